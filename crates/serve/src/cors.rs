//! Which web pages may call this server from a browser. None, unless told otherwise.

use axum::http::{HeaderValue, Method, header};
use tower_http::cors::{AllowOrigin, CorsLayer};

pub fn layer(allowed_origins: &[String]) -> Option<CorsLayer> {
    if allowed_origins.is_empty() {
        return None;
    }
    let origins = if allowed_origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(allowed_origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()))
    };
    let headers = [
        header::AUTHORIZATION,
        header::CONTENT_TYPE,
        header::HeaderName::from_static("x-api-key"),
        header::HeaderName::from_static("x-request-id"),
    ];
    Some(
        CorsLayer::new()
            .allow_origin(origins)
            .allow_methods([Method::GET, Method::POST, Method::OPTIONS])
            .allow_headers(headers)
            .expose_headers([header::HeaderName::from_static("x-request-id"), header::RETRY_AFTER]),
    )
}
