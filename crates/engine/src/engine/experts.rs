//! How widely the tokens of a step spread over the experts of a model. For benchmarks: what a step costs depends on it.

use std::collections::HashSet;

use baton_backend::Op;

use super::Engine;
use crate::EngineError;

/// Experts that were chosen in the last layer with experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsTouched {
    pub num_tokens: usize,
    pub num_experts: usize,
    /// By one of the tokens or more. Experts that every token goes to are not counted.
    pub num_touched: usize,
}

impl Engine {
    /// What the first `num_tokens` rows of the last step chose; `None` for a model without experts.
    pub fn experts_touched(&mut self, num_tokens: usize) -> Result<Option<ExpertsTouched>, EngineError> {
        let Some(experts) = &self.model.experts else { return Ok(None) };
        let ops = &self.decoder.program().ops;
        let route =
            ops.iter().rev().find_map(|op| if let Op::Route(route) = op { Some(route) } else { None });
        let Some(route) = route else { return Ok(None) };
        let rows = self.backend.read_buffer(route.routing, num_tokens)?;
        let chosen = rows.chunks_exact(2 * route.num_slots()).flat_map(|row| &row[..route.top_k]);
        let touched: HashSet<u32> = chosen.map(|expert| *expert as u32).collect();
        let num_touched = touched.len();
        Ok(Some(ExpertsTouched { num_tokens, num_experts: experts.num_experts, num_touched }))
    }
}
