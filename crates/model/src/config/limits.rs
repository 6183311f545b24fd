//! Limits for every configuration, whatever its source, and the context length that a server may use.
//!
//! Sizes are bounded far above any real model, so that products of two of them cannot overflow and a damaged file
//! cannot cause huge allocations.

use baton_core::TokenId;

use super::{ModelConfig, RopeConfig, RopeScaling};
use crate::ModelError;

pub(super) const MAX_LAYERS: usize = 4096;
const MAX_HIDDEN: usize = 1 << 20;
const MAX_INTERMEDIATE: usize = 1 << 22;
const MAX_HEADS: usize = 1 << 14;
const MAX_HEAD_DIM: usize = 1 << 12;
const MAX_VOCAB: usize = 1 << 24;
const MAX_LENGTH: usize = 1 << 30;

pub(crate) fn config_error(what: impl Into<String>) -> ModelError {
    ModelError::Config { what: what.into() }
}

fn within(name: &str, value: usize, most: usize) -> Result<(), ModelError> {
    if value == 0 || value > most {
        return Err(config_error(format!("{name} is {value}; it must be 1 to {most}")));
    }
    Ok(())
}

fn positive(name: &str, value: f32) -> Result<(), ModelError> {
    if !value.is_finite() || value <= 0.0 {
        return Err(config_error(format!("{name} is {value}; it must be a positive number")));
    }
    Ok(())
}

impl ModelConfig {
    /// Checks every number; the readers call it before they hand a configuration out.
    pub(super) fn validated(mut self) -> Result<Self, ModelError> {
        within("hidden_size", self.hidden_size, MAX_HIDDEN)?;
        within("intermediate_size", self.intermediate_size, MAX_INTERMEDIATE)?;
        within("num_attention_heads", self.num_heads, MAX_HEADS)?;
        within("num_key_value_heads", self.num_kv_heads, MAX_HEADS)?;
        within("head_dim", self.head_dim, MAX_HEAD_DIM)?;
        within("vocab_size", self.vocab_size, MAX_VOCAB)?;
        within("num_hidden_layers", self.layers.len(), MAX_LAYERS)?;
        within("the longest sequence", self.max_model_len, MAX_LENGTH)?;
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(config_error(format!(
                "num_attention_heads ({}) must be a multiple of num_key_value_heads ({})",
                self.num_heads, self.num_kv_heads
            )));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(config_error(format!("head_dim is {}; it must be even", self.head_dim)));
        }
        within("num_attention_heads x head_dim", self.num_heads * self.head_dim, MAX_HIDDEN)?;
        if let Some(experts) = &self.experts {
            experts.validate(self.layers.len())?;
        }
        if let Some(latent) = &self.latent {
            latent.validate()?;
        }
        positive("rms_norm_eps", self.norm_eps)?;
        positive("the scale of attention", self.attention_scale)?;
        positive("the scale of the embeddings", self.embed_scale)?;
        positive("the scale of the residual stream", self.residual_scale)?;
        positive("the scale of the logits", self.logit_scale)?;
        self.validate_combination()?;
        for (name, softcap) in [("attention", self.attention_softcap), ("logit", self.logit_softcap)] {
            softcap.map_or(Ok(()), |softcap| positive(&format!("the {name} softcap"), softcap))?;
        }
        for rope in &self.ropes {
            validate_rope(rope, self.head_dim)?;
        }
        for layer in &self.layers {
            if layer.window == Some(0) {
                return Err(config_error("sliding_window is 0; it must be positive, or null for none"));
            }
            if layer.rope.is_some_and(|rope| rope >= self.ropes.len()) {
                return Err(config_error("a layer names a rotary table that is not there"));
            }
        }
        // Ids beyond the vocabulary can never be sampled; shrunken test models keep those of their parents.
        let vocab_size = self.vocab_size;
        let in_vocab = |id: &TokenId| (*id as usize) < vocab_size;
        self.bos_token_id = self.bos_token_id.filter(in_vocab);
        self.eos_token_ids.retain(in_vocab);
        Ok(self)
    }

    /// What no program is written for.
    fn validate_combination(&self) -> Result<(), ModelError> {
        let adds_to_embeddings = self.learned_positions || self.embed_norm;
        if self.residual_scale != 1.0 && adds_to_embeddings {
            return Err(config_error("a scaled residual stream with learned positions is not supported"));
        }
        if self.parallel_residual && (self.post_norms || !self.pre_norms) {
            return Err(config_error("parallel halves of a layer with norms after them are not supported"));
        }
        if let Some(slopes) = &self.alibi_slopes
            && slopes.len() != self.num_heads
        {
            return Err(config_error(format!("{} slopes for {} heads", slopes.len(), self.num_heads)));
        }
        if self.normalized_head && self.tied_embeddings {
            return Err(config_error("a normalised head that is tied to the embedding is not supported"));
        }
        Ok(())
    }

    /// The context length to serve: the one requested, else the checkpoint's own.
    pub fn resolve_max_model_len(&self, requested: Option<usize>) -> Result<usize, ModelError> {
        let limit = self.max_model_len;
        match requested {
            None => Ok(limit),
            Some(0) => Err(config_error("--max-model-len must be at least 1")),
            Some(requested) if requested > limit => Err(config_error(format!(
                "--max-model-len {requested} is more than the {limit} tokens that this model was made for"
            ))),
            Some(requested) => Ok(requested),
        }
    }
}

