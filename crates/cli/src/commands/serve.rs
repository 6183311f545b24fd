//! `baton serve`: loads a model and answers HTTP until it is told to stop. The server itself is `baton-serve`; here it
//! gets its flags, its log and its signals.

use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use baton_core::SamplingParams;
use baton_engine::EngineConfig;
use baton_events::{EventHub, KvEventsConfig, Publisher};
use baton_graph::{GraphConfig, GraphEngine, GraphModel, GraphService};
use baton_serve::{
    GraphServing, ModelText, PublicContent, PublicPrefix, Reserved, ServeError, ServedModel, Server,
    ServerConfig, SystemPrompt, TlsFiles,
};
use serde_json::Map;
use tokio::signal::unix::{SignalKind, signal};

use crate::commands::graph::open_device;
#[cfg(feature = "grpc")]
use crate::commands::grpc;
use crate::engine_args::EngineArgs;
use crate::errors::{CONTAINED_HTTP_THREAD, WithHint, hinted};
use crate::graph_args::GraphServeArgs;
use crate::log;
use crate::model_dir;
use crate::serve_args::ServeArgs;
use crate::session::{AnySession, EncoderSession, Session};

/// News of the prefix cache between two steps; more become one that clears the reader's view.
const MAX_STEP_EVENTS: usize = 1 << 16;

pub fn run(args: &ServeArgs, out: &mut dyn Write) -> Result<()> {
    args.engine.refuse_synthetic()?;
    let mut config = server_config(args)?;
    // What is wrong with a file is said before a model is loaded.
    let profile = args.log.profile.as_ref().map(|path| {
        File::create(path).with_context(|| format!("--profile: cannot write {}", path.display()))
    });
    let profile = profile.transpose()?;
    config.num_lost_log_lines = Some(log::start_for_process(
        args.log.log_format,
        args.log.log_level,
        args.log.max_queued_log_lines as usize,
    )?);
    // So is that the port is taken, or a certificate wrong.
    let reserved = match Reserved::new(&config) {
        Err(error @ ServeError::Bind { .. }) => {
            Err(error).with_hint(|| "is another server running?".to_owned())?
        }
        reserved => reserved?,
    };
    config.graph = graph_serving(&args.graph)?;
    let engine = engine_args(args);
    let chosen = model_dir::choose(args.model.as_deref(), &args.models, &engine)?;
    config.more_models = chosen.more;
    let events = kv_events(args);
    let mut hub = None;
    let (model, load_s) = match AnySession::open(chosen.model.as_deref(), &engine)? {
        AnySession::Decoder(session) => {
            tracing::info!("{}", session.engine.memory_plan());
            tracing::info!("sampling defaults: {}", session.sampling);
            let load_s = session.load_s;
            let transfer = session.transfer.clone();
            config.kv_transfer = transfer.as_ref().map(|transfer| transfer.address());
            let group = session.engine.full_kv_group();
            hub = kv_events(args).map(|config| Arc::new(EventHub::new(config.buffer_steps, group)));
            let model = served_model(args, *session, chosen.name, profile, hub.clone());
            if let Some(transfer) = &transfer {
                transfer.set_engine(model.engine().clone());
                tracing::info!("KV is handed over on {}", transfer.address());
            }
            (model, load_s)
        }
        AnySession::Encoder(session) => {
            let load_s = session.load_s;
            (served_encoder(args, *session, chosen.name), load_s)
        }
    };
    let name = model.name().to_owned();
    #[cfg(feature = "grpc")]
    let model_id = engine.tokenizer.clone().or(chosen.model).unwrap_or_else(|| name.clone());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .thread_name(CONTAINED_HTTP_THREAD)
        .enable_all()
        .build()
        .context("the server's threads could not be started")?;
    let served = runtime.block_on(async {
        let server = Server::listen(reserved, model, config).await?;
        if let Some((config, hub)) = events.filter(|config| config.uses_zmq()).zip(hub) {
            publish_kv_events(config, hub).await?;
        }
        #[cfg(feature = "grpc")]
        let grpc = grpc::start(args, &server, model_id, kv_events(args)).await?;
        let stop = stop_signal()?;
        // Whoever started the server may have closed its stdout; that is no reason not to serve.
        let _ = announce(out, &name, server.address(), load_s, args);
        server.run(stop).await?;
        #[cfg(feature = "grpc")]
        if let Some(grpc) = grpc {
            grpc.finish().await;
        }
        Ok(())
    });
    // A connection that does not want to end must not keep the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    log::flush();
    served
}

