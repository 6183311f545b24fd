//! The attention part of `baton bench kernels`: a prompt, bound by arithmetic, and a decode after it, bound by reading the KV
//! cache. There are enough layers for the KV cache to be larger than the processor's caches.

use baton_backend::testing::Random;
use baton_backend::{
    Attention, AttentionCut, AttentionHeads, AttentionPlan, Backend, BackendError, BufferId, CutOptions,
    Embed, KvDtype, KvLayerSpec, KvSpec, LatentKv, Linear, Norm, NormKind, NormSpan, Op, Program, ProgramId,
    Qkv, RopeSpec, RopeStyle, SequenceQueries, SharedPrefixes, StepInput, StepLimits, Tensor, WeightId,
    WeightUse,
};

use crate::kernels::{KernelSizes, step_seconds};

/// Some sequences of one length. A prompt is measured where there is one sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionCase {
    pub(crate) heads: &'static str,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    /// Of a latent, what is rotated: values are the rest of a key, which is read once.
    rotary: Option<usize>,
    pub(crate) num_seqs: usize,
    pub(crate) context: usize,
}

const fn heads(
    heads: &'static str,
    (num_heads, num_kv_heads, head_dim): (usize, usize, usize),
    num_seqs: usize,
    context: usize,
) -> AttentionCase {
    AttentionCase { heads, num_heads, num_kv_heads, head_dim, rotary: None, num_seqs, context }
}

const fn smollm2(context: usize) -> AttentionCase {
    heads("SmolLM2", (9, 3, 64), 1, context)
}

const fn llama_1b(context: usize) -> AttentionCase {
    heads("Llama-1B", (32, 8, 64), 1, context)
}

const fn llama_8b(num_seqs: usize, context: usize) -> AttentionCase {
    heads("Llama-8B", (32, 8, 128), num_seqs, context)
}

const fn latent(num_seqs: usize, context: usize) -> AttentionCase {
    AttentionCase { rotary: Some(64), ..heads("16 x (512 + 64)", (16, 1, 576), num_seqs, context) }
}

pub(crate) const SMALL: &[AttentionCase] =
    &[smollm2(512), smollm2(2048), smollm2(8192), llama_1b(512), llama_1b(2048), llama_1b(8192)];
pub(crate) const LARGE: &[AttentionCase] = &[
    llama_1b(2048),
    llama_1b(8192),
    llama_8b(1, 512),
    llama_8b(1, 2048),
    llama_8b(1, 8192),
    llama_8b(1, 131_072),
    llama_8b(8, 640),
    llama_8b(8, 16_384),
    llama_8b(32, 640),
    llama_8b(32, 4096),
    llama_8b(256, 640),
    latent(1, 2048),
    latent(1, 16_384),
    latent(8, 640),
    latent(64, 640),
    latent(256, 640),
    latent(64, 4096),
];
const MAX_LAYERS: usize = 256;
/// Width of the rows that queries, keys and values are made from: as little as there can be.
const HIDDEN: usize = 32;
/// The best of this many runs counts: others were disturbed.
const RUNS: usize = 3;

/// One shape of heads with one context.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionFigures {
    pub heads: &'static str,
    pub kv_dtype: KvDtype,
    pub num_seqs: usize,
    pub context: usize,
    /// Keys and values read per second by a decode.
    pub decode_gb_per_s: f64,
    /// Microseconds of one layer of that decode.
    pub decode_us: f64,
    /// Products per second of a prompt of as many tokens, where there is one sequence.
    pub prompt_gmac_per_s: Option<f64>,
}

