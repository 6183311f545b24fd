//! Host memory that the device can copy from and read directly.
//!
//! Small pieces are allocated by the driver, which takes more than half a second per GiB, a page at a time. So larger ones are
//! mapped by us in huge pages, touched by several threads, and then registered with the driver; the swap space, which may be
//! most of the machine's memory, in parts by as many threads, each part as long as the system still has memory for it: a
//! touched page that is not there ends the process, and no error is told.

use std::slice::ChunksMut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use baton_backend::BackendError;
use cudarc::driver::CudaContext;
use cudarc::driver::result as driver;
use cudarc::driver::sys;
use memmap2::MmapMut;

/// What is mapped by us and registered as one: the driver's copies stay within one registration.
const MAPPED_BYTES: std::ops::RangeInclusive<usize> = 32 << 20..=4 << 30;
/// What is larger is registered in parts of so many bytes, which kernels read as one.
const PART_BYTES: usize = 1 << 30;
/// The system keeps so much.
const SPARE_BYTES: usize = 1 << 30;
const PAGE_BYTES: usize = 4096;
const MAX_THREADS: usize = 16;

#[derive(Debug)]
pub(crate) struct PinnedMemory {
    pointer: *mut u8,
    bytes: usize,
    /// `None`: it is the driver's.
    mapping: Option<MmapMut>,
    /// Where registered parts of the mapping begin.
    parts: Vec<usize>,
    context: Arc<CudaContext>,
}

// SAFETY: plain memory, owned by this.
unsafe impl Send for PinnedMemory {}
// SAFETY: shared references read it, or hand out its address to those who answer for what they do there.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// The context is the calling thread's.
    pub(crate) fn new(context: Arc<CudaContext>, bytes: usize, what: &str) -> Result<Self, BackendError> {
        let bytes = bytes.max(1);
        if MAPPED_BYTES.contains(&bytes)
            && let Some(mapping) = map(bytes)
            && let Some(memory) = Self::register(&context, mapping)
        {
            return Ok(memory);
        }
        if bytes > *MAPPED_BYTES.end() {
            return Self::in_parts(context, bytes, what);
        }
        // SAFETY: the context is current; the memory is freed once, when this is dropped.
        let pointer =
            unsafe { driver::malloc_host(bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP) }.map_err(|_| {
                BackendError::OutOfMemory {
                    what: format!("{what} (pinned host memory)"),
                    needed_bytes: bytes as u64,
                    free_bytes: 0,
                }
            })?;
        Ok(Self { pointer: pointer.cast(), bytes, mapping: None, parts: Vec::new(), context })
    }

    /// `None` where the driver does not want it, or the device would know it by another address.
    fn register(context: &Arc<CudaContext>, mut mapping: MmapMut) -> Option<Self> {
        let (pointer, bytes) = (mapping.as_mut_ptr(), mapping.len());
        let parts = vec![register(pointer, bytes)?];
        Some(Self { pointer, bytes, mapping: Some(mapping), parts, context: Arc::clone(context) })
    }

    /// Maps a large piece, and touches and registers its parts on several threads.
    fn in_parts(context: Arc<CudaContext>, bytes: usize, what: &str) -> Result<Self, BackendError> {
        let gib = |bytes: f64| bytes / f64::from(1 << 30);
        let out_of_memory = || BackendError::Unsupported {
            what: format!(
                "with {:.1} GiB for {what} in the host's memory, of which {:.1} GiB are free: lower --swap-space",
                gib(bytes as f64),
                gib(free_bytes() as f64)
            ),
        };
        let mut mapping = map_untouched(bytes).ok_or_else(out_of_memory)?;
        let pointer = mapping.as_mut_ptr();
        let (is_whole, parts) = register_parts(&context, mapping.chunks_mut(PART_BYTES));
        // Where something failed, what was registered is given back when this is dropped.
        let memory = Self { pointer, bytes, mapping: Some(mapping), parts, context };
        if is_whole { Ok(memory) } else { Err(out_of_memory()) }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.pointer
    }

    /// Pinned memory has the same address on the device (unified addressing, which every supported device has).
    pub(crate) fn address(&self) -> u64 {
        self.pointer as u64
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: the allocation is this long and zeroed or written by the driver; reads of unfinished copies are prevented
        // by waiting for their step.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }

    pub(crate) fn words(&self) -> &[u32] {
        // SAFETY: page-aligned, so aligned for u32; any bits are a u32.
        unsafe { std::slice::from_raw_parts(self.pointer.cast(), self.bytes / 4) }
    }

    pub(crate) fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: as above, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.cast(), self.bytes / 4) }
    }
}

