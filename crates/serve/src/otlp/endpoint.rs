//! The collector: an `http://` address, and one POST at a time to it.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const TIMEOUT: Duration = Duration::from_secs(10);
/// Where collectors take traces, unless the address says another path.
const DEFAULT_PATH: &str = "/v1/traces";
const DEFAULT_PORT: u16 = 4318;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    host: String,
    port: u16,
    path: String,
}

#[derive(Debug, Error)]
#[error(
    "{0:?} is not the address of a trace collector: write for example http://127.0.0.1:4318 (OTLP over HTTP; \
         https is not supported, use a collector on this machine or network)"
)]
pub struct EndpointError(String);

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let wrong = || EndpointError(text.to_owned());
        let rest = text.trim().strip_prefix("http://").ok_or_else(wrong)?;
        let (authority, path) = match rest.find('/') {
            Some(slash) => rest.split_at(slash),
            None => (rest, ""),
        };
        // The colon of a port comes after the bracket of an IPv6 address.
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_| wrong())?),
            _ => (authority, DEFAULT_PORT),
        };
        let sound = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'@');
        if host.is_empty() || !sound(host) || !sound(path) {
            return Err(wrong());
        }
        let path = if matches!(path, "" | "/") { DEFAULT_PATH } else { path };
        Ok(Self { host: host.to_owned(), port, path: path.to_owned() })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}:{}{}", self.host, self.port, self.path)
    }
}

impl Endpoint {
    /// Posts a JSON document; anything but a 2xx is an error.
    pub async fn post(&self, body: &str) -> io::Result<()> {
        let answered = tokio::time::timeout(TIMEOUT, self.exchange(body)).await;
        let status = answered.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        if status.starts_with("HTTP/1.1 2") || status.starts_with("HTTP/1.0 2") {
            return Ok(());
        }
        let line = status.lines().next().unwrap_or_default();
        Err(io::Error::other(format!("the collector answered {line:?}")))
    }

    async fn exchange(&self, body: &str) -> io::Result<String> {
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        let mut stream = TcpStream::connect((host, self.port)).await?;
        let head = format!(
            "POST {} HTTP/1.1\r\nHost: {}:{}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
             Connection: close\r\n\r\n",
            self.path,
            self.host,
            self.port,
            body.len()
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(body.as_bytes()).await?;
        // The status is in the first bytes; what the collector says beyond it is of no use here.
        let mut answer = [0; 256];
        let mut length = 0;
        while length < answer.len() && !answer[..length].contains(&b'\n') {
            match stream.read(&mut answer[length..]).await? {
                0 => break,
                read => length += read,
            }
        }
        Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        let check = |text: &str, expected: &str| {
            assert_eq!(
                text.parse::<Endpoint>().map(|endpoint| endpoint.to_string()).ok().as_deref(),
                Some(expected)
            );
        };
        check("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces");
        check("http://collector", "http://collector:4318/v1/traces");
        check("http://collector:80/otlp", "http://collector:80/otlp");
        check("http://[::1]:4318/", "http://[::1]:4318/v1/traces");
        check("http://[::1]", "http://[::1]:4318/v1/traces");
        for wrong in
            ["", "collector:4317", "https://collector", "http://", "http://:4318", "http://a b", "http://x:y"]
        {
            assert!(wrong.parse::<Endpoint>().is_err(), "{wrong}");
        }
    }
}
