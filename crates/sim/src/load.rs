//! Scenarios and requests from random numbers: small pools, small blocks and short sequences, so that every step is
//! near some limit.

use std::sync::Arc;

use baton_core::{BeamParams, Request, RequestId, SamplingParams, TokenId};
use baton_kv::{EvictionPolicy, KvConfig, KvGroup, StorePolicy};
use baton_sched::{CostModel, Policy, PreemptionMode, SchedConfig};

use crate::{FakeModel, Rng};

/// Everything that a run keeps constant.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub sched: SchedConfig,
    pub kv: KvConfig,
    pub model: FakeModel,
    /// How many requests are kept in the system, about.
    pub load: usize,
    /// Chances in a thousand, a step.
    pub aborts: u64,
    pub failures: u64,
    pub cache_resets: u64,
    /// Chances in a thousand that a sequence which has drawn a token gets drafts, or has to wait.
    pub drafts: u64,
    pub waits: u64,
    /// How many tenants send requests.
    pub tenants: usize,
    /// Beginnings that prompts have in common.
    prefixes: Vec<Vec<TokenId>>,
}

pub fn random_scenario(rng: &mut Rng) -> Scenario {
    let model = FakeModel::default();
    let block_size = *rng.pick(&[1, 2, 3, 4, 8, 16]);
    let max_model_len = rng.between(8, 96);
    let max_num_seqs = rng.between(1, 12);
    let max_num_batched_tokens = max_num_seqs + *rng.pick(&[0, 1, 8, 40, 200]);
    let groups = random_groups(rng, max_model_len);
    let mut kv = KvConfig { block_size, groups, ..KvConfig::default() };
    let max_plans_in_flight = rng.between(1, 2);
    let smallest_pool = kv.peak_blocks_of(max_model_len, max_plans_in_flight * max_num_batched_tokens);
    let num_device_blocks = smallest_pool + *rng.pick(&[0, 1, 2, smallest_pool, 3 * smallest_pool, 250]);
    kv = KvConfig {
        num_device_blocks,
        num_host_blocks: *rng.pick(&[0, 2, smallest_pool, 4 * smallest_pool]),
        enable_prefix_caching: !rng.per_mille(150),
        enable_host_cache: !rng.per_mille(200),
        eviction: *rng.pick(&[EvictionPolicy::Lru, EvictionPolicy::Lfu]),
        store: *rng.pick(&[StorePolicy::Off, StorePolicy::Eviction, StorePolicy::WriteThrough]),
        event_capacity: *rng.pick(&[0, 1, 64]),
        ..kv
    };
    let sched = SchedConfig {
        max_num_seqs,
        max_num_batched_tokens,
        max_num_logit_rows: max_num_seqs + *rng.pick(&[0, 1, 30]),
        max_num_sample_entries: *rng.pick(&[usize::MAX, usize::MAX, 4 * max_model_len, max_model_len]),
        max_model_len,
        max_num_queued_reqs: rng.per_mille(300).then_some(6),
        max_num_queued_reqs_per_key: rng.per_mille(200).then_some(4),
        policy: *rng.pick(&[Policy::Fcfs, Policy::Fcfs, Policy::Priority]),
        preemption_mode: *rng.pick(&[PreemptionMode::Auto, PreemptionMode::Swap, PreemptionMode::Recompute]),
        long_prefill_token_threshold: *rng.pick(&[0, 0, 1, 7]),
        swap_cost_per_token: 1.0,
        recompute_cost_per_token: *rng.pick(&[0.5, 2.0, 4.0]),
        min_store_tokens: *rng.pick(&[0, 0, 8]),
        relay_max_queries: *rng.pick(&[0, 8]),
        redraws: max_num_seqs.is_multiple_of(2),
        max_step_slowdown: *rng.pick(&[0.0, 1.0, 1.5, 3.0]),
        cost: CostModel {
            reads_per_position: *rng.pick(&[0.0, 0.002, 0.1]),
            work_per_position: *rng.pick(&[0.0, 0.01, 0.5]),
            min_sharers: *rng.pick(&[0, 2, 16]),
        },
        max_plans_in_flight,
    };
    let mishaps = rng.per_mille(500);
    let prefixes = (0..4).map(|_| random_tokens(rng, model, max_model_len)).collect();
    Scenario {
        sched,
        kv,
        model,
        load: rng.between(1, 16),
        tenants: *rng.pick(&[1, 1, 2, 5]),
        aborts: if mishaps { 20 } else { 0 },
        failures: if mishaps { 4 } else { 0 },
        cache_resets: if mishaps { 3 } else { 0 },
        drafts: *rng.pick(&[0, 300, 900]),
        waits: *rng.pick(&[0, 0, 50]),
        prefixes,
    }
}

