//! Host memory that the device can copy from and read directly.
//!
//! Small pieces are allocated by the driver, which takes more than half a second a GiB, a page at a time. So larger ones are
//! mapped by us in huge pages, touched by several threads, and then registered with the driver.

use std::sync::Arc;

use baton_backend::BackendError;
use cudarc::driver::CudaContext;
use cudarc::driver::result as driver;
use cudarc::driver::sys;
use memmap2::MmapMut;

/// What is mapped by us. Even larger pieces are the driver's again, which fails where memory is short; a touched page does not.
const MAPPED_BYTES: std::ops::RangeInclusive<usize> = 32 << 20..=4 << 30;
const PAGE_BYTES: usize = 4096;
const MAX_THREADS: usize = 16;

#[derive(Debug)]
pub(crate) struct PinnedMemory {
    pointer: *mut u8,
    bytes: usize,
    /// `None`: it is the driver's.
    mapping: Option<MmapMut>,
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
        // SAFETY: the context is current; the memory is freed once, when this is dropped.
        let pointer =
            unsafe { driver::malloc_host(bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP) }.map_err(|_| {
                BackendError::OutOfMemory {
                    what: format!("{what} (pinned host memory)"),
                    needed_bytes: bytes as u64,
                    free_bytes: 0,
                }
            })?;
        Ok(Self { pointer: pointer.cast(), bytes, mapping: None, context })
    }

    /// `None` where the driver does not want it, or the device would know it by another address.
    fn register(context: &Arc<CudaContext>, mut mapping: MmapMut) -> Option<Self> {
        let (pointer, bytes) = (mapping.as_mut_ptr(), mapping.len());
        let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the range is mapped, and stays so until it is unregistered, when this is dropped.
        unsafe { sys::cuMemHostRegister_v2(pointer.cast(), bytes, flags) }.result().ok()?;
        let memory = Self { pointer, bytes, mapping: Some(mapping), context: Arc::clone(context) };
        let mut address = 0;
        // SAFETY: the range was just registered; only the address is written.
        let known = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, pointer.cast(), 0) };
        (known.result().is_ok() && address == pointer as u64).then_some(memory)
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

/// Memory full of zeros, in huge pages where the system has them, all of it there. `None` if the system refuses.
fn map(bytes: usize) -> Option<MmapMut> {
    let mut mapping = MmapMut::map_anon(bytes).ok()?;
    // Small pages do as well.
    #[cfg(target_os = "linux")]
    let _ = mapping.advise(memmap2::Advice::HugePage);
    let num_threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
    let share = bytes.div_ceil(num_threads).next_multiple_of(2 << 20);
    std::thread::scope(|scope| {
        for part in mapping.chunks_mut(share) {
            scope.spawn(|| part.iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte = 0));
        }
    });
    Some(mapping)
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        let _ = match self.mapping {
            // SAFETY: registered by `register`, which nothing else undoes; it is unmapped after this.
            Some(_) => unsafe { sys::cuMemHostUnregister(self.pointer.cast()) }.result(),
            // SAFETY: allocated by `new`, freed here only.
            None => unsafe { driver::free_host(self.pointer.cast()) },
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
