//! The routes of llama.cpp's server that are no other's: `/completion`, `/infill`, `/props`, `/slots`.

use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use baton_core::{FinishReason, PositionLogprobs, SamplingParams, TokenId, TokenLogprob};
use serde_json::Value;

use crate::FINGERPRINT;
use crate::answer::{Streamed, Writer};
use crate::auth::Tenant;
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::generation::{Generation, GenerationRequest, Update};
use crate::params::{ApiFields, sampling_params};
use crate::prepare::{self, ChatOptions, Conversation};
use crate::sse::{self, Events};
use crate::state::App;
use crate::structured;
use crate::tools::ToolUse;
use crate::types::common::StopReason;
use crate::types::llamacpp::{
    AppliedTemplate, LlamaAnswer, LlamaBias, LlamaChunk, LlamaDefaults, LlamaFields, LlamaModalities,
    LlamaProbability, LlamaProps, LlamaSettings, LlamaSlot, LlamaTimings,
};
use crate::types::messages::TokenCount;
use crate::types::prompt::Prompt;
use crate::types::text::TokenizeRequest;

use super::{Received, json, parsed, receive};

/// How models that fill in the middle mark what comes before, what comes after, and where their own text begins.
const MARKS: [[&str; 3]; 4] = [
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
    ["▁<PRE>", "▁<SUF>", "▁<MID>"],
];
/// Slots that `/slots` lists at most.
const MAX_SLOTS: usize = 256;

pub async fn completion(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let mut received = receive::<LlamaFields>(&app, request).await?;
    let app = Arc::clone(&received.app);
    let missing = || ApiError::invalid_field("prompt", "prompt is missing: give a text or token ids");
    let prompts = received.own.prompt.take().ok_or_else(missing)?.0;
    let (count, limit) = (prompts.len(), app.config.max_choices);
    let most = if received.fields.stream.unwrap_or(false) { 1 } else { limit };
    if count == 0 || count > most {
        let message = format!("prompt must hold 1 to {most} prompts (1 for a stream), got {count}");
        return Err(ApiError::invalid_field("prompt", message));
    }
    app.check_queue(count)?;
    let tokens = prepare::blocking(&app, move |app| {
        let tokens = |prompt| prepare::prompt_tokens(app, prompt, true, "prompt");
        prompts.into_iter().map(tokens).collect()
    });
    let tokens = tokens.await?;
    answer(&app, &tenant, received, tokens).await
}

pub async fn infill(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let mut received = receive::<LlamaFields>(&app, request).await?;
    let app = Arc::clone(&received.app);
    let own = &mut received.own;
    let missing = |field: &str| ApiError::invalid_field(field, format!("{field} is missing: give a text"));
    let before = own.input_prefix.take().ok_or_else(|| missing("input_prefix"))?;
    let after = own.input_suffix.take().ok_or_else(|| missing("input_suffix"))?;
    let extra = own.input_extra.take().unwrap_or_default();
    let extra: String = extra.iter().flat_map(|file| [&file.filename, "\n", &file.text, "\n"]).collect();
    // What was typed of the middle already comes right before it.
    let begun = match own.prompt.take().map(|prompts| prompts.0) {
        Some(mut prompts) => match prompts.pop() {
            Some(Prompt::Text(text)) => text,
            None => String::new(),
            Some(Prompt::Tokens(_) | Prompt::Mixed(_)) => {
                return Err(ApiError::invalid_field("prompt", "prompt must be a text"));
            }
        },
        None => String::new(),
    };
    let mut tokens = infill_prompt(&app, format!("{extra}{before}"), after, "input_prefix").await?;
    if !begun.is_empty() {
        let prompt = Prompt::Text(begun);
        tokens.extend(
            prepare::blocking(&app, move |app| prepare::prompt_tokens(app, prompt, false, "prompt")).await?,
        );
    }
    answer(&app, &tenant, received, vec![tokens]).await
}

