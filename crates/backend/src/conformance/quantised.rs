//! Weights of quantised checkpoints: eight-bit floats with scales of rows and of blocks, and columns out of order.

use std::sync::Arc;

use super::ops::{built, steps};
use super::{Built, Case, MAX_TOKENS, Rows, limits};
use crate::testing::{Random, random_tensor};
use crate::{
    Activation, Backend, BackendError, BufferId, Embed, GatedLinear, KvDtype, KvLayerSpec, KvSpec, Linear,
    Logits, Norm, NormKind, NormSpan, Op, Program, Qkv, RopeSpec, RopeStyle, Scales, StepInput, StepLimits,
    Tensor, WeightFormat, WeightUse, e4m3_from_f32, e4m3_to_f32,
};

/// The largest value of a row: a power of two below the largest of e4m3, 448.
const LARGEST: f32 = 3.5;

/// How scales lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Tensor,
    Rows,
    Blocks,
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in [Kind::Tensor, Kind::Rows, Kind::Blocks] {
        // The second has columns that are no whole units of any kernel.
        for (rows, cols) in [(256, 768), (80, 208)] {
            cases.push(linear(kind, rows, cols));
        }
        cases.push(gated(kind, 136, 512));
        cases.push(many_gated(kind));
        cases.push(any_values(kind));
        cases.push(qkv(kind));
        cases.push(logits(kind));
    }
    for format in [WeightFormat::Q4_0, WeightFormat::Q4_1, WeightFormat::Q8_0] {
        cases.push(ordered(format, true));
        cases.push(ordered(format, false));
    }
    cases
}

fn eight_bits(kind: Kind, rows: usize, cols: usize, random: &mut Random) -> Tensor {
    let tensor = random_tensor(WeightFormat::F8_E4M3, rows, cols, 1.0, random);
    let mut scales = |count: usize| (0..count).map(|_| 0.05 + 0.1 * random.uniform()).collect::<Vec<f32>>();
    let scales = match kind {
        Kind::Tensor => Scales::of_tensor(0.1),
        Kind::Rows => Scales::of_rows(scales(rows)),
        Kind::Blocks => {
            let across = cols.div_ceil(128);
            Scales::of_blocks(scales(rows.div_ceil(128) * across), 128, 128, across)
        }
    };
    tensor.with_scales(scales).expect("scales of this shape")
}

/// Rows that a device which rounds activations to e4m3 with a scale per token, before or after [`norm`], loses nothing of: the
/// first value is the largest and all are steps of e4m3 beside it.
fn source(
    backend: &mut dyn Backend,
    limits: &StepLimits,
    cols: usize,
    random: &mut Random,
) -> Result<(Op, BufferId), BackendError> {
    backend.set_limits(limits)?;
    let rows = limits.max_tokens;
    let unit = 448.0 / LARGEST;
    let rounded = |value: f32| e4m3_to_f32(e4m3_from_f32(value.clamp(-LARGEST, LARGEST) * unit)) / unit;
    let mut values: Vec<f32> = random.normals(rows * cols).into_iter().map(rounded).collect();
    values.iter_mut().step_by(cols).for_each(|first| *first = LARGEST);
    let table = Tensor::from_f32(rows, cols, &values).expect("as many values as the shape says");
    let weight = backend.load_weight(&[table], WeightUse::Embedding)?;
    let output = backend.create_buffer(rows, cols)?;
    Ok((Op::Embed(Embed { weight, scale: 1.0, output }), output))
}

/// Weights that keep the steps of [`source`], and its largest value.
fn norm(backend: &mut dyn Backend, cols: usize, random: &mut Random) -> Result<Norm, BackendError> {
    let mut values: Vec<f32> = (0..cols).map(|_| [1.0, -1.0, 0.5, -0.25][random.below(4)]).collect();
    values[0] = 1.0;
    let weight = backend.load_vector(&values)?;
    Ok(Norm { kind: NormKind::Rms, weight, eps: 1e-5 })
}

