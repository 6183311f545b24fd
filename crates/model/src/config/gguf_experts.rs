//! Mixtures of experts and attention over latents in the metadata of GGUF files, by llama.cpp's keys.

use baton_backend::{GroupScore, RouteGroups, RouteScores};

use super::experts::shared_count;
use super::gguf::Reader;
use super::limits::config_error;
use super::{Architecture, ExpertConfig, LatentConfig};
use crate::ModelError;

/// `expert_gating_func`.
const GGUF_SOFTMAX: u32 = 1;
pub(super) const GGUF_SIGMOID: u32 = 2;

impl Reader<'_> {
    pub(super) fn is_mixture(&self) -> bool {
        matches!(
            self.architecture,
            Architecture::Mixtral
                | Architecture::Qwen2Moe
                | Architecture::Qwen3Moe
                | Architecture::GraniteMoe
                | Architecture::GptOss
                | Architecture::Olmoe
                | Architecture::DeepseekV2
                | Architecture::DeepseekV3
        )
    }

    pub(super) fn experts(&self, num_layers: usize) -> Result<Option<ExpertConfig>, ModelError> {
        if !self.is_mixture() {
            return Ok(None);
        }
        if matches!(self.architecture, Architecture::DeepseekV2 | Architecture::DeepseekV3) {
            return self.deepseek_experts(num_layers).map(Some);
        }
        let num_experts = self.required("expert_count")?;
        let top_k = self.required("expert_used_count")?;
        let dense = self.same_for_all("feed_forward_length")?;
        let intermediate_size = match self.integer("expert_feed_forward_length")? {
            Some(size) => size,
            // Mixtral has no other.
            None => dense.ok_or_else(|| self.missing("expert_feed_forward_length"))?,
        };
        let is_qwen2 = self.architecture == Architecture::Qwen2Moe;
        let shared = self.integer("expert_shared_feed_forward_length")?.filter(|_| is_qwen2).unwrap_or(0);
        let num_shared = shared_count(shared, intermediate_size)?;
        Ok(Some(ExpertConfig {
            num_experts,
            top_k,
            intermediate_size,
            num_shared,
            has_shared_gate: num_shared > 0,
            scores: RouteScores::Softmax,
            has_selection_bias: false,
            has_bias: false,
            groups: None,
            // llama.cpp has this by architecture, not by file.
            normalizes: !is_qwen2 && self.architecture != Architecture::Olmoe,
            scale: self.f32("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0),
            layers: vec![true; num_layers],
        }))
    }

    fn deepseek_experts(&self, num_layers: usize) -> Result<ExpertConfig, ModelError> {
        // Files from before the key are all of models with softmax.
        let scores = match self.integer("expert_gating_func")?.map_or(GGUF_SOFTMAX, |func| func as u32) {
            0 | GGUF_SOFTMAX => RouteScores::Softmax,
            GGUF_SIGMOID => RouteScores::Sigmoid,
            other => {
                return Err(config_error(format!("expert_gating_func is {other}, which is not supported")));
            }
        };
        let is_sigmoid = scores == RouteScores::Sigmoid;
        let first = self.integer("leading_dense_block_count")?.unwrap_or(0);
        let count = self.integer("expert_group_count")?.filter(|&count| count > 1);
        let groups = count.zip(self.integer("expert_group_used_count")?).map(|(count, chosen)| {
            let score = if is_sigmoid { GroupScore::BestTwo } else { GroupScore::Best };
            RouteGroups { count, chosen, score }
        });
        Ok(ExpertConfig {
            num_experts: self.required("expert_count")?,
            top_k: self.required("expert_used_count")?,
            intermediate_size: self.required("expert_feed_forward_length")?,
            num_shared: self.integer("expert_shared_count")?.unwrap_or(0),
            has_shared_gate: false,
            scores,
            has_bias: false,
            has_selection_bias: self.has_tensor(&format!("blk.{first}.exp_probs_b.bias")),
            groups,
            normalizes: self.bool("expert_weights_norm")?.unwrap_or(false),
            scale: self.f32("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0),
            layers: (0..num_layers).map(|layer| layer >= first).collect(),
        })
    }

    pub(super) fn latent(&self) -> Result<Option<LatentConfig>, ModelError> {
        if !matches!(self.architecture, Architecture::DeepseekV2 | Architecture::DeepseekV3) {
            return Ok(None);
        }
        // Files that have the heads as one tensor have no keys with this suffix; `key_length` is then that of a query.
        let length = |name: &str| match self.integer(&format!("attention.{name}_mla"))? {
            Some(length) => Ok(length),
            None => self.required(&format!("attention.{name}")),
        };
        let rotary_dim = self.required("rope.dimension_count")?;
        let query_dim = length("key_length")?;
        let nope_dim = query_dim.checked_sub(rotary_dim).ok_or_else(|| {
            config_error(format!("queries of {query_dim} dimensions have no {rotary_dim} to rotate"))
        })?;
        Ok(Some(LatentConfig {
            query_rank: self.integer("attention.q_lora_rank")?.filter(|&rank| rank > 0),
            rank: self.required("attention.kv_lora_rank")?,
            nope_dim,
            rotary_dim,
            value_dim: length("value_length")?,
            has_split_heads: self.has_tensor("blk.0.attn_k_b.weight"),
        }))
    }
}
