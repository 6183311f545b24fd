//! Embeddings, norms, products and logits, in every format of weights.

use super::{Built, Case, MAX_TOKENS, Rows, inputs, limits, tokens};
use crate::testing::{Random, random_tensor};
use crate::{
    ActivatedLinear, Activation, AddPositions, Backend, BackendError, BufferId, Embed, GatedLinear,
    KeepLogitRows, Linear, Logits, Norm, NormKind, NormOp, Op, Program, StepInput, StepLimits, Tensor,
    WeightFormat, WeightUse,
};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![norm("rms", false), norm("layer", true), mixed_parts()];
    // Those with scales beside them have their own cases.
    for format in WeightFormat::ALL.into_iter().filter(|format| *format != WeightFormat::F8_E4M3) {
        cases.push(embed(format));
        cases.push(linear(format, 200, 768));
        // Rows that are no whole tiles, columns that are no whole records.
        if format.block_len() == 32 {
            cases.push(linear(format, 88, 608));
        }
        cases.push(gated(format, Activation::Silu, 136, WeightUse::Embedding));
        // Whole tiles, and a table that is a weight as well, as a tied head is.
        cases.push(gated(format, Activation::Silu, 160, WeightUse::EmbeddingAndLinear));
        cases.push(logits(format, None));
    }
    // More tiles than a device has groups of blocks; columns that do not split evenly.
    cases.push(linear(WeightFormat::BF16, 5000, 320));
    // Columns that are no whole stages of any kernel, rows that are no whole tiles.
    cases.push(linear(WeightFormat::BF16, 88, 1000));
    for activation in [Activation::GeluTanh, Activation::Gelu, Activation::Relu, Activation::ClampedSwiglu] {
        cases.push(gated(WeightFormat::BF16, activation, 136, WeightUse::Embedding));
        cases.push(gated(WeightFormat::F32, activation, 136, WeightUse::Embedding));
    }
    for activation in [Activation::Silu, Activation::GeluTanh, Activation::Gelu, Activation::Relu] {
        cases.push(many_gated(activation, 20 * 128));
    }
    cases.push(gated(WeightFormat::Q5_0, Activation::ClampedSwiglu, 136, WeightUse::Embedding));
    cases.push(many_gated(Activation::Silu, 25 * 112));
    for format in [WeightFormat::Q4_1, WeightFormat::Q5_0, WeightFormat::Q6_K, WeightFormat::Q8_0] {
        cases.push(many_packed(format));
    }
    cases.push(logits(WeightFormat::BF16, Some(3.0)));
    for format in [WeightFormat::F32, WeightFormat::BF16, WeightFormat::Q8_0] {
        cases.push(biased_logits(format));
    }
    cases.push(kept_rows());
    for format in [WeightFormat::F32, WeightFormat::F16, WeightFormat::BF16, WeightFormat::Q8_0] {
        cases.push(add_positions(format));
        cases.push(activated(format, Activation::GeluTanh));
    }
    for activation in [Activation::Gelu, Activation::Relu, Activation::ReluSquared] {
        cases.push(activated(WeightFormat::BF16, activation));
    }
    cases
}

/// A device with its limits, and a buffer into which tokens are looked up in random values.
pub(super) fn source(
    backend: &mut dyn Backend,
    limits: &StepLimits,
    cols: usize,
    random: &mut Random,
) -> Result<(Op, BufferId), BackendError> {
    backend.set_limits(limits)?;
    let rows = limits.max_tokens;
    let weight = backend.load_weight(&[inputs(rows, cols, random)], WeightUse::Embedding)?;
    let output = backend.create_buffer(rows, cols)?;
    Ok((Op::Embed(Embed { weight, scale: 1.0, output }), output))
}

pub(super) fn built(
    backend: &mut dyn Backend,
    ops: Vec<Op>,
    output: BufferId,
) -> Result<Built, BackendError> {
    Ok(Built { program: backend.compile(&Program::new(ops))?, output, rows: Rows::Tokens })
}

pub(super) fn steps<const N: usize>(counts: [usize; N]) -> Vec<StepInput> {
    counts.into_iter().map(tokens).collect()
}

