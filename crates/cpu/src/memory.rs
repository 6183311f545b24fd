//! Memory of the backend: aligned, zeroed, asked for politely.
//!
//! Every large request is compared with what the system says is free, so that a model which does not fit is a clear
//! error and not a killed process. Large blocks come straight from the system as untouched zero pages.

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use baton_backend::BackendError;

use crate::cgroup::{self, Group};

/// Requests below this are not worth a look at the system's counters.
const CHECKED_BYTES: usize = 1 << 20;
/// From here on memory is mapped, in whole huge pages where the system has them.
const MAPPED_BYTES: usize = 1 << 22;
/// From here up to [`MAPPED_BYTES`] memory is cut from a mapping that many share, so that they share huge pages too.
const SHARED_BYTES: usize = 1 << 14;
/// Bytes of such a mapping. What is not used of it is never touched.
const REGION_BYTES: usize = 1 << 25;
/// A cache line, and the widest vector.
const ALIGNMENT: usize = 64;

/// A mapping, given back when its last user is gone.
#[derive(Debug)]
struct Region {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: only an address range; what lies in it is governed by the `AlignedBytes` that own parts of it.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn new(len: usize) -> Option<Arc<Self>> {
        Some(Arc::new(Self { start: map_zeroed(len)?, len }))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        unmap(self.start, self.len);
    }
}

/// The region that is being cut, and how much of it is given out.
static CURRENT: Mutex<(Weak<Region>, usize)> = Mutex::new((Weak::new(), 0));

/// Zero bytes from a shared region, at most [`MAPPED_BYTES`].
fn cut(len: usize) -> Option<(NonNull<u8>, Arc<Region>)> {
    let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
    let len = len.next_multiple_of(ALIGNMENT);
    let region = if let Some(region) = current.0.upgrade().filter(|region| region.len - current.1 >= len) {
        region
    } else {
        let region = Region::new(REGION_BYTES)?;
        *current = (Arc::downgrade(&region), 0);
        region
    };
    // SAFETY: `len` bytes from here on lie within the region and were not given out before.
    let start = unsafe { region.start.add(current.1) };
    current.1 += len;
    Some((start, region))
}

/// Zeroed memory that starts on a cache line.
#[derive(Debug)]
pub struct AlignedBytes {
    start: NonNull<u8>,
    len: usize,
    /// `None` where the memory is the allocator's.
    region: Option<Arc<Region>>,
}

// SAFETY: the memory is owned and has no interior state; sharing is governed by the borrow of the owner.
unsafe impl Send for AlignedBytes {}
// SAFETY: as above; writes through shared references go through raw pointers whose users prove disjointness.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// `len` zero bytes, or an error that names `what` they were for.
    pub fn zeroed(len: usize, what: &str) -> Result<Self, BackendError> {
        let out_of_memory = || BackendError::OutOfMemory {
            what: what.to_owned(),
            needed_bytes: len as u64,
            free_bytes: SystemMemory::read().free_bytes,
        };
        if len >= CHECKED_BYTES && len as u64 > SystemMemory::read().free_bytes {
            return Err(out_of_memory());
        }
        let mapped = match len {
            0..SHARED_BYTES => None,
            SHARED_BYTES..MAPPED_BYTES => cut(len),
            MAPPED_BYTES.. => Region::new(len).map(|region| (region.start, region)),
        };
        if let Some((start, region)) = mapped {
            return Ok(Self { start, len, region: Some(region) });
        }
        let layout = Self::layout(len).ok_or_else(out_of_memory)?;
        // SAFETY: the layout has a non-zero size.
        let start = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).ok_or_else(out_of_memory)?;
        Ok(Self { start, len, region: None })
    }

    fn layout(len: usize) -> Option<Layout> {
        Layout::from_size_align(len.max(1), ALIGNMENT).ok()
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// The first byte. Writers must prove that nobody else touches what they write.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl AlignedBytes {
    /// Has the system give memory for some of the bytes before they are used, which changes nothing of what is in them. False where
    /// it cannot, or there are no such bytes.
    pub fn populate(&self, range: std::ops::Range<usize>) -> bool {
        let end = range.end.min(self.len);
        range.start < end && populate(self.start, range.start..end)
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        if self.region.is_none()
            && let Some(layout) = Self::layout(self.len)
        {
            // SAFETY: allocated in `zeroed` with this very layout.
            unsafe { std::alloc::dealloc(self.start.as_ptr(), layout) };
        }
    }
}

