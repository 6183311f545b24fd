//! The choice of experts: a product with the router into scratch, then a row at a time.

use baton_backend::{BackendError, GroupScore, Route, RouteScores};

use super::linear::{Target, multiply_into};
use super::product::{Product, ProductInput};
use super::{OpResult, Step, require};
use crate::buffers::Shared;
use crate::units::Units;

/// What chooses the experts of a row.
struct Chooser<'a> {
    op: &'a Route,
    num_experts: usize,
    /// Empty without.
    bias: &'a [f32],
}

impl Step<'_> {
    pub(super) fn run_route(&mut self, op: &Route) -> OpResult {
        let num_tokens = self.num_rows();
        if num_tokens == 0 {
            return Ok(());
        }
        let (weight, matrix) = self.packed(op.weight)?;
        let routing = self.buffer(op.routing, num_tokens)?;
        require(routing.cols == 2 * op.num_slots(), "a routing does not have a place for each expert")?;
        let num_experts = weight.rows - usize::from(op.has_shared_gate);
        let products = self.backend.scratch.experts.products.matrix();
        let products = products.reshaped(num_tokens, weight.rows).ok_or_else(too_small)?;
        let input = ProductInput {
            buffer: op.input,
            norm: op.norm,
            gather: None,
            num_tokens,
            in_place: op.input == op.routing,
        };
        let product = Product::new(self, &input, matrix, weight.cols, matrix.panels.len())?;
        let target = Target {
            output: products,
            bias: self.optional_vector(op.bias, weight.rows)?,
            accumulate: false,
            softcap: None,
            activation: None,
        };
        let bias = match op.selection_bias {
            None => &[],
            // SAFETY: the vector has a value for each expert and outlives the step.
            Some(id) => unsafe { std::slice::from_raw_parts(self.vector(id, num_experts)?, num_experts) },
        };
        let chooser = Chooser { op, num_experts, bias };
        let units = Units::new(num_tokens);
        // SAFETY: workers write disjoint parts of the products, as `multiply_into` says.
        let target = unsafe { Shared::new(target) };
        self.backend.pool.run(&|worker| {
            // SAFETY: the shapes were checked above.
            unsafe { multiply_into(worker, &product, target.get()) };
            worker.barrier();
            while let Some(row) = units.take() {
                // SAFETY: both rows are this unit's alone, and as wide as was checked.
                unsafe {
                    let products = std::slice::from_raw_parts_mut(products.row(row), products.cols);
                    let routing = std::slice::from_raw_parts_mut(routing.row(row), routing.cols);
                    chooser.choose(products, routing);
                }
            }
        });
        Ok(())
    }
}

fn too_small() -> BackendError {
    super::wrong("the scratch for experts was not made for this program")
}

impl Chooser<'_> {
    /// `products` are used up.
    fn choose(&self, products: &mut [f32], routing: &mut [f32]) {
        let op = self.op;
        let (scores, gate) = products.split_at_mut(self.num_experts);
        score(op.scores, scores);
        let (experts, weights) = routing.split_at_mut(op.num_slots());
        self.choose_experts(scores, &mut experts[..op.top_k]);
        let mut sum = 0.0;
        for (weight, expert) in weights.iter_mut().zip(&experts[..op.top_k]) {
            *weight = scores[*expert as usize];
            sum += *weight;
        }
        let factor = if op.normalizes { op.scale / sum } else { op.scale };
        weights[..op.top_k].iter_mut().for_each(|weight| *weight *= factor);
        let shared = if op.has_shared_gate { sigmoid(gate[0]) } else { 1.0 };
        weights[op.top_k..].fill(shared);
        for (number, expert) in experts[op.top_k..].iter_mut().enumerate() {
            *expert = (self.num_experts + number) as f32;
        }
    }

    /// The best, the lower number first where two are equal.
    fn choose_experts(&self, scores: &[f32], chosen: &mut [f32]) {
        let key = |expert: usize| scores[expert] + self.bias.get(expert).copied().unwrap_or(0.0);
        for number in 0..chosen.len() {
            let (before, rest) = chosen.split_at_mut(number);
            let mut best: Option<(usize, f32)> = None;
            let mut consider = |range: std::ops::Range<usize>| {
                for expert in range {
                    let (key, is_free) = (key(expert), !before.contains(&(expert as f32)));
                    if is_free && best.is_none_or(|(_, most)| key > most) {
                        best = Some((expert, key));
                    }
                }
            };
            match self.op.groups {
                None => consider(0..self.num_experts),
                Some(groups) => {
                    let size = self.num_experts / groups.count;
                    (0..groups.count)
                        .filter(|&group| self.is_chosen_group(group, &key))
                        .for_each(|group| consider(group * size..(group + 1) * size));
                }
            }
            // There are at least as many experts as are chosen: see the check of the program.
            rest[0] = best.map_or(0.0, |(expert, _)| expert as f32);
        }
    }

    /// Whether fewer groups than are chosen are better, or equal and before it.
    fn is_chosen_group(&self, group: usize, key: &impl Fn(usize) -> f32) -> bool {
        let Some(groups) = self.op.groups else { return true };
        let size = self.num_experts / groups.count;
        let score = |group: usize| {
            let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
            for key in (group * size..(group + 1) * size).map(key) {
                if key > best {
                    (best, second) = (key, best);
                } else if key > second {
                    second = key;
                }
            }
            match groups.score {
                GroupScore::BestTwo if size > 1 => best + second,
                _ => best,
            }
        };
        let own = score(group);
        let is_better = |&other: &usize| {
            let other_score = score(other);
            other_score > own || other_score == own && other < group
        };
        (0..groups.count).filter(is_better).count() < groups.chosen
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn score(kind: RouteScores, products: &mut [f32]) {
    match kind {
        RouteScores::Sigmoid => products.iter_mut().for_each(|product| *product = sigmoid(*product)),
        RouteScores::Softmax => {
            let most = products.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            for product in products.iter_mut() {
                *product = (*product - most).exp();
                sum += *product;
            }
            for product in products.iter_mut() {
                *product /= sum;
            }
        }
    }
}
