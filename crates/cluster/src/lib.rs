//! KV beyond one process: stores on a local disk and in Redis, and the library API over them.
//!
//! All of them are [`BlockStore`](baton_engine::BlockStore)s: rows of KV by name, carried to and from blocks of the host tier
//! by threads of the engine. Each row is an [`entry`]: it names the model and the layout that it is of, its key and a checksum,
//! so that whatever answers, only the right bytes are taken.
//!
//! Not here: which rows are wanted and when. That is `kv` and `sched`.
#![forbid(unsafe_code)]

mod breaker;
mod counters;
mod disk;
pub mod entry;
mod kv_store;
mod memory;
mod redis;
mod redis_url;
pub mod resp;
mod timed;
pub mod transfer;

pub use disk::DiskStore;
pub use kv_store::{Kv, KvStore};
pub use memory::{BufferBlocks, MemoryStore};
pub use redis::{RedisOptions, RedisStore};
pub use redis_url::RedisUrl;
pub use transfer::{PeerOptions, PeerStore, TransferOptions, TransferServer};

use thiserror::Error;

/// Why a store could not be opened. Once it is open, nothing is an error: see [`baton_engine::StoreStats`].
#[derive(Debug, Error)]
pub enum ClusterError {
    #[error("{path}: {cause}")]
    Disk { path: String, cause: String },
    #[error(
        "{path} holds the KV of another model or of another KV format: give another --kv-disk-path, or empty that directory"
    )]
    OtherModel { path: String },
    #[error(
        "{path} is used by another process: each needs a --kv-disk-path of its own; share KV with --kv-store"
    )]
    InUse { path: String },
    #[error("--kv-transfer-port: {cause}")]
    Transfer { cause: String },
    #[error("--kv-store {url}: {cause}")]
    Redis { url: String, cause: String },
}
