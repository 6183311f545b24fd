//! `baton route`: one address in front of many servers. The router itself is `baton-router`; here it gets its flags, its log
//! and its signals.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use baton_router::{Role, RouteError, Router, RouterConfig, WorkerSpec};

use crate::errors::{CONTAINED_HTTP_THREAD, WithHint};
use crate::log;
use crate::route_args::RouteArgs;

use super::serve::stop_signal;

const QUEUED_LOG_LINES: usize = 8192;

pub fn run(args: &RouteArgs, out: &mut dyn Write) -> Result<()> {
    log::start_for_process(args.log.log_format, args.log.log_level, QUEUED_LOG_LINES)?;
    let config = config(args)?;
    let policy = config.policy;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .thread_name(CONTAINED_HTTP_THREAD)
        .enable_all()
        .build()
        .context("the router's threads could not be started")?;
    let routed = runtime.block_on(async {
        let router = match Router::bind(config).await {
            Err(error @ RouteError::Bind { .. }) => {
                Err(error).with_hint(|| "is another server running?".to_owned())?
            }
            router => router?,
        };
        let stop = stop_signal()?;
        let (url, count) = (format!("http://{}", router.address()), router.num_workers());
        // Whoever started the router may have closed its stdout; that is no reason not to route.
        let _ = writeln!(out, "Baton routes to {count} workers on {url} ({policy})");
        let _ = writeln!(out, "who holds what: open {url}/ in a browser");
        let _ = out.flush();
        router.run(stop).await;
        Ok(())
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    log::flush();
    routed
}

fn config(args: &RouteArgs) -> Result<RouterConfig> {
    let seconds = Duration::from_secs_f64;
    let with_role = |specs: &[WorkerSpec], role| -> Vec<WorkerSpec> {
        specs.iter().map(|spec| WorkerSpec { role, ..spec.clone() }).collect()
    };
    let mut workers = args.worker_urls.clone();
    workers.extend(with_role(&args.prefill, Role::Prefill));
    workers.extend(with_role(&args.decode, Role::Decode));
    Ok(RouterConfig {
        host: args.listen.host,
        port: args.listen.port,
        workers,
        workers_file: args.workers_file.clone(),
        policy: args.policy,
        session_header: args.placing.session_header.to_ascii_lowercase(),
        prefix_bytes: args.placing.prefix_bytes as usize,
        load_factor: args.placing.load_factor,
        max_indexed_blocks: args.placing.max_indexed_blocks,
        worker_api_key: args.listen.worker_api_key.clone(),
        admin_api_key: args.listen.admin_api_key.clone(),
        health_path: args.health.health_path.clone(),
        health_interval: seconds(args.health.health_interval),
        health_timeout: seconds(args.health.health_timeout),
        health_failures: args.health.health_failures,
        connect_timeout: seconds(args.health.connect_timeout),
        request_timeout: seconds(args.health.request_timeout),
        stream_timeout: seconds(args.health.stream_timeout),
        max_attempts: args.health.max_attempts,
        breaker_failures: args.health.breaker_failures,
        breaker_cooldown: seconds(args.health.breaker_cooldown),
        max_body_bytes: usize::try_from(args.listen.max_body_size).context("--max-body-size")?,
        max_connections: args.listen.max_connections,
        max_requests: args.listen.max_concurrent_requests,
        max_requests_per_worker: args.listen.max_requests_per_worker,
        shutdown_timeout: seconds(args.listen.shutdown_timeout),
    })
}
