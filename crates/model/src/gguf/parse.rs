//! The header of one GGUF file: magic, version, metadata, tensor table. Everything is checked here, so that
//! later code can trust the ranges of tensors.

use std::collections::HashSet;
use std::ops::Range;

use super::cursor::{Cursor, Parsed};
use super::ggml_type::GgmlType;
use super::value::{GgufMetadata, read_value};

const MAGIC: &[u8] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 20;
const MAX_DIMS: u32 = 4;

/// The tensor table's entry, with the range of bytes in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ParsedTensor {
    pub(super) name: String,
    /// As in the file: the length of a row first.
    pub(super) dims: Vec<u64>,
    pub(super) ggml_type: GgmlType,
    pub(super) range: Range<usize>,
}

#[derive(Debug)]
pub(super) struct ParsedFile {
    pub(super) version: u32,
    pub(super) metadata: GgufMetadata,
    pub(super) tensors: Vec<ParsedTensor>,
}

pub(super) fn parse(bytes: &[u8]) -> Parsed<ParsedFile> {
    let mut cursor = Cursor::new(bytes);
    let version = read_version(&mut cursor)?;
    let tensor_count = cursor.read_u64("the number of tensors")?;
    let metadata_count = cursor.read_u64("the number of metadata entries")?;
    let metadata = read_metadata(&mut cursor, metadata_count)?;
    let alignment = alignment(&metadata)?;
    let entries = read_tensor_table(&mut cursor, tensor_count, alignment)?;
    let tensors = place_tensors(entries, cursor.position() as u64, alignment, bytes.len())?;
    Ok(ParsedFile { version, metadata, tensors })
}

fn read_version(cursor: &mut Cursor<'_>) -> Parsed<u32> {
    let magic = cursor.take(4, "the magic number")?;
    if magic == b"FUGG" {
        return Err(big_endian());
    }
    if magic != MAGIC {
        return Err("it does not begin with \"GGUF\", so it is not a GGUF file".to_owned());
    }
    match cursor.read_u32("the version")? {
        version @ (2 | 3) => Ok(version),
        version if version.swap_bytes() <= 0xff => Err(big_endian()),
        version => Err(format!(
            "GGUF version {version} is not supported, only 2 and 3; convert the model again with a current converter"
        )),
    }
}

fn big_endian() -> String {
    "it is a big-endian GGUF file; only little-endian ones are supported".to_owned()
}

fn read_metadata(cursor: &mut Cursor<'_>, count: u64) -> Parsed<GgufMetadata> {
    let mut metadata = GgufMetadata::default();
    for index in 0..count {
        let key = cursor.read_string(&format!("the key of metadata entry {index} of {count}"))?;
        let what = format!("metadata {key:?}");
        let type_id = cursor.read_u32(&what)?;
        let value = read_value(cursor, type_id, &what)?;
        if !metadata.insert(key, value) {
            return Err(format!("{what} is there twice"));
        }
    }
    Ok(metadata)
}

fn alignment(metadata: &GgufMetadata) -> Parsed<u64> {
    let alignment = metadata.get_u64("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
        return Err(format!(
            "general.alignment is {alignment}; it must be a power of two of at most {MAX_ALIGNMENT}"
        ));
    }
    Ok(alignment)
}

struct TableEntry {
    name: String,
    dims: Vec<u64>,
    ggml_type: GgmlType,
    /// From the beginning of the data.
    offset: u64,
    bytes: u64,
}

fn read_tensor_table(cursor: &mut Cursor<'_>, count: u64, alignment: u64) -> Parsed<Vec<TableEntry>> {
    let mut entries = Vec::new();
    let mut names = HashSet::new();
    for index in 0..count {
        let name = cursor.read_string(&format!("the name of tensor {index} of {count}"))?;
        let entry = read_tensor_entry(cursor, name, alignment)?;
        if !names.insert(entry.name.clone()) {
            return Err(format!("tensor {:?} is there twice", entry.name));
        }
        entries.push(entry);
    }
    Ok(entries)
}

fn read_tensor_entry(cursor: &mut Cursor<'_>, name: String, alignment: u64) -> Parsed<TableEntry> {
    let what = format!("tensor {name:?}");
    let num_dims = cursor.read_u32(&what)?;
    if num_dims == 0 || num_dims > MAX_DIMS {
        return Err(format!("{what} has {num_dims} dimensions; 1 to {MAX_DIMS} are possible"));
    }
    let mut dims = Vec::with_capacity(num_dims as usize);
    for _ in 0..num_dims {
        dims.push(cursor.read_u64(&what)?);
    }
    if dims.contains(&0) {
        return Err(format!("{what} of {dims:?} has an empty dimension"));
    }
    let type_id = cursor.read_u32(&what)?;
    let Some(ggml_type) = GgmlType::from_id(type_id) else {
        return Err(format!("{what} has the unknown tensor type {type_id}"));
    };
    let Some(bytes) = ggml_type.tensor_bytes(&dims) else {
        return Err(format!(
            "{what} of {dims:?} {} values has rows that are not whole blocks, or is too large",
            ggml_type.name()
        ));
    };
    let offset = cursor.read_u64(&what)?;
    if offset % alignment != 0 {
        return Err(format!(
            "{what} begins at {offset}, which is not a multiple of the alignment {alignment}"
        ));
    }
    Ok(TableEntry { name, dims, ggml_type, offset, bytes })
}

/// Turns offsets into ranges of the file; refuses what reaches beyond the end or overlaps.
fn place_tensors(
    entries: Vec<TableEntry>,
    header_bytes: u64,
    alignment: u64,
    file_bytes: usize,
) -> Parsed<Vec<ParsedTensor>> {
    // No overflow: the header lies in memory and the alignment is bounded.
    let data_start = header_bytes.next_multiple_of(alignment);
    let mut tensors = Vec::with_capacity(entries.len());
    for entry in entries {
        let start = data_start.checked_add(entry.offset);
        let end = start.and_then(|start| start.checked_add(entry.bytes));
        let (Some(start), Some(end)) = (start, end) else {
            return Err(format!("tensor {:?} lies beyond any possible file", entry.name));
        };
        if end > file_bytes as u64 {
            return Err(format!(
                "tensor {:?} ends at byte {end}, but the file has {file_bytes} bytes; the download may be incomplete",
                entry.name
            ));
        }
        tensors.push(ParsedTensor {
            name: entry.name,
            dims: entry.dims,
            ggml_type: entry.ggml_type,
            range: start as usize..end as usize,
        });
    }
    refuse_overlaps(&tensors)?;
    Ok(tensors)
}

fn refuse_overlaps(tensors: &[ParsedTensor]) -> Parsed<()> {
    let mut by_start: Vec<&ParsedTensor> = tensors.iter().collect();
    by_start.sort_by_key(|tensor| tensor.range.start);
    for pair in by_start.windows(2) {
        if pair[0].range.end > pair[1].range.start {
            return Err(format!("tensors {:?} and {:?} overlap", pair[0].name, pair[1].name));
        }
    }
    Ok(())
}
