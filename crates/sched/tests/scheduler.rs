//! The scheduler's promises one by one, with results made by hand. The simulator checks them all together.

use std::sync::Arc;

use baton_core::{
    BeamParams, FinishReason, PositionLogprobs, Request, RequestId, RequestOutput, SamplingParams, TokenId,
    TokenLogprob,
};
use baton_sched::{
    KvConfig, PENDING_TOKEN, Plan, Policy, PreemptionMode, SampledToken, SchedConfig, SchedError, Scheduler,
    SeqResult, StepResult, Wait,
};

fn config() -> SchedConfig {
    SchedConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_num_logit_rows: 8,
        max_model_len: 32,
        ..SchedConfig::default()
    }
}

fn kv(num_device_blocks: usize) -> KvConfig {
    KvConfig { num_device_blocks, num_host_blocks: 16, block_size: 4, ..KvConfig::default() }
}

fn scheduler(config: SchedConfig, num_device_blocks: usize) -> Scheduler {
    Scheduler::new(config, kv(num_device_blocks)).expect("a valid configuration")
}

fn request(id: u64, prompt_len: u32, params: SamplingParams) -> Request {
    Request::new(RequestId(id), (0..prompt_len).map(|token| token + 100 * id as u32).collect(), params)
}

/// Every sample of the Plan draws this token.
fn all_draw(plan: &Plan, token_id: TokenId) -> StepResult {
    let sampled = |logprob| SampledToken {
        token_id,
        logprobs: Some(PositionLogprobs { chosen: TokenLogprob { token_id, logprob, rank: 1 }, top: vec![] }),
    };
    let seqs = plan.seqs.iter().map(|planned| SeqResult {
        samples: planned.samples.iter().map(|sample| sampled(-(sample.index as f32) - 1.0)).collect(),
        ..SeqResult::default()
    });
    StepResult { seqs: seqs.collect(), fetched: plan.fetches.iter().map(|fetch| fetch.id).collect() }
}

fn step(scheduler: &mut Scheduler, token_id: TokenId) -> (Plan, Vec<RequestOutput>) {
    let plan = scheduler.schedule();
    let result = all_draw(&plan, token_id);
    let outputs = scheduler.apply(&plan, &result);
    scheduler.check_invariants();
    (plan, outputs)
}

/// (request, start, number of tokens, number of samples) of every run.
fn runs(plan: &Plan) -> Vec<(u64, u32, usize, usize)> {
    plan.seqs
        .iter()
        .map(|run| (run.request_id.0, run.start, run.token_ids.len(), run.samples.len()))
        .collect()
}

fn assert_all_free(scheduler: &Scheduler) {
    scheduler.check_invariants();
    assert!(!scheduler.has_unfinished());
    let stats = scheduler.stats();
    assert_eq!((stats.kv.num_device_blocks_used, stats.kv.num_host_blocks_used), (0, 0));
}

#[test]
fn the_rest_of_a_prompt_is_computed_in_pieces_beside_decodes() {
    let mut scheduler = scheduler(config(), 12);
    scheduler.pace_rests();
    let mut next = |prompt: Option<(u64, u32)>| {
        if let Some((id, len)) = prompt {
            scheduler.add_request(request(id, len, SamplingParams::greedy(8))).expect("fits");
        }
        runs(&step(&mut scheduler, 7).0)
    };
    assert_eq!(next(Some((1, 4))), [(1, 0, 4, 1)], "nobody decodes");
    assert_eq!(next(Some((2, 4))), [(1, 4, 1, 1), (2, 0, 2, 0)]);
    assert_eq!(next(None), [(1, 5, 1, 1), (2, 2, 2, 1)]);
    assert_eq!(next(Some((3, 8))), [(1, 6, 1, 1), (2, 4, 1, 1), (3, 0, 8, 1)], "more than a rest");
}

