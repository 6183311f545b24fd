//! `baton bench kernels`: how fast a device multiplies, for each weight format and shape, and attends, beside what this
//! machine can do at best, measured in the same run. Decoding reads every weight once a token, so its limit is the memory;
//! prompts are limited by arithmetic.
//!
//! It speaks to the device through [`Backend`] alone, so every device offers it. Each shape is loaded several times over,
//! so that decodes read from memory and not from a cache.

use std::time::Instant;

use baton_backend::testing::{Random, random_row};
use baton_backend::{
    Backend, BackendError, Embed, KvDtype, Linear, Ops, Program, SharedBytes, StepInput, StepLimits,
    StepOutput, Tensor, WeightFormat, WeightUse,
};
use indicatif::ProgressBar;
use serde_json::{Map, Value, json};

use crate::BenchError;
use crate::kernels_attention::{self, AttentionFigures, CONTEXTS, HEADS};

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

/// What the machine can do at best; nothing is known of other devices than the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KernelLimits {
    /// Reads from memory: of decodes.
    pub memory_gb_per_s: Option<f64>,
    /// Multiply-adds of bytes: of quantised weights.
    pub dot_gmac_per_s: Option<f64>,
    /// Multiply-adds of f32: of float weights and attention.
    pub fma_gmac_per_s: Option<f64>,
    /// Multiply-adds of bf16 in tiles, where there are any: a value of a product with a bf16 weight takes two of
    /// them.
    pub bf16_gmac_per_s: Option<f64>,
}

/// All that was measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KernelsResult {
    pub limits: KernelLimits,
    pub products: Vec<KernelFigures>,
    pub attention: Vec<AttentionFigures>,
}

/// What is to be measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KernelsOptions {
    pub limits: KernelLimits,
    pub formats: Vec<WeightFormat>,
    pub kv_dtypes: Vec<KvDtype>,
}

