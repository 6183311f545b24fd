//! The library API: KV of token sequences, stored and retrieved by tokens.
//!
//! ```text
//! store.store(&tokens, &kv);                   // whole rows of it
//! let kv = store.retrieve(&longer_tokens);     // the longest stored beginning, maybe empty
//! ```

use std::sync::Arc;

use baton_core::{BlockId, TokenId};
use baton_engine::{BlockHash, BlockKey, BlockStore, KvIdentity, StoredRow};

use crate::memory::BufferBlocks;

/// KV of the first tokens of a sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kv {
    /// A multiple of the block size.
    pub num_tokens: usize,
    /// The bytes of each row, group after group.
    pub rows: Vec<Vec<u8>>,
}

/// Any store, by tokens. Models whose layers all have full attention: with windows, a beginning is more than its rows.
#[derive(Clone, Debug)]
pub struct KvStore {
    store: Arc<dyn BlockStore>,
    row_bytes: Vec<usize>,
    block_size: usize,
    salt: Option<String>,
}

impl KvStore {
    pub fn new(store: Arc<dyn BlockStore>, identity: &KvIdentity, block_size: usize) -> Self {
        Self { store, row_bytes: identity.row_bytes.clone(), block_size: block_size.max(1), salt: None }
    }

    /// The KV of another tenant: no salt finds the rows of another.
    #[must_use]
    pub fn with_salt(mut self, salt: &str) -> Self {
        self.salt = Some(salt.to_owned());
        self
    }

    /// Keeps the KV of a sequence's first tokens.
    pub fn store(&self, tokens: &[TokenId], kv: &Kv) {
        let num_rows = kv.num_tokens.min(tokens.len()) / self.block_size;
        for (group, &row_bytes) in self.row_bytes.iter().enumerate() {
            let keys = self.keys(tokens, group);
            for (row, key) in keys.into_iter().take(num_rows).enumerate() {
                let content = kv.rows.get(group * (kv.num_tokens / self.block_size) + row);
                let Some(content) = content.filter(|content| content.len() == row_bytes) else { continue };
                let buffer = BufferBlocks::new(1, row_bytes);
                baton_backend::HostBlocks::write(&buffer, 0, content);
                self.store.store(&[StoredRow { key, blocks: vec![BlockId(0)] }], &buffer);
            }
        }
    }

    /// The KV of the longest beginning of a sequence that is there.
    pub fn retrieve(&self, tokens: &[TokenId]) -> Kv {
        let mut num_rows = tokens.len() / self.block_size;
        let mut groups: Vec<Vec<Vec<u8>>> = Vec::new();
        for (group, &row_bytes) in self.row_bytes.iter().enumerate() {
            let keys = self.keys(tokens, group);
            let found = self.store.lookup(&keys);
            num_rows = num_rows.min(found.iter().take_while(|found| **found).count());
            let block = |row: usize| StoredRow { key: keys[row], blocks: vec![BlockId(row as u32)] };
            let rows: Vec<StoredRow> = (0..num_rows).map(block).collect();
            let buffer = BufferBlocks::new(num_rows, row_bytes);
            let fetched = self.store.fetch(&rows, &buffer);
            num_rows = fetched.iter().take_while(|fetched| **fetched).count();
            let read = |row: usize| {
                let mut content = vec![0; row_bytes];
                baton_backend::HostBlocks::read(&buffer, row as u32, &mut content);
                content
            };
            groups.push((0..num_rows).map(read).collect());
        }
        let rows = groups.into_iter().flat_map(|rows| rows.into_iter().take(num_rows)).collect();
        Kv { num_tokens: num_rows * self.block_size, rows }
    }

    /// Forgets the KV of a sequence.
    pub fn remove(&self, tokens: &[TokenId]) {
        for group in 0..self.row_bytes.len() {
            self.store.remove(&self.keys(tokens, group));
        }
    }

    fn keys(&self, tokens: &[TokenId], group: usize) -> Vec<BlockKey> {
        let mut hash = BlockHash::root(self.salt.as_deref());
        let key = |row: &[TokenId]| {
            hash = hash.child(row);
            BlockKey { group, hash }
        };
        tokens.chunks_exact(self.block_size).map(key).collect()
    }
}
