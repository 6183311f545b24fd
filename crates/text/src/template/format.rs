//! Python's two ways of formatting: `'%s' % x` and `'{:.2f}'.format(x)`.
//!
//! A short pattern can ask for a huge text, so that widths and precisions are bounded and every field is charged.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::budget::{self, ChargedText};
use super::print;
use super::python::MAX_COUNT_ARGUMENT;

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// `[[fill]align][sign][#][0][width][grouping][.precision][type]`.
#[derive(Clone, Debug, Default)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    alternate: bool,
    grouping: Option<char>,
    width: usize,
    precision: Option<usize>,
    kind: Option<char>,
}

/// Reads a pattern character by character.
struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn next_if(&mut self, wanted: impl Fn(char) -> bool) -> Option<char> {
        let character = self.peek().filter(|&character| wanted(character))?;
        self.rest = &self.rest[character.len_utf8()..];
        Some(character)
    }

    fn take_until(&mut self, wanted: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(wanted).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest;
        taken
    }

    fn number(&mut self) -> Result<Option<usize>, Error> {
        let digits = self.take_until(|character| !character.is_ascii_digit());
        if digits.is_empty() {
            return Ok(None);
        }
        digits
            .parse()
            .ok()
            .filter(|&number| number <= MAX_COUNT_ARGUMENT as usize)
            .map(Some)
            .ok_or_else(|| invalid(format!("counts above {MAX_COUNT_ARGUMENT} are not supported")))
    }
}

impl Spec {
    fn parse(text: &str) -> Result<Self, Error> {
        let mut spec = Self::default();
        let is_align = |character: char| matches!(character, '<' | '>' | '=' | '^');
        let mut reader = Reader { rest: text };
        if let Some(fill) = reader.peek()
            && text[fill.len_utf8()..].starts_with(is_align)
        {
            spec.fill = reader.next_if(|_| true);
        }
        spec.align = reader.next_if(is_align);
        spec.sign = reader.next_if(|character| matches!(character, '+' | '-' | ' '));
        spec.alternate = reader.next_if(|character| character == '#').is_some();
        if reader.next_if(|character| character == '0').is_some() {
            spec.fill = spec.fill.or(Some('0'));
            spec.align = spec.align.or(Some('='));
        }
        spec.width = reader.number()?.unwrap_or(0);
        spec.grouping = reader.next_if(|character| matches!(character, ',' | '_'));
        if reader.next_if(|character| character == '.').is_some() {
            spec.precision = Some(reader.number()?.ok_or_else(|| invalid("a precision is missing"))?);
        }
        spec.kind = reader.next_if(|_| true);
        if !reader.rest.is_empty() {
            return Err(invalid("invalid format specification"));
        }
        Ok(spec)
    }

    /// Pads to the width; `sign` stays in front of zeros.
    fn pad(&self, sign: &str, body: &str, align_default: char) -> Result<String, Error> {
        let missing = self.width.saturating_sub(sign.chars().count() + body.chars().count());
        budget::charge((sign.len() + body.len() + missing * 4) as u64)?;
        let fill = self.fill.unwrap_or(' ');
        let run = |count: usize| fill.to_string().repeat(count);
        Ok(match self.align.unwrap_or(align_default) {
            '<' => format!("{sign}{body}{}", run(missing)),
            '^' => format!("{}{sign}{body}{}", run(missing / 2), run(missing - missing / 2)),
            '=' => format!("{sign}{}{body}", run(missing)),
            _ => format!("{}{sign}{body}", run(missing)),
        })
    }