fn linear(kind: Kind, rows: usize, cols: usize) -> Case {
    let name = format!("linear F8_E4M3 of {kind:?} {rows} x {cols} with norm, bias, residual");
    Case::new(name, steps([1, 2, 7, 8, 9, 16, 17, 33, 64, 150]), move |backend| {
        let mut random = Random::new(21);
        let (embed, input) = source(backend, &limits(), cols, &mut random)?;
        let weight = backend.load_weight(&[eight_bits(kind, rows, cols, &mut random)], WeightUse::Linear)?;
        let bias = Some(backend.load_vector(&random.normals(rows))?);
        let norm = Some(norm(backend, cols, &mut random)?);
        let output = backend.create_buffer(MAX_TOKENS, rows)?;
        let first = Linear { input, norm, weight, bias, output, accumulate: false };
        let second = Linear { norm: None, bias: None, accumulate: true, ..first };
        built(backend, vec![embed, Op::Linear(first), Op::Linear(second)], output)
    })
}

fn gated(kind: Kind, width: usize, cols: usize) -> Case {
    let name = format!("gated_linear F8_E4M3 of {kind:?} in two parts");
    Case::new(name, steps([1, 4, 8, 13, 16, 30, 70]), move |backend| {
        let mut random = Random::new(22);
        let (embed, input) = source(backend, &limits(), cols, &mut random)?;
        let parts = [(); 2].map(|()| eight_bits(kind, width, cols, &mut random));
        let weight = backend.load_weight(&parts, WeightUse::Linear)?;
        let norm = Some(norm(backend, cols, &mut random)?);
        let output = backend.create_buffer(MAX_TOKENS, width)?;
        let activation = Activation::Silu;
        let gated = GatedLinear { input, norm, weight, bias: None, activation, output };
        built(backend, vec![embed, Op::GatedLinear(gated)], output)
    })
}

/// Few tokens are not rounded to e4m3, whatever their values are.
fn any_values(kind: Kind) -> Case {
    let (width, cols) = (328, 1408);
    Case::new(
        format!("gated_linear F8_E4M3 of {kind:?}, then linear, of any values"),
        steps([1, 2, 3, 7, 8]),
        move |backend| {
            let mut random = Random::new(26);
            let (embed, input) = super::ops::source(backend, &limits(), cols, &mut random)?;
            let parts = [(); 2].map(|()| eight_bits(kind, width, cols, &mut random));
            let both = backend.load_weight(&parts, WeightUse::Linear)?;
            let other =
                backend.load_weight(&[eight_bits(kind, width, cols, &mut random)], WeightUse::Linear)?;
            let weight = backend.load_vector(&random.normals(cols))?;
            let norm = Some(Norm { kind: NormKind::Rms, weight, eps: 1e-5 });
            let bias = Some(backend.load_vector(&random.normals(width))?);
            let output = backend.create_buffer(MAX_TOKENS, width)?;
            let activation = Activation::GeluTanh;
            let gated = GatedLinear { input, norm, weight: both, bias: None, activation, output };
            let added = Linear { input, norm: None, weight: other, bias, output, accumulate: true };
            built(backend, vec![embed, Op::GatedLinear(gated), Op::Linear(added)], output)
        },
    )
}

/// Tokens for which product and activation may be one kernel.
fn many_gated(kind: Kind) -> Case {
    const TOKENS: usize = 700;
    let (width, cols) = (20 * 128, 384);
    let name = format!("gated_linear F8_E4M3 of {kind:?} of many tokens");
    Case::new(name, steps([20, 64, 65, 128, 256, 300, TOKENS]), move |backend| {
        let mut random = Random::new(23);
        let limits = StepLimits { max_tokens: TOKENS, ..limits() };
        let (embed, input) = source(backend, &limits, cols, &mut random)?;
        let parts = [(); 2].map(|()| eight_bits(kind, width, cols, &mut random));
        let weight = backend.load_weight(&parts, WeightUse::Linear)?;
        let norm = Some(norm(backend, cols, &mut random)?);
        let output = backend.create_buffer(TOKENS, width)?;
        let activation = Activation::Silu;
        let gated = GatedLinear { input, norm, weight, bias: None, activation, output };
        built(backend, vec![embed, Op::GatedLinear(gated)], output)
    })
}

