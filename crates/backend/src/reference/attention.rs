//! Attention by work items: each gives its queries an output, or a partial result that a merge puts together.

use super::kv_cache::KvCache;
use super::math::{apply_softcap, dot, vector};
use super::ops::Run;
use crate::{Attention, AttentionItem, AttentionPlan, NO_PARTIAL};

/// The result of some of a query's keys for one head: a softmax that is not divided yet.
#[derive(Clone, Debug)]
struct Partial {
    /// The largest score; −∞ if no key was seen.
    max: f64,
    /// `Σ exp(score − max)`.
    sum: f64,
    /// `Σ exp(score − max) · value`.
    weighted: Vec<f64>, // [head_dim]
}

impl Partial {
    /// Of keys given by their scores and values.
    fn of(keys: &[(f32, &[f32])], head_dim: usize) -> Self {
        let max = keys.iter().fold(f32::NEG_INFINITY, |max, (score, _)| max.max(*score));
        let max = f64::from(max);
        let (mut sum, mut weighted) = (0.0, vec![0.0; head_dim]);
        for (score, value) in keys {
            let weight = (f64::from(*score) - max).exp();
            sum += weight;
            for (weighted, value) in weighted.iter_mut().zip(*value) {
                *weighted += weight * f64::from(*value);
            }
        }
        Self { max, sum, weighted }
    }

    fn merge(&mut self, other: &Self) {
        let max = self.max.max(other.max);
        if max == f64::NEG_INFINITY {
            return;
        }
        let (own, others) = ((self.max - max).exp(), (other.max - max).exp());
        self.max = max;
        self.sum = self.sum * own + other.sum * others;
        for (weighted, other) in self.weighted.iter_mut().zip(&other.weighted) {
            *weighted = *weighted * own + other * others;
        }
    }

    /// Takes a key into account whose value is nothing.
    fn add_sink(&mut self, score: f32) {
        let max = self.max.max(f64::from(score));
        let own = (self.max - max).exp();
        self.max = max;
        self.sum = self.sum * own + (f64::from(score) - max).exp();
        self.weighted.iter_mut().for_each(|weighted| *weighted *= own);
    }

    fn push_result(&self, output: &mut Vec<f32>) {
        output.extend(self.weighted.iter().map(|weighted| (weighted / self.sum) as f32));
    }
}

/// One partial a head.
type HeadPartials = Vec<Partial>;

impl Run<'_> {
    /// The output of every query row: `[tokens, heads · head_dim]`.
    pub(super) fn attend(&self, op: &Attention) -> Vec<Vec<f32>> {
        let num_plans = self.input.attention.len();
        assert!(op.plan < num_plans, "attention plan {} of {num_plans}", op.plan);
        let plan = &self.input.attention[op.plan];
        let num_tokens = self.input.num_tokens();
        let mut results: Vec<Option<HeadPartials>> = vec![None; num_tokens];
        let mut partials: Vec<Option<HeadPartials>> = vec![None; plan.num_partials as usize];
        for item in &plan.items {
            for i in 0..item.num_queries as usize {
                let query = item.query_start as usize + i;
                let heads = self.attend_query(op, item, query);
                let place = if item.partial == NO_PARTIAL {
                    &mut results[query]
                } else {
                    &mut partials[item.partial as usize + i]
                };
                assert!(place.is_none(), "two items write the result of query {query}: {item:?}");
                *place = Some(heads);
            }
        }
        merge_partials(plan, &mut partials, &mut results);
        // Once a query, whatever parts its keys were in.
        if let Some(sinks) = op.sinks.map(|sinks| vector(self.parameters, sinks, op.num_heads)) {
            for heads in results.iter_mut().flatten() {
                heads.iter_mut().zip(sinks).for_each(|(head, score)| head.add_sink(*score));
            }
        }
        results.iter().enumerate().map(|(query, heads)| output_row(query, heads.as_ref())).collect()
    }

    fn attend_query(&self, op: &Attention, item: &AttentionItem, query: usize) -> HeadPartials {
        let kv = self.kv_cache();
        let spec = kv.layer_spec(op.layer);
        assert!(
            op.num_heads.is_multiple_of(spec.num_kv_heads),
            "{} heads cannot share {} kv heads",
            op.num_heads,
            spec.num_kv_heads
        );
        let heads_per_kv_head = op.num_heads / spec.num_kv_heads;
        let slopes = op.alibi.map(|alibi| vector(self.parameters, alibi, op.num_heads));
        let position = self.input.positions[query];
        let row = self.buffers[op.query.0 as usize].row(query);
        let attend_head = |(head, query): (usize, &[f32])| {
            let mut keys = Vec::new();
            for key_position in item.kv_start..item.kv_start + item.kv_len {
                if !sees(position, key_position, op.window) {
                    continue;
                }
                let slot = self.slot(item, key_position, kv.block_size());
                let (key, value) = kv.read(op.layer, slot, head / heads_per_kv_head);
                let mut score = apply_softcap(op.scale * dot(query, key), op.softcap);
                if let Some(slopes) = slopes {
                    score -= slopes[head] * (position - key_position) as f32;
                }
                keys.push((score, value));
            }
            Partial::of(&keys, spec.head_dim)
        };
        row.chunks_exact(spec.head_dim).enumerate().map(attend_head).collect()
    }

    fn slot(&self, item: &AttentionItem, key_position: u32, block_size: usize) -> usize {
        let offset = (key_position - item.kv_start) as usize;
        let page = self.input.pages[item.pages_start as usize + offset / block_size];
        page as usize * block_size + offset % block_size
    }

    fn kv_cache(&self) -> &KvCache {
        self.kv.as_deref().expect("a KV cache is made before a program with attention runs")
    }
}

/// The rule of [`AttentionItem`].
fn sees(position: u32, key_position: u32, window: Option<u32>) -> bool {
    key_position <= position && window.is_none_or(|window| position - key_position < window)
}

fn merge_partials(
    plan: &AttentionPlan,
    partials: &mut [Option<HeadPartials>],
    results: &mut [Option<HeadPartials>],
) {
    for merge in &plan.merges {
        let slots = &plan.merge_slots[merge.first as usize..merge.first as usize + merge.count as usize];
        let mut take = |slot: &u32| {
            let partial = partials[*slot as usize].take();
            partial.unwrap_or_else(|| {
                panic!("partial slot {slot} is merged twice or was never written: {merge:?}")
            })
        };
        let (first, rest) = slots.split_first().expect("a merge has at least one partial");
        let mut merged = take(first);
        for slot in rest {
            for (head, other) in merged.iter_mut().zip(take(slot)) {
                head.merge(&other);
            }
        }
        let place = &mut results[merge.query as usize];
        assert!(place.is_none(), "the result of query {} is written twice", merge.query);
        *place = Some(merged);
    }
    let unmerged = partials.iter().position(Option::is_some);
    assert!(unmerged.is_none(), "partial slot {unmerged:?} is never merged");
}

fn output_row(query: usize, heads: Option<&HeadPartials>) -> Vec<f32> {
    let heads = heads.unwrap_or_else(|| panic!("no attention item covers query {query}"));
    let mut row = Vec::new();
    for head in heads {
        assert!(head.sum > 0.0 || head.sum.is_nan(), "query {query} sees no key");
        head.push_result(&mut row);
    }
    row
}
