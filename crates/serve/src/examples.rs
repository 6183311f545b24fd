//! Examples for `/openapi.json` and `/docs`: a body for the routes that take one. Each is sent by a test.

use serde_json::{Value, json};

/// A body that the route answers, with few tokens.
pub fn request(path: &str) -> Option<Value> {
    let question = || json!([{"role": "user", "content": "Why is the sky blue?"}]);
    let body = match path {
        "/v1/chat/completions" => json!({"messages": question(), "temperature": 0.2, "max_tokens": 32}),
        "/v1/chat/completions/batch" => json!({"messages": [question(), question()], "max_tokens": 16}),
        "/v1/chat/completions/input_tokens" => json!({"messages": question()}),
        "/v1/completions" => json!({"prompt": "Once upon a time", "max_tokens": 16}),
        "/v1/responses" => json!({"input": "Why is the sky blue?", "max_output_tokens": 32}),
        "/v1/messages" | "/v1/messages/count_tokens" => json!({"messages": question(), "max_tokens": 32}),
        "/v1/embeddings" => json!({"input": ["A river", "A mountain"]}),
        "/v1/graphs" => json!({"id": "ring", "edge_index": [[0, 1, 2], [1, 2, 0]],
            "features": [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]}),
        "/v1/graphs/{id}/embeddings" => json!({"nodes": [0, 2], "fan_outs": [10, 25], "seed": 1}),
        "/v1/rerank" | "/v2/rerank" => {
            json!({"query": "Where is water?", "documents": ["A river", "A mountain"], "top_n": 1})
        }
        "/v1/score" => json!({"text_1": "A river", "text_2": ["A stream", "A mountain"]}),
        "/tokenize" => json!({"prompt": "Why is the sky blue?"}),
        "/detokenize" => json!({"tokens": [11, 12, 13]}),
        _ => return None,
    };
    Some(body)
}

/// The heading that a route stands under.
pub fn group(path: &str) -> &'static str {
    let begins = |beginnings: &[&str]| beginnings.iter().any(|beginning| path.starts_with(beginning));
    if begins(&["/v1/responses"]) {
        "Responses"
    } else if begins(&["/v1/messages"]) {
        "Messages"
    } else if begins(&["/v1/graphs"]) {
        "Graphs"
    } else if begins(&["/v1/", "/v2/"]) {
        "Chat and text"
    } else if begins(&["/tokenize", "/detokenize"]) {
        "Tokens"
    } else if begins(&["/api/"]) {
        "Ollama"
    } else if begins(&["/completion", "/infill", "/apply-template", "/props", "/slots"]) {
        "llama.cpp"
    } else {
        "Operation"
    }
}
