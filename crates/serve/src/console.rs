//! The web console at `/`: a chat and a live view, written for the browser under `console/` and carried in the binary;
//! and the page of `/docs`, which shares its look.
//!
//! The files hold nothing but the pages themselves, which is why they need no key: a browser has none before a person
//! has typed it. All that the pages show comes through the API, where keys are asked for. The policy that goes with
//! every file lets the page talk to this server and to nobody else, and lets it run no code but these files.

use std::fmt::Write;
use std::sync::LazyLock;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;

use crate::routes::ROUTES;

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";
const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SVG: &str = "image/svg+xml";
const JS: &str = "text/javascript; charset=utf-8";

#[derive(Clone, Copy, Debug)]
struct File {
    path: &'static str,
    content_type: &'static str,
    content: &'static str,
}

macro_rules! files {
    ($($content_type:ident $name:literal)*) => {
        &[$(File {
            path: concat!("/console/", $name),
            content_type: $content_type,
            content: include_str!(concat!("../console/", $name)),
        }),*]
    };
}

const INDEX: File = File { path: "/", content_type: HTML, content: include_str!("../console/index.html") };

/// Only of the console.
const CONSOLE: &[File] = files! {
    CSS "chat.css"
    CSS "live.css"
    CSS "prose.css"
    JS "attach.js"
    JS "chart.js"
    JS "chat.js"
    JS "connection.js"
    JS "defaults.js"
    JS "errors.js"
    JS "figures.js"
    JS "format.js"
    JS "highlight.js"
    JS "inline.js"
    JS "latex.js"
    JS "live.js"
    JS "main.js"
    JS "markdown.js"
    JS "mathml.js"
    JS "message.js"
    JS "metrics.js"
    JS "panels.js"
    JS "requests.js"
    JS "run.js"
    JS "settings.js"
    JS "sidebar.js"
    JS "store.js"
    JS "transfer.js"
    JS "tree.js"
};

/// What `/docs` needs too.
const SHARED: &[File] = files! {
    CSS "base.css"
    CSS "docs.css"
    SVG "icon.svg"
    JS "api.js"
    JS "docs.js"
    JS "dom.js"
    JS "key.js"
    JS "schema.js"
    JS "theme.js"
};

/// `/docs` without its list of routes.
const DOCS: &str = include_str!("../console/docs.html");
const DOCS_ROUTES: &str = "<!-- routes -->";

fn files(console: bool) -> impl Iterator<Item = &'static File> {
    let own = if console { std::slice::from_ref(&INDEX).iter().chain(CONSOLE) } else { [].iter().chain(&[]) };
    own.chain(SHARED)
}

/// Whether a path is one of the pages' files; without the console, only those of `/docs` are there.
pub fn is_file(path: &str, console: bool) -> bool {
    files(console).any(|file| file.path == path)
}

/// The routes of the pages' files.
pub fn router<S: Clone + Send + Sync + 'static>(console: bool) -> Router<S> {
    files(console).fold(Router::new(), |router, file| {
        let tag = format!("\"{}\"", &blake3::hash(file.content.as_bytes()).to_hex()[..32]);
        let tag = HeaderValue::from_str(&tag).expect("hex digits are a header");
        router.route(file.path, get(move |headers: HeaderMap| async move { file.answer(&tag, &headers) }))
    })
}

/// The page of `/docs`. It lists the routes as it is, for whoever runs no scripts; its script shows every field.
pub fn docs(status: StatusCode) -> Response {
    static PAGE: LazyLock<String> = LazyLock::new(|| {
        let mut routes = String::new();
        for route in ROUTES {
            let method = route.method.to_uppercase();
            let _ = writeln!(
                routes,
                "<li><b>{method}</b> <code>{}</code> <span>{}</span></li>",
                route.path, route.summary
            );
        }
        DOCS.replace(DOCS_ROUTES, &routes)
    });
    let mut response = (status, PAGE.as_str()).into_response();
    set_headers(&mut response, HTML);
    response
}

impl File {
    /// The file, or that the browser has it already.
    fn answer(self, tag: &HeaderValue, asked: &HeaderMap) -> Response {
        let mut response = if asked.get(header::IF_NONE_MATCH) == Some(tag) {
            StatusCode::NOT_MODIFIED.into_response()
        } else {
            Body::from(Bytes::from_static(self.content.as_bytes())).into_response()
        };
        response.headers_mut().insert(header::ETAG, tag.clone());
        set_headers(&mut response, self.content_type);
        response
    }
}

fn set_headers(response: &mut Response, content_type: &'static str) {
    for (name, value) in [
        (header::CONTENT_TYPE, content_type),
        // Kept, but asked about each time: a new binary brings a new page.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCS_FILE: File = File { path: "/docs", content_type: HTML, content: DOCS };

    /// The names in quotes after any of these words.
    fn quoted<'a>(text: &'a str, before: &str) -> Vec<&'a str> {
        text.split(before).skip(1).filter_map(|rest| rest.split('"').next()).collect()
    }

    /// What a file loads, as paths.
    fn loaded(file: &File) -> Vec<String> {
        let pages = ["src=\"console/", "href=\"console/"].into_iter();
        let names = pages.flat_map(|before| quoted(file.content, before));
        let modules =
            ["from \"./", "import \"./"].into_iter().flat_map(|before| quoted(file.content, before));
        names.chain(modules).map(|name| format!("/console/{name}")).collect()
    }

    #[test]
    fn every_file_that_is_asked_for_is_there_and_every_file_is_asked_for() {
        for (console, first) in [(true, INDEX), (false, DOCS_FILE)] {
            let mut wanted = loaded(&first);
            let mut at = 0;
            while at < wanted.len() {
                let file = files(console).find(|file| file.path == wanted[at]);
                let file = file.unwrap_or_else(|| panic!("{} is asked for", wanted[at]));
                let more = loaded(file).into_iter().filter(|path| !wanted.contains(path));
                wanted.extend(more.collect::<Vec<_>>());
                at += 1;
            }
            assert!(wanted.len() > 5, "{} asks for {wanted:?}", first.path);
            let own = if console { CONSOLE } else { SHARED };
            for file in own {
                assert!(wanted.iter().any(|path| path == file.path), "nobody asks for {}", file.path);
            }
        }
    }

    #[test]
    fn no_file_needs_what_the_policy_forbids() {
        for file in files(true).chain([&DOCS_FILE]) {
            for forbidden in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "eval(",
                " style=\"",
                "onclick=\"",
                "src=\"/",
            ] {
                assert!(!file.content.contains(forbidden), "{} contains {forbidden}", file.path);
            }
            for address in ["http://", "https://"] {
                let names = ["www.w3.org/2000/svg", "www.w3.org/1998/Math/MathML"];
                let rest = file.content.split(address).skip(1);
                let foreign = rest.filter(|rest| !names.iter().any(|name| rest.starts_with(name)));
                assert_eq!(foreign.count(), 0, "{} names another server", file.path);
            }
        }
    }
}
