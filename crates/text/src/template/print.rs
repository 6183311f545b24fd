//! Values as Python prints them: `str()` and `repr()`.
//!
//! The template engine prints like Rust in places (floats without exponents, its own escapes); prompts must have
//! Python's bytes.

use std::fmt::{self, Write};

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::budget::{self, ChargedText};

/// Python gives up at about this depth as well (`RecursionError`).
const MAX_DEPTH: usize = 900;

fn exhausted(_: fmt::Error) -> Error {
    budget::charge(u64::MAX).expect_err("more than there is")
}

/// A value as Python's `str()` prints it.
pub(super) fn to_text(value: &Value) -> Result<String, Error> {
    let mut text = ChargedText::default();
    push_text(value, &mut text)?;
    Ok(text.0)
}

/// A value as Python's `repr()` prints it.
pub(super) fn to_repr(value: &Value) -> Result<String, Error> {
    let mut text = ChargedText::default();
    push_repr(value, &mut text, 0)?;
    Ok(text.0)
}

/// Appends a value as Python's `str()` prints it.
pub(super) fn push_text(value: &Value, out: &mut impl Write) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text).map_err(exhausted),
        None if value.is_undefined() => Ok(()),
        None => push_repr(value, out, 0),
    }
}

fn push_repr(value: &Value, out: &mut impl Write, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "the value is nested too deeply to be printed"));
    }
    let mut put = |text: &str| out.write_str(text).map_err(exhausted);
    match value.kind() {
        ValueKind::Undefined => put("Undefined"),
        ValueKind::String => push_quoted(value.as_str().unwrap_or_default(), out).map_err(exhausted),
        ValueKind::Number if !value.is_integer() => put(&float(f64::try_from(value.clone())?)),
        ValueKind::Seq => {
            let is_tuple = value.is_tuple();
            put(if is_tuple { "(" } else { "[" })?;
            let mut count = 0;
            for item in value.try_iter()? {
                if count > 0 {
                    out.write_str(", ").map_err(exhausted)?;
                }
                push_repr(&item, out, depth + 1)?;
                count += 1;
            }
            let close = match (is_tuple, count) {
                (true, 1) => ",)",
                (true, _) => ")",
                (false, _) => "]",
            };
            out.write_str(close).map_err(exhausted)
        }
        ValueKind::Map => {
            put("{")?;
            for (index, key) in value.try_iter()?.enumerate() {
                if index > 0 {
                    out.write_str(", ").map_err(exhausted)?;
                }
                push_repr(&key, out, depth + 1)?;
                out.write_str(": ").map_err(exhausted)?;
                push_repr(&value.get_item(&key)?, out, depth + 1)?;
            }
            out.write_str("}").map_err(exhausted)
        }
        _ => write!(out, "{value}").map_err(exhausted),
    }
}

/// A text as `repr()` writes it.
fn push_quoted(text: &str, out: &mut impl Write) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    let mut plain_from = 0;
    for (at, character) in text.char_indices() {
        if character != quote && character != '\\' && is_printable(character) {
            continue;
        }
        out.write_str(&text[plain_from..at])?;
        plain_from = at + character.len_utf8();
        match character {
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            '\\' => out.write_str("\\\\")?,
            _ if character == quote => write!(out, "\\{character}")?,
            _ => match u32::from(character) {
                code @ 0..=0xFF => write!(out, "\\x{code:02x}")?,
                code @ 0x100..=0xFFFF => write!(out, "\\u{code:04x}")?,
                code => write!(out, "\\U{code:08x}")?,
            },
        }
    }
    out.write_str(&text[plain_from..])?;
    out.write_char(quote)
}

/// `str.isprintable` of one character. Rust's `Debug` escapes the same general categories; besides them only marks
/// at the beginning of a text, which is why a letter goes first.
pub(super) fn is_printable(character: char) -> bool {
    if character.is_ascii() {
        return (' '..='~').contains(&character);
    }
    let mut two = String::from("a");
    two.push(character);
    !two.escape_debug().skip(1).any(|escaped| escaped == '\\')
}

/// A number as Python's `repr` writes it: shortest digits, an exponent below 1e-4 and from 1e16 on.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf".to_owned() } else { "-inf".to_owned() };
    }
    let size = number.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        return exponential(&format!("{number:e}"));
    }
    format!("{number:?}")
}

/// Rust's `1.5e7` as Python's `1.5e+07`.
pub(super) fn exponential(text: &str) -> String {
    let (digits, exponent) = text.split_once('e').expect("the format has an exponent");
    let exponent: i32 = exponent.parse().expect("the exponent is a number");
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_look_like_pythons() {
        for (number, expect) in [
            (1.0, "1.0"),
            (-0.5, "-0.5"),
            (1e16, "1e+16"),
            (123456789012345.0, "123456789012345.0"),
            (1e-5, "1e-05"),
            (0.0001, "0.0001"),
            (1.5e300, "1.5e+300"),
            (0.0, "0.0"),
        ] {
            assert_eq!(float(number), expect);
        }
    }
}
