//! Which names this server answers to, and which web pages may talk to it.
//!
//! A page on the web can send requests to a server on the visitor's own machine, and with a name of its own that it
//! points at 127.0.0.1 (DNS rebinding) even read the answers. So a server that has no keys and listens on loopback
//! answers only to names that mean this machine, or that it was given; and a request that a page of another origin sends
//! is refused unless that origin is allowed. Programs that are no browsers send no `Origin` and notice nothing.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::ServerConfig;
use crate::auth::OPEN_ROUTES;
use crate::error::ApiError;
use crate::state::App;

/// Every request passes here before anything of it is looked at.
pub async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let host = request.uri().authority().map(axum::http::uri::Authority::as_str);
    let host = host.or_else(|| text(request.headers(), header::HOST));
    if !OPEN_ROUTES.contains(&request.uri().path())
        && let Some(host) = host
        && !is_served(&app.config, host)
    {
        return ApiError::wrong_host(name_of(host)).into_response();
    }
    if let Some(origin) = text(request.headers(), header::ORIGIN)
        && !may_call(&app.config, origin, host)
    {
        return ApiError::foreign_origin(origin).into_response();
    }
    next.run(request).await
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    // What is no text names nobody.
    headers.get(name).map(|value| value.to_str().unwrap_or(""))
}

fn is_served(config: &ServerConfig, host: &str) -> bool {
    let is_private = config.api_keys.is_empty() && config.host.is_loopback();
    if !is_private && config.allowed_hosts.is_empty() {
        return true;
    }
    let name = name_of(host);
    let is_allowed = |allowed: &String| allowed == "*" || allowed.eq_ignore_ascii_case(name);
    means_here(name) || config.allowed_hosts.iter().any(is_allowed)
}

fn may_call(config: &ServerConfig, origin: &str, host: Option<&str>) -> bool {
    let own = origin.split_once("://").is_some_and(|(scheme, authority)| {
        let default_port = if scheme == "https" { ":443" } else { ":80" };
        let plain =
            |authority: &str| authority.strip_suffix(default_port).unwrap_or(authority).to_ascii_lowercase();
        host.is_some_and(|host| plain(host) == plain(authority))
    });
    own || is_allowed(&config.allowed_origins, origin)
}

/// Whether pages of this origin may call: `*` is all of them, `localhost` those that this machine serves on any port.
pub fn is_allowed(allowed: &[String], origin: &str) -> bool {
    let is_local = || {
        let authority = origin.split_once("://").map(|(_, authority)| authority);
        authority.is_some_and(|authority| means_here(name_of(authority)))
    };
    allowed.iter().any(|allowed| match allowed.as_str() {
        "*" => true,
        "localhost" => is_local(),
        _ => allowed.eq_ignore_ascii_case(origin),
    })
}

/// Names of this machine itself.
fn means_here(name: &str) -> bool {
    name.eq_ignore_ascii_case("localhost")
        || name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Without the port.
fn name_of(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(keys: &[&str], host: &str, hosts: &[&str], origins: &[&str]) -> ServerConfig {
        let owned = |texts: &[&str]| texts.iter().map(ToString::to_string).collect();
        ServerConfig {
            api_keys: owned(keys),
            host: host.parse().expect("an address"),
            allowed_hosts: owned(hosts),
            allowed_origins: owned(origins),
            ..ServerConfig::default()
        }
    }

    #[test]
    fn localhost_stands_for_pages_of_this_machine() {
        let allowed = ["localhost".to_owned(), "https://my.page".to_owned()];
        for origin in
            ["http://localhost", "http://LOCALHOST:3000", "https://127.0.0.1:8", "http://[::1]:3000"]
        {
            assert!(is_allowed(&allowed, origin), "{origin}");
        }
        assert!(is_allowed(&allowed, "https://my.page"));
        for origin in
            ["http://localhost.evil.com", "http://notlocalhost", "localhost", "null", "http://my.page"]
        {
            assert!(!is_allowed(&allowed, origin), "{origin}");
        }
        assert!(!is_allowed(&[], "http://localhost") && is_allowed(&["*".to_owned()], "http://evil.com"));
    }

    #[test]
    fn without_keys_on_loopback_only_names_of_this_machine_are_served() {
        let private = config(&[], "127.0.0.1", &["my.box"], &[]);
        for (host, expected) in [
            ("localhost", true),
            ("LocalHost:8000", true),
            ("127.0.0.1:8000", true),
            ("[::1]:8000", true),
            ("[::1]", true),
            ("my.box:80", true),
            ("evil.example:8000", false),
            ("localhost.evil.example", false),
            ("192.168.1.7", false),
            ("", false),
        ] {
            assert_eq!(is_served(&private, host), expected, "{host}");
        }
        assert!(is_served(&config(&["key"], "127.0.0.1", &[], &[]), "proxy.example"));
        assert!(is_served(&config(&[], "0.0.0.0", &[], &[]), "box.example"));
        assert!(!is_served(&config(&["key"], "0.0.0.0", &["box.example"], &[]), "evil.example"));
        assert!(is_served(&config(&[], "127.0.0.1", &["*"], &[]), "evil.example"));
    }

    #[test]
    fn pages_of_other_origins_are_refused_unless_they_are_named() {
        let closed = config(&[], "127.0.0.1", &[], &[]);
        assert!(may_call(&closed, "http://127.0.0.1:8000", Some("127.0.0.1:8000")));
        assert!(may_call(&closed, "https://box.example", Some("box.example:443")));
        for origin in ["http://evil.example", "http://127.0.0.1:9000", "null", ""] {
            assert!(!may_call(&closed, origin, Some("127.0.0.1:8000")), "{origin}");
        }
        let open = config(&[], "127.0.0.1", &[], &["http://app.example"]);
        assert!(may_call(&open, "http://app.example", Some("127.0.0.1:8000")));
        assert!(!may_call(&open, "http://app.example.evil", Some("127.0.0.1:8000")));
        assert!(may_call(&config(&[], "127.0.0.1", &[], &["*"]), "null", Some("x")));
    }
}
