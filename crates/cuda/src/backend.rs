//! The life of the device: load, create, submit, collect.

use std::collections::VecDeque;
use std::path::PathBuf;

use baton_backend::{
    Backend, BackendError, BufferId, DeviceInfo, DeviceSpan, KvSpec, Precision, Program, RandomFill, RopeId,
    RopeSpec, RopeStyle, Sharing, StepInput, StepLimits, StepMemory, StepOutput, Tensor, VectorId, WeightId,
    WeightUse,
};
use half::bf16;

use crate::clock::StepClock;
use crate::device::{Buffer, Device, Rope};
use crate::gemm::Gemm;
use crate::gpu::{DeviceMemory, Gpu};
use crate::graphs::{Action, Graph, Graphs, Shape, fingerprint};
use crate::kernels::Kernels;
use crate::kv::KvCache;
use crate::layout::TILE_ROWS;
use crate::ops::{Run, Scoring, meeting_bytes, unsupported};
use crate::options::{CudaOptions, Expected};
use crate::output::{MAX_TOP, RESULT_WORDS, unpack};
use crate::pack::{Packed, capacity_words, pack};
use crate::pinned::PinnedMemory;
use crate::probe::{Missing, StartError, look_for_gemm, open_gemm, probe};
use crate::products::MAX_PRODUCT_ROWS;
use crate::ranges::{Ranges, step_name};
use crate::swap::{Previous, Swapper, copy_blocks};
use crate::weights::{Staging, Weight, fill};

/// Tokens of a KV block unless asked otherwise.
pub(crate) const BLOCK_SIZE: usize = 16;
/// Of the memory for partial results, one part in this many is for their log-sum-exps.
pub(crate) const PARTIAL_LSE_SHARE: usize = 32;
/// Values of a weight that are converted at once for a large product.
const MAX_CONVERTED: usize = 64 << 20;
const SAMPLE_PARTS: usize = 32;
const MAX_SMALL_HEAD: usize = 32768;
const MAX_IN_FLIGHT: usize = 2;

/// See the crate.
#[derive(Debug)]
pub struct CudaBackend {
    // Dropped in this order: graphs and kernels need the context of `device.gpu`, which is last in `Device`.
    graphs: Graphs,
    swapper: Option<Swapper>,
    clock: StepClock,
    pub(crate) device: Device,
    staging: Staging,
    cache_dir: Option<PathBuf>,
    /// Of the device, with nothing of ours but the context.
    free_at_start: u64,
    limits: Option<StepLimits>,
    enforce_eager: bool,
    partial_bytes: usize,
    widest_linear: (usize, usize),
    largest_converted: usize,
    slots: Option<[Slot; MAX_IN_FLIGHT]>,
    in_flight: VecDeque<InFlight>,
    next_slot: usize,
}

/// The host's side of a step in flight.
#[derive(Debug)]
struct Slot {
    step: PinnedMemory,
    packed: Packed,
    results: PinnedMemory,
    top: PinnedMemory,
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    slot: usize,
    num_samples: usize,
}

impl CudaBackend {
    /// The devices of this machine, or what is missing to use one. Never panics.
    pub fn probe() -> Result<Vec<DeviceInfo>, Missing> {
        let devices = probe()?;
        open_gemm()?;
        Ok(devices.iter().map(|properties| properties.info(properties.total_bytes)).collect())
    }

