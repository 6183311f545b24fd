//! The ops of `baton bench kernels` without products: embedding lookup, norms, sampling, block copies, and swaps over the bus. All
//! of them only move memory, so they are compared with the memory bandwidth.

use std::time::Instant;

use baton_backend::testing::{Random, random_row};
use baton_backend::{
    Backend, BackendError, BlockCopy, Embed, KvDtype, KvLayerSpec, KvSpec, Logits, Norm, NormKind, NormOp,
    Op, Program, ProgramId, Sample, SampleRow, SharedBytes, StepInput, StepLimits, StepOutput, Tensor,
    WeightFormat, WeightUse,
};

use crate::kernels::{KernelSizes, Open, step_seconds};

/// The best of this many runs counts: others were disturbed.
const RUNS: usize = 5;
/// An op of a few microseconds is repeated.
const REPEATS: usize = 16;
/// Width of the rows that logits are made from: as little as there can be.
const NARROW: usize = 32;
const NUM_BLOCKS: usize = 64;

/// One op of one size.
#[derive(Clone, Debug, PartialEq)]
pub struct SmallFigures {
    pub op: &'static str,
    pub size: String,
    pub us: f64,
    /// Read and written per second; of swaps only what goes over the bus.
    pub gb_per_s: f64,
    /// It is limited by the device's memory, and not by the bus.
    pub is_memory: bool,
}

struct Sizes {
    hidden: usize,
    vocab: usize,
    rows: [usize; 3],
    samples: [usize; 3],
    layers: usize,
    layer: KvLayerSpec,
}

impl Sizes {
    fn of(sizes: KernelSizes) -> Self {
        match sizes {
            KernelSizes::Small => Self {
                hidden: 576,
                vocab: 49_152,
                rows: [1, 64, 512],
                samples: [1, 8, 64],
                layers: 30,
                layer: KvLayerSpec { num_kv_heads: 3, head_dim: 64 },
            },
            KernelSizes::Large => Self {
                hidden: 4096,
                vocab: 128_256,
                rows: [1, 64, 2048],
                samples: [1, 64, 256],
                layers: 32,
                layer: KvLayerSpec { num_kv_heads: 8, head_dim: 128 },
            },
        }
    }
}

pub(crate) fn measure(open: Open<'_>, sizes: KernelSizes) -> Result<Vec<SmallFigures>, crate::BenchError> {
    let failed = |error: BackendError| crate::BenchError::Failed(error.to_string());
    let of = Sizes::of(sizes);
    let mut figures = rows(open()?, &of, sizes).map_err(failed)?;
    figures.extend(sampling(open()?, &of).map_err(failed)?);
    figures.extend(blocks(open()?, &of).map_err(failed)?);
    Ok(figures)
}

fn limits(max_tokens: usize, vocab_size: usize) -> StepLimits {
    StepLimits {
        max_tokens,
        max_seqs: max_tokens,
        max_logit_rows: max_tokens,
        max_samples: max_tokens,
        max_model_len: max_tokens,
        vocab_size,
    }
}

fn tokens(count: usize) -> StepInput {
    let ids: Vec<u32> = (0..count as u32).collect();
    StepInput { token_ids: ids.clone(), positions: ids.clone(), slots: ids, ..StepInput::default() }
}

fn best(backend: &mut dyn Backend, input: &StepInput, program: ProgramId) -> Result<f64, BackendError> {
    let mut best = f64::MAX;
    for _ in 0..RUNS {
        best = best.min(step_seconds(backend, input, program)?);
    }
    Ok(best.max(1e-9))
}

/// Embeddings and norms.
fn rows(
    mut backend: Box<dyn Backend>,
    of: &Sizes,
    sizes: KernelSizes,
) -> Result<Vec<SmallFigures>, BackendError> {
    let max_rows = of.rows[2];
    backend.set_limits(&limits(max_rows, 1))?;
    let mut random = Random::new(3);
    let table = random_bf16(max_rows, of.hidden, &mut random);
    let weight = backend.load_weight(&[table], WeightUse::Embedding)?;
    let norm = backend.load_vector(&random.normals(of.hidden))?;
    let norm = Norm { kind: NormKind::Rms, weight: norm, eps: 1e-5 };
    let input = backend.create_buffer(max_rows, of.hidden)?;
    let output = backend.create_buffer(max_rows, of.hidden)?;
    let element = backend.device().activation_bytes;
    let mut figures = Vec::new();
    for (op, read_bytes) in [("embedding", 2), ("norm", element)] {
        let one = || match op {
            "norm" => Op::Norm(NormOp { input, norm, output, accumulate: false }),
            _ => Op::Embed(Embed { weight, scale: 1.0, output: input }),
        };
        let program = backend.compile(&Program::new((0..REPEATS).map(|_| one()).collect()))?;
        for count in of.rows {
            let mut step = tokens(count);
            sizes.make_decode(&mut step);
            let seconds = best(&mut *backend, &step, program)? / REPEATS as f64;
            let bytes = count * of.hidden * (read_bytes + element);
            figures.push(figure(op, format!("{count} x {}", of.hidden), bytes, seconds));
        }
    }
    Ok(figures)
}

