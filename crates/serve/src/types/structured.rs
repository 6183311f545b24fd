//! The ways in which a request may ask for an output of a certain shape: OpenAI's, vLLM's, and vLLM's older one.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::common::Others;

/// At most one of these may be set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StructuredFields {
    /// Text, any JSON object, or JSON of a schema.
    pub response_format: Option<ResponseFormat>,
    /// vLLM's way to say what the output must be like.
    pub structured_outputs: Option<StructuredOutputs>,
    /// A JSON schema, as an object or as its text.
    pub guided_json: Option<Value>,
    /// What the whole output matches.
    pub guided_regex: Option<String>,
    /// The output is one of these texts.
    pub guided_choice: Option<Vec<String>>,
    /// A grammar in Lark syntax or GBNF.
    pub guided_grammar: Option<String>,
    /// llama.cpp's: a grammar in GBNF, or in Lark syntax.
    pub grammar: Option<String>,
    /// llama.cpp's: a JSON schema.
    pub json_schema: Option<Value>,
    /// SGLang's: what the whole output matches.
    pub regex: Option<String>,
    /// SGLang's: a grammar in EBNF (`root ::= …`).
    pub ebnf: Option<String>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct ResponseFormat {
    /// `text`, `json_object` or `json_schema`.
    #[serde(rename = "type")]
    pub kind: String,
    /// With `json_schema`: the schema and its name.
    pub json_schema: Option<NamedSchema>,
    /// With `json_object`, as llama.cpp and others take it.
    pub schema: Option<Value>,
    #[serde(flatten)]
    #[schemars(skip)]
    pub others: Others,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct NamedSchema {
    /// Its name, which is noted nowhere.
    pub name: Option<String>,
    /// Noted nowhere.
    pub description: Option<String>,
    /// The JSON schema.
    pub schema: Option<Value>,
    /// Schemas are always kept strictly.
    pub strict: Option<bool>,
    #[serde(flatten)]
    #[schemars(skip)]
    pub others: Others,
}

/// One of these.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StructuredOutputs {
    /// A JSON schema, as an object or as its text.
    pub json: Option<Value>,
    /// What the whole output matches.
    pub regex: Option<String>,
    /// The output is one of these texts.
    pub choice: Option<Vec<String>>,
    /// A grammar in Lark syntax or GBNF.
    pub grammar: Option<String>,
    /// Any JSON object.
    pub json_object: Option<bool>,
    /// Refused, where they ask for something.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}
