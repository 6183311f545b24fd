//! A small client of Hugging Face's API: what a repository holds, and its files from any byte on.
//!
//! Redirects are followed here, so that a token never leaves the hub's own host, and every wait has an end: a hub that
//! accepts a connection and says nothing is given up like one that is not there.

use std::io::Read;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use serde::Deserialize;
use ureq::Agent;
use ureq::http::{Response, StatusCode};

use crate::{ErrorKind, HubError, RepoName, home};

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
const MAX_REDIRECTS: usize = 6;
/// Of what the hub says of a repository.
const MAX_JSON_BYTES: u64 = 64 << 20;
const MAX_PAGES: usize = 200;
/// A request that the hub is too busy for is repeated after these waits.
const WAITS: [Duration; 3] = [Duration::from_millis(500), Duration::from_secs(2), Duration::from_secs(5)];
/// The most that a hub may make us wait.
const MAX_WAIT: Duration = Duration::from_secs(30);
const CHUNK_BYTES: usize = 256 << 10;

/// Which hub, and what lets one in.
#[derive(Clone)]
pub struct Endpoint {
    url: String,
    token: Option<String>,
    /// Without the network: `HF_HUB_OFFLINE`.
    pub offline: bool,
    /// How long a hub may say nothing.
    pub patience: Duration,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint")
            .field("url", &self.url)
            .field("has_token", &self.token.is_some())
            .finish_non_exhaustive()
    }
}

impl Endpoint {
    /// `HF_ENDPOINT`, `HF_TOKEN` (or the token of `hf auth login`), `HF_HUB_OFFLINE`, `HF_HUB_DOWNLOAD_TIMEOUT`.
    pub fn from_env() -> Self {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let token = set("HF_TOKEN").or_else(|| set("HUGGING_FACE_HUB_TOKEN"));
        let token = token.or_else(|| std::fs::read_to_string(home::token_file()?).ok());
        let on = |value: String| ["1", "true", "yes", "on"].contains(&value.to_ascii_lowercase().as_str());
        let patience = set("HF_HUB_DOWNLOAD_TIMEOUT").and_then(|seconds| seconds.parse::<u64>().ok());
        let url = set("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        Self {
            offline: set("HF_HUB_OFFLINE").is_some_and(on),
            patience: Duration::from_secs(patience.unwrap_or(30).clamp(1, 3600)),
            ..Self::new(&url, token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty()))
        }
    }

    pub fn new(url: &str, token: Option<String>) -> Self {
        let url = url.trim_end_matches('/').to_owned();
        Self { url, token, offline: false, patience: Duration::from_secs(30) }
    }

    pub fn url(&self) -> &str {
        &self.url
    }
}

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    pub path: String,
    pub size: u64,
    pub checksum: Checksum,
}

/// What the hub says a file's bytes hash to, in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checksum {
    Sha256(String),
    /// Of a small file: Git's own, SHA-1 over a header and the bytes.
    GitBlob(String),
}

impl Checksum {
    pub fn text(&self) -> &str {
        match self {
            Self::Sha256(text) | Self::GitBlob(text) => text,
        }
    }
}

/// A repository at one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub commit: String,
    pub files: Vec<RemoteFile>,
}

/// Asks one hub.
#[derive(Debug)]
pub struct Client {
    agent: Agent,
    endpoint: Endpoint,
}

/// The bytes of a file, from `start` on.
pub(crate) struct Download {
    pub start: u64,
    /// What the hub says the whole file has, if it says.
    pub total: Option<u64>,
    pub reader: Box<dyn Read>,
}

#[derive(Deserialize)]
struct RawInfo {
    sha: Option<String>,
}

#[derive(Deserialize)]
struct RawFile {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
    oid: Option<String>,
    lfs: Option<RawLfs>,
}

#[derive(Deserialize)]
struct RawLfs {
    oid: Option<String>,
    #[serde(alias = "sha256")]
    other: Option<String>,
    size: Option<u64>,
}

