//! Every kernel compiles for every architecture without spilling registers. Needs NVRTC, not a GPU.

#[test]
fn every_kernel_compiles_without_spills() {
    let Some(reports) = baton_cuda::check_kernels() else {
        assert!(std::env::var_os("BATON_REQUIRE_NVRTC").is_none(), "NVRTC was not found");
        println!("no NVRTC: nothing checked");
        return;
    };
    let reports = reports.unwrap_or_else(|error| panic!("{error}"));
    let mut spilling = Vec::new();
    for report in &reports {
        println!(
            "{:>8} {:24} {:4} registers at most",
            report.architecture, report.unit, report.max_registers
        );
        spilling.extend(
            report.spills.iter().map(|line| format!("{} {}: {line}", report.architecture, report.unit)),
        );
    }
    assert!(reports.iter().all(|report| report.max_registers > 0), "the compiler gave no report");
    assert!(spilling.is_empty(), "registers are spilled:\n{}", spilling.join("\n"));
}
