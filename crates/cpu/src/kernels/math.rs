//! Functions that the processors do not have, to about one unit in the last place, for sixteen lanes.
//!
//! # Safety
//! As in [`super::simd`].
#![allow(unsafe_op_in_unsafe_fn)]

use baton_backend::Activation;

use super::simd::Simd;

/// Below this e^x is no normal number; it is taken as 0.
const EXP_LOW: f32 = -87.33;
const EXP_HIGH: f32 = 88.37;
/// e^x for small x, the highest power first.
const EXP_SERIES: [f32; 8] =
    [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5, 1.0, 1.0];

/// e^x: 1 at 0 and 0 at minus infinity, exactly.
#[inline(always)]
pub unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    let bounded = S::min(S::max(x, S::splat(EXP_LOW)), S::splat(EXP_HIGH));
    let power = S::to_int(S::mul(bounded, S::splat(std::f32::consts::LOG2_E)));
    let whole = S::to_float(power);
    // ln 2 in two parts, the first of which has few enough bits to multiply without loss.
    let rest = S::fma(whole, S::splat(-0.693_359_4), bounded);
    let rest = S::fma(whole, S::splat(2.121_944_4e-4), rest);
    let mut series = S::splat(EXP_SERIES[0]);
    for &coefficient in &EXP_SERIES[1..] {
        series = S::fma(series, rest, S::splat(coefficient));
    }
    S::zero_below(S::mul(series, S::exp2_int(power)), x, EXP_LOW)
}

/// The same for several vectors of numbers that are not above 0, to the same last bit: the vectors' steps come one beside the
/// other, so that none waits for another's result.
#[inline(always)]
pub unsafe fn exp_not_above_0<S: Simd, const N: usize>(x: [S::F; N]) -> [S::F; N] {
    let mut rest = x;
    let mut powers = [S::splat_int(0); N];
    for i in 0..N {
        rest[i] = S::max(x[i], S::splat(EXP_LOW));
        powers[i] = S::to_int(S::mul(rest[i], S::splat(std::f32::consts::LOG2_E)));
    }
    for i in 0..N {
        let whole = S::to_float(powers[i]);
        rest[i] = S::fma(whole, S::splat(-0.693_359_4), rest[i]);
        rest[i] = S::fma(whole, S::splat(2.121_944_4e-4), rest[i]);
    }
    let mut series = [S::splat(EXP_SERIES[0]); N];
    for &coefficient in &EXP_SERIES[1..] {
        for i in 0..N {
            series[i] = S::fma(series[i], rest[i], S::splat(coefficient));
        }
    }
    for i in 0..N {
        series[i] = S::zero_below(S::mul(series[i], S::exp2_int(powers[i])), x[i], EXP_LOW);
    }
    series
}

/// 1 − 2 / (e^2x + 1).
#[inline(always)]
pub unsafe fn tanh<S: Simd>(x: S::F) -> S::F {
    let one = S::splat(1.0);
    S::sub(one, S::div(S::splat(2.0), S::add(exp::<S>(S::add(x, x)), one)))
}

#[inline(always)]
unsafe fn sigmoid<S: Simd>(x: S::F) -> S::F {
    let one = S::splat(1.0);
    S::reciprocal(S::add(one, exp::<S>(S::sub(S::splat(0.0), x))))
}

/// The error function by the five-term formula 7.1.26 of Abramowitz and Stegun: within 1.5e-7.
#[inline(always)]
unsafe fn erf<S: Simd>(x: S::F) -> S::F {
    let one = S::splat(1.0);
    let size = S::abs(x);
    let t = S::div(one, S::fma(S::splat(0.327_591_1), size, one));
    let mut series = S::splat(1.061_405_4);
    for coefficient in [-1.453_152_1, 1.421_413_8, -0.284_496_72, 0.254_829_6] {
        series = S::fma(series, t, S::splat(coefficient));
    }
    let tail = S::mul(S::mul(series, t), exp::<S>(S::sub(S::splat(0.0), S::mul(x, x))));
    let value = S::sub(one, tail);
    // The sign of x: twice "x is not below 0", less one.
    let sign = S::sub(S::zero_below(S::splat(2.0), x, 0.0), one);
    S::mul(value, sign)
}

/// The activation of a gate.
#[inline(always)]
pub unsafe fn activate<S: Simd>(activation: Activation, x: S::F) -> S::F {
    let half = S::mul(x, S::splat(0.5));
    match activation {
        Activation::Silu => S::mul(x, sigmoid::<S>(x)),
        Activation::GeluTanh => {
            let cubic = S::fma(S::mul(S::mul(x, x), x), S::splat(0.044_715), x);
            S::fma(half, tanh::<S>(S::mul(cubic, S::splat(0.797_884_6))), half)
        }
        Activation::Gelu => {
            S::fma(half, erf::<S>(S::mul(x, S::splat(std::f32::consts::FRAC_1_SQRT_2))), half)
        }
        Activation::Relu => S::max(x, S::splat(0.0)),
        Activation::ReluSquared => {
            let positive = S::max(x, S::splat(0.0));
            S::mul(positive, positive)
        }
        // Only of gates: see `activate_gate`. Programs are checked for that.
        Activation::ClampedSwiglu => x,
    }
}

/// What a gate lets through of `up`.
#[inline(always)]
pub unsafe fn activate_gate<S: Simd>(activation: Activation, gate: S::F, up: S::F) -> S::F {
    if activation != Activation::ClampedSwiglu {
        return S::mul(activate::<S>(activation, gate), up);
    }
    let limit = Activation::SWIGLU_LIMIT;
    let gate = S::min(gate, S::splat(limit));
    let up = S::max(S::min(up, S::splat(limit)), S::splat(-limit));
    let let_through = S::mul(gate, sigmoid::<S>(S::mul(gate, S::splat(Activation::SWIGLU_ALPHA))));
    S::fma(let_through, up, let_through)
}

/// `cap · tanh(x / cap)`.
#[inline(always)]
pub unsafe fn softcap<S: Simd>(x: S::F, cap: f32) -> S::F {
    S::mul(tanh::<S>(S::mul(x, S::splat(1.0 / cap))), S::splat(cap))
}
