//! `config.json` and `generation_config.json` of Hugging Face checkpoints.
//!
//! Absent keys mean what transformers means by them, which differs between architectures: the defaults are kept
//! together in [`Defaults`]. Sizes that no class of transformers could guess are required.

use baton_backend::{Activation, RopeStyle, WeightFormat};
use baton_core::TokenId;

use super::experts;
use super::generation::GenerationDefaults;
use super::gpt2::{self, Gpt2Sizes};
use super::hugging_face_rope::{ropes, scaled_length};
use super::latent;
use super::limits::{MAX_LAYERS, config_error};
use super::raw::{OneOrMany, RawConfig};
use super::{Architecture, LayerConfig, ModelConfig, NameScheme, distinct};
use crate::families::{self, Family, Keys};
use crate::{ModelError, QuantizationConfig};

/// What a class of transformers assumes when a key is absent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    pub(crate) num_heads: Option<u64>,
    pub(crate) num_kv_heads: Option<u64>,
    pub(crate) head_dim: Option<u64>,
    pub(crate) vocab_size: Option<u64>,
    pub(crate) max_position_embeddings: u64,
    pub(crate) sliding_window: Option<u64>,
    pub(crate) tied_embeddings: bool,
    pub(crate) rope_theta: f64,
    pub(crate) norm_eps: f64,
    pub(crate) hidden_act: &'static str,
    /// `intermediate_size` in parts of `hidden_size`.
    pub(crate) mlp_ratio: Option<u64>,
    pub(crate) partial_rotary_factor: f64,
}

impl Defaults {
    pub(crate) const LLAMA: Self = Self {
        num_heads: None,
        num_kv_heads: None,
        head_dim: None,
        vocab_size: None,
        max_position_embeddings: 2048,
        sliding_window: None,
        tied_embeddings: false,
        rope_theta: 10_000.0,
        norm_eps: 1e-6,
        hidden_act: "silu",
        mlp_ratio: None,
        partial_rotary_factor: 1.0,
    };

    fn of(architecture: Architecture) -> Self {
        let llama = Self::LLAMA;
        match architecture {
            // GPT-2's keys have other names and no defaults here.
            Architecture::Llama | Architecture::DeepseekV2 | Architecture::Gpt2 => llama,
            Architecture::Mistral => Self {
                num_kv_heads: Some(8),
                max_position_embeddings: 131_072,
                sliding_window: Some(4096),
                ..llama
            },
            Architecture::DeepseekV3 => Self { max_position_embeddings: 4096, ..llama },
            Architecture::Mixtral => {
                Self { num_kv_heads: Some(8), max_position_embeddings: 131_072, rope_theta: 1e6, ..llama }
            }
            Architecture::Qwen2Moe => Self {
                num_kv_heads: Some(16),
                max_position_embeddings: 32_768,
                sliding_window: Some(4096),
                ..llama
            },
            Architecture::Qwen3Moe => Self {
                num_kv_heads: Some(4),
                max_position_embeddings: 32_768,
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
                ..llama
            },
            other => families::of(other).map_or(llama, |family| family.defaults),
        }
    }
}

impl ModelConfig {
    /// Reads `config.json` and, if there is one, `generation_config.json`, whose end-of-sequence tokens are added.
    pub fn from_json(config: &[u8], generation_config: Option<&[u8]>) -> Result<Self, ModelError> {
        let raw: RawConfig = serde_json::from_slice(config)
            .map_err(|cause| config_error(format!("config.json is not usable: {cause}")))?;
        let mut model = match families::of(architecture(&raw)?) {
            Some(family) => from_family(config, family)?,
            None => from_raw(&raw)?,
        };
        let text = raw.text_config.as_deref();
        let quantization = [Some(&raw), text].into_iter().flatten().find_map(|raw| {
            raw.quantization_config
                .as_ref()
                .or(raw.compression_config.as_ref())
                .filter(|value| !value.is_null())
        });
        model.quantization = quantization.map(QuantizationConfig::from_json).transpose()?;
        if let Some(bytes) = generation_config {
            model.eos_token_ids.extend(GenerationDefaults::from_json(bytes)?.eos_token_ids);
            model.eos_token_ids = distinct(model.eos_token_ids);
        }
        model.validated()
    }
}

/// A family's own keys are given the names that llama has for them, and what is left is the family's to change.
fn from_family(config: &[u8], family: &Family) -> Result<ModelConfig, ModelError> {
    let keys = Keys::parse(config, family)?;
    let raw: RawConfig = serde_json::from_value(keys.to_value())
        .map_err(|cause| config_error(format!("config.json is not usable: {cause}")))?;
    let mut model = from_raw(&raw)?;
    (family.adjust)(&mut model, &keys)?;
    Ok(model)
}

