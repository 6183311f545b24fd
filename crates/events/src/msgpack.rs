//! The part of MessagePack that KV events use. vLLM writes a batch and its events as arrays, an event's name first; maps with a
//! `type` are read as well. Every length is checked against the bytes that are there before anything is allocated.

use crate::wire::{Event, EventBatch};

/// Nested deeper than any event.
const MAX_DEPTH: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("the message ends in the middle of a value")]
    Short,
    #[error("{0} bytes follow the message")]
    Long(usize),
    #[error("{what} is expected at byte {at}")]
    Unexpected { what: &'static str, at: usize },
    #[error("values are nested too deeply")]
    Deep,
    #[error("there is no event called {0:?}")]
    UnknownEvent(String),
}

/// Writes a batch as vLLM does.
pub fn encode(batch: &EventBatch) -> Vec<u8> {
    let mut out = Vec::with_capacity(64);
    array(&mut out, 3);
    out.push(0xcb);
    out.extend_from_slice(&batch.ts.to_be_bytes());
    array(&mut out, batch.events.len());
    for event in &batch.events {
        encode_event(&mut out, event);
    }
    optional(&mut out, batch.data_parallel_rank.map(u64::from));
    out
}

fn encode_event(out: &mut Vec<u8>, event: &Event) {
    match event {
        Event::BlockStored { block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium } => {
            array(out, 8);
            text(out, "BlockStored");
            hashes(out, block_hashes);
            optional(out, *parent_block_hash);
            array(out, token_ids.len());
            for &token in token_ids {
                unsigned(out, token.into());
            }
            unsigned(out, *block_size as u64);
            optional(out, *lora_id);
            optional_text(out, medium.as_deref());
            // The name of a LoRA.
            out.push(0xc0);
        }
        Event::BlockRemoved { block_hashes, medium } => {
            array(out, 3);
            text(out, "BlockRemoved");
            hashes(out, block_hashes);
            optional_text(out, medium.as_deref());
        }
        Event::AllBlocksCleared => {
            array(out, 1);
            text(out, "AllBlocksCleared");
        }
    }
}

fn hashes(out: &mut Vec<u8>, hashes: &[u64]) {
    array(out, hashes.len());
    for &hash in hashes {
        unsigned(out, hash);
    }
}

fn array(out: &mut Vec<u8>, len: usize) {
    match len {
        0..=15 => out.push(0x90 | len as u8),
        16..=0xffff => {
            out.push(0xdc);
            out.extend_from_slice(&(len as u16).to_be_bytes());
        }
        _ => {
            out.push(0xdd);
            out.extend_from_slice(&(len as u32).to_be_bytes());
        }
    }
}

fn unsigned(out: &mut Vec<u8>, value: u64) {
    match value {
        0..=0x7f => out.push(value as u8),
        0x80..=0xff => out.extend_from_slice(&[0xcc, value as u8]),
        0x100..=0xffff => {
            out.push(0xcd);
            out.extend_from_slice(&(value as u16).to_be_bytes());
        }
        0x1_0000..=0xffff_ffff => {
            out.push(0xce);
            out.extend_from_slice(&(value as u32).to_be_bytes());
        }
        _ => {
            out.push(0xcf);
            out.extend_from_slice(&value.to_be_bytes());
        }
    }
}

