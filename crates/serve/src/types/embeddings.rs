//! `/v1/embeddings`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::prompt::Prompts;

#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["input"]))]
pub struct EmbeddingRequest {
    /// The name of the model, as `/v1/models` lists it.
    pub model: Option<String>,
    /// A text, token ids, or a list of either.
    pub input: Option<Prompts>,
    /// Numbers, or their bytes in base64.
    pub encoding_format: Option<EncodingFormat>,
    /// Keep only the first ones, and make them a unit vector again.
    #[schemars(range(min = 1))]
    pub dimensions: Option<usize>,
    /// Noted nowhere.
    pub user: Option<String>,
    /// Add what the model wants at the beginning of a prompt.
    pub add_special_tokens: Option<bool>,
    /// Make the vector as long as 1: by default of a decoder, and of an encoder whose files say so.
    pub normalize: Option<bool>,
    /// The model's own, if anything: `last` of a decoder.
    pub pooling: Option<String>,
    /// Keep only the last so many tokens of an input; -1 keeps as many as there is room for.
    pub truncate_prompt_tokens: Option<i64>,
    /// Share cached prefixes only with requests of the same salt.
    pub cache_salt: Option<String>,
    /// Under `--scheduling-policy priority` the lowest value runs first.
    pub priority: Option<i32>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EncodingFormat {
    #[default]
    Float,
    /// 32-bit little-endian numbers.
    Base64,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct EmbeddingResponse {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub data: Vec<Embedding>,
    pub usage: EmbeddingUsage,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Embedding {
    pub object: &'static str,
    pub index: usize,
    pub embedding: EmbeddingVector,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum EmbeddingVector {
    Float(Vec<f32>),
    Base64(String),
}

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct EmbeddingUsage {
    pub prompt_tokens: usize,
    pub total_tokens: usize,
}