/// Makes mapped memory known to the driver. Returns where it begins; `None` where the driver does not want it, or the device would
/// know it by another address. The context is the calling thread's.
fn register(pointer: *mut u8, bytes: usize) -> Option<usize> {
    let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP;
    // SAFETY: the range is mapped, and stays so until it is unregistered.
    unsafe { sys::cuMemHostRegister_v2(pointer.cast(), bytes, flags) }.result().ok()?;
    let mut address = 0;
    // SAFETY: the range was just registered; only the address is written.
    let known = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, pointer.cast(), 0) };
    if known.result().is_ok() && address == pointer as u64 {
        return Some(pointer as usize);
    }
    unregister(pointer as usize);
    None
}

/// Touches and registers parts of a mapping on several threads. Returns whether that are all, and where they begin.
fn register_parts(context: &Arc<CudaContext>, parts: ChunksMut<'_, u8>) -> (bool, Vec<usize>) {
    let parts = Mutex::new(parts);
    let registered = Mutex::new(Vec::new());
    let touching = AtomicUsize::new(0);
    let work = || -> Option<()> {
        context.bind_to_thread().ok()?;
        loop {
            let part = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(part) = part else { return Some(()) };
            // What others are touching may not be in the system's figures yet.
            let promised = touching.fetch_add(part.len(), Ordering::SeqCst) + part.len() + SPARE_BYTES;
            if promised as u64 > free_bytes() {
                return None;
            }
            touch(part);
            touching.fetch_sub(part.len(), Ordering::SeqCst);
            let start = register(part.as_mut_ptr(), part.len())?;
            registered.lock().unwrap_or_else(PoisonError::into_inner).push(start);
        }
    };
    let is_whole = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..num_threads()).map(|_| scope.spawn(work)).collect();
        threads.into_iter().all(|thread| matches!(thread.join(), Ok(Some(()))))
    });
    (is_whole, registered.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn unregister(start: usize) {
    // SAFETY: only what `register` has registered is given to this, once.
    let _ = unsafe { sys::cuMemHostUnregister(start as *mut std::ffi::c_void) }.result();
}

/// Memory full of zeros, in huge pages where the system has them, none of it there yet. `None` if the system refuses.
fn map_untouched(bytes: usize) -> Option<MmapMut> {
    let mapping = MmapMut::map_anon(bytes).ok()?;
    // Small pages do as well.
    #[cfg(target_os = "linux")]
    let _ = mapping.advise(memmap2::Advice::HugePage);
    Some(mapping)
}

fn touch(part: &mut [u8]) {
    part.iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte = 0);
}

/// What the system can still give; where it does not say, all.
fn free_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    parse_free_bytes(&text).unwrap_or(u64::MAX)
}

fn parse_free_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn num_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS)
}

/// The same, all of it there.
fn map(bytes: usize) -> Option<MmapMut> {
    let mut mapping = map_untouched(bytes)?;
    let share = bytes.div_ceil(num_threads()).next_multiple_of(2 << 20);
    std::thread::scope(|scope| {
        for part in mapping.chunks_mut(share) {
            scope.spawn(move || touch(part));
        }
    });
    Some(mapping)
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        self.parts.drain(..).for_each(unregister);
        if self.mapping.is_none() {
            // SAFETY: allocated by `new`, freed here only.
            let _ = unsafe { driver::free_host(self.pointer.cast()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_says_what_is_free() {
        assert_eq!(parse_free_bytes("MemTotal:  16 kB\nMemAvailable:    8 kB\n"), Some(8192));
        assert_eq!(parse_free_bytes("nothing"), None);
    }

    #[test]
    fn mapped_memory_is_zeroed_and_writable_to_its_end() {
        for bytes in [1, PAGE_BYTES + 1, (5 << 20) + 3] {
            let mut mapping = map(bytes).expect("a little memory");
            assert_eq!(mapping.len(), bytes);
            assert!(mapping.iter().all(|byte| *byte == 0));
            mapping.fill(1);
        }
    }
}
