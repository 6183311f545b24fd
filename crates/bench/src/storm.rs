//! The attack mode of `baton bench soak`: clients with one key attack while a well-behaved client uses another.
//!
//! The well-behaved client first streams alone, then beside the attackers. Each attack is a valid or almost valid request that
//! costs the server far more than its sender. To pass, the time between tokens of the well-behaved client must stay
//! within a multiple of its time alone, the client must never be rejected, and the server's memory must stay within a bound.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::Method;
use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio::io::AsyncWriteExt;

use crate::BenchError;
use crate::client::Client;
use crate::random::Random;
use crate::soak::resident_mib;
use crate::stats::Distribution;

/// How long a body that is declared and not sent is held.
const HOLD: Duration = Duration::from_secs(5);
/// An attacker waits no longer for an answer.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Tokens of one answer to the well-behaved client.
const ANSWER_TOKENS: u32 = 128;

#[derive(Clone, Debug)]
pub struct StormOptions {
    pub base_url: String,
    /// Those of the well-behaved client.
    pub headers: Vec<(String, String)>,
    /// Those of the attackers.
    pub attack_headers: Vec<(String, String)>,
    pub num_attackers: usize,
    /// What they do, one after the other.
    pub attacks: Vec<Attack>,
    /// How long the well-behaved client is alone first.
    pub calm: Duration,
    pub duration: Duration,
    pub pid: Option<u32>,
    /// How many times as long as alone the 99th percentile of the time between tokens may be.
    pub max_token_ratio: f64,
    /// What the process may hold at most.
    pub max_resident_mib: Option<f64>,
    pub seed: u64,
}

/// A request that costs the server far more than its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Attack {
    /// `multipleOf` with more remainders than anybody can visit.
    HardSchema,
    /// Thousands of properties, never the same twice.
    LargeSchema,
    /// As many messages as fit into a body.
    TinyMessages,
    /// Declares a large body and sends a byte.
    DeclaredBody,
    /// A thousand prompts at once.
    Flood,
    /// Many continuations of a long prompt, with penalties.
    Penalties,
}

impl Attack {
    pub const ALL: [Self; 6] = [
        Self::HardSchema,
        Self::LargeSchema,
        Self::TinyMessages,
        Self::DeclaredBody,
        Self::Flood,
        Self::Penalties,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::HardSchema => "hard-schema",
            Self::LargeSchema => "large-schema",
            Self::TinyMessages => "tiny-messages",
            Self::DeclaredBody => "declared-body",
            Self::Flood => "flood",
            Self::Penalties => "penalties",
        }
    }

    fn route(self) -> &'static str {
        match self {
            Self::HardSchema | Self::LargeSchema | Self::TinyMessages => "/v1/chat/completions",
            Self::DeclaredBody | Self::Flood | Self::Penalties => "/v1/completions",
        }
    }

    fn body(self, random: &mut Random) -> String {
        let messages = json!([{"role": "user", "content": "Hi"}]);
        let shaped = |schema: Value| json!({"messages": messages, "max_tokens": 8, "guided_json": schema});
        let body = match self {
            Self::HardSchema => {
                shaped(json!({"type": "integer", "multipleOf": 2_000_000_000 + random.below(1 << 30)}))
            }
            Self::LargeSchema => {
                let salt = random.below(1 << 16);
                let property = |number: u32| (format!("p{number}_{salt:x}"), json!({"type": "integer"}));
                shaped(
                    json!({"type": "object", "properties": (0..7500).map(property).collect::<Map<_, _>>()}),
                )
            }
            Self::TinyMessages => {
                // As text: half a million values would take this process longer than that one.
                let messages = vec![r#"{"role":"user","content":"a"}"#; 400_000].join(",");
                return format!(r#"{{"max_tokens":1,"messages":[{messages}]}}"#);
            }
            Self::DeclaredBody => Value::Null,
            Self::Flood => {
                let prompt = |number: u64| format!("{number} {}", random_words(number, 20));
                let first = random.below(1 << 40);
                let prompts: Vec<String> = (first..first + 1000).map(prompt).collect();
                json!({"prompt": prompts, "max_tokens": 64, "ignore_eos": true})
            }
            Self::Penalties => {
                let prompt = random_words(random.next_u64(), 1500);
                json!({"prompt": prompt, "n": 64, "max_tokens": 64, "ignore_eos": true, "temperature": 1,
                    "presence_penalty": 0.5, "repetition_penalty": 1.1})
            }
        };
        body.to_string()
    }
}

impl FromStr for Attack {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let names = || Self::ALL.map(Self::name).join(", ");
        let found = Self::ALL.into_iter().find(|attack| attack.name() == name);
        found.ok_or_else(|| format!("there is no attack {name:?}; there are {}", names()))
    }
}

