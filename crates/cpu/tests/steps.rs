//! The life of a step: embeddings, norms, sampling with feedback, memory, and steps that are not valid.

mod common;

use baton_backend::testing::random_tensor;
use baton_backend::{
    Backend, BackendError, BlockCopy, BufferId, Embed, KvDtype, KvLayerSpec, KvSpec, Linear, Logits, Norm,
    NormKind, NormOp, Program, ReferenceBackend, Sample, SampleRow, StepExecutor, StepInput, StepOutput,
    WeightFormat, WeightId, WeightUse,
};
use baton_cpu::{CpuBackend, CpuOptions};
use common::{Op, cpu, error, limits, paths, random, run, run_and_read, tokens};

#[test]
fn embeddings_and_norms_agree_with_the_reference() {
    for format in WeightFormat::ALL {
        let mut random = random(3);
        let cols = if format.is_float() { 37 } else { 256 };
        let tables = [30, 20].map(|rows| random_tensor(format, rows, cols, 1.0, &mut random));
        let build = |backend: &mut dyn Backend| {
            backend.set_limits(&limits(16, 50)).expect("limits");
            let weight = backend.load_weight(&tables, WeightUse::Embedding).expect("loads");
            let mut random = common::random(9);
            let norm_weight = backend.load_vector(&random.normals(cols)).expect("loads");
            let norm_bias = backend.load_vector(&random.normals(cols)).expect("loads");
            let input = backend.create_buffer(16, cols).expect("creates");
            let output = backend.create_buffer(16, cols).expect("creates");
            let norm = |kind| Norm { kind, weight: norm_weight, eps: 1e-5 };
            let layer = NormKind::Layer { bias: Some(norm_bias) };
            let ops = vec![
                Op::Embed(Embed { weight, scale: 1.5, output: input }),
                Op::Norm(NormOp { input, norm: norm(NormKind::Rms), output, accumulate: false }),
                Op::Norm(NormOp { input, norm: norm(layer), output, accumulate: true }),
                Op::Norm(NormOp { input: output, norm: norm(NormKind::Rms), output, accumulate: false }),
            ];
            (ops, output)
        };
        let step = tokens(&[0, 29, 30, 49, 7]);
        let mut reference = ReferenceBackend::new();
        let (ops, output) = build(&mut reference);
        let expected = run_and_read(&mut reference, &step, &ops, output);
        for isa in paths() {
            let mut backend = cpu(isa, 2);
            let (ops, output) = build(&mut backend);
            let got = run_and_read(&mut backend, &step, &ops, output);
            assert!(error(&got, &expected) < 3e-6, "{format} on {isa}: {}", error(&got, &expected));
        }
    }
}

fn sample_row(logit_row: u32, temperature: f32) -> SampleRow {
    SampleRow {
        temperature,
        seed: 7,
        counter: u64::from(logit_row),
        num_logprobs: Some(3),
        ..SampleRow::greedy(logit_row)
    }
}

/// Token `t` has the logits of column `t` of a random table: what is drawn is known.
fn sampler(backend: &mut dyn Backend) -> (Vec<Op>, BufferId) {
    backend.set_limits(&limits(32, 60)).expect("limits");
    let one_hot: Vec<f32> = (0..60 * 60).map(|i| f32::from(u8::from(i / 60 == i % 60))).collect();
    let table = common::load_inputs(backend, 60, 60, &one_hot);
    let head = random_tensor(WeightFormat::F32, 60, 60, 4.0, &mut random(2));
    let head = backend.load_weight(&[head], WeightUse::Linear).expect("loads");
    let input = backend.create_buffer(32, 60).expect("creates");
    let logits = backend.create_logits(32, 60).expect("creates");
    let ops = vec![
        Op::Embed(Embed { weight: table, scale: 1.0, output: input }),
        Op::Logits(Logits { input, norm: None, weight: head, bias: None, softcap: None, output: logits }),
        Op::Sample(Sample { logits }),
    ];
    (ops, logits)
}

#[test]
fn samples_agree_with_the_reference_and_are_fed_back() {
    let mut first = tokens(&(0..20).collect::<Vec<u32>>());
    first.samples = (0..20).map(|row| sample_row(row, if row % 2 == 0 { 0.0 } else { 0.9 })).collect();
    first.samples[3].forced = Some(11);
    let mut second = tokens(&[0, 0, 5]);
    second.feedback = vec![(0, 4), (1, 3)];
    second.samples = (0..3).map(|row| sample_row(row, 0.0)).collect();
    let both = |backend: &mut dyn Backend| {
        let (ops, _) = sampler(backend);
        let program = backend.compile(&Program::new(ops)).expect("compiles");
        // Both are in flight before the first is collected.
        backend.submit(&first, program).expect("submits");
        backend.submit(&second, program).expect("submits");
        let mut outputs = [StepOutput::default(), StepOutput::default()];
        for output in &mut outputs {
            backend.collect(output).expect("collects");
        }
        outputs
    };
    let expected = both(&mut ReferenceBackend::new());
    assert_eq!(expected[0].samples[3].chosen.token_id, 11);
    for isa in paths() {
        for threads in [1, 3] {
            assert_eq!(both(&mut cpu(isa, threads)), expected, "{isa}");
        }
    }
}

