//! `redis://[user[:password]@]host[:port][/database]`, and `rediss://` for TLS.

use std::fmt;
use std::str::FromStr;

#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl {
    pub host: String,
    pub port: u16,
    pub user: Option<String>,
    pub password: Option<String>,
    pub database: u32,
    pub is_tls: bool,
}

/// Without the password.
impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "rediss" } else { "redis" };
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        write!(f, "{scheme}://{host}:{}/{}", self.port, self.database)
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for RedisUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let usage = || "write redis://host:port, or rediss:// for TLS".to_owned();
        let (scheme, rest) = text.split_once("://").ok_or_else(usage)?;
        let is_tls = match scheme {
            "redis" => false,
            "rediss" => true,
            other => return Err(format!("{other}:// is no store that is known: {}", usage())),
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, address) =
            authority.rsplit_once('@').map_or((None, authority), |(login, address)| (Some(login), address));
        let (user, password) = match login.map(|login| login.split_once(':').unwrap_or((login, ""))) {
            None => (None, None),
            Some((user, password)) => (decode(user)?, decode(password)?),
        };
        let (host, port) = split_address(address)?;
        if host.is_empty() {
            return Err(format!("the host is missing: {}", usage()));
        }
        let database = match path {
            "" => 0,
            number => number.parse().map_err(|_| format!("{number:?} is not the number of a database"))?,
        };
        Ok(Self { host: host.to_owned(), port, user, password, database, is_tls })
    }
}

/// Host and port; an IPv6 address stands in brackets.
fn split_address(address: &str) -> Result<(&str, u16), String> {
    let (host, port) = match address.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or("a [ without a ]")?;
            (host, rest.strip_prefix(':'))
        }
        None => match address.rsplit_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (address, None),
        },
    };
    let port = match port {
        None => 6379,
        Some(port) => port.parse().map_err(|_| format!("{port:?} is not a port"))?,
    };
    Ok((host, port))
}

/// Undoes `%40` and the like. Nothing for an empty text.
fn decode(text: &str) -> Result<Option<String>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        if byte == b'%' {
            let digits = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
            let value = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
            bytes.push(value.ok_or("a % is followed by two hex digits")?);
            rest = &after[2..];
        } else {
            bytes.push(byte);
            rest = after;
        }
    }
    String::from_utf8(bytes).map(Some).map_err(|_| "user and password are UTF-8".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_found() {
        let url: RedisUrl = "rediss://me:p%40ss@cache.local:7000/3".parse().unwrap();
        assert_eq!((url.host.as_str(), url.port, url.database, url.is_tls), ("cache.local", 7000, 3, true));
        assert_eq!((url.user.as_deref(), url.password.as_deref()), (Some("me"), Some("p@ss")));
        assert_eq!(url.to_string(), "rediss://cache.local:7000/3", "the password is not shown");
        let plain: RedisUrl = "redis://127.0.0.1".parse().unwrap();
        assert_eq!((plain.port, plain.database, plain.user), (6379, 0, None));
        let six: RedisUrl = "redis://[::1]:6380".parse().unwrap();
        assert_eq!((six.host.as_str(), six.port), ("::1", 6380));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, says) in [
            ("127.0.0.1:6379", "write redis://"),
            ("http://x", "http:// is no store"),
            ("redis://", "the host is missing"),
            ("redis://h:port", "\"port\" is not a port"),
            ("redis://h/x", "number of a database"),
            ("redis://u:%zz@h", "two hex digits"),
        ] {
            let error = text.parse::<RedisUrl>().unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
