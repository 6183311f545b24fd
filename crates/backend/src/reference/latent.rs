//! Attention over latents: what stands around it.

use super::math::{dot, normalize, rotate};
use super::ops::Run;
use crate::{HeadLinear, LatentKv, WeightUse};

impl Run<'_> {
    pub(super) fn head_linear(&mut self, op: &HeadLinear) {
        let weight = self.weight(op.weight);
        let num_heads = self.num_matrices(op.weight);
        let (rows, cols) = (weight.rows / num_heads, weight.cols);
        let (from, to) = (
            self.buffers[op.input.0 as usize].cols / num_heads,
            self.buffers[op.output.0 as usize].cols / num_heads,
        );
        let mut values = vec![0.0; cols];
        let mut outputs: Vec<Vec<f32>> =
            (0..self.num_tokens()).map(|row| self.buffers[op.output.0 as usize].row(row).to_vec()).collect();
        for row in 0..weight.rows {
            weight.row(row, &mut values);
            let (head, place) = (row / rows, row % rows);
            for (token, output) in outputs.iter_mut().enumerate() {
                let input = &self.buffers[op.input.0 as usize].row(token)[head * from..head * from + cols];
                output[head * to + place] = dot(&values, input);
            }
        }
        self.store(op.output, &outputs, false);
    }

    pub(super) fn latent_kv(&mut self, op: &LatentKv) {
        let rope = self.parameters.ropes[op.rope.0 as usize].clone();
        let rotary = 2 * rope.inv_freq.len();
        let latents = self.inputs(op.latent, None);
        let queries = self.inputs(op.query, None);
        let mut outputs: Vec<Vec<f32>> =
            (0..self.num_tokens()).map(|row| self.buffers[op.output.0 as usize].row(row).to_vec()).collect();
        let kv = self.kv.as_deref_mut().expect("a KV cache is made before a program with attention runs");
        let first_slot = kv.lane_of(op.layer) * self.input.num_tokens();
        for (number, mut key) in latents.into_iter().enumerate() {
            let position = self.input.positions[number];
            let rank = key.len() - rotary;
            normalize(&mut key[..rank], &op.norm, self.parameters);
            rotate(&mut key[rank..], &rope, position);
            let mut value = key.clone();
            value[rank..].fill(0.0);
            kv.write(op.layer, self.input.slots[first_slot + number] as usize, &key, &value);
            let (from, to) = (queries[number].len() / op.num_heads, key.len());
            for head in 0..op.num_heads {
                let end = &mut outputs[number][head * to + rank..(head + 1) * to];
                end.copy_from_slice(&queries[number][(head + 1) * from - rotary..(head + 1) * from]);
                rotate(end, &rope, position);
            }
        }
        self.store(op.output, &outputs, false);
    }

    /// How many matrices a weight is.
    fn num_matrices(&self, id: crate::WeightId) -> usize {
        match self.weight(id).usage {
            WeightUse::Experts(count) => count,
            _ => 1,
        }
    }
}
