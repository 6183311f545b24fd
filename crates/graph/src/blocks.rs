//! Blocks of embeddings in two tiers, and what has to move when one is needed.
//!
//! In both tiers the free list is the cache. A device block that no plan holds may be taken: if the host has its content
//! nothing moves; else it is saved first, or given up where no request needs it. A host block whose content the device has as
//! well may be taken at once; one that is the only copy of what a request needs is held.

use std::collections::BTreeSet;

use baton_backend::BlockCopy;
use baton_core::BlockId;
use baton_kv::{BlockPool, EvictionPolicy};

use crate::view::{NONE, View, ViewId};

/// The block of nodes that a block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) view: ViewId,
    pub(crate) block: u32,
}

/// What a plan makes of the tiers.
#[derive(Debug, Default)]
pub(crate) struct BlockMoves {
    /// Beside the step before.
    pub(crate) swap_out: Vec<BlockCopy>,
    pub(crate) swap_in: Vec<BlockCopy>,
    /// After those: into blocks, or of blocks, that this same plan saves.
    pub(crate) late_swap_in: Vec<BlockCopy>,
    /// Held until the moves were made: host blocks, and device blocks that are saved ahead.
    held_host: Vec<BlockId>,
    held_device: Vec<BlockId>,
    /// Host blocks that the moves write.
    written_host: BTreeSet<u32>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapCounts {
    pub swapped_out: u64,
    pub swapped_in: u64,
    /// Blocks that were saved before anybody needed theirs.
    pub saved_ahead: u64,
    /// Blocks whose content was given up.
    pub evicted: u64,
}

#[derive(Debug)]
pub(crate) struct Blocks {
    device: BlockPool,
    host: BlockPool,
    device_owners: Vec<Option<Owner>>,
    host_owners: Vec<Option<Owner>>,
    /// The device block has what no host block has.
    is_dirty: Vec<bool>,
    num_owned: usize,
    num_host_owned: usize,
    shift: u32,
    pub(crate) counts: SwapCounts,
}

impl Blocks {
    pub(crate) fn new(num_device: usize, num_host: usize, eviction: EvictionPolicy, shift: u32) -> Self {
        Self {
            device: BlockPool::new(num_device, eviction),
            host: BlockPool::new(num_host, EvictionPolicy::Lru),
            device_owners: vec![None; num_device],
            host_owners: vec![None; num_host],
            is_dirty: vec![false; num_device],
            num_owned: 0,
            num_host_owned: 0,
            shift,
            counts: SwapCounts::default(),
        }
    }

    pub(crate) fn num_device(&self) -> usize {
        self.device.num_blocks()
    }

    pub(crate) fn num_host(&self) -> usize {
        self.host.num_blocks()
    }

    /// Device blocks with content.
    pub(crate) fn num_owned(&self) -> usize {
        self.num_owned
    }

    pub(crate) fn num_host_owned(&self) -> usize {
        self.num_host_owned
    }

    /// Makes a block of nodes resident and holds it. False where that has to wait for plans that were made.
    pub(crate) fn pin(&mut self, views: &mut [Option<View>], owner: Owner, moves: &mut BlockMoves) -> bool {
        let (page, host) = {
            let view = view_of(views, owner.view);
            (view.pages[owner.block as usize], view.host[owner.block as usize])
        };
        if page != NONE {
            self.device.share(BlockId(page));
            self.device.count_hit(BlockId(page));
            return true;
        }
        let Some((block, was_saved)) = self.take_device(views, moves) else { return false };
        self.device_owners[block.index()] = Some(owner);
        self.num_owned += 1;
        view_of(views, owner.view).pages[owner.block as usize] = block.0;
        self.is_dirty[block.index()] = false;
        if host != NONE {
            // Held until the copy is made, whoever else wants host blocks.
            if view_of(views, owner.view).reserved[owner.block as usize] == 0 {
                self.host.share(BlockId(host));
            }
            moves.held_host.push(BlockId(host));
            let copy = BlockCopy { from: host, to: block.0 };
            let is_late = was_saved || moves.written_host.contains(&host);
            if is_late {
                moves.late_swap_in.push(copy);
            } else {
                moves.swap_in.push(copy);
            }
            self.counts.swapped_in += 1;
        }
        true
    }

    /// The plan writes into a block that it holds: what the host has of it is old.
    pub(crate) fn mark_written(&mut self, views: &mut [Option<View>], owner: Owner) {
        let view = view_of(views, owner.view);
        let page = view.pages[owner.block as usize] as usize;
        self.is_dirty[page] = true;
        let host = view.host[owner.block as usize];
        // One that is being copied from is left until that is done.
        if host != NONE && self.host.ref_count(BlockId(host)) == 0 {
            self.drop_host(views, BlockId(host));
            self.host.forget(BlockId(host));
        }
    }

