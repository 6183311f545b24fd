//! Mixtures of experts. A row of results holds its slots in their order.

use super::math::{activate_gate, dot, vector};
use super::ops::Run;
use crate::{BufferId, ExpertGated, ExpertLinear, GroupScore, Route, RouteScores, VectorId, WeightId};

impl Run<'_> {
    pub(super) fn route(&mut self, op: &Route) {
        let inputs = self.inputs(op.input, op.norm.as_ref());
        let mut products = self.project(&inputs, op.weight, op.bias);
        let num_experts = self.weight(op.weight).rows - usize::from(op.has_shared_gate);
        let bias = op.selection_bias.map(|bias| vector(self.parameters, bias, num_experts).to_vec());
        let rows: Vec<Vec<f32>> =
            products.iter_mut().map(|row| route_row(op, row, num_experts, bias.as_deref())).collect();
        self.store(op.routing, &rows, false);
    }

    /// The experts of a token and their weights.
    fn experts_of(&self, routing: BufferId, row: usize) -> Vec<(usize, f32)> {
        let row = self.buffers[routing.0 as usize].row(row);
        let (experts, weights) = row.split_at(row.len() / 2);
        experts.iter().zip(weights).map(|(expert, weight)| (*expert as usize, *weight)).collect()
    }

    pub(super) fn expert_gated(&mut self, op: &ExpertGated) {
        let inputs = self.inputs(op.input, op.norm.as_ref());
        let slots = self.slots(op.routing);
        // Not from a token's: a step that only moves blocks has none.
        let num_slots = self.buffers[op.routing.0 as usize].cols / 2;
        let rows_of_expert = 2 * self.buffers[op.output.0 as usize].cols / num_slots.max(1);
        let products =
            self.expert_products(op.weight, op.bias, rows_of_expert, &slots, |token, _| &inputs[token]);
        let activated = |product: Vec<f32>| -> Vec<f32> {
            let (gate, up) = product.split_at(rows_of_expert / 2);
            gate.iter().zip(up).map(|(gate, up)| activate_gate(op.activation, *gate, *up)).collect()
        };
        let rows: Vec<Vec<f32>> =
            products.into_iter().map(|row| row.into_iter().flat_map(activated).collect()).collect();
        self.store(op.output, &rows, false);
    }

    pub(super) fn expert_linear(&mut self, op: &ExpertLinear) {
        let inputs = self.inputs(op.input, None);
        let slots = self.slots(op.routing);
        let (width, cols) = (self.buffers[op.output.0 as usize].cols, self.weight(op.weight).cols);
        let input = |token: usize, slot: usize| &inputs[token][slot * cols..(slot + 1) * cols];
        let products = self.expert_products(op.weight, op.bias, width, &slots, input);
        let mut rows = Vec::new();
        for (products, slots) in products.iter().zip(&slots) {
            let mut row = vec![0.0_f32; width];
            for (product, (_, weight)) in products.iter().zip(slots) {
                row.iter_mut().zip(product).for_each(|(sum, value)| *sum += weight * value);
            }
            rows.push(row);
        }
        self.store(op.output, &rows, op.accumulate);
    }

    fn slots(&self, routing: BufferId) -> Vec<Vec<(usize, f32)>> {
        (0..self.num_tokens()).map(|token| self.experts_of(routing, token)).collect()
    }

    /// `weight[expert] · input + bias[expert]` of every slot of every token. Rows of weights are decoded once.
    fn expert_products<'i>(
        &self,
        weight: WeightId,
        bias: Option<VectorId>,
        rows: usize,
        slots: &[Vec<(usize, f32)>],
        input: impl Fn(usize, usize) -> &'i [f32],
    ) -> Vec<Vec<Vec<f32>>> {
        let weight = self.weight(weight);
        let bias = bias.map(|bias| vector(self.parameters, bias, weight.rows));
        let mut values = vec![0.0; weight.cols];
        let mut products: Vec<Vec<Vec<f32>>> =
            slots.iter().map(|slots| vec![Vec::with_capacity(rows); slots.len()]).collect();
        for expert in 0..weight.rows / rows {
            let places: Vec<(usize, usize)> = slots
                .iter()
                .enumerate()
                .flat_map(|(token, slots)| {
                    slots.iter().enumerate().map(move |(slot, of)| (token, slot, of.0))
                })
                .filter_map(|(token, slot, of)| (of == expert).then_some((token, slot)))
                .collect();
            for row in (expert * rows..(expert + 1) * rows).take_while(|_| !places.is_empty()) {
                weight.row(row, &mut values);
                for &(token, slot) in &places {
                    let product = dot(&values, input(token, slot)) + bias.map_or(0.0, |bias| bias[row]);
                    products[token][slot].push(product);
                }
            }
        }
        products
    }
}

