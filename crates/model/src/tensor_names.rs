//! The names and shapes of a decoder's weights: one table, read by the loader of the real weights and by the dummy
//! weights alike, so that the two cannot drift apart.
//!
//! A tensor is known by its [`Role`] and layer; the [`NameScheme`] of the checkpoint turns that into a name, the
//! [`ModelConfig`] into a shape. Nothing here opens a file.

use crate::expert_names::expert_tensors;
use crate::families;
use crate::{Architecture, LatentConfig, ModelConfig, NameScheme, QkvLayout};

/// What a tensor is for, whatever its file calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    TokenEmbedding,
    /// Learned positions (gpt2 only).
    PositionEmbedding,
    /// Tells the texts of a pair apart (encoders).
    TokenTypeEmbedding,
    /// The two products of an encoder's head for classes.
    Pooler,
    Classifier,
    /// Of the embeddings (bloom).
    EmbedNorm,
    OutputNorm,
    /// The head that gives logits; absent when it is tied to the embedding.
    Output,
    AttnNorm,
    AttnQ,
    AttnK,
    AttnV,
    /// q, k and v in one matrix.
    AttnQkv,
    AttnOutput,
    /// A score for each head that takes its part of the softmax (gpt-oss).
    AttnSinks,
    AttnQNorm,
    AttnKNorm,
    /// Of attention over latents: the queries' own latent, its norm and what makes heads of it.
    AttnQA,
    AttnQANorm,
    AttnQB,
    /// The latent of keys and values with what is rotated, its norm, and the matrices of heads.
    AttnKvA,
    AttnKvANorm,
    AttnKvB,
    /// The same as two tensors, keys transposed: `[heads * rank, nope]` and `[heads * value_dim, rank]`.
    AttnKB,
    AttnVB,
    /// After attention, before the residual (gemma only).
    PostAttnNorm,
    /// Before the MLP. Hugging Face calls it `post_attention_layernorm` except in gemma.
    FfnNorm,
    FfnGate,
    FfnUp,
    /// Gate and up in one matrix.
    FfnGateUp,
    FfnDown,
    /// After the MLP, before the residual (gemma only).
    PostFfnNorm,
    /// A tensor of a mixture of experts: see `expert_names`.
    Expert,
}

impl Role {
    /// Tables, the head, and the small heads of encoders: what quantised checkpoints leave as it is.
    pub(crate) fn is_table(self) -> bool {
        matches!(
            self,
            Self::TokenEmbedding
                | Self::PositionEmbedding
                | Self::TokenTypeEmbedding
                | Self::Pooler
                | Self::Classifier
                | Self::Output
        )
    }

    /// Norm weights are vectors, kept in f32 by the backend; so are sinks.
    pub(crate) fn is_norm(self) -> bool {
        matches!(
            self,
            Self::OutputNorm
                | Self::EmbedNorm
                | Self::AttnNorm
                | Self::AttnSinks
                | Self::AttnQNorm
                | Self::AttnKNorm
                | Self::AttnQANorm
                | Self::AttnKvANorm
                | Self::PostAttnNorm
                | Self::FfnNorm
                | Self::PostFfnNorm
        )
    }

    /// False for the embeddings, the last norm and the head, which the model has once.
    pub(crate) fn is_per_layer(self) -> bool {
        !matches!(
            self,
            Self::TokenEmbedding
                | Self::PositionEmbedding
                | Self::TokenTypeEmbedding
                | Self::Pooler
                | Self::Classifier
                | Self::EmbedNorm
                | Self::OutputNorm
                | Self::Output
        )
    }
}

/// The name of a role's weight. `layer` is ignored by roles which the model has once.
pub(crate) fn weight_name(
    scheme: NameScheme,
    architecture: Architecture,
    role: Role,
    layer: usize,
) -> String {
    name(scheme, architecture, role, layer, "weight")
}

/// The name of a role's bias, whether or not the model has one (see [`has_bias`]).
pub(crate) fn bias_name(scheme: NameScheme, architecture: Architecture, role: Role, layer: usize) -> String {
    name(scheme, architecture, role, layer, "bias")
}

