//! The one decoder that all architectures are: a [`ModelConfig`] and its weights become a fixed list of fused ops.
//!
//! Llama, mistral, qwen2, qwen3 and gemma3 differ in numbers (heads, windows, rotary tables), in options (biases, norms
//! of q and k, norms after attention and MLP, soft caps) and in the names of their tensors, never in the order of the
//! work: embed, then in every layer qkv, attention, linear, gated linear, linear, then logits and sampling. So there is
//! no code for an architecture here; [`Decoder::load`] reads the configuration once and keeps finished ops, and
//! [`Program::run`] replays them.
//!
//! Weights come from a [`WeightSource`] and go to the [`Backend`], which packs them as it likes. Not here: kernels
//! (`cpu`, `cuda`), what a step contains (`engine`), how files are read (`gguf`, `safetensors`).

mod loader;
mod rope;
#[cfg(test)]
mod tests;

use baton_backend::{
    Attention, Backend, BackendError, BufferId, Embed, GatedLinear, Linear, Logits, Norm, NormOp, Ops,
    Program, Qkv, RopeId, StepLimits,
};

use crate::tensor_names::Role;
use crate::{ModelConfig, ModelError, WeightSource};
pub use loader::LoadProgress;
use loader::Loader;
pub use rope::rope_spec;

/// A loaded model: what a step does, op by op.
#[derive(Debug)]
pub struct Decoder {
    embed: Embed,
    layers: Vec<Layer>,
    logits: Logits,
    /// The last norm's weight and epsilon, for hidden states that are read back.
    last_norm: (Vec<f32>, f32),
}

/// The ops of one layer in the order they run. The residual stream stays in one buffer: the last op of each half adds
/// to it.
#[derive(Debug)]
struct Layer {
    qkv: Qkv,
    attention: Attention,
    attention_output: Linear,
    /// Gemma norms what a half gives before adding it; the linear before it then only writes scratch.
    post_attention_norm: Option<NormOp>,
    gated: GatedLinear,
    down: Linear,
    post_mlp_norm: Option<NormOp>,
}

/// The activations a step needs. All layers share them.
#[derive(Clone, Copy, Debug)]
struct Buffers {
    hidden: BufferId,          // [max_tokens, hidden]
    query: BufferId,           // [max_tokens, heads * head_dim]
    attended: BufferId,        // [max_tokens, heads * head_dim]
    mlp: BufferId,             // [max_tokens, intermediate]
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
        check_config(config, limits)?;
        backend.set_limits(limits)?;
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
        let kinds = config.attention_kinds();
        let layers = (0..config.layers.len())
            .map(|layer| Layer::load(config, &mut loader, layer, &ropes, &kinds, &buffers))
            .collect::<Result<Vec<Layer>, ModelError>>()?;
        let last_norm = loader.norm(Role::OutputNorm, 0)?;
        let last_norm_values = loader.norm_values(Role::OutputNorm, 0)?;
        loader.finish();

        Ok(Self {
            embed: Embed { weight: embedding, scale: config.embed_scale, output: buffers.hidden },
            layers,
            logits: Logits {
                input: buffers.hidden,
                norm: Some(last_norm),
                weight: head,
                softcap: config.logit_softcap,
                output: buffers.logits,
            },
            last_norm: (last_norm_values, config.norm_eps),
        })
    }

    /// A row of [`Decoder::hidden_buffer`] after the last norm: what the head sees.
    pub fn last_norm(&self, row: &[f32]) -> Vec<f32> {
        let (weight, eps) = &self.last_norm;
        let square = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
        let scale = (square + eps).sqrt().recip();
        row.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
    }

    /// Where a step leaves its logits, `[logit rows, vocab]`.
    pub fn logits_buffer(&self) -> BufferId {
        self.logits.output
    }

    /// Where a step that says `reads_hidden` leaves the residual stream, `[tokens, hidden]`, before the last norm.
    pub fn hidden_buffer(&self) -> BufferId {
        self.embed.output
    }

    /// Bytes of the buffers that [`Decoder::load`] creates, for the memory plan. Logits are counted in f32.
    pub fn buffer_bytes(config: &ModelConfig, limits: &StepLimits, activation_bytes: usize) -> u64 {
        let bytes = |rows: usize, cols: usize, element: usize| {
            (rows as u64).saturating_mul(cols as u64).saturating_mul(element as u64)
        };
        let query = config.num_heads.saturating_mul(config.head_dim);
        let hidden_buffers = if config.post_norms { 2 } else { 1 };
        [
            bytes(limits.max_tokens, config.hidden_size, activation_bytes).saturating_mul(hidden_buffers),
            bytes(limits.max_tokens, query, activation_bytes).saturating_mul(2),
            bytes(limits.max_tokens, config.intermediate_size, activation_bytes),
            bytes(limits.max_logit_rows, config.vocab_size, size_of::<f32>()),
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }
}

