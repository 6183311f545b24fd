//! `baton bench serve`: sends a workload to a server over HTTP and records when each chunk arrives.
//!
//! One thread does everything: the client must leave the cores to the server it measures. `metrics` defines the figures.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::Method;
use indicatif::ProgressBar;
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::BenchError;
use crate::arrival::Arrivals;
use crate::client::chunk::{Chunk, Usage};
use crate::client::sse::SseParser;
use crate::client::{Answer, Client};
use crate::dataset::{Prompt, Sample, TokenRange, prompt_text, prompt_tokens};

/// Between two looks at a server that is not there yet.
const READY_POLL: Duration = Duration::from_millis(200);
const SHOW_EVERY: Duration = Duration::from_millis(250);

#[derive(Clone, Debug)]
pub struct ServeOptions {
    pub base_url: String,
    /// `/v1/completions` or `/v1/chat/completions`.
    pub endpoint: String,
    pub chat: bool,
    /// Without one, the first that the server names.
    pub model: Option<String>,
    pub headers: Vec<(String, String)>,
    pub arrivals: Arrivals,
    pub max_concurrency: Option<usize>,
    pub num_warmups: usize,
    pub ignore_eos: bool,
    /// Fields of every request: sampling parameters and whatever else.
    pub extra_body: Map<String, Value>,
    /// Made-up prompts are words instead of token ids.
    pub text_prompts: bool,
    pub tokens: TokenRange,
    /// Keep what was answered.
    pub keep_text: bool,
    /// How long to wait for the server.
    pub ready_timeout: Duration,
    pub seed: u64,
}

/// What came of one request. Times are in seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// After the start of the run.
    pub start_s: f64,
    /// How long it waited for its turn under `--max-concurrency`.
    pub queue_s: f64,
    pub ttft_s: f64,
    /// To the last chunk.
    pub latency_s: f64,
    /// Between chunks.
    pub itls_s: Vec<f64>,
    pub input_len: usize,
    /// As the server counts, or else the number of chunks.
    pub output_len: usize,
    pub text: String,
    pub error: Option<String>,
}

/// A run that has ended.
#[derive(Clone, Debug)]
pub struct ServeRun {
    pub model_id: String,
    pub duration_s: f64,
    /// In the order of the workload.
    pub outcomes: Vec<Outcome>,
}

const NO_TOKEN: &str = "ends the stream without a token";

/// What all requests share.
struct Load {
    client: Client,
    options: ServeOptions,
    model_id: String,
    /// The server has no tokenizer: only token ids show when a token comes.
    asks_token_ids: bool,
    started: Instant,
    num_chunks: AtomicU64,
}

/// Sends the workload and waits for all answers. The bar moves with every answer.
pub fn run(options: ServeOptions, samples: Vec<Sample>, bar: &ProgressBar) -> Result<ServeRun, BenchError> {
    options.arrivals.validate()?;
    if options.max_concurrency == Some(0) {
        return Err(BenchError::options("--max-concurrency must be above 0"));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|cause| BenchError::Failed(format!("the client's thread cannot be started: {cause}")))?;
    runtime.block_on(run_async(options, samples, bar))
}

async fn run_async(
    options: ServeOptions,
    samples: Vec<Sample>,
    bar: &ProgressBar,
) -> Result<ServeRun, BenchError> {
    let client = Client::new(&options.base_url, &options.headers).await?;
    let model_id = find_model(&client, &options).await?;
    let mut load = Load {
        client,
        options,
        model_id,
        asks_token_ids: false,
        started: Instant::now(),
        num_chunks: AtomicU64::new(0),
    };
    // One request shows that everything fits together before a thousand fail.
    let first = samples.first().ok_or_else(|| BenchError::options("the workload is empty"))?;
    let mut test = load.one(first, 0.0).await;
    if test.output_len > 0 && test.error.as_deref() == Some(NO_TOKEN) {
        load.asks_token_ids = true;
        test = load.one(first, 0.0).await;
    }
    if let Some(cause) = test.error {
        let url = format!("{}{}", load.options.base_url, load.options.endpoint);
        return Err(BenchError::server(url, cause));
    }
    load = warm_up(load, first).await;
    load.started = Instant::now();
    load.num_chunks = AtomicU64::new(0);
    let load = Arc::new(load);
    let shown = tokio::spawn(show(Arc::clone(&load), bar.clone()));
    let outcomes = send_all(&load, samples, bar).await;
    let duration_s = load.started.elapsed().as_secs_f64();
    shown.abort();
    bar.finish_and_clear();
    Ok(ServeRun { model_id: load.model_id.clone(), duration_s, outcomes })
}

