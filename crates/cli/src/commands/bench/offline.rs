//! `baton bench latency` and `throughput`: the engine in this process.

use std::io::Write;

use anyhow::Result;
use baton_bench::{LatencyOptions, OfflineRequest, Prompt, Sample, TokenRange, prompt_tokens};
use baton_core::SamplingParams;

use super::{bar, write_result};
use crate::bench_args::{LatencyArgs, ThroughputArgs};
use crate::engine_args::EngineArgs;
use crate::session::{Session, TextModel};

/// Requests handed to the engine before the first have ended.
const MAX_OUTSTANDING: usize = 1024;

pub fn latency(args: &LatencyArgs, out: &mut dyn Write) -> Result<()> {
    let seed = args.engine.seed.unwrap_or(0);
    let params = SamplingParams { n: args.n, ..args.sampling.params(args.engine.seed) };
    params.validate(u32::MAX)?;
    // The same prompts run again and again: found in the cache they would measure nothing.
    let mut engine_args = args.engine.clone();
    engine_args.cache.no_enable_prefix_caching |= !args.engine.cache.enable_prefix_caching;
    let mut session = Session::open(args.model.as_deref(), &engine_args)?;
    let vocab_size = session.engine.model_config().vocab_size;
    let options = LatencyOptions {
        input_len: args.input_len,
        output_len: args.output_len,
        batch_size: args.batch_size,
        num_iters_warmup: args.num_iters_warmup,
        num_iters: args.num_iters,
        params,
        tokens: TokenRange::of_vocabulary(vocab_size.min(10_000)),
        seed,
    };
    let result = baton_bench::latency(&mut session.engine, &options, &bar(&args.output, args.num_iters))?;
    write!(out, "{}", result.summary())?;
    let mut json = result.to_json();
    describe(&mut json, &session, &args.engine);
    json.insert("input_len".to_owned(), args.input_len.into());
    json.insert("output_len".to_owned(), args.output_len.into());
    json.insert("batch_size".to_owned(), args.batch_size.into());
    write_result(&args.output, &json)
}

pub fn throughput(args: &ThroughputArgs, out: &mut dyn Write) -> Result<()> {
    let seed = args.engine.seed.unwrap_or(0);
    let params = SamplingParams { ignore_eos: true, ..args.sampling.params(args.engine.seed) };
    params.validate(u32::MAX)?;
    let mut session = Session::open(args.model.as_deref(), &args.engine)?;
    let text = &session.text;
    let count = |prompt: &str| text.encode(prompt).map(|ids| ids.len()).map_err(|error| format!("{error:#}"));
    let workload = args.dataset.options(seed).load(Some(&count))?;
    for note in &workload.notes {
        eprintln!("note: {note}");
    }
    let tokens = args.dataset.tokens(Some(session.engine.model_config().vocab_size));
    let requests: Result<Vec<OfflineRequest>> =
        workload.samples.iter().map(|sample| request(sample, text, tokens)).collect();
    let config = args.engine.resolve();
    let outstanding = MAX_OUTSTANDING.max(config.max_num_seqs).min(config.max_num_queued_reqs.max(1));
    let bar = bar(&args.output, workload.samples.len());
    let result = baton_bench::throughput(&mut session.engine, requests?, &params, outstanding, &bar)?;
    write!(out, "{}", result.summary())?;
    let mut json = result.to_json();
    describe(&mut json, &session, &args.engine);
    write_result(&args.output, &json)
}

fn request(sample: &Sample, text: &TextModel, tokens: TokenRange) -> Result<OfflineRequest> {
    let prompt_token_ids = match &sample.prompt {
        Prompt::Text(prompt) => text.encode(prompt)?,
        prompt => prompt_tokens(prompt, tokens),
    };
    Ok(OfflineRequest { prompt_token_ids, output_len: sample.output_len })
}

/// What was measured, for whoever finds the file later.
pub(super) fn describe(
    json: &mut serde_json::Map<String, serde_json::Value>,
    session: &Session,
    args: &EngineArgs,
) {
    let memory = session.engine.memory_plan();
    json.insert("model_id".to_owned(), session.text.name.clone().into());
    json.insert("device".to_owned(), memory.device.clone().into());
    json.insert("max_num_seqs".to_owned(), memory.max_num_seqs.into());
    json.insert("load_s".to_owned(), session.load_s.into());
    json.insert("load_format".to_owned(), format!("{:?}", args.load_format).to_lowercase().into());
    json.insert("version".to_owned(), env!("CARGO_PKG_VERSION").into());
}