pub(crate) fn measure(
    mut backend: Box<dyn Backend>,
    case: &AttentionCase,
    kv_dtype: KvDtype,
    sizes: KernelSizes,
) -> Result<AttentionFigures, BackendError> {
    let &AttentionCase { heads, num_heads, num_kv_heads, head_dim, rotary, num_seqs, context } = case;
    let device = backend.device();
    let layer = KvLayerSpec { num_kv_heads, head_dim };
    let one = KvSpec::full(layer, 1, kv_dtype, device.block_size);
    let layer_bytes = one.bytes_per_token() * context * num_seqs;
    let num_layers = (sizes.cache_bytes() / layer_bytes).clamp(1, MAX_LAYERS);
    let spec = KvSpec::full(layer, num_layers, kv_dtype, device.block_size);
    backend.check_kv_spec(&spec)?;
    let max_tokens = if num_seqs == 1 { context } else { num_seqs };
    backend.set_limits(&StepLimits {
        max_tokens,
        max_seqs: num_seqs,
        max_logit_rows: num_seqs,
        max_samples: num_seqs,
        max_model_len: context,
        vocab_size: 1,
    })?;
    let mut random = Random::new(2);
    let table = load(&mut *backend, &mut random, 1, WeightUse::Embedding)?;
    let rows = (num_heads + 2 * num_kv_heads) * head_dim;
    let weight = load(&mut *backend, &mut random, rows, WeightUse::Linear)?;
    let input = backend.create_buffer(max_tokens, HIDDEN)?;
    let query = backend.create_buffer(max_tokens, num_heads * head_dim)?;
    let output = backend.create_buffer(max_tokens, num_heads * head_dim)?;
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
    let latents = rotary
        .map(|rotary| Latents::new(&mut *backend, &mut random, (case, rotary), max_tokens, [input, query]))
        .transpose()?;
    backend.create_kv_cache(&spec, num_seqs * context.div_ceil(spec.block_size), 0)?;
    let keys = |layer| latents.as_ref().map_or_else(|| vec![qkv(layer)], |latents| latents.ops(layer));
    let scale = 1.0 / (head_dim as f32).sqrt();
    let attention = |layer| {
        let (plan, window, softcap, alibi, sinks) = (0, None, None, None, None);
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
    let embed = Embed { weight: table, scale: 1.0, output: input };
    let num_layers = spec.layers.len();
    let program = |ops: Vec<Op>| Program::new([vec![Op::Embed(embed)], ops].concat());
    let token_bytes = spec.bytes_per_token() / num_layers;
    let cut = AttentionCut::new(
        &device,
        &AttentionHeads { num_heads, num_kv_heads, head_dim, token_bytes },
        &CutOptions { block_size: spec.block_size, relays: false, is_fixed: false },
    );
    let step = |num_seqs, first, count| step(num_seqs, first, count, spec.block_size, &cut);
    let fill = backend.compile(&program((0..num_layers).flat_map(keys).collect()))?;
    let value_dim = head_dim - rotary.unwrap_or(0);
    let mut prompt_gmac_per_s = None;
    if num_seqs == 1 {
        let prompt = step(1, 0, context);
        seconds(&mut *backend, fill, &prompt, 1)?;
        let attend = backend.compile(&program(vec![attention(0)]))?;
        let prompt_s = seconds(&mut *backend, attend, &prompt, RUNS)?;
        let macs = (context * (context + 1) / 2 * num_heads * (head_dim + value_dim)) as f64;
        prompt_gmac_per_s = Some(macs / prompt_s / 1e9);
    }
    let mut decode = step(num_seqs, context - 1, 1);
    sizes.make_decode(&mut decode);
    let all = backend.compile(&program((0..num_layers).map(attention).collect()))?;
    let decode_s = seconds(&mut *backend, all, &decode, 2 * RUNS)?;
    // Of a latent the key is read alone.
    let planes_kept = if rotary.is_some() { 2 } else { 1 };
    Ok(AttentionFigures {
        heads,
        kv_dtype,
        num_seqs,
        context,
        decode_gb_per_s: (layer_bytes / planes_kept * num_layers) as f64 / decode_s / 1e9,
        decode_us: decode_s / num_layers as f64 * 1e6,
        prompt_gmac_per_s,
    })
}

fn load(
    backend: &mut dyn Backend,
    random: &mut Random,
    rows: usize,
    usage: WeightUse,
) -> Result<WeightId, BackendError> {
    let values = random.normals(rows * HIDDEN);
    let tensor = Tensor::from_f32(rows, HIDDEN, &values).expect("as many values as the shape says");
    backend.load_weight(&[tensor], usage)
}

/// What makes queries, and the latents that are their keys.
struct Latents {
    linears: [Op; 3],
    /// For layer 0.
    keys: LatentKv,
}

impl Latents {
    fn new(
        backend: &mut dyn Backend,
        random: &mut Random,
        (case, rotary): (&AttentionCase, usize),
        max_tokens: usize,
        [input, query]: [BufferId; 2],
    ) -> Result<Self, BackendError> {
        let &AttentionCase { num_heads, head_dim, .. } = case;
        let ends = backend.create_buffer(max_tokens, num_heads * 2 * rotary)?;
        let latent = backend.create_buffer(max_tokens, head_dim)?;
        let mut linear = |rows: usize, output| {
            let weight = load(backend, random, rows, WeightUse::Linear)?;
            let linear = Linear { input, norm: None, weight, bias: None, output, accumulate: false };
            Ok::<_, BackendError>(Op::Linear(linear))
        };
        let linears = [
            linear(num_heads * head_dim, query)?,
            linear(num_heads * 2 * rotary, ends)?,
            linear(head_dim, latent)?,
        ];
        let weight = backend.load_vector(&vec![1.0; head_dim - rotary])?;
        let norm = Norm { kind: NormKind::Rms, weight, eps: 1e-6 };
        let inv_freq = (0..rotary / 2).map(|i| 0.9_f32.powi(i as i32)).collect();
        let rope = backend.create_rope(&RopeSpec { inv_freq, scale: 1.0, style: RopeStyle::Interleaved })?;
        let keys = LatentKv { latent, norm, query: ends, rope, num_heads, layer: 0, output: query };
        Ok(Self { linears, keys })
    }

    fn ops(&self, layer: usize) -> Vec<Op> {
        let keys = Op::LatentKv(LatentKv { layer, ..self.keys });
        self.linears.iter().cloned().chain([keys]).collect()
    }
}

/// Tokens `first..first + count` of some sequences, each with pages of its own.
fn step(num_seqs: usize, first: usize, count: usize, block_size: usize, cut: &AttentionCut) -> StepInput {
    let num_pages = (first + count).div_ceil(block_size);
    let places = || (0..num_seqs).flat_map(|seq| (first..first + count).map(move |position| (seq, position)));
    let mut input = StepInput {
        token_ids: vec![0; num_seqs * count],
        positions: places().map(|(_, position)| position as u32).collect(),
        slots: places().map(|(seq, position)| (seq * num_pages * block_size + position) as u32).collect(),
        pages: (0..(num_seqs * num_pages) as u32).collect(),
        ..StepInput::default()
    };
    let sequence = |seq: usize| SequenceQueries {
        query_start: (seq * count) as u32,
        num_queries: count as u32,
        first_position: first as u32,
        pages_start: (seq * num_pages) as u32,
    };
    let sequences: Vec<_> = (0..num_seqs).map(sequence).collect();
    let mut plan = AttentionPlan::default();
    cut.plan(&sequences, &[], &input.pages, None, &mut SharedPrefixes::default(), &mut plan);
    input.attention.push(plan);
    input
}

/// The shortest of some runs.
fn seconds(
    backend: &mut dyn Backend,
    program: ProgramId,
    input: &StepInput,
    runs: usize,
) -> Result<f64, BackendError> {
    let mut best = f64::MAX;
    for _ in 0..runs {
        best = best.min(step_seconds(backend, input, program)?);
    }
    Ok(best.max(1e-9))
}