    fn sign_of(&self, negative: bool) -> &'static str {
        match (negative, self.sign) {
            (true, _) => "-",
            (false, Some('+')) => "+",
            (false, Some(' ')) => " ",
            (false, _) => "",
        }
    }

    fn text(&self, text: &str) -> Result<String, Error> {
        if !matches!(self.kind, None | Some('s')) || self.sign.is_some() || self.align == Some('=') {
            return Err(invalid("this format does not work on a text"));
        }
        let cut: String = text.chars().take(self.precision.unwrap_or(usize::MAX)).collect();
        self.pad("", &cut, '<')
    }

    fn integer(&self, number: i128) -> Result<String, Error> {
        let size = number.unsigned_abs();
        let (prefix, digits) = match self.kind {
            None | Some('d' | 'n') => ("", size.to_string()),
            Some('x') => ("0x", format!("{size:x}")),
            Some('X') => ("0X", format!("{size:X}")),
            Some('o') => ("0o", format!("{size:o}")),
            Some('b') => ("0b", format!("{size:b}")),
            Some('c') => {
                let character = u32::try_from(size).ok().and_then(char::from_u32);
                let character = character.ok_or_else(|| invalid("no such character"))?;
                return self.pad("", &character.to_string(), '<');
            }
            Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%') => return self.float(number as f64),
            Some(_) => return Err(invalid("this format does not work on an integer")),
        };
        if self.precision.is_some() {
            return Err(invalid("an integer has no precision"));
        }
        let sign = format!("{}{}", self.sign_of(number < 0), if self.alternate { prefix } else { "" });
        self.pad(&sign, &group(&digits, self.grouping), '>')
    }

    fn float(&self, number: f64) -> Result<String, Error> {
        let size = number.abs();
        let precision = self.precision.unwrap_or(6);
        let upper = self.kind.is_some_and(|kind| kind.is_ascii_uppercase());
        let body = if size.is_finite() {
            match self.kind.map(|kind| kind.to_ascii_lowercase()) {
                Some('f') => format!("{size:.precision$}"),
                Some('e') => print::exponential(&format!("{size:.precision$e}")),
                Some('%') => format!("{:.precision$}%", size * 100.0),
                Some('g' | 'n') => general(size, precision, self.alternate),
                None if self.precision.is_some() => {
                    let text = general(size, precision, false);
                    if text.contains(['.', 'e']) { text } else { text + ".0" }
                }
                None => print::float(size),
                Some(_) => return Err(invalid("this format does not work on a float")),
            }
        } else {
            print::float(size)
        };
        let body = if upper { body.to_uppercase() } else { body };
        let whole = body.find(|character: char| !character.is_ascii_digit()).unwrap_or(body.len());
        let body = group(&body[..whole], self.grouping) + &body[whole..];
        self.pad(self.sign_of(number.is_sign_negative() && !number.is_nan()), &body, '>')
    }
}

/// Groups of three digits.
fn group(digits: &str, separator: Option<char>) -> String {
    let Some(separator) = separator else { return digits.to_owned() };
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(separator);
        }
        out.push(digit);
    }
    out
}

/// `%g`: significant digits, without an exponent where that is short.
fn general(size: f64, precision: usize, keep_zeros: bool) -> String {
    let precision = precision.max(1);
    let scientific = format!("{size:.*e}", precision - 1);
    let exponent: i64 =
        scientific.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0);
    let trim = |text: &str| {
        if keep_zeros || !text.contains('.') {
            return text.to_owned();
        }
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    if (-4..precision as i64).contains(&exponent) {
        let decimals = usize::try_from(precision as i64 - 1 - exponent).unwrap_or(0);
        return trim(&format!("{size:.decimals$}"));
    }
    let (digits, exponent) = scientific.split_once('e').expect("the format has an exponent");
    print::exponential(&format!("{}e{exponent}", trim(digits)))
}

fn integer_of(value: &Value) -> Option<i128> {
    match value.kind() {
        ValueKind::Bool => Some(i128::from(value.is_true())),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok(),
        _ => None,
    }
}

fn float_of(value: &Value) -> Option<f64> {
    match integer_of(value) {
        Some(integer) => Some(integer as f64),
        None if value.kind() == ValueKind::Number => f64::try_from(value.clone()).ok(),
        None => None,
    }
}

/// `format(value, spec)`.
fn formatted(value: &Value, spec: &str) -> Result<String, Error> {
    if spec.is_empty() {
        return print::to_text(value);
    }
    let spec = Spec::parse(spec)?;
    match value.kind() {
        ValueKind::String => spec.text(value.as_str().unwrap_or_default()),
        ValueKind::Bool if matches!(spec.kind, Some('s')) => spec.text(&print::to_text(value)?),
        ValueKind::Number | ValueKind::Bool => match integer_of(value) {
            Some(integer) => spec.integer(integer),
            None => spec.float(f64::try_from(value.clone())?),
        },
        other => Err(invalid(format!("a {other} cannot be formatted with a specification"))),
    }
}

