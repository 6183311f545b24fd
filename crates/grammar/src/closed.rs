//! Closes the objects of a schema that does not say whether other keys are allowed.
//!
//! JSON Schema allows further keys unless `additionalProperties` forbids them, and a model that may write more keys will.
//! Clients list the keys they want, and other engines close such objects, so we do too. A schema with its own
//! `additionalProperties` or `unevaluatedProperties` is left as it is, and so is an object whose keys come from several schemas
//! (`allOf`, `$ref` beside `properties`, …): closing one of them would forbid the keys of the others.

use std::collections::HashSet;

use serde_json::{Map, Value};

/// Keywords whose schemas apply to the same object as the schema that they stand in.
const IN_PLACE: [&str; 10] =
    ["allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "then", "else", "not", "dependentSchemas"];
/// Keywords whose value maps names to schemas.
const MAPS: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Keywords whose value is data, whatever it looks like.
const DATA: [&str; 5] = ["const", "enum", "default", "examples", "example"];

/// The schema with `additionalProperties: false` wherever an object lists its keys and says nothing of others.
#[must_use]
pub fn close_objects(mut schema: Value) -> Value {
    // References from places where schemas apply together keep their targets open.
    let mut open = HashSet::new();
    find_open(&schema, false, &mut open);
    // What an open definition refers to in place is open as well; each is looked at once.
    let mut waiting: Vec<String> = open.iter().cloned().collect();
    while let Some(target) = waiting.pop() {
        let mut found = HashSet::new();
        if let Some(definition) = schema.pointer(&target) {
            find_open(definition, true, &mut found);
        }
        waiting.extend(found.into_iter().filter(|target| open.insert(target.clone())));
    }
    close(&mut schema, false, "", &open);
    schema
}

/// The same for a schema's text. Text that is not JSON is left to the compiler, which reports it.
#[must_use]
pub fn closed_schema(text: &str) -> String {
    serde_json::from_str(text).map_or_else(|_| text.to_owned(), |schema| close_objects(schema).to_string())
}

/// Several schemas say which keys an object may have.
fn is_combined(schema: &Map<String, Value>) -> bool {
    let lists_keys = schema.contains_key("properties") || schema.contains_key("patternProperties");
    let mut count = usize::from(lists_keys);
    for keyword in IN_PLACE {
        count += match (keyword, schema.get(keyword)) {
            (_, None) => 0,
            // One schema in `allOf` is that schema.
            ("allOf", Some(Value::Array(all))) => all.len(),
            ("not", Some(_)) => 2,
            // Of the options of `anyOf` and `oneOf` one is chosen, which applies alone.
            _ => 1,
        };
    }
    count > 1
}

/// The object lists its keys, and those that it must have are among them.
fn lists_all_keys(schema: &Map<String, Value>) -> bool {
    let Some(Value::Object(properties)) = schema.get("properties") else { return false };
    let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
    let min = schema.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
    required.filter_map(Value::as_str).all(|key| properties.contains_key(key))
        && min <= properties.len() as u64
}

/// The schemas that apply to the same object.
fn in_place(schema: &Map<String, Value>) -> impl Iterator<Item = (&'static str, &Value)> {
    IN_PLACE.into_iter().filter_map(|keyword| schema.get(keyword).map(|value| (keyword, value)))
}

/// Collects the targets (as JSON pointers) of references that stand where schemas apply together.
fn find_open(value: &Value, combined: bool, open: &mut HashSet<String>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| find_open(value, combined, open)),
        Value::Object(schema) => {
            let combined = combined || is_combined(schema);
            for (keyword, value) in in_place(schema) {
                match value {
                    Value::String(reference) if combined => {
                        open.extend(reference.strip_prefix('#').map(str::to_owned));
                    }
                    Value::Object(map) if keyword == "dependentSchemas" => {
                        map.values().for_each(|value| find_open(value, combined, open));
                    }
                    value => find_open(value, combined, open),
                }
            }
            for (keyword, value) in schema {
                if IN_PLACE.contains(&keyword.as_str()) || DATA.contains(&keyword.as_str()) {
                    continue;
                }
                match value {
                    Value::Object(map) if MAPS.contains(&keyword.as_str()) => {
                        map.values().for_each(|value| find_open(value, false, open));
                    }
                    value => find_open(value, false, open),
                }
            }
        }
        _ => {}
    }
}

