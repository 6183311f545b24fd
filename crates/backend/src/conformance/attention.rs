//! `qkv` and `attention` over every kind of cache, on random sequences and trees of them.

use super::{Built, Case, MAX_TOKENS, Rows, inputs, limits};
use crate::testing::{Random, random_tensor};
use crate::{
    Attention, Backend, BackendError, BranchQueries, Embed, KvDtype, KvLayerSpec, KvSpec, Norm, NormKind,
    NormSpan, Op, PlannerOptions, Program, Qkv, RopeSpec, RopeStyle, SampleRow, SequenceQueries,
    ShareOptions, SharedBytes, SharedPrefixes, StepInput, Tensor, WeightFormat, WeightUse, plan_relay,
};

const HIDDEN: usize = 256;

/// Of four sequences.
const NUM_BLOCKS: usize = 164;

#[derive(Clone, Copy, Debug)]
struct Kind {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    dtype: KvDtype,
    window: Option<u32>,
    softcap: Option<f32>,
    alibi: bool,
    sinks: bool,
    head_norms: bool,
    /// What they are taken over.
    span: NormSpan,
    layer_norms: bool,
    /// Values that an eight-bit cache cannot hold.
    overflows: bool,
    has_rope: bool,
    style: RopeStyle,
    split: u32,
    max_queries: u32,
    block_size: usize,
}

fn kinds() -> Vec<Kind> {
    let plain = Kind {
        heads: 8,
        kv_heads: 2,
        head_dim: 64,
        dtype: KvDtype::BF16,
        window: None,
        softcap: None,
        alibi: false,
        sinks: false,
        head_norms: false,
        span: NormSpan::Head,
        layer_norms: false,
        overflows: false,
        has_rope: true,
        style: RopeStyle::Half,
        split: 0,
        max_queries: 32,
        block_size: 16,
    };
    let mut kinds = Vec::new();
    for (heads, kv_heads, head_dim) in [
        (8, 2, 64),
        (8, 2, 128),
        (4, 2, 256),
        (8, 1, 128),
        (4, 4, 64),
        (4, 2, 16),
        (3, 1, 24),
        (4, 2, 96),
        (24, 1, 64),
    ] {
        for dtype in [KvDtype::BF16, KvDtype::F16] {
            kinds.push(Kind { heads, kv_heads, head_dim, dtype, ..plain });
        }
        kinds.push(Kind { heads, kv_heads, head_dim, split: 32, max_queries: 5, head_norms: true, ..plain });
        kinds.push(Kind { heads, kv_heads, head_dim, window: Some(21), split: 64, ..plain });
        kinds.push(Kind { heads, kv_heads, head_dim, sinks: true, ..plain });
        kinds.push(Kind { heads, kv_heads, head_dim, sinks: true, split: 32, max_queries: 5, ..plain });
        let dtype = KvDtype::F32;
        kinds.push(Kind { heads, kv_heads, head_dim, dtype, split: 32, head_norms: true, ..plain });
    }
    kinds.push(Kind { head_dim: 128, dtype: KvDtype::F32, window: Some(21), softcap: Some(3.0), ..plain });
    kinds.push(Kind { dtype: KvDtype::F32, alibi: true, style: RopeStyle::Interleaved, ..plain });
    kinds.push(Kind { dtype: KvDtype::F32, sinks: true, window: Some(21), split: 32, ..plain });
    kinds.push(Kind { dtype: KvDtype::Int8, sinks: true, split: 64, ..plain });
    kinds.push(Kind { head_dim: 128, softcap: Some(3.0), ..plain });
    kinds.push(Kind { head_dim: 128, alibi: true, split: 16, ..plain });
    kinds.push(Kind {
        head_dim: 128,
        style: RopeStyle::Interleaved,
        max_queries: 0,
        block_size: 64,
        ..plain
    });
    kinds.push(Kind { head_dim: 128, window: Some(50), max_queries: 0, block_size: 8, ..plain });
    kinds.push(Kind { head_dim: 128, dtype: KvDtype::F16, max_queries: 48, block_size: 32, ..plain });
    kinds.push(Kind { head_dim: 128, split: 128, block_size: 128, ..plain });
    kinds.push(Kind { head_dim: 128, has_rope: false, ..plain });
    for (heads, kv_heads, head_dim) in [(8, 2, 64), (8, 1, 128), (4, 2, 96)] {
        kinds.push(Kind { heads, kv_heads, head_dim, dtype: KvDtype::Int8, ..plain });
        kinds.push(Kind {
            heads,
            kv_heads,
            head_dim,
            dtype: KvDtype::Int8,
            window: Some(21),
            split: 64,
            ..plain
        });
    }
    for span in [NormSpan::Head, NormSpan::EachHead, NormSpan::Row] {
        for layer_norms in [false, true] {
            if span == NormSpan::Head && !layer_norms {
                continue;
            }
            let normed = Kind { head_norms: true, span, layer_norms, ..plain };
            kinds.push(Kind { dtype: KvDtype::F32, ..normed });
            kinds.push(Kind { head_dim: 24, style: RopeStyle::Interleaved, ..normed });
        }
    }
    // Guesses in items of as many queries as kernels for decodes take.
    for head_dim in [64, 128] {
        kinds.push(Kind { head_dim, max_queries: 4, ..plain });
        kinds.push(Kind { head_dim, max_queries: 4, split: 64, ..plain });
        kinds.push(Kind { head_dim, max_queries: 4, dtype: KvDtype::F8E4M3, window: Some(90), ..plain });
    }
    kinds.extend(fp8_kinds(Kind { dtype: KvDtype::F8E4M3, ..plain }));
    kinds
}

