//! The ops of one step. Each computes its result in memory of its own and stores it at the end, so that an op may name
//! the same buffer as input and output.

use baton_core::TokenId;

use super::kv_cache::KvCache;
use super::math::{activate, dot, normalize, rotate, soften, vector};
use super::{Buffer, Parameters, Weight};
use crate::sampling::{SampleScratch, push_sampled, sample_row};
use crate::{
    Attention, BufferId, Embed, GatedLinear, Linear, Logits, Norm, NormOp, Ops, Qkv, StepInput, StepOutput,
    VectorId, WeightId,
};

/// One step on its way through a program.
pub(super) struct Run<'a> {
    pub(super) parameters: &'a Parameters,
    pub(super) buffers: &'a mut [Buffer],
    pub(super) kv: Option<&'a mut KvCache>,
    pub(super) input: &'a StepInput,
    /// With feedback filled in.
    pub(super) token_ids: Vec<TokenId>,
    pub(super) output: StepOutput,
}

impl Run<'_> {
    fn num_tokens(&self) -> usize {
        self.input.num_tokens()
    }

    fn weight(&self, id: WeightId) -> &Weight {
        &self.parameters.weights[id.0 as usize]
    }

    /// All token rows of a buffer, normalised: `[tokens, cols]`.
    fn inputs(&self, buffer: BufferId, norm: Option<&Norm>) -> Vec<Vec<f32>> {
        (0..self.num_tokens()).map(|row| self.input_row(buffer, row, norm)).collect()
    }

    fn input_row(&self, buffer: BufferId, row: usize, norm: Option<&Norm>) -> Vec<f32> {
        let mut values = self.buffers[buffer.0 as usize].row(row).to_vec();
        if let Some(norm) = norm {
            normalize(&mut values, norm, self.parameters);
        }
        values
    }

    /// `weight · input + bias` for each row of `inputs`: `[rows, out]`.
    fn project(&self, inputs: &[Vec<f32>], weight: WeightId, bias: Option<VectorId>) -> Vec<Vec<f32>> {
        let weight = self.weight(weight);
        let bias = bias.map(|bias| vector(self.parameters, bias, weight.rows));
        let mut outputs = vec![vec![0.0; weight.rows]; inputs.len()];
        let mut weight_row = vec![0.0; weight.cols];
        for out in 0..weight.rows {
            weight.row(out, &mut weight_row);
            for (input, output) in inputs.iter().zip(&mut outputs) {
                output[out] = dot(&weight_row, input) + bias.map_or(0.0, |bias| bias[out]);
            }
        }
        outputs
    }

    /// Stores rows 0.. of a buffer, or adds to them.
    pub(super) fn store(&mut self, buffer: BufferId, rows: &[Vec<f32>], accumulate: bool) {
        let buffer = &mut self.buffers[buffer.0 as usize];
        assert!(rows.len() <= buffer.rows, "{} rows are written to a buffer of {}", rows.len(), buffer.rows);
        for (number, row) in rows.iter().enumerate() {
            assert_eq!(row.len(), buffer.cols, "a row of the wrong width is written to a buffer");
            for (cell, value) in buffer.row_mut(number).iter_mut().zip(row) {
                *cell = if accumulate { *cell + value } else { *value };
            }
        }
    }
}

impl Ops for Run<'_> {
    fn embed(&mut self, op: &Embed) {
        let weight = self.weight(op.weight);
        let lookup = |token_id: &TokenId| {
            let row = *token_id as usize;
            assert!(row < weight.rows, "token {token_id} of a vocabulary of {}", weight.rows);
            let mut values = vec![0.0; weight.cols];
            weight.row(row, &mut values);
            for value in &mut values {
                *value *= op.scale;
            }
            values
        };
        let rows: Vec<_> = self.token_ids.iter().map(lookup).collect();
        self.store(op.output, &rows, false);
    }

    fn norm(&mut self, op: &NormOp) {
        let rows = self.inputs(op.input, Some(&op.norm));
        self.store(op.output, &rows, op.accumulate);
    }

    fn linear(&mut self, op: &Linear) {
        let inputs = self.inputs(op.input, op.norm.as_ref());
        let rows = self.project(&inputs, op.weight, op.bias);
        self.store(op.output, &rows, op.accumulate);
    }

    fn gated_linear(&mut self, op: &GatedLinear) {
        let inputs = self.inputs(op.input, op.norm.as_ref());
        let mut rows = self.project(&inputs, op.weight, op.bias);
        for row in &mut rows {
            let up = row.split_off(row.len() / 2);
            for (gate, up) in row.iter_mut().zip(up) {
                *gate = activate(op.activation, *gate) * up;
            }
        }
        self.store(op.output, &rows, false);
    }

    fn qkv(&mut self, op: &Qkv) {
        let inputs = self.inputs(op.input, op.norm.as_ref());
        let mut rows = self.project(&inputs, op.weight, op.bias);
        let kv = self.kv.as_deref_mut().expect("a KV cache is made before a program with attention runs");
        let spec = kv.layer_spec(op.layer);
        let (q_len, kv_len) = (op.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim);
        for (number, row) in rows.iter_mut().enumerate() {
            assert_eq!(row.len(), q_len + 2 * kv_len, "a qkv weight has the wrong number of rows");
            let value = row.split_off(q_len + kv_len);
            let mut key = row.split_off(q_len);
            for (heads, norm) in [(&mut *row, op.q_norm), (&mut key, op.k_norm)] {
                for head in heads.chunks_exact_mut(spec.head_dim) {
                    if let Some(norm) = norm {
                        normalize(head, &norm, self.parameters);
                    }
                    if let Some(rope) = op.rope {
                        rotate(head, &self.parameters.ropes[rope.0 as usize], self.input.positions[number]);
                    }
                }
            }
            kv.write(op.layer, self.input.slots[number] as usize, &key, &value);
        }
        self.store(op.output, &rows, false);
    }

    fn attention(&mut self, op: &Attention) {
        let rows = self.attend(op);
        self.store(op.output, &rows, false);
    }

    fn logits(&mut self, op: &Logits) {
        let inputs: Vec<_> = self
            .input
            .logit_rows
            .iter()
            .map(|row| self.input_row(op.input, *row as usize, op.norm.as_ref()))
            .collect();
        let mut rows = self.project(&inputs, op.weight, None);
        rows.iter_mut().flatten().for_each(|logit| *logit = soften(*logit, op.softcap));
        self.store(op.output, &rows, false);
    }

    fn sample(&mut self, logits: BufferId) {
        let buffer = &self.buffers[logits.0 as usize];
        let mut scratch = SampleScratch::with_vocab_size(buffer.cols);
        let mut top = Vec::new();
        for row in &self.input.samples {
            top.clear();
            let lists = self.input.lists_of(row);
            let logits = buffer.row(row.logit_row as usize);
            let sampled = sample_row(logits, row, lists, &mut scratch, &mut top);
            push_sampled(&mut self.output, &sampled, &top);
        }
    }
}
