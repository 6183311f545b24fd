//! `POST /v1/rerank` and `POST /v1/score`: how well pairs of texts go together.
//!
//! A model that was made for pairs reads both texts of a pair at once and gives a score; of any other the score is the cosine of the
//! vectors that `/v1/embeddings` gives of the two.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use baton_core::TokenId;

use crate::auth::Tenant;
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::generation::Generation;
use crate::ids;
use crate::model::ServedEncoder;
use crate::prepare;
use crate::state::{App, InFlight};
use crate::types::prompt::Prompt;
use crate::types::rerank::{
    Document, RerankDocument, RerankRequest, RerankResponse, RerankResult, RerankUsage, Score, ScoreRequest,
    ScoreResponse, Texts,
};

use super::embeddings::pooling_request;
use super::{json, parsed};

pub async fn rerank(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let in_flight = app.admit()?;
    let body = JsonBody::read_for_engine(&app, request).await?;
    let asked: RerankRequest = parsed(&app, body, JsonBody::parse).await?;
    let app = app.for_model(asked.model.as_deref()).await?;
    let missing = |name: &str| ApiError::invalid_field(name, format!("{name} is missing"));
    let query = asked.query.ok_or_else(|| missing("query"))?;
    let documents: Vec<String> =
        asked.documents.ok_or_else(|| missing("documents"))?.into_iter().map(Document::into_text).collect();
    check_count(&app, "documents", documents.len())?;
    let top_n = asked.top_n.unwrap_or(documents.len());
    if top_n == 0 {
        return Err(ApiError::invalid_field("top_n", "top_n must be at least 1"));
    }
    let pairs = Pairs {
        first: vec![query],
        second: documents.clone(),
        truncation: asked.truncate_prompt_tokens,
        names: ("query", "documents"),
    };
    let (scores, usage) = pairs.score(&app, in_flight, &tenant, asked.priority).await?;
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(top_n);
    let returns = asked.return_documents.unwrap_or(true);
    let result = |index: usize| RerankResult {
        index,
        document: returns.then(|| RerankDocument { text: documents[index].clone() }),
        relevance_score: scores[index],
    };
    Ok(json(&RerankResponse {
        id: format!("rerank-{}", ids::unique()),
        model: app.model.name().to_owned(),
        usage,
        results: order.into_iter().map(result).collect(),
    }))
}

pub async fn score(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let in_flight = app.admit()?;
    let body = JsonBody::read_for_engine(&app, request).await?;
    let asked: ScoreRequest = parsed(&app, body, JsonBody::parse).await?;
    let app = app.for_model(asked.model.as_deref()).await?;
    let missing = |name: &str| ApiError::invalid_field(name, format!("{name} is missing"));
    let first = asked.text_1.map(Texts::into_vec).ok_or_else(|| missing("text_1"))?;
    let second = asked.text_2.map(Texts::into_vec).ok_or_else(|| missing("text_2"))?;
    check_count(&app, "text_2", second.len())?;
    if first.len() != 1 && first.len() != second.len() {
        let message = format!(
            "text_1 must be one text, or as many as text_2 has ({}), got {}",
            second.len(),
            first.len()
        );
        return Err(ApiError::invalid_field("text_1", message));
    }
    let pairs =
        Pairs { first, second, truncation: asked.truncate_prompt_tokens, names: ("text_1", "text_2") };
    let (scores, usage) = pairs.score(&app, in_flight, &tenant, asked.priority).await?;
    let score = |(index, score)| Score { index, object: "score", score };
    Ok(json(&ScoreResponse {
        id: format!("score-{}", ids::unique()),
        object: "list",
        created: ids::unix_seconds(),
        model: app.model.name().to_owned(),
        data: scores.into_iter().enumerate().map(score).collect(),
        usage,
    }))
}

/// Two vectors take two places of the queue.
fn check_count(app: &App, name: &str, count: usize) -> Result<(), ApiError> {
    let limit = app.config.max_choices.saturating_sub(1).max(1);
    if count == 0 || count > limit {
        let message = format!("{name} must hold 1 to {limit} texts, got {count}");
        return Err(ApiError::invalid_field(name, message));
    }
    app.check_queue(count)
}