fn fp8_kinds(plain: Kind) -> Vec<Kind> {
    let mut kinds = Vec::new();
    for (heads, kv_heads, head_dim) in
        [(8, 2, 64), (8, 2, 128), (4, 2, 256), (8, 1, 128), (4, 4, 64), (24, 1, 64), (4, 2, 96), (3, 1, 24)]
    {
        let plain = Kind { heads, kv_heads, head_dim, ..plain };
        kinds.push(plain);
        kinds.push(Kind { split: 32, max_queries: 5, head_norms: true, ..plain });
        kinds.push(Kind { window: Some(21), split: 64, ..plain });
        kinds.push(Kind { softcap: Some(3.0), max_queries: 0, ..plain });
        kinds.push(Kind { sinks: true, split: 32, ..plain });
        kinds.push(Kind { window: Some(50), max_queries: 0, block_size: 8, ..plain });
    }
    for head_dim in [64, 128, 256] {
        kinds.push(Kind { head_dim, alibi: true, split: 16, block_size: 64, ..plain });
        kinds.push(Kind { head_dim, style: RopeStyle::Interleaved, ..plain });
        kinds.push(Kind { head_dim, overflows: true, ..plain });
    }
    kinds
}

/// `[q; k; v]` of a case: random, or for a cache of e4m3 each value one of the hidden ones, so that it is a multiple of a quarter.
fn projection(kind: &Kind, hidden_size: usize, random: &mut Random) -> Tensor {
    let rows = (kind.heads + 2 * kind.kv_heads) * kind.head_dim;
    if kind.dtype != KvDtype::F8E4M3 {
        return random_tensor(WeightFormat::BF16, rows, hidden_size, 0.15, random);
    }
    let mut values = vec![0.0; rows * hidden_size];
    for row in values.chunks_exact_mut(hidden_size) {
        row[random.below(hidden_size)] = if random.below(2) == 0 { 1.0 } else { -1.0 };
    }
    let bytes = values.iter().flat_map(|value| half::bf16::from_f32(*value).to_le_bytes()).collect();
    Tensor::new(WeightFormat::BF16, rows, hidden_size, SharedBytes::from_vec(bytes)).expect("shape")
}

/// `(pages, first position, number of tokens)` of a step.
type Runs<'a> = &'a [(Way, usize, usize)];

/// Whose pages a run reads: up to a position those of one sequence, then of another, then of a third.
#[derive(Clone, Copy, Debug)]
struct Way {
    seqs: [usize; 3],
    until: [usize; 2],
}

impl Way {
    fn of(seq: usize) -> Self {
        Self { seqs: [seq; 3], until: [0; 2] }
    }

