//! `linear`, `gated_linear` and `logits` on every instruction set: against the reference backend, against the same
//! quantised activations in f64, and bit by bit against themselves in other batches and on other numbers of threads.

mod common;

use baton_backend::quant::dequantize_row;
use baton_backend::testing::random_tensor;
use baton_backend::{
    Activation, Backend, BufferId, Embed, GatedLinear, Linear, Logits, Norm, NormKind, Precision,
    ReferenceBackend, StepExecutor, Tensor, WeightFormat, WeightUse,
};
use baton_cpu::Isa;
use common::{
    Op, bits, cpu, cpu_of, error, limits, load_inputs, paths, random, run, run_and_read, super_rounding,
    tokens,
};
use half::f16;

const BATCHES: [usize; 7] = [1, 2, 3, 5, 8, 17, 64];
const TABLE_ROWS: usize = 64;

/// A backend with a table of inputs and one product.
struct Setup {
    ops: Vec<Op>,
    output: BufferId,
}

#[derive(Clone, Copy)]
struct Shape<'a> {
    parts: &'a [Tensor],
    inputs: &'a [f32],
    with_norm: bool,
    with_bias: bool,
    accumulate: bool,
}

fn linear(backend: &mut dyn Backend, shape: Shape<'_>) -> Setup {
    let cols = shape.parts[0].cols();
    let rows: usize = shape.parts.iter().map(Tensor::rows).sum();
    backend.set_limits(&limits(TABLE_ROWS, 100)).expect("limits");
    let table = load_inputs(backend, TABLE_ROWS, cols, shape.inputs);
    let weight = backend.load_weight(shape.parts, WeightUse::Linear).expect("loads");
    let mut random = random(5);
    let norm = backend.load_vector(&random.normals(cols)).expect("loads");
    let bias = backend.load_vector(&random.normals(rows)).expect("loads");
    let residual = load_inputs(backend, TABLE_ROWS, rows, &random.normals(TABLE_ROWS * rows));
    let input = backend.create_buffer(TABLE_ROWS, cols).expect("creates");
    let output = backend.create_buffer(TABLE_ROWS, rows).expect("creates");
    let ops = vec![
        Op::Embed(Embed { weight: table, scale: 1.0, output: input }),
        Op::Embed(Embed { weight: residual, scale: 1.0, output }),
        Op::Linear(Linear {
            input,
            norm: shape.with_norm.then_some(Norm { kind: NormKind::Rms, weight: norm, eps: 1e-5 }),
            weight,
            bias: shape.with_bias.then_some(bias),
            output,
            accumulate: shape.accumulate,
        }),
    ];
    Setup { ops, output }
}

/// True where activations have one scale per super-block.
fn has_supers(isa: Isa, format: WeightFormat) -> bool {
    isa == Isa::Amx && matches!(format, WeightFormat::Q4_K | WeightFormat::Q5_K | WeightFormat::Q6_K)
}

/// Activations as the documentation says they are quantised, back to f64.
fn quantised(values: &[f32], has_supers: bool) -> Vec<f64> {
    let mut result = Vec::new();
    for block in values.chunks(if has_supers { 256 } else { 32 }) {
        let largest = block.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let d = if has_supers { largest / 127.0 } else { f16::from_f32(largest / 127.0).to_f32() };
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        result.extend(block.iter().map(|x| f64::from(d) * f64::from((x * inverse).round_ties_even())));
    }
    result
}

/// Tiles of bf16 take activations as sums of two bf16, which are within 2^-17 of them, and of f16 weights leave out the product
/// of the two smaller parts, which is less than 2^-15: rarely all at once.
const SPLIT_LIMIT: f32 = 1.0 / 65536.0;

/// True where a product of a matrix of this format is made in tiles of bf16.
fn is_split(isa: Isa, format: WeightFormat, cols: usize) -> bool {
    isa >= Isa::AmxBf16 && matches!(format, WeightFormat::F16 | WeightFormat::BF16) && cols.is_multiple_of(32)
}

#[test]
fn every_format_equals_exact_arithmetic() {
    // Float weights of any width, and of one that tiles take: several chunks of k with a rest.
    let floats = [WeightFormat::F32, WeightFormat::F16, WeightFormat::BF16].map(|format| (format, 301));
    // Eight-bit floats become Q8_0 when they are loaded: the conformance cases have them.
    let formats = WeightFormat::ALL.into_iter().filter(|format| *format != WeightFormat::F8_E4M3);
    let cases = formats.map(|format| (format, if format.is_float() { 608 } else { 768 }));
    for (format, cols) in floats.into_iter().chain(cases) {
        check_exact(format, cols, Precision::Fast);
    }
}