    pub fn new(options: CudaOptions) -> Result<Self, StartError> {
        let devices = probe()?;
        let count = devices.len();
        let properties = devices.into_iter().nth(options.ordinal);
        let properties = properties
            .ok_or_else(|| unsupported(format!("cuda:{}: there are {count} devices", options.ordinal)))?;
        if properties.capability < (8, 0) {
            let what = format!("{}: it is older than compute capability 8.0", properties.name);
            return Err(unsupported(what).into());
        }
        look_for_gemm()?;
        // Compiling takes longest and needs nothing of the device.
        let cache_dir = options.cache_dir;
        let mut kernels = Kernels::new(&properties, options.precision, cache_dir.clone());
        if let Some(Expected { formats, cache }) = &options.expected {
            kernels.expect(formats, cache);
        }
        let gpu = Gpu::new(properties)?;
        let free_at_start = gpu.free_bytes();
        let is_plain = options.library_products || options.precision == Precision::Full;
        let nothing = || gpu.allocate(0, "nothing yet");
        let device = Device {
            weights: Vec::new(),
            vectors: Vec::new(),
            ropes: Vec::new(),
            buffers: Vec::new(),
            kv: None,
            step: nothing()?,
            normed: nothing()?,
            projected: nothing()?,
            converted: nothing()?,
            partials: nothing()?,
            arrivals: nothing()?,
            skinny_rows: if is_plain { 0 } else { options.skinny_rows },
            gated_min_busy: if is_plain { usize::MAX } else { options.gated_min_busy },
            small_bf16_rows: if options.library_products { 0 } else { MAX_PRODUCT_ROWS },
            adjusted: nothing()?,
            sample_parts: nothing()?,
            drawn: nothing()?,
            meetings: nothing()?,
            results: nothing()?,
            top: nothing()?,
            max_tokens: 0,
            max_logit_rows: 0,
            ranges: Ranges::new(),
            kernels,
            gemm: None,
            gpu,
        };
        Ok(Self {
            staging: Staging::new(&device.gpu)?,
            graphs: Graphs::default(),
            swapper: None,
            clock: StepClock::new()?,
            device,
            cache_dir,
            free_at_start,
            limits: None,
            enforce_eager: options.enforce_eager,
            partial_bytes: options.partial_bytes,
            widest_linear: (0, 0),
            largest_converted: 0,
            slots: None,
            in_flight: VecDeque::new(),
            next_slot: 0,
        })
    }

    /// Opening cuBLASLt takes a while and holds up threads that start. So it is called when those that compile have started, and
    /// waiting for them is all there is left to do.
    pub(crate) fn open_gemm(&mut self) -> Result<(), BackendError> {
        if self.device.gemm.is_none() {
            let missing =
                |missing| BackendError::Device { cause: format!("CUDA: {missing}, or use --device cpu") };
            open_gemm().map_err(missing)?;
            let Device { gpu, kernels, .. } = &self.device;
            self.device.gemm = Some(Gemm::new(gpu, kernels.precision(), self.cache_dir.as_deref())?);
        }
        Ok(())
    }

    /// Grows the scratch of products to the weights and limits known so far.
    fn size_scratch(&mut self) -> Result<(), BackendError> {
        let Some(limits) = self.limits else { return Ok(()) };
        let (rows, cols) = self.widest_linear;
        let max_rows = limits.max_tokens.max(limits.max_logit_rows);
        let element = self.device.activation_bytes();
        let Device { gpu, normed, projected, converted, .. } = &mut self.device;
        for (memory, bytes) in [
            (normed, max_rows * cols * element),
            (projected, limits.max_tokens * rows * element),
            (converted, self.largest_converted.min(MAX_CONVERTED.max(TILE_ROWS * cols)) * element),
        ] {
            if memory.bytes() < bytes {
                *memory = gpu.allocate(0, "nothing")?;
                *memory = gpu.allocate(bytes, "workspace")?;
            }
        }
        Ok(())
    }

    fn check(&self, input: &StepInput) -> Result<(), BackendError> {
        let limits = self.limits.ok_or_else(|| unsupported("a step before set_limits"))?;
        let tokens = input.num_tokens();
        let is_within = tokens <= limits.max_tokens
            && input.logit_rows.len() <= limits.max_logit_rows
            && input.samples.len() <= limits.max_samples
            && input.positions.len() == tokens
            && input.slots.len() == tokens
            && input.logit_rows.iter().all(|row| (*row as usize) < tokens)
            && input.samples.iter().all(|sample| (sample.logit_row as usize) < input.logit_rows.len())
            && input
                .feedback
                .iter()
                .all(|(row, sample)| (*row as usize) < tokens && (*sample as usize) < limits.max_samples);
        if !is_within {
            return Err(unsupported("a step beyond its limits"));
        }
        match &self.device.kv {
            Some(kv) => kv.check(input),
            None => Ok(()),
        }
    }

    fn new_buffer(&mut self, rows: usize, cols: usize, is_logits: bool) -> Result<BufferId, BackendError> {
        let what = format!("a buffer of {rows} x {cols}");
        let element = self.device.element_bytes(is_logits);
        let bytes = rows.checked_mul(cols).and_then(|values| values.checked_mul(element));
        let bytes = bytes.ok_or_else(|| unsupported(what.clone()))?;
        let memory = self.device.gpu.allocate(bytes, &what)?;
        self.device.buffers.push(Buffer { memory, rows, cols, is_logits });
        Ok(BufferId(self.device.buffers.len() as u32 - 1))
    }

