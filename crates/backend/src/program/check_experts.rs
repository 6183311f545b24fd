//! The checks of the ops of a mixture of experts.

use super::check::{Checked, Checker, require, width_of};
use crate::{BufferId, ExpertGated, ExpertLinear, Route, VectorId, WeightId, WeightUse};

impl Checker<'_> {
    pub(super) fn route(&mut self, op: &Route) -> Checked {
        let (rows, cols) = self.product(op.weight, op.bias)?;
        let num_experts = rows - usize::from(op.has_shared_gate);
        self.norm(op.norm.as_ref(), cols)?;
        self.width("the input", op.input, cols)?;
        require(op.top_k > 0 && op.top_k <= num_experts, || {
            format!("{} of {num_experts} experts are chosen", op.top_k)
        })?;
        require(op.num_shared > 0 || !op.has_shared_gate, || {
            "a gate of shared experts without any".to_owned()
        })?;
        require(op.scale.is_finite(), || format!("a scale of {}", op.scale))?;
        self.vector("the bias of the selection", op.selection_bias, num_experts)?;
        if let Some(groups) = op.groups {
            let is_even = groups.count > 0 && num_experts.is_multiple_of(groups.count);
            require(is_even && (1..=groups.count).contains(&groups.chosen), || {
                format!("{} of {} groups of {num_experts} experts", groups.chosen, groups.count)
            })?;
            require(op.top_k <= groups.chosen * (num_experts / groups.count), || {
                format!("{} experts are chosen from {} groups, which have fewer", op.top_k, groups.chosen)
            })?;
        }
        require(num_experts + op.num_shared <= 1 << 16, || format!("{num_experts} experts"))?;
        let slots = self.slots(op.routing)?;
        require(slots == op.num_slots(), || width_of("the number of slots", slots, op.num_slots()))
    }

    pub(super) fn expert_gated(&mut self, op: &ExpertGated) -> Checked {
        let (rows, cols) = self.experts(op.weight, op.bias)?;
        require(rows.is_multiple_of(2), || format!("a gate and its product in {rows} rows"))?;
        self.norm(op.norm.as_ref(), cols)?;
        self.width("the input", op.input, cols)?;
        let slots = self.slots(op.routing)?;
        self.width("the output", op.output, slots * (rows / 2))
    }

    pub(super) fn expert_linear(&mut self, op: &ExpertLinear) -> Checked {
        let (rows, cols) = self.experts(op.weight, op.bias)?;
        let slots = self.slots(op.routing)?;
        self.width("the input", op.input, slots * cols)?;
        self.width("the output", op.output, rows)
    }

    /// Rows and columns of one expert.
    fn experts(&self, id: WeightId, bias: Option<VectorId>) -> Checked<(usize, usize)> {
        let weight = self.weight(id)?;
        let WeightUse::Experts(count) = weight.usage else {
            return Err(format!("weight {} was not loaded as experts", id.0));
        };
        require(count > 0 && weight.rows.is_multiple_of(count), || {
            format!("{count} experts in {} rows", weight.rows)
        })?;
        self.vector("the bias", bias, weight.rows)?;
        Ok((weight.rows / count, weight.cols))
    }

    /// How many experts a token has in a buffer of routings.
    fn slots(&mut self, id: BufferId) -> Checked<usize> {
        let buffer = self.buffer(id)?;
        require(buffer.is_logits, || format!("buffer {} is not for routings: see create_logits", id.0))?;
        require(buffer.cols.is_multiple_of(2) && buffer.cols > 0, || {
            format!("a routing in {} columns", buffer.cols)
        })?;
        self.needs.max_tokens = self.needs.max_tokens.min(buffer.rows);
        Ok(buffer.cols / 2)
    }
}
