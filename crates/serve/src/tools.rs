//! The functions of a request: checked, shown to the template, and turned into the shape that a forced call must have.

use std::sync::Arc;

use baton_core::StructuredOutput;
use baton_grammar::close_objects;
use baton_text::{CallMode, ToolFormat};
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::types::tools::{ChatTool, ChatToolChoice, Function};

const MAX_TOOLS: usize = 512;
const MAX_NAME_BYTES: usize = 128;
/// Calls in an answer that must be calls. A model that may go on calling often does not stop by itself.
const MAX_REQUIRED_CALLS: usize = 8;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model may not call anything.
    None,
    /// The model decides.
    #[default]
    Auto,
    /// At least one call.
    Required,
    /// This function.
    Named(String),
}

/// A function, and where the request describes it.
#[derive(Clone, Debug)]
pub struct Described {
    pub path: String,
    pub function: Function,
}

/// The functions of a request and what the model may do with them.
#[derive(Clone, Debug, Default)]
pub struct ToolUse {
    functions: Vec<Function>,
    names: Arc<[String]>,
    choice: ToolChoice,
    parallel: bool,
}

impl ToolUse {
    pub fn new(
        described: Vec<Described>,
        choice: ToolChoice,
        parallel: Option<bool>,
    ) -> Result<Self, ApiError> {
        if described.len() > MAX_TOOLS {
            return Err(ApiError::invalid_field("tools", format!("tools may hold {MAX_TOOLS} functions")));
        }
        let mut names: Vec<String> = Vec::with_capacity(described.len());
        for Described { path, function } in &described {
            let name = &function.name;
            let letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
            let path = format!("{path}.name");
            if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.chars().all(letter) {
                let message = format!(
                    "{path} must have 1 to {MAX_NAME_BYTES} letters, digits, underscores, dashes or dots"
                );
                return Err(ApiError::invalid_field(path, message));
            }
            if names.contains(name) {
                return Err(ApiError::invalid_field(&path, format!("{path}: {name:?} is described twice")));
            }
            names.push(name.clone());
        }
        match &choice {
            ToolChoice::Required if names.is_empty() => {
                let message = "tool_choice asks for a call, but there are no tools";
                return Err(ApiError::invalid_field("tool_choice", message));
            }
            ToolChoice::Named(name) if !names.contains(name) => {
                let message = format!("tool_choice names {name:?}, which is not among the tools");
                return Err(ApiError::invalid_field("tool_choice", message));
            }
            _ => {}
        }
        let functions = described.into_iter().map(|described| described.function).collect();
        // A choice among several functions may be several calls; of one function it is one, unless asked for more.
        let single = choice == ToolChoice::Required && names.len() == 1;
        Ok(Self { functions, names: names.into(), choice, parallel: parallel.unwrap_or(!single) })
    }

    /// Reads the fields of `/v1/chat/completions`.
    pub fn of_chat(
        tools: Option<Vec<ChatTool>>,
        choice: Option<ChatToolChoice>,
        parallel: Option<bool>,
    ) -> Result<Self, ApiError> {
        let describe = |(index, tool): (usize, ChatTool)| {
            check_type(&format!("tools[{index}]"), &tool.kind)?;
            Ok(Described { path: format!("tools[{index}].function"), function: tool.function })
        };
        let described = tools.unwrap_or_default().into_iter().enumerate().map(describe);
        let mut described: Vec<Described> = described.collect::<Result<_, ApiError>>()?;
        let choice = match choice {
            None => ToolChoice::default(),
            Some(ChatToolChoice::Mode(mode)) => mode_of(&mode)?,
            Some(ChatToolChoice::Named { function, .. }) => ToolChoice::Named(function.name),
            Some(ChatToolChoice::Allowed { allowed_tools, .. }) => {
                keep_allowed(&mut described, &allowed_tools.tools)?;
                mode_of(&allowed_tools.mode)?
            }
        };
        Self::new(described, choice, parallel)
    }

