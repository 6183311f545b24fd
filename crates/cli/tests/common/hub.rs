//! A small server that speaks the hub's API, and misbehaves when asked to.
#![allow(dead_code, reason = "each test uses its own part of this")]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sha1::Digest;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What is wrong with a hub.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Every connection ends after this many bytes of a file.
    pub cut_after: Option<usize>,
    /// Ranges are not understood.
    pub no_ranges: bool,
    /// Files begin with another byte than announced.
    pub damages: bool,
    /// The list says that files are longer by this.
    pub lies_by: i64,
    /// Files are sent with so many bytes more.
    pub sends_more: usize,
    /// After the head of a file, nothing.
    pub hangs: bool,
    /// The first request is answered with 503.
    pub busy_once: bool,
    /// A token that must be there.
    pub token: Option<&'static str>,
}

/// A hub with one repository, `owner/name`.
#[derive(Debug)]
pub struct Hub {
    pub url: String,
    log: Arc<Mutex<Vec<String>>>,
}

struct State {
    files: Vec<(String, Vec<u8>)>,
    faults: Faults,
    port: u16,
    was_busy: AtomicBool,
    log: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    pub fn start(files: &[(&str, &[u8])], faults: Faults) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let log = Arc::new(Mutex::new(Vec::new()));
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
        let was_busy = AtomicBool::new(!faults.busy_once);
        let state = Arc::new(State { files, faults, port, was_busy, log: Arc::clone(&log) });
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&state);
                std::thread::spawn(move || state.serve(stream));
            }
        });
        Self { url: format!("http://127.0.0.1:{port}"), log }
    }

    /// The requests so far: method and path, `range`, and whether there was a token.
    pub fn log(&self) -> Vec<String> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(&sha2::Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes what is written");
        text
    })
}

fn git_blob(bytes: &[u8]) -> String {
    let mut hasher = sha1::Sha1::new();
    hasher.update(format!("blob {}\0", bytes.len()));
    hasher.update(bytes);
    hex(&hasher.finalize())
}

/// As on the hub, weights are large files with a SHA-256 and the rest belongs to Git.
fn is_large(name: &str) -> bool {
    let extension = std::path::Path::new(name).extension();
    extension.is_some_and(|extension| extension == "gguf" || extension == "safetensors")
}