/// Queries only: keys and values go to the cache, which the cases of attention look at.
fn qkv(kind: Kind) -> Case {
    let (num_heads, num_kv_heads, head_dim, cols) = (4, 2, 64, 512);
    let mut steps: Vec<StepInput> = steps([1, 3, 16, 40]);
    for step in &mut steps {
        step.slots = (0..step.num_tokens() as u32).collect();
    }
    Case::new(format!("qkv F8_E4M3 of {kind:?} with norm, rope"), steps, move |backend| {
        let mut random = Random::new(24);
        let (embed, input) = source(backend, &limits(), cols, &mut random)?;
        let rows = [num_heads, num_kv_heads, num_kv_heads].map(|heads| heads * head_dim);
        let parts = rows.map(|rows| eight_bits(kind, rows, cols, &mut random));
        let weight = backend.load_weight(&parts, WeightUse::Linear)?;
        let norm = Some(norm(backend, cols, &mut random)?);
        let inv_freq = (0..head_dim / 2).map(|i| 0.5_f32.powi(i as i32 / 4)).collect();
        let rope = Some(backend.create_rope(&RopeSpec { inv_freq, scale: 1.0, style: RopeStyle::Half })?);
        let output = backend.create_buffer(MAX_TOKENS, num_heads * head_dim)?;
        let (q_norm, k_norm) = (None, None);
        let qkv = Qkv {
            input,
            norm,
            weight,
            bias: None,
            q_norm,
            k_norm,
            norm_span: NormSpan::Head,
            rope,
            num_heads,
            layer: 0,
            output,
        };
        let program = backend.compile(&Program::new(vec![embed, Op::Qkv(qkv)]))?;
        let layer = KvLayerSpec { num_kv_heads, head_dim };
        backend.create_kv_cache(&KvSpec::new(vec![layer], &[None], KvDtype::F16, 16), 16, 0)?;
        Ok(Built { program, output, rows: Rows::Tokens })
    })
}

fn logits(kind: Kind) -> Case {
    let steps = [1, 6, 16].map(|count| {
        let step = super::tokens(count);
        StepInput { logit_rows: (0..count as u32).collect(), ..step }
    });
    Case::new(format!("logits F8_E4M3 of {kind:?}"), steps.into(), move |backend| {
        let (mut random, cols, vocab) = (Random::new(25), 512, 1000);
        let (embed, input) = source(backend, &limits(), cols, &mut random)?;
        let head = eight_bits(kind, vocab, cols, &mut random);
        let weight = backend.load_weight(&[head], WeightUse::Linear)?;
        let norm = Some(norm(backend, cols, &mut random)?);
        let output = backend.create_logits(16, vocab)?;
        let logits = Op::Logits(Logits { input, norm, weight, bias: None, softcap: None, output });
        let program = backend.compile(&Program::new(vec![embed, logits]))?;
        Ok(Built { program, output, rows: Rows::Logits })
    })
}

/// As GPTQ with `desc_act` has them; parts with different orders are put in order.
fn ordered(format: WeightFormat, is_common: bool) -> Case {
    let kind = if is_common { "in one order" } else { "in two orders" };
    Case::new(format!("linear {format} with columns {kind}"), steps([1, 5, 40, 150]), move |backend| {
        let (mut random, rows, cols) = (Random::new(26), 64, 512);
        let (embed, input) = source(backend, &limits(), cols, &mut random)?;
        let order =
            |step: usize| -> Arc<[u32]> { (0..cols).map(|i| ((i * step + 3) % cols) as u32).collect() };
        let orders = [order(37), order(if is_common { 37 } else { 91 })];
        let parts = orders.map(|columns| {
            let tensor = random_tensor(format, rows, cols, 0.1, &mut random);
            tensor.with_columns(columns).expect("each column once")
        });
        let weight = backend.load_weight(&parts, WeightUse::Linear)?;
        let norm = Some(norm(backend, cols, &mut random)?);
        let output = backend.create_buffer(MAX_TOKENS, 2 * rows)?;
        let first = Linear { input, norm, weight, bias: None, output, accumulate: false };
        let second = Linear { norm: None, accumulate: true, ..first };
        built(backend, vec![embed, Op::Linear(first), Op::Linear(second)], output)
    })
}