    /// The plan that held it has run.
    pub(crate) fn unpin(&mut self, page: u32) {
        self.device.release(BlockId(page), true);
    }

    /// The moves of a plan were made.
    pub(crate) fn moves_are_done(&mut self, views: &mut [Option<View>], moves: &mut BlockMoves) {
        for host in moves.held_host.drain(..) {
            let Some(owner) = self.host_owners[host.index()] else {
                self.host.release(host, false);
                continue;
            };
            let page = view_of(views, owner.view).pages[owner.block as usize];
            let is_old = page != NONE && self.is_dirty[page as usize];
            self.host.release(host, !is_old);
            if is_old {
                self.drop_host(views, host);
            }
        }
        for block in moves.held_device.drain(..) {
            self.device.release(block, true);
        }
        moves.swap_out.clear();
        moves.swap_in.clear();
        moves.late_swap_in.clear();
        moves.written_host.clear();
    }

    /// From a share of the pool on: saves blocks that will be given up next while nobody waits for them.
    pub(crate) fn save_ahead(&mut self, views: &mut [Option<View>], high_water: f64, moves: &mut BlockMoves) {
        let num_device = self.num_device();
        if (self.num_owned as f64) < high_water * num_device as f64 || self.num_host() == 0 {
            return;
        }
        // Those that the next plans will take.
        let ahead = (num_device / 8).max(1);
        let next: Vec<BlockId> = self.device.free_blocks().take(ahead).collect();
        for block in next {
            let Some(owner) = self.device_owners[block.index()].filter(|_| self.is_dirty[block.index()])
            else {
                continue;
            };
            if view_of(views, owner.view).reserved[owner.block as usize] == 0 {
                continue;
            }
            let Some(host) = self.take_host(views) else { return };
            self.set_host(views, host, owner);
            self.is_dirty[block.index()] = false;
            // Nobody may take either block before the copy is made.
            self.device.share(block);
            moves.held_device.push(block);
            moves.held_host.push(host);
            moves.written_host.insert(host.0);
            moves.swap_out.push(BlockCopy { from: block.0, to: host.0 });
            self.counts.swapped_out += 1;
            self.counts.saved_ahead += 1;
        }
    }

    /// A request needs these blocks from now on: what is only on the host stays there.
    pub(crate) fn reserve(&mut self, views: &mut [Option<View>], owner: Owner) {
        let view = view_of(views, owner.view);
        let (page, host) = (view.pages[owner.block as usize], view.host[owner.block as usize]);
        if page == NONE && host != NONE {
            self.host.share(BlockId(host));
        }
    }

    /// No request needs the block any more.
    pub(crate) fn unreserve(&mut self, views: &mut [Option<View>], owner: Owner) {
        let view = view_of(views, owner.view);
        let (page, host) = (view.pages[owner.block as usize], view.host[owner.block as usize]);
        if page == NONE && host != NONE {
            self.host.release(BlockId(host), true);
        }
    }

    /// Forgets all blocks of a view that no plan holds and no request needs.
    pub(crate) fn forget_view(&mut self, views: &mut [Option<View>], id: ViewId) {
        for block in 0..view_of(views, id).num_blocks() {
            let view = view_of(views, id);
            let (page, host) = (view.pages[block], view.host[block]);
            if host != NONE {
                self.drop_host(views, BlockId(host));
                self.host.forget(BlockId(host));
            }
            if page != NONE {
                view_of(views, id).pages[block] = NONE;
                self.device_owners[page as usize] = None;
                self.num_owned -= 1;
                self.device.forget(BlockId(page));
            }
        }
    }