/// Waits for the server, and asks it for its model where none was named.
async fn find_model(client: &Client, options: &ServeOptions) -> Result<String, BenchError> {
    if options.ready_timeout.is_zero()
        && let Some(model) = &options.model
    {
        return Ok(model.clone());
    }
    let deadline = Instant::now() + options.ready_timeout;
    let models = loop {
        match client.get_json("/v1/models").await {
            Ok(models) => break models,
            Err(error) if Instant::now() >= deadline => return Err(error),
            Err(_) => tokio::time::sleep(READY_POLL).await,
        }
    };
    let first = || models["data"][0]["id"].as_str().map(str::to_owned);
    let none =
        || BenchError::server(format!("{}/v1/models", options.base_url), "names no model: give --model");
    options.model.clone().or_else(first).ok_or_else(none)
}

async fn warm_up(load: Load, sample: &Sample) -> Load {
    let (count, width) = (load.options.num_warmups, load.options.max_concurrency.unwrap_or(64));
    let load = Arc::new(load);
    let mut left = count;
    while left > 0 {
        let mut tasks = JoinSet::new();
        for _ in 0..left.min(width) {
            let (load, sample) = (Arc::clone(&load), sample.clone());
            tasks.spawn(async move { load.one(&sample, 0.0).await });
        }
        left -= tasks.len();
        tasks.join_all().await;
    }
    Arc::try_unwrap(load).unwrap_or_else(|_| unreachable!("all warm-up tasks have been joined"))
}

