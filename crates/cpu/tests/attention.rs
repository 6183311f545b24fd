//! `qkv` and `attention` on every instruction set: against the reference backend, and prompts, chunks and decodes bit by
//! bit against each other.

mod common;

use baton_backend::testing::random_tensor;
use baton_backend::{
    Attention, AttentionPlan, Backend, BlockCopy, BufferId, Embed, KvDtype, KvLayerSpec, KvSpec, Norm,
    NormKind, NormSpan, PlannerOptions, Qkv, ReferenceBackend, RopeSpec, RopeStyle, SequenceQueries,
    ShareOptions, SharedPrefixes, StepInput, WeightFormat, WeightUse, plan_attention, plan_relay,
};
use baton_cpu::Isa;
use common::{Op, bits, cpu, error, limits, load_inputs, paths, random, run, run_and_read};

const BLOCK_SIZE: usize = 16;
const NUM_BLOCKS: usize = 96;
const HIDDEN: usize = 64;
const VOCAB: usize = 97;
const MAX_TOKENS: usize = 320;

/// What varies between tests.
#[derive(Clone, Copy, Debug)]
struct Case {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    rotary_dim: usize,
    style: RopeStyle,
    dtype: KvDtype,
    window: Option<u32>,
    softcap: Option<f32>,
    alibi: bool,
    sinks: bool,
    head_norms: bool,
    split: u32,
}

const PLAIN: Case = Case {
    num_heads: 6,
    num_kv_heads: 2,
    head_dim: 32,
    rotary_dim: 32,
    style: RopeStyle::Half,
    dtype: KvDtype::F32,
    window: None,
    softcap: None,
    alibi: false,
    sinks: false,
    head_norms: false,
    split: 0,
};

fn cases() -> Vec<Case> {
    vec![
        PLAIN,
        Case { dtype: KvDtype::F16, style: RopeStyle::Interleaved, split: 64, ..PLAIN },
        Case { dtype: KvDtype::BF16, head_norms: true, rotary_dim: 16, window: Some(50), ..PLAIN },
        Case { dtype: KvDtype::F16, head_dim: 40, rotary_dim: 20, window: Some(33), split: 32, ..PLAIN },
        Case { dtype: KvDtype::F16, num_heads: 7, num_kv_heads: 1, head_dim: 80, rotary_dim: 80, ..PLAIN },
        Case { dtype: KvDtype::BF16, num_heads: 8, num_kv_heads: 8, head_dim: 64, alibi: true, ..PLAIN },
        Case { softcap: Some(2.0), alibi: true, num_heads: 8, num_kv_heads: 8, ..PLAIN },
        Case { head_dim: 40, rotary_dim: 20, window: Some(33), split: 32, alibi: true, ..PLAIN },
        Case { num_heads: 70, num_kv_heads: 1, head_dim: 16, rotary_dim: 16, split: 16, ..PLAIN },
        Case { dtype: KvDtype::Int8, style: RopeStyle::Interleaved, split: 64, ..PLAIN },
        Case { dtype: KvDtype::Int8, head_dim: 40, rotary_dim: 20, window: Some(50), ..PLAIN },
        Case { sinks: true, window: Some(33), split: 32, ..PLAIN },
        Case { dtype: KvDtype::BF16, sinks: true, num_heads: 8, num_kv_heads: 1, head_dim: 64, ..PLAIN },
    ]
}

struct Setup {
    ops: Vec<Op>,
    output: BufferId,
}

