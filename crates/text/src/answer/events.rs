//! The events that a parser makes of an answer's text, in order.

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerEvent {
    /// Text for the reader.
    Content(String),
    /// Text that the model wrote to itself before answering.
    Reasoning(String),
    /// The model calls a function.
    CallBegin {
        index: usize,
        id: String,
        name: String,
    },
    /// The next piece of the call's arguments, which together are a JSON object unless the model got it wrong.
    Arguments {
        index: usize,
        text: String,
    },
    CallEnd {
        index: usize,
    },
}

/// Collects events and joins neighbours of a kind, so that what comes out does not depend on the size of the steps.
pub fn push_content(out: &mut Vec<AnswerEvent>, text: &str) {
    match out.last_mut() {
        _ if text.is_empty() => {}
        Some(AnswerEvent::Content(content)) => content.push_str(text),
        _ => out.push(AnswerEvent::Content(text.to_owned())),
    }
}

pub fn push_reasoning(out: &mut Vec<AnswerEvent>, text: &str) {
    match out.last_mut() {
        _ if text.is_empty() => {}
        Some(AnswerEvent::Reasoning(reasoning)) => reasoning.push_str(text),
        _ => out.push(AnswerEvent::Reasoning(text.to_owned())),
    }
}

pub fn push_arguments(out: &mut Vec<AnswerEvent>, index: usize, text: &str) {
    match out.last_mut() {
        _ if text.is_empty() => {}
        Some(AnswerEvent::Arguments { index: last, text: arguments }) if *last == index => {
            arguments.push_str(text);
        }
        _ => out.push(AnswerEvent::Arguments { index, text: text.to_owned() }),
    }
}

/// Appends later events; pieces that a cut between two steps divided become one again.
pub fn append(out: &mut Vec<AnswerEvent>, events: Vec<AnswerEvent>) {
    for event in events {
        match event {
            AnswerEvent::Content(text) => push_content(out, &text),
            AnswerEvent::Reasoning(text) => push_reasoning(out, &text),
            AnswerEvent::Arguments { index, text } => push_arguments(out, index, &text),
            other => out.push(other),
        }
    }
}
