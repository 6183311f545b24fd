//! The oracle: every op as plain loops on one thread, in f32 with f64 sums, with no thought for speed.
//!
//! It defines what the ops mean; `cpu` and `cuda` are tested against it. It is also strict: a step that breaks the
//! contract of [`crate::Backend`] (a slot outside the cache, a page list too short, a query that no item covers, a
//! partial that nothing wrote) stops it with a message that says which rule was broken, where a fast backend would read
//! someone else's memory.
//!
//! Weights are decoded a row at a time when they are used, so that it can run a real model from a mapped file.
//! Activations are f32 and never quantised. The KV cache rounds to its [`crate::KvDtype`]. A step is computed inside
//! `submit`; `collect` only hands over what it gave.

mod attention;
pub(crate) mod experts;
mod kv_cache;
mod latent;
mod math;
mod ops;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use baton_core::TokenId;

use crate::{
    AttentionTuning, Backend, BackendError, BufferId, BufferShape, DeviceInfo, Handles, KvSpec, Program,
    ProgramId, Programs, RopeId, RopeSpec, Sharing, StepExecutor, StepInput, StepLimits, StepOutput, Tensor,
    VectorId, WeightId, WeightShape, WeightUse,
};

use kv_cache::KvCache;
use ops::Run;

/// How many steps may be submitted and not yet collected.
const MAX_IN_FLIGHT: usize = 2;
const DEFAULT_MEMORY_BYTES: u64 = 4 << 30;

/// See the module.
#[derive(Debug)]
pub struct ReferenceBackend {
    handles: Handles,
    programs: Programs,
    parameters: Parameters,
    limits: Option<StepLimits>,
    buffers: Vec<Buffer>,
    kv: Option<KvCache>,
    finished: VecDeque<StepOutput>,
    /// What the samples of the last submitted step drew.
    previous_tokens: Vec<TokenId>,
    total_bytes: u64,
    used_bytes: u64,
    wants_large_steps: bool,
}

/// What is loaded once and only read by steps.
#[derive(Debug, Default)]
struct Parameters {
    weights: Vec<Weight>,
    vectors: Vec<Vec<f32>>,
    ropes: Vec<RopeSpec>,
}

/// Parts that stand one below the other.
#[derive(Debug)]
struct Weight {
    parts: Vec<Tensor>,
    rows: usize,
    cols: usize,
    usage: WeightUse,
}

#[derive(Debug)]
struct Buffer {
    rows: usize,
    cols: usize,
    values: Vec<f32>, // [rows, cols]
}

impl Weight {
    /// Decodes one row.
    fn row(&self, mut row: usize, out: &mut [f32]) {
        for part in &self.parts {
            if row < part.rows() {
                return part.dequantize_row(row, out);
            }
            row -= part.rows();
        }
        unreachable!("a row of a weight is below its number of rows");
    }
}

impl Buffer {
    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..(row + 1) * self.cols]
    }

    fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.cols..(row + 1) * self.cols]
    }
}

impl Default for ReferenceBackend {
    fn default() -> Self {
        Self::with_memory(DEFAULT_MEMORY_BYTES)
    }
}

impl ReferenceBackend {
    pub fn new() -> Self {
        Self::default()
    }

    /// A device that says that it does best with large steps, as those do that have them recorded.
    #[must_use]
    pub fn with_large_steps(self) -> Self {
        Self { wants_large_steps: true, ..self }
    }

    /// A device of this many bytes: buffers and KV cache beyond them are refused. Weights count too.
    pub fn with_memory(total_bytes: u64) -> Self {
        Self {
            wants_large_steps: false,
            handles: Handles::default(),
            programs: Programs::default(),
            parameters: Parameters::default(),
            limits: None,
            buffers: Vec::new(),
            kv: None,
            finished: VecDeque::new(),
            previous_tokens: Vec::new(),
            total_bytes,
            used_bytes: 0,
        }
    }

    fn reserve(&mut self, what: &str, bytes: Option<usize>) -> Result<(), BackendError> {
        let free_bytes = self.total_bytes - self.used_bytes;
        let needed_bytes = bytes.map_or(u64::MAX, |bytes| bytes as u64);
        if needed_bytes > free_bytes {
            return Err(BackendError::OutOfMemory { what: what.to_owned(), needed_bytes, free_bytes });
        }
        self.used_bytes += needed_bytes;
        Ok(())
    }

    fn new_buffer(&mut self, shape: BufferShape) -> Result<BufferId, BackendError> {
        assert!(self.limits.is_some(), "set_limits is called before any buffer is made");
        let BufferShape { rows, cols, .. } = shape;
        let len = rows.checked_mul(cols);
        let what = format!("a buffer of {rows} x {cols}");
        self.reserve(&what, len.and_then(|len| len.checked_mul(size_of::<f32>())))?;
        // NaN, so that reading what no op has written shows.
        self.buffers.push(Buffer { rows, cols, values: vec![f32::NAN; rows * cols] });
        Ok(self.handles.add_buffer(shape))
    }

    /// The token ids of the step, those drawn by the step before filled in.
    fn token_ids(&self, input: &StepInput) -> Vec<TokenId> {
        let mut token_ids = input.token_ids.clone();
        for (row, sample) in &input.feedback {
            token_ids[*row as usize] = self.previous_tokens[*sample as usize];
        }
        token_ids
    }
}

