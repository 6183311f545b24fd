//! `/v1/rerank` in the shapes of Jina, Cohere and vLLM, and `/v1/score` in that of vLLM.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["query", "documents"]))]
pub struct RerankRequest {
    /// The name of the model, as `/v1/models` lists it.
    pub model: Option<String>,
    /// What is looked for.
    pub query: Option<String>,
    /// What is put in order.
    pub documents: Option<Vec<Document>>,
    /// Answer with so many of the best; all without it.
    pub top_n: Option<usize>,
    /// Repeat the texts in the answer, as by default.
    pub return_documents: Option<bool>,
    /// Keep only so many tokens of a query with its document; -1 keeps as many as there is room for.
    pub truncate_prompt_tokens: Option<i64>,
    /// Under `--scheduling-policy priority` the lowest value runs first.
    pub priority: Option<i32>,
}

/// A text, or an object that has one.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Document {
    Text(String),
    Object { text: String },
}

impl Document {
    pub fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Object { text } => text,
        }
    }
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct RerankResponse {
    pub id: String,
    pub model: String,
    pub usage: RerankUsage,
    /// Best first.
    pub results: Vec<RerankResult>,
}

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct RerankUsage {
    pub prompt_tokens: usize,
    pub total_tokens: usize,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct RerankResult {
    /// Among the documents of the request.
    pub index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document: Option<RerankDocument>,
    pub relevance_score: f32,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct RerankDocument {
    pub text: String,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["text_1", "text_2"]))]
pub struct ScoreRequest {
    /// The name of the model, as `/v1/models` lists it.
    pub model: Option<String>,
    /// A text that is compared with all of `text_2`, or as many as there are of those.
    #[serde(alias = "queries", alias = "data_1")]
    pub text_1: Option<Texts>,
    /// A text, or a list of them.
    #[serde(alias = "documents", alias = "items", alias = "data_2")]
    pub text_2: Option<Texts>,
    /// Keep only so many tokens of a pair; -1 keeps as many as there is room for.
    pub truncate_prompt_tokens: Option<i64>,
    /// Under `--scheduling-policy priority` the lowest value runs first.
    pub priority: Option<i32>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Texts {
    One(String),
    Many(Vec<String>),
}

impl Texts {
    pub fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ScoreResponse {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub data: Vec<Score>,
    pub usage: RerankUsage,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Score {
    pub index: usize,
    pub object: &'static str,
    pub score: f32,
}
