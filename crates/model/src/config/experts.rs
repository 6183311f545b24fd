//! Mixtures of experts in `config.json` and in the metadata of GGUF files, as one [`ExpertConfig`].

use baton_backend::{GroupScore, RouteGroups, RouteScores};
use serde::Deserialize;

use super::limits::config_error;
use super::{Architecture, ModelConfig};
use crate::ModelError;

/// Far above any real model.
const MAX_EXPERTS: usize = 1 << 14;
const MAX_CHOSEN: usize = 64;

/// The mixture that some or all layers have in place of an MLP.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertConfig {
    /// Those that are chosen from.
    pub num_experts: usize,
    /// How many of them a token goes to.
    pub top_k: usize,
    /// Of one expert.
    pub intermediate_size: usize,
    /// Experts that every token goes to. One that is wider than the others is several.
    pub num_shared: usize,
    /// A router's row decides how much of the shared ones a token gets (qwen2moe).
    pub has_shared_gate: bool,
    pub scores: RouteScores,
    pub has_selection_bias: bool,
    /// The router's products and those of all experts have biases (gpt-oss).
    pub has_bias: bool,
    pub groups: Option<RouteGroups>,
    pub normalizes: bool,
    pub scale: f32,
    /// One entry per layer: whether it has experts.
    pub layers: Vec<bool>,
}

impl ExpertConfig {
    /// Experts of one token.
    pub fn num_slots(&self) -> usize {
        self.top_k + self.num_shared
    }

    /// All of a layer.
    pub fn num_all(&self) -> usize {
        self.num_experts + self.num_shared
    }

    pub(super) fn validate(&self, num_layers: usize) -> Result<(), ModelError> {
        let within = |name: &str, value: usize, most: usize| {
            if value == 0 || value > most {
                return Err(config_error(format!("{name} is {value}; it must be 1 to {most}")));
            }
            Ok(())
        };
        within("the number of experts", self.num_experts, MAX_EXPERTS)?;
        within("num_experts_per_tok", self.top_k, self.num_experts.min(MAX_CHOSEN))?;
        within("moe_intermediate_size", self.intermediate_size, 1 << 22)?;
        if self.num_shared > MAX_CHOSEN {
            return Err(config_error(format!("{} shared experts are too many", self.num_shared)));
        }
        if !self.scale.is_finite() || self.scale <= 0.0 {
            return Err(config_error(format!(
                "routed_scaling_factor is {}; it must be positive",
                self.scale
            )));
        }
        if let Some(RouteGroups { count, chosen, .. }) = self.groups {
            let is_even =
                count > 0 && self.num_experts.is_multiple_of(count) && (1..=count).contains(&chosen);
            if !is_even || self.top_k > chosen * (self.num_experts / count) {
                return Err(config_error(format!(
                    "{chosen} of {count} groups of {} experts cannot have {} chosen",
                    self.num_experts, self.top_k
                )));
            }
        }
        if self.layers.len() != num_layers {
            return Err(config_error(format!("{} layers of experts of {num_layers}", self.layers.len())));
        }
        Ok(())
    }
}

impl ModelConfig {
    /// The mixture of a layer, if it has one.
    pub fn experts_of(&self, layer: usize) -> Option<&ExpertConfig> {
        self.experts.as_ref().filter(|experts| experts.layers[layer])
    }

    /// Some layer has an MLP of its own.
    pub fn has_dense_layers(&self) -> bool {
        self.experts.as_ref().is_none_or(|experts| experts.layers.contains(&false))
    }
}

/// The keys of `config.json` that are about experts.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RawExperts {
    pub(super) num_experts: Option<u64>,
    pub(super) num_local_experts: Option<u64>,
    pub(super) n_routed_experts: Option<u64>,
    pub(super) num_experts_per_tok: Option<u64>,
    pub(super) moe_intermediate_size: Option<u64>,
    pub(super) shared_expert_intermediate_size: Option<u64>,
    pub(super) n_shared_experts: Option<u64>,
    pub(super) norm_topk_prob: Option<bool>,
    pub(super) decoder_sparse_step: Option<u64>,
    pub(super) mlp_only_layers: Option<Vec<u64>>,
    pub(super) first_k_dense_replace: Option<u64>,
    pub(super) moe_layer_freq: Option<u64>,
    pub(super) routed_scaling_factor: Option<f64>,
    pub(super) scoring_func: Option<String>,
    pub(super) topk_method: Option<String>,
    pub(super) n_group: Option<u64>,
    pub(super) topk_group: Option<u64>,
}

