//! Every op on random data, on the device and on the reference backend.

use baton_backend::testing::{List, Op, Random, random_tensor};
use baton_backend::{
    Activation, Backend, BufferId, Embed, GatedLinear, KvDtype, Linear, Norm, NormKind, NormOp, Precision,
    ReferenceBackend, StepInput, StepLimits, StepOutput, Tensor, WeightFormat, WeightUse,
};

use baton_cuda::{CudaBackend, CudaOptions};

use crate::attention::{self, Case, cases};
use crate::backend;
use crate::table::Table;

pub const MAX_TOKENS: usize = 160;

pub fn limits() -> StepLimits {
    StepLimits {
        max_tokens: MAX_TOKENS,
        max_seqs: 16,
        max_logit_rows: 16,
        max_samples: 16,
        max_model_len: 2048,
        vocab_size: 1000,
    }
}

/// Values that bf16 holds exactly, so that both sides start from the same.
pub fn inputs(rows: usize, cols: usize, random: &mut Random) -> Tensor {
    let values: Vec<f32> =
        random.normals(rows * cols).iter().map(|value| half::bf16::from_f32(*value).to_f32()).collect();
    Tensor::from_f32(rows, cols, &values).expect("shape")
}

/// Multiples of a quarter: sums of two are e4m3 exactly. A value that is not may be rounded either way by two devices whose
/// sums differ in their last bit, and a step of e4m3 is up to an eighth of the value.
pub fn quarters(count: usize, random: &mut Random) -> Vec<f32> {
    (0..count).map(|_| (random.below(15) as f32 - 7.0) * 0.25).collect()
}

pub fn run(backend: &mut dyn Backend, input: &StepInput, program: &List, output: BufferId) -> Vec<f32> {
    backend.submit(input, program).expect("the step starts");
    backend.collect(&mut StepOutput::default()).expect("the step ends");
    backend.read_buffer(output, input.num_tokens()).expect("the buffer is read")
}

fn tokens(count: usize) -> StepInput {
    let ids: Vec<u32> = (0..count as u32).collect();
    StepInput { token_ids: ids.clone(), positions: ids.clone(), slots: ids, ..StepInput::default() }
}

/// Of the largest value: of sums of f32, or of results that are rounded to bf16.
pub fn tolerance(precision: Precision) -> f32 {
    match precision {
        Precision::Fast => 1.5e-2,
        Precision::Full => 1e-5,
    }
}

/// `which` is nothing for all, or a part, for tools that watch memory and take their time: `bf16` (the ops of bf16 weights,
/// and norms), `formats` (the products of all other weights), one of those formats, `attention` or of that one
/// type of cache (`attention-f8e4m3`) or what attention_wide does (`wide`), `full` (all in full precision).
pub fn check(which: Option<&str>, table: &mut Table) {
    let is_part = |part: &str| which.is_none_or(|which| which == part);
    let precision = Precision::Fast;
    for format in WeightFormat::ALL {
        let is_named = which.is_some_and(|which| which.eq_ignore_ascii_case(&format.to_string()));
        if is_named || is_part(if format == WeightFormat::BF16 { "bf16" } else { "formats" }) {
            products(format, (200, 768), precision, table);
            // Rows that are no whole tiles, columns that are no whole records.
            if format.block_len() == 32 {
                products(format, (88, 608), precision, table);
            }
        }
    }
    if is_part("bf16") {
        // More tiles than the device has groups of blocks; columns that do not split evenly.
        products(WeightFormat::BF16, (5000, 320), precision, table);
        for activation in [Activation::GeluTanh, Activation::Gelu] {
            gated(WeightFormat::BF16, activation, (136, WeightUse::Embedding), precision, table);
        }
        for activation in [Activation::Silu, Activation::GeluTanh, Activation::Gelu] {
            whole_gated(activation, 20 * 128, table);
        }
        whole_gated(Activation::Silu, 25 * 112, table);
        norms(precision, table);
    }
    if is_part("formats") {
        mixed_parts(precision, table);
    }
    for case in &cases() {
        let is_wide =
            [64, 128].contains(&case.head_dim) && [KvDtype::BF16, KvDtype::F16].contains(&case.dtype);
        let cache = format!("attention-{:?}", case.dtype).to_lowercase();
        if is_part("attention") || is_part(&cache) || is_wide && is_part("wide") {
            attention::check(case, precision, table);
        }
    }
    if is_part("full") {
        check_full(table);
    }
}

/// Caches are f32: two sums that differ in their last bit may be rounded to a smaller type differently.
fn check_full(table: &mut Table) {
    let precision = Precision::Full;
    for format in WeightFormat::ALL {
        products(format, (200, 768), precision, table);
    }
    for activation in [Activation::GeluTanh, Activation::Gelu] {
        gated(WeightFormat::F32, activation, (136, WeightUse::Embedding), precision, table);
    }
    norms(precision, table);
    mixed_parts(precision, table);
    for case in cases().iter().filter(|case| case.dtype == KvDtype::BF16) {
        attention::check(&Case { dtype: KvDtype::F32, ..*case }, precision, table);
    }
}