/// Measures every shape for each format. `open` opens the device anew for each, since buffers are made once.
pub fn kernels(
    open: &dyn Fn() -> Result<Box<dyn Backend>, BenchError>,
    options: &KernelsOptions,
    bar: &ProgressBar,
) -> Result<KernelsResult, BenchError> {
    let failed = |error: BackendError| BenchError::Failed(error.to_string());
    let formats = &options.formats;
    let cases: Vec<_> = formats
        .iter()
        .flat_map(|&format| SHAPES.map(|shape| (format, shape)))
        .filter(|(format, (_, _, cols))| cols % format.block_len() == 0)
        .collect();
    bar.set_length((cases.len() + options.kv_dtypes.len() * HEADS.len() * CONTEXTS.len()) as u64);
    let mut result = KernelsResult { limits: options.limits, ..KernelsResult::default() };
    for (format, shape) in cases {
        bar.set_message(format!("{format} {}", shape.0));
        result.products.push(measure(open()?, format, shape).map_err(failed)?);
        bar.inc(1);
    }
    for &dtype in &options.kv_dtypes {
        for (heads, context) in HEADS.iter().flat_map(|&heads| CONTEXTS.map(|context| (heads, context))) {
            bar.set_message(format!("attention {dtype:?} {} {context}", heads.0));
            let figures = kernels_attention::measure(open()?, heads, dtype, context).map_err(failed)?;
            result.attention.push(figures);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(result)
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

/// A figure, and its share of a limit that is known.
fn with_share(figure: f64, limit: Option<f64>) -> String {
    match limit {
        Some(limit) => format!("{figure:.1} ({:.0} %)", 100.0 * figure / limit.max(1e-9)),
        None => format!("{figure:.1}"),
    }
}

impl KernelLimits {
    /// The higher ones of two measurements.
    #[must_use]
    pub fn best(self, other: Self) -> Self {
        let higher = |a: Option<f64>, b: Option<f64>| [a, b].into_iter().flatten().reduce(f64::max);
        Self {
            memory_gb_per_s: higher(self.memory_gb_per_s, other.memory_gb_per_s),
            dot_gmac_per_s: higher(self.dot_gmac_per_s, other.dot_gmac_per_s),
            fma_gmac_per_s: higher(self.fma_gmac_per_s, other.fma_gmac_per_s),
            bf16_gmac_per_s: higher(self.bf16_gmac_per_s, other.bf16_gmac_per_s),
        }
    }

    /// Of the products of a format.
    fn gmac_per_s(&self, format: WeightFormat) -> Option<f64> {
        match format {
            WeightFormat::BF16 => self.bf16_gmac_per_s.map(|limit| limit / 2.0).or(self.fma_gmac_per_s),
            WeightFormat::F32 | WeightFormat::F16 => self.fma_gmac_per_s,
            _ => self.dot_gmac_per_s,
        }
    }
}

/// A line for each case, with shares of the limits where these are known.
pub fn kernels_table(result: &KernelsResult) -> String {
    use std::fmt::Write;
    let limits = &result.limits;
    let mut text = String::new();
    for (limit, unit, what) in [
        (limits.memory_gb_per_s, "GB/s", "read from memory: the limit of decodes"),
        (limits.dot_gmac_per_s, "GMAC/s", "of bytes: the limit of quantised weights"),
        (limits.fma_gmac_per_s, "GMAC/s", "of f32: the limit of float weights and of attention"),
        (limits.bf16_gmac_per_s, "GMAC/s", "of bf16 in tiles: twice the limit of bf16 weights"),
    ] {
        if let Some(limit) = limit {
            let _ = writeln!(text, "{limit:>8.1} {unit} {what}");
        }
    }
    let _ = write!(text, "\n{:<8} {:<18} {:>14}  GMAC/s:", "format", "shape", "decode GB/s");
    for rows in ROWS {
        let _ = write!(text, " {:>14}", format!("M={rows}"));
    }
    text.push('\n');
    for one in &result.products {
        let decode = with_share(one.decode_gb_per_s, limits.memory_gb_per_s);
        let _ = write!(text, "{:<8} {:<18} {decode:>14}         ", one.format.to_string(), one.shape);
        for figure in one.gmac_per_s {
            let _ = write!(text, " {:>14}", with_share(figure, limits.gmac_per_s(one.format)));
        }
        text.push('\n');
    }
    if result.attention.is_empty() {
        return text;
    }
    let _ = writeln!(
        text,
        "\n{:<8} {:<10} {:>8} {:>14} {:>10} {:>16}",
        "cache", "attention", "context", "decode GB/s", "us/layer", "prompt GMAC/s"
    );
    for one in &result.attention {
        let decode = with_share(one.decode_gb_per_s, limits.memory_gb_per_s);
        let prompt = with_share(one.prompt_gmac_per_s, limits.fma_gmac_per_s);
        let _ = writeln!(
            text,
            "{:<8} {:<10} {:>8} {decode:>14} {:>10.1} {prompt:>16}",
            format!("{:?}", one.kv_dtype).to_lowercase(),
            one.heads,
            one.context,
            one.decode_us
        );
    }
    text
}

pub fn kernels_json(result: &KernelsResult) -> Map<String, Value> {
    let limits = &result.limits;
    let share = |figure: f64, limit: Option<f64>| limit.map(|limit| figure / limit);
    let one = |one: &KernelFigures| {
        let by_rows = |value: &dyn Fn(f64) -> Value| -> Map<String, Value> {
            ROWS.iter().zip(one.gmac_per_s).map(|(rows, rate)| (rows.to_string(), value(rate))).collect()
        };
        let limit = limits.gmac_per_s(one.format);
        json!({
            "format": one.format.to_string(),
            "shape": one.shape,
            "decode_gb_per_s": one.decode_gb_per_s,
            "decode_share_of_memory": share(one.decode_gb_per_s, limits.memory_gb_per_s),
            "gmac_per_s": by_rows(&|rate| json!(rate)),
            "share_of_peak": by_rows(&|rate| json!(share(rate, limit))),
        })
    };
    let attention = |one: &AttentionFigures| {
        json!({
            "kv_cache_dtype": one.kv_dtype,
            "heads": one.heads,
            "context": one.context,
            "decode_gb_per_s": one.decode_gb_per_s,
            "decode_share_of_memory": share(one.decode_gb_per_s, limits.memory_gb_per_s),
            "decode_us_per_layer": one.decode_us,
            "prompt_gmac_per_s": one.prompt_gmac_per_s,
            "prompt_share_of_peak": share(one.prompt_gmac_per_s, limits.fma_gmac_per_s),
        })
    };
    let mut map = Map::new();
    map.insert("memory_gb_per_s".to_owned(), json!(limits.memory_gb_per_s));
    map.insert("dot_gmac_per_s".to_owned(), json!(limits.dot_gmac_per_s));
    map.insert("fma_gmac_per_s".to_owned(), json!(limits.fma_gmac_per_s));
    map.insert("bf16_gmac_per_s".to_owned(), json!(limits.bf16_gmac_per_s));
    map.insert("kernels".to_owned(), result.products.iter().map(one).collect());
    map.insert("attention".to_owned(), result.attention.iter().map(attention).collect());
    map
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_backend::{MockBackend, MockOptions};

    #[test]
    fn every_shape_that_fits_a_format_is_measured_and_compared_with_its_limit() {
        let open = || Ok(Box::new(MockBackend::new(MockOptions::default())) as Box<dyn Backend>);
        let mut options = KernelsOptions {
            limits: KernelLimits {
                memory_gb_per_s: Some(20.0),
                dot_gmac_per_s: Some(600.0),
                fma_gmac_per_s: Some(150.0),
                bf16_gmac_per_s: None,
            },
            formats: vec![WeightFormat::Q8_0, WeightFormat::Q4_K],
            kv_dtypes: vec![KvDtype::F16, KvDtype::Int8],
        };
        let mut result = kernels(&open, &options, &ProgressBar::hidden()).unwrap();
        // Blocks of 256 do not divide 576 columns.
        assert_eq!((result.products.len(), result.attention.len()), (6 + 4, 2 * 2 * 3));
        assert!(result.products.iter().all(|one| one.gmac_per_s.iter().all(|rate| *rate > 0.0)));
        assert!(result.attention.iter().all(|one| one.decode_gb_per_s > 0.0 && one.prompt_gmac_per_s > 0.0));
        result.products[0].decode_gb_per_s = 15.0;
        result.products[0].gmac_per_s[0] = 300.0;
        result.attention[0].prompt_gmac_per_s = 30.0;
        let table = kernels_table(&result);
        // Limits, products and attention with their headings.
        assert_eq!(table.lines().count(), 3 + 2 + 10 + 2 + 12);
        for cell in ["15.0 (75 %)", "300.0 (50 %)", "30.0 (20 %)"] {
            assert!(table.contains(cell), "{cell} in {table}");
        }
        let json = kernels_json(&result);
        assert_eq!(json["kernels"][0]["share_of_peak"]["1"], 0.5);
        assert_eq!(json["attention"][0]["prompt_share_of_peak"], 0.2);
        assert_eq!(json["attention"][11]["kv_cache_dtype"], "int8");

        let disturbed = KernelLimits { memory_gb_per_s: Some(7.0), ..options.limits };
        assert_eq!(disturbed.best(options.limits), options.limits);
        assert_eq!(KernelLimits::default().best(KernelLimits::default()), KernelLimits::default());

        // Of a device whose limits are not known there are no shares.
        options.limits = KernelLimits::default();
        result.limits = options.limits;
        assert!(!kernels_table(&result).contains('%'));
        assert!(kernels_json(&result)["kernels"][0]["decode_share_of_memory"].is_null());
    }
}
