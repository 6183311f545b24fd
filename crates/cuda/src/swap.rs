//! Whole blocks on their way: copies within the device, on the stream of the steps, and swaps to and from pinned host memory,
//! on a stream of their own, so that they overlap with the steps around them.
//!
//! Swaps are in order among each other. What else must not meet is held apart by events:
//! - a swap-out reads what the step before may still be writing: it begins when that step is done, while its own step runs;
//! - a step that writes to a block begins when swap-outs have read it; those of the step itself that this concerns go first;
//! - a swap-in writes to blocks that the step before may still be reading: if it does, it is waited for;
//! - a step begins when its swap-ins are there;
//! - a fetch writes to blocks that no step uses before it was told that the fetch is done. Only copies of the step before may
//!   still be reading them: then it is waited for.
//!
//! Of the step before that nothing else is asked: older ones were collected, so they are done.

use std::collections::{HashSet, VecDeque};

use baton_backend::{BackendError, BlockCopy, StepInput};

use crate::gpu::{DeviceMemory, Event, Gpu, Stream};
use crate::kernels::Kernels;
use crate::kv::{KvCache, independent_runs};
use crate::pack::Packed;
use crate::params::{Address, MoveParams};
use crate::pinned::PinnedMemory;

/// Blocks of threads that copy within the device, and that swap: a few have enough loads in flight for the bus, and more would
/// take room from the step that runs beside them.
const COPY_GRID: u32 = 256;
const SWAP_GRID: u32 = 16;

/// The step before, which may still be running.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Previous<'a> {
    pub(crate) words: &'a [u32],
    pub(crate) packed: &'a Packed,
    pub(crate) done: &'a Event,
}

/// How the swap-outs of a step are done.
#[derive(Debug, Default, PartialEq, Eq)]
struct Order {
    /// Before the step and its swap-ins.
    first: Vec<BlockCopy>,
    /// While the step runs.
    beside: Vec<BlockCopy>,
}

#[derive(Debug)]
pub(crate) struct Swapper {
    /// Pairs of block numbers for the kernel; rewritten by each step that swaps, in the order of the stream.
    pairs: DeviceMemory,
    staging: [(PinnedMemory, Event); 2],
    next_staging: usize,
    /// The step's own swaps are as far as the step needs them.
    ready: Event,
    /// Every swap-out so far is done.
    read: Event,
    /// Device blocks that swap-outs may be reading until then.
    reading: HashSet<u32>,
    /// Fetches that were begun and not yet told to be done, oldest first.
    fetches: VecDeque<(u64, Event)>,
    shows_host_blocks: bool,
    stream: Stream,
}

impl Swapper {
    pub(crate) fn new(gpu: &Gpu, kv: &KvCache) -> Result<Self, BackendError> {
        let bytes = 8 * max_swaps(kv.num_device_blocks(), kv.num_host_blocks());
        let staging = || Ok::<_, BackendError>((gpu.allocate_pinned(bytes, "swap lists")?, Event::new()?));
        Ok(Self {
            pairs: gpu.allocate(bytes, "swap lists")?,
            staging: [staging()?, staging()?],
            next_staging: 0,
            ready: Event::new()?,
            read: Event::new()?,
            reading: HashSet::new(),
            fetches: VecDeque::new(),
            shows_host_blocks: false,
            stream: gpu.new_stream()?,
        })
    }

