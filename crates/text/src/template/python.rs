//! What templates expect of Python: operators on texts and lists, string methods, filters and tests, each charged
//! for the data it touches (see `budget`).
//!
//! The filters and tests are the template engine's own behind a charge; only those on the list below exist. Where a
//! short call could ask for a huge result (paddings, repetitions, replacements), the result is sized up first.

use minijinja::value::{Rest, Value, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, filters, functions, tests};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::budget::{self, ChargedText, ITEM_BYTES};
use super::json;

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// How a filter or test is charged.
#[derive(Clone, Copy, Debug)]
enum Cost {
    /// Once over the value, making at most as much as it is long.
    Length,
    /// Once over the value, making a list of its items.
    List,
    /// Compares values with each other or with arguments: everything inside them may be looked at.
    Deep,
    /// Runs something for each item, with the same arguments.
    EachItem,
}

fn charge(cost: Cost, arguments: &[Value]) -> Result<(), Error> {
    let Some((value, rest)) = arguments.split_first() else { return Ok(()) };
    match cost {
        Cost::Length => budget::charge_length(value),
        Cost::List => budget::charge(budget::length(value).saturating_mul(ITEM_BYTES)),
        Cost::Deep => arguments.iter().try_for_each(|argument| budget::charge_deep(argument).map(|_| ())),
        Cost::EachItem => {
            budget::charge_deep(value)?;
            let mut each = ITEM_BYTES;
            for argument in rest {
                each += budget::charge_deep(argument)?;
            }
            budget::charge(budget::length(value).saturating_mul(each))
        }
    }
}

/// No sound template pads, batches or rounds by more than this.
const MAX_COUNT_ARGUMENT: i64 = 10_000;

fn add_filters(environment: &mut Environment<'_>) {
    let mut add = |name: &'static str, cost: Cost, function: Value| {
        environment.add_filter(name, move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
            let arguments = arguments.into_values();
            charge(cost, &arguments)?;
            function.call(state, &arguments)
        });
    };
    for (name, function) in [
        ("safe", Value::from_function(filters::safe)),
        ("lower", Value::from_function(filters::lower)),
        ("upper", Value::from_function(filters::upper)),
        ("title", Value::from_function(filters::title)),
        ("capitalize", Value::from_function(filters::capitalize)),
        ("length", Value::from_function(filters::length)),
        ("count", Value::from_function(filters::length)),
        ("trim", Value::from_function(filters::trim)),
        ("default", Value::from_function(filters::default)),
        ("d", Value::from_function(filters::default)),
        ("abs", Value::from_function(filters::abs)),
        ("int", Value::from_function(filters::int)),
        ("float", Value::from_function(filters::float)),
        ("attr", Value::from_function(filters::attr)),
        ("first", Value::from_function(filters::first)),
        ("last", Value::from_function(filters::last)),
        ("bool", Value::from_function(filters::bool)),
    ] {
        add(name, Cost::Length, function);
    }
    for (name, function) in [
        ("items", Value::from_function(filters::items)),
        ("reverse", Value::from_function(filters::reverse)),
        ("list", Value::from_function(filters::list)),
        ("split", Value::from_function(filters::split)),
        ("lines", Value::from_function(filters::lines)),
    ] {
        add(name, Cost::List, function);
    }
    for (name, function) in [
        ("dictsort", Value::from_function(filters::dictsort)),
        ("min", Value::from_function(filters::min)),
        ("max", Value::from_function(filters::max)),
        ("sort", Value::from_function(filters::sort)),
        ("sum", Value::from_function(filters::sum)),
        ("groupby", Value::from_function(filters::groupby)),
        ("unique", Value::from_function(filters::unique)),
    ] {
        add(name, Cost::Deep, function);
    }
    for (name, function) in [
        ("select", Value::from_function(filters::select)),
        ("reject", Value::from_function(filters::reject)),
        ("selectattr", Value::from_function(filters::selectattr)),
        ("rejectattr", Value::from_function(filters::rejectattr)),
        ("map", Value::from_function(filters::map)),
    ] {
        add(name, Cost::EachItem, function);
    }
    add_sized_filters(environment);
}