#[test]
fn refusals_name_the_limit_and_the_flag() {
    let mut scheduler = scheduler(SchedConfig { max_num_queued_reqs: Some(1), ..config() }, 12);
    let mut refuse = |request: Request, expect: &str| {
        let message = scheduler.add_request(request).expect_err("must be refused").to_string();
        assert!(message.contains(expect), "{message}");
    };
    refuse(request(1, 0, SamplingParams::greedy(1)), "the prompt is empty");
    refuse(request(1, 32, SamplingParams::greedy(1)), "32 tokens and at least one is to follow");
    refuse(request(1, 4, SamplingParams { n: 5, ..SamplingParams::greedy(1) }), "--max-num-seqs");
    refuse(
        request(1, 4, SamplingParams { n: 4, ..SamplingParams::greedy(20) }),
        "lower max_tokens, n or best_of",
    );
    refuse(
        request(1, 4, SamplingParams { top_p: 0.0, ..SamplingParams::greedy(1) }),
        "top_p must be in (0, 1]",
    );
    refuse(Request::new(RequestId(1), vec![PENDING_TOKEN], SamplingParams::greedy(1)), "not a token");
    scheduler.add_request(request(1, 4, SamplingParams::greedy(1))).expect("fits");
    assert_eq!(
        scheduler.add_request(request(1, 4, SamplingParams::greedy(1))),
        Err(SchedError::DuplicateId(RequestId(1)))
    );
    assert_eq!(
        scheduler.add_request(request(2, 4, SamplingParams::greedy(1))),
        Err(SchedError::QueueFull { limit: 1 })
    );
}

#[test]
fn limits_that_cannot_work_are_refused_at_start() {
    let refuse =
        |config: SchedConfig, blocks: usize| Scheduler::new(config, kv(blocks)).expect_err("must be refused");
    assert!(matches!(refuse(config(), 7), SchedError::PoolTooSmall { needed: 8, got: 7, fits: 28, .. }));
    let narrow = SchedConfig { max_num_batched_tokens: 3, ..config() };
    assert!(matches!(refuse(narrow, 8), SchedError::LimitTooLow { name: "max-num-batched-tokens", .. }));
    assert_eq!(refuse(SchedConfig { max_plans_in_flight: 3, ..config() }, 8), SchedError::PlansInFlight(3));
}

#[test]
fn one_budget_for_chunks_and_decodes() {
    let mut scheduler = scheduler(config(), 32);
    for (id, len) in [(1, 20), (2, 6), (3, 20)] {
        scheduler.add_request(request(id, len, SamplingParams::greedy(3))).expect("fits");
    }
    assert_eq!(runs(&step(&mut scheduler, 7).0), [(1, 0, 16, 0)]);
    assert_eq!(runs(&step(&mut scheduler, 7).0), [(1, 16, 4, 1), (2, 0, 6, 1), (3, 0, 6, 0)]);
    assert_eq!(runs(&step(&mut scheduler, 7).0), [(1, 20, 1, 1), (2, 6, 1, 1), (3, 6, 14, 1)]);
}

#[test]
fn a_long_prompt_leaves_room_for_the_decodes_behind_it() {
    let mut scheduler = scheduler(SchedConfig { policy: Policy::Priority, ..config() }, 64);
    for id in 1..3 {
        scheduler.add_request(request(id, 2, SamplingParams::greedy(8))).expect("fits");
    }
    step(&mut scheduler, 7);
    let mut urgent = request(3, 30, SamplingParams::greedy(1));
    urgent.priority = -1;
    scheduler.add_request(urgent).expect("fits");
    step(&mut scheduler, 7);
    assert_eq!(runs(&step(&mut scheduler, 7).0), [(3, 14, 14, 0), (1, 3, 1, 1), (2, 3, 1, 1)]);
}

#[test]
fn the_cached_prefix_is_told_and_used_but_one_token_is_computed() {
    let mut scheduler = scheduler(config(), 32);
    let prompt: Vec<TokenId> = (0..8).collect();
    for (id, cached) in [(1, 0), (2, 4)] {
        scheduler
            .add_request(Request::new(RequestId(id), prompt.clone(), SamplingParams::greedy(1)))
            .expect("fits");
        let (plan, outputs) = step(&mut scheduler, 7);
        assert_eq!(runs(&plan), [(id, cached, 8 - cached as usize, 1)]);
        assert_eq!((outputs[0].num_cached_tokens, outputs[0].finished), (cached, true));
    }
    let stats = scheduler.stats().kv;
    assert_eq!((stats.prefix_cache_queries, stats.prefix_cache_hits), (16, 4));
    assert_all_free(&scheduler);
}