/// The graph engine on a thread of its own, where a graph model is served.
fn graph_serving(args: &GraphServeArgs) -> Result<Option<GraphServing>> {
    let Some(path) = &args.graph_model else { return Ok(None) };
    let model = GraphModel::open(path, None)?;
    let config = GraphConfig { max_waiting: args.max_graph_requests, ..args.engine.config() };
    let engine = GraphEngine::new(model, open_device(&args.engine)?, config)?;
    tracing::info!(model = engine.model().name(), device = engine.device().description, "serving graphs");
    let (service, _) =
        GraphService::start(engine).context("the graph engine's thread could not be started")?;
    let max_bytes = usize::try_from(args.max_graph_memory).context("--max-graph-memory")?;
    let (max_graphs, max_requests) = (args.max_graphs, args.max_graph_requests);
    Ok(Some(GraphServing { service, max_graphs, max_bytes, max_requests }))
}

/// With several keys, one may have half of the queue unless it is said otherwise.
fn engine_args(args: &ServeArgs) -> EngineArgs {
    let mut engine = args.engine.clone();
    if args.api_keys().len() > 1 {
        let all = engine.max_num_queued_reqs.unwrap_or(EngineConfig::default().max_num_queued_reqs);
        engine.max_num_queued_reqs_per_key.get_or_insert(all.div_ceil(2));
    }
    if kv_events(args).is_some() {
        engine.kv_event_capacity = MAX_STEP_EVENTS;
    }
    engine
}

/// The settings, where events are asked for.
fn kv_events(args: &ServeArgs) -> Option<&KvEventsConfig> {
    args.listen.kv_events_config.as_ref().filter(|config| config.enable_kv_cache_events)
}

async fn publish_kv_events(config: &KvEventsConfig, hub: Arc<EventHub>) -> Result<()> {
    let publisher = Publisher::bind(config)
        .await
        .with_hint(|| "choose another endpoint in --kv-events-config, or publisher null".to_owned())?;
    let replay = publisher.replay_endpoint.as_deref().unwrap_or("none");
    tracing::info!(endpoint = publisher.endpoint, replay, topic = config.topic, "publishing KV events");
    tokio::spawn(publisher.run(hub));
    Ok(())
}

fn server_config(args: &ServeArgs) -> Result<ServerConfig> {
    let api_keys = args.api_keys();
    if api_keys.iter().any(|key| key.trim().is_empty()) {
        return Err(hinted(
            "an API key is empty",
            "leave --api-key and BATON_API_KEY out to serve without keys",
        ));
    }
    let tls = args.listen.ssl_certfile.clone().zip(args.listen.ssl_keyfile.clone());
    Ok(ServerConfig {
        tls: tls.map(|(certificates, key)| TlsFiles { certificates, key }),
        public_prefixes: args
            .listen
            .public_prefix
            .iter()
            .map(|path| public_prefix(path))
            .collect::<Result<_>>()?,
        system_prompts: args
            .listen
            .system_prompt_file
            .iter()
            .map(|path| system_prompt(path, &args.listen.served_model_name))
            .collect::<Result<_>>()?,
        inject_system_prompt: !args.listen.no_inject_system_prompt,
        host: args.listen.host,
        port: args.listen.port,
        api_keys,
        allowed_origins: args.listen.allowed_origins(),
        root_path: args.listen.root_path.clone().unwrap_or_default(),
        tokens_as_ids: args.listen.return_tokens_as_token_ids,
        force_include_usage: args.listen.enable_force_include_usage,
        otlp_traces_endpoint: args.log.otlp_traces_endpoint.clone(),
        console: !args.listen.disable_console,
        max_body_bytes: usize::try_from(args.listen.max_body_size).context("--max-body-size")?,
        max_body_items: args.listen.max_body_items,
        max_bodies_bytes: usize::try_from(args.listen.max_bodies_size).context("--max-bodies-size")?,
        allowed_hosts: args.listen.allowed_hosts.clone(),
        max_connections: args.listen.max_connections,
        max_logprobs: args.listen.max_logprobs,
        max_choices: args.listen.max_choices,
        read_timeout: Duration::from_secs_f64(args.listen.read_timeout),
        half_close_timeout: Duration::from_secs_f64(args.listen.half_close_timeout),
        compile_timeout: Duration::from_secs_f64(args.listen.compile_timeout),
        shutdown_timeout: Duration::from_secs_f64(args.listen.shutdown_timeout),
        stall_timeout: Duration::from_secs_f64(args.listen.engine_stall_timeout),
        tool_call_parser: args.chat_format.tool_call_parser,
        reasoning_parser: args.chat_format.reasoning_parser,
        chat_template_kwargs: args
            .chat_format
            .default_chat_template_kwargs
            .clone()
            .map_or_else(Map::new, |kwargs| kwargs.0),
        max_stored_responses: args.chat_format.max_stored_responses,
        max_stored_bytes: usize::try_from(args.chat_format.max_stored_size).context("--max-stored-size")?,
        stored_response_ttl: Duration::from_secs_f64(args.chat_format.stored_response_ttl),
        ..ServerConfig::default()
    })
}

