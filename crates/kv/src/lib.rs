//! Paged KV-cache bookkeeping: which physical block holds which tokens of which sequence.
//!
//! [`KvCache`] owns two pools of numbered blocks (device and host), the block tables of every sequence (one for each group of
//! layers that see the same part of it), reference counts, and the prefix cache. It holds *numbers only*: no tensor, no thread, no clock. What has to happen to
//! the bytes (copy-on-write, swap) is handed back as lists of [`BlockMove`], which the scheduler puts into its Plan.
//!
//! ```
//! use baton_core::SeqId;
//! use baton_kv::{KvCache, KvConfig, WriteRange};
//!
//! let mut kv = KvCache::new(KvConfig { num_device_blocks: 8, block_size: 4, ..KvConfig::default() })?;
//! let (first, second) = (SeqId(1), SeqId(2));
//! let prompt: Vec<u32> = (0..9).collect();
//! let mut copies = Vec::new();
//! kv.add_sequence(first, None, 0);
//! kv.reserve(WriteRange { seq_id: first, start: 0, end: 9 }, &mut copies)?;
//! kv.commit(first, &prompt, 9); // the step has run: two full blocks can now be found by their hash
//! kv.remove_sequence(first);
//!
//! kv.add_sequence(second, None, 0);
//! let cached = kv.match_prefix(second, &prompt, 8);
//! assert_eq!(kv.attach_prefix(second, cached.num_rows).num_tokens, 8);
//! # Ok::<(), baton_kv::KvError>(())
//! ```
#![forbid(unsafe_code)]

mod block_pool;
mod check;
mod config;
mod events;
mod free_list;
mod hash;
mod manager;
mod offload;
mod pool;
mod prefix;
mod stores;
mod swap;
mod table;

pub use block_pool::BlockPool;
pub use config::{EvictionPolicy, KvConfig, KvError, KvGroup};
pub use events::KvEvent;
pub use hash::BlockHash;
pub use manager::{KvCache, KvStats, WriteRange};
pub use pool::BlockKey;
pub use prefix::{Attached, PrefixMatch};
pub use stores::{Load, StorePolicy, StoredRow};
pub use swap::BlockMove;

use baton_core::BlockId;

/// Stands in a block table for a row that lies behind the window of its group and was given back.
pub const NO_BLOCK: BlockId = BlockId(u32::MAX);
