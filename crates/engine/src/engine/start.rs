//! From files to an engine that is ready: weights, programs, the memory plan, the cache.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use baton_backend::{
    AttentionCut, AttentionHeads, Backend, BackendError, CutOptions, DeviceInfo, KvDtype, KvLayerSpec,
    KvSpec, MAX_SPLIT_QUERIES, ProgramId, StepLimits, StepMemory, StepOutput,
};
use baton_kv::{KvConfig, StorePolicy};
use baton_model::{
    Decoder, LoadProgress, ModelConfig, ModelFiles, WeightSource, joint_kv_spec, num_parameters,
};
use baton_sched::{SchedConfig, Scheduler};

use super::{Engine, EngineStats, MASK_GRACE, kv_groups};
use crate::masks::Masks;
use crate::observe::StepNotes;
use crate::pace::{Pace, cost_model};
use crate::runner::{AttentionKind, Runner};
use crate::speculate::{DraftLimits, Drafter, Filled, Speculation, measure_steps};
use crate::stores::{MIN_STORE_TOKENS, fingerprint};
use crate::{EngineConfig, EngineError, MemoryPlan, MemoryRequest};

/// A model that is going to share the device with another.
struct Draft<'a> {
    model: &'a ModelConfig,
    weights: Arc<dyn WeightSource>,
    limits: StepLimits,
}

impl<'a> Draft<'a> {
    /// The same steps, of a model with its own vocabulary and context.
    fn new(files: &'a ModelFiles, config: &EngineConfig, limits: &StepLimits) -> Result<Self, EngineError> {
        let model = files.config();
        let wanted = config.speculative.as_ref().and_then(|config| config.max_model_len);
        let max_model_len = wanted.unwrap_or(usize::MAX).min(model.max_model_len).min(limits.max_model_len);
        let limits = StepLimits { max_model_len, vocab_size: model.vocab_size, ..*limits };
        Ok(Self { model, weights: files.weights()?, limits })
    }
}

