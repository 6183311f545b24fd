//! `baton bench kernels`: how fast a device multiplies, for each weight format and shape, beside how fast this machine
//! reads memory. Decoding reads every weight once a token, so its limit is the memory; prompts are limited by arithmetic.
//!
//! It speaks to the device through [`Backend`] alone, so every device offers it. Each shape is loaded several times over,
//! so that decodes read from memory and not from a cache.

use std::time::Instant;

use baton_backend::testing::{Random, random_row};
use baton_backend::{
    Backend, BackendError, Embed, Linear, Ops, Program, SharedBytes, StepInput, StepLimits, StepOutput,
    Tensor, WeightFormat, WeightUse,
};
use indicatif::ProgressBar;
use serde_json::{Map, Value, json};

use crate::BenchError;

/// `(name, rows, cols)`.
const SHAPES: [(&str, usize, usize); 6] = [
    ("SmolLM2 qkv", 960, 576),
    ("SmolLM2 gate+up", 3072, 576),
    ("SmolLM2 down", 576, 1536),
    ("Llama-1B qkv", 3072, 2048),
    ("Llama-1B gate+up", 16384, 2048),
    ("Llama-1B down", 2048, 8192),
];
/// Rows of a step: a decode, small batches, a batch, a chunk of a prompt.
pub const ROWS: [usize; 5] = [1, 4, 8, 64, 512];
/// Weights of one measurement together: several times the last-level cache.
const TOTAL_BYTES: usize = 192 << 20;
/// The best of so many runs counts: others are disturbed.
const RUNS: usize = 5;

/// One format in one shape.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelFigures {
    pub format: WeightFormat,
    pub shape: &'static str,
    /// Packed weights read a second by a step of one row.
    pub decode_gb_per_s: f64,
    /// Products a second, for each of [`ROWS`].
    pub gmac_per_s: [f64; ROWS.len()],
}

