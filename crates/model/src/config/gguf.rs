//! The configuration in a GGUF file's metadata. Keys and their meaning are those of llama.cpp; where the metadata is
//! silent, the tensors that are there decide (biases, tied embeddings, rope factors).

use baton_backend::{Activation, RopeStyle, WeightFormat};
use baton_core::TokenId;

use super::gguf_experts::GGUF_SIGMOID;
use super::gpt2::Gpt2Sizes;
use super::latent;
use super::limits::{MAX_LAYERS, config_error};
use super::{
    Architecture, LayerConfig, ModelConfig, NameScheme, QkvLayout, RopeConfig, RopeScaling, distinct,
};
use crate::families;
use crate::gguf::{GgufArray, GgufFile, GgufValue};
use crate::tensor_names::{Role, bias_name, weight_name};
use crate::{ModelError, WeightSource};

const GEMMA_LOCAL_THETA: f32 = 10_000.0;
/// Gemma 3 of 27B, known by its number of layers, scales attention by its hidden size instead of its head size.
const GEMMA_27B_LAYERS: usize = 62;
/// Tokens that end a turn whatever the metadata says, as llama.cpp has it.
const END_TOKENS: [&str; 7] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
];
/// What ends a turn of gpt-oss, an answer and a call: `<|end|>` ends only a part of it there.
const GPT_OSS_END_TOKENS: [&str; 2] = ["<|return|>", "<|call|>"];

impl ModelConfig {
    pub fn from_gguf(file: &GgufFile) -> Result<Self, ModelError> {
        let (architecture, prefix) = architecture(file)?;
        Reader { file, architecture, prefix }.read()?.validated()
    }
}

fn architecture(file: &GgufFile) -> Result<(Architecture, String), ModelError> {
    let known = |architecture: Architecture, prefix: &str| Ok((architecture, prefix.to_owned()));
    match file.metadata().get_str("general.architecture").map_err(config_error)? {
        // Mistral's files say llama too; the two differ only by a sliding window.
        Some(name @ "llama") => {
            let count = file.metadata().get_u32("llama.expert_count").map_err(config_error)?;
            let has_experts = count.is_some_and(|count| count > 0);
            known(if has_experts { Architecture::Mixtral } else { Architecture::Llama }, name)
        }
        Some(name @ "qwen2") => known(Architecture::Qwen2, name),
        Some(name @ "qwen3") => known(Architecture::Qwen3, name),
        Some(name @ "qwen2moe") => known(Architecture::Qwen2Moe, name),
        Some(name @ "qwen3moe") => known(Architecture::Qwen3Moe, name),
        Some(name @ "deepseek2") => {
            let scores = file.metadata().get_u32("deepseek2.expert_gating_func").map_err(config_error)?;
            let is_v3 = scores == Some(GGUF_SIGMOID);
            known(if is_v3 { Architecture::DeepseekV3 } else { Architecture::DeepseekV2 }, name)
        }
        Some(name @ "gemma3") => known(Architecture::Gemma3, name),
        Some(name @ "gpt2") => known(Architecture::Gpt2, name),
        Some(other) => match families::by_gguf(other) {
            Some(family) => known(family.architecture, other),
            None => Err(ModelError::UnknownArchitecture { name: other.to_owned() }),
        },
        None => {
            Err(config_error("the GGUF file has no \"general.architecture\"; it is not a language model"))
        }
    }
}

#[derive(Debug)]
pub(crate) struct Reader<'a> {
    file: &'a GgufFile,
    pub(super) architecture: Architecture,
    /// Before the keys of the architecture.
    prefix: String,
}