/// A prompt that asks for what is between two texts.
pub async fn infill_prompt(
    app: &Arc<App>,
    before: String,
    after: String,
    param: &'static str,
) -> Result<Vec<TokenId>, ApiError> {
    prepare::blocking(app, move |app| {
        let tokenizer = prepare::tokenizer(app)?;
        let marks = MARKS.iter().find_map(|marks| {
            let ids: Option<Vec<TokenId>> = marks.iter().map(|mark| tokenizer.token_to_id(mark)).collect();
            ids
        });
        let Some(marks) = marks else {
            let message = "this model was not made to fill in the middle: it has no tokens for it";
            return Err(ApiError::invalid_field(param, message));
        };
        let mut tokens = vec![marks[0]];
        for (text, mark) in [(before, marks[1]), (after, marks[2])] {
            if !text.is_empty() {
                tokens.extend(prepare::prompt_tokens(app, Prompt::Text(text), false, param)?);
            }
            tokens.push(mark);
        }
        Ok(tokens)
    })
    .await
}

async fn answer(
    app: &Arc<App>,
    tenant: &Tenant,
    received: Received<LlamaFields>,
    prompts: Vec<Vec<TokenId>>,
) -> Result<Response, ApiError> {
    let started = Instant::now();
    let Received { in_flight, own, fields, structured, .. } = received;
    let streams = fields.stream.unwrap_or(false);
    let wanted = own.n_predict.or(fields.max_tokens.map(i64::from)).unwrap_or(-1);
    if fields.n.is_some_and(|n| n != 1) {
        return Err(ApiError::invalid_field("n", "/completion has one answer: /v1/completions has several"));
    }
    let api = ApiFields {
        max_tokens: u32::try_from(wanted).ok().map(|count| count.max(1)),
        logprobs: own.n_probs.filter(|&count| count > 0),
        best_of: None,
        biases_texts: true,
    };
    let mut params = sampling_params(app, &fields, api)?;
    let constraint = structured::apply(app, structured::requested(structured)?, &mut params).await?;
    let settings = settings(app, &params, wanted, streams);
    let generation_request = GenerationRequest {
        prompts,
        params,
        constraint,
        skip_special_tokens: fields.skip_special_tokens.unwrap_or(true),
        cache_salt: fields.cache_salt,
        kv_transfer: fields.kv_transfer_params,
        priority: fields.priority.unwrap_or(0),
        answer_formats: Vec::new(),
        clamps_length: true,
        prediction: Arc::from([]),
    };
    let mut generation = Generation::start(app, in_flight, tenant, generation_request).await?;
    let mut writer = LlamaWriter {
        settings,
        shows_tokens: own.return_tokens.unwrap_or(false),
        started,
        first: None,
        has_new_line: false,
        stop: None,
    };
    if streams {
        return Ok(sse::response(Streamed::new(generation, writer)));
    }
    let (updates, first) = generation.collect_timed().await?;
    writer.first = first;
    let mut answers = Vec::new();
    for (index, update) in updates.into_iter().enumerate() {
        writer.has_new_line = false;
        writer.note(&update);
        answers.push(selected(&writer.whole(&generation, index, update), own.response_fields.as_deref()));
    }
    let is_one = generation.num_choices() == 1;
    Ok(if is_one { json(&answers.pop()) } else { json(&answers) })
}

/// The fields of an answer that are wanted, under the names that they were asked for by.
fn selected(answer: &LlamaAnswer, fields: Option<&[String]>) -> Value {
    let whole = serde_json::to_value(answer).expect("our types serialise");
    let Some(fields) = fields.filter(|fields| !fields.is_empty()) else { return whole };
    let found =
        fields.iter().filter_map(|field| Some((field.clone(), whole.pointer(&format!("/{field}"))?.clone())));
    Value::Object(found.collect())
}

fn settings(app: &App, params: &SamplingParams, n_predict: i64, stream: bool) -> LlamaSettings {
    let asked = params.logit_bias.iter().map(|&(token, bias)| LlamaBias { token, bias: Some(bias) });
    let tokenizer = app.model.text.tokenizer.as_ref().filter(|_| params.ignore_eos);
    let ends = tokenizer.into_iter().flat_map(|tokenizer| tokenizer.end_token_ids());
    LlamaSettings {
        n_ctx: app.model.max_model_len,
        n_predict,
        max_tokens: n_predict,
        // What llama.cpp says for one that is drawn.
        seed: params.seed.unwrap_or(u64::from(u32::MAX)),
        temperature: params.temperature,
        top_k: params.top_k,
        top_p: params.top_p,
        min_p: params.min_p,
        repeat_penalty: params.repetition_penalty,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        stop: params.stop.clone(),
        ignore_eos: params.ignore_eos,
        stream,
        n_probs: params.logprobs.unwrap_or(0),
        logit_bias: asked.chain(ends.map(|&token| LlamaBias { token, bias: None })).collect(),
    }
}