fn name(
    scheme: NameScheme,
    architecture: Architecture,
    role: Role,
    layer: usize,
    suffix: &'static str,
) -> String {
    let family = families::of(architecture);
    let (prefix, stem) = match scheme {
        NameScheme::HuggingFace if architecture == Architecture::Gpt2 => (GPT2_LAYERS, gpt2_stem(role)),
        NameScheme::HuggingFace => (
            family.map_or("model.layers.", |family| family.layers),
            family
                .and_then(|family| family.stem(role))
                .unwrap_or_else(|| hugging_face_stem(architecture, role)),
        ),
        NameScheme::Gguf => {
            let own = family.and_then(|family| family.gguf_stem(role));
            ("blk.", own.unwrap_or_else(|| gguf_stem(role)))
        }
    };
    if role == Role::AttnSinks && scheme == NameScheme::HuggingFace {
        return format!("{prefix}{layer}.{stem}");
    }
    if role.is_per_layer() { format!("{prefix}{layer}.{stem}.{suffix}") } else { format!("{stem}.{suffix}") }
}

/// Before the layers of GPT-2. The first published checkpoints have no `transformer.`; see [`optional_prefix`].
const GPT2_LAYERS: &str = "transformer.h.";
/// What the names of a checkpoint may leave out.
pub(crate) fn optional_prefix(architecture: Architecture) -> Option<&'static str> {
    if architecture == Architecture::Gpt2 {
        return Some("transformer.");
    }
    families::of(architecture).map(|family| family.optional_prefix).filter(|prefix| !prefix.is_empty())
}

fn gpt2_stem(role: Role) -> &'static str {
    match role {
        Role::TokenEmbedding => "transformer.wte",
        Role::PositionEmbedding => "transformer.wpe",
        Role::OutputNorm => "transformer.ln_f",
        Role::AttnNorm => "ln_1",
        Role::AttnQkv => "attn.c_attn",
        Role::AttnOutput => "attn.c_proj",
        Role::FfnNorm => "ln_2",
        Role::FfnUp => "mlp.c_fc",
        Role::FfnDown => "mlp.c_proj",
        other => hugging_face_stem(Architecture::Gpt2, other),
    }
}

/// GPT-2's own checkpoints have the matrices of its layers as `[in, out]`.
pub(crate) fn is_transposed(config: &ModelConfig, role: Role) -> bool {
    config.architecture == Architecture::Gpt2
        && config.names == NameScheme::HuggingFace
        && matches!(role, Role::AttnQkv | Role::AttnOutput | Role::FfnUp | Role::FfnDown)
}

fn hugging_face_stem(architecture: Architecture, role: Role) -> &'static str {
    match role {
        Role::TokenEmbedding => "model.embed_tokens",
        Role::PositionEmbedding => "model.embed_positions",
        Role::TokenTypeEmbedding => "model.embed_token_types",
        Role::Pooler => "pooler.dense",
        Role::Classifier => "classifier",
        Role::EmbedNorm => "model.embed_norm",
        Role::OutputNorm => "model.norm",
        Role::Output => "lm_head",
        Role::AttnNorm => "input_layernorm",
        Role::AttnQ => "self_attn.q_proj",
        Role::AttnK => "self_attn.k_proj",
        Role::AttnV => "self_attn.v_proj",
        Role::AttnQkv => "self_attn.qkv_proj",
        Role::AttnOutput => "self_attn.o_proj",
        Role::AttnSinks => "self_attn.sinks",
        Role::AttnQNorm => "self_attn.q_norm",
        Role::AttnKNorm => "self_attn.k_norm",
        Role::AttnQA => "self_attn.q_a_proj",
        Role::AttnQANorm => "self_attn.q_a_layernorm",
        Role::AttnQB => "self_attn.q_b_proj",
        Role::AttnKvA => "self_attn.kv_a_proj_with_mqa",
        Role::AttnKvANorm => "self_attn.kv_a_layernorm",
        Role::AttnKvB => "self_attn.kv_b_proj",
        Role::AttnKB => "self_attn.k_b_proj",
        Role::AttnVB => "self_attn.v_b_proj",
        Role::FfnNorm if architecture == Architecture::Gemma3 => "pre_feedforward_layernorm",
        Role::PostAttnNorm | Role::FfnNorm => "post_attention_layernorm",
        Role::FfnGate => "mlp.gate_proj",
        Role::FfnUp => "mlp.up_proj",
        Role::FfnGateUp => "mlp.gate_up_proj",
        Role::FfnDown => "mlp.down_proj",
        Role::PostFfnNorm => "post_feedforward_layernorm",
        Role::Expert => unreachable!("experts have names of their own"),
    }
}