fn build(backend: &mut dyn Backend, case: &Case) -> Setup {
    let mut random = random(41);
    backend.set_limits(&limits(MAX_TOKENS, VOCAB)).expect("limits");
    let table = load_inputs(backend, VOCAB, HIDDEN, &random.normals(VOCAB * HIDDEN));
    let rows = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim;
    let weight = random_tensor(WeightFormat::F32, rows, HIDDEN, 0.5, &mut random);
    let weight = backend.load_weight(&[weight], WeightUse::Linear).expect("loads");
    let bias = backend.load_vector(&random.normals(rows)).expect("loads");
    let norm_weight = backend.load_vector(&random.normals(HIDDEN)).expect("loads");
    let head_weight = backend.load_vector(&random.normals(case.head_dim)).expect("loads");
    let slopes: Vec<f32> = (0..case.num_heads).map(|head| 0.5 / (head + 1) as f32).collect();
    let slopes = backend.load_vector(&slopes).expect("loads");
    let sinks: Vec<f32> = (0..case.num_heads).map(|head| head as f32 - 3.0).collect();
    let sinks = backend.load_vector(&sinks).expect("loads");
    let inv_freq = (0..case.rotary_dim / 2).map(|i| 0.7f32.powi(i as i32)).collect();
    let rope = backend.create_rope(&RopeSpec { inv_freq, scale: 1.1, style: case.style }).expect("creates");
    let layer = KvLayerSpec { num_kv_heads: case.num_kv_heads, head_dim: case.head_dim };
    let spec = KvSpec::full(layer, 2, case.dtype, BLOCK_SIZE);
    backend.create_kv_cache(&spec, NUM_BLOCKS, 8).expect("creates");
    let width = case.num_heads * case.head_dim;
    let input = backend.create_buffer(MAX_TOKENS, HIDDEN).expect("creates");
    let query = backend.create_buffer(MAX_TOKENS, width).expect("creates");
    let output = backend.create_buffer(MAX_TOKENS, width).expect("creates");
    let norm = |weight| Norm { kind: NormKind::Rms, weight, eps: 1e-5 };
    let head_norm = case.head_norms.then_some(norm(head_weight));
    let ops = vec![
        Op::Embed(Embed { weight: table, scale: 1.0, output: input }),
        Op::Qkv(Qkv {
            input,
            norm: Some(norm(norm_weight)),
            weight,
            bias: Some(bias),
            q_norm: head_norm,
            k_norm: head_norm,
            norm_span: NormSpan::Head,
            rope: Some(rope),
            num_heads: case.num_heads,
            layer: 1,
            output: query,
        }),
        Op::Attention(Attention {
            layer: 1,
            plan: 0,
            window: case.window,
            num_heads: case.num_heads,
            scale: 0.2,
            softcap: case.softcap,
            alibi: case.alibi.then_some(slopes),
            sinks: case.sinks.then_some(sinks),
            query,
            output,
        }),
    ];
    Setup { ops, output }
}

/// A run of tokens of one sequence: its first block, the position of its first token, how many.
#[derive(Clone, Copy)]
struct Run {
    first_block: usize,
    start: usize,
    len: usize,
}