async fn send_all(load: &Arc<Load>, samples: Vec<Sample>, bar: &ProgressBar) -> Vec<Outcome> {
    let count = samples.len();
    let times = load.options.arrivals.times(count, load.options.seed);
    let turns = load.options.max_concurrency.map(|limit| Arc::new(Semaphore::new(limit)));
    let mut tasks = JoinSet::new();
    for (index, sample) in samples.into_iter().enumerate() {
        let at = load.started + Duration::from_secs_f64(sample.at_s.unwrap_or(times[index]));
        if at > Instant::now() {
            tokio::time::sleep_until(at.into()).await;
        }
        let (load, turns, bar) = (Arc::clone(load), turns.clone(), bar.clone());
        let arrived = Instant::now();
        tasks.spawn(async move {
            let _turn = match &turns {
                Some(turns) => turns.acquire().await.ok(),
                None => None,
            };
            let outcome = load.one(&sample, arrived.elapsed().as_secs_f64()).await;
            bar.inc(1);
            (index, outcome)
        });
    }
    let mut outcomes = vec![Outcome::default(); count];
    while let Some(ended) = tasks.join_next().await {
        match ended {
            Ok((index, outcome)) => outcomes[index] = outcome,
            // A request that panicked is a defect of ours: it must not pass for a result.
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
    outcomes
}

/// Shows the speed beside the bar.
async fn show(load: Arc<Load>, bar: ProgressBar) {
    let (mut last, mut last_at) = (0, Instant::now());
    loop {
        tokio::time::sleep(SHOW_EVERY).await;
        let (now, chunks) = (Instant::now(), load.num_chunks.load(Ordering::Relaxed));
        let rate = (chunks - last) as f64 / (now - last_at).as_secs_f64();
        bar.set_message(format!("{rate:.0} tok/s"));
        (last, last_at) = (chunks, now);
    }
}

impl Load {
    /// Sends one request and follows its answer to the end.
    async fn one(&self, sample: &Sample, queue_s: f64) -> Outcome {
        let body = self.body(sample);
        let started = Instant::now();
        let mut outcome = Outcome {
            start_s: started.saturating_duration_since(self.started).as_secs_f64(),
            queue_s,
            input_len: sample.input_len.unwrap_or(0),
            ..Outcome::default()
        };
        let followed = async {
            let answer = self.client.send(Method::POST, &self.options.endpoint, body).await?;
            self.follow(answer, started, &mut outcome).await
        };
        if let Err(cause) = followed.await {
            outcome.error = Some(cause);
        }
        outcome
    }

    async fn follow(
        &self,
        mut answer: Answer<'_>,
        started: Instant,
        outcome: &mut Outcome,
    ) -> Result<(), String> {
        if !answer.status().is_success() {
            let (status, body) = answer.whole().await?;
            return Err(refusal(status.as_u16(), &body));
        }
        let (mut parser, mut usage, mut failure) = (SseParser::default(), None::<Usage>, None::<String>);
        let (mut last, mut num_chunks) = (started, 0);
        while let Some(data) = answer.next().await {
            let data = data?;
            let now = Instant::now();
            let mut event = |event: &[u8]| match Chunk::parse(event) {
                _ if event == b"[DONE]" => {}
                Err(cause) => failure = Some(format!("sends an event that is not understood: {cause}")),
                Ok(chunk) => {
                    if let Some(error) = &chunk.error {
                        failure = Some(error.message().to_owned());
                    }
                    usage = chunk.usage.or(usage);
                    let Some(text) = chunk.new_text() else { return };
                    if num_chunks == 0 {
                        outcome.ttft_s = (now - started).as_secs_f64();
                    } else {
                        outcome.itls_s.push((now - last).as_secs_f64());
                    }
                    num_chunks += 1;
                    self.num_chunks.fetch_add(1, Ordering::Relaxed);
                    last = now;
                    if self.options.keep_text {
                        outcome.text.push_str(text);
                    }
                }
            };
            if !parser.feed(&data, &mut event) {
                return Err("sends a line without end".to_owned());
            }
        }
        answer.finish();
        outcome.latency_s = (last - started).as_secs_f64();
        outcome.output_len = usage.map_or(num_chunks, |usage| usage.completion_tokens);
        if let Some(usage) = usage.filter(|usage| usage.prompt_tokens > 0) {
            outcome.input_len = usage.prompt_tokens;
        }
        match failure {
            Some(cause) => Err(cause),
            None if num_chunks == 0 => Err(NO_TOKEN.to_owned()),
            None => Ok(()),
        }
    }

    fn body(&self, sample: &Sample) -> Bytes {
        let options = &self.options;
        let mut body = Map::new();
        body.insert("model".to_owned(), json!(self.model_id));
        let as_text = options.chat || options.text_prompts;
        let prompt = match &sample.prompt {
            Prompt::Text(text) => json!(text),
            prompt if as_text => json!(prompt_text(prompt)),
            prompt => json!(prompt_tokens(prompt, options.tokens)),
        };
        if options.chat {
            body.insert("messages".to_owned(), json!([{"role": "user", "content": prompt}]));
        } else {
            body.insert("prompt".to_owned(), prompt);
        }
        body.insert("max_tokens".to_owned(), json!(sample.output_len));
        body.insert("stream".to_owned(), json!(true));
        body.insert("stream_options".to_owned(), json!({"include_usage": true}));
        if self.asks_token_ids {
            body.insert("return_token_ids".to_owned(), json!(true));
        }
        if options.ignore_eos {
            body.insert("ignore_eos".to_owned(), json!(true));
        }
        body.extend(options.extra_body.clone());
        Value::Object(body).to_string().into()
    }
}

/// Why the server did not answer, in one line.
fn refusal(status: u16, body: &[u8]) -> String {
    let message = Chunk::parse(body).ok().and_then(|chunk| Some(chunk.error?.message().to_owned()));
    let message =
        message.unwrap_or_else(|| String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned());
    format!("says {status}: {}", message.split_whitespace().collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_one_line() {
        let body = br#"{"error":{"message":"the prompt\nis too long","type":"x"}}"#;
        assert_eq!(refusal(400, body), "says 400: the prompt is too long");
        assert_eq!(refusal(502, b"<html>\nBad gateway"), "says 502: <html> Bad gateway");
    }
}