fn gguf_stem(role: Role) -> &'static str {
    match role {
        Role::TokenEmbedding => "token_embd",
        Role::PositionEmbedding => "position_embd",
        Role::TokenTypeEmbedding => "token_types",
        Role::Pooler => "cls",
        Role::Classifier => "cls.output",
        Role::EmbedNorm => "token_embd_norm",
        Role::OutputNorm => "output_norm",
        Role::Output => "output",
        Role::AttnNorm => "attn_norm",
        Role::AttnQ => "attn_q",
        Role::AttnK => "attn_k",
        Role::AttnV => "attn_v",
        Role::AttnQkv => "attn_qkv",
        Role::AttnOutput => "attn_output",
        Role::AttnSinks => "attn_sinks",
        Role::AttnQNorm => "attn_q_norm",
        Role::AttnKNorm => "attn_k_norm",
        Role::AttnQA => "attn_q_a",
        Role::AttnQANorm => "attn_q_a_norm",
        Role::AttnQB => "attn_q_b",
        Role::AttnKvA => "attn_kv_a_mqa",
        Role::AttnKvANorm => "attn_kv_a_norm",
        Role::AttnKvB => "attn_kv_b",
        Role::AttnKB => "attn_k_b",
        Role::AttnVB => "attn_v_b",
        Role::PostAttnNorm => "post_attention_norm",
        Role::FfnNorm => "ffn_norm",
        Role::FfnGate => "ffn_gate",
        Role::FfnUp | Role::FfnGateUp => "ffn_up",
        Role::FfnDown => "ffn_down",
        Role::PostFfnNorm => "post_ffw_norm",
        Role::Expert => unreachable!("experts have names of their own"),
    }
}

/// `(rows, cols)` of a role's weight: rows are outputs, vectors have one row. A bias is `(1, rows)`.
pub(crate) fn shape(config: &ModelConfig, role: Role) -> (usize, usize) {
    let hidden = config.hidden_size;
    if let Some(shape) = config.latent.as_ref().and_then(|latent| latent_shape(config, latent, role)) {
        return shape;
    }
    let query = config.num_heads * config.head_dim;
    let key_value = config.num_kv_heads * config.head_dim;
    match role {
        Role::TokenEmbedding | Role::Output => (config.vocab_size, hidden),
        Role::PositionEmbedding => (config.max_model_len + config.position_offset, hidden),
        Role::TokenTypeEmbedding => (num_token_types(config), hidden),
        Role::Pooler => (hidden, hidden),
        Role::Classifier => {
            (config.encoder.as_ref().and_then(|encoder| encoder.num_labels).unwrap_or(0), hidden)
        }
        Role::EmbedNorm
        | Role::OutputNorm
        | Role::AttnNorm
        | Role::PostAttnNorm
        | Role::FfnNorm
        | Role::PostFfnNorm => (1, hidden),
        Role::AttnQ => (query, hidden),
        Role::AttnK | Role::AttnV => (key_value, hidden),
        Role::AttnQkv => (query + 2 * key_value, hidden),
        Role::AttnOutput => (hidden, query),
        Role::AttnSinks => (1, config.num_heads),
        Role::AttnQNorm => (1, config.qk_norm_span.weight_len(config.num_heads, config.head_dim)),
        Role::AttnKNorm => (1, config.qk_norm_span.weight_len(config.num_kv_heads, config.head_dim)),
        Role::FfnGate | Role::FfnUp => (config.intermediate_size, hidden),
        Role::FfnGateUp => (2 * config.intermediate_size, hidden),
        Role::FfnDown => (hidden, config.intermediate_size),
        Role::Expert => unreachable!("experts have shapes of their own"),
        Role::AttnQA
        | Role::AttnQANorm
        | Role::AttnQB
        | Role::AttnKvA
        | Role::AttnKvANorm
        | Role::AttnKvB
        | Role::AttnKB
        | Role::AttnVB => {
            unreachable!("only models with latents have it")
        }
    }
}

