//! `baton bench latency` and `throughput`: the engine in this process, without a server.
//!
//! Latency runs one batch repeatedly; throughput submits a whole workload and waits until it is done. There is no text:
//! prompts and outputs are token ids.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use baton_core::{FinishReason, Request, RequestId, SamplingParams, TokenId};
use baton_engine::{Engine, ExpertsTouched, SpeculationStats};
use indicatif::ProgressBar;
use serde_json::{Map, Value, json};

use crate::BenchError;
use crate::dataset::{TokenRange, synthetic_tokens};
use crate::stats::Distribution;

/// Reported by `latency`, as vLLM does.
const PERCENTILES: [u32; 6] = [10, 25, 50, 75, 90, 99];

#[derive(Clone, Debug)]
pub struct LatencyOptions {
    pub input_len: usize,
    pub output_len: usize,
    pub batch_size: usize,
    pub num_iters_warmup: usize,
    pub num_iters: usize,
    /// Its `max_tokens` and `ignore_eos` are set here.
    pub params: SamplingParams,
    pub tokens: TokenRange,
    pub seed: u64,
}

/// How one batch went.
#[derive(Clone, Copy, Debug)]
struct BatchTimes {
    latency_s: f64,
    /// Until every sequence had its first token.
    prefill_s: f64,
    /// Tokens that came after that.
    num_decoded: usize,
    /// How long the device worked after that, where it tells.
    decode_busy_s: Option<f64>,
}

#[derive(Clone, Debug)]
pub struct LatencyResult {
    pub latencies_s: Vec<f64>,
    pub prefill_s: f64,
    pub prefill_tokens_per_second: f64,
    /// Without the time to the first token of the last sequence, and without the tokens that came by then.
    pub decode_tokens_per_second: f64,
    pub output_tokens_per_second: f64,
    /// The share of the time after the first tokens in which the device worked on no step, where it tells.
    pub device_idle_share: Option<f64>,
    /// Of the whole run, warm-up included; `None` where no guess was checked.
    pub speculation: Option<SpeculationStats>,
    /// How the last step of the batch spread over the experts of the last layer, where there are any.
    pub experts: Option<ExpertsTouched>,
}

