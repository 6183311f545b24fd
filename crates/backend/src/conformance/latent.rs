//! Attention over latents: the products of heads, and the whole way from a latent to what its queries saw.

use super::ops::{built, source, steps};
use super::{Case, limits};
use crate::testing::{Random, random_tensor};
use crate::{
    Attention, HeadLinear, KvDtype, KvLayerSpec, KvSpec, LatentKv, Linear, Norm, NormKind, Op,
    PlannerOptions, RopeSpec, RopeStyle, SequenceQueries, StepInput, WeightFormat, WeightUse, plan_attention,
};

pub(super) fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = [WeightFormat::F32, WeightFormat::F16, WeightFormat::BF16, WeightFormat::Q8_0]
        .into_iter()
        .map(|format| head_linear(format, 4, 96, 64))
        .collect();
    cases.push(head_linear(WeightFormat::BF16, 16, 512, 128));
    cases.push(head_linear(WeightFormat::F32, 3, 24, 40));
    for (num_heads, rank, rotary) in [(4, 64, 16), (16, 512, 64)] {
        for (dtype, name) in [(KvDtype::F32, "f32"), (KvDtype::BF16, "bf16")] {
            cases.push(latent(num_heads, rank, rotary, dtype, name));
        }
    }
    cases
}

fn head_linear(format: WeightFormat, num_heads: usize, rows: usize, cols: usize) -> Case {
    let name = format!("head_linear {format}, {num_heads} x {rows} x {cols}");
    Case::new(name, steps([1, 3, 8, 40, 130]), move |backend| {
        let mut random = Random::new(31);
        // The input has more columns for a head than the weight, and so has the output.
        let (embed, input) = source(backend, &limits(), num_heads * (cols + 8), &mut random)?;
        let weight = random_tensor(format, num_heads * rows, cols, 0.1, &mut random);
        let weight = backend.load_weight(&[weight], WeightUse::Experts(num_heads))?;
        let first = random_tensor(
            WeightFormat::BF16,
            num_heads * (rows + 8),
            num_heads * (cols + 8),
            0.1,
            &mut random,
        );
        let first = backend.load_weight(&[first], WeightUse::Linear)?;
        let output = backend.create_buffer(limits().max_tokens, num_heads * (rows + 8))?;
        let fill = Linear { input, norm: None, weight: first, bias: None, output, accumulate: false };
        built(
            backend,
            vec![embed, Op::Linear(fill), Op::HeadLinear(HeadLinear { input, weight, output })],
            output,
        )
    })
}

const BLOCK_SIZE: usize = 16;

/// Two sequences: a prompt, then further tokens of both.
fn latent_steps() -> Vec<StepInput> {
    let step = |runs: &[(u32, u32, u32)]| {
        let mut input = StepInput::default();
        let mut seqs = Vec::new();
        for &(first_page, start, count) in runs {
            let pages_start = input.pages.len() as u32;
            seqs.push(SequenceQueries {
                query_start: input.token_ids.len() as u32,
                num_queries: count,
                first_position: start,
                pages_start,
            });
            let num_pages = (start + count).div_ceil(BLOCK_SIZE as u32);
            input.pages.extend((0..num_pages).map(|page| first_page + 2 * page));
            for position in start..start + count {
                let page = first_page + 2 * (position / BLOCK_SIZE as u32);
                input.token_ids.push((position * 7 + first_page) % 160);
                input.positions.push(position);
                input.slots.push(page * BLOCK_SIZE as u32 + position % BLOCK_SIZE as u32);
            }
        }
        let options = PlannerOptions {
            block_size: BLOCK_SIZE,
            window: None,
            max_kv_per_item: 32,
            max_kv_per_shared_item: 0,
            max_split_queries: 0,
            max_queries_per_item: 5,
        };
        input.attention.resize(1, crate::AttentionPlan::default());
        plan_attention(&seqs, &options, &mut input.attention[0]);
        input
    };
    vec![
        step(&[(0, 0, 37)]),
        step(&[(0, 37, 1), (1, 0, 20)]),
        step(&[(0, 38, 1), (1, 20, 1)]),
        step(&[(0, 39, 40)]),
    ]
}

fn latent(num_heads: usize, rank: usize, rotary: usize, dtype: KvDtype, dtype_name: &str) -> Case {
    let name = format!("latent attention {num_heads} x {rank} + {rotary}, {dtype_name}");
    Case::new(name, latent_steps(), move |backend| {
        let mut random = Random::new(32);
        let (hidden_cols, other, rows) = (128, 48, limits().max_tokens);
        let (embed, hidden) = source(backend, &limits(), hidden_cols, &mut random)?;
        let mut linear = |backend: &mut dyn crate::Backend, cols: usize| {
            let weight = random_tensor(WeightFormat::BF16, cols, hidden_cols, 0.1, &mut random);
            let weight = backend.load_weight(&[weight], WeightUse::Linear)?;
            let output = backend.create_buffer(rows, cols)?;
            let op = Linear { input: hidden, norm: None, weight, bias: None, output, accumulate: false };
            Ok::<_, crate::BackendError>((Op::Linear(op), output))
        };
        let (to_query, query) = linear(backend, num_heads * (other + rotary))?;
        let (to_latent, latents) = linear(backend, rank + rotary)?;
        let weight = random_tensor(WeightFormat::BF16, num_heads * rank, other, 0.1, &mut random);
        let weight = backend.load_weight(&[weight], WeightUse::Experts(num_heads))?;
        let absorbed = backend.create_buffer(rows, num_heads * (rank + rotary))?;
        let output = backend.create_buffer(rows, num_heads * (rank + rotary))?;
        let norm = backend.load_vector(&random.normals(rank))?;
        let norm = Norm { kind: NormKind::Rms, weight: norm, eps: 1e-5 };
        let inv_freq = (0..rotary / 2).map(|i| 0.5_f32.powi(i as i32)).collect();
        let rope = backend.create_rope(&RopeSpec { inv_freq, scale: 1.0, style: RopeStyle::Interleaved })?;
        let ops = vec![
            embed,
            to_query,
            to_latent,
            Op::LatentKv(LatentKv {
                latent: latents,
                norm,
                query,
                rope,
                num_heads,
                layer: 0,
                output: absorbed,
            }),
            Op::HeadLinear(HeadLinear { input: query, weight, output: absorbed }),
            Op::Attention(Attention {
                layer: 0,
                plan: 0,
                window: None,
                num_heads,
                scale: 0.05,
                softcap: None,
                alibi: None,
                sinks: None,
                query: absorbed,
                output,
            }),
        ];
        let layer = KvLayerSpec { num_kv_heads: 1, head_dim: rank + rotary };
        let spec = KvSpec::new(vec![layer], &[None], dtype, BLOCK_SIZE);
        backend.check_kv_spec(&spec)?;
        let built = built(backend, ops, output)?;
        backend.create_kv_cache(&spec, 16, 0)?;
        Ok(built)
    })
    .allowing(2.0)
    .rounding(dtype != KvDtype::F32)
}