    fn seq_at(&self, position: usize, block_size: usize) -> usize {
        let is_before = |until: usize| position / block_size < until / block_size;
        self.seqs[if is_before(self.until[0]) { 0 } else { 2 - usize::from(is_before(self.until[1])) }]
    }
}

fn attention_step(kind: &Kind, runs: Runs) -> StepInput {
    let mut input = StepInput::default();
    let mut seqs = Vec::new();
    for &(way, start, len) in runs {
        let num_pages = (start + len).div_ceil(kind.block_size);
        let seq_at = |position: usize| way.seq_at(position, kind.block_size);
        // Pages of a sequence lie backwards and interleaved with the others'.
        let page = |index: usize| ((40 - index) * 4 + seq_at(index * kind.block_size)) as u32;
        seqs.push(SequenceQueries {
            query_start: input.token_ids.len() as u32,
            num_queries: len as u32,
            first_position: start as u32,
            pages_start: input.pages.len() as u32,
        });
        input.pages.extend((0..num_pages).map(page));
        for position in start..start + len {
            input.token_ids.push(((seq_at(position) * 31 + position * 7) % MAX_TOKENS) as u32);
            input.positions.push(position as u32);
            input.slots.push(
                page(position / kind.block_size) * kind.block_size as u32
                    + (position % kind.block_size) as u32,
            );
        }
    }
    plan_step(kind, &seqs, &[], &mut input);
    input
}

/// Plans the attention of a step.
fn plan_step(kind: &Kind, seqs: &[SequenceQueries], branches: &[BranchQueries], input: &mut StepInput) {
    let options = PlannerOptions {
        block_size: kind.block_size,
        window: kind.window,
        max_kv_per_item: kind.split.next_multiple_of(kind.block_size as u32),
        max_kv_per_shared_item: kind.split.next_multiple_of(kind.block_size as u32),
        max_split_queries: 0,
        max_queries_per_item: kind.max_queries,
    };
    let sharing = ShareOptions {
        block_size: kind.block_size,
        window: kind.window,
        border: kind.block_size as u32,
        min_keys: 0,
        min_seqs: 2,
        max_queries: 4,
        queries_per_read: 0,
        read_cost: 1,
        query_cost: 24,
        step_cost: 0,
    };
    let mut shared = SharedPrefixes::default();
    shared.find(seqs, &input.pages, &sharing);
    input.attention.resize_with(1, Default::default);
    plan_relay(seqs, branches, &shared, &options, &mut input.attention[0]);
}

/// Guesses that are a tree: a decode goes on with a chain of three, another guess departs after the first of them with two more
/// behind it, and from the first of these one departs again. Another sequence decodes beside it.
fn tree_step(kind: &Kind) -> StepInput {
    let mut input = attention_step(kind, &[(Way::of(1), 156, 4), (Way::of(3), 268, 1)]);
    let (chain, beside) = (
        SequenceQueries { query_start: 0, num_queries: 4, first_position: 156, pages_start: 0 },
        SequenceQueries {
            query_start: 4,
            num_queries: 1,
            first_position: 268,
            pages_start: 160_usize.div_ceil(kind.block_size) as u32,
        },
    );
    let departs = |query_start, num_queries| SequenceQueries {
        query_start,
        num_queries,
        first_position: 158,
        pages_start: 0,
    };
    let first_page = input.pages.len() as u32;
    // Blocks of the third sequence, which is short.
    let blocks = [20, 21].map(|index| (40 - index) * 4 + 2);
    input.pages.extend(blocks);
    for (row, (block, place, position)) in
        (0..).zip([(blocks[0], 0, 158), (blocks[0], 1, 159), (blocks[0], 2, 160), (blocks[1], 0, 159)])
    {
        input.token_ids.push(11 + 3 * row);
        input.positions.push(position);
        input.slots.push(block * kind.block_size as u32 + place);
    }
    let branches = [
        BranchQueries { seq: 2, before: Vec::new(), page: first_page },
        BranchQueries { seq: 3, before: vec![(first_page, 1)], page: first_page + 1 },
    ];
    plan_step(kind, &[chain, beside, departs(5, 3), departs(8, 1)], &branches, &mut input);
    input
}

