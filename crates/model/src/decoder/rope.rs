//! Rotary frequencies: from how a checkpoint was stretched to one table of inverse frequencies.
//!
//! The formulas and their order of rounding are those of transformers (`modeling_rope_utils`), so that the tables agree
//! to the last bit or two of an f32: an error in a frequency grows with the position it is multiplied by.

use std::f32::consts::TAU;

use baton_backend::{RopeSpec, RopeStyle};

use crate::{ModelError, RopeConfig, RopeScaling};

/// The table for a model that is served up to `max_model_len` tokens.
///
/// Only `Dynamic` (NTK) looks at the length. Transformers recomputes it as a sequence grows past the original context,
/// but keys in a paged cache were rotated once and are shared by sequences of all lengths, so there is one table: that
/// of the longest sequence served, or the unscaled one where that fits the original context.
pub fn rope_spec(
    config: &RopeConfig,
    style: RopeStyle,
    max_model_len: usize,
) -> Result<RopeSpec, ModelError> {
    check(config)?;
    let dim = config.rotary_dim;
    let plain = || inverse_frequencies(config.theta as f64, dim);
    let mut scale = 1.0;
    let inv_freq = match &config.scaling {
        RopeScaling::None => plain(),
        RopeScaling::Linear { factor } => plain().into_iter().map(|freq| freq / factor).collect(),
        &RopeScaling::Dynamic { factor, original_max_position_embeddings } => {
            let theta = dynamic_theta(config, factor, original_max_position_embeddings, max_model_len);
            inverse_frequencies(theta, dim)
        }
        &RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            let context = original_max_position_embeddings as f32;
            let stretch = |freq| llama3_frequency(freq, factor, low_freq_factor, high_freq_factor, context);
            plain().into_iter().map(stretch).collect()
        }
        RopeScaling::Yarn { .. } => {
            let (inv_freq, attention_factor) = yarn(config);
            scale = attention_factor;
            inv_freq
        }
        RopeScaling::LongRope { short, long, original_max_position_embeddings, attention_factor } => {
            scale = *attention_factor;
            let divisors = if max_model_len > *original_max_position_embeddings { long } else { short };
            plain().into_iter().zip(divisors).map(|(freq, divisor)| freq / divisor).collect()
        }
        RopeScaling::Factors { divisors } => {
            plain().into_iter().zip(divisors).map(|(freq, divisor)| freq / divisor).collect()
        }
    };
    Ok(RopeSpec { inv_freq, scale, style })
}

/// `theta ^ (−2i / dim)` for every pair of dimensions. The exponent is rounded to f32 first, as transformers does.
fn inverse_frequencies(theta: f64, dim: usize) -> Vec<f32> {
    position_frequencies(theta, dim).map(|freq| 1.0 / freq).collect()
}

fn position_frequencies(theta: f64, dim: usize) -> impl Iterator<Item = f32> {
    (0..dim / 2).map(move |i| {
        let exponent = (2 * i) as f32 / dim as f32;
        theta.powf(exponent as f64) as f32
    })
}

fn dynamic_theta(config: &RopeConfig, factor: f32, original: usize, max_model_len: usize) -> f64 {
    let theta = config.theta as f64;
    // A rotation of one pair only has no frequency to stretch, and no exponent.
    if max_model_len <= original || config.rotary_dim <= 2 {
        return theta;
    }
    let (factor, dim) = (factor as f64, config.rotary_dim as f64);
    let stretch = factor * max_model_len as f64 / original as f64 - (factor - 1.0);
    theta * stretch.powf(dim / (dim - 2.0))
}

/// Leaves short waves, divides long ones by the factor and blends in between.
fn llama3_frequency(freq: f32, factor: f32, low: f32, high: f32, context: f32) -> f32 {
    let wave_length = TAU / freq;
    if wave_length < context / high {
        freq
    } else if wave_length > context / low {
        freq / factor
    } else {
        let smooth = (context / wave_length - low) / (high - low);
        (1.0 - smooth) * (freq / factor) + smooth * freq
    }
}