/// A `.json` file holds messages, any other the text itself.
fn public_prefix(path: &Path) -> Result<PublicPrefix> {
    let name = path.display().to_string();
    let text =
        std::fs::read_to_string(path).with_context(|| format!("--public-prefix: cannot read {name}"))?;
    let content = if path.extension().is_some_and(|end| end == "json") {
        let messages = serde_json::from_str(&text).with_context(|| {
            format!("--public-prefix: {name} must be a list of messages, [{{\"role\": …, \"content\": …}}]")
        })?;
        PublicContent::Messages(messages)
    } else {
        PublicContent::Text(text)
    };
    Ok(PublicPrefix { name, content })
}

/// `FILE`, or `NAME=FILE` where NAME is a name that the model is served by.
fn system_prompt(flag: &Path, names: &[String]) -> Result<SystemPrompt> {
    let named = flag.to_str().and_then(|text| text.split_once('='));
    let named = named.filter(|(name, _)| names.iter().any(|served| served == name));
    let (model, path) = named.map_or((None, flag), |(name, file)| (Some(name.to_owned()), Path::new(file)));
    let file = path.display().to_string();
    let bytes = std::fs::read(path).with_context(|| format!("--system-prompt-file: cannot read {file}"))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        hinted(
            format!("--system-prompt-file: {file} is not UTF-8 from byte {at} on"),
            "save the file as UTF-8",
        )
    })?;
    // Editors end a file with a line break, which is no part of what was written.
    let text = text.trim_end_matches(['\n', '\r']).to_owned();
    if text.trim().is_empty() {
        let hint = "write the system prompt into it, or leave the flag out";
        return Err(hinted(format!("--system-prompt-file: {file} is empty"), hint));
    }
    Ok(SystemPrompt { file, model, text })
}

fn served_model(
    args: &ServeArgs,
    session: Session,
    name: Option<String>,
    profile: Option<File>,
    kv_events: Option<Arc<EventHub>>,
) -> ServedModel {
    let mut names = args.listen.served_model_name.clone();
    if names.is_empty() {
        names.push(name.unwrap_or_else(|| session.text.name.clone()));
    }
    start_model(session, names, profile, kv_events)
}

/// Starts the engine of a model that was opened.
pub fn start_model(
    session: Session,
    names: Vec<String>,
    profile: Option<File>,
    kv_events: Option<Arc<EventHub>>,
) -> ServedModel {
    let Session { engine, text, sampling, .. } = session;
    let default_sampling = sampling.over(SamplingParams::default());
    let sampling_source = sampling.source.clone();
    let (tokenizer, chat_template, eos_token_ids) = text.into_parts();
    let text = ModelText { tokenizer, chat_template, eos_token_ids, default_sampling, sampling_source };
    let profile = profile.map(|file| Box::new(file) as Box<dyn Write + Send>);
    ServedModel::start_with_events(engine, text, names, profile, kv_events)
}

fn served_encoder(args: &ServeArgs, session: EncoderSession, name: Option<String>) -> ServedModel {
    let mut names = args.listen.served_model_name.clone();
    if names.is_empty() {
        names.push(name.unwrap_or_else(|| session.text.name.clone()));
    }
    start_encoder(session, names)
}

/// Starts the engine of an encoder that was opened.
pub fn start_encoder(session: EncoderSession, names: Vec<String>) -> ServedModel {
    let EncoderSession { engine, text, .. } = session;
    let (tokenizer, chat_template, eos_token_ids) = text.into_parts();
    let text = ModelText {
        tokenizer,
        chat_template,
        eos_token_ids,
        default_sampling: SamplingParams::default(),
        sampling_source: String::new(),
    };
    ServedModel::start_encoder(engine, text, names)
}

/// Ready at the first SIGTERM or SIGINT; a second one ends the process at once.
pub fn stop_signal() -> Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be handled")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be handled")?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tokio::spawn(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            log::say("stopped at once: a second signal came");
            log::flush();
            std::process::exit(130);
        });
    })
}

fn announce(
    out: &mut dyn Write,
    name: &str,
    address: SocketAddr,
    load_s: f64,
    args: &ServeArgs,
) -> Result<()> {
    let key = if args.api_keys().is_empty() { "" } else { " -H \"Authorization: Bearer $BATON_API_KEY\"" };
    let scheme = if args.listen.ssl_certfile.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://{address}");
    writeln!(out, "Baton serves {name} on {url} (loaded in {load_s:.2} s)")?;
    writeln!(
        out,
        "try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \
         -d '{{\"messages\": [{{\"role\": \"user\", \"content\": \"Why is the sky blue?\"}}]}}'"
    )?;
    if !args.listen.disable_console {
        writeln!(out, "or open {url}/ in a browser")?;
    }
    out.flush()?;
    Ok(())
}
