//! `vllm.Inference`: one answer, or a stream of what is new. Nothing runs in the background: a stream is polled by the connection that
//! it goes to, and a client that goes away drops it, which aborts the request.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use baton_serve::{Frontend, Generation, Tenant, Update};
use futures_core::Stream;
use tonic::{Request, Response, Status};
use vllm_proto::inference_server::Inference;
use vllm_proto::{GenerateRequest, GenerateResponse};

use crate::abort::{Abortable, Running};
use crate::request::convert;
use crate::response::Writer;
use crate::server::status;

#[derive(Clone, Debug)]
pub struct InferenceService {
    pub frontend: Frontend,
    pub running: Running,
}

impl InferenceService {
    async fn start(&self, request: Request<GenerateRequest>, streams: bool) -> Result<Answer, Status> {
        let tenant = tenant(&request)?;
        let request = request.into_inner();
        let id = request.request_id.clone();
        // Named before it begins: an abort that comes early must find it.
        let abortable = if id.is_empty() {
            None
        } else {
            let taken = || Status::already_exists("a request of this request_id is running: choose another");
            Some(self.running.enter(tenant.id(), id).ok_or_else(taken)?)
        };
        let (plain, wanted) = convert(request, streams)?;
        let generation = self.frontend.generate(&tenant, plain).await.map_err(|error| status(&error))?;
        let writer = Writer::new(wanted, generation.num_choices());
        Ok(Answer {
            generation: Some(generation),
            abortable,
            writer,
            updates: Vec::new(),
            ready: VecDeque::new(),
        })
    }
}

/// Whose request it is, as the connection's side has found out.
pub fn tenant<T>(request: &Request<T>) -> Result<Tenant, Status> {
    let tenant = request.extensions().get::<Tenant>();
    tenant.cloned().ok_or_else(|| Status::internal("the request was not authenticated"))
}

#[tonic::async_trait]
impl Inference for InferenceService {
    type GenerateStreamStream = Answer;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<GenerateResponse>, Status> {
        let mut answer = self.start(request, false).await?;
        let Some(mut generation) = answer.generation.take() else { return Err(Status::cancelled("aborted")) };
        let aborted = async {
            match &mut answer.abortable {
                Some(abortable) => drop((&mut abortable.aborted).await),
                None => std::future::pending().await,
            }
        };
        let updates = tokio::select! {
            updates = generation.collect() => updates.map_err(|error| status(&error))?,
            () = aborted => return Err(Status::cancelled("the request was aborted")),
        };
        let update = updates.into_iter().next().unwrap_or_default();
        Ok(Response::new(answer.writer.response(&generation, update)))
    }

    async fn generate_stream(&self, request: Request<GenerateRequest>) -> Result<Response<Answer>, Status> {
        Ok(Response::new(self.start(request, true).await?))
    }
}

/// What is sent while it is made.
#[derive(Debug)]
pub struct Answer {
    /// `None` once everything has ended.
    generation: Option<Generation>,
    abortable: Option<Abortable>,
    writer: Writer,
    updates: Vec<Update>,
    ready: VecDeque<GenerateResponse>,
}

impl Answer {
    fn is_aborted(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(abortable) = &mut self.abortable else { return false };
        Pin::new(&mut abortable.aborted).poll(cx).is_ready()
    }
}

impl Stream for Answer {
    type Item = Result<GenerateResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            if let Some(response) = this.ready.pop_front() {
                return Poll::Ready(Some(Ok(response)));
            }
            if this.generation.is_some() && this.is_aborted(cx) {
                this.generation = None;
                this.abortable = None;
                this.ready.extend(this.writer.aborted());
                continue;
            }
            let Some(generation) = &mut this.generation else { return Poll::Ready(None) };
            match generation.poll_updates(cx, &mut this.updates) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(true)) => {
                    for update in this.updates.drain(..) {
                        this.ready.push_back(this.writer.response(generation, update));
                    }
                }
                Poll::Ready(Ok(false)) => this.generation = None,
                Poll::Ready(Err(error)) => {
                    this.generation = None;
                    return Poll::Ready(Some(Err(status(&error))));
                }
            }
        }
    }
}
