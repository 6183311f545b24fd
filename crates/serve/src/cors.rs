//! Which web pages may call this server from a browser. None, unless told otherwise.

use axum::http::{HeaderValue, Method, header};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::origin;

pub fn layer(allowed_origins: &[String]) -> Option<CorsLayer> {
    if allowed_origins.is_empty() {
        return None;
    }
    let origins = if allowed_origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        let allowed = allowed_origins.to_vec();
        AllowOrigin::predicate(move |origin: &HeaderValue, _| {
            origin.to_str().is_ok_and(|origin| origin::is_allowed(&allowed, origin))
        })
    };
    Some(
        CorsLayer::new()
            .allow_origin(origins)
            .allow_methods([Method::GET, Method::POST, Method::DELETE, Method::OPTIONS])
            // SDKs send headers of their own (x-stainless-*, anthropic-*, openai-*), more with every version; what a
            // page may do here is decided by its origin and its key.
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers([header::HeaderName::from_static("x-request-id"), header::RETRY_AFTER]),
    )
}
