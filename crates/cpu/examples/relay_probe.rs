//! Private timing of attention alone: `relay_probe READERS SHARED OWN [ROUNDS] [DTYPE]`.
use baton_backend::testing::{List, Op, Random};
use baton_backend::*;
use baton_cpu::{CpuBackend, CpuOptions, Isa};
use std::time::Instant;

struct One {
    backend: CpuBackend,
    program: List,
    relay: StepInput,
    plain: StepInput,
}
fn make(isa: Isa, n: usize, shared: usize, own: usize, dtype: KvDtype) -> One {
    let (heads, kvh, dim, layers) = (9, 3, 64, 30);
    let mut backend =
        CpuBackend::new(CpuOptions { threads: Some(2), isa: Some(isa), ..Default::default() }).unwrap();
    backend
        .set_limits(&StepLimits {
            max_tokens: n.max(512),
            max_seqs: n,
            max_logit_rows: n,
            max_samples: n,
            max_model_len: shared + own,
            vocab_size: 1,
        })
        .unwrap();
    let mut r = Random::new(2);
    let t = Tensor::from_f32(1, 64, &r.normals(64)).unwrap();
    let table = backend.load_weight(&[t], WeightUse::Embedding).unwrap();
    let rows = (heads + 2 * kvh) * dim;
    let t = Tensor::from_f32(rows, 64, &r.normals(rows * 64)).unwrap();
    let weight = backend.load_weight(&[t], WeightUse::Linear).unwrap();
    let spec = KvSpec {
        layers: vec![KvLayerSpec { num_kv_heads: kvh, head_dim: dim }; layers],
        dtype,
        block_size: 16,
    };
    let (sp, op) = (shared / 16, own / 16);
    backend.create_kv_cache(&spec, sp + n * op, 0).unwrap();
    let input = backend.create_buffer(n.max(512), 64).unwrap();
    let query = backend.create_buffer(n.max(512), heads * dim).unwrap();
    let output = backend.create_buffer(n.max(512), heads * dim).unwrap();
    let mut ops = vec![Op::Embed(Embed { weight: table, scale: 1.0, output: input })];
    ops.push(Op::Qkv(Qkv {
        input,
        norm: None,
        weight,
        bias: None,
        q_norm: None,
        k_norm: None,
        rope: None,
        num_heads: heads,
        layer: 0,
        output: query,
    }));
    for layer in 0..layers {
        ops.push(Op::Attention(Attention {
            layer,
            plan: 0,
            window: None,
            num_heads: heads,
            scale: 0.125,
            softcap: None,
            alibi: None,
            query,
            output,
        }));
    }
    let position = shared + own - 1;
    let mut step =
        StepInput { token_ids: vec![0; n], positions: vec![position as u32; n], ..StepInput::default() };
    let mut seqs = vec![];
    for s in 0..n {
        seqs.push(SequenceQueries {
            query_start: s as u32,
            num_queries: 1,
            first_position: position as u32,
            pages_start: step.pages.len() as u32,
        });
        step.pages.extend((0..sp as u32).chain((sp + s * op) as u32..(sp + (s + 1) * op) as u32));
        step.slots.push(((sp + (s + 1) * op) * 16 - 1) as u32);
    }
    let options = PlannerOptions {
        block_size: 16,
        window: None,
        max_kv_per_item: 0,
        max_split_queries: 8,
        max_queries_per_item: 32,
    };
    let mut prefixes = SharedPrefixes::default();
    prefixes.find(
        &seqs,
        &step.pages,
        &ShareOptions {
            block_size: 16,
            window: None,
            border: 512,
            min_keys: 512,
            min_seqs: 2,
            max_queries: 8,
        },
    );
    let (mut relay, mut plain) = (step.clone(), step);
    let mut plan = AttentionPlan::default();
    plan_relay(&seqs, &prefixes, &options, &mut plan);
    relay.attention.push(plan);
    let mut plan = AttentionPlan::default();
    plan_attention(&seqs, &options, &mut plan);
    plain.attention.push(plan);
    One { backend, program: List(ops), relay, plain }
}
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let n = |i: usize, d: usize| a.get(i).map_or(d, |x| x.parse().unwrap());
    let dtype = match a.get(5).map(String::as_str) {
        Some("bf16") => KvDtype::BF16,
        Some("int8") => KvDtype::Int8,
        Some("f32") => KvDtype::F32,
        _ => KvDtype::F16,
    };
    let isas: Vec<Isa> =
        [Isa::Avx512Vnni, Isa::Avx512Bf16].into_iter().filter(|i| i.is_available()).collect();
    let mut all: Vec<One> = isas.iter().map(|&i| make(i, n(1, 32), n(2, 4096), n(3, 64), dtype)).collect();
    let mut times = vec![[vec![], vec![]]; isas.len()];
    let mut out = StepOutput::default();
    for _ in 0..n(4, 7) {
        for (one, t) in all.iter_mut().zip(&mut times) {
            for (k, input) in [&one.relay, &one.plain].into_iter().enumerate() {
                let s = Instant::now();
                one.backend.submit(input, &one.program).unwrap();
                one.backend.collect(&mut out).unwrap();
                t[k].push(s.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    for (isa, t) in isas.iter().zip(&mut times) {
        for t in t.iter_mut() {
            t.sort_by(f64::total_cmp);
        }
        let m = |t: &Vec<f64>| t[t.len() / 2];
        println!(
            "{isa}: relay min {:.1} median {:.1} ms, plain min {:.1} median {:.1} ms, ratio of minima {:.2}, of medians {:.2}",
            t[0][0],
            m(&t[0]),
            t[1][0],
            m(&t[1]),
            t[1][0] / t[0][0],
            m(&t[1]) / m(&t[0])
        );
    }
}
