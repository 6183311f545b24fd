//! `--parts operator`: attention alone, without a model. Decodes of a batch over a shared prefix and a context of their own, in
//! each of the three modes, planned as the engine plans them.
//!
//! One device is opened per kind of heads, with a KV cache that fits all cases. A case runs enough layers to read more than the
//! processor's caches hold, if the KV cache has that many.

use std::fmt::Write;

use baton_backend::testing::Random;
use baton_backend::{
    Attention, AttentionCut, AttentionHeads, AttentionPlan, Backend, BackendError, BufferId, CutOptions,
    DeviceInfo, Embed, KvDtype, KvLayerSpec, KvSpec, NormSpan, Op, Program, ProgramId, Qkv, SequenceQueries,
    SharedPrefixes, StepInput, StepLimits, Tensor, WeightUse,
};
use indicatif::ProgressBar;
use serde_json::{Value, json};

use super::run::RelayMode;
use super::{RelayReport, curves_by};
use crate::kernels::{KernelLimits, KernelSizes, step_seconds};
use crate::report::charts::{Chart, XScale, draw_scaled};
use crate::stats::Distribution;
use crate::{BenchError, BenchError::Failed};

/// Width of the rows that queries, keys and values are made from: as little as there can be.
const HIDDEN: usize = 32;
/// Rows of the table that tokens are looked up in, so that keys differ.
const NUM_TOKENS: usize = 64;
/// Tokens of a step that fills the cache.
const FILL: usize = 512;
/// Steps before those that count: a device records the second of a kind.
const WARM_UP: usize = 2;

/// Query heads, kv heads and the size of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Heads {
    name: &'static str,
    shape: [usize; 3],
}

const SMALL: [Heads; 2] =
    [Heads { name: "GQA 9:3", shape: [9, 3, 64] }, Heads { name: "MHA 9", shape: [9, 9, 64] }];
const LARGE: [Heads; 2] =
    [Heads { name: "GQA 32:8", shape: [32, 8, 128] }, Heads { name: "MHA 32", shape: [32, 32, 128] }];

#[derive(Clone, Debug)]
pub struct OperatorOptions {
    pub sizes: KernelSizes,
    pub limits: KernelLimits,
    pub kv_dtype: KvDtype,
    /// Lengths of the shared prefix.
    pub shared: Vec<usize>,
    /// Requests of a step.
    pub batches: Vec<usize>,
    /// Tokens that each request has alone.
    pub own: Vec<usize>,
    pub num_iters: usize,
}

impl OperatorOptions {
    fn heads(&self) -> &'static [Heads; 2] {
        match self.sizes {
            KernelSizes::Small => &SMALL,
            KernelSizes::Large => &LARGE,
        }
    }

    /// Cached keys and values of all layers, and how many layers there are.
    fn cache(&self) -> (usize, usize) {
        match self.sizes {
            KernelSizes::Small => (512 << 20, 16),
            KernelSizes::Large => (56 << 30, 32),
        }
    }
}

/// A batch over a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    heads: Heads,
    is_recorded: bool,
    batch: usize,
    shared: usize,
    own: usize,
}

/// What one way took for one layer.
#[derive(Clone, Copy, Debug)]
struct OperatorFigures {
    us: f64,
    /// Keys and values that the requests hold, and partial results.
    memory_bytes: usize,
    partial_bytes: usize,
    /// Keys and values that the plan reads.
    read_bytes: usize,
    read_gb_per_s: f64,
    gmac_per_s: f64,
}

impl OperatorFigures {
    /// The larger share: what bounds it is near one of the two.
    fn share_of_peak(&self, limits: &KernelLimits) -> Option<f64> {
        let memory = limits.memory_gb_per_s.map(|limit| self.read_gb_per_s / limit);
        let products = limits.attention_gmac_per_s().map(|limit| self.gmac_per_s / limit);
        [memory, products].into_iter().flatten().reduce(f64::max)
    }
}

struct CaseResult {
    case: Case,
    /// In the order of [`RelayMode::ALL`]; none where the cache is too small for all copies of the prefix.
    figures: [Option<OperatorFigures>; 3],
}

impl CaseResult {
    fn us(&self, mode: usize) -> Option<f64> {
        self.figures[mode].map(|figures| figures.us)
    }

    /// How much faster reading once is than every request's reading the same blocks.
    fn speedup(&self) -> Option<f64> {
        Some(self.us(1)? / self.us(2)?)
    }
}

/// Opens the device anew; whether its steps are recorded is said.
pub type OpenRecorded<'a> = &'a dyn Fn(bool) -> Result<Box<dyn Backend>, BenchError>;

