//! The tiny model's attention without pages, items or heads that share: every position of a sequence from scratch, in f64.

use baton_core::TokenId;
use half::{bf16, f16};

use super::{HEAD_DIM, HEADS, HIDDEN, KV_HEADS, Kind, Numbers, SCALE};
use crate::{KvDtype, RopeStyle, e4m3_from_f32, e4m3_to_f32};

/// The attention output at every position, `[tokens][HEADS · HEAD_DIM]`.
pub(super) fn attention(kind: &Kind, tokens: &[TokenId]) -> Vec<Vec<f32>> {
    let numbers = Numbers::new();
    let projected: Vec<Vec<f64>> = tokens.iter().map(|token| project(&numbers, *token)).collect();
    let head = |position: usize, number: usize| {
        let values = projected[position][number * HEAD_DIM..(number + 1) * HEAD_DIM].to_vec();
        if number < HEADS + KV_HEADS { position_head(&numbers, kind, values, position) } else { values }
    };
    let mut outputs = Vec::new();
    for query_position in 0..tokens.len() {
        let mut output = Vec::new();
        for number in 0..HEADS {
            let query = head(query_position, number);
            let kv_head = number / (HEADS / KV_HEADS);
            let first = kind.window.map_or(0, |window| (query_position + 1).saturating_sub(window as usize));
            let mut total = if kind.sinks { f64::from(numbers.sinks[number]).exp() } else { 0.0 };
            let mut sums = [0.0; HEAD_DIM];
            for position in first..=query_position {
                let key = stored(kind.dtype, head(position, HEADS + kv_head));
                let value = stored(kind.dtype, head(position, HEADS + KV_HEADS + kv_head));
                let mut score: f64 =
                    query.iter().zip(&key).map(|(q, k)| q * k).sum::<f64>() * f64::from(SCALE);
                if let Some(cap) = kind.softcap {
                    score = f64::from(cap) * (score / f64::from(cap)).tanh();
                }
                if kind.alibi {
                    score += f64::from(numbers.slopes[number]) * (position as f64 - query_position as f64);
                }
                // Scores of the tiny model are small enough for a plain exp.
                total += score.exp();
                sums.iter_mut().zip(&value).for_each(|(sum, value)| *sum += score.exp() * value);
            }
            output.extend(sums.iter().map(|sum| (sum / total) as f32));
        }
        outputs.push(output);
    }
    outputs
}

fn project(numbers: &Numbers, token: TokenId) -> Vec<f64> {
    let input = &numbers.embedding[token as usize * HIDDEN..(token as usize + 1) * HIDDEN];
    let row = |(weights, bias): (&[f32], &f32)| {
        let products = weights.iter().zip(input).map(|(w, x)| f64::from(*w) * 0.5 * f64::from(*x));
        products.sum::<f64>() + f64::from(*bias)
    };
    numbers.qkv.chunks_exact(HIDDEN).zip(&numbers.head_bias).map(row).collect()
}

/// Norm and rotation of a query or key head.
fn position_head(numbers: &Numbers, kind: &Kind, mut head: Vec<f64>, position: usize) -> Vec<f64> {
    if kind.qk_norm {
        let mean_square = head.iter().map(|x| x * x).sum::<f64>() / HEAD_DIM as f64;
        for (x, weight) in head.iter_mut().zip(&numbers.head_norm) {
            *x *= f64::from(*weight) / (mean_square + 1e-5).sqrt();
        }
    }
    if let Some(rope) = &kind.rope {
        let half = rope.inv_freq.len();
        for i in 0..half {
            let (a, b) = if rope.style == RopeStyle::Half { (i, i + half) } else { (2 * i, 2 * i + 1) };
            let angle = position as f64 * f64::from(rope.inv_freq[i]);
            let (x, y) = (head[a], head[b]);
            head[a] = (x * angle.cos() - y * angle.sin()) * f64::from(rope.scale);
            head[b] = (y * angle.cos() + x * angle.sin()) * f64::from(rope.scale);
        }
    }
    head
}

fn stored(dtype: KvDtype, values: Vec<f64>) -> Vec<f64> {
    let largest = values.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
    let round = |value: f64| match dtype {
        KvDtype::F32 => value,
        KvDtype::F16 => f16::from_f32(value as f32).to_f64(),
        KvDtype::BF16 => bf16::from_f32(value as f32).to_f64(),
        KvDtype::F8E4M3 => f64::from(e4m3_to_f32(e4m3_from_f32(value as f32))),
        KvDtype::Int8 => (value * 127.0 / largest).round() * largest / 127.0,
    };
    values.into_iter().map(round).collect()
}