fn embed(format: WeightFormat) -> Case {
    Case::new(format!("embed {format}"), steps([1, 5, 40]), move |backend| {
        let mut random = Random::new(3);
        backend.set_limits(&limits())?;
        let parts = [30, MAX_TOKENS - 30].map(|rows| random_tensor(format, rows, 512, 1.0, &mut random));
        let weight = backend.load_weight(&parts, WeightUse::Embedding)?;
        let output = backend.create_buffer(MAX_TOKENS, 512)?;
        built(backend, vec![Op::Embed(Embed { weight, scale: 1.5, output })], output)
    })
}

fn add_positions(format: WeightFormat) -> Case {
    let mut steps = steps([1, 5, 40]);
    // Decodes are anywhere in their sequences.
    steps[2].positions = (0..40).map(|row| row * 13 % 300).collect();
    Case::new(format!("add_positions {format}"), steps, move |backend| {
        let mut random = Random::new(12);
        let (embed, output) = source(backend, &limits(), 512, &mut random)?;
        let table = random_tensor(format, 300, 512, 1.0, &mut random);
        let weight = backend.load_weight(&[table], WeightUse::Embedding)?;
        built(backend, vec![embed, Op::AddPositions(AddPositions { weight, output })], output)
    })
}

/// With a layer norm before it, as GPT-2 has it.
fn activated(format: WeightFormat, activation: Activation) -> Case {
    let name = format!("activated_linear {format}, {activation:?}, with layer norm");
    Case::new(name, steps([1, 4, 13, 40, 150]), move |backend| {
        let (mut random, rows, cols) = (Random::new(13), 136, 512);
        let (embed, input) = source(backend, &limits(), cols, &mut random)?;
        let weight = random_tensor(format, rows, cols, 0.1, &mut random);
        let weight = backend.load_weight(&[weight], WeightUse::Linear)?;
        let bias = Some(backend.load_vector(&random.normals(rows))?);
        let norm_weight = backend.load_vector(&random.normals(cols))?;
        let norm_bias = Some(backend.load_vector(&random.normals(cols))?);
        let kind = NormKind::Layer { bias: norm_bias };
        let norm = Some(Norm { kind, weight: norm_weight, eps: 1e-5 });
        let output = backend.create_buffer(MAX_TOKENS, rows)?;
        let op = ActivatedLinear { input, norm, weight, bias, activation, output };
        built(backend, vec![embed, Op::ActivatedLinear(op)], output)
    })
}

fn norm(name: &str, is_layer: bool) -> Case {
    Case::new(format!("norm {name}, then added"), steps([1, 5]), move |backend| {
        let (mut random, cols) = (Random::new(8), 1000);
        let (embed, hidden) = source(backend, &limits(), cols, &mut random)?;
        let weight = backend.load_vector(&random.normals(cols))?;
        let bias = backend.load_vector(&random.normals(cols))?;
        let output = backend.create_buffer(MAX_TOKENS, cols)?;
        let kind = if is_layer { NormKind::Layer { bias: Some(bias) } } else { NormKind::Rms };
        let norm = |accumulate| {
            Op::Norm(NormOp { input: hidden, norm: Norm { kind, weight, eps: 1e-5 }, output, accumulate })
        };
        built(backend, vec![embed, norm(false), norm(true)], output)
    })
}

fn linear(format: WeightFormat, rows: usize, cols: usize) -> Case {
    let name = format!("linear {format} {rows} x {cols} with norm, bias, residual");
    Case::new(name, steps([1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 33, 48, 64, 65, 150]), move |backend| {
        let mut random = Random::new(5);
        let (embed, hidden) = source(backend, &limits(), cols, &mut random)?;
        let weight = random_tensor(format, rows, cols, 0.1, &mut random);
        let weight = backend.load_weight(&[weight], WeightUse::Linear)?;
        let bias = backend.load_vector(&random.normals(rows))?;
        let norm = backend.load_vector(&random.normals(cols))?;
        let norm = Norm { kind: NormKind::Rms, weight: norm, eps: 1e-5 };
        let output = backend.create_buffer(MAX_TOKENS, rows)?;
        let linear = |norm, bias, accumulate| {
            Op::Linear(Linear { input: hidden, norm, weight, bias, output, accumulate })
        };
        built(backend, vec![embed, linear(Some(norm), Some(bias), false), linear(None, None, true)], output)
    })
}

