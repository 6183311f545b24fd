//! `baton plan`: the memory calculator. It does the engine's own arithmetic ([`MemoryPlan`]) for a device that need not
//! be here and a model that need not be downloaded: a `config.json` is enough.

use std::io::Write;

use anyhow::Result;
use baton_backend::{Backend, KvDtype, StepLimits, StepMemory, WeightFormat};
use baton_cpu::{CpuBackend, CpuOptions};
use baton_engine::{EngineConfig, MemoryPlan, MemoryRequest};
use baton_model::{Decoder, ModelConfig, joint_kv_spec};
use serde::Serialize;

use crate::args::PlanArgs;
use crate::devices;
use baton::gpu_steps;

use crate::engine_args::{kv_dtype, parse_dtype};
use crate::errors::hinted;
use crate::session::{OpenedConfig, open_config, unsupported_warning};
use crate::size::{grouped, show};
use crate::table::{Align, Table};

/// Lengths that are reported beside `--context` and the model's limit.
const USUAL_CONTEXTS: [usize; 3] = [1024, 4096, 16_384];

pub fn run(args: &PlanArgs, out: &mut dyn Write) -> Result<()> {
    let opened = open_config(args.model.as_deref())?;
    let mut config = opened.config;
    let mut weight_bytes = opened.weight_bytes;
    if let Some(format) = parse_dtype(&args.dtype)? {
        config.dtype = format;
        config.quantization = None;
        weight_bytes = None;
    }
    let device = Device::find(args)?;
    let weight_bytes = weight_bytes.map(|bytes| if device.is_gpu { bytes.gpu } else { bytes.cpu });
    let weight_bytes = weight_bytes.unwrap_or_else(|| baton_model::weight_bytes(&config));
    let draft = args.speculative_config.as_ref().and_then(|config| config.draft_model());
    let draft = draft.map(|model| Draft::open(model, &device)).transpose()?;
    let mut report = calculate(args, &opened.name, &config, weight_bytes, draft.as_ref(), &device)?;
    // With another --dtype the plan is for other weights than the file's.
    if args.dtype == "auto" {
        report.unsupported_dtypes = opened.unsupported_dtypes;
    }
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        print(&report, out)?;
    }
    report.check()
}

/// What the calculation needs to know of a device.
struct Device {
    description: String,
    memory_bytes: u64,
    /// What the engine may use, before `--gpu-memory-utilization`.
    free_bytes: u64,
    activation_bytes: usize,
    block_size: usize,
    is_gpu: bool,
    /// The most KV that the engine takes unasked.
    kv_cap_bytes: Option<u64>,
}

impl Device {
    fn find(args: &PlanArgs) -> Result<Self> {
        let mut device = if args.device.eq_ignore_ascii_case("cpu") {
            let info = CpuBackend::new(CpuOptions::default())?.device();
            Self {
                description: info.description,
                memory_bytes: info.total_bytes,
                free_bytes: info.free_bytes,
                activation_bytes: info.activation_bytes,
                block_size: info.block_size,
                is_gpu: false,
                kv_cap_bytes: info.kv_cap_bytes,
            }
        } else {
            let known = devices::find(&args.device).ok_or_else(|| {
                hinted(
                    format!("--device {:?} is not known", args.device),
                    format!("known are cpu, {}; or give --device-memory SIZE", devices::names()),
                )
            });
            let known = match (known, args.device_memory) {
                (Ok(known), _) => (known.description.to_owned(), known.memory_bytes),
                (Err(_), Some(bytes)) => (args.device.clone(), bytes),
                (Err(error), None) => return Err(error),
            };
            Self {
                description: known.0,
                memory_bytes: known.1,
                free_bytes: baton_cuda::free_bytes(known.1),
                activation_bytes: 2,
                block_size: 16,
                is_gpu: true,
                kv_cap_bytes: None,
            }
        };
        if let Some(bytes) = args.device_memory {
            device.memory_bytes = bytes;
            device.free_bytes = if device.is_gpu { baton_cuda::free_bytes(bytes) } else { bytes };
            device.kv_cap_bytes = None;
        }
        Ok(device)
    }
}