/// Attention alone. `records` are the ways in which the device runs steps: recorded, not, or both.
pub fn relay_operator(
    open: OpenRecorded<'_>,
    records: &[bool],
    options: &OperatorOptions,
    bar: &ProgressBar,
) -> Result<RelayReport, BenchError> {
    let failed = |error: BackendError| Failed(error.to_string());
    let per_device = options.shared.len() * options.batches.len() * options.own.len();
    if per_device == 0 || options.num_iters == 0 {
        return Err(BenchError::options(
            "--shared-lens, --batch-sizes, --own-lens and --num-iters name at least one value above 0",
        ));
    }
    bar.set_length((per_device * options.heads().len() * records.len()) as u64);
    let mut results = Vec::new();
    for &heads in options.heads() {
        for &is_recorded in records {
            bar.set_message(heads.name);
            let mut device = Device::open(open(is_recorded)?, heads, options).map_err(failed)?;
            for &own in &options.own {
                for &batch in &options.batches {
                    for &shared in &options.shared {
                        let case = Case { heads, is_recorded, batch, shared, own };
                        results.extend(device.measure(case, options).map_err(failed)?);
                        bar.inc(1);
                    }
                }
            }
        }
    }
    bar.finish_and_clear();
    Ok(RelayReport {
        text: table(&results, options),
        json: [("operator".to_owned(), results.iter().map(|one| to_json(one, options)).collect())]
            .into_iter()
            .collect(),
        charts: charts(&results, options),
    })
}

/// A device with a cache full of keys.
struct Device {
    backend: Box<dyn Backend>,
    info: DeviceInfo,
    heads: Heads,
    spec: KvSpec,
    num_blocks: usize,
    embed: Embed,
    query: BufferId,
    output: BufferId,
}

impl Device {
    fn open(
        mut backend: Box<dyn Backend>,
        heads: Heads,
        options: &OperatorOptions,
    ) -> Result<Self, BackendError> {
        let [num_heads, num_kv_heads, head_dim] = heads.shape;
        let info = backend.device();
        let (cache_bytes, num_layers) = options.cache();
        let layer = KvLayerSpec { num_kv_heads, head_dim };
        let spec = KvSpec::full(layer, num_layers, options.kv_dtype, info.block_size);
        backend.check_kv_spec(&spec)?;
        let most = |values: &[usize]| values.iter().copied().max().unwrap_or(1);
        let (shared, own, batch) = (most(&options.shared), most(&options.own), most(&options.batches));
        let max_tokens = batch.max(FILL);
        backend.set_limits(&StepLimits {
            max_tokens,
            max_seqs: max_tokens,
            max_logit_rows: max_tokens,
            max_samples: max_tokens,
            max_model_len: shared + own,
            vocab_size: NUM_TOKENS,
        })?;
        let mut random = Random::new(2);
        let mut weight = |rows: usize, usage: WeightUse| {
            let values = random.normals(rows * HIDDEN);
            let tensor = Tensor::from_f32(rows, HIDDEN, &values).expect("as many values as the shape says");
            backend.load_weight(&[tensor], usage)
        };
        let table = weight(NUM_TOKENS, WeightUse::Embedding)?;
        let weight = weight((num_heads + 2 * num_kv_heads) * head_dim, WeightUse::Linear)?;
        // More than half of the device is never taken, and no more than the largest case without sharing needs.
        let affordable = cache_bytes.min((info.free_bytes / 2) as usize) / spec.bytes_per_block();
        let blocks = |tokens: usize| tokens.div_ceil(spec.block_size);
        let num_blocks = affordable.clamp(1, batch * (blocks(shared) + blocks(own)));
        backend.create_kv_cache(&spec, num_blocks, 0)?;
        let input = backend.create_buffer(max_tokens, HIDDEN)?;
        let query = backend.create_buffer(max_tokens, num_heads * head_dim)?;
        let output = backend.create_buffer(max_tokens, num_heads * head_dim)?;
        let embed = Embed { weight: table, scale: 1.0, output: input };
        let qkv = |layer| {
            let (norm, bias, q_norm, k_norm, rope) = (None, None, None, None, None);
            Op::Qkv(Qkv {
                input,
                norm,
                weight,
                bias,
                q_norm,
                k_norm,
                norm_span: NormSpan::Head,
                rope,
                num_heads,
                layer,
                output: query,
            })
        };
        let fill = Program::new([Op::Embed(embed)].into_iter().chain((0..num_layers).map(qkv)).collect());
        let fill = backend.compile(&fill)?;
        let mut device = Self { backend, info, heads, spec, num_blocks, embed, query, output };
        device.fill(fill)?;
        Ok(device)
    }

