//! The conformance cases on the device of this machine, where there is one. `examples/gpu_conformance` does the same and more.

use baton_backend::Precision;
use baton_backend::conformance::{Outcome, cases};
use baton_cuda::{CudaBackend, CudaOptions};

#[test]
fn every_case_passes() {
    if let Err(missing) = CudaBackend::probe() {
        println!("no CUDA device: nothing checked ({missing})");
        return;
    }
    let mut failures = Vec::new();
    for case in cases() {
        let mut device = CudaBackend::new(CudaOptions::default()).expect("the device starts");
        if let Outcome::Failed { detail } = case.run(&mut device, Precision::Fast) {
            failures.push(format!("{}: {detail}", case.name));
        }
    }
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
}
