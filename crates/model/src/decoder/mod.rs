//! The one decoder that all architectures are: a [`ModelConfig`] and its weights become a fixed list of fused ops.
//!
//! Architectures differ in numbers (heads, windows, rotary tables), in options (biases, norms of q and k, norms after attention and
//! MLP, halves in parallel, soft caps) and in the names of their tensors, hardly in the order of the work: embed, then in every
//! layer qkv, attention, linear, gated linear, linear, then logits and sampling. So there is no code for an architecture here;
//! [`Decoder::load`] reads the configuration once and writes the [`Program`].
//!
//! Weights come from a [`WeightSource`] and go to the [`Backend`], which packs them as it likes. Not here: kernels
//! (`cpu`, `cuda`), what a step contains (`engine`), how files are read (`gguf`, `safetensors`).

mod experts;
mod latent;
mod loader;
mod rope;
#[cfg(test)]
mod tests;

use baton_backend::{
    ActivatedLinear, AddPositions, Attention, Backend, BackendError, BufferId, Embed, GatedLinear,
    KeepLogitRows, KvDtype, KvSpec, Linear, Logits, Norm, NormOp, Op, Program, Qkv, RopeId, Sample,
    StepLimits, VectorId, WeightId,
};

use crate::tensor_names::{Role, mlp_roles, qkv_roles};
use crate::{ExpertConfig, LatentConfig, ModelConfig, ModelError, WeightSource};
use experts::expert_half;
use latent::{LatentBuffers, latent_half};
pub use loader::LoadProgress;
pub(crate) use loader::Loader;
pub use rope::rope_spec;

/// A loaded model: what a step does, op by op.
#[derive(Debug)]
pub struct Decoder {
    program: Program,
    hidden: BufferId,
    logits: BufferId,
    /// The last norm's weight and epsilon, for hidden states that are read back.
    last_norm: LastNorm,
}

#[derive(Debug)]
struct LastNorm {
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    eps: f32,
    /// The mean is subtracted as well.
    is_layer_norm: bool,
}

/// The activations a step needs. All layers share them.
#[derive(Clone, Copy, Debug)]
struct Buffers {
    hidden: BufferId,      // [max_tokens, hidden]
    query: BufferId,       // [max_tokens, heads * head_dim]
    attended: BufferId,    // [max_tokens, heads * head_dim]
    mlp: Option<BufferId>, // [max_tokens, intermediate], where a layer is dense
    /// Routings and results of experts, `[max_tokens, 2 * slots]` and `[max_tokens, slots * intermediate]`.
    experts: Option<(BufferId, BufferId)>,
    latent: Option<LatentBuffers>,
    scratch: Option<BufferId>, // [max_tokens, hidden], with post norms only
    logits: BufferId,          // [max_logit_rows, vocab]
}

