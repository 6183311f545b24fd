//! Results, one line each, and whether any was bad.

use std::process::ExitCode;

#[derive(Debug, Default)]
pub struct Table {
    checks: usize,
    failures: usize,
}

impl Table {
    /// The largest difference in parts of the largest expected value. NaN fails.
    pub fn compare(&mut self, what: &str, expected: &[f32], got: &[f32], tolerance: f32) {
        let largest = expected.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        let is_broken = expected.len() != got.len() || got.iter().any(|value| !value.is_finite());
        let error = expected.iter().zip(got).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs())) / largest;
        self.line(
            what,
            !is_broken && error <= tolerance,
            &format!("error {error:.1e} of {largest:.2}, allowed {tolerance:.0e}"),
        );
    }

    pub fn line(&mut self, what: &str, is_good: bool, detail: &str) {
        self.checks += 1;
        self.failures += usize::from(!is_good);
        println!("{} {what:64} {detail}", if is_good { "ok  " } else { "FAIL" });
    }

    pub fn finish(&self) -> ExitCode {
        println!("{} checks, {} failed", self.checks, self.failures);
        if self.failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