/// The arguments of `str.format`.
struct Fields<'a> {
    positional: &'a [Value],
    named: Option<&'a Value>,
    next: usize,
}

impl Fields<'_> {
    fn next_positional(&mut self) -> Result<Value, Error> {
        self.next += 1;
        self.positional
            .get(self.next - 1)
            .cloned()
            .ok_or_else(|| invalid("str.format: an argument is missing"))
    }

    /// `name`, `0`, or nothing, then `.attribute` and `[item]`.
    fn value(&mut self, name: &str) -> Result<Value, Error> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut path) = name.split_at(end);
        let mut value = if first.is_empty() {
            self.next_positional()?
        } else if let Ok(index) = first.parse::<usize>() {
            let argument = self.positional.get(index).cloned();
            argument.ok_or_else(|| invalid("str.format: an argument is missing"))?
        } else {
            let named = self.named.map(|named| named.get_attr(first)).transpose()?;
            let missing = || invalid(format!("str.format: there is no argument {first}"));
            named.filter(|value| !value.is_undefined()).ok_or_else(missing)?
        };
        while !path.is_empty() {
            if let Some(rest) = path.strip_prefix('[') {
                let (key, rest) =
                    rest.split_once(']').ok_or_else(|| invalid("str.format: a ] is missing"))?;
                let key = key.parse::<i64>().map_or_else(|_| Value::from(key), Value::from);
                value = value.get_item(&key)?;
                path = rest;
            } else {
                let rest = path.strip_prefix('.').unwrap_or(path);
                let end = rest.find(['.', '[']).unwrap_or(rest.len());
                value = value.get_attr(&rest[..end])?;
                path = &rest[end..];
            }
            if value.is_undefined() {
                return Err(invalid("str.format: there is no such item"));
            }
        }
        Ok(value)
    }
}

/// `pattern.format(…)`.
pub(super) fn brace(pattern: &str, arguments: &[Value]) -> Result<String, Error> {
    let (positional, named) = match arguments.split_last() {
        Some((last, rest)) if last.is_kwargs() => (rest, Some(last)),
        _ => (arguments, None),
    };
    let mut fields = Fields { positional, named, next: 0 };
    brace_with(pattern, &mut fields, 0)
}

fn brace_with(pattern: &str, fields: &mut Fields<'_>, depth: usize) -> Result<String, Error> {
    use std::fmt::Write as _;
    let exhausted = |_| budget::charge(u64::MAX).expect_err("more than there is");
    let mut out = ChargedText::default();
    let mut reader = Reader { rest: pattern };
    while !reader.rest.is_empty() {
        out.write_str(reader.take_until(|character| matches!(character, '{' | '}'))).map_err(exhausted)?;
        if reader.rest.starts_with("{{") || reader.rest.starts_with("}}") {
            out.write_str(&reader.rest[..1]).map_err(exhausted)?;
            reader.rest = &reader.rest[2..];
            continue;
        }
        let Some(brace) = reader.next_if(|_| true) else { break };
        if brace == '}' {
            return Err(invalid("str.format: a single } in the text"));
        }
        let end = field_end(reader.rest).ok_or_else(|| invalid("str.format: a } is missing"))?;
        let (field, rest) = reader.rest.split_at(end);
        reader.rest = &rest[1..];
        let (name, spec) = field.split_once(':').unwrap_or((field, ""));
        let (name, conversion) = name.split_once('!').map_or((name, None), |(name, c)| (name, Some(c)));
        let value = fields.value(name)?;
        let value = match conversion {
            None => value,
            Some("s") => Value::from(print::to_text(&value)?),
            Some("r" | "a") => Value::from(print::to_repr(&value)?),
            Some(_) => return Err(invalid("str.format: only !s and !r are known")),
        };
        let spec = if !spec.contains('{') {
            spec.to_owned()
        } else if depth == 0 {
            brace_with(spec, fields, 1)?
        } else {
            return Err(invalid("str.format: fields are nested too deeply"));
        };
        out.write_str(&formatted(&value, &spec)?).map_err(exhausted)?;
    }
    Ok(out.0)
}

