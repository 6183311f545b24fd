//! `config.json` and `generation_config.json` of Hugging Face checkpoints.
//!
//! Absent keys mean what transformers means by them, which differs between architectures: the defaults are kept
//! together in [`Defaults`]. Sizes that no class of transformers could guess are required.

use baton_backend::{Activation, RopeStyle, WeightFormat};
use baton_core::TokenId;

use super::generation::GenerationDefaults;
use super::hugging_face_rope::{ropes, scaled_length};
use super::limits::{MAX_LAYERS, config_error};
use super::raw::{OneOrMany, RawConfig};
use super::{Architecture, LayerConfig, ModelConfig, NameScheme, distinct};
use crate::ModelError;

/// What a class of transformers assumes when a key is absent.
pub(super) struct Defaults {
    num_heads: Option<u64>,
    num_kv_heads: Option<u64>,
    head_dim: Option<u64>,
    vocab_size: Option<u64>,
    max_position_embeddings: u64,
    sliding_window: Option<u64>,
    tied_embeddings: bool,
    pub(super) rope_theta: f64,
}

impl Defaults {
    fn of(architecture: Architecture) -> Self {
        let llama = Self {
            num_heads: None,
            num_kv_heads: None,
            head_dim: None,
            vocab_size: None,
            max_position_embeddings: 2048,
            sliding_window: None,
            tied_embeddings: false,
            rope_theta: 10_000.0,
        };
        match architecture {
            Architecture::Llama => llama,
            Architecture::Mistral => Self {
                num_kv_heads: Some(8),
                max_position_embeddings: 131_072,
                sliding_window: Some(4096),
                ..llama
            },
            Architecture::Qwen2 => {
                Self { max_position_embeddings: 32_768, sliding_window: Some(4096), ..llama }
            }
            Architecture::Qwen3 => Self {
                head_dim: Some(128),
                max_position_embeddings: 32_768,
                sliding_window: Some(4096),
                ..llama
            },
            Architecture::Gemma3 => Self {
                num_heads: Some(8),
                num_kv_heads: Some(4),
                head_dim: Some(256),
                vocab_size: Some(262_208),
                max_position_embeddings: 131_072,
                sliding_window: Some(4096),
                tied_embeddings: true,
                rope_theta: 1_000_000.0,
            },
        }
    }
}

impl ModelConfig {
    /// Reads `config.json` and, if there is one, `generation_config.json`, whose end-of-sequence tokens are added.
    pub fn from_json(config: &[u8], generation_config: Option<&[u8]>) -> Result<Self, ModelError> {
        let raw = serde_json::from_slice(config)
            .map_err(|cause| config_error(format!("config.json is not usable: {cause}")))?;
        let mut model = from_raw(&raw)?;
        if let Some(bytes) = generation_config {
            model.eos_token_ids.extend(GenerationDefaults::from_json(bytes)?.eos_token_ids);
            model.eos_token_ids = distinct(model.eos_token_ids);
        }
        model.validated()
    }
}