fn close(value: &mut Value, combined: bool, path: &str, open: &HashSet<String>) {
    match value {
        Value::Array(values) => {
            for (index, value) in values.iter_mut().enumerate() {
                close(value, combined, &format!("{path}/{index}"), open);
            }
        }
        Value::Object(schema) => close_schema(schema, combined || open.contains(path), path, open),
        _ => {}
    }
}

fn close_schema(schema: &mut Map<String, Value>, combined: bool, path: &str, open: &HashSet<String>) {
    let combined = combined || is_combined(schema);
    for (keyword, value) in schema.iter_mut() {
        let path = format!("{path}/{}", keyword.replace('~', "~0").replace('/', "~1"));
        match value {
            _ if DATA.contains(&keyword.as_str()) => {}
            Value::Object(map) if MAPS.contains(&keyword.as_str()) => {
                let combined = combined && keyword == "dependentSchemas";
                for (name, value) in map.iter_mut() {
                    let name = name.replace('~', "~0").replace('/', "~1");
                    close(value, combined, &format!("{path}/{name}"), open);
                }
            }
            value => close(value, combined && IN_PLACE.contains(&keyword.as_str()), &path, open),
        }
    }
    let says = ["additionalProperties", "unevaluatedProperties"].iter().any(|key| schema.contains_key(*key));
    if !combined && !says && lists_all_keys(schema) {
        schema.insert("additionalProperties".to_owned(), Value::Bool(false));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_that_list_their_keys_are_closed() {
        let closed = close_objects(json!({
            "type": "object",
            "properties": {
                "a": {"type": "array", "items": {"properties": {"x": {}}}},
                "properties": {"$ref": "#/$defs/P"},
                "free": {"type": "object"},
                "map": {"properties": {"k": {}}, "additionalProperties": {"type": "integer"}},
                "said": {"properties": {}, "additionalProperties": true},
                "choice": {"anyOf": [{"properties": {"b": {}}}, {"type": "null"}]},
            },
            "$defs": {"P": {"properties": {"y": {"const": {"properties": {}}}}}},
        }));
        let at = |pointer: &str| closed.pointer(pointer).unwrap_or_else(|| panic!("{pointer}: {closed}"));
        for path in ["", "/properties/a/items", "/$defs/P", "/properties/choice/anyOf/0"] {
            assert_eq!(at(&format!("{path}/additionalProperties")), &json!(false), "{path}");
        }
        assert_eq!(at("/properties/free"), &json!({"type": "object"}));
        assert_eq!(at("/properties/map/additionalProperties"), &json!({"type": "integer"}));
        assert_eq!(at("/properties/said/additionalProperties"), &json!(true));
        assert_eq!(at("/$defs/P/properties/y/const"), &json!({"properties": {}}));
    }

    #[test]
    fn keys_from_several_schemas_stay_open() {
        let schema = json!({
            "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"b": {"properties": {"deep": {}}}}}],
            "$defs": {
                "Base": {"allOf": [{"$ref": "#/$defs/Root"}], "properties": {"a": {}}},
                "Root": {"properties": {"r": {}}},
                "Other": {"properties": {"o": {}}},
            },
        });
        let closed = close_objects(schema);
        for path in ["/allOf/1", "/$defs/Base", "/$defs/Root"] {
            assert_eq!(closed.pointer(path).and_then(|at| at.get("additionalProperties")), None, "{path}");
        }
        for path in ["/allOf/1/properties/b", "/$defs/Other"] {
            assert_eq!(
                closed.pointer(path).and_then(|at| at.get("additionalProperties")),
                Some(&json!(false))
            );
        }
        // Older pydantic wraps a reference into a list of one.
        let wrapped = close_objects(
            json!({"properties": {"a": {"allOf": [{"$ref": "#/$defs/A"}]}}, "$defs": {"A": {"properties": {}}}}),
        );
        assert_eq!(wrapped["$defs"]["A"]["additionalProperties"], json!(false));
        let conditional = close_objects(
            json!({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"properties": {"b": {}}}]}),
        );
        assert_eq!(conditional.get("additionalProperties"), None);
        // What must be written must be writable.
        let elsewhere = close_objects(json!({"properties": {"a": {}}, "required": ["b"]}));
        assert_eq!(elsewhere.get("additionalProperties"), None);
    }
}
