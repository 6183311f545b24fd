//! `baton bench kernels`: the speed of products, for each weight format and shape, and of attention, as shares of the machine's
//! peak measured in the same run. Decoding reads every weight once per token, so memory bandwidth bounds it; prompts are
//! bound by arithmetic.
//!
//! It uses nothing but [`Backend`], so it runs on every device. Each shape is loaded several times over,
//! so that decodes read from memory and not from a cache.

use std::time::Instant;

use baton_backend::testing::{Random, random_row};
use baton_backend::{
    Activation, Backend, BackendError, Embed, GatedLinear, KvDtype, Linear, Op, Program, ProgramId,
    SampleRow, SharedBytes, StepInput, StepLimits, StepOutput, Tensor, WeightFormat, WeightId, WeightUse,
};
use indicatif::ProgressBar;

use crate::BenchError;
use crate::kernels_attention::{self, AttentionCase, AttentionFigures};
use crate::kernels_small::{self, SmallFigures};

/// What is measured: on a GPU larger shapes and larger batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KernelSizes {
    #[default]
    Small,
    Large,
}

/// A gated one has as many rows of the gate as of up, and its activation is a part of it.
#[derive(Clone, Copy, Debug)]
struct Shape {
    name: &'static str,
    rows: usize,
    cols: usize,
    is_gated: bool,
}

const fn plain(name: &'static str, rows: usize, cols: usize) -> Shape {
    Shape { name, rows, cols, is_gated: false }
}

const fn gated(name: &'static str, rows: usize, cols: usize) -> Shape {
    Shape { name, rows, cols, is_gated: true }
}

const SMALL_SHAPES: &[Shape] = &[
    plain("SmolLM2 qkv", 960, 576),
    gated("SmolLM2 gate+up", 3072, 576),
    plain("SmolLM2 down", 576, 1536),
    plain("Llama-1B qkv", 3072, 2048),
    gated("Llama-1B gate+up", 16384, 2048),
    plain("Llama-1B down", 2048, 8192),
];
const LARGE_SHAPES: &[Shape] = &[
    plain("Llama-1B qkv", 3072, 2048),
    gated("Llama-1B gate+up", 16384, 2048),
    plain("Llama-8B qkv", 6144, 4096),
    plain("Llama-8B out", 4096, 4096),
    gated("Llama-8B gate+up", 28672, 4096),
    plain("Llama-8B down", 4096, 14336),
    plain("Llama-8B head", 128_256, 4096),
];

impl KernelSizes {
    fn shapes(self) -> &'static [Shape] {
        match self {
            Self::Small => SMALL_SHAPES,
            Self::Large => LARGE_SHAPES,
        }
    }

    /// Rows of a step: a decode, batches, a chunk of a prompt.
    pub fn rows(self) -> &'static [usize] {
        match self {
            Self::Small => &[1, 4, 8, 64, 512],
            Self::Large => &[1, 4, 8, 16, 32, 64, 256, 2048],
        }
    }

    pub(crate) fn attention(self) -> &'static [AttentionCase] {
        match self {
            Self::Small => kernels_attention::SMALL,
            Self::Large => kernels_attention::LARGE,
        }
    }

    /// Cached keys and values of one measurement together: beside reading them a step's own time is nothing.
    pub(crate) fn cache_bytes(self) -> usize {
        match self {
            Self::Small => 192 << 20,
            Self::Large => 4 << 30,
        }
    }

    /// Weights of one measurement together: many times the last-level cache.
    fn total_bytes(self) -> usize {
        match self {
            Self::Small => 192 << 20,
            Self::Large => 1 << 30,
        }
    }

    /// Up to this many rows, reading the weights is the limit, so all copies are used and not only a few.
    fn max_reading_rows(self) -> usize {
        match self {
            Self::Small => 0,
            Self::Large => 256,
        }
    }

    /// Makes a small step one of decodes, which a GPU records, so that launches take no time.
    pub(crate) fn make_decode(self, input: &mut StepInput) {
        let num_rows = input.num_tokens() as u32;
        if self == Self::Large && num_rows <= 256 {
            input.logit_rows = (0..num_rows).collect();
            input.samples = (0..num_rows).map(SampleRow::greedy).collect();
        }
    }

    /// Units of what is read and of what is multiplied, in GB/s and GMAC/s, and digits.
    pub(crate) fn units(self) -> [(&'static str, f64); 2] {
        match self {
            Self::Small => [("GB/s", 1.0), ("GMAC/s", 1.0)],
            Self::Large => [("TB/s", 1e-3), ("TFLOP/s", 2e-3)],
        }
    }
}