/// A step of these runs. The sequence of block `b` has its pages from `b` on, in reverse order.
fn step(case: &Case, runs: &[Run]) -> StepInput {
    let mut input = StepInput::default();
    let mut seqs = Vec::new();
    for run in runs {
        let num_pages = (run.start + run.len).div_ceil(BLOCK_SIZE);
        let page = |index: usize| run.first_block + 20 - index;
        seqs.push(SequenceQueries {
            query_start: input.token_ids.len() as u32,
            num_queries: run.len as u32,
            first_position: run.start as u32,
            pages_start: input.pages.len() as u32,
        });
        input.pages.extend((0..num_pages).map(|index| page(index) as u32));
        for position in run.start..run.start + run.len {
            input.token_ids.push(((position * 31 + run.first_block) % VOCAB) as u32);
            input.positions.push(position as u32);
            let slot = page(position / BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE;
            input.slots.push(slot as u32);
        }
    }
    let options = PlannerOptions {
        block_size: BLOCK_SIZE,
        window: case.window,
        max_kv_per_item: case.split,
        max_kv_per_shared_item: 0,
        max_split_queries: 0,
        max_queries_per_item: 0,
    };
    let mut plan = AttentionPlan::default();
    plan_attention(&seqs, &options, &mut plan);
    input.attention.push(plan);
    input
}

/// Prompts, a chunk and decodes of three sequences over several steps.
fn history() -> Vec<Vec<Run>> {
    let run = |first_block, start, len| Run { first_block, start, len };
    vec![
        vec![run(0, 0, 70), run(21, 0, 3)],
        vec![run(0, 70, 61), run(21, 3, 1), run(42, 0, 129)],
        vec![run(42, 129, 1), run(0, 131, 1), run(21, 4, 1)],
    ]
}

/// Keys that round to another f16, bf16 or i8 than the reference's move a result by that rounding.
fn limit(dtype: KvDtype, isa: Isa) -> f32 {
    match dtype {
        KvDtype::F32 => 2e-5,
        // Queries and keys are rounded to bf16, that is scores of some 18 by some 0.03, and weights by as much.
        KvDtype::F16 | KvDtype::BF16 | KvDtype::Int8 if isa == Isa::Avx512Bf16 => 4e-2,
        KvDtype::F16 | KvDtype::BF16 => 4e-3,
        KvDtype::Int8 | KvDtype::F8E4M3 => 1e-2,
    }
}

#[test]
fn every_kind_agrees_with_the_reference() {
    for case in cases() {
        let mut reference = ReferenceBackend::new();
        let setup = build(&mut reference, &case);
        let steps: Vec<StepInput> = history().iter().map(|runs| step(&case, runs)).collect();
        let expected: Vec<Vec<f32>> =
            steps.iter().map(|input| run_and_read(&mut reference, input, &setup.ops, setup.output)).collect();
        for isa in paths() {
            let mut backend = cpu(isa, 2);
            let setup = build(&mut backend, &case);
            for (input, expected) in steps.iter().zip(&expected) {
                let got = run_and_read(&mut backend, input, &setup.ops, setup.output);
                let error = error(&got, expected);
                assert!(error < limit(case.dtype, isa), "{case:?} on {isa}: {error}");
            }
        }
    }
}

#[test]
fn a_prompt_equals_its_chunks_and_its_decodes_to_the_bit() {
    for case in cases() {
        for isa in paths() {
            let run_all = |cuts: &[usize], threads: usize, neighbour: bool| -> Vec<u32> {
                let mut backend = cpu(isa, threads);
                let setup = build(&mut backend, &case);
                let mut rows = Vec::new();
                for pair in cuts.windows(2) {
                    let mut runs = vec![Run { first_block: 0, start: pair[0], len: pair[1] - pair[0] }];
                    if neighbour {
                        runs.insert(0, Run { first_block: 30, start: 0, len: 5 });
                    }
                    let input = step(&case, &runs);
                    let got = run_and_read(&mut backend, &input, &setup.ops, setup.output);
                    let width = got.len() / input.num_tokens();
                    rows.extend(bits(&got[if neighbour { 5 * width } else { 0 }..]));
                }
                rows
            };
            let whole = run_all(&[0, 150], 1, false);
            assert!(whole == run_all(&[0, 150], 3, true), "{case:?} on {isa}: another batch");
            assert!(whole == run_all(&[0, 37, 100, 150], 2, true), "{case:?} on {isa}: chunks");
            let single: Vec<usize> = [0].into_iter().chain(60..=150).collect();
            assert!(whole == run_all(&single, 2, false), "{case:?} on {isa}: decodes");
        }
    }
}

#[test]
fn a_long_context_in_segments_has_the_same_bits_however_it_is_split() {
    // Three segments; the last tokens as one chunk of one thread, and as decodes that several threads share.
    let (start, end) = (1290, 1300);
    let cases = [
        Case { dtype: KvDtype::F16, ..PLAIN },
        Case { dtype: KvDtype::Int8, window: Some(600), ..PLAIN },
        Case { head_dim: 40, rotary_dim: 20, alibi: true, softcap: Some(2.0), ..PLAIN },
        Case { dtype: KvDtype::F16, sinks: true, ..PLAIN },
    ];
    let run_all = |backend: &mut dyn Backend, case: &Case, one_by_one: bool| -> Vec<f32> {
        let setup = build(backend, case);
        let mut cuts: Vec<usize> = (0..start).step_by(258).collect();
        cuts.extend(if one_by_one { (start..=end).collect() } else { vec![start, end] });
        let mut rows = Vec::new();
        for pair in cuts.windows(2) {
            let input =
                step(case, &[Run { first_block: NUM_BLOCKS - 21, start: pair[0], len: pair[1] - pair[0] }]);
            rows.extend(run_and_read(backend, &input, &setup.ops, setup.output));
        }
        rows
    };
    for case in cases {
        let reference = run_all(&mut ReferenceBackend::new(), &case, false);
        for isa in paths() {
            let whole = run_all(&mut cpu(isa, 1), &case, false);
            let limit = limit(case.dtype, isa);
            assert!(error(&whole, &reference) < limit, "{case:?} on {isa}: {}", error(&whole, &reference));
            for threads in [1, 2, 5] {
                let got = run_all(&mut cpu(isa, threads), &case, true);
                assert!(bits(&whole) == bits(&got), "{case:?} on {isa}, {threads} threads");
            }
        }
    }
}

#[test]
fn eight_bits_stay_close_to_f32() {
    // With one key there is no choice, so the first token's result is its value to within half a step of 1/127, and its factor
    // may be rounded to bf16.
    for isa in paths() {
        let rounding = if isa == Isa::Avx512Bf16 { 2e-3 } else { 0.0 };
        let run_with = |dtype: KvDtype| {
            let case = Case { dtype, ..PLAIN };
            let mut backend = cpu(isa, 2);
            let setup = build(&mut backend, &case);
            let input = step(&case, &[Run { first_block: 0, start: 0, len: 150 }]);
            run_and_read(&mut backend, &input, &setup.ops, setup.output)
        };
        let (exact, got) = (run_with(KvDtype::F32), run_with(KvDtype::Int8));
        for (exact, got) in
            exact[..PLAIN.num_heads * PLAIN.head_dim].chunks(32).zip(got.chunks(PLAIN.head_dim))
        {
            let error = error(got, exact);
            assert!(error > 1e-4 && error < 0.5001 / 127.0 + rounding, "{isa}: {error}");
        }
        // These scores have a deviation of about 18, so the softmax is sharp and near ties turn over.
        let square = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x * x)).sum::<f64>();
        let difference = square(&mut got.iter().zip(&exact).map(|(a, b)| a - b));
        let error = (difference / square(&mut exact.iter().copied())).sqrt();
        assert!(error < 0.02 + 10.0 * f64::from(rounding), "{isa}: {error}");
    }
}

