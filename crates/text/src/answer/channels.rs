//! Answers in channels, as gpt-oss writes them: reasoning in `analysis`, the answer in `final`, calls of functions in `commentary`.
//!
//! A message is `<|channel|>NAME<|message|>TEXT<|end|>`; the next one begins with `<|start|>assistant`, which the prompt has written for
//! the first. A header may say `to=functions.NAME`: then the text is the arguments of a call. What has no header is answer.

use super::events::{AnswerEvent, push_arguments, push_reasoning};

const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const START: &str = "<|start|>";
/// What ends a text; the last two end an answer as well.
const ENDS: [&str; 3] = ["<|end|>", "<|call|>", "<|return|>"];
pub const MARKS: [&str; 6] = [CHANNEL, MESSAGE, START, ENDS[0], ENDS[1], ENDS[2]];
/// The end of a prompt that leaves the choice of the channel to the model, and what chooses the answer's.
pub const PROMPT_END: &str = "<|start|>assistant";
pub const ANSWER_BEGIN: &str = "<|channel|>final<|message|>";
const FUNCTIONS: &str = "functions.";
/// A header that is longer than this is text.
const MAX_HEADER_BYTES: usize = 1024;
/// The arguments of later calls are dropped.
const MAX_CALLS: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before the text of a message. The first one of an answer may be missing, with all marks.
    Header {
        is_first: bool,
    },
    Reasoning,
    Answer,
    Call,
    /// Text for a tool that nobody offered.
    Dropped,
}

#[derive(Debug)]
pub struct ChannelParser {
    state: State,
    /// All of a header so far, or the beginning of a mark within a text.
    held: String,
    /// Calls are looked for.
    has_calls: bool,
    new_id: fn() -> String,
    num_calls: usize,
}

impl ChannelParser {
    /// `prompt` is the text that the answer continues.
    pub fn new(prompt: &str, has_calls: bool, new_id: fn() -> String) -> Self {
        let message = prompt.rfind(MESSAGE).map(|at| at + MESSAGE.len());
        let is_within = |at: &usize| {
            ENDS.iter().all(|end| !prompt[*at..].contains(end)) && !prompt[*at..].contains(START)
        };
        let mut parser = Self {
            state: State::Header { is_first: true },
            held: String::new(),
            has_calls,
            new_id,
            num_calls: 0,
        };
        if let Some(message) = message.filter(is_within) {
            let header = &prompt[..message - MESSAGE.len()];
            parser.enter(&header[header.rfind(START).unwrap_or(0)..], &mut Vec::new());
        }
        parser
    }

    /// True until the model has begun something else.
    pub fn is_inside(&self) -> bool {
        matches!(self.state, State::Header { .. } | State::Reasoning)
    }

    /// Takes a character; what belongs to the answer is appended to `answer`.
    pub fn step(&mut self, c: char, out: &mut Vec<AnswerEvent>, answer: &mut String) {
        self.held.push(c);
        match self.state {
            State::Header { is_first } => self.in_header(is_first, out, answer),
            _ => self.in_text(out, answer),
        }
    }

    fn in_header(&mut self, is_first: bool, out: &mut Vec<AnswerEvent>, answer: &mut String) {
        if let Some(header) = self.held.strip_suffix(MESSAGE) {
            let header = header.to_owned();
            self.held.clear();
            self.enter(&header, out);
            return;
        }
        if ENDS.iter().any(|end| self.held.ends_with(end)) {
            // A message without a text.
            self.held.clear();
            self.state = State::Header { is_first: false };
            return;
        }
        let begin = self.held.trim_start();
        let may_be = [START, CHANNEL, MESSAGE, "to="]
            .into_iter()
            .chain(ENDS)
            .any(|mark| begin.starts_with(mark) || mark.starts_with(begin));
        if !may_be || self.held.len() > MAX_HEADER_BYTES {
            // White space between messages is nobody's.
            let text = if is_first { &*self.held } else { self.held.trim_start() };
            answer.push_str(text);
            self.held.clear();
            self.state = State::Answer;
        }
    }

    /// The text that comes belongs to the message of this header.
    fn enter(&mut self, header: &str, out: &mut Vec<AnswerEvent>) {
        let word_after = |mark: &str| {
            let rest = header.split_once(mark)?.1;
            Some(rest.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or_default())
        };
        let recipient =
            word_after("to=").filter(|recipient| *recipient != "assistant" && !recipient.is_empty());
        self.state = match (recipient, word_after(CHANNEL)) {
            (Some(_), _) if !self.has_calls || self.num_calls == MAX_CALLS => State::Dropped,
            (Some(recipient), _) => {
                let name = recipient.strip_prefix(FUNCTIONS).unwrap_or(recipient).to_owned();
                out.push(AnswerEvent::CallBegin { index: self.num_calls, id: (self.new_id)(), name });
                self.num_calls += 1;
                State::Call
            }
            (None, Some("analysis")) => State::Reasoning,
            (None, _) => State::Answer,
        };
    }

    fn in_text(&mut self, out: &mut Vec<AnswerEvent>, answer: &mut String) {
        let mark = MARKS.into_iter().find(|mark| self.held == *mark);
        match mark {
            None if MARKS.iter().any(|mark| mark.starts_with(&*self.held)) => {}
            None => {
                // Marks have their first letter only at their beginning: only the last character may begin another one.
                let last = self.held.pop().expect("a character was taken");
                let text = std::mem::take(&mut self.held);
                self.show(&text, out, answer);
                if last == '<' {
                    self.held.push(last);
                } else {
                    self.show(last.encode_utf8(&mut [0; 4]), out, answer);
                }
            }
            // The end of a header that never began.
            Some(MESSAGE) => self.held.clear(),
            Some(mark) => {
                if self.state == State::Call {
                    out.push(AnswerEvent::CallEnd { index: self.num_calls - 1 });
                }
                self.state = State::Header { is_first: false };
                if mark != CHANNEL && mark != START {
                    self.held.clear();
                }
            }
        }
    }

    fn show(&self, text: &str, out: &mut Vec<AnswerEvent>, answer: &mut String) {
        match self.state {
            State::Reasoning => push_reasoning(out, text),
            State::Answer => answer.push_str(text),
            State::Call => push_arguments(out, self.num_calls - 1, text),
            State::Header { .. } | State::Dropped => {}
        }
    }

    pub fn finish(&mut self, out: &mut Vec<AnswerEvent>, answer: &mut String) {
        let held = std::mem::take(&mut self.held);
        match self.state {
            // What looked like a header to the end is one that was cut off, if it has a mark.
            State::Header { is_first: true } if !MARKS.iter().any(|mark| held.contains(mark)) => {
                answer.push_str(&held);
            }
            _ => self.show(&held, out, answer),
        }
        if self.state == State::Call {
            out.push(AnswerEvent::CallEnd { index: self.num_calls - 1 });
        }
        self.state = State::Header { is_first: false };
    }
}
