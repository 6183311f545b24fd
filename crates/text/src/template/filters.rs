//! Jinja2's filters on texts and numbers, where the template engine has none or means something else by the name.

use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State};

use super::budget::{self, ChargedText, ITEM_BYTES};
use super::python::{self, MAX_COUNT_ARGUMENT, invalid};
use super::{format, json, methods, print};

/// Adds them to the environment.
pub(super) fn add(environment: &mut Environment<'_>) {
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("string", |value: &Value| print::to_text(value));
    environment.add_filter("lower", |value: &Value| changed(value, str::to_lowercase));
    environment.add_filter("upper", |value: &Value| changed(value, str::to_uppercase));
    environment.add_filter("capitalize", |value: &Value| changed(value, capitalize));
    environment.add_filter("title", |value: &Value| changed(value, title));
    environment.add_filter("trim", |value: &Value, characters: Option<&str>| {
        changed(value, |text| methods::strip(text, characters, true, true).to_owned())
    });
    for name in ["e", "escape"] {
        environment.add_filter(name, escape);
    }
    environment.add_filter("forceescape", |value: &Value| escape(&Value::from(print::to_text(value)?)));
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("items", items);
    environment.add_filter("wordcount", |value: &Value| {
        changed(value, |text| {
            text.split(|c: char| !c.is_alphanumeric() && c != '_')
                .filter(|word| !word.is_empty())
                .count()
                .to_string()
        })
        .map(|count| count.parse::<usize>().unwrap_or(0))
    });
    environment.add_filter("replace", |text: &Value, old: &Value, new: &Value, count: Option<i64>| {
        python::replace(&print::to_text(text)?, &print::to_text(old)?, &print::to_text(new)?, count)
    });
    environment.add_filter("join", join);
    environment.add_filter("indent", indent);
    environment.add_filter("truncate", truncate);
    environment.add_filter("wordwrap", wordwrap);
    environment.add_filter("center", |state: &mut State, value: &Value, width: Option<i64>| {
        let text = Value::from(print::to_text(value)?);
        methods::method(state, &text, "center", &[Value::from(width.unwrap_or(80))])
    });
    environment.add_filter("urlencode", urlencode);
    environment.add_filter("striptags", |value: &Value| changed(value, strip_tags));
    environment.add_filter("tojson", json::tojson);
    environment.add_filter("format", |arguments: Rest<ValueOrKwargs>| {
        let mut arguments = arguments.into_values();
        if arguments.is_empty() {
            return Err(invalid("format needs a text"));
        }
        let pattern = print::to_text(&arguments.remove(0))?;
        match arguments.last() {
            Some(named) if named.is_kwargs() => format::percent(&pattern, &named.clone()),
            _ => format::percent(&pattern, &Value::from(Tuple::from(arguments))),
        }
    });
}

/// What a function makes of a value as Python prints it; texts do not grow by more than their case.
fn changed(value: &Value, change: impl FnOnce(&str) -> String) -> Result<String, Error> {
    let text = print::to_text(value)?;
    budget::charge(text.len() as u64)?;
    Ok(change(&text))
}

fn capitalize(text: &str) -> String {
    let mut characters = text.chars();
    let first: String = characters.next().map_or_else(String::new, |first| first.to_uppercase().collect());
    first + &characters.as_str().to_lowercase()
}

/// Jinja2's filter, not Python's method: an apostrophe does not begin a word.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut begins = true;
    for character in text.chars() {
        let between = matches!(character, '-' | '(' | '{' | '[' | '<') || methods::is_space(character);
        if between {
            out.push(character);
        } else if begins {
            out.extend(character.to_uppercase());
        } else {
            out.extend(character.to_lowercase());
        }
        begins = between;
    }
    out
}

/// `default(value, default_value='', boolean=false)`.
#[allow(clippy::needless_pass_by_value)] // The template engine hands keyword arguments over by value.
fn default(
    value: &Value,
    other: Option<Value>,
    boolean: Option<bool>,
    named: Kwargs,
) -> Result<Value, Error> {
    let other = match other {
        Some(other) => other,
        None => named.get::<Option<Value>>("default_value")?.unwrap_or_else(|| Value::from("")),
    };
    let boolean = boolean.or(named.get("boolean")?).unwrap_or(false);
    named.assert_all_used()?;
    Ok(if value.is_undefined() || boolean && !value.is_true() { other } else { value.clone() })
}

