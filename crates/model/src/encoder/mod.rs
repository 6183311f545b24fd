//! The encoder: a [`ModelConfig`] with an [`EncoderConfig`] and its weights become a fixed list of ops, without a cache, and the rows
//! of a text become one vector.
//!
//! A text's tokens see each other in both directions, so a text is computed whole, in one step, with as many others as fit. What a
//! pair of texts needs to be told apart is in its positions: the table of positions is there once for each type of token. Pooling,
//! and the small head of a reranker, are computed here, on the host.

use baton_backend::{
    ActivatedLinear, AddPositions, Backend, BufferId, Embed, EncoderAttention, GatedLinear, Linear, Norm,
    NormOp, Op, Program, RopeId, StepInput, StepLimits,
};
use baton_core::TokenId;

use crate::config::{EncoderConfig, Pooling};
use crate::decoder::{LoadProgress, Loader, rope_spec};
use crate::tensor_names::{Role, mlp_roles, qkv_roles};
use crate::{ModelConfig, ModelError, WeightSource};

/// A loaded encoder.
#[derive(Debug)]
pub struct Encoder {
    program: Program,
    hidden: BufferId,
    hidden_size: usize,
    config: EncoderConfig,
    /// Positions of the second type of token begin here; 0 where there is no such type.
    second_type: u32,
    head: Option<Head>,
}

/// What scores a pair, from its first row: a product with tanh, then one with a row for each label.
#[derive(Debug)]
struct Head {
    dense: Product,
    classifier: Product,
}

#[derive(Debug)]
struct Product {
    weight: Vec<f32>, // [rows, cols]
    bias: Vec<f32>,   // [rows]
}

impl Product {
    fn apply(&self, input: &[f32]) -> Vec<f32> {
        let rows = self.weight.chunks_exact(input.len()).zip(&self.bias);
        rows.map(|(row, bias)| row.iter().zip(input).map(|(a, b)| a * b).sum::<f32>() + bias).collect()
    }
}

#[derive(Clone, Copy)]
struct Buffers {
    hidden: BufferId,   // [max_tokens, hidden]
    qkv: BufferId,      // [max_tokens, 3 * hidden]
    attended: BufferId, // [max_tokens, heads * head_dim]
    mlp: BufferId,      // [max_tokens, intermediate]
}

impl Encoder {
    /// The limits of a device that runs steps of so many tokens.
    pub fn limits(config: &ModelConfig, max_tokens: usize) -> StepLimits {
        StepLimits {
            max_tokens,
            max_seqs: max_tokens,
            max_logit_rows: 1,
            max_samples: 1,
            max_model_len: 2 * config.max_model_len,
            vocab_size: config.vocab_size,
        }
    }

    /// Gives the backend its limits, buffers and weights.
    pub fn load(
        config: &ModelConfig,
        weights: &dyn WeightSource,
        backend: &mut dyn Backend,
        max_tokens: usize,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, ModelError> {
        let wrong = |what: &str| ModelError::Config { what: what.to_owned() };
        let encoder = config.encoder.clone().ok_or_else(|| wrong("the model is no encoder"))?;
        if config.num_heads != config.num_kv_heads {
            return Err(wrong("an encoder with fewer key-value heads than heads is not supported"));
        }
        backend.set_limits(&Self::limits(config, max_tokens))?;
        let query = config.num_heads * config.head_dim;
        let buffers = Buffers {
            hidden: backend.create_buffer(max_tokens, config.hidden_size)?,
            qkv: backend.create_buffer(max_tokens, 3 * query)?,
            attended: backend.create_buffer(max_tokens, query)?,
            mlp: backend.create_buffer(max_tokens, config.intermediate_size)?,
        };
        let ropes = config
            .ropes
            .iter()
            .map(|rope| {
                Ok(backend.create_rope(&rope_spec(rope, config.rope_style, config.max_model_len)?)?)
            })
            .collect::<Result<Vec<RopeId>, ModelError>>()?;
        let mut loader = Loader::new(config, weights, backend, progress);
        let mut ops = embed(&mut loader, &buffers)?;
        for layer in 0..config.layers.len() {
            write_layer(config, &mut loader, layer, ropes.first().copied(), &buffers, &mut ops)?;
        }
        let head = encoder.num_labels.map(|labels| load_head(config, &loader, labels)).transpose()?;
        loader.finish();
        let has_types = config.learned_positions && encoder.num_token_types > 1;
        Ok(Self {
            program: Program::new(ops),
            hidden: buffers.hidden,
            hidden_size: config.hidden_size,
            second_type: if has_types { config.max_model_len as u32 } else { 0 },
            config: encoder,
            head,
        })
    }

    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Where a step leaves the rows of its tokens, `[tokens, hidden]`.
    pub fn hidden_buffer(&self) -> BufferId {
        self.hidden
    }

    /// How long the result of a text is.
    pub fn output_size(&self) -> usize {
        self.config.num_labels.unwrap_or(self.hidden_size)
    }

    /// Adds a text to a step. Of a pair, the second text begins after the first separator, which is also its last token.
    pub fn add(&self, tokens: &[TokenId], input: &mut StepInput) {
        let start = input.token_ids.len() as u32;
        let first_end = match (self.head.is_some(), tokens.last()) {
            (true, Some(last)) => tokens.iter().position(|token| token == last).unwrap_or(tokens.len()),
            _ => tokens.len(),
        };
        for (place, &token) in tokens.iter().enumerate() {
            let of_type = if place > first_end { self.second_type } else { 0 };
            input.token_ids.push(token);
            input.positions.push(place as u32 + of_type);
            input.slots.push(start);
        }
    }

    /// The vector of a text, or the scores of a pair, from the rows of its tokens.
    pub fn pool(&self, rows: &[f32]) -> Vec<f32> {
        let width = self.hidden_size;
        if let Some(head) = &self.head {
            let first = head.dense.apply(&rows[..width]);
            let mut scores = head.classifier.apply(&first.iter().map(|x| x.tanh()).collect::<Vec<_>>());
            if self.config.applies_sigmoid {
                for score in &mut scores {
                    *score = 1.0 / (1.0 + (-*score).exp());
                }
            }
            return scores;
        }
        let mut vector = match self.config.pooling {
            Pooling::Cls => rows[..width].to_vec(),
            Pooling::Last => rows[rows.len() - width..].to_vec(),
            Pooling::Mean => {
                let mut sums = vec![0.0_f32; width];
                for row in rows.chunks_exact(width) {
                    sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
                }
                let count = (rows.len() / width) as f32;
                for sum in &mut sums {
                    *sum /= count;
                }
                sums
            }
        };
        if self.config.normalize {
            let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-12);
            for x in &mut vector {
                *x /= length;
            }
        }
        vector
    }
}

