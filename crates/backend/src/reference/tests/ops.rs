//! Each remaining op on numbers small enough to check by hand.

use std::sync::Arc;

use super::*;
use crate::quant::{dequantize_row, quantize_row};
use crate::testing::random_tensor;
use crate::{Activation, GatedLinear, Linear, NormOp, SharedBytes, VectorId, WeightFormat, WeightId};

/// A backend whose steps have two tokens, 1 and 0, and whose embedding gives token `t` the row `t` of `rows`.
struct Desk {
    backend: ReferenceBackend,
    embed: Embed,
}

impl Desk {
    fn new(rows: [&[f32]; 2]) -> Self {
        let mut backend = ReferenceBackend::new();
        backend.set_limits(&limits()).unwrap();
        let tensor = Tensor::from_f32(2, rows[0].len(), &rows.concat()).unwrap();
        let weight = backend.load_weight(&[tensor], WeightUse::Embedding).unwrap();
        let output = backend.create_buffer(2, rows[0].len()).unwrap();
        Self { backend, embed: Embed { weight, scale: 1.0, output } }
    }

    fn weight(&mut self, rows: usize, values: &[f32]) -> WeightId {
        let tensor = Tensor::from_f32(rows, values.len() / rows, values).unwrap();
        self.backend.load_weight(&[tensor], WeightUse::Linear).unwrap()
    }

    fn vector(&mut self, values: &[f32]) -> VectorId {
        self.backend.load_vector(values).unwrap()
    }

    fn buffer(&mut self, cols: usize) -> BufferId {
        self.backend.create_buffer(2, cols).unwrap()
    }

    /// Embeds, runs `ops`, and reads both rows of `buffer`.
    fn run(&mut self, buffer: BufferId, ops: &[Op]) -> Vec<f32> {
        let program = Program::new([&[Op::Embed(self.embed)], ops].concat());
        let program = self.backend.compile(&program).unwrap();
        let input = StepInput {
            token_ids: vec![1, 0],
            positions: vec![0, 1],
            slots: vec![0, 1],
            logit_rows: vec![1, 1],
            ..StepInput::default()
        };
        self.backend.submit(&input, program).unwrap();
        self.backend.collect(&mut StepOutput::default()).unwrap();
        self.backend.read_buffer(buffer, 2).unwrap()
    }
}

#[test]
fn embed_looks_up_and_scales() {
    let mut desk = Desk::new([&[1.0, 2.0], &[3.0, 4.0]]);
    desk.embed.scale = 2.0;
    assert_eq!(desk.run(desk.embed.output, &[]), [6.0, 8.0, 2.0, 4.0]);
}

#[test]
fn linear_norms_adds_bias_and_accumulates() {
    let mut desk = Desk::new([&[3.0, 4.0], &[1.0, -1.0]]);
    let weight = desk.weight(2, &[1.0, 2.0, 10.0, 20.0]);
    let (norm_weight, bias) = (desk.vector(&[2.0, 1.0]), desk.vector(&[100.0, 200.0]));
    let input = desk.embed.output;
    let output = desk.buffer(2);
    let plain = Linear { input, norm: None, weight, bias: None, output, accumulate: false };
    assert_eq!(desk.run(output, &[Op::Linear(plain)]), [-1.0, -10.0, 11.0, 110.0]);

    let norm = Norm { kind: NormKind::Rms, weight: norm_weight, eps: 0.5 };
    let full = Linear { norm: Some(norm), bias: Some(bias), accumulate: true, ..plain };
    let both = desk.run(output, &[Op::Linear(plain), Op::Linear(full)]);
    // Mean squares 1 and 12.5, plus 0.5.
    let (a, b) = (1.5_f32.sqrt(), 13_f32.sqrt());
    let normed = [[2.0 / a, -1.0 / a], [6.0 / b, 4.0 / b]];
    let expected = [
        -1.0 + 100.0 + normed[0][0] + 2.0 * normed[0][1],
        -10.0 + 200.0 + 10.0 * normed[0][0] + 20.0 * normed[0][1],
        11.0 + 100.0 + normed[1][0] + 2.0 * normed[1][1],
        110.0 + 200.0 + 10.0 * normed[1][0] + 20.0 * normed[1][1],
    ];
    assert_close(&both, &expected, "norm, bias, accumulate");
}