#[test]
fn in_full_precision_nothing_is_rounded() {
    for format in WeightFormat::ALL {
        check_exact(format, if format.is_float() { 608 } else { 768 }, Precision::Full);
    }
}

/// Products of random weights beside f64, of inputs as they are or as they are quantised.
fn check_exact(format: WeightFormat, cols: usize, precision: Precision) {
    let rows = 37;
    let mut random = random(7);
    let weight = random_tensor(format, rows, cols, 1.0, &mut random);
    let inputs = random.normals(TABLE_ROWS * cols);
    let inputs_as_used = |has_supers: bool| -> Vec<f64> {
        if format.is_float() || precision == Precision::Full {
            inputs.iter().map(|&x| f64::from(x)).collect()
        } else {
            inputs.chunks(cols).flat_map(|row| quantised(row, has_supers)).collect()
        }
    };
    let parts = [weight];
    let with_blocks = exact(&parts[0], &inputs_as_used(false));
    let with_supers = exact(&parts[0], &inputs_as_used(true));
    let shape =
        Shape { parts: &parts, inputs: &inputs, with_norm: false, with_bias: false, accumulate: false };
    for isa in paths() {
        let (expected, scales) = if has_supers(isa, format) { &with_supers } else { &with_blocks };
        let mut backend = cpu_of(isa, 2, precision);
        let setup = linear(&mut backend, shape);
        let is_split = precision == Precision::Fast && is_split(isa, format, cols);
        let limit = if is_split { SPLIT_LIMIT } else { 1e-6 };
        for batch in BATCHES {
            let ids: Vec<u32> = (0..batch as u32).collect();
            let got = run_and_read(&mut backend, &tokens(&ids), &setup.ops, setup.output);
            for (i, got) in got.iter().enumerate() {
                let (expected, scale) = (expected[i], scales[i]);
                assert!(
                    (got - expected).abs() <= limit * scale,
                    "{format} on {isa}, {precision:?}, batch {batch}, element {i}: {got}, expected {expected}"
                );
            }
        }
    }
}

/// Products in f64 with all tokens, and the sums of their magnitudes, `[tokens, rows]`.
fn exact(weight: &Tensor, inputs: &[f64]) -> (Vec<f32>, Vec<f32>) {
    let (rows, cols) = (weight.rows(), weight.cols());
    let mut expected = vec![0.0f32; TABLE_ROWS * rows];
    let mut scales = vec![0.0f32; TABLE_ROWS * rows];
    let mut values = vec![0.0f32; cols];
    for row in 0..rows {
        dequantize_row(weight.format(), weight.row(row), &mut values);
        for token in 0..TABLE_ROWS {
            let input = &inputs[token * cols..][..cols];
            let products = values.iter().zip(input).map(|(&w, x)| f64::from(w) * x);
            expected[token * rows + row] = products.clone().sum::<f64>() as f32;
            scales[token * rows + row] = products.map(f64::abs).sum::<f64>() as f32;
        }
    }
    (expected, scales)
}

#[test]
fn norm_bias_and_residual_agree_with_the_reference() {
    let formats =
        [WeightFormat::F32, WeightFormat::F16, WeightFormat::BF16, WeightFormat::Q8_0, WeightFormat::Q6_K];
    for format in formats {
        let mut random = random(11);
        let parts = [random_tensor(format, 50, 512, 1.0, &mut random)];
        let inputs = random.normals(TABLE_ROWS * 512);
        let shape =
            Shape { parts: &parts, inputs: &inputs, with_norm: true, with_bias: true, accumulate: true };
        let mut reference = ReferenceBackend::new();
        let setup = linear(&mut reference, shape);
        let ids: Vec<u32> = (0..17).rev().collect();
        let expected = run_and_read(&mut reference, &tokens(&ids), &setup.ops, setup.output);
        for isa in paths() {
            let mut backend = cpu(isa, 2);
            let setup = linear(&mut backend, shape);
            let got = run_and_read(&mut backend, &tokens(&ids), &setup.ops, setup.output);
            let limit = match format.is_float() {
                true if is_split(isa, format, 512) => SPLIT_LIMIT,
                true => 2e-6,
                // Eight bits an activation, each up to half a step of 1/127 of its block's largest off.
                false => 1.5e-2 * super_rounding(isa),
            };
            assert!(error(&got, &expected) < limit, "{format} on {isa}: {}", error(&got, &expected));
        }
    }
}

