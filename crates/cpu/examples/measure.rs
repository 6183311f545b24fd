//! How fast the kernels are, as a share of what this machine can do:
//! `cargo run --release -p baton-cpu --example measure [threads] [tokens of context]`.
//!
//! First the limits, measured here and now: 8-bit dot products, f32 multiply-adds, reads from memory. Then for each
//! format and shape decode (one token) in GB of packed weights a second and prompts in GMAC a second; then attention.
//! With one thread all times are the thread's own time on a core, so that they mean something on a busy machine.
//! Every shape is loaded several times, so that decodes read from memory and not from the cache.

use std::time::Instant;

use baton_backend::testing::{Random, random_row};
use baton_backend::{
    Attention, AttentionPlan, Backend, BackendError, Embed, KvDtype, KvLayerSpec, KvSpec, Linear, Ops,
    PlannerOptions, Program, Qkv, SequenceQueries, SharedBytes, StepInput, StepLimits, StepOutput, Tensor,
    WeightFormat, WeightUse, plan_attention,
};
use baton_cpu::{CpuBackend, CpuOptions};

/// `(name, rows, cols)`.
const SHAPES: [(&str, usize, usize); 5] = [
    ("SmolLM2 qkv", 960, 576),
    ("SmolLM2 gate+up", 3072, 576),
    ("SmolLM2 down", 576, 1536),
    ("Qwen-1.5B gate+up", 17920, 1536),
    ("Qwen-1.5B down", 1536, 8960),
];
/// Weights of one measurement together: several times the last-level cache.
const TOTAL_BYTES: usize = 192 << 20;
const ROUNDS: usize = 5;

/// Seconds: of this thread on a core if there is one thread, else of the clock on the wall.
#[derive(Clone, Copy)]
enum Clock {
    Thread,
    Wall(Instant),
}

impl Clock {
    fn seconds(self) -> f64 {
        match self {
            Self::Wall(start) => start.elapsed().as_secs_f64(),
            Self::Thread => {
                let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
                // SAFETY: the call fills the structure it is given.
                unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
                time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
            }
        }
    }

    /// The least of several runs.
    fn best<T>(self, rounds: usize, mut work: impl FnMut() -> T) -> f64 {
        let once = |work: &mut dyn FnMut() -> T| {
            let start = self.seconds();
            std::hint::black_box(work());
            self.seconds() - start
        };
        (0..rounds).map(|_| once(&mut work)).fold(f64::MAX, f64::min)
    }
}

/// What one thread can do at best.
struct Limits {
    dot_gmacs: f64,
    fma_gmacs: f64,
    read_gigabytes: f64,
}

#[cfg(target_arch = "x86_64")]
mod peak {
    use std::arch::x86_64::{_mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_reduce_add_epi32};
    use std::arch::x86_64::{_mm512_reduce_add_ps, _mm512_set1_epi32, _mm512_set1_ps};

    const CHAINS: usize = 12;

    /// `rounds · 12 · 64` multiply-adds of bytes.
    #[target_feature(enable = "avx2,fma,avx512f,avx512vnni")]
    pub fn dot(rounds: usize) -> i32 {
        let x = _mm512_set1_epi32(std::hint::black_box(0x0102_0304));
        let mut sums = [x; CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, x, x);
            }
        }
        sums.iter().map(|&sum| _mm512_reduce_add_epi32(sum)).fold(0, i32::wrapping_add)
    }

    /// `rounds · 12 · 16` multiply-adds of f32.
    #[target_feature(enable = "avx2,fma,avx512f")]
    pub fn fma(rounds: usize) -> f32 {
        let x = _mm512_set1_ps(std::hint::black_box(0.5));
        let mut sums = [x; CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, x, x);
            }
        }
        sums.iter().map(|&sum| _mm512_reduce_add_ps(sum)).sum()
    }
}

#[cfg(target_arch = "x86_64")]
fn peaks() -> (f64, f64) {
    let rounds = 2_000_000;
    let work = (rounds * 12) as f64 / 1e9;
    let (mut dot, mut fma) = (f64::NAN, f64::NAN);
    if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni") {
        // SAFETY: the processor has the instructions.
        dot = 64.0 * work / Clock::Thread.best(ROUNDS, || unsafe { peak::dot(rounds) });
        // SAFETY: as above.
        fma = 16.0 * work / Clock::Thread.best(ROUNDS, || unsafe { peak::fma(rounds) });
    }
    (dot, fma)
}

#[cfg(not(target_arch = "x86_64"))]
fn peaks() -> (f64, f64) {
    (f64::NAN, f64::NAN)
}

