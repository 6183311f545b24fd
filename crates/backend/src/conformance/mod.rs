//! What every backend must compute: cases for each op, run on a device and compared with the reference backend.
//!
//! A backend's tests run [`cases`] on fresh devices; so does a program on a machine with a GPU. A case says by itself what its
//! steps are and how far the device may be off. A new op brings one more case here. What only one backend promises (bits that
//! do not depend on the batch, its own instruction sets) is tested beside that backend.

mod attention;
mod encoder;
mod experts;
mod latent;
mod ops;
mod quantised;
mod sampling;
mod swap;

use std::sync::OnceLock;

use crate::testing::Random;
use crate::{
    Backend, BackendError, BufferId, Precision, ProgramId, ReferenceBackend, StepInput, StepLimits,
    StepOutput, Tensor,
};

/// Rows of the buffers of most cases.
const MAX_TOKENS: usize = 160;

/// One thing that a device must do.
pub struct Case {
    /// Begins with the op.
    pub name: String,
    check: Check,
}

/// Whose result a device's is compared with.
enum Check {
    /// The reference backend's, of the same steps.
    Reference { twin: Twin, expected: OnceLock<Result<Vec<f32>, String>>, factor: f32, rounds: bool },
    /// What the case knows without it.
    Own(OwnCheck),
}

type OwnCheck = Box<dyn Fn(&mut dyn Backend) -> Result<Outcome, BackendError> + Send + Sync>;
type Build = Box<dyn Fn(&mut dyn Backend) -> Result<Built, BackendError> + Send + Sync>;

/// A program that both devices build, and steps that both run.
struct Twin {
    build: Build,
    steps: Vec<StepInput>,
}

/// What a case looks at after each step.
struct Built {
    program: ProgramId,
    output: BufferId,
    rows: Rows,
}

/// How many rows of the output a step has.
#[derive(Clone, Copy)]
enum Rows {
    Tokens,
    Logits,
}

/// How a case went.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Passed {
        detail: String,
    },
    Failed {
        detail: String,
    },
    /// The device says itself that it cannot.
    Unsupported {
        what: String,
    },
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Case").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Every case, in the order of the ops.
pub fn cases() -> Vec<Case> {
    [
        ops::cases(),
        quantised::cases(),
        experts::cases(),
        latent::cases(),
        attention::cases(),
        encoder::cases(),
        sampling::cases(),
        swap::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

impl Case {
    fn new(
        name: String,
        steps: Vec<StepInput>,
        build: impl Fn(&mut dyn Backend) -> Result<Built, BackendError> + Send + Sync + 'static,
    ) -> Self {
        let twin = Twin { build: Box::new(build), steps };
        Self { name, check: Check::Reference { twin, expected: OnceLock::new(), factor: 1.0, rounds: false } }
    }

    /// Results that go through more roundings than one product's may be off by so many times as much.
    fn allowing(mut self, times: f32) -> Self {
        if let Check::Reference { factor, .. } = &mut self.check {
            *factor = times;
        }
        self
    }

    /// Values are rounded to a smaller type on their way, and two sums that differ in their last bit may be rounded
    /// differently, however exactly a device computes.
    fn rounding(mut self, is_so: bool) -> Self {
        if let Check::Reference { rounds, .. } = &mut self.check {
            *rounds = is_so;
        }
        self
    }

    fn own(
        name: String,
        check: impl Fn(&mut dyn Backend) -> Result<Outcome, BackendError> + Send + Sync + 'static,
    ) -> Self {
        Self { name, check: Check::Own(Box::new(check)) }
    }

    /// On a fresh device that computes with this precision.
    pub fn run(&self, device: &mut dyn Backend, precision: Precision) -> Outcome {
        self.run_allowing(1.0, device, precision)
    }

    /// The same where results may be off by so many times as much, because the device rounds more coarsely.
    pub fn run_allowing(&self, times: f32, device: &mut dyn Backend, precision: Precision) -> Outcome {
        let outcome = match &self.check {
            Check::Own(check) => check(device),
            Check::Reference { twin, expected, factor, rounds } => {
                let expected = expected.get_or_init(|| {
                    twin.run(&mut ReferenceBackend::new()).map_err(|error| error.to_string())
                });
                match expected {
                    Err(error) => Ok(Outcome::Failed { detail: format!("on the reference: {error}") }),
                    Ok(expected) => {
                        let precision = if *rounds { Precision::Fast } else { precision };
                        let allowed = times * factor * tolerance(precision);
                        twin.run(device).map(|got| compare(expected, &got, allowed))
                    }
                }
            }
        };
        outcome.unwrap_or_else(|error| match error {
            BackendError::Unsupported { what } => Outcome::Unsupported { what },
            error => Outcome::Failed { detail: error.to_string() },
        })
    }
}

impl Twin {
    /// The output of all steps.
    fn run(&self, device: &mut dyn Backend) -> Result<Vec<f32>, BackendError> {
        let Built { program, output, rows } = (self.build)(device)?;
        let mut values = Vec::new();
        for step in &self.steps {
            device.submit(step, program)?;
            device.collect(&mut StepOutput::default())?;
            let rows = match rows {
                Rows::Tokens => step.num_tokens(),
                Rows::Logits => step.logit_rows.len(),
            };
            values.extend(device.read_buffer(output, rows)?);
        }
        Ok(values)
    }
}

/// Of the largest value: of sums of f32, or of results that were rounded to bf16 or whose inputs were rounded to 8 bits.
fn tolerance(precision: Precision) -> f32 {
    match precision {
        Precision::Fast => 1.5e-2,
        Precision::Full => 1e-5,
    }
}

/// The largest difference in parts of the largest expected value. What is not finite fails.
pub fn compare(expected: &[f32], got: &[f32], allowed: f32) -> Outcome {
    let largest = expected.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    let error = expected.iter().zip(got).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs())) / largest;
    let detail = format!("error {error:.1e} of {largest:.2}, allowed {allowed:.0e}");
    let is_sound = expected.len() == got.len() && expected.iter().chain(got).all(|value| value.is_finite());
    if is_sound && error <= allowed { Outcome::Passed { detail } } else { Outcome::Failed { detail } }
}

