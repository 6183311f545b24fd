//! Attention on random sequences and trees of them, on the device and on the reference backend.

use baton_backend::testing::{List, Op, Random, random_tensor};
use baton_backend::{
    Attention, Backend, Embed, KvDtype, KvLayerSpec, KvSpec, Norm, NormKind, PlannerOptions, Precision, Qkv,
    ReferenceBackend, RopeSpec, RopeStyle, SequenceQueries, ShareOptions, SharedBytes, SharedPrefixes,
    StepInput, Tensor, WeightFormat, WeightUse, plan_relay,
};

use crate::backend;
use crate::ops::{MAX_TOKENS, inputs, limits, quarters, run, tolerance};
use crate::table::Table;

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dtype: KvDtype,
    pub window: Option<u32>,
    pub softcap: Option<f32>,
    pub alibi: bool,
    pub head_norms: bool,
    /// Values that an eight-bit cache cannot hold.
    pub overflows: bool,
    pub style: RopeStyle,
    pub split: u32,
    pub max_queries: u32,
    pub block_size: usize,
}

pub fn cases() -> Vec<Case> {
    let plain = Case {
        heads: 8,
        kv_heads: 2,
        head_dim: 64,
        dtype: KvDtype::BF16,
        window: None,
        softcap: None,
        alibi: false,
        head_norms: false,
        overflows: false,
        style: RopeStyle::Half,
        split: 0,
        max_queries: 32,
        block_size: 16,
    };
    let mut cases = Vec::new();
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
            cases.push(Case { heads, kv_heads, head_dim, dtype, ..plain });
        }
        cases.push(Case { heads, kv_heads, head_dim, split: 32, max_queries: 5, head_norms: true, ..plain });
        cases.push(Case { heads, kv_heads, head_dim, window: Some(21), split: 64, ..plain });
    }
    cases.push(Case { head_dim: 128, dtype: KvDtype::F32, ..plain });
    cases.push(Case { head_dim: 128, softcap: Some(3.0), ..plain });
    cases.push(Case { head_dim: 128, alibi: true, split: 16, ..plain });
    cases.push(Case {
        head_dim: 128,
        style: RopeStyle::Interleaved,
        max_queries: 0,
        block_size: 64,
        ..plain
    });
    cases.push(Case { head_dim: 128, window: Some(50), max_queries: 0, block_size: 8, ..plain });
    cases.push(Case { head_dim: 128, dtype: KvDtype::F16, max_queries: 48, block_size: 32, ..plain });
    cases.push(Case { head_dim: 128, split: 128, block_size: 128, ..plain });
    cases.extend(fp8_cases(Case { dtype: KvDtype::F8E4M3, ..plain }));
    cases
}

fn fp8_cases(plain: Case) -> Vec<Case> {
    let mut cases = Vec::new();
    for (heads, kv_heads, head_dim) in
        [(8, 2, 64), (8, 2, 128), (4, 2, 256), (8, 1, 128), (4, 4, 64), (24, 1, 64), (4, 2, 96), (3, 1, 24)]
    {
        let plain = Case { heads, kv_heads, head_dim, ..plain };
        cases.push(plain);
        cases.push(Case { split: 32, max_queries: 5, head_norms: true, ..plain });
        cases.push(Case { window: Some(21), split: 64, ..plain });
        cases.push(Case { softcap: Some(3.0), max_queries: 0, ..plain });
        cases.push(Case { window: Some(50), max_queries: 0, block_size: 8, ..plain });
    }
    for head_dim in [64, 128, 256] {
        cases.push(Case { head_dim, alibi: true, split: 16, block_size: 64, ..plain });
        cases.push(Case { head_dim, style: RopeStyle::Interleaved, ..plain });
        cases.push(Case { head_dim, overflows: true, ..plain });
    }
    cases
}

/// `[q; k; v]` of a case: random, or for a cache of e4m3 each value one of the hidden ones, so that it is a multiple of a quarter.
fn projection(case: &Case, hidden_size: usize, random: &mut Random) -> Tensor {
    let rows = (case.heads + 2 * case.kv_heads) * case.head_dim;
    if case.dtype != KvDtype::F8E4M3 {
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

fn attention_step(case: &Case, runs: Runs) -> StepInput {
    let mut input = StepInput::default();
    let mut seqs = Vec::new();
    for &(way, start, len) in runs {
        let num_pages = (start + len).div_ceil(case.block_size);
        let seq_at = |position: usize| way.seq_at(position, case.block_size);
        // Pages of a sequence lie backwards and interleaved with the others'.
        let page = |index: usize| ((40 - index) * 4 + seq_at(index * case.block_size)) as u32;
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
                page(position / case.block_size) * case.block_size as u32
                    + (position % case.block_size) as u32,
            );
        }
    }
    let options = PlannerOptions {
        block_size: case.block_size,
        window: case.window,
        max_kv_per_item: case.split.next_multiple_of(case.block_size as u32),
        max_kv_per_shared_item: case.split.next_multiple_of(case.block_size as u32),
        max_split_queries: 0,
        max_queries_per_item: case.max_queries,
    };
    let sharing = ShareOptions {
        block_size: case.block_size,
        window: case.window,
        border: case.block_size as u32,
        min_keys: 0,
        min_seqs: 2,
        max_queries: 4,
        queries_per_read: 0,
        read_cost: 1,
        query_cost: 24,
        step_cost: 0,
    };
    let mut shared = SharedPrefixes::default();
    shared.find(&seqs, &input.pages, &sharing);
    input.attention.resize_with(1, Default::default);
    plan_relay(&seqs, &shared, &options, &mut input.attention[0]);
    input
}