#[test]
fn a_head_of_zeros_is_stored_and_one_that_is_no_number_shows() {
    let case = Case { dtype: KvDtype::Int8, ..PLAIN };
    for isa in paths() {
        for (fill, is_number) in [(0.0, true), (1e-38, true), (f32::NAN, false), (f32::INFINITY, false)] {
            let mut backend = cpu(isa, 1);
            backend.set_limits(&limits(4, 1)).expect("limits");
            let table = load_inputs(&mut backend, 1, 8, &[fill; 8]);
            // A weight of ones and zeros, whose values are finite or not as the inputs are.
            let rows = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim;
            let weight = baton_backend::Tensor::from_f32(rows, 8, &vec![1.0; rows * 8]).expect("shape");
            let weight = backend.load_weight(&[weight], WeightUse::Linear).expect("loads");
            let layer = KvLayerSpec { num_kv_heads: case.num_kv_heads, head_dim: case.head_dim };
            let spec = KvSpec::full(layer, 1, case.dtype, BLOCK_SIZE);
            backend.create_kv_cache(&spec, 21, 0).expect("creates");
            let width = case.num_heads * case.head_dim;
            let input = backend.create_buffer(4, 8).expect("creates");
            let query = backend.create_buffer(4, width).expect("creates");
            let output = backend.create_buffer(4, width).expect("creates");
            let ops = [
                Op::Embed(Embed { weight: table, scale: 1.0, output: input }),
                Op::Qkv(Qkv {
                    input,
                    norm: None,
                    weight,
                    bias: None,
                    q_norm: None,
                    k_norm: None,
                    norm_span: NormSpan::Head,
                    rope: None,
                    num_heads: case.num_heads,
                    layer: 0,
                    output: query,
                }),
                Op::Attention(Attention {
                    layer: 0,
                    plan: 0,
                    window: None,
                    num_heads: case.num_heads,
                    scale: 1.0,
                    softcap: None,
                    alibi: None,
                    sinks: None,
                    query,
                    output,
                }),
            ];
            let mut input = step(&case, &[Run { first_block: 0, start: 0, len: 1 }]);
            input.token_ids.fill(0);
            let got = run_and_read(&mut backend, &input, &ops, output);
            assert!(got.iter().all(|x| if is_number { *x == 0.0 } else { x.is_nan() }), "{isa}, {fill}");
        }
    }
}