#[derive(Debug)]
struct LlamaWriter {
    settings: LlamaSettings,
    shows_tokens: bool,
    started: Instant,
    first: Option<Instant>,
    has_new_line: bool,
    stop: Option<(FinishReason, Option<StopReason>)>,
}

impl LlamaWriter {
    fn note(&mut self, update: &Update) {
        self.first.get_or_insert_with(Instant::now);
        self.has_new_line |= update.text.contains('\n');
        if let Some(reason) = update.finish_reason {
            self.stop = Some((reason, update.stop_reason.clone()));
        }
    }

    fn timings(&self, generation: &Generation) -> LlamaTimings {
        let (usage, first) = (generation.usage(), self.first.unwrap_or_else(Instant::now));
        let ms = |duration: std::time::Duration| duration.as_secs_f64() * 1e3;
        let (prompt_ms, predicted_ms) = (ms(first.duration_since(self.started)), ms(first.elapsed()));
        let per = |total: f64, count: usize| if count == 0 { 0.0 } else { total / count as f64 };
        let rate =
            |count: usize, total_ms: f64| if total_ms > 0.0 { count as f64 * 1e3 / total_ms } else { 0.0 };
        let cache_n = usage.prompt_tokens_details.cached_tokens;
        let prompt_n = usage.prompt_tokens.saturating_sub(cache_n);
        let predicted_n = usage.completion_tokens;
        // The first token is drawn where the prompt ends: it belongs to the prompt's time.
        let num_decodes = predicted_n.saturating_sub(1);
        LlamaTimings {
            cache_n,
            prompt_n,
            prompt_ms,
            prompt_per_token_ms: per(prompt_ms, prompt_n),
            prompt_per_second: rate(prompt_n, prompt_ms),
            predicted_n,
            predicted_ms,
            predicted_per_token_ms: per(predicted_ms, num_decodes),
            predicted_per_second: rate(num_decodes, predicted_ms),
        }
    }

    fn probabilities(&self, app: &App, logprobs: &[PositionLogprobs]) -> Option<Vec<LlamaProbability>> {
        let one = |token: &TokenLogprob| {
            let text = app.model.token_text(token.token_id);
            let bytes = text.clone().into_bytes();
            LlamaProbability {
                id: token.token_id,
                token: text,
                bytes,
                logprob: token.logprob,
                top_logprobs: Vec::new(),
            }
        };
        let position = |position: &PositionLogprobs| LlamaProbability {
            top_logprobs: position.top.iter().map(one).collect(),
            ..one(&position.chosen)
        };
        (self.settings.n_probs > 0).then(|| logprobs.iter().map(position).collect())
    }

    fn whole(&self, generation: &Generation, index: usize, update: Update) -> LlamaAnswer {
        let (usage, app) = (generation.usage(), generation.app());
        let prompt = &generation.part_of(index).prompt_token_ids;
        // Of several answers, each counts its own.
        let (tokens_evaluated, tokens_predicted) = match generation.num_choices() {
            1 => (usage.prompt_tokens, usage.completion_tokens),
            _ => (prompt.len(), update.token_ids.len()),
        };
        let prompt =
            app.model.text.tokenizer.as_ref().and_then(|tokenizer| tokenizer.decode(prompt, false).ok());
        let (stop_type, stopping_word) = match &self.stop {
            Some((FinishReason::Length, _)) => ("limit", String::new()),
            Some((FinishReason::Stop, Some(StopReason::Text(text)))) => ("word", text.clone()),
            Some((FinishReason::Stop, _)) => ("eos", String::new()),
            _ => ("none", String::new()),
        };
        LlamaAnswer {
            index,
            completion_probabilities: self.probabilities(app, &update.logprobs),
            content: update.text,
            tokens: if self.shows_tokens { update.token_ids } else { Vec::new() },
            id_slot: 0,
            stop: true,
            model: app.model.name().to_owned(),
            tokens_predicted,
            tokens_evaluated,
            tokens_cached: tokens_evaluated + tokens_predicted,
            generation_settings: self.settings.clone(),
            prompt: prompt.unwrap_or_default(),
            has_new_line: self.has_new_line,
            // The context was full before the answer had ended.
            truncated: stop_type == "limit" && tokens_evaluated + tokens_predicted >= self.settings.n_ctx,
            stop_type,
            stopping_word,
            timings: self.timings(generation),
        }
    }
}