fn from_raw(top: &RawConfig) -> Result<ModelConfig, ModelError> {
    let architecture = architecture(top)?;
    refuse_unsupported(top)?;
    if architecture == Architecture::Gpt2 {
        return gpt2(top);
    }
    // Multimodal checkpoints describe their language model in an object of its own.
    let raw = top.text_config.as_deref().unwrap_or(top);
    let defaults = Defaults::of(architecture);
    let hidden_size = required("hidden_size", raw.hidden_size)?;
    let latent = latent::from_raw(architecture, &raw.latent)?;
    let (num_heads, num_kv_heads, head_dim) = match &latent {
        None => heads(raw, &defaults, hidden_size)?,
        // One latent for all heads.
        Some(latent) => (required("num_attention_heads", raw.num_attention_heads)?, 1, latent.head_dim()),
    };
    if latent.is_some() && raw.attention_bias == Some(true) {
        return Err(config_error("attention_bias is not supported for models with latents"));
    }
    let rotated = latent.map_or(head_dim, |latent| latent.rotary_dim);
    let num_layers =
        checked_layers("num_hidden_layers", required("num_hidden_layers", raw.num_hidden_layers)?)?;
    let layers = layers(architecture, raw, num_layers, defaults.sliding_window)?;
    let position_limit = position_limit(raw, defaults.max_position_embeddings);
    let ropes = ropes(architecture, raw, &defaults, rotated, position_limit)?;
    let max_model_len = scaled_length(architecture, &ropes, position_limit)?;
    let is_gemma = architecture == Architecture::Gemma3;
    let (qkv_bias, attention_output_bias) = match architecture {
        Architecture::Qwen2 | Architecture::Qwen2Moe => (true, false),
        Architecture::Mistral | Architecture::Mixtral => (false, false),
        _ => (raw.attention_bias.unwrap_or(false), raw.attention_bias.unwrap_or(false)),
    };
    let eos_token_ids = [&raw.eos_token_id, &top.eos_token_id].into_iter().flatten();
    let eos_token_ids =
        distinct(eos_token_ids.flat_map(OneOrMany::as_slice).filter_map(|&id| token_id(Some(id))));
    let intermediate_size = required(
        "intermediate_size",
        raw.intermediate_size.or_else(|| defaults.mlp_ratio.map(|ratio| ratio * hidden_size as u64)),
    )?;
    let experts = experts::from_raw(architecture, &raw.experts, intermediate_size, num_layers)?;
    Ok(ModelConfig {
        architecture,
        names: NameScheme::HuggingFace,
        hidden_size,
        intermediate_size,
        num_heads,
        num_kv_heads,
        head_dim,
        vocab_size: required("vocab_size", raw.vocab_size.or(defaults.vocab_size))?,
        layers,
        latent,
        rope_style: if latent.is_some() { RopeStyle::Interleaved } else { RopeStyle::Half },
        norm_eps: raw.rms_norm_eps.unwrap_or(defaults.norm_eps) as f32,
        norm_weight_offset: if is_gemma { 1.0 } else { 0.0 },
        activation: activation(architecture, raw, &defaults)?,
        attention_scale: if is_gemma {
            (raw.query_pre_attn_scalar.unwrap_or(256.0).powf(-0.5)) as f32
        } else if let Some(latent) = &latent {
            latent::attention_scale(latent, &ropes)
        } else {
            (head_dim as f64).powf(-0.5) as f32
        },
        attention_softcap: raw.attn_logit_softcapping.filter(|_| is_gemma).map(|cap| cap as f32),
        logit_softcap: raw.final_logit_softcapping.filter(|_| is_gemma).map(|cap| cap as f32),
        embed_scale: if is_gemma { (hidden_size as f64).sqrt() as f32 } else { 1.0 },
        qk_norm: matches!(architecture, Architecture::Qwen3 | Architecture::Qwen3Moe | Architecture::Gemma3),
        post_norms: is_gemma,
        qkv_bias,
        attention_output_bias,
        mlp_bias: architecture == Architecture::Llama && raw.mlp_bias.unwrap_or(false),
        experts,
        tied_embeddings: raw
            .tie_word_embeddings
            .or(top.tie_word_embeddings)
            .unwrap_or(defaults.tied_embeddings),
        max_model_len,
        ropes,
        dtype: dtype(raw, top)?,
        quantization: None,
        bos_token_id: token_id(raw.bos_token_id.or(top.bos_token_id)),
        eos_token_ids,
        ..ModelConfig::default()
    })
}

