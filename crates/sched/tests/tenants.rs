//! How tenants share steps, places and blocks.

use baton_core::{Request, RequestId, SamplingParams};
use baton_sched::{KvConfig, Plan, SampledToken, SchedConfig, Scheduler, SeqResult, StepResult};

const GOOD: u32 = 1;
const BAD: u32 = 2;

fn config() -> SchedConfig {
    SchedConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_num_logit_rows: 16,
        max_model_len: 512,
        max_step_slowdown: 3.0,
        ..SchedConfig::default()
    }
}

fn scheduler(config: SchedConfig, num_device_blocks: usize) -> Scheduler {
    let kv = KvConfig { num_device_blocks, num_host_blocks: 0, block_size: 4, ..KvConfig::default() };
    let mut scheduler = Scheduler::new(config, kv).expect("a valid configuration");
    // A step of three times the time of one decode has 3 * (9 + 1) - 9 = 21 tokens.
    scheduler.set_step_overhead(9.0);
    scheduler
}

fn add(scheduler: &mut Scheduler, tenant: u32, id: u64, prompt_len: u32, params: SamplingParams) {
    let prompt = (0..prompt_len).map(|token| token + 1000 * id as u32).collect();
    let request = Request { tenant, ..Request::new(RequestId(id), prompt, params) };
    scheduler.add_request(request).expect("fits");
}

fn step(scheduler: &mut Scheduler) -> Plan {
    let plan = scheduler.schedule();
    let seqs = plan.seqs.iter().map(|planned| SeqResult {
        samples: planned.samples.iter().map(|_| SampledToken { token_id: 7, logprobs: None }).collect(),
        ..SeqResult::default()
    });
    let result =
        StepResult { seqs: seqs.collect(), fetched: plan.fetches.iter().map(|fetch| fetch.id).collect() };
    scheduler.apply(&plan, &result);
    scheduler.check_invariants();
    plan
}

/// Tokens of one request in a Plan.
fn tokens_of(plan: &Plan, id: u64) -> usize {
    let own = plan.seqs.iter().filter(|seq| seq.request_id == RequestId(id));
    own.map(|seq| seq.token_ids.len()).sum()
}

#[test]
fn prompts_of_another_tenant_do_not_make_a_decode_wait() {
    let mut scheduler = scheduler(config(), 400);
    add(&mut scheduler, GOOD, 1, 4, SamplingParams::greedy(100));
    step(&mut scheduler);
    add(&mut scheduler, BAD, 2, 400, SamplingParams::greedy(4));
    let mut num_computed = 0;
    for _ in 0..10 {
        let plan = step(&mut scheduler);
        assert_eq!(tokens_of(&plan, 1), 1, "the decode is in every step");
        let prompt = tokens_of(&plan, 2);
        assert!((1..=20).contains(&prompt), "{prompt} tokens of the prompt");
        num_computed += prompt;
    }
    assert!(num_computed >= 150, "what the decode leaves is used: {num_computed}");
}

#[test]
fn one_tenant_alone_has_the_whole_step() {
    for second in [GOOD, BAD] {
        let mut scheduler = scheduler(config(), 400);
        add(&mut scheduler, GOOD, 1, 4, SamplingParams::greedy(100));
        step(&mut scheduler);
        add(&mut scheduler, second, 2, 400, SamplingParams::greedy(4));
        let is_shared = tokens_of(&step(&mut scheduler), 2) < 63;
        assert_eq!(is_shared, second == BAD);
    }
    let mut unlimited = scheduler(SchedConfig { max_step_slowdown: 0.0, ..config() }, 400);
    add(&mut unlimited, GOOD, 1, 4, SamplingParams::greedy(100));
    step(&mut unlimited);
    add(&mut unlimited, BAD, 2, 400, SamplingParams::greedy(4));
    assert_eq!(tokens_of(&step(&mut unlimited), 2), 63);
}

#[test]
fn prompts_of_two_tenants_share_a_step_in_which_nobody_decodes() {
    let mut scheduler = scheduler(config(), 400);
    add(&mut scheduler, BAD, 1, 300, SamplingParams::greedy(4));
    add(&mut scheduler, GOOD, 2, 300, SamplingParams::greedy(4));
    let plan = step(&mut scheduler);
    assert_eq!((tokens_of(&plan, 1), tokens_of(&plan, 2)), (32, 32));
}

#[test]
fn long_contexts_of_another_tenant_take_turns() {
    let mut config = config();
    // Each position costs as much as a tenth of a token: a decode after 200 costs 21.
    config.cost.work_per_position = 0.1;
    let mut scheduler = scheduler(config, 800);
    for id in 2..6 {
        add(&mut scheduler, BAD, id, 200, SamplingParams::greedy(100));
    }
    for _ in 0..20 {
        step(&mut scheduler);
    }
    add(&mut scheduler, GOOD, 1, 4, SamplingParams::greedy(200));
    step(&mut scheduler);
    let plans: Vec<Plan> = (0..40).map(|_| step(&mut scheduler)).collect();
    assert!(plans.iter().all(|plan| tokens_of(plan, 1) == 1), "the short one is in every step");
    assert!(plans.iter().all(|plan| plan.seqs.len() <= 3), "not all of the others are");
    for id in 2..6 {
        let turns = plans.iter().filter(|plan| tokens_of(plan, id) == 1).count();
        assert!((9..=21).contains(&turns), "request {id} has {turns} of 40 steps");
    }
}