#[test]
fn prompt_scores_are_cut_to_the_rows_and_handed_over_once() {
    let mut scheduler = scheduler(config(), 32);
    let params = SamplingParams { prompt_logprobs: Some(0), ..SamplingParams::greedy(2) };
    scheduler.add_request(request(1, 10, params)).expect("fits");
    let mut all_scores = Vec::new();
    let mut scored = Vec::new();
    while scheduler.has_unfinished() {
        let plan = scheduler.schedule();
        let mut result = all_draw(&plan, 7);
        let run = &plan.seqs[0];
        scored.push((run.start + run.scored.start, run.start + run.scored.end, run.num_logit_rows()));
        let score =
            |i| PositionLogprobs { chosen: TokenLogprob { token_id: i, logprob: 0.0, rank: 1 }, top: vec![] };
        result.seqs[0].prompt_logprobs = run.scored.clone().map(|i| score(run.start + i)).collect();
        for output in scheduler.apply(&plan, &result) {
            all_scores.extend(output.prompt_logprobs.iter().map(|score| score.chosen.token_id));
        }
    }
    assert_eq!(scored[..2], [(0, 8, 8), (8, 9, 2)]);
    assert_eq!(all_scores, (0..9).collect::<Vec<_>>());
}

#[test]
fn stops_at_end_tokens_but_not_before_min_tokens() {
    let mut scheduler = scheduler(config(), 32);
    let mut with_eos = request(1, 2, SamplingParams { min_tokens: 1, ..SamplingParams::greedy(5) });
    with_eos.eos_token_ids = Arc::from([7]);
    scheduler.add_request(with_eos).expect("fits");
    let (plan, outputs) = step(&mut scheduler, 7);
    assert!(plan.seqs[0].samples[0].ban_end);
    assert_eq!(outputs[0].outputs[0].finish_reason, None);
    let (plan, outputs) = step(&mut scheduler, 7);
    assert!(!plan.seqs[0].samples[0].ban_end);
    let last = &outputs[0].outputs[0];
    assert_eq!((last.finish_reason, last.stop_token_id), (Some(FinishReason::Stop), Some(7)));
    assert_all_free(&scheduler);
}

#[test]
fn the_model_length_ends_a_sequence() {
    let mut scheduler = scheduler(config(), 32);
    scheduler
        .add_request(request(1, 30, SamplingParams { max_tokens: None, ..SamplingParams::default() }))
        .expect("fits");
    let mut last = Vec::new();
    while scheduler.has_unfinished() {
        last = step(&mut scheduler, 7).1;
    }
    assert_eq!(last[0].outputs[0].finish_reason, Some(FinishReason::Length));
    assert_eq!(scheduler.stats().kv.num_device_blocks_used, 0);
}

#[test]
fn continuations_share_the_prompt_and_copy_on_write() {
    let mut scheduler = scheduler(config(), 32);
    scheduler.add_request(request(1, 6, SamplingParams { n: 3, ..SamplingParams::greedy(3) })).expect("fits");
    let plan = scheduler.schedule();
    assert_eq!(runs(&plan), [(1, 0, 6, 3)]);
    for sample in &plan.seqs[0].samples {
        let view = scheduler.sequence(sample.seq_id).expect("known before the fork");
        assert_eq!((view.token_ids.len(), view.index), (6, sample.index));
    }
    let outputs = scheduler.apply(&plan, &all_draw(&plan, 7));
    assert_eq!(outputs[0].outputs.len(), 3);
    assert_eq!(scheduler.stats().kv.num_device_blocks_used, 2, "all three read the same blocks");
    let (plan, _) = step(&mut scheduler, 7);
    assert_eq!(plan.copies.len(), 2, "the last writer needs no copy");
    assert!(plan.seqs.iter().all(|run| run.block_tables[0][0] == plan.seqs[0].block_tables[0][0]));
    assert_eq!(scheduler.abort_sequence(RequestId(1), 1).expect("it runs").outputs[0].index, 1);
    let (plan, outputs) = step(&mut scheduler, 7);
    assert_eq!((plan.seqs.len(), outputs[0].finished), (2, true));
    assert_all_free(&scheduler);
}

