//! What of CUDA this machine has. Asking never fails and never panics: a machine without a GPU is a normal machine.

use std::path::PathBuf;

use baton_backend::{AttentionTuning, BackendError, DeviceInfo, Sharing};
use cudarc::driver::result as driver;
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use thiserror::Error;

use crate::backend::BLOCK_SIZE;
use crate::compile::HEAD_DIMS;

/// Why CUDA cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Missing {
    #[error("no NVIDIA driver was found (libcuda.so.1)")]
    Driver,
    #[error("the NVIDIA driver found no device: {cause}")]
    Device { cause: String },
    #[error(
        "{library} was not found: install the CUDA toolkit's runtime libraries (13.x, or 12.8 and later) or add their folder to LD_LIBRARY_PATH"
    )]
    Library { library: &'static str },
}

/// Why a device did not start.
#[derive(Debug, Error)]
pub enum StartError {
    #[error("CUDA: {0}")]
    Missing(#[from] Missing),
    #[error(transparent)]
    Device(#[from] BackendError),
}

/// What the rest of the crate wants to know about a device.
#[derive(Clone, Debug)]
pub(crate) struct Properties {
    pub(crate) ordinal: usize,
    pub(crate) name: String,
    /// Compute capability, such as (9, 0).
    pub(crate) capability: (i32, i32),
    pub(crate) num_multiprocessors: u32,
    pub(crate) shared_bytes_per_multiprocessor: u32,
    pub(crate) total_bytes: u64,
}

/// The devices of this machine. With them the compiler is there, but not yet cuBLASLt.
pub(crate) fn probe() -> Result<Vec<Properties>, Missing> {
    // SAFETY: only tries to open a library by its usual names.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err(Missing::Driver);
    }
    // From a cold disk this takes as long as starting the driver.
    let compiler = std::thread::spawn(open_compiler);
    let device = |error: driver::DriverError| Missing::Device { cause: error.to_string() };
    driver::init().map_err(device)?;
    let count = driver::device::get_count().map_err(device)?;
    if count == 0 {
        return Err(Missing::Device { cause: "there is none".to_owned() });
    }
    let devices = (0..count).map(|ordinal| properties(ordinal).map_err(device)).collect::<Result<_, _>>()?;
    if !compiler.join().expect("opening a library does not panic") {
        return Err(Missing::Library { library: "NVRTC (libnvrtc.so)" });
    }
    Ok(devices)
}

/// False where it is missing. Otherwise it stays open, and so does another one that it opens with the first program.
fn open_compiler() -> bool {
    use cudarc::nvrtc::{result as nvrtc, sys};
    // SAFETY: only tries to open a library.
    if !unsafe { sys::is_culib_present() } {
        return false;
    }
    let Ok(program) = nvrtc::create_program(c"", None) else { return false };
    // SAFETY: the program was just made; nothing uses it after this.
    unsafe {
        let _ = nvrtc::compile_program::<&str>(program, &[]);
        nvrtc::destroy_program(program).is_ok()
    }
}

/// It stays open: the first call of a function does that, from a cold disk in half a second.
pub(crate) fn open_gemm() -> Result<(), Missing> {
    use cudarc::cublaslt::sys;
    // SAFETY: the first only tries to open a library, the second reads a number.
    let is_there = unsafe { sys::is_culib_present() && sys::cublasLtGetVersion() > 0 };
    if is_there { Ok(()) } else { Err(Missing::Library { library: "cuBLASLt (libcublasLt.so)" }) }
}

/// Finds out whether cuBLASLt is missing, without opening it where it seems to be there: that takes long, and can wait.
pub(crate) fn look_for_gemm() -> Result<(), Missing> {
    let cache = std::fs::read("/etc/ld.so.cache").unwrap_or_default();
    let folders = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    if is_listed("libcublasLt.so", &cache, std::env::split_paths(&folders)) { Ok(()) } else { open_gemm() }
}

/// A library is in the loader's cache or in a folder where the loader looks.
fn is_listed(name: &str, cache: &[u8], mut folders: impl Iterator<Item = PathBuf>) -> bool {
    let is_named = |file: std::io::Result<std::fs::DirEntry>| {
        file.is_ok_and(|file| file.file_name().as_encoded_bytes().starts_with(name.as_bytes()))
    };
    cache.windows(name.len()).any(|part| part == name.as_bytes())
        || folders.any(|folder| std::fs::read_dir(folder).is_ok_and(|mut files| files.any(is_named)))
}

fn properties(ordinal: i32) -> Result<Properties, driver::DriverError> {
    let device = driver::device::get(ordinal)?;
    // SAFETY: the device handle was just given out by the driver.
    let attribute = |attribute| unsafe { driver::device::get_attribute(device, attribute) };
    // SAFETY: as above.
    let total_bytes = unsafe { driver::device::total_mem(device) }? as u64;
    Ok(Properties {
        ordinal: ordinal as usize,
        name: driver::device::get_name(device)?,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        num_multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        shared_bytes_per_multiprocessor: attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
        )? as u32,
        total_bytes,
    })
}