/// The best of this many runs counts: others were disturbed.
const RUNS: usize = 5;

/// One format in one shape.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelFigures {
    pub format: WeightFormat,
    pub shape: &'static str,
    /// Packed weights read per second by a step of one row.
    pub decode_gb_per_s: f64,
    /// Products per second, for each of [`KernelSizes::rows`].
    pub gmac_per_s: Vec<f64>,
    /// The same by the device's library.
    pub library_gmac_per_s: Option<Vec<f64>>,
}

/// What the machine can do at best.
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
    /// Multiply-adds of bf16 on a GPU: of everything.
    pub tensor_gmac_per_s: Option<f64>,
}

/// All that was measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KernelsResult {
    pub sizes: KernelSizes,
    pub limits: KernelLimits,
    pub products: Vec<KernelFigures>,
    pub attention: Vec<AttentionFigures>,
    pub small: Vec<SmallFigures>,
}

/// What is to be measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KernelsOptions {
    pub sizes: KernelSizes,
    pub limits: KernelLimits,
    pub formats: Vec<WeightFormat>,
    pub kv_dtypes: Vec<KvDtype>,
}

/// Opens the device anew, since buffers are made once.
pub type Open<'a> = &'a dyn Fn() -> Result<Box<dyn Backend>, BenchError>;

/// Measures every shape for each format. `library` opens the device so that bf16 products are its library's.
pub fn kernels(
    open: Open<'_>,
    library: Option<Open<'_>>,
    options: &KernelsOptions,
    bar: &ProgressBar,
) -> Result<KernelsResult, BenchError> {
    let failed = |error: BackendError| BenchError::Failed(error.to_string());
    let sizes = options.sizes;
    let cases: Vec<_> = options
        .formats
        .iter()
        .flat_map(|&format| sizes.shapes().iter().map(move |shape| (format, shape)))
        .filter(|(format, shape)| shape.cols % format.block_len() == 0)
        .collect();
    bar.set_length((cases.len() + options.kv_dtypes.len() * sizes.attention().len() + 1) as u64);
    let mut result = KernelsResult { sizes, limits: options.limits, ..KernelsResult::default() };
    for (format, shape) in cases {
        bar.set_message(format!("{format} {}", shape.name));
        let mut figures = measure(open()?, format, shape, sizes).map_err(failed)?;
        if let Some(library) = library.filter(|_| format == WeightFormat::BF16) {
            let theirs = measure(library()?, format, shape, sizes).map_err(failed)?;
            figures.library_gmac_per_s = Some(theirs.gmac_per_s);
        }
        result.products.push(figures);
        bar.inc(1);
    }
    for &dtype in &options.kv_dtypes {
        for case in sizes.attention() {
            bar.set_message(format!("attention {dtype:?} {} {}", case.heads, case.context));
            result.attention.push(kernels_attention::measure(open()?, case, dtype, sizes).map_err(failed)?);
            bar.inc(1);
        }
    }
    bar.set_message("all the others");
    result.small = kernels_small::measure(open, sizes)?;
    bar.finish_and_clear();
    Ok(result)
}

