//! The environment of a chat template: filters and tests, each charged for the data it touches (see `budget`).
//!
//! Those on the lists below are the template engine's own behind a charge; texts and numbers have filters of ours
//! (see `filters`), because prompts must come out as Jinja2 writes them. Where a short call could ask for a huge
//! result, the result is sized up first.

use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, filters, functions, tests};

use super::budget::{self, ChargedText, ITEM_BYTES};
use super::{arithmetic, filters as ours, methods, print};

pub(super) fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
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
pub(super) const MAX_COUNT_ARGUMENT: i64 = 10_000;

fn add_filters(environment: &mut Environment<'_>) {
    let mut add = |name: &'static str, cost: Cost, function: Value| {
        environment.add_filter(name, move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
            let arguments = arguments.into_values();
            arguments.first().map_or(Ok(()), |value| refuse_none(value, name))?;
            charge(cost, &arguments)?;
            function.call(state, &arguments)
        });
    };
    for (name, function) in [
        ("safe", Value::from_function(filters::safe)),
        ("abs", Value::from_function(filters::abs)),
        ("attr", Value::from_function(filters::attr)),
        ("first", Value::from_function(filters::first)),
        ("last", Value::from_function(filters::last)),
        ("bool", Value::from_function(filters::bool)),
    ] {
        add(name, Cost::Length, function);
    }
    for (name, function) in [
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
    // In Python these make generators, which are no JSON.
    let mut add = |name: &'static str, cost: Cost, function: Value| {
        environment.add_filter(name, move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
            let arguments = arguments.into_values();
            charge(cost, &arguments)?;
            let made = function.call(state, &arguments)?;
            Ok::<_, Error>(generator(made.try_iter()?.collect()))
        });
    };
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
    ] {
        environment.add_filter(name, move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
            let arguments = arguments.into_values();
            check_counts(&arguments)?;
            arguments.first().map_or(Ok(()), |value| refuse_none(value, name))?;
            charge(Cost::List, &arguments)?;
            budget::charge(MAX_COUNT_ARGUMENT as u64)?;
            function.call(state, &arguments)
        });
    }
    ours::add(environment);
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

/// What Python makes lazily: it can be iterated over, but is not a list.
#[derive(Debug)]
pub(super) struct Generator(Vec<Value>);

impl Object for Generator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.clone())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.0.len())
    }
}

pub(super) fn generator(items: Vec<Value>) -> Value {
    Value::from_object(Generator(items))
}

/// Python cannot iterate over `None`; the engine takes it for an empty list. What may be skipped may be none.
pub(super) fn refuse_none(value: &Value, name: &str) -> Result<(), Error> {
    let skips =
        matches!(name, "select" | "reject" | "selectattr" | "rejectattr" | "map" | "safe" | "attr" | "bool");
    if value.is_none() && !skips {
        return Err(invalid(format!("{name} does not work on none")));
    }
    Ok(())
}

pub(super) fn join(separator: &str, values: &Value, attribute: Option<&str>) -> Result<String, Error> {
    use std::fmt::Write as _;
    let mut out = ChargedText::default();
    for (index, value) in values.try_iter()?.enumerate() {
        if index > 0 && out.write_str(separator).is_err() {
            budget::charge(u64::MAX)?;
        }
        match attribute {
            Some(attribute) => print::push_text(&value.get_attr(attribute)?, &mut out)?,
            None => print::push_text(&value, &mut out)?,
        }
    }
    Ok(out.0)
}

pub(super) fn replace(text: &str, old: &str, new: &str, count: Option<i64>) -> Result<String, Error> {
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
        ("callable", Value::from_function(|value: &Value| value.kind() == ValueKind::Plain)),
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

/// In Jinja2 a text is a sequence and can be iterated over, and so are mappings and what is undefined.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined)
}

/// The engine iterates over none as over an empty list; in Python it is not iterable.
fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || !value.is_none() && value.try_iter().is_ok()
}

/// `dict(mapping or pairs, **more)`.
#[allow(clippy::needless_pass_by_value)] // The template engine hands keyword arguments over by value.
fn dict(value: Option<&Value>, named: Kwargs) -> Result<Value, Error> {
    let mut pairs: Vec<(Value, Value)> = Vec::new();
    if let Some(value) = value.filter(|value| !value.is_undefined()) {
        budget::charge_deep(value)?;
        let is_map = value.kind() == ValueKind::Map;
        for item in value.try_iter()? {
            let pair = if is_map {
                (item.clone(), value.get_item(&item)?)
            } else if item.len() == Some(2) {
                (item.get_item_by_index(0)?, item.get_item_by_index(1)?)
            } else {
                return Err(invalid("dict needs a mapping or a list of pairs"));
            };
            pairs.push(pair);
        }
    }
    for name in named.args() {
        pairs.push((Value::from(name), named.get(name)?));
    }
    Ok(Value::from_pairs(pairs))
}

/// An environment with everything a chat template may use.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::empty();
    add_filters(&mut environment);
    add_tests(&mut environment);
    environment.set_unknown_method_callback(methods::method);
    environment.add_function("range", functions::range);
    environment.add_function("dict", dict);
    environment.add_function("cycler", |items: Rest<Value>| minijinja_contrib::globals::cycler(items.0));
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    environment.add_function("namespace", functions::namespace);
    environment.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        let message = print::to_text(message)?;
        budget::refuse(message.clone());
        Err(invalid(message))
    });
    arithmetic::add_operators(&mut environment);
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
        print::push_text(value, &mut text)?;
        out.write_str(&text.0).map_err(Error::from)
    });
    environment
}
