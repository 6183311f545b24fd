//! Reasoning: what a model writes between `<think>` and `</think>` before it answers.
//!
//! Some templates open the tag in the prompt, so that the answer begins inside. White space at the borders belongs to
//! neither side. Everything after the closing tag is handed to the caller as it is.

use super::events::{AnswerEvent, push_reasoning};
use super::format::ReasoningFormat;

/// A run of white space that is longer than this is shown as it comes.
const MAX_HELD_SPACES: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing but white space so far.
    Start,
    Inside,
    /// After the closing tag, before the first letter of the answer.
    Closed,
    Answer,
}

#[derive(Debug)]
pub struct ReasoningParser {
    state: State,
    open: &'static str,
    close: &'static str,
    /// The answer begins inside, with or without another opening tag.
    begins_inside: bool,
    /// The beginning of a tag, perhaps.
    held: String,
    spaces: String,
    has_text: bool,
}

impl ReasoningParser {
    /// `prompt` is the text that the answer continues.
    pub fn new(format: ReasoningFormat, prompt: &str) -> Self {
        let (open, close) = (format.opening(), format.closing());
        let prompt = prompt.trim_end();
        let begins_inside = match format {
            _ if prompt.ends_with(open) => true,
            ReasoningFormat::DeepSeekR1 => !prompt.ends_with(close),
            _ => false,
        };
        Self {
            state: State::Start,
            open,
            close,
            begins_inside,
            held: String::new(),
            spaces: String::new(),
            has_text: false,
        }
    }

    /// True while the model reasons.
    pub fn is_inside(&self) -> bool {
        self.state == State::Inside || (self.state == State::Start && self.begins_inside)
    }

    /// Takes text; what belongs to the answer is appended to `answer`.
    pub fn push(&mut self, text: &str, out: &mut Vec<AnswerEvent>, answer: &mut String) {
        for (at, c) in text.char_indices() {
            if self.state == State::Answer {
                answer.push_str(&text[at..]);
                return;
            }
            self.step(c, out, answer);
        }
    }

    fn step(&mut self, c: char, out: &mut Vec<AnswerEvent>, answer: &mut String) {
        match self.state {
            State::Start => self.at_start(c, out, answer),
            State::Inside => self.inside(c, out, answer),
            State::Closed if c.is_whitespace() => {}
            State::Closed | State::Answer => {
                self.state = State::Answer;
                answer.push(c);
            }
        }
    }

    fn at_start(&mut self, c: char, out: &mut Vec<AnswerEvent>, answer: &mut String) {
        if self.held.is_empty() && c.is_whitespace() && self.spaces.len() < MAX_HELD_SPACES {
            self.spaces.push(c);
            return;
        }
        if self.open[self.held.len()..].starts_with(c) {
            self.held.push(c);
            if self.held == self.open {
                self.enter();
            }
            return;
        }
        let held = std::mem::take(&mut self.held);
        if self.begins_inside {
            self.enter();
        } else {
            self.state = State::Answer;
            answer.push_str(&std::mem::take(&mut self.spaces));
        }
        held.chars().chain([c]).for_each(|c| self.step(c, out, answer));
    }

    fn enter(&mut self) {
        self.state = State::Inside;
        self.held.clear();
        self.spaces.clear();
    }

    fn inside(&mut self, c: char, out: &mut Vec<AnswerEvent>, answer: &mut String) {
        if self.close[self.held.len()..].starts_with(c) {
            self.held.push(c);
            if self.held == self.close {
                self.held.clear();
                self.spaces.clear();
                self.state = State::Closed;
            }
            return;
        }
        if !self.held.is_empty() {
            // Tags have their first letter only at their beginning, so nothing held can begin another one.
            let held = std::mem::take(&mut self.held);
            self.show(&held, out);
            self.step(c, out, answer);
        } else if c.is_whitespace() && self.spaces.len() < MAX_HELD_SPACES {
            self.spaces.push(c);
        } else {
            self.show(c.encode_utf8(&mut [0; 4]), out);
        }
    }

    fn show(&mut self, text: &str, out: &mut Vec<AnswerEvent>) {
        let spaces = std::mem::take(&mut self.spaces);
        if std::mem::replace(&mut self.has_text, true) {
            push_reasoning(out, &spaces);
        }
        push_reasoning(out, text);
    }

    pub fn finish(&mut self, out: &mut Vec<AnswerEvent>, answer: &mut String) {
        let (held, spaces) = (std::mem::take(&mut self.held), std::mem::take(&mut self.spaces));
        match self.state {
            State::Start if !self.begins_inside => {
                answer.push_str(&spaces);
                answer.push_str(&held);
            }
            State::Start | State::Inside if !held.is_empty() => {
                self.spaces = spaces;
                self.show(&held, out);
            }
            _ => {}
        }
        self.state = State::Answer;
    }
}
