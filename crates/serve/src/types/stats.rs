//! `/stats`: what the server is and what it does right now, in one answer for a person's page.

use schemars::JsonSchema;
use serde::Serialize;

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Stats {
    pub version: &'static str,
    pub uptime_s: f64,
    /// The name that answers say.
    pub model: String,
    /// The longest prompt with its answer, in tokens.
    pub max_model_len: usize,
    /// What a request that says nothing is sampled with.
    pub sampling_defaults: SamplingDefaults,
    /// For people: the processor or GPU.
    pub device: String,
    pub max_num_seqs: usize,
    pub kv_cache: KvCache,
    /// Requests of this key that are being served, the oldest first.
    pub requests: Vec<RunningRequest>,
    /// Requests of this key that are being served, also those that the list has no place for.
    pub num_requests: usize,
    /// Requests of other keys, of which nothing else is told.
    pub num_other_requests: usize,
}

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct SamplingDefaults {
    pub temperature: f32,
    pub top_p: f32,
    /// 0: off.
    pub top_k: u32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
}

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct KvCache {
    /// Tokens of a block.
    pub block_size: usize,
    pub num_blocks: usize,
    /// All that fits.
    pub num_tokens: usize,
    pub bytes: u64,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct RunningRequest {
    /// The engine's number of it.
    pub id: String,
    pub state: RequestState,
    pub num_prompt_tokens: usize,
    /// Prompt tokens whose KV came from the prefix cache.
    pub num_cached_tokens: usize,
    /// Of all continuations.
    pub num_output_tokens: usize,
    /// Of one continuation.
    pub max_tokens: Option<u32>,
    /// Continuations.
    pub n: u32,
    /// Since it came.
    pub age_s: f64,
    /// From its arrival to its first token.
    pub time_to_first_token_s: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RequestState {
    /// No step has had a part of it yet.
    Waiting,
    /// Its prompt is being computed.
    Prefill,
    /// Its answer is being written.
    Decode,
}
