//! Python's operators on numbers, texts and lists, each charged for the data it makes.

use minijinja::value::{Rest, Tuple, Value, ValueKind};
use minijinja::{Environment, Error};

use super::budget::{self, ChargedText, ITEM_BYTES};
use super::python::invalid;
use super::{filters, format, print};

/// The functions that rewritten templates call in place of operators.
pub(super) fn add_operators(environment: &mut Environment<'_>) {
    environment.add_function("__baton_add", add);
    environment.add_function("__baton_concat", concat);
    environment.add_function("__baton_multiply", multiply);
    environment.add_function("__baton_remainder", remainder);
    environment.add_function("__baton_floor_divide", floor_divide);
    environment.add_function("__baton_divide", divide);
    environment.add_function("__baton_power", power);
    environment.add_function("__baton_order", order);
    environment.add_function("__baton_slice", slice);
}

/// `+` of any number of operands, from the left.
fn add(operands: Rest<Value>) -> Result<Value, Error> {
    if operands.iter().all(|operand| operand.kind() == ValueKind::String && !operand.is_safe()) {
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
        if left.is_tuple() && right.is_tuple() {
            return Ok(Value::from(Tuple::from(items)));
        }
        return Ok(Value::from(items));
    }
    match (left.as_str(), right.as_str()) {
        // Beside a text that is marked as safe another one is escaped, as markupsafe does.
        (Some(_), Some(_)) if left.is_safe() || right.is_safe() => {
            let (left, right) = (filters::escape(left)?, filters::escape(right)?);
            concat_texts(&[left, right]).map(|text| Value::from_safe_string(text.to_string()))
        }
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
    operands.iter().try_for_each(|operand| print::push_text(operand, &mut out))?;
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

/// `%`: formats a text, or the remainder with the sign of the divisor.
fn remainder(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(pattern) = left.as_str() {
        budget::charge_length(left)?;
        return format::percent(pattern, right).map(Value::from);
    }
    check_divisor(right)?;
    let integers = |a: i128, b: i128| {
        a.checked_rem(b).map(|rest| if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest })
    };
    numbers(left, right, "%", integers, |a, b| {
        let rest = a % b;
        if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }
    })
}

fn floor_divide(left: &Value, right: &Value) -> Result<Value, Error> {
    check_divisor(right)?;
    let integers = |a: i128, b: i128| {
        let quotient = a.checked_div(b)?;
        Some(if a % b != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient })
    };
    numbers(left, right, "//", integers, |a, b| (a / b).floor())
}

fn divide(left: &Value, right: &Value) -> Result<Value, Error> {
    check_divisor(right)?;
    match (float(left), float(right)) {
        (Some(left), Some(right)) => Ok(Value::from(left / right)),
        _ => Err(unsupported(left, right, "/")),
    }
}

fn power(left: &Value, right: &Value) -> Result<Value, Error> {
    // A negative exponent makes a float of integers.
    if integer(right).is_some_and(|exponent| exponent < 0)
        && let (Some(left), Some(right)) = (float(left), float(right))
    {
        check_divisor(&Value::from(left))?;
        return Ok(Value::from(left.powf(right)));
    }
    let integers = |a: i128, b: i128| u32::try_from(b).ok().and_then(|exponent| a.checked_pow(exponent));
    numbers(left, right, "**", integers, f64::powf)
}

fn check_divisor(value: &Value) -> Result<(), Error> {
    if float(value) == Some(0.0) {
        return Err(invalid("division by zero"));
    }
    Ok(())
}

fn unsupported(left: &Value, right: &Value, operator: &str) -> Error {
    invalid(std::format!("{operator} does not work on a {} and a {}", left.kind(), right.kind()))
}

fn integer(value: &Value) -> Option<i128> {
    if value.kind() == ValueKind::Bool {
        return Some(i128::from(value.is_true()));
    }
    value.is_integer().then(|| i128::try_from(value.clone()).ok()).flatten()
}