fn validate_rope(rope: &RopeConfig, head_dim: usize) -> Result<(), ModelError> {
    positive("rope_theta", rope.theta)?;
    if rope.rotary_dim == 0 || rope.rotary_dim > head_dim || !rope.rotary_dim.is_multiple_of(2) {
        return Err(config_error(format!(
            "{} of {head_dim} dimensions of a head are rotated; it must be an even number of them",
            rope.rotary_dim
        )));
    }
    match &rope.scaling {
        RopeScaling::None => Ok(()),
        RopeScaling::Linear { factor } => positive("the rope factor", *factor),
        RopeScaling::Dynamic { factor, original_max_position_embeddings } => {
            positive("the rope factor", *factor)?;
            // Its formula divides by rotary_dim - 2.
            within("rotary dimensions beyond 2", rope.rotary_dim - 2, head_dim)?;
            within("original_max_position_embeddings", *original_max_position_embeddings, MAX_LENGTH)
        }
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            positive("the rope factor", *factor)?;
            positive("low_freq_factor", *low_freq_factor)?;
            positive("high_freq_factor", *high_freq_factor)?;
            if high_freq_factor <= low_freq_factor {
                return Err(config_error(format!(
                    "high_freq_factor ({high_freq_factor}) must be above low_freq_factor ({low_freq_factor})"
                )));
            }
            within("original_max_position_embeddings", *original_max_position_embeddings, MAX_LENGTH)
        }
        RopeScaling::Yarn {
            factor,
            original_max_position_embeddings,
            attention_factor,
            beta_fast,
            beta_slow,
            mscale,
            mscale_all_dim,
            truncate: _,
        } => {
            positive("the rope factor", *factor)?;
            positive("beta_fast", *beta_fast)?;
            positive("beta_slow", *beta_slow)?;
            for (name, value) in [
                ("attention_factor", attention_factor),
                ("mscale", mscale),
                ("mscale_all_dim", mscale_all_dim),
            ] {
                value.map_or(Ok(()), |value| positive(name, value))?;
            }
            // Its formula divides by the logarithm of theta.
            if rope.theta <= 1.0 {
                return Err(config_error(format!("rope_theta is {}; yarn needs more than 1", rope.theta)));
            }
            within("original_max_position_embeddings", *original_max_position_embeddings, MAX_LENGTH)
        }
        RopeScaling::LongRope { short, long, original_max_position_embeddings, attention_factor } => {
            for divisors in [short, long] {
                validate_divisors(divisors, rope.rotary_dim)?;
            }
            positive("the attention factor", *attention_factor)?;
            within("original_max_position_embeddings", *original_max_position_embeddings, MAX_LENGTH)
        }
        RopeScaling::Factors { divisors } => validate_divisors(divisors, rope.rotary_dim),
    }
}

fn validate_divisors(divisors: &[f32], rotary_dim: usize) -> Result<(), ModelError> {
    if divisors.len() != rotary_dim / 2 {
        let (got, expected) = (divisors.len(), rotary_dim / 2);
        return Err(config_error(format!("there are {got} rope factors, expected {expected}")));
    }
    divisors.iter().try_for_each(|&divisor| positive("a rope factor", divisor))
}