fn gated(format: WeightFormat, activation: Activation, width: usize, usage: WeightUse) -> Case {
    let name = format!("gated_linear {format} {width}, {activation:?}, embedded");
    let (rows, cols) = (2 * width, 512);
    Case::new(name, steps([1, 4, 7, 13, 30, 40, 70]), move |backend| {
        let mut random = Random::new(6);
        backend.set_limits(&limits())?;
        let source = random_tensor(format, MAX_TOKENS, cols, 1.0, &mut random);
        let source = backend.load_weight(&[source], usage)?;
        let weight = random_tensor(format, rows, cols, 0.1, &mut random);
        let weight = backend.load_weight(&[weight], WeightUse::Linear)?;
        let bias = Some(backend.load_vector(&random.normals(rows))?);
        let hidden = backend.create_buffer(MAX_TOKENS, cols)?;
        let output = backend.create_buffer(MAX_TOKENS, width)?;
        let embed = Op::Embed(Embed { weight: source, scale: 1.5, output: hidden });
        let gated = GatedLinear { input: hidden, norm: None, weight, bias, activation, output };
        built(backend, vec![embed, Op::GatedLinear(gated)], output)
    })
}

/// Tokens for which products and activations may be one kernel: whole tiles and parts of them, fewer tiles than blocks and
/// more.
fn many_gated(activation: Activation, width: usize) -> Case {
    const TOKENS: usize = 700;
    let (rows, cols) = (2 * width, 320);
    let name = format!("gated_linear of many tokens {width}, {activation:?}");
    Case::new(name, steps([9, 20, 64, 65, 128, 256, 300, TOKENS]), move |backend| {
        let mut random = Random::new(9);
        let limits = StepLimits { max_tokens: TOKENS, ..limits() };
        let (embed, hidden) = source(backend, &limits, cols, &mut random)?;
        let weight = random_tensor(WeightFormat::BF16, rows, cols, 0.1, &mut random);
        let weight = backend.load_weight(&[weight], WeightUse::Linear)?;
        let norm = backend.load_vector(&random.normals(cols))?;
        let norm = Some(Norm { kind: NormKind::Rms, weight: norm, eps: 1e-5 });
        let output = backend.create_buffer(TOKENS, width)?;
        let gated = GatedLinear { input: hidden, norm, weight, bias: None, activation, output };
        built(backend, vec![embed, Op::GatedLinear(gated)], output)
    })
}

/// Tokens for which packed weights may have kernels of their own, with columns that do not divide evenly between blocks: plain with
/// a residual, and gated.
fn many_packed(format: WeightFormat) -> Case {
    const TOKENS: usize = 260;
    let (width, cols) = (400, 1280);
    Case::new(
        format!("linear {format} and gated of many tokens"),
        steps([17, 64, 65, 129, TOKENS]),
        move |backend| {
            let mut random = Random::new(15);
            let limits = StepLimits { max_tokens: TOKENS, ..limits() };
            let (embed, hidden) = source(backend, &limits, cols, &mut random)?;
            let mut weight = |rows| {
                let tensor = random_tensor(format, rows, cols, 0.1, &mut random);
                backend.load_weight(&[tensor], WeightUse::Linear)
            };
            let (both, other) = (weight(2 * width)?, weight(width)?);
            let bias = Some(backend.load_vector(&random.normals(width))?);
            let output = backend.create_buffer(TOKENS, width)?;
            let activation = Activation::Silu;
            let gated =
                GatedLinear { input: hidden, norm: None, weight: both, bias: None, activation, output };
            let added = Linear { input: hidden, norm: None, weight: other, bias, output, accumulate: true };
            built(backend, vec![embed, Op::GatedLinear(gated), Op::Linear(added)], output)
        },
    )
}

