//! `baton bench kernels`: the device's products and attention, without a model.

use std::io::Write;

use anyhow::{Context, Result};
use baton_backend::{Backend, DeviceInfo, WeightFormat};
use baton_bench::{BenchError, KernelLimits, KernelSizes, KernelsOptions};
use baton_cuda::{CudaBackend, CudaOptions};

use super::{bar, write_result};
use crate::bench_args::KernelsArgs;
use crate::engine_args::{EngineArgs, kv_dtype, parse_dtype};
use crate::errors::hinted;
use crate::session::{cuda_options, open_backend};

pub fn run(args: &KernelsArgs, out: &mut dyn Write) -> Result<()> {
    let format = |name: &String| -> Result<WeightFormat> {
        let unknown = || hinted("--formats auto means nothing here", "name formats, for example q8_0,bf16");
        parse_dtype(name).context("--formats")?.ok_or_else(unknown)
    };
    let formats = args.formats.iter().map(format).collect::<Result<Vec<_>>>()?;
    let default = baton_engine::EngineConfig::default().kv_dtype;
    let kv_dtypes = args.kv_cache_dtypes.iter().map(|&dtype| kv_dtype(dtype, default)).collect();
    let device = open_backend(&args.engine, None)?.device();
    writeln!(out, "{}", device.description)?;
    out.flush()?;
    let cuda = cuda_options(&args.engine).filter(|_| device.name != "cpu");
    let limits = || limits(&args.engine, &device);
    let failed = |error: anyhow::Error| BenchError::Failed(format!("{error:#}"));
    let open = || open_backend(&args.engine, None).map_err(failed);
    let library = || -> Result<Box<dyn Backend>, BenchError> {
        let options = CudaOptions { library_products: true, ..cuda.clone().unwrap_or_default() };
        Ok(Box::new(CudaBackend::new(options).map_err(|error| failed(error.into()))?))
    };
    let sizes = if cuda.is_some() { KernelSizes::Large } else { KernelSizes::Small };
    let options = KernelsOptions { sizes, limits: limits()?, formats, kv_dtypes };
    let library: Option<baton_bench::Open> = cuda.is_some().then_some(&library);
    let mut result = baton_bench::kernels(&open, library, &options, &bar(&args.output, 1))?;
    // Once more: other programs may have disturbed the first.
    result.limits = result.limits.best(limits()?);
    write!(out, "{}", baton_bench::kernels_table(&result))?;
    let mut json = baton_bench::kernels_json(&result);
    json.insert("device".to_owned(), device.description.into());
    write_result(&args.output, &json)
}

/// What the device can do at best, where that can be measured.
pub(super) fn limits(args: &EngineArgs, device: &DeviceInfo) -> Result<KernelLimits> {
    match cuda_options(args).filter(|_| device.name != "cpu") {
        Some(options) => cuda_limits(&options),
        None if device.name == "cpu" => cpu_limits(args.threads),
        None => Ok(KernelLimits::default()),
    }
}

fn cuda_limits(options: &CudaOptions) -> Result<KernelLimits> {
    let peaks = CudaBackend::new(options.clone())?.measure_peaks()?;
    Ok(KernelLimits {
        memory_gb_per_s: Some(peaks.memory_gb_per_s),
        tensor_gmac_per_s: Some(peaks.tensor_gmac_per_s),
        ..KernelLimits::default()
    })
}

/// What as many threads as the backend uses can do at best.
fn cpu_limits(threads: Option<usize>) -> Result<KernelLimits> {
    let threads = threads.unwrap_or_else(|| baton_cpu::Machine::read().default_threads());
    let peaks = baton_cpu::Peaks::measure(None, threads)?;
    Ok(KernelLimits {
        memory_gb_per_s: Some(peaks.memory_gb_per_s),
        dot_gmac_per_s: Some(peaks.dot_gmac_per_s),
        fma_gmac_per_s: Some(peaks.fma_gmac_per_s),
        bf16_gmac_per_s: peaks.bf16_gmac_per_s,
        tensor_gmac_per_s: None,
    })
}
