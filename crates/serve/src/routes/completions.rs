//! `POST /v1/completions`.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use baton_core::TokenId;

use crate::auth::Tenant;
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::generation::{Generation, Job, Update};
use crate::logprobs::{self, TokenNames, finish_name};
use crate::params::{ApiFields, Show, sampling_params};
use crate::prepare;
use crate::sse::{self, EventSource, Events, TEXT_MARK, TextTemplate};
use crate::state::App;
use crate::types::common::SamplingFields;
use crate::types::completions::{
    CompletionChoice, CompletionChunk, CompletionFields, CompletionLogprobs, CompletionResponse,
};
use crate::types::prompt::Prompt;
use crate::{FINGERPRINT, ids};

use super::{check_model, json, refuse};

/// OpenAI's default, which surprises everybody once.
const DEFAULT_MAX_TOKENS: u32 = 16;

pub async fn create(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let in_flight = app.admit()?;
    let body = JsonBody::read(&app, request).await?;
    let mut completion: CompletionFields = body.parse()?;
    let mut fields: SamplingFields = body.parse()?;
    drop(body);
    check_model(&app, fields.model.as_deref())?;
    check_supported(&completion)?;
    let show = Show::new(&fields)?;
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
    };
    let params = sampling_params(&app, &fields, api)?;
    let missing = || ApiError::invalid_field("prompt", "prompt is missing: give a text or token ids");
    let prompts = completion.prompt.take().ok_or_else(missing)?.0;
    let (prompts, echoes) = prepare_prompts(&app, &completion, prompts, echo).await?;
    let job = Job {
        prompts,
        params,
        skip_special_tokens: show.skip_special_tokens,
        cache_salt: fields.cache_salt,
        priority: fields.priority.unwrap_or(0),
    };
    let generation = Generation::start(&app, in_flight, &tenant, job).await?;
    let answer = Answer {
        id: format!("cmpl-{}", ids::unique()),
        created: ids::unix_seconds(),
        show,
        logprobs: completion.logprobs.map(|top| top as usize),
        prompt_logprobs: asked_prompt_logprobs,
        echoes,
        only_echo,
        generation,
    };
    if !show.stream {
        return answer.whole().await;
    }
    let num_choices = answer.generation.num_choices();
    Ok(sse::response(CompletionStream {
        answer,
        updates: Vec::new(),
        offsets: vec![0; num_choices],
        begun: vec![false; num_choices],
        templates: vec![None; num_choices],
    }))
}

fn check_supported(completion: &CompletionFields) -> Result<(), ApiError> {
    refuse(&[
        ("suffix", &completion.suffix),
        ("prompt_embeds", &completion.prompt_embeds),
        ("structured_outputs", &completion.structured_outputs),
        ("guided_json", &completion.guided_json),
        ("guided_regex", &completion.guided_regex),
        ("guided_choice", &completion.guided_choice),
        ("guided_grammar", &completion.guided_grammar),
    ])?;
    if completion.response_format.as_ref().is_some_and(|format| format.kind != "text") {
        return Err(ApiError::unsupported("response_format"));
    }
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
    let add_special = completion.add_special_tokens.unwrap_or(true);
    prepare::blocking(app, move |app| {
        let (mut all_tokens, mut echoes) = (Vec::with_capacity(prompts.len()), Vec::new());
        for prompt in prompts {
            let text = match &prompt {
                Prompt::Text(text) if echo => Some(text.clone()),
                _ => None,
            };
            let tokens = prepare::prompt_tokens(app, prompt, add_special)?;
            if echo {
                echoes.push(match (text, &app.model.text.tokenizer) {
                    (Some(text), _) => text,
                    (None, Some(tokenizer)) => tokenizer.decode(&tokens, true)?,
                    (None, None) => String::new(),
                });
            }
            all_tokens.push(tokens);
        }
        Ok((all_tokens, echoes))
    })
    .await
}

/// An answer under way, and how it is to look.
struct Answer {
    id: String,
    created: u64,
    show: Show,
    logprobs: Option<usize>,
    prompt_logprobs: bool,
    /// The prompts' texts; empty without `echo`.
    echoes: Vec<String>,
    only_echo: bool,
    generation: Generation,
}

