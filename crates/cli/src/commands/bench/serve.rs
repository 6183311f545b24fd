//! `baton bench serve`: load on a server over HTTP.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use baton_bench::{
    Arrivals, Goodput, Heading, Metric, RampUp, Sample, ServeMetrics, ServeOptions, ServeRun, Workload,
};
use serde_json::{Map, Value, json};

use super::{bar, write_json, write_result};
use crate::bench_args::{BackendArg, BenchServeArgs, RampUpArg};
use crate::errors::{WithHint, hinted};
use crate::session::TextModel;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

pub fn run(args: &BenchServeArgs, out: &mut dyn Write) -> Result<()> {
    // What is wrong with the flags is said before anything is sent.
    let goodput = Goodput::parse(&args.result.goodput)?;
    let shown = Metric::parse_list(&args.result.percentile_metrics).context("--percentile-metrics")?;
    let percentiles = parse_percentiles(&args.result.metric_percentiles)?;
    let options = options(args)?;
    options.arrivals.validate()?;
    let workload = load(args)?;
    let Workload { samples, notes } = workload;
    for note in &notes {
        eprintln!("note: {note}");
    }
    let num_prompts = samples.len();
    let run = baton_bench::run_serve(options.clone(), samples, &bar(&args.output, num_prompts))
        .with_hint(|| format!("is a server running at {}? try: baton serve", options.base_url))?;
    let metrics = ServeMetrics::new(&run.outcomes, run.duration_s, goodput);
    report_failures(&run);
    let heading =
        Heading { max_concurrency: args.traffic.max_concurrency, request_rate: args.traffic.request_rate };
    write!(out, "{}", baton_bench::serve_summary(&metrics, heading, &shown, &percentiles))?;
    let mut result = head(args, &options, &run, num_prompts);
    result.extend(metrics.to_json(&shown, &percentiles));
    if args.result.save_detailed {
        result.extend(baton_bench::details(&run.outcomes));
    }
    write_result(&args.output, &result)?;
    if args.result.save_result {
        let path = result_path(args, &result)?;
        write_json(&path, &result)?;
        writeln!(out, "result saved to {}", path.display())?;
    }
    if metrics.completed == 0 {
        return Err(hinted("every request failed", "the first reasons are above"));
    }
    Ok(())
}

fn options(args: &BenchServeArgs) -> Result<ServeOptions> {
    let server = &args.server;
    let asks_chat = server.endpoint.as_deref().is_some_and(|endpoint| endpoint.contains("/chat/"));
    let chat = match server.backend {
        Some(BackendArg::Openai) if asks_chat => {
            return Err(hinted(
                "--backend openai speaks of completions, but --endpoint of chat",
                "leave --backend out, or use --backend openai-chat",
            ));
        }
        Some(backend) => backend == BackendArg::OpenaiChat,
        None => asks_chat,
    };
    let endpoint =
        server.endpoint.clone().unwrap_or_else(|| (if chat { CHAT } else { COMPLETIONS }).to_owned());
    let mut extra_body = args.sampling.fields(chat);
    extra_body.extend(server.extra_body.clone().unwrap_or_default());
    let traffic = &args.traffic;
    let ramp_up = traffic.ramp_up_strategy.map(|strategy| RampUp {
        exponential: strategy == RampUpArg::Exponential,
        start_rps: traffic.ramp_up_start_rps.unwrap_or(0.0),
        end_rps: traffic.ramp_up_end_rps.unwrap_or(0.0),
    });
    Ok(ServeOptions {
        base_url: server.address.base_url(),
        endpoint,
        chat,
        model: server.model.clone(),
        headers: server.address.headers(),
        arrivals: Arrivals { request_rate: traffic.request_rate, burstiness: traffic.burstiness, ramp_up },
        max_concurrency: traffic.max_concurrency,
        num_warmups: traffic.num_warmups,
        ignore_eos: traffic.ignore_eos,
        extra_body,
        text_prompts: server.text_prompts,
        tokens: args.dataset.tokens(None),
        keep_text: args.result.save_detailed,
        ready_timeout: Duration::from_secs(u64::from(server.ready_check_timeout_sec)),
        seed: args.seed,
    })
}

fn load(args: &BenchServeArgs) -> Result<Workload> {
    let text =
        args.server.tokenizer.as_deref().map(TextModel::of_tokenizer).transpose().context("--tokenizer")?;
    let options = args.dataset.options(args.seed);
    let mut workload = match &text {
        Some(text) => {
            let count =
                |prompt: &str| text.encode(prompt).map(|ids| ids.len()).map_err(|error| format!("{error:#}"));
            options.load(Some(&count))?
        }
        None => options.load(None)?,
    };
    if args.dataset.no_self_timed {
        let untimed = |sample: Sample| Sample { at_s: None, ..sample };
        workload.samples = workload.samples.into_iter().map(untimed).collect();
    }
    Ok(workload)
}

fn parse_percentiles(text: &str) -> Result<Vec<f64>> {
    let parse = |part: &str| match part.trim().parse::<f64>() {
        Ok(p) if (0.0..=100.0).contains(&p) => Ok(p),
        _ => Err(hinted(
            format!("--metric-percentiles: {part:?} is not a percentile"),
            "write for example 50,90,99",
        )),
    };
    text.split(',').map(parse).collect()
}

fn report_failures(run: &ServeRun) {
    for error in run.outcomes.iter().filter_map(|outcome| outcome.error.as_deref()).take(5) {
        eprintln!("a request failed: the server {error}");
    }
}

/// What stands before the figures, under vLLM's keys.
fn head(
    args: &BenchServeArgs,
    options: &ServeOptions,
    run: &ServeRun,
    num_prompts: usize,
) -> Map<String, Value> {
    let backend = if options.chat { "openai-chat" } else { "openai" };
    let rate = args.traffic.request_rate;
    let Value::Object(mut head) = json!({
        "date": baton_bench::stamp(),
        "endpoint_type": backend,
        "backend": backend,
        "label": args.result.label,
        "model_id": run.model_id,
        "tokenizer_id": args.server.tokenizer.as_ref().unwrap_or(&run.model_id),
        "num_prompts": num_prompts,
    }) else {
        unreachable!("an object was written")
    };
    for (key, value) in &args.result.metadata {
        head.insert(key.clone(), json!(value));
    }
    head.insert("request_rate".to_owned(), if rate.is_finite() { json!(rate) } else { json!("inf") });
    head.insert("burstiness".to_owned(), json!(args.traffic.burstiness));
    head.insert("max_concurrency".to_owned(), json!(args.traffic.max_concurrency));
    head
}

/// vLLM's name of a result file, unless one is given.
fn result_path(args: &BenchServeArgs, result: &Map<String, Value>) -> Result<PathBuf> {
    let label = args.result.label.as_deref().or(result["backend"].as_str()).unwrap_or_default();
    let model = result["model_id"].as_str().unwrap_or_default();
    let model = model.rsplit('/').next().unwrap_or(model);
    let concurrency =
        args.traffic.max_concurrency.map_or(String::new(), |limit| format!("-concurrency{limit}"));
    let rate = args.traffic.request_rate;
    let date = result["date"].as_str().unwrap_or_default();
    let name = format!("{label}-{rate}qps{concurrency}-{model}-{date}.json").replace('/', "_");
    let name = args.result.result_filename.clone().unwrap_or_else(|| PathBuf::from(name));
    let Some(directory) = &args.result.result_dir else { return Ok(name) };
    std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    Ok(directory.join(name))
}