fn random_words(seed: u64, count: usize) -> String {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.below(1000).to_string()).collect::<Vec<_>>().join(" ")
}

/// What came of a storm.
#[derive(Clone, Debug, Default, Serialize)]
pub struct StormResult {
    pub duration: f64,
    pub calm_tokens: usize,
    pub calm_p50_ms: f64,
    pub calm_p99_ms: f64,
    /// Median time to the first token.
    pub calm_first_ms: f64,
    pub storm_tokens: usize,
    pub storm_p50_ms: f64,
    pub storm_p99_ms: f64,
    pub storm_max_ms: f64,
    pub storm_first_ms: f64,
    /// Answers to the attackers, by attack and status; 0 is none in time.
    pub attacks: BTreeMap<String, BTreeMap<u16, u64>>,
    /// The largest that was seen.
    pub resident_mib: Option<f64>,
    pub failures: Vec<String>,
}

/// Runs the storm. The bar counts seconds.
pub fn run(options: StormOptions, bar: &ProgressBar) -> Result<StormResult, BenchError> {
    let failed = |cause: std::io::Error| {
        BenchError::Failed(format!("the client's threads cannot be started: {cause}"))
    };
    // The attackers make large bodies. Their threads are their own, of low priority, so that they do not hold up the clock of
    // the well-behaved client.
    let attackers = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .on_thread_start(|| baton_engine::lower_priority(19))
        .enable_all()
        .build()
        .map_err(failed)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let result = runtime.block_on(run_async(Arc::new(options), attackers.handle(), bar));
    attackers.shutdown_background();
    result
}

async fn run_async(
    options: Arc<StormOptions>,
    attackers: &tokio::runtime::Handle,
    bar: &ProgressBar,
) -> Result<StormResult, BenchError> {
    let client = Client::new(&options.base_url, &options.headers).await?;
    let started = Instant::now();
    bar.set_message("calm");
    let calm = stream_until(&client, started + options.calm).await;
    if calm.gaps_ms.is_empty() {
        let why = calm.failures.first().map_or("no token came", String::as_str);
        return Err(BenchError::server("/v1/completions", why.to_owned()));
    }
    bar.set_message("storm");
    let end = Instant::now() + options.duration;
    let attacking: Vec<_> = (0..options.num_attackers)
        .map(|number| attackers.spawn(attack(Arc::clone(&options), number, end)))
        .collect();
    let watched = attackers.spawn(watch_memory(options.pid, started, end, bar.clone()));
    let storm = stream_until(&client, end).await;
    let mut attacks: BTreeMap<String, BTreeMap<u16, u64>> = BTreeMap::new();
    for attacker in attacking {
        let answers = attacker.await;
        let answers = answers.map_err(|cause| BenchError::Failed(format!("an attacker broke: {cause}")))?;
        for ((attack, status), count) in answers {
            *attacks.entry(attack.name().to_owned()).or_default().entry(status).or_default() += count;
        }
    }
    let resident = watched.await.unwrap_or(None);
    bar.finish_and_clear();
    Ok(judge(&options, started.elapsed(), calm, storm, attacks, resident))
}

/// What the well-behaved client saw.
#[derive(Debug, Default)]
struct Seen {
    /// Between two pieces of one answer.
    gaps_ms: Vec<f64>,
    /// From a request to its first piece.
    firsts_ms: Vec<f64>,
    failures: Vec<String>,
}

