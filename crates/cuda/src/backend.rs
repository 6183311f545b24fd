//! The device as it runs steps: submit, collect. How it is set up for them: `setup`.

mod profile;
mod setup;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use baton_backend::{
    BackendError, BufferId, DeviceInfo, DeviceSpan, Handles, HostBlocks, Op, Precision, ProgramId, Programs,
    StepExecutor, StepInput, StepLimits, StepOutput,
};
use half::bf16;

use crate::clock::StepClock;
use crate::device::Device;
use crate::gemm::Gemm;
use crate::gpu::Gpu;
use crate::graphs::{Action, Graph, Graphs, Shape};
use crate::kernels::Kernels;
use crate::kv::KvCache;
use crate::ops::{Run, Scoring, unsupported};
use crate::options::{CudaOptions, Expected};
use crate::output::{MAX_TOP, RESULT_WORDS, unpack};
use crate::pack::{Packed, pack};
use crate::pinned::PinnedMemory;
use crate::probe::{Missing, StartError, look_for_gemm, open_gemm, probe};
use crate::products::MAX_PRODUCT_ROWS;
use crate::ranges::{Ranges, step_name};
use crate::swap::{Previous, Swapper, copy_blocks};
use crate::weights::Staging;

/// Tokens of a KV block unless asked otherwise.
pub(crate) const BLOCK_SIZE: usize = 16;
/// Of the memory for partial results, one part in this many is for their log-sum-exps.
pub(crate) const PARTIAL_LSE_SHARE: usize = 32;
const MAX_IN_FLIGHT: usize = 2;

/// See the crate.
#[derive(Debug)]
pub struct CudaBackend {
    // Dropped in this order: graphs and kernels need the context of `device.gpu`, which is last in `Device`.
    graphs: Graphs,
    swapper: Option<Swapper>,
    clock: StepClock,
    pub(crate) device: Device,
    handles: Handles,
    programs: Programs,
    staging: Staging,
    cache_dir: Option<PathBuf>,
    /// Of the device, with nothing of ours but the context.
    free_at_start: u64,
    limits: Option<StepLimits>,
    enforce_eager: bool,
    partial_bytes: usize,
    widest_linear: (usize, usize),
    largest_converted: usize,
    /// Of the widest weights of e4m3, and of those whose columns are out of order.
    widest_fp8: usize,
    widest_ordered: usize,
    slots: Option<[Slot; MAX_IN_FLIGHT]>,
    in_flight: VecDeque<InFlight>,
    next_slot: usize,
    /// Samples of the step that was submitted last.
    num_drawn: usize,
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
    /// It is there to wait for fetches.
    waits: bool,
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
            ordered: nothing()?,
            codes: nothing()?,
            code_scales: nothing()?,
            projected: nothing()?,
            converted: nothing()?,
            partials: nothing()?,
            arrivals: nothing()?,
            latent_layers: Vec::new(),
            experts: None,
            skinny_rows: if is_plain { 0 } else { options.skinny_rows },
            gated_min_busy: if is_plain { usize::MAX } else { options.gated_min_busy },
            small_bf16_rows: if options.library_products { 0 } else { MAX_PRODUCT_ROWS },
            adjusted: nothing()?,
            sample_parts: nothing()?,
            drawn: nothing()?,
            row_syncs: nothing()?,
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
            handles: Handles::default(),
            programs: Programs::default(),
            cache_dir,
            free_at_start,
            limits: None,
            enforce_eager: options.enforce_eager,
            partial_bytes: options.partial_bytes,
            widest_linear: (0, 0),
            largest_converted: 0,
            widest_fp8: 0,
            widest_ordered: 0,
            slots: None,
            in_flight: VecDeque::new(),
            next_slot: 0,
            num_drawn: 0,
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

