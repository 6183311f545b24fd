//! The attention part of `baton bench kernels`: a prompt, limited by arithmetic, and a decode at the end of it, limited by
//! reading the cache. Layers are as many as it takes for the cache to be larger than the processor's own.

use std::time::Instant;

use baton_backend::testing::Random;
use baton_backend::{
    Attention, AttentionPlan, Backend, BackendError, Embed, KvDtype, KvLayerSpec, KvSpec, Ops,
    PlannerOptions, Program, Qkv, SequenceQueries, StepInput, StepLimits, StepOutput, Tensor, WeightUse,
    choose_split, plan_attention,
};

/// `(name, heads, kv heads, head_dim)`.
pub(crate) const HEADS: [(&str, usize, usize, usize); 2] = [("SmolLM2", 9, 3, 64), ("Llama-1B", 32, 8, 64)];
/// Tokens of the prompt, and keys of the decode.
pub(crate) const CONTEXTS: [usize; 3] = [512, 2048, 8192];
/// The cache of one measurement: several times the last-level cache.
const TOTAL_BYTES: usize = 192 << 20;
const MAX_LAYERS: usize = 256;
/// Width of the rows that queries, keys and values are made from: as little as there can be.
const HIDDEN: usize = 32;
/// The best of so many runs counts: others are disturbed.
const RUNS: usize = 3;

/// One shape of heads with one context.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionFigures {
    pub heads: &'static str,
    pub kv_dtype: KvDtype,
    pub context: usize,
    /// Keys and values read a second by a decode.
    pub decode_gb_per_s: f64,
    /// Microseconds of one layer of that decode.
    pub decode_us: f64,
    /// Products a second of a prompt of as many tokens.
    pub prompt_gmac_per_s: f64,
}

enum Op {
    Qkv(Qkv),
    Attention(Attention),
}

struct Layers {
    embed: Embed,
    ops: Vec<Op>,
}

impl Program for Layers {
    fn run(&self, ops: &mut dyn Ops) {
        ops.embed(&self.embed);
        for op in &self.ops {
            match op {
                Op::Qkv(op) => ops.qkv(op),
                Op::Attention(op) => ops.attention(op),
            }
        }
    }
}

pub(crate) fn measure(
    mut backend: Box<dyn Backend>,
    (heads, num_heads, num_kv_heads, head_dim): (&'static str, usize, usize, usize),
    kv_dtype: KvDtype,
    context: usize,
) -> Result<AttentionFigures, BackendError> {
    let device = backend.device();
    let layer = KvLayerSpec { num_kv_heads, head_dim };
    let one = KvSpec { layers: vec![layer], dtype: kv_dtype, block_size: device.block_size };
    let layer_bytes = one.bytes_per_token() * context;
    let spec = KvSpec { layers: vec![layer; (TOTAL_BYTES / layer_bytes).clamp(1, MAX_LAYERS)], ..one };
    backend.check_kv_spec(&spec)?;
    backend.set_limits(&StepLimits {
        max_tokens: context,
        max_seqs: 1,
        max_logit_rows: 1,
        max_samples: 1,
        max_model_len: context,
        vocab_size: 1,
    })?;
    let mut random = Random::new(2);
    let mut weight = |rows: usize, usage: WeightUse| {
        let values = random.normals(rows * HIDDEN);
        let tensor = Tensor::from_f32(rows, HIDDEN, &values).expect("as many values as the shape says");
        backend.load_weight(&[tensor], usage)
    };
    let table = weight(1, WeightUse::Embedding)?;
    let weight = weight((num_heads + 2 * num_kv_heads) * head_dim, WeightUse::Linear)?;
    backend.create_kv_cache(&spec, context.div_ceil(spec.block_size), 0)?;
    let input = backend.create_buffer(context, HIDDEN)?;
    let query = backend.create_buffer(context, num_heads * head_dim)?;
    let output = backend.create_buffer(context, num_heads * head_dim)?;
    let qkv = |layer| {
        let (norm, bias, q_norm, k_norm, rope) = (None, None, None, None, None);
        Op::Qkv(Qkv { input, norm, weight, bias, q_norm, k_norm, rope, num_heads, layer, output: query })
    };
    let scale = 1.0 / (head_dim as f32).sqrt();
    let attention = |layer| {
        let (plan, window, softcap, alibi) = (0, None, None, None);
        Op::Attention(Attention { layer, plan, window, num_heads, scale, softcap, alibi, query, output })
    };
    let embed = Embed { weight: table, scale: 1.0, output: input };
    let num_layers = spec.layers.len();
    let program = |ops: Vec<Op>| Layers { embed, ops };
    let cut = Cut { block_size: spec.block_size, num_kv_heads, units: device.attention_units };
    let prompt = step(0, context, &cut);
    seconds(&mut *backend, &program((0..num_layers).map(qkv).collect()), &prompt, 1)?;
    let prompt_s = seconds(&mut *backend, &program(vec![attention(0)]), &prompt, RUNS)?;
    let decode = step(context - 1, 1, &cut);
    let all = program((0..num_layers).map(attention).collect());
    let decode_s = seconds(&mut *backend, &all, &decode, 2 * RUNS)?;
    let macs = (context * (context + 1) / 2 * num_heads * 2 * head_dim) as f64;
    Ok(AttentionFigures {
        heads,
        kv_dtype,
        context,
        decode_gb_per_s: (layer_bytes * num_layers) as f64 / decode_s / 1e9,
        decode_us: decode_s / num_layers as f64 * 1e6,
        prompt_gmac_per_s: macs / prompt_s / 1e9,
    })
}

/// What the cutting of attention into items depends on.
struct Cut {
    block_size: usize,
    num_kv_heads: usize,
    units: usize,
}

/// Tokens `first..first + count` of one sequence.
fn step(first: usize, count: usize, cut: &Cut) -> StepInput {
    let positions: Vec<u32> = (first..first + count).map(|position| position as u32).collect();
    let mut input = StepInput {
        token_ids: vec![0; count],
        slots: positions.clone(),
        positions,
        pages: (0..(first + count).div_ceil(cut.block_size) as u32).collect(),
        ..StepInput::default()
    };
    let sequence = SequenceQueries {
        query_start: 0,
        num_queries: count as u32,
        first_position: first as u32,
        pages_start: 0,
    };
    let mut options = PlannerOptions {
        block_size: cut.block_size,
        window: None,
        max_kv_per_item: 0,
        // As the engine cuts prompts.
        max_queries_per_item: 32,
        max_split_queries: 8,
    };
    if cut.units > 0 {
        options.max_kv_per_item = choose_split(&[sequence], &options, cut.num_kv_heads, cut.units);
    }
    let mut plan = AttentionPlan::default();
    plan_attention(&[sequence], &options, &mut plan);
    input.attention.push(plan);
    input
}

/// The shortest of some runs.
fn seconds(
    backend: &mut dyn Backend,
    program: &Layers,
    input: &StepInput,
    runs: usize,
) -> Result<f64, BackendError> {
    let mut best = f64::MAX;
    for _ in 0..runs {
        let started = Instant::now();
        backend.submit(input, program)?;
        backend.collect(&mut StepOutput::default())?;
        best = best.min(started.elapsed().as_secs_f64());
    }
    Ok(best.max(1e-9))
}