/// `int(value, default=0, base=10)`: anything but a number gives the default.
#[allow(clippy::needless_pass_by_value)]
fn int(value: &Value, default: Option<Value>, base: Option<u32>, named: Kwargs) -> Result<Value, Error> {
    let default = default.or(named.get("default")?).unwrap_or_else(|| Value::from(0));
    let base = base.or(named.get("base")?).unwrap_or(10);
    named.assert_all_used()?;
    budget::charge_length(value)?;
    let number = match value.kind() {
        ValueKind::Bool => Some(i128::from(value.is_true())),
        ValueKind::Number if value.is_integer() => return Ok(value.clone()),
        ValueKind::Number => f64::try_from(value.clone()).ok().filter(|n| n.is_finite()).map(|n| n as i128),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            parse_integer(text, base)
                .or_else(|| parse_float(text).filter(|n| n.is_finite()).map(|n| n as i128))
        }
        _ => None,
    };
    Ok(number
        .map_or(default, |number| i64::try_from(number).map_or_else(|_| Value::from(number), Value::from)))
}

/// Digits of a Python literal: single underscores between them are allowed.
fn without_underscores(text: &str) -> Option<String> {
    let wrong = text.starts_with('_') || text.ends_with('_') || text.contains("__");
    (!wrong).then(|| text.replace('_', ""))
}

fn parse_integer(text: &str, base: u32) -> Option<i128> {
    let text = methods::strip(text, None, true, true);
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let lower = digits.to_ascii_lowercase();
    let prefix = match base {
        16 => "0x",
        8 => "0o",
        2 => "0b",
        _ => "",
    };
    let digits = without_underscores(lower.strip_prefix(prefix).unwrap_or(&lower))?;
    if !(2..=36).contains(&base) || digits.starts_with(['+', '-']) {
        return None;
    }
    let number = i128::from_str_radix(&digits, base).ok()?;
    Some(if negative { -number } else { number })
}

fn parse_float(text: &str) -> Option<f64> {
    without_underscores(methods::strip(text, None, true, true))?.parse().ok()
}

/// `float(value, default=0.0)`.
#[allow(clippy::needless_pass_by_value)]
fn float(value: &Value, default: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let default = default.or(named.get("default")?).unwrap_or_else(|| Value::from(0.0));
    named.assert_all_used()?;
    budget::charge_length(value)?;
    let number = match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        ValueKind::String => parse_float(value.as_str().unwrap_or_default()),
        _ => None,
    };
    Ok(number.map_or(default, Value::from))
}

/// The text with HTML's characters escaped, marked as safe; one that is marked already stays as it is.
pub(super) fn escape(value: &Value) -> Result<Value, Error> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    let text = print::to_text(value)?;
    budget::charge((text.len() as u64).saturating_mul(5))?;
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            other => out.push(other),
        }
    }
    Ok(Value::from_safe_string(out))
}

/// What is undefined has no length of its own: it is empty.
fn length(value: &Value) -> Result<usize, Error> {
    match value.as_str() {
        _ if value.is_undefined() => Ok(0),
        Some(text) => {
            budget::charge_length(value)?;
            Ok(text.chars().count())
        }
        None => value.len().ok_or_else(|| invalid(std::format!("a {} has no length", value.kind()))),
    }
}

/// Pairs of keys and values.
fn items(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() {
        return Ok(Value::from(Vec::<Value>::new()));
    }
    if value.kind() != ValueKind::Map {
        return Err(invalid("items needs a mapping"));
    }
    budget::charge(budget::length(value).saturating_mul(ITEM_BYTES))?;
    let pair = |key: Value| {
        let item = value.get_item(&key)?;
        Ok(Value::from(Tuple::from([key, item])))
    };
    let pairs = value.try_iter()?.map(pair).collect::<Result<Vec<Value>, Error>>()?;
    Ok(python::generator(pairs))
}

/// `join(value, d='', attribute=none)`.
#[allow(clippy::needless_pass_by_value)]
fn join(
    value: &Value,
    separator: Option<&Value>,
    attribute: Option<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    python::refuse_none(value, "join")?;
    let separator = match separator {
        Some(separator) => print::to_text(separator)?,
        None => named
            .get::<Option<Value>>("d")?
            .map(|text| print::to_text(&text))
            .transpose()?
            .unwrap_or_default(),
    };
    let attribute = attribute.or(named.get("attribute")?).map(|name| print::to_text(&name)).transpose()?;
    named.assert_all_used()?;
    python::join(&separator, value, attribute.as_deref())
}

