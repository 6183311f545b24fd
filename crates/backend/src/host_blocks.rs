//! The blocks of the host tier, for those who carry them to disks, stores and other machines.

use std::fmt::Debug;

/// Host blocks as bytes. Any thread may read and write them beside the steps; the device's own moves and these never meet.
///
/// Who calls must hold the block in the scheduler's books, so that no step uses it for something else meanwhile: else the bytes
/// may be of either, but nothing worse happens.
pub trait HostBlocks: Debug + Send + Sync {
    /// How the bytes of a block are laid out, in words. Blocks may be exchanged where these are equal, and nowhere else.
    fn layout(&self) -> &str;

    fn num_blocks(&self) -> usize;

    fn block_bytes(&self) -> usize;

    /// # Panics
    /// Where there is no such block, or `to` is not as long as one.
    fn read(&self, block: u32, to: &mut [u8]);

    /// # Panics
    /// Where there is no such block, or `from` is not as long as one.
    fn write(&self, block: u32, from: &[u8]);
}