    /// Starts the swaps of a step and has the step's stream wait for what it needs of them.
    pub(crate) fn start(
        &mut self,
        gpu: &Gpu,
        kernels: &Kernels,
        kv: &KvCache,
        input: &StepInput,
        previous: Option<Previous<'_>>,
    ) -> Result<(), BackendError> {
        if !self.reading.is_empty() && self.read.is_done()? {
            self.reading.clear();
        }
        let swaps = !input.swap_out.is_empty() || !input.swap_in.is_empty() || !input.fetches.is_empty();
        if !swaps && self.reading.is_empty() {
            return Ok(());
        }
        let written = written_blocks(input, kv.block_shift);
        if !self.reading.is_disjoint(&written) {
            gpu.stream.wait_for(&self.read)?;
            self.reading.clear();
        }
        if !swaps {
            return Ok(());
        }
        if let Some(previous) = previous
            && (!input.swap_out.is_empty() || touches(previous, input, kv.block_shift))
        {
            self.stream.wait_for(previous.done)?;
        }
        let order = order(input, &written);
        let fetches = input.fetches.iter().map(|fetch| &fetch.copies);
        let lists = [&order.first, &input.swap_in, &order.beside].into_iter().chain(fetches);
        self.upload(lists.flatten())?;
        let host = |array: usize| kv.host_address(array);
        let device = |array: usize| kv.arrays[array].device.address();
        let mut pairs = self.pairs.address();
        let mover = |list: &[BlockCopy], pairs| Mover {
            stream: self.stream,
            grid: SWAP_GRID,
            pairs,
            runs: distinct_targets(list),
        };
        mover(&order.first, pairs).run(gpu, kernels, kv, device, host)?;
        pairs += 8 * order.first.len() as u64;
        mover(&input.swap_in, pairs).run(gpu, kernels, kv, host, device)?;
        pairs += 8 * input.swap_in.len() as u64;
        if !order.first.is_empty() || !input.swap_in.is_empty() {
            self.ready.record_on(self.stream)?;
            gpu.stream.wait_for(&self.ready)?;
        }
        mover(&order.beside, pairs).run(gpu, kernels, kv, device, host)?;
        pairs += 8 * order.beside.len() as u64;
        self.read.record_on(self.stream)?;
        self.reading.extend(order.beside.iter().map(|copy| copy.from));
        for fetch in &input.fetches {
            mover(&fetch.copies, pairs).run(gpu, kernels, kv, host, device)?;
            pairs += 8 * fetch.copies.len() as u64;
            let done = Event::new()?;
            done.record_on(self.stream)?;
            self.fetches.push_back((fetch.id, done));
        }
        Ok(())
    }

    /// Appends the fetches that are done, of all that were begun; with `waits` those are all of them.
    pub(crate) fn take_fetched(&mut self, waits: bool, fetched: &mut Vec<u64>) -> Result<(), BackendError> {
        if self.shows_host_blocks {
            self.read.wait()?;
        }
        while let Some((id, done)) = self.fetches.front() {
            if waits {
                done.wait()?;
            } else if !done.is_done()? {
                break;
            }
            fetched.push(*id);
            self.fetches.pop_front();
        }
        Ok(())
    }

    /// From now on, what a collected step has swapped out is in the host's memory: others than the device read it there.
    pub(crate) fn show_host_blocks(&mut self) {
        self.shows_host_blocks = true;
    }

    /// Brings the copies of all lists to the device, one after another.
    fn upload<'a>(&mut self, copies: impl Iterator<Item = &'a BlockCopy>) -> Result<(), BackendError> {
        let (pinned, free) = &mut self.staging[self.next_staging];
        self.next_staging ^= 1;
        // Only if swaps are two steps behind.
        free.wait()?;
        let mut num_words = 0;
        for (pair, copy) in pinned.words_mut().as_chunks_mut::<2>().0.iter_mut().zip(copies) {
            *pair = [copy.from, copy.to];
            num_words += 2;
        }
        self.stream.upload(pinned, &self.pairs, 0, 4 * num_words)?;
        free.record_on(self.stream)
    }

    pub(crate) fn synchronize(&self) -> Result<(), BackendError> {
        self.stream.synchronize()
    }
}

impl Drop for Swapper {
    fn drop(&mut self) {
        self.stream.destroy();
    }
}

/// Copies between the tiers that a step may have: each block of either is written once.
pub(crate) fn max_swaps(num_device_blocks: usize, num_host_blocks: usize) -> usize {
    num_device_blocks + num_host_blocks
}

/// The copies within the device, on the stream of the step, whose upload has brought their list.
pub(crate) fn copy_blocks(
    gpu: &Gpu,
    kernels: &Kernels,
    kv: &KvCache,
    copies: &[BlockCopy],
    pairs: Address,
) -> Result<(), BackendError> {
    let device = |array: usize| kv.arrays[array].device.address();
    let runs = independent_runs(copies);
    Mover { stream: gpu.stream, grid: COPY_GRID, pairs, runs }.run(gpu, kernels, kv, device, device)
}

/// Moves a list of blocks, one launch for each array and run of copies that may be done at once.
struct Mover {
    stream: Stream,
    grid: u32,
    pairs: Address,
    runs: Vec<std::ops::Range<usize>>,
}

