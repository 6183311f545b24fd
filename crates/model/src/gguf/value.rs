//! The values of GGUF metadata and typed access to them. Parsing allocates no more than a small multiple of the bytes
//! it has read: counts in the file are never trusted.

use std::collections::BTreeMap;

use super::cursor::{Cursor, Parsed};

/// Arrays of arrays beyond this depth are refused. Known files use one level.
const MAX_ARRAY_DEPTH: usize = 4;

#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(GgufArray),
}

/// An array, one vector for each type of element, so that a hundred thousand numbers stay small.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufArray {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Array(Vec<GgufArray>),
}

impl GgufArray {
    pub fn len(&self) -> usize {
        match self {
            Self::U8(values) => values.len(),
            Self::I8(values) => values.len(),
            Self::U16(values) => values.len(),
            Self::I16(values) => values.len(),
            Self::U32(values) => values.len(),
            Self::I32(values) => values.len(),
            Self::U64(values) => values.len(),
            Self::I64(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
            Self::Bool(values) => values.len(),
            Self::String(values) => values.len(),
            Self::Array(values) => values.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as integers, whatever their width; `None` if they are not integers or do not fit.
    fn integers(&self) -> Option<Vec<i64>> {
        Some(match self {
            Self::U8(values) => values.iter().map(|&value| value.into()).collect(),
            Self::I8(values) => values.iter().map(|&value| value.into()).collect(),
            Self::U16(values) => values.iter().map(|&value| value.into()).collect(),
            Self::I16(values) => values.iter().map(|&value| value.into()).collect(),
            Self::U32(values) => values.iter().map(|&value| value.into()).collect(),
            Self::I32(values) => values.iter().map(|&value| value.into()).collect(),
            Self::U64(values) => values.iter().map(|&value| value.try_into().ok()).collect::<Option<_>>()?,
            Self::I64(values) => values.clone(),
            Self::F32(_) | Self::F64(_) | Self::Bool(_) | Self::String(_) | Self::Array(_) => return None,
        })
    }
}

impl GgufValue {
    /// The name of the type, for messages.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "u8",
            Self::I8(_) => "i8",
            Self::U16(_) => "u16",
            Self::I16(_) => "i16",
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::U64(_) => "u64",
            Self::I64(_) => "i64",
            Self::F32(_) => "f32",
            Self::F64(_) => "f64",
            Self::Bool(_) => "bool",
            Self::String(_) => "string",
            Self::Array(_) => "array",
        }
    }

    /// The value as a non-negative integer, whatever its width.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(value) => Some(value.into()),
            Self::I8(value) => value.try_into().ok(),
            Self::U16(value) => Some(value.into()),
            Self::I16(value) => value.try_into().ok(),
            Self::U32(value) => Some(value.into()),
            Self::I32(value) => value.try_into().ok(),
            Self::U64(value) => Some(value),
            Self::I64(value) => value.try_into().ok(),
            _ => None,
        }
    }
}

/// The metadata of a GGUF file. Every getter gives `None` for an absent key and an error for one of a wrong type.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufMetadata {
    values: BTreeMap<String, GgufValue>,
}