fn products(format: WeightFormat, (rows, cols): (usize, usize), precision: Precision, table: &mut Table) {
    let build = |backend: &mut dyn Backend| {
        let mut random = Random::new(5);
        backend.set_limits(&limits()).expect("limits");
        let source = backend
            .load_weight(&[inputs(MAX_TOKENS, cols, &mut random)], WeightUse::Embedding)
            .expect("loads");
        let weight = random_tensor(format, rows, cols, 0.1, &mut random);
        let weight = backend.load_weight(&[weight], WeightUse::Linear).expect("loads");
        let bias = backend.load_vector(&random.normals(rows)).expect("loads");
        let norm = backend.load_vector(&random.normals(cols)).expect("loads");
        let hidden = backend.create_buffer(MAX_TOKENS, cols).expect("creates");
        let output = backend.create_buffer(MAX_TOKENS, rows).expect("creates");
        let linear = |norm, bias, accumulate| {
            Op::Linear(Linear { input: hidden, norm, weight, bias, output, accumulate })
        };
        let norm = Norm { kind: NormKind::Rms, weight: norm, eps: 1e-5 };
        let embed = Op::Embed(Embed { weight: source, scale: 1.0, output: hidden });
        (List(vec![embed, linear(Some(norm), Some(bias), false), linear(None, None, true)]), output)
    };
    let (mut cuda, mut reference) = (backend(precision), ReferenceBackend::new());
    let (program, output) = build(&mut cuda);
    let _ = build(&mut reference);
    for m in [1, 2, 3, 4, 5, 8, 9, 16, 24, 33, 64, 65, 150] {
        let expected = run(&mut reference, &tokens(m), &program, output);
        let got = run(&mut cuda, &tokens(m), &program, output);
        table.compare(
            &format!("linear {format} {precision:?} {rows} x {cols} with norm, bias, residual, {m} tokens"),
            &expected,
            &got,
            tolerance(precision),
        );
    }
    // Whole tiles, and a table that is a weight as well, as a tied head is.
    gated(format, Activation::Silu, (136, WeightUse::Embedding), precision, table);
    gated(format, Activation::Silu, (160, WeightUse::EmbeddingAndLinear), precision, table);
}

fn gated(
    format: WeightFormat,
    activation: Activation,
    (width, usage): (usize, WeightUse),
    precision: Precision,
    table: &mut Table,
) {
    let (rows, cols) = (2 * width, 512);
    let build = |backend: &mut dyn Backend| {
        let mut random = Random::new(6);
        backend.set_limits(&limits()).expect("limits");
        let source = random_tensor(format, MAX_TOKENS, cols, 1.0, &mut random);
        let source = backend.load_weight(&[source], usage).expect("loads");
        let weight = random_tensor(format, rows, cols, 0.1, &mut random);
        let weight = backend.load_weight(&[weight], WeightUse::Linear).expect("loads");
        let bias = backend.load_vector(&random.normals(rows)).expect("loads");
        let hidden = backend.create_buffer(MAX_TOKENS, cols).expect("creates");
        let output = backend.create_buffer(MAX_TOKENS, rows / 2).expect("creates");
        let gated = GatedLinear { input: hidden, norm: None, weight, bias: Some(bias), activation, output };
        (
            List(vec![Op::Embed(Embed { weight: source, scale: 1.5, output: hidden }), Op::Gated(gated)]),
            output,
        )
    };
    let (mut cuda, mut reference) = (backend(precision), ReferenceBackend::new());
    let (program, output) = build(&mut cuda);
    let _ = build(&mut reference);
    for m in [1, 4, 7, 13, 30, 40, 70] {
        let expected = run(&mut reference, &tokens(m), &program, output);
        let got = run(&mut cuda, &tokens(m), &program, output);
        table.compare(
            &format!("gated {format} {precision:?} {width}, {activation:?}, embedded, {m} rows"),
            &expected,
            &got,
            tolerance(precision),
        );
    }
}

