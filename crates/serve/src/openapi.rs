//! `/openapi.json`, made from the route table and from the types that requests are read into and answers written
//! from, so that it cannot say anything else than they do.

use std::sync::LazyLock;

use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};

use crate::error::ErrorBody;
use crate::routes::{ROUTES, Route};
use crate::types::chat::{ChatChunk, ChatFields, ChatResponse};
use crate::types::common::SamplingFields;
use crate::types::completions::{CompletionChunk, CompletionFields, CompletionResponse};
use crate::types::embeddings::{EmbeddingRequest, EmbeddingResponse};
use crate::types::messages::{MessageError, MessageEvent, MessageFields, MessageResponse, TokenCount};
use crate::types::responses::{DeletedResponse, InputItems, ResponseEvent, ResponseFields, ResponseObject};
use crate::types::structured::StructuredFields;
use crate::types::text::{
    DetokenizeRequest, DetokenizeResponse, Load, ModelCard, ModelList, RouterLoad, TokenizeRequest,
    TokenizeResponse, TokenizerInfo, Version,
};

/// The document, built once.
pub fn document() -> &'static Value {
    static DOCUMENT: LazyLock<Value> = LazyLock::new(build);
    &DOCUMENT
}

struct Schemas {
    requests: SchemaGenerator,
    responses: SchemaGenerator,
}

impl Schemas {
    fn request<T: JsonSchema>(&mut self) -> Schema {
        self.requests.subschema_for::<T>()
    }

    fn response<T: JsonSchema>(&mut self) -> Schema {
        self.responses.subschema_for::<T>()
    }
}

fn build() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let responses = settings.clone().for_serialize().into_generator();
    let mut schemas = Schemas { requests: settings.into_generator(), responses };
    let mut paths = Map::new();
    for route in ROUTES {
        let item = paths.entry(route.path).or_insert_with(|| json!({}));
        item[route.method] = operation(route, &mut schemas);
    }
    let mut components = schemas.requests.take_definitions(true);
    components.extend(schemas.responses.take_definitions(true));
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The API of OpenAI with vLLM's additions.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    })
}

fn operation(route: &Route, schemas: &mut Schemas) -> Value {
    let error = if route.path.starts_with("/v1/messages") {
        schemas.response::<MessageError>()
    } else {
        schemas.response::<ErrorBody>()
    };
    let mut operation = json!({
        "operationId": operation_id(route),
        "summary": route.summary,
        "responses": {
            "200": {"description": "As asked", "content": answer(route, schemas)},
            "default": {"description": "Why not", "content": {"application/json": {"schema": error}}},
        },
    });
    if let Some(body) = request_body(route.path, schemas) {
        operation["requestBody"] =
            json!({"required": true, "content": {"application/json": {"schema": body}}});
    }
    if route.path.contains("{id}") {
        operation["parameters"] =
            json!([{"name": "id", "in": "path", "required": true, "schema": {"type": "string"}}]);
    }
    operation
}

fn operation_id(route: &Route) -> String {
    let words = route.path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    std::iter::once(route.method).chain(words).collect::<Vec<_>>().join("_")
}

fn request_body(path: &str, schemas: &mut Schemas) -> Option<Value> {
    let schema = match path {
        "/v1/chat/completions" => {
            json!({"allOf": [schemas.request::<ChatFields>(), schemas.request::<SamplingFields>(),
                schemas.request::<StructuredFields>()]})
        }
        "/v1/completions" => {
            json!({"allOf": [schemas.request::<CompletionFields>(), schemas.request::<SamplingFields>(),
                schemas.request::<StructuredFields>()]})
        }
        "/v1/responses" => {
            json!({"allOf": [schemas.request::<ResponseFields>(), schemas.request::<SamplingFields>()]})
        }
        "/v1/messages" | "/v1/messages/count_tokens" => schemas.request::<MessageFields>().into(),
        "/v1/embeddings" => schemas.request::<EmbeddingRequest>().into(),
        "/tokenize" => schemas.request::<TokenizeRequest>().into(),
        "/detokenize" => schemas.request::<DetokenizeRequest>().into(),
        _ => return None,
    };
    Some(schema)
}

fn answer(route: &Route, schemas: &mut Schemas) -> Value {
    let json = |schema: Schema| json!({"application/json": {"schema": schema}});
    let or_events = |whole: Schema, event: Schema| json!({"application/json": {"schema": whole}, "text/event-stream": {"itemSchema": event}});
    match route.path {
        "/v1/models" => json(schemas.response::<ModelList>()),
        "/v1/models/{id}" => json(schemas.response::<ModelCard>()),
        "/v1/chat/completions" => {
            let whole = schemas.response::<ChatResponse>();
            or_events(whole, schemas.response::<ChatChunk<'_>>())
        }
        "/v1/completions" => {
            let whole = schemas.response::<CompletionResponse>();
            or_events(whole, schemas.response::<CompletionChunk<'_>>())
        }
        "/v1/responses" => {
            let whole = schemas.response::<ResponseObject>();
            or_events(whole, schemas.response::<ResponseEvent<'_>>())
        }
        "/v1/responses/{id}" if route.method == "delete" => json(schemas.response::<DeletedResponse>()),
        "/v1/responses/{id}" | "/v1/responses/{id}/cancel" => json(schemas.response::<ResponseObject>()),
        "/v1/messages" => {
            let whole = schemas.response::<MessageResponse>();
            or_events(whole, schemas.response::<MessageEvent>())
        }
        "/v1/messages/count_tokens" => json(schemas.response::<TokenCount>()),
        "/v1/embeddings" => json(schemas.response::<EmbeddingResponse>()),
        "/tokenize" => json(schemas.response::<TokenizeResponse>()),
        "/detokenize" => json(schemas.response::<DetokenizeResponse>()),
        "/load" => json(schemas.response::<Load>()),
        "/get_load" => json(schemas.response::<RouterLoad>()),
        "/tokenizer_info" => json(schemas.response::<TokenizerInfo>()),
        "/v1/responses/{id}/input_items" => json(schemas.response::<InputItems>()),
        "/version" => json(schemas.response::<Version>()),
        "/openapi.json" => json!({"application/json": {"schema": {"type": "object"}}}),
        "/metrics" => json!({"text/plain": {"schema": {"type": "string"}}}),
        "/docs" => json!({"text/html": {"schema": {"type": "string"}}}),
        _ => json!({}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every `$ref` anywhere in the document.
    fn references<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
        match value {
            Value::Object(map) => {
                found.extend(map.get("$ref").and_then(Value::as_str));
                map.values().for_each(|value| references(value, found));
            }
            Value::Array(list) => list.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }

    #[test]
    fn every_reference_leads_somewhere() {
        let document = document();
        let mut found = Vec::new();
        references(document, &mut found);
        assert!(found.len() > 10);
        for reference in found {
            let pointer = reference.strip_prefix('#').expect("within the document");
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
    }

    #[test]
    fn the_fields_that_matter_are_described() {
        let schemas = &document()["components"]["schemas"];
        assert!(schemas["ChatFields"]["properties"]["messages"].is_object());
        assert_eq!(schemas["ChatFields"]["required"], json!(["messages"]));
        assert_eq!(schemas["CompletionFields"]["required"], json!(["prompt"]));
        assert!(schemas["SamplingFields"]["properties"]["min_p"].is_object());
        assert!(schemas["StructuredFields"]["properties"]["response_format"].is_object());
        assert!(document()["paths"]["/v1/models/{id}"]["get"].is_object());
    }
}