fn limits() -> Limits {
    let (dot_gmacs, fma_gmacs) = peaks();
    let words = vec![1u64; TOTAL_BYTES / 8];
    let seconds = Clock::Thread.best(ROUNDS, || words.iter().fold(0u64, |sum, &word| sum.wrapping_add(word)));
    Limits { dot_gmacs, fma_gmacs, read_gigabytes: TOTAL_BYTES as f64 / seconds / 1e9 }
}

enum Op {
    Linear(Linear),
    Qkv(Qkv),
    Attention(Attention),
}

struct List(Embed, Vec<Op>);

impl Program for List {
    fn run(&self, ops: &mut dyn Ops) {
        ops.embed(&self.0);
        for op in &self.1 {
            match op {
                Op::Linear(op) => ops.linear(op),
                Op::Qkv(op) => ops.qkv(op),
                Op::Attention(op) => ops.attention(op),
            }
        }
    }
}

fn backend(threads: usize, max_tokens: usize) -> Result<CpuBackend, BackendError> {
    let mut backend = CpuBackend::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() })?;
    backend.set_limits(&StepLimits {
        max_tokens,
        max_seqs: 1,
        max_logit_rows: 1,
        max_samples: 1,
        max_model_len: 1 << 20,
        vocab_size: 1,
    })?;
    Ok(backend)
}

fn step(backend: &mut CpuBackend, input: &StepInput, program: &List) {
    backend.submit(input, program).expect("the step is valid");
    backend.collect(&mut StepOutput::default()).expect("a step is in flight");
}

/// The step of tokens `first..first + count` of one sequence, with their attention.
fn tokens(first: usize, count: usize) -> StepInput {
    let positions: Vec<u32> = (first..first + count).map(|position| position as u32).collect();
    let mut input = StepInput {
        token_ids: vec![0; count],
        slots: positions.clone(),
        positions,
        pages: (0..(first + count).div_ceil(16) as u32).collect(),
        ..StepInput::default()
    };
    let sequence = SequenceQueries {
        query_start: 0,
        num_queries: count as u32,
        first_position: first as u32,
        pages_start: 0,
    };
    let options = PlannerOptions {
        block_size: 16,
        window: None,
        max_kv_per_item: 0,
        max_queries_per_item: 0,
        max_split_queries: 0,
    };
    let mut plan = AttentionPlan::default();
    plan_attention(&[sequence], &options, &mut plan);
    input.attention.push(plan);
    input
}

fn measure(
    format: WeightFormat,
    (name, rows, cols): (&str, usize, usize),
    threads: usize,
    clock: Clock,
    limits: &Limits,
) -> Result<(), BackendError> {
    let max_tokens = 512;
    let mut backend = backend(threads, max_tokens)?;
    let mut random = Random::new(1);
    // One random row many times over: the speed does not depend on the values.
    let bytes = random_row(format, cols, 1.0, &mut random).repeat(rows);
    let copies = (TOTAL_BYTES / bytes.len()).max(1);
    let tensor = Tensor::new(format, rows, cols, SharedBytes::from_vec(bytes)).expect("the shape is right");
    let row = Tensor::from_f32(1, cols, &random.normals(cols)).expect("the shape is right");
    let table = backend.load_weight(&[row], WeightUse::Embedding)?;
    let input = backend.create_buffer(max_tokens, cols)?;
    let output = backend.create_buffer(max_tokens, rows)?;
    let mut linears = Vec::new();
    for _ in 0..copies {
        let weight = backend.load_weight(std::slice::from_ref(&tensor), WeightUse::Linear)?;
        linears.push(Linear { input, norm: None, weight, bias: None, output, accumulate: false });
    }
    let embed = Embed { weight: table, scale: 1.0, output: input };
    let program =
        |count: usize| List(embed, linears[..count].iter().map(|&linear| Op::Linear(linear)).collect());
    let many = program(copies);
    let gigabytes = backend.weight_bytes() as f64 / 1e9;
    let plain = |count: usize| StepInput {
        token_ids: vec![0; count],
        positions: (0..count as u32).collect(),
        slots: (0..count as u32).collect(),
        ..StepInput::default()
    };
    let decode = gigabytes / clock.best(ROUNDS, || step(&mut backend, &plain(1), &many));
    let share = 100.0 * decode / limits.read_gigabytes / threads as f64;
    print!("{format:6} {name:18} decode {decode:5.1} GB/s ({share:3.0} %)  GMAC/s:");
    let few = copies.min(4);
    let macs = (few * rows * cols) as f64 / 1e9;
    let few = program(few);
    for count in [4, 8, 64, 512] {
        let input = plain(count);
        let speed = macs * count as f64 / clock.best(ROUNDS, || step(&mut backend, &input, &few));
        let peak = if format.is_float() { limits.fma_gmacs } else { limits.dot_gmacs };
        print!("  M={count} {speed:5.1} ({:2.0} %)", 100.0 * speed / peak / threads as f64);
    }
    println!();
    Ok(())
}