/// Tokens for which products and activations are one kernel where the device has it: whole tiles and parts of them, fewer tiles
/// than blocks and more.
fn whole_gated(activation: Activation, width: usize, table: &mut Table) {
    let precision = Precision::Fast;
    const TOKENS: usize = 700;
    let (rows, cols) = (2 * width, 320);
    let build = |backend: &mut dyn Backend| {
        let mut random = Random::new(9);
        let limits = StepLimits { max_tokens: TOKENS, ..limits() };
        backend.set_limits(&limits).expect("limits");
        let source =
            backend.load_weight(&[inputs(TOKENS, cols, &mut random)], WeightUse::Embedding).expect("loads");
        let weight = random_tensor(WeightFormat::BF16, rows, cols, 0.1, &mut random);
        let weight = backend.load_weight(&[weight], WeightUse::Linear).expect("loads");
        let norm = backend.load_vector(&random.normals(cols)).expect("loads");
        let norm = Norm { kind: NormKind::Rms, weight: norm, eps: 1e-5 };
        let hidden = backend.create_buffer(TOKENS, cols).expect("creates");
        let output = backend.create_buffer(TOKENS, rows / 2).expect("creates");
        let gated = GatedLinear { input: hidden, norm: Some(norm), weight, bias: None, activation, output };
        (
            List(vec![Op::Embed(Embed { weight: source, scale: 1.0, output: hidden }), Op::Gated(gated)]),
            output,
        )
    };
    let mut cuda = CudaBackend::new(CudaOptions { gated_min_busy: 1, ..CudaOptions::default() })
        .expect("the device starts");
    let mut reference = ReferenceBackend::new();
    let (program, output) = build(&mut cuda);
    let _ = build(&mut reference);
    for m in [9, 20, 64, 65, 128, 256, 300, TOKENS] {
        let expected = run(&mut reference, &tokens(m), &program, output);
        let got = run(&mut cuda, &tokens(m), &program, output);
        table.compare(
            &format!("whole gated {width}, {activation:?}, {m} tokens"),
            &expected,
            &got,
            tolerance(precision),
        );
    }
}

/// A weight whose parts have different formats, as in Q4_K_M files.
fn mixed_parts(precision: Precision, table: &mut Table) {
    let cols = 512;
    let build = |backend: &mut dyn Backend| {
        let mut random = Random::new(7);
        backend.set_limits(&limits()).expect("limits");
        let source = backend
            .load_weight(&[inputs(MAX_TOKENS, cols, &mut random)], WeightUse::Embedding)
            .expect("loads");
        let formats = [WeightFormat::Q4_K, WeightFormat::Q4_K, WeightFormat::Q6_K, WeightFormat::BF16];
        let parts = formats.map(|format| random_tensor(format, 40, cols, 0.1, &mut random));
        let weight = backend.load_weight(&parts, WeightUse::Linear).expect("loads");
        let hidden = backend.create_buffer(MAX_TOKENS, cols).expect("creates");
        let output = backend.create_buffer(MAX_TOKENS, 80).expect("creates");
        let gated = GatedLinear {
            input: hidden,
            norm: None,
            weight,
            bias: None,
            activation: Activation::Silu,
            output,
        };
        (
            List(vec![Op::Embed(Embed { weight: source, scale: 1.0, output: hidden }), Op::Gated(gated)]),
            output,
        )
    };
    let (mut cuda, mut reference) = (backend(precision), ReferenceBackend::new());
    let (program, output) = build(&mut cuda);
    let _ = build(&mut reference);
    for m in [1, 6, 40] {
        let expected = run(&mut reference, &tokens(m), &program, output);
        let got = run(&mut cuda, &tokens(m), &program, output);
        table.compare(
            &format!("gated with parts of three formats, {precision:?}, {m} rows"),
            &expected,
            &got,
            tolerance(precision),
        );
    }
}

fn norms(precision: Precision, table: &mut Table) {
    for (name, is_layer) in [("rms", false), ("layer", true)] {
        let cols = 1000;
        let build = |backend: &mut dyn Backend| {
            let mut random = Random::new(8);
            backend.set_limits(&limits()).expect("limits");
            let source = backend
                .load_weight(&[inputs(MAX_TOKENS, cols, &mut random)], WeightUse::Embedding)
                .expect("loads");
            let weight = backend.load_vector(&random.normals(cols)).expect("loads");
            let bias = backend.load_vector(&random.normals(cols)).expect("loads");
            let hidden = backend.create_buffer(MAX_TOKENS, cols).expect("creates");
            let output = backend.create_buffer(MAX_TOKENS, cols).expect("creates");
            let kind = if is_layer { NormKind::Layer { bias: Some(bias) } } else { NormKind::Rms };
            let norm = |accumulate| {
                Op::Norm(NormOp { input: hidden, norm: Norm { kind, weight, eps: 1e-5 }, output, accumulate })
            };
            (
                List(vec![
                    Op::Embed(Embed { weight: source, scale: 2.0, output: hidden }),
                    norm(false),
                    norm(true),
                ]),
                output,
            )
        };
        let (mut cuda, mut reference) = (backend(precision), ReferenceBackend::new());
        let (program, output) = build(&mut cuda);
        let _ = build(&mut reference);
        let expected = run(&mut reference, &tokens(5), &program, output);
        let got = run(&mut cuda, &tokens(5), &program, output);
        table.compare(
            &format!("{name} norm, then added, {precision:?}"),
            &expected,
            &got,
            tolerance(precision),
        );
    }
}
