//! [`CpuBackend`]: what is loaded and created before *ready*, and the life of a step.
//!
//! A step is computed within `submit`: all threads work on it, so there would be nothing to overlap. `collect` hands out
//! the results in order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use baton_backend::{
    AttentionTuning, Backend, BackendError, BufferId, BufferShape, DeviceInfo, DeviceSpan, Handles,
    HostBlocks, KvSpec, Precision, Program, ProgramId, Programs, RopeId, RopeSpec, Sharing, StepExecutor,
    StepInput, StepLimits, StepOutput, Tensor, VectorId, WeightId, WeightShape, WeightUse,
};
use baton_core::TokenId;

use crate::buffers::Buffer;
use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::kernels::attention::PANEL_KEYS;
use crate::kernels::segments::SEGMENT_KEYS;
use crate::kv::{self, KvCache};
use crate::memory::SystemMemory;
use crate::ops::Step;
use crate::pool::Pool;
use crate::scratch::Scratch;
use crate::topology::Machine;
use crate::weights::Weight;

/// Steps that may be submitted before one is collected.
const MAX_IN_FLIGHT: usize = 2;
/// Of a step's time, how much may be added to it by copies that another request waits for: a tenth.
const FETCH_SHARE: u32 = 10;
/// What it costs a query to go on from shared keys to its own, in bytes of keys and values read in that time.
const SHARED_QUERY_BYTES: usize = 18 << 10;

/// How the backend uses the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Number of threads, the caller's included; as many as the process may use physical cores if `None`.
    pub threads: Option<usize>,
    /// Forces an instruction set; else `BATON_CPU_ISA`, else the best one.
    pub isa: Option<Isa>,
    /// Binds each worker thread to a core, where there are enough of them.
    pub pin: bool,
    /// [`Precision::Full`] unpacks weights to f32 when they are loaded.
    pub precision: Precision,
}

/// A table of rotary frequencies and the angles of the step.
#[derive(Debug)]
pub(crate) struct Rope {
    pub spec: RopeSpec,
    /// `[tokens, inv_freq.len()]`, filled by the first op of a step that rotates.
    pub cos: Buffer,
    pub sin: Buffer,
    pub is_filled: bool,
}

/// The backend. See the crate's documentation.
#[derive(Debug)]
pub struct CpuBackend {
    pub(crate) isa: Isa,
    pub(crate) kernels: Kernels,
    pub(crate) pool: Pool,
    handles: Handles,
    programs: Programs,
    pub(crate) weights: Vec<Weight>,
    pub(crate) vectors: Vec<(Buffer, usize)>,
    pub(crate) ropes: Vec<Rope>,
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) kv: Option<KvCache>,
    pub(crate) scratch: Scratch,
    precision: Precision,
    limits: Option<StepLimits>,
    /// The step's tokens, with those of the step before filled in.
    pub(crate) token_ids: Vec<TokenId>,
    previous_samples: Vec<TokenId>,
    finished: VecDeque<(StepOutput, DeviceSpan)>,
    last_span: Option<DeviceSpan>,
    spare: Vec<StepOutput>,
}

impl CpuBackend {
    pub fn new(options: CpuOptions) -> Result<Self, BackendError> {
        let isa = Isa::choose(options.isa)?;
        let num_threads = options.threads.unwrap_or_else(|| Machine::read().default_threads());
        if num_threads == 0 || num_threads > 4096 {
            return Err(BackendError::Unsupported { what: format!("{num_threads} threads") });
        }
        let pool = Pool::new(num_threads, options.pin)
            .map_err(|error| BackendError::Device { cause: format!("cannot start threads: {error}") })?;
        Ok(Self {
            isa,
            kernels: Kernels::new(isa),
            pool,
            handles: Handles::default(),
            programs: Programs::default(),
            weights: Vec::new(),
            vectors: Vec::new(),
            ropes: Vec::new(),
            buffers: Vec::new(),
            kv: None,
            scratch: Scratch::new(num_threads)?,
            precision: options.precision,
            limits: None,
            token_ids: Vec::new(),
            previous_samples: Vec::new(),
            finished: VecDeque::with_capacity(MAX_IN_FLIGHT),
            last_span: None,
            spare: vec![StepOutput::default(); MAX_IN_FLIGHT],
        })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    fn fill_rope_tables(&mut self) -> Result<(), BackendError> {
        let Some(limits) = self.limits else { return Ok(()) };
        for rope in &mut self.ropes {
            let half = rope.spec.inv_freq.len();
            if rope.cos.matrix().rows < limits.max_tokens {
                rope.cos = Buffer::new(limits.max_tokens, half, "a table of angles")?;
                rope.sin = Buffer::new(limits.max_tokens, half, "a table of angles")?;
            }
        }
        Ok(())
    }

    fn new_buffer(&mut self, shape: BufferShape) -> Result<BufferId, BackendError> {
        self.buffers.push(Buffer::new(shape.rows, shape.cols, "a buffer of activations")?);
        Ok(self.handles.add_buffer(shape))
    }
}

/// What of the free memory KV may take unasked. Other programs live in it too: a quarter, where that is little up to
/// 4 GiB, and never more than half.
fn kv_share(free_bytes: u64) -> u64 {
    (free_bytes / 4).max((free_bytes / 2).min(4 << 30))
}

/// The processor's name, where the system tells.
pub(crate) fn processor_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

impl StepExecutor for CpuBackend {
    fn host_blocks(&mut self) -> Option<Arc<dyn HostBlocks>> {
        let kv = self.kv.as_mut().filter(|kv| kv.num_host_blocks > 0)?;
        kv.populate();
        Some(Arc::new(kv.host_blocks()))
    }

