//! An answer as a list of blocks: reasoning, text and calls of functions, in the order in which they came. APIs that
//! stream blocks (responses, messages) translate the changes; whole answers are the blocks at the end.

use baton_text::AnswerEvent;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockKind {
    Reasoning,
    Text,
    Call { id: String, name: String },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    pub kind: BlockKind,
    /// The text, or the arguments.
    pub text: String,
}

/// What an event did to the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Opened(usize),
    Extended(usize, String),
    Closed(usize),
}

#[derive(Clone, Debug, Default)]
pub struct Blocks {
    pub list: Vec<Block>,
    is_open: bool,
}

impl Blocks {
    pub fn of(events: Vec<AnswerEvent>) -> Self {
        let (mut blocks, mut changes) = (Self::default(), Vec::new());
        for event in events {
            blocks.push(event, &mut changes);
        }
        blocks
    }

    pub fn push(&mut self, event: AnswerEvent, changes: &mut Vec<Change>) {
        match event {
            AnswerEvent::Content(text) => self.extend(BlockKind::Text, text, changes),
            AnswerEvent::Reasoning(text) => self.extend(BlockKind::Reasoning, text, changes),
            AnswerEvent::CallBegin { id, name, .. } => self.open(BlockKind::Call { id, name }, changes),
            AnswerEvent::Arguments { text, .. } => self.append(text, changes),
            AnswerEvent::CallEnd { .. } => self.close(changes),
        }
    }

    fn extend(&mut self, kind: BlockKind, text: String, changes: &mut Vec<Change>) {
        if !(self.is_open && self.list.last().is_some_and(|last| last.kind == kind)) {
            self.open(kind, changes);
        }
        self.append(text, changes);
    }

    fn open(&mut self, kind: BlockKind, changes: &mut Vec<Change>) {
        self.close(changes);
        self.list.push(Block { kind, text: String::new() });
        self.is_open = true;
        changes.push(Change::Opened(self.list.len() - 1));
    }

    fn append(&mut self, text: String, changes: &mut Vec<Change>) {
        if let Some(last) = self.list.last_mut() {
            last.text.push_str(&text);
            changes.push(Change::Extended(self.list.len() - 1, text));
        }
    }

    /// Blocks that nothing can be added to any more.
    pub fn num_closed(&self) -> usize {
        self.list.len() - usize::from(self.is_open)
    }

    /// Ends the last block.
    pub fn close(&mut self, changes: &mut Vec<Change>) {
        if std::mem::replace(&mut self.is_open, false) {
            changes.push(Change::Closed(self.list.len() - 1));
        }
    }

    /// All text of a kind.
    pub fn text_of(&self, kind: &BlockKind) -> Option<String> {
        let texts: Vec<&str> =
            self.list.iter().filter(|block| block.kind == *kind).map(|block| &*block.text).collect();
        (!texts.is_empty()).then(|| texts.concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_opens_and_closes_once() {
        let text = |text: &str| AnswerEvent::Content(text.to_owned());
        let events = vec![
            AnswerEvent::Reasoning("r".to_owned()),
            text("a"),
            text("b"),
            AnswerEvent::CallBegin { index: 0, id: "1".to_owned(), name: "f".to_owned() },
            AnswerEvent::Arguments { index: 0, text: "{}".to_owned() },
            AnswerEvent::CallEnd { index: 0 },
            text("c"),
        ];
        let (mut blocks, mut changes) = (Blocks::default(), Vec::new());
        for event in events {
            blocks.push(event, &mut changes);
        }
        blocks.close(&mut changes);
        blocks.close(&mut changes);
        let short: Vec<String> = changes
            .iter()
            .map(|change| match change {
                Change::Opened(index) => format!("+{index}"),
                Change::Extended(index, text) => format!("{index}{text}"),
                Change::Closed(index) => format!("-{index}"),
            })
            .collect();
        assert_eq!(short.join(" "), "+0 0r -0 +1 1a 1b -1 +2 2{} -2 +3 3c -3");
        assert_eq!(blocks.text_of(&BlockKind::Text).as_deref(), Some("abc"));
    }
}