/// Parts of odd heights and different formats, floats among them.
fn mixed_parts() -> Vec<Tensor> {
    let mut random = random(13);
    [(WeightFormat::Q4_1, 21), (WeightFormat::BF16, 5), (WeightFormat::Q5_K, 34), (WeightFormat::Q8_0, 16)]
        .map(|(format, rows)| random_tensor(format, rows, 256, 1.0, &mut random))
        .to_vec()
}

#[test]
fn mixed_parts_agree_with_the_reference() {
    let parts = mixed_parts();
    let inputs = random(17).normals(TABLE_ROWS * 256);
    for with_norm in [false, true] {
        let shape = Shape { parts: &parts, inputs: &inputs, with_norm, with_bias: false, accumulate: false };
        let mut reference = ReferenceBackend::new();
        let setup = linear(&mut reference, shape);
        let ids: Vec<u32> = (0..9).collect();
        let expected = run_and_read(&mut reference, &tokens(&ids), &setup.ops, setup.output);
        for isa in paths() {
            let mut backend = cpu(isa, 3);
            let setup = linear(&mut backend, shape);
            let got = run_and_read(&mut backend, &tokens(&ids), &setup.ops, setup.output);
            let limit = 1e-2 * super_rounding(isa);
            assert!(error(&got, &expected) < limit, "{isa}: {}", error(&got, &expected));
        }
    }
}

#[test]
fn a_row_is_the_same_in_every_batch_and_on_any_number_of_threads() {
    let mut cases: Vec<Vec<Tensor>> = WeightFormat::ALL
        .into_iter()
        .map(|format| vec![random_tensor(format, 40, 512, 1.0, &mut random(19))])
        .collect();
    cases.push(mixed_parts());
    // Float parts of which one is not multiplied in tiles, so that none is.
    let floats = [WeightFormat::BF16, WeightFormat::F32, WeightFormat::F16];
    cases.push(floats.map(|format| random_tensor(format, 20, 512, 1.0, &mut random(37))).to_vec());
    for parts in cases {
        let cols = parts[0].cols();
        let inputs = random(23).normals(TABLE_ROWS * cols);
        let shape =
            Shape { parts: &parts, inputs: &inputs, with_norm: true, with_bias: true, accumulate: false };
        for isa in paths() {
            let mut alone = Vec::new();
            for threads in [1, 2, 5] {
                let mut backend = cpu(isa, threads);
                let setup = linear(&mut backend, shape);
                let mut read =
                    |ids: &[u32]| bits(&run_and_read(&mut backend, &tokens(ids), &setup.ops, setup.output));
                if threads == 1 {
                    (0..TABLE_ROWS as u32).for_each(|id| alone.push(read(&[id])));
                }
                for batch in BATCHES {
                    let ids: Vec<u32> = (0..batch as u32).map(|i| (i * 7 + 3) % TABLE_ROWS as u32).collect();
                    let rows = read(&ids);
                    for (i, &id) in ids.iter().enumerate() {
                        let width = alone[0].len();
                        let format = parts[0].format();
                        assert_eq!(
                            rows[i * width..(i + 1) * width],
                            alone[id as usize],
                            "{format} on {isa}, {threads} threads, batch {batch}, row {i}"
                        );
                    }
                }
            }
        }
    }
}

fn gated(backend: &mut dyn Backend, parts: &[Tensor], inputs: &[f32], activation: Activation) -> Setup {
    let cols = parts[0].cols();
    let rows: usize = parts.iter().map(Tensor::rows).sum();
    backend.set_limits(&limits(TABLE_ROWS, 100)).expect("limits");
    let table = load_inputs(backend, TABLE_ROWS, cols, inputs);
    let weight = backend.load_weight(parts, WeightUse::Linear).expect("loads");
    let bias = backend.load_vector(&random(3).normals(rows)).expect("loads");
    let norm_weight = backend.load_vector(&random(4).normals(cols)).expect("loads");
    let norm_bias = backend.load_vector(&random(5).normals(cols)).expect("loads");
    let input = backend.create_buffer(TABLE_ROWS, cols).expect("creates");
    let output = backend.create_buffer(TABLE_ROWS, rows / 2).expect("creates");
    let norm = Norm { kind: NormKind::Layer { bias: Some(norm_bias) }, weight: norm_weight, eps: 1e-6 };
    let ops = vec![
        Op::Embed(Embed { weight: table, scale: 1.0, output: input }),
        Op::GatedLinear(GatedLinear {
            input,
            norm: Some(norm),
            weight,
            bias: Some(bias),
            activation,
            output,
        }),
    ];
    Setup { ops, output }
}

