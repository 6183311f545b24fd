//! Runs prompts through the engine in one of three modes and measures them.
//!
//! All modes use the same engine, so that runs can be interleaved: a request with its own cache salt finds nothing in the
//! prefix cache, and relay attention is switched on or off before the run.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_core::{Request, RequestId, SamplingParams, TokenId};
use baton_engine::{Engine, RelayStats};

use crate::BenchError;
use crate::offline::{check, idle_share};
use crate::stats::Distribution;

/// What is passed on from request to request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RelayMode {
    /// Nothing: every request computes and keeps its whole prompt.
    NoCache,
    /// The KV of shared prefixes, which every request reads for itself.
    Cached,
    /// The KV of shared prefixes, which is read once for all.
    Relay,
}

impl RelayMode {
    pub const ALL: [Self; 3] = [Self::NoCache, Self::Cached, Self::Relay];

    /// In tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoCache => "no cache",
            Self::Cached => "cached",
            Self::Relay => "relay",
        }
    }

    /// In JSON.
    pub fn key(self) -> &'static str {
        match self {
            Self::NoCache => "no_cache",
            Self::Cached => "cached",
            Self::Relay => "relay",
        }
    }
}

/// A request of a run.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    pub(crate) token_ids: Vec<TokenId>,
    /// How many of the first tokens are a prefix that other prompts have too. It is cached before the run begins.
    pub(crate) num_shared: usize,
    pub(crate) output_len: usize,
    /// When it comes, from the beginning of the run.
    pub(crate) at_s: f64,
}

/// When the tokens of a request came, from its own beginning.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RequestTimes {
    pub(crate) first_s: Option<f64>,
    pub(crate) last_s: f64,
    pub(crate) num_tokens: usize,
}

impl RequestTimes {
    /// Time per output token after the first.
    pub(crate) fn tpot_s(&self) -> Option<f64> {
        let first_s = self.first_s?;
        (self.num_tokens > 1).then(|| (self.last_s - first_s) / (self.num_tokens - 1) as f64)
    }
}

/// How a run went.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunResult {
    pub(crate) elapsed_s: f64,
    /// Until every request had its first token, and the tokens that came after that.
    prefill_s: f64,
    num_decoded: usize,
    pub(crate) num_output_tokens: usize,
    pub(crate) num_cached_tokens: usize,
    /// In the order of the prompts.
    pub(crate) times: Vec<RequestTimes>,
    pub(crate) outputs: Vec<Vec<TokenId>>,
    pub(crate) relay: RelayStats,
    pub(crate) device_idle_share: Option<f64>,
}

impl RunResult {
    /// Output tokens in the time from handing over the first request to the end of the last.
    pub(crate) fn output_tokens_per_second(&self) -> f64 {
        self.num_output_tokens as f64 / self.elapsed_s.max(1e-9)
    }

    /// The same without the time in which some request still waited for its first token.
    pub(crate) fn decode_tokens_per_second(&self) -> f64 {
        self.num_decoded as f64 / (self.elapsed_s - self.prefill_s).max(1e-9)
    }

    pub(crate) fn ttfts_ms(&self) -> Distribution {
        Distribution::new(
            self.times.iter().filter_map(|times| times.first_s).map(|seconds| seconds * 1e3).collect(),
        )
    }

    pub(crate) fn tpots_ms(&self) -> Distribution {
        Distribution::new(
            self.times.iter().filter_map(RequestTimes::tpot_s).map(|seconds| seconds * 1e3).collect(),
        )
    }
}

/// Runs prompts; two runs never share what is a prompt's own.
pub(crate) struct Runs<'a> {
    pub(crate) engine: &'a mut Engine,
    params: SamplingParams,
    last_salt: u64,
}

impl<'a> Runs<'a> {
    pub(crate) fn new(engine: &'a mut Engine, params: &SamplingParams) -> Self {
        let params = SamplingParams { ignore_eos: true, ..params.clone() };
        Self { engine, params, last_salt: 0 }
    }

    /// Relay attention is there to be switched on.
    pub(crate) fn can_relay(&mut self) -> bool {
        self.engine.set_relay_attention(true)
    }

