//! The web console at `/`: a chat and a live view, written for the browser under `console/` and carried in the binary.
//!
//! The files hold nothing but the page itself, which is why they need no key: a browser has none before a person has
//! typed it. All that the page shows comes through the API, where keys are asked for. The policy that goes with every
//! file lets the page talk to this server and to nobody else, and lets it run no code but these files.

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

#[derive(Clone, Copy, Debug)]
struct File {
    path: &'static str,
    content_type: &'static str,
    content: &'static str,
}

macro_rules! files {
    ($($path:literal $name:literal $content_type:literal;)*) => {
        &[$(File {
            path: $path,
            content_type: $content_type,
            content: include_str!(concat!("../console/", $name)),
        }),*]
    };
}

const FILES: &[File] = files! {
    "/" "index.html" "text/html; charset=utf-8";
    "/console/console.css" "console.css" "text/css; charset=utf-8";
    "/console/icon.svg" "icon.svg" "image/svg+xml";
    "/console/main.js" "main.js" "text/javascript; charset=utf-8";
    "/console/api.js" "api.js" "text/javascript; charset=utf-8";
    "/console/chat.js" "chat.js" "text/javascript; charset=utf-8";
    "/console/chart.js" "chart.js" "text/javascript; charset=utf-8";
    "/console/dom.js" "dom.js" "text/javascript; charset=utf-8";
    "/console/live.js" "live.js" "text/javascript; charset=utf-8";
    "/console/markdown.js" "markdown.js" "text/javascript; charset=utf-8";
    "/console/metrics.js" "metrics.js" "text/javascript; charset=utf-8";
};

/// Whether a path is one of the page's files.
pub fn is_file(path: &str) -> bool {
    FILES.iter().any(|file| file.path == path)
}

/// The routes of the page's files.
pub fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    FILES.iter().fold(Router::new(), |router, file| {
        let tag = format!("\"{}\"", &blake3::hash(file.content.as_bytes()).to_hex()[..32]);
        let tag = HeaderValue::from_str(&tag).expect("hex digits are a header");
        router.route(file.path, get(move |headers: HeaderMap| async move { file.answer(&tag, &headers) }))
    })
}

impl File {
    /// The file, or that the browser has it already.
    fn answer(self, tag: &HeaderValue, asked: &HeaderMap) -> Response {
        let mut response = if asked.get(header::IF_NONE_MATCH) == Some(tag) {
            StatusCode::NOT_MODIFIED.into_response()
        } else {
            Body::from(Bytes::from_static(self.content.as_bytes())).into_response()
        };
        let headers = response.headers_mut();
        headers.insert(header::ETAG, tag.clone());
        for (name, value) in [
            (header::CONTENT_TYPE, self.content_type),
            // Kept, but asked about each time: a new binary brings a new page.
            (header::CACHE_CONTROL, "no-cache"),
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names in quotes after any of these words.
    fn quoted<'a>(text: &'a str, before: &str) -> Vec<&'a str> {
        text.split(before).skip(1).filter_map(|rest| rest.split('"').next()).collect()
    }

    #[test]
    fn every_file_that_is_asked_for_is_there() {
        for file in FILES {
            for path in quoted(file.content, "src=\"").into_iter().chain(quoted(file.content, "href=\"/")) {
                let path = format!("/{}", path.trim_start_matches('/'));
                assert!(is_file(&path), "{} asks for {path}", file.path);
            }
            for module in quoted(file.content, "from \"./") {
                assert!(is_file(&format!("/console/{module}")), "{} imports {module}", file.path);
            }
        }
    }

    #[test]
    fn no_file_needs_what_the_policy_forbids() {
        for file in FILES {
            for forbidden in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", " style=\"", "onclick=\""]
            {
                assert!(!file.content.contains(forbidden), "{} contains {forbidden}", file.path);
            }
            for address in ["http://", "https://"] {
                let foreign = file
                    .content
                    .split(address)
                    .skip(1)
                    .filter(|rest| !rest.starts_with("www.w3.org/2000/svg"));
                assert_eq!(foreign.count(), 0, "{} names another server", file.path);
            }
        }
    }
}
