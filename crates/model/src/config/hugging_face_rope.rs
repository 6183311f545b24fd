//! Rotary embeddings in `config.json`: theta, the part of a head that is rotated, and how the context was stretched.
//! Only what is written is read here; the frequencies are computed by the decoder.

use super::hugging_face::Defaults;
use super::limits::config_error;
use super::raw::{RawConfig, RawRope};
use super::{Architecture, RopeConfig, RopeScaling};
use crate::ModelError;

const GEMMA_LOCAL_THETA: f64 = 10_000.0;

/// The rotary tables: one, or for gemma that of the full layers and that of the sliding ones.
pub(super) fn ropes(
    architecture: Architecture,
    raw: &RawConfig,
    defaults: &Defaults,
    head_dim: usize,
    position_limit: u64,
) -> Result<Vec<RopeConfig>, ModelError> {
    // As in transformers: the older key wins where both are there.
    let written = raw.rope_scaling.as_ref().or(raw.rope_parameters.as_ref()).cloned().unwrap_or_default();
    let by_layer_type = written.full_attention.is_some() || written.sliding_attention.is_some();
    let full = written.full_attention.as_deref().cloned();
    let sliding = written.sliding_attention.as_deref().cloned();
    let one = |rope: &RawRope, theta: f64| {
        let theta = rope.rope_theta.unwrap_or(theta);
        let rotated = rope.partial_rotary_factor.or(raw.partial_rotary_factor);
        let rotated = rotated.unwrap_or(defaults.partial_rotary_factor);
        rope_config(raw, rope, theta, rotated, head_dim, position_limit)
    };
    let global_theta = raw.rope_theta.unwrap_or(defaults.rope_theta);
    if architecture == Architecture::Gemma3 {
        let local_theta = raw.rope_local_base_freq.unwrap_or(GEMMA_LOCAL_THETA);
        let full = if by_layer_type { full.unwrap_or_default() } else { written };
        return Ok(vec![one(&full, global_theta)?, one(&sliding.unwrap_or_default(), local_theta)?]);
    }
    if !by_layer_type {
        return Ok(vec![one(&written, global_theta)?]);
    }
    // Other models have one table; both entries must say the same.
    let full = full.map(|rope| one(&rope, global_theta)).transpose()?;
    let sliding = sliding.map(|rope| one(&rope, global_theta)).transpose()?;
    match (full, sliding) {
        (Some(full), Some(sliding)) if full != sliding => {
            Err(config_error("rope_parameters differ between layer types, which only gemma3 may have"))
        }
        (Some(rope), _) | (None, Some(rope)) => Ok(vec![rope]),
        (None, None) => Ok(vec![one(&RawRope::default(), global_theta)?]),
    }
}

fn rope_config(
    raw: &RawConfig,
    rope: &RawRope,
    theta: f64,
    rotated: f64,
    head_dim: usize,
    position_limit: u64,
) -> Result<RopeConfig, ModelError> {
    if !(rotated > 0.0 && rotated <= 1.0) {
        return Err(config_error(format!(
            "partial_rotary_factor is {rotated}; it must be above 0 and at most 1"
        )));
    }
    Ok(RopeConfig {
        theta: theta as f32,
        rotary_dim: (head_dim as f64 * rotated) as usize,
        scaling: scaling(raw, rope, position_limit)?,
    })
}

