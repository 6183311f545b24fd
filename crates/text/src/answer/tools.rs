//! Finds tool calls in the text of an answer, as it comes.
//!
//! One state machine for all formats: text until a mark (or JSON at the beginning of a line), then an object or a list of
//! them, then text again. What turns out to be no call is content, every character of it. Once a call has been announced
//! its arguments are given as the model writes them, right or wrong. White space around calls is dropped.

use std::sync::Arc;

use super::OutputParser;
use super::call::{CallReader, Names, Progress};
use super::events::{AnswerEvent, push_arguments, push_content};
use super::format::ToolFormat;

/// A run of white space that is longer than this is content.
const MAX_HELD_SPACES: usize = 1024;
/// Later ones are content.
const MAX_CALLS: usize = 128;
/// Between name and arguments in Mistral's newer form.
const ARGS: &str = "[ARGS]";

#[derive(Debug)]
enum State {
    Text,
    /// After a mark, a bracket or a comma: an object must follow.
    Open,
    /// A name, as Mistral's newer models write it.
    Name(String),
    Call(CallReader),
    After,
    /// The arguments of an announced call are no JSON: all text belongs to them, until the closing mark.
    Broken,
}

#[derive(Debug, PartialEq, Eq)]
enum Taken {
    Yes,
    /// The state has changed: the same character again.
    Again,
}

#[derive(Debug)]
pub struct ToolParser {
    format: ToolFormat,
    names: Arc<[String]>,
    new_id: fn() -> String,
    state: State,
    /// White space that is content if text follows, and nothing if a call does.
    spaces: String,
    /// The beginning of a mark, perhaps.
    held: String,
    /// What came since the text ended and is content again if no call follows.
    pending: String,
    in_list: bool,
    at_line_start: bool,
    num_calls: usize,
}

impl ToolParser {
    pub fn new(format: ToolFormat, names: Arc<[String]>, new_id: fn() -> String) -> Self {
        Self {
            format,
            names,
            new_id,
            state: State::Text,
            spaces: String::new(),
            held: String::new(),
            pending: String::new(),
            in_list: false,
            at_line_start: true,
            num_calls: 0,
        }
    }

    fn step(&mut self, c: char, out: &mut Vec<AnswerEvent>) {
        while self.advance(c, out) == Taken::Again {}
    }

    fn advance(&mut self, c: char, out: &mut Vec<AnswerEvent>) -> Taken {
        match &mut self.state {
            State::Text => self.in_text(c, out),
            State::Open => self.at_open(c, out),
            State::Name(_) => self.in_name(c, out),
            State::Call(_) => self.in_call(c, out),
            State::After => self.after_call(c, out),
            State::Broken => self.in_broken(c, out),
        }
    }

    fn in_text(&mut self, c: char, out: &mut Vec<AnswerEvent>) -> Taken {
        if let Some(marker) = self.format.marker() {
            if marker[self.held.len()..].starts_with(c) {
                self.held.push(c);
                if self.held == marker {
                    self.open();
                }
                return Taken::Yes;
            }
            if !self.held.is_empty() {
                let held = std::mem::take(&mut self.held);
                self.content(&held, out);
                return Taken::Again;
            }
        }
        if self.format.is_bare() && self.at_line_start && matches!(c, '{' | '[') {
            self.open();
            return Taken::Again;
        }
        if c.is_whitespace() && self.spaces.len() < MAX_HELD_SPACES {
            self.at_line_start |= c == '\n';
            self.spaces.push(c);
        } else {
            self.content(c.encode_utf8(&mut [0; 4]), out);
        }
        Taken::Yes
    }

    /// A call may begin here.
    fn open(&mut self) {
        self.pending = std::mem::take(&mut self.spaces);
        self.pending.push_str(&std::mem::take(&mut self.held));
        self.state = State::Open;
    }

    fn at_open(&mut self, c: char, out: &mut Vec<AnswerEvent>) -> Taken {
        if self.num_calls == MAX_CALLS {
            return self.no_call("", out);
        }
        match c {
            '{' => {
                // A marked call is a call, whatever its name.
                let marked = !self.format.is_bare() || self.pending.contains("<|python_tag|>");
                let names = if marked { Names::Any } else { Names::Known(Arc::clone(&self.names)) };
                self.state = State::Call(CallReader::new(names));
                Taken::Again
            }
            '[' if !self.in_list => {
                self.in_list = true;
                self.pending.push(c);
                Taken::Yes
            }
            c if c.is_whitespace() && self.pending.len() < MAX_HELD_SPACES => {
                self.pending.push(c);
                Taken::Yes
            }
            c if self.format == ToolFormat::Mistral && !self.in_list && is_name(c) => {
                self.state = State::Name(String::new());
                Taken::Again
            }
            _ => self.no_call("", out),
        }
    }

    fn in_name(&mut self, c: char, out: &mut Vec<AnswerEvent>) -> Taken {
        let State::Name(text) = &mut self.state else { unreachable!("the state was looked at") };
        let name_length = text.find('[').unwrap_or(text.len());
        let in_mark = name_length < text.len();
        let continues = if in_mark || c == '[' {
            ARGS[text.len() - name_length..].starts_with(c)
        } else {
            is_name(c) && text.len() < MAX_HELD_SPACES
        };
        if continues {
            text.push(c);
            return Taken::Yes;
        }
        if c == '{' && (!in_mark || text.ends_with(ARGS)) {
            let name = text[..name_length].to_owned();
            self.state = State::Call(CallReader::of_arguments());
            self.begin(name, out);
            return Taken::Again;
        }
        let text = std::mem::take(text);
        self.no_call(&text, out)
    }