    /// Writes keys and values into every block: what a device reads may change how fast it is.
    fn fill(&mut self, program: ProgramId) -> Result<(), BackendError> {
        let num_slots = self.num_blocks * self.spec.block_size;
        for first in (0..num_slots).step_by(FILL) {
            let slots = first as u32..num_slots.min(first + FILL) as u32;
            let input = StepInput {
                token_ids: slots.clone().map(|slot| (slot * 7 + slot / 61) % NUM_TOKENS as u32).collect(),
                positions: (0..slots.len() as u32).collect(),
                slots: slots.collect(),
                ..StepInput::default()
            };
            step_seconds(&mut *self.backend, &input, program)?;
        }
        Ok(())
    }

    /// None where even shared blocks do not fit.
    fn measure(&mut self, case: Case, options: &OperatorOptions) -> Result<Option<CaseResult>, BackendError> {
        let steps = RelayMode::ALL.map(|mode| self.step(case, mode, options));
        if steps[1].is_none() {
            return Ok(None);
        }
        let layer_bytes =
            (self.spec.bytes_per_token() / self.spec.layers.len()) * (case.shared + case.batch * case.own);
        let num_layers = options.sizes.cache_bytes() / layer_bytes.max(1);
        let num_layers = num_layers.clamp(1, self.spec.layers.len());
        let program = self.program(num_layers)?;
        let mut times = [const { Vec::new() }; 3];
        for iteration in 0..WARM_UP + options.num_iters {
            for (step, times) in steps.iter().zip(&mut times) {
                let Some(step) = step else { continue };
                let seconds = step_seconds(&mut *self.backend, step, program)?;
                if iteration >= WARM_UP {
                    times.push(seconds / num_layers as f64);
                }
            }
        }
        let mut figures = [None; 3];
        for (index, (step, times)) in steps.iter().zip(times).enumerate() {
            let seconds = Distribution::new(times).median().max(1e-9);
            figures[index] =
                step.as_ref().map(|step| self.figures(case, RelayMode::ALL[index], step, seconds));
        }
        Ok(Some(CaseResult { case, figures }))
    }

    fn program(&mut self, num_layers: usize) -> Result<ProgramId, BackendError> {
        let [num_heads, _, head_dim] = self.heads.shape;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let attention = |layer| {
            let (plan, window, softcap, alibi, sinks) = (0, None, None, None, None);
            let (query, output) = (self.query, self.output);
            Op::Attention(Attention {
                layer,
                plan,
                window,
                num_heads,
                scale,
                softcap,
                alibi,
                sinks,
                query,
                output,
            })
        };
        let ops = [Op::Embed(self.embed)].into_iter().chain((0..num_layers).map(attention));
        self.backend.compile(&Program::new(ops.collect()))
    }

    /// The last token of every request; none where the blocks do not suffice.
    fn step(&self, case: Case, mode: RelayMode, options: &OperatorOptions) -> Option<StepInput> {
        let block_size = self.spec.block_size;
        let (shared, own) = (case.shared.div_ceil(block_size), case.own.div_ceil(block_size));
        let copies = if mode == RelayMode::NoCache { case.batch } else { 1 };
        let first_own = copies * shared;
        if first_own + case.batch * own > self.num_blocks {
            return None;
        }
        let mut input = StepInput::default();
        let mut queries = Vec::with_capacity(case.batch);
        let position = ((shared + own) * block_size - 1) as u32;
        for seq in 0..case.batch {
            let prefix = (seq % copies) * shared;
            let rest = first_own + seq * own;
            let pages_start = input.pages.len() as u32;
            input.pages.extend((prefix..prefix + shared).chain(rest..rest + own).map(|page| page as u32));
            input.token_ids.push((seq % NUM_TOKENS) as u32);
            input.positions.push(position);
            input.slots.push(((rest + own) * block_size - 1) as u32);
            queries.push(SequenceQueries {
                query_start: seq as u32,
                num_queries: 1,
                first_position: position,
                pages_start,
            });
        }
        let is_relay = mode == RelayMode::Relay;
        let mut plan = AttentionPlan::default();
        self.cut(is_relay).plan(&queries, &[], &input.pages, None, &mut SharedPrefixes::default(), &mut plan);
        input.attention.push(plan);
        options.sizes.make_decode(&mut input);
        Some(input)
    }

    /// As the engine would cut attention into items.
    fn cut(&self, relays: bool) -> AttentionCut {
        let [num_heads, num_kv_heads, head_dim] = self.heads.shape;
        let token_bytes = self.spec.bytes_per_token() / self.spec.layers.len();
        let heads = AttentionHeads { num_heads, num_kv_heads, head_dim, token_bytes };
        let options = CutOptions { block_size: self.spec.block_size, relays, is_fixed: false };
        AttentionCut::new(&self.info, &heads, &options)
    }

