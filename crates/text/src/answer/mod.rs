//! Splits the text of an answer, as it comes, into reasoning, content and tool calls.
//!
//! Text comes from the detokeniser in pieces of any size, events go to the writer of the answer. However the text is
//! cut, the events say the same; a whole answer is a stream in one piece. Nothing here knows a protocol or a clock:
//! identifiers of calls come from a function of the caller's. What is held back is bounded.

mod call;
mod channels;
mod events;
mod format;
mod json;
mod reasoning;
#[cfg(test)]
mod tests;
mod tools;

use std::sync::Arc;

use channels::ChannelParser;
pub use events::{AnswerEvent, append as append_events};
use events::{push_arguments, push_content};
pub use format::{ReasoningFormat, ToolFormat, UnknownFormat};
use reasoning::ReasoningParser;
use tools::ToolParser;

/// Takes an answer's text apart.
pub trait OutputParser {
    /// Takes the next text and appends what it means.
    fn push(&mut self, text: &str, out: &mut Vec<AnswerEvent>);
    /// The text has ended: appends what was held back.
    fn finish(&mut self, out: &mut Vec<AnswerEvent>);
}

/// Where to look for calls.
#[derive(Clone, Debug, Default)]
pub enum CallMode {
    /// All text is content.
    #[default]
    None,
    /// The model may call these functions, in its own way of writing.
    Auto { format: ToolFormat, names: Arc<[String]> },
    /// The text is a list of calls of these functions, or one call.
    Required { names: Arc<[String]> },
    /// The text is the arguments of this function.
    Named(String),
}

/// How to read an answer.
#[derive(Clone, Debug)]
pub struct AnswerOptions {
    pub reasoning: Option<ReasoningFormat>,
    pub calls: CallMode,
    /// More than one call may be made; later ones are dropped otherwise.
    pub parallel: bool,
    /// Gives a call its identifier.
    pub new_id: fn() -> String,
}

impl AnswerOptions {
    /// The texts that begin and end the parts of an answer. Where they are special tokens, these must be shown.
    pub fn marks(&self) -> Vec<&'static str> {
        let reasoning = match self.reasoning {
            _ if self.has_channels() => channels::MARKS.to_vec(),
            Some(format) => vec![format.opening(), format.closing()],
            None => Vec::new(),
        };
        let calls = match &self.calls {
            CallMode::Auto { format, .. } => [format.marker(), format.closing()],
            _ => [None, None],
        };
        reasoning.into_iter().chain(calls.into_iter().flatten()).collect()
    }

    /// The answer is written in channels, calls and all.
    fn has_channels(&self) -> bool {
        self.reasoning == Some(ReasoningFormat::OpenAi)
            || matches!(self.calls, CallMode::Auto { format: ToolFormat::OpenAi, .. })
    }
}

/// Reads one answer.
#[derive(Debug)]
pub struct AnswerParser {
    frame: Frame,
    calls: Calls,
    /// The whole text is calls: the rest of one that was cut off is not content.
    only_calls: bool,
    parallel: bool,
}

/// What an answer is wrapped in.
#[derive(Debug)]
enum Frame {
    None,
    Reasoning(ReasoningParser),
    Channels { parser: ChannelParser, shows_reasoning: bool },
}

#[derive(Debug)]
enum Calls {
    None,
    Written(ToolParser),
    Named(NamedCall),
}

impl AnswerParser {
    /// `prompt` is the text that the answer continues; it may have opened the reasoning.
    pub fn new(options: AnswerOptions, prompt: &str) -> Self {
        let new_id = options.new_id;
        let frame = match options.reasoning {
            _ if options.has_channels() => Frame::Channels {
                parser: ChannelParser::new(prompt, matches!(options.calls, CallMode::Auto { .. }), new_id),
                shows_reasoning: options.reasoning.is_some(),
            },
            Some(format) => Frame::Reasoning(ReasoningParser::new(format, prompt)),
            None => Frame::None,
        };
        let only_calls = matches!(options.calls, CallMode::Required { .. });
        let calls = match options.calls {
            CallMode::None => Calls::None,
            CallMode::Auto { format, names } => Calls::Written(ToolParser::new(format, names, new_id)),
            CallMode::Required { names } => Calls::Written(ToolParser::new(ToolFormat::Json, names, new_id)),
            CallMode::Named(name) => {
                Calls::Named(NamedCall { name, new_id, begun: false, spaces: String::new() })
            }
        };
        Self { frame, calls, only_calls, parallel: options.parallel }
    }

