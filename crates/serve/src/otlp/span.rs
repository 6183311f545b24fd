//! A request as a span: its times and figures under the names that vLLM gives them.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use baton_core::{FinishReason, SamplingParams};
use serde_json::{Value, json};

use super::TraceParent;
use crate::ids;
use crate::metrics::RequestEnd;

const KIND_SERVER: u8 = 2;
const STATUS_ERROR: u8 = 2;

/// What a span is made of, taken when the request ends.
#[derive(Debug)]
pub struct RequestSpan {
    pub parent: Option<TraceParent>,
    pub request_id: String,
    pub params: Arc<SamplingParams>,
    pub end: RequestEnd,
    pub ended: Instant,
}

impl RequestSpan {
    pub fn to_json(&self, model: &str) -> Value {
        let trace_id = self.parent.as_ref().map_or_else(ids::unique, |parent| parent.trace_id.clone());
        let mut span = json!({
            "traceId": trace_id,
            "spanId": &ids::unique()[..16],
            "name": "llm_request",
            "kind": KIND_SERVER,
            "startTimeUnixNano": unix_nanos(self.end.times.submitted),
            "endTimeUnixNano": unix_nanos(self.ended),
            "attributes": self.attributes(model),
        });
        if let Some(parent) = &self.parent {
            span["parentSpanId"] = parent.span_id.clone().into();
        }
        if self.end.reason == FinishReason::Error {
            span["status"] = json!({"code": STATUS_ERROR});
        }
        span
    }

    fn attributes(&self, model: &str) -> Vec<Value> {
        let (end, params, times) = (&self.end, &self.params, &self.end.times);
        let seconds = |from: Option<Instant>, to: Option<Instant>| {
            Some(to?.saturating_duration_since(from?).as_secs_f64())
        };
        let submitted = Some(times.submitted);
        let text = |value: &str| Some(json!({"stringValue": value}));
        // Integers of 64 bits are texts in OTLP's JSON.
        let count = |value: usize| Some(json!({"intValue": value.to_string()}));
        let number = |value: f64| Some(json!({"doubleValue": value}));
        let reason = match end.reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Abort => "abort",
            FinishReason::Error => "error",
        };
        [
            ("gen_ai.response.model", text(model)),
            ("gen_ai.response.finish_reason", text(reason)),
            ("gen_ai.request.id", text(&self.request_id)),
            ("gen_ai.request.temperature", number(f64::from(params.temperature))),
            ("gen_ai.request.top_p", number(f64::from(params.top_p))),
            ("gen_ai.request.max_tokens", params.max_tokens.and_then(|max| count(max as usize))),
            ("gen_ai.request.n", count(end.n as usize)),
            ("gen_ai.usage.num_sequences", count(params.num_sequences() as usize)),
            ("gen_ai.usage.prompt_tokens", count(end.num_prompt_tokens)),
            ("gen_ai.usage.cached_tokens", count(end.num_cached_tokens)),
            ("gen_ai.usage.completion_tokens", count(end.num_generation_tokens)),
            ("gen_ai.latency.time_in_queue", seconds(submitted, times.started).and_then(number)),
            ("gen_ai.latency.time_to_first_token", seconds(submitted, times.first_token).and_then(number)),
            (
                "gen_ai.latency.time_in_model_prefill",
                seconds(times.started, times.first_token).and_then(number),
            ),
            (
                "gen_ai.latency.time_in_model_decode",
                seconds(times.first_token, times.last_token).and_then(number),
            ),
            (
                "gen_ai.latency.time_in_model_inference",
                seconds(times.started, times.last_token).and_then(number),
            ),
            ("gen_ai.latency.e2e", seconds(submitted, Some(self.ended)).and_then(number)),
        ]
        .into_iter()
        .filter_map(|(key, value)| Some(json!({"key": key, "value": value?})))
        .collect()
    }
}

/// OTLP wants the wall clock, as a text.
fn unix_nanos(moment: Instant) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(moment.elapsed()).as_nanos().to_string()
}