impl Mover {
    fn run(
        &self,
        gpu: &Gpu,
        kernels: &Kernels,
        kv: &KvCache,
        from: impl Fn(usize) -> Address,
        to: impl Fn(usize) -> Address,
    ) -> Result<(), BackendError> {
        for run in &self.runs {
            for array in 0..kv.arrays.len() {
                let params = MoveParams {
                    from: from(array),
                    to: to(array),
                    pairs: self.pairs + 8 * run.start as u64,
                    count: run.len() as u32,
                    block_units: (kv.arrays[array].block_bytes / 16) as u32,
                };
                // SAFETY: the struct is the kernel's; the blocks were checked against both tiers.
                unsafe {
                    gpu.launch_on(self.stream, kernels.core().move_blocks, (self.grid, 1), 256, 0, &params)
                }?;
            }
        }
        Ok(())
    }
}

/// Device blocks that the step itself writes to.
fn written_blocks(input: &StepInput, block_shift: u32) -> HashSet<u32> {
    let slots = input.slots.iter().map(|slot| slot >> block_shift);
    slots.chain(input.copies.iter().map(|copy| copy.to)).collect()
}

/// Whether a step reads or writes what the next one swaps in or fetches.
fn touches(step: Previous<'_>, next: &StepInput, block_shift: u32) -> bool {
    let fetched = next.fetches.iter().flat_map(|fetch| &fetch.copies);
    let targets: HashSet<u32> = next.swap_in.iter().chain(fetched).map(|copy| copy.to).collect();
    let mut pages = step.words[step.packed.pages.clone()].iter();
    let mut slots = step.words[step.packed.slots.clone()].iter();
    let mut copies = step.words[step.packed.copies.clone()].iter();
    pages.any(|page| targets.contains(page))
        || slots.any(|slot| targets.contains(&(slot >> block_shift)))
        || copies.any(|block| targets.contains(block))
}

/// First what the step or its swap-ins write to, or its swap-ins read.
fn order(input: &StepInput, written: &HashSet<u32>) -> Order {
    let (targets, sources): (HashSet<u32>, HashSet<u32>) =
        input.swap_in.iter().map(|copy| (copy.to, copy.from)).unzip();
    let is_first = |copy: &BlockCopy| {
        written.contains(&copy.from) || targets.contains(&copy.from) || sources.contains(&copy.to)
    };
    let (first, beside) = input.swap_out.iter().partition(|copy| is_first(copy));
    Order { first, beside }
}

/// Cuts a list of swaps wherever a block is written a second time. The two sides of a swap are different memory.
fn distinct_targets(list: &[BlockCopy]) -> Vec<std::ops::Range<usize>> {
    let (mut runs, mut seen, mut start) = (Vec::new(), HashSet::new(), 0);
    for (i, copy) in list.iter().enumerate() {
        if !seen.insert(copy.to) {
            runs.push(start..i);
            seen = HashSet::from([copy.to]);
            start = i;
        }
    }
    if start < list.len() {
        runs.push(start..list.len());
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copies(pairs: &[(u32, u32)]) -> Vec<BlockCopy> {
        pairs.iter().map(|&(from, to)| BlockCopy { from, to }).collect()
    }

    #[test]
    fn what_the_step_needs_is_swapped_out_first() {
        let input = StepInput {
            swap_out: copies(&[(1, 10), (2, 11), (3, 12), (4, 13), (5, 14)]),
            swap_in: copies(&[(20, 3), (14, 9)]),
            copies: copies(&[(7, 4)]),
            slots: vec![16, 17],
            ..StepInput::default()
        };
        let written = written_blocks(&input, 4);
        assert_eq!(written, HashSet::from([1, 4]));
        let order = order(&input, &written);
        // Written by the step, a target of a swap-in, a target of a copy, read by a swap-in.
        assert_eq!(order.first, copies(&[(1, 10), (3, 12), (4, 13), (5, 14)]));
        assert_eq!(order.beside, copies(&[(2, 11)]));
    }

    #[test]
    fn a_block_is_not_written_twice_at_once() {
        assert!(distinct_targets(&[]).is_empty());
        assert_eq!(distinct_targets(&copies(&[(0, 1), (1, 2), (1, 0)])), vec![0..3; 1]);
        assert_eq!(distinct_targets(&copies(&[(0, 1), (2, 1), (3, 1), (4, 5)])), [0..1, 1..2, 2..4]);
    }
}