fn scaling(raw: &RawConfig, rope: &RawRope, position_limit: u64) -> Result<RopeScaling, ModelError> {
    let Some(kind) = rope.rope_type.as_deref().or(rope.legacy_type.as_deref()) else {
        return match rope.factor {
            None => Ok(RopeScaling::None),
            Some(factor) => {
                Err(config_error(format!("rope_scaling has the factor {factor} but no \"rope_type\"")))
            }
        };
    };
    let factor = || {
        rope.factor
            .map(|factor| factor as f32)
            .ok_or_else(|| config_error(format!("rope_scaling of type {kind:?} has no \"factor\"")))
    };
    let positions = |value: u64| {
        usize::try_from(value).map_err(|_| config_error(format!("{value} positions are too many")))
    };
    let original = || {
        positions(
            raw.original_max_position_embeddings
                .or(rope.original_max_position_embeddings)
                .unwrap_or(position_limit),
        )
    };
    let needed = |name: &str, value: Option<f64>| {
        value
            .map(|value| value as f32)
            .ok_or_else(|| config_error(format!("rope_scaling of type {kind:?} has no {name:?}")))
    };
    Ok(match kind {
        "default" | "none" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: factor()? },
        // Its formula stretches from the configuration's own limit.
        "dynamic" => RopeScaling::Dynamic {
            factor: factor()?,
            original_max_position_embeddings: positions(position_limit)?,
        },
        "llama3" => RopeScaling::Llama3 {
            factor: factor()?,
            low_freq_factor: needed("low_freq_factor", rope.low_freq_factor)?,
            high_freq_factor: needed("high_freq_factor", rope.high_freq_factor)?,
            original_max_position_embeddings: original()?,
        },
        "yarn" => {
            let original = original()?;
            RopeScaling::Yarn {
                factor: rope
                    .factor
                    .map_or_else(|| position_limit as f32 / original as f32, |factor| factor as f32),
                original_max_position_embeddings: original,
                attention_factor: rope.attention_factor.map(|value| value as f32),
                // Zero means the default here, as transformers has it.
                beta_fast: rope.beta_fast.filter(|&beta| beta != 0.0).unwrap_or(32.0) as f32,
                beta_slow: rope.beta_slow.filter(|&beta| beta != 0.0).unwrap_or(1.0) as f32,
                mscale: rope.mscale.filter(|&mscale| mscale != 0.0).map(|value| value as f32),
                mscale_all_dim: rope.mscale_all_dim.filter(|&mscale| mscale != 0.0).map(|value| value as f32),
                truncate: rope.truncate.unwrap_or(true),
            }
        }
        "longrope" | "su" => longrope(raw, rope, position_limit)?,
        other => {
            return Err(config_error(format!(
                "rope scaling of type {other:?} is not supported; linear, dynamic, llama3, yarn and longrope are"
            )));
        }
    })
}

/// Phi's: a divisor for each frequency, one list for contexts within the original length and one for longer ones.
fn longrope(raw: &RawConfig, rope: &RawRope, position_limit: u64) -> Result<RopeScaling, ModelError> {
    let list = |name: &str, values: &Option<Vec<f64>>| {
        let values = values.as_ref().ok_or_else(|| config_error(format!("longrope has no {name:?}")))?;
        Ok::<_, ModelError>(values.iter().map(|&value| value as f32).collect::<Vec<f32>>())
    };
    let original = raw.original_max_position_embeddings.or(rope.original_max_position_embeddings);
    let factor = match original {
        Some(original) => position_limit as f64 / original as f64,
        None => rope.factor.unwrap_or(1.0),
    };
    let original = original.unwrap_or(position_limit);
    let attention_factor = rope.attention_factor.unwrap_or_else(|| {
        if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() }
    });
    Ok(RopeScaling::LongRope {
        short: list("short_factor", &rope.short_factor)?,
        long: list("long_factor", &rope.long_factor)?,
        original_max_position_embeddings: usize::try_from(original)
            .map_err(|_| config_error(format!("{original} positions are too many")))?,
        attention_factor: attention_factor as f32,
    })
}

/// The longest sequence with scaling included, as vLLM derives it: llama3 and gemma state it already scaled, yarn
/// stretches the original length, the others the stated one.
pub(super) fn scaled_length(
    architecture: Architecture,
    ropes: &[RopeConfig],
    position_limit: u64,
) -> Result<usize, ModelError> {
    let stated = position_limit as f64;
    let length = match ropes.first().map(|rope| &rope.scaling) {
        _ if architecture == Architecture::Gemma3 => stated,
        Some(RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor, .. }) => {
            stated * f64::from(*factor)
        }
        Some(RopeScaling::Yarn { factor, original_max_position_embeddings, .. }) => {
            *original_max_position_embeddings as f64 * f64::from(*factor)
        }
        _ => stated,
    };
    if length >= 1.0 && length <= (1_u64 << 40) as f64 {
        Ok(length as usize)
    } else {
        Err(config_error(format!("the configuration gives {length} as the longest sequence")))
    }
}
