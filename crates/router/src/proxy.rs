//! The way of a request: read, placed, sent, and its answer passed on.
//!
//! A worker that cannot be reached, breaks off before the first byte of its answer, or says that it is busy or going away
//! costs a retry with another one. After the first byte nothing is repeated.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::{Request, Response, StatusCode};
use tokio::time::Sleep;

use crate::body::{BodySummary, Kind};
use crate::config::{Policy, Role};
use crate::error::{Refusal, Reply, lost_event};
use crate::policy::{Belongs, Candidate, Choice};
use crate::server::{App, Served};
use crate::upstream::{Answer, AnswerBody, Question, SendError, question, strip_hop_by_hop};
use crate::worker::{Taken, Worker, prefix_key, session_key};
use crate::{admin, merge, pd, responses, tokenize};

/// Which worker answered.
const WORKER_HEADER: HeaderName = HeaderName::from_static("x-baton-worker");
const REQUEST_ID: &str = "x-request-id";

/// A request that was read and is to be placed.
pub struct RoutedRequest {
    pub question: Question,
    pub kind: Kind,
    pub body: BodySummary,
    pub belongs: Belongs,
    /// Tokens of the prompt that workers have cached.
    pub matches: Vec<(u32, usize)>,
    /// The one worker that can answer, where there is only one.
    pub owner: Option<u32>,
}

/// Answers a request. Errors are answers too.
pub async fn handle(app: Arc<App>, request: Request<Incoming>) -> Reply {
    let started = Instant::now();
    if let Some(reply) = admin::handle(&app, &request) {
        return reply;
    }
    match forward(&app, request, started).await {
        Ok(reply) => reply,
        Err(refusal) => {
            app.metrics.refused.fetch_add(1, Ordering::Relaxed);
            refusal.reply()
        }
    }
}

async fn forward(app: &Arc<App>, request: Request<Incoming>, started: Instant) -> Result<Reply, Refusal> {
    let served = app.admit()?;
    let (parts, body) = request.into_parts();
    let body = read_body(body, app.config.max_body_bytes).await?;
    let read = Instant::now();
    let path = parts.uri.path().to_owned();
    if let Some(reply) = merge::handle(app, &parts, &body).await {
        return Ok(reply);
    }
    let mut question = question(&parts, body);
    if !question.headers.contains_key(REQUEST_ID) {
        question.headers.insert(REQUEST_ID, request_id());
    }
    let routed = place(app, question, &path).await;
    app.metrics.overhead.observe(read.elapsed());
    let (answer, taken) =
        if matches!(routed.kind, Kind::Chat | Kind::Completion) && app.fleet.is_disaggregated() {
            pd::send(app, routed).await?
        } else {
            send(app, &routed, |role| role != Role::Prefill).await?
        };
    app.metrics.first_byte.observe(started.elapsed());
    if let Some(id) = responses::created(&path, answer.body.first()) {
        app.responses.note(id, taken.worker().id);
    }
    Ok(pass_on(app, answer, taken, served, started))
}

async fn read_body(body: Incoming, limit: usize) -> Result<Bytes, Refusal> {
    // What is too long by its own word is not read at all.
    if body.size_hint().lower() > limit as u64 {
        return Err(Refusal::TooLarge { limit });
    }
    match Limited::new(body, limit).collect().await {
        Ok(whole) => Ok(whole.to_bytes()),
        Err(cause) if cause.is::<http_body_util::LengthLimitError>() => Err(Refusal::TooLarge { limit }),
        Err(cause) => Err(Refusal::Body(cause.to_string())),
    }
}

