//! What two processes say to each other to hand KV over.
//!
//! A frame is `length (u32), kind (u8), tag (16 bytes), body`. The tag is a keyed hash over direction, number and content of
//! the frame: who does not have the shared key can neither ask nor answer, and a frame cannot be repeated. Of a row only the
//! header is under the tag; the header holds a keyed hash of the rest.

use std::io::{self, Read};

use baton_core::TokenId;
use baton_engine::{BlockHash, BlockKey};

use crate::entry::HEADER_BYTES;

pub(crate) const FRAME_HEAD: usize = 5 + TAG;
const TAG: usize = 16;
/// Frames other than rows are never longer.
pub const MAX_BODY: usize = 32 << 20;
pub(crate) const ROW: u8 = 5;

/// Everything but a row, which is an entry as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Which of these rows are there? They may be on their way: the answer may take so long.
    Lookup {
        wait_ms: u32,
        keys: Vec<BlockKey>,
    },
    /// Send these rows, each of them a row or [`Message::Missing`].
    Fetch {
        keys: Vec<BlockKey>,
    },
    /// Compute a prompt, whose rows have these names, and keep its KV for me.
    Prefill {
        salt: Option<String>,
        num_public_tokens: u32,
        token_ids: Vec<TokenId>,
        keys: Vec<BlockKey>,
    },
    Found(Vec<bool>),
    Missing,
    /// What was asked for is done, or not.
    Done(bool),
}

impl Message {
    pub fn encode(&self) -> (u8, Vec<u8>) {
        let mut body = Vec::new();
        let kind = match self {
            Self::Lookup { wait_ms, keys } => {
                body.extend_from_slice(&wait_ms.to_le_bytes());
                put_keys(&mut body, keys);
                1
            }
            Self::Fetch { keys } => {
                put_keys(&mut body, keys);
                2
            }
            Self::Prefill { salt, num_public_tokens, token_ids, keys } => {
                body.push(u8::from(salt.is_some()));
                let salt = salt.as_deref().unwrap_or_default();
                body.extend_from_slice(&(salt.len() as u32).to_le_bytes());
                body.extend_from_slice(salt.as_bytes());
                body.extend_from_slice(&num_public_tokens.to_le_bytes());
                body.extend_from_slice(&(token_ids.len() as u32).to_le_bytes());
                for token in token_ids {
                    body.extend_from_slice(&token.to_le_bytes());
                }
                put_keys(&mut body, keys);
                3
            }
            Self::Found(found) => {
                body.extend(found.iter().map(|found| u8::from(*found)));
                4
            }
            Self::Missing => 6,
            Self::Done(is_good) => {
                body.push(u8::from(*is_good));
                7
            }
        };
        (kind, body)
    }

    /// `None` where the bytes are no such message.
    pub fn decode(kind: u8, body: &[u8]) -> Option<Self> {
        let mut rest = Reader(body);
        let message = match kind {
            1 => Self::Lookup { wait_ms: rest.u32()?, keys: rest.keys()? },
            2 => Self::Fetch { keys: rest.keys()? },
            3 => {
                let has_salt = rest.bool()?;
                let len = rest.u32()? as usize;
                let salt = String::from_utf8(rest.take(len)?.to_vec()).ok()?;
                let num_public_tokens = rest.u32()?;
                let len = rest.u32()? as usize;
                let tokens = rest.take(len.checked_mul(4)?)?;
                let token_ids =
                    tokens.as_chunks::<4>().0.iter().map(|raw| u32::from_le_bytes(*raw)).collect();
                let salt = has_salt.then_some(salt);
                Self::Prefill { salt, num_public_tokens, token_ids, keys: rest.keys()? }
            }
            4 => Self::Found(std::mem::take(&mut rest.0).iter().map(|byte| *byte == 1).collect()),
            6 => Self::Missing,
            7 => Self::Done(rest.bool()?),
            _ => return None,
        };
        rest.0.is_empty().then_some(message)
    }
}

pub(crate) fn refused(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Reads a frame, whose tag is still to be compared: its kind, its tag, and its body into `body`. A row has at most `max_row` bytes.
pub fn read_frame(stream: &mut impl Read, max_row: usize, body: &mut Vec<u8>) -> io::Result<(u8, [u8; TAG])> {
    let mut head = [0; FRAME_HEAD];
    stream.read_exact(&mut head)?;
    let (len, rest) = head.split_at(4);
    let len = u32::from_le_bytes(len.try_into().expect("four bytes")) as usize;
    let kind = rest[0];
    if len > if kind == ROW { max_row } else { MAX_BODY } {
        return Err(refused("a frame that is too long"));
    }
    if kind == ROW {
        // Rows follow rows of the same length: what is there need not be cleared to be written over.
        body.resize(len, 0);
        stream.read_exact(body)?;
    } else {
        // What is claimed is believed piece by piece, so that a length alone takes no memory.
        body.clear();
        if stream.take(len as u64).read_to_end(body)? < len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok((kind, rest[1..].try_into().expect("sixteen bytes")))
}

/// The part of a frame's body that its tag covers.
pub(crate) fn covered(kind: u8, body: &[u8]) -> &[u8] {
    if kind == ROW { &body[..body.len().min(HEADER_BYTES)] } else { body }
}

fn put_keys(body: &mut Vec<u8>, keys: &[BlockKey]) {
    body.extend_from_slice(&(keys.len() as u32).to_le_bytes());
    for key in keys {
        body.extend_from_slice(&(key.group as u16).to_le_bytes());
        body.extend_from_slice(&key.hash.to_bytes());
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    fn bool(&mut self) -> Option<bool> {
        match self.take(1)? {
            [0] => Some(false),
            [1] => Some(true),
            _ => None,
        }
    }

    fn keys(&mut self) -> Option<Vec<BlockKey>> {
        let count = self.u32()? as usize;
        let bytes = self.take(count.checked_mul(18)?)?;
        let key = |raw: &[u8; 18]| {
            let (group, hash) = raw.split_at(2);
            let group = u16::from_le_bytes(group.try_into().expect("two bytes"));
            let hash = BlockHash::from_bytes(hash.try_into().expect("sixteen bytes"));
            BlockKey { group: usize::from(group), hash }
        };
        Some(bytes.as_chunks::<18>().0.iter().map(key).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_and_nothing_else_is_one() {
        let keys: Vec<BlockKey> =
            (0..3).map(|token| BlockKey { group: 1, hash: BlockHash::root(None).child(&[token]) }).collect();
        let salt = Some("tenant".to_owned());
        let messages = [
            Message::Lookup { wait_ms: 7, keys: keys.clone() },
            Message::Fetch { keys: Vec::new() },
            Message::Prefill { salt, num_public_tokens: 3, token_ids: vec![1, 2, 3], keys },
            Message::Found(vec![true, false]),
            Message::Missing,
            Message::Done(true),
        ];
        for message in messages {
            let (kind, mut body) = message.encode();
            assert_eq!(Message::decode(kind, &body), Some(message.clone()));
            body.push(9);
            assert_ne!(Message::decode(kind, &body), Some(message.clone()), "longer");
            for len in 0..body.len() - 1 {
                assert_ne!(Message::decode(kind, &body[..len]), Some(message.clone()), "cut to {len}");
            }
        }
        assert_eq!(Message::decode(9, b""), None);
    }
}