/// Measured on an H200 (`baton bench relay --parts operator`), where sequences that read the same keys for themselves find many
/// of them in the L2 and reach 8 TB/s: 14 us per layer for the launches, 35 ns per query to merge.
const SHARING_COSTS: Sharing = Sharing {
    border: 0,
    head_dims: &[],
    min_seqs: 0,
    units: 0,
    read_cost: 2,
    query_bytes: 290 << 10,
    step_bytes: 112 << 20,
};

impl Properties {
    pub(crate) fn info(&self, free_bytes: u64) -> DeviceInfo {
        let (major, minor) = self.capability;
        DeviceInfo {
            name: format!("cuda:{}", self.ordinal),
            description: format!(
                "{}, sm_{major}{minor}, {} multiprocessors, {:.0} GiB",
                self.name,
                self.num_multiprocessors,
                self.total_bytes as f64 / f64::from(1 << 30)
            ),
            total_bytes: self.total_bytes,
            free_bytes,
            block_size: BLOCK_SIZE,
            activation_bytes: 2,
            kv_cap_bytes: None,
            max_steps_in_flight: 2,
            wants_large_steps: true,
            attention: AttentionTuning {
                // Two blocks of the decode kernel a multiprocessor; a block of the other one has 128 rows.
                units: 2 * self.num_multiprocessors as usize,
                rows: 128,
                decode_rows: 16,
                decode_bytes: 64 << 20,
                sharing: Sharing {
                    // A tile of keys.
                    border: 64,
                    head_dims: &HEAD_DIMS,
                    min_seqs: 2,
                    // A block of the kernel for many rows has a multiprocessor of its own.
                    units: self.num_multiprocessors as usize,
                    ..SHARING_COSTS
                },
                partial_bytes: 0,
            },
            max_sample_entries: crate::pack::MAX_SAMPLE_ENTRIES,
            // About half of what cuBLASLt reaches on large products: prompts are not all large.
            macs_per_second: f64::from(self.num_multiprocessors) * 1.5e12,
            swap_bytes_per_second: 4e10,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compiler_opens_where_there_is_one() {
        // SAFETY: only tries to open a library.
        assert_eq!(open_compiler(), unsafe { cudarc::nvrtc::sys::is_culib_present() });
    }

    #[test]
    fn libraries_are_found_without_opening_them() {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let folders = || [PathBuf::from("/no/such/folder"), folder.clone()].into_iter();
        assert!(is_listed("libx.so", b"..liby.so\0libx.so.13\0..", std::iter::empty()));
        assert!(is_listed("Cargo.to", b"", folders()));
        assert!(!is_listed("libx.so", b"libx.s", folders()));
        assert!(!is_listed("libx.so", b"", std::iter::empty()));
    }
}