impl State {
    fn serve(&self, stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().expect("a second handle"));
        let mut stream = stream;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
            let (mut range, mut token, mut host) = (None, None, String::new());
            loop {
                let mut header = String::new();
                if reader.read_line(&mut header).unwrap_or(0) == 0 || header == "\r\n" {
                    break;
                }
                let (name, value) = header.trim().split_once(": ").unwrap_or_default();
                match name.to_ascii_lowercase().as_str() {
                    "range" => {
                        range =
                            value.strip_prefix("bytes=").map(|range| range.trim_end_matches('-').to_owned());
                    }
                    "authorization" => token = value.strip_prefix("Bearer ").map(str::to_owned),
                    "host" => value.clone_into(&mut host),
                    _ => {}
                }
            }
            let start: usize = range.as_deref().and_then(|range| range.parse().ok()).unwrap_or(0);
            let mark = if token.is_some() { " token" } else { "" };
            self.log
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(format!("{path} from {start}{mark}"));
            if !self.answer(&mut stream, &path, &host, start, token.as_deref()) {
                return;
            }
        }
    }

    /// False where the connection is to end.
    fn answer(&self, out: &mut TcpStream, path: &str, host: &str, start: usize, token: Option<&str>) -> bool {
        if !self.was_busy.swap(true, Ordering::SeqCst) {
            return say(out, "503 Service Unavailable", "Retry-After: 0\r\n", b"");
        }
        // The files lie on another host, which wants no token.
        if let Some(sum) = path.strip_prefix("/cdn/") {
            assert!(host.starts_with("localhost"), "{host}");
            let found = self.files.iter().find(|(_, bytes)| sha256(bytes) == sum);
            return match found {
                Some((_, bytes)) => self.file(out, bytes, start),
                None => say(out, "404 Not Found", "", b""),
            };
        }
        match (self.faults.token, token) {
            (Some(_), None) => return say(out, "401 Unauthorized", "", b"{}"),
            (Some(wanted), Some(given)) if wanted != given => return say(out, "403 Forbidden", "", b"{}"),
            _ => {}
        }
        let info =
            ["main", "v1", COMMIT].map(|revision| format!("/api/models/owner/name/revision/{revision}"));
        if info.iter().any(|known| known == path) {
            return say(
                out,
                "200 OK",
                "",
                format!("{{\"id\": \"owner/name\", \"sha\": \"{COMMIT}\"}}").as_bytes(),
            );
        }
        if path == format!("/api/models/owner/name/tree/{COMMIT}?recursive=true") {
            return say(out, "200 OK", "", self.tree().as_bytes());
        }
        let wanted = path.strip_prefix(&format!("/owner/name/resolve/{COMMIT}/"));
        match wanted.and_then(|name| self.files.iter().find(|(known, _)| known == name)) {
            Some((name, bytes)) if is_large(name) => {
                let to = format!("Location: http://localhost:{}/cdn/{}\r\n", self.port, sha256(bytes));
                say(out, "302 Found", &to, b"")
            }
            Some((_, bytes)) => self.file(out, bytes, start),
            None => say(out, "404 Not Found", "", b"{}"),
        }
    }

    fn tree(&self) -> String {
        let entry = |(name, bytes): &(String, Vec<u8>)| {
            let lie = if bytes.len() > 100 { self.faults.lies_by } else { 0 };
            let size = bytes.len() as i64 + lie;
            let mut entry =
                serde_json::json!({"type": "file", "path": name, "size": size, "oid": git_blob(bytes)});
            if is_large(name) {
                entry["lfs"] = serde_json::json!({"oid": sha256(bytes), "size": size, "pointerSize": 130});
            }
            entry
        };
        let mut entries: Vec<serde_json::Value> = self.files.iter().map(entry).collect();
        entries.push(serde_json::json!({"type": "directory", "path": "folder", "size": 0, "oid": COMMIT}));
        // Paths that lead out of the cache are never followed.
        entries
            .push(serde_json::json!({"type": "file", "path": "../../evil.gguf", "size": 1, "oid": COMMIT}));
        serde_json::to_string(&entries).expect("JSON")
    }

    fn file(&self, out: &mut TcpStream, bytes: &[u8], start: usize) -> bool {
        let mut sent = bytes.to_vec();
        if self.faults.damages {
            sent[0] ^= 1;
        }
        sent.extend(std::iter::repeat_n(0, self.faults.sends_more));
        let start = if self.faults.no_ranges { 0 } else { start };
        let rest = &sent[start.min(sent.len())..];
        let (status, range) = if start > 0 {
            let last = sent.len() - 1;
            ("206 Partial Content", format!("Content-Range: bytes {start}-{last}/{}\r\n", sent.len()))
        } else {
            ("200 OK", String::new())
        };
        // Without a length, what comes is believed until the connection ends.
        let length = if self.faults.sends_more > 0 {
            String::new()
        } else {
            format!("Content-Length: {}\r\n", rest.len())
        };
        let head = format!("HTTP/1.1 {status}\r\n{range}{length}Connection: close\r\n\r\n");
        let _ = out.write_all(head.as_bytes());
        if self.faults.hangs {
            std::thread::sleep(Duration::from_secs(60));
            return false;
        }
        let _ = out.write_all(&rest[..self.faults.cut_after.unwrap_or(rest.len()).min(rest.len())]);
        false
    }
}

fn say(out: &mut TcpStream, status: &str, headers: &str, body: &[u8]) -> bool {
    let head = format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\n\r\n", body.len());
    out.write_all(head.as_bytes()).and_then(|()| out.write_all(body)).is_ok()
}
