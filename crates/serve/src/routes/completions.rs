//! `POST /v1/completions`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use baton_core::TokenId;

use crate::FINGERPRINT;
use crate::answer::{ResponseHeader, Streamed, Writer};
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::generation::{Generation, GenerationRequest, Update};
use crate::logprobs::{self, finish_name};
use crate::params::{ApiFields, Show, sampling_params, truncate_prompt};
use crate::prepare;
use crate::sse::{self, Events, TEXT_MARK, TextTemplate};
use crate::state::App;
use crate::structured;
use crate::types::common::Usage;
use crate::types::completions::{
    CompletionChoice, CompletionChunk, CompletionFields, CompletionLogprobs, CompletionResponse,
};
use crate::types::prompt::Prompt;

use super::{Received, json, receive, refuse};

/// OpenAI's default, which surprises everybody once.
const DEFAULT_MAX_TOKENS: u32 = 16;

pub async fn create(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let Received { app, in_flight, own: mut completion, mut fields, structured } =
        receive::<CompletionFields>(&app, request).await?;
    check_supported(&completion)?;
    let show = Show::new(&app, &fields)?;
    let echo = completion.echo.unwrap_or(false);
    // With `echo`, no tokens at all may be asked for: the prompt alone is wanted, usually for its probabilities.
    let only_echo = echo && fields.max_tokens == Some(0);
    let max_tokens = if only_echo { 1 } else { fields.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS) };
    let asked_prompt_logprobs = fields.prompt_logprobs.is_some();
    if echo {
        fields.prompt_logprobs = fields.prompt_logprobs.max(completion.logprobs);
    }
    let api = ApiFields {
        max_tokens: Some(max_tokens),
        logprobs: completion.logprobs,
        best_of: completion.best_of,
        ..ApiFields::default()
    };
    let mut params = sampling_params(&app, &fields, api)?;
    let constraint = structured::apply(&app, structured::requested(structured)?, &mut params).await?;
    let missing = || ApiError::invalid_field("prompt", "prompt is missing: give a text or token ids");
    let prompts = completion.prompt.take().ok_or_else(missing)?.0;
    if echo && fields.truncate_prompt_tokens.is_some() {
        let message = "truncate_prompt_tokens and echo do not go together";
        return Err(ApiError::invalid_field("truncate_prompt_tokens", message));
    }
    let (mut prompts, echoes) = prepare_prompts(&app, &completion, prompts, echo).await?;
    for prompt in &mut prompts {
        truncate_prompt(&app, &fields, params.max_tokens, prompt)?;
    }
    let generation_request = GenerationRequest {
        prompts,
        params,
        constraint,
        skip_special_tokens: show.skip_special_tokens,
        cache_salt: fields.cache_salt,
        kv_transfer: fields.kv_transfer_params,
        priority: fields.priority.unwrap_or(0),
        answer_formats: Vec::new(),
        clamps_length: false,
        prediction: Arc::from([]),
    };
    let mut generation = Generation::start(&app, in_flight, &tenant, generation_request).await?;
    let num_choices = generation.num_choices();
    let mut writer = CompletionWriter {
        head: ResponseHeader::new("cmpl", show),
        logprobs: completion.logprobs.map(|top| top as usize),
        prompt_logprobs: asked_prompt_logprobs,
        echoes,
        only_echo,
        offsets: vec![0; num_choices],
        begun: vec![false; num_choices],
        templates: vec![None; num_choices],
    };
    if show.stream {
        return Ok(sse::response(Streamed::new(generation, writer)));
    }
    let updates = generation.collect().await?;
    Ok(json(&writer.whole(&generation, updates)))
}

fn check_supported(completion: &CompletionFields) -> Result<(), ApiError> {
    refuse(&[("suffix", &completion.suffix), ("prompt_embeds", &completion.prompt_embeds)])?;
    Ok(())
}

/// Token ids of all prompts, and with `echo` their texts.
async fn prepare_prompts(
    app: &Arc<App>,
    completion: &CompletionFields,
    prompts: Vec<Prompt>,
    echo: bool,
) -> Result<(Vec<Vec<TokenId>>, Vec<String>), ApiError> {
    let limit = app.config.max_choices;
    if prompts.is_empty() || prompts.len() > limit {
        let message = format!("prompt must hold 1 to {limit} prompts, got {}", prompts.len());
        return Err(ApiError::invalid_field("prompt", message));
    }
    app.check_queue(prompts.len())?;
    let add_special = completion.add_special_tokens.unwrap_or(true);
    prepare::blocking(app, move |app| {
        let (mut all_tokens, mut echoes) = (Vec::with_capacity(prompts.len()), Vec::new());
        for prompt in prompts {
            let text = match &prompt {
                Prompt::Text(text) if echo => Some(text.clone()),
                _ => None,
            };
            let tokens = prepare::prompt_tokens(app, prompt, add_special, "prompt")?;
            if echo {
                echoes.push(match (text, &app.model.text.tokenizer) {
                    (Some(text), _) => text,
                    // Special tokens too: somebody wrote them.
                    (None, Some(tokenizer)) => tokenizer.decode(&tokens, false)?,
                    (None, None) => String::new(),
                });
            }
            all_tokens.push(tokens);
        }
        Ok((all_tokens, echoes))
    })
    .await
}

