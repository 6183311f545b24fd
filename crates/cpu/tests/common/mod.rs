//! What the tests share: programs as lists of ops, backends of every instruction set, comparisons.
#![allow(dead_code)]

pub use baton_backend::Op;
use baton_backend::testing::Random;
use baton_backend::{
    Backend, BackendError, BufferId, Precision, Program, StepInput, StepLimits, StepOutput, Tensor, WeightId,
    WeightUse,
};
use baton_cpu::{CpuBackend, CpuOptions, Isa};

/// Every path that this machine has.
pub fn paths() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
}

/// How much further than with a scale for every 32 activations results may be off. In products of k-quants AMX has one for 256,
/// whose largest is, of normal values, a third larger.
pub fn super_rounding(isa: Isa) -> f32 {
    if isa == Isa::Amx { 1.35 } else { 1.0 }
}

pub fn cpu(isa: Isa, threads: usize) -> CpuBackend {
    cpu_of(isa, threads, Precision::Fast)
}

pub fn cpu_of(isa: Isa, threads: usize, precision: Precision) -> CpuBackend {
    let options = CpuOptions { threads: Some(threads), isa: Some(isa), pin: false, precision };
    CpuBackend::new(options).expect("starts")
}

pub fn limits(max_tokens: usize, vocab_size: usize) -> StepLimits {
    StepLimits {
        max_tokens,
        max_seqs: max_tokens,
        max_logit_rows: max_tokens,
        max_samples: max_tokens,
        max_model_len: 4096,
        vocab_size,
    }
}

/// A table whose rows, looked up as tokens, are the inputs of a test.
pub fn load_inputs(backend: &mut dyn Backend, rows: usize, cols: usize, values: &[f32]) -> WeightId {
    let table = Tensor::from_f32(rows, cols, values).expect("shape");
    backend.load_weight(&[table], WeightUse::Embedding).expect("loads")
}

/// A step of these tokens without attention; all rows give logits.
pub fn tokens(ids: &[u32]) -> StepInput {
    StepInput {
        token_ids: ids.to_vec(),
        positions: (0..ids.len() as u32).collect(),
        slots: (0..ids.len() as u32).collect(),
        logit_rows: (0..ids.len() as u32).collect(),
        ..StepInput::default()
    }
}

pub fn run(backend: &mut dyn Backend, input: &StepInput, ops: &[Op]) -> Result<StepOutput, BackendError> {
    let mut output = StepOutput::default();
    let program = backend.compile(&Program::new(ops.to_vec()))?;
    backend.submit(input, program)?;
    backend.collect(&mut output)?;
    Ok(output)
}

pub fn run_and_read(backend: &mut dyn Backend, input: &StepInput, ops: &[Op], buffer: BufferId) -> Vec<f32> {
    run(backend, input, ops).expect("runs");
    backend.read_buffer(buffer, input.num_tokens()).expect("rows")
}

/// The largest difference, as a share of the largest magnitude expected.
pub fn error(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    assert!(got.iter().all(|x| x.is_finite()), "not finite: {got:?}");
    let largest = expected.iter().fold(1e-30f32, |m, x| m.max(x.abs()));
    got.iter().zip(expected).fold(0.0f32, |m, (a, b)| m.max((a - b).abs())) / largest
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

pub fn random(seed: u64) -> Random {
    Random::new(seed)
}