impl Answer {
    fn names(&self) -> TokenNames<'_> {
        TokenNames { model: &self.generation.app().model, as_ids: self.show.tokens_as_ids }
    }

    async fn whole(mut self) -> Result<Response, ApiError> {
        let updates = self.generation.collect().await?;
        let choices = updates.into_iter().map(|update| self.choice(update, true, &mut 0)).collect();
        let mut usage = self.generation.usage();
        if self.only_echo {
            usage = crate::types::common::Usage::new(
                usage.prompt_tokens,
                0,
                usage.prompt_tokens_details.cached_tokens,
            );
        }
        Ok(json(&CompletionResponse {
            choices,
            id: self.id.clone(),
            object: "text_completion",
            created: self.created,
            model: self.generation.app().model.name().to_owned(),
            usage,
            system_fingerprint: FINGERPRINT,
        }))
    }

    /// A choice, or a piece of one. `offset` is the length of its text so far.
    fn choice(&self, mut update: Update, is_first: bool, offset: &mut usize) -> CompletionChoice {
        let (names, part) = (self.names(), self.generation.part_of(update.choice));
        let prompt_index = update.choice * self.echoes.len() / self.generation.num_choices().max(1);
        let echo = self.echoes.get(prompt_index).filter(|_| is_first);
        if self.only_echo {
            (update.text, update.token_ids, update.logprobs) = (String::new(), Vec::new(), Vec::new());
            update.finish_reason = update.finish_reason.map(|_| baton_core::FinishReason::Length);
            update.stop_reason = None;
        }
        let logprobs = self.logprobs.map(|top| {
            let mut lists = CompletionLogprobs::default();
            if echo.is_some() {
                let prompt = &part.prompt_token_ids;
                logprobs::extend_echo(&mut lists, prompt, &part.prompt_logprobs, top, offset, names);
            }
            logprobs::extend_completion(&mut lists, &update.logprobs, top, offset, names);
            lists
        });
        let text = match echo {
            Some(echo) => format!("{echo}{}", update.text),
            None => update.text,
        };
        let shows_prompt = is_first && self.prompt_logprobs;
        CompletionChoice {
            index: update.choice,
            text,
            logprobs,
            finish_reason: update.finish_reason.map(finish_name),
            stop_reason: update.stop_reason,
            prompt_logprobs: shows_prompt.then(|| logprobs::prompt(&part.prompt_logprobs, names)),
            prompt_token_ids: (is_first && self.show.token_ids).then(|| part.prompt_token_ids.clone()),
            token_ids: self.show.token_ids.then_some(update.token_ids),
        }
    }

    /// True for an update that brings text and nothing else, whose chunk differs from the last in the text alone.
    fn is_plain(&self, update: &Update) -> bool {
        !update.text.is_empty()
            && update.finish_reason.is_none()
            && self.logprobs.is_none()
            && !self.show.token_ids
            && !self.show.continuous_usage
            && !self.only_echo
    }

    /// The chunk of a plain update, its text left open.
    fn template(&self, choice: usize) -> Option<TextTemplate> {
        let update = Update { choice, text: TEXT_MARK.to_owned(), ..Update::default() };
        let choices = [self.choice(update, false, &mut 0)];
        TextTemplate::new(&self.chunk(&choices, false))
    }

    fn push_chunk(&self, choices: &[CompletionChoice], is_last: bool, out: &mut Events) {
        out.push(&self.chunk(choices, is_last));
    }

    fn chunk<'a>(&'a self, choices: &'a [CompletionChoice], is_last: bool) -> CompletionChunk<'a> {
        let usage = match (self.show.include_usage, is_last || self.show.continuous_usage) {
            (false, _) => None,
            (true, false) => Some(None),
            (true, true) => Some(Some(self.generation.usage())),
        };
        CompletionChunk {
            id: &self.id,
            object: "text_completion",
            created: self.created,
            model: self.generation.app().model.name(),
            choices,
            usage,
            system_fingerprint: FINGERPRINT,
        }
    }
}

struct CompletionStream {
    answer: Answer,
    updates: Vec<Update>,
    /// Characters of each choice's text so far.
    offsets: Vec<usize>,
    begun: Vec<bool>,
    /// Of each choice, made with its second chunk.
    templates: Vec<Option<TextTemplate>>,
}

impl EventSource for CompletionStream {
    fn poll_events(&mut self, cx: &mut Context<'_>, out: &mut Events) -> Poll<Result<bool, ApiError>> {
        let more = ready!(self.answer.generation.poll_updates(cx, &mut self.updates))?;
        for update in self.updates.drain(..) {
            let index = update.choice;
            let is_first = !std::mem::replace(&mut self.begun[index], true);
            if !is_first && self.answer.is_plain(&update) {
                let template = &mut self.templates[index];
                if template.is_none() {
                    *template = self.answer.template(index);
                }
                if let Some(template) = template {
                    out.push_text(template, &update.text);
                    continue;
                }
            }
            let ends = update.finish_reason.is_some();
            let choice = self.answer.choice(update, is_first, &mut self.offsets[index]);
            let has_tokens = choice.logprobs.as_ref().is_some_and(|lists| !lists.tokens.is_empty());
            let has_ids = choice.token_ids.as_ref().is_some_and(|ids| !ids.is_empty());
            if ends || has_tokens || has_ids || !choice.text.is_empty() {
                self.answer.push_chunk(&[choice], false, out);
            }
        }
        if !more && self.answer.show.include_usage {
            self.answer.push_chunk(&[], true, out);
        }
        Poll::Ready(Ok(more))
    }
}