impl Program for Decoder {
    fn run(&self, ops: &mut dyn Ops) {
        ops.embed(&self.embed);
        for (number, layer) in self.layers.iter().enumerate() {
            ops.qkv(&layer.qkv);
            ops.attention(&layer.attention);
            if number + 1 == self.layers.len() {
                // Of a prompt only the last row goes on to the head: its other rows need no more than their keys and values.
                ops.keep_logit_rows(&[layer.attention.output, self.embed.output]);
            }
            ops.linear(&layer.attention_output);
            if let Some(norm) = &layer.post_attention_norm {
                ops.norm(norm);
            }
            ops.gated_linear(&layer.gated);
            ops.linear(&layer.down);
            if let Some(norm) = &layer.post_mlp_norm {
                ops.norm(norm);
            }
        }
        ops.logits(&self.logits);
        ops.sample(self.logits.output);
    }
}

impl Layer {
    fn load(
        config: &ModelConfig,
        loader: &mut Loader<'_>,
        index: usize,
        ropes: &[RopeId],
        kinds: &[Option<u32>],
        buffers: &Buffers,
    ) -> Result<Self, ModelError> {
        let layer = config.layers[index];
        let (weight, bias) = loader.linear(&[Role::AttnQ, Role::AttnK, Role::AttnV], index)?;
        let qkv = Qkv {
            input: buffers.hidden,
            norm: Some(loader.norm(Role::AttnNorm, index)?),
            weight,
            bias,
            q_norm: loader.norm_if(config.qk_norm, Role::AttnQNorm, index)?,
            k_norm: loader.norm_if(config.qk_norm, Role::AttnKNorm, index)?,
            rope: Some(ropes[layer.rope]),
            num_heads: config.num_heads,
            layer: index,
            output: buffers.query,
        };
        let attention = Attention {
            layer: index,
            plan: kinds
                .iter()
                .position(|&kind| kind == layer.window)
                .expect("attention_kinds lists the window of every layer"),
            window: layer.window,
            num_heads: config.num_heads,
            scale: config.attention_scale,
            softcap: config.attention_softcap,
            alibi: None,
            query: buffers.query,
            output: buffers.attended,
        };
        let post_attention = loader.norm_if(config.post_norms, Role::PostAttnNorm, index)?;
        let (weight, bias) = loader.linear(&[Role::AttnOutput], index)?;
        let attention_output = buffers.residual(Linear {
            input: buffers.attended,
            norm: None,
            weight,
            bias,
            output: buffers.hidden,
            accumulate: true,
        });
        let (weight, bias) = loader.linear(&[Role::FfnGate, Role::FfnUp], index)?;
        let gated = GatedLinear {
            input: buffers.hidden,
            norm: Some(loader.norm(Role::FfnNorm, index)?),
            weight,
            bias,
            activation: config.activation,
            output: buffers.mlp,
        };
        let post_mlp = loader.norm_if(config.post_norms, Role::PostFfnNorm, index)?;
        let (weight, bias) = loader.linear(&[Role::FfnDown], index)?;
        let down = buffers.residual(Linear {
            input: buffers.mlp,
            norm: None,
            weight,
            bias,
            output: buffers.hidden,
            accumulate: true,
        });
        Ok(Self {
            qkv,
            attention,
            attention_output,
            post_attention_norm: buffers.post_norm(post_attention),
            gated,
            down,
            post_mlp_norm: buffers.post_norm(post_mlp),
        })
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
        Ok(Self {
            hidden: backend.create_buffer(rows, config.hidden_size)?,
            query: backend.create_buffer(rows, query)?,
            attended: backend.create_buffer(rows, query)?,
            mlp: backend.create_buffer(rows, config.intermediate_size)?,
            scratch: config
                .post_norms
                .then(|| backend.create_buffer(rows, config.hidden_size))
                .transpose()?,
            logits: backend.create_logits(limits.max_logit_rows, config.vocab_size)?,
        })
    }

    /// Where a norm follows, the linear writes into scratch instead of adding to the residual stream.
    fn residual(&self, linear: Linear) -> Linear {
        match self.scratch {
            Some(scratch) => Linear { output: scratch, accumulate: false, ..linear },
            None => linear,
        }
    }

    fn post_norm(&self, norm: Option<Norm>) -> Option<NormOp> {
        let input = self.scratch?;
        norm.map(|norm| NormOp { input, norm, output: self.hidden, accumulate: true })
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
        let Some(rope) = config.ropes.get(layer.rope) else {
            return wrong(format!("layer {index} has no rotary table {}", layer.rope));
        };
        if rope.rotary_dim > config.head_dim {
            return wrong(format!(
                "layer {index} rotates {} of only {} dimensions of a head",
                rope.rotary_dim, config.head_dim
            ));
        }
        if layer.window == Some(0) {
            return wrong(format!("layer {index} has a sliding window of 0 tokens"));
        }
    }
    if limits.vocab_size != config.vocab_size {
        return wrong(format!(
            "the step limits are for {} tokens of vocabulary, the model has {}",
            limits.vocab_size, config.vocab_size
        ));
    }
    Ok(())
}
