//! NumPy's `.npy`: a magic, a header that is a Python dictionary, the values.

use std::io::{self, Write};

use half::f16;

/// Values of an array.
#[derive(Clone, Debug, PartialEq)]
pub enum Numbers {
    Floats(Vec<f32>),
    Ints(Vec<i64>),
}

/// An array in the order of C.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    pub shape: Vec<usize>,
    pub numbers: Numbers,
}

impl Array {
    pub(crate) fn into_floats(self) -> (Vec<usize>, Vec<f32>) {
        let values = match self.numbers {
            Numbers::Floats(values) => values,
            Numbers::Ints(values) => values.into_iter().map(|value| value as f32).collect(),
        };
        (self.shape, values)
    }

    /// Floats that are whole numbers pass too: CSV and pandas make them of columns with a gap.
    pub(crate) fn into_ints(self) -> Result<(Vec<usize>, Vec<i64>), String> {
        let values = match self.numbers {
            Numbers::Ints(values) => values,
            Numbers::Floats(values) => {
                let whole = |&value: &f32| {
                    let is_whole = value.fract() == 0.0 && value.abs() < 16_777_216.0;
                    is_whole
                        .then_some(value as i64)
                        .ok_or_else(|| format!("{value} is not the number of a node"))
                };
                values.iter().map(whole).collect::<Result<_, _>>()?
            }
        };
        Ok((self.shape, values))
    }
}

/// The header's length and where the values begin.
fn header(bytes: &[u8]) -> Result<(&str, &[u8]), String> {
    let truncated = || "is no whole NumPy file: it ends within its header".to_owned();
    let rest = bytes.strip_prefix(b"\x93NUMPY").ok_or("is no NumPy file: it begins with something else")?;
    let (version, rest) = rest.split_at_checked(2).ok_or_else(truncated)?;
    let (len, rest) = match version[0] {
        1 => {
            let (len, rest) = rest.split_at_checked(2).ok_or_else(truncated)?;
            (usize::from(u16::from_le_bytes([len[0], len[1]])), rest)
        }
        2 | 3 => {
            let (len, rest) = rest.split_at_checked(4).ok_or_else(truncated)?;
            (u32::from_le_bytes([len[0], len[1], len[2], len[3]]) as usize, rest)
        }
        other => return Err(format!("is a NumPy file of version {other}: 1 to 3 are read")),
    };
    let (header, values) = rest.split_at_checked(len).ok_or_else(truncated)?;
    let header = std::str::from_utf8(header).map_err(|_| "has a NumPy header that is no text")?;
    Ok((header, values))
}

/// The value of a key of the dictionary, up to the comma or brace that ends it.
fn field<'a>(header: &'a str, key: &str) -> Result<&'a str, String> {
    let quoted = format!("'{key}':");
    let place = header.find(&quoted).ok_or_else(|| format!("has a NumPy header without {key:?}"))?;
    Ok(header[place + quoted.len()..].trim_start())
}

fn parse_shape(header: &str) -> Result<Vec<usize>, String> {
    let wrong = || "has a NumPy header with a shape that is none".to_owned();
    let inside = field(header, "shape")?.strip_prefix('(').ok_or_else(wrong)?;
    let inside = &inside[..inside.find(')').ok_or_else(wrong)?];
    let parts = inside.split(',').map(str::trim).filter(|part| !part.is_empty());
    let shape: Vec<usize> = parts.map(|part| part.parse().map_err(|_| wrong())).collect::<Result<_, _>>()?;
    if shape.len() > 4 { Err(wrong()) } else { Ok(shape) }
}

/// Reads a whole file.
pub fn parse(bytes: &[u8]) -> Result<Array, String> {
    let (header, values) = header(bytes)?;
    let shape = parse_shape(header)?;
    let is_fortran = field(header, "fortran_order")?.starts_with("True");
    let descr = field(header, "descr")?;
    let descr =
        descr.strip_prefix('\'').and_then(|rest| rest.split_once('\'')).map_or("", |(descr, _)| descr);
    let width: usize = descr.get(2..).and_then(|width| width.parse().ok()).unwrap_or(0);
    if !matches!(width, 1 | 2 | 4 | 8) || !descr.starts_with(['<', '|', '=']) {
        return Err(format!("holds values of type {descr:?}: little-endian integers and floats are read"));
    }
    let len = shape.iter().try_fold(1usize, |len, dim| len.checked_mul(*dim));
    let expected = len.and_then(|len| len.checked_mul(width));
    let expected =
        expected.ok_or_else(|| format!("says its shape is {shape:?}, which no memory can hold"))?;
    if values.len() != expected {
        return Err(format!("says its shape is {shape:?}, {expected} bytes, but holds {}", values.len()));
    }
    let numbers = match &descr[1..] {
        "f4" => Numbers::Floats(each(values, f32::from_le_bytes)),
        "f8" => Numbers::Floats(each(values, |raw| f64::from_le_bytes(raw) as f32)),
        "f2" => Numbers::Floats(each(values, |raw| f16::from_le_bytes(raw).to_f32())),
        "i8" => Numbers::Ints(each(values, i64::from_le_bytes)),
        "i4" => Numbers::Ints(each(values, |raw| i64::from(i32::from_le_bytes(raw)))),
        "i2" => Numbers::Ints(each(values, |raw| i64::from(i16::from_le_bytes(raw)))),
        "i1" => Numbers::Ints(each(values, |raw| i64::from(i8::from_le_bytes(raw)))),
        "u8" => {
            let all: Vec<u64> = each(values, u64::from_le_bytes);
            let small = all.iter().map(|&value| i64::try_from(value)).collect::<Result<_, _>>();
            Numbers::Ints(small.map_err(|_| "holds a number above 2^63")?)
        }
        "u4" => Numbers::Ints(each(values, |raw| i64::from(u32::from_le_bytes(raw)))),
        "u2" => Numbers::Ints(each(values, |raw| i64::from(u16::from_le_bytes(raw)))),
        "u1" => Numbers::Ints(values.iter().map(|&value| i64::from(value)).collect()),
        other => return Err(format!("holds values of type {other:?}: integers and floats are read")),
    };
    let array = Array { shape, numbers };
    Ok(if is_fortran { transposed(array) } else { array })
}

