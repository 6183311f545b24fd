//! The one way of every chat dialect: messages → prompt → generation → events. Dialects translate what they are asked
//! into an [`Ask`], and the events of the generation into their own words.

use std::sync::Arc;

use crate::auth::Tenant;
use crate::error::ApiError;
use crate::generation::{Generation, Job, Reading};
use crate::params::{ApiFields, sampling_params, truncate_prompt};
use crate::prepare::{self, Conversation};
use crate::state::{App, InFlight};
use crate::structured::{self, Wish};
use crate::types::common::SamplingFields;

/// What is asked of the model.
#[derive(Debug)]
pub struct Ask {
    pub conversation: Conversation,
    pub fields: SamplingFields,
    pub api: ApiFields,
    /// The shape of the answer, unless it must be a call.
    pub structured: Option<Wish>,
    /// Give as many tokens as there is room for where more are asked for.
    pub clamps_length: bool,
}

/// Hands the conversation to the engine.
pub async fn start(
    app: &Arc<App>,
    in_flight: InFlight,
    tenant: &Tenant,
    ask: Ask,
) -> Result<Generation, ApiError> {
    let Ask { mut conversation, fields, api, structured, clamps_length } = ask;
    let mut params = sampling_params(app, &fields, api)?;
    let call = conversation.tools.structured_output()?.map(|shape| ("tools", shape));
    let constraint = structured::apply(app, call.or(structured), &mut params).await?;
    conversation.options.skips_reasoning = params.structured_outputs.is_some();
    let options = app.speech.answer_options(&conversation.tools);
    let mut prompt = prepare::blocking(app, move |app| prepare::chat_prompt(app, conversation)).await?;
    truncate_prompt(app, &fields, params.max_tokens, &mut prompt.token_ids)?;
    let job = Job {
        prompts: vec![prompt.token_ids],
        params,
        constraint,
        skip_special_tokens: fields.skip_special_tokens.unwrap_or(true),
        cache_salt: fields.cache_salt,
        priority: fields.priority.unwrap_or(0),
        reading: Some(Reading { options, prompt_end: prompt.end }),
        clamps_length,
    };
    Generation::start(app, in_flight, tenant, job).await
}