/// Multiples of a quarter: sums of two are e4m3 exactly. A value that is not may be rounded either way by two devices whose
/// sums differ in their last bit, and a step of e4m3 is up to an eighth of the value.
fn quarters(count: usize, random: &mut Random) -> Vec<f32> {
    (0..count).map(|_| (random.below(15) as f32 - 7.0) * 0.25).collect()
}

/// The steps of a kind: prompts in pieces, decodes, both, and relays.
fn steps(kind: &Kind) -> Vec<StepInput> {
    // Decodes that have a beginning in common; each computes a token again.
    let own = |runs: &[(usize, usize, usize)]| -> Vec<(Way, usize, usize)> {
        runs.iter().map(|&(seq, start, len)| (Way::of(seq), start, len)).collect()
    };
    let relayed = (0..24).map(|number| (Way::of(0), 100 + 2 * number, 1)).collect();
    // A tree: two beginnings, four ways to go on from each, ten decodes below each, some of two tokens.
    let tree = (0..80).map(|number: usize| {
        let seqs = [number / 40, [0, 1, 3, 0][number / 10 % 4], 3];
        let way = Way { seqs, until: [48, 96] };
        if number % 10 == 3 { (way, 100 + number / 5, 2) } else { (way, 180 + number, 1) }
    });
    let steps: [Vec<_>; 9] = [
        own(&[(0, 0, 100), (1, 0, 33), (2, 0, 1)]),
        own(&[(0, 100, 1), (1, 33, 1), (2, 1, 1)]),
        own(&[(2, 2, 70), (0, 101, 1), (1, 34, 1), (3, 0, 17)]),
        own(&[(0, 102, 1), (1, 35, 1), (2, 72, 1), (3, 17, 1)]),
        own(&[(1, 36, 120)]),
        own(&[(3, 18, 150)]),
        own(&[(3, 168, 100), (0, 103, 60)]),
        relayed,
        tree.collect(),
    ];
    let mut steps: Vec<_> = steps.iter().map(|runs| attention_step(kind, runs)).collect();
    steps.push(tree_step(kind));
    steps.extend((0..4).map(|number| checked_step(kind, number)));
    steps
}

/// Steps of one shape in which every row gives a token, as a device may record them: guesses are checked and all are wrong, so that
/// the next step has others in their places.
fn checked_step(kind: &Kind, number: usize) -> StepInput {
    let runs = [(0, 158, 5), (3, 262, 5), (1, 150, 4), (2, 70, 1)];
    let mut input = attention_step(kind, &runs.map(|(seq, start, len)| (Way::of(seq), start + number, len)));
    for token in &mut input.token_ids {
        *token = (*token + 17 * number as u32) % MAX_TOKENS as u32;
    }
    input.logit_rows = (0..input.num_tokens() as u32).collect();
    input.samples = input.logit_rows.iter().copied().map(SampleRow::greedy).collect();
    input
}

fn name(kind: &Kind) -> String {
    let flag = |is_set: bool, name: &'static str| if is_set { name } else { "" };
    format!(
        "attention {:?} {}/{}x{} block {} split {} queries {} window {:?}{}{}{}{}{}{}{}{}",
        kind.dtype,
        kind.heads,
        kind.kv_heads,
        kind.head_dim,
        kind.block_size,
        kind.split,
        kind.max_queries,
        kind.window,
        flag(kind.softcap.is_some(), " softcap"),
        flag(kind.alibi, " alibi"),
        flag(kind.sinks, " sinks"),
        flag(kind.head_norms, " head norms"),
        if kind.span == NormSpan::Head && !kind.layer_norms {
            String::new()
        } else {
            format!(" {:?}{}", kind.span, flag(kind.layer_norms, " layer norm"))
        },
        flag(kind.overflows, " overflow"),
        flag(!kind.has_rope, " without rope"),
        flag(kind.style == RopeStyle::Interleaved, " interleaved"),
    )
}

pub(super) fn cases() -> Vec<Case> {
    let case = |kind: Kind| {
        Case::new(name(&kind), steps(&kind), move |backend| build(&kind, backend))
            .allowing(1.5)
            .rounding(kind.dtype != KvDtype::F32)
    };
    kinds().into_iter().map(case).collect()
}