/// Yarn's frequencies, and what it multiplies cos and sin with.
fn yarn(config: &RopeConfig) -> (Vec<f32>, f32) {
    let &RopeScaling::Yarn {
        factor,
        original_max_position_embeddings,
        attention_factor,
        beta_fast,
        beta_slow,
        mscale,
        mscale_all_dim,
        truncate,
    } = &config.scaling
    else {
        unreachable!("called for yarn only");
    };
    let (theta, dim) = (config.theta as f64, config.rotary_dim);
    // The dimension that turns this many times over the original context.
    let correction_dim = |rotations: f32| {
        let turns = original_max_position_embeddings as f64 / (rotations as f64 * std::f64::consts::TAU);
        dim as f64 * turns.ln() / (2.0 * theta.ln())
    };
    let (mut low, mut high) = (correction_dim(beta_fast), correction_dim(beta_slow));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
    if low == high {
        high += 0.001;
    }
    let blend = |(i, freq): (usize, f32)| {
        let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        let extrapolated = 1.0 - ramp;
        (1.0 / (factor * freq)) * (1.0 - extrapolated) + (1.0 / freq) * extrapolated
    };
    let inv_freq = position_frequencies(theta, dim).enumerate().map(blend).collect();
    let attention_factor = attention_factor.unwrap_or_else(|| match (mscale, mscale_all_dim) {
        (Some(mscale), Some(all_dim)) if mscale != 0.0 && all_dim != 0.0 => {
            (yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)) as f32
        }
        _ => yarn_mscale(factor, 1.0) as f32,
    });
    (inv_freq, attention_factor)
}

fn yarn_mscale(factor: f32, mscale: f32) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale as f64 * (factor as f64).ln() + 1.0 }
}