#[test]
fn best_of_gives_the_best_at_the_end() {
    let mut scheduler = scheduler(config(), 32);
    scheduler
        .add_request(request(1, 6, SamplingParams { best_of: Some(3), ..SamplingParams::greedy(2) }))
        .expect("fits");
    assert!(step(&mut scheduler, 7).1.is_empty());
    let outputs = step(&mut scheduler, 8).1;
    assert_eq!(outputs[0].outputs.len(), 1);
    let best = &outputs[0].outputs[0];
    assert_eq!((&best.token_ids[..], best.cumulative_logprob, best.index), (&[7, 8][..], -2.0, 0));
}

#[test]
fn beams_keep_what_scores_best() {
    let mut scheduler = scheduler(config(), 32);
    let params = SamplingParams { n: 2, beam: Some(BeamParams::default()), ..SamplingParams::greedy(2) };
    let mut beam = request(1, 5, params);
    beam.eos_token_ids = Arc::from([0]);
    scheduler.add_request(beam).expect("fits");
    let candidates = |list: &[(TokenId, f32)]| {
        let token = |&(token_id, logprob): &(TokenId, f32)| TokenLogprob { token_id, logprob, rank: 1 };
        SeqResult { candidates: list.iter().map(token).collect(), ..SeqResult::default() }
    };
    let plan = scheduler.schedule();
    assert_eq!(plan.seqs[0].samples.len(), 1);
    let first = candidates(&[(1, -0.1), (0, -1.0), (2, -2.0), (3, -3.0)]);
    assert!(scheduler.apply(&plan, &StepResult { seqs: vec![first], ..StepResult::default() }).is_empty());
    let plan = scheduler.schedule();
    assert_eq!(runs(&plan), [(1, 5, 1, 1), (1, 5, 1, 1)]);
    // Beam [1] at -0.1 and beam [2] at -2.0; hypothesis [0] at -1.0 / 1.
    let second = vec![candidates(&[(4, -0.3), (5, -3.9)]), candidates(&[(6, -0.5), (0, -5.0)])];
    let outputs = scheduler.apply(&plan, &StepResult { seqs: second, ..StepResult::default() });
    let got: Vec<_> = outputs[0].outputs.iter().map(|out| (&out.token_ids[..], out.finish_reason)).collect();
    // [1, 4] at -0.4 / 2 beats [0] at -1.0, which beats [2, 6] at -2.5 / 2.
    assert_eq!(got, [(&[1, 4][..], Some(FinishReason::Length)), (&[0][..], Some(FinishReason::Stop))]);
    assert_all_free(&scheduler);
}

#[test]
fn a_step_is_planned_before_the_last_one_is_applied() {
    let mut scheduler = scheduler(SchedConfig { max_plans_in_flight: 2, ..config() }, 32);
    scheduler.add_request(request(1, 4, SamplingParams::greedy(3))).expect("fits");
    let penalty = SamplingParams { presence_penalty: 1.0, ..SamplingParams::greedy(3) };
    scheduler.add_request(request(2, 4, penalty)).expect("fits");
    let first = scheduler.schedule();
    let second = scheduler.schedule();
    assert_eq!(runs(&second), [(1, 4, 1, 1)], "a penalty has to see the token first");
    assert_eq!(second.seqs[0].token_ids, [PENDING_TOKEN]);
    assert_eq!(second.seqs[0].samples[0].num_output_tokens, 1);
    assert!(scheduler.schedule().is_empty(), "two Plans in flight are the limit");
    scheduler.apply(&first, &all_draw(&first, 7));
    // It ends while the second Plan still writes into its blocks.
    assert!(scheduler.abort(RequestId(1)).expect("it runs").finished);
    scheduler.check_invariants();
    assert_eq!(scheduler.stats().kv.num_device_blocks_used, 3);
    assert!(scheduler.apply(&second, &all_draw(&second, 8)).is_empty(), "nobody wants this token any more");
    assert_eq!(scheduler.stats().kv.num_device_blocks_used, 1);
}

