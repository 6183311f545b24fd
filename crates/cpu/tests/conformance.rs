//! The cases that every backend must pass, on every instruction set of this machine and in full precision.

mod common;

use baton_backend::Precision;
use baton_backend::conformance::{Outcome, cases};
use common::{cpu_of, paths, super_rounding};

/// Two halves, which run beside each other.
#[test]
fn every_even_case_passes() {
    check(0);
}

#[test]
fn every_odd_case_passes() {
    check(1);
}

fn check(half: usize) {
    let cases = cases();
    let mut failures = Vec::new();
    for (number, case) in cases.iter().enumerate().filter(|(number, _)| number % 2 == half) {
        for (index, isa) in paths().into_iter().enumerate() {
            // Attention takes the reference long: a part of it on each path, all of it on all of them together.
            if case.name.starts_with("attention") && number / 2 % paths().len() != index {
                continue;
            }
            let precisions: &[Precision] =
                if index == 0 { &[Precision::Fast, Precision::Full] } else { &[Precision::Fast] };
            for &precision in precisions {
                let times = if case.name.contains("_K") { super_rounding(isa) } else { 1.0 };
                match case.run_allowing(times, &mut cpu_of(isa, 2, precision), precision) {
                    Outcome::Passed { .. } => {}
                    Outcome::Failed { detail } => {
                        failures.push(format!("{} on {isa}, {precision:?}: {detail}", case.name));
                    }
                    Outcome::Unsupported { what } => {
                        assert!(what.contains("fp8") || what.contains("block size"), "{}: {what}", case.name);
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
}