    fn figures(&self, case: Case, mode: RelayMode, step: &StepInput, seconds: f64) -> OperatorFigures {
        let [num_heads, _, head_dim] = self.heads.shape;
        let token_bytes = self.spec.bytes_per_token() / self.spec.layers.len();
        let plan = &step.attention[0];
        let read_bytes: usize = plan.items.iter().map(|item| item.kv_len as usize * token_bytes).sum();
        let held = if mode == RelayMode::NoCache { case.batch * case.shared } else { case.shared };
        let macs = case.batch * (case.shared + case.own) * num_heads * head_dim * 2;
        OperatorFigures {
            us: seconds * 1e6,
            memory_bytes: (held + case.batch * case.own) * token_bytes,
            partial_bytes: plan.num_partials as usize * num_heads * head_dim * size_of::<f32>(),
            read_bytes,
            read_gb_per_s: read_bytes as f64 / seconds / 1e9,
            gmac_per_s: macs as f64 / seconds / 1e9,
        }
    }
}

fn table(results: &[CaseResult], options: &OperatorOptions) -> String {
    let mut text = format!(
        "Attention of one layer, microseconds; keys and values read\n{:<9} {:<4} {:>5} {:>6} {:>4} {:>10} {:>10} {:>10} {:>8} {:>11} {:>11} {:>7}\n",
        "heads",
        "rec.",
        "batch",
        "shared",
        "own",
        "no cache",
        "cached",
        "relay",
        "",
        "cached read",
        "relay read",
        "of peak"
    );
    for result in results {
        let Case { heads, is_recorded, batch, shared, own } = result.case;
        let us = |mode: usize| result.us(mode).map_or_else(|| "-".to_owned(), |us| format!("{us:.1}"));
        let read = |mode: usize| {
            let bytes = result.figures[mode].map_or(0, |figures| figures.read_bytes);
            format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20))
        };
        let speedup = result.speedup().map_or_else(String::new, |speedup| format!("{speedup:.2} x"));
        let share = result.figures[2].and_then(|figures| figures.share_of_peak(&options.limits));
        let share = share.map_or_else(String::new, |share| format!("{:.0} %", share * 100.0));
        let _ = writeln!(
            text,
            "{:<9} {:<4} {batch:>5} {shared:>6} {own:>4} {:>10} {:>10} {:>10} {speedup:>8} {:>11} {:>11} {share:>7}",
            heads.name,
            if is_recorded { "yes" } else { "no" },
            us(0),
            us(1),
            us(2),
            read(1),
            read(2),
        );
    }
    text
}

fn to_json(result: &CaseResult, options: &OperatorOptions) -> Value {
    let Case { heads, is_recorded, batch, shared, own } = result.case;
    let mut json = json!({
        "heads": heads.name,
        "num_heads": heads.shape[0],
        "num_kv_heads": heads.shape[1],
        "head_dim": heads.shape[2],
        "kv_cache_dtype": format!("{:?}", options.kv_dtype).to_lowercase(),
        "recorded": is_recorded,
        "batch_size": batch,
        "shared_len": shared,
        "own_len": own,
        "speedup_over_cached": result.speedup(),
    });
    for (mode, figures) in RelayMode::ALL.iter().zip(&result.figures) {
        json[mode.key()] = figures.map_or(Value::Null, |figures| {
            json!({
                "us": figures.us,
                "memory_bytes": figures.memory_bytes,
                "partial_bytes": figures.partial_bytes,
                "read_bytes": figures.read_bytes,
                "read_gb_per_s": figures.read_gb_per_s,
                "gmac_per_s": figures.gmac_per_s,
                "share_of_peak": figures.share_of_peak(&options.limits),
            })
        });
    }
    json
}

/// Speed-up against the length of the prefix, a curve for each batch; a chart for each kind of heads and own context.
fn charts(results: &[CaseResult], options: &OperatorOptions) -> Vec<Chart> {
    let mut charts = Vec::new();
    for heads in options.heads() {
        for &own in &options.own {
            for is_recorded in [true, false] {
                let of_chart = results.iter().filter(|one| {
                    (one.case.heads, one.case.own, one.case.is_recorded) == (*heads, own, is_recorded)
                });
                let points = of_chart.filter_map(|one| {
                    let name = format!("batch {}", one.case.batch);
                    Some((name, (one.case.shared as f64, one.speedup()?)))
                });
                let curves = curves_by(points);
                if !curves.is_empty() {
                    let recorded = if is_recorded { ", recorded" } else { "" };
                    let title = format!("Attention, {}, {own} own{recorded}", heads.name);
                    let x_title = ("tokens that are shared", XScale::Doubling);
                    charts.push(draw_scaled(&title, x_title, "times as fast as cached", &curves));
                }
            }
        }
    }
    charts
}