#[test]
fn the_youngest_makes_room_and_comes_back_first() {
    for (mode, is_swapped) in [(PreemptionMode::Swap, true), (PreemptionMode::Recompute, false)] {
        let mut scheduler = scheduler(SchedConfig { preemption_mode: mode, ..config() }, 8);
        for id in 1..4 {
            scheduler
                .add_request(request(id, 7, SamplingParams::greedy(if id < 3 { 16 } else { 1 })))
                .expect("fits");
        }
        let (mut was_preempted, mut order) = (false, Vec::new());
        while scheduler.has_unfinished() {
            let (plan, outputs) = step(&mut scheduler, 7);
            was_preempted |= !plan.seqs.iter().any(|run| run.request_id.0 == 2);
            assert!(
                !order.is_empty() || plan.seqs.iter().any(|run| run.request_id.0 == 1),
                "the oldest always runs"
            );
            order.extend(outputs.iter().filter(|output| output.finished).map(|output| output.request_id.0));
        }
        let stats = scheduler.stats();
        assert!(was_preempted && stats.num_preemptions_swap + stats.num_preemptions_recompute > 0);
        assert_eq!(stats.num_preemptions_swap > 0, is_swapped);
        assert!(order.iter().position(|&id| id == 1) < order.iter().position(|&id| id == 2));
        assert_all_free(&scheduler);
    }
}

#[test]
fn priority_goes_before_arrival() {
    let mut scheduler = scheduler(SchedConfig { policy: Policy::Priority, ..config() }, 32);
    for (id, priority) in [(1, 5), (2, 0), (3, 0)] {
        let mut request = request(id, 6, SamplingParams::greedy(2));
        request.priority = priority;
        scheduler.add_request(request).expect("fits");
    }
    assert_eq!(runs(&scheduler.schedule()), [(2, 0, 6, 1), (3, 0, 6, 1), (1, 0, 4, 0)]);
}

#[test]
fn tenants_take_turns_by_tokens() {
    let mut scheduler = scheduler(SchedConfig { max_num_seqs: 1, ..config() }, 24);
    let of = |tenant: u32, id: u64| Request { tenant, ..request(id, 4, SamplingParams::greedy(2)) };
    // One has sent ten before the other sends its first.
    for id in 0..10 {
        scheduler.add_request(of(1, id)).expect("taken");
    }
    step(&mut scheduler, 7);
    for id in 10..13 {
        scheduler.add_request(of(2, id)).expect("taken");
    }
    let mut order = Vec::new();
    while scheduler.has_unfinished() {
        let (_, outputs) = step(&mut scheduler, 7);
        order.extend(outputs.iter().filter(|output| output.finished).map(|output| output.request_id.0));
    }
    assert_eq!(order, [0, 10, 1, 11, 2, 12, 3, 4, 5, 6, 7, 8, 9]);
    assert_all_free(&scheduler);
}

#[test]
fn one_tenant_cannot_fill_the_queue() {
    let limits =
        SchedConfig { max_num_queued_reqs: Some(5), max_num_queued_reqs_per_key: Some(3), ..config() };
    let mut scheduler = scheduler(limits, 24);
    let of = |tenant: u32, id: u64| Request { tenant, ..request(id, 4, SamplingParams::greedy(2)) };
    for id in 0..3 {
        scheduler.add_request(of(1, id)).expect("taken");
    }
    assert_eq!(scheduler.add_request(of(1, 3)), Err(SchedError::KeyQueueFull { limit: 3 }));
    scheduler.add_request(of(2, 4)).expect("taken");
    scheduler.add_request(of(2, 5)).expect("taken");
    assert_eq!(scheduler.add_request(of(2, 6)), Err(SchedError::QueueFull { limit: 5 }));
}

#[test]
fn a_failed_step_ends_its_requests_and_no_others() {
    let mut scheduler = scheduler(config(), 32);
    scheduler.add_request(request(1, 16, SamplingParams::greedy(2))).expect("fits");
    scheduler.add_request(request(2, 4, SamplingParams::greedy(1))).expect("fits");
    let plan = scheduler.schedule();
    let outputs = scheduler.fail(&plan);
    assert_eq!(outputs.len(), 1);
    assert_eq!(outputs[0].outputs[0].finish_reason, Some(FinishReason::Error));
    assert_eq!(runs(&scheduler.schedule()), [(2, 0, 4, 1)]);
}

