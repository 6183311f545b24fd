//! The router's settings and how workers are written down: as a flag, or in a file that is read again when it changes.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use hyper::Uri;
use serde::Deserialize;

/// How a worker is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// One after the other.
    RoundRobin,
    /// The one with the fewest requests.
    LeastLoad,
    /// The same for all requests of a session.
    Session,
    /// The same for prompts that begin alike, as long as it is not much busier than the others.
    #[default]
    PrefixHash,
    /// The one that holds the most of the prompt's KV, weighed against its load.
    LongestPrefix,
}

impl Policy {
    pub const ALL: [Self; 5] =
        [Self::RoundRobin, Self::LeastLoad, Self::Session, Self::PrefixHash, Self::LongestPrefix];

    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round_robin",
            Self::LeastLoad => "least_load",
            Self::Session => "session",
            Self::PrefixHash => "prefix_hash",
            Self::LongestPrefix => "longest_prefix",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Policy {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let text = text.replace('-', "_");
        Self::ALL.into_iter().find(|policy| policy.name() == text).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|policy| policy.name()).collect();
            ConfigError::new(format!("{text:?} is not a policy: choose one of {}", names.join(", ")))
        })
    }
}

/// What a worker does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Whole requests.
    #[default]
    Both,
    /// Computes prompts and hands their KV over.
    Prefill,
    /// Takes the KV of a prompt and goes on from there.
    Decode,
}

impl Role {
    pub fn name(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Where a worker's news of cached blocks come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EventSource {
    /// `GET /kv_events` of the worker itself, where it has that.
    #[default]
    Auto,
    None,
    /// A ZeroMQ PUB socket as vLLM has it, `tcp://host:port`.
    Zmq(String),
}

/// A worker as the user names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerSpec {
    /// `http://host:port`, perhaps with a path before every route; no slash at the end.
    pub url: String,
    pub role: Role,
    pub events: EventSource,
    /// Gets no new requests, but finishes those it has.
    pub drain: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

impl ConfigError {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl WorkerSpec {
    pub fn new(url: &str, role: Role) -> Result<Self, ConfigError> {
        let url = check_url(url)?;
        Ok(Self { url, role, events: EventSource::Auto, drain: false })
    }

    /// `tcp://host:port`, `http` for the worker's own stream, or `none`.
    pub fn with_events(mut self, text: &str) -> Result<Self, ConfigError> {
        self.events = parse_events(text)?;
        Ok(self)
    }

    /// `host:port`.
    pub(crate) fn authority(&self) -> String {
        let uri: Uri = self.url.parse().expect("the URL was checked");
        uri.authority().map(ToString::to_string).unwrap_or_default()
    }

    /// What stands before every route, often nothing.
    pub(crate) fn path_prefix(&self) -> String {
        let uri: Uri = self.url.parse().expect("the URL was checked");
        uri.path().trim_end_matches('/').to_owned()
    }
}

/// `URL`, or `URL,events=tcp://host:port`.
impl FromStr for WorkerSpec {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut parts = text.split(',');
        let spec = Self::new(parts.next().unwrap_or_default(), Role::Both)?;
        parts.try_fold(spec, |spec, part| match part.split_once('=') {
            Some(("events", events)) => spec.with_events(events),
            _ => Err(ConfigError::new(format!(
                "{part:?} is not known: after the URL of a worker write for example events=tcp://host:5557"
            ))),
        })
    }
}

fn check_url(url: &str) -> Result<String, ConfigError> {
    let wrong = |cause: &str| {
        ConfigError::new(format!("the worker {url:?} {cause}: write for example http://10.0.0.7:8000"))
    };
    let uri: Uri = url.parse().map_err(|_| wrong("is not a URL"))?;
    match uri.scheme_str() {
        Some("http") => {}
        Some("https") => return Err(wrong("is behind TLS, which is not spoken to workers")),
        _ => return Err(wrong("does not begin with http://")),
    }
    if uri.host().is_none_or(str::is_empty) {
        return Err(wrong("has no host"));
    }
    if uri.query().is_some() || uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err(wrong("has more than a host, a port and a path"));
    }
    Ok(url.trim_end_matches('/').to_owned())
}

