//! Methods of Python's texts, lists and dictionaries. Those that change a value do not exist: transformers renders in
//! a sandbox that refuses them.

use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{Error, State};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::budget::{self, ITEM_BYTES};
use super::python::{self, MAX_COUNT_ARGUMENT, invalid};
use super::{format, print};

/// What Python takes for white space in `strip` and `split`.
pub(super) fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}

/// Calls a method that the template engine does not know.
pub(super) fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    budget::charge_length(value)?;
    arguments.iter().try_for_each(budget::charge_length)?;
    if let Some(text) = value.as_str() {
        return of_text(state, value, text, name, arguments);
    }
    if value.kind() == ValueKind::Seq {
        arguments.iter().try_for_each(|argument| budget::charge_deep(argument).map(|_| ()))?;
        budget::charge_deep(value)?;
    }
    match (value.kind(), name) {
        (ValueKind::Seq, "index") => {
            let (wanted,): (&Value,) = from_args(arguments)?;
            let found = value.try_iter()?.position(|item| item == *wanted);
            found.map(Value::from).ok_or_else(|| invalid("index: the value is not in the list"))
        }
        (ValueKind::Seq, "copy") if !value.is_tuple() => Ok(value.try_iter()?.collect()),
        (ValueKind::Map, "copy") => Ok(value.clone()),
        _ => unknown_method_callback(state, value, name, arguments),
    }
}

fn of_text(
    state: &mut State,
    value: &Value,
    text: &str,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match name {
        "replace" => {
            let (old, new, count): (&str, &str, Option<i64>) = from_args(arguments)?;
            python::replace(text, old, new, count).map(Value::from)
        }
        "join" => {
            let (values,): (&Value,) = from_args(arguments)?;
            if values.kind() == ValueKind::Seq
                && values.try_iter()?.any(|item| item.kind() != ValueKind::String)
            {
                return Err(invalid("join: the list holds something that is no text"));
            }
            python::join(text, values, None).map(Value::from)
        }
        "format" => format::brace(text, arguments).map(Value::from),
        "strip" | "lstrip" | "rstrip" => {
            let (characters,): (Option<&str>,) = from_args(arguments)?;
            Ok(Value::from(strip(text, characters, name != "rstrip", name != "lstrip")))
        }
        "split" | "rsplit" => split(text, name == "rsplit", arguments),
        "splitlines" => {
            budget::charge((text.len() as u64).saturating_mul(ITEM_BYTES))?;
            let (keep, named): (Option<bool>, Kwargs) = from_args(arguments)?;
            let keep = keep.or(named.get("keepends")?).unwrap_or(false);
            Ok(lines(text, keep).into_iter().map(Value::from).collect())
        }
        "removeprefix" | "removesuffix" => {
            let (affix,): (&str,) = from_args(arguments)?;
            let rest =
                if name == "removeprefix" { text.strip_prefix(affix) } else { text.strip_suffix(affix) };
            Ok(Value::from(rest.unwrap_or(text)))
        }
        "partition" | "rpartition" => partition(text, name, arguments),
        "ljust" | "rjust" | "center" | "zfill" | "expandtabs" => pad(text, name, arguments),
        "find" | "rfind" | "index" | "rindex" | "count" | "startswith" | "endswith" => {
            search(state, value, text, name, arguments)
        }
        "title" | "swapcase" | "casefold" => {
            let () = from_args(arguments)?;
            Ok(Value::from(match name {
                "title" => title(text),
                "swapcase" => text.chars().map(swap_case).collect(),
                _ => text.to_lowercase().replace('ß', "ss"),
            }))
        }
        "isdigit" | "isdecimal" | "isnumeric" | "isspace" | "istitle" | "isidentifier" | "isprintable" => {
            let () = from_args(arguments)?;
            Ok(Value::from(is_all(text, name)))
        }
        _ => unknown_method_callback(state, value, name, arguments),
    }
}

pub(super) fn strip<'a>(text: &'a str, characters: Option<&str>, start: bool, end: bool) -> &'a str {
    let unwanted = |character: char| match characters {
        Some(characters) => characters.contains(character),
        None => is_space(character),
    };
    let text = if start { text.trim_start_matches(unwanted) } else { text };
    if end { text.trim_end_matches(unwanted) } else { text }
}