#[test]
fn a_plan_that_cannot_be_submitted_fails_before_the_one_in_flight() {
    let mut scheduler = scheduler(SchedConfig { max_plans_in_flight: 2, ..config() }, 24);
    scheduler.add_request(request(1, 4, SamplingParams::greedy(5))).expect("taken");
    let first = scheduler.schedule();
    scheduler.add_request(request(2, 4, SamplingParams::greedy(3))).expect("taken");
    let second = scheduler.schedule();
    assert_eq!(second.seqs.len(), 2);
    let failed: Vec<u64> = scheduler.fail(&second).iter().map(|output| output.request_id.0).collect();
    assert_eq!(failed, [1, 2]);
    scheduler.check_invariants();
    // The older plan is still applied, although its request has ended.
    scheduler.add_request(request(3, 4, SamplingParams::greedy(1))).expect("taken");
    let third = scheduler.schedule();
    let result = all_draw(&first, 7);
    assert!(scheduler.apply(&first, &result).is_empty());
    let result = all_draw(&third, 7);
    let outputs = scheduler.apply(&third, &result);
    assert!(outputs[0].finished && outputs[0].request_id == RequestId(3));
    assert_all_free(&scheduler);
}

#[test]
fn samples_bring_no_more_than_a_step_has_room_for() {
    let mut scheduler = scheduler(SchedConfig { max_num_sample_entries: 10, ..config() }, 24);
    let penalised = SamplingParams { frequency_penalty: 1.0, ..SamplingParams::greedy(2) };
    let wide = SamplingParams { n: 3, ..penalised.clone() };
    let refused = scheduler.add_request(request(9, 4, wide)).expect_err("12 entries at once");
    assert!(refused.to_string().contains("12 penalised tokens and biases"), "{refused}");
    for id in 1..=3 {
        scheduler.add_request(request(id, 4, penalised.clone())).expect("taken");
    }
    // The third prompt is computed up to its last token, which waits for room.
    assert_eq!(runs(&scheduler.schedule()), [(1, 0, 4, 1), (2, 0, 4, 1), (3, 0, 3, 0)]);
}

#[test]
fn a_result_of_the_wrong_shape_is_a_failed_step() {
    let mut scheduler = scheduler(config(), 32);
    for (id, result) in [
        (1, StepResult::default()),
        (2, StepResult { seqs: vec![SeqResult::default()], ..StepResult::default() }),
    ] {
        scheduler.add_request(request(id, 4, SamplingParams::greedy(2))).expect("fits");
        let plan = scheduler.schedule();
        let outputs = scheduler.apply(&plan, &result);
        assert_eq!(outputs[0].outputs[0].finish_reason, Some(FinishReason::Error));
        assert_all_free(&scheduler);
    }
}

#[test]
fn a_structured_sequence_waits_for_its_token_and_for_its_mask() {
    let mut scheduler = scheduler(SchedConfig { max_plans_in_flight: 2, ..config() }, 16);
    let shaped = SamplingParams {
        structured_outputs: Some(baton_core::StructuredOutput::JsonObject),
        ..SamplingParams::greedy(3)
    };
    scheduler.add_request(request(1, 4, shaped)).expect("fits");
    scheduler.add_request(request(2, 4, SamplingParams::greedy(4))).expect("fits");
    let first = scheduler.schedule();
    assert_eq!(runs(&first), [(1, 0, 4, 1), (2, 0, 4, 1)]);
    let second = scheduler.schedule();
    assert_eq!(runs(&second), [(2, 4, 1, 1)], "the next token of the first depends on the one in flight");
    let held = first.seqs[0].seq_id;
    scheduler.apply(&first, &all_draw(&first, 7));
    scheduler.wait(held, Wait::Mask);
    let third = scheduler.schedule();
    assert_eq!(runs(&third), [(2, 5, 1, 1)], "held back");
    scheduler.apply(&second, &all_draw(&second, 7));
    scheduler.resume(held, Wait::Mask);
    scheduler.apply(&third, &all_draw(&third, 7));
    assert_eq!(runs(&step(&mut scheduler, 7).0), [(1, 4, 1, 1), (2, 6, 1, 1)]);
    assert!(scheduler.contains(RequestId(1)) && !scheduler.contains(RequestId(2)));
    scheduler.wait(held, Wait::Mask);
    assert!(scheduler.schedule().is_empty());
    let failed = scheduler.fail_request(RequestId(1)).expect("it was here");
    assert_eq!(failed.outputs[0].finish_reason, Some(FinishReason::Error));
    assert!(!scheduler.contains(RequestId(1)) && scheduler.fail_request(RequestId(1)).is_none());
    assert_all_free(&scheduler);
}