/// The model that drafts, as far as its memory goes.
struct Draft {
    name: String,
    config: ModelConfig,
    weight_bytes: u64,
}

impl Draft {
    fn open(model: &str, device: &Device) -> Result<Self> {
        let OpenedConfig { name, config, weight_bytes, .. } = open_config(Some(model))?;
        let weight_bytes = weight_bytes.map(|bytes| if device.is_gpu { bytes.gpu } else { bytes.cpu });
        let weight_bytes = weight_bytes.unwrap_or_else(|| baton_model::weight_bytes(&config));
        Ok(Self { name, config, weight_bytes })
    }
}

/// What is printed, and the shape of `--json`. All sizes are bytes.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    architecture: baton_model::Architecture,
    num_parameters: u64,
    dtype: WeightFormat,
    /// How linear layers are quantised, where the configuration says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    quantization: Option<String>,
    device: String,
    device_memory_bytes: u64,
    gpu_memory_utilization: f64,
    usable_bytes: u64,
    /// Of the draft model too, where there is one.
    weight_bytes: u64,
    draft_model: Option<String>,
    draft_weight_bytes: u64,
    /// Types of the file's tensors that no backend computes with: it cannot run.
    unsupported_dtypes: Vec<String>,
    workspace_bytes: u64,
    graph_bytes: u64,
    /// More would fit, but is only taken when `--kv-cache-memory` asks for it: other programs use this memory too.
    kv_is_capped: bool,
    kv_cache_bytes: u64,
    kv_cache_dtype: KvDtype,
    kv_bytes_per_token: u64,
    block_size: usize,
    num_blocks: usize,
    kv_tokens: usize,
    max_model_len: usize,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    /// Whether one sequence of `max_model_len` can run.
    fits: bool,
    sequences: Vec<Fit>,
}

#[derive(Debug, Serialize)]
struct Fit {
    context: usize,
    count: usize,
    /// Of one sequence; windows keep less than the whole of it.
    kv_bytes: u64,
}