    fn check(&self, input: &StepInput, program: ProgramId) -> Result<(), BackendError> {
        let needs = &self.programs.get(program)?.needs;
        let limits = self.limits.ok_or_else(|| unsupported("a step before set_limits"))?;
        let kv = self.device.kv.as_ref();
        input.check(&limits, kv.map(KvCache::shape), needs, self.num_drawn)?;
        kv.map_or(Ok(()), |kv| kv.check_swaps(input))
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

    fn launch(
        &mut self,
        shape: Shape,
        [is_bucket, is_recording]: [bool; 2],
        num_partials: &[u32],
        ops: &[Op],
    ) -> Result<Option<Scoring>, BackendError> {
        let mut run = Run {
            device: &mut self.device,
            shape,
            is_bucket,
            is_recording,
            keeps_logit_rows: false,
            num_partials,
            scoring: None,
        };
        ops.iter().try_for_each(|op| run.run(op))?;
        Ok(run.scoring)
    }

    fn run(&mut self, input: &StepInput, program: ProgramId) -> Result<(), BackendError> {
        // A step that only moves blocks: a launch of nothing is refused.
        if input.num_tokens() == 0 {
            return Ok(());
        }
        let scoring = self.run_program(input, program)?;
        let is_wanted =
            input.samples.iter().any(|sample| sample.forced.is_some() || sample.num_logprobs.is_some());
        scoring.filter(|_| is_wanted).map_or(Ok(()), |scoring| scoring.launch(&self.device.gpu))
    }

    fn run_program(
        &mut self,
        input: &StepInput,
        program: ProgramId,
    ) -> Result<Option<Scoring>, BackendError> {
        let compiled = self.programs.get(program)?;
        let ops = compiled.ops.as_slice();
        let limits = self.limits.expect("checked before");
        let block_size = self.device.kv.as_ref().map_or(1, |kv| 1 << kv.block_shift);
        let exact = Shape::exact(input, block_size);
        let num_partials: Vec<u32> = input.attention.iter().map(|plan| plan.num_partials).collect();
        let bucket = if self.enforce_eager {
            None
        } else {
            exact.bucket(Self::max_decodes(&limits), Self::max_checked(&limits))
        };
        let Some(bucket) = bucket else { return self.launch(exact, [false; 2], &num_partials, ops) };
        let key = (program, bucket);
        match self.graphs.action(key) {
            Action::Run => self.launch(bucket, [true, false], &num_partials, ops),
            Action::Replay => self.graphs.replay(&self.device.gpu, key),
            Action::Record => {
                self.record(key, &num_partials, ops)?;
                match self.graphs.action(key) {
                    Action::Replay => self.graphs.replay(&self.device.gpu, key),
                    _ => self.launch(bucket, [true, false], &num_partials, ops),
                }
            }
        }
    }

    fn record(
        &mut self,
        key: (ProgramId, Shape),
        num_partials: &[u32],
        ops: &[Op],
    ) -> Result<(), BackendError> {
        Graph::begin(&self.device.gpu)?;
        let launched = self.launch(key.1, [true; 2], num_partials, ops);
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

    /// Rows of the largest step of plain decodes that is recorded.
    pub(crate) fn max_decodes(limits: &StepLimits) -> usize {
        Self::max_checked(limits).min(limits.max_seqs)
    }

    /// The same of steps that check guesses.
    fn max_checked(limits: &StepLimits) -> usize {
        limits.max_tokens.min(limits.max_logit_rows).min(limits.max_samples)
    }
}

impl StepExecutor for CudaBackend {
    fn host_blocks(&mut self) -> Option<Arc<dyn HostBlocks>> {
        self.swapper.as_mut()?.show_host_blocks();
        Some(Arc::new(self.device.kv.as_ref()?.host_blocks()?))
    }

    fn submit(&mut self, input: &StepInput, program: ProgramId) -> Result<(), BackendError> {
        self.device.gpu.bind()?;
        assert!(
            self.in_flight.len() < MAX_IN_FLIGHT,
            "a third step is submitted before the first is collected"
        );
        self.check(input, program)?;
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
        self.in_flight.push_back(InFlight { slot, num_samples, waits: input.waits_for_fetches });
        self.next_slot ^= 1;
        self.num_drawn = num_samples;
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), BackendError> {
        self.device.gpu.bind()?;
        let step = self.in_flight.pop_front().expect("a step is in flight when its result is collected");
        let slot = &self.slots.as_ref().expect("made before the first step")[step.slot];
        self.clock.collect()?;
        unpack(step.num_samples, slot.results.words(), slot.top.words(), output);
        output.fetched.clear();
        if let Some(swapper) = &mut self.swapper {
            swapper.take_fetched(step.waits, &mut output.fetched)?;
        }
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
}