    /// There are functions, and the model may call them.
    pub fn is_offered(&self) -> bool {
        !self.functions.is_empty() && self.choice != ToolChoice::None
    }

    pub fn parallel(&self) -> bool {
        self.parallel
    }

    /// The functions as templates want them.
    pub fn shown(&self) -> Option<Vec<Value>> {
        let tool = |function: &Function| json!({"type": "function", "function": function});
        self.is_offered().then(|| self.functions.iter().map(tool).collect())
    }

    /// Where calls are to be looked for in an answer of a model that writes them like this.
    pub fn call_mode(&self, format: Option<ToolFormat>) -> CallMode {
        let names = || Arc::clone(&self.names);
        match (&self.choice, format) {
            _ if !self.is_offered() => CallMode::None,
            (ToolChoice::Named(name), _) => CallMode::Named(name.clone()),
            (ToolChoice::Required, _) => CallMode::Required { names: names() },
            (ToolChoice::Auto, Some(format)) => CallMode::Auto { format, names: names() },
            (ToolChoice::Auto, None) | (ToolChoice::None, _) => CallMode::None,
        }
    }

    /// The shape of an answer that must be a call.
    pub fn structured_output(&self) -> Result<Option<StructuredOutput>, ApiError> {
        let schema = match &self.choice {
            ToolChoice::Named(name) => {
                let named = self.functions.iter().find(|function| function.name == *name);
                Value::Object(named.map(parameters_of).unwrap_or_default())
            }
            ToolChoice::Required => self.list_schema()?,
            ToolChoice::Auto | ToolChoice::None => return Ok(None),
        };
        Ok(Some(StructuredOutput::Json(close_objects(schema).to_string())))
    }