fn from_raw(top: &RawConfig) -> Result<ModelConfig, ModelError> {
    let architecture = architecture(top)?;
    refuse_unsupported(top)?;
    // Multimodal checkpoints describe their language model in an object of its own.
    let raw = top.text_config.as_deref().unwrap_or(top);
    let defaults = Defaults::of(architecture);
    let hidden_size = required("hidden_size", raw.hidden_size)?;
    let (num_heads, num_kv_heads, head_dim) = heads(raw, &defaults, hidden_size)?;
    let num_layers = required("num_hidden_layers", raw.num_hidden_layers)?;
    if num_layers > MAX_LAYERS {
        return Err(config_error(format!(
            "num_hidden_layers is {num_layers}; at most {MAX_LAYERS} are possible"
        )));
    }
    let layers = layers(architecture, raw, num_layers, defaults.sliding_window)?;
    let position_limit = position_limit(raw, defaults.max_position_embeddings);
    let ropes = ropes(architecture, raw, &defaults, head_dim, position_limit)?;
    let max_model_len = scaled_length(architecture, &ropes, position_limit)?;
    let is_gemma = architecture == Architecture::Gemma3;
    let (qkv_bias, attention_output_bias) = match architecture {
        Architecture::Qwen2 => (true, false),
        Architecture::Mistral => (false, false),
        _ => (raw.attention_bias.unwrap_or(false), raw.attention_bias.unwrap_or(false)),
    };
    let eos_token_ids = [&raw.eos_token_id, &top.eos_token_id].into_iter().flatten();
    let eos_token_ids =
        distinct(eos_token_ids.flat_map(OneOrMany::as_slice).filter_map(|&id| token_id(Some(id))));
    Ok(ModelConfig {
        architecture,
        names: NameScheme::HuggingFace,
        hidden_size,
        intermediate_size: required("intermediate_size", raw.intermediate_size)?,
        num_heads,
        num_kv_heads,
        head_dim,
        vocab_size: required("vocab_size", raw.vocab_size.or(defaults.vocab_size))?,
        layers,
        ropes,
        rope_style: RopeStyle::Half,
        norm_eps: raw.rms_norm_eps.unwrap_or(1e-6) as f32,
        norm_weight_offset: if is_gemma { 1.0 } else { 0.0 },
        activation: activation(architecture, raw)?,
        attention_scale: if is_gemma {
            (raw.query_pre_attn_scalar.unwrap_or(256.0).powf(-0.5)) as f32
        } else {
            (head_dim as f64).powf(-0.5) as f32
        },
        attention_softcap: raw.attn_logit_softcapping.filter(|_| is_gemma).map(|cap| cap as f32),
        logit_softcap: raw.final_logit_softcapping.filter(|_| is_gemma).map(|cap| cap as f32),
        embed_scale: if is_gemma { (hidden_size as f64).sqrt() as f32 } else { 1.0 },
        qk_norm: matches!(architecture, Architecture::Qwen3 | Architecture::Gemma3),
        post_norms: is_gemma,
        qkv_bias,
        attention_output_bias,
        mlp_bias: architecture == Architecture::Llama && raw.mlp_bias.unwrap_or(false),
        tied_embeddings: raw
            .tie_word_embeddings
            .or(top.tie_word_embeddings)
            .unwrap_or(defaults.tied_embeddings),
        max_model_len,
        dtype: dtype(raw, top)?,
        bos_token_id: token_id(raw.bos_token_id.or(top.bos_token_id)),
        eos_token_ids,
    })
}

/// Query heads, key/value heads, and the size of a head.
fn heads(
    raw: &RawConfig,
    defaults: &Defaults,
    hidden_size: usize,
) -> Result<(usize, usize, usize), ModelError> {
    let num_heads = required("num_attention_heads", raw.num_attention_heads.or(defaults.num_heads))?;
    // Absent or null both mean as many as there are heads, unless the class has a number of its own.
    let num_kv_heads = raw.num_key_value_heads.unwrap_or(defaults.num_kv_heads);
    let num_kv_heads = optional("num_key_value_heads", num_kv_heads)?.unwrap_or(num_heads);
    let head_dim = match optional("head_dim", raw.head_dim.or(defaults.head_dim))? {
        Some(head_dim) => head_dim,
        None => hidden_size
            .checked_div(num_heads)
            .filter(|head_dim| head_dim * num_heads == hidden_size)
            .ok_or_else(|| {
                config_error(format!(
                    "hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_heads})"
                ))
            })?,
    };
    Ok((num_heads, num_kv_heads, head_dim))
}

fn architecture(top: &RawConfig) -> Result<Architecture, ModelError> {
    // A class that we do not know is not saved by a model_type that we do.
    let class = top.architectures.iter().flatten().next().or(top.model_type.as_ref());
    match class.map(String::as_str) {
        Some("LlamaForCausalLM" | "llama") => Ok(Architecture::Llama),
        Some("MistralForCausalLM" | "mistral") => Ok(Architecture::Mistral),
        Some("Qwen2ForCausalLM" | "qwen2") => Ok(Architecture::Qwen2),
        Some("Qwen3ForCausalLM" | "qwen3") => Ok(Architecture::Qwen3),
        Some("Gemma3ForCausalLM" | "Gemma3ForConditionalGeneration" | "gemma3" | "gemma3_text") => {
            Ok(Architecture::Gemma3)
        }
        Some(other) => Err(ModelError::UnknownArchitecture { name: other.to_owned() }),
        None => Err(config_error(
            "config.json has neither \"architectures\" nor \"model_type\"; is it the configuration of a language \
             model?",
        )),
    }
}

fn refuse_unsupported(top: &RawConfig) -> Result<(), ModelError> {
    let raw = top.text_config.as_deref().unwrap_or(top);
    if let Some(quantization) = top.quantization_config.as_ref().or(raw.quantization_config.as_ref()) {
        let method = quantization.quant_method.as_deref().unwrap_or("unknown");
        return Err(config_error(format!(
            "the checkpoint is quantised by the method {method:?}, which is not supported; use the unquantised \
             checkpoint or a GGUF file"
        )));
    }
    if raw.use_bidirectional_attention == Some(true) {
        return Err(config_error("use_bidirectional_attention is not supported; only causal models are"));
    }
    Ok(())
}

fn required(name: &str, value: Option<u64>) -> Result<usize, ModelError> {
    optional(name, value)?.ok_or_else(|| config_error(format!("config.json has no {name:?}")))
}

