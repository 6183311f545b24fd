//! Builds a response: the blocks so far, the events that tell of them, the object at the end.

use std::sync::Arc;

use baton_core::FinishReason;
use baton_text::AnswerEvent;
use serde_json::Value;

use crate::answer::Writer;
use crate::auth::Tenant;
use crate::blocks::{Block, BlockKind, Blocks, Change};
use crate::error::ApiError;
use crate::generation::{Generation, Update};
use crate::ids;
use crate::logprobs::{self, TokenNames};
use crate::sse::Events;
use crate::state::App;
use crate::store::{Stored, Turns};
use crate::types::responses::{
    ContentPart, IncompleteDetails, InputTokensDetails, OutputItem, OutputTokensDetails, ResponseError,
    ResponseEvent, ResponseObject, ResponseUsage,
};

use super::input;

#[derive(Debug)]
pub struct ResponseBuilder {
    pub app: Arc<App>,
    pub tenant: Tenant,
    pub response: ResponseObject,
    /// The conversation that is answered, without instructions.
    pub turns: Turns,
    blocks: Blocks,
    /// Of the items, in their order.
    item_ids: Vec<String>,
    finish_reason: Option<FinishReason>,
    num_events: u64,
    /// How many alternatives to report; `None` for no log-probabilities.
    pub top_logprobs: Option<usize>,
    /// Of the tokens of the text so far, and those that no event has told of.
    logprobs: Vec<Value>,
    new_logprobs: Vec<Value>,
}

impl ResponseBuilder {
    pub fn new(app: &Arc<App>, tenant: Tenant, response: ResponseObject, turns: Turns) -> Self {
        Self {
            app: Arc::clone(app),
            tenant,
            response,
            turns,
            blocks: Blocks::default(),
            item_ids: Vec::new(),
            finish_reason: None,
            num_events: 0,
            top_logprobs: None,
            logprobs: Vec::new(),
            new_logprobs: Vec::new(),
        }
    }

    /// Takes in what is new.
    pub fn take(&mut self, update: Update) -> Vec<Change> {
        let mut changes = Vec::new();
        self.take_logprobs(&update);
        for event in update.events {
            self.blocks.push(event, &mut changes);
        }
        self.finish_reason = update.finish_reason.or(self.finish_reason);
        if self.finish_reason.is_some() {
            self.blocks.close(&mut changes);
        }
        while self.item_ids.len() < self.blocks.list.len() {
            let prefix = match self.blocks.list[self.item_ids.len()].kind {
                BlockKind::Reasoning => "rs",
                BlockKind::Text => "msg",
                BlockKind::Call { .. } => "fc",
            };
            self.item_ids.push(format!("{prefix}_{}", ids::unique()));
        }
        changes
    }

    /// Only tokens of the text have a place to be told of.
    fn take_logprobs(&mut self, update: &Update) {
        let Some(top) = self.top_logprobs else { return };
        if update.events.iter().all(|event| matches!(event, AnswerEvent::Content(_))) {
            let names = TokenNames { model: &self.app.model, as_ids: false };
            let entries = logprobs::chat(&update.logprobs, top, names).content;
            let entries = entries.iter().filter_map(|entry| serde_json::to_value(entry).ok());
            self.new_logprobs.extend(entries);
            let first_new = self.new_logprobs.len() - update.logprobs.len().min(self.new_logprobs.len());
            self.logprobs.extend_from_slice(&self.new_logprobs[first_new..]);
        }
    }

    /// The response is done: fills in the object and keeps it if it is to be kept.
    pub fn complete(&mut self, generation: &Generation) {
        let is_cut = self.finish_reason == Some(FinishReason::Length);
        self.response.status = if is_cut { "incomplete" } else { "completed" };
        self.response.incomplete_details =
            is_cut.then_some(IncompleteDetails { reason: "max_output_tokens" });
        self.response.usage = Some(usage(generation));
        self.response.output = (0..self.blocks.list.len())
            .map(|index| self.item(index, if is_cut { self.status_if_cut(index) } else { "completed" }))
            .collect();
        self.keep();
    }

    /// The response will not be done.
    pub fn abandon(&mut self, status: &'static str, error: Option<&ApiError>) {
        self.response.status = status;
        self.response.error = error.map(|error| {
            let detail = error.body().error;
            ResponseError { code: "server_error".to_owned(), message: detail.message }
        });
        self.keep();
    }