#[test]
fn the_device_describes_itself() {
    for isa in paths() {
        let device = cpu(isa, 2).device();
        assert_eq!((device.name.as_str(), device.block_size, device.activation_bytes), ("cpu", 16, 4));
        assert!(device.description.ends_with(&format!("2 threads, {isa}")), "{}", device.description);
        assert!(device.free_bytes > 0 && device.free_bytes <= device.total_bytes);
    }
    assert!(CpuBackend::new(CpuOptions { threads: Some(0), ..CpuOptions::default() }).is_err());
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut backend = cpu(paths()[0], 1);
    backend.set_limits(&limits(8, 10)).expect("limits");
    let layer = KvLayerSpec { num_kv_heads: 8, head_dim: 128 };
    let mut spec = KvSpec::full(layer, 64, KvDtype::F32, 16);
    let error = backend.create_kv_cache(&spec, 100_000_000, 0).expect_err("too large");
    assert!(matches!(error, BackendError::OutOfMemory { .. }), "{error}");
    assert!(backend.create_kv_cache(&spec, usize::MAX / 2, usize::MAX / 2).is_err());
    spec.block_size = 8;
    let error = backend.create_kv_cache(&spec, 1, 0).expect_err("odd block size");
    assert!(error.to_string().contains("multiple of 16"), "{error}");
    let spec = KvSpec::full(layer, 1, KvDtype::F8E4M3, 16);
    let error = backend.create_kv_cache(&spec, 1, 0).expect_err("no kernels for it");
    assert!(error.to_string().contains("--kv-cache-dtype"), "{error}");
    let error = backend.create_buffer(1 << 40, 1 << 10).expect_err("too large");
    assert!(matches!(error, BackendError::OutOfMemory { .. }), "{error}");
    assert!(backend.create_buffer(usize::MAX, 2).is_err());
}

#[test]
fn weights_are_counted() {
    let mut backend = cpu(paths()[0], 1);
    let tensor = random_tensor(WeightFormat::Q4_1, 32, 64, 1.0, &mut random(1));
    backend.load_weight(std::slice::from_ref(&tensor), WeightUse::Linear).expect("loads");
    assert_eq!(backend.weight_bytes(), tensor.bytes().len() as u64);
}

#[test]
fn wrong_steps_are_refused_and_the_backend_lives_on() {
    let mut backend = cpu(paths()[0], 2);
    let (ops, logits) = sampler(&mut backend);
    let layer = KvLayerSpec { num_kv_heads: 1, head_dim: 16 };
    let spec = KvSpec::full(layer, 1, KvDtype::F16, 16);
    backend.create_kv_cache(&spec, 4, 2).expect("creates");
    let good = tokens(&[1, 2]);
    let copy = |from, to| BlockCopy { from, to };
    type Change = Box<dyn Fn(&mut StepInput)>;
    let changes: Vec<(&str, Change)> = vec![
        ("vocabulary", Box::new(|step| step.token_ids[0] = 60)),
        ("positions", Box::new(|step| step.positions.truncate(1))),
        ("33 tokens", Box::new(|step| *step = tokens(&[0; 33]))),
        ("slot", Box::new(|step| step.slots[1] = 64)),
        ("page", Box::new(|step| step.pages.push(4))),
        ("swapped out", Box::new(move |step| step.swap_out.push(copy(0, 2)))),
        ("copied", Box::new(move |step| step.copies.push(copy(0, 4)))),
        ("did not draw", Box::new(|step| step.feedback.push((0, 0)))),
        ("row of logits", Box::new(|step| step.logit_rows.push(2))),
        ("row of logits", Box::new(|step| step.samples.push(sample_row(2, 0.0)))),
        ("history", Box::new(|step| step.samples.push(SampleRow { history: 0..1, ..sample_row(0, 0.0) }))),
        ("mask", Box::new(|step| step.samples.push(SampleRow { mask: 0..1, ..sample_row(0, 0.0) }))),
        ("scored", Box::new(|step| step.samples.push(SampleRow { forced: Some(60), ..sample_row(0, 0.0) }))),
    ];
    for (expect, change) in changes {
        let mut step = good.clone();
        change(&mut step);
        let error = run(&mut backend, &step, &ops).expect_err(expect).to_string();
        assert!(error.contains(expect), "expected {expect:?} in {error:?}");
        run(&mut backend, &good, &ops).expect("still works");
    }
    let no_weight = Linear {
        input: logits,
        norm: None,
        weight: WeightId(9),
        bias: None,
        output: logits,
        accumulate: false,
    };
    let error = run(&mut backend, &good, &[Op::Linear(no_weight)]).expect_err("no such weight").to_string();
    assert!(error.contains("no such weight"), "{error}");
    let lookup_only = Linear { weight: WeightId(0), ..no_weight };
    assert!(run(&mut backend, &good, &[Op::Linear(lookup_only)]).is_err());
    assert!(backend.collect(&mut StepOutput::default()).is_err());
}

#[test]
fn an_empty_step_does_nothing() {
    for isa in paths() {
        let mut backend = cpu(isa, 2);
        let (ops, _) = sampler(&mut backend);
        let output = run(&mut backend, &StepInput::default(), &ops).expect("runs");
        assert_eq!(output, StepOutput::default());
    }
}