impl Client {
    pub fn new(endpoint: Endpoint) -> Self {
        let config = Agent::config_builder()
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .timeout_connect(Some(endpoint.patience.min(Duration::from_secs(10))))
            .timeout_recv_response(Some(endpoint.patience))
            .user_agent(concat!("baton/", env!("CARGO_PKG_VERSION")))
            .build();
        Self { agent: Agent::new_with_config(config), endpoint }
    }

    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The files of a repository at a branch, a tag or a commit.
    pub fn snapshot(&self, repo: &RepoName, revision: &str) -> Result<Snapshot, HubError> {
        if self.endpoint.offline {
            let message =
                format!("{repo} has not been fetched, and HF_HUB_OFFLINE forbids asking the hub for it");
            return Err(HubError::new(ErrorKind::Network, message));
        }
        let base = format!("{}/api/models/{}", self.endpoint.url, repo.id());
        let what = || format!("{} at {revision}", repo.id());
        let info: RawInfo = self.json(&format!("{base}/revision/{}", escape(revision)), &what)?.0;
        let commit = info.sha.filter(|sha| is_hash(sha, 40)).ok_or_else(|| self.nonsense("no commit"))?;
        let mut files = Vec::new();
        let mut next = Some(format!("{base}/tree/{commit}?recursive=true"));
        for _ in 0..MAX_PAGES {
            let Some(url) = next.take() else { break };
            let (page, link): (Vec<RawFile>, _) = self.json(&url, &what)?;
            files.extend(page.into_iter().filter(|file| file.kind == "file").filter_map(remote_file));
            next = link;
        }
        Ok(Snapshot { commit, files })
    }

    fn nonsense(&self, what: &str) -> HubError {
        let message = format!("{} does not answer as a hub does: {what}", self.endpoint.url);
        HubError::new(ErrorKind::Network, message).with_hint("check HF_ENDPOINT")
    }

    /// A JSON answer, and the address of the next page.
    fn json<T: serde::de::DeserializeOwned>(
        &self,
        url: &str,
        what: &dyn Fn() -> String,
    ) -> Result<(T, Option<String>), HubError> {
        let response = self.get(url, None, what)?;
        let link = response.headers().get("link").and_then(|value| value.to_str().ok()).and_then(next_link);
        let link = link.filter(|link| same_origin(link, &self.endpoint.url));
        let body = response.into_body().into_with_config().limit(MAX_JSON_BYTES).reader();
        let mut bytes = Vec::new();
        patient(body, self.endpoint.patience)
            .read_to_end(&mut bytes)
            .map_err(|cause| self.failed(&cause.to_string()))?;
        let value = serde_json::from_slice(&bytes).map_err(|cause| self.nonsense(&cause.to_string()))?;
        Ok((value, link))
    }

    /// The bytes of a file from `start` on, or from its beginning where the hub does not do that.
    pub(crate) fn open(
        &self,
        repo: &RepoName,
        commit: &str,
        path: &str,
        start: u64,
    ) -> Result<Download, HubError> {
        let url = format!("{}/{}/resolve/{commit}/{}", self.endpoint.url, repo.id(), escape_path(path));
        let response = self.get(&url, Some(start), &|| format!("{path} of {}", repo.id()))?;
        let header = |name: &str| {
            response.headers().get(name).and_then(|value| value.to_str().ok().map(str::to_owned))
        };
        let (start, total) = if response.status() == StatusCode::PARTIAL_CONTENT {
            let range = header("content-range").as_deref().and_then(content_range);
            let (from, total) = range.ok_or_else(|| self.nonsense("a part without Content-Range"))?;
            (from, total)
        } else {
            (0, header("content-length").and_then(|length| length.parse().ok()))
        };
        let reader = patient(response.into_body().into_reader(), self.endpoint.patience);
        Ok(Download { start, total, reader: Box::new(reader) })
    }