/// Measures every shape for each format. `open` opens the device anew for each, since buffers are made once.
pub fn kernels(
    open: &dyn Fn() -> Result<Box<dyn Backend>, BenchError>,
    formats: &[WeightFormat],
    bar: &ProgressBar,
) -> Result<Vec<KernelFigures>, BenchError> {
    let cases: Vec<_> = formats
        .iter()
        .flat_map(|&format| SHAPES.map(|shape| (format, shape)))
        .filter(|(format, (_, _, cols))| cols % format.block_len() == 0)
        .collect();
    bar.set_length(cases.len() as u64);
    let mut figures = Vec::with_capacity(cases.len());
    for (format, shape) in cases {
        bar.set_message(format!("{format} {}", shape.0));
        figures.push(measure(open()?, format, shape).map_err(|error| BenchError::Failed(error.to_string()))?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(figures)
}

struct Products {
    embed: Embed,
    linears: Vec<Linear>,
}

impl Program for Products {
    fn run(&self, ops: &mut dyn Ops) {
        ops.embed(&self.embed);
        self.linears.iter().for_each(|linear| ops.linear(linear));
    }
}

fn measure(
    mut backend: Box<dyn Backend>,
    format: WeightFormat,
    (shape, rows, cols): (&'static str, usize, usize),
) -> Result<KernelFigures, BackendError> {
    let max_tokens = ROWS[ROWS.len() - 1];
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
    let shape_is_right = "the shape is a multiple of the format's block";
    let tensor = Tensor::new(format, rows, cols, SharedBytes::from_vec(bytes)).expect(shape_is_right);
    let row = Tensor::from_f32(1, cols, &random.normals(cols)).expect(shape_is_right);
    let table = backend.load_weight(&[row], WeightUse::Embedding)?;
    let input = backend.create_buffer(max_tokens, cols)?;
    let output = backend.create_buffer(max_tokens, rows)?;
    let mut linears = Vec::with_capacity(copies);
    for _ in 0..copies {
        let weight = backend.load_weight(std::slice::from_ref(&tensor), WeightUse::Linear)?;
        linears.push(Linear { input, norm: None, weight, bias: None, output, accumulate: false });
    }
    let embed = Embed { weight: table, scale: 1.0, output: input };
    let weight_bytes = backend.weight_bytes() as f64;
    let many = Products { embed, linears };
    let decode_s = seconds(&mut *backend, &many, 1)?;
    // A few are enough where arithmetic is the limit.
    let few = Products { embed, linears: many.linears[..copies.min(4)].to_vec() };
    let macs = (few.linears.len() * rows * cols) as f64;
    let mut gmac_per_s = [0.0; ROWS.len()];
    for (figure, num_rows) in gmac_per_s.iter_mut().zip(ROWS) {
        *figure = macs * num_rows as f64 / seconds(&mut *backend, &few, num_rows)? / 1e9;
    }
    Ok(KernelFigures { format, shape, decode_gb_per_s: weight_bytes / decode_s / 1e9, gmac_per_s })
}

/// Seconds of one run of the program with this many rows.
fn seconds(backend: &mut dyn Backend, program: &Products, num_rows: usize) -> Result<f64, BackendError> {
    let count = num_rows as u32;
    let input = StepInput {
        token_ids: vec![0; num_rows],
        positions: (0..count).collect(),
        slots: (0..count).collect(),
        ..StepInput::default()
    };
    let mut best = f64::MAX;
    for _ in 0..RUNS {
        let started = Instant::now();
        backend.submit(&input, program)?;
        backend.collect(&mut StepOutput::default())?;
        best = best.min(started.elapsed().as_secs_f64());
    }
    Ok(best.max(1e-9))
}

/// How fast `threads` threads read memory that is in no cache, in GB a second.
pub fn memory_gb_per_s(threads: usize) -> f64 {
    let words = TOTAL_BYTES / size_of::<u64>() / threads.max(1);
    let parts: Vec<Vec<u64>> = (0..threads.max(1)).map(|part| vec![part as u64 + 1; words]).collect();
    let mut best = f64::MAX;
    for _ in 0..RUNS {
        let started = Instant::now();
        let sum: u64 = std::thread::scope(|scope| {
            let readers: Vec<_> = parts
                .iter()
                .map(|part| scope.spawn(|| part.iter().fold(0_u64, |sum, &word| sum ^ word)))
                .collect();
            readers.into_iter().map(|reader| reader.join().unwrap_or(0)).fold(0, |a, b| a ^ b)
        });
        std::hint::black_box(sum);
        best = best.min(started.elapsed().as_secs_f64());
    }
    (parts.len() * words * size_of::<u64>()) as f64 / best.max(1e-9) / 1e9
}

/// A line for each case.
pub fn kernels_table(figures: &[KernelFigures]) -> String {
    use std::fmt::Write;
    let mut text = format!("{:<8} {:<18} {:>12}  GMAC/s:", "format", "shape", "decode GB/s");
    for rows in ROWS {
        let _ = write!(text, " {:>8}", format!("M={rows}"));
    }
    text.push('\n');
    for one in figures {
        let _ = write!(
            text,
            "{:<8} {:<18} {:>12.1}         ",
            one.format.to_string(),
            one.shape,
            one.decode_gb_per_s
        );
        for figure in one.gmac_per_s {
            let _ = write!(text, " {figure:>8.1}");
        }
        text.push('\n');
    }
    text
}

pub fn kernels_json(figures: &[KernelFigures]) -> Map<String, Value> {
    let one = |one: &KernelFigures| {
        let rates: Map<String, Value> =
            ROWS.iter().zip(one.gmac_per_s).map(|(rows, rate)| (rows.to_string(), json!(rate))).collect();
        json!({
            "format": one.format.to_string(),
            "shape": one.shape,
            "decode_gb_per_s": one.decode_gb_per_s,
            "gmac_per_s": rates,
        })
    };
    let mut map = Map::new();
    map.insert("kernels".to_owned(), figures.iter().map(one).collect());
    map
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_backend::{MockBackend, MockOptions};

    #[test]
    fn every_shape_that_fits_a_format_is_measured() {
        let open = || Ok(Box::new(MockBackend::new(MockOptions::default())) as Box<dyn Backend>);
        let formats = [WeightFormat::Q8_0, WeightFormat::Q4_K];
        let figures = kernels(&open, &formats, &ProgressBar::hidden()).unwrap();
        // Blocks of 256 do not divide 576 columns.
        assert_eq!(figures.len(), 6 + 4);
        assert!(figures.iter().all(|one| one.gmac_per_s.iter().all(|rate| *rate > 0.0)));
        let table = kernels_table(&figures);
        assert_eq!(table.lines().count(), 11);
        assert_eq!(kernels_json(&figures)["kernels"].as_array().map(Vec::len), Some(10));
    }
}