fn embed(loader: &mut Loader<'_>, buffers: &Buffers) -> Result<Vec<Op>, ModelError> {
    let hidden = buffers.hidden;
    let weight = loader.embedding_with_types()?;
    let mut ops = vec![Op::Embed(Embed { weight, scale: 1.0, output: hidden })];
    if let Some(weight) = loader.positions_with_types()? {
        ops.push(Op::AddPositions(AddPositions { weight, output: hidden }));
    }
    ops.push(norm_in_place(loader.norm(Role::EmbedNorm, 0)?, hidden));
    Ok(ops)
}

fn norm_in_place(norm: Norm, buffer: BufferId) -> Op {
    Op::Norm(NormOp { input: buffer, norm, output: buffer, accumulate: false })
}

fn write_layer(
    config: &ModelConfig,
    loader: &mut Loader<'_>,
    layer: usize,
    rope: Option<RopeId>,
    buffers: &Buffers,
    ops: &mut Vec<Op>,
) -> Result<(), ModelError> {
    let Buffers { hidden, qkv, attended, mlp } = *buffers;
    let (weight, bias) = loader.linear(qkv_roles(config), layer)?;
    ops.push(Op::Linear(Linear { input: hidden, norm: None, weight, bias, output: qkv, accumulate: false }));
    ops.push(Op::EncoderAttention(EncoderAttention {
        qkv,
        rope,
        num_heads: config.num_heads,
        scale: config.attention_scale,
        output: attended,
    }));
    let (weight, bias) = loader.linear(&[Role::AttnOutput], layer)?;
    ops.push(Op::Linear(Linear {
        input: attended,
        norm: None,
        weight,
        bias,
        output: hidden,
        accumulate: true,
    }));
    ops.push(norm_in_place(loader.norm(Role::PostAttnNorm, layer)?, hidden));
    let (weight, bias) = loader.linear(mlp_roles(config), layer)?;
    let (input, norm, activation, output) = (hidden, None, config.activation, mlp);
    ops.push(if config.gated_mlp {
        Op::GatedLinear(GatedLinear { input, norm, weight, bias, activation, output })
    } else {
        Op::ActivatedLinear(ActivatedLinear { input, norm, weight, bias, activation, output })
    });
    let (weight, bias) = loader.linear(&[Role::FfnDown], layer)?;
    ops.push(Op::Linear(Linear { input: mlp, norm: None, weight, bias, output: hidden, accumulate: true }));
    ops.push(norm_in_place(loader.norm(Role::PostFfnNorm, layer)?, hidden));
    Ok(())
}

fn load_head(config: &ModelConfig, loader: &Loader<'_>, labels: usize) -> Result<Head, ModelError> {
    let product = |role: Role, rows: usize| {
        let (weight, bias) = loader.host_product(role, rows, config.hidden_size)?;
        Ok::<_, ModelError>(Product { weight, bias })
    };
    Ok(Head {
        dense: product(Role::Pooler, config.hidden_size)?,
        classifier: product(Role::Classifier, labels)?,
    })
}