#[test]
fn a_shared_prefix_is_read_by_many_queries() {
    // Two decodes that share the first 32 keys (blocks 20 and 19): one item reads them for both.
    let case = PLAIN;
    let prefix = Run { first_block: 0, start: 0, len: 32 };
    let plain = |backend: &mut dyn Backend| {
        let setup = build(backend, &case);
        run(backend, &step(&case, &[prefix]), &setup.ops).expect("runs");
        let mut input = StepInput {
            token_ids: vec![5, 6],
            positions: vec![32, 32],
            slots: vec![40 * 16, 41 * 16],
            pages: vec![20, 19, 40, 20, 19, 41],
            ..StepInput::default()
        };
        let item = |query_start, pages_start| baton_backend::AttentionItem {
            query_start,
            num_queries: 1,
            pages_start,
            kv_start: 0,
            kv_len: 33,
            partial: baton_backend::NO_PARTIAL,
        };
        input
            .attention
            .push(AttentionPlan { items: vec![item(0, 0), item(1, 3)], ..AttentionPlan::default() });
        let expected = run_and_read(backend, &input, &setup.ops, setup.output);
        let relay = |query_start, num_queries, pages_start, kv_start, kv_len, partial| {
            baton_backend::AttentionItem { query_start, num_queries, pages_start, kv_start, kv_len, partial }
        };
        input.attention[0] = AttentionPlan {
            items: vec![relay(0, 2, 0, 0, 32, 0), relay(0, 1, 2, 32, 1, 2), relay(1, 1, 5, 32, 1, 3)],
            merges: vec![
                baton_backend::AttentionMerge { query: 0, first: 0, count: 2 },
                baton_backend::AttentionMerge { query: 1, first: 2, count: 2 },
            ],
            merge_slots: vec![0, 2, 1, 3],
            num_partials: 4,
            num_shared_items: 0,
        };
        (expected, run_and_read(backend, &input, &setup.ops, setup.output))
    };
    for isa in paths() {
        let (expected, got) = plain(&mut cpu(isa, 2));
        assert!(error(&got, &expected) < 1e-5, "{isa}: {}", error(&got, &expected));
        let (reference, _) = plain(&mut ReferenceBackend::new());
        assert!(error(&got, &reference) < 2e-5, "{isa}");
    }
}

#[test]
fn sharing_a_beginning_does_not_change_a_bit() {
    let pages = NUM_BLOCKS - 21;
    let cases = [
        Case { dtype: KvDtype::F16, ..PLAIN },
        Case { dtype: KvDtype::F16, head_dim: 80, rotary_dim: 80, window: Some(601), ..PLAIN },
        Case { dtype: KvDtype::BF16, num_heads: 8, num_kv_heads: 8, alibi: true, ..PLAIN },
        Case { dtype: KvDtype::Int8, window: Some(600), ..PLAIN },
        Case { head_dim: 40, rotary_dim: 20, alibi: true, softcap: Some(2.0), ..PLAIN },
        Case { dtype: KvDtype::F16, sinks: true, ..PLAIN },
        Case { num_heads: 70, num_kv_heads: 1, head_dim: 16, rotary_dim: 16, ..PLAIN },
    ];
    // Decodes of one context at different places, each of which computes its token again: 512 keys are common to all, 1024 to
    // most of them.
    let places = [520, 700].into_iter().chain((0..40).map(|number| 1030 + 6 * number));
    let decodes: Vec<Run> = places.map(|start| Run { first_block: pages, start, len: 1 }).collect();
    for case in cases {
        for isa in paths() {
            for threads in [1, 3] {
                let mut backend = cpu(isa, threads);
                let setup = build(&mut backend, &case);
                for start in (0..1290).step_by(258) {
                    let prompt = step(&case, &[Run { first_block: pages, start, len: 258 }]);
                    run(&mut backend, &prompt, &setup.ops).expect("runs");
                }
                let alone = step(&case, &decodes);
                let expected = run_and_read(&mut backend, &alone, &setup.ops, setup.output);
                let together = share(&case, alone, backend.device().attention.sharing.border);
                assert!(together.attention[0].items.len() > decodes.len(), "nothing is shared");
                let got = run_and_read(&mut backend, &together, &setup.ops, setup.output);
                assert!(bits(&got) == bits(&expected), "{case:?} on {isa}, {threads} threads");
            }
        }
    }
}

