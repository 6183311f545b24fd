//! The ops of one step. Each computes its result in memory of its own and stores it at the end, so that an op may name
//! the same buffer as input and output.

use baton_core::TokenId;

use super::kv_cache::KvCache;
use super::math::{activate, activate_gate, apply_softcap, dot, normalize, normalize_part, rotate, vector};
use super::{Buffer, Parameters, Weight};
use crate::sampling::{SampleScratch, push_sampled, sample_row};
use crate::{
    ActivatedLinear, AddPositions, Attention, BufferId, Embed, EncoderAttention, GatedLinear, Linear, Logits,
    Norm, NormOp, NormSpan, Op, Qkv, StepInput, StepOutput, VectorId, WeightId,
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
    pub(super) fn run(&mut self, op: &Op) {
        match op {
            Op::Embed(op) => self.embed(op),
            Op::AddPositions(op) => self.add_positions(*op),
            Op::Norm(op) => self.norm(op),
            Op::Linear(op) => self.linear(op),
            Op::ActivatedLinear(op) => self.activated_linear(op),
            Op::GatedLinear(op) => self.gated_linear(op),
            Op::Route(op) => self.route(op),
            Op::ExpertGated(op) => self.expert_gated(op),
            Op::ExpertLinear(op) => self.expert_linear(op),
            Op::HeadLinear(op) => self.head_linear(op),
            Op::LatentKv(op) => self.latent_kv(op),
            Op::Qkv(op) => self.qkv(op),
            Op::Attention(op) => self.attention(op),
            Op::EncoderAttention(op) => self.encoder_attention(op),
            // All rows are computed to the end.
            Op::KeepLogitRows(_) => {}
            Op::Logits(op) => self.logits(op),
            Op::Sample(op) => self.sample(op.logits),
        }
    }

    pub(super) fn num_tokens(&self) -> usize {
        self.input.num_tokens()
    }

    pub(super) fn weight(&self, id: WeightId) -> &Weight {
        &self.parameters.weights[id.0 as usize]
    }

    /// All token rows of a buffer, normalised: `[tokens, cols]`.
    pub(super) fn inputs(&self, buffer: BufferId, norm: Option<&Norm>) -> Vec<Vec<f32>> {
        (0..self.num_tokens()).map(|row| self.input_row(buffer, row, norm)).collect()
    }

    pub(super) fn input_row(&self, buffer: BufferId, row: usize, norm: Option<&Norm>) -> Vec<f32> {
        let mut values = self.buffers[buffer.0 as usize].row(row).to_vec();
        if let Some(norm) = norm {
            normalize(&mut values, norm, self.parameters);
        }
        values
    }

    /// `weight · input + bias` for each row of `inputs`: `[rows, out]`.
    pub(super) fn project(
        &self,
        inputs: &[Vec<f32>],
        weight: WeightId,
        bias: Option<VectorId>,
    ) -> Vec<Vec<f32>> {
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

    fn add_positions(&mut self, op: AddPositions) {
        let weight = self.weight(op.weight);
        let lookup = |position: &u32| {
            let mut values = vec![0.0; weight.cols];
            weight.row(*position as usize, &mut values);
            values
        };
        let rows: Vec<_> = self.input.positions.iter().map(lookup).collect();
        self.store(op.output, &rows, true);
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

    fn activated_linear(&mut self, op: &ActivatedLinear) {
        let inputs = self.inputs(op.input, op.norm.as_ref());
        let mut rows = self.project(&inputs, op.weight, op.bias);
        rows.iter_mut().flatten().for_each(|value| *value = activate(op.activation, *value));
        self.store(op.output, &rows, false);
    }

    fn gated_linear(&mut self, op: &GatedLinear) {
        let inputs = self.inputs(op.input, op.norm.as_ref());
        let mut rows = self.project(&inputs, op.weight, op.bias);
        for row in &mut rows {
            let up = row.split_off(row.len() / 2);
            for (gate, up) in row.iter_mut().zip(up) {
                *gate = activate_gate(op.activation, *gate, up);
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
        let first_slot = kv.lane_of(op.layer) * self.input.num_tokens();
        for (number, row) in rows.iter_mut().enumerate() {
            assert_eq!(row.len(), q_len + 2 * kv_len, "a qkv weight has the wrong number of rows");
            let value = row.split_off(q_len + kv_len);
            let mut key = row.split_off(q_len);
            for (heads, norm) in [(&mut *row, op.q_norm), (&mut key, op.k_norm)] {
                if let Some(norm) = norm {
                    normalize_heads(heads, &norm, op.norm_span, spec.head_dim, self.parameters);
                }
                for head in heads.chunks_exact_mut(spec.head_dim) {
                    if let Some(rope) = op.rope {
                        rotate(head, &self.parameters.ropes[rope.0 as usize], self.input.positions[number]);
                    }
                }
            }
            kv.write(op.layer, self.input.slots[first_slot + number] as usize, &key, &value);
        }
        self.store(op.output, &rows, false);
    }

    fn attention(&mut self, op: &Attention) {
        let rows = self.attend(op);
        self.store(op.output, &rows, false);
    }

    fn encoder_attention(&mut self, op: &EncoderAttention) {
        let width = self.buffers[op.output.0 as usize].cols;
        let head_dim = width / op.num_heads;
        let mut rows = self.inputs(op.qkv, None);
        if let Some(rope) = op.rope {
            for (row, position) in rows.iter_mut().zip(&self.input.positions) {
                for head in row[..2 * width].chunks_exact_mut(head_dim) {
                    rotate(head, &self.parameters.ropes[rope.0 as usize], *position);
                }
            }
        }
        let sequences = &self.input.slots;
        let attend = |number: usize| {
            let seen: Vec<usize> =
                (0..rows.len()).filter(|&other| sequences[other] == sequences[number]).collect();
            let mut output = Vec::with_capacity(width);
            for head in (0..op.num_heads).map(|head| head * head_dim) {
                let query = &rows[number][head..head + head_dim];
                let key = |row: usize| &rows[row][width + head..width + head + head_dim];
                let scores: Vec<f32> = seen.iter().map(|&row| op.scale * dot(query, key(row))).collect();
                let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let weights: Vec<f64> = scores.iter().map(|score| f64::from(score - most).exp()).collect();
                let sum: f64 = weights.iter().sum();
                output.extend((0..head_dim).map(|i| {
                    let value = |row: usize| f64::from(rows[row][2 * width + head + i]);
                    let total: f64 =
                        seen.iter().zip(&weights).map(|(&row, weight)| weight * value(row)).sum();
                    (total / sum) as f32
                }));
            }
            output
        };
        let outputs: Vec<Vec<f32>> = (0..rows.len()).map(attend).collect();
        self.store(op.output, &outputs, false);
    }

    fn logits(&mut self, op: &Logits) {
        let inputs: Vec<_> = self
            .input
            .logit_rows
            .iter()
            .map(|row| self.input_row(op.input, *row as usize, op.norm.as_ref()))
            .collect();
        let mut rows = self.project(&inputs, op.weight, op.bias);
        rows.iter_mut().flatten().for_each(|logit| *logit = apply_softcap(*logit, op.softcap));
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

/// Norms of q or k, over what the op says.
fn normalize_heads(heads: &mut [f32], norm: &Norm, span: NormSpan, head_dim: usize, parameters: &Parameters) {
    let total = heads.len();
    match span {
        NormSpan::Row => normalize(heads, norm, parameters),
        NormSpan::Head => {
            heads.chunks_exact_mut(head_dim).for_each(|head| normalize(head, norm, parameters));
        }
        NormSpan::EachHead => {
            for (number, head) in heads.chunks_exact_mut(head_dim).enumerate() {
                normalize_part(head, norm, parameters, number * head_dim, total);
            }
        }
    }
}
