//! Errors of the router itself, in the shape that OpenAI's clients read.

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use serde_json::json;

use crate::upstream::SendError;

/// What goes to a client.
pub type Reply = Response<BoxBody<Bytes, SendError>>;

pub fn whole(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Reply {
    let body = Full::new(body.into()).map_err(|never| match never {}).boxed();
    let mut reply = Response::new(body);
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}

pub fn json_reply(status: StatusCode, body: &serde_json::Value) -> Reply {
    whole(status, "application/json", body.to_string())
}

/// Why the router did not pass a request on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("no worker can take requests now: {0}")]
    NoWorker(String),
    #[error("too many requests: {limit} are being served")]
    Busy { limit: usize },
    #[error("the request body has more than {limit} bytes")]
    TooLarge { limit: usize },
    #[error("the request body could not be read: {0}")]
    Body(String),
    #[error("the router is shutting down: try another one")]
    Draining,
    #[error("{0}")]
    Failed(String),
    #[error("API key required")]
    Unauthorized,
    #[error("{0}")]
    Unknown(String),
    #[error("{0}")]
    Wrong(String),
}

impl Refusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::NoWorker(_) | Self::Draining => StatusCode::SERVICE_UNAVAILABLE,
            Self::Unknown(_) => StatusCode::NOT_FOUND,
            Self::Busy { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Body(_) | Self::Wrong(_) => StatusCode::BAD_REQUEST,
            Self::Failed(_) => StatusCode::BAD_GATEWAY,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
        }
    }

    pub fn reply(&self) -> Reply {
        let status = self.status();
        let kind = match status {
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        };
        let error = json!({"error": {"message": self.to_string(), "type": kind, "param": null,
                                     "code": status.as_u16()}});
        let mut reply = json_reply(status, &error);
        if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            reply.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        reply
    }
}

/// The last event of a stream whose worker was lost. It begins with the end of whatever event was being sent.
pub fn lost_event(cause: &SendError) -> Bytes {
    let error = json!({"error": {"message": format!("the worker was lost in mid-answer: it {cause}"),
                                 "type": "server_error", "param": null, "code": 502}});
    Bytes::from(format!("\n\ndata: {error}\n\n"))
}