    /// Caches the prefixes, unless nothing is to be cached, and then runs the prompts.
    pub(crate) fn run(&mut self, prompts: &[Prompt], mode: RelayMode) -> Result<RunResult, BenchError> {
        let limit = self.engine.memory_plan().max_model_len;
        let longest = prompts.iter().map(|one| one.token_ids.len() + one.output_len).max().unwrap_or(0);
        if longest > limit {
            return Err(BenchError::options(format!(
                "a prompt with its answer has {longest} tokens, more than the longest sequence, {limit}: shorten the lengths"
            )));
        }
        self.last_salt += 1;
        self.engine.set_relay_attention(mode == RelayMode::Relay);
        if mode != RelayMode::NoCache {
            let mut seen = HashSet::new();
            let prefixes = prompts.iter().map(|prompt| &prompt.token_ids[..prompt.num_shared]);
            for prefix in prefixes.filter(|prefix| !prefix.is_empty() && seen.insert(*prefix)) {
                self.cache(prefix)?;
            }
        }
        let requests = (0..).zip(prompts).map(|(index, prompt)| self.request(index, prompt, mode)).collect();
        timed(self.engine, prompts, requests)
    }

    /// One token of output, so that the whole prefix is computed.
    fn cache(&mut self, prefix: &[TokenId]) -> Result<(), BenchError> {
        let params = SamplingParams { max_tokens: Some(1), ..self.params.clone() };
        Ok(self.engine.generate(vec![prefix.to_vec()], &params).map(|_| ())?)
    }

    fn request(&mut self, index: usize, prompt: &Prompt, mode: RelayMode) -> Request {
        let params =
            SamplingParams { max_tokens: u32::try_from(prompt.output_len).ok(), ..self.params.clone() };
        let id = self.engine.new_request_id();
        let is_shared = mode != RelayMode::NoCache;
        let salt = if is_shared {
            format!("run {}", self.last_salt)
        } else {
            format!("{index} of {}", self.last_salt)
        };
        Request {
            cache_salt: Some(Arc::from(salt)),
            num_public_tokens: if is_shared { prompt.num_shared as u32 } else { 0 },
            ..Request::new(id, prompt.token_ids.clone(), params)
        }
    }
}

fn timed(engine: &mut Engine, prompts: &[Prompt], requests: Vec<Request>) -> Result<RunResult, BenchError> {
    let mut result = RunResult {
        times: vec![RequestTimes::default(); prompts.len()],
        outputs: vec![Vec::new(); prompts.len()],
        ..RunResult::default()
    };
    let index_of: HashMap<RequestId, usize> =
        requests.iter().enumerate().map(|(index, request)| (request.id, index)).collect();
    let mut waiting = prompts.iter().zip(requests).peekable();
    let before = engine.stats();
    let (mut num_begun, mut has_begun) = (0, false);
    let started = Instant::now();
    loop {
        let now_s = started.elapsed().as_secs_f64();
        while let Some((_, request)) = waiting.next_if(|(prompt, _)| prompt.at_s <= now_s) {
            engine.add_request(request)?;
        }
        if !engine.has_unfinished() {
            let Some((prompt, _)) = waiting.peek() else { break };
            let wait_s = prompt.at_s - started.elapsed().as_secs_f64();
            std::thread::sleep(Duration::from_secs_f64(wait_s.max(0.0)));
            continue;
        }
        for output in engine.step() {
            check(engine, &output)?;
            let Some(&index) = index_of.get(&output.request_id) else { continue };
            let times = &mut result.times[index];
            let num_tokens: usize = output.outputs.iter().map(|output| output.token_ids.len()).sum();
            if num_tokens > 0 {
                times.last_s = started.elapsed().as_secs_f64() - prompts[index].at_s;
                num_begun += usize::from(times.first_s.is_none());
                times.first_s.get_or_insert(times.last_s);
                times.num_tokens += num_tokens;
            }
            result.num_decoded += if has_begun { num_tokens } else { 0 };
            // Said once, with the first output.
            result.num_cached_tokens += output.num_cached_tokens as usize;
            result.outputs[index].extend(output.outputs.into_iter().flat_map(|output| output.token_ids));
        }
        if num_begun == prompts.len() && !has_begun {
            has_begun = true;
            result.prefill_s = started.elapsed().as_secs_f64();
        }
    }
    result.elapsed_s = started.elapsed().as_secs_f64();
    result.num_output_tokens = result.times.iter().map(|times| times.num_tokens).sum();
    let after = engine.stats();
    result.relay = after.relay.since(&before.relay);
    let busy_s = after.device_busy_s.map(|busy_s| busy_s - before.device_busy_s.unwrap_or(0.0));
    result.device_idle_share = busy_s.and_then(|busy_s| idle_share(busy_s, result.elapsed_s));
    Ok(result)
}