impl StepExecutor for ReferenceBackend {
    fn submit(&mut self, input: &StepInput, program: ProgramId) -> Result<(), BackendError> {
        assert!(
            self.finished.len() < MAX_IN_FLIGHT,
            "a third step is submitted before the first is collected"
        );
        let program = self.programs.get(program)?;
        let limits = self.limits.expect("set_limits is called before the first step");
        let cache = self.kv.as_ref().map(KvCache::shape);
        input.check(&limits, cache, &program.needs, self.previous_tokens.len())?;
        let token_ids = self.token_ids(input);
        if let Some(kv) = &mut self.kv {
            kv.move_blocks(input);
        }
        let mut run = Run {
            parameters: &self.parameters,
            buffers: &mut self.buffers,
            kv: self.kv.as_mut(),
            input,
            token_ids,
            output: StepOutput {
                fetched: input.fetches.iter().map(|fetch| fetch.id).collect(),
                ..StepOutput::default()
            },
        };
        program.ops.iter().for_each(|op| run.run(op));
        let output = run.output;
        self.previous_tokens.clear();
        self.previous_tokens.extend(output.samples.iter().map(|sampled| sampled.chosen.token_id));
        self.finished.push_back(output);
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), BackendError> {
        *output = self.finished.pop_front().expect("a step is in flight when its result is collected");
        Ok(())
    }

    fn read_buffer(&mut self, buffer: BufferId, rows: usize) -> Result<Vec<f32>, BackendError> {
        let buffer = &self.buffers[buffer.0 as usize];
        assert!(rows <= buffer.rows, "{rows} rows are read from a buffer of {}", buffer.rows);
        Ok(buffer.values[..rows * buffer.cols].to_vec())
    }
}

impl Backend for ReferenceBackend {
    fn device(&self) -> DeviceInfo {
        DeviceInfo {
            name: "reference".to_owned(),
            description: "plain f32 loops on one thread".to_owned(),
            total_bytes: self.total_bytes,
            free_bytes: self.total_bytes - self.used_bytes,
            block_size: 16,
            activation_bytes: size_of::<f32>(),
            kv_cap_bytes: None,
            max_steps_in_flight: MAX_IN_FLIGHT,
            wants_large_steps: self.wants_large_steps,
            attention: AttentionTuning {
                sharing: Sharing { border: 16, min_seqs: 2, read_cost: 1, ..Sharing::default() },
                ..AttentionTuning::default()
            },
            max_sample_entries: 0,
            macs_per_second: 1e9,
            swap_bytes_per_second: 1e10,
        }
    }

    fn load_weight(&mut self, parts: &[Tensor], usage: WeightUse) -> Result<WeightId, BackendError> {
        let shape = WeightShape::new(parts, usage)?;
        self.reserve("a weight", Some(parts.iter().map(|part| part.bytes().len()).sum()))?;
        let weight = Weight { parts: parts.to_vec(), rows: shape.rows, cols: shape.cols, usage };
        self.parameters.weights.push(weight);
        Ok(self.handles.add_weight(shape))
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<VectorId, BackendError> {
        self.reserve("a vector", Some(size_of_val(values)))?;
        self.parameters.vectors.push(values.to_vec());
        Ok(self.handles.add_vector(values.len()))
    }

    fn create_rope(&mut self, spec: &RopeSpec) -> Result<RopeId, BackendError> {
        self.parameters.ropes.push(spec.clone());
        Ok(self.handles.add_rope(spec))
    }

    fn set_limits(&mut self, limits: &StepLimits) -> Result<(), BackendError> {
        assert!(self.limits.is_none(), "set_limits is called once");
        assert!(self.buffers.is_empty(), "set_limits is called before any buffer is made");
        self.limits = Some(*limits);
        Ok(())
    }

    fn create_buffer(&mut self, rows: usize, cols: usize) -> Result<BufferId, BackendError> {
        self.new_buffer(BufferShape { rows, cols, is_logits: false })
    }

    fn create_logits(&mut self, rows: usize, vocab_size: usize) -> Result<BufferId, BackendError> {
        self.new_buffer(BufferShape { rows, cols: vocab_size, is_logits: true })
    }

    fn compile(&mut self, program: &Program) -> Result<ProgramId, BackendError> {
        self.programs.compile(program, &self.handles)
    }

    fn create_kv_cache(
        &mut self,
        spec: &KvSpec,
        num_device_blocks: usize,
        num_host_blocks: usize,
    ) -> Result<(), BackendError> {
        assert!(self.kv.is_none(), "create_kv_cache is called once");
        self.programs.set_cache(spec)?;
        let num_blocks = num_device_blocks.checked_add(num_host_blocks);
        self.reserve(
            "the KV cache",
            num_blocks.and_then(|blocks| blocks.checked_mul(spec.bytes_per_block())),
        )?;
        self.kv = Some(KvCache::new(spec, num_device_blocks, num_host_blocks));
        Ok(())
    }

    fn weight_bytes(&self) -> u64 {
        let parts = self.parameters.weights.iter().flat_map(|weight| &weight.parts);
        let vectors = self.parameters.vectors.iter().map(|vector| size_of_val(vector.as_slice()));
        parts.map(|part| part.bytes().len()).chain(vectors).sum::<usize>() as u64
    }
}