    /// A device block, and whether its old content is saved by this plan's moves.
    fn take_device(&mut self, views: &mut [Option<View>], moves: &mut BlockMoves) -> Option<(BlockId, bool)> {
        let next = self.device.free_blocks().next()?;
        let must_save = |owner: Owner| {
            let view = views[owner.view].as_ref().expect("a view stays while its blocks are owned");
            view.host[owner.block as usize] == NONE && view.reserved[owner.block as usize] > 0
        };
        if self.host.num_free() == 0 && self.device_owners[next.index()].is_some_and(must_save) {
            // Moves that were planned hold the host's blocks: they have to be made first.
            return None;
        }
        let block = self.device.take()?;
        let Some(owner) = self.device_owners[block.index()].take() else { return Some((block, false)) };
        self.num_owned -= 1;
        let view = view_of(views, owner.view);
        view.pages[owner.block as usize] = NONE;
        let is_needed = view.reserved[owner.block as usize] > 0;
        let host = view.host[owner.block as usize];
        if host != NONE {
            // The host's copy is now the only one.
            if is_needed {
                self.host.share(BlockId(host));
            }
            return Some((block, false));
        }
        // What nobody needs is saved only where that costs nothing else.
        let has_place = is_needed || self.num_host_owned < self.num_host();
        let host = if has_place { self.take_host(views) } else { None };
        let Some(host) = host else {
            debug_assert!(!is_needed, "a host block for what requests need was there a moment ago");
            view_of(views, owner.view).forget_block(owner.block, self.shift);
            self.counts.evicted += 1;
            return Some((block, false));
        };
        self.set_host(views, host, owner);
        if !is_needed {
            moves.held_host.push(host);
        }
        moves.written_host.insert(host.0);
        moves.swap_out.push(BlockCopy { from: block.0, to: host.0 });
        self.counts.swapped_out += 1;
        Some((block, true))
    }

    /// A host block that is held. Its old content is given up, or is on the device as well.
    fn take_host(&mut self, views: &mut [Option<View>]) -> Option<BlockId> {
        let host = self.host.take()?;
        if let Some(owner) = self.host_owners[host.index()] {
            self.drop_host(views, host);
            let view = view_of(views, owner.view);
            let page = view.pages[owner.block as usize];
            if page == NONE {
                view.forget_block(owner.block, self.shift);
                self.counts.evicted += 1;
            } else {
                self.is_dirty[page as usize] = true;
            }
        }
        Some(host)
    }

    fn set_host(&mut self, views: &mut [Option<View>], host: BlockId, owner: Owner) {
        self.host_owners[host.index()] = Some(owner);
        self.num_host_owned += 1;
        view_of(views, owner.view).host[owner.block as usize] = host.0;
    }

    fn drop_host(&mut self, views: &mut [Option<View>], host: BlockId) {
        if let Some(owner) = self.host_owners[host.index()].take() {
            self.num_host_owned -= 1;
            view_of(views, owner.view).host[owner.block as usize] = NONE;
        }
    }

    /// Panics where the books do not balance. `pins` are those of the plans that were not applied.
    pub(crate) fn check(&self, views: &[Option<View>], pins: &[Owner]) {
        let mut held = vec![0u32; self.num_device()];
        for pin in pins {
            let view = views[pin.view].as_ref().expect("a held view is there");
            held[view.pages[pin.block as usize] as usize] += 1;
        }
        for (block, owner) in self.device_owners.iter().enumerate() {
            let id = BlockId(block as u32);
            // Blocks being saved are held by the moves.
            assert!(self.device.ref_count(id) >= held[block], "device block {block} is held too little");
            if let Some(owner) = owner {
                let view = views[owner.view].as_ref().expect("an owner is there");
                assert_eq!(view.pages[owner.block as usize], block as u32, "device block {block}: owner");
            }
        }
        let owned = self.device_owners.iter().flatten().count();
        assert_eq!(owned, self.num_owned, "device blocks with content are counted wrong");
        assert_eq!(
            self.host_owners.iter().flatten().count(),
            self.num_host_owned,
            "host blocks are counted wrong"
        );
        for (number, view) in views.iter().enumerate() {
            let Some(view) = view else { continue };
            for block in 0..view.num_blocks() {
                let owner = Some(Owner { view: number, block: block as u32 });
                let (page, host) = (view.pages[block], view.host[block]);
                assert!(
                    page == NONE || self.device_owners[page as usize] == owner,
                    "a page has another owner"
                );
                assert!(
                    host == NONE || self.host_owners[host as usize] == owner,
                    "a host page has another owner"
                );
                if page == NONE && host != NONE && view.reserved[block] > 0 {
                    assert!(self.host.ref_count(BlockId(host)) > 0, "the only copy of a block may be taken");
                }
            }
        }
    }

    /// After all requests and plans: nothing is held.
    pub(crate) fn check_idle(&self) {
        assert_eq!(self.device.num_free(), self.num_device(), "a device block is leaked");
        assert_eq!(self.host.num_free(), self.num_host(), "a host block is leaked");
    }
}

fn view_of(views: &mut [Option<View>], id: ViewId) -> &mut View {
    views[id].as_mut().expect("a view stays while its blocks are owned")
}