/// Where a field ends; its specification may hold fields.
fn field_end(text: &str) -> Option<usize> {
    let mut depth = 0;
    for (at, character) in text.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => return Some(at),
            '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// `pattern % arguments`: a tuple is a list of arguments, a mapping can be asked by name.
pub(super) fn percent(pattern: &str, arguments: &Value) -> Result<String, Error> {
    use std::fmt::Write as _;
    let exhausted = |_| budget::charge(u64::MAX).expect_err("more than there is");
    let positional: Vec<Value> =
        if arguments.is_tuple() { arguments.try_iter()?.collect() } else { vec![arguments.clone()] };
    budget::charge(positional.len() as u64)?;
    let mut next = positional.iter();
    let mut out = ChargedText::default();
    let mut reader = Reader { rest: pattern };
    while !reader.rest.is_empty() {
        out.write_str(reader.take_until(|character| character == '%')).map_err(exhausted)?;
        if reader.next_if(|_| true).is_none() {
            break;
        }
        let name = if reader.next_if(|character| character == '(').is_some() {
            let name = reader.take_until(|character| character == ')');
            reader.next_if(|_| true).ok_or_else(|| invalid("%: a ) is missing"))?;
            Some(name)
        } else {
            None
        };
        let spec = percent_spec(&mut reader)?;
        if spec.kind == Some('%') {
            out.write_str("%").map_err(exhausted)?;
            continue;
        }
        let value = match name {
            Some(name) => arguments.get_item(&Value::from(name)).ok().filter(|value| !value.is_undefined()),
            None => next.next().cloned(),
        };
        let value = value.ok_or_else(|| invalid("%: not enough arguments for the format"))?;
        out.write_str(&percent_field(&value, spec)?).map_err(exhausted)?;
    }
    let left_over = next.next().is_some() && !matches!(arguments.kind(), ValueKind::Map);
    if left_over && (arguments.is_tuple() || arguments.kind() != ValueKind::Seq) {
        return Err(invalid("%: not all arguments were converted"));
    }
    Ok(out.0)
}

fn percent_spec(reader: &mut Reader<'_>) -> Result<Spec, Error> {
    let mut spec = Spec::default();
    while let Some(flag) = reader.next_if(|character| matches!(character, '-' | '+' | ' ' | '0' | '#')) {
        match flag {
            '-' => spec.align = Some('<'),
            '0' if spec.align.is_none() => {
                spec.align = Some('=');
                spec.fill = Some('0');
            }
            '0' => {}
            '#' => spec.alternate = true,
            sign => spec.sign = Some(sign),
        }
    }
    if spec.align == Some('<') {
        spec.fill = None;
    }
    spec.width = reader.number()?.unwrap_or(0);
    if reader.next_if(|character| character == '.').is_some() {
        spec.precision = Some(reader.number()?.unwrap_or(0));
    }
    reader.next_if(|character| matches!(character, 'h' | 'l' | 'L'));
    spec.kind = Some(reader.next_if(|_| true).ok_or_else(|| invalid("%: the format is incomplete"))?);
    Ok(spec)
}

fn percent_field(value: &Value, mut spec: Spec) -> Result<String, Error> {
    let kind = spec.kind.unwrap_or('s');
    let number = || invalid(format!("%{kind} needs a number"));
    let text = |mut spec: Spec, text: String| {
        spec.kind = None;
        spec.sign = None;
        spec.fill = None;
        spec.align = Some(if spec.align == Some('<') { '<' } else { '>' });
        spec.text(&text)
    };
    match kind {
        's' => text(spec, print::to_text(value)?),
        'r' | 'a' => text(spec, print::to_repr(value)?),
        'c' => match value.as_str() {
            Some(one) if one.chars().count() == 1 => text(spec, one.to_owned()),
            Some(_) => Err(invalid("%c needs one character")),
            None => spec.integer(integer_of(value).ok_or_else(number)?),
        },
        'd' | 'i' | 'u' => {
            let float = float_of(value).ok_or_else(number)?;
            let integer = integer_of(value).unwrap_or(float.trunc() as i128);
            spec.kind = Some('d');
            spec.precision = None;
            spec.integer(integer)
        }
        'x' | 'X' | 'o' => spec.integer(integer_of(value).ok_or_else(number)?),
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => spec.float(float_of(value).ok_or_else(number)?),
        _ => Err(invalid(format!("%: {kind:?} is no conversion"))),
    }
}
