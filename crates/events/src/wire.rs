//! Events as they travel: fields and names are those of vLLM's `kv_events`.

use serde::{Deserialize, Serialize};

/// What happened to the blocks of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type")]
pub enum Event {
    /// A run of full blocks can now be found in the prefix cache.
    BlockStored {
        block_hashes: Vec<u64>,
        /// The block before the first one; none at the start of a prompt.
        parent_block_hash: Option<u64>,
        /// `block_size` for each block.
        token_ids: Vec<u32>,
        block_size: usize,
        #[serde(default)]
        lora_id: Option<u64>,
        /// Where they are: `GPU` is the device, whatever it is.
        #[serde(default)]
        medium: Option<String>,
    },
    BlockRemoved {
        block_hashes: Vec<u64>,
        #[serde(default)]
        medium: Option<String>,
    },
    AllBlocksCleared,
}

/// The events of one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventBatch {
    /// Seconds since 1970.
    pub ts: f64,
    pub events: Vec<Event>,
    #[serde(default)]
    pub data_parallel_rank: Option<u32>,
}
