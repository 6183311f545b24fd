//! News of the prefix cache for routers and KV stores outside.
//!
//! The buffer is bounded. When it overflows, everything in it is dropped and one `AllCleared` stands in its place:
//! the reader then knows less than is true, but never believes in a block that is gone. The number of dropped
//! events is counted.

use baton_core::TokenId;
use serde::{Deserialize, Serialize};

use crate::BlockHash;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type")]
pub enum KvEvent {
    /// A run of full blocks can now be found by hash.
    BlockStored {
        hashes: Vec<BlockHash>,
        /// The block before the first one; `None` at the start of a sequence.
        parent: Option<BlockHash>,
        /// The tokens of all blocks, `block_size` each.
        token_ids: Vec<TokenId>,
        block_size: usize,
        /// Which group of layers.
        group: usize,
    },
    /// These blocks can no longer be found.
    BlockRemoved { hashes: Vec<BlockHash>, group: usize },
    /// Nothing that was reported so far can be found.
    AllCleared,
}

pub(crate) struct EventBuffer {
    events: Vec<KvEvent>,
    capacity: usize,
    pub(crate) num_dropped: u64,
}

impl EventBuffer {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { events: Vec::new(), capacity, num_dropped: 0 }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.capacity > 0
    }

    pub(crate) fn push(&mut self, event: KvEvent) {
        if !self.is_on() {
            return;
        }
        if event == KvEvent::AllCleared {
            self.events.clear();
        } else if self.events.len() >= self.capacity {
            // The newcomer is lost as well: a reader that has cleared everything must not hear of the removal of
            // a block, and with room for one event only there would be no place for a stored one.
            self.num_dropped += self.events.len() as u64 + 1;
            self.events.clear();
            self.events.push(KvEvent::AllCleared);
            return;
        }
        if let (
            Some(KvEvent::BlockRemoved { hashes: last, group: last_group }),
            KvEvent::BlockRemoved { hashes, group },
        ) = (self.events.last_mut(), &event)
            && last_group == group
        {
            last.extend_from_slice(hashes);
            return;
        }
        self.events.push(event);
    }

    pub(crate) fn drain(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn removed(tokens: &[TokenId]) -> KvEvent {
        let hashes = tokens.iter().map(|&t| BlockHash::root(None).child(&[t])).collect();
        KvEvent::BlockRemoved { hashes, group: 0 }
    }

    fn stored(token: TokenId) -> KvEvent {
        let hashes = vec![BlockHash::root(None).child(&[token])];
        KvEvent::BlockStored { hashes, parent: None, token_ids: vec![token], block_size: 1, group: 0 }
    }

    #[test]
    fn an_overflow_clears_the_readers_view() {
        let mut buffer = EventBuffer::new(2);
        for token in 0..3 {
            buffer.push(stored(token));
        }
        assert_eq!(buffer.num_dropped, 3);
        buffer.push(stored(3));
        assert_eq!(buffer.drain(), [KvEvent::AllCleared, stored(3)]);
        assert_eq!(buffer.drain(), []);
    }

    #[test]
    fn removals_in_a_row_become_one_event() {
        let mut buffer = EventBuffer::new(2);
        buffer.push(removed(&[1]));
        buffer.push(removed(&[2]));
        assert_eq!(buffer.drain(), [removed(&[1, 2])]);
    }

    #[test]
    fn capacity_zero_switches_events_off() {
        let mut buffer = EventBuffer::new(0);
        buffer.push(KvEvent::AllCleared);
        assert_eq!((buffer.drain(), buffer.num_dropped), (vec![], 0));
    }
}