    /// Follows redirects and repeats what the hub was too busy for.
    fn get(
        &self,
        url: &str,
        start: Option<u64>,
        what: &dyn Fn() -> String,
    ) -> Result<Response<ureq::Body>, HubError> {
        let (mut url, mut num_redirects, mut waits) = (url.to_owned(), 0, WAITS.iter());
        loop {
            let mut request = self.agent.get(&url);
            if let Some(token) = &self.endpoint.token
                && same_origin(&url, &self.endpoint.url)
            {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            if let Some(start) = start.filter(|&start| start > 0) {
                request = request.header("range", format!("bytes={start}-"));
            }
            // A compressed answer could not be continued at a byte.
            let response = request
                .header("accept-encoding", "identity")
                .call()
                .map_err(|cause| self.failed(&cause.to_string()))?;
            let status = response.status();
            if status.is_success() {
                return Ok(response);
            }
            if status.is_redirection() {
                num_redirects += 1;
                let location = response.headers().get("location").and_then(|value| value.to_str().ok());
                let target = location.and_then(|location| join(&url, location));
                url = target
                    .filter(|_| num_redirects <= MAX_REDIRECTS)
                    .filter(|target| !url.starts_with("https:") || target.starts_with("https:"))
                    .ok_or_else(|| self.nonsense("a redirect without an address"))?;
                continue;
            }
            let is_busy = status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error();
            match waits.next().filter(|_| is_busy) {
                Some(&wait) => std::thread::sleep(retry_after(&response).unwrap_or(wait).min(MAX_WAIT)),
                None => return Err(self.refused(status, what)),
            }
        }
    }

    fn failed(&self, cause: &str) -> HubError {
        HubError::new(ErrorKind::Network, format!("{} cannot be reached: {cause}", self.endpoint.url))
            .with_hint("check the network, the proxy variables and HF_ENDPOINT; HF_HUB_OFFLINE=1 uses only what has been fetched")
    }

    fn refused(&self, status: StatusCode, what: &dyn Fn() -> String) -> HubError {
        let (what, url) = (what(), &self.endpoint.url);
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN if self.endpoint.token.is_some() => {
                HubError::new(ErrorKind::Denied, format!("{url} does not give {what} to this token"))
                    .with_hint("accept the model's terms on its page, and check that HF_TOKEN may read it")
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                HubError::new(ErrorKind::Denied, format!("{url} does not give {what} to everyone: it does not exist, is private, or its terms must be accepted"))
                    .with_hint("check the name; for a private or gated model, accept its terms on its page and set HF_TOKEN")
            }
            StatusCode::NOT_FOUND => HubError::new(ErrorKind::NotFound, format!("{url} has no {what}"))
                .with_hint("check the name and --revision"),
            _ => HubError::new(ErrorKind::Network, format!("{url} answered {status} for {what}"))
                .with_hint("try again later"),
        }
    }
}

fn remote_file(raw: RawFile) -> Option<RemoteFile> {
    let (checksum, size) = match raw.lfs {
        Some(lfs) => {
            let sum = lfs.oid.or(lfs.other)?;
            let sum = sum.strip_prefix("sha256:").unwrap_or(&sum).to_ascii_lowercase();
            (Checksum::Sha256(sum), lfs.size.unwrap_or(raw.size))
        }
        None => (Checksum::GitBlob(raw.oid?.to_ascii_lowercase()), raw.size),
    };
    let length = if matches!(checksum, Checksum::Sha256(_)) { 64 } else { 40 };
    // A path becomes the name of a file of ours.
    let sound = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains(['\\', '\0']);
    let is_sound = raw.path.split('/').all(sound) && is_hash(checksum.text(), length);
    is_sound.then_some(RemoteFile { path: raw.path, size, checksum })
}

fn is_hash(text: &str, length: usize) -> bool {
    text.len() == length && text.chars().all(|c| c.is_ascii_hexdigit())
}

fn retry_after(response: &Response<ureq::Body>) -> Option<Duration> {
    response.headers().get("retry-after")?.to_str().ok()?.trim().parse().ok().map(Duration::from_secs)
}

/// `<URL>; rel="next"`.
fn next_link(header: &str) -> Option<String> {
    let link = header.split(',').find(|link| link.contains("rel=\"next\""))?;
    Some(link.trim().strip_prefix('<')?.split_once('>')?.0.to_owned())
}

/// `bytes 5-9/10`: where it begins, and the whole.
fn content_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, total.parse().ok()))
}

/// Scheme, host and port.
fn origin(url: &str) -> Option<&str> {
    let start = url.find("://")? + 3;
    let end = url[start..].find(['/', '?', '#']).map_or(url.len(), |end| start + end);
    Some(&url[..end])
}

fn same_origin(one: &str, other: &str) -> bool {
    origin(one)
        .is_some_and(|origin_one| origin(other).is_some_and(|two| origin_one.eq_ignore_ascii_case(two)))
}

