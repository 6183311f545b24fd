//! What 16-bit caches hold, on every instruction set: whatever arithmetic attention has, its result is that of f32 to within the
//! rounding of one value, what is not a number shows, and what an earlier request left behind does not.

mod common;

use baton_backend::{
    Attention, AttentionPlan, Backend, BufferId, Embed, KvDtype, KvLayerSpec, KvSpec, NormSpan,
    PlannerOptions, Precision, Qkv, SequenceQueries, StepInput, Tensor, WeightUse, plan_attention,
};
use baton_cpu::Isa;
use common::{Op, bits, cpu, cpu_of, error, limits, load_inputs, paths, random, run_and_read};

const BLOCK_SIZE: usize = 16;
const HIDDEN: usize = 32;
const VOCAB: usize = 50;
/// A token whose values are no numbers.
const NO_NUMBER: u32 = VOCAB as u32 - 1;
const NUM_HEADS: usize = 6;
const NUM_KV_HEADS: usize = 2;

struct Setup {
    ops: Vec<Op>,
    output: BufferId,
}

/// One layer whose scores have a deviation of about one.
fn build(backend: &mut dyn Backend, dtype: KvDtype, head_dim: usize) -> Setup {
    let mut random = random(7);
    backend.set_limits(&limits(256, VOCAB)).expect("limits");
    let mut inputs = random.normals(VOCAB * HIDDEN);
    inputs[NO_NUMBER as usize * HIDDEN..].fill(f32::NAN);
    let table = load_inputs(backend, VOCAB, HIDDEN, &inputs);
    let rows = (NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim;
    let values: Vec<f32> = random.normals(rows * HIDDEN).iter().map(|x| x / (HIDDEN as f32).sqrt()).collect();
    let weight = Tensor::from_f32(rows, HIDDEN, &values).expect("shape");
    let weight = backend.load_weight(&[weight], WeightUse::Linear).expect("loads");
    let layer = KvLayerSpec { num_kv_heads: NUM_KV_HEADS, head_dim };
    let spec = KvSpec::full(layer, 1, dtype, BLOCK_SIZE);
    backend.create_kv_cache(&spec, 32, 0).expect("creates");
    let width = NUM_HEADS * head_dim;
    let input = backend.create_buffer(256, HIDDEN).expect("creates");
    let query = backend.create_buffer(256, width).expect("creates");
    let output = backend.create_buffer(256, width).expect("creates");
    let (norm, bias, q_norm, k_norm, rope) = (None, None, None, None, None);
    let (num_heads, layer) = (NUM_HEADS, 0);
    let scale = 1.0 / (head_dim as f32).sqrt();
    let ops = vec![
        Op::Embed(Embed { weight: table, scale: 1.0, output: input }),
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
        }),
        Op::Attention(Attention {
            layer,
            plan: 0,
            window: None,
            num_heads,
            scale,
            softcap: None,
            alibi: None,
            sinks: None,
            query,
            output,
        }),
    ];
    Setup { ops, output }
}

/// Tokens from position `start` on of a sequence whose pages are the first ones.
fn step(start: usize, token_ids: &[u32]) -> StepInput {
    let end = start + token_ids.len();
    let mut input = StepInput {
        token_ids: token_ids.to_vec(),
        positions: (start as u32..end as u32).collect(),
        slots: (start as u32..end as u32).collect(),
        pages: (0..end.div_ceil(BLOCK_SIZE) as u32).collect(),
        ..StepInput::default()
    };
    let queries = SequenceQueries {
        query_start: 0,
        num_queries: token_ids.len() as u32,
        first_position: start as u32,
        pages_start: 0,
    };
    let options = PlannerOptions {
        block_size: BLOCK_SIZE,
        window: None,
        max_kv_per_item: 0,
        max_kv_per_shared_item: 0,
        max_split_queries: 0,
        max_queries_per_item: 0,
    };
    let mut plan = AttentionPlan::default();
    plan_attention(&[queries], &options, &mut plan);
    input.attention.push(plan);
    input
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| i * 13 % NO_NUMBER).collect()
}

#[test]
fn sixteen_bits_stay_close_to_f32() {
    for head_dim in [16, 40, 64, 80, 128] {
        for isa in paths() {
            let run_with = |dtype: KvDtype| {
                let mut backend = cpu(isa, 2);
                let setup = build(&mut backend, dtype, head_dim);
                run_and_read(&mut backend, &step(0, &tokens(201)), &setup.ops, setup.output)
            };
            let exact = run_with(KvDtype::F32);
            // Two values of bf16 are rounded for each product, to 2^-9 each; f16 has three bits more.
            let is_paired = isa == Isa::Avx512Bf16;
            for (dtype, limit) in [(KvDtype::F16, if is_paired { 6e-3 } else { 1e-3 }), (KvDtype::BF16, 8e-3)]
            {
                let error = error(&run_with(dtype), &exact);
                assert!(error < limit, "{dtype:?}, heads of {head_dim} on {isa}: {error}");
            }
        }
    }
}

#[test]
fn full_precision_has_no_bf16_in_it() {
    if !Isa::Avx512Bf16.is_available() {
        return;
    }
    let run_on = |isa: Isa| {
        let mut backend = cpu_of(isa, 2, Precision::Full);
        let setup = build(&mut backend, KvDtype::F16, 64);
        bits(&run_and_read(&mut backend, &step(0, &tokens(100)), &setup.ops, setup.output))
    };
    assert!(run_on(Isa::Avx512Bf16) == run_on(Isa::Avx512Vnni));
}

#[test]
fn what_was_left_behind_does_not_show_and_what_is_no_number_does() {
    for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::BF16] {
        for isa in paths() {
            let mut backend = cpu(isa, 2);
            let setup = build(&mut backend, dtype, 64);
            let mut run = |start: usize, token_ids: &[u32]| {
                run_and_read(&mut backend, &step(start, token_ids), &setup.ops, setup.output)
            };
            // An earlier request has left its blocks full of NaN.
            run(0, &[NO_NUMBER; 100]);
            // Even and odd numbers of keys, as a prompt and as decodes.
            let token_ids = tokens(40);
            let rows = run(0, &token_ids[..35]);
            assert!(rows.iter().all(|x| x.is_finite()), "{dtype:?} on {isa}: a prompt");
            for (position, &token_id) in token_ids.iter().enumerate().skip(35) {
                let row = run(position, &[token_id]);
                assert!(row.iter().all(|x| x.is_finite()), "{dtype:?} on {isa}: position {position}");
            }
            // A token of its own that is none, seen by the next.
            run(40, &[NO_NUMBER]);
            assert!(run(41, &[3]).iter().all(|x| x.is_nan()), "{dtype:?} on {isa}");
        }
    }
}
