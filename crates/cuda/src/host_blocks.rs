//! The host tier as bytes, for those who carry blocks to disks, stores and other machines.
//!
//! The device copies to and from the same pinned memory. A block that the scheduler's books hold for a reader or writer is in
//! none of its copies: those to it are done when their step was collected (the backend waits for that as soon as somebody has
//! asked for these blocks), and those from it are over when the fetch was reported.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use baton_backend::{HostBlocks, KvSpec};

use crate::pinned::PinnedMemory;

#[derive(Debug)]
pub(crate) struct CudaHostBlocks {
    pub(crate) memory: Arc<PinnedMemory>,
    /// Where each array's blocks begin, and how many bytes one has.
    pub(crate) arrays: Vec<(usize, usize)>,
    pub(crate) num_blocks: usize,
    pub(crate) layout: String,
    pub(crate) lock: Mutex<()>,
}

pub(crate) fn layout(spec: &KvSpec) -> String {
    let array = |array: &baton_backend::KvLayerSpec| format!("{}x{}", array.num_kv_heads, array.head_dim);
    let arrays: Vec<String> = spec.arrays().iter().map(array).collect();
    format!("cuda heads {:?} {} tokens: {}", spec.dtype, spec.block_size, arrays.join(", "))
}

impl CudaHostBlocks {
    fn for_pieces(&self, block: u32, len: usize, mut copy: impl FnMut(*mut u8, Range<usize>)) {
        let block = block as usize;
        assert!(block < self.num_blocks, "there is no host block {block}");
        assert_eq!(len, self.block_bytes(), "the bytes of a host block");
        let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let mut start = 0;
        for &(offset, block_bytes) in &self.arrays {
            let place = offset + block * block_bytes;
            assert!(place + block_bytes <= self.memory.bytes(), "the host tier is as large as its blocks");
            // SAFETY: the piece lies within the memory, as was just checked.
            copy(unsafe { self.memory.as_ptr().add(place) }, start..start + block_bytes);
            start += block_bytes;
        }
    }
}

impl HostBlocks for CudaHostBlocks {
    fn layout(&self) -> &str {
        &self.layout
    }

    fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    fn block_bytes(&self) -> usize {
        self.arrays.iter().map(|(_, bytes)| bytes).sum()
    }

    fn read(&self, block: u32, to: &mut [u8]) {
        self.for_pieces(block, to.len(), |piece, range| {
            let to = &mut to[range];
            // SAFETY: the piece is as long as its range; the lock keeps writers away.
            unsafe { std::ptr::copy_nonoverlapping(piece, to.as_mut_ptr(), to.len()) };
        });
    }

    fn write(&self, block: u32, from: &[u8]) {
        self.for_pieces(block, from.len(), |piece, range| {
            let from = &from[range];
            // SAFETY: the piece is as long as its range; the lock keeps all others away.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), piece, from.len()) };
        });
    }
}