fn measure(
    mut backend: Box<dyn Backend>,
    format: WeightFormat,
    shape: &Shape,
    sizes: KernelSizes,
) -> Result<KernelFigures, BackendError> {
    let &Shape { name, rows, cols, is_gated } = shape;
    let max_tokens = sizes.rows().iter().copied().max().unwrap_or(1);
    backend.set_limits(&StepLimits {
        max_tokens,
        max_seqs: max_tokens,
        max_logit_rows: max_tokens,
        max_samples: max_tokens,
        max_model_len: max_tokens,
        vocab_size: 1,
    })?;
    let mut random = Random::new(1);
    // One random row many times over: the speed does not depend on the values.
    let bytes = random_row(format, cols, 1.0, &mut random).repeat(rows);
    let copies = (sizes.total_bytes() / bytes.len()).max(1);
    let shape_is_right = "the shape is a multiple of the format's block";
    let tensor = Tensor::new(format, rows, cols, SharedBytes::from_vec(bytes)).expect(shape_is_right);
    let row = Tensor::from_f32(1, cols, &random.normals(cols)).expect(shape_is_right);
    let table = backend.load_weight(&[row], WeightUse::Embedding)?;
    let input = backend.create_buffer(max_tokens, cols)?;
    let output = backend.create_buffer(max_tokens, if is_gated { rows / 2 } else { rows })?;
    let mut weights = Vec::with_capacity(copies);
    for _ in 0..copies {
        weights.push(backend.load_weight(std::slice::from_ref(&tensor), WeightUse::Linear)?);
    }
    let op = |&weight: &WeightId| {
        let (norm, bias, activation) = (None, None, Activation::Silu);
        if is_gated {
            Op::GatedLinear(GatedLinear { input, norm, weight, bias, activation, output })
        } else {
            Op::Linear(Linear { input, norm, weight, bias, output, accumulate: false })
        }
    };
    let embed = Embed { weight: table, scale: 1.0, output: input };
    let weight_bytes = backend.weight_bytes() as f64;
    let program = |weights: &[WeightId]| {
        Program::new([Op::Embed(embed)].into_iter().chain(weights.iter().map(op)).collect())
    };
    // A few are enough where arithmetic is the limit.
    let num_few = copies.min(4);
    let (all, few) = (program(&weights), program(&weights[..num_few]));
    let (all, few) = (backend.compile(&all)?, backend.compile(&few)?);
    let decode_s = seconds(&mut *backend, all, 1, sizes)?;
    let mut gmac_per_s = Vec::with_capacity(sizes.rows().len());
    for &num_rows in sizes.rows() {
        let reads = num_rows <= sizes.max_reading_rows();
        let (program, count) = if reads { (all, copies) } else { (few, num_few) };
        let macs = (count * rows * cols * num_rows) as f64;
        gmac_per_s.push(macs / seconds(&mut *backend, program, num_rows, sizes)? / 1e9);
    }
    let decode_gb_per_s = weight_bytes / decode_s / 1e9;
    Ok(KernelFigures { format, shape: name, decode_gb_per_s, gmac_per_s, library_gmac_per_s: None })
}

/// Seconds of one run of the program with this many rows.
fn seconds(
    backend: &mut dyn Backend,
    program: ProgramId,
    num_rows: usize,
    sizes: KernelSizes,
) -> Result<f64, BackendError> {
    let count = num_rows as u32;
    let mut input = StepInput {
        token_ids: vec![0; num_rows],
        positions: (0..count).collect(),
        slots: (0..count).collect(),
        ..StepInput::default()
    };
    sizes.make_decode(&mut input);
    let mut best = f64::MAX;
    for _ in 0..RUNS {
        best = best.min(step_seconds(backend, &input, program)?);
    }
    Ok(best.max(1e-9))
}