fn parse_events(text: &str) -> Result<EventSource, ConfigError> {
    match text {
        "http" | "auto" => Ok(EventSource::Auto),
        "none" => Ok(EventSource::None),
        address if address.strip_prefix("tcp://").is_some_and(|rest| rest.contains(':')) => {
            Ok(EventSource::Zmq(address.to_owned()))
        }
        other => Err(ConfigError::new(format!(
            "{other:?} is no source of KV events: write tcp://host:port, http or none"
        ))),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileWorker {
    url: String,
    #[serde(default)]
    role: Role,
    kv_events: Option<String>,
    #[serde(default)]
    drain: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum FileEntry {
    Url(String),
    Worker(FileWorker),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    workers: Vec<FileEntry>,
}

/// A file of workers: JSON (`{"workers": ["http://…", {"url": "http://…", "role": "prefill"}]}`), or one URL a line.
pub fn parse_workers_file(text: &str) -> Result<Vec<WorkerSpec>, ConfigError> {
    let specs: Vec<WorkerSpec> = if text.trim_start().starts_with('{') {
        let file: File = serde_json::from_str(text)
            .map_err(|cause| ConfigError::new(format!("it is not a list of workers: {cause}")))?;
        file.workers.into_iter().map(FileEntry::into_spec).collect::<Result<_, _>>()?
    } else {
        let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
        lines.filter(|line| !line.is_empty()).map(str::parse).collect::<Result<_, _>>()?
    };
    check_unique(&specs)?;
    Ok(specs)
}

impl FileEntry {
    fn into_spec(self) -> Result<WorkerSpec, ConfigError> {
        match self {
            Self::Url(url) => url.parse(),
            Self::Worker(FileWorker { url, role, kv_events, drain }) => {
                let spec = WorkerSpec { drain, ..WorkerSpec::new(&url, role)? };
                match kv_events {
                    Some(events) => spec.with_events(&events),
                    None => Ok(spec),
                }
            }
        }
    }
}

pub(crate) fn check_unique(specs: &[WorkerSpec]) -> Result<(), ConfigError> {
    for (index, spec) in specs.iter().enumerate() {
        if specs[..index].iter().any(|other| other.url == spec.url) {
            return Err(ConfigError::new(format!("the worker {} is named twice", spec.url)));
        }
    }
    if specs.len() > MAX_WORKERS {
        return Err(ConfigError::new(format!("there are {} workers; at most {MAX_WORKERS}", specs.len())));
    }
    Ok(())
}

/// More than any site has.
pub(crate) const MAX_WORKERS: usize = 1024;

/// Each field is a flag of `baton route`; defaults are those of the command line.
#[derive(Clone, Debug)]
pub struct RouterConfig {
    pub host: IpAddr,
    /// 0 takes any free port.
    pub port: u16,
    pub workers: Vec<WorkerSpec>,
    /// Read at the start and whenever it has changed.
    pub workers_file: Option<PathBuf>,
    pub policy: Policy,
    /// Names the session; without it, the body's `user` does.
    pub session_header: String,
    /// Bytes of a prompt that `prefix_hash` looks at.
    pub prefix_bytes: usize,
    /// How much busier than the average a worker may be and still get requests for what it holds: 1.2 is a fifth.
    pub load_factor: f64,
    /// The router's own questions to workers carry this key; clients' keys are passed through.
    pub worker_api_key: Option<String>,
    /// Asked of whoever wants the router's own pages; without it they are open.
    pub admin_api_key: Option<String>,
    pub health_path: String,
    pub health_interval: Duration,
    pub health_timeout: Duration,
    /// Checks in a row that must fail before a worker gets no more requests.
    pub health_failures: u32,
    pub connect_timeout: Duration,
    /// Until a worker's answer begins.
    pub request_timeout: Duration,
    /// Between two pieces of an answer.
    pub stream_timeout: Duration,
    /// Workers that a request is tried with.
    pub max_attempts: usize,
    /// Failures in a row that open a worker's circuit breaker.
    pub breaker_failures: u32,
    /// How long it stays open.
    pub breaker_cooldown: Duration,
    pub max_body_bytes: usize,
    pub max_connections: usize,
    /// Requests in all, and of one worker; more are answered with 429.
    pub max_requests: usize,
    pub max_requests_per_worker: usize,
    /// How long requests may go on after a signal to stop.
    pub shutdown_timeout: Duration,
    /// Blocks that the index of prefixes may hold, of all workers together.
    pub max_indexed_blocks: usize,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 8080,
            workers: Vec::new(),
            workers_file: None,
            policy: Policy::default(),
            session_header: "x-session-id".to_owned(),
            prefix_bytes: 1024,
            load_factor: 1.2,
            worker_api_key: None,
            admin_api_key: None,
            health_path: "/health".to_owned(),
            health_interval: Duration::from_secs(2),
            health_timeout: Duration::from_secs(5),
            health_failures: 2,
            connect_timeout: Duration::from_secs(2),
            request_timeout: Duration::from_secs(600),
            stream_timeout: Duration::from_secs(300),
            max_attempts: 3,
            breaker_failures: 3,
            breaker_cooldown: Duration::from_secs(5),
            max_body_bytes: 16 << 20,
            max_connections: 4096,
            max_requests: 4096,
            max_requests_per_worker: 1024,
            shutdown_timeout: Duration::from_secs(30),
            max_indexed_blocks: 4 << 20,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_read_from_flags() {
        let spec: WorkerSpec = "http://127.0.0.1:8000/".parse().unwrap();
        assert_eq!((spec.url.as_str(), spec.role), ("http://127.0.0.1:8000", Role::Both));
        assert_eq!((spec.authority(), spec.path_prefix()), ("127.0.0.1:8000".to_owned(), String::new()));
        let spec: WorkerSpec = "http://gpu:8000/llm,events=tcp://gpu:5557".parse().unwrap();
        assert_eq!(spec.events, EventSource::Zmq("tcp://gpu:5557".to_owned()));
        assert_eq!(spec.path_prefix(), "/llm");
        for (wrong, expect) in [
            ("", "is not a URL"),
            ("gpu:8000", "http://"),
            ("https://gpu", "TLS"),
            ("http://u:p@gpu", "more than a host"),
            ("http://gpu?x=1", "more than a host"),
            ("http://gpu,role=x", "is not known"),
            ("http://gpu,events=udp://x", "no source of KV events"),
        ] {
            let error = wrong.parse::<WorkerSpec>().unwrap_err().to_string();
            assert!(error.contains(expect), "{wrong}: {error}");
        }
    }

    #[test]
    fn files_have_two_forms() {
        let lines = parse_workers_file("# site A\nhttp://a:1\n\nhttp://b:2 # spare\n").unwrap();
        assert_eq!(lines.iter().map(|spec| &*spec.url).collect::<Vec<_>>(), ["http://a:1", "http://b:2"]);
        let json = r#"{"workers": ["http://a:1", {"url": "http://b:2/", "role": "prefill", "drain": true,
                       "kv_events": "tcp://b:5557"}]}"#;
        let json = parse_workers_file(json).unwrap();
        assert_eq!((json[1].role, json[1].drain, &*json[1].url), (Role::Prefill, true, "http://b:2"));
        for (wrong, expect) in [
            ("http://a:1\nhttp://a:1/", "named twice"),
            ("{\"workers\": [{\"url\": \"http://a:1\", \"rolle\": \"x\"}]}", "not a list of workers"),
            ("{\"workers\": 1}", "not a list of workers"),
            ("nonsense here", "not a URL"),
        ] {
            let error = parse_workers_file(wrong).unwrap_err().to_string();
            assert!(error.contains(expect), "{wrong}: {error}");
        }
    }

    #[test]
    fn policies_are_named_as_users_write_them() {
        assert_eq!("least-load".parse(), Ok(Policy::LeastLoad));
        assert!("best".parse::<Policy>().unwrap_err().to_string().contains("longest_prefix"));
    }
}