fn optional(name: &str, value: Option<u64>) -> Result<Option<usize>, ModelError> {
    // Well below usize, so that sums and doubles of unvalidated values cannot overflow either.
    match value {
        Some(value) if value > 1 << 40 => Err(config_error(format!("{name} is {value}, which is too large"))),
        other => Ok(other.map(|value| value as usize)),
    }
}

/// The smallest of the keys that limit the positions, as vLLM takes it.
fn position_limit(raw: &RawConfig, default: u64) -> u64 {
    let keys = [
        raw.max_position_embeddings,
        raw.n_positions,
        raw.max_seq_len,
        raw.seq_length,
        raw.model_max_length,
        raw.max_target_positions,
        raw.max_sequence_length,
        raw.max_seq_length,
        raw.seq_len,
    ];
    keys.into_iter().flatten().min().unwrap_or(default)
}

fn layers(
    architecture: Architecture,
    raw: &RawConfig,
    num_layers: usize,
    default_window: Option<u64>,
) -> Result<Vec<LayerConfig>, ModelError> {
    // Here null differs from an absent key: it switches the window off.
    let window = raw.sliding_window.unwrap_or(default_window).map(u32::try_from).transpose();
    let window = window.map_err(|_| config_error("sliding_window does not fit 32 bits"))?;
    let layer_types = match (&raw.layer_types, architecture) {
        // These have the same attention in every layer; transformers ignores the key as well.
        (_, Architecture::Llama | Architecture::Mistral) | (None, _) => None,
        (Some(types), _) if types.len() == num_layers => Some(types),
        (Some(types), _) => {
            return Err(config_error(format!(
                "layer_types has {} entries for {num_layers} layers",
                types.len()
            )));
        }
    };
    let pattern = raw.sliding_window_pattern.or(raw.private_sliding_window_pattern).unwrap_or(6);
    if pattern == 0 {
        return Err(config_error("sliding_window_pattern is 0; it must be at least 1"));
    }
    let first_windowed = raw.max_window_layers.unwrap_or(28);
    let mut layers = Vec::with_capacity(num_layers);
    for index in 0..num_layers {
        let slides = match layer_types.map(|types| types[index].as_str()) {
            Some("sliding_attention") => true,
            Some("full_attention") => false,
            Some(other) => {
                return Err(config_error(format!("layer_types has {other:?}, which is not supported")));
            }
            None => match architecture {
                Architecture::Llama => false,
                Architecture::Mistral => true,
                Architecture::Qwen2 | Architecture::Qwen3 => index as u64 >= first_windowed,
                Architecture::Gemma3 => !(index as u64 + 1).is_multiple_of(pattern),
            },
        };
        let is_qwen = matches!(architecture, Architecture::Qwen2 | Architecture::Qwen3);
        let window_in_use = window.filter(|_| !is_qwen || raw.use_sliding_window == Some(true));
        layers.push(LayerConfig {
            window: if slides { window_in_use } else { None },
            // Gemma's sliding layers have a rotary table of their own, with or without a window.
            rope: usize::from(slides && architecture == Architecture::Gemma3),
        });
    }
    Ok(layers)
}

fn activation(architecture: Architecture, raw: &RawConfig) -> Result<Activation, ModelError> {
    let (key, name) = if architecture == Architecture::Gemma3 {
        ("hidden_activation", raw.hidden_activation.as_deref().unwrap_or("gelu_pytorch_tanh"))
    } else {
        ("hidden_act", raw.hidden_act.as_deref().unwrap_or("silu"))
    };
    match name {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" | "gelu_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
        "gelu" => Ok(Activation::Gelu),
        other => Err(config_error(format!(
            "{key} is {other:?}; only silu, gelu and gelu_pytorch_tanh are supported"
        ))),
    }
}

fn dtype(raw: &RawConfig, top: &RawConfig) -> Result<WeightFormat, ModelError> {
    let name = [&raw.dtype, &raw.torch_dtype, &top.dtype, &top.torch_dtype].into_iter().flatten().next();
    // Checkpoints that do not say are served in bfloat16, as vLLM does.
    let name = name.map_or("bfloat16", String::as_str);
    match name.strip_prefix("torch.").unwrap_or(name) {
        "bfloat16" | "auto" => Ok(WeightFormat::BF16),
        "float16" | "half" => Ok(WeightFormat::F16),
        "float32" | "float" => Ok(WeightFormat::F32),
        other => Err(config_error(format!("dtype {other:?} is not one of bfloat16, float16, float32"))),
    }
}

fn token_id(id: Option<i64>) -> Option<TokenId> {
    // Some checkpoints write -1 for "none".
    id.and_then(|id| TokenId::try_from(id).ok())
}
