//! Every op on the device of this machine, where there is one. `examples/check` does the same and more.

#[path = "../examples/check/attention.rs"]
mod attention;
#[path = "../examples/check/ops.rs"]
mod ops;
#[path = "../examples/check/sampling.rs"]
mod sampling;
#[path = "../examples/check/table.rs"]
mod table;

use std::process::ExitCode;

use baton_backend::Precision;
use baton_cuda::{CudaBackend, CudaOptions};

fn backend(precision: Precision) -> CudaBackend {
    CudaBackend::new(CudaOptions { precision, ..CudaOptions::default() }).expect("the device starts")
}

#[test]
fn every_op_agrees_with_the_reference() {
    if let Err(missing) = CudaBackend::probe() {
        println!("no CUDA device: nothing checked ({missing})");
        return;
    }
    let mut table = table::Table::default();
    ops::check(None, &mut table);
    sampling::check(&mut table);
    assert_eq!(table.finish(), ExitCode::SUCCESS, "see the lines that start with FAIL");
}