    fn in_call(&mut self, c: char, out: &mut Vec<AnswerEvent>) -> Taken {
        let State::Call(reader) = &mut self.state else { unreachable!("the state was looked at") };
        let mut bytes = [0; 4];
        let letter = &*c.encode_utf8(&mut bytes);
        match reader.push(c) {
            Progress::Nothing => {}
            Progress::Begin { name } => {
                self.begin(name, out);
                self.argument(letter, out);
            }
            Progress::Argument => self.argument(letter, out),
            Progress::LastArgument => {
                self.argument(letter, out);
                self.end(out);
            }
            Progress::End => self.end(out),
            Progress::Whole { name, arguments } => {
                self.begin(name, out);
                self.argument(&arguments, out);
                self.end(out);
            }
            Progress::NoCall if reader.is_announced() => {
                self.state = State::Broken;
                return Taken::Again;
            }
            Progress::NoCall => {
                let text = reader.take_pending();
                return self.no_call(&text, out);
            }
        }
        Taken::Yes
    }

    fn after_call(&mut self, c: char, out: &mut Vec<AnswerEvent>) -> Taken {
        if let Some(closing) = self.format.closing().filter(|_| !self.in_list) {
            if closing[self.held.len()..].starts_with(c) {
                self.held.push(c);
                if self.held == closing {
                    self.held.clear();
                    self.back_to_text();
                }
                return Taken::Yes;
            }
            if !self.held.is_empty() {
                // A mark's first letter may begin another mark.
                let held = std::mem::take(&mut self.held);
                self.back_to_text();
                held.chars().for_each(|c| self.step(c, out));
                return Taken::Again;
            }
        }
        match c {
            c if c.is_whitespace() && self.spaces.len() < MAX_HELD_SPACES => self.spaces.push(c),
            ',' if self.in_list => {
                self.pending.push(c);
                self.state = State::Open;
            }
            ']' if self.in_list => self.in_list = false,
            ';' if self.format == ToolFormat::Llama3Json && !self.in_list => {
                self.pending.push(c);
                self.state = State::Open;
            }
            _ => {
                self.back_to_text();
                return Taken::Again;
            }
        }
        Taken::Yes
    }

    fn in_broken(&mut self, c: char, out: &mut Vec<AnswerEvent>) -> Taken {
        if let Some(closing) = self.format.closing() {
            if closing[self.held.len()..].starts_with(c) {
                self.held.push(c);
                if self.held == closing {
                    self.held.clear();
                    self.end(out);
                    self.back_to_text();
                }
                return Taken::Yes;
            }
            if !self.held.is_empty() {
                let held = std::mem::take(&mut self.held);
                self.argument(&held, out);
                return Taken::Again;
            }
        }
        self.argument(c.encode_utf8(&mut [0; 4]), out);
        Taken::Yes
    }

    fn back_to_text(&mut self) {
        self.state = State::Text;
        self.in_list = false;
        self.at_line_start = self.spaces.contains('\n');
    }

    /// What was taken for a call is content.
    fn no_call(&mut self, text: &str, out: &mut Vec<AnswerEvent>) -> Taken {
        let pending = std::mem::take(&mut self.pending);
        self.state = State::Text;
        self.in_list = false;
        self.content(&pending, out);
        self.content(text, out);
        // The character that was refused is text, even if it looks like the beginning of a call.
        self.at_line_start = false;
        Taken::Again
    }

    fn content(&mut self, text: &str, out: &mut Vec<AnswerEvent>) {
        if !text.is_empty() {
            push_content(out, &std::mem::take(&mut self.spaces));
            push_content(out, text);
            self.at_line_start = false;
        }
    }

    fn begin(&mut self, name: String, out: &mut Vec<AnswerEvent>) {
        self.pending.clear();
        out.push(AnswerEvent::CallBegin { index: self.num_calls, id: (self.new_id)(), name });
        self.num_calls += 1;
    }

    fn argument(&mut self, text: &str, out: &mut Vec<AnswerEvent>) {
        push_arguments(out, self.num_calls - 1, text);
    }

    fn end(&mut self, out: &mut Vec<AnswerEvent>) {
        out.push(AnswerEvent::CallEnd { index: self.num_calls - 1 });
        self.state = State::After;
        self.spaces.clear();
    }
}

impl OutputParser for ToolParser {
    fn push(&mut self, text: &str, out: &mut Vec<AnswerEvent>) {
        text.chars().for_each(|c| self.step(c, out));
    }

    fn finish(&mut self, out: &mut Vec<AnswerEvent>) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text | State::Open => {}
            State::Name(text) => self.pending.push_str(&text),
            State::Call(mut reader) if !reader.is_announced() => {
                self.pending.push_str(&reader.take_pending());
            }
            State::Call(_) => self.end(out),
            // The closing mark was cut off.
            State::After => self.held.clear(),
            State::Broken => {
                let held = std::mem::take(&mut self.held);
                self.argument(&held, out);
                self.end(out);
            }
        }
        let rest = std::mem::take(&mut self.pending) + &std::mem::take(&mut self.held);
        self.content(&rest, out);
        let spaces = std::mem::take(&mut self.spaces);
        if self.num_calls == 0 {
            push_content(out, &spaces);
        }
        self.state = State::Text;
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')
}
