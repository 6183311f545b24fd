//! Roughly how fast products are on this machine: `cargo run --release -p baton-cpu --example measure [threads]`.
//!
//! For each format and shape: decode (one token) in GB of packed weights a second, and prompts in GMAC a second. Every
//! shape is loaded several times, so that decodes read from memory and not from the cache.

use std::time::Instant;

use baton_backend::testing::{Random, random_row};
use baton_backend::{
    Backend, BackendError, Embed, Linear, Ops, Program, SharedBytes, StepInput, StepLimits, StepOutput,
    Tensor, WeightFormat, WeightUse,
};
use baton_cpu::{CpuBackend, CpuOptions};

/// `(name, rows, cols)`.
const SHAPES: [(&str, usize, usize); 6] = [
    ("SmolLM2 qkv", 960, 576),
    ("SmolLM2 gate+up", 3072, 576),
    ("SmolLM2 down", 576, 1536),
    ("Llama-1B qkv", 3072, 2048),
    ("Llama-1B gate+up", 16384, 2048),
    ("Llama-1B down", 2048, 8192),
];
/// Weights of one measurement together: several times the last-level cache.
const TOTAL_BYTES: usize = 192 << 20;

struct Products(Vec<Linear>, Embed);

impl Program for Products {
    fn run(&self, ops: &mut dyn Ops) {
        ops.embed(&self.1);
        self.0.iter().for_each(|linear| ops.linear(linear));
    }
}

/// Seconds of one run of the program with this many tokens, the best of several.
fn seconds(backend: &mut CpuBackend, program: &Products, num_tokens: usize) -> Result<f64, BackendError> {
    let count = num_tokens as u32;
    let input = StepInput {
        token_ids: vec![0; num_tokens],
        positions: (0..count).collect(),
        slots: (0..count).collect(),
        ..StepInput::default()
    };
    let mut best = f64::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        backend.submit(&input, program)?;
        best = best.min(start.elapsed().as_secs_f64());
        backend.collect(&mut StepOutput::default())?;
    }
    Ok(best)
}

fn measure(
    format: WeightFormat,
    (name, rows, cols): (&str, usize, usize),
    threads: Option<usize>,
) -> Result<(), BackendError> {
    let mut backend = CpuBackend::new(CpuOptions { threads, ..CpuOptions::default() })?;
    let max_tokens = 512;
    backend.set_limits(&StepLimits {
        max_tokens,
        max_seqs: 1,
        max_logit_rows: 1,
        max_samples: 1,
        max_model_len: max_tokens,
        vocab_size: 1,
    })?;
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
    let many = Products(linears, embed);
    let weight_bytes = backend.weight_bytes() as f64;
    let decode = seconds(&mut backend, &many, 1)?;
    let few = Products(many.0[..copies.min(4)].to_vec(), embed);
    let macs = (few.0.len() * rows * cols) as f64;
    print!("{:6} {name:18} decode {:6.1} GB/s   GMAC/s:", format.to_string(), weight_bytes / decode / 1e9);
    for num_tokens in [1, 4, 8, 64, 512] {
        let seconds = seconds(&mut backend, &few, num_tokens)?;
        print!("  M={num_tokens} {:6.1}", macs * num_tokens as f64 / seconds / 1e9);
    }
    println!();
    Ok(())
}

fn main() -> Result<(), BackendError> {
    let threads = std::env::args().nth(1).and_then(|text| text.parse().ok());
    println!("{}", CpuBackend::new(CpuOptions { threads, ..CpuOptions::default() })?.device().description);
    for format in
        [WeightFormat::Q4_1, WeightFormat::Q8_0, WeightFormat::Q4_K, WeightFormat::Q6_K, WeightFormat::BF16]
    {
        for shape in SHAPES {
            if shape.2 % format.block_len() == 0 {
                measure(format, shape, threads)?;
            }
        }
    }
    Ok(())
}