fn calculate(
    args: &PlanArgs,
    name: &str,
    config: &ModelConfig,
    target_weight_bytes: u64,
    draft: Option<&Draft>,
    device: &Device,
) -> Result<Report> {
    let defaults = EngineConfig::default();
    let (max_num_seqs, max_num_batched_tokens) = if device.is_gpu {
        gpu_steps(args.max_num_seqs, args.max_num_batched_tokens)
    } else {
        let tokens = args.max_num_batched_tokens.unwrap_or(defaults.max_num_batched_tokens);
        (args.max_num_seqs.unwrap_or(defaults.max_num_seqs), tokens)
    };
    let engine = EngineConfig {
        max_num_seqs,
        max_num_batched_tokens,
        block_size: args.block_size,
        kv_dtype: kv_dtype(args.kv_cache_dtype, defaults.kv_dtype),
        gpu_memory_utilization: args.gpu_memory_utilization,
        speculative: args.speculative_config.clone(),
        ..defaults
    };
    engine.validate()?;
    let max_model_len = config.resolve_max_model_len(args.max_model_len.0)?;
    let limits = engine.step_limits(max_model_len, config.vocab_size);
    let block_size = engine.block_size.unwrap_or(device.block_size);
    let models: Vec<&ModelConfig> = [config].into_iter().chain(draft.map(|draft| &draft.config)).collect();
    let spec = joint_kv_spec(&models, engine.kv_dtype, block_size);
    let draft_weight_bytes = draft.map_or(0, |draft| draft.weight_bytes);
    let weight_bytes = target_weight_bytes.saturating_add(draft_weight_bytes);
    let usable_bytes = (device.free_bytes as f64 * args.gpu_memory_utilization) as u64;
    let buffer_bytes = models.iter().fold(0_u64, |sum, model| {
        let limits = StepLimits { vocab_size: model.vocab_size, ..limits };
        sum.saturating_add(Decoder::buffer_bytes(model, &limits, device.activation_bytes))
    });
    let mut steps = StepMemory::default();
    for model in models.iter().filter(|_| device.is_gpu) {
        // Both share the workspace; each has its recorded steps.
        let own = gpu_step_memory(model, &limits);
        steps.workspace_bytes = steps.workspace_bytes.max(own.workspace_bytes);
        steps.graph_bytes = steps.graph_bytes.saturating_add(own.graph_bytes);
    }
    let workspace_bytes = buffer_bytes.saturating_add(steps.workspace_bytes);
    let mut request = MemoryRequest {
        device: device.description.clone(),
        total_bytes: device.memory_bytes,
        usable_bytes,
        weight_bytes,
        workspace_bytes,
        graph_bytes: steps.graph_bytes,
        kv_cap_bytes: device.kv_cap_bytes,
        kv_cache_memory: None,
        swap_space: 0,
        // One block, so that the plan is made even where the longest sequence does not fit; `fits` says so.
        max_model_len: 1,
        may_shrink: false,
        max_num_seqs: engine.max_num_seqs,
        max_run: engine.max_num_batched_tokens,
    };
    // All that is left, not only what a full batch would use: the question is what fits.
    request.kv_cache_memory = Some(request.kv_budget_bytes());
    let plan = MemoryPlan::new(&request, &spec).ok();
    let mut contexts: Vec<usize> = args.context.iter().copied().filter(|&len| len > 0).collect();
    if contexts.is_empty() {
        contexts.extend(USUAL_CONTEXTS.iter().filter(|&&len| len < max_model_len));
    }
    contexts.push(max_model_len);
    contexts.sort_unstable();
    contexts.dedup();
    let count = |context| plan.as_ref().map_or(0, |plan| plan.sequences_of(context));
    let kv_bytes = |context| plan.as_ref().map_or(0, |plan| plan.sequence_bytes(context));
    let kv_tokens = match plan.as_ref() {
        Some(plan) if plan.groups.len() == 1 => plan.kv_tokens(),
        _ => count(max_model_len).saturating_mul(max_model_len),
    };
    Ok(Report {
        model: name.to_owned(),
        architecture: config.architecture,
        num_parameters: baton_model::num_parameters(config),
        dtype: config.dtype,
        quantization: config.quantization.as_ref().map(ToString::to_string),
        device: device.description.clone(),
        device_memory_bytes: device.memory_bytes,
        gpu_memory_utilization: args.gpu_memory_utilization,
        usable_bytes,
        weight_bytes,
        draft_model: draft.map(|draft| draft.name.clone()),
        draft_weight_bytes,
        unsupported_dtypes: Vec::new(),
        workspace_bytes,
        graph_bytes: steps.graph_bytes,
        kv_is_capped: request.kv_budget_bytes() < request.left_bytes(),
        kv_cache_bytes: plan.as_ref().map_or(0, |plan| plan.kv_bytes),
        kv_cache_dtype: engine.kv_dtype,
        kv_bytes_per_token: spec.bytes_per_token() as u64,
        block_size,
        num_blocks: plan.as_ref().map_or(0, |plan| plan.num_device_blocks),
        kv_tokens,
        max_model_len,
        max_num_seqs: engine.max_num_seqs,
        max_num_batched_tokens: engine.max_num_batched_tokens,
        fits: count(max_model_len) > 0,
        sequences: contexts
            .into_iter()
            .map(|context| Fit { context, count: count(context), kv_bytes: kv_bytes(context) })
            .collect(),
    })
}