/// Runs the batch `num_iters` times after warming up. The bar moves with every batch.
pub fn latency(
    engine: &mut Engine,
    options: &LatencyOptions,
    bar: &ProgressBar,
) -> Result<LatencyResult, BenchError> {
    let limit = engine.memory_plan().max_model_len;
    let positive = options.input_len > 0 && options.output_len > 0;
    if !positive || options.batch_size == 0 || options.num_iters == 0 {
        return Err(BenchError::options(
            "--input-len, --output-len, --batch-size and --num-iters are above 0",
        ));
    }
    if options.input_len.saturating_add(options.output_len) > limit {
        return Err(BenchError::options(format!(
            "--input-len {} and --output-len {} together exceed the longest sequence, {limit}: lower them",
            options.input_len, options.output_len
        )));
    }
    let params = Arc::new(SamplingParams {
        max_tokens: u32::try_from(options.output_len).ok(),
        ignore_eos: true,
        ..options.params.clone()
    });
    bar.set_length((options.num_iters_warmup + options.num_iters) as u64);
    let mut times = Vec::with_capacity(options.num_iters);
    for iteration in 0..options.num_iters_warmup + options.num_iters {
        let is_warmup = iteration < options.num_iters_warmup;
        bar.set_message(if is_warmup { "warming up" } else { "measuring" });
        let prompts = (0..options.batch_size)
            .map(|index| synthetic_tokens(options.seed + index as u64, options.input_len, options.tokens));
        let measured = run_batch(engine, prompts.collect(), &params)?;
        if !is_warmup {
            times.push(measured);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let speculation = speculation(engine);
    // With guesses the last step may have had fewer rows than there are sequences.
    let experts = if speculation.is_none() { engine.experts_touched(options.batch_size)? } else { None };
    Ok(LatencyResult { speculation, experts, ..LatencyResult::new(options, &times) })
}

impl LatencyResult {
    fn new(options: &LatencyOptions, times: &[BatchTimes]) -> Self {
        let sum = |of: &dyn Fn(&BatchTimes) -> f64| times.iter().map(of).sum::<f64>();
        let rate = |tokens: f64, seconds: f64| if seconds > 0.0 { tokens / seconds } else { 0.0 };
        let batches = times.len() as f64;
        let prefill_s = sum(&|times| times.prefill_s);
        let decode_s = sum(&|times| times.latency_s - times.prefill_s);
        let decode_busy_s: Option<f64> = times.iter().map(|times| times.decode_busy_s).sum();
        let num_input = (options.batch_size * options.input_len) as f64 * batches;
        let num_output = (options.batch_size * options.output_len) as f64 * batches;
        Self {
            latencies_s: times.iter().map(|times| times.latency_s).collect(),
            prefill_s: prefill_s / batches,
            prefill_tokens_per_second: rate(num_input, prefill_s),
            decode_tokens_per_second: rate(sum(&|times| times.num_decoded as f64), decode_s),
            output_tokens_per_second: rate(num_output, sum(&|times| times.latency_s)),
            device_idle_share: decode_busy_s.and_then(|busy_s| idle_share(busy_s, decode_s)),
            speculation: None,
            experts: None,
        }
    }

    /// vLLM's keys, then our own.
    pub fn to_json(&self) -> Map<String, Value> {
        let latencies = Distribution::new(self.latencies_s.clone());
        let percentiles: Map<String, Value> =
            PERCENTILES.iter().map(|p| (p.to_string(), json!(latencies.percentile(f64::from(*p))))).collect();
        let Value::Object(mut map) = json!({
            "avg_latency": latencies.mean(),
            "std_latency": latencies.standard_deviation(),
            "latencies": self.latencies_s,
            "percentiles": percentiles,
            "avg_prefill_latency": self.prefill_s,
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "output_tokens_per_second": self.output_tokens_per_second,
            "device_idle_share": self.device_idle_share,
        }) else {
            unreachable!("an object was written")
        };
        if let Some(experts) = &self.experts {
            map.insert("num_experts".to_owned(), json!(experts.num_experts));
            map.insert("num_experts_touched".to_owned(), json!(experts.num_touched));
        }
        describe_speculation(self.speculation.as_ref(), &mut map);
        map
    }

    /// vLLM's lines, then our own.
    pub fn summary(&self) -> String {
        use std::fmt::Write;
        let latencies = Distribution::new(self.latencies_s.clone());
        let mut text = format!("Avg latency: {} seconds\n", latencies.mean());
        for p in PERCENTILES {
            let _ = writeln!(text, "{p}% percentile latency: {} seconds", latencies.percentile(f64::from(p)));
        }
        let _ = writeln!(
            text,
            "Prefill: {:.4} seconds, {:.2} tokens/s",
            self.prefill_s, self.prefill_tokens_per_second
        );
        let _ = writeln!(text, "Decode: {:.2} tokens/s (excluding prefill)", self.decode_tokens_per_second);
        let _ = writeln!(text, "Output: {:.2} tokens/s", self.output_tokens_per_second);
        if let Some(share) = self.device_idle_share {
            let _ = writeln!(text, "Device: idle {:.1} % of the decoding", share * 100.0);
        }
        if let Some(ExpertsTouched { num_tokens, num_experts, num_touched }) = self.experts {
            let _ = writeln!(
                text,
                "Experts: {num_touched} of {num_experts} chosen by {num_tokens} tokens (last step, last layer)"
            );
        }
        text + &speculation_line(self.speculation.as_ref())
    }
}

fn run_batch(
    engine: &mut Engine,
    prompts: Vec<Vec<TokenId>>,
    params: &Arc<SamplingParams>,
) -> Result<BatchTimes, BenchError> {
    let num_requests = prompts.len();
    let started = Instant::now();
    // Requests whose first token has come.
    let mut begun: HashMap<RequestId, bool> = HashMap::with_capacity(num_requests);
    for prompt_token_ids in prompts {
        let id = engine.new_request_id();
        begun.insert(id, false);
        add(engine, id, prompt_token_ids, params)?;
    }
    let (mut num_begun, mut num_decoded, mut prefill_s, mut prefill_busy_s) = (0, 0, None, None);
    while engine.has_unfinished() {
        for output in engine.step() {
            check(engine, &output)?;
            let num_tokens: usize = output.outputs.iter().map(|output| output.token_ids.len()).sum();
            if prefill_s.is_some() {
                num_decoded += num_tokens;
            } else if num_tokens > 0 && begun.insert(output.request_id, true) == Some(false) {
                num_begun += 1;
            }
        }
        if num_begun == num_requests && prefill_s.is_none() {
            prefill_s = Some(started.elapsed().as_secs_f64());
            prefill_busy_s = engine.stats().device_busy_s;
        }
    }
    let latency_s = started.elapsed().as_secs_f64();
    let decode_busy_s = engine.stats().device_busy_s.zip(prefill_busy_s).map(|(all, before)| all - before);
    Ok(BatchTimes { latency_s, prefill_s: prefill_s.unwrap_or(latency_s), num_decoded, decode_busy_s })
}

/// What is left of some time beside the device's work. A step that began just before it is counted whole, so this can come out
/// a little below nothing.
pub(crate) fn idle_share(busy_s: f64, elapsed_s: f64) -> Option<f64> {
    (elapsed_s > 0.0).then(|| (1.0 - busy_s / elapsed_s).max(0.0))
}

/// One request of a throughput run.
#[derive(Clone, Debug)]
pub struct OfflineRequest {
    pub prompt_token_ids: Vec<TokenId>,
    pub output_len: usize,
}

#[derive(Clone, Debug)]
pub struct ThroughputResult {
    pub elapsed_s: f64,
    pub num_requests: usize,
    pub num_prompt_tokens: usize,
    pub num_output_tokens: usize,
    pub num_cached_tokens: usize,
    /// The share of the time in which the device worked on no step, where it tells.
    pub device_idle_share: Option<f64>,
    /// `None` where no guess was checked.
    pub speculation: Option<SpeculationStats>,
}

/// Hands over all requests, at most `max_outstanding` at a time, and waits until the last has ended.
pub fn throughput(
    engine: &mut Engine,
    requests: Vec<OfflineRequest>,
    params: &SamplingParams,
    max_outstanding: usize,
    bar: &ProgressBar,
) -> Result<ThroughputResult, BenchError> {
    let limit = engine.memory_plan().max_model_len;
    let longest = requests.iter().map(|one| one.prompt_token_ids.len() + one.output_len).max().unwrap_or(0);
    if longest > limit {
        return Err(BenchError::options(format!(
            "a prompt with its answer has {longest} tokens, more than the longest sequence, {limit}: shorten the lengths"
        )));
    }
    bar.set_length(requests.len() as u64);
    let mut result = ThroughputResult {
        elapsed_s: 0.0,
        num_requests: requests.len(),
        num_prompt_tokens: requests.iter().map(|one| one.prompt_token_ids.len()).sum(),
        num_output_tokens: 0,
        num_cached_tokens: 0,
        device_idle_share: None,
        speculation: None,
    };
    let mut waiting = requests.into_iter();
    let mut outstanding = 0;
    let busy_before_s = engine.stats().device_busy_s.unwrap_or(0.0);
    let started = Instant::now();
    loop {
        for one in waiting.by_ref().take(max_outstanding.saturating_sub(outstanding)) {
            let id = engine.new_request_id();
            let max_tokens = u32::try_from(one.output_len).ok();
            let params = Arc::new(SamplingParams { max_tokens, ..params.clone() });
            add(engine, id, one.prompt_token_ids, &params)?;
            outstanding += 1;
        }
        if !engine.has_unfinished() {
            break;
        }
        for output in engine.step() {
            check(engine, &output)?;
            result.num_output_tokens +=
                output.outputs.iter().map(|output| output.token_ids.len()).sum::<usize>();
            // Said once, with the first output.
            result.num_cached_tokens += output.num_cached_tokens as usize;
            if output.finished {
                outstanding -= 1;
                bar.inc(1);
            }
        }
        let elapsed_s = started.elapsed().as_secs_f64();
        bar.set_message(format!("{:.0} output tok/s", result.num_output_tokens as f64 / elapsed_s.max(1e-9)));
    }
    result.elapsed_s = started.elapsed().as_secs_f64();
    let busy_s = engine.stats().device_busy_s.map(|busy_s| busy_s - busy_before_s);
    result.device_idle_share = busy_s.and_then(|busy_s| idle_share(busy_s, result.elapsed_s));
    result.speculation = speculation(engine);
    bar.finish_and_clear();
    Ok(result)
}

impl ThroughputResult {
    fn rate(&self, count: usize) -> f64 {
        count as f64 / self.elapsed_s.max(1e-9)
    }

    pub fn output_tokens_per_second(&self) -> f64 {
        self.rate(self.num_output_tokens)
    }

    /// vLLM's keys, then our own.
    pub fn to_json(&self) -> Map<String, Value> {
        let total = self.num_prompt_tokens + self.num_output_tokens;
        let Value::Object(mut map) = json!({
            "elapsed_time": self.elapsed_s,
            "num_requests": self.num_requests,
            "total_num_tokens": total,
            "requests_per_second": self.rate(self.num_requests),
            "tokens_per_second": self.rate(total),
            "total_input_tokens": self.num_prompt_tokens,
            "total_output_tokens": self.num_output_tokens,
            "total_cached_tokens": self.num_cached_tokens,
            "output_tokens_per_second": self.output_tokens_per_second(),
            "device_idle_share": self.device_idle_share,
        }) else {
            unreachable!("an object was written")
        };
        describe_speculation(self.speculation.as_ref(), &mut map);
        map
    }

    /// vLLM's lines.
    pub fn summary(&self) -> String {
        let total = self.num_prompt_tokens + self.num_output_tokens;
        let idle = self
            .device_idle_share
            .map_or(String::new(), |share| format!("Device: idle {:.1} % of the time\n", share * 100.0));
        format!(
            "Throughput: {:.2} requests/s, {:.2} total tokens/s, {:.2} output tokens/s\n\
             Total num prompt tokens:  {}\nTotal num output tokens:  {}\n{idle}{}",
            self.rate(self.num_requests),
            self.rate(total),
            self.output_tokens_per_second(),
            self.num_prompt_tokens,
            self.num_output_tokens,
            speculation_line(self.speculation.as_ref()),
        )
    }
}

fn speculation(engine: &Engine) -> Option<SpeculationStats> {
    Some(engine.stats().speculation).filter(|stats| stats.num_drafts > 0)
}

fn speculation_line(stats: Option<&SpeculationStats>) -> String {
    stats.map_or(String::new(), |stats| {
        format!(
            "Speculation: {:.2} tokens per checked step, {} of {} guesses right\n",
            stats.mean_acceptance_length(),
            stats.num_accepted_tokens,
            stats.num_draft_tokens
        )
    })
}

/// The figures of speculation in a result file.
fn describe_speculation(stats: Option<&SpeculationStats>, map: &mut Map<String, Value>) {
    let Some(stats) = stats else { return };
    map.insert("spec_decode_num_drafts".to_owned(), stats.num_drafts.into());
    map.insert("spec_decode_num_draft_tokens".to_owned(), stats.num_draft_tokens.into());
    map.insert("spec_decode_num_accepted_tokens".to_owned(), stats.num_accepted_tokens.into());
    map.insert("spec_decode_mean_acceptance_length".to_owned(), stats.mean_acceptance_length().into());
}

fn add(
    engine: &mut Engine,
    id: RequestId,
    prompt_token_ids: Vec<TokenId>,
    params: &Arc<SamplingParams>,
) -> Result<(), BenchError> {
    let mut request = Request::new(id, prompt_token_ids, SamplingParams::default());
    request.params = Arc::clone(params);
    Ok(engine.add_request(request)?)
}

/// A step that failed ends the benchmark: its figures would mean nothing.
pub(crate) fn check(engine: &Engine, output: &baton_core::RequestOutput) -> Result<(), BenchError> {
    if output.outputs.iter().any(|output| output.finish_reason == Some(FinishReason::Error)) {
        let cause = engine.stats().last_failure.unwrap_or_else(|| "a step failed".to_owned());
        return Err(BenchError::Failed(cause));
    }
    Ok(())
}