/// Gate and up of different formats, the gate itself of two.
fn mixed_parts() -> Case {
    let name = "gated_linear with parts of three formats".to_owned();
    Case::new(name, steps([1, 6, 40]), |backend| {
        let (mut random, cols, width) = (Random::new(7), 512, 96);
        let (embed, hidden) = source(backend, &limits(), cols, &mut random)?;
        let formats = [(WeightFormat::Q4_0, 64), (WeightFormat::BF16, 32), (WeightFormat::Q6_K, width)];
        let parts: Vec<Tensor> = formats
            .iter()
            .map(|&(format, rows)| random_tensor(format, rows, cols, 0.1, &mut random))
            .collect();
        let weight = backend.load_weight(&parts, WeightUse::Linear)?;
        let bias = Some(backend.load_vector(&random.normals(2 * width))?);
        let output = backend.create_buffer(MAX_TOKENS, width)?;
        let activation = Activation::Silu;
        let gated = GatedLinear { input: hidden, norm: None, weight, bias, activation, output };
        built(backend, vec![embed, Op::GatedLinear(gated)], output)
    })
}

/// Steps of which some rows have logits.
fn some_rows() -> Vec<StepInput> {
    let step = |count: usize, every: usize| StepInput {
        logit_rows: (0..count as u32).rev().step_by(every).collect::<Vec<_>>().into_iter().rev().collect(),
        ..tokens(count)
    };
    vec![step(1, 1), step(6, 1), step(40, 3), step(16, 16)]
}

fn logits(format: WeightFormat, softcap: Option<f32>) -> Case {
    let cap = if softcap.is_some() { " with softcap" } else { "" };
    logits_case(format!("logits {format}{cap}"), format, softcap, false)
}

fn biased_logits(format: WeightFormat) -> Case {
    logits_case(format!("logits {format} with bias"), format, None, true)
}

fn logits_case(name: String, format: WeightFormat, softcap: Option<f32>, is_biased: bool) -> Case {
    Case::new(name, some_rows(), move |backend| {
        let (mut random, cols, vocab) = (Random::new(10), 512, 1000);
        let (embed, hidden) = source(backend, &limits(), cols, &mut random)?;
        let head = random_tensor(format, vocab, cols, 0.1, &mut random);
        let weight = backend.load_weight(&[head], WeightUse::EmbeddingAndLinear)?;
        let norm = backend.load_vector(&random.normals(cols))?;
        let norm = Some(Norm { kind: NormKind::Rms, weight: norm, eps: 1e-5 });
        let output = backend.create_logits(16, vocab)?;
        let bias = is_biased.then(|| backend.load_vector(&random.normals(vocab))).transpose()?;
        let logits = Op::Logits(Logits { input: hidden, norm, weight, bias, softcap, output });
        let program = backend.compile(&Program::new(vec![embed, logits]))?;
        Ok(Built { program, output, rows: Rows::Logits })
    })
}

/// Rows without logits are dropped before the last products.
fn kept_rows() -> Case {
    Case::new("keep_logit_rows before a product".to_owned(), some_rows(), |backend| {
        let (mut random, cols, vocab) = (Random::new(11), 256, 1000);
        let (embed, hidden) = source(backend, &limits(), cols, &mut random)?;
        let mut weight = |rows| {
            let tensor = random_tensor(WeightFormat::BF16, rows, cols, 0.1, &mut random);
            backend.load_weight(&[tensor], WeightUse::Linear)
        };
        let (product, head) = (weight(cols)?, weight(vocab)?);
        let other = backend.create_buffer(MAX_TOKENS, cols)?;
        let output = backend.create_logits(16, vocab)?;
        let norm = backend.load_vector(&random.normals(cols))?;
        let norm = Norm { kind: NormKind::Rms, weight: norm, eps: 1e-5 };
        let linear = |input, output, accumulate| {
            Op::Linear(Linear { input, norm: None, weight: product, bias: None, output, accumulate })
        };
        let ops = vec![
            embed,
            Op::Norm(NormOp { input: hidden, norm, output: other, accumulate: false }),
            Op::KeepLogitRows(KeepLogitRows { buffers: vec![other, hidden] }),
            linear(other, hidden, true),
            Op::Logits(Logits {
                input: hidden,
                norm: Some(norm),
                weight: head,
                bias: None,
                softcap: None,
                output,
            }),
        ];
        Ok(Built { program: backend.compile(&Program::new(ops))?, output, rows: Rows::Logits })
    })
    .allowing(1.5)
}