impl Writer for LlamaWriter {
    fn begin(&mut self, _: &Generation, _: &mut Events) {}

    fn update(&mut self, generation: &Generation, update: Update, out: &mut Events) {
        self.note(&update);
        if update.text.is_empty() && update.logprobs.is_empty() {
            return;
        }
        let usage = generation.usage();
        out.push(&LlamaChunk {
            index: 0,
            completion_probabilities: self.probabilities(generation.app(), &update.logprobs),
            content: update.text,
            tokens: update.token_ids,
            stop: false,
            id_slot: 0,
            tokens_predicted: usage.completion_tokens,
            tokens_evaluated: usage.prompt_tokens,
        });
    }

    fn end(&mut self, generation: &Generation, out: &mut Events) {
        out.push(&self.whole(generation, 0, Update::default()));
    }

    fn ends_with_done(&self) -> bool {
        false
    }
}

/// The prompt that messages become.
pub async fn apply_template(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let (app, tokens) = template_tokens(&app, request).await?;
    let prompt =
        prepare::blocking(&app, move |app| Ok(prepare::tokenizer(app)?.decode(&tokens, false)?)).await?;
    Ok(json(&AppliedTemplate { prompt }))
}

/// How many tokens a conversation has.
pub async fn input_tokens(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let (_, tokens) = template_tokens(&app, request).await?;
    Ok(json(&TokenCount { input_tokens: tokens.len() }))
}

/// What the chat template of the model makes of messages.
async fn template_tokens(app: &Arc<App>, request: Request) -> Result<(Arc<App>, Vec<TokenId>), ApiError> {
    let body = JsonBody::read(app, request).await?;
    let asked: TokenizeRequest = parsed(app, body, JsonBody::parse).await?;
    let missing = || ApiError::invalid_field("messages", "messages is missing: give at least one message");
    let messages = asked.messages.ok_or_else(missing)?;
    let app = app.for_model(asked.model.as_deref()).await?;
    let options = ChatOptions {
        add_generation_prompt: asked.add_generation_prompt,
        chat_template_kwargs: asked.chat_template_kwargs,
        ..ChatOptions::default()
    };
    let tools = ToolUse::of_chat(asked.tools, None, None)?;
    let conversation = Conversation { model: asked.model, messages, tools, options };
    let prompt = prepare::blocking(&app, move |app| prepare::chat_prompt(app, conversation)).await?;
    Ok((app, prompt.token_ids))
}

pub async fn props(State(app): State<Arc<App>>) -> Response {
    let tokenizer = app.model.text.tokenizer.as_ref();
    let text = |id: Option<TokenId>| {
        let tokenizer = tokenizer?;
        tokenizer.token_text(id?).map(str::to_owned)
    };
    let (bos, eos) = tokenizer.map_or((None, None), |tokenizer| (tokenizer.bos_id(), tokenizer.eos_id()));
    let template = tokenizer.and_then(|tokenizer| tokenizer.chat_template()).unwrap_or_default();
    json(&LlamaProps {
        default_generation_settings: LlamaDefaults {
            params: settings(&app, &app.model.text.default_sampling, -1, true),
            n_ctx: app.model.max_model_len,
        },
        total_slots: app.model.facts.max_num_seqs,
        // Where it lies on the server is nobody's business.
        model_path: app.model.name().to_owned(),
        model_alias: app.model.name().to_owned(),
        chat_template: template.to_owned(),
        bos_token: text(bos).unwrap_or_default(),
        eos_token: text(eos).unwrap_or_default(),
        build_info: FINGERPRINT,
        modalities: LlamaModalities::default(),
        is_sleeping: false,
    })
}

pub async fn slots(State(app): State<Arc<App>>) -> Response {
    let (running, n_ctx) = (app.num_in_flight(), app.model.max_model_len);
    let count = app.model.facts.max_num_seqs.min(MAX_SLOTS);
    let slots: Vec<LlamaSlot> =
        (0..count).map(|id| LlamaSlot { id, n_ctx, is_processing: id < running }).collect();
    json(&slots)
}