/// Plans a step of decodes anew, so that what they have in common is read once.
fn share(case: &Case, mut input: StepInput, border: usize) -> StepInput {
    let mut pages_start = 0;
    let mut seqs = Vec::new();
    for (row, &position) in input.positions.iter().enumerate() {
        seqs.push(SequenceQueries {
            query_start: row as u32,
            num_queries: 1,
            first_position: position,
            pages_start,
        });
        pages_start += (position + 1).div_ceil(BLOCK_SIZE as u32);
    }
    let sharing = ShareOptions {
        block_size: BLOCK_SIZE,
        window: case.window,
        border: border as u32,
        min_keys: 0,
        min_seqs: 2,
        max_queries: 1,
        queries_per_read: 0,
        read_cost: 1,
        query_cost: 24,
        step_cost: 0,
    };
    let mut shared = SharedPrefixes::default();
    shared.find(&seqs, &input.pages, &sharing);
    let options = PlannerOptions {
        block_size: BLOCK_SIZE,
        window: case.window,
        max_kv_per_item: 0,
        max_kv_per_shared_item: 0,
        max_split_queries: 0,
        max_queries_per_item: 32,
    };
    plan_relay(&seqs, &[], &shared, &options, &mut input.attention[0]);
    input
}

#[test]
fn an_empty_part_adds_nothing() {
    // The second item lies wholly before the window of the query, so it has nothing to say.
    let case = Case { window: Some(16), ..PLAIN };
    for isa in paths() {
        let mut backend = cpu(isa, 2);
        let setup = build(&mut backend, &case);
        run(&mut backend, &step(&case, &[Run { first_block: 0, start: 0, len: 48 }]), &setup.ops)
            .expect("runs");
        let mut input = step(&case, &[Run { first_block: 0, start: 48, len: 1 }]);
        input.attention[0].items[0].kv_start = 0;
        input.attention[0].items[0].kv_len = 49;
        input.attention[0].items[0].pages_start = 0;
        let expected = run_and_read(&mut backend, &input, &setup.ops, setup.output);
        let mut late = input.attention[0].items[0];
        let mut early = late;
        (early.kv_len, early.partial) = (32, 0);
        (late.kv_start, late.kv_len, late.pages_start, late.partial) = (32, 17, 2, 1);
        input.attention[0] = AttentionPlan {
            items: vec![early, late],
            merges: vec![baton_backend::AttentionMerge { query: 0, first: 0, count: 2 }],
            merge_slots: vec![0, 1],
            num_partials: 2,
            num_shared_items: 0,
        };
        let got = run_and_read(&mut backend, &input, &setup.ops, setup.output);
        assert!(error(&got, &expected) < 1e-6, "{isa}: {}", error(&got, &expected));
    }
}

#[test]
fn blocks_move_between_tiers() {
    let dtypes = [KvDtype::F32, KvDtype::F16, KvDtype::Int8];
    for (isa, dtype) in paths().into_iter().flat_map(|isa| dtypes.map(|dtype| (isa, dtype))) {
        let case = Case { dtype, ..PLAIN };
        let mut backend = cpu(isa, 2);
        let setup = build(&mut backend, &case);
        let prompt = step(&case, &[Run { first_block: 0, start: 0, len: 20 }]);
        run(&mut backend, &prompt, &setup.ops).expect("runs");
        let decode = step(&case, &[Run { first_block: 0, start: 20, len: 1 }]);
        let expected = run_and_read(&mut backend, &decode, &setup.ops, setup.output);

        // Blocks 20 and 19 go to the host; 20's place is taken, then both come back to other places, one by a copy.
        let copy = |from, to| BlockCopy { from, to };
        let mut away = step(&case, &[Run { first_block: 0, start: 0, len: 16 }]);
        away.token_ids.fill(1);
        away.swap_out = vec![copy(20, 3), copy(19, 4)];
        run(&mut backend, &away, &setup.ops).expect("runs");
        let mut back = decode.clone();
        back.swap_in = vec![copy(3, 50), copy(4, 51)];
        back.copies = vec![copy(51, 52)];
        back.pages = vec![50, 52];
        back.slots = vec![52 * 16 + 4];
        let got = run_and_read(&mut backend, &back, &setup.ops, setup.output);
        assert_eq!(bits(&got), bits(&expected), "{dtype:?} on {isa}");
    }
}
