//! Attention over latents (MLA): one key for all heads, of which the values are a part. Queries are taken to the latent's space
//! before attention, and what they saw is taken back after it, by a small matrix of each head.

use serde::{Deserialize, Serialize};

use crate::{BufferId, Norm, RopeId, WeightId};

/// `output[head] = weight[head] · input[head]`. A head's input is the first values of its part of the row, as many as the
/// weight has columns; its output likewise, as many as a head's weight has rows. What follows them is left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadLinear {
    pub input: BufferId,  // [tokens, heads * some]
    pub weight: WeightId, // [heads][out, in], loaded as experts
    pub output: BufferId, // [tokens, heads * some]
}

/// Writes the latent of each token, `[norm(latent); rotate(rest)]`, into the step's slots of `layer` as a key, and the
/// normed latent, followed by zeros, as its value. Writes the rotated ends of the queries' heads to the ends of `output`'s.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatentKv {
    pub latent: BufferId, // [tokens, rank + rotary]
    pub norm: Norm,       // [rank]
    pub query: BufferId,  // [tokens, heads * (other + rotary)]
    pub rope: RopeId,     // of `rotary` dimensions
    pub num_heads: usize,
    pub layer: usize,
    pub output: BufferId, // [tokens, heads * (rank + rotary)]
}