    /// True while the model reasons.
    pub fn is_reasoning(&self) -> bool {
        match &self.frame {
            Frame::None => false,
            Frame::Reasoning(parser) => parser.is_inside(),
            Frame::Channels { parser, shows_reasoning } => *shows_reasoning && parser.is_inside(),
        }
    }

    fn answer(&mut self, text: &str, out: &mut Vec<AnswerEvent>) {
        match &mut self.calls {
            Calls::None => push_content(out, text),
            Calls::Written(parser) => parser.push(text, out),
            Calls::Named(call) => call.push(text, out),
        }
    }

    /// One step of an answer in channels.
    fn in_channels(
        &mut self,
        out: &mut Vec<AnswerEvent>,
        step: impl FnOnce(&mut ChannelParser, &mut Vec<AnswerEvent>, &mut String),
    ) {
        let Frame::Channels { parser, shows_reasoning } = &mut self.frame else { return };
        let mut answer = String::new();
        if *shows_reasoning {
            step(parser, out, &mut answer);
        } else {
            let mut events = Vec::new();
            step(parser, &mut events, &mut answer);
            for event in events {
                match event {
                    AnswerEvent::Reasoning(text) => answer.push_str(&text),
                    event => append_events(out, vec![event]),
                }
            }
        }
        if !answer.is_empty() {
            self.answer(&answer, out);
        }
    }

    fn drop_surplus(&self, out: &mut Vec<AnswerEvent>) {
        if self.only_calls {
            out.retain(|event| !matches!(event, AnswerEvent::Content(_)));
        }
        if !self.parallel {
            out.retain(|event| match event {
                AnswerEvent::CallBegin { index, .. }
                | AnswerEvent::Arguments { index, .. }
                | AnswerEvent::CallEnd { index } => *index == 0,
                AnswerEvent::Content(_) | AnswerEvent::Reasoning(_) => true,
            });
        }
    }
}

impl OutputParser for AnswerParser {
    fn push(&mut self, text: &str, out: &mut Vec<AnswerEvent>) {
        let mut answer = String::new();
        match &mut self.frame {
            Frame::None => self.answer(text, out),
            Frame::Reasoning(reasoning) => {
                reasoning.push(text, out, &mut answer);
                self.answer(&answer, out);
            }
            Frame::Channels { .. } => text.chars().for_each(|c| {
                // In their order: an answer may come before a call.
                self.in_channels(out, |parser, out, answer| parser.step(c, out, answer));
            }),
        }
        self.drop_surplus(out);
    }

    fn finish(&mut self, out: &mut Vec<AnswerEvent>) {
        match &mut self.frame {
            Frame::None => {}
            Frame::Reasoning(reasoning) => {
                let mut answer = String::new();
                reasoning.finish(out, &mut answer);
                self.answer(&answer, out);
            }
            Frame::Channels { .. } => {
                self.in_channels(out, ChannelParser::finish);
            }
        }
        match &mut self.calls {
            Calls::None => {}
            Calls::Written(parser) => parser.finish(out),
            Calls::Named(call) => call.finish(out),
        }
        self.drop_surplus(out);
    }
}

/// The whole text is the arguments of a function that the request named.
#[derive(Debug)]
struct NamedCall {
    name: String,
    new_id: fn() -> String,
    begun: bool,
    /// White space that belongs to the arguments only if more of them follows.
    spaces: String,
}

impl OutputParser for NamedCall {
    fn push(&mut self, text: &str, out: &mut Vec<AnswerEvent>) {
        let text = if self.begun { text } else { text.trim_start() };
        let shown = text.trim_end();
        if !shown.is_empty() {
            if !self.begun {
                self.begun = true;
                let (id, name) = ((self.new_id)(), self.name.clone());
                out.push(AnswerEvent::CallBegin { index: 0, id, name });
            }
            push_arguments(out, 0, &std::mem::take(&mut self.spaces));
            push_arguments(out, 0, shown);
        }
        self.spaces.push_str(&text[shown.len()..]);
    }

    fn finish(&mut self, out: &mut Vec<AnswerEvent>) {
        if self.begun {
            out.push(AnswerEvent::CallEnd { index: 0 });
        }
    }
}
