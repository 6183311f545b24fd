//! Errors as clients see them: OpenAI's shape, the field at fault in `param`, and no internals.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use baton_core::ParamError;
use baton_engine::EngineError;
use baton_text::TextError;
use schemars::JsonSchema;
use serde::Serialize;

/// When a client that was turned away may come again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The body of every answer that is not a success.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ErrorBody {
    pub error: ErrorDetail,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ErrorDetail {
    /// What is wrong and what to do about it.
    pub message: String,
    #[serde(rename = "type")]
    pub kind: String,
    /// The field at fault.
    pub param: Option<String>,
    /// For programs.
    pub code: Option<String>,
}

/// An answer that is not a success.
#[derive(Clone, Debug)]
pub struct ApiError {
    pub status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: None }
    }

    /// 400: the request is at fault.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400 that names the field.
    pub fn invalid_field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::invalid(message) }
    }

    /// 400 for a field that Baton does not support and that would change the answer.
    pub fn unsupported(param: &str) -> Self {
        let message = format!("{param} is not supported by this server: leave it out");
        Self { code: Some("unsupported_parameter"), ..Self::invalid_field(param, message) }
    }

    /// 400: more tokens than the model takes.
    pub fn too_long(param: &str, message: impl Into<String>) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::invalid_field(param, message) }
    }

    pub fn unauthorized(has_key: bool) -> Self {
        let message = if has_key {
            "wrong API key"
        } else {
            "API key required: send it as `Authorization: Bearer KEY`"
        };
        Self {
            code: Some("invalid_api_key"),
            ..Self::new(StatusCode::UNAUTHORIZED, "invalid_request_error", message)
        }
    }

    /// 403: a name that this server does not answer to.
    pub fn wrong_host(name: &str) -> Self {
        let message = format!(
            "this server does not answer to the name {name:?}: ask for localhost, or start it with --allowed-hosts"
        );
        Self {
            code: Some("host_not_allowed"),
            ..Self::new(StatusCode::FORBIDDEN, "invalid_request_error", message)
        }
    }

    /// 403: a page that may not call this server.
    pub fn foreign_origin(origin: &str) -> Self {
        let message =
            format!("web pages from {origin:?} may not call this server: start it with --allowed-origins");
        Self {
            code: Some("origin_not_allowed"),
            ..Self::new(StatusCode::FORBIDDEN, "invalid_request_error", message)
        }
    }

    /// 403: it would cost other keys what is theirs.
    pub fn shared_by_keys(what: &str) -> Self {
        let message =
            format!("{what} is shared by several API keys, so that none of them may clear it for the others");
        Self {
            code: Some("shared_by_keys"),
            ..Self::new(StatusCode::FORBIDDEN, "invalid_request_error", message)
        }
    }

    pub fn no_such_model(model: &str, served: &str) -> Self {
        let message = format!("the model {model:?} is not served here; {served:?} is");
        Self {
            param: Some("model".to_owned()),
            code: Some("model_not_found"),
            ..Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
        }
    }

    /// 503: it takes longer than a request may wait.
    pub fn model_not_ready(model: &str) -> Self {
        Self::unavailable(&format!(
            "the model {model:?} is not ready: it is still loading, or every loaded model is busy; try again later"
        ))
    }

    /// 503: a model that is there cannot be loaded.
    pub fn model_failed(model: &str, cause: &str) -> Self {
        Self {
            param: Some("model".to_owned()),
            code: Some("model_not_loaded"),
            ..Self::unavailable(&format!("the model {model:?} could not be loaded: {cause}"))
        }
    }

    /// 404 for a stored response that is not there, or not for this key.
    pub fn no_such_response(param: &str, id: &str) -> Self {
        let message = format!(
            "Response with id {id:?} not found: it was not stored, is too old, or belongs to another key"
        );
        Self {
            param: Some(param.to_owned()),
            code: Some("response_not_found"),
            ..Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
        }
    }

    /// 404 for routes that need a graph model.
    pub fn no_graph_model() -> Self {
        let message = "no graph model is served here: start the server with --graph-model";
        Self {
            code: Some("no_graph_model"),
            ..Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
        }
    }

    /// 404 for a graph that is not there, or not for this key.
    pub fn no_such_graph(id: &str) -> Self {
        let message = format!("there is no graph {id:?}: POST it to /v1/graphs first");
        Self {
            param: Some("id".to_owned()),
            code: Some("graph_not_found"),
            ..Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
        }
    }

    fn graph_conflict(message: String) -> Self {
        Self {
            param: Some("id".to_owned()),
            code: Some("graph_conflict"),
            ..Self::new(StatusCode::CONFLICT, "invalid_request_error", message)
        }
    }

    /// 409: a graph is never changed in place.
    pub fn graph_exists(id: &str, version: u64) -> Self {
        Self::graph_conflict(format!(
            "graph {id:?} exists in version {version}: delete it, or send the new one with a higher version"
        ))
    }

    /// 409: it went away while it was computed.
    pub fn graph_gone(id: &str) -> Self {
        Self::graph_conflict(format!(
            "graph {id:?} was deleted or replaced while its embeddings were being computed"
        ))
    }

    pub fn graph_too_large(bytes: usize, limit: usize) -> Self {
        let message = format!(
            "the graph takes {bytes} bytes, and graphs may have {limit} together (--max-graph-memory)"
        );
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    /// 409: others are in the way, and the client may delete its own.
    pub fn no_room_for_graph(bytes: usize, limit: usize) -> Self {
        Self::graph_conflict(format!(
            "there is no room for {bytes} bytes beside the other graphs, which may have {limit} together \
             (--max-graph-memory): delete a graph"
        ))
    }

    pub fn too_many_graphs(limit: usize) -> Self {
        Self::graph_conflict(format!("there are {limit} graphs already (--max-graphs): delete one"))
    }

    /// 413: the answer would be.
    pub fn answer_too_large(num_rows: usize, limit: usize) -> Self {
        let message = format!(
            "the embeddings of {num_rows} nodes are too large for one answer: ask for at most {limit} nodes at a time \
             (--max-bodies-size)"
        );
        Self {
            param: Some("nodes".to_owned()),
            ..Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
        }
    }

    pub fn no_such_route(method: &str, path: &str) -> Self {
        let message = format!("there is no {method} {path}; GET /docs lists the routes");
        Self {
            code: Some("unknown_url"),
            ..Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
        }
    }

    pub fn no_kv_events() -> Self {
        let message = "this server publishes no KV events: start it with --kv-events-config";
        Self {
            code: Some("kv_events_off"),
            ..Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
        }
    }

    pub fn wrong_method(method: &str, path: &str) -> Self {
        let message = format!("{path} does not take {method}");
        Self {
            code: Some("method_not_supported"),
            ..Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
        }
    }

    pub fn body_too_large(limit: usize) -> Self {
        let message = format!("the request body is larger than {limit} bytes (--max-body-size)");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    pub fn too_many_items(count: usize, limit: usize) -> Self {
        let message = format!(
            "the request body has {count} objects, arrays and texts, at most {limit} are allowed (--max-body-items)"
        );
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    pub fn body_too_costly(cost: usize, limit: usize) -> Self {
        let message = format!(
            "the request body would take about {cost} bytes of memory, one request may have {limit} \
             (--max-bodies-size)"
        );
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    pub fn not_json() -> Self {
        let message = "the request body must be JSON: send the header `Content-Type: application/json`";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message)
    }

    pub fn read_timeout() -> Self {
        let message = "the request body did not arrive in time";
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message)
    }

    /// 429: as many requests as may wait are waiting.
    pub fn busy() -> Self {
        let message = "too many requests are waiting: try again later";
        Self {
            code: Some("rate_limit_exceeded"),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
        }
    }

    /// 400: the shape that was asked for turned out to be too complex to be kept.
    pub fn too_complex(message: impl Into<String>) -> Self {
        Self { code: Some("structured_output_failed"), ..Self::invalid(message) }
    }

    /// 503: the server cannot take requests now.
    pub fn unavailable(message: &str) -> Self {
        Self {
            code: Some("service_unavailable"),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
        }
    }

    /// 503: every connection that may be is at work.
    pub fn too_many_connections() -> Self {
        Self {
            code: Some("overloaded"),
            ..Self::unavailable("too many connections (--max-connections): try again later")
        }
    }

    /// 500. The cause goes to the log, not to the client.
    pub fn internal(cause: &dyn std::fmt::Display) -> Self {
        tracing::error!(%cause, "a request failed");
        let message = "the server failed to compute this request; its log says why";
        Self {
            code: Some("internal_error"),
            ..Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
        }
    }

    pub fn body(&self) -> ErrorBody {
        ErrorBody {
            error: ErrorDetail {
                message: self.message.clone(),
                kind: self.kind.to_owned(),
                param: self.param.clone(),
                code: self.code.map(str::to_owned),
            },
        }
    }
}

impl From<ParamError> for ApiError {
    fn from(error: ParamError) -> Self {
        Self::invalid_field(error.name, error.to_string())
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        use baton_engine::SchedError;
        match error {
            EngineError::Param(error) | EngineError::Sched(SchedError::Params(error)) => error.into(),
            EngineError::Busy { .. }
            | EngineError::Sched(SchedError::QueueFull { .. } | SchedError::KeyQueueFull { .. }) => {
                Self::busy()
            }
            EngineError::Sched(error @ SchedError::PromptTooLong { .. }) => {
                Self::too_long("prompt", error.to_string())
            }
            EngineError::Sched(
                error @ (SchedError::EmptyPrompt
                | SchedError::InvalidToken { .. }
                | SchedError::NeverFits { .. }
                | SchedError::TooManyEntries { .. }
                | SchedError::TooManySequences { .. }),
            ) => Self::invalid(error.to_string()),
            EngineError::TextLength { .. } | EngineError::NoGeneration => Self::invalid(error.to_string()),
            EngineError::TokenOutOfVocabulary { .. } => Self::invalid_field("prompt", error.to_string()),
            EngineError::Stopped => Self::unavailable("the server is shutting down: try another one"),
            other => Self::internal(&other),
        }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        match error {
            TextError::NoChatTemplate
            | TextError::TemplateRefused(_)
            | TextError::TemplateRender(_)
            | TextError::TemplateLimit(_) => Self::invalid_field("messages", error.to_string()),
            TextError::Encode(_) => Self::invalid_field("prompt", error.to_string()),
            TextError::EmptyStopString => Self::invalid_field("stop", error.to_string()),
            other => Self::internal(&other),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        let body = serde_json::to_vec(&self.body()).expect("strings serialise");
        let mut response = (self.status, body).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER.as_secs()));
            }
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        // For routes that tell of errors in other words.
        response.extensions_mut().insert(self);
        response
    }
}
