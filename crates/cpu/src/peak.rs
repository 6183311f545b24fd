//! The best speed of this machine's arithmetic and memory, measured: what `baton bench kernels` compares products with.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use baton_backend::BackendError;

use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::kernels::peak::{PeakKernel, ReadKernel};
use crate::memory::AlignedBytes;

/// The best of so many runs counts: others are disturbed.
const RUNS: usize = 5;
/// A run takes at least this long.
const LEAST: Duration = Duration::from_millis(20);
/// Memory that is read, of all threads together: more than caches hold.
const READ_BYTES: usize = 512 << 20;

/// Multiply-adds and bytes a second of all threads together, in billions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// Of bytes: the limit of quantised weights.
    pub dot_gmac_per_s: f64,
    /// Of f32: the limit of attention, and of float weights where there is nothing better for them.
    pub fma_gmac_per_s: f64,
    /// Of bf16, where there are tiles. A product with a bf16 weight takes two of these.
    pub bf16_gmac_per_s: Option<f64>,
    /// Read from memory: the limit of decodes.
    pub memory_gb_per_s: f64,
}

impl Peaks {
    /// Measures `threads` threads with the instructions of `isa`; of the environment's choice or the best if `None`.
    pub fn measure(isa: Option<Isa>, threads: usize) -> Result<Self, BackendError> {
        let kernels = Kernels::new(Isa::choose(isa)?);
        Ok(Self {
            dot_gmac_per_s: best(kernels.peak_dot, threads),
            fma_gmac_per_s: best(kernels.peak_fma, threads),
            bf16_gmac_per_s: kernels.split.map(|split| best(split.peak, threads)),
            memory_gb_per_s: memory(kernels.peak_read, threads.max(1))?,
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

/// Each thread writes its memory first, so that it lies on the thread's NUMA node, and reads it while the others do.
fn memory(kernel: ReadKernel, threads: usize) -> Result<f64, BackendError> {
    let bytes = (READ_BYTES / threads).next_multiple_of(4096);
    let parts =
        (0..threads).map(|_| AlignedBytes::zeroed(bytes, "memory to read")).collect::<Result<Vec<_>, _>>()?;
    let start = Barrier::new(threads);
    let seconds = |part: &AlignedBytes| -> Vec<(Instant, Instant)> {
        // SAFETY: this thread alone has the part.
        unsafe { part.as_mut_ptr().write_bytes(0, bytes) };
        let once = |_| {
            start.wait();
            let started = Instant::now();
            // SAFETY: the processor has the instructions, and the part as many bytes.
            unsafe { kernel(part.as_mut_ptr(), bytes) };
            (started, Instant::now())
        };
        (0..RUNS).map(once).collect()
    };
    let all: Vec<Vec<(Instant, Instant)>> = std::thread::scope(|scope| {
        let readers: Vec<_> = parts.iter().map(|part| scope.spawn(|| seconds(part))).collect();
        readers.into_iter().map(|reader| reader.join().unwrap_or_default()).collect()
    });
    let run = |number: usize| -> Option<f64> {
        let first = all.iter().filter_map(|times| times.get(number)).map(|times| times.0).min()?;
        let last = all.iter().filter_map(|times| times.get(number)).map(|times| times.1).max()?;
        Some((bytes * threads) as f64 / (last - first).as_secs_f64().max(1e-9) / 1e9)
    };
    Ok((0..RUNS).filter_map(run).fold(0.0, f64::max))
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
            assert!(peaks.memory_gb_per_s > 0.1, "{isa}: {peaks:?}");
            if let Some(bf16) = peaks.bf16_gmac_per_s {
                assert!(bf16 > 2.0 * peaks.fma_gmac_per_s, "{isa}: {peaks:?}");
            }
            if isa >= Isa::Avx512Vnni {
                assert!(peaks.dot_gmac_per_s > 2.0 * peaks.fma_gmac_per_s, "{isa}: {peaks:?}");
            }
        }
    }
}