    /// Uploads a step and moves its blocks.
    fn begin(&mut self, input: &StepInput) -> Result<(), BackendError> {
        let slots = self.slots.as_mut().expect("made with the limits, which were checked");
        let Device { gpu, kernels, kv, step, .. } = &self.device;
        let slot = &mut slots[self.next_slot];
        slot.packed = pack(input, slot.step.words_mut(), self.device.min_narrow_items())?;
        gpu.upload(&slot.step, step, 0, 4 * slot.packed.num_words)?;
        let copies = step.address() + 4 * slot.packed.copies.start as u64;
        let Some(kv) = kv else { return Ok(()) };
        if let Some(swapper) = &mut self.swapper {
            let previous = self.in_flight.back().zip(self.clock.last_end());
            let previous = previous.map(|(step, done)| {
                let slot = &slots[step.slot];
                Previous { words: slot.step.words(), packed: &slot.packed, done }
            });
            swapper.start(gpu, kernels, kv, input, previous)?;
        }
        copy_blocks(gpu, kernels, kv, &input.copies, copies)
    }

    /// A step that failed on its way leaves nothing running that a later one does not know of.
    fn settle(&self) {
        let _ = self.device.gpu.synchronize();
        if let Some(swapper) = &self.swapper {
            let _ = swapper.synchronize();
        }
    }

    fn launch(
        &mut self,
        shape: Shape,
        [is_bucket, is_recording]: [bool; 2],
        num_partials: &[u32],
        program: &dyn Program,
    ) -> Result<Option<Scoring>, BackendError> {
        let mut run = Run {
            device: &mut self.device,
            shape,
            is_bucket,
            is_recording,
            keeps_logit_rows: false,
            num_partials,
            failure: None,
            scoring: None,
        };
        program.run(&mut run);
        run.failure.map_or(Ok(run.scoring), Err)
    }

    fn run(&mut self, input: &StepInput, program: &dyn Program) -> Result<(), BackendError> {
        let scoring = self.run_program(input, program)?;
        let is_wanted =
            input.samples.iter().any(|sample| sample.forced.is_some() || sample.num_logprobs.is_some());
        scoring.filter(|_| is_wanted).map_or(Ok(()), |scoring| scoring.launch(&self.device.gpu))
    }

    fn run_program(
        &mut self,
        input: &StepInput,
        program: &dyn Program,
    ) -> Result<Option<Scoring>, BackendError> {
        let limits = self.limits.expect("checked before");
        let exact = Shape::exact(input);
        let num_partials: Vec<u32> = input.attention.iter().map(|plan| plan.num_partials).collect();
        let bucket = if self.enforce_eager { None } else { exact.bucket(Self::max_decodes(&limits)) };
        let Some(bucket) = bucket else { return self.launch(exact, [false; 2], &num_partials, program) };
        let key = (fingerprint(program), bucket);
        match self.graphs.action(key) {
            Action::Run => self.launch(bucket, [true, false], &num_partials, program),
            Action::Replay => self.graphs.replay(&self.device.gpu, key),
            Action::Record => {
                self.record(key, &num_partials, program)?;
                match self.graphs.action(key) {
                    Action::Replay => self.graphs.replay(&self.device.gpu, key),
                    _ => self.launch(bucket, [true, false], &num_partials, program),
                }
            }
        }
    }

    fn record(
        &mut self,
        key: (u64, Shape),
        num_partials: &[u32],
        program: &dyn Program,
    ) -> Result<(), BackendError> {
        Graph::begin(&self.device.gpu)?;
        let launched = self.launch(key.1, [true; 2], num_partials, program);
        let graph = Graph::end(&self.device.gpu);
        let scoring = launched?;
        self.graphs.store(key, graph.ok(), scoring);
        Ok(())
    }

    /// The shapes of steps that are recorded.
    fn buckets(&self) -> Vec<Shape> {
        let limits = self.limits.filter(|_| !self.enforce_eager);
        limits.map_or_else(Vec::new, |limits| Shape::buckets(Self::max_decodes(&limits)).collect())
    }