/// One step, by the device's own clock where it has one.
pub(crate) fn step_seconds(
    backend: &mut dyn Backend,
    input: &StepInput,
    program: ProgramId,
) -> Result<f64, BackendError> {
    let started = Instant::now();
    backend.submit(input, program)?;
    backend.collect(&mut StepOutput::default())?;
    let span = backend.last_step_span().map(|span| span.end.duration_since(span.start));
    Ok(span.unwrap_or_else(|| started.elapsed()).as_secs_f64())
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
            tensor_gmac_per_s: higher(self.tensor_gmac_per_s, other.tensor_gmac_per_s),
        }
    }

    /// Of the products of a format.
    pub(crate) fn gmac_per_s(&self, format: WeightFormat) -> Option<f64> {
        self.tensor_gmac_per_s.or(match format {
            WeightFormat::BF16 => self.bf16_gmac_per_s.map(|limit| limit / 2.0).or(self.fma_gmac_per_s),
            WeightFormat::F32 | WeightFormat::F16 => self.fma_gmac_per_s,
            _ => self.dot_gmac_per_s,
        })
    }

    pub(crate) fn attention_gmac_per_s(&self) -> Option<f64> {
        self.tensor_gmac_per_s.or(self.fma_gmac_per_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels_report::{kernels_json, kernels_table};
    use baton_backend::{MockBackend, MockOptions};

    #[test]
    fn every_shape_that_fits_a_format_is_measured_and_compared_with_its_limit() {
        let open = || Ok(Box::new(MockBackend::new(MockOptions::default())) as Box<dyn Backend>);
        let mut options = KernelsOptions {
            limits: KernelLimits {
                memory_gb_per_s: Some(20.0),
                dot_gmac_per_s: Some(600.0),
                fma_gmac_per_s: Some(150.0),
                ..KernelLimits::default()
            },
            sizes: KernelSizes::Small,
            formats: vec![WeightFormat::Q8_0, WeightFormat::Q4_K],
            kv_dtypes: vec![KvDtype::F16, KvDtype::Int8],
        };
        let mut result = kernels(&open, None, &options, &ProgressBar::hidden()).unwrap();
        // Blocks of 256 do not divide 576 columns.
        assert_eq!((result.products.len(), result.attention.len()), (6 + 4, 2 * 2 * 3));
        assert!(result.products.iter().all(|one| one.gmac_per_s.iter().all(|rate| *rate > 0.0)));
        assert!(
            result.attention.iter().all(|one| one.decode_gb_per_s > 0.0 && one.prompt_gmac_per_s > Some(0.0))
        );
        result.products[0].decode_gb_per_s = 15.0;
        result.products[0].gmac_per_s[0] = 300.0;
        result.attention[0].prompt_gmac_per_s = Some(30.0);
        let table = kernels_table(&result);
        // Limits, products and attention with their headings.
        assert_eq!(table.lines().count(), 3 + 2 + 10 + 2 + 12 + 2 + result.small.len());
        assert!(table.contains("sampling, top-p 0.9") && table.contains("swapping, one way"));
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
    /// A GPU: larger shapes, in its units, bf16 beside the library.
    #[test]
    fn a_gpu_is_compared_with_its_library_and_its_tensor_cores() {
        let open = || Ok(Box::new(MockBackend::new(MockOptions::default())) as Box<dyn Backend>);
        let options = KernelsOptions {
            sizes: KernelSizes::Large,
            limits: KernelLimits {
                memory_gb_per_s: Some(4800.0),
                tensor_gmac_per_s: Some(400_000.0),
                ..KernelLimits::default()
            },
            formats: vec![WeightFormat::BF16],
            kv_dtypes: vec![],
        };
        let library: Open = &open;
        let mut result =
            KernelsResult { sizes: options.sizes, limits: options.limits, ..KernelsResult::default() };
        let shape = &LARGE_SHAPES[0];
        let mut one = measure(library().unwrap(), WeightFormat::BF16, shape, options.sizes).unwrap();
        assert_eq!(one.gmac_per_s.len(), 8);
        (one.decode_gb_per_s, one.gmac_per_s[0], one.gmac_per_s[7]) = (3600.0, 1500.0, 300_000.0);
        one.library_gmac_per_s = Some(vec![1000.0; 8]);
        result.products.push(one);
        let case = &kernels_attention::LARGE[6];
        result
            .attention
            .push(kernels_attention::measure(open().unwrap(), case, KvDtype::BF16, options.sizes).unwrap());
        assert_eq!((result.attention[0].num_seqs, result.attention[0].prompt_gmac_per_s), (8, None));
        let table = kernels_table(&result);
        for cell in ["4.80 TB/s", "800.0 TFLOP/s", "3.60 (75 %)", "600.0 (75 %)", "1.50 x", "M=2048"] {
            assert!(table.contains(cell), "{cell} in {table}");
        }
        assert_eq!(kernels_json(&result)["kernels"][0]["library_gmac_per_s"]["2048"], 1000.0);
    }
}
