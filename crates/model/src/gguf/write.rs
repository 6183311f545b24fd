//! Writes GGUF files, version 3: metadata, a table of tensors, then their bytes, each from a multiple of 32 on.

use std::io::{self, Write};

use baton_backend::{Tensor, WeightFormat};

use super::{GgmlType, GgufArray, GgufValue};

const VERSION: u32 = 3;
const ALIGNMENT: u64 = 32;

/// A tensor to be written, whose bytes are made when its turn comes.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) name: String,
    /// The length of a row first.
    pub(crate) dims: Vec<u64>,
    pub(crate) format: WeightFormat,
    pub(crate) bytes: u64,
}

/// Writes the whole file. `make` is asked for each tensor in the order of `tensors`.
pub(crate) fn write_gguf<E: From<io::Error>>(
    out: &mut dyn Write,
    metadata: &[(String, GgufValue)],
    tensors: &[Planned],
    mut make: impl FnMut(&Planned) -> Result<Tensor, E>,
) -> Result<(), E> {
    let mut head = Vec::new();
    head.extend(b"GGUF");
    head.extend(VERSION.to_le_bytes());
    head.extend((tensors.len() as u64).to_le_bytes());
    head.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        string(&mut head, key);
        head.extend(value_type(value).to_le_bytes());
        put_value(&mut head, value);
    }
    let mut offset = 0_u64;
    for tensor in tensors {
        string(&mut head, &tensor.name);
        head.extend((tensor.dims.len() as u32).to_le_bytes());
        for dim in &tensor.dims {
            head.extend(dim.to_le_bytes());
        }
        head.extend(GgmlType::of(tensor.format).id().to_le_bytes());
        head.extend(offset.to_le_bytes());
        offset += tensor.bytes.next_multiple_of(ALIGNMENT);
    }
    head.resize(head.len().next_multiple_of(ALIGNMENT as usize), 0);
    out.write_all(&head)?;
    for tensor in tensors {
        let made = make(tensor)?;
        out.write_all(made.bytes())?;
        let padding = (made.num_bytes() as u64).next_multiple_of(ALIGNMENT) - made.num_bytes() as u64;
        out.write_all(&vec![0; padding as usize])?;
    }
    Ok(())
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn value_type(value: &GgufValue) -> u32 {
    match value {
        GgufValue::U8(_) => 0,
        GgufValue::I8(_) => 1,
        GgufValue::U16(_) => 2,
        GgufValue::I16(_) => 3,
        GgufValue::U32(_) => 4,
        GgufValue::I32(_) => 5,
        GgufValue::F32(_) => 6,
        GgufValue::Bool(_) => 7,
        GgufValue::String(_) => 8,
        GgufValue::Array(_) => 9,
        GgufValue::U64(_) => 10,
        GgufValue::I64(_) => 11,
        GgufValue::F64(_) => 12,
    }
}

fn put_value(out: &mut Vec<u8>, value: &GgufValue) {
    match value {
        GgufValue::U8(value) => out.extend(value.to_le_bytes()),
        GgufValue::I8(value) => out.extend(value.to_le_bytes()),
        GgufValue::U16(value) => out.extend(value.to_le_bytes()),
        GgufValue::I16(value) => out.extend(value.to_le_bytes()),
        GgufValue::U32(value) => out.extend(value.to_le_bytes()),
        GgufValue::I32(value) => out.extend(value.to_le_bytes()),
        GgufValue::U64(value) => out.extend(value.to_le_bytes()),
        GgufValue::I64(value) => out.extend(value.to_le_bytes()),
        GgufValue::F32(value) => out.extend(value.to_le_bytes()),
        GgufValue::F64(value) => out.extend(value.to_le_bytes()),
        GgufValue::Bool(value) => out.push(u8::from(*value)),
        GgufValue::String(value) => string(out, value),
        GgufValue::Array(array) => put_array(out, array),
    }
}

fn put_array(out: &mut Vec<u8>, array: &GgufArray) {
    fn all<T>(out: &mut Vec<u8>, kind: u32, values: &[T], put: impl Fn(&mut Vec<u8>, &T)) {
        out.extend(kind.to_le_bytes());
        out.extend((values.len() as u64).to_le_bytes());
        for value in values {
            put(out, value);
        }
    }
    match array {
        GgufArray::U8(values) => all(out, 0, values, |out, value| out.push(*value)),
        GgufArray::I8(values) => all(out, 1, values, |out, value| out.extend(value.to_le_bytes())),
        GgufArray::U16(values) => all(out, 2, values, |out, value| out.extend(value.to_le_bytes())),
        GgufArray::I16(values) => all(out, 3, values, |out, value| out.extend(value.to_le_bytes())),
        GgufArray::U32(values) => all(out, 4, values, |out, value| out.extend(value.to_le_bytes())),
        GgufArray::I32(values) => all(out, 5, values, |out, value| out.extend(value.to_le_bytes())),
        GgufArray::F32(values) => all(out, 6, values, |out, value| out.extend(value.to_le_bytes())),
        GgufArray::Bool(values) => all(out, 7, values, |out, value| out.push(u8::from(*value))),
        GgufArray::String(values) => all(out, 8, values, |out, value| string(out, value)),
        GgufArray::Array(values) => all(out, 9, values, put_array),
        GgufArray::U64(values) => all(out, 10, values, |out, value| out.extend(value.to_le_bytes())),
        GgufArray::I64(values) => all(out, 11, values, |out, value| out.extend(value.to_le_bytes())),
        GgufArray::F64(values) => all(out, 12, values, |out, value| out.extend(value.to_le_bytes())),
    }
}
