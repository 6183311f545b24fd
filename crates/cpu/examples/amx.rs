//! Compares the AMX kernels with the others on this machine: `cargo run --release -p baton-cpu --example amx [threads]`.
//!
//! For each quantised format and some numbers of tokens: whether the results are those of VNNI to the last bit, how far
//! they are from the portable kernels, and how fast each path is. Fails where a bit differs.

use std::process::ExitCode;
use std::time::Instant;

use baton_backend::testing::{Random, random_tensor};
use baton_backend::{
    Backend, BackendError, BufferId, Embed, Linear, Ops, Program, StepInput, StepLimits, StepOutput, Tensor,
    WeightFormat, WeightUse,
};
use baton_cpu::{CpuBackend, CpuOptions, Isa, Peaks};

const ROWS: usize = 3072;
const COLS: usize = 1536;
const MAX_TOKENS: usize = 512;
const RUNS: usize = 5;

struct Product(Embed, Linear);

impl Program for Product {
    fn run(&self, ops: &mut dyn Ops) {
        ops.embed(&self.0);
        ops.linear(&self.1);
    }
}

struct Path {
    backend: CpuBackend,
    product: Product,
    output: BufferId,
}

impl Path {
    fn new(isa: Isa, threads: usize, weight: &Tensor, table: &Tensor) -> Result<Self, BackendError> {
        let options = CpuOptions { threads: Some(threads), isa: Some(isa), pin: false };
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
        Ok(Self {
            backend,
            product: Product(Embed { weight: table, scale: 1.0, output: input }, linear),
            output,
        })
    }

    /// The result, and billions of multiply-adds a second.
    fn run(&mut self, num_tokens: usize) -> Result<(Vec<f32>, f64), BackendError> {
        let ids: Vec<u32> = (0..num_tokens as u32).collect();
        let input =
            StepInput { token_ids: ids.clone(), positions: ids.clone(), slots: ids, ..StepInput::default() };
        let mut best = f64::MAX;
        for _ in 0..RUNS {
            let started = Instant::now();
            self.backend.submit(&input, &self.product)?;
            self.backend.collect(&mut StepOutput::default())?;
            best = best.min(started.elapsed().as_secs_f64());
        }
        let speed = (num_tokens * ROWS * COLS) as f64 / best / 1e9;
        Ok((self.backend.read_buffer(self.output, num_tokens)?, speed))
    }
}

fn compare(format: WeightFormat, threads: usize) -> Result<bool, BackendError> {
    let mut random = Random::new(7);
    let weight = random_tensor(format, ROWS, COLS, 1.0, &mut random);
    let table =
        Tensor::from_f32(MAX_TOKENS, COLS, &random.normals(MAX_TOKENS * COLS)).expect("the shape is right");
    let mut paths = Vec::new();
    for isa in [Isa::Amx, Isa::Avx512Vnni, Isa::Portable] {
        paths.push(Path::new(isa, threads, &weight, &table)?);
    }
    let mut is_equal = true;
    for num_tokens in [1, 5, 8, 13, 16, 64, 512] {
        let results = paths.iter_mut().map(|path| path.run(num_tokens)).collect::<Result<Vec<_>, _>>()?;
        let [(amx, amx_speed), (vnni, vnni_speed), (portable, _)] = &results[..] else {
            unreachable!("three paths");
        };
        let same = amx.iter().zip(vnni).all(|(a, b)| a.to_bits() == b.to_bits());
        let largest = portable.iter().fold(1e-30f32, |m, x| m.max(x.abs()));
        let error = amx.iter().zip(portable).fold(0.0f32, |m, (a, b)| m.max((a - b).abs())) / largest;
        println!(
            "{:6} {num_tokens:4} tokens: {} VNNI, {error:.1e} from portable, GMAC/s: amx {amx_speed:7.1}, vnni {vnni_speed:7.1} ({:.2}x)",
            format.to_string(),
            if same { "equals " } else { "DIFFERS from" },
            amx_speed / vnni_speed
        );
        // The portable path rounds products and sums one by one.
        is_equal &= same && error < 1e-4;
    }
    Ok(is_equal)
}

fn main() -> ExitCode {
    if !Isa::Amx.is_available() {
        println!("skipped: this processor, or the system, has no AMX");
        return ExitCode::SUCCESS;
    }
    let threads = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(1);
    let run = || -> Result<bool, BackendError> {
        for isa in [Isa::Amx, Isa::Avx512Vnni] {
            let peaks = Peaks::measure(Some(isa), threads)?;
            println!("{isa}, {threads} threads, at best: {:.0} GMAC/s of bytes", peaks.dot_gmac_per_s);
        }
        let mut is_equal = true;
        for format in WeightFormat::ALL.into_iter().filter(|format| !format.is_float()) {
            is_equal &= compare(format, threads)?;
        }
        Ok(is_equal)
    };
    match run() {
        Ok(true) => {
            println!("all equal");
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
