//! A real Redis server on a port of its own.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[derive(Debug)]
pub struct Redis {
    child: Child,
    port: u16,
    _folder: tempfile::TempDir,
}

impl Redis {
    /// `None`, with a line that says so, where there is no Redis and `BATON_REQUIRE_REDIS` does not demand one.
    pub fn start(arguments: &[&str]) -> Option<Self> {
        Self::launch(arguments, false)
    }

    pub fn start_tls(arguments: &[&str]) -> Option<Self> {
        Self::launch(arguments, true)
    }

    fn launch(arguments: &[&str], is_tls: bool) -> Option<Self> {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
        let (plain, tls) = if is_tls { ("0", port.as_str()) } else { (port.as_str(), "0") };
        let mut command = Command::new("redis-server");
        command.args(["--bind", "127.0.0.1", "--port", plain, "--save", "", "--appendonly", "no"]);
        if is_tls {
            command.args(["--tls-port", tls]);
        }
        command.args(arguments).current_dir(folder.path());
        let child = match command.stdout(Stdio::null()).stderr(Stdio::null()).spawn() {
            Ok(child) => child,
            Err(error) => {
                let is_needed = std::env::var_os("BATON_REQUIRE_REDIS").is_some();
                assert!(!is_needed, "redis-server is needed: {error}");
                println!("passed over: there is no redis-server here (apt-get install redis-server)");
                return None;
            }
        };
        let mut redis = Self { child, port: port.parse().unwrap(), _folder: folder };
        let deadline = Instant::now() + Duration::from_secs(20);
        while Instant::now() < deadline && redis.child.try_wait().unwrap().is_none() {
            if TcpStream::connect(("127.0.0.1", redis.port)).is_ok() {
                return Some(redis);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        redis.kill();
        // The port may have been taken before the server had it.
        Self::launch(arguments, is_tls)
    }

    pub fn url(&self, scheme: &str, login: &str) -> String {
        format!("{scheme}://{login}127.0.0.1:{}", self.port)
    }

    fn command(&self, words: &[&[u8]]) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            bytes.extend_from_slice(word);
            bytes.extend_from_slice(b"\r\n");
        }
        stream.write_all(&bytes).unwrap();
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if let Some(count) = line.strip_prefix('*') {
            let count: usize = count.trim().parse().unwrap();
            let mut names = String::new();
            for _ in 0..count {
                reader.read_line(&mut String::new()).unwrap();
                reader.read_line(&mut names).unwrap();
            }
            return names;
        }
        line
    }

    /// Spoils every value that a pattern names, in one of several ways.
    pub fn garble(&self, pattern: &str) {
        let names = self.command(&[b"KEYS", pattern.as_bytes()]);
        for (index, name) in names.lines().enumerate() {
            let name = name.trim().as_bytes();
            match index % 3 {
                0 => drop(self.command(&[b"SETRANGE", name, b"200", b"garbage"])),
                1 => drop(self.command(&[b"SETRANGE", name, b"0", b"X"])),
                _ => drop(self.command(&[b"SETRANGE", name, b"3000", b"spoilt"])),
            }
        }
    }

    pub fn pause(&self) {
        self.signal("STOP");
    }

    pub fn resume(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        let _ = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).output();
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.signal("CONT");
        self.kill();
    }
}
