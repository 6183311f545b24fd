//! Mixtures of experts: which experts a token goes to, and products with the weights of those alone.
//!
//! A mixture is three ops: [`Route`], [`ExpertGated`], [`ExpertLinear`]. Experts that every token goes to (shared ones) are
//! experts like the others, numbered after those that are chosen, so that they take no launch of their own.

use serde::{Deserialize, Serialize};

use crate::{Activation, BufferId, Norm, VectorId, WeightId};

/// How a router's products become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RouteScores {
    /// Over all experts.
    Softmax,
    /// Of each expert by itself (DeepSeek-V3).
    Sigmoid,
}

/// What decides between groups of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupScore {
    /// The best of a group (DeepSeek-V2).
    Best,
    /// The sum of its two best (DeepSeek-V3).
    BestTwo,
}

/// Experts in groups of one size, of which only the best `chosen` are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteGroups {
    pub count: usize,
    pub chosen: usize,
    pub score: GroupScore,
}

/// Chooses the experts of each token: `scores = softmax or sigmoid(weight · norm(input) + bias)`, of which the `top_k` with the
/// largest `score + selection_bias` are chosen, the lower number first where two are equal. A chosen expert's weight is its score,
/// divided by the sum of the chosen where `normalizes`, times `scale`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Route {
    pub input: BufferId, // [tokens, hidden]
    pub norm: Option<Norm>,
    pub weight: WeightId, // [experts, hidden], and one row more with `has_shared_gate`
    pub bias: Option<VectorId>, // [rows of the weight]
    pub scores: RouteScores,
    pub selection_bias: Option<VectorId>, // [experts]
    pub groups: Option<RouteGroups>,
    pub top_k: usize,
    pub normalizes: bool,
    pub scale: f32,
    /// Experts that every token goes to, after the routed ones.
    pub num_shared: usize,
    /// Their weight is the sigmoid of the last row of `weight`; 1 without.
    pub has_shared_gate: bool,
    /// Numbers of experts, then their weights, made by `create_logits`: a place each for the chosen and the shared.
    pub routing: BufferId, // [tokens, 2 * (top_k + num_shared)]
}

impl Route {
    /// Experts of one token.
    pub fn num_slots(&self) -> usize {
        self.top_k + self.num_shared
    }
}

/// `output = activation(gate) * up` for each expert of a token, where `[gate; up] = weight[expert] · norm(input) + bias[expert]`.
/// In which order a row holds the results of its slots is the device's own business: only [`ExpertLinear`] reads them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertGated {
    pub input: BufferId, // [tokens, hidden]
    pub norm: Option<Norm>,
    pub routing: BufferId,      // [tokens, 2 * slots]
    pub weight: WeightId,       // [experts][2 * intermediate, hidden], gate rows first
    pub bias: Option<VectorId>, // [experts * 2 * intermediate]
    pub activation: Activation,
    pub output: BufferId, // [tokens, slots * intermediate]
}

/// `output (+)= Σ routing weight · (weight[expert] · input[slot] + bias[expert])` over the slots of a token, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertLinear {
    pub input: BufferId,        // [tokens, slots * intermediate], of `ExpertGated`
    pub routing: BufferId,      // [tokens, 2 * slots]
    pub weight: WeightId,       // [experts][hidden, intermediate]
    pub bias: Option<VectorId>, // [experts * hidden]
    pub output: BufferId,       // [tokens, hidden]
    pub accumulate: bool,
}