/// Finds out where a request belongs.
async fn place(app: &Arc<App>, question: Question, path: &str) -> RoutedRequest {
    let kind = Kind::of(question.method.as_str(), path);
    let max_text = app.config.prefix_bytes;
    let mut body =
        if kind.generates() { BodySummary::read(&question.body, max_text) } else { BodySummary::default() };
    let header = question.headers.get(&app.config.session_header).and_then(|value| value.to_str().ok());
    let session = header.or(body.user.as_deref()).map(session_key);
    let prefix = prefix_key(&body.text, &body.token_ids, app.config.prefix_bytes);
    let mut matches = Vec::new();
    if app.chooser.policy() == Policy::LongestPrefix && kind.generates() && !app.index().is_empty() {
        if body.token_ids.is_empty() {
            body.token_ids = tokenize::tokens(app, &question, kind, &body).await.unwrap_or_default();
        }
        matches = app.index().matches(&body.token_ids);
    }
    let owner = responses::named(path).or(body.previous_response_id.as_deref());
    let owner = owner.and_then(|id| app.responses.owner(id));
    let belongs = Belongs { session, prefix, num_prompt_tokens: body.num_prompt_tokens() };
    RoutedRequest { question, kind, body, belongs, matches, owner }
}

/// Sends a request to a worker whose role is allowed, and to another one if it comes to nothing.
pub async fn send(
    app: &Arc<App>,
    routed: &RoutedRequest,
    allowed: impl Fn(Role) -> bool,
) -> Result<(Answer, Taken), Refusal> {
    let mut tried: Vec<u32> = Vec::new();
    let mut last: Option<(Answer, Taken)> = None;
    let mut cause = String::new();
    for attempt in 0..app.config.max_attempts.max(1) {
        let Some((worker, choice)) = pick(app, routed, &allowed, &tried) else { break };
        if !worker.breaker().allow(Instant::now()) {
            tried.push(worker.id);
            continue;
        }
        if attempt > 0 {
            app.metrics.retries.fetch_add(1, Ordering::Relaxed);
        }
        app.metrics.chose(choice);
        tried.push(worker.id);
        let matched = routed.matched(worker.id);
        let taken = worker.take(routed.belongs.num_prompt_tokens, matched);
        match worker.upstream.ask(&routed.question, app.config.request_timeout).await {
            Ok(answer) if is_turned_away(answer.parts.status) => {
                // The worker is well and busy, or about to go.
                worker.succeeded();
                last = Some((answer, taken));
            }
            Ok(answer) => {
                if answer.parts.status == StatusCode::INTERNAL_SERVER_ERROR {
                    worker.failed();
                } else {
                    worker.succeeded();
                }
                return Ok((answer, taken));
            }
            Err(error @ SendError::Request(_)) => return Err(Refusal::Wrong(format!("the worker {error}"))),
            Err(error) => {
                worker.failed();
                tracing::warn!(worker = worker.url(), reason = error.reason(), "request failed: {error}");
                cause = format!("{} {error}", worker.url());
                // A worker that thought for minutes is not helped by a second one that does.
                if matches!(error, SendError::Timeout(_)) {
                    return Err(Refusal::Failed(format!("the worker {error}")));
                }
            }
        }
    }
    match last {
        Some(answer) => Ok(answer),
        None if cause.is_empty() => Err(no_worker(app)),
        None => Err(Refusal::Failed(format!("no worker could answer; the last one: {cause}"))),
    }
}

/// Another worker may take what this one does not.
fn is_turned_away(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT
    )
}

fn no_worker(app: &App) -> Refusal {
    let workers = app.fleet.all();
    let usable = workers.iter().filter(|worker| worker.is_healthy() && !worker.is_draining()).count();
    if usable > 0 && workers.iter().any(|worker| worker.num_requests() >= app.config.max_requests_per_worker)
    {
        return Refusal::Busy { limit: app.config.max_requests_per_worker };
    }
    Refusal::NoWorker(format!("{} of {} are healthy", usable, workers.len()))
}

impl RoutedRequest {
    pub fn matched(&self, worker: u32) -> usize {
        self.matches.iter().find(|(id, _)| *id == worker).map_or(0, |(_, matched)| *matched)
    }
}

