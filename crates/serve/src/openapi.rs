//! `/openapi.json`, made from the route table and from the types that requests are read into and answers written
//! from, so that it cannot say anything else than they do.

use std::sync::LazyLock;

use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};

use crate::error::ErrorBody;
use crate::examples;
use crate::routes::{ROUTES, Route};
use crate::types::chat::{BatchChatFields, ChatChunk, ChatFields, ChatResponse};
use crate::types::common::SamplingFields;
use crate::types::completions::{CompletionChunk, CompletionFields, CompletionResponse};
use crate::types::embeddings::{EmbeddingRequest, EmbeddingResponse};
use crate::types::graphs::{
    DeletedGraph, GraphEmbeddingRequest, GraphEmbeddings, GraphInfo, GraphList, GraphUpload,
};
use crate::types::llamacpp::{AppliedTemplate, LlamaAnswer, LlamaChunk, LlamaFields, LlamaProps, LlamaSlot};
use crate::types::messages::{MessageError, MessageEvent, MessageFields, MessageResponse, TokenCount};
use crate::types::ollama::{
    OllamaAnswer, OllamaChat, OllamaError, OllamaGenerate, OllamaInfo, OllamaModels, OllamaShow,
};
use crate::types::rerank::{RerankRequest, RerankResponse, ScoreRequest, ScoreResponse};
use crate::types::responses::{DeletedResponse, InputItems, ResponseEvent, ResponseFields, ResponseObject};
use crate::types::stats::Stats;
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
    } else if route.path.starts_with("/api/") {
        schemas.response::<OllamaError>()
    } else {
        schemas.response::<ErrorBody>()
    };
    let mut operation = json!({
        "operationId": operation_id(route),
        "summary": route.summary,
        "tags": [examples::group(route.path)],
        "responses": {
            "200": {"description": "As asked", "content": answer(route, schemas)},
            "default": {"description": "Why not", "content": {"application/json": {"schema": error}}},
        },
    });
    let takes_body = route.method == "post";
    if let Some(body) = takes_body.then(|| request_body(route.path, schemas)).flatten() {
        let mut content = json!({"schema": body});
        if let Some(example) = examples::request(route.path) {
            content["example"] = example;
        }
        operation["requestBody"] = json!({"required": true, "content": {"application/json": content}});
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
        "/v1/chat/completions/batch" => {
            json!({"allOf": [schemas.request::<BatchChatFields>(), schemas.request::<SamplingFields>(),
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
        "/v1/graphs" => schemas.request::<GraphUpload>().into(),
        "/v1/graphs/{id}/embeddings" => schemas.request::<GraphEmbeddingRequest>().into(),
        "/v1/rerank" | "/v2/rerank" => schemas.request::<RerankRequest>().into(),
        "/v1/score" => schemas.request::<ScoreRequest>().into(),
        "/tokenize" | "/apply-template" | "/v1/chat/completions/input_tokens" => {
            schemas.request::<TokenizeRequest>().into()
        }
        "/detokenize" => schemas.request::<DetokenizeRequest>().into(),
        "/api/chat" => schemas.request::<OllamaChat>().into(),
        "/api/generate" => schemas.request::<OllamaGenerate>().into(),
        "/api/show" => schemas.request::<OllamaShow>().into(),
        "/completion" | "/infill" => {
            json!({"allOf": [schemas.request::<LlamaFields>(), schemas.request::<SamplingFields>(),
                schemas.request::<StructuredFields>()]})
        }
        _ => return None,
    };
    Some(schema)
}

fn answer(route: &Route, schemas: &mut Schemas) -> Value {
    let json = |schema: Schema| json!({"application/json": {"schema": schema}});
    // An item of such a stream is an event. Its data is JSON, but for the `[DONE]` at the end of OpenAI's streams.
    let or_events = |whole: Schema, event: Schema| {
        let data = json!({"type": "string", "contentSchema": event});
        let properties = json!({"event": {"type": "string"}, "data": data});
        let item = json!({"type": "object", "required": ["data"], "properties": properties});
        json!({"application/json": {"schema": whole}, "text/event-stream": {"itemSchema": item}})
    };
    match route.path {
        "/v1/models" => json(schemas.response::<ModelList>()),
        "/v1/models/{id}" => json(schemas.response::<ModelCard>()),
        "/v1/chat/completions" => {
            let whole = schemas.response::<ChatResponse>();
            or_events(whole, schemas.response::<ChatChunk<'_>>())
        }
        "/v1/chat/completions/batch" => json(schemas.response::<ChatResponse>()),
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
        "/v1/messages/count_tokens" | "/v1/chat/completions/input_tokens" => {
            json(schemas.response::<TokenCount>())
        }
        "/v1/embeddings" => json(schemas.response::<EmbeddingResponse>()),
        "/v1/graphs" if route.method == "get" => json(schemas.response::<GraphList>()),
        "/v1/graphs/{id}" if route.method == "delete" => json(schemas.response::<DeletedGraph>()),
        "/v1/graphs" | "/v1/graphs/{id}" => json(schemas.response::<GraphInfo>()),
        "/v1/graphs/{id}/embeddings" => json(schemas.response::<GraphEmbeddings>()),
        "/v1/rerank" | "/v2/rerank" => json(schemas.response::<RerankResponse>()),
        "/v1/score" => json(schemas.response::<ScoreResponse>()),
        "/tokenize" => json(schemas.response::<TokenizeResponse>()),
        "/detokenize" => json(schemas.response::<DetokenizeResponse>()),
        "/api/chat" | "/api/generate" => {
            let line = schemas.response::<OllamaAnswer>();
            json!({"application/json": {"schema": line}, "application/x-ndjson": {"itemSchema": line}})
        }
        "/api/tags" | "/api/ps" => json(schemas.response::<OllamaModels>()),
        "/api/show" => json(schemas.response::<OllamaInfo>()),
        "/completion" | "/infill" => {
            // Several prompts are answered with a list.
            let (one, many) = (schemas.response::<LlamaAnswer>(), schemas.response::<Vec<LlamaAnswer>>());
            or_events(schemars::json_schema!({"anyOf": [one, many]}), schemas.response::<LlamaChunk>())
        }
        "/apply-template" => json(schemas.response::<AppliedTemplate>()),
        "/props" => json(schemas.response::<LlamaProps>()),
        "/slots" => json(schemas.response::<Vec<LlamaSlot>>()),
        "/load" => json(schemas.response::<Load>()),
        "/get_load" => json(schemas.response::<RouterLoad>()),
        "/tokenizer_info" => json(schemas.response::<TokenizerInfo>()),
        "/v1/responses/{id}/input_items" => json(schemas.response::<InputItems>()),
        "/stats" => json(schemas.response::<Stats>()),
        "/version" | "/api/version" => json(schemas.response::<Version>()),
        "/openapi.json" => json!({"application/json": {"schema": {"type": "object"}}}),
        "/kv_events" => json!({"text/event-stream": {"itemSchema": {"type": "object"}}}),
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
    fn every_field_of_a_v1_request_is_described() {
        let mut generator = SchemaSettings::draft2020_12().into_generator();
        let mut schemas = Schemas { requests: generator.clone(), responses: generator.clone() };
        // Other servers' dialects are described by those servers.
        for route in ROUTES.iter().filter(|route| route.path.starts_with("/v1/")) {
            request_body(route.path, &mut schemas);
        }
        generator = schemas.requests;
        let definitions = generator.take_definitions(true);
        assert!(definitions.len() > 10);
        for (name, schema) in definitions {
            let properties = schema["properties"].as_object().into_iter().flatten();
            for (field, property) in properties {
                let words = property["description"].as_str().unwrap_or_default();
                let reference = property["$ref"].is_string() || property["anyOf"].is_array();
                assert!(!words.is_empty() || reference, "{name}.{field} has no description");
            }
        }
    }

    #[test]
    fn every_v1_route_that_takes_a_body_has_an_example() {
        for (path, methods) in document()["paths"].as_object().unwrap() {
            for operation in methods.as_object().unwrap().values() {
                let content = &operation["requestBody"]["content"]["application/json"];
                let needs_one = content.is_object() && path.starts_with("/v1/");
                assert!(!needs_one || content["example"].is_object(), "{path}");
                assert!(operation["tags"][0].is_string());
            }
        }
    }

    #[test]
    fn the_fields_that_matter_are_described() {
        let schemas = &document()["components"]["schemas"];
        for name in ["ChatFieldsOfMessages", "ChatFieldsOfConversations"] {
            assert!(schemas[name]["properties"]["messages"].is_object());
            assert_eq!(schemas[name]["required"], json!(["messages"]));
        }
        assert_eq!(schemas["CompletionFields"]["required"], json!(["prompt"]));
        assert!(schemas["SamplingFields"]["properties"]["min_p"].is_object());
        assert!(schemas["StructuredFields"]["properties"]["response_format"].is_object());
        assert!(document()["paths"]["/v1/models/{id}"]["get"].is_object());
    }
}