fn gpt2(raw: &RawConfig) -> Result<ModelConfig, ModelError> {
    gpt2::refuse_unsupported(raw)?;
    let hidden_size = required("n_embd", raw.n_embd)?;
    let config = ModelConfig::gpt2(&Gpt2Sizes {
        hidden_size,
        intermediate_size: optional("n_inner", raw.n_inner)?.unwrap_or(4 * hidden_size),
        num_layers: checked_layers("n_layer", required("n_layer", raw.n_layer)?)?,
        num_heads: required("n_head", raw.n_head)?,
        vocab_size: required("vocab_size", raw.vocab_size.or(Some(50_257)))?,
        max_model_len: required("n_positions", raw.n_positions.or(Some(1024)))?,
    })?;
    let eos_token_ids = raw.eos_token_id.iter().flat_map(OneOrMany::as_slice);
    Ok(ModelConfig {
        norm_eps: raw.layer_norm_epsilon.unwrap_or(1e-5) as f32,
        activation: named_activation(
            "activation_function",
            raw.activation_function.as_deref().unwrap_or("gelu_new"),
        )?,
        tied_embeddings: raw.tie_word_embeddings.unwrap_or(true),
        // Published checkpoints say nothing and are float32.
        dtype: if raw.dtype.is_some() || raw.torch_dtype.is_some() {
            dtype(raw, raw)?
        } else {
            WeightFormat::F32
        },
        bos_token_id: token_id(raw.bos_token_id),
        eos_token_ids: distinct(eos_token_ids.filter_map(|&id| token_id(Some(id)))),
        ..config
    })
}

fn checked_layers(name: &str, num_layers: usize) -> Result<usize, ModelError> {
    if num_layers > MAX_LAYERS {
        return Err(config_error(format!("{name} is {num_layers}; at most {MAX_LAYERS} are possible")));
    }
    Ok(num_layers)
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
        Some("DeepseekV2ForCausalLM" | "deepseek_v2") => Ok(Architecture::DeepseekV2),
        Some("DeepseekV3ForCausalLM" | "deepseek_v3") => Ok(Architecture::DeepseekV3),
        Some("MixtralForCausalLM" | "mixtral") => Ok(Architecture::Mixtral),
        Some("Qwen2MoeForCausalLM" | "qwen2_moe") => Ok(Architecture::Qwen2Moe),
        Some("Qwen3MoeForCausalLM" | "qwen3_moe") => Ok(Architecture::Qwen3Moe),
        Some("GPT2LMHeadModel" | "gpt2") => Ok(Architecture::Gpt2),
        Some(other) => match families::by_class(other) {
            Some(family) => Ok(family.architecture),
            None => Err(ModelError::UnknownArchitecture { name: other.to_owned() }),
        },
        None => Err(config_error(
            "config.json has neither \"architectures\" nor \"model_type\"; is it the configuration of a language \
             model?",
        )),
    }
}

fn refuse_unsupported(top: &RawConfig) -> Result<(), ModelError> {
    let raw = top.text_config.as_deref().unwrap_or(top);
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
        // These have the same attention in every layer; transformers ignores the key as well. Families read it themselves.
        (
            _,
            Architecture::Llama
            | Architecture::Mistral
            | Architecture::Mixtral
            | Architecture::DeepseekV2
            | Architecture::DeepseekV3
            | Architecture::Gpt2,
        )
        | (None, _) => None,
        (_, other) if families::of(other).is_some() => None,
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
                Architecture::Mistral | Architecture::Mixtral => true,
                Architecture::Qwen2
                | Architecture::Qwen3
                | Architecture::Qwen2Moe
                | Architecture::Qwen3Moe => index as u64 >= first_windowed,
                Architecture::Gemma3 => !(index as u64 + 1).is_multiple_of(pattern),
                _ => false,
            },
        };
        let is_qwen = matches!(
            architecture,
            Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Qwen2Moe | Architecture::Qwen3Moe
        );
        let window_in_use = window.filter(|_| !is_qwen || raw.use_sliding_window == Some(true));
        layers.push(LayerConfig {
            window: if slides { window_in_use } else { None },
            // Gemma's sliding layers have a rotary table of their own, with or without a window.
            rope: Some(usize::from(slides && architecture == Architecture::Gemma3)),
        });
    }
    Ok(layers)
}

fn activation(
    architecture: Architecture,
    raw: &RawConfig,
    defaults: &Defaults,
) -> Result<Activation, ModelError> {
    let (key, name) = if architecture == Architecture::Gemma3 {
        ("hidden_activation", raw.hidden_activation.as_deref().unwrap_or("gelu_pytorch_tanh"))
    } else {
        ("hidden_act", raw.hidden_act.as_deref().unwrap_or(defaults.hidden_act))
    };
    named_activation(key, name)
}

pub(crate) fn named_activation(key: &str, name: &str) -> Result<Activation, ModelError> {
    match name {
        "silu" | "swish" | "swiglu" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" | "gelu_tanh" | "gelu_new" | "gelu_fast" => Ok(Activation::GeluTanh),
        "gelu" | "gelu_python" => Ok(Activation::Gelu),
        "relu" => Ok(Activation::Relu),
        "relu2" => Ok(Activation::ReluSquared),
        other => Err(config_error(format!(
            "{key} is {other:?}; only silu, gelu, gelu_pytorch_tanh, relu and relu2 are supported"
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