/// Numbers of experts, then their weights.
pub(crate) fn route_row(op: &Route, products: &[f32], num_experts: usize, bias: Option<&[f32]>) -> Vec<f32> {
    let scores = scores(op.scores, &products[..num_experts]);
    let mut keys: Vec<f64> = scores.clone();
    if let Some(bias) = bias {
        keys.iter_mut().zip(bias).for_each(|(key, bias)| *key += f64::from(*bias));
    }
    if let Some(groups) = op.groups {
        let size = num_experts / groups.count;
        let group_keys: Vec<f64> = keys
            .chunks(size)
            .map(|group| {
                let mut group = group.to_vec();
                group.sort_by(|a, b| b.total_cmp(a));
                match groups.score {
                    GroupScore::Best => group[0],
                    GroupScore::BestTwo => group.iter().take(2).sum(),
                }
            })
            .collect();
        let chosen = best(&group_keys, groups.chosen);
        for (number, key) in keys.iter_mut().enumerate() {
            if !chosen.contains(&(number / size)) {
                *key = f64::NEG_INFINITY;
            }
        }
    }
    let chosen = best(&keys, op.top_k);
    let sum: f64 = if op.normalizes { chosen.iter().map(|&expert| scores[expert]).sum() } else { 1.0 };
    let shared = if op.has_shared_gate { sigmoid(f64::from(products[num_experts])) } else { 1.0 };
    let mut row: Vec<f32> = chosen.iter().map(|&expert| expert as f32).collect();
    row.extend((0..op.num_shared).map(|number| (num_experts + number) as f32));
    row.extend(chosen.iter().map(|&expert| (scores[expert] / sum * f64::from(op.scale)) as f32));
    row.extend((0..op.num_shared).map(|_| shared as f32));
    row
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn scores(kind: RouteScores, products: &[f32]) -> Vec<f64> {
    let products = products.iter().map(|product| f64::from(*product));
    match kind {
        RouteScores::Sigmoid => products.map(sigmoid).collect(),
        RouteScores::Softmax => {
            let most = products.clone().fold(f64::NEG_INFINITY, f64::max);
            let powers: Vec<f64> = products.map(|product| (product - most).exp()).collect();
            let sum: f64 = powers.iter().sum();
            powers.iter().map(|power| power / sum).collect()
        }
    }
}

/// The places of the `count` largest, the largest first and the lower place first of two that are equal.
fn best(keys: &[f64], count: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..keys.len()).collect();
    places.sort_by(|&a, &b| keys[b].total_cmp(&keys[a]).then(a.cmp(&b)));
    places.truncate(count);
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RouteGroups;

    fn op() -> Route {
        Route {
            input: BufferId(0),
            norm: None,
            weight: WeightId(0),
            bias: None,
            scores: RouteScores::Softmax,
            selection_bias: None,
            groups: None,
            top_k: 2,
            normalizes: true,
            scale: 1.0,
            num_shared: 0,
            has_shared_gate: false,
            routing: BufferId(1),
        }
    }

    fn assert_near(got: &[f32], expected: &[f32]) {
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-6, "{got} {expected}");
        }
    }

    #[test]
    fn the_best_are_chosen_and_weighed() {
        let products = [1.0_f32.ln(), 4.0_f32.ln(), 2.0_f32.ln(), 1.0_f32.ln()];
        assert_near(&route_row(&op(), &products, 4, None), &[1.0, 2.0, 2.0 / 3.0, 1.0 / 3.0]);
        let plain = Route { normalizes: false, scale: 2.0, ..op() };
        assert_near(&route_row(&plain, &products, 4, None), &[1.0, 2.0, 1.0, 0.5]);
        // Equal ones in the order of their numbers.
        assert_near(&route_row(&op(), &[0.0; 4], 4, None), &[0.0, 1.0, 0.5, 0.5]);
        // The bias decides who is chosen, not with which weight.
        let sigmoid = Route { scores: RouteScores::Sigmoid, normalizes: false, ..op() };
        let row = route_row(&sigmoid, &[0.0, 0.0, 3.0_f32.ln(), 0.0], 4, Some(&[0.0, 0.0, -9.0, 1.0]));
        assert_near(&row, &[3.0, 0.0, 0.5, 0.5]);
    }

    #[test]
    fn groups_are_chosen_first() {
        let groups = |score| Some(RouteGroups { count: 2, chosen: 1, score });
        let products = [3.0, 0.0, 2.0, 2.0];
        let row = |score| {
            let op = Route { scores: RouteScores::Sigmoid, groups: groups(score), ..op() };
            route_row(&op, &products, 4, None)
        };
        assert_eq!(row(GroupScore::Best)[..2], [0.0, 1.0]);
        assert_eq!(row(GroupScore::BestTwo)[..2], [2.0, 3.0]);
    }

    #[test]
    fn shared_experts_follow() {
        let op = Route { num_shared: 2, has_shared_gate: true, ..op() };
        let row = route_row(&op, &[0.0, 5.0, 5.0, 0.0], 3, None);
        assert_near(&row, &[1.0, 2.0, 3.0, 4.0, 0.5, 0.5, 0.5, 0.5]);
    }
}
