//! What the server says of itself: version, metrics, the API for machines and for people.

use std::fmt::Write;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{Html, IntoResponse, Response};

use crate::metrics::ServerFigures;
use crate::openapi;
use crate::state::App;
use crate::types::text::Version;

use super::{ROUTES, json};

pub async fn version() -> Response {
    json(&Version { version: env!("CARGO_PKG_VERSION") })
}

pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let stats = app.model.engine.pulse().stats();
    let figures =
        ServerFigures { num_in_flight: app.num_in_flight(), uptime_s: app.started.elapsed().as_secs_f64() };
    let page = app.model.metrics.render(&stats, figures);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response()
}

pub async fn openapi() -> Response {
    json(openapi::document())
}

pub async fn docs() -> Html<String> {
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
    Html(format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Baton API</title>\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <style>body{{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}}\
         td{{padding:.2rem .8rem .2rem 0;vertical-align:top}}</style>\
         <h1>Baton {}</h1><p>The API of OpenAI with vLLM's additions. For machines: \
         <a href=\"/openapi.json\">/openapi.json</a>.</p><table>{rows}</table></html>",
        env!("CARGO_PKG_VERSION")
    ))
}