/// Attention of SmolLM2's shape: a prompt of `context` tokens, and one token after it.
fn measure_attention(
    context: usize,
    dtype: KvDtype,
    threads: usize,
    clock: Clock,
    limits: &Limits,
) -> Result<(), BackendError> {
    const LAYERS: usize = 8;
    let (num_heads, num_kv_heads, head_dim, hidden) = (9, 3, 64, 32);
    let mut backend = backend(threads, context)?;
    let mut random = Random::new(2);
    let mut tensor =
        |rows: usize| Tensor::from_f32(rows, hidden, &random.normals(rows * hidden)).expect("shape");
    let (row, rows) = (tensor(1), (num_heads + 2 * num_kv_heads) * head_dim);
    let table = backend.load_weight(&[row], WeightUse::Embedding)?;
    let weight = backend.load_weight(&[tensor(rows)], WeightUse::Linear)?;
    let layer = KvLayerSpec { num_kv_heads, head_dim };
    let spec = KvSpec { layers: vec![layer; LAYERS], dtype, block_size: 16 };
    backend.create_kv_cache(&spec, context.div_ceil(16) + 1, 0)?;
    let input = backend.create_buffer(context, hidden)?;
    let query = backend.create_buffer(context, num_heads * head_dim)?;
    let output = backend.create_buffer(context, num_heads * head_dim)?;
    let embed = Embed { weight: table, scale: 1.0, output: input };
    let qkv = |layer| {
        let none = None;
        let (q_norm, k_norm) = (none, none);
        Op::Qkv(Qkv {
            input,
            norm: None,
            weight,
            bias: None,
            q_norm,
            k_norm,
            rope: None,
            num_heads,
            layer,
            output: query,
        })
    };
    let scale = 0.125;
    let attention = |layer| {
        let (softcap, alibi) = (None, None);
        Op::Attention(Attention {
            layer,
            plan: 0,
            window: None,
            num_heads,
            scale,
            softcap,
            alibi,
            query,
            output,
        })
    };
    let prompt = tokens(0, context);
    step(&mut backend, &prompt, &List(embed, (0..LAYERS).map(qkv).collect()));
    let only = List(embed, (0..LAYERS).map(attention).collect());
    let seconds = clock.best(3, || step(&mut backend, &prompt, &only));
    let pairs = (context * (context + 1) / 2 * num_heads) as f64;
    let speed = pairs * (2 * head_dim * LAYERS) as f64 / seconds / 1e9;
    let share = 100.0 * speed / limits.fma_gmacs / threads as f64;
    print!("attention {dtype:?} context {context:5}: prompt {speed:5.1} GMAC/s ({share:2.0} %)");
    let one = tokens(context - 1, 1);
    let seconds = clock.best(2 * ROUNDS, || step(&mut backend, &one, &only));
    let gigabytes = (context * num_kv_heads * head_dim * 2 * dtype.bytes() * LAYERS) as f64 / 1e9;
    println!(", decode {:5.1} GB/s, {:.1} us a layer", gigabytes / seconds, seconds * 1e6 / LAYERS as f64);
    Ok(())
}

fn main() -> Result<(), BackendError> {
    let argument = |n: usize| std::env::args().nth(n).and_then(|text| text.parse().ok());
    let threads: usize = argument(1).unwrap_or(1);
    let clock = if threads == 1 { Clock::Thread } else { Clock::Wall(Instant::now()) };
    println!("{}", backend(threads, 1)?.device().description);
    let limits = limits();
    println!(
        "one thread: {:.0} GMAC/s of bytes, {:.0} GMAC/s of f32, {:.1} GB/s read",
        limits.dot_gmacs, limits.fma_gmacs, limits.read_gigabytes
    );
    for context in argument(2).map_or(vec![512, 2048, 8192], |context| vec![context]) {
        measure_attention(context, KvDtype::F16, threads, clock, &limits)?;
    }
    for format in [
        WeightFormat::Q4_1,
        WeightFormat::Q4_0,
        WeightFormat::Q8_0,
        WeightFormat::Q4_K,
        WeightFormat::Q6_K,
        WeightFormat::BF16,
    ] {
        for shape in SHAPES {
            if shape.2 % format.block_len() == 0 {
                measure(format, shape, threads, clock, &limits)?;
            }
        }
    }
    Ok(())
}
