//! vLLM's gRPC services beside the HTTP server.

use std::net::SocketAddr;

use anyhow::Result;
use baton_events::KvEventsConfig;
use baton_grpc::{ControlFacts, GrpcServer};
use baton_serve::Server;

use crate::errors::{WithHint, hinted};
use crate::serve_args::ServeArgs;

/// Starts them where they are asked for. `model_id` is where this server has found its tokenizer; others look for it there.
pub async fn start(
    args: &ServeArgs,
    server: &Server,
    model_id: String,
    kv_events: Option<&KvEventsConfig>,
) -> Result<Option<GrpcServer>> {
    let Some(port) = args.listen.grpc_port else { return Ok(None) };
    let host = args.listen.host;
    if args.listen.ssl_certfile.is_some() && !host.is_loopback() {
        return Err(hinted(
            format!("--grpc-port would listen on {host} without TLS"),
            "leave it out, or serve on loopback and let a proxy speak TLS",
        ));
    }
    let facts = ControlFacts {
        model_id,
        max_batched_tokens: args.engine.max_num_batched_tokens.unwrap_or(0),
        kv_events: kv_events.cloned(),
    };
    let address = SocketAddr::new(host, port);
    let grpc = GrpcServer::start(server.frontend(), facts, address, args.listen.max_connections)
        .await
        .with_hint(|| "is another server running?".to_owned())?;
    tracing::info!(address = %grpc.address(), "serving gRPC");
    Ok(Some(grpc))
}