fn random_bf16(rows: usize, cols: usize, random: &mut Random) -> Tensor {
    let bytes = random_row(WeightFormat::BF16, cols, 1.0, random).repeat(rows);
    let bytes = SharedBytes::from_vec(bytes);
    Tensor::new(WeightFormat::BF16, rows, cols, bytes).expect("as many bytes as the shape says")
}

fn figure(op: &'static str, size: String, bytes: usize, seconds: f64) -> SmallFigures {
    SmallFigures { op, size, us: seconds * 1e6, gb_per_s: bytes as f64 / seconds / 1e9, is_memory: true }
}

/// From random logits, which a step before has made.
fn sampling(mut backend: Box<dyn Backend>, of: &Sizes) -> Result<Vec<SmallFigures>, BackendError> {
    let max_rows = of.samples[2];
    backend.set_limits(&limits(max_rows, of.vocab))?;
    let mut random = Random::new(4);
    let mut weight = |rows: usize, usage: WeightUse| {
        let values = random.normals(rows * NARROW);
        let tensor = Tensor::from_f32(rows, NARROW, &values).expect("as many values as the shape says");
        backend.load_weight(&[tensor], usage)
    };
    let table = weight(max_rows, WeightUse::Embedding)?;
    let head = weight(of.vocab, WeightUse::Linear)?;
    let input = backend.create_buffer(max_rows, NARROW)?;
    let output = backend.create_logits(max_rows, of.vocab)?;
    let make = Program::new(vec![
        Op::Embed(Embed { weight: table, scale: 1.0, output: input }),
        Op::Logits(Logits { input, norm: None, weight: head, bias: None, softcap: None, output }),
    ]);
    let make = backend.compile(&make)?;
    let draw = backend.compile(&Program::new(vec![Op::Sample(Sample { logits: output })]))?;
    type Change = fn(&mut SampleRow);
    let kinds: [(&'static str, Change); 4] = [
        ("sampling, greedy", |_| ()),
        ("sampling, temperature", |row| row.temperature = 0.8),
        ("sampling, top-k 50", |row| (row.temperature, row.top_k) = (0.8, 50)),
        ("sampling, top-p 0.9", |row| (row.temperature, row.top_p) = (0.8, 0.9)),
    ];
    let mut figures = Vec::new();
    for (op, change) in kinds {
        for count in of.samples {
            let mut step = tokens(count);
            step.logit_rows = (0..count as u32).collect();
            step_seconds(&mut *backend, &step, make)?;
            step.samples = (0..count as u32).map(SampleRow::greedy).collect();
            for (seed, row) in (0..).zip(&mut step.samples) {
                row.seed = seed;
                change(row);
            }
            let seconds = best(&mut *backend, &step, draw)?;
            figures.push(figure(op, format!("{count} x {}", of.vocab), count * of.vocab * 4, seconds));
        }
    }
    Ok(figures)
}

/// Copies within the device, and swaps to the host and back.
fn blocks(mut backend: Box<dyn Backend>, of: &Sizes) -> Result<Vec<SmallFigures>, BackendError> {
    let block_size = backend.device().block_size;
    let dtype = KvDtype::BF16;
    let spec = KvSpec::full(of.layer, of.layers, dtype, block_size);
    backend.check_kv_spec(&spec)?;
    backend.set_limits(&limits(1, 1))?;
    backend.create_kv_cache(&spec, 2 * NUM_BLOCKS, NUM_BLOCKS)?;
    let bytes = spec.bytes_per_token() * block_size * NUM_BLOCKS;
    let nothing = backend.compile(&Program::default())?;
    let moves = |to: u32| (0..NUM_BLOCKS as u32).map(|from| BlockCopy { from, to: from + to }).collect();
    let copies = StepInput { copies: moves(NUM_BLOCKS as u32), ..StepInput::default() };
    let seconds = best(&mut *backend, &copies, nothing)?;
    let size = format!("{NUM_BLOCKS} blocks, {} MiB", bytes >> 20);
    let mut figures = vec![figure("copying blocks", size.clone(), 2 * bytes, seconds)];
    // Out and in again, each of which waits for the other: half of the time is one way.
    let out = StepInput { swap_out: moves(0), ..StepInput::default() };
    let back = StepInput { swap_in: moves(0), ..StepInput::default() };
    let mut shortest = f64::MAX;
    for _ in 0..RUNS {
        let started = Instant::now();
        for step in [&out, &back, &out, &back] {
            backend.submit(step, nothing)?;
            backend.collect(&mut StepOutput::default())?;
        }
        shortest = shortest.min(started.elapsed().as_secs_f64() / 4.0);
    }
    let swaps = figure("swapping, one way", size, bytes, shortest.max(1e-9));
    figures.push(SmallFigures { is_memory: backend.device().name == "cpu", ..swaps });
    Ok(figures)
}
