//! What `complete --json` prints. The shapes are documented in docs/cli.md; scripts depend on them.

use baton_core::{FinishReason, PositionLogprobs, TokenId, TokenLogprob};
use serde::Serialize;

use crate::generate::{Answer, Continuation, StopReason};
use crate::session::TextModel;

#[derive(Debug, Serialize)]
pub struct CompletionReport {
    id: String,
    model: String,
    prompt_token_ids: Vec<TokenId>,
    outputs: Vec<OutputReport>,
    prompt_logprobs: Option<Vec<Option<PositionReport>>>,
    usage: Usage,
    timing: TimingReport,
}

#[derive(Debug, Serialize)]
struct OutputReport {
    index: usize,
    token_ids: Vec<TokenId>,
    text: String,
    finish_reason: Option<FinishReason>,
    stop_reason: Option<StopReason>,
    logprobs: Option<Vec<PositionReport>>,
    cumulative_logprob: Option<f32>,
}

#[derive(Debug, Serialize)]
struct PositionReport {
    #[serde(flatten)]
    chosen: TokenReport,
    top: Vec<TokenReport>,
}

#[derive(Debug, Serialize)]
struct TokenReport {
    token_id: TokenId,
    token: String,
    logprob: f32,
    rank: u32,
}

/// OpenAI's names.
#[derive(Debug, Serialize)]
#[allow(clippy::struct_field_names)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    cached_tokens: u32,
}

/// Seconds, and tokens per second. The prompt's speed counts the whole time to the first token.
#[derive(Debug, Serialize)]
#[allow(clippy::struct_field_names)]
pub struct TimingReport {
    load_s: f64,
    ttft_s: Option<f64>,
    decode_s: f64,
    total_s: f64,
    pub prefill_tokens_per_s: Option<f64>,
    pub decode_tokens_per_s: Option<f64>,
}

/// What was asked for, which decides what is reported.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    pub logprobs: bool,
    pub prompt_logprobs: bool,
    /// Cumulative log-probabilities are known: log-probabilities, best_of or beams were asked for.
    pub scores: bool,
}

impl CompletionReport {
    pub fn new(answer: &Answer, text: &TextModel, load_s: f64, asked: Asked) -> Self {
        let prompt_tokens = answer.prompt_token_ids.len();
        let completion_tokens = answer.num_completion_tokens();
        let prompt_logprobs = asked.prompt_logprobs.then(|| {
            // The first token has no probability: nothing comes before it.
            let positions =
                answer.prompt_logprobs.iter().map(|position| Some(position_report(position, text)));
            std::iter::once(None).chain(positions).collect()
        });
        Self {
            id: format!("cmpl-{}", answer.request_id),
            model: text.name.clone(),
            prompt_token_ids: answer.prompt_token_ids.clone(),
            outputs: answer
                .continuations
                .iter()
                .enumerate()
                .map(|(i, c)| output_report(i, c, text, asked))
                .collect(),
            prompt_logprobs,
            usage: Usage {
                prompt_tokens,
                completion_tokens,
                total_tokens: prompt_tokens + completion_tokens,
                cached_tokens: answer.num_cached_tokens,
            },
            timing: timing_report(answer, load_s),
        }
    }
}

/// The speeds of an answer.
pub fn timing_report(answer: &Answer, load_s: f64) -> TimingReport {
    let total_s = answer.timing.last_token.as_secs_f64();
    let ttft_s = answer.timing.first_token.map(|time| time.as_secs_f64());
    let decode_s = total_s - ttft_s.unwrap_or(total_s);
    let computed = answer.prompt_token_ids.len() as f64 - f64::from(answer.num_cached_tokens);
    let decoded = answer.num_completion_tokens().saturating_sub(answer.continuations.len()) as f64;
    let speed = |tokens: f64, seconds: f64| (tokens > 0.0 && seconds > 0.0).then(|| tokens / seconds);
    TimingReport {
        load_s,
        ttft_s,
        decode_s,
        total_s,
        prefill_tokens_per_s: ttft_s.and_then(|seconds| speed(computed, seconds)),
        decode_tokens_per_s: speed(decoded, decode_s),
    }
}

fn output_report(index: usize, continuation: &Continuation, text: &TextModel, asked: Asked) -> OutputReport {
    OutputReport {
        index,
        token_ids: continuation.token_ids.clone(),
        text: continuation.text.clone(),
        finish_reason: continuation.finish_reason,
        stop_reason: continuation.stop_reason.clone(),
        logprobs: asked
            .logprobs
            .then(|| continuation.logprobs.iter().map(|position| position_report(position, text)).collect()),
        cumulative_logprob: asked.scores.then_some(continuation.cumulative_logprob),
    }
}

fn position_report(position: &PositionLogprobs, text: &TextModel) -> PositionReport {
    let token_report = |token: &TokenLogprob| TokenReport {
        token_id: token.token_id,
        token: text.token_text(token.token_id),
        logprob: token.logprob,
        rank: token.rank,
    };
    PositionReport {
        chosen: token_report(&position.chosen),
        top: position.top.iter().map(token_report).collect(),
    }
}
