//! Reading a request's JSON, within limits of size, time and total memory.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header;
use bytes::Bytes;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use tokio::sync::OwnedSemaphorePermit;

use crate::error::ApiError;
use crate::state::{App, BODY_UNIT_BYTES};
use crate::wording;

/// What is read and thrown away of a body that is too large. A client that is still sending would otherwise find its
/// connection reset and never see the answer.
const DISCARD_BYTES: usize = 64 << 20;
const DISCARD_TIME: Duration = Duration::from_secs(5);

/// A request's body, which counts against the memory for bodies until it is dropped.
#[derive(Debug)]
pub struct JsonBody {
    bytes: Bytes,
    _budget: OwnedSemaphorePermit,
}

impl JsonBody {
    pub async fn read(app: &Arc<App>, request: Request) -> Result<Self, ApiError> {
        let limit = app.config.max_body_bytes;
        let content_type = request.headers().get(header::CONTENT_TYPE);
        if !content_type.is_none_or(|value| is_json(value.as_bytes())) {
            return Err(ApiError::not_json());
        }
        let declared =
            request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let size: usize = declared.unwrap_or(limit);
        if size > limit {
            discard(request.into_body()).await;
            return Err(ApiError::body_too_large(limit));
        }
        let units = u32::try_from(size / BODY_UNIT_BYTES + 1).map_err(|_| ApiError::body_too_large(limit))?;
        let budget = Arc::clone(&app.bodies).try_acquire_many_owned(units).map_err(|_| ApiError::busy())?;
        let read = collect(request.into_body(), declared.unwrap_or(0), limit);
        let bytes = tokio::time::timeout(app.config.read_timeout, read)
            .await
            .map_err(|_| ApiError::read_timeout())??;
        Ok(Self { bytes, _budget: budget })
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

async fn collect(mut body: Body, declared: usize, limit: usize) -> Result<Bytes, ApiError> {
    let mut bytes = Vec::with_capacity(declared.min(limit));
    while let Some(frame) = body.frame().await {
        let cut_off = |_| ApiError::invalid("the request body could not be read to its end");
        let Ok(data) = frame.map_err(cut_off)?.into_data() else { continue };
        if bytes.len() + data.len() > limit {
            discard(body).await;
            return Err(ApiError::body_too_large(limit));
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.into())
}

async fn discard(mut body: Body) {
    let read = async {
        let mut num_bytes = 0;
        while let Some(Ok(frame)) = body.frame().await {
            num_bytes += frame.data_ref().map_or(0, Bytes::len);
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