/// Filters whose result can be larger than their input, or that print.
fn add_sized_filters(environment: &mut Environment<'_>) {
    for (name, function) in [
        ("batch", Value::from_function(filters::batch)),
        ("slice", Value::from_function(filters::slice)),
        ("round", Value::from_function(filters::round)),
        ("indent", Value::from_function(filters::indent)),
    ] {
        environment.add_filter(name, move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
            let arguments = arguments.into_values();
            check_counts(&arguments)?;
            let lines =
                arguments.first().and_then(Value::as_str).map_or(1, |text| text.lines().count() as u64);
            budget::charge(lines.saturating_mul(if name == "indent" {
                MAX_COUNT_ARGUMENT as u64 / 100
            } else {
                1
            }))?;
            charge(Cost::List, &arguments)?;
            budget::charge(MAX_COUNT_ARGUMENT as u64)?;
            function.call(state, &arguments)
        });
    }
    environment.add_filter("replace", |text: &Value, old: &str, new: &str, count: Option<i64>| {
        replace(&budget::to_text(text)?, old, new, count)
    });
    environment.add_filter("string", |value: &Value| budget::to_text(value));
    environment.add_filter("join", join_filter);
    environment.add_filter("tojson", json::tojson);
    environment.add_filter("format", |state: &mut State, arguments: Rest<ValueOrKwargs>| {
        let arguments = arguments.into_values();
        let pattern = arguments.first().and_then(Value::as_str).unwrap_or_default();
        check_percent_format(pattern)?;
        charge_fields(pattern.matches('%').count(), &arguments)?;
        Value::from_function(filters::format).call(state, &arguments)
    });
}

fn check_counts(arguments: &[Value]) -> Result<(), Error> {
    let too_large = |value: &Value| value.as_i64().is_some_and(|count| count.abs() > MAX_COUNT_ARGUMENT);
    for argument in arguments.iter().skip(1) {
        let named = if argument.is_kwargs() {
            argument.try_iter()?.filter_map(|key| argument.get_item(&key).ok()).any(|value| too_large(&value))
        } else {
            false
        };
        if named || too_large(argument) {
            return Err(invalid(format!("counts above {MAX_COUNT_ARGUMENT} are not supported")));
        }
    }
    Ok(())
}

/// Widths and precisions could ask for gigabytes; templates use the plain conversions.
fn check_percent_format(pattern: &str) -> Result<(), Error> {
    let mut rest = pattern;
    while let Some(at) = rest.find('%') {
        rest = &rest[at + 1..];
        match rest.chars().next() {
            Some(kind @ ('s' | 'd' | 'i' | 'r' | 'f' | '%')) => rest = &rest[kind.len_utf8()..],
            _ => return Err(invalid("only %s, %d, %i, %r, %f and %% are supported in format")),
        }
    }
    Ok(())
}