/// Where a redirect leads.
fn join(from: &str, location: &str) -> Option<String> {
    if location.starts_with("http://") || location.starts_with("https://") {
        return Some(location.to_owned());
    }
    let path = location.starts_with('/') && !location.starts_with("//");
    path.then(|| Some(format!("{}{location}", origin(from)?))).flatten()
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            out.push(byte as char);
        } else {
            out.push('%');
            out.push_str(&crate::hex(&[byte]).to_ascii_uppercase());
        }
    }
    out
}

fn escape_path(path: &str) -> String {
    path.split('/').map(escape).collect::<Vec<_>>().join("/")
}

/// A reader that gives up when nothing has come for a while. The thread that reads ends with the connection.
fn patient(mut inner: impl Read + Send + 'static, patience: Duration) -> impl Read {
    let (sender, receiver) = sync_channel::<std::io::Result<Vec<u8>>>(4);
    std::thread::spawn(move || {
        loop {
            let mut chunk = vec![0; CHUNK_BYTES];
            let read = inner.read(&mut chunk).map(|count| {
                chunk.truncate(count);
                chunk
            });
            let ended = read.as_ref().map_or(true, Vec::is_empty);
            if sender.send(read).is_err() || ended {
                break;
            }
        }
    });
    Patient { receiver, patience, chunk: Vec::new(), at: 0, ended: false }
}

struct Patient {
    receiver: std::sync::mpsc::Receiver<std::io::Result<Vec<u8>>>,
    patience: Duration,
    chunk: Vec<u8>,
    at: usize,
    ended: bool,
}

impl Read for Patient {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        if self.at == self.chunk.len() && !self.ended {
            self.chunk = match self.receiver.recv_timeout(self.patience) {
                Ok(chunk) => chunk?,
                Err(RecvTimeoutError::Disconnected) => Vec::new(),
                Err(RecvTimeoutError::Timeout) => {
                    let cause = format!("nothing came for {} s", self.patience.as_secs());
                    return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, cause));
                }
            };
            self.at = 0;
            self.ended = self.chunk.is_empty();
        }
        let count = out.len().min(self.chunk.len() - self.at);
        out[..count].copy_from_slice(&self.chunk[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_taken_apart() {
        assert_eq!(origin("https://h.co:8/a?b"), Some("https://h.co:8"));
        assert!(same_origin("https://H.co/x", "https://h.co"));
        assert!(!same_origin("https://h.co.evil/x", "https://h.co"));
        assert_eq!(join("http://a/b/c", "/d").as_deref(), Some("http://a/d"));
        assert_eq!(join("http://a/b", "https://c/d").as_deref(), Some("https://c/d"));
        assert_eq!(join("http://a/b", "//evil/d"), None);
        assert_eq!(join("http://a/b", "file:///etc/passwd"), None);
        assert_eq!(escape_path("a b/c#d.gguf"), "a%20b/c%23d.gguf");
        assert_eq!(next_link("<http://x?cursor=1>; rel=\"next\"").as_deref(), Some("http://x?cursor=1"));
        assert_eq!(content_range("bytes 5-9/10"), Some((5, Some(10))));
        assert_eq!(content_range("bytes 5-9/*"), Some((5, None)));
        assert_eq!(content_range("items 5-9/10"), None);
    }

    #[test]
    fn paths_that_lead_elsewhere_are_left_out() {
        let raw = |path: &str, oid: &str| {
            let (kind, path) = ("file".to_owned(), path.to_owned());
            remote_file(RawFile { kind, path, size: 1, oid: Some(oid.to_owned()), lfs: None })
        };
        let oid = "0123456789012345678901234567890123456789";
        assert!(raw("a/b.json", oid).is_some());
        for path in ["../x", "/etc/passwd", "a//b", "a/../../x", "", "a\\b"] {
            assert!(raw(path, oid).is_none(), "{path}");
        }
        assert!(raw("a", "../../../x").is_none(), "a checksum becomes the name of a file");
    }

    #[test]
    fn silence_ends() {
        struct Silent;
        impl Read for Silent {
            fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
                std::thread::sleep(Duration::from_secs(5));
                Ok(0)
            }
        }
        let error = patient(Silent, Duration::from_millis(20)).read(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    }
}