#[test]
fn gates_agree_with_the_reference() {
    let mut random = random(29);
    let mut tensor = |format, rows| random_tensor(format, rows, 256, 0.2, &mut random);
    // One tensor whose halves are no whole panels; two of different formats; halves that do not meet at a tensor.
    let cases = [
        (vec![tensor(WeightFormat::F32, 42)], 3e-6),
        (vec![tensor(WeightFormat::F16, 40), tensor(WeightFormat::BF16, 40)], 3e-6),
        (vec![tensor(WeightFormat::Q4_K, 40), tensor(WeightFormat::Q6_K, 40)], 1e-2),
        (vec![tensor(WeightFormat::Q8_0, 10), tensor(WeightFormat::F32, 50)], 1e-2),
    ];
    let inputs = random.normals(TABLE_ROWS * 256);
    let ids: Vec<u32> = (5..18).collect();
    for (parts, limit) in cases {
        for activation in [Activation::Silu, Activation::GeluTanh, Activation::Gelu] {
            let mut reference = ReferenceBackend::new();
            let setup = gated(&mut reference, &parts, &inputs, activation);
            let expected = run_and_read(&mut reference, &tokens(&ids), &setup.ops, setup.output);
            for isa in paths() {
                let mut backend = cpu(isa, 2);
                let setup = gated(&mut backend, &parts, &inputs, activation);
                let got = run_and_read(&mut backend, &tokens(&ids), &setup.ops, setup.output);
                let error = error(&got, &expected);
                let in_tiles = parts.iter().all(|part| is_split(isa, part.format(), 256));
                let has_supers = parts.iter().any(|part| has_supers(isa, part.format()));
                let limit = if in_tiles { SPLIT_LIMIT } else { limit };
                let limit = if has_supers { limit * super_rounding(isa) } else { limit };
                assert!(error < limit, "{activation:?} on {isa}: {error}");
                let last = run_and_read(&mut backend, &tokens(&ids[12..]), &setup.ops, setup.output);
                assert_eq!(bits(&got[got.len() - last.len()..]), bits(&last), "{activation:?} on {isa}");
            }
        }
    }
}

#[test]
fn logits_gather_their_rows() {
    let mut random = random(31);
    let weight = random_tensor(WeightFormat::F32, 77, 48, 1.0, &mut random);
    let inputs = random.normals(TABLE_ROWS * 48);
    let build = |backend: &mut dyn Backend| {
        backend.set_limits(&limits(TABLE_ROWS, 77)).expect("limits");
        let table = load_inputs(backend, TABLE_ROWS, 48, &inputs);
        let head =
            backend.load_weight(std::slice::from_ref(&weight), WeightUse::EmbeddingAndLinear).expect("loads");
        let norm = backend.load_vector(&[0.5; 48]).expect("loads");
        let input = backend.create_buffer(TABLE_ROWS, 48).expect("creates");
        let output = backend.create_logits(TABLE_ROWS, 77).expect("creates");
        let norm = Norm { kind: NormKind::Rms, weight: norm, eps: 1e-5 };
        let ops = vec![
            Op::Embed(Embed { weight: table, scale: 1.0, output: input }),
            Op::Logits(Logits {
                input,
                norm: Some(norm),
                weight: head,
                bias: None,
                softcap: Some(3.0),
                output,
            }),
        ];
        (ops, output)
    };
    let mut step = tokens(&[9, 8, 7, 6, 5, 4]);
    step.logit_rows = vec![5, 0, 3];
    let mut reference = ReferenceBackend::new();
    let (ops, output) = build(&mut reference);
    run(&mut reference, &step, &ops).expect("runs");
    let expected = reference.read_buffer(output, 3).expect("rows");
    for isa in paths() {
        let mut backend = cpu(isa, 2);
        let (ops, output) = build(&mut backend);
        run(&mut backend, &step, &ops).expect("runs");
        let got = backend.read_buffer(output, 3).expect("rows");
        assert!(error(&got, &expected) < 2e-6, "{isa}: {}", error(&got, &expected));
    }
}