/// Layer 1 of two is used, to see that the other is not written.
fn build(kind: &Kind, backend: &mut dyn Backend) -> Result<Built, BackendError> {
    let layer = KvLayerSpec { num_kv_heads: kind.kv_heads, head_dim: kind.head_dim };
    let spec = KvSpec::full(layer, 2, kind.dtype, kind.block_size);
    backend.check_kv_spec(&spec)?;
    backend.set_limits(&limits())?;
    let mut random = Random::new(9);
    let is_fp8 = kind.dtype == KvDtype::F8E4M3;
    let source = if is_fp8 {
        let values = quarters(MAX_TOKENS * HIDDEN, &mut random);
        Tensor::from_f32(MAX_TOKENS, HIDDEN, &values).expect("as many values as the shape says")
    } else {
        inputs(MAX_TOKENS, HIDDEN, &mut random)
    };
    let source = backend.load_weight(&[source], WeightUse::Embedding)?;
    let weight = projection(kind, HIDDEN, &mut random);
    let rows = weight.rows();
    let weight = backend.load_weight(&[weight], WeightUse::Linear)?;
    let mut bias = if is_fp8 { quarters(rows, &mut random) } else { random.normals(rows) };
    if kind.overflows {
        let first_value = (kind.heads + kind.kv_heads) * kind.head_dim;
        bias[first_value..].iter_mut().step_by(5).for_each(|bias| *bias = 1000.0);
        bias[first_value..].iter_mut().skip(1).step_by(5).for_each(|bias| *bias = -460.0);
    }
    let bias = backend.load_vector(&bias)?;
    let mut norm = |heads: usize| {
        let len = kind.span.weight_len(heads, kind.head_dim);
        let weight = backend.load_vector(&random.normals(len))?;
        let bias = kind.layer_norms.then(|| backend.load_vector(&random.normals(len))).transpose()?;
        let norm_kind = if kind.layer_norms { NormKind::Layer { bias } } else { NormKind::Rms };
        Ok::<_, BackendError>(kind.head_norms.then_some(Norm { kind: norm_kind, weight, eps: 1e-5 }))
    };
    let q_norm = norm(kind.heads)?;
    // One weight for both where that is possible: what is drawn after it stays the same.
    let k_norm = if kind.span == NormSpan::Head { q_norm } else { norm(kind.kv_heads)? };
    let slopes: Vec<f32> = (0..kind.heads).map(|head| 0.5 / (head + 1) as f32).collect();
    let slopes = backend.load_vector(&slopes)?;
    // From far below all scores to as large as any.
    let sinks: Vec<f32> = (0..kind.heads).map(|head| head as f32 - 3.0).collect();
    let sinks = backend.load_vector(&sinks)?;
    let inv_freq = (0..kind.head_dim / 4).map(|i| 0.8_f32.powi(i as i32)).collect();
    let rope = backend.create_rope(&RopeSpec { inv_freq, scale: 1.1, style: kind.style })?;
    backend.create_kv_cache(&spec, NUM_BLOCKS, 0)?;
    let width = kind.heads * kind.head_dim;
    let hidden = backend.create_buffer(MAX_TOKENS, HIDDEN)?;
    let query = backend.create_buffer(MAX_TOKENS, width)?;
    let output = backend.create_buffer(MAX_TOKENS, width)?;
    let ops = vec![
        Op::Embed(Embed { weight: source, scale: 1.0, output: hidden }),
        Op::Qkv(Qkv {
            input: hidden,
            norm: None,
            weight,
            bias: Some(bias),
            q_norm,
            k_norm,
            norm_span: kind.span,
            rope: kind.has_rope.then_some(rope),
            num_heads: kind.heads,
            layer: 1,
            output: query,
        }),
        Op::Attention(Attention {
            layer: 1,
            plan: 0,
            window: kind.window,
            num_heads: kind.heads,
            scale: 1.0 / (kind.head_dim as f32).sqrt() / 4.0,
            softcap: kind.softcap,
            alibi: kind.alibi.then_some(slopes),
            sinks: kind.sinks.then_some(sinks),
            query,
            output,
        }),
    ];
    Ok(Built { program: backend.compile(&Program::new(ops))?, output, rows: Rows::Tokens })
}