/// How an answer is to look, and how far its choices are.
#[derive(Debug)]
struct CompletionWriter {
    head: ResponseHeader,
    logprobs: Option<usize>,
    prompt_logprobs: bool,
    /// The prompts' texts; empty without `echo`.
    echoes: Vec<String>,
    only_echo: bool,
    /// Characters of each choice's text so far.
    offsets: Vec<usize>,
    begun: Vec<bool>,
    templates: Vec<Option<TextTemplate>>,
}

impl CompletionWriter {
    fn whole(&mut self, generation: &Generation, updates: Vec<Update>) -> CompletionResponse {
        let choices = updates.into_iter().map(|update| self.choice(generation, update)).collect();
        let mut usage = generation.usage();
        if self.only_echo {
            usage = Usage::new(usage.prompt_tokens, 0, usage.prompt_tokens_details.cached_tokens);
        }
        CompletionResponse {
            choices,
            id: self.head.id.clone(),
            object: "text_completion",
            created: self.head.created,
            model: generation.app().model.name().to_owned(),
            usage,
            system_fingerprint: FINGERPRINT,
            kv_transfer_params: generation.kv_transfer_params(),
        }
    }

    /// A choice, or a piece of one.
    fn choice(&mut self, generation: &Generation, mut update: Update) -> CompletionChoice {
        let (names, part) = (self.head.names(generation), generation.part_of(update.choice));
        let is_first = !std::mem::replace(&mut self.begun[update.choice], true);
        let offset = &mut self.offsets[update.choice];
        let prompt_index = update.choice * self.echoes.len() / generation.num_choices().max(1);
        let echo = self.echoes.get(prompt_index).filter(|_| is_first);
        if self.only_echo {
            (update.text, update.token_ids, update.logprobs) = (String::new(), Vec::new(), Vec::new());
            update.finish_reason = update.finish_reason.map(|_| baton_core::FinishReason::Length);
            update.stop_reason = None;
        }
        let logprobs = self.logprobs.map(|top| {
            let mut lists = CompletionLogprobs::default();
            if let Some(echo) = echo {
                let prompt = &part.prompt_token_ids;
                let mut place = logprobs::Place { offset, rest: echo };
                logprobs::extend_echo(&mut lists, prompt, &part.prompt_logprobs, top, &mut place, names);
                // What the tokens lack or have more of than the text must not move the answer.
                *offset = echo.chars().count();
            }
            let mut place = logprobs::Place { offset, rest: &update.text };
            logprobs::extend_completion(&mut lists, &update.logprobs, top, &mut place, names);
            lists
        });
        let text = match echo {
            Some(echo) => format!("{echo}{}", update.text),
            None => update.text,
        };
        let shows_prompt = is_first && self.prompt_logprobs;
        let shows_ids = self.head.show.token_ids;
        CompletionChoice {
            index: update.choice,
            text,
            logprobs,
            finish_reason: update.finish_reason.map(finish_name),
            stop_reason: update.stop_reason,
            prompt_logprobs: shows_prompt.then(|| logprobs::prompt(&part.prompt_logprobs, names)),
            prompt_token_ids: (is_first && shows_ids).then(|| part.prompt_token_ids.clone()),
            token_ids: shows_ids.then_some(update.token_ids),
        }
    }

    /// True for an update that brings text and nothing else, whose chunk differs from the last in the text alone.
    fn is_plain(&self, update: &Update) -> bool {
        self.begun[update.choice]
            && !update.text.is_empty()
            && update.finish_reason.is_none()
            && self.logprobs.is_none()
            && !self.head.show.token_ids
            && !self.head.show.continuous_usage
            && !self.only_echo
    }

    /// The chunk of a plain update, its text left open. Made with the choice's second chunk.
    fn template(&mut self, generation: &Generation, choice: usize) -> Option<&TextTemplate> {
        if self.templates[choice].is_none() {
            let update = Update { choice, text: TEXT_MARK.to_owned(), ..Update::default() };
            let choices = [self.choice(generation, update)];
            self.templates[choice] = TextTemplate::new(&self.chunk(generation, &choices, false));
        }
        self.templates[choice].as_ref()
    }

    fn chunk<'a>(
        &'a self,
        generation: &'a Generation,
        choices: &'a [CompletionChoice],
        is_last: bool,
    ) -> CompletionChunk<'a> {
        CompletionChunk {
            id: &self.head.id,
            object: "text_completion",
            created: self.head.created,
            model: generation.app().model.name(),
            choices,
            usage: self.head.chunk_usage(generation, is_last),
            system_fingerprint: FINGERPRINT,
        }
    }
}

impl Writer for CompletionWriter {
    fn begin(&mut self, _: &Generation, _: &mut Events) {}

    fn update(&mut self, generation: &Generation, update: Update, out: &mut Events) {
        if self.is_plain(&update)
            && let Some(template) = self.template(generation, update.choice)
        {
            out.push_text(template, &update.text);
            return;
        }
        let ends = update.finish_reason.is_some();
        let choice = self.choice(generation, update);
        let has_tokens = choice.logprobs.as_ref().is_some_and(|lists| !lists.tokens.is_empty());
        let has_ids = choice.token_ids.as_ref().is_some_and(|ids| !ids.is_empty());
        if ends || has_tokens || has_ids || !choice.text.is_empty() {
            out.push(&self.chunk(generation, &[choice], false));
        }
    }

    fn end(&mut self, generation: &Generation, out: &mut Events) {
        if self.head.show.include_usage {
            out.push(&self.chunk(generation, &[], true));
        }
    }
}
