//! Attention over latents (MLA) in `config.json`.

use serde::Deserialize;

use super::limits::config_error;
use super::{Architecture, RopeConfig, RopeScaling};
use crate::ModelError;

/// Sizes of attention over latents. Queries and values have heads of their own, keys have one latent for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentConfig {
    /// Queries are made from a latent of this size; from the hidden state where there is none.
    pub query_rank: Option<usize>,
    pub rank: usize,
    /// Of a query's head, what meets the latent, and what is rotated.
    pub nope_dim: usize,
    pub rotary_dim: usize,
    pub value_dim: usize,
    /// The matrices of heads are two tensors, those of keys transposed, as GGUF files have them.
    pub has_split_heads: bool,
}

impl LatentConfig {
    /// What the cache keeps for a token: the latent and the rotated part.
    pub fn head_dim(&self) -> usize {
        self.rank + self.rotary_dim
    }

    pub fn query_dim(&self) -> usize {
        self.nope_dim + self.rotary_dim
    }

    pub(super) fn validate(&self) -> Result<(), ModelError> {
        for (name, value) in [
            ("q_lora_rank", self.query_rank.unwrap_or(1)),
            ("kv_lora_rank", self.rank),
            ("qk_nope_head_dim", self.nope_dim),
            ("qk_rope_head_dim", self.rotary_dim),
            ("v_head_dim", self.value_dim),
        ] {
            if value == 0 || value > 1 << 16 {
                return Err(config_error(format!("{name} is {value}; it must be 1 to {}", 1 << 16)));
            }
        }
        Ok(())
    }
}

/// The keys of `config.json` that are about latents.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RawLatent {
    pub(super) q_lora_rank: Option<u64>,
    pub(super) kv_lora_rank: Option<u64>,
    pub(super) qk_nope_head_dim: Option<u64>,
    pub(super) qk_rope_head_dim: Option<u64>,
    pub(super) v_head_dim: Option<u64>,
}

pub(super) fn from_raw(
    architecture: Architecture,
    raw: &RawLatent,
) -> Result<Option<LatentConfig>, ModelError> {
    if !matches!(architecture, Architecture::DeepseekV2 | Architecture::DeepseekV3) {
        return Ok(None);
    }
    let size = |name: &str, value: Option<u64>, default: u64| {
        let value = value.unwrap_or(default);
        usize::try_from(value).map_err(|_| config_error(format!("{name} is {value}, which is too large")))
    };
    let config = LatentConfig {
        query_rank: raw.q_lora_rank.map(|rank| size("q_lora_rank", Some(rank), 0)).transpose()?,
        rank: size("kv_lora_rank", raw.kv_lora_rank, 512)?,
        nope_dim: size("qk_nope_head_dim", raw.qk_nope_head_dim, 128)?,
        rotary_dim: size("qk_rope_head_dim", raw.qk_rope_head_dim, 64)?,
        value_dim: size("v_head_dim", raw.v_head_dim, 128)?,
        has_split_heads: false,
    };
    config.validate()?;
    Ok(Some(config))
}

/// What multiplies q · k: yarn's factor goes to the scores of these models, not to the rotation alone.
pub(super) fn attention_scale(latent: &LatentConfig, ropes: &[RopeConfig]) -> f32 {
    let scale = (latent.query_dim() as f64).powf(-0.5);
    let factor = match ropes.first().map(|rope| &rope.scaling) {
        Some(&RopeScaling::Yarn { factor, mscale_all_dim: Some(all_dim), .. }) if factor > 1.0 => {
            0.1 * f64::from(all_dim) * f64::from(factor).ln() + 1.0
        }
        _ => 1.0,
    };
    (scale * factor * factor) as f32
}