#[test]
fn continuations_that_do_not_run_together_read_their_prompt_each() {
    let mut config = config();
    // Reading the prompt once costs 0.01 * 200 * 9 = 18 tokens, where as many as four read it together. Three times the time of the
    // short decode leaves 20.
    config.cost.reads_per_position = 0.01;
    config.cost.min_sharers = 4;
    let mut scheduler = scheduler(config, 800);
    add(&mut scheduler, BAD, 2, 200, SamplingParams { n: 6, ..SamplingParams::greedy(100) });
    for _ in 0..20 {
        step(&mut scheduler);
    }
    add(&mut scheduler, GOOD, 1, 4, SamplingParams::greedy(200));
    step(&mut scheduler);
    for _ in 0..40 {
        let plan = step(&mut scheduler);
        assert_eq!((tokens_of(&plan, 1), tokens_of(&plan, 2)), (1, 1));
        let least = scheduler.last_least_cost().expect("a shared step");
        let cost = scheduler.last_step_cost().tokens(9.0);
        assert!(cost <= 3.0 * least, "{cost} of {least}");
    }
}

#[test]
fn where_steps_take_longer_than_they_should_the_others_get_less() {
    let mut scheduler = scheduler(config(), 400);
    add(&mut scheduler, GOOD, 1, 4, SamplingParams::greedy(100));
    step(&mut scheduler);
    add(&mut scheduler, BAD, 2, 400, SamplingParams::greedy(4));
    let of_another = |scheduler: &mut Scheduler| {
        let plan = step(scheduler);
        assert_eq!(tokens_of(&plan, 1), 1);
        tokens_of(&plan, 2)
    };
    let all = of_another(&mut scheduler);
    scheduler.set_spare_share(0.25);
    let quarter = of_another(&mut scheduler);
    assert!(quarter > 0 && quarter * 3 < all, "{quarter} of {all}");
    scheduler.set_spare_share(0.0);
    assert_eq!(of_another(&mut scheduler), 1, "but never nothing");
}

#[test]
fn who_has_less_than_its_share_of_the_places_gets_one_soon() {
    let mut scheduler = scheduler(config(), 400);
    for id in 10..30 {
        add(&mut scheduler, BAD, id, 4, SamplingParams::greedy(300));
    }
    step(&mut scheduler);
    assert_eq!(scheduler.stats().num_running, 8, "all places, while nobody else is here");
    add(&mut scheduler, GOOD, 1, 4, SamplingParams::greedy(3));
    let first = (0..20).position(|_| tokens_of(&step(&mut scheduler), 1) > 0).expect("gets a place");
    assert!(first <= 6, "after {first} steps");
    assert_eq!(scheduler.stats().num_preemptions_recompute, 1, "one made way");
    // Beyond its share it takes its turn like everybody else.
    for id in 100..110 {
        add(&mut scheduler, GOOD, id, 4, SamplingParams::greedy(300));
    }
    for _ in 0..60 {
        step(&mut scheduler);
    }
    let plan = scheduler.schedule();
    let num_good = plan.seqs.iter().filter(|seq| (100..110).contains(&seq.request_id.0)).count();
    assert_eq!(num_good, 4, "half of the places");
}

#[test]
fn who_has_less_than_its_share_of_the_blocks_gets_some_soon() {
    let mut scheduler = scheduler(SchedConfig { max_model_len: 128, ..config() }, 64);
    for id in 10..14 {
        add(&mut scheduler, BAD, id, 60, SamplingParams::greedy(60));
    }
    for _ in 0..8 {
        step(&mut scheduler);
    }
    add(&mut scheduler, GOOD, 1, 60, SamplingParams::greedy(3));
    let first = (0..30).position(|_| tokens_of(&step(&mut scheduler), 1) > 0).expect("gets blocks");
    assert!(first <= 12, "after {first} steps");
}

#[test]
fn a_request_that_needs_all_places_runs_in_the_end() {
    let mut scheduler = scheduler(config(), 400);
    add(&mut scheduler, BAD, 1, 8, SamplingParams { n: 8, ..SamplingParams::greedy(20) });
    let mut next = 100;
    let mut num_steps = 0;
    // There is always work of the other tenant, before one request ends the next is here.
    while scheduler.contains(RequestId(1)) {
        if scheduler.stats().num_waiting + scheduler.stats().num_running < 4 {
            add(&mut scheduler, GOOD, next, 4, SamplingParams::greedy(4));
            next += 1;
        }
        step(&mut scheduler);
        num_steps += 1;
        assert!(num_steps < 20_000, "it never ends");
    }
}
