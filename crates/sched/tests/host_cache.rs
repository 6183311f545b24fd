//! Conversations that together exceed the device's blocks are found again in the host tier.

use std::collections::{BTreeMap, HashSet, VecDeque};

use baton_core::{BlockId, Request, RequestId, SamplingParams, TokenId};
use baton_sched::{KvConfig, Plan, SampledToken, SchedConfig, Scheduler, SeqResult, StepResult};

const BLOCK_SIZE: usize = 16;
/// Tokens of each answer, and of the next question.
const ANSWER: u32 = 8;
const QUESTION: usize = 64;

struct Load {
    conversations: usize,
    tokens: usize,
    /// Conversations that the device's blocks hold, and the host's.
    device: usize,
    host: usize,
    at_once: usize,
    tokens_per_step: usize,
    plans_in_flight: usize,
}

/// What the issue asks for, as on a GPU: a step computes a whole prompt.
const LOAD: Load = Load {
    conversations: 64,
    tokens: 8192,
    device: 16,
    host: 80,
    at_once: 4,
    tokens_per_step: 8192,
    plans_in_flight: 2,
};

struct Run {
    scheduler: Scheduler,
    prompts: Vec<Vec<TokenId>>,
    next_id: u64,
    /// Blocks copied to the host tier, and those of them that their own step overwrites: such a step has to wait.
    num_copied: usize,
    num_late: usize,
}

impl Run {
    fn new(load: &Load) -> Self {
        let rows = load.tokens / BLOCK_SIZE;
        let kv = KvConfig {
            num_device_blocks: load.device * rows,
            num_host_blocks: load.host * rows,
            block_size: BLOCK_SIZE,
            ..KvConfig::default()
        };
        let config = SchedConfig {
            max_num_batched_tokens: load.tokens_per_step,
            max_model_len: load.tokens + 1024,
            max_plans_in_flight: load.plans_in_flight,
            recompute_cost_per_token: 12.0,
            ..SchedConfig::default()
        };
        let scheduler = Scheduler::new(config, kv).expect("a valid configuration");
        let prompt = |number: usize| {
            (0..load.tokens).map(|token| ((number * 7919 + token * 31) % 40_000) as TokenId).collect()
        };
        let prompts = (0..load.conversations).map(prompt).collect();
        Self { scheduler, prompts, next_id: 0, num_copied: 0, num_late: 0 }
    }

    /// Every one of these conversations goes on by an answer and a question. Returns the part of what they had said before
    /// that was found.
    fn turn(&mut self, load: &Load, conversations: impl Iterator<Item = usize>) -> f64 {
        let mut waiting: VecDeque<usize> = conversations.collect();
        let mut running: BTreeMap<RequestId, usize> = BTreeMap::new();
        let mut in_flight: VecDeque<Plan> = VecDeque::new();
        let (mut known, mut found) = (0, 0);
        while !waiting.is_empty() || !running.is_empty() || !in_flight.is_empty() {
            while running.len() < load.at_once
                && let Some(number) = waiting.pop_front()
            {
                let id = RequestId(self.next_id);
                self.next_id += 1;
                known += self.prompts[number].len() - QUESTION;
                let request = Request::new(id, self.prompts[number].clone(), SamplingParams::greedy(ANSWER));
                self.scheduler.add_request(request).expect("it fits");
                running.insert(id, number);
            }
            let plan = self.scheduler.schedule();
            self.count_copies(&plan);
            let is_empty = plan.is_empty();
            if !is_empty {
                in_flight.push_back(plan);
            }
            if in_flight.len() < load.plans_in_flight && !is_empty {
                continue;
            }
            let plan = in_flight.pop_front().expect("something is always in flight or planned");
            for output in self.scheduler.apply(&plan, &answer(&plan)) {
                let number = running[&output.request_id];
                self.prompts[number].extend(output.outputs.iter().flat_map(|one| &one.token_ids));
                found += output.num_cached_tokens as usize;
                if output.finished {
                    running.remove(&output.request_id);
                    let question = (0..QUESTION).map(|token| (number + 3 * token) as TokenId);
                    self.prompts[number].extend(question);
                }
            }
        }
        self.scheduler.check_invariants();
        found as f64 / known as f64
    }

    fn count_copies(&mut self, plan: &Plan) {
        let mut written: HashSet<BlockId> = HashSet::new();
        for seq in &plan.seqs {
            let (start, end) = (seq.start as usize, seq.start as usize + seq.token_ids.len());
            written.extend(&seq.block_tables[0][start / BLOCK_SIZE..end.div_ceil(BLOCK_SIZE)]);
        }
        self.num_copied += plan.swap_out.len();
        self.num_late += plan.swap_out.iter().filter(|copy| written.contains(&copy.from)).count();
    }
}

/// Every sample draws a token; fetches are done when their step is.
fn answer(plan: &Plan) -> StepResult {
    let seqs = plan.seqs.iter().map(|planned| SeqResult {
        samples: planned.samples.iter().map(|_| SampledToken { token_id: 7, logprobs: None }).collect(),
        ..SeqResult::default()
    });
    StepResult { seqs: seqs.collect(), fetched: plan.fetches.iter().map(|fetch| fetch.id).collect() }
}

#[test]
fn conversations_that_exceed_the_device_are_found_on_the_next_turn() {
    let loads = [
        LOAD,
        // As many at a time as the device holds: what ends is overwritten at once.
        Load { at_once: 16, ..LOAD },
        Load { plans_in_flight: 1, ..LOAD },
        // Steps of a CPU.
        Load { tokens_per_step: 2048, ..LOAD },
        Load { tokens_per_step: 512, at_once: 16, ..LOAD },
    ];
    for load in loads {
        let mut run = Run::new(&load);
        run.turn(&load, 0..load.conversations);
        for turn in 2..=3 {
            let found = run.turn(&load, 0..load.conversations);
            println!("turn {turn}: {found:.3} found, {} of {} copies late", run.num_late, run.num_copied);
            assert!(found >= 0.95);
        }
    }
}

/// What was used least recently on either tier goes first, and of a prefix the end.
#[test]
fn a_host_tier_that_is_too_small_keeps_the_latest() {
    let load = Load { host: 32, ..LOAD };
    let mut run = Run::new(&load);
    run.turn(&load, 0..64);
    assert!(run.turn(&load, 40..64) >= 0.95);
    // Others come once; what goes on stays.
    run.turn(&load, 0..6);
    assert!(run.turn(&load, 44..64) >= 0.95);
}

/// What the device keeps is not in the host tier as well: neither alone would hold all of these.
#[test]
fn the_tiers_together_hold_nearly_as_much_as_their_sizes_say() {
    let loads = [
        Load { host: 60, ..LOAD },
        Load { device: 40, host: 32, ..LOAD },
        Load { device: 56, host: 16, ..LOAD },
        Load { device: 40, host: 32, tokens_per_step: 512, ..LOAD },
    ];
    for load in loads {
        let mut run = Run::new(&load);
        run.turn(&load, 0..load.conversations);
        for turn in 2..=3 {
            let found = run.turn(&load, 0..load.conversations);
            println!("{} + {}, turn {turn}: {found:.3} found", load.device, load.host);
            assert!(found >= 0.95);
        }
    }
}
