//! The header of a safetensors file: eight bytes of length, JSON, then the data. Every number is checked here.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{Error, IgnoredAny, MapAccess, Visitor};

/// The format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const METADATA_KEY: &str = "__metadata__";

#[derive(Debug)]
pub(super) struct HeaderTensor {
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    /// In the file, not in its data section.
    pub(super) range: Range<usize>,
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The header's map; unlike a `BTreeMap` it refuses a name that comes twice.
struct RawHeader(BTreeMap<String, RawTensor>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;

        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut tensors = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA_KEY {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let tensor: RawTensor = map.next_value()?;
                    if tensors.contains_key(&name) {
                        return Err(A::Error::custom(format!("tensor {name:?} is there twice")));
                    }
                    tensors.insert(name, tensor);
                }
                Ok(RawHeader(tensors))
            }
        }

        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// The tensors of a file with their ranges, all of which lie in the file and do not overlap.
pub(super) fn parse_header(file: &[u8]) -> Result<BTreeMap<String, HeaderTensor>, String> {
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(format!("it has {} bytes, too few for a safetensors header", file.len()));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(format!(
            "its header has {length} bytes, more than the limit of {MAX_HEADER_BYTES}; it is not a safetensors file"
        ));
    }
    let Some((json, data)) = rest.split_at_checked(length as usize) else {
        return Err(format!(
            "its header should have {length} bytes but the file ends after {}; the download may be incomplete",
            rest.len()
        ));
    };
    let RawHeader(raw) = serde_json::from_slice(json).map_err(|cause| format!("its header: {cause}"))?;
    let data_start = file.len() - data.len();
    let mut tensors = BTreeMap::new();
    for (name, tensor) in raw {
        let tensor = place(&name, tensor, data_start, data.len())?;
        tensors.insert(name, tensor);
    }
    refuse_overlaps(&tensors)?;
    Ok(tensors)
}

fn place(name: &str, raw: RawTensor, data_start: usize, data_len: usize) -> Result<HeaderTensor, String> {
    let (start, end) = raw.data_offsets;
    if start > end || end > data_len as u64 {
        return Err(format!(
            "tensor {name:?} lies at {start}..{end}, but the file has {data_len} bytes of data; the download may be \
             incomplete"
        ));
    }
    let shape: Option<Vec<usize>> = raw.shape.iter().map(|&dim| dim.try_into().ok()).collect();
    let shape = shape.ok_or_else(|| format!("tensor {name:?} of {:?} is too large", raw.shape))?;
    if let Some(value_bytes) = value_bytes(&raw.dtype) {
        let expected = shape.iter().try_fold(value_bytes, |bytes, &dim| bytes.checked_mul(dim));
        if expected.map(|bytes| bytes as u64) != Some(end - start) {
            return Err(format!(
                "tensor {name:?} of {shape:?} {} values does not fit its {} bytes",
                raw.dtype,
                end - start
            ));
        }
    }
    let range = data_start + start as usize..data_start + end as usize;
    Ok(HeaderTensor { dtype: raw.dtype, shape, range })
}

/// Bytes of a value. Dtypes that are not known are never read, so their size is not checked.
fn value_bytes(dtype: &str) -> Option<usize> {
    Some(match dtype {
        "BOOL" | "I8" | "U8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => 1,
        "F16" | "BF16" | "I16" | "U16" => 2,
        "F32" | "I32" | "U32" => 4,
        "F64" | "I64" | "U64" => 8,
        _ => return None,
    })
}

fn refuse_overlaps(tensors: &BTreeMap<String, HeaderTensor>) -> Result<(), String> {
    let mut by_start: Vec<(&String, &Range<usize>)> =
        tensors.iter().map(|(name, tensor)| (name, &tensor.range)).collect();
    by_start.sort_by_key(|(_, range)| (range.start, range.end));
    for pair in by_start.windows(2) {
        if pair[0].1.end > pair[1].1.start {
            return Err(format!("tensors {:?} and {:?} overlap", pair[0].0, pair[1].0));
        }
    }
    Ok(())
}