/// Numbers that give no usable table are refused, rather than answered with NaN.
fn check(config: &RopeConfig) -> Result<(), ModelError> {
    let wrong = |what: String| Err(ModelError::Config { what: format!("rotary embedding: {what}") });
    let dim = config.rotary_dim;
    if dim == 0 || !dim.is_multiple_of(2) {
        return wrong(format!("the number of rotated dimensions must be even and above 0, got {dim}"));
    }
    let positive = |name: &str, value: f32| {
        if value.is_finite() && value > 0.0 {
            return Ok(());
        }
        wrong(format!("{name} must be a number above 0, got {value}"))
    };
    let context = |value: usize| positive("original_max_position_embeddings", value as f32);
    positive("rope_theta", config.theta)?;
    match &config.scaling {
        RopeScaling::None => Ok(()),
        RopeScaling::Linear { factor } => positive("factor", *factor),
        RopeScaling::Dynamic { factor, original_max_position_embeddings } => {
            positive("factor", *factor)?;
            context(*original_max_position_embeddings)
        }
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            positive("factor", *factor)?;
            positive("low_freq_factor", *low_freq_factor)?;
            positive("high_freq_factor", *high_freq_factor)?;
            if low_freq_factor >= high_freq_factor {
                return wrong(format!(
                    "low_freq_factor {low_freq_factor} must be below high_freq_factor {high_freq_factor}"
                ));
            }
            context(*original_max_position_embeddings)
        }
        RopeScaling::Yarn {
            factor,
            original_max_position_embeddings,
            attention_factor,
            beta_fast,
            beta_slow,
            ..
        } => {
            positive("factor", *factor)?;
            positive("beta_fast", *beta_fast)?;
            positive("beta_slow", *beta_slow)?;
            positive("attention_factor", attention_factor.unwrap_or(1.0))?;
            if config.theta == 1.0 {
                return wrong("yarn needs a rope_theta other than 1".to_owned());
            }
            context(*original_max_position_embeddings)
        }
        RopeScaling::LongRope { short, long, original_max_position_embeddings, attention_factor } => {
            positive("attention_factor", *attention_factor)?;
            if short.len() != dim / 2 || long.len() != dim / 2 {
                return wrong(format!("{} and {} factors, expected {}", short.len(), long.len(), dim / 2));
            }
            context(*original_max_position_embeddings)
        }
        RopeScaling::Factors { divisors } => {
            if divisors.len() != dim / 2 {
                return wrong(format!(
                    "{dim} rotated dimensions need {} frequency factors, got {}",
                    dim / 2,
                    divisors.len()
                ));
            }
            divisors.iter().try_for_each(|&divisor| positive("every frequency factor", divisor))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn scaling(case: &Value) -> RopeScaling {
        let parameters = &case["parameters"];
        let optional = |name: &str| parameters[name].as_f64().map(|value| value as f32);
        let number = |name: &str| optional(name).unwrap();
        let original = parameters["original_max_position_embeddings"]
            .as_u64()
            .or(case["max_position_embeddings"].as_u64())
            .unwrap() as usize;
        match parameters["rope_type"].as_str().unwrap() {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: number("factor") },
            "dynamic" => {
                RopeScaling::Dynamic { factor: number("factor"), original_max_position_embeddings: original }
            }
            "llama3" => RopeScaling::Llama3 {
                factor: number("factor"),
                low_freq_factor: number("low_freq_factor"),
                high_freq_factor: number("high_freq_factor"),
                original_max_position_embeddings: original,
            },
            "yarn" => RopeScaling::Yarn {
                factor: number("factor"),
                original_max_position_embeddings: original,
                attention_factor: optional("attention_factor"),
                beta_fast: optional("beta_fast").unwrap_or(32.0),
                beta_slow: optional("beta_slow").unwrap_or(1.0),
                mscale: optional("mscale"),
                mscale_all_dim: optional("mscale_all_dim"),
                truncate: parameters["truncate"].as_bool().unwrap_or(true),
            },
            other => panic!("no such scaling: {other}"),
        }
    }

    #[test]
    fn tables_are_those_of_transformers() {
        let cases: Vec<Value> =
            serde_json::from_str(include_str!("../../tests/data/golden/ropes.json")).unwrap();
        assert!(cases.len() > 10);
        for case in &cases {
            let config = RopeConfig {
                theta: case["parameters"]["rope_theta"].as_f64().unwrap() as f32,
                rotary_dim: case["rotary_dim"].as_u64().unwrap() as usize,
                scaling: scaling(case),
            };
            let max_model_len = case["max_model_len"].as_u64().unwrap() as usize;
            let spec = rope_spec(&config, RopeStyle::Half, max_model_len).unwrap();
            let expected = case["inv_freq"].as_array().unwrap();
            assert_eq!(spec.inv_freq.len(), expected.len());
            for (i, (&got, expected)) in spec.inv_freq.iter().zip(expected).enumerate() {
                let expected = expected.as_f64().unwrap();
                let error = (got as f64 - expected).abs() / expected;
                assert!(error < 4e-7, "{config:?}: frequency {i} is {got}, expected {expected}");
            }
            let scale = case["scale"].as_f64().unwrap();
            assert!((spec.scale as f64 - scale).abs() < 1e-6, "{config:?}: {} not {scale}", spec.scale);
        }
    }

    #[test]
    fn factors_divide_the_frequencies() {
        let config = RopeConfig {
            theta: 100.0,
            rotary_dim: 4,
            scaling: RopeScaling::Factors { divisors: vec![1.0, 4.0] },
        };
        let spec = rope_spec(&config, RopeStyle::Interleaved, 10).unwrap();
        assert_eq!(spec.inv_freq, [1.0, 0.025]);
        assert_eq!(spec.style, RopeStyle::Interleaved);
    }

    #[test]
    fn unusable_numbers_are_refused() {
        let refused = |rotary_dim, theta, scaling| {
            let config = RopeConfig { theta, rotary_dim, scaling };
            rope_spec(&config, RopeStyle::Half, 10).unwrap_err().to_string()
        };
        assert_eq!(
            refused(5, 10.0, RopeScaling::None),
            "rotary embedding: the number of rotated dimensions must be even and above 0, got 5"
        );
        assert_eq!(
            refused(4, f32::NAN, RopeScaling::None),
            "rotary embedding: rope_theta must be a number above 0, got NaN"
        );
        assert_eq!(
            refused(4, 10.0, RopeScaling::Linear { factor: 0.0 }),
            "rotary embedding: factor must be a number above 0, got 0"
        );
        assert_eq!(
            refused(4, 10.0, RopeScaling::Factors { divisors: vec![1.0] }),
            "rotary embedding: 4 rotated dimensions need 2 frequency factors, got 1"
        );
    }
}