/// From `config.json`, with what the architecture's class in transformers assumes.
pub(super) fn from_raw(
    architecture: Architecture,
    raw: &RawExperts,
    intermediate_size: usize,
    num_layers: usize,
) -> Result<Option<ExpertConfig>, ModelError> {
    let size = |name: &str, value: Option<u64>| {
        let value = value.ok_or_else(|| config_error(format!("config.json has no {name:?}")))?;
        usize::try_from(value).map_err(|_| config_error(format!("{name} is {value}, which is too large")))
    };
    let is_sparse = |index: usize| {
        let step = raw.decoder_sparse_step.unwrap_or(1).max(1);
        let is_dense = raw.mlp_only_layers.iter().flatten().any(|&layer| layer == index as u64);
        !is_dense && (index as u64 + 1).is_multiple_of(step)
    };
    let plain = |num_experts, top_k, intermediate_size| ExpertConfig {
        num_experts,
        top_k,
        intermediate_size,
        num_shared: 0,
        has_shared_gate: false,
        scores: RouteScores::Softmax,
        has_selection_bias: false,
        has_bias: false,
        groups: None,
        normalizes: true,
        scale: 1.0,
        layers: vec![true; num_layers],
    };
    let config = match architecture {
        Architecture::GptOss => plain(
            size("num_local_experts", raw.num_local_experts.or(raw.num_experts).or(Some(128)))?,
            size("num_experts_per_tok", raw.num_experts_per_tok.or(Some(4)))?,
            intermediate_size,
        ),
        Architecture::Mixtral | Architecture::GraniteMoe => plain(
            size("num_local_experts", raw.num_local_experts.or(Some(8)))?,
            size("num_experts_per_tok", raw.num_experts_per_tok.or(Some(2)))?,
            intermediate_size,
        ),
        Architecture::Olmoe => ExpertConfig {
            normalizes: raw.norm_topk_prob.unwrap_or(false),
            ..plain(
                size("num_experts", raw.num_experts.or(raw.num_local_experts).or(Some(64)))?,
                size("num_experts_per_tok", raw.num_experts_per_tok.or(Some(8)))?,
                intermediate_size,
            )
        },
        Architecture::Qwen2Moe | Architecture::Qwen3Moe => {
            let is_qwen2 = architecture == Architecture::Qwen2Moe;
            let width = size("moe_intermediate_size", raw.moe_intermediate_size)?;
            let default = if is_qwen2 { 60 } else { 128 };
            let num_experts =
                raw.num_experts.or(raw.num_local_experts).or(raw.n_routed_experts).or(Some(default));
            let shared = if is_qwen2 {
                shared_count(
                    size("shared_expert_intermediate_size", raw.shared_expert_intermediate_size)?,
                    width,
                )?
            } else {
                0
            };
            ExpertConfig {
                num_shared: shared,
                has_shared_gate: shared > 0,
                normalizes: raw.norm_topk_prob.unwrap_or(false),
                layers: (0..num_layers).map(is_sparse).collect(),
                ..plain(
                    size("num_experts", num_experts)?,
                    size(
                        "num_experts_per_tok",
                        raw.num_experts_per_tok.or(Some(if is_qwen2 { 4 } else { 8 })),
                    )?,
                    width,
                )
            }
        }
        Architecture::DeepseekV2 | Architecture::DeepseekV3 => {
            deepseek(architecture, raw, num_layers, plain, size)?
        }
        _ => return Ok(None),
    };
    config.validate(num_layers)?;
    Ok(Some(config))
}

fn deepseek(
    architecture: Architecture,
    raw: &RawExperts,
    num_layers: usize,
    plain: impl Fn(usize, usize, usize) -> ExpertConfig,
    size: impl Fn(&str, Option<u64>) -> Result<usize, ModelError>,
) -> Result<ExpertConfig, ModelError> {
    let is_v3 = architecture == Architecture::DeepseekV3;
    let num_experts = raw.n_routed_experts.or(raw.num_local_experts).or(raw.num_experts);
    let first = raw.first_k_dense_replace.unwrap_or(if is_v3 { 3 } else { 0 });
    let step = raw.moe_layer_freq.unwrap_or(1).max(1);
    let method = raw.topk_method.as_deref().unwrap_or(if is_v3 { "noaux_tc" } else { "greedy" });
    let score = match method {
        "greedy" => None,
        "group_limited_greedy" => Some(GroupScore::Best),
        "noaux_tc" => Some(GroupScore::BestTwo),
        other => return Err(config_error(format!("topk_method is {other:?}, which is not supported"))),
    };
    let count = size("n_group", raw.n_group.or(Some(if is_v3 { 8 } else { 1 })))?;
    let chosen = size("topk_group", raw.topk_group.or(Some(if is_v3 { 4 } else { 1 })))?;
    let scores = match raw.scoring_func.as_deref().unwrap_or(if is_v3 { "sigmoid" } else { "softmax" }) {
        "softmax" => RouteScores::Softmax,
        "sigmoid" => RouteScores::Sigmoid,
        other => return Err(config_error(format!("scoring_func is {other:?}, which is not supported"))),
    };
    Ok(ExpertConfig {
        num_shared: size("n_shared_experts", raw.n_shared_experts.or(Some(0)))?,
        scores,
        has_selection_bias: method == "noaux_tc",
        groups: score.filter(|_| count > 1).map(|score| RouteGroups { count, chosen, score }),
        normalizes: raw.norm_topk_prob.unwrap_or(is_v3),
        scale: raw.routed_scaling_factor.unwrap_or(if is_v3 { 2.5 } else { 1.0 }) as f32,
        layers: (0..num_layers as u64).map(|layer| layer >= first && layer.is_multiple_of(step)).collect(),
        ..plain(
            size("n_routed_experts", num_experts)?,
            size("num_experts_per_tok", raw.num_experts_per_tok)?,
            size("moe_intermediate_size", raw.moe_intermediate_size)?,
        )
    })
}

/// How many experts of `width` a shared one is.
pub(super) fn shared_count(shared: usize, width: usize) -> Result<usize, ModelError> {
    if shared == 0 || width == 0 {
        return Ok(0);
    }
    if !shared.is_multiple_of(width) {
        return Err(config_error(format!(
            "a shared expert of {shared} is no multiple of the others' {width}, which is not supported"
        )));
    }
    Ok(shared / width)
}