impl Reader<'_> {
    fn read(&self) -> Result<ModelConfig, ModelError> {
        self.refuse_unsupported()?;
        if self.architecture == Architecture::Gpt2 {
            return self.read_gpt2();
        }
        let family = families::of(self.architecture);
        let hidden_size = self.required("embedding_length")?;
        let num_layers = self.num_layers()?;
        let num_heads =
            self.same_for_all("attention.head_count")?.ok_or_else(|| self.missing("attention.head_count"))?;
        let latent = self.latent()?;
        let (num_kv_heads, head_dim) = match &latent {
            // One latent for all heads.
            Some(latent) => (1, latent.head_dim()),
            None => (
                self.same_for_all("attention.head_count_kv")?.unwrap_or(num_heads),
                self.head_dim(hidden_size, num_heads)?,
            ),
        };
        let ropes = self.ropes(head_dim)?;
        let layers = self.layers(num_layers, ropes.len())?;
        let experts = self.experts(num_layers)?;
        let is_gemma = self.architecture == Architecture::Gemma3;
        let scale_dim = match self.architecture {
            Architecture::Gemma3 if num_layers == GEMMA_27B_LAYERS => hidden_size / num_heads.max(1),
            _ => head_dim,
        };
        let bias = |role| self.has_tensor(&bias_name(NameScheme::Gguf, self.architecture, role, 0));
        let mut config = ModelConfig {
            architecture: self.architecture,
            names: NameScheme::Gguf,
            hidden_size,
            intermediate_size: self
                .same_for_all("feed_forward_length")?
                .ok_or_else(|| self.missing("feed_forward_length"))?,
            num_heads,
            num_kv_heads,
            head_dim,
            vocab_size: self.vocab_size()?,
            layers,
            latent,
            rope_style: match (self.architecture, family) {
                (Architecture::Llama | Architecture::Mistral | Architecture::Mixtral, _) => {
                    RopeStyle::Interleaved
                }
                _ if latent.is_some() => RopeStyle::Interleaved,
                (_, Some(family)) => family.gguf_rope,
                _ => RopeStyle::Half,
            },
            norm_eps: self.norm_eps()?,
            // The converter has added gemma's 1 to the weights already.
            activation: if is_gemma { Activation::GeluTanh } else { Activation::Silu },
            attention_scale: match &latent {
                Some(latent) => latent::attention_scale(latent, &ropes),
                None => (scale_dim as f64).powf(-0.5) as f32,
            },
            logit_softcap: self.f32("final_logit_softcapping")?.filter(|&cap| is_gemma && cap != 0.0),
            embed_scale: if is_gemma { (hidden_size as f64).sqrt() as f32 } else { 1.0 },
            qk_norm: matches!(
                self.architecture,
                Architecture::Qwen3 | Architecture::Qwen3Moe | Architecture::Gemma3
            ),
            post_norms: is_gemma,
            qkv_bias: bias(Role::AttnQ) || bias(Role::AttnQkv),
            attention_output_bias: bias(Role::AttnOutput),
            mlp_bias: bias(Role::FfnDown),
            experts,
            tied_embeddings: !self.has_tensor(&weight_name(
                NameScheme::Gguf,
                self.architecture,
                Role::Output,
                0,
            )),
            max_model_len: self.max_model_len(&ropes)?,
            ropes,
            dtype: self.dtype(),
            quantization: None,
            bos_token_id: self
                .file
                .metadata()
                .get_u32("tokenizer.ggml.bos_token_id")
                .map_err(config_error)?,
            eos_token_ids: self.eos_token_ids()?,
            ..ModelConfig::default()
        };
        if let Some(family) = family {
            self.read_tensors(&mut config);
            (family.adjust_gguf)(&mut config, self)?;
        }
        Ok(config)
    }

    /// What the tensors of a layer say by being there.
    fn read_tensors(&self, config: &mut ModelConfig) {
        let has = |stem: &str| self.has_tensor(&format!("blk.0.{stem}"));
        config.layer_norm = !self.has_key("attention.layer_norm_rms_epsilon");
        config.norm_bias = has("attn_norm.bias");
        config.pre_norms = has("attn_norm.weight");
        config.embed_norm = self.has_tensor("token_embd_norm.weight");
        config.learned_positions = self.has_tensor("position_embd.weight");
        config.gated_mlp = has("ffn_gate.weight");
        config.qk_norm = has("attn_q_norm.weight");
        config.post_norms = has("post_ffw_norm.weight");
        config.mlp_bias = has("ffn_up.bias") || has("ffn_down.bias");
        config.head_bias = self.has_tensor("output.bias");
        if has("attn_qkv.weight") {
            config.qkv_layout = QkvLayout::Concatenated;
        }
    }

    fn has_key(&self, name: &str) -> bool {
        self.file.metadata().get(&self.key(name)).is_some()
    }

    /// Of either kind of norm.
    fn norm_eps(&self) -> Result<f32, ModelError> {
        let (rms, layer) = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon");
        let layer_eps = if families::of(self.architecture).is_some() { self.f32(layer)? } else { None };
        self.f32(rms)?.or(layer_eps).ok_or_else(|| self.missing(rms))
    }

    /// Gives the file's window to the layers that slide.
    pub(crate) fn set_windows(
        &self,
        config: &mut ModelConfig,
        slides: impl Fn(usize) -> bool,
    ) -> Result<(), ModelError> {
        let window = self.integer("attention.sliding_window")?.filter(|&window| window > 0);
        for (index, layer) in config.layers.iter_mut().enumerate() {
            layer.window = window.map(|window| window as u32).filter(|_| slides(index));
        }
        Ok(())
    }

    pub(crate) fn bool(&self, name: &str) -> Result<Option<bool>, ModelError> {
        match self.file.metadata().get(&self.key(name)) {
            None => Ok(None),
            Some(GgufValue::Bool(value)) => Ok(Some(*value)),
            Some(_) => Err(config_error(format!("{:?} should be a bool", self.key(name)))),
        }
    }

    fn read_gpt2(&self) -> Result<ModelConfig, ModelError> {
        let required = |name: &str| self.same_for_all(name)?.ok_or_else(|| self.missing(name));
        let config = ModelConfig::gpt2(&Gpt2Sizes {
            hidden_size: self.required("embedding_length")?,
            intermediate_size: required("feed_forward_length")?,
            num_layers: self.num_layers()?,
            num_heads: required("attention.head_count")?,
            vocab_size: self.vocab_size()?,
            max_model_len: self.required("context_length")?,
        })?;
        let output = weight_name(NameScheme::Gguf, self.architecture, Role::Output, 0);
        let metadata = self.file.metadata();
        Ok(ModelConfig {
            names: NameScheme::Gguf,
            norm_eps: self.f32("attention.layer_norm_epsilon")?.unwrap_or(config.norm_eps),
            tied_embeddings: !self.has_tensor(&output),
            dtype: self.dtype(),
            quantization: None,
            bos_token_id: metadata.get_u32("tokenizer.ggml.bos_token_id").map_err(config_error)?,
            eos_token_ids: self.eos_token_ids()?,
            ..config
        })
    }

    fn num_layers(&self) -> Result<usize, ModelError> {
        let num_layers = self.required("block_count")?;
        if num_layers > MAX_LAYERS {
            return Err(config_error(format!(
                "block_count is {num_layers}; at most {MAX_LAYERS} are possible"
            )));
        }
        Ok(num_layers)
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    pub(super) fn missing(&self, name: &str) -> ModelError {
        config_error(format!("the GGUF file has no metadata {:?}", self.key(name)))
    }

    pub(crate) fn integer(&self, name: &str) -> Result<Option<usize>, ModelError> {
        let value = self.file.metadata().get_u32(&self.key(name)).map_err(config_error)?;
        Ok(value.map(|value| value as usize))
    }

    pub(super) fn required(&self, name: &str) -> Result<usize, ModelError> {
        self.integer(name)?.ok_or_else(|| self.missing(name))
    }

    pub(crate) fn f32(&self, name: &str) -> Result<Option<f32>, ModelError> {
        self.file.metadata().get_f32(&self.key(name)).map_err(config_error)
    }

    /// A number, or an array with one for each layer, which must all be the same.
    pub(super) fn same_for_all(&self, name: &str) -> Result<Option<usize>, ModelError> {
        let key = self.key(name);
        let Some(GgufValue::Array(_)) = self.file.metadata().get(&key) else { return self.integer(name) };
        let values = self.file.metadata().get_integers(&key).map_err(config_error)?.unwrap_or_default();
        let first = values.first().copied().unwrap_or_default();
        if values.iter().any(|&value| value != first) {
            return Err(config_error(format!("{key:?} differs between layers, which is not supported")));
        }
        let first = usize::try_from(first).ok().filter(|&first| first > 0 && u32::try_from(first).is_ok());
        first.map(Some).ok_or_else(|| config_error(format!("{key:?} has no usable value")))
    }

    /// Rows of a tensor; 0 where it is not there.
    pub(crate) fn rows(&self, name: &str) -> usize {
        self.file.tensor(name).ok().flatten().map_or(0, |tensor| tensor.rows())
    }

    pub(crate) fn has_tensor(&self, name: &str) -> bool {
        self.file.find(name).is_some()
    }

    fn refuse_unsupported(&self) -> Result<(), ModelError> {
        let has_experts = self.integer("expert_count")?.is_some_and(|count| count > 0);
        if has_experts && !self.is_mixture() {
            let what = format!("mixtures of experts of the architecture {:?} are not supported", self.prefix);
            return Err(config_error(what));
        }
        Ok(())
    }

    fn head_dim(&self, hidden_size: usize, num_heads: usize) -> Result<usize, ModelError> {
        let key_length = self.integer("attention.key_length")?;
        let value_length = self.integer("attention.value_length")?;
        let head_dim = match key_length {
            Some(key_length) => key_length,
            None => {
                hidden_size.checked_div(num_heads).ok_or_else(|| config_error("attention.head_count is 0"))?
            }
        };
        if value_length.is_some_and(|value_length| value_length != head_dim) {
            return Err(config_error(format!(
                "keys of {head_dim} and values of {value_length:?} dimensions are not supported; they must be the same"
            )));
        }
        Ok(head_dim)
    }

    fn vocab_size(&self) -> Result<usize, ModelError> {
        let tokens = self.file.metadata().get_array("tokenizer.ggml.tokens").map_err(config_error)?;
        match tokens.map(GgufArray::len).filter(|&count| count > 0) {
            Some(count) => Ok(count),
            None => self.required("vocab_size"),
        }
    }

    /// Gemma: `period` of layers of which the last is global, or one flag a layer. Llama (Mistral): all or none.
    fn layers(&self, num_layers: usize, num_ropes: usize) -> Result<Vec<LayerConfig>, ModelError> {
        let window = self.integer("attention.sliding_window")?.filter(|&window| window > 0);
        // llama.cpp gives qwen full attention in every layer, whatever this key says.
        let window = window.filter(|_| {
            matches!(self.architecture, Architecture::Llama | Architecture::Mixtral | Architecture::Gemma3)
        });
        let local_rope = num_ropes - 1;
        let sliding = LayerConfig { window: window.map(|window| window as u32), rope: Some(local_rope) };
        let full = LayerConfig { window: None, rope: Some(0) };
        if self.architecture != Architecture::Gemma3 || window.is_none() {
            let layer = if window.is_some() { sliding } else { full };
            return Ok(vec![layer; num_layers]);
        }
        let key = self.key("attention.sliding_window_pattern");
        if let Some(GgufValue::Array(flags)) = self.file.metadata().get(&key) {
            let GgufArray::Bool(flags) = flags else {
                return Err(config_error(format!("{key:?} should be an array of bool")));
            };
            if flags.len() != num_layers {
                return Err(config_error(format!(
                    "{key:?} has {} entries for {num_layers} layers",
                    flags.len()
                )));
            }
            return Ok(flags.iter().map(|&slides| if slides { sliding } else { full }).collect());
        }
        let period = self.integer("attention.sliding_window_pattern")?.unwrap_or(6);
        // A period of 0 means that every layer slides.
        let slides = |index: usize| period == 0 || !(index + 1).is_multiple_of(period);
        Ok((0..num_layers).map(|index| if slides(index) { sliding } else { full }).collect())
    }

    /// One rotary table, or for gemma a second one for the sliding layers, which are never stretched.
    fn ropes(&self, head_dim: usize) -> Result<Vec<RopeConfig>, ModelError> {
        let theta = self.f32("rope.freq_base")?.unwrap_or(10_000.0);
        let rotary_dim = self.integer("rope.dimension_count")?.unwrap_or(head_dim);
        let mut ropes = vec![RopeConfig { theta, rotary_dim, scaling: self.rope_scaling()? }];
        if self.architecture == Architecture::Gemma3 {
            let theta = self.f32("rope.freq_base_swa")?.unwrap_or(GEMMA_LOCAL_THETA);
            ropes.push(RopeConfig { theta, rotary_dim, scaling: RopeScaling::None });
        }
        Ok(ropes)
    }

    fn rope_scaling(&self) -> Result<RopeScaling, ModelError> {
        let metadata = self.file.metadata();
        let written = metadata.get_str(&self.key("rope.scaling.type")).map_err(config_error)?;
        // Files from before 2023-10 have only `rope.scale_linear`.
        let factor = match self.f32("rope.scaling.factor")? {
            None => self.f32("rope.scale_linear")?,
            some => some,
        };
        let factor = factor.filter(|&factor| factor != 0.0).unwrap_or(1.0);
        let divisors = self.rope_divisors()?;
        // Phi's files have two lists, and not always a word about them.
        let written = match written {
            None if self.has_tensor("rope_factors_long.weight") => Some("longrope"),
            written => written,
        };
        match (written.unwrap_or("linear"), divisors) {
            ("none", None) => Ok(RopeScaling::None),
            ("none", Some(divisors)) => Ok(RopeScaling::Factors { divisors }),
            ("linear", None) if factor == 1.0 => Ok(RopeScaling::None),
            ("linear", None) => Ok(RopeScaling::Linear { factor }),
            ("linear", Some(mut divisors)) => {
                for divisor in &mut divisors {
                    *divisor *= factor;
                }
                Ok(RopeScaling::Factors { divisors })
            }
            ("longrope", None) => self.longrope(),
            ("yarn", None) => self.yarn(factor),
            ("yarn", Some(_)) => Err(config_error("rope_freqs.weight together with yarn is not supported")),
            (other, _) => Err(config_error(format!(
                "rope scaling of type {other:?} is not supported; none, linear, yarn and longrope are"
            ))),
        }
    }

    fn yarn(&self, factor: f32) -> Result<RopeScaling, ModelError> {
        let original = match self.integer("rope.scaling.original_context_length")? {
            Some(original) => original,
            None => self.required("context_length")?,
        };
        // llama.cpp multiplies the factor of the paper by this one.
        let attention_factor = match self.f32("rope.scaling.attn_factor")? {
            None => self.f32("rope.scaling.yarn_attn_factor")?,
            some => some,
        };
        let paper_factor = if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 };
        let log_multiplier =
            self.f32("rope.scaling.yarn_log_multiplier")?.filter(|&multiplier| multiplier != 0.0);
        let attention_factor = attention_factor.filter(|&attention_factor| attention_factor != 1.0);
        let is_latent = matches!(self.architecture, Architecture::DeepseekV2 | Architecture::DeepseekV3);
        Ok(RopeScaling::Yarn {
            factor,
            original_max_position_embeddings: original,
            // With latents the factor is in the scores alone.
            attention_factor: if is_latent {
                Some(1.0)
            } else {
                attention_factor.map(|attention_factor| attention_factor * paper_factor)
            },
            beta_fast: self.f32("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: self.f32("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            mscale: log_multiplier.map(|_| 1.0),
            // The converter has multiplied it by the paper's 0.1.
            mscale_all_dim: log_multiplier.map(|log| if is_latent { 10.0 * log } else { log }),
            truncate: true,
        })
    }

    fn longrope(&self) -> Result<RopeScaling, ModelError> {
        let list = |name: &str| {
            self.divisors(name)?.ok_or_else(|| ModelError::MissingTensor { name: name.to_owned() })
        };
        Ok(RopeScaling::LongRope {
            short: list("rope_factors_short.weight")?,
            long: list("rope_factors_long.weight")?,
            original_max_position_embeddings: self.required("rope.scaling.original_context_length")?,
            attention_factor: self.f32("rope.scaling.attn_factor")?.unwrap_or(1.0),
        })
    }

    /// `rope_freqs.weight`, which llama 3.1 and later files have instead of the llama3 parameters.
    fn rope_divisors(&self) -> Result<Option<Vec<f32>>, ModelError> {
        self.divisors("rope_freqs.weight")
    }

    fn divisors(&self, name: &str) -> Result<Option<Vec<f32>>, ModelError> {
        let Some(tensor) = self.file.tensor(name)? else { return Ok(None) };
        if tensor.format() != WeightFormat::F32 || tensor.rows() != 1 {
            return Err(ModelError::WrongShape {
                name: name.to_owned(),
                expected: "one row of F32".to_owned(),
                got: format!("{} rows of {}", tensor.rows(), tensor.format()),
            });
        }
        let (values, _) = tensor.bytes().as_chunks::<4>();
        Ok(Some(values.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()))
    }

    fn max_model_len(&self, ropes: &[RopeConfig]) -> Result<usize, ModelError> {
        let stated = self.required("context_length")?;
        match ropes.first().map(|rope| &rope.scaling) {
            // Converters state sometimes the original length, sometimes the stretched one.
            Some(RopeScaling::Yarn { factor, original_max_position_embeddings, .. }) => {
                Ok(stated.max((*original_max_position_embeddings as f64 * f64::from(*factor)) as usize))
            }
            _ => Ok(stated),
        }
    }

    /// The format that most bytes of the layers have.
    fn dtype(&self) -> WeightFormat {
        let bytes_of = |format: WeightFormat| -> u64 {
            let tensors = self.file.tensors().iter().filter(|tensor| tensor.name.starts_with("blk."));
            tensors
                .filter(|tensor| tensor.ggml_type.weight_format() == Some(format))
                .map(|tensor| tensor.bytes)
                .sum()
        };
        // The last of equals wins, and without any layer that should be F32.
        WeightFormat::ALL.into_iter().rev().max_by_key(|&format| bytes_of(format)).expect("there are formats")
    }

    fn eos_token_ids(&self) -> Result<Vec<TokenId>, ModelError> {
        let metadata = self.file.metadata();
        let mut ids = Vec::new();
        for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
            ids.extend(metadata.get_u32(&format!("tokenizer.ggml.{key}")).map_err(config_error)?);
        }
        let tokens = metadata.get_strings("tokenizer.ggml.tokens").map_err(config_error)?.unwrap_or_default();
        let find = |end: &str| tokens.iter().position(|token| token == end).map(|id| id as TokenId);
        ids.extend(GPT_OSS_END_TOKENS.into_iter().filter_map(find));
        let ends_parts = GPT_OSS_END_TOKENS.into_iter().all(|end| find(end).is_some());
        ids.extend(END_TOKENS.into_iter().filter(|end| !(ends_parts && *end == "<|end|>")).filter_map(find));
        Ok(distinct(ids))
    }
}
