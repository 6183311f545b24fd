//! JSON in and out of templates: values of a request become values of the template engine, in the order of their keys,
//! and the `tojson` filter writes them as transformers defines it:
//! Python's `json.dumps` with `ensure_ascii` off and no HTML escapes.

use std::fmt::{self, Write};

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::budget::{self, ChargedText};
use super::print;
use super::python::Generator;

/// The layout of the text.
struct Writer {
    out: ChargedText,
    /// One level of indentation; without it everything is on one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
    ensure_ascii: bool,
}

/// `value | tojson(indent=…, separators=(…, …), sort_keys=…, ensure_ascii=…)`.
#[allow(clippy::needless_pass_by_value)] // The template engine hands keyword arguments over by value.
pub(super) fn tojson(value: &Value, indent: Option<Value>, options: Kwargs) -> Result<String, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<Value>>("indent")?,
    };
    let indent = match indent.filter(|indent| !indent.is_none() && !indent.is_undefined()) {
        None => None,
        Some(indent) => Some(indentation(&indent)?),
    };
    let separators: Option<Vec<String>> = options.get("separators")?;
    let (item_separator, key_separator) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators must be a pair of texts")),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let mut writer = Writer {
        out: ChargedText::default(),
        indent,
        item_separator,
        key_separator,
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    writer.value(value, 0)?;
    Ok(writer.out.0)
}

/// A JSON value as templates see it.
pub(super) fn to_value(json: serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => Value::from(integer),
            (None, Some(integer)) => Value::from(integer),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text),
        Json::Array(items) => items.into_iter().map(to_value).collect(),
        Json::Object(items) => {
            Value::from_pairs(items.into_iter().map(|(key, value)| (Value::from(key), to_value(value))))
        }
    }
}

fn indentation(indent: &Value) -> Result<String, Error> {
    if let Some(text) = indent.as_str().filter(|text| text.len() <= 64) {
        return Ok(text.to_owned());
    }
    match indent.as_usize() {
        Some(width @ 0..=64) => Ok(" ".repeat(width)),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "indent must be a number from 0 to 64")),
    }
}

fn exhausted(_: fmt::Error) -> Error {
    budget::charge(u64::MAX).expect_err("more than there is")
}

impl Writer {
    fn put(&mut self, text: &str) -> Result<(), Error> {
        self.out.write_str(text).map_err(exhausted)
    }

    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.put("null"),
            ValueKind::Bool => self.put(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.text(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable if value.downcast_object_ref::<Generator>().is_none() => {
                self.put("[")?;
                let mut empty = true;
                for item in value.try_iter()? {
                    self.begin_item(&mut empty, depth + 1)?;
                    self.value(&item, depth + 1)?;
                }
                self.end(empty, depth, "]")
            }
            ValueKind::Map => {
                self.put("{")?;
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                budget::charge(keys.len() as u64)?;
                if self.sort_keys {
                    keys.sort();
                }
                let mut empty = true;
                for key in keys {
                    let item = value.get_item(&key)?;
                    self.begin_item(&mut empty, depth + 1)?;
                    self.key(&key)?;
                    let separator = self.key_separator.clone();
                    self.put(&separator)?;
                    self.value(&item, depth + 1)?;
                }
                self.end(empty, depth, "}")
            }
            other => {
                Err(Error::new(ErrorKind::BadSerialization, format!("a {other} cannot be written as JSON")))
            }
        }
    }

    fn key(&mut self, key: &Value) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.text(key.as_str().unwrap_or_default()),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                self.put("\"")?;
                self.value(key, 0)?;
                self.put("\"")
            }
            other => Err(Error::new(ErrorKind::BadSerialization, format!("a {other} cannot be a JSON key"))),
        }
    }

    fn begin_item(&mut self, empty: &mut bool, depth: usize) -> Result<(), Error> {
        if !std::mem::replace(empty, false) {
            let separator = self.item_separator.clone();
            self.put(&separator)?;
        }
        self.new_line(depth)
    }

    fn end(&mut self, empty: bool, depth: usize, close: &str) -> Result<(), Error> {
        if !empty {
            self.new_line(depth)?;
        }
        self.put(close)
    }

    fn new_line(&mut self, depth: usize) -> Result<(), Error> {
        let Some(indent) = self.indent.clone() else { return Ok(()) };
        self.put("\n")?;
        (0..depth).try_for_each(|_| self.put(&indent))
    }

    fn number(&mut self, value: &Value) -> Result<(), Error> {
        if value.is_integer() {
            return write!(self.out, "{value}").map_err(exhausted);
        }
        let number = f64::try_from(value.clone())?;
        let text = match number {
            _ if number.is_nan() => "NaN".to_owned(),
            f64::INFINITY => "Infinity".to_owned(),
            f64::NEG_INFINITY => "-Infinity".to_owned(),
            _ => print::float(number),
        };
        self.put(&text)
    }

    fn text(&mut self, text: &str) -> Result<(), Error> {
        self.put("\"")?;
        let mut plain_from = 0;
        for (at, character) in text.char_indices() {
            let plain = !matches!(character, '"' | '\\' | '\0'..='\u{1F}')
                && (!self.ensure_ascii || matches!(character, ' '..='~'));
            if plain {
                continue;
            }
            self.put(&text[plain_from..at])?;
            plain_from = at + character.len_utf8();
            match character {
                '"' => self.put("\\\"")?,
                '\\' => self.put("\\\\")?,
                '\n' => self.put("\\n")?,
                '\r' => self.put("\\r")?,
                '\t' => self.put("\\t")?,
                '\u{8}' => self.put("\\b")?,
                '\u{C}' => self.put("\\f")?,
                other => {
                    for unit in other.encode_utf16(&mut [0; 2]) {
                        write!(self.out, "\\u{unit:04x}").map_err(exhausted)?;
                    }
                }
            }
        }
        self.put(&text[plain_from..])?;
        self.put("\"")
    }
}
