//! A row of KV outside of the process: a header that says what it is, then its bytes.
//!
//! The header names the identity (model and layout), the key (group and hash, in which the tenant's salt is), the length, and a
//! checksum over all of it. With a secret the checksum is a keyed hash: who does not know the secret cannot make an entry that
//! is taken, whatever he writes into the store.

use baton_engine::{BlockHash, BlockKey, KvIdentity};

/// Bytes before the content.
pub const HEADER_BYTES: usize = 64;
const MAGIC: [u8; 4] = *b"BKV1";
const CHECKED: usize = 48;

/// What all entries of one engine share.
#[derive(Clone)]
pub struct Sealer {
    identity: [u8; 16],
    key: [u8; 32],
}

impl std::fmt::Debug for Sealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sealer({})", self.identity_hex())
    }
}

impl Sealer {
    /// The secret may be empty: then the checksum only finds accidents.
    pub fn new(identity: &KvIdentity, secret: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("baton kv entry identity 1");
        for part in [&identity.model, &identity.layout] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        for bytes in &identity.row_bytes {
            hasher.update(&(*bytes as u64).to_le_bytes());
        }
        let mut kept = [0; 16];
        kept.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Self { identity: kept, key: blake3::derive_key("baton kv entry key 1", secret.as_bytes()) }
    }

    /// 32 hex digits.
    pub fn identity_hex(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.identity))
    }

    /// The header of an entry.
    pub fn seal(&self, key: BlockKey, content: &[u8]) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..4].copy_from_slice(&MAGIC);
        header[4..8].copy_from_slice(&(key.group as u32).to_le_bytes());
        header[8..16].copy_from_slice(&(content.len() as u64).to_le_bytes());
        header[16..32].copy_from_slice(&key.hash.to_bytes());
        header[32..CHECKED].copy_from_slice(&self.identity);
        let checksum = self.checksum(&header[..CHECKED], content);
        header[CHECKED..].copy_from_slice(&checksum);
        header
    }

    /// The content of an entry, where it is the row of this key and not changed by a bit.
    pub fn open<'a>(&self, key: BlockKey, entry: &'a [u8]) -> Option<&'a [u8]> {
        let (header, content) = entry.split_at_checked(HEADER_BYTES)?;
        let fits = header[..4] == MAGIC
            && header[4..8] == (key.group as u32).to_le_bytes()
            && header[8..16] == (content.len() as u64).to_le_bytes()
            && header[16..32] == key.hash.to_bytes()
            && header[32..CHECKED] == self.identity;
        // Comparing in constant time keeps those who try from learning the checksum byte by byte.
        let is_right = || {
            let expected = self.checksum(&header[..CHECKED], content);
            header[CHECKED..].iter().zip(expected).fold(0, |differs, (got, want)| differs | (got ^ want)) == 0
        };
        (fits && is_right()).then_some(content)
    }

    fn checksum(&self, header: &[u8], content: &[u8]) -> [u8; 16] {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(header);
        hasher.update(content);
        let mut kept = [0; 16];
        kept.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        kept
    }
}

/// The name of a row in a file system or a key-value store: `group-hash`.
pub fn row_name(key: BlockKey) -> String {
    format!("{}-{}", key.group, key.hash)
}

/// What [`row_name`] has written.
pub fn parse_row_name(name: &str) -> Option<BlockKey> {
    let (group, hash) = name.split_once('-')?;
    Some(BlockKey { group: group.parse().ok()?, hash: hash.parse::<BlockHash>().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(model: &str) -> KvIdentity {
        KvIdentity { model: model.to_owned(), layout: "l".to_owned(), row_bytes: vec![5] }
    }

    fn key(token: u32) -> BlockKey {
        BlockKey { group: 0, hash: BlockHash::root(None).child(&[token]) }
    }

    #[test]
    fn only_the_right_entry_opens() {
        let sealer = Sealer::new(&identity("a"), "secret");
        let mut entry = sealer.seal(key(1), b"hello").to_vec();
        entry.extend_from_slice(b"hello");
        assert_eq!(sealer.open(key(1), &entry), Some(b"hello".as_slice()));
        assert_eq!(sealer.open(key(2), &entry), None, "another row");
        assert_eq!(sealer.open(BlockKey { group: 1, ..key(1) }, &entry), None, "another group");
        assert_eq!(Sealer::new(&identity("b"), "secret").open(key(1), &entry), None, "another model");
        assert_eq!(Sealer::new(&identity("a"), "").open(key(1), &entry), None, "another secret");
        for len in 0..entry.len() {
            assert_eq!(sealer.open(key(1), &entry[..len]), None, "cut to {len} bytes");
        }
        for byte in 0..entry.len() {
            let mut broken = entry.clone();
            broken[byte] ^= 1;
            assert_eq!(sealer.open(key(1), &broken), None, "byte {byte} changed");
        }
        entry.push(0);
        assert_eq!(sealer.open(key(1), &entry), None, "longer");
    }

    #[test]
    fn names_come_back() {
        let key = BlockKey { group: 3, ..key(7) };
        assert_eq!(parse_row_name(&row_name(key)), Some(key));
        for name in ["", "3", "3-", "x-00", "3-zz", ".tmp-1"] {
            assert_eq!(parse_row_name(name), None, "{name}");
        }
    }
}
