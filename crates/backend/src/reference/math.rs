//! The formulas. Sums are in f64, so that the oracle's own rounding is far below that of what it judges.

use super::Parameters;
use crate::{Activation, Norm, NormKind, RopeSpec, RopeStyle, VectorId};

/// Eight running sums instead of one: less rounding, and the compiler can use vectors.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "a product of vectors of different lengths");
    let mut sums = [0.0_f64; 8];
    for (a, b) in a.chunks(8).zip(b.chunks(8)) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += f64::from(*a) * f64::from(*b);
        }
    }
    sums.iter().sum::<f64>() as f32
}

/// Normalises in place.
pub(super) fn normalize(values: &mut [f32], norm: &Norm, parameters: &Parameters) {
    normalize_part(values, norm, parameters, 0, values.len());
}

/// The same with the weights from `first` on, of `total`.
pub(super) fn normalize_part(
    values: &mut [f32],
    norm: &Norm,
    parameters: &Parameters,
    first: usize,
    total: usize,
) {
    let part = first..first + values.len();
    let weight = &vector(parameters, norm.weight, total)[part.clone()];
    let len = values.len() as f64;
    let mean = match norm.kind {
        NormKind::Rms => 0.0,
        NormKind::Layer { .. } => values.iter().map(|value| f64::from(*value)).sum::<f64>() / len,
    };
    let variance = values.iter().map(|value| (f64::from(*value) - mean).powi(2)).sum::<f64>() / len;
    let factor = 1.0 / (variance + f64::from(norm.eps)).sqrt();
    for (value, weight) in values.iter_mut().zip(weight) {
        *value = ((f64::from(*value) - mean) * factor) as f32 * weight;
    }
    if let NormKind::Layer { bias: Some(bias) } = norm.kind {
        let bias = &vector(parameters, bias, total)[part];
        for (value, bias) in values.iter_mut().zip(bias) {
            *value += bias;
        }
    }
}

/// Rotates the first `2 · inv_freq.len()` values of a head.
pub(super) fn rotate(head: &mut [f32], rope: &RopeSpec, position: u32) {
    let half = rope.inv_freq.len();
    assert!(2 * half <= head.len(), "rotary dimension {} of a head of {}", 2 * half, head.len());
    for (i, inv_freq) in rope.inv_freq.iter().enumerate() {
        // The angle is rounded to f32, as checkpoints were trained with.
        let angle = f64::from(position as f32 * inv_freq);
        let (sin, cos) = ((angle.sin() as f32) * rope.scale, (angle.cos() as f32) * rope.scale);
        let (first, second) = match rope.style {
            RopeStyle::Half => (i, i + half),
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
        };
        let (x, y) = (head[first], head[second]);
        head[first] = x * cos - y * sin;
        head[second] = y * cos + x * sin;
    }
}

pub(super) fn activate(activation: Activation, value: f32) -> f32 {
    let x = f64::from(value);
    let result = match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::Gelu => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
        Activation::Relu => x.max(0.0),
        Activation::ReluSquared => x.max(0.0) * x.max(0.0),
        Activation::ClampedSwiglu => panic!("{activation:?} of a product without a gate"),
    };
    result as f32
}

/// What a gate lets through of `up`.
pub(super) fn activate_gate(activation: Activation, gate: f32, up: f32) -> f32 {
    if activation != Activation::ClampedSwiglu {
        return activate(activation, gate) * up;
    }
    let limit = f64::from(Activation::SWIGLU_LIMIT);
    let (gate, up) = (f64::from(gate).min(limit), f64::from(up).clamp(-limit, limit));
    (gate / (1.0 + (-f64::from(Activation::SWIGLU_ALPHA) * gate).exp()) * (up + 1.0)) as f32
}

pub(super) fn apply_softcap(value: f32, softcap: Option<f32>) -> f32 {
    softcap.map_or(value, |cap| cap * (value / cap).tanh())
}

pub(super) fn vector(parameters: &Parameters, id: VectorId, len: usize) -> &[f32] {
    let vector = &parameters.vectors[id.0 as usize];
    assert_eq!(vector.len(), len, "vector {} has the wrong length", id.0);
    vector
}

/// `2/√π · exp(−x²) · Σ 2ⁿ x²ⁿ⁺¹ / (1·3·5·…·(2n+1))`: all terms have one sign, so that nothing cancels.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > 1e-17 * sum.abs() {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of Python's `math.erf` and of the formulas in double precision.
    #[test]
    fn known_values() {
        for (x, expected) in
            [(0.0, 0.0), (0.5, 0.5204998778130465), (-2.0, -0.9953222650189527), (5.5, 0.9999999999999927)]
        {
            assert!((erf(x) - expected).abs() < 1e-14, "erf({x}) = {}", erf(x));
        }
        assert_eq!(activate(Activation::Silu, -1000.0), 0.0);
        assert!((activate(Activation::Silu, 1.0) - 0.731_058_6).abs() < 1e-6);
        assert!((activate(Activation::Gelu, 1.0) - 0.841_344_7).abs() < 1e-6);
        assert!((activate(Activation::GeluTanh, 1.0) - 0.841_192).abs() < 1e-6);
        assert_eq!(activate(Activation::Gelu, 100.0), 100.0);
        assert_eq!(activate(Activation::GeluTanh, -100.0), 0.0);
        let swiglu = |gate, up| activate_gate(Activation::ClampedSwiglu, gate, up);
        assert!((swiglu(1.0, 0.5) - 1.268_693_6).abs() < 1e-6, "{}", swiglu(1.0, 0.5));
        assert_eq!((swiglu(9.0, 9.0), swiglu(2.0, -9.0)), (swiglu(7.0, 7.0), swiglu(2.0, -7.0)));
        assert_eq!((swiglu(-100.0, 1.0), swiglu(3.0, -1.0)), (0.0, 0.0));
    }

    #[test]
    fn rotation_styles() {
        let rope = |style| RopeSpec { inv_freq: vec![1.0, 0.01], scale: 1.0, style };
        let rotated = |style| {
            let mut head = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
            rotate(&mut head, &rope(style), 3);
            head
        };
        let (c, s, c2, s2) = (3_f32.cos(), 3_f32.sin(), 0.03_f32.cos(), 0.03_f32.sin());
        let half = [c - 3.0 * s, 2.0 * c2 - 4.0 * s2, 3.0 * c + s, 4.0 * c2 + 2.0 * s2, 5.0, 6.0];
        let interleaved = [c - 2.0 * s, 2.0 * c + s, 3.0 * c2 - 4.0 * s2, 4.0 * c2 + 3.0 * s2, 5.0, 6.0];
        for (actual, expected) in rotated(RopeStyle::Half).iter().zip(half) {
            assert!((actual - expected).abs() < 1e-6);
        }
        for (actual, expected) in rotated(RopeStyle::Interleaved).iter().zip(interleaved) {
            assert!((actual - expected).abs() < 1e-6);
        }
    }
}
