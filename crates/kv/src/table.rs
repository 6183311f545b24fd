//! The block tables of one sequence, with the hash chain over its tokens.

use baton_core::{BlockId, TokenId};

use crate::{BlockHash, NO_BLOCK};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tier {
    Device,
    Host,
}

#[derive(Clone, Debug)]
pub(crate) struct SequenceTable {
    /// By group, then by row: bundles of `tier`. All groups have as many rows; those behind a group's window are
    /// [`NO_BLOCK`].
    pub(crate) groups: Vec<Vec<BlockId>>,
    pub(crate) tier: Tier,
    pub(crate) root: BlockHash,
    /// Where a public prefix ends: the first row that belongs to the salt, and the salt's root.
    salted_from: Option<(usize, BlockHash)>,
    /// Hashes of the full rows of known tokens. May run ahead of the rows (a prompt not yet computed).
    pub(crate) chain: Vec<BlockHash>,
    /// The first so many rows have been offered to the prefix cache.
    pub(crate) num_registered: usize,
    /// Its blocks are kept for whoever begins with the same tokens, whatever else is evicted or reset.
    pub(crate) is_pinned: bool,
    /// The prefix cache was reset while this sequence held KV: what it has must not be cached any more.
    pub(crate) stale: bool,
    /// Bundles of the host tier that are being copied to the device.
    pub(crate) fetching: Vec<BlockId>,
}

impl SequenceTable {
    /// The first `num_public_rows` rows are shared by all salts.
    pub(crate) fn new(salt: Option<&str>, num_public_rows: usize, num_groups: usize) -> Self {
        let own_root = BlockHash::root(salt);
        let public = num_public_rows > 0;
        Self {
            groups: vec![Vec::new(); num_groups],
            tier: Tier::Device,
            root: if public { BlockHash::root(None) } else { own_root },
            salted_from: (public && salt.is_some()).then_some((num_public_rows, own_root)),
            chain: Vec::new(),
            num_registered: 0,
            is_pinned: false,
            stale: false,
            fetching: Vec::new(),
        }
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.groups[0].len()
    }

    /// Every bundle with its group and row.
    pub(crate) fn bundles(&self) -> impl Iterator<Item = (usize, usize, BlockId)> + '_ {
        let of_group = |(group, rows): (usize, &'_ Vec<BlockId>)| {
            let held = rows.iter().copied().enumerate().filter(|(_, bundle)| *bundle != NO_BLOCK);
            held.map(move |(row, bundle)| (group, row, bundle)).collect::<Vec<_>>()
        };
        self.groups.iter().enumerate().flat_map(of_group)
    }

    /// Hashes full rows of `token_ids` until the chain is `num_rows` long.
    pub(crate) fn extend_chain(&mut self, token_ids: &[TokenId], num_rows: usize, block_size: usize) {
        for index in self.chain.len()..num_rows {
            let mut parent = self.parent_of(index).unwrap_or(self.root);
            if let Some((_, own_root)) = self.salted_from.filter(|(first, _)| *first == index) {
                parent = parent.salted(own_root);
            }
            self.chain.push(parent.child(&token_ids[index * block_size..(index + 1) * block_size]));
        }
    }

    /// The hash before row `index`, without the root.
    pub(crate) fn parent_of(&self, index: usize) -> Option<BlockHash> {
        index.checked_sub(1).map(|parent| self.chain[parent])
    }
}
