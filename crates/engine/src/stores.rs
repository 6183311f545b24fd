//! The engine with stores: attaching them, and what each step does for them.

use std::sync::Arc;
use std::time::Duration;

use baton_model::{ModelConfig, ModelError, WeightSource};
use baton_sched::Plan;

use crate::tiers::{BlockStore, KvIdentity, Tiers};
use crate::{Engine, EngineError};

/// Fewer missing tokens than this are computed without asking anybody.
pub(crate) const MIN_STORE_TOKENS: usize = 32;
/// How long the engine waits for a store before it looks at its mailbox again.
pub(crate) const TIER_WAIT: Duration = Duration::from_millis(2);
/// A step with fewer tokens says little about how fast prompts are computed.
const MIN_TIMED_TOKENS: usize = 64;
/// Places in each tensor that its fingerprint looks at, and bytes at each.
const SAMPLES: usize = 8;
const SAMPLE_BYTES: usize = 256;

impl Engine {
    /// What entries of a store must be of to be used by this engine.
    pub fn kv_identity(&mut self) -> Result<KvIdentity, EngineError> {
        let groups = self.scheduler.kv_config().groups.clone();
        let model = self.model_fingerprint.clone();
        let (Some(model), true) = (model, self.scheduler.has_stores()) else {
            let needed_mib = self.memory_plan().kv_bytes_per_token * self.memory_plan().block_size as u64;
            return Err(EngineError::StoreNeedsHostTier { needed_mib: needed_mib.div_ceil(1 << 20) });
        };
        let host = self.backend.host_blocks().ok_or_else(|| self.no_host_blocks())?;
        let row_bytes = groups.iter().map(|group| group.lanes * host.block_bytes()).collect();
        let layout = format!("{}; {:?}", host.layout(), groups);
        Ok(KvIdentity { model, layout, row_bytes })
    }

    fn no_host_blocks(&self) -> EngineError {
        EngineError::NoHostBlocks { device: self.memory_plan().device.clone() }
    }

    /// From now on, KV goes to these stores and is looked for in them, the first one first. A request waits for them at most
    /// this long.
    pub fn attach_stores(
        &mut self,
        stores: Vec<Arc<dyn BlockStore>>,
        time_limit: Duration,
    ) -> Result<(), EngineError> {
        let identity = self.kv_identity()?;
        let host = self.backend.host_blocks().ok_or_else(|| self.no_host_blocks())?;
        let block_size = self.memory_plan().block_size;
        self.notes.heartbeat.set_stores(stores.clone());
        if stores.iter().any(|store| store.computes_prompts()) {
            self.scheduler.pace_rests();
        }
        let tiers = Tiers::start(stores, &host, identity.row_bytes, block_size, time_limit)
            .map_err(|error| EngineError::Threads { reason: error.to_string() })?;
        self.tiers = Some(tiers);
        Ok(())
    }

    /// Something is to be done without a command: requests, or rows that are to be stored.
    pub(crate) fn has_work(&self) -> bool {
        self.has_unfinished() || (self.tiers.is_some() && self.scheduler.has_unsaved_rows())
    }

    /// Stores have not yet taken all that they were given.
    pub(crate) fn is_storing(&self) -> bool {
        self.tiers.as_ref().is_some_and(Tiers::is_saving)
    }

    /// Gives the stores what the last plan or result asks of them.
    pub(crate) fn begin_tiers(&mut self) {
        if let Some(tiers) = &mut self.tiers {
            tiers.begin(&mut self.scheduler);
        }
    }

    /// Takes in what the stores have done.
    pub(crate) fn collect_tiers(&mut self, wait: Duration) {
        if let Some(tiers) = &mut self.tiers {
            // Where rows that are to be stored find no place, one that is stored makes it.
            let wait = if tiers.has_pending_queries() || tiers.is_saving() { wait } else { Duration::ZERO };
            tiers.collect(&mut self.scheduler, wait);
        }
    }

    /// Steps until all KV that should be stored is with the stores, and waits for them: for callers that drive the engine by
    /// hand, and for the end.
    pub fn flush_stores(&mut self, limit: Duration) {
        while self.tiers.is_some() && self.has_work() {
            let _ = self.step();
        }
        if let Some(tiers) = &mut self.tiers {
            tiers.flush(&mut self.scheduler, limit);
        }
    }

    /// How fast prompts are computed, as far as this step tells.
    pub(crate) fn time_prefill(&mut self, plan: &Plan, time: Duration) {
        let is_prompt = |num_tokens: usize| num_tokens > 8;
        let num_tokens: usize =
            plan.seqs.iter().map(|seq| seq.token_ids.len()).filter(|&count| is_prompt(count)).sum();
        let others = plan.num_tokens() - num_tokens;
        if let Some(tiers) = self.tiers.as_mut().filter(|_| num_tokens >= MIN_TIMED_TOKENS.max(4 * others)) {
            tiers.computed(num_tokens, time);
        }
    }
}

/// Names a model by its configuration, its tensors and samples of what is in them: enough to tell fine-tunes and quantisations
/// apart without reading gigabytes.
pub(crate) fn fingerprint(model: &ModelConfig, weights: &dyn WeightSource) -> Result<String, ModelError> {
    let mut hasher = blake3::Hasher::new_derive_key("baton kv model fingerprint 1");
    hasher.update(format!("{model:?}").as_bytes());
    let mut names = weights.names();
    names.sort_unstable();
    for name in names {
        let Some(tensor) = weights.tensor(&name)? else { continue };
        let shape = format!("\n{name} {:?} {}x{}\n", tensor.format(), tensor.rows(), tensor.cols());
        hasher.update(shape.as_bytes());
        if let Some(fill) = tensor.random_fill() {
            // Dummy weights are made when they are looked at.
            hasher.update(format!("{fill:?}").as_bytes());
            continue;
        }
        let bytes = tensor.bytes();
        for sample in 0..SAMPLES {
            let start = bytes.len().saturating_sub(SAMPLE_BYTES) / (SAMPLES - 1) * sample;
            hasher.update(&bytes[start..(start + SAMPLE_BYTES).min(bytes.len())]);
        }
    }
    Ok(hasher.finalize().to_hex().to_string())
}
