//! The history of events: the engine puts batches in, publishers and streams take them out at their own pace.
//!
//! The engine never waits: the history is bounded, and whoever is too slow for it finds that the oldest are gone. A reader that
//! has missed something is told so, and must forget what it knew.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use baton_kv::{BlockHash, KvEvent};
use tokio::sync::watch;

use crate::wire::{Event, EventBatch};

/// What vLLM calls memory of the device, whatever device it is.
const DEVICE: &str = "GPU";
/// The most tokens in the history, so that few long prompts do not hold more memory than many short ones.
const MAX_TOKENS: usize = 16 << 20;

#[derive(Debug)]
pub struct EventHub {
    history: Mutex<History>,
    /// The number of the next batch.
    next: watch::Sender<u64>,
    capacity: usize,
    group: usize,
}

#[derive(Debug, Default)]
struct History {
    batches: VecDeque<Arc<EventBatch>>,
    /// The number of the first batch that is kept.
    first: u64,
    num_tokens: usize,
}

/// What there was for a reader.
#[derive(Debug, Default)]
pub struct Read {
    /// With their numbers.
    pub batches: Vec<(u64, Arc<EventBatch>)>,
    /// What was asked for is no longer kept.
    pub missed: bool,
    /// Where the next read begins.
    pub next: u64,
}

impl EventHub {
    /// Keeps this many batches. Only events of one KV group are told: the one whose layers see the whole prompt.
    pub fn new(capacity: usize, group: usize) -> Self {
        Self { history: Mutex::default(), next: watch::Sender::new(0), capacity: capacity.max(1), group }
    }

    fn lock(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The events of a step, from the engine's thread.
    pub fn publish(&self, events: &[KvEvent]) {
        let events: Vec<Event> = events.iter().filter_map(|event| self.to_wire(event)).collect();
        if events.is_empty() {
            return;
        }
        let ts = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        let batch = Arc::new(EventBatch { ts, events, data_parallel_rank: Some(0) });
        let mut history = self.lock();
        history.num_tokens += num_tokens(&batch);
        history.batches.push_back(batch);
        while history.batches.len() > self.capacity
            || (history.num_tokens > MAX_TOKENS && history.batches.len() > 1)
        {
            if let Some(oldest) = history.batches.pop_front() {
                history.num_tokens -= num_tokens(&oldest);
                history.first += 1;
            }
        }
        let next = history.first + history.batches.len() as u64;
        drop(history);
        self.next.send_replace(next);
    }

    fn to_wire(&self, event: &KvEvent) -> Option<Event> {
        let short = |hashes: &[BlockHash]| hashes.iter().map(|hash| hash.low_bits()).collect();
        match event {
            KvEvent::BlockStored { hashes, parent, token_ids, block_size, group } if *group == self.group => {
                Some(Event::BlockStored {
                    block_hashes: short(hashes),
                    parent_block_hash: parent.map(BlockHash::low_bits),
                    token_ids: token_ids.clone(),
                    block_size: *block_size,
                    lora_id: None,
                    medium: Some(DEVICE.to_owned()),
                })
            }
            KvEvent::BlockRemoved { hashes, group } if *group == self.group => {
                Some(Event::BlockRemoved { block_hashes: short(hashes), medium: Some(DEVICE.to_owned()) })
            }
            KvEvent::AllCleared => Some(Event::AllBlocksCleared),
            _ => None,
        }
    }

    /// At most `limit` batches from this number on.
    pub fn read(&self, from: u64, limit: usize) -> Read {
        let history = self.lock();
        let end = history.first + history.batches.len() as u64;
        let start = from.clamp(history.first, end);
        let skip = (start - history.first) as usize;
        let batches = history.batches.iter().skip(skip).take(limit);
        let batches: Vec<_> = (start..).zip(batches.cloned()).collect();
        let next = start + batches.len() as u64;
        Read { batches, missed: from < history.first, next }
    }

    /// The number that the next batch will have.
    pub fn next(&self) -> u64 {
        *self.next.borrow()
    }

    /// Tells when there is more.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.next.subscribe()
    }
}

fn num_tokens(batch: &EventBatch) -> usize {
    let tokens = |event: &Event| match event {
        Event::BlockStored { token_ids, .. } => token_ids.len(),
        Event::BlockRemoved { block_hashes, .. } => block_hashes.len(),
        Event::AllBlocksCleared => 1,
    };
    batch.events.iter().map(tokens).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(token: u32, group: usize) -> KvEvent {
        let hashes = vec![BlockHash::root(None).child(&[token])];
        KvEvent::BlockStored { hashes, parent: None, token_ids: vec![token], block_size: 1, group }
    }

    #[test]
    fn readers_go_at_their_own_pace_and_learn_what_they_missed() {
        let hub = EventHub::new(3, 0);
        assert!(!hub.read(0, 10).missed);
        for token in 0..5 {
            hub.publish(&[stored(token, 0), stored(token, 1)]);
        }
        assert_eq!(hub.next(), 5);
        let read = hub.read(0, 2);
        assert!(read.missed, "the first two are gone");
        assert_eq!(read.batches.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(read.batches[0].1.events.len(), 1, "the other group is not told of");
        let read = hub.read(read.next, 10);
        assert!(!read.missed && read.batches.len() == 1 && read.next == 5);
        let read = hub.read(100, 10);
        assert!(read.batches.is_empty() && read.next == 5, "a reader of another run starts over");
    }

    #[test]
    fn what_concerns_nobody_is_no_batch() {
        let hub = EventHub::new(3, 0);
        hub.publish(&[stored(1, 7)]);
        hub.publish(&[]);
        assert_eq!(hub.next(), 0);
        hub.publish(&[KvEvent::AllCleared]);
        assert_eq!(hub.read(0, 1).batches[0].1.events, [Event::AllBlocksCleared]);
    }
}
