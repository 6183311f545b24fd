//! The block table of one sequence, with the hash chain over its tokens.

use baton_core::{BlockId, TokenId};

use crate::BlockHash;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tier {
    Device,
    Host,
}

#[derive(Clone, Debug)]
pub(crate) struct BlockTable {
    /// Physical blocks of positions 0.., all in `tier`.
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) tier: Tier,
    pub(crate) root: BlockHash,
    /// Where a public prefix ends: the first block that belongs to the salt, and the salt's root.
    salted_from: Option<(usize, BlockHash)>,
    /// Hashes of the full blocks of known tokens. May run ahead of `blocks` (a prompt not yet computed).
    pub(crate) chain: Vec<BlockHash>,
    /// The first so many blocks have been offered to the prefix cache.
    pub(crate) num_registered: usize,
    /// Its blocks are kept for whoever begins with the same tokens, whatever else is evicted or reset.
    pub(crate) is_pinned: bool,
    /// The prefix cache was reset while this sequence held KV: what it has must not be cached any more.
    pub(crate) stale: bool,
}

impl BlockTable {
    /// The first `num_public_blocks` blocks are shared by all salts.
    pub(crate) fn new(salt: Option<&str>, num_public_blocks: usize) -> Self {
        let own_root = BlockHash::root(salt);
        let public = num_public_blocks > 0;
        Self {
            blocks: Vec::new(),
            tier: Tier::Device,
            root: if public { BlockHash::root(None) } else { own_root },
            salted_from: (public && salt.is_some()).then_some((num_public_blocks, own_root)),
            chain: Vec::new(),
            num_registered: 0,
            is_pinned: false,
            stale: false,
        }
    }

    /// Hashes full blocks of `token_ids` until the chain is `num_blocks` long.
    pub(crate) fn extend_chain(&mut self, token_ids: &[TokenId], num_blocks: usize, block_size: usize) {
        for index in self.chain.len()..num_blocks {
            let mut parent = self.parent_of(index).unwrap_or(self.root);
            if let Some((_, own_root)) = self.salted_from.filter(|(first, _)| *first == index) {
                parent = parent.salted(own_root);
            }
            self.chain.push(parent.child(&token_ids[index * block_size..(index + 1) * block_size]));
        }
    }

    /// The hash before block `index`, without the root.
    pub(crate) fn parent_of(&self, index: usize) -> Option<BlockHash> {
        index.checked_sub(1).map(|parent| self.chain[parent])
    }
}