/// The same for `str.format`: fields may be named, but not formatted.
fn check_brace_format(pattern: &str) -> Result<(), Error> {
    let mut in_field = false;
    for character in pattern.chars() {
        match character {
            '{' if in_field => in_field = false,
            '{' => in_field = true,
            '}' => in_field = false,
            ':' | '!' if in_field => {
                return Err(invalid("format specifications are not supported in str.format"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Every field of a format may print every argument.
fn charge_fields(fields: usize, arguments: &[Value]) -> Result<(), Error> {
    for argument in arguments {
        let size = budget::to_text(argument)?.len() as u64;
        budget::charge(size.saturating_mul(fields as u64))?;
    }
    Ok(())
}

fn join_filter(value: &Value, separator: Option<&Value>, attribute: Option<&str>) -> Result<String, Error> {
    let separator = separator.map(budget::to_text).transpose()?.unwrap_or_default();
    join(&separator, value, attribute)
}

fn join(separator: &str, values: &Value, attribute: Option<&str>) -> Result<String, Error> {
    use std::fmt::Write as _;
    let mut out = ChargedText::default();
    for (index, value) in values.try_iter()?.enumerate() {
        if index > 0 && out.write_str(separator).is_err() {
            budget::charge(u64::MAX)?;
        }
        match attribute {
            Some(attribute) => budget::push_text(&value.get_attr(attribute)?, &mut out)?,
            None => budget::push_text(&value, &mut out)?,
        }
    }
    Ok(out.0)
}

fn replace(text: &str, old: &str, new: &str, count: Option<i64>) -> Result<String, Error> {
    let limit = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    budget::charge(text.len() as u64)?;
    let matches = if old.is_empty() { text.chars().count() + 1 } else { text.matches(old).count() };
    let added = (matches.min(limit) as u64).saturating_mul(new.len() as u64);
    budget::charge((text.len() as u64).saturating_add(added))?;
    Ok(text.replacen(old, new, limit))
}

fn add_tests(environment: &mut Environment<'_>) {
    let mut add = |name: &'static str, cost: Cost, function: Value| {
        environment.add_test(name, move |state: &mut State, arguments: Rest<Value>| {
            charge(cost, &arguments)?;
            function.call(state, &arguments).map(|value| value.is_true())
        });
    };
    for (name, function) in [
        ("undefined", Value::from_function(tests::is_undefined)),
        ("defined", Value::from_function(tests::is_defined)),
        ("none", Value::from_function(tests::is_none)),
        ("boolean", Value::from_function(tests::is_boolean)),
        ("odd", Value::from_function(tests::is_odd)),
        ("even", Value::from_function(tests::is_even)),
        ("divisibleby", Value::from_function(tests::is_divisibleby)),
        ("number", Value::from_function(tests::is_number)),
        ("integer", Value::from_function(tests::is_integer)),
        ("float", Value::from_function(tests::is_float)),
        ("string", Value::from_function(tests::is_string)),
        ("iterable", Value::from_function(is_iterable)),
        ("sequence", Value::from_function(is_sequence)),
        ("mapping", Value::from_function(tests::is_mapping)),
        ("true", Value::from_function(tests::is_true)),
        ("false", Value::from_function(tests::is_false)),
        ("lower", Value::from_function(tests::is_lower)),
        ("upper", Value::from_function(tests::is_upper)),
        ("filter", Value::from_function(tests::is_filter)),
        ("test", Value::from_function(tests::is_test)),
    ] {
        // What a value is does not depend on its length; only the case tests read it.
        add(name, Cost::Length, function);
    }
    for (names, function) in [
        (&["eq", "equalto", "=="][..], Value::from_function(tests::is_eq)),
        (&["ne", "!="], Value::from_function(tests::is_ne)),
        (&["lt", "lessthan", "<"], Value::from_function(tests::is_lt)),
        (&["le", "<="], Value::from_function(tests::is_le)),
        (&["gt", "greaterthan", ">"], Value::from_function(tests::is_gt)),
        (&["ge", ">="], Value::from_function(tests::is_ge)),
        (&["in"], Value::from_function(tests::is_in)),
        (&["sameas"], Value::from_function(tests::is_sameas)),
    ] {
        for name in names {
            add(name, Cost::Deep, function.clone());
        }
    }
}

/// In Jinja2 a text is a sequence and can be iterated over, and so are mappings.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
}

fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || value.try_iter().is_ok() && !value.is_undefined()
}

/// `+` of any number of operands, from the left.
fn add(operands: Rest<Value>) -> Result<Value, Error> {
    if operands.iter().all(|operand| operand.kind() == ValueKind::String) {
        return concat_texts(&operands);
    }
    let mut operands = operands.0.into_iter();
    let first = operands.next().ok_or_else(|| invalid("nothing to add"))?;
    operands.try_fold(first, |left, right| add_two(&left, &right))
}

fn add_two(left: &Value, right: &Value) -> Result<Value, Error> {
    let is_list = |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    if is_list(left) && is_list(right) {
        budget::charge(
            budget::length(left).saturating_add(budget::length(right)).saturating_mul(ITEM_BYTES),
        )?;
        let mut items: Vec<Value> = left.try_iter()?.collect();
        items.extend(right.try_iter()?);
        return Ok(Value::from(items));
    }
    match (left.as_str(), right.as_str()) {
        (Some(_), Some(_)) => concat_texts(&[left.clone(), right.clone()]),
        _ => numbers(left, right, "+", i128::checked_add, |a, b| a + b),
    }
}

/// `~`: every operand is printed.
#[allow(clippy::needless_pass_by_value)] // The template engine hands arguments over by value.
fn concat(operands: Rest<Value>) -> Result<Value, Error> {
    concat_texts(&operands)
}

fn concat_texts(operands: &[Value]) -> Result<Value, Error> {
    let mut out = ChargedText::default();
    operands.iter().try_for_each(|operand| budget::push_text(operand, &mut out))?;
    Ok(Value::from(out.0))
}

/// `*` of any number of operands, from the left.
fn multiply(operands: Rest<Value>) -> Result<Value, Error> {
    let mut operands = operands.0.into_iter();
    let first = operands.next().ok_or_else(|| invalid("nothing to multiply"))?;
    operands.try_fold(first, |left, right| multiply_two(&left, &right))
}

fn multiply_two(left: &Value, right: &Value) -> Result<Value, Error> {
    let (value, count) = match (left.kind(), right.kind()) {
        (ValueKind::String | ValueKind::Seq | ValueKind::Iterable, ValueKind::Number) => (left, right),
        (ValueKind::Number, ValueKind::String | ValueKind::Seq | ValueKind::Iterable) => (right, left),
        _ => return numbers(left, right, "*", i128::checked_mul, |a, b| a * b),
    };
    let count = count
        .as_i64()
        .ok_or_else(|| invalid("a text or list can only be repeated a whole number of times"))?;
    let count = usize::try_from(count).unwrap_or(0);
    let size = budget::length(value).saturating_mul(count as u64);
    if let Some(text) = value.as_str() {
        budget::charge(size)?;
        return Ok(Value::from(text.repeat(count)));
    }
    budget::charge(size.saturating_mul(ITEM_BYTES))?;
    let items: Vec<Value> = value.try_iter()?.collect();
    let length = items.len().saturating_mul(count);
    Ok(items.into_iter().cycle().take(length).collect())
}

fn numbers(
    left: &Value,
    right: &Value,
    operator: &str,
    integers: fn(i128, i128) -> Option<i128>,
    floats: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    let unsupported =
        || invalid(format!("{operator} does not work on a {} and a {}", left.kind(), right.kind()));
    let integer = |value: &Value| -> Option<i128> {
        if value.kind() == ValueKind::Bool {
            return Some(i128::from(value.is_true()));
        }
        value.is_integer().then(|| i128::try_from(value.clone()).ok()).flatten()
    };
    if let (Some(left), Some(right)) = (integer(left), integer(right)) {
        let result = integers(left, right).ok_or_else(|| invalid("the number is too large"))?;
        return Ok(i64::try_from(result).map_or_else(|_| Value::from(result), Value::from));
    }
    let float = |value: &Value| -> Option<f64> {
        integer(value).map(|value| value as f64).or_else(|| {
            (value.kind() == ValueKind::Number).then(|| f64::try_from(value.clone()).ok()).flatten()
        })
    };
    match (float(left), float(right)) {
        (Some(left), Some(right)) => Ok(Value::from(floats(left, right))),
        _ => Err(unsupported()),
    }
}

/// Methods of Python's texts, lists and dictionaries.
fn method(state: &mut State, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    budget::charge_length(value)?;
    arguments.iter().try_for_each(budget::charge_length)?;
    let Some(text) = value.as_str() else {
        if value.kind() == ValueKind::Seq {
            arguments.iter().try_for_each(|argument| budget::charge_deep(argument).map(|_| ()))?;
            budget::charge_deep(value)?;
        }
        return unknown_method_callback(state, value, name, arguments);
    };
    match name {
        "replace" => {
            let (old, new, count): (&str, &str, Option<i64>) = from_args(arguments)?;
            replace(text, old, new, count).map(Value::from)
        }
        "join" => {
            let (values,): (&Value,) = from_args(arguments)?;
            join(text, values, None).map(Value::from)
        }
        "format" => {
            check_brace_format(text)?;
            charge_fields(text.matches('{').count(), arguments)?;
            unknown_method_callback(state, value, name, arguments)
        }
        "split" | "splitlines" => {
            budget::charge(budget::length(value).saturating_mul(ITEM_BYTES))?;
            unknown_method_callback(state, value, name, arguments)
        }
        "rsplit" => {
            budget::charge(budget::length(value).saturating_mul(ITEM_BYTES))?;
            let (separator, limit): (&str, Option<usize>) = from_args(arguments)?;
            let limit = limit.map_or(usize::MAX, |limit| limit.saturating_add(1));
            let mut parts: Vec<Value> = text.rsplitn(limit, separator).map(Value::from).collect();
            parts.reverse();
            Ok(Value::from(parts))
        }
        "removeprefix" | "removesuffix" => {
            let (affix,): (&str,) = from_args(arguments)?;
            let rest =
                if name == "removeprefix" { text.strip_prefix(affix) } else { text.strip_suffix(affix) };
            Ok(Value::from(rest.unwrap_or(text)))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            let found =
                if name == "partition" { text.split_once(separator) } else { text.rsplit_once(separator) };
            let parts = match (found, name) {
                (Some((before, after)), _) => [before, separator, after],
                (None, "partition") => [text, "", ""],
                (None, _) => ["", "", text],
            };
            Ok(parts.into_iter().map(Value::from).collect())
        }
        _ => unknown_method_callback(state, value, name, arguments),
    }
}

/// An environment with everything a chat template may use.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::empty();
    add_filters(&mut environment);
    add_tests(&mut environment);
    environment.set_unknown_method_callback(method);
    environment.add_function("range", functions::range);
    environment.add_function("dict", functions::dict);
    environment.add_function("namespace", functions::namespace);
    environment.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        let message = budget::to_text(message)?;
        budget::refuse(message.clone());
        Err(invalid(message))
    });
    environment.add_function("__baton_add", add);
    environment.add_function("__baton_concat", concat);
    environment.add_function("__baton_multiply", multiply);
    environment.add_filter("__baton_iterate", |value: Value| -> Result<Value, Error> {
        // As in Python; the engine itself takes none for an empty list.
        if value.is_none() {
            return Err(invalid("none cannot be iterated over"));
        }
        budget::charge_length(&value)?;
        Ok(value)
    });
    environment.add_filter("__baton_touch", |value: Value| budget::charge_length(&value).map(|()| value));
    environment.add_filter("__baton_touch_text", |value: Value| -> Result<Value, Error> {
        if value.kind() == ValueKind::String {
            budget::charge_length(&value)?;
        }
        Ok(value)
    });
    environment.add_filter("__baton_weigh", |value: Value| budget::charge_deep(&value).map(|_| value));
    environment.set_formatter(|out, _state, value| {
        let mut text = ChargedText::default();
        budget::push_text(value, &mut text)?;
        out.write_str(&text.0).map_err(Error::from)
    });
    environment
}