#[test]
fn layer_norm_in_place_and_accumulated() {
    let mut desk = Desk::new([&[3.0, 5.0], &[0.0, -4.0]]);
    let (weight, bias) = (desk.vector(&[2.0, 3.0]), desk.vector(&[10.0, 20.0]));
    let buffer = desk.embed.output;
    let norm = Norm { kind: NormKind::Layer { bias: Some(bias) }, weight, eps: 0.0 };
    let op = NormOp { input: buffer, norm, output: buffer, accumulate: false };
    assert_close(&desk.run(buffer, &[Op::Norm(op)]), &[12.0, 17.0, 8.0, 23.0], "layer norm");
    let op = NormOp { accumulate: true, ..op };
    assert_close(&desk.run(buffer, &[Op::Norm(op)]), &[12.0, 13.0, 11.0, 28.0], "accumulated");
}

#[test]
fn gated_linear_takes_gate_rows_first() {
    let mut desk = Desk::new([&[2.0], &[-1.0]]);
    let weight = desk.weight(4, &[1.0, -1.0, 3.0, 5.0]);
    let bias = desk.vector(&[0.0, 0.5, 0.0, 1.0]);
    let output = desk.buffer(2);
    let op = GatedLinear {
        input: desk.embed.output,
        norm: None,
        weight,
        bias: Some(bias),
        activation: Activation::Silu,
        output,
    };
    let silu = |x: f32| x / (1.0 + (-x).exp());
    let expected = [silu(-1.0) * -3.0, silu(1.5) * -4.0, silu(2.0) * 6.0, silu(-1.5) * 11.0];
    assert_close(&desk.run(output, &[Op::GatedLinear(op)]), &expected, "gated");
}

#[test]
fn logits_take_their_rows_and_softcap() {
    let mut desk = Desk::new([&[2.0, 1.0], &[9.0, 9.0]]);
    let weight = desk.weight(3, &[1.0, 0.0, 0.0, 1.0, 10.0, 10.0]);
    let output = desk.backend.create_logits(2, 3).unwrap();
    let op = Logits { input: desk.embed.output, norm: None, weight, bias: None, softcap: Some(4.0), output };
    let row: Vec<f32> = [2.0_f32, 1.0, 30.0].iter().map(|x| 4.0 * (x / 4.0).tanh()).collect();
    assert_close(&desk.run(output, &[Op::Logits(op)]), &[row.clone(), row].concat(), "logits");
}

/// One matrix from parts of every format equals the decoded matrix.
#[test]
fn parts_of_every_format_stand_one_below_the_other() {
    let mut random = Random::new(77);
    let rows: Vec<Vec<f32>> = (0..2).map(|_| random.normals(256)).collect();
    let mut desk = Desk::new([&rows[0], &rows[1]]);
    let mut parts: Vec<Tensor> = Vec::new();
    for format in WeightFormat::ALL {
        parts.push(random_tensor(format, 2, 256, 0.1, &mut random));
        let bytes = quantize_row(format, &random.normals(256));
        parts.push(Tensor::new(format, 1, 256, SharedBytes::new(Arc::new(bytes))).unwrap());
    }
    let weight = desk.backend.load_weight(&parts, WeightUse::EmbeddingAndLinear).unwrap();
    let mut expected = [Vec::new(), Vec::new()];
    for part in &parts {
        let mut decoded = vec![0.0; part.rows() * 256];
        dequantize_row(part.format(), part.bytes(), &mut decoded);
        for weight_row in decoded.chunks_exact(256) {
            for (output, input) in expected.iter_mut().zip([&rows[1], &rows[0]]) {
                output.push(weight_row.iter().zip(input).map(|(w, x)| w * x).sum::<f32>());
            }
        }
    }
    let output = desk.buffer(3 * WeightFormat::ALL.len());
    let op = Linear { input: desk.embed.output, norm: None, weight, bias: None, output, accumulate: false };
    assert_close(&desk.run(output, &[Op::Linear(op)]), &expected.concat(), "every format");
}