    /// What attention needs besides its cache.
    fn size_attention(&mut self, cache: &KvSpec) -> Result<(), BackendError> {
        let Device { gpu, kernels, partials, arrivals, max_tokens, .. } = &mut self.device;
        kernels.make_ready()?;
        let most_heads = cache.layers.iter().map(|layer| layer.num_kv_heads).max().unwrap_or(0);
        for (memory, bytes) in [(partials, self.partial_bytes), (arrivals, 4 * *max_tokens * most_heads)] {
            if memory.bytes() < bytes {
                *memory = gpu.allocate(bytes, "partial results of attention")?;
            }
        }
        Ok(())
    }

    /// Runs steps of nothing, so that products are chosen by time and kernels are loaded. Returns what recording them will take.
    fn rehearse_steps(&mut self, program: &dyn Program) -> Result<u64, BackendError> {
        let limits = self.limits.ok_or_else(|| unsupported("a rehearsal before set_limits"))?;
        self.fill_activations()?;
        // Kernels that read a step's counts do nothing, products go over whatever is there.
        let slots = self.slots.as_mut().expect("made with the limits");
        let packed = pack(&StepInput::default(), slots[0].step.words_mut(), 0)?;
        self.device.gpu.upload(&slots[0].step, &self.device.step, 0, 4 * packed.num_words)?;
        self.launch(Shape::prompts(limits.max_tokens), [true, false], &[], program)?;
        let buckets = self.buckets();
        for bucket in &buckets {
            self.launch(bucket.products(), [true, false], &[], program)?;
        }
        self.device.gemm.as_mut().expect("opened with the first weight").save_choices();
        self.finish_kernels()?;
        let Some(bucket) = buckets.last() else { return self.device.gpu.synchronize().map(|()| 0) };
        // Kernels are loaded by their first launch, which must not be a recorded one.
        if let Some(scoring) = self.launch(*bucket, [true, false], &[], program)? {
            scoring.launch(&self.device.gpu)?;
        }
        self.device.gpu.synchronize()?;
        let free_bytes = self.device.gpu.free_bytes();
        self.record((fingerprint(program), *bucket), &[], program)?;
        let graph_bytes = free_bytes.saturating_sub(self.device.gpu.free_bytes());
        self.graphs = Graphs::default();
        // Of each size one that shares nothing, and one that does.
        Ok(2 * graph_bytes * buckets.len() as u64)
    }

    /// Waits for the kernels that take longest to compile, for which nothing has to wait before.
    fn finish_kernels(&mut self) -> Result<(), BackendError> {
        for layer in 0..self.device.kv.as_ref().map_or(0, KvCache::num_layers) {
            self.device.tiled_attention(layer)?;
        }
        self.device.kernels.sampler().map(drop)
    }

    /// Random values where products read, because a device is faster on zeros.
    fn fill_activations(&self) -> Result<(), BackendError> {
        let Device { gpu, kernels, buffers, normed, .. } = &self.device;
        let activations = buffers.iter().filter(|buffer| !buffer.is_logits).map(|buffer| &buffer.memory);
        for memory in activations.chain([normed]) {
            fill(gpu, kernels, memory, RandomFill { seed: memory.address(), largest: 1.0 })?;
        }
        Ok(())
    }

    /// Rows of the largest step that is recorded.
    pub(crate) fn max_decodes(limits: &StepLimits) -> usize {
        limits.max_tokens.min(limits.max_logit_rows).min(limits.max_samples).min(limits.max_seqs)
    }
}

impl Backend for CudaBackend {
    fn device(&self) -> DeviceInfo {
        let info = self.device.gpu.properties.info(self.device.gpu.free_bytes());
        let partial_bytes = self.partial_bytes / PARTIAL_LSE_SHARE * (PARTIAL_LSE_SHARE - 1);
        // Without tensor cores a query costs the same whoever reads the keys.
        let is_fast = self.device.kernels.precision() == Precision::Fast;
        let sharing = if is_fast { info.sharing } else { Sharing::default() };
        DeviceInfo { activation_bytes: self.device.activation_bytes(), partial_bytes, sharing, ..info }
    }