impl GgufMetadata {
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.values.get(key)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &GgufValue)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Adds a value; false if the key is already there.
    pub(super) fn insert(&mut self, key: String, value: GgufValue) -> bool {
        match self.values.entry(key) {
            std::collections::btree_map::Entry::Occupied(_) => false,
            std::collections::btree_map::Entry::Vacant(entry) => {
                entry.insert(value);
                true
            }
        }
    }

    pub fn get_u64(&self, key: &str) -> Result<Option<u64>, String> {
        self.typed(key, "a non-negative integer", GgufValue::as_u64)
    }

    pub fn get_u32(&self, key: &str) -> Result<Option<u32>, String> {
        self.typed(key, "an integer of 32 bits", |value| value.as_u64()?.try_into().ok())
    }

    pub fn get_f32(&self, key: &str) -> Result<Option<f32>, String> {
        self.typed(key, "a number", |value| match *value {
            GgufValue::F32(number) => Some(number),
            GgufValue::F64(number) => Some(number as f32),
            _ => None,
        })
    }

    pub fn get_bool(&self, key: &str) -> Result<Option<bool>, String> {
        self.typed(key, "true or false", |value| match *value {
            GgufValue::Bool(value) => Some(value),
            _ => None,
        })
    }

    pub fn get_str(&self, key: &str) -> Result<Option<&str>, String> {
        self.typed(key, "a string", |value| match value {
            GgufValue::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    pub fn get_array(&self, key: &str) -> Result<Option<&GgufArray>, String> {
        self.typed(key, "an array", |value| match value {
            GgufValue::Array(array) => Some(array),
            _ => None,
        })
    }

    pub fn get_strings(&self, key: &str) -> Result<Option<&[String]>, String> {
        self.typed(key, "an array of strings", |value| match value {
            GgufValue::Array(GgufArray::String(texts)) => Some(texts.as_slice()),
            _ => None,
        })
    }

    pub fn get_integers(&self, key: &str) -> Result<Option<Vec<i64>>, String> {
        self.typed(key, "an array of integers", |value| match value {
            GgufValue::Array(array) => array.integers(),
            _ => None,
        })
    }

    pub fn get_f32s(&self, key: &str) -> Result<Option<&[f32]>, String> {
        self.typed(key, "an array of f32", |value| match value {
            GgufValue::Array(GgufArray::F32(numbers)) => Some(numbers.as_slice()),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl Fn(&'a GgufValue) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => Err(format!("metadata {key:?} should be {expected}, but is {}", describe(value))),
        }
    }
}

fn describe(value: &GgufValue) -> String {
    match value {
        GgufValue::Array(array) => format!("an array of {} values", array.len()),
        GgufValue::String(_) => "a string".to_owned(),
        other => format!("{other:?}"),
    }
}

/// Reads a value of the type `type_id`. `what` names it in errors.
pub(super) fn read_value(cursor: &mut Cursor<'_>, type_id: u32, what: &str) -> Parsed<GgufValue> {
    Ok(match type_id {
        0 => GgufValue::U8(cursor.read_u8(what)?),
        1 => GgufValue::I8(cursor.read_i8(what)?),
        2 => GgufValue::U16(cursor.read_u16(what)?),
        3 => GgufValue::I16(cursor.read_i16(what)?),
        4 => GgufValue::U32(cursor.read_u32(what)?),
        5 => GgufValue::I32(cursor.read_i32(what)?),
        6 => GgufValue::F32(cursor.read_f32(what)?),
        7 => GgufValue::Bool(cursor.read_bool(what)?),
        8 => GgufValue::String(cursor.read_string(what)?),
        9 => GgufValue::Array(read_array(cursor, 0, what)?),
        10 => GgufValue::U64(cursor.read_u64(what)?),
        11 => GgufValue::I64(cursor.read_i64(what)?),
        12 => GgufValue::F64(cursor.read_f64(what)?),
        other => return Err(format!("{what} has the unknown value type {other}")),
    })
}

fn read_array(cursor: &mut Cursor<'_>, depth: usize, what: &str) -> Parsed<GgufArray> {
    if depth == MAX_ARRAY_DEPTH {
        return Err(format!("{what} has arrays nested deeper than {MAX_ARRAY_DEPTH}"));
    }
    let type_id = cursor.read_u32(what)?;
    let count = cursor.read_u64(what)?;
    Ok(match type_id {
        0 => GgufArray::U8(elements(cursor, count, 1, what, Cursor::read_u8)?),
        1 => GgufArray::I8(elements(cursor, count, 1, what, Cursor::read_i8)?),
        2 => GgufArray::U16(elements(cursor, count, 2, what, Cursor::read_u16)?),
        3 => GgufArray::I16(elements(cursor, count, 2, what, Cursor::read_i16)?),
        4 => GgufArray::U32(elements(cursor, count, 4, what, Cursor::read_u32)?),
        5 => GgufArray::I32(elements(cursor, count, 4, what, Cursor::read_i32)?),
        6 => GgufArray::F32(elements(cursor, count, 4, what, Cursor::read_f32)?),
        7 => GgufArray::Bool(elements(cursor, count, 1, what, Cursor::read_bool)?),
        8 => GgufArray::String(elements(cursor, count, 8, what, Cursor::read_string)?),
        9 => GgufArray::Array(elements(cursor, count, 12, what, |cursor, what| {
            read_array(cursor, depth + 1, what)
        })?),
        10 => GgufArray::U64(elements(cursor, count, 8, what, Cursor::read_u64)?),
        11 => GgufArray::I64(elements(cursor, count, 8, what, Cursor::read_i64)?),
        12 => GgufArray::F64(elements(cursor, count, 8, what, Cursor::read_f64)?),
        other => return Err(format!("{what} is an array of the unknown value type {other}")),
    })
}

/// `count` elements of at least `min_bytes` each in the file. That many must still be there before any is allocated.
fn elements<'a, T>(
    cursor: &mut Cursor<'a>,
    count: u64,
    min_bytes: usize,
    what: &str,
    read: impl Fn(&mut Cursor<'a>, &str) -> Parsed<T>,
) -> Parsed<Vec<T>> {
    let most = cursor.remaining() / min_bytes;
    let Some(count) = usize::try_from(count).ok().filter(|&count| count <= most) else {
        return Err(format!(
            "{what} at byte {} says that it has {count} elements, but the file has bytes for at most {most}",
            cursor.position()
        ));
    };
    let mut values = Vec::with_capacity(count);
    for _ in 0..count {
        values.push(read(cursor, what)?);
    }
    Ok(values)
}