fn limits() -> StepLimits {
    StepLimits {
        max_tokens: MAX_TOKENS,
        max_seqs: 16,
        max_logit_rows: 16,
        max_samples: 16,
        max_model_len: 2048,
        vocab_size: 1000,
    }
}

/// Values that bf16 holds exactly, so that both sides start from the same.
fn inputs(rows: usize, cols: usize, random: &mut Random) -> Tensor {
    let values: Vec<f32> =
        random.normals(rows * cols).iter().map(|value| half::bf16::from_f32(*value).to_f32()).collect();
    Tensor::from_f32(rows, cols, &values).expect("as many values as the shape says")
}

/// The tokens `0..count`, without attention.
fn tokens(count: usize) -> StepInput {
    let ids: Vec<u32> = (0..count as u32).collect();
    StepInput { token_ids: ids.clone(), positions: ids.clone(), slots: ids, ..StepInput::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reference agrees with itself, so that every case builds and runs; none is unsupported or the same as another.
    #[test]
    fn the_reference_passes() {
        let cases = cases();
        let mut names: Vec<&str> = cases.iter().map(|case| case.name.as_str()).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
        // Attention takes the oracle long: a part of its cases is enough here.
        for case in cases.iter().enumerate().filter_map(|(number, case)| {
            (!case.name.starts_with("attention") || number % 8 == 0).then_some(case)
        }) {
            let outcome = case.run(&mut ReferenceBackend::new(), Precision::Full);
            assert!(matches!(outcome, Outcome::Passed { .. }), "{}: {outcome:?}", case.name);
        }
    }

    #[test]
    fn what_is_off_fails() {
        let passes = |got: &[f32]| matches!(compare(&[1.0, -4.0], got, 1e-2), Outcome::Passed { .. });
        assert!(passes(&[1.03, -4.0]));
        assert!(!passes(&[1.05, -4.0]));
        assert!(!passes(&[1.0]));
        assert!(!passes(&[1.0, f32::NAN]));
    }
}
