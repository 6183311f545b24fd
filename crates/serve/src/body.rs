//! Reading a request's JSON, within limits of size, time and total memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Request;
use axum::http::header;
use bytes::Bytes;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;

use crate::budget::{self, Charge};
use crate::error::ApiError;
use crate::frontend::MessageLimits;
use crate::scope;
use crate::state::App;
use crate::wording;

/// What is read and thrown away of a body that is too large. A client that is still sending would otherwise find its
/// connection reset and never see the answer.
const DISCARD_BYTES: usize = 64 << 20;
const DISCARD_TIME: Duration = Duration::from_secs(5);
/// What takes longer than a millisecond to look through.
const LARGE_BYTES: usize = 64 << 10;
/// Room made for a body before its first byte is there.
const FIRST_BYTES: usize = 64 << 10;

/// A request's body. What it takes counts against the memory for bodies until its request has become tokens.
#[derive(Clone, Debug)]
pub struct JsonBody {
    bytes: Bytes,
}

impl JsonBody {
    /// Reads the body of a request that is going to wait for the engine, unless too many wait already.
    pub async fn read_for_engine(app: &Arc<App>, request: Request) -> Result<Self, ApiError> {
        // Where there are several models, it is not known yet whose queue it is.
        if app.models.is_none()
            && let Err(busy) = app.check_queue(1)
        {
            discard(app, request.into_body()).await;
            return Err(busy);
        }
        Self::read(app, request).await
    }

    pub async fn read(app: &Arc<App>, mut request: Request) -> Result<Self, ApiError> {
        // A route that had to look into it passes it on.
        if let Some(read) = request.extensions_mut().remove::<Self>() {
            return Ok(read);
        }
        let limit = app.config.max_body_bytes;
        let content_type = request.headers().get(header::CONTENT_TYPE);
        if !content_type.is_some_and(|value| is_json(value.as_bytes())) {
            return Err(ApiError::not_json());
        }
        let declared =
            request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let declared: usize = declared.unwrap_or(0);
        if declared > limit {
            discard(app, request.into_body()).await;
            return Err(ApiError::body_too_large(limit));
        }
        let mut charge = app.bodies.charge(scope::tenant());
        let read = collect(app, request.into_body(), &mut charge, declared, limit);
        let bytes = tokio::time::timeout(app.config.read_timeout, read)
            .await
            .map_err(|_| ApiError::read_timeout())??;
        let body = Self { bytes };
        let num_items = if body.is_large() {
            let bytes = body.bytes.clone();
            app.text_workers.run(scope::tenant(), move || budget::count_items(&bytes)).await?
        } else {
            budget::count_items(&body.bytes)
        };
        charge_for_parts(app, &mut charge, body.bytes.len(), num_items)?;
        scope::hold(charge);
        Ok(body)
    }

    /// Too large to be looked through on an async thread: streams of others would wait for it.
    pub fn is_large(&self) -> bool {
        self.bytes.len() > LARGE_BYTES
    }

    /// Reads the fields that `T` knows. A field of a wrong type is named.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        if !wording::is_object(&self.bytes) {
            return Err(ApiError::invalid("the request body must be a JSON object"));
        }
        let mut deserializer = serde_json::Deserializer::from_slice(&self.bytes);
        let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
            let path = error.path().to_string();
            let cause = error.inner();
            let words = wording::of_json(&cause.to_string());
            if cause.is_syntax() || cause.is_eof() || path == "." {
                return ApiError::invalid(format!("the request body is not a valid JSON object: {words}"));
            }
            ApiError::invalid_field(path.clone(), format!("{path}: {words}"))
        })?;
        deserializer.end().map_err(|cause| {
            ApiError::invalid(format!("the request body is not one JSON object: {cause}"))
        })?;
        Ok(value)
    }
}

/// Reads a message of another protocol, with what it takes once it is decoded.
pub async fn read_message(app: &App, body: Body, limits: MessageLimits) -> Result<Bytes, ApiError> {
    let mut charge = app.bodies.charge(scope::tenant());
    let limit = limits.max_bytes.min(app.config.max_body_bytes);
    let read = collect(app, body, &mut charge, 0, limit);
    let bytes =
        tokio::time::timeout(app.config.read_timeout, read).await.map_err(|_| ApiError::read_timeout())??;
    let cost = bytes.len().saturating_mul(limits.factor.max(1));
    if cost > app.bodies.share() {
        return Err(ApiError::body_too_costly(cost, app.bodies.share()));
    }
    if !charge.grow(cost - bytes.len()) {
        return Err(ApiError::busy());
    }
    scope::hold(charge);
    Ok(bytes)
}

/// Charges for what the body becomes besides its bytes, before it becomes it.
fn charge_for_parts(
    app: &App,
    charge: &mut Charge,
    num_bytes: usize,
    num_items: usize,
) -> Result<(), ApiError> {
    let limit = app.config.max_body_items;
    if num_items > limit {
        return Err(ApiError::too_many_items(num_items, limit));
    }
    let cost = budget::cost(num_bytes, num_items);
    if cost > app.bodies.share() {
        return Err(ApiError::body_too_costly(cost, app.bodies.share()));
    }
    if charge.grow(cost - num_bytes) { Ok(()) } else { Err(ApiError::busy()) }
}

/// Reads the body and charges for each part when it is there: what a client declares costs nothing.
async fn collect(
    app: &App,
    mut body: Body,
    charge: &mut Charge,
    declared: usize,
    limit: usize,
) -> Result<Bytes, ApiError> {
    let mut bytes = Vec::with_capacity(declared.min(FIRST_BYTES));
    while let Some(frame) = body.frame().await {
        let cut_off = |_| ApiError::invalid("the request body could not be read to its end");
        let Ok(data) = frame.map_err(cut_off)?.into_data() else { continue };
        if bytes.len() + data.len() > limit {
            discard(app, body).await;
            return Err(ApiError::body_too_large(limit));
        }
        if !charge.grow(data.len()) {
            discard(app, body).await;
            return Err(ApiError::busy());
        }
        bytes.extend_from_slice(&data);
        if bytes.len() > LARGE_BYTES {
            pace(app, data.len()).await;
        }
    }
    Ok(bytes.into())
}

/// Reads a large body no faster than its key may.
async fn pace(app: &App, num_bytes: usize) {
    let wait = app.bodies.pace(scope::tenant(), num_bytes, Instant::now());
    // A timer's tick is a millisecond.
    if wait > Duration::from_millis(2) {
        tokio::time::sleep(wait).await;
    }
}

async fn discard(app: &App, mut body: Body) {
    let read = async {
        let mut num_bytes = 0;
        while let Some(Ok(frame)) = body.frame().await {
            let len = frame.data_ref().map_or(0, Bytes::len);
            num_bytes += len;
            pace(app, len).await;
            if num_bytes > DISCARD_BYTES {
                return;
            }
        }
    };
    let _ = tokio::time::timeout(DISCARD_TIME, read).await;
}

fn is_json(content_type: &[u8]) -> bool {
    let text = String::from_utf8_lossy(content_type).to_ascii_lowercase();
    let media_type = text.split(';').next().unwrap_or_default().trim();
    media_type == "application/json"
        || (media_type.starts_with("application/") && media_type.ends_with("+json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_by_any_of_its_names() {
        assert!(is_json(b"application/json"));
        assert!(is_json(b"Application/JSON; charset=utf-8"));
        assert!(is_json(b"application/problem+json"));
        assert!(!is_json(b"text/plain"));
        assert!(!is_json(b"application/x-www-form-urlencoded"));
    }
}