#[cfg(unix)]
fn map_zeroed(len: usize) -> Option<NonNull<u8>> {
    // SAFETY: a private anonymous mapping at an address of the system's choice; failure is checked below.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return None;
    }
    #[cfg(target_os = "linux")]
    // SAFETY: advice on the mapping just made; it may be refused without harm.
    unsafe {
        libc::madvise(start, len, libc::MADV_HUGEPAGE);
    }
    NonNull::new(start.cast())
}

/// In whole pages; the range lies within what was allocated.
#[cfg(target_os = "linux")]
fn populate(start: NonNull<u8>, range: std::ops::Range<usize>) -> bool {
    const PAGE: usize = 4096;
    let first = (start.as_ptr() as usize + range.start) & !(PAGE - 1);
    let end = start.as_ptr() as usize + range.end;
    // SAFETY: pages of memory that is allocated; giving them memory changes no byte.
    unsafe { libc::madvise(first as *mut libc::c_void, end - first, libc::MADV_POPULATE_WRITE) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn populate(_start: NonNull<u8>, _range: std::ops::Range<usize>) -> bool {
    false
}

#[cfg(unix)]
fn unmap(start: NonNull<u8>, len: usize) {
    // SAFETY: `start` and `len` are those of a mapping made by `map_zeroed`, given back once.
    unsafe { libc::munmap(start.as_ptr().cast(), len) };
}

#[cfg(not(unix))]
fn map_zeroed(_len: usize) -> Option<NonNull<u8>> {
    None
}

#[cfg(not(unix))]
fn unmap(_start: NonNull<u8>, _len: usize) {}

/// What the system says about its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemMemory {
    pub total_bytes: u64,
    pub free_bytes: u64,
}

impl SystemMemory {
    /// From `/proc/meminfo`, tightened by the limits of the control groups that the process is in. A system that says
    /// nothing is taken at its allocator's word.
    pub fn read() -> Self {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let memory = Self::parse(&text).unwrap_or(Self { total_bytes: u64::MAX, free_bytes: u64::MAX });
        cgroup::groups().into_iter().fold(memory, Self::within)
    }

    fn within(self, group: Group) -> Self {
        Self {
            total_bytes: self.total_bytes.min(group.limit_bytes),
            free_bytes: self.free_bytes.min(group.free_bytes()),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let kibibytes = |name: &str| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix("kB")?.trim().parse().ok()
        };
        Some(Self {
            total_bytes: kibibytes("MemTotal:")?.checked_mul(1024)?,
            free_bytes: kibibytes("MemAvailable:")?.checked_mul(1024)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_and_aligned() {
        let sizes = [0, 1, 1000, SHARED_BYTES, SHARED_BYTES + 1, MAPPED_BYTES - 1, MAPPED_BYTES + 3];
        let all = sizes.map(|len| (len, AlignedBytes::zeroed(len, "a test").expect("small")));
        for (len, bytes) in &all {
            assert_eq!(bytes.as_mut_ptr() as usize % ALIGNMENT, 0);
            // SAFETY: `len` bytes were allocated and nobody else has them.
            let slice = unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr(), *len) };
            assert!(slice.iter().all(|&byte| byte == 0));
            slice.fill(1);
        }
    }

    #[test]
    fn regions_are_shared_and_replaced_when_full() {
        let take = || AlignedBytes::zeroed(MAPPED_BYTES / 2, "a test").expect("small");
        let all: Vec<AlignedBytes> = (0..2 * REGION_BYTES / MAPPED_BYTES + 2).map(|_| take()).collect();
        let mut starts: Vec<usize> = all.iter().map(|bytes| bytes.as_mut_ptr() as usize).collect();
        starts.sort_unstable();
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= MAPPED_BYTES / 2));
    }

    #[test]
    fn too_much_is_an_error() {
        let error = AlignedBytes::zeroed(usize::MAX / 2, "the KV cache").expect_err("too much");
        assert!(matches!(error, BackendError::OutOfMemory { what, .. } if what == "the KV cache"));
    }

    #[test]
    fn meminfo_is_read() {
        let text = "MemTotal:       16 kB\nMemFree: 1 kB\nMemAvailable:    8 kB\n";
        assert_eq!(SystemMemory::parse(text), Some(SystemMemory { total_bytes: 16384, free_bytes: 8192 }));
        assert_eq!(SystemMemory::parse("nothing"), None);
    }

    #[test]
    fn a_control_group_tightens_it() {
        let memory = SystemMemory { total_bytes: 1000, free_bytes: 900 };
        let group = |limit_bytes| Group { limit_bytes, used_bytes: 300, cached_bytes: 250 };
        let tight = memory.within(group(500));
        assert_eq!(tight, SystemMemory { total_bytes: 500, free_bytes: 450 });
        assert_eq!(tight.within(group(2000)), tight);
    }
}
