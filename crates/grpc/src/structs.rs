//! `google.protobuf.Struct` to JSON and back.

use std::collections::BTreeMap;

use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value as ProtoValue};
use serde_json::{Map, Number, Value};

/// What is nested deeper is no parameter of anything. Protobuf's own decoder ends at 100 messages.
const MAX_DEPTH: usize = 32;
/// Whole numbers that a double holds exactly.
const MAX_WHOLE: f64 = 9_007_199_254_740_992.0;

/// `None` where it is nested too deeply or holds a number that JSON has not.
pub fn to_json(fields: Struct) -> Option<Value> {
    object(fields, MAX_DEPTH)
}

fn object(fields: Struct, depth: usize) -> Option<Value> {
    let depth = depth.checked_sub(1)?;
    let entry = |(name, value): (String, ProtoValue)| Some((name, json(value, depth)?));
    Some(Value::Object(fields.fields.into_iter().map(entry).collect::<Option<Map<_, _>>>()?))
}

fn json(value: ProtoValue, depth: usize) -> Option<Value> {
    Some(match value.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::BoolValue(value)) => Value::Bool(value),
        Some(Kind::StringValue(text)) => Value::String(text),
        Some(Kind::NumberValue(number)) => Value::Number(json_number(number)?),
        Some(Kind::StructValue(fields)) => object(fields, depth)?,
        Some(Kind::ListValue(list)) => {
            let depth = depth.checked_sub(1)?;
            let values = list.values.into_iter().map(|value| json(value, depth));
            Value::Array(values.collect::<Option<_>>()?)
        }
    })
}

/// Every number of a `Struct` is a double; whole ones were integers.
fn json_number(number: f64) -> Option<Number> {
    if number.fract() == 0.0 && number.abs() <= MAX_WHOLE {
        return Some(Number::from(number as i64));
    }
    Number::from_f64(number)
}

/// The fields of an object; those of anything else are none.
pub fn from_json(value: &Value) -> Struct {
    let fields = value.as_object().into_iter().flatten();
    Struct { fields: fields.map(|(name, value)| (name.clone(), proto(value))).collect::<BTreeMap<_, _>>() }
}

fn proto(value: &Value) -> ProtoValue {
    let kind = match value {
        Value::Null => Kind::NullValue(0),
        Value::Bool(value) => Kind::BoolValue(*value),
        Value::Number(number) => Kind::NumberValue(number.as_f64().unwrap_or_default()),
        Value::String(text) => Kind::StringValue(text.clone()),
        Value::Array(values) => Kind::ListValue(ListValue { values: values.iter().map(proto).collect() }),
        Value::Object(_) => Kind::StructValue(from_json(value)),
    };
    ProtoValue { kind: Some(kind) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_comes_back() {
        let value = serde_json::json!({
            "do_remote_prefill": true, "remote_port": 8998, "ratio": 0.5, "ids": [1, "two", null], "inner": {"a": {}}
        });
        assert_eq!(to_json(from_json(&value)), Some(value));
        assert_eq!(from_json(&Value::Null), Struct::default());
    }

    #[test]
    fn what_json_has_not_is_refused() {
        let of = |kind| Struct { fields: [("a".to_owned(), ProtoValue { kind: Some(kind) })].into() };
        assert_eq!(to_json(of(Kind::NumberValue(f64::NAN))), None);
        let deep = (0..MAX_DEPTH).fold(Struct::default(), |inner, _| of(Kind::StructValue(inner)));
        assert_eq!(to_json(deep), None);
    }
}
