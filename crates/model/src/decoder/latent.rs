//! The half of a layer that is attention over latents, in the form where the matrices of keys and values are taken to the queries and
//! to what they saw: the cache holds the latent alone, which all heads share.

use baton_backend::{
    Attention, Backend, BackendError, BufferId, HeadLinear, KeepLogitRows, LatentKv, Linear, Norm, Op,
    RopeId, Tensor, WeightId, WeightUse,
};

use super::loader::Loader;
use super::{Buffers, CacheLayer};
use crate::tensor_names::Role;
use crate::{LatentConfig, ModelConfig, ModelError};

/// Of the norms of latents, whatever the configuration says of the others: as in transformers.
const LATENT_EPS: f32 = 1e-6;

/// What attention over latents needs besides.
#[derive(Clone, Copy, Debug)]
pub(super) struct LatentBuffers {
    heads: BufferId,                // [max_tokens, heads * (nope + rotary)]
    query_latent: Option<BufferId>, // [max_tokens, query rank]
    latent: BufferId,               // [max_tokens, rank + rotary]
    values: BufferId,               // [max_tokens, heads * value_dim]
}

impl LatentBuffers {
    pub(super) fn create(
        config: &ModelConfig,
        latent: &LatentConfig,
        backend: &mut dyn Backend,
        rows: usize,
    ) -> Result<Self, BackendError> {
        Ok(Self {
            heads: backend.create_buffer(rows, config.num_heads * latent.query_dim())?,
            query_latent: latent.query_rank.map(|rank| backend.create_buffer(rows, rank)).transpose()?,
            latent: backend.create_buffer(rows, latent.head_dim())?,
            values: backend.create_buffer(rows, config.num_heads * latent.value_dim)?,
        })
    }

    /// Columns of all of them.
    pub(super) fn width(config: &ModelConfig, latent: &LatentConfig) -> usize {
        config.num_heads * (latent.query_dim() + latent.value_dim)
            + latent.query_rank.unwrap_or(0)
            + latent.head_dim()
    }
}

pub(super) fn latent_half(
    config: &ModelConfig,
    latent: &LatentConfig,
    loader: &mut Loader<'_>,
    (index, rope): (usize, RopeId),
    cache_layer: CacheLayer,
    buffers: &Buffers,
    ops: &mut Vec<Op>,
) -> Result<(), ModelError> {
    let own = buffers.latent.expect("made for a model with latents");
    let norm = Some(loader.norm(Role::AttnNorm, index)?);
    let linear = |input, norm, weight, output| {
        Op::Linear(Linear { input, norm, weight, bias: None, output, accumulate: false })
    };
    match own.query_latent {
        None => {
            let (weight, _) = loader.linear(&[Role::AttnQ], index)?;
            ops.push(linear(buffers.hidden, norm, weight, own.heads));
        }
        Some(query_latent) => {
            let (weight, _) = loader.linear(&[Role::AttnQA], index)?;
            ops.push(linear(buffers.hidden, norm, weight, query_latent));
            let norm = Some(Norm { eps: LATENT_EPS, ..loader.norm(Role::AttnQANorm, index)? });
            let (weight, _) = loader.linear(&[Role::AttnQB], index)?;
            ops.push(linear(query_latent, norm, weight, own.heads));
        }
    }
    let (weight, _) = loader.linear(&[Role::AttnKvA], index)?;
    ops.push(linear(buffers.hidden, norm, weight, own.latent));
    ops.push(Op::LatentKv(LatentKv {
        latent: own.latent,
        norm: Norm { eps: LATENT_EPS, ..loader.norm(Role::AttnKvANorm, index)? },
        query: own.heads,
        rope,
        num_heads: config.num_heads,
        layer: cache_layer.number,
        output: buffers.query,
    }));
    let (keys, values) = load_heads(config, latent, loader, index)?;
    ops.push(Op::HeadLinear(HeadLinear { input: own.heads, weight: keys, output: buffers.query }));
    ops.push(Op::Attention(Attention {
        layer: cache_layer.number,
        plan: cache_layer.plan,
        window: None,
        num_heads: config.num_heads,
        scale: config.attention_scale,
        softcap: None,
        alibi: None,
        sinks: None,
        query: buffers.query,
        output: buffers.attended,
    }));
    if index + 1 == config.layers.len() {
        ops.push(Op::KeepLogitRows(KeepLogitRows { buffers: vec![buffers.attended, buffers.hidden] }));
    }
    ops.push(Op::HeadLinear(HeadLinear { input: buffers.attended, weight: values, output: own.values }));
    let (weight, bias) = loader.linear(&[Role::AttnOutput], index)?;
    buffers.add_residual(ops, (own.values, weight, bias), None);
    Ok(())
}

/// For each head the matrix that takes its query to the latent, `[rank, nope]`, and the one that takes what it saw back,
/// `[value_dim, rank]`.
fn load_heads(
    config: &ModelConfig,
    latent: &LatentConfig,
    loader: &mut Loader<'_>,
    index: usize,
) -> Result<(WeightId, WeightId), ModelError> {
    let usage = WeightUse::Experts(config.num_heads);
    if latent.has_split_heads {
        let (keys, values) = (loader.matrix(Role::AttnKB, index)?, loader.matrix(Role::AttnVB, index)?);
        return Ok((loader.load(&[keys], usage)?, loader.load(&[values], usage)?));
    }
    let whole = loader.matrix(Role::AttnKvB, index)?;
    let failed = |cause| ModelError::Tensor { name: "kv_b_proj".to_owned(), cause };
    let whole = if whole.format().is_float() { whole } else { whole.to_f32().map_err(failed)? };
    let (mut keys, mut values): (Vec<Tensor>, Vec<Tensor>) = (Vec::new(), Vec::new());
    let size = latent.nope_dim + latent.value_dim;
    let rows = |range| whole.slice_rows(range).expect("the shape was checked");
    for first in (0..config.num_heads).map(|head| head * size) {
        keys.push(rows(first..first + latent.nope_dim).transposed().map_err(failed)?);
        values.push(rows(first + latent.nope_dim..first + size));
    }
    Ok((loader.load(&keys, usage)?, loader.load(&values, usage)?))
}