/// Pairs of texts: one with each of many, or each with its own.
struct Pairs {
    first: Vec<String>,
    second: Vec<String>,
    truncation: Option<i64>,
    /// Of the fields that they came in.
    names: (&'static str, &'static str),
}

impl Pairs {
    /// A score for each of the second texts.
    async fn score(
        self,
        app: &Arc<App>,
        in_flight: InFlight,
        tenant: &Tenant,
        priority: Option<i32>,
    ) -> Result<(Vec<f32>, RerankUsage), ApiError> {
        let crossed = app.model.encoder.clone().filter(|encoder| encoder.scores_pairs);
        let (num_first, num_second) = (self.first.len(), self.second.len());
        let scores_pairs = crossed.is_some();
        let prompts = prepare::blocking(app, move |app| match &crossed {
            Some(encoder) => self.joined(app, encoder),
            None => self.separate(app),
        });
        let prompts = prompts.await?;
        let mut generation =
            Generation::start(app, in_flight, tenant, pooling_request(prompts, None, priority)).await?;
        generation.collect().await?;
        let pooled = |index: usize| generation.part_of(index).pooled.as_slice();
        let scores = if scores_pairs {
            // Of several labels the first is that of relevance.
            (0..num_second).map(|index| pooled(index).first().copied().unwrap_or_default()).collect()
        } else {
            let of_first = |index: usize| if num_first == 1 { 0 } else { index };
            (0..num_second).map(|index| cosine(pooled(of_first(index)), pooled(num_first + index))).collect()
        };
        let prompt_tokens = generation.usage().prompt_tokens;
        Ok((scores, RerankUsage { prompt_tokens, total_tokens: prompt_tokens }))
    }

    /// Every text by itself: first those of one side, then those of the other.
    fn separate(self, app: &App) -> Result<Vec<Vec<TokenId>>, ApiError> {
        let room = self.room(app)?;
        let (first_name, second_name) = self.names;
        let first = self.first.into_iter().map(|text| (text, first_name));
        let second = self.second.into_iter().map(|text| (text, second_name));
        let tokens = |(text, name): (String, &str)| {
            let mut tokens = prepare::prompt_tokens(app, Prompt::Text(text), true, name)?;
            if let Some(room) = room {
                tokens.truncate(room);
            }
            Ok(tokens)
        };
        first.chain(second).map(tokens).collect()
    }

    /// Both texts of a pair as one: each with its marks, the second without its first one.
    fn joined(self, app: &App, encoder: &ServedEncoder) -> Result<Vec<Vec<TokenId>>, ApiError> {
        let room = self.room(app)?;
        let (first_name, second_name) = self.names;
        let tokens = |text: String, name: &str| prepare::prompt_tokens(app, Prompt::Text(text), true, name);
        let first: Vec<Vec<TokenId>> =
            self.first.into_iter().map(|text| tokens(text, first_name)).collect::<Result<_, _>>()?;
        let join = |(index, text): (usize, String)| {
            let mut pair = first[if first.len() == 1 { 0 } else { index }].clone();
            let separator = *pair.last().expect("prompts are not empty");
            if encoder.double_separator {
                pair.push(separator);
            }
            pair.extend(tokens(text, second_name)?.iter().skip(1));
            if let Some(room) = room.filter(|&room| pair.len() > room) {
                pair.truncate(room.saturating_sub(1));
                pair.push(separator);
            }
            Ok(pair)
        };
        self.second.into_iter().enumerate().map(join).collect()
    }

    /// Tokens that a text or pair may have where it is to be cut.
    fn room(&self, app: &App) -> Result<Option<usize>, ApiError> {
        let most = app.model.max_model_len.saturating_sub(1);
        match self.truncation {
            None => Ok(None),
            Some(-1) => Ok(Some(most)),
            Some(wanted) => match usize::try_from(wanted) {
                Ok(wanted) if (1..=most).contains(&wanted) => Ok(Some(wanted)),
                _ => {
                    let message = format!("truncate_prompt_tokens must be -1 or 1 to {most}, got {wanted}");
                    Err(ApiError::invalid_field("truncate_prompt_tokens", message))
                }
            },
        }
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let length = (dot(a, a) * dot(b, b)).sqrt();
    if length > 0.0 { dot(a, b) / length } else { 0.0 }
}