/// Chooses among the workers that were not tried.
pub fn pick(
    app: &App,
    routed: &RoutedRequest,
    allowed: &impl Fn(Role) -> bool,
    tried: &[u32],
) -> Option<(Arc<Worker>, Choice)> {
    let now = Instant::now();
    let workers = app.fleet.all();
    if let Some(owner) = routed.owner.filter(|owner| !tried.contains(owner))
        && let Some(worker) = workers.iter().find(|worker| worker.id == owner)
    {
        return Some((Arc::clone(worker), Choice::Session));
    }
    let usable = |worker: &&Arc<Worker>| {
        allowed(worker.role())
            && !tried.contains(&worker.id)
            && worker.is_available(now, app.config.max_requests_per_worker)
    };
    let usable: Vec<&Arc<Worker>> = workers.iter().filter(usable).collect();
    // A model that nobody is known to serve is refused by a worker, in its own words.
    let model = routed.body.model.as_deref().unwrap_or_default();
    let serving: Vec<&Arc<Worker>> = usable.iter().copied().filter(|worker| worker.serves(model)).collect();
    let workers = if serving.is_empty() || model.is_empty() { usable } else { serving };
    if workers.is_empty() {
        return None;
    }
    let candidate = |worker: &&Arc<Worker>| Candidate {
        key: worker.key,
        num_requests: worker.load(),
        recent_tokens: worker.recent_tokens(now),
        matched_tokens: routed.matched(worker.id),
    };
    let candidates: Vec<Candidate> = workers.iter().map(candidate).collect();
    let (index, choice) = app.chooser.choose(&candidates, &routed.belongs);
    Some((Arc::clone(workers[index]), choice))
}

/// Passes an answer on as it comes.
fn pass_on(app: &Arc<App>, answer: Answer, taken: Taken, served: Served, started: Instant) -> Reply {
    let Answer { mut parts, body } = answer;
    strip_hop_by_hop(&mut parts.headers);
    if let Ok(name) = HeaderValue::from_str(taken.worker().upstream.authority()) {
        parts.headers.insert(WORKER_HEADER, name);
    }
    let is_stream = is_event_stream(&parts.headers);
    let limit = app.config.stream_timeout;
    let body = PassedBody {
        body,
        app: Arc::clone(app),
        taken,
        _served: served,
        is_stream,
        ended: false,
        started,
        last: Instant::now(),
        limit,
        timer: Box::pin(tokio::time::sleep(limit)),
    };
    Response::from_parts(parts, body.boxed())
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("text/event-stream"))
}

/// An answer on its way to the client, with what is counted of it.
struct PassedBody {
    body: AnswerBody,
    app: Arc<App>,
    taken: Taken,
    _served: Served,
    is_stream: bool,
    ended: bool,
    started: Instant,
    last: Instant,
    limit: Duration,
    /// Rings some time after the limit; then it is looked whether anything has come.
    timer: Pin<Box<Sleep>>,
}

impl PassedBody {
    fn fail(&mut self, error: SendError) -> Result<Frame<Bytes>, SendError> {
        self.ended = true;
        self.app.metrics.broken_streams.fetch_add(1, Ordering::Relaxed);
        self.taken.worker().failed();
        tracing::warn!(worker = self.taken.worker().url(), "answer lost: the worker {error}");
        // A stream can say so; of anything else the client sees that it is cut short.
        if self.is_stream { Ok(Frame::data(lost_event(&error))) } else { Err(error) }
    }
}

impl Body for PassedBody {
    type Data = Bytes;
    type Error = SendError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, SendError>>> {
        let this = &mut *self;
        if this.ended {
            return Poll::Ready(None);
        }
        match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                this.last = Instant::now();
                let len = frame.data_ref().map_or(0, Bytes::len);
                this.app.metrics.streamed_bytes.fetch_add(len as u64, Ordering::Relaxed);
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(this.fail(error))),
            Poll::Ready(None) => {
                this.ended = true;
                Poll::Ready(None)
            }
            Poll::Pending => {
                while this.timer.as_mut().poll(cx).is_ready() {
                    let due = this.last + this.limit;
                    if due <= Instant::now() {
                        let late = SendError::Timeout(this.limit.as_secs());
                        return Poll::Ready(Some(this.fail(late)));
                    }
                    this.timer.as_mut().reset(due.into());
                }
                Poll::Pending
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for PassedBody {
    fn drop(&mut self) {
        self.app.metrics.duration.observe(self.started.elapsed());
    }
}

/// For log lines of both sides.
fn request_id() -> HeaderValue {
    HeaderValue::from_str(&crate::server::new_id()).expect("hex digits are a header")
}
