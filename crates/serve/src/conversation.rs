//! The one way of every chat dialect: messages → prompt → generation → events. Dialects translate what they are asked
//! into an [`ChatRequest`], and the events of the generation into their own words.

use std::sync::Arc;

use crate::auth::Tenant;
use crate::error::ApiError;
use crate::generation::{AnswerFormat, Generation, GenerationRequest};
use crate::params::{ApiFields, sampling_params, truncate_prompt};
use crate::prepare::{self, Conversation};
use crate::state::{App, InFlight};
use crate::structured::{self, StructuredRequest};
use crate::types::common::SamplingFields;
use crate::types::prompt::Prompt;

/// What is asked of the model.
#[derive(Debug)]
pub struct ChatRequest {
    /// Each is answered; their tools and options are the same.
    pub conversations: Vec<Conversation>,
    pub fields: SamplingFields,
    pub api: ApiFields,
    /// The shape of the answer, unless it must be a call.
    pub structured: Option<StructuredRequest>,
    /// Give as many tokens as there is room for where more are asked for.
    pub clamps_length: bool,
    /// What the answers are expected to be, for speculation.
    pub prediction: Option<String>,
}

/// Hands the conversations to the engine.
pub async fn start(
    app: &Arc<App>,
    in_flight: InFlight,
    tenant: &Tenant,
    chat: ChatRequest,
) -> Result<Generation, ApiError> {
    let ChatRequest { mut conversations, fields, api, structured, clamps_length, prediction } = chat;
    let mut params = sampling_params(app, &fields, api)?;
    let tools = conversations.first().map(|conversation| conversation.tools.clone()).unwrap_or_default();
    let call = tools.structured_output()?.map(|shape| ("tools", shape));
    let constraint = structured::apply(app, call.or(structured), &mut params).await?;
    for conversation in &mut conversations {
        conversation.options.skips_reasoning = params.structured_outputs.is_some();
    }
    let options = app.chat_format.answer_options(&tools);
    let chat_prompts = prepare::blocking(app, move |app| {
        let prompts = conversations.into_iter().map(|conversation| prepare::chat_prompt(app, conversation));
        let prompts = prompts.collect::<Result<Vec<_>, _>>()?;
        let prediction = match prediction {
            Some(text) => prepare::prompt_tokens(app, Prompt::Text(text), false, "prediction")?,
            None => Vec::new(),
        };
        Ok((prompts, Arc::from(prediction)))
    });
    let (chat_prompts, prediction) = chat_prompts.await?;
    let (mut prompts, mut answer_formats) = (Vec::new(), Vec::new());
    for mut prompt in chat_prompts {
        truncate_prompt(app, &fields, params.max_tokens, &mut prompt.token_ids)?;
        prompts.push(prompt.token_ids);
        answer_formats.push(AnswerFormat { options: options.clone(), prompt_end: prompt.end });
    }
    let generation_request = GenerationRequest {
        prompts,
        params,
        constraint,
        skip_special_tokens: fields.skip_special_tokens.unwrap_or(true),
        cache_salt: fields.cache_salt,
        kv_transfer: fields.kv_transfer_params,
        priority: fields.priority.unwrap_or(0),
        answer_formats,
        clamps_length,
        prediction,
    };
    Generation::start(app, in_flight, tenant, generation_request).await
}