impl Engine {
    /// Loads the model onto the device and plans its memory. After this nothing is allocated for a step.
    pub fn new(
        files: &ModelFiles,
        backend: Box<dyn Backend>,
        config: &EngineConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, EngineError> {
        Self::with_draft(files, None, backend, config, progress)
    }

    /// The same with the model that `config.speculative` names as its draft. Both have the same tokens: that is the caller's to
    /// check, because the engine knows no text.
    pub fn with_draft(
        files: &ModelFiles,
        draft: Option<&ModelFiles>,
        mut backend: Box<dyn Backend>,
        config: &EngineConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, EngineError> {
        config.validate()?;
        check_draft(config, draft)?;
        let model = files.config().clone();
        let max_model_len = model.resolve_max_model_len(config.max_model_len)?;
        let limits = config.step_limits(max_model_len, model.vocab_size);
        let draft = draft.map(|files| Draft::new(files, config, &limits)).transpose()?;
        let block_size = config.block_size.unwrap_or(backend.device().block_size);
        let models: Vec<&ModelConfig> =
            [&model].into_iter().chain(draft.as_ref().map(|draft| draft.model)).collect();
        let kv_spec = joint_kv_spec(&models, config.kv_dtype, block_size);
        backend.check_kv_spec(&kv_spec)?;
        let weights = files.weights()?;
        let device = backend.device();
        let buffer_bytes = |model, limits| Decoder::buffer_bytes(model, limits, device.activation_bytes);
        let draft_buffer_bytes = draft.as_ref().map_or(0, |draft| buffer_bytes(draft.model, &draft.limits));
        let workspace_bytes = buffer_bytes(&model, &limits).saturating_add(draft_buffer_bytes);
        // Said at once, not after minutes of loading.
        let target_bytes = weights.total_bytes();
        let weight_bytes = target_bytes + draft.as_ref().map_or(0, |draft| draft.weights.total_bytes());
        let needed_bytes = weight_bytes.saturating_add(workspace_bytes);
        if needed_bytes > device.free_bytes {
            let what = "the model with its workspace".to_owned();
            return Err(
                BackendError::OutOfMemory { what, needed_bytes, free_bytes: device.free_bytes }.into()
            );
        }
        let usable_bytes = (device.free_bytes as f64 * config.gpu_memory_utilization) as u64;
        let widest = draft.as_ref().map_or(0, |draft| draft.model.vocab_size).max(model.vocab_size);
        backend.set_limits(&StepLimits { vocab_size: widest, ..limits })?;
        let layout = joint_kv_spec(&models, KvDtype::F16, 1);
        let decoder = Decoder::load_at(&model, &*weights, &mut *backend, &limits, (&layout, 0), progress)?;
        let program = backend.compile(decoder.program())?;
        let first_layer = model.layers.len();
        let draft_program = match &draft {
            Some(Draft { model, weights, limits }) => {
                let place = (&layout, first_layer);
                let mut after = |loaded: LoadProgress| {
                    progress(LoadProgress {
                        done_bytes: target_bytes + loaded.done_bytes,
                        total_bytes: weight_bytes,
                    });
                };
                let decoder = Decoder::load_at(model, &**weights, &mut *backend, limits, place, &mut after)?;
                Some(backend.compile(decoder.program())?)
            }
            None => None,
        };
        let steps = profile(&mut *backend, program, draft_program, &kv_spec)?;
        let device = backend.device();
        // A device with memory of its own leaves the host's alone: whether that is there is seen when it is taken.
        let swap_space = match device.kv_cap_bytes {
            None if device.wants_large_steps => config.swap_space,
            _ => config.swap_space.min(device.free_bytes / 2),
        };
        let memory = MemoryPlan::new(
            &MemoryRequest {
                device: device.description.clone(),
                total_bytes: device.total_bytes,
                usable_bytes,
                weight_bytes: backend.weight_bytes(),
                workspace_bytes: workspace_bytes.saturating_add(steps.workspace_bytes),
                graph_bytes: steps.graph_bytes,
                kv_cap_bytes: device.kv_cap_bytes,
                kv_cache_memory: config.kv_cache_memory,
                swap_space,
                max_model_len,
                may_shrink: config.max_model_len.is_none(),
                max_num_seqs: config.max_num_seqs,
                max_run: config.max_num_batched_tokens.saturating_mul(device.max_steps_in_flight.max(1)),
            },
            &kv_spec,
        )?;
        let max_model_len = memory.max_model_len;
        backend.create_kv_cache(&kv_spec, memory.num_device_blocks, memory.num_host_blocks)?;
        for program in [Some(program), draft_program].into_iter().flatten() {
            backend.warm_up(program)?;
        }

        let cut = attention_cut(&device, &model, &kv_spec, config);
        let sched = SchedConfig {
            max_num_logit_rows: limits.max_logit_rows,
            max_model_len,
            swap_cost_per_token: memory.kv_bytes_per_token as f64 / device.swap_bytes_per_second,
            recompute_cost_per_token: num_parameters(&model) as f64 / device.macs_per_second,
            cost: cost_model(&model, &memory, cut.min_sharers()),
            relay_max_queries: if cut.shares() { MAX_SPLIT_QUERIES as usize } else { 0 },
            ..sched_config(config, &device)
        };
        let scheduler = Scheduler::new(
            sched,
            KvConfig {
                num_device_blocks: memory.num_device_blocks,
                num_host_blocks: memory.num_host_blocks,
                block_size,
                groups: kv_groups(&kv_spec),
                enable_prefix_caching: config.enable_prefix_caching,
                eviction: config.eviction,
                store: config.store,
                event_capacity: config.kv_event_capacity,
                ..KvConfig::default()
            },
        )?;
        let mut model_fingerprint =
            (config.store != StorePolicy::Off).then(|| fingerprint(&model, &*weights)).transpose()?;
        if let (Some(draft), Some(known)) = (&draft, &mut model_fingerprint) {
            // Blocks hold the draft's layers too.
            *known = format!("{known}+{}", fingerprint(draft.model, &*draft.weights)?);
        }
        let speculative = config.speculative.as_ref();
        let mut speculation =
            speculative.map(|config| Speculation::new(config, limits.max_logit_rows)).transpose()?;
        let mut runner = Runner::new(block_size, AttentionKind::all(&kv_spec), cut, config.seed);
        let max_rows = limits.max_logit_rows.min(limits.max_tokens).min(max_model_len);
        let steps = |program| (program, max_rows, &kv_spec, memory.num_device_blocks);
        if let Some(speculation) = &mut speculation {
            speculation.set_times(measure_steps(&mut *backend, &mut runner, steps(program))?);
        }
        let mut drafter = None;
        if let (Some(draft), Some(program)) = (&draft, draft_program) {
            let cut = attention_cut(&device, draft.model, &kv_spec, config);
            let mut runner = Runner::new(block_size, AttentionKind::all(&kv_spec), cut, config.seed);
            let times = measure_steps(&mut *backend, &mut runner, steps(program))?;
            let num_blocks = [memory.num_device_blocks, memory.num_host_blocks];
            let filled = Filled::new(&kv_spec, first_layer, num_blocks);
            let limits = DraftLimits::new(&draft.limits, model.vocab_size, device.wants_large_steps);
            let num_beside = speculation.as_mut().map_or(0, |speculation| {
                if !can_branch(&[&model, draft.model], &kv_spec, speculation.max_guesses()) {
                    speculation.forbid_branches();
                }
                speculation.num_beside()
            });
            let limits = DraftLimits { num_beside, ..limits };
            drafter = Some(Drafter::new(program, runner, filled, times, limits));
        }
        let stats = EngineStats { scheduler: scheduler.stats(), ..EngineStats::default() };
        Ok(Self {
            notes: StepNotes::new(stats),
            backend,
            decoder,
            program,
            drafter,
            reserved: HashMap::new(),
            eos_token_ids: Arc::from(model.eos_token_ids.as_slice()),
            model,
            scheduler,
            tiers: None,
            model_fingerprint,
            runner,
            speculation,
            masks: Masks::start().map_err(|error| EngineError::Threads { reason: error.to_string() })?,
            memory,
            in_flight: VecDeque::new(),
            max_steps_in_flight: device.max_steps_in_flight,
            output: StepOutput::default(),
            next_request_id: 0,
            num_steps: 0,
            last_failure: None,
            device_busy: None,
            pace: Pace::default(),
            max_step_slowdown: config.max_step_slowdown,
            mask_grace: MASK_GRACE,
            max_logit_rows: limits.max_logit_rows,
            full_kv_group: kv_groups(&kv_spec).iter().position(|group| group.window.is_none()).unwrap_or(0),
        })
    }
}

/// Whether guesses may branch: the keys of a branch count as up to a block before where they stand, which is no matter as long as no
/// window ends there and distance has no weight of its own.
fn can_branch(models: &[&ModelConfig], cache: &KvSpec, max_guesses: usize) -> bool {
    let least = (cache.block_size + max_guesses) as u32 + 1;
    models.iter().all(|model| model.alibi_slopes.is_none())
        && cache.lane_windows().all(|window| window.is_none_or(|window| window > least))
}

/// A draft model is there exactly where one is asked for.
fn check_draft(config: &EngineConfig, draft: Option<&ModelFiles>) -> Result<(), EngineError> {
    let is_asked = config.speculative.as_ref().is_some_and(|config| config.draft_model().is_some());
    if is_asked == draft.is_some() {
        return Ok(());
    }
    let (allowed, got) = if is_asked {
        ("another method than draft_model where no draft model is opened", "draft_model")
    } else {
        ("draft_model where a draft model is opened", "another method")
    };
    Err(EngineError::Flag { flag: "--speculative-config", allowed: allowed.to_owned(), got: got.to_owned() })
}

/// What the steps of both programs take. Memory that one leaves is there for the other, so that the last answer has it all.
fn profile(
    backend: &mut dyn Backend,
    program: ProgramId,
    draft: Option<ProgramId>,
    cache: &KvSpec,
) -> Result<StepMemory, BackendError> {
    let mut steps = backend.profile_run(program, cache)?;
    if let Some(draft) = draft {
        let both = backend.profile_run(draft, cache)?;
        steps.workspace_bytes = steps.workspace_bytes.max(both.workspace_bytes);
        steps.graph_bytes = steps.graph_bytes.saturating_add(both.graph_bytes);
    }
    Ok(steps)
}

/// What follows from the settings and the device alone.
fn sched_config(config: &EngineConfig, device: &DeviceInfo) -> SchedConfig {
    SchedConfig {
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens,
        max_num_sample_entries: match device.max_sample_entries {
            0 => usize::MAX,
            limit => limit,
        },
        max_num_queued_reqs: Some(config.max_num_queued_reqs),
        max_num_queued_reqs_per_key: config.max_num_queued_reqs_per_key,
        policy: config.policy,
        preemption_mode: config.preemption_mode,
        max_step_slowdown: config.max_step_slowdown,
        max_plans_in_flight: device.max_steps_in_flight,
        redraws: device.wants_large_steps,
        min_store_tokens: MIN_STORE_TOKENS,
        ..SchedConfig::default()
    }
}

fn attention_cut(
    device: &DeviceInfo,
    model: &ModelConfig,
    kv_spec: &KvSpec,
    config: &EngineConfig,
) -> AttentionCut {
    let heads = AttentionHeads {
        num_heads: model.num_heads,
        num_kv_heads: model.num_kv_heads,
        head_dim: model.head_dim,
        token_bytes: kv_spec
            .layer_bytes(KvLayerSpec { num_kv_heads: model.num_kv_heads, head_dim: model.head_dim }),
    };
    let (relays, is_fixed) = (config.relays(), config.deterministic);
    AttentionCut::new(device, &heads, &CutOptions { block_size: kv_spec.block_size, relays, is_fixed })
}