fn gpu_step_memory(config: &ModelConfig, limits: &StepLimits) -> StepMemory {
    let heads = |count: usize| count.saturating_mul(config.head_dim);
    let qkv = heads(config.num_heads.saturating_add(config.num_kv_heads.saturating_mul(2)));
    let widest_input = config.hidden_size.max(config.intermediate_size).max(heads(config.num_heads));
    let widest_output = config.hidden_size.max(config.intermediate_size.saturating_mul(2)).max(qkv);
    baton_cuda::step_memory(limits, widest_input, widest_output)
}

impl Report {
    /// An answer of "no" is an error, so that scripts see it.
    fn check(&self) -> Result<()> {
        if self.fits {
            return Ok(());
        }
        let needed = self.weight_bytes.saturating_add(self.workspace_bytes).saturating_add(self.graph_bytes);
        if needed > self.usable_bytes {
            return Err(hinted(
                format!(
                    "the model does not fit: weights and workspace take {}, and {} may be used",
                    show(needed),
                    show(self.usable_bytes)
                ),
                "take a smaller --dtype, a larger device or a higher --gpu-memory-utilization",
            ));
        }
        Err(hinted(
            format!(
                "one sequence of {} tokens does not fit: the KV cache holds {}",
                self.max_model_len, self.kv_tokens
            ),
            if self.kv_is_capped {
                format!(
                    "`baton serve` takes {} unless --kv-cache-memory gives the cache more of this machine's memory; a smaller \
                     --kv-cache-dtype helps too",
                    self.kv_tokens
                )
            } else {
                format!("lower --max-model-len to {}, or take a smaller --kv-cache-dtype", self.kv_tokens)
            },
        ))
    }
}

fn print(report: &Report, out: &mut dyn Write) -> Result<()> {
    writeln!(
        out,
        "{}: {:?}, {} parameters, {}{}",
        report.model,
        report.architecture,
        grouped(report.num_parameters),
        report.dtype,
        report.quantization.as_ref().map_or(String::new(), |how| format!(", {how}"))
    )?;
    writeln!(out, "on {}\n", report.device)?;
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Left]);
    let share = format!(
        "{:.0} % of what is free of {}",
        report.gpu_memory_utilization * 100.0,
        show(report.device_memory_bytes)
    );
    let step =
        format!("{} tokens, {} sequences per step", report.max_num_batched_tokens, report.max_num_seqs);
    let capped = if report.kv_is_capped { "; more with --kv-cache-memory" } else { "" };
    let kv = format!("{} blocks of {} tokens{capped}", grouped(report.num_blocks as u64), report.block_size);
    let token = format!("{:?}, {} bytes", report.kv_cache_dtype, grouped(report.kv_bytes_per_token));
    table.row(["usable", &show(report.usable_bytes), &share]);
    let with_draft = report
        .draft_model
        .as_ref()
        .map(|draft| format!("{} of them the draft model's, {draft}", show(report.draft_weight_bytes)));
    table.row(["weights", &show(report.weight_bytes), with_draft.as_deref().unwrap_or("")]);
    table.row(["workspace", &show(report.workspace_bytes), &step]);
    if report.graph_bytes > 0 {
        table.row(["graphs", &show(report.graph_bytes), ""]);
    }
    table.row(["KV cache", &show(report.kv_cache_bytes), &kv]);
    table.row(["KV per token", &show(report.kv_bytes_per_token), &token]);
    table.row(["KV tokens", &grouped(report.kv_tokens as u64), ""]);
    writeln!(out, "{table}")?;
    let mut table = Table::new(&[Align::Right, Align::Right, Align::Right]);
    table.row(["CONTEXT", "SEQUENCES AT ONCE", "KV EACH"]);
    for fit in &report.sequences {
        table.row([&grouped(fit.context as u64), &grouped(fit.count as u64), &show(fit.kv_bytes)]);
    }
    write!(out, "{table}")?;
    if let Some(warning) = unsupported_warning(&report.unsupported_dtypes) {
        writeln!(out, "\nwarning: {warning}")?;
    }
    Ok(())
}
