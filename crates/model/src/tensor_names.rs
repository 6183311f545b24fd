//! The names and shapes of a decoder's weights: one table, read by the loader of the real weights and by the dummy
//! weights alike, so that the two cannot drift apart.
//!
//! A tensor is known by its [`Role`] and layer; the [`NameScheme`] of the checkpoint turns that into a name, the
//! [`ModelConfig`] into a shape. Nothing here opens a file.

use crate::{Architecture, ModelConfig, NameScheme};

/// What a tensor is for, whatever its file calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    TokenEmbedding,
    OutputNorm,
    /// The head that gives logits; absent when it is tied to the embedding.
    Output,
    AttnNorm,
    AttnQ,
    AttnK,
    AttnV,
    AttnOutput,
    AttnQNorm,
    AttnKNorm,
    /// After attention, before the residual (gemma only).
    PostAttnNorm,
    /// Before the MLP. Hugging Face calls it `post_attention_layernorm` except in gemma.
    FfnNorm,
    FfnGate,
    FfnUp,
    FfnDown,
    /// After the MLP, before the residual (gemma only).
    PostFfnNorm,
}

impl Role {
    /// Norm weights are vectors, kept in f32 by the backend.
    pub(crate) fn is_norm(self) -> bool {
        matches!(
            self,
            Self::OutputNorm
                | Self::AttnNorm
                | Self::AttnQNorm
                | Self::AttnKNorm
                | Self::PostAttnNorm
                | Self::FfnNorm
                | Self::PostFfnNorm
        )
    }

    /// False for the embedding, the last norm and the head, which the model has once.
    pub(crate) fn is_per_layer(self) -> bool {
        !matches!(self, Self::TokenEmbedding | Self::OutputNorm | Self::Output)
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
    let (prefix, stem) = match scheme {
        NameScheme::HuggingFace => ("model.layers.", hugging_face_stem(architecture, role)),
        NameScheme::Gguf => ("blk.", gguf_stem(role)),
    };
    if role.is_per_layer() { format!("{prefix}{layer}.{stem}.{suffix}") } else { format!("{stem}.{suffix}") }
}

fn hugging_face_stem(architecture: Architecture, role: Role) -> &'static str {
    match role {
        Role::TokenEmbedding => "model.embed_tokens",
        Role::OutputNorm => "model.norm",
        Role::Output => "lm_head",
        Role::AttnNorm => "input_layernorm",
        Role::AttnQ => "self_attn.q_proj",
        Role::AttnK => "self_attn.k_proj",
        Role::AttnV => "self_attn.v_proj",
        Role::AttnOutput => "self_attn.o_proj",
        Role::AttnQNorm => "self_attn.q_norm",
        Role::AttnKNorm => "self_attn.k_norm",
        Role::FfnNorm if architecture == Architecture::Gemma3 => "pre_feedforward_layernorm",
        Role::PostAttnNorm | Role::FfnNorm => "post_attention_layernorm",
        Role::FfnGate => "mlp.gate_proj",
        Role::FfnUp => "mlp.up_proj",
        Role::FfnDown => "mlp.down_proj",
        Role::PostFfnNorm => "post_feedforward_layernorm",
    }
}

fn gguf_stem(role: Role) -> &'static str {
    match role {
        Role::TokenEmbedding => "token_embd",
        Role::OutputNorm => "output_norm",
        Role::Output => "output",
        Role::AttnNorm => "attn_norm",
        Role::AttnQ => "attn_q",
        Role::AttnK => "attn_k",
        Role::AttnV => "attn_v",
        Role::AttnOutput => "attn_output",
        Role::AttnQNorm => "attn_q_norm",
        Role::AttnKNorm => "attn_k_norm",
        Role::PostAttnNorm => "post_attention_norm",
        Role::FfnNorm => "ffn_norm",
        Role::FfnGate => "ffn_gate",
        Role::FfnUp => "ffn_up",
        Role::FfnDown => "ffn_down",
        Role::PostFfnNorm => "post_ffw_norm",
    }
}

/// `(rows, cols)` of a role's weight: rows are outputs, vectors have one row. A bias is `(1, rows)`.
pub(crate) fn shape(config: &ModelConfig, role: Role) -> (usize, usize) {
    let hidden = config.hidden_size;
    let query = config.num_heads * config.head_dim;
    let key_value = config.num_kv_heads * config.head_dim;
    match role {
        Role::TokenEmbedding | Role::Output => (config.vocab_size, hidden),
        Role::OutputNorm | Role::AttnNorm | Role::PostAttnNorm | Role::FfnNorm | Role::PostFfnNorm => {
            (1, hidden)
        }
        Role::AttnQ => (query, hidden),
        Role::AttnK | Role::AttnV => (key_value, hidden),
        Role::AttnOutput => (hidden, query),
        Role::AttnQNorm | Role::AttnKNorm => (1, config.head_dim),
        Role::FfnGate | Role::FfnUp => (config.intermediate_size, hidden),
        Role::FfnDown => (hidden, config.intermediate_size),
    }
}

/// Whether the checkpoint holds a bias beside the weight of this role.
pub(crate) fn has_bias(config: &ModelConfig, role: Role) -> bool {
    match role {
        Role::AttnQ | Role::AttnK | Role::AttnV => config.qkv_bias,
        Role::AttnOutput => config.attention_output_bias,
        Role::FfnGate | Role::FfnUp | Role::FfnDown => config.mlp_bias,
        _ => false,
    }
}

/// The roles which the model has once.
pub(crate) fn model_roles(config: &ModelConfig) -> Vec<Role> {
    let mut roles = vec![Role::TokenEmbedding, Role::OutputNorm];
    if !config.tied_embeddings {
        roles.push(Role::Output);
    }
    roles
}

/// The roles which every layer has, in the order of the forward pass.
pub(crate) fn layer_roles(config: &ModelConfig) -> Vec<Role> {
    let mut roles = vec![Role::AttnNorm, Role::AttnQ, Role::AttnK, Role::AttnV];
    if config.qk_norm {
        roles.extend([Role::AttnQNorm, Role::AttnKNorm]);
    }
    roles.push(Role::AttnOutput);
    if config.post_norms {
        roles.push(Role::PostAttnNorm);
    }
    roles.extend([Role::FfnNorm, Role::FfnGate, Role::FfnUp, Role::FfnDown]);
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
        tensors.push(ExpectedTensor { name, role, is_bias: false, rows, cols });
        if has_bias(config, role) {
            let name = bias_name(config.names, config.architecture, role, layer);
            tensors.push(ExpectedTensor { name, role, is_bias: true, rows: 1, cols: rows });
        }
    };
    for role in model_roles(config) {
        push(role, 0);
    }
    let layer_roles = layer_roles(config);
    for layer in 0..config.layers.len() {
        for &role in &layer_roles {
            push(role, layer);
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