    fn submit(&mut self, input: &StepInput, program: ProgramId) -> Result<(), BackendError> {
        let device = |cause: &str| BackendError::Device { cause: cause.to_owned() };
        let limits = self.limits.ok_or_else(|| device("a step came before the limits were set"))?;
        if self.finished.len() >= MAX_IN_FLIGHT {
            return Err(device("two steps are in flight already: collect one first"));
        }
        let program = self.programs.get(program)?;
        let cache = self.kv.as_ref().map(KvCache::shape);
        input.check(&limits, cache, &program.needs, self.previous_samples.len())?;
        let start = Instant::now();
        let mut output = self.spare.pop().unwrap_or_default();
        output.fetched.clear();
        if let Some(kv) = &mut self.kv {
            // Whoever waits for its KV must not hold up those that decode meanwhile.
            let last = self.last_span.map(|span| span.end.saturating_duration_since(span.start));
            let limit = last.filter(|_| !input.token_ids.is_empty() && !input.waits_for_fetches);
            kv.move_blocks(input, &self.pool, limit.map(|last| last / FETCH_SHARE), &mut output.fetched);
        }
        self.token_ids.clear();
        self.token_ids.extend_from_slice(&input.token_ids);
        for &(row, sample) in &input.feedback {
            self.token_ids[row as usize] = self.previous_samples[sample as usize];
        }
        self.ropes.iter_mut().for_each(|rope| rope.is_filled = false);
        output.samples.clear();
        output.top.clear();
        let mut step = Step::new(self, input, &mut output);
        program.ops.iter().try_for_each(|op| step.run(op))?;
        self.previous_samples.clear();
        self.previous_samples.extend(output.samples.iter().map(|sample| sample.chosen.token_id));
        self.finished.push_back((output, DeviceSpan { start, end: Instant::now() }));
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), BackendError> {
        let (done, span) = self
            .finished
            .pop_front()
            .ok_or_else(|| BackendError::Device { cause: "no step is in flight".to_owned() })?;
        self.spare.push(std::mem::replace(output, done));
        self.last_span = Some(span);
        Ok(())
    }

    fn last_step_span(&self) -> Option<DeviceSpan> {
        self.last_span
    }

    fn read_buffer(&mut self, buffer: BufferId, rows: usize) -> Result<Vec<f32>, BackendError> {
        let buffer = self
            .buffers
            .get(buffer.0 as usize)
            .filter(|buffer| rows <= buffer.matrix().rows)
            .ok_or_else(|| BackendError::Device { cause: "no such rows of a buffer".to_owned() })?;
        Ok(buffer.as_slice()[..rows * buffer.matrix().cols].to_vec())
    }
}

impl Backend for CpuBackend {
    fn device(&self) -> DeviceInfo {
        let memory = SystemMemory::read();
        DeviceInfo {
            name: "cpu".to_owned(),
            description: format!("{}, {} threads, {}", processor_name(), self.pool.num_threads(), self.isa),
            total_bytes: memory.total_bytes,
            free_bytes: memory.free_bytes,
            block_size: PANEL_KEYS,
            activation_bytes: 4,
            kv_cap_bytes: Some(kv_share(memory.free_bytes)),
            max_steps_in_flight: 1,
            wants_large_steps: false,
            attention: AttentionTuning {
                // Where segments end, so that sharing does not change a bit.
                sharing: Sharing {
                    border: SEGMENT_KEYS,
                    min_seqs: 16,
                    read_cost: 1,
                    query_bytes: SHARED_QUERY_BYTES,
                    ..Sharing::default()
                },
                ..AttentionTuning::default()
            },
            max_sample_entries: 0,
            // Orders of magnitude for an int8 product and a copy between two places in memory.
            macs_per_second: 5e10 * self.pool.num_threads() as f64,
            swap_bytes_per_second: 5e9,
        }
    }