    fn status_if_cut(&self, index: usize) -> &'static str {
        if index + 1 == self.blocks.list.len() { "incomplete" } else { "completed" }
    }

    /// Storing is a favour: where there is no room, the answer is given all the same.
    fn keep(&mut self) {
        if !self.response.store {
            return;
        }
        for block in &self.blocks.list {
            match &block.kind {
                BlockKind::Reasoning => input::add_reasoning(&mut self.turns, &block.text),
                BlockKind::Text => input::add_text(&mut self.turns, &block.text),
                BlockKind::Call { id, name } => input::add_call(&mut self.turns, id, name, &block.text),
            }
        }
        let stored = Stored {
            response: Arc::new(self.response.clone()),
            turns: Arc::new(std::mem::take(&mut self.turns)),
            cancel: None,
        };
        if self.app.responses.put(&self.tenant, stored).is_err() {
            tracing::warn!(id = self.response.id, "a response is not stored: the store is full");
        }
    }

    fn item(&self, index: usize, status: &'static str) -> OutputItem {
        item(&self.blocks.list[index], self.item_ids[index].clone(), status, &self.logprobs)
    }

    fn push(&mut self, event: ResponseEvent<'_>, out: &mut Events) {
        let event = ResponseEvent { sequence_number: self.num_events, ..event };
        self.num_events += 1;
        out.push_named(event.kind, &event);
    }

    fn push_response(&mut self, kind: &'static str, out: &mut Events) {
        let response = self.response.clone();
        self.push(ResponseEvent { kind, response: Some(&response), ..ResponseEvent::default() }, out);
    }

    fn push_change(&mut self, change: Change, out: &mut Events) {
        let index = match &change {
            Change::Opened(index) | Change::Extended(index, _) | Change::Closed(index) => *index,
        };
        let (item_id, block) = (self.item_ids[index].clone(), self.blocks.list[index].clone());
        let is_call = matches!(block.kind, BlockKind::Call { .. });
        let event = ResponseEvent { output_index: Some(index), ..ResponseEvent::default() };
        let of_item = ResponseEvent { item_id: Some(&item_id), ..event.clone() };
        let of_part = ResponseEvent { content_index: (!is_call).then_some(0), ..of_item.clone() };
        match change {
            Change::Opened(_) => {
                let empty = Block { text: String::new(), ..block };
                let item = Some(item(&empty, item_id.clone(), "in_progress", &[]));
                self.push(ResponseEvent { kind: "response.output_item.added", item, ..event }, out);
                if let Some(part) = part(&empty, &[]) {
                    let kind = "response.content_part.added";
                    self.push(ResponseEvent { kind, part: Some(part), ..of_part }, out);
                }
            }
            Change::Extended(_, text) => {
                let (kind, logprobs) = match block.kind {
                    BlockKind::Text => {
                        ("response.output_text.delta", Some(std::mem::take(&mut self.new_logprobs)))
                    }
                    BlockKind::Reasoning => ("response.reasoning_text.delta", None),
                    BlockKind::Call { .. } => ("response.function_call_arguments.delta", None),
                };
                self.push(ResponseEvent { kind, delta: Some(&text), logprobs, ..of_part }, out);
            }
            Change::Closed(_) => {
                let done = match &block.kind {
                    BlockKind::Text => ResponseEvent {
                        kind: "response.output_text.done",
                        text: Some(&block.text),
                        logprobs: Some(self.logprobs.clone()),
                        ..of_part.clone()
                    },
                    BlockKind::Reasoning => ResponseEvent {
                        kind: "response.reasoning_text.done",
                        text: Some(&block.text),
                        ..of_part.clone()
                    },
                    BlockKind::Call { name, .. } => ResponseEvent {
                        kind: "response.function_call_arguments.done",
                        name: Some(name),
                        arguments: Some(&block.text),
                        ..of_part.clone()
                    },
                };
                self.push(done, out);
                if let Some(part) = part(&block, &self.logprobs) {
                    let kind = "response.content_part.done";
                    self.push(ResponseEvent { kind, part: Some(part), ..of_part }, out);
                }
                let is_cut = self.finish_reason == Some(FinishReason::Length);
                let status = if is_cut { self.status_if_cut(index) } else { "completed" };
                let item = Some(item(&block, item_id.clone(), status, &self.logprobs));
                self.push(ResponseEvent { kind: "response.output_item.done", item, ..event }, out);
            }
        }
    }
}

fn item(block: &Block, id: String, status: &'static str, logprobs: &[Value]) -> OutputItem {
    // An item that has just begun has no parts yet.
    let content = part(block, logprobs).filter(|_| status != "in_progress").into_iter().collect();
    match &block.kind {
        BlockKind::Reasoning => OutputItem::Reasoning { id, summary: Vec::new(), content, status },
        BlockKind::Text => OutputItem::Message { id, role: "assistant", status, content },
        BlockKind::Call { id: call_id, name } => OutputItem::FunctionCall {
            id,
            call_id: call_id.clone(),
            name: name.clone(),
            arguments: block.text.clone(),
            status,
        },
    }
}

fn part(block: &Block, logprobs: &[Value]) -> Option<ContentPart> {
    let text = block.text.clone();
    match block.kind {
        BlockKind::Text => {
            Some(ContentPart::OutputText { text, annotations: Vec::new(), logprobs: logprobs.to_vec() })
        }
        BlockKind::Reasoning => Some(ContentPart::ReasoningText { text }),
        BlockKind::Call { .. } => None,
    }
}

fn usage(generation: &Generation) -> ResponseUsage {
    let usage = generation.usage();
    ResponseUsage {
        input_tokens: usage.prompt_tokens,
        input_tokens_details: InputTokensDetails { cached_tokens: usage.prompt_tokens_details.cached_tokens },
        output_tokens: usage.completion_tokens,
        output_tokens_details: OutputTokensDetails {
            reasoning_tokens: usage.completion_tokens_details.map_or(0, |details| details.reasoning_tokens),
        },
        total_tokens: usage.total_tokens,
    }
}

impl Writer for ResponseBuilder {
    fn begin(&mut self, _: &Generation, out: &mut Events) {
        self.push_response("response.created", out);
        self.push_response("response.in_progress", out);
    }

    fn update(&mut self, _: &Generation, update: Update, out: &mut Events) {
        for change in self.take(update) {
            self.push_change(change, out);
        }
    }

    fn end(&mut self, generation: &Generation, out: &mut Events) {
        self.complete(generation);
        let is_complete = self.response.status == "completed";
        self.push_response(if is_complete { "response.completed" } else { "response.incomplete" }, out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        self.abandon("failed", Some(error));
        self.push_response("response.failed", out);
    }

    fn ends_with_done(&self) -> bool {
        false
    }
}