fn each<const N: usize, T>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|raw| read(*raw)).collect()
}

/// An array in the order of Fortran, put into that of C.
fn transposed(array: Array) -> Array {
    fn reorder<T: Copy>(values: &[T], shape: &[usize]) -> Vec<T> {
        let mut strides = Vec::with_capacity(shape.len());
        let mut stride = 1;
        for dim in shape {
            strides.push(stride);
            stride *= dim;
        }
        let place = |mut number: usize| {
            let mut at = 0;
            for (dim, stride) in shape.iter().zip(&strides).rev() {
                at += number % dim * stride;
                number /= dim;
            }
            at
        };
        (0..values.len()).map(|number| values[place(number)]).collect()
    }
    let numbers = match &array.numbers {
        Numbers::Floats(values) => Numbers::Floats(reorder(values, &array.shape)),
        Numbers::Ints(values) => Numbers::Ints(reorder(values, &array.shape)),
    };
    Array { numbers, ..array }
}

/// A matrix of f32.
pub fn write_f32(out: &mut dyn Write, cols: usize, values: &[f32]) -> io::Result<()> {
    let rows = values.len() / cols.max(1);
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {cols}), }}");
    // Values begin at a multiple of 64, after a line break.
    while (header.len() + 11) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    out.write_all(b"\x93NUMPY\x01\x00")?;
    out.write_all(&(header.len() as u16).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    for part in values.chunks(1 << 14) {
        let bytes: Vec<u8> = part.iter().flat_map(|value| value.to_le_bytes()).collect();
        out.write_all(&bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, values: &[u8]) -> Vec<u8> {
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend(values);
        bytes
    }

    #[test]
    fn what_is_written_is_read() {
        let mut bytes = Vec::new();
        write_f32(&mut bytes, 3, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.5]).expect("writes");
        assert_eq!(bytes.len(), 64 + 24 + 64 * usize::from(bytes.len() > 88));
        let array = parse(&bytes).expect("reads");
        assert_eq!(array.shape, [2, 3]);
        assert_eq!(array.numbers, Numbers::Floats(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.5]));
    }

    #[test]
    fn other_types_and_orders_are_read() {
        let header = "{'descr': '<i4', 'fortran_order': True, 'shape': (2, 3), }";
        let values: Vec<u8> = [1i32, 4, 2, 5, 3, 6].iter().flat_map(|value| value.to_le_bytes()).collect();
        let array = parse(&file(header, &values)).expect("reads");
        assert_eq!(array.numbers, Numbers::Ints(vec![1, 2, 3, 4, 5, 6]));
        let array = parse(&file("{'descr': '|u1', 'fortran_order': False, 'shape': (3,), }", &[7, 8, 9]));
        assert_eq!(array.expect("reads").numbers, Numbers::Ints(vec![7, 8, 9]));
    }

    #[test]
    fn lies_are_named() {
        let whole = file("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1), }", &[0; 8]);
        for end in 0..whole.len() {
            parse(&whole[..end]).expect_err("truncated");
        }
        for (header, says) in [
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999, 9999999999), }", "no memory"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 1), }", "12 bytes, but holds 8"),
            ("{'descr': '>f4', 'fortran_order': False, 'shape': (2, 1), }", "little-endian"),
            ("{'descr': '<c8', 'fortran_order': False, 'shape': (1,), }", "integers and floats"),
            ("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", "integers and floats"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (-2, 1), }", "a shape that is none"),
            ("{'descr': '<f4', 'fortran_order': False}", "without \"shape\""),
        ] {
            let error = parse(&file(header, &[0; 8])).expect_err(header);
            assert!(error.contains(says), "{error}");
        }
    }
}