    fn load_weight(&mut self, parts: &[Tensor], usage: WeightUse) -> Result<WeightId, BackendError> {
        let shape = WeightShape::new(parts, usage)?;
        let weight = Weight::load(parts, usage, self.kernels.forms(), self.precision, &self.pool)?;
        let matrices = weight.packed.iter().chain(&weight.experts);
        if matrices.clone().next().is_some() {
            let has_floats = matrices.clone().any(|matrix| matrix.has_floats);
            let has_supers = matrices.clone().any(|matrix| matrix.has_supers);
            self.scratch.add_weight(weight.cols, has_floats, has_supers)?;
        }
        self.weights.push(weight);
        Ok(self.handles.add_weight(shape))
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<VectorId, BackendError> {
        self.vectors.push((Buffer::from_values(values)?, values.len()));
        Ok(self.handles.add_vector(values.len()))
    }

    fn create_rope(&mut self, spec: &RopeSpec) -> Result<RopeId, BackendError> {
        let empty = || Buffer::new(0, spec.inv_freq.len(), "a table of angles");
        self.ropes.push(Rope { spec: spec.clone(), cos: empty()?, sin: empty()?, is_filled: false });
        self.fill_rope_tables()?;
        Ok(self.handles.add_rope(spec))
    }

    fn set_limits(&mut self, limits: &StepLimits) -> Result<(), BackendError> {
        self.limits = Some(*limits);
        self.token_ids.reserve(limits.max_tokens.min(1 << 24));
        self.previous_samples.reserve(limits.max_samples.min(1 << 20));
        self.fill_rope_tables()?;
        self.scratch.set_limits(limits)
    }

    fn create_buffer(&mut self, rows: usize, cols: usize) -> Result<BufferId, BackendError> {
        self.new_buffer(BufferShape { rows, cols, is_logits: false })
    }

    fn create_logits(&mut self, rows: usize, vocab_size: usize) -> Result<BufferId, BackendError> {
        self.new_buffer(BufferShape { rows, cols: vocab_size, is_logits: true })
    }

    fn compile(&mut self, program: &Program) -> Result<ProgramId, BackendError> {
        let id = self.programs.compile(program, &self.handles)?;
        if let Some(limits) = self.limits {
            self.scratch.experts.reserve(program, &self.handles, &self.weights, limits.max_tokens)?;
        }
        Ok(id)
    }

    fn check_kv_spec(&self, spec: &KvSpec) -> Result<(), BackendError> {
        kv::check_spec(spec)
    }

    fn create_kv_cache(
        &mut self,
        spec: &KvSpec,
        num_device_blocks: usize,
        num_host_blocks: usize,
    ) -> Result<(), BackendError> {
        let max_tokens = self
            .limits
            .ok_or_else(|| BackendError::Device {
                cause: "the limits are set after the KV cache".to_owned(),
            })?
            .max_tokens;
        // Full precision rounds nothing to bf16.
        let is_paired = |head_dim: usize| {
            self.precision == Precision::Fast && self.kernels.has_pairs(spec.dtype, head_dim)
        };
        self.programs.set_cache(spec)?;
        let kv = KvCache::new(spec, num_device_blocks, num_host_blocks, is_paired)?;
        let width = kv.layers.iter().map(|layer| 2 * layer.num_kv_heads * layer.head_dim).max().unwrap_or(0);
        self.scratch.kv = Buffer::new(max_tokens, width, "scratch for keys and values")?;
        for layer in &kv.layers {
            self.scratch.reserve_attention(1, layer.value_dim)?;
        }
        self.kv = Some(kv);
        Ok(())
    }

    fn weight_bytes(&self) -> u64 {
        self.weights.iter().map(Weight::bytes).sum()
    }
}