impl Decoder {
    /// Gives the backend its limits, buffers, rotary tables and weights. `progress` is told after every weight.
    pub fn load(
        config: &ModelConfig,
        weights: &dyn WeightSource,
        backend: &mut dyn Backend,
        limits: &StepLimits,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, ModelError> {
        backend.set_limits(limits)?;
        // Which block tables a layer goes by does not depend on how the cache stores it.
        let cache = config.kv_spec(KvDtype::F16, 1);
        Self::load_at(config, weights, backend, limits, (&cache, 0), progress)
    }

    /// The same on a device that has its limits, with the layers of a shared cache from `first_layer` on. Of that cache only the
    /// block tables count.
    pub fn load_at(
        config: &ModelConfig,
        weights: &dyn WeightSource,
        backend: &mut dyn Backend,
        limits: &StepLimits,
        (cache, first_layer): (&KvSpec, usize),
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, ModelError> {
        if config.encoder.is_some() {
            let what =
                "the model is an encoder: it gives embeddings or scores and continues no text".to_owned();
            return Err(ModelError::Config { what });
        }
        check_config(config, limits)?;
        let buffers = Buffers::create(config, backend, limits)?;
        let ropes = config
            .ropes
            .iter()
            .map(|rope| {
                let spec = rope_spec(rope, config.rope_style, limits.max_model_len)?;
                Ok(backend.create_rope(&spec)?)
            })
            .collect::<Result<Vec<RopeId>, ModelError>>()?;

        let mut loader = Loader::new(config, weights, backend, progress);
        let (embedding, head) = loader.embedding_and_head()?;
        // The residual stream is kept divided by its scale: see `Loader::norm_eps`.
        let scale = config.embed_scale / config.residual_scale;
        let mut ops = vec![Op::Embed(Embed { weight: embedding, scale, output: buffers.hidden })];
        if let Some(weight) = loader.positions()? {
            ops.push(Op::AddPositions(AddPositions { weight, output: buffers.hidden }));
        }
        if let Some(norm) = loader.norm_if(config.embed_norm, Role::EmbedNorm, 0)? {
            let hidden = buffers.hidden;
            ops.push(Op::Norm(NormOp { input: hidden, norm, output: hidden, accumulate: false }));
        }
        let slopes = loader.slopes()?;
        for index in 0..config.layers.len() {
            let cache_layer =
                CacheLayer { number: first_layer + index, plan: cache.lane_of(first_layer + index) };
            let mut writer = LayerWriter {
                config,
                loader: &mut loader,
                index,
                buffers: &buffers,
                ops: &mut ops,
                cache_layer,
            };
            writer.write(&ropes, slopes)?;
        }
        let norm = loader.norm(Role::OutputNorm, 0)?;
        let last_norm = LastNorm {
            weight: loader.norm_values(Role::OutputNorm, 0)?,
            bias: loader.norm_bias_values(Role::OutputNorm, 0)?,
            eps: loader.norm_eps(Role::OutputNorm),
            is_layer_norm: config.layer_norm,
        };
        let head_bias = loader.head_bias()?;
        loader.finish();
        ops.push(Op::Logits(Logits {
            input: buffers.hidden,
            norm: Some(norm),
            weight: head,
            bias: head_bias,
            softcap: config.logit_softcap,
            output: buffers.logits,
        }));
        ops.push(Op::Sample(Sample { logits: buffers.logits }));
        Ok(Self { program: Program::new(ops), hidden: buffers.hidden, logits: buffers.logits, last_norm })
    }

    /// What the backend is to compile.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// A row of [`Decoder::hidden_buffer`] after the last norm: what the head sees.
    pub fn last_norm(&self, row: &[f32]) -> Vec<f32> {
        let LastNorm { weight, bias, eps, is_layer_norm } = &self.last_norm;
        let len = row.len() as f32;
        let mean = if *is_layer_norm { row.iter().sum::<f32>() / len } else { 0.0 };
        let square = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / len;
        let scale = (square + eps).sqrt().recip();
        let mut normed: Vec<f32> = row.iter().zip(weight).map(|(x, w)| (x - mean) * scale * w).collect();
        if let Some(bias) = bias {
            normed.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
        }
        normed
    }

    /// Where a step leaves its logits, `[logit rows, vocab]`.
    pub fn logits_buffer(&self) -> BufferId {
        self.logits
    }

    /// Where a step that says `reads_hidden` leaves the residual stream, `[tokens, hidden]`, before the last norm.
    pub fn hidden_buffer(&self) -> BufferId {
        self.hidden
    }

    /// Bytes of the buffers that [`Decoder::load`] creates, for the memory plan. Logits are counted in f32.
    pub fn buffer_bytes(config: &ModelConfig, limits: &StepLimits, activation_bytes: usize) -> u64 {
        let bytes = |rows: usize, cols: usize, element: usize| {
            (rows as u64).saturating_mul(cols as u64).saturating_mul(element as u64)
        };
        let query = config.num_heads.saturating_mul(config.head_dim);
        let latents = config.latent.as_ref().map_or(0, |latent| LatentBuffers::width(config, latent));
        let dense = if config.has_dense_layers() { config.intermediate_size } else { 0 };
        let slots = config.experts.as_ref().map_or(0, ExpertConfig::num_slots);
        let inner = config.experts.as_ref().map_or(0, |experts| slots * experts.intermediate_size);
        let hidden_buffers = if config.post_norms { 2 } else { 1 };
        [
            bytes(limits.max_tokens, config.hidden_size, activation_bytes).saturating_mul(hidden_buffers),
            bytes(limits.max_tokens, query, activation_bytes).saturating_mul(2),
            bytes(limits.max_tokens, latents, activation_bytes),
            bytes(limits.max_tokens, dense, activation_bytes),
            bytes(limits.max_tokens, 2 * slots, size_of::<f32>()),
            bytes(limits.max_tokens, inner, activation_bytes),
            bytes(limits.max_logit_rows, config.vocab_size, size_of::<f32>()),
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }
}

/// Writes the ops of one layer. The residual stream stays in one buffer.
struct LayerWriter<'a, 'b> {
    config: &'a ModelConfig,
    loader: &'a mut Loader<'b>,
    index: usize,
    buffers: &'a Buffers,
    ops: &'a mut Vec<Op>,
    cache_layer: CacheLayer,
}

/// Where a layer keeps its keys and values.
#[derive(Clone, Copy, Debug)]
struct CacheLayer {
    number: usize,
    /// Of `StepInput::attention`: its block table.
    plan: usize,
}

impl LayerWriter<'_, '_> {
    fn write(&mut self, ropes: &[RopeId], slopes: Option<VectorId>) -> Result<(), ModelError> {
        if let Some(latent) = &self.config.latent {
            self.attend_latents(latent, ropes)?;
            return self.add_feed_forward();
        }
        let norm = self.loader.norm_if(self.config.pre_norms, Role::AttnNorm, self.index)?;
        self.attend(norm, ropes, slopes)?;
        if self.config.parallel_residual && self.config.experts.is_none() {
            // The MLP reads the stream before attention is added to it.
            let norm = if self.config.shared_norm { norm } else { self.mlp_norm()? };
            self.expand(norm)?;
            self.add_attention()?;
            return self.add_mlp();
        }
        self.add_attention()?;
        self.add_feed_forward()
    }

    /// The second half of a layer: an MLP, or a mixture of experts.
    fn add_feed_forward(&mut self) -> Result<(), ModelError> {
        if let Some(experts) = self.config.experts_of(self.index) {
            return expert_half(self.config, experts, self.loader, self.index, self.buffers, self.ops);
        }
        let norm = self.mlp_norm()?;
        self.expand(norm)?;
        self.add_mlp()
    }

    fn attend_latents(&mut self, latent: &LatentConfig, ropes: &[RopeId]) -> Result<(), ModelError> {
        let rope = self.config.layers[self.index].rope.map(|rope| (self.index, ropes[rope]));
        let rope = rope.ok_or_else(|| ModelError::Config {
            what: "a layer with latents has no rotary table".to_owned(),
        })?;
        latent_half(self.config, latent, self.loader, rope, self.cache_layer, self.buffers, self.ops)
    }

    fn mlp_norm(&mut self) -> Result<Option<Norm>, ModelError> {
        self.loader.norm_if(self.config.pre_norms, Role::FfnNorm, self.index)
    }

    fn attend(
        &mut self,
        norm: Option<Norm>,
        ropes: &[RopeId],
        slopes: Option<VectorId>,
    ) -> Result<(), ModelError> {
        let (config, buffers, index) = (self.config, self.buffers, self.index);
        let layer = config.layers[index];
        let (weight, bias) = self.loader.linear(qkv_roles(config), index)?;
        let key_scale = self.loader.kv_scales(index)?.map_or(1.0, |scales| scales.key);
        self.ops.push(Op::Qkv(Qkv {
            input: buffers.hidden,
            norm,
            weight,
            bias,
            q_norm: self.loader.norm_if(config.qk_norm, Role::AttnQNorm, index)?,
            k_norm: self.loader.norm_if(config.qk_norm, Role::AttnKNorm, index)?,
            norm_span: config.qk_norm_span,
            rope: layer.rope.map(|rope| ropes[rope]),
            num_heads: config.num_heads,
            layer: self.cache_layer.number,
            output: buffers.query,
        }));
        self.ops.push(Op::Attention(Attention {
            layer: self.cache_layer.number,
            plan: self.cache_layer.plan,
            window: layer.window,
            num_heads: config.num_heads,
            scale: config.attention_scale * key_scale,
            softcap: config.attention_softcap,
            alibi: slopes,
            sinks: self.loader.sinks(index)?,
            query: buffers.query,
            output: buffers.attended,
        }));
        if index + 1 == config.layers.len() {
            // Of a prompt only the last row goes on to the head: its other rows need no more than their keys and values.
            let kept = vec![buffers.attended, buffers.hidden];
            self.ops.push(Op::KeepLogitRows(KeepLogitRows { buffers: kept }));
        }
        Ok(())
    }

    fn add_attention(&mut self) -> Result<(), ModelError> {
        let post_norm = self.loader.norm_if(self.config.post_norms, Role::PostAttnNorm, self.index)?;
        let (weight, bias) = self.loader.linear(&[Role::AttnOutput], self.index)?;
        self.buffers.add_residual(self.ops, (self.buffers.attended, weight, bias), post_norm);
        Ok(())
    }

    /// The first product of the MLP, with its activation.
    fn expand(&mut self, norm: Option<Norm>) -> Result<(), ModelError> {
        let (weight, bias) = self.loader.linear(mlp_roles(self.config), self.index)?;
        let (input, activation, output) = (self.buffers.hidden, self.config.activation, self.buffers.mlp());
        self.ops.push(if self.config.gated_mlp {
            Op::GatedLinear(GatedLinear { input, norm, weight, bias, activation, output })
        } else {
            Op::ActivatedLinear(ActivatedLinear { input, norm, weight, bias, activation, output })
        });
        Ok(())
    }

    fn add_mlp(&mut self) -> Result<(), ModelError> {
        let post_norm = self.loader.norm_if(self.config.post_norms, Role::PostFfnNorm, self.index)?;
        let (weight, bias) = self.loader.linear(&[Role::FfnDown], self.index)?;
        self.buffers.add_residual(self.ops, (self.buffers.mlp(), weight, bias), post_norm);
        Ok(())
    }
}

impl Buffers {
    fn create(
        config: &ModelConfig,
        backend: &mut dyn Backend,
        limits: &StepLimits,
    ) -> Result<Self, BackendError> {
        let query = config.num_heads * config.head_dim;
        let rows = limits.max_tokens;
        let experts = config.experts.as_ref().map(|experts| {
            let slots = experts.num_slots();
            let routing = backend.create_logits(rows, 2 * slots)?;
            Ok::<_, BackendError>((routing, backend.create_buffer(rows, slots * experts.intermediate_size)?))
        });
        let experts = experts.transpose()?;
        Ok(Self {
            hidden: backend.create_buffer(rows, config.hidden_size)?,
            query: backend.create_buffer(rows, query)?,
            attended: backend.create_buffer(rows, query)?,
            mlp: config
                .has_dense_layers()
                .then(|| backend.create_buffer(rows, config.intermediate_size))
                .transpose()?,
            experts,
            latent: config
                .latent
                .as_ref()
                .map(|latent| LatentBuffers::create(config, latent, backend, rows))
                .transpose()?,
            scratch: config
                .post_norms
                .then(|| backend.create_buffer(rows, config.hidden_size))
                .transpose()?,
            logits: backend.create_logits(limits.max_logit_rows, config.vocab_size)?,
        })
    }

    /// Of a model with dense layers.
    fn mlp(&self) -> BufferId {
        self.mlp.expect("made for a model with dense layers")
    }

    /// Adds a product to the residual stream. Gemma norms it before: the product is then written to scratch.
    fn add_residual(
        &self,
        ops: &mut Vec<Op>,
        (input, weight, bias): (BufferId, WeightId, Option<VectorId>),
        norm: Option<Norm>,
    ) {
        let linear = Linear { input, norm: None, weight, bias, output: self.hidden, accumulate: true };
        let Some((scratch, norm)) = self.scratch.zip(norm) else {
            return ops.push(Op::Linear(linear));
        };
        ops.push(Op::Linear(Linear { output: scratch, accumulate: false, ..linear }));
        ops.push(Op::Norm(NormOp { input: scratch, norm, output: self.hidden, accumulate: true }));
    }
}

/// What the ops rely on. The parsers of configurations check more; this is for configurations made by hand.
fn check_config(config: &ModelConfig, limits: &StepLimits) -> Result<(), ModelError> {
    let wrong = |what: String| Err(ModelError::Config { what });
    if config.layers.is_empty() {
        return wrong("the model has no layers".to_owned());
    }
    let sizes = [
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("num_heads", config.num_heads),
        ("num_kv_heads", config.num_kv_heads),
        ("head_dim", config.head_dim),
        ("vocab_size", config.vocab_size),
        ("max_tokens", limits.max_tokens),
        ("max_logit_rows", limits.max_logit_rows),
    ];
    for (name, size) in sizes {
        if size == 0 || u32::try_from(size).is_err() {
            return wrong(format!("{name} is {size}, which no model can have"));
        }
    }
    if !config.num_heads.is_multiple_of(config.num_kv_heads) {
        return wrong(format!(
            "{} attention heads cannot share {} key-value heads evenly",
            config.num_heads, config.num_kv_heads
        ));
    }
    for (index, layer) in config.layers.iter().enumerate() {
        if let Some(number) = layer.rope {
            let Some(rope) = config.ropes.get(number) else {
                return wrong(format!("layer {index} has no rotary table {number}"));
            };
            if rope.rotary_dim > config.head_dim {
                return wrong(format!(
                    "layer {index} rotates {} of only {} dimensions of a head",
                    rope.rotary_dim, config.head_dim
                ));
            }
        }
        if layer.window == Some(0) {
            return wrong(format!("layer {index} has a sliding window of 0 tokens"));
        }
    }
    if config.learned_positions && limits.max_model_len > config.max_model_len {
        return wrong(format!(
            "sequences of {} tokens, but the model has learned {} positions",
            limits.max_model_len, config.max_model_len
        ));
    }
    if limits.vocab_size != config.vocab_size {
        return wrong(format!(
            "the step limits are for {} tokens of vocabulary, the model has {}",
            limits.vocab_size, config.vocab_size
        ));
    }
    Ok(())
}
