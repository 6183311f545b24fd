//! The best speed of this machine's arithmetic, measured: what `baton bench kernels` compares products with.

use std::time::{Duration, Instant};

use baton_backend::BackendError;

use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::kernels::peak::PeakKernel;

/// The best of so many runs counts: others are disturbed.
const RUNS: usize = 5;
/// A run takes at least this long.
const LEAST: Duration = Duration::from_millis(20);

/// Multiply-adds a second of all threads together, in billions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// Of bytes: the limit of quantised weights.
    pub dot_gmac_per_s: f64,
    /// Of f32: the limit of attention, and of float weights where there is nothing better for them.
    pub fma_gmac_per_s: f64,
    /// Of bf16, where there are tiles. A product with a bf16 weight takes two of these, one with an f16 weight three.
    pub bf16_gmac_per_s: Option<f64>,
}

impl Peaks {
    /// Measures `threads` threads with the instructions of `isa`; of the environment's choice or the best if `None`.
    pub fn measure(isa: Option<Isa>, threads: usize) -> Result<Self, BackendError> {
        let kernels = Kernels::new(Isa::choose(isa)?);
        Ok(Self {
            dot_gmac_per_s: best(kernels.peak_dot, threads),
            fma_gmac_per_s: best(kernels.peak_fma, threads),
            bf16_gmac_per_s: kernels.split.map(|split| best(split.peak, threads)),
        })
    }
}

fn best(kernel: PeakKernel, threads: usize) -> f64 {
    // SAFETY: `Isa::choose` has made sure that the processor has the instructions; the kernel touches nothing else.
    let run = |rounds: usize| unsafe { kernel(rounds) };
    let mut rounds = 1000;
    loop {
        let started = Instant::now();
        run(rounds);
        if started.elapsed() >= LEAST {
            break;
        }
        rounds *= 2;
    }
    let once = || {
        let started = Instant::now();
        let macs: f64 = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(|| run(rounds))).collect();
            workers.into_iter().map(|worker| worker.join().unwrap_or(0.0)).sum()
        });
        macs / started.elapsed().as_secs_f64() / 1e9
    };
    (0..RUNS).map(|_| once()).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_has_peaks_and_bytes_are_no_slower_than_floats() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let peaks = Peaks::measure(Some(isa), 1).expect("available");
            println!("{isa}: {peaks:?}");
            assert!(peaks.dot_gmac_per_s > 0.0 && peaks.fma_gmac_per_s > 0.0, "{isa}: {peaks:?}");
            if let Some(bf16) = peaks.bf16_gmac_per_s {
                assert!(bf16 > 2.0 * peaks.fma_gmac_per_s, "{isa}: {peaks:?}");
            }
            if isa >= Isa::Avx512Vnni {
                assert!(peaks.dot_gmac_per_s > 2.0 * peaks.fma_gmac_per_s, "{isa}: {peaks:?}");
            }
        }
    }
}
