//! The configuration in a GGUF file's metadata. Keys and their meaning are those of llama.cpp; where the metadata is
//! silent, the tensors that are there decide (biases, tied embeddings, rope factors).

use baton_backend::{Activation, RopeStyle, WeightFormat};
use baton_core::TokenId;

use super::limits::{MAX_LAYERS, config_error};
use super::{Architecture, LayerConfig, ModelConfig, NameScheme, RopeConfig, RopeScaling, distinct};
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

impl ModelConfig {
    pub fn from_gguf(file: &GgufFile) -> Result<Self, ModelError> {
        let (architecture, prefix) = architecture(file)?;
        Reader { file, architecture, prefix }.read()?.validated()
    }
}

fn architecture(file: &GgufFile) -> Result<(Architecture, &'static str), ModelError> {
    match file.metadata().get_str("general.architecture").map_err(config_error)? {
        // Mistral's files say llama too; the two differ only by a sliding window.
        Some("llama") => Ok((Architecture::Llama, "llama")),
        Some("qwen2") => Ok((Architecture::Qwen2, "qwen2")),
        Some("qwen3") => Ok((Architecture::Qwen3, "qwen3")),
        Some("gemma3") => Ok((Architecture::Gemma3, "gemma3")),
        Some(other) => Err(ModelError::UnknownArchitecture { name: other.to_owned() }),
        None => {
            Err(config_error("the GGUF file has no \"general.architecture\"; it is not a language model"))
        }
    }
}

struct Reader<'a> {
    file: &'a GgufFile,
    architecture: Architecture,
    /// Before the keys of the architecture.
    prefix: &'static str,
}

impl Reader<'_> {
    fn read(&self) -> Result<ModelConfig, ModelError> {
        self.refuse_unsupported()?;
        let hidden_size = self.required("embedding_length")?;
        let num_layers = self.required("block_count")?;
        if num_layers > MAX_LAYERS {
            return Err(config_error(format!(
                "block_count is {num_layers}; at most {MAX_LAYERS} are possible"
            )));
        }
        let num_heads =
            self.same_for_all("attention.head_count")?.ok_or_else(|| self.missing("attention.head_count"))?;
        let num_kv_heads = self.same_for_all("attention.head_count_kv")?.unwrap_or(num_heads);
        let head_dim = self.head_dim(hidden_size, num_heads)?;
        let ropes = self.ropes(head_dim)?;
        let layers = self.layers(num_layers, ropes.len())?;
        let is_gemma = self.architecture == Architecture::Gemma3;
        let scale_dim = match self.architecture {
            Architecture::Gemma3 if num_layers == GEMMA_27B_LAYERS => hidden_size / num_heads.max(1),
            _ => head_dim,
        };
        let bias = |role| self.has_tensor(&bias_name(NameScheme::Gguf, self.architecture, role, 0));
        Ok(ModelConfig {
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
            rope_style: match self.architecture {
                Architecture::Llama | Architecture::Mistral => RopeStyle::Interleaved,
                _ => RopeStyle::Half,
            },
            norm_eps: self
                .f32("attention.layer_norm_rms_epsilon")?
                .ok_or_else(|| self.missing("attention.layer_norm_rms_epsilon"))?,
            // The converter has added gemma's 1 to the weights already.
            norm_weight_offset: 0.0,
            activation: if is_gemma { Activation::GeluTanh } else { Activation::Silu },
            attention_scale: (scale_dim as f64).powf(-0.5) as f32,
            attention_softcap: None,
            logit_softcap: self.f32("final_logit_softcapping")?.filter(|&cap| is_gemma && cap != 0.0),
            embed_scale: if is_gemma { (hidden_size as f64).sqrt() as f32 } else { 1.0 },
            qk_norm: matches!(self.architecture, Architecture::Qwen3 | Architecture::Gemma3),
            post_norms: is_gemma,
            qkv_bias: bias(Role::AttnQ),
            attention_output_bias: bias(Role::AttnOutput),
            mlp_bias: bias(Role::FfnDown),
            tied_embeddings: !self.has_tensor(&weight_name(
                NameScheme::Gguf,
                self.architecture,
                Role::Output,
                0,
            )),
            max_model_len: self.max_model_len(&ropes)?,
            ropes,
            dtype: self.dtype(),
            bos_token_id: self
                .file
                .metadata()
                .get_u32("tokenizer.ggml.bos_token_id")
                .map_err(config_error)?,
            eos_token_ids: self.eos_token_ids()?,
        })
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    fn missing(&self, name: &str) -> ModelError {
        config_error(format!("the GGUF file has no metadata {:?}", self.key(name)))
    }

    fn integer(&self, name: &str) -> Result<Option<usize>, ModelError> {
        let value = self.file.metadata().get_u32(&self.key(name)).map_err(config_error)?;
        Ok(value.map(|value| value as usize))
    }

    fn required(&self, name: &str) -> Result<usize, ModelError> {
        self.integer(name)?.ok_or_else(|| self.missing(name))
    }

    fn f32(&self, name: &str) -> Result<Option<f32>, ModelError> {
        self.file.metadata().get_f32(&self.key(name)).map_err(config_error)
    }

    /// A number, or an array with one for each layer, which must all be the same.
    fn same_for_all(&self, name: &str) -> Result<Option<usize>, ModelError> {
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

    fn has_tensor(&self, name: &str) -> bool {
        self.file.find(name).is_some()
    }

    fn refuse_unsupported(&self) -> Result<(), ModelError> {
        if self.integer("expert_count")?.is_some_and(|count| count > 0) {
            return Err(config_error("mixture-of-experts models are not supported"));
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
        let window =
            window.filter(|_| matches!(self.architecture, Architecture::Llama | Architecture::Gemma3));
        let local_rope = num_ropes - 1;
        let sliding = LayerConfig { window: window.map(|window| window as u32), rope: local_rope };
        let full = LayerConfig { window: None, rope: 0 };
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
            ("yarn", None) => self.yarn(factor),
            ("yarn", Some(_)) => Err(config_error("rope_freqs.weight together with yarn is not supported")),
            (other, _) => Err(config_error(format!(
                "rope scaling of type {other:?} is not supported; none, linear and yarn are"
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
        Ok(RopeScaling::Yarn {
            factor,
            original_max_position_embeddings: original,
            attention_factor: attention_factor
                .filter(|&attention_factor| attention_factor != 1.0)
                .map(|attention_factor| attention_factor * paper_factor),
            beta_fast: self.f32("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: self.f32("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            mscale: log_multiplier.map(|_| 1.0),
            mscale_all_dim: log_multiplier,
            truncate: true,
        })
    }

    /// `rope_freqs.weight`, which llama 3.1 and later files have instead of the llama3 parameters.
    fn rope_divisors(&self) -> Result<Option<Vec<f32>>, ModelError> {
        let name = "rope_freqs.weight";
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
        for end in END_TOKENS {
            ids.extend(tokens.iter().position(|token| token == end).map(|id| id as TokenId));
        }
        Ok(distinct(ids))
    }
}