/// The roles of attention over latents.
fn latent_shape(config: &ModelConfig, latent: &LatentConfig, role: Role) -> Option<(usize, usize)> {
    let (hidden, heads) = (config.hidden_size, config.num_heads);
    let query_rank = latent.query_rank.unwrap_or(hidden);
    Some(match role {
        Role::AttnQ => (heads * latent.query_dim(), hidden),
        Role::AttnQA => (query_rank, hidden),
        Role::AttnQANorm => (1, query_rank),
        Role::AttnQB => (heads * latent.query_dim(), query_rank),
        Role::AttnKvA => (latent.head_dim(), hidden),
        Role::AttnKvANorm => (1, latent.rank),
        Role::AttnKvB => (heads * (latent.nope_dim + latent.value_dim), latent.rank),
        Role::AttnKB => (heads * latent.rank, latent.nope_dim),
        Role::AttnVB => (heads * latent.value_dim, latent.rank),
        Role::AttnOutput => (hidden, heads * latent.value_dim),
        _ => return None,
    })
}

/// Whether the checkpoint holds a bias beside the weight of this role.
pub(crate) fn has_bias(config: &ModelConfig, role: Role) -> bool {
    match role {
        Role::AttnQ | Role::AttnK | Role::AttnV | Role::AttnQkv => config.qkv_bias,
        Role::AttnOutput => config.attention_output_bias,
        Role::FfnGate | Role::FfnUp | Role::FfnGateUp | Role::FfnDown => config.mlp_bias,
        Role::Output => config.head_bias,
        Role::Pooler | Role::Classifier => true,
        // Those of q and k never have one.
        Role::AttnQNorm | Role::AttnKNorm | Role::AttnSinks => false,
        norm if norm.is_norm() => config.layer_norm && config.norm_bias,
        _ => false,
    }
}

/// The roles which the model has once.
pub(crate) fn model_roles(config: &ModelConfig) -> Vec<Role> {
    let mut roles = vec![Role::TokenEmbedding];
    match &config.encoder {
        None => roles.push(Role::OutputNorm),
        Some(encoder) => {
            roles.extend((encoder.num_token_types > 0).then_some(Role::TokenTypeEmbedding));
            if encoder.num_labels.is_some() {
                roles.extend([Role::Pooler, Role::Classifier]);
            }
        }
    }
    if config.learned_positions {
        roles.push(Role::PositionEmbedding);
    }
    if config.embed_norm {
        roles.push(Role::EmbedNorm);
    }
    if !config.tied_embeddings {
        roles.push(Role::Output);
    }
    roles
}

pub(crate) fn num_token_types(config: &ModelConfig) -> usize {
    config.encoder.as_ref().map_or(0, |encoder| encoder.num_token_types)
}

/// What the projection of attention is made of, one below the other.
pub(crate) fn qkv_roles(config: &ModelConfig) -> &'static [Role] {
    match config.qkv_layout {
        QkvLayout::Separate => &[Role::AttnQ, Role::AttnK, Role::AttnV],
        QkvLayout::Concatenated | QkvLayout::Grouped => &[Role::AttnQkv],
    }
}

/// What the first product of the MLP is made of.
pub(crate) fn mlp_roles(config: &ModelConfig) -> &'static [Role] {
    match (config.gated_mlp, config.fused_gate_up) {
        (false, _) => &[Role::FfnUp],
        (true, false) => &[Role::FfnGate, Role::FfnUp],
        (true, true) => &[Role::FfnGateUp],
    }
}

/// The rows of a fused projection in the order q, k, v, where the file has them group by group.
pub(crate) fn grouped_rows(config: &ModelConfig) -> Option<Vec<usize>> {
    if config.qkv_layout != QkvLayout::Grouped {
        return None;
    }
    let (head_dim, groups) = (config.head_dim, config.num_kv_heads);
    let queries = config.num_heads / groups;
    // The first row of a head that is the `place`-th of its group.
    let head = |group: usize, place: usize| {
        let first = (group * (queries + 2) + place) * head_dim;
        first..first + head_dim
    };
    let all = (0..groups).flat_map(|group| (0..queries).flat_map(move |place| head(group, place)));
    let keys = (0..groups).flat_map(|group| head(group, queries));
    let values = (0..groups).flat_map(|group| head(group, queries + 1));
    Some(all.chain(keys).chain(values).collect())
}