fn optional(out: &mut Vec<u8>, value: Option<u64>) {
    match value {
        Some(value) => unsigned(out, value),
        None => out.push(0xc0),
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    let bytes = &text.as_bytes()[..text.len().min(255)];
    if bytes.len() < 32 {
        out.push(0xa0 | bytes.len() as u8);
    } else {
        out.extend_from_slice(&[0xd9, bytes.len() as u8]);
    }
    out.extend_from_slice(bytes);
}

fn optional_text(out: &mut Vec<u8>, value: Option<&str>) {
    match value {
        Some(value) => text(out, value),
        None => out.push(0xc0),
    }
}

/// Reads a batch, as vLLM or anybody else wrote it.
pub fn decode(bytes: &[u8]) -> Result<EventBatch, DecodeError> {
    let mut reader = Reader { bytes, at: 0 };
    let len = reader.array("a batch")?;
    if len < 2 {
        return Err(DecodeError::Unexpected { what: "a time and events", at: 0 });
    }
    let ts = reader.number("a time")?;
    let num_events = reader.array("a list of events")?;
    let mut events = Vec::new();
    for _ in 0..num_events {
        events.push(reader.event()?);
    }
    let mut data_parallel_rank = None;
    for index in 2..len {
        if index == 2 {
            data_parallel_rank =
                reader.optional_unsigned("a rank")?.and_then(|rank| u32::try_from(rank).ok());
        } else {
            reader.skip(0)?;
        }
    }
    match bytes.len() - reader.at {
        0 => Ok(EventBatch { ts, events, data_parallel_rank }),
        left => Err(DecodeError::Long(left)),
    }
}

/// The fields of an event, whatever it is.
#[derive(Default)]
struct Fields {
    name: String,
    block_hashes: Vec<u64>,
    parent_block_hash: Option<u64>,
    token_ids: Vec<u32>,
    block_size: usize,
    lora_id: Option<u64>,
    medium: Option<String>,
}

const STORED: [&str; 6] =
    ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"];
const REMOVED: [&str; 2] = ["block_hashes", "medium"];

impl Fields {
    fn order(&self) -> &'static [&'static str] {
        match self.name.as_str() {
            "BlockStored" => &STORED,
            "BlockRemoved" => &REMOVED,
            _ => &[],
        }
    }

    fn into_event(self) -> Result<Event, DecodeError> {
        let Self { name, block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium } = self;
        match name.as_str() {
            "BlockStored" => Ok(Event::BlockStored {
                block_hashes,
                parent_block_hash,
                token_ids,
                block_size,
                lora_id,
                medium,
            }),
            "BlockRemoved" => Ok(Event::BlockRemoved { block_hashes, medium }),
            "AllBlocksCleared" => Ok(Event::AllBlocksCleared),
            _ => Err(DecodeError::UnknownEvent(name)),
        }
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn take(&mut self, len: usize) -> Result<&[u8], DecodeError> {
        let end =
            self.at.checked_add(len).filter(|&end| end <= self.bytes.len()).ok_or(DecodeError::Short)?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, DecodeError> {
        Ok(self.take(1)?[0])
    }

    /// A big-endian number of `len` bytes.
    fn big_endian(&mut self, len: usize) -> Result<u64, DecodeError> {
        Ok(self.take(len)?.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    fn unexpected(&self, what: &'static str) -> DecodeError {
        DecodeError::Unexpected { what, at: self.at.saturating_sub(1) }
    }

    /// The number of elements of a list, of which there cannot be more than bytes are left.
    fn array(&mut self, what: &'static str) -> Result<usize, DecodeError> {
        let len = match self.byte()? {
            byte @ 0x90..=0x9f => u64::from(byte & 0x0f),
            0xdc => self.big_endian(2)?,
            0xdd => self.big_endian(4)?,
            _ => return Err(self.unexpected(what)),
        };
        self.checked_len(len)
    }

    fn checked_len(&self, len: u64) -> Result<usize, DecodeError> {
        let left = (self.bytes.len() - self.at) as u64;
        if len > left { Err(DecodeError::Short) } else { Ok(len as usize) }
    }

    fn text(&mut self, what: &'static str) -> Result<String, DecodeError> {
        let len = match self.byte()? {
            byte @ 0xa0..=0xbf => u64::from(byte & 0x1f),
            0xd9 => self.big_endian(1)?,
            0xda => self.big_endian(2)?,
            0xdb => self.big_endian(4)?,
            _ => return Err(self.unexpected(what)),
        };
        let len = self.checked_len(len)?;
        Ok(String::from_utf8_lossy(self.take(len)?).into_owned())
    }

    fn optional_text(&mut self) -> Result<Option<String>, DecodeError> {
        if self.is_nil() { Ok(None) } else { self.text("a text").map(Some) }
    }

    /// Takes a nil, if that is what comes.
    fn is_nil(&mut self) -> bool {
        let nil = self.bytes.get(self.at) == Some(&0xc0);
        self.at += usize::from(nil);
        nil
    }

    fn number(&mut self, what: &'static str) -> Result<f64, DecodeError> {
        match self.bytes.get(self.at) {
            Some(0xcb) => {
                self.at += 1;
                Ok(f64::from_bits(self.big_endian(8)?))
            }
            Some(0xca) => {
                self.at += 1;
                Ok(f64::from(f32::from_bits(self.big_endian(4)? as u32)))
            }
            _ => Ok(self.unsigned(what)? as f64),
        }
    }

    /// A whole number; the bits of one below 0 are kept, because hashes may be written that way.
    fn unsigned(&mut self, what: &'static str) -> Result<u64, DecodeError> {
        match self.byte()? {
            byte @ 0..=0x7f => Ok(byte.into()),
            byte @ 0xe0..=0xff => Ok(i64::from(byte as i8) as u64),
            0xcc => self.big_endian(1),
            0xcd => self.big_endian(2),
            0xce => self.big_endian(4),
            0xcf | 0xd3 => self.big_endian(8),
            0xd0 => Ok(i64::from(self.big_endian(1)? as i8) as u64),
            0xd1 => Ok(i64::from(self.big_endian(2)? as i16) as u64),
            0xd2 => Ok(i64::from(self.big_endian(4)? as i32) as u64),
            _ => Err(self.unexpected(what)),
        }
    }

    fn optional_unsigned(&mut self, what: &'static str) -> Result<Option<u64>, DecodeError> {
        if self.is_nil() { Ok(None) } else { self.unsigned(what).map(Some) }
    }

    /// A number, or bytes of which the last eight are the number, as vLLM shortens its hashes.
    fn hash(&mut self) -> Result<u64, DecodeError> {
        let len = match self.bytes.get(self.at) {
            Some(0xc4) => 1,
            Some(0xc5) => 2,
            Some(0xc6) => 4,
            _ => return self.unsigned("a block hash"),
        };
        self.at += 1;
        let len = self.big_endian(len)?;
        let len = self.checked_len(len)?;
        let bytes = self.take(len)?;
        let tail = &bytes[bytes.len().saturating_sub(8)..];
        Ok(tail.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    fn event(&mut self) -> Result<Event, DecodeError> {
        let mut fields = Fields::default();
        let byte = *self.bytes.get(self.at).ok_or(DecodeError::Short)?;
        if matches!(byte, 0x80..=0x8f | 0xde | 0xdf) {
            self.event_map(&mut fields)?;
        } else {
            let len = self.array("an event")?;
            if len == 0 {
                return Err(self.unexpected("the name of an event"));
            }
            fields.name = self.text("the name of an event")?;
            let order = fields.order();
            for index in 0..len - 1 {
                match order.get(index) {
                    Some(name) => self.field(name, &mut fields)?,
                    None => self.skip(0)?,
                }
            }
        }
        fields.into_event()
    }

    fn event_map(&mut self, fields: &mut Fields) -> Result<(), DecodeError> {
        let len = match self.byte()? {
            byte @ 0x80..=0x8f => u64::from(byte & 0x0f),
            0xde => self.big_endian(2)?,
            _ => self.big_endian(4)?,
        };
        for _ in 0..self.checked_len(len)? {
            let name = self.text("the name of a field")?;
            if name == "type" {
                fields.name = self.text("the name of an event")?;
            } else {
                self.field(&name, fields)?;
            }
        }
        Ok(())
    }

    fn field(&mut self, name: &str, fields: &mut Fields) -> Result<(), DecodeError> {
        match name {
            "block_hashes" => {
                for _ in 0..self.array("a list of hashes")? {
                    let hash = self.hash()?;
                    fields.block_hashes.push(hash);
                }
            }
            "parent_block_hash" => {
                fields.parent_block_hash = if self.is_nil() { None } else { Some(self.hash()?) };
            }
            "token_ids" => {
                for _ in 0..self.array("a list of tokens")? {
                    let token = self.unsigned("a token")?;
                    let token = u32::try_from(token).map_err(|_| self.unexpected("a token"))?;
                    fields.token_ids.push(token);
                }
            }
            "block_size" => {
                let size = self.unsigned("a block size")?;
                fields.block_size = usize::try_from(size).map_err(|_| self.unexpected("a block size"))?;
            }
            "lora_id" => fields.lora_id = self.optional_unsigned("a number")?,
            "medium" => fields.medium = self.optional_text()?,
            _ => self.skip(0)?,
        }
        Ok(())
    }

    /// Passes over a value of any kind.
    fn skip(&mut self, depth: usize) -> Result<(), DecodeError> {
        if depth > MAX_DEPTH {
            return Err(DecodeError::Deep);
        }
        let (bytes, values) = match self.byte()? {
            0..=0x7f | 0xe0..=0xff | 0xc0..=0xc3 => (0, 0),
            byte @ 0x80..=0x8f => (0, 2 * u64::from(byte & 0x0f)),
            byte @ 0x90..=0x9f => (0, u64::from(byte & 0x0f)),
            byte @ 0xa0..=0xbf => (u64::from(byte & 0x1f), 0),
            0xc4 | 0xd9 => (self.big_endian(1)?, 0),
            0xc5 | 0xda => (self.big_endian(2)?, 0),
            0xc6 | 0xdb => (self.big_endian(4)?, 0),
            0xc7 => (self.big_endian(1)? + 1, 0),
            0xc8 => (self.big_endian(2)? + 1, 0),
            0xc9 => (self.big_endian(4)? + 1, 0),
            0xcc | 0xd0 => (1, 0),
            0xcd | 0xd1 | 0xd4 => (2, 0),
            0xd5 => (3, 0),
            0xca | 0xce | 0xd2 => (4, 0),
            0xd6 => (5, 0),
            0xcb | 0xcf | 0xd3 => (8, 0),
            0xd7 => (9, 0),
            0xd8 => (17, 0),
            0xdc => (0, self.big_endian(2)?),
            0xdd => (0, self.big_endian(4)?),
            0xde => (0, 2 * self.big_endian(2)?),
            0xdf => (0, 2 * self.big_endian(4)?),
        };
        let len = self.checked_len(bytes)?;
        self.take(len)?;
        for _ in 0..self.checked_len(values)? {
            self.skip(depth + 1)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn batch() -> EventBatch {
        EventBatch {
            ts: 1.5,
            events: vec![
                Event::BlockStored {
                    block_hashes: vec![1, u64::MAX, 300],
                    parent_block_hash: Some(70_000),
                    token_ids: (0..48).map(|token| token * 3000).collect(),
                    block_size: 16,
                    lora_id: None,
                    medium: Some("GPU".to_owned()),
                },
                Event::BlockRemoved { block_hashes: vec![], medium: None },
                Event::AllBlocksCleared,
            ],
            data_parallel_rank: Some(0),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(decode(&encode(&batch())), Ok(batch()));
    }

    #[test]
    fn the_bytes_are_those_of_msgpack() {
        let batch = EventBatch {
            ts: 0.0,
            events: vec![Event::BlockRemoved { block_hashes: vec![5], medium: None }],
            data_parallel_rank: None,
        };
        let expect = b"\x93\xcb\0\0\0\0\0\0\0\0\x91\x93\xacBlockRemoved\x91\x05\xc0\xc0";
        assert_eq!(encode(&batch), expect);
    }

    #[test]
    fn maps_bytes_and_unknown_fields_are_read_too() {
        // {"type": "BlockStored", "block_hashes": [b"..8 bytes and one before"], "new": {"a": [1.0]}, …}
        let mut bytes = b"\x93\xcb\0\0\0\0\0\0\0\0\x91\x86".to_vec();
        bytes.extend_from_slice(b"\xa4type\xabBlockStored");
        bytes.extend_from_slice(b"\xacblock_hashes\x91\xc4\x09\x07\0\0\0\0\0\0\x01\x02");
        bytes.extend_from_slice(b"\xa3new\x81\xa1a\x91\xcb\0\0\0\0\0\0\0\0");
        bytes.extend_from_slice(b"\xb1parent_block_hash\xd3\xff\xff\xff\xff\xff\xff\xff\xff");
        bytes.extend_from_slice(b"\xa9token_ids\x92\x01\x02\xaablock_size\x02\xc0");
        let decoded = decode(&bytes).unwrap();
        let [Event::BlockStored { block_hashes, parent_block_hash, token_ids, block_size: 2, .. }] =
            &decoded.events[..]
        else {
            panic!("{decoded:?}")
        };
        assert_eq!(
            (&block_hashes[..], *parent_block_hash, &token_ids[..]),
            (&[258][..], Some(u64::MAX), &[1, 2][..])
        );
    }

    #[test]
    fn no_cut_of_a_message_is_one() {
        let bytes = encode(&batch());
        for end in 0..bytes.len() {
            assert!(decode(&bytes[..end]).is_err(), "{end}");
        }
        assert_eq!(decode(&[&bytes[..], b"\0"].concat()), Err(DecodeError::Long(1)));
    }

    #[test]
    fn lying_lengths_allocate_nothing() {
        assert_eq!(decode(b"\xdd\xff\xff\xff\xff"), Err(DecodeError::Short));
        assert_eq!(decode(b"\x93\x00\xdd\xff\xff\xff\xf0\x00"), Err(DecodeError::Short));
        let deep = [&b"\x94\x00\x90\xc0"[..], &[0x91; 64], b"\x00"].concat();
        assert_eq!(decode(&deep), Err(DecodeError::Deep));
    }

    proptest! {
        #[test]
        fn bytes_of_any_kind_are_an_error_or_a_batch(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }

        #[test]
        fn a_changed_byte_is_an_error_or_a_batch(at in 0usize..100, byte in any::<u8>()) {
            let mut bytes = encode(&batch());
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = decode(&bytes);
        }
    }
}
