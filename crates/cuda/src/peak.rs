//! What the device can do at best, measured: what `baton bench kernels` shows its figures beside.

use baton_backend::{BackendError, RandomFill};

use crate::backend::CudaBackend;
use crate::device::Device;
use crate::gemm::{Matrices, Shape};
use crate::gpu::Timer;
use crate::params::ReadParams;
use crate::weights::fill;

/// Many times the L2.
const READ_BYTES: usize = 2 << 30;
/// Of the sides of the matrices: large enough that nothing but the tensor cores counts.
const SIDE: usize = 8192;
/// The best of so many runs counts.
const RUNS: usize = 5;

#[derive(Clone, Copy, Debug)]
pub struct Peaks {
    /// Reads from the device's memory.
    pub memory_gb_per_s: f64,
    /// Multiply-adds of bf16 on tensor cores, by cuBLASLt.
    pub tensor_gmac_per_s: f64,
}

impl CudaBackend {
    /// Reads and multiplies for a moment; takes 3 GiB of the device's memory while it does.
    pub fn measure_peaks(&mut self) -> Result<Peaks, BackendError> {
        self.device.kernels.make_ready()?;
        self.open_gemm()?;
        Ok(Peaks {
            memory_gb_per_s: READ_BYTES as f64 / self.device.read_seconds()? / 1e9,
            tensor_gmac_per_s: (SIDE as f64).powi(3) / self.device.multiply_seconds()? / 1e9,
        })
    }
}

/// Random values: a device is faster on zeros.
fn values() -> RandomFill {
    RandomFill { seed: 1, largest: 1.0 }
}

impl Device {
    fn read_seconds(&self) -> Result<f64, BackendError> {
        let gpu = &self.gpu;
        let memory = gpu.allocate(READ_BYTES, "a measurement")?;
        let sink = gpu.allocate(4, "a measurement")?;
        fill(gpu, &self.kernels, &memory, values())?;
        let params =
            ReadParams { from: memory.address(), count: READ_BYTES as u64 / 16, sink: sink.address() };
        let blocks = 4 * gpu.properties.num_multiprocessors;
        // SAFETY: the struct is the kernel's; the memory has as many units of 16 bytes.
        best(|| unsafe { gpu.launch(self.kernels.core().read_memory, (blocks, 1), 512, 0, &params) }, gpu)
    }

    fn multiply_seconds(&mut self) -> Result<f64, BackendError> {
        let Self { gpu, gemm, kernels, .. } = self;
        let gemm = gemm.as_mut().expect("opened before");
        let matrix = || {
            let memory = gpu.allocate(SIDE * SIDE * 2, "a measurement")?;
            fill(gpu, kernels, &memory, values())?;
            Ok::<_, BackendError>(memory)
        };
        let (weight, input, output) = (matrix()?, matrix()?, matrix()?);
        let matrices = Matrices {
            weight: weight.address(),
            input: input.address(),
            output: output.address(),
            scales: None,
        };
        let shape = Shape {
            m: SIDE,
            n: SIDE,
            k: SIDE,
            output_stride: SIDE,
            is_f32: false,
            is_fp8: false,
            output_alignment: 16,
        };
        // SAFETY: the addresses are matrices of the shape's sizes.
        best(|| unsafe { gemm.multiply(gpu, shape, matrices, false, Some(output.address())) }, gpu)
    }
}

fn best(
    mut work: impl FnMut() -> Result<(), BackendError>,
    gpu: &crate::gpu::Gpu,
) -> Result<f64, BackendError> {
    let timer = Timer::new()?;
    let mut best = f64::MAX;
    for _ in 0..=RUNS {
        timer.start(gpu)?;
        work()?;
        best = best.min(f64::from(timer.stop(gpu)?) / 1e3);
    }
    Ok(best.max(1e-9))
}