fn float(value: &Value) -> Option<f64> {
    integer(value)
        .map(|value| value as f64)
        .or_else(|| (value.kind() == ValueKind::Number).then(|| f64::try_from(value.clone()).ok()).flatten())
}

fn numbers(
    left: &Value,
    right: &Value,
    operator: &str,
    integers: fn(i128, i128) -> Option<i128>,
    floats: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    if let (Some(left), Some(right)) = (integer(left), integer(right)) {
        let result = integers(left, right).ok_or_else(|| invalid("the number is too large"))?;
        return Ok(i64::try_from(result).map_or_else(|_| Value::from(result), Value::from));
    }
    match (float(left), float(right)) {
        (Some(left), Some(right)) => Ok(Value::from(floats(left, right))),
        _ => Err(unsupported(left, right, operator)),
    }
}

/// `<`, `<=`, `>` and `>=` of two operands. Python orders only what is alike.
fn order(operator: &str, left: &Value, right: &Value) -> Result<bool, Error> {
    budget::charge_deep(left)?;
    budget::charge_deep(right)?;
    let class = |value: &Value| match value.kind() {
        ValueKind::Number | ValueKind::Bool => Some(0),
        ValueKind::String => Some(1),
        ValueKind::Seq => Some(2 + u8::from(value.is_tuple())),
        _ => None,
    };
    if class(left).is_none() || class(left) != class(right) {
        return Err(unsupported(left, right, operator));
    }
    Ok(match operator {
        "<" => left < right,
        "<=" => left <= right,
        ">" => left > right,
        _ => left >= right,
    })
}

/// `value[start:stop:step]`.
fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value, Error> {
    let position = |value: &Value| match integer(value) {
        _ if value.is_none() => Ok(None),
        Some(position) => Ok(Some(position)),
        None => Err(invalid("a position in a slice must be a whole number")),
    };
    let (start, stop, step) = (position(start)?, position(stop)?, position(step)?.unwrap_or(1));
    if step == 0 {
        return Err(invalid("the step of a slice must not be 0"));
    }
    let slices = value.as_str().is_some() || matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    if !slices {
        return Err(invalid(std::format!("a {} cannot be sliced", value.kind())));
    }
    budget::charge(budget::length(value).saturating_mul(if value.as_str().is_some() {
        1
    } else {
        ITEM_BYTES
    }))?;
    if let Some(text) = value.as_str() {
        if step == 1 && start.is_none_or(|start| start >= 0) && stop.is_none() {
            let skipped = usize::try_from(start.unwrap_or(0)).unwrap_or(usize::MAX);
            let at = text.char_indices().nth(skipped).map_or(text.len(), |(at, _)| at);
            return Ok(Value::from(&text[at..]));
        }
        let characters: Vec<char> = text.chars().collect();
        let picked = picked(characters.len(), start, stop, step);
        return Ok(Value::from(picked.map(|index| characters[index]).collect::<String>()));
    }
    let items: Vec<Value> = value.try_iter()?.collect();
    let sliced: Vec<Value> =
        picked(items.len(), start, stop, step).map(|index| items[index].clone()).collect();
    Ok(if value.is_tuple() { Value::from(Tuple::from(sliced)) } else { Value::from(sliced) })
}

/// The indices of a slice of that many items, as Python's `slice.indices` defines them.
fn picked(length: usize, start: Option<i128>, stop: Option<i128>, step: i128) -> impl Iterator<Item = usize> {
    let length = length as i128;
    let (lowest, highest) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let bound = |position: Option<i128>, default: i128| match position {
        None => default,
        Some(position) if position < 0 => (position + length).max(lowest),
        Some(position) => position.min(highest),
    };
    let start = bound(start, if step > 0 { lowest } else { highest });
    let stop = bound(stop, if step > 0 { highest } else { lowest });
    let goes_on = move |&index: &i128| if step > 0 { index < stop } else { index > stop };
    std::iter::successors(Some(start), move |index| index.checked_add(step))
        .take_while(goes_on)
        .map(|index| usize::try_from(index).expect("within the length"))
}
