//! Compares the AMX kernels with the others on this machine: `cargo run --release -p baton-cpu --example amx [threads]`.
//!
//! For bf16, the k-quants that have tiles and some numbers of tokens: whether a row is the same to the last bit in every batch, how
//! far it is from the portable kernels, and how fast each path is. Fails where a bit differs or a result is too far off.

use std::process::ExitCode;
use std::time::Instant;

use baton_backend::testing::{Random, random_tensor};
use baton_backend::{
    Backend, BackendError, BufferId, Embed, Linear, Op, Program, ProgramId, StepExecutor, StepInput,
    StepLimits, StepOutput, Tensor, WeightFormat, WeightUse,
};
use baton_cpu::{CpuBackend, CpuOptions, Isa, Machine, Peaks};

const ROWS: usize = 3072;
const COLS: usize = 1536;
const MAX_TOKENS: usize = 512;
const TOKENS: [usize; 11] = [1, 2, 4, 8, 9, 13, 16, 32, 67, 256, 512];
/// The fastest of so many runs counts.
const RUNS: usize = 5;

struct Path {
    backend: CpuBackend,
    product: ProgramId,
    output: BufferId,
}

impl Path {
    fn new(isa: Isa, threads: usize, weight: &Tensor, table: &Tensor) -> Result<Self, BackendError> {
        let options =
            CpuOptions { threads: Some(threads), isa: Some(isa), pin: threads > 1, ..CpuOptions::default() };
        let mut backend = CpuBackend::new(options)?;
        backend.set_limits(&StepLimits {
            max_tokens: MAX_TOKENS,
            max_seqs: 1,
            max_logit_rows: 1,
            max_samples: 1,
            max_model_len: MAX_TOKENS,
            vocab_size: MAX_TOKENS,
        })?;
        let table = backend.load_weight(std::slice::from_ref(table), WeightUse::Embedding)?;
        let weight = backend.load_weight(std::slice::from_ref(weight), WeightUse::Linear)?;
        let input = backend.create_buffer(MAX_TOKENS, COLS)?;
        let output = backend.create_buffer(MAX_TOKENS, ROWS)?;
        let linear = Linear { input, norm: None, weight, bias: None, output, accumulate: false };
        let embed = Embed { weight: table, scale: 1.0, output: input };
        let product = backend.compile(&Program::new(vec![Op::Embed(embed), Op::Linear(linear)]))?;
        Ok(Self { backend, product, output })
    }

    /// The result, and billions of multiply-adds a second of the fastest of some runs.
    fn run(&mut self, num_tokens: usize, runs: usize) -> Result<(Vec<f32>, f64), BackendError> {
        let ids: Vec<u32> = (0..num_tokens as u32).collect();
        let input =
            StepInput { token_ids: ids.clone(), positions: ids.clone(), slots: ids, ..StepInput::default() };
        let mut best = f64::MAX;
        for _ in 0..runs {
            let started = Instant::now();
            self.backend.submit(&input, self.product)?;
            self.backend.collect(&mut StepOutput::default())?;
            best = best.min(started.elapsed().as_secs_f64());
        }
        let speed = (num_tokens * ROWS * COLS) as f64 / best / 1e9;
        Ok((self.backend.read_buffer(self.output, num_tokens)?, speed))
    }
}

fn has_same_bits(a: &[f32], b: &[f32]) -> bool {
    a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// The largest difference, as a share of the largest magnitude expected.
fn error(got: &[f32], expected: &[f32]) -> f32 {
    let largest = expected.iter().fold(1e-30f32, |m, x| m.max(x.abs()));
    let difference = |(a, b): (&f32, &f32)| if a.is_nan() { f32::INFINITY } else { (a - b).abs() };
    got.iter().zip(expected).map(difference).fold(0.0f32, f32::max) / largest
}

/// One format with all numbers of tokens; true where all is as it should be.
fn compare(format: WeightFormat, threads: usize) -> Result<bool, BackendError> {
    let mut random = Random::new(7);
    let weight = random_tensor(format, ROWS, COLS, 1.0, &mut random);
    let table =
        Tensor::from_f32(MAX_TOKENS, COLS, &random.normals(MAX_TOKENS * COLS)).expect("the shape is right");
    let path = |isa| Path::new(isa, threads, &weight, &table);
    // The slow one once: what it says of a row does not depend on the others.
    let (portable, _) = path(Isa::Portable)?.run(MAX_TOKENS, 1)?;
    let (mut amx, mut vnni) = (path(Isa::Amx)?, path(Isa::Avx512Vnni)?);
    let (all, _) = amx.run(MAX_TOKENS, 1)?;
    let mut is_right = true;
    for num_tokens in TOKENS {
        let (got, amx_speed) = amx.run(num_tokens, RUNS)?;
        let (_, vnni_speed) = vnni.run(num_tokens, RUNS)?;
        let same = has_same_bits(&got, &all);
        let error = error(&got, &portable);
        println!(
            "{:6} {num_tokens:4} tokens: {} other batches, {error:.1e} from portable, GMAC/s: amx {amx_speed:7.1}, avx512 {vnni_speed:7.1} ({:.2}x)",
            format.to_string(),
            if same { "equals" } else { "DIFFERS from" },
            amx_speed / vnni_speed
        );
        // The portable path rounds products and sums one by one; with k-quants it has a scale for every 32 activations.
        is_right &= same && error < if format.is_float() { 2e-5 } else { 1e-2 };
    }
    Ok(is_right)
}

fn print_machine() {
    let machine = Machine::read();
    println!("{machine}; threads unless told otherwise: {}", machine.default_threads());
    let mut nodes: Vec<usize> = machine.cores.iter().map(|core| core.node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    for node in nodes {
        let of_node = |first: usize, last: usize| -> Vec<usize> {
            machine.cores[first..last].iter().filter(|core| core.node == node).map(|core| core.id).collect()
        };
        let (first, others) =
            (of_node(0, machine.num_physical), of_node(machine.num_physical, machine.cores.len()));
        println!("node {node}: a core of each physical one {first:?}, their siblings {others:?}");
    }
}

fn run(threads: usize) -> Result<bool, BackendError> {
    for isa in [Isa::Amx, Isa::Avx512Vnni] {
        let peaks = Peaks::measure(Some(isa), threads)?;
        print!("{isa}, {threads} threads, at best GMAC/s: {:.0} of bytes", peaks.dot_gmac_per_s);
        print!(", {:.0} of f32", peaks.fma_gmac_per_s);
        println!("{}", peaks.bf16_gmac_per_s.map_or_else(String::new, |peak| format!(", {peak:.0} of bf16")));
    }
    println!("(a product with a bf16 weight takes two of bf16's)");
    let mut is_right = true;
    for format in [WeightFormat::BF16, WeightFormat::Q4_K, WeightFormat::Q5_K, WeightFormat::Q6_K] {
        is_right &= compare(format, threads)?;
    }
    Ok(is_right)
}

fn main() -> ExitCode {
    let threads = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(1);
    print_machine();
    println!("taken unasked: {}", Isa::best());
    if !Isa::Amx.is_available() {
        println!("skipped: this processor, or the system, has no AMX");
        return ExitCode::SUCCESS;
    }
    match run(threads) {
        Ok(true) => {
            println!("all right");
            ExitCode::SUCCESS
        }
        Ok(false) => {
            println!("results differ");
            ExitCode::FAILURE
        }
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}
