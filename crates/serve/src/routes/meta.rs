//! What the server says of itself: version, metrics, the API for machines and for people.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::State;
use axum::http::header;
use axum::response::{Html, IntoResponse, Response};

use crate::metrics::ServerFigures;
use crate::openapi;
use crate::state::App;
use crate::types::text::Version;

use super::{ROUTES, json};

/// The page has its own style and nothing else.
const DOCS_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; \
                           frame-ancestors 'none'";

pub async fn version() -> Response {
    json(&Version { version: env!("CARGO_PKG_VERSION") })
}

pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let stats = app.model.engine.pulse().stats();
    let lost = app.config.num_lost_log_lines.as_ref();
    let figures = ServerFigures {
        num_in_flight: app.num_in_flight(),
        uptime_s: app.started.elapsed().as_secs_f64(),
        num_lost_log_lines: lost.map_or(0, |lost| lost.load(Ordering::Relaxed)),
    };
    let page = app.model.metrics.render(&stats, figures);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response()
}

pub async fn openapi() -> Response {
    json(openapi::document())
}

pub async fn docs() -> Response {
    let mut rows = String::new();
    for route in ROUTES {
        let _ = write!(
            rows,
            "<tr><td>{}</td><td><code>{}</code></td><td>{}</td></tr>",
            route.method.to_uppercase(),
            route.path,
            route.summary
        );
    }
    let page = Html(format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Baton API</title>\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <style>body{{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}}\
         td{{padding:.2rem .8rem .2rem 0;vertical-align:top}}</style>\
         <h1>Baton {}</h1><p>The API of OpenAI with vLLM's additions. For machines: \
         <a href=\"/openapi.json\">/openapi.json</a>.</p><table>{rows}</table></html>",
        env!("CARGO_PKG_VERSION")
    ));
    ([(header::CONTENT_SECURITY_POLICY, DOCS_POLICY), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")], page)
        .into_response()
}
