//! The way in for protocols other than HTTP's: the same keys, limits, queues, metrics and drain as a completion has.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use bytes::Bytes;

use crate::auth::{self, Tenant};
use crate::body;
use crate::error::ApiError;
use crate::generation::{Generation, GenerationRequest};
use crate::params::{ApiFields, sampling_params, truncate_prompt};
use crate::state::App;
use crate::types::common::SamplingFields;
use crate::types::prompt::Prompt;
use crate::types::structured::StructuredFields;
use crate::{ids, prepare, scope, structured};

/// A running server, for those who translate another protocol into its requests.
#[derive(Clone, Debug)]
pub struct Frontend(Arc<App>);

/// A completion of one prompt.
#[derive(Debug)]
pub struct PlainRequest {
    pub prompt: Prompt,
    pub fields: SamplingFields,
    pub structured: StructuredFields,
    /// Alternatives that each token of the answer is reported with.
    pub logprobs: Option<u32>,
    /// Compute the prompt, even where its beginning is cached.
    pub bypass_cache: bool,
}

/// What a message may be before it is decoded.
#[derive(Clone, Copy, Debug)]
pub struct MessageLimits {
    pub max_bytes: usize,
    /// The most memory that it takes once it is decoded, as a multiple of its length.
    pub factor: usize,
    /// Needs no key.
    pub is_open: bool,
}

/// What is served.
#[derive(Clone, Debug)]
pub struct ServedFacts {
    /// The first one is what answers say.
    pub names: Vec<String>,
    pub max_model_len: usize,
    pub block_size: usize,
    pub num_kv_blocks: usize,
    pub max_num_seqs: usize,
    pub has_tokenizer: bool,
}

impl Frontend {
    pub(crate) fn new(app: &Arc<App>) -> Self {
        Self(Arc::clone(app))
    }

    pub fn facts(&self) -> ServedFacts {
        let model = &self.0.model;
        ServedFacts {
            names: model.names.clone(),
            max_model_len: model.max_model_len,
            block_size: model.memory.block_size,
            num_kv_blocks: model.memory.num_device_blocks,
            max_num_seqs: model.memory.max_num_seqs,
            has_tokenizer: model.text.tokenizer.is_some(),
        }
    }

    /// It takes requests and its engine is at work.
    pub fn is_ready(&self) -> bool {
        !self.0.is_draining() && self.0.failure().is_none()
    }

    /// Checks the key of a request, reads its body within the server's limits and has it handled. The handler is given the request
    /// with its [`Tenant`] among the extensions, and its body once more.
    pub async fn run<F: Future<Output = Response>>(
        &self,
        request: Request,
        limits: MessageLimits,
        handler: impl FnOnce(Request, Bytes) -> F,
    ) -> Result<Response, ApiError> {
        let tenant = if limits.is_open {
            Tenant::default()
        } else {
            let key = auth::presented_key(request.headers());
            self.0.keys.check(key).ok_or_else(|| ApiError::unauthorized(key.is_some()))?
        };
        scope::within(&tenant, async {
            let (mut parts, body) = request.into_parts();
            let body = body::read_message(&self.0, body, limits).await?;
            parts.extensions.insert(tenant.clone());
            Ok(handler(Request::from_parts(parts, Body::from(body.clone())), body).await)
        })
        .await
    }

    /// Hands a request to the engine. Whoever drops the generation aborts it.
    pub async fn generate(&self, tenant: &Tenant, request: PlainRequest) -> Result<Generation, ApiError> {
        let in_flight = self.0.admit()?;
        let PlainRequest { prompt, fields, structured, logprobs, bypass_cache } = request;
        let app = self.0.for_model(fields.model.as_deref()).await?;
        app.check_queue(1)?;
        let api = ApiFields { max_tokens: fields.max_tokens, logprobs, ..ApiFields::default() };
        let mut params = sampling_params(&app, &fields, api)?;
        let constraint = structured::apply(&app, structured::requested(structured)?, &mut params).await?;
        let tokenise = move |app: &App| prepare::prompt_tokens(app, prompt, true, "prompt");
        let mut tokens = prepare::blocking(&app, tokenise).await?;
        truncate_prompt(&app, &fields, params.max_tokens, &mut tokens)?;
        let asked = GenerationRequest {
            prompts: vec![tokens],
            params,
            constraint,
            skip_special_tokens: fields.skip_special_tokens.unwrap_or(true),
            // Nobody else has this salt.
            cache_salt: if bypass_cache { Some(ids::unique()) } else { fields.cache_salt },
            kv_transfer: fields.kv_transfer_params,
            priority: fields.priority.unwrap_or(0),
            answer_formats: Vec::new(),
            clamps_length: false,
            prediction: Arc::from([]),
        };
        Generation::start(&app, in_flight, tenant, asked).await
    }
}