pub fn check(case: &Case, precision: Precision, table: &mut Table) {
    let hidden_size = 256;
    let build = |backend: &mut dyn Backend| {
        let mut random = Random::new(9);
        backend.set_limits(&limits()).expect("limits");
        let is_fp8 = case.dtype == KvDtype::F8E4M3;
        let source = if is_fp8 {
            let values = quarters(MAX_TOKENS * hidden_size, &mut random);
            Tensor::from_f32(MAX_TOKENS, hidden_size, &values).expect("shape")
        } else {
            inputs(MAX_TOKENS, hidden_size, &mut random)
        };
        let source = backend.load_weight(&[source], WeightUse::Embedding).expect("loads");
        let weight = projection(case, hidden_size, &mut random);
        let rows = weight.rows();
        let weight = backend.load_weight(&[weight], WeightUse::Linear).expect("loads");
        let mut bias = if is_fp8 { quarters(rows, &mut random) } else { random.normals(rows) };
        if case.overflows {
            let first_value = (case.heads + case.kv_heads) * case.head_dim;
            bias[first_value..].iter_mut().step_by(5).for_each(|bias| *bias = 1000.0);
            bias[first_value..].iter_mut().skip(1).step_by(5).for_each(|bias| *bias = -460.0);
        }
        let bias = backend.load_vector(&bias).expect("loads");
        let head_weight = backend.load_vector(&random.normals(case.head_dim)).expect("loads");
        let slopes: Vec<f32> = (0..case.heads).map(|head| 0.5 / (head + 1) as f32).collect();
        let slopes = backend.load_vector(&slopes).expect("loads");
        let inv_freq = (0..case.head_dim / 4).map(|i| 0.8_f32.powi(i as i32)).collect();
        let rope =
            backend.create_rope(&RopeSpec { inv_freq, scale: 1.1, style: case.style }).expect("creates");
        let layer = KvLayerSpec { num_kv_heads: case.kv_heads, head_dim: case.head_dim };
        let spec = KvSpec { layers: vec![layer; 2], dtype: case.dtype, block_size: case.block_size };
        backend.create_kv_cache(&spec, 164, 0).expect("creates");
        let width = case.heads * case.head_dim;
        let hidden = backend.create_buffer(MAX_TOKENS, hidden_size).expect("creates");
        let query = backend.create_buffer(MAX_TOKENS, width).expect("creates");
        let output = backend.create_buffer(MAX_TOKENS, width).expect("creates");
        let head_norm =
            case.head_norms.then_some(Norm { kind: NormKind::Rms, weight: head_weight, eps: 1e-5 });
        let qkv = Qkv {
            input: hidden,
            norm: None,
            weight,
            bias: Some(bias),
            q_norm: head_norm,
            k_norm: head_norm,
            rope: Some(rope),
            num_heads: case.heads,
            layer: 1,
            output: query,
        };
        let attention = Attention {
            layer: 1,
            plan: 0,
            window: case.window,
            num_heads: case.heads,
            scale: 1.0 / (case.head_dim as f32).sqrt() / 4.0,
            softcap: case.softcap,
            alibi: case.alibi.then_some(slopes),
            query,
            output,
        };
        let embed = Embed { weight: source, scale: 1.0, output: hidden };
        (List(vec![Op::Embed(embed), Op::Qkv(qkv), Op::Attention(attention)]), output)
    };
    let (mut cuda, mut reference) = (backend(precision), ReferenceBackend::new());
    let (program, output) = build(&mut cuda);
    let _ = build(&mut reference);
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
    let steps = [
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
    let (mut expected, mut got) = (Vec::new(), Vec::new());
    for runs in &steps {
        let input = attention_step(case, runs);
        expected.extend(run(&mut reference, &input, &program, output));
        got.extend(run(&mut cuda, &input, &program, output));
    }
    let name = format!(
        "attention {precision:?} {}/{}x{} {:?} block {} split {} window {:?}{}{}{}",
        case.heads,
        case.kv_heads,
        case.head_dim,
        case.dtype,
        case.block_size,
        case.split,
        case.window,
        if case.softcap.is_some() { " softcap" } else { "" },
        if case.alibi { " alibi" } else { "" },
        if case.overflows { " overflow" } else { "" }
    );
    table.compare(&name, &expected, &got, 1.5 * tolerance(precision));
}