    fn load_weight(&mut self, parts: &[Tensor], usage: WeightUse) -> Result<WeightId, BackendError> {
        self.device.gpu.bind()?;
        self.open_gemm()?;
        for part in parts {
            self.device.kernels.prepare_format(part.format())?;
        }
        let Device { gpu, kernels, .. } = &self.device;
        let weight = Weight::load(gpu, kernels, &mut self.staging, parts, usage)?;
        if usage != WeightUse::Embedding {
            // A head writes logits, never scratch; a small one is not worth knowing.
            let is_head = weight.rows > MAX_SMALL_HEAD
                && self.limits.is_some_and(|limits| limits.vocab_size == weight.rows);
            self.widest_linear.0 = self.widest_linear.0.max(if is_head { 0 } else { weight.rows });
            self.widest_linear.1 = self.widest_linear.1.max(weight.cols);
            self.largest_converted =
                self.largest_converted.max(weight.largest_converted(kernels.precision()).unwrap_or(0));
            self.size_scratch()?;
        }
        self.device.weights.push(weight);
        Ok(WeightId(self.device.weights.len() as u32 - 1))
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<VectorId, BackendError> {
        let memory = self.device.gpu.allocate(size_of_val(values), "a vector")?;
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.staging.copy(&self.device.gpu, &bytes, &memory, 0)?;
        self.device.vectors.push(memory);
        Ok(VectorId(self.device.vectors.len() as u32 - 1))
    }

    fn create_rope(&mut self, spec: &RopeSpec) -> Result<RopeId, BackendError> {
        let inv_freq = self.device.gpu.allocate(4 * spec.inv_freq.len(), "a rotary table")?;
        let bytes: Vec<u8> = spec.inv_freq.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.staging.copy(&self.device.gpu, &bytes, &inv_freq, 0)?;
        self.device.ropes.push(Rope {
            inv_freq,
            half: spec.inv_freq.len() as u32,
            scale: spec.scale,
            is_interleaved: spec.style == RopeStyle::Interleaved,
        });
        Ok(RopeId(self.device.ropes.len() as u32 - 1))
    }

    fn set_limits(&mut self, limits: &StepLimits) -> Result<(), BackendError> {
        assert!(self.limits.is_none(), "set_limits is called once");
        let samples = limits.max_samples.max(1);
        let gpu = &self.device.gpu;
        // Each split of a context has one partial a query; even the narrowest model's fill what there is.
        let step_bytes = 4 * capacity_words(limits, self.partial_bytes / 16384);
        self.device.step = gpu.allocate(step_bytes, "the step")?;
        self.device.adjusted = gpu.allocate(4 * samples * limits.vocab_size, "adjusted logits")?;
        self.device.sample_parts = gpu.allocate(2 * 4 * samples * SAMPLE_PARTS, "sampling")?;
        self.device.drawn = gpu.allocate(4 * samples, "sampling")?;
        self.device.meetings = gpu.allocate(meeting_bytes(samples, &gpu.properties), "sampling")?;
        let result_bytes = 4 * samples * RESULT_WORDS;
        self.device.results = gpu.allocate(result_bytes, "sampling")?;
        let top_bytes = 8 * samples * MAX_TOP;
        self.device.top = gpu.allocate(top_bytes, "sampling")?;
        let slot = || {
            Ok::<_, BackendError>(Slot {
                step: gpu.allocate_pinned(step_bytes, "the step")?,
                packed: Packed::default(),
                results: gpu.allocate_pinned(result_bytes, "sampling")?,
                top: gpu.allocate_pinned(top_bytes, "sampling")?,
            })
        };
        self.slots = Some([slot()?, slot()?]);
        self.limits = Some(*limits);
        self.device.max_tokens = limits.max_tokens;
        self.device.max_logit_rows = limits.max_logit_rows;
        self.size_scratch()
    }

    fn create_buffer(&mut self, rows: usize, cols: usize) -> Result<BufferId, BackendError> {
        if !cols.is_multiple_of(8) {
            return Err(unsupported(format!("a buffer of {rows} x {cols}: use a multiple of 8 columns")));
        }
        self.new_buffer(rows, cols, false)
    }

    fn create_logits(&mut self, rows: usize, vocab_size: usize) -> Result<BufferId, BackendError> {
        self.new_buffer(rows, vocab_size, true)
    }

    fn check_kv_spec(&self, spec: &KvSpec) -> Result<(), BackendError> {
        crate::kv::check_spec(spec)
    }

    fn rehearse(&mut self, program: &dyn Program, cache: &KvSpec) -> Result<StepMemory, BackendError> {
        self.device.gpu.bind()?;
        self.size_attention(cache)?;
        // Steps of nothing, which touch no block.
        self.device.kv = Some(KvCache::new(&self.device.gpu, cache, 1, 0)?);
        let graph_bytes = self.rehearse_steps(program)?;
        self.device.kv = None;
        let buffers: usize = self.device.buffers.iter().map(|buffer| buffer.memory.bytes()).sum();
        let taken_bytes = self.free_at_start.saturating_sub(self.device.gpu.free_bytes());
        let workspace_bytes = taken_bytes.saturating_sub(self.weight_bytes()).saturating_sub(buffers as u64);
        Ok(StepMemory { workspace_bytes, graph_bytes })
    }

    fn create_kv_cache(
        &mut self,
        spec: &KvSpec,
        num_device_blocks: usize,
        num_host_blocks: usize,
    ) -> Result<(), BackendError> {
        assert!(self.device.kv.is_none(), "create_kv_cache is called once");
        crate::kv::check_spec(spec)?;
        self.device.gpu.bind()?;
        self.size_attention(spec)?;
        self.device.kv = Some(KvCache::new(&self.device.gpu, spec, num_device_blocks, num_host_blocks)?);
        if num_host_blocks > 0 {
            self.swapper = Some(Swapper::new(&self.device.gpu, num_host_blocks)?);
        }
        self.device.gpu.synchronize()
    }

    fn warm_up(&mut self, program: &dyn Program) -> Result<(), BackendError> {
        self.device.gpu.bind()?;
        let fingerprint = fingerprint(program);
        for bucket in self.buckets() {
            self.record((fingerprint, bucket), &[], program)?;
        }
        self.device.gpu.synchronize()
    }

    fn submit(&mut self, input: &StepInput, program: &dyn Program) -> Result<(), BackendError> {
        self.device.gpu.bind()?;
        assert!(
            self.in_flight.len() < MAX_IN_FLIGHT,
            "a third step is submitted before the first is collected"
        );
        self.check(input)?;
        let slot = self.next_slot;
        let _range = self.device.ranges.enter(|| step_name(input));
        self.clock.start(&self.device.gpu)?;
        self.begin(input).and_then(|()| self.run(input, program)).inspect_err(|_| self.settle())?;
        let slots = self.slots.as_ref().expect("made with the limits, which were checked");
        let num_samples = input.samples.len();
        self.device.gpu.download(
            &self.device.results,
            &slots[slot].results,
            4 * num_samples * RESULT_WORDS,
        )?;
        if input.samples.iter().any(|sample| sample.num_logprobs.is_some_and(|count| count > 0)) {
            self.device.gpu.download(&self.device.top, &slots[slot].top, 8 * num_samples * MAX_TOP)?;
        }
        self.clock.end(&self.device.gpu)?;
        self.in_flight.push_back(InFlight { slot, num_samples });
        self.next_slot ^= 1;
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), BackendError> {
        self.device.gpu.bind()?;
        let step = self.in_flight.pop_front().expect("a step is in flight when its result is collected");
        let slot = &self.slots.as_ref().expect("made before the first step")[step.slot];
        self.clock.collect()?;
        unpack(step.num_samples, slot.results.words(), slot.top.words(), output);
        Ok(())
    }

    fn last_step_span(&self) -> Option<DeviceSpan> {
        self.clock.last()
    }

    fn read_buffer(&mut self, buffer: BufferId, rows: usize) -> Result<Vec<f32>, BackendError> {
        let buffer = &self.device.buffers[buffer.0 as usize];
        assert!(rows <= buffer.rows, "{rows} rows are read from a buffer of {}", buffer.rows);
        let element = self.device.element_bytes(buffer.is_logits);
        let bytes = rows * buffer.cols * element;
        let pinned = self.device.gpu.allocate_pinned(bytes, "reading a buffer")?;
        self.device.gpu.download(&buffer.memory, &pinned, bytes)?;
        self.device.gpu.synchronize()?;
        let bytes = &pinned.as_slice()[..bytes];
        Ok(if element == 4 {
            bytes.as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect()
        } else {
            bytes.as_chunks::<2>().0.iter().map(|raw| bf16::from_le_bytes(*raw).to_f32()).collect()
        })
    }

    fn weight_bytes(&self) -> u64 {
        let weights: usize = self.device.weights.iter().map(Weight::bytes).sum();
        let vectors: usize = self.device.vectors.iter().map(DeviceMemory::bytes).sum();
        (weights + vectors) as u64
    }
}
