//! The name of a block's content: a hash over all tokens from the start of the sequence to the end of the block.
//!
//! Each block is hashed together with its parent's hash, so equal names mean equal prefixes. The root carries the
//! salt of the tenant: requests of different salts can never find each other's blocks. Where a prefix was declared
//! public, the salt enters only after its last full block. The hash is cryptographic because a client chooses the tokens: a forged collision would show one tenant the KV of another.

use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::str::FromStr;

use baton_core::{BlockId, TokenId};
use serde::{Deserialize, Serialize};

/// 128 bits of the blake3 chain. Printed and serialised as 32 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct BlockHash(u128);

impl BlockHash {
    /// The parent of every first block of this salt.
    pub fn root(salt: Option<&str>) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("baton kv prefix root");
        // "No salt" and "the empty salt" are two different tenants.
        hasher.update(&[u8::from(salt.is_some())]);
        hasher.update(salt.unwrap_or_default().as_bytes());
        Self::keep(&hasher)
    }

    /// The block that follows this one and holds `token_ids`.
    #[must_use]
    pub fn child(self, token_ids: &[TokenId]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.0.to_le_bytes());
        let mut bytes = [0u8; 256];
        for part in token_ids.chunks(bytes.len() / 4) {
            for (slot, token) in bytes.chunks_exact_mut(4).zip(part) {
                slot.copy_from_slice(&token.to_le_bytes());
            }
            hasher.update(&bytes[..part.len() * 4]);
        }
        Self::keep(&hasher)
    }

    /// From here on the chain belongs to one salt: the last name that all salts share, joined with the salt's root.
    #[must_use]
    pub(crate) fn salted(self, root: Self) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("baton kv end of a public prefix");
        hasher.update(&self.0.to_le_bytes());
        hasher.update(&root.0.to_le_bytes());
        Self::keep(&hasher)
    }

    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }

    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_le_bytes(bytes))
    }

    /// Half of the hash, for those who name blocks by 64 bits, as vLLM's events do.
    pub fn low_bits(self) -> u64 {
        self.0 as u64
    }

    fn keep(hasher: &blake3::Hasher) -> Self {
        let mut kept = [0u8; 16];
        kept.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Self(u128::from_le_bytes(kept))
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHash({self})")
    }
}

impl From<BlockHash> for String {
    fn from(hash: BlockHash) -> Self {
        hash.to_string()
    }
}

impl FromStr for BlockHash {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.len() != 32 {
            return Err(format!("a block hash has 32 hex digits, got {} characters", text.len()));
        }
        u128::from_str_radix(text, 16).map(Self).map_err(|error| format!("not a block hash: {error}"))
    }
}

impl TryFrom<String> for BlockHash {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Finds blocks by name. The names are hashes already, so the map takes their low bits as they are.
pub(crate) type HashIndex = std::collections::HashMap<BlockHash, BlockId, BuildHasherDefault<LowBits>>;

#[derive(Default)]
pub(crate) struct LowBits(u64);

impl Hasher for LowBits {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 << 8) ^ u64::from(byte);
        }
    }

    fn write_u128(&mut self, value: u128) {
        self.0 = value as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_depends_on_salt_parent_and_tokens() {
        let roots = [BlockHash::root(None), BlockHash::root(Some("")), BlockHash::root(Some("a"))];
        let mut names: Vec<BlockHash> = roots
            .iter()
            .flat_map(|root| [*root, root.child(&[1, 2]), root.child(&[2, 1]), root.child(&[1]).child(&[2])])
            .collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 12);
        assert_eq!(BlockHash::root(Some("a")).child(&[7; 100]), BlockHash::root(Some("a")).child(&[7; 100]));
    }

    #[test]
    fn long_blocks_are_hashed_whole() {
        let tokens: Vec<TokenId> = (0..200).collect();
        let mut changed = tokens.clone();
        changed[199] = 0;
        let root = BlockHash::root(None);
        assert_ne!(root.child(&tokens), root.child(&changed));
        assert_ne!(root.child(&tokens), root.child(&tokens[..199]));
    }

    #[test]
    fn text_form_comes_back() {
        let hash = BlockHash::root(Some("tenant"));
        assert_eq!(hash.to_string().parse(), Ok(hash));
        assert!("12".parse::<BlockHash>().is_err());
        assert!("g".repeat(32).parse::<BlockHash>().is_err());
    }
}