/// The roles which every layer has, in the order of the forward pass.
pub(crate) fn layer_roles(config: &ModelConfig) -> Vec<Role> {
    let mut roles = Vec::new();
    roles.extend(config.pre_norms.then_some(Role::AttnNorm));
    match &config.latent {
        None => roles.extend(qkv_roles(config)),
        Some(latent) => {
            match latent.query_rank {
                None => roles.push(Role::AttnQ),
                Some(_) => roles.extend([Role::AttnQA, Role::AttnQANorm, Role::AttnQB]),
            }
            roles.extend([Role::AttnKvA, Role::AttnKvANorm]);
            if latent.has_split_heads {
                roles.extend([Role::AttnKB, Role::AttnVB]);
            } else {
                roles.push(Role::AttnKvB);
            }
        }
    }
    if config.qk_norm {
        roles.extend([Role::AttnQNorm, Role::AttnKNorm]);
    }
    roles.push(Role::AttnOutput);
    roles.extend(config.attention_sinks.then_some(Role::AttnSinks));
    if config.post_norms {
        roles.push(Role::PostAttnNorm);
    }
    roles.extend((config.pre_norms && !config.shared_norm).then_some(Role::FfnNorm));
    roles.extend(mlp_roles(config));
    roles.push(Role::FfnDown);
    if config.post_norms {
        roles.push(Role::PostFfnNorm);
    }
    roles
}

/// One tensor that a checkpoint of a configuration must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExpectedTensor {
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) is_bias: bool,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

/// Every tensor of the configuration, biases included.
pub(crate) fn expected_tensors(config: &ModelConfig) -> Vec<ExpectedTensor> {
    let mut tensors = Vec::new();
    let mut push = |role, layer| {
        let (rows, cols) = shape(config, role);
        let name = weight_name(config.names, config.architecture, role, layer);
        let stored = if is_transposed(config, role) { (cols, rows) } else { (rows, cols) };
        tensors.push(ExpectedTensor { name, role, is_bias: false, rows: stored.0, cols: stored.1 });
        if has_bias(config, role) {
            let name = bias_name(config.names, config.architecture, role, layer);
            tensors.push(ExpectedTensor {
                name,
                role,
                is_bias: true,
                rows: 1,
                cols: if role.is_norm() { cols } else { rows },
            });
        }
    };
    for role in model_roles(config) {
        push(role, 0);
    }
    let layer_roles = layer_roles(config);
    for layer in 0..config.layers.len() {
        let experts = config.experts_of(layer);
        let is_mlp = |role: &Role| matches!(role, Role::FfnGate | Role::FfnUp | Role::FfnDown);
        for &role in layer_roles.iter().filter(|role| experts.is_none() || !is_mlp(role)) {
            push(role, layer);
        }
    }
    for layer in 0..config.layers.len() {
        if let Some(experts) = config.experts_of(layer) {
            tensors.extend(expert_tensors(config, experts, layer));
        }
    }
    tensors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_scheme_and_the_architecture() {
        let hugging_face = |architecture, role| weight_name(NameScheme::HuggingFace, architecture, role, 3);
        assert_eq!(
            hugging_face(Architecture::Llama, Role::FfnNorm),
            "model.layers.3.post_attention_layernorm.weight"
        );
        assert_eq!(
            hugging_face(Architecture::Gemma3, Role::FfnNorm),
            "model.layers.3.pre_feedforward_layernorm.weight"
        );
        assert_eq!(
            hugging_face(Architecture::Gemma3, Role::PostAttnNorm),
            "model.layers.3.post_attention_layernorm.weight"
        );
        assert_eq!(hugging_face(Architecture::Llama, Role::Output), "lm_head.weight");
        let gguf = |role| weight_name(NameScheme::Gguf, Architecture::Qwen2, role, 11);
        assert_eq!(gguf(Role::PostFfnNorm), "blk.11.post_ffw_norm.weight");
        assert_eq!(gguf(Role::TokenEmbedding), "token_embd.weight");
        assert_eq!(bias_name(NameScheme::Gguf, Architecture::Qwen2, Role::AttnQ, 0), "blk.0.attn_q.bias");
    }
}