    /// A list of calls. Definitions within a function's schema move to the top, where their references point.
    fn list_schema(&self) -> Result<Value, ApiError> {
        let mut definitions = Map::new();
        let mut calls = Vec::with_capacity(self.functions.len());
        for function in &self.functions {
            let mut parameters = parameters_of(function);
            for key in ["$defs", "definitions"] {
                let Some(Value::Object(own)) = parameters.remove(key) else { continue };
                let all = definitions.entry(key).or_insert_with(|| json!({}));
                for (name, definition) in own {
                    if all.get(&name).is_some_and(|other| *other != definition) {
                        let message = format!("tools: two functions define {name:?} differently in {key}");
                        return Err(ApiError::invalid_field("tools", message));
                    }
                    all[name] = definition;
                }
            }
            calls.push(json!({
                "type": "object",
                "properties": {"name": {"type": "string", "const": function.name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": false,
            }));
        }
        let most = if self.parallel { MAX_REQUIRED_CALLS } else { 1 };
        let mut schema = json!({"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}});
        for (key, value) in definitions {
            schema[key] = value;
        }
        Ok(schema)
    }
}

fn parameters_of(function: &Function) -> Map<String, Value> {
    let mut parameters = function.parameters.clone().unwrap_or_default();
    if parameters.is_empty() {
        parameters.insert("type".to_owned(), "object".into());
        parameters.insert("properties".to_owned(), json!({}));
    }
    parameters
}

/// Only functions are run by clients; other tools are run by other servers.
pub fn check_type(path: &str, kind: &str) -> Result<(), ApiError> {
    if kind == "function" {
        return Ok(());
    }
    let message =
        format!("{path}.type must be \"function\", got {kind:?}: this server runs no tools of its own");
    Err(ApiError::invalid_field(format!("{path}.type"), message))
}

/// Leaves only the functions that `allowed_tools` names; the others are as if they were not there.
pub fn keep_allowed(described: &mut Vec<Described>, allowed: &[Map<String, Value>]) -> Result<(), ApiError> {
    let name_of = |tool: &Map<String, Value>| {
        let function = tool.get("function").and_then(|function| function.get("name"));
        function.or(tool.get("name")).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let names: Vec<String> = allowed.iter().map(name_of).collect();
    if let Some(name) = names.iter().find(|name| described.iter().all(|tool| tool.function.name != **name)) {
        let message = format!("tool_choice allows {name:?}, which is not among the tools");
        return Err(ApiError::invalid_field("tool_choice", message));
    }
    described.retain(|tool| names.contains(&tool.function.name));
    Ok(())
}

pub fn mode_of(mode: &str) -> Result<ToolChoice, ApiError> {
    match mode {
        "none" => Ok(ToolChoice::None),
        "auto" => Ok(ToolChoice::Auto),
        "required" => Ok(ToolChoice::Required),
        _ => {
            let message = format!("tool_choice must be none, auto, required or a function, got {mode:?}");
            Err(ApiError::invalid_field("tool_choice", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::types::common::Others;

    use super::*;

    fn function(name: &str, parameters: Value) -> Described {
        let Value::Object(parameters) = parameters else { panic!("an object") };
        let function = Function {
            name: name.to_owned(),
            description: None,
            parameters: Some(parameters),
            strict: None,
            others: Others,
        };
        Described { path: "tools[0].function".to_owned(), function }
    }

    fn schema(tools: &ToolUse) -> Value {
        match tools.structured_output().expect("sound") {
            Some(StructuredOutput::Json(schema)) => serde_json::from_str(&schema).expect("JSON"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_named_function_gives_its_own_schema() {
        let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let tools = vec![function("f", parameters.clone()), function("g", json!({}))];
        let named = |name: &str| ToolUse::new(tools.clone(), ToolChoice::Named(name.to_owned()), None);
        let closed = |mut schema: Value| {
            schema["additionalProperties"] = json!(false);
            schema
        };
        assert_eq!(schema(&named("f").unwrap()), closed(parameters));
        assert_eq!(schema(&named("g").unwrap()), closed(json!({"type": "object", "properties": {}})));
        assert!(named("h").is_err());
    }

    #[test]
    fn a_required_call_is_a_list_of_all() {
        let parameters =
            json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {}}});
        let tools = vec![function("f", parameters), function("g", json!({}))];
        let single = ToolUse::new(tools.clone(), ToolChoice::Required, Some(false)).unwrap();
        let schema = schema(&single);
        assert_eq!((&schema["minItems"], &schema["maxItems"]), (&json!(1), &json!(1)));
        assert_eq!(schema["$defs"], json!({"A": {}}));
        let first = &schema["items"]["anyOf"][0]["properties"];
        assert_eq!(first["name"]["const"], "f");
        assert_eq!(
            first["parameters"],
            json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "additionalProperties": false})
        );
        let other = function("h", json!({"$defs": {"A": {"type": "null"}}}));
        let conflict = ToolUse::new([tools, vec![other]].concat(), ToolChoice::Required, None).unwrap();
        assert!(conflict.structured_output().is_err());
    }

    #[test]
    fn required_calls_come_to_an_end() {
        let most = |count: usize, parallel: Option<bool>| {
            let tools = (0..count).map(|index| function(&format!("f{index}"), json!({}))).collect();
            schema(&ToolUse::new(tools, ToolChoice::Required, parallel).unwrap())["maxItems"].clone()
        };
        assert_eq!(most(1, None), 1);
        assert_eq!(most(1, Some(true)), MAX_REQUIRED_CALLS);
        assert_eq!(most(2, None), MAX_REQUIRED_CALLS);
        assert_eq!(most(2, Some(false)), 1);
    }

    #[test]
    fn wrong_functions_are_named() {
        let param = |tools: Vec<Described>, choice| {
            ToolUse::new(tools, choice, None).unwrap_err().body().error.param.unwrap_or_default()
        };
        let bad_name = function("a b", json!({}));
        assert_eq!(param(vec![bad_name], ToolChoice::Auto), "tools[0].function.name");
        let twice = vec![function("f", json!({})), function("f", json!({}))];
        assert_eq!(param(twice, ToolChoice::Auto), "tools[0].function.name");
        assert_eq!(param(vec![], ToolChoice::Required), "tool_choice");
    }
}