/// One streamed answer after the other.
async fn stream_until(client: &Client, end: Instant) -> Seen {
    let mut seen = Seen::default();
    let body = json!({"prompt": "Once upon a time", "max_tokens": ANSWER_TOKENS, "ignore_eos": true,
        "temperature": 0, "stream": true});
    let body = Bytes::from(body.to_string());
    while Instant::now() < end {
        if let Err(cause) = stream_once(client, body.clone(), end, &mut seen).await {
            seen.failures.push(cause);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    seen
}

async fn stream_once(client: &Client, body: Bytes, end: Instant, seen: &mut Seen) -> Result<(), String> {
    let asked = Instant::now();
    let mut answer = client.send(Method::POST, "/v1/completions", body).await?;
    if !answer.status().is_success() {
        return Err(format!("the well-behaved client was answered with {}", answer.status().as_u16()));
    }
    let mut last: Option<Instant> = None;
    while let Some(piece) = answer.next().await {
        let piece = piece?;
        if piece.windows(7).any(|window| window == b"\"error\"") {
            return Err("the well-behaved client's stream broke off".to_owned());
        }
        let now = Instant::now();
        let (times_ms, since) = match last {
            Some(last) => (&mut seen.gaps_ms, last),
            None => (&mut seen.firsts_ms, asked),
        };
        times_ms.push((now - since).as_secs_f64() * 1e3);
        last = Some(now);
        if now > end {
            // What is left of the answer does not count; dropping it closes the connection.
            return Ok(());
        }
    }
    answer.finish();
    Ok(())
}

async fn attack(options: Arc<StormOptions>, number: usize, end: Instant) -> BTreeMap<(Attack, u16), u64> {
    let mut random = Random::new(options.seed.wrapping_add(number as u64 + 1));
    let mut answers = BTreeMap::new();
    let Ok(client) = Client::new(&options.base_url, &options.attack_headers).await else { return answers };
    while Instant::now() < end {
        let turn = number + answers.values().sum::<u64>() as usize;
        let attack = options.attacks[turn % options.attacks.len()];
        let status = if attack == Attack::DeclaredBody {
            declare_body(&options).await;
            0
        } else {
            let body = Bytes::from(attack.body(&mut random));
            let sent = async {
                match client.send(Method::POST, attack.route(), body).await {
                    Ok(answer) => answer.whole().await.map_or(0, |(status, _)| status.as_u16()),
                    Err(_) => 0,
                }
            };
            tokio::time::timeout(PATIENCE.min(end - Instant::now().min(end)), sent).await.unwrap_or(0)
        };
        *answers.entry((attack, status)).or_default() += 1;
    }
    answers
}

/// Declares sixteen megabytes, sends one byte and holds the connection.
async fn declare_body(options: &StormOptions) {
    let Some(address) = options.base_url.strip_prefix("http://") else { return };
    let Ok(mut stream) = tokio::net::TcpStream::connect(address).await else { return };
    let headers: Vec<String> =
        options.attack_headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let headers = headers.concat();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n{headers}\
         Content-Length: {}\r\n\r\n{{",
        16 << 20
    );
    if stream.write_all(head.as_bytes()).await.is_ok() {
        tokio::time::sleep(HOLD).await;
    }
}

/// The largest resident memory until `end`.
async fn watch_memory(pid: Option<u32>, started: Instant, end: Instant, bar: ProgressBar) -> Option<f64> {
    let mut largest: Option<f64> = None;
    while Instant::now() < end {
        if let Some(now) = pid.and_then(resident_mib) {
            largest = Some(largest.map_or(now, |before| before.max(now)));
        }
        bar.set_position(started.elapsed().as_secs());
        tokio::time::sleep(LOOK_EVERY).await;
    }
    largest
}

fn judge(
    options: &StormOptions,
    duration: Duration,
    calm: Seen,
    storm: Seen,
    attacks: BTreeMap<String, BTreeMap<u16, u64>>,
    resident_mib: Option<f64>,
) -> StormResult {
    let mut failures: Vec<String> = calm.failures.into_iter().chain(storm.failures).collect();
    failures.sort();
    failures.dedup();
    let (calm_firsts, storm_firsts) = (Distribution::new(calm.firsts_ms), Distribution::new(storm.firsts_ms));
    let (calm, storm) = (Distribution::new(calm.gaps_ms), Distribution::new(storm.gaps_ms));
    let p99 = |gaps: &Distribution| if gaps.is_empty() { f64::INFINITY } else { gaps.percentile(99.0) };
    let (calm_p99_ms, storm_p99_ms) = (p99(&calm), p99(&storm));
    let allowed = calm_p99_ms * options.max_token_ratio;
    if storm_p99_ms > allowed {
        failures.push(format!(
            "the 99th percentile between tokens is {storm_p99_ms:.1} ms, {calm_p99_ms:.1} ms alone, above {allowed:.1} ms"
        ));
    }
    if let (Some(limit), Some(largest)) = (options.max_resident_mib, resident_mib)
        && largest > limit
    {
        failures.push(format!("resident memory reached {largest:.0} MiB, above {limit:.0} MiB"));
    }
    let p50 = |gaps: &Distribution| if gaps.is_empty() { 0.0 } else { gaps.median() };
    StormResult {
        duration: duration.as_secs_f64(),
        calm_tokens: calm.len(),
        calm_p50_ms: p50(&calm),
        calm_p99_ms,
        calm_first_ms: p50(&calm_firsts),
        storm_tokens: storm.len(),
        storm_p50_ms: p50(&storm),
        storm_p99_ms,
        storm_max_ms: storm.sorted().last().copied().unwrap_or(0.0),
        storm_first_ms: p50(&storm_firsts),
        attacks,
        resident_mib,
        failures,
    }
}

impl StormResult {
    pub fn passed(&self) -> bool {
        self.failures.is_empty()
    }

    /// For the console.
    pub fn summary(&self) -> String {
        let mut lines = vec![
            format!(
                "alone: {} gaps between tokens, median {:.1} ms, 99th percentile {:.1} ms; first token {:.1} ms",
                self.calm_tokens, self.calm_p50_ms, self.calm_p99_ms, self.calm_first_ms
            ),
            format!(
                "in the storm: {} gaps, median {:.1} ms, 99th percentile {:.1} ms, largest {:.1} ms; first token {:.1} ms",
                self.storm_tokens,
                self.storm_p50_ms,
                self.storm_p99_ms,
                self.storm_max_ms,
                self.storm_first_ms
            ),
        ];
        for (attack, statuses) in &self.attacks {
            let counts: Vec<String> =
                statuses.iter().map(|(status, count)| format!("{status}: {count}")).collect();
            lines.push(format!("  {attack:<14} {}", counts.join(", ")));
        }
        lines.extend(self.resident_mib.map(|most| format!("resident memory: at most {most:.0} MiB")));
        lines.extend(self.failures.iter().map(|failure| format!("FAILED: {failure}")));
        lines.push(if self.passed() { "passed" } else { "did not pass" }.to_owned());
        lines.join("\n") + "\n"
    }

    pub fn to_json(&self) -> Value {
        serde_json::to_value(self).expect("plain numbers and texts")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(calm: f64, storm: f64, failures: &[&str], resident: Option<f64>) -> StormResult {
        let options = StormOptions {
            base_url: String::new(),
            headers: Vec::new(),
            attack_headers: Vec::new(),
            num_attackers: 1,
            attacks: Attack::ALL.to_vec(),
            calm: Duration::from_secs(1),
            duration: Duration::from_secs(1),
            pid: None,
            max_token_ratio: 3.0,
            max_resident_mib: Some(1000.0),
            seed: 0,
        };
        let seen = |gap: f64| Seen { gaps_ms: vec![gap; 10], ..Seen::default() };
        let storm = Seen { failures: failures.iter().map(ToString::to_string).collect(), ..seen(storm) };
        judge(&options, Duration::from_secs(2), seen(calm), storm, BTreeMap::new(), resident)
    }

    #[test]
    fn every_promise_can_be_broken() {
        assert!(judged(10.0, 29.0, &[], Some(900.0)).passed());
        assert!(!judged(10.0, 31.0, &[], None).passed());
        assert!(!judged(10.0, 10.0, &["answered with 429"], None).passed());
        assert!(!judged(10.0, 10.0, &[], Some(1001.0)).passed());
    }

    #[test]
    fn attacks_are_found_by_name() {
        for attack in Attack::ALL {
            assert_eq!(attack.name().parse(), Ok(attack));
        }
        let unknown = "rain".parse::<Attack>().expect_err("no such attack");
        assert!(unknown.contains("hard-schema, large-schema"), "{unknown}");
    }

    #[test]
    fn attacks_are_what_they_are_called() {
        let mut random = Random::new(3);
        let body = |attack: Attack, random: &mut Random| -> Value {
            serde_json::from_str(&attack.body(random)).expect("JSON")
        };
        let hard = body(Attack::HardSchema, &mut random);
        assert!(hard["guided_json"]["multipleOf"].as_u64().is_some_and(|step| step >= 2_000_000_000));
        let large = body(Attack::LargeSchema, &mut random);
        assert_eq!(large["guided_json"]["properties"].as_object().map(Map::len), Some(7500));
        assert_ne!(large, body(Attack::LargeSchema, &mut random), "none is found in a cache");
        assert_eq!(body(Attack::Flood, &mut random)["prompt"].as_array().map(Vec::len), Some(1000));
        assert!((10 << 20..16 << 20).contains(&Attack::TinyMessages.body(&mut random).len()));
    }
}