/// `indent(value, width=4, first=false, blank=false)`; the width may be a text.
#[allow(clippy::needless_pass_by_value)]
fn indent(
    value: &Value,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    named: Kwargs,
) -> Result<String, Error> {
    let width = width.or(named.get("width")?).unwrap_or_else(|| Value::from(4));
    let first = first.or(named.get("first")?).unwrap_or(false);
    let blank = blank.or(named.get("blank")?).unwrap_or(false);
    named.assert_all_used()?;
    let unit = match (width.as_str(), width.as_i64()) {
        (Some(text), _) => text.to_owned(),
        (None, Some(count)) if count <= MAX_COUNT_ARGUMENT => " ".repeat(usize::try_from(count).unwrap_or(0)),
        _ => {
            return Err(invalid(std::format!("indent: a width above {MAX_COUNT_ARGUMENT} is not supported")));
        }
    };
    let text = print::to_text(value)? + "\n";
    let lines = methods::lines(&text, false);
    budget::charge((text.len() + lines.len() * unit.len()) as u64)?;
    let mut out = String::with_capacity(text.len());
    for (index, line) in lines.iter().enumerate() {
        if index > 0 {
            out.push('\n');
        }
        if if index == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&unit);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `truncate(value, length=255, killwords=false, end='...', leeway=5)`.
#[allow(clippy::needless_pass_by_value)]
fn truncate(
    value: &Value,
    length: Option<usize>,
    kill_words: Option<bool>,
    end: Option<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let length = length.or(named.get("length")?).unwrap_or(255);
    let kill_words = kill_words.or(named.get("killwords")?).unwrap_or(false);
    let end = end.or(named.get("end")?).map_or_else(|| Ok("...".to_owned()), |end| print::to_text(&end))?;
    let leeway = named.get::<Option<usize>>("leeway")?.unwrap_or(5);
    named.assert_all_used()?;
    let text = print::to_text(value)?;
    budget::charge(text.len() as u64)?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let keep = length.checked_sub(end.chars().count());
    let keep = keep.ok_or_else(|| invalid("truncate: the length is shorter than the end"))?;
    let kept: String = text.chars().take(keep).collect();
    let kept = if kill_words {
        kept.as_str()
    } else {
        kept.rsplit_once(' ').map_or(kept.as_str(), |(words, _)| words)
    };
    Ok(kept.to_owned() + &end)
}

/// `wordwrap(value, width=79)`: lines of whole words; longer words are cut.
fn wordwrap(value: &Value, width: Option<usize>) -> Result<String, Error> {
    let width = width.unwrap_or(79).max(1);
    let text = print::to_text(value)?;
    budget::charge((text.len() as u64).saturating_mul(ITEM_BYTES))?;
    let mut out = Vec::new();
    for line in methods::lines(&text, false) {
        let mut current: Vec<char> = Vec::new();
        let mut wrapped = Vec::new();
        for word in line.split(' ') {
            let mut word: Vec<char> = word.chars().collect();
            if !current.is_empty() && current.len() + 1 + word.len() > width {
                wrapped.push(std::mem::take(&mut current));
            } else if !current.is_empty() {
                current.push(' ');
            }
            while word.len() > width {
                wrapped.push(word.drain(..width).collect());
            }
            current.extend(word);
        }
        wrapped.push(current);
        out.extend(wrapped.into_iter().map(String::from_iter));
    }
    Ok(out.join("\n"))
}

fn quote(text: &str, is_path: bool, out: &mut ChargedText) -> Result<(), Error> {
    use std::fmt::Write as _;
    for byte in text.bytes() {
        let written = match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                out.write_char(char::from(byte))
            }
            b'/' if is_path => out.write_char('/'),
            b' ' if !is_path => out.write_char('+'),
            other => write!(out, "%{other:02X}"),
        };
        written.map_err(|_| budget::charge(u64::MAX).expect_err("more than there is"))?;
    }
    Ok(())
}

fn urlencode(value: &Value) -> Result<String, Error> {
    let mut out = ChargedText::default();
    if value.kind() != ValueKind::Map {
        quote(&print::to_text(value)?, true, &mut out)?;
        return Ok(out.0);
    }
    for (index, key) in value.try_iter()?.enumerate() {
        if index > 0 {
            out.0.push('&');
        }
        quote(&print::to_text(&key)?, false, &mut out)?;
        out.0.push('=');
        quote(&print::to_text(&value.get_item(&key)?)?, false, &mut out)?;
    }
    Ok(out.0)
}

/// Without tags and comments, and with single spaces.
fn strip_tags(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(open) = rest.find('<') {
        out.push_str(&rest[..open]);
        let tag = &rest[open..];
        let end = if tag.starts_with("<!--") {
            tag.find("-->").map(|at| at + 3)
        } else {
            tag.find('>').map(|at| at + 1)
        };
        let Some(end) = end else {
            rest = tag;
            break;
        };
        rest = &tag[end..];
    }
    out.push_str(rest);
    out.split(methods::is_space).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}