fn split(text: &str, from_end: bool, arguments: &[Value]) -> Result<Value, Error> {
    budget::charge((text.len() as u64).saturating_mul(ITEM_BYTES))?;
    let (separator, limit, named): (Option<&str>, Option<i64>, Kwargs) = from_args(arguments)?;
    let separator = separator.or(named.get("sep")?);
    let limit = limit.or(named.get("maxsplit")?).and_then(|limit| usize::try_from(limit).ok());
    named.assert_all_used()?;
    let pieces = limit.map_or(usize::MAX, |limit| limit.saturating_add(1));
    let mut parts: Vec<&str> = Vec::new();
    match separator {
        Some("") => return Err(invalid("split: the separator is empty")),
        Some(separator) if from_end => parts = text.rsplitn(pieces, separator).collect(),
        Some(separator) => parts = text.splitn(pieces, separator).collect(),
        None => {
            // White space between words is skipped; what the last part keeps is its far end.
            let mut rest = strip(text, None, !from_end, from_end);
            while !rest.is_empty() {
                let cut = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
                let Some(at) = cut.filter(|_| parts.len() + 1 < pieces) else {
                    parts.push(rest);
                    break;
                };
                let width = rest[at..].chars().next().map_or(1, char::len_utf8);
                let (before, after) = (&rest[..at], &rest[at + width..]);
                parts.push(if from_end { after } else { before });
                rest =
                    if from_end { strip(before, None, false, true) } else { strip(after, None, true, false) };
            }
        }
    }
    if from_end {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// `str.splitlines`.
pub(super) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let is_end = |character: char| {
        matches!(
            character,
            '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(is_end).unwrap_or(rest.len());
        let mut width = rest[end..].chars().next().map_or(0, char::len_utf8);
        if rest[end..].starts_with("\r\n") {
            width = 2;
        }
        lines.push(&rest[..if keep_ends { end + width } else { end }]);
        rest = &rest[end + width..];
    }
    lines
}

fn partition(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(arguments)?;
    let found = if name == "partition" { text.split_once(separator) } else { text.rsplit_once(separator) };
    let parts = match (found, name) {
        (Some((before, after)), _) => [before, separator, after],
        (None, "partition") => [text, "", ""],
        (None, _) => ["", "", text],
    };
    Ok(Value::from(minijinja::value::Tuple::from(parts.map(Value::from))))
}

fn pad(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (width, fill): (Option<i64>, Option<&str>) = from_args(arguments)?;
    let width = width.unwrap_or(if name == "expandtabs" { 8 } else { 0 });
    if width > MAX_COUNT_ARGUMENT {
        return Err(invalid(std::format!("counts above {MAX_COUNT_ARGUMENT} are not supported")));
    }
    let width = usize::try_from(width).unwrap_or(0);
    if name == "expandtabs" {
        return expand_tabs(text, width).map(Value::from);
    }
    let mut fills = fill.unwrap_or(" ").chars();
    let (Some(fill), None) = (fills.next(), fills.next()) else {
        return Err(invalid(std::format!("{name}: the fill must be one character")));
    };
    let missing = width.saturating_sub(text.chars().count());
    budget::charge((missing * 4 + text.len()) as u64)?;
    let run = |count: usize| fill.to_string().repeat(count);
    Ok(Value::from(match name {
        "ljust" => text.to_owned() + &run(missing),
        "rjust" => run(missing) + text,
        "center" => {
            // Python's rule for the odd one: left of a text of even width.
            let left = missing / 2 + (missing & width & 1);
            run(left) + text + &run(missing - left)
        }
        _ => {
            let sign = text.strip_prefix(['+', '-']).map_or(0, |_| 1);
            std::format!("{}{}{}", &text[..sign], "0".repeat(missing), &text[sign..])
        }
    }))
}

fn expand_tabs(text: &str, width: usize) -> Result<String, Error> {
    budget::charge((text.matches('\t').count() * width + text.len()) as u64)?;
    let (mut out, mut column) = (String::new(), 0);
    for character in text.chars() {
        match character {
            '\t' if width == 0 => {}
            '\t' => {
                let missing = width - column % width;
                out.push_str(&" ".repeat(missing));
                column += missing;
            }
            _ => {
                out.push(character);
                column = if matches!(character, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    Ok(out)
}

/// The searches may be limited to a part, counted in characters.
fn search(
    state: &mut State,
    value: &Value,
    text: &str,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let (wanted, start, end): (&Value, Option<i64>, Option<i64>) = from_args(arguments)?;
    let length = text.chars().count() as i64;
    let clamp = |position: i64| if position < 0 { (length + position).max(0) } else { position.min(length) };
    let (start, end) = (clamp(start.unwrap_or(0)), clamp(end.unwrap_or(length)));
    let byte = |position: i64| {
        text.char_indices().nth(usize::try_from(position).unwrap_or(0)).map_or(text.len(), |(at, _)| at)
    };
    let part = if start <= end { &text[byte(start)..byte(end)] } else { "" };
    let Some(needle) = wanted.as_str() else {
        // A tuple of prefixes.
        if matches!(name, "startswith" | "endswith") {
            return unknown_method_callback(state, &Value::from(part), name, &arguments[..1]);
        }
        return unknown_method_callback(state, value, name, arguments);
    };
    let at = match name {
        "startswith" => return Ok(Value::from(start <= end && part.starts_with(needle))),
        "endswith" => return Ok(Value::from(start <= end && part.ends_with(needle))),
        "count" => return Ok(Value::from(part.matches(needle).count())),
        "rfind" | "rindex" => part.rfind(needle),
        _ => part.find(needle),
    };
    match at {
        Some(at) => Ok(Value::from(start + part[..at].chars().count() as i64)),
        None if name.ends_with("index") => Err(invalid("index: the text does not occur")),
        None => Ok(Value::from(-1)),
    }
}

/// Every run of letters with a capital first.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for character in text.chars() {
        if inside {
            out.extend(character.to_lowercase());
        } else {
            out.extend(character.to_uppercase());
        }
        inside = character.is_lowercase() || character.is_uppercase();
    }
    out
}

fn swap_case(character: char) -> char {
    let mut swapped: Vec<char> = if character.is_lowercase() {
        character.to_uppercase().collect()
    } else {
        character.to_lowercase().collect()
    };
    if swapped.len() == 1 { swapped.remove(0) } else { character }
}

fn is_all(text: &str, name: &str) -> bool {
    match name {
        "isprintable" => return text.chars().all(print::is_printable),
        "isidentifier" => {
            let is_first = |character: char| character == '_' || character.is_alphabetic();
            return text.starts_with(is_first)
                && text.chars().all(|character| character == '_' || character.is_alphanumeric());
        }
        "istitle" => return text.chars().any(char::is_alphabetic) && title(text) == text,
        _ => {}
    }
    !text.is_empty()
        && text.chars().all(|character| match name {
            "isspace" => is_space(character),
            "isnumeric" => character.is_numeric(),
            // Decimal digits of any script are those with a run of ten; superscripts count as digits only.
            "isdecimal" => is_decimal(character),
            _ => is_decimal(character) || matches!(character, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '₀'..='₉'),
        })
}

/// Unicode's decimal digits (Nd): numeric, but neither a fraction, a letter-like numeral nor an enclosed one.
fn is_decimal(character: char) -> bool {
    let code = u32::from(character);
    character.is_ascii_digit()
        || (character.is_numeric()
            && !character.is_alphabetic()
            && matches!(code, 0x660..=0x2000 | 0xA620..=0xAC00 | 0xFF10..=0xFF19 | 0x1_0000..=0x1_FFFF)
            && !matches!(code, 0x9F4..=0x9F9 | 0xB72..=0xB77 | 0xBF0..=0xBF2 | 0xC78..=0xC7E | 0xD58..=0xD5E
                | 0xD70..=0xD78 | 0xF2A..=0xF33 | 0x1369..=0x137C | 0x17F0..=0x17F9 | 0x19DA
                | 0xA830..=0xA835 | 0x1_0100..=0x1_049F | 0x1_1000..=0x1_1065 | 0x1_F100..=0x1_F10C))
}