/// Mostly one group as most models have; else full and windowed ones, some with several lanes.
fn random_groups(rng: &mut Rng, max_model_len: usize) -> Vec<KvGroup> {
    if rng.per_mille(400) {
        return vec![KvGroup::default()];
    }
    let group = |rng: &mut Rng| KvGroup {
        window: rng.per_mille(600).then(|| rng.between(1, max_model_len)),
        lanes: rng.between(1, 3),
    };
    (0..rng.between(1, 3)).map(|_| group(rng)).collect()
}

fn random_tokens(rng: &mut Rng, model: FakeModel, len: usize) -> Vec<TokenId> {
    (0..len).map(|_| rng.between(0, model.vocab_size as usize - 1) as TokenId).collect()
}

/// A request that may or may not be refused.
pub fn random_request(rng: &mut Rng, scenario: &Scenario, id: RequestId) -> Request {
    let longest = scenario.sched.max_model_len - 1;
    let shared_len = rng.between(0, longest - 1);
    let mut prompt = rng.pick(&scenario.prefixes)[..shared_len].to_vec();
    // Some prompts are known as a whole: even then a token has to be computed.
    let is_known = shared_len > 0 && rng.per_mille(300);
    let own_len = if is_known { 0 } else { rng.between(1, (longest - shared_len).min(12)) };
    prompt.extend(random_tokens(rng, scenario.model, own_len));
    let mut request = Request::new(id, prompt, random_params(rng));
    request.eos_token_ids = if rng.per_mille(500) { Arc::from([0, 1]) } else { Arc::from([]) };
    request.priority = rng.between(0, 3) as i32 - 1;
    request.tenant = rng.between(0, scenario.tenants - 1) as u32;
    request.cache_salt = rng.per_mille(200).then(|| Arc::from(*rng.pick(&["", "red", "blue"])));
    // What is public lies within the beginnings that requests share, and ends before the prompt does.
    let most = shared_len.min(request.prompt_token_ids.len() - 1);
    request.num_public_tokens = if rng.per_mille(400) { rng.between(0, most) as u32 } else { 0 };
    request
}

fn random_params(rng: &mut Rng) -> SamplingParams {
    let max_tokens = rng.between(1, 24) as u32;
    let mut params = SamplingParams {
        max_tokens: (!rng.per_mille(100)).then_some(max_tokens),
        seed: rng.per_mille(700).then(|| rng.next_u64() % 3),
        ignore_eos: rng.per_mille(100),
        min_tokens: if rng.per_mille(200) { rng.between(0, max_tokens as usize) as u32 } else { 0 },
        logprobs: rng.per_mille(200).then_some(1),
        prompt_logprobs: rng.per_mille(100).then_some(1),
        presence_penalty: if rng.per_mille(100) { 0.5 } else { 0.0 },
        ..SamplingParams::default()
    };
    if rng.per_mille(50) {
        params.logit_bias = (0..rng.between(1, 8) as TokenId).map(|token| (token, 0.0)).collect();
    }
    if rng.per_mille(200) {
        params.stop_token_ids = vec![rng.between(2, 5) as TokenId];
    }
    match rng.between(0, 9) {
        0 | 1 => params.n = rng.between(2, 4) as u32,
        2 => {
            params.n = rng.between(1, 2) as u32;
            params.best_of = Some(rng.between(2, 4) as u32);
        }
        3 => {
            params.n = rng.between(1, 3) as u32;
            params.best_of = Some(rng.between(3, 4) as u32);
            let length_penalty = *rng.pick(&[0.0, 1.0, 2.0]);
            params.beam = Some(BeamParams { length_penalty, early_stopping: rng.per_mille(500) });
        }
        _ => {}
    }
    params
}
