//! From a Plan to the flat arrays of a step, and from the step's samples back to a result for the scheduler.
//!
//! The runner decides nothing: which tokens run is the Plan's word, how they are computed the backend's. It owns the
//! step's arrays and fills them anew for each Plan.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use baton_backend::{
    AttentionCut, BlockCopy, BranchQueries, Fetch, KvGroupSpec, KvSpec, MAX_SPLIT_QUERIES, SampleRow,
    Sampled, SequenceQueries, SharedPrefixes, StepInput, StepOutput,
};
use baton_core::{BlockId, PositionLogprobs, SamplingParams, SeqId, TokenCount, TokenId};
use baton_sched::{
    BlockMove, NO_BLOCK, PENDING_TOKEN, Plan, PlannedSample, PlannedSeq, SampledToken, SeqResult, StepResult,
};

use crate::engine::pools;
use crate::relay::{RelayStats, StepRelay, add_groups};

/// Layers of a model that attend alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AttentionKind {
    /// `None` is full attention.
    window: Option<u32>,
    /// Of all these layers together.
    bytes_per_token: u64,
    /// Plans of `StepInput::attention`: one for each lane of the group.
    num_lanes: usize,
}

impl AttentionKind {
    /// In the order of `StepInput::attention`.
    pub(crate) fn all(kv: &KvSpec) -> Vec<Self> {
        let of_group = |group: &KvGroupSpec| {
            let layers = group.lanes.iter().flatten();
            let bytes_per_token = layers.map(|&layer| kv.layer_bytes(kv.layers[layer]) as u64).sum();
            Self { window: group.window, bytes_per_token, num_lanes: group.lanes.len() }
        };
        kv.groups.iter().map(of_group).collect()
    }

    /// Keys that the decodes of a step see.
    fn decode_keys(&self, queries: &[SequenceQueries]) -> u64 {
        let seen = |seq: &SequenceQueries| {
            let first = self.window.map_or(0, |window| (seq.first_position + 1).saturating_sub(window));
            u64::from(seq.first_position + seq.num_queries - first)
        };
        queries.iter().filter(|seq| seq.num_queries <= MAX_SPLIT_QUERIES).map(seen).sum()
    }
}

#[derive(Debug)]
pub(crate) struct Runner {
    block_size: usize,
    kinds: Vec<AttentionKind>,
    cut: AttentionCut,
    seed: u64,
    input: StepInput,
    queries: Vec<SequenceQueries>,
    branches: Vec<BranchQueries>,
    shared: SharedPrefixes,
    relayed: RelayStats,
    /// What is shared in the newest step.
    step_relay: StepRelay,
    /// Which sample of the newest submitted step belongs to which sequence.
    last_samples: HashMap<SeqId, u32>,
    /// Those of the step before, for when the newest could not be submitted.
    earlier_samples: HashMap<SeqId, u32>,
    /// Hidden states of all steps are read.
    pub(crate) reads_hidden: bool,
    /// The lanes' pages and slots while a step is filled.
    lanes: Vec<Lane>,
}

#[derive(Clone, Debug, Default)]
struct Lane {
    pages: Vec<u32>,
    slots: Vec<u32>,
}

impl Runner {
    pub(crate) fn new(block_size: usize, kinds: Vec<AttentionKind>, cut: AttentionCut, seed: u64) -> Self {
        let mut input = StepInput::default();
        let num_lanes = kinds.iter().map(|kind| kind.num_lanes).sum();
        input.attention.resize_with(num_lanes, Default::default);
        Self {
            block_size,
            kinds,
            cut,
            seed,
            input,
            queries: Vec::new(),
            branches: Vec::new(),
            shared: SharedPrefixes::default(),
            relayed: RelayStats::default(),
            step_relay: StepRelay::default(),
            last_samples: HashMap::new(),
            earlier_samples: HashMap::new(),
            reads_hidden: false,
            lanes: vec![Lane::default(); num_lanes],
        }
    }

    /// Switches relay attention from the next step on. Whether steps share now: a device or a setting may forbid it.
    pub(crate) fn set_sharing(&mut self, enabled: bool) -> bool {
        self.cut.set_relays(enabled);
        self.cut.shares()
    }

    pub(crate) fn step_relay(&self) -> &StepRelay {
        &self.step_relay
    }

    pub(crate) fn relay_stats(&self) -> RelayStats {
        self.relayed
    }

    /// Fills the step's arrays.
    pub(crate) fn build(&mut self, plan: &Plan) -> &StepInput {
        self.input.clear();
        self.queries.clear();
        self.branches.clear();
        copy_moves(&plan.swap_out, &mut self.input.swap_out);
        copy_moves(&plan.swap_in, &mut self.input.swap_in);
        copy_moves(&plan.copies, &mut self.input.copies);
        for fetch in &plan.fetches {
            let mut copies = Vec::with_capacity(fetch.moves.len());
            copy_moves(&fetch.moves, &mut copies);
            self.input.fetches.push(Fetch { id: fetch.id, copies });
        }
        self.input.waits_for_fetches = plan.waits_for_fetches;
        let mut samples = HashMap::with_capacity(plan.seqs.len());
        for seq in &plan.seqs {
            self.add_tokens(seq);
            self.add_samples(seq, &mut samples);
        }
        let pages_per_lane = self.lanes.first().map_or(0, |lane| lane.pages.len()) as u32;
        for lane in &mut self.lanes {
            self.input.pages.append(&mut lane.pages);
            self.input.slots.append(&mut lane.slots);
        }
        self.earlier_samples = std::mem::replace(&mut self.last_samples, samples);
        self.input.reads_hidden = pools(plan) || self.reads_hidden;
        self.step_relay.groups.clear();
        self.step_relay.num_tokens_saved = 0;
        let mut first_lane = 0;
        for kind in &self.kinds {
            let lanes = &mut self.input.attention[first_lane..first_lane + kind.num_lanes];
            let (attention, others) = lanes.split_first_mut().expect("a group has a lane");
            let (queries, shared) = (&self.queries, &mut self.shared);
            self.cut.plan(queries, &self.branches, &self.input.pages, kind.window, shared, attention);
            // A large group reads its keys once for each item's worth of queries.
            let once = attention.shared_items().iter().map(|item| u64::from(item.kv_len)).sum::<u64>();
            let saved = shared.keys(queries).1 - once;
            if saved > 0 {
                add_groups(attention, queries, &mut self.step_relay.groups);
            }
            self.step_relay.num_tokens_saved += saved;
            let relayed = &mut self.relayed;
            relayed.num_tokens_read += once;
            relayed.num_tokens_saved += saved;
            relayed.num_bytes_saved += saved * kind.bytes_per_token;
            relayed.num_bytes_read += kind.decode_keys(queries).saturating_sub(saved) * kind.bytes_per_token;
            // All lanes of a group have blocks for the same tokens: their plans differ in where the pages are.
            for other in others {
                other.clone_from(attention);
            }
            for lane in lanes {
                let shift = first_lane as u32 * pages_per_lane;
                lane.items.iter_mut().for_each(|item| item.pages_start += shift);
                first_lane += 1;
            }
        }
        &self.input
    }

    /// The same for a pass of a draft model: what counts is which tokens are drawn, how likely they were, and which `num_top` would
    /// have been the likeliest.
    pub(crate) fn build_draft(&mut self, plan: &Plan, num_top: u32) -> &StepInput {
        self.build(plan);
        self.input.samples.iter_mut().for_each(|sample| sample.num_logprobs = Some(num_top));
        &self.input
    }

    /// The step that was built last, whose blocks have been moved already.
    pub(crate) fn without_moves(&mut self) -> &StepInput {
        self.input.swap_out.clear();
        self.input.swap_in.clear();
        self.input.copies.clear();
        self.input.fetches.clear();
        &self.input
    }

    /// The step that was built last could not be submitted: the device still holds the samples of the one before.
    pub(crate) fn take_back(&mut self) {
        self.last_samples = std::mem::take(&mut self.earlier_samples);
    }

    fn add_tokens(&mut self, seq: &PlannedSeq) {
        let input = &mut self.input;
        let first_row = input.token_ids.len() as u32;
        let pages_start = self.lanes.first().map_or(0, |lane| lane.pages.len()) as u32;
        let num_tokens = seq.end() - seq.start;
        for (offset, &token_id) in seq.token_ids[..num_tokens as usize].iter().enumerate() {
            let row = first_row + offset as u32;
            let position = seq.start + offset as u32;
            if token_id == PENDING_TOKEN {
                let sample =
                    self.last_samples.get(&seq.seq_id).expect("a pending token is drawn by the step before");
                input.feedback.push((row, *sample));
                input.token_ids.push(0);
            } else {
                input.token_ids.push(token_id);
            }
            input.positions.push(position);
        }
        let num_pages = (seq.start + num_tokens).div_ceil(self.block_size as u32) as usize;
        let block_size = self.block_size as u32;
        for (lane, blocks) in self.lanes.iter_mut().zip(&seq.block_tables) {
            // What lies behind a window is not read: any page will do.
            let page = |block: &BlockId| if *block == NO_BLOCK { 0 } else { block.0 };
            lane.pages.extend(blocks[..num_pages].iter().map(page));
            lane.slots.extend((seq.start..seq.start + num_tokens).map(|position| {
                blocks[(position / block_size) as usize].0 * block_size + position % block_size
            }));
        }
        self.queries.push(SequenceQueries {
            query_start: first_row,
            num_queries: num_tokens,
            first_position: seq.start,
            pages_start,
        });
        self.add_branches(seq, pages_start);
    }

    /// The rows of a run's branches, which see its pages up to where they depart, and their own.
    fn add_branches(&mut self, seq: &PlannedSeq, pages_start: u32) {
        let block_size = self.block_size as u32;
        let first_page = self.lanes.first().map_or(0, |lane| lane.pages.len()) as u32;
        let first_draft = seq.end() - seq.num_chain_drafts() as u32;
        for (place, (first, branch)) in (0..).zip(seq.numbered_branches()) {
            for (lane, blocks) in self.lanes.iter_mut().zip(&seq.block_tables) {
                let block = blocks[branch.row as usize].0;
                lane.pages.push(block);
                lane.slots.extend((0..branch.num_tokens).map(|place| block * block_size + place));
            }
            // Guesses of the chain, and then of each branch before this one how many it goes on from.
            let path = seq.path(branch.parent as usize);
            let num_of_chain = path.iter().filter(|&&number| number <= seq.num_chain_drafts()).count();
            let mut before: Vec<(u32, u32)> = Vec::new();
            for (page, (first, other)) in (first_page..).zip(seq.numbered_branches()) {
                let numbers = first..first + other.num_tokens as usize;
                let count = path.iter().filter(|number| numbers.contains(number)).count() as u32;
                before.extend((count > 0).then_some((page, count)));
            }
            let query_start = self.input.token_ids.len() as u32;
            let position = first_draft + path.len() as u32;
            let tokens = &seq.drafts()[first - 1..][..branch.num_tokens as usize];
            self.input.token_ids.extend_from_slice(tokens);
            self.input.positions.extend((position..).take(tokens.len()));
            self.branches.push(BranchQueries { seq: self.queries.len(), before, page: first_page + place });
            self.queries.push(SequenceQueries {
                query_start,
                num_queries: branch.num_tokens,
                first_position: first_draft + num_of_chain as u32,
                pages_start,
            });
        }
    }

    fn add_samples(&mut self, seq: &PlannedSeq, samples: &mut HashMap<SeqId, u32>) {
        let first_row = (self.input.token_ids.len() - seq.token_ids.len()) as u32;
        for offset in seq.scored.clone() {
            let logit_row = self.add_logit_row(first_row + offset);
            let target = seq.token_ids.get(offset as usize + 1).copied().or(seq.next_token_id);
            self.input.samples.push(SampleRow {
                forced: Some(target.expect("a Plan brings the token after the last one that is scored")),
                num_logprobs: seq.params.prompt_logprobs,
                ..SampleRow::greedy(logit_row)
            });
        }
        if seq.samples.is_empty() {
            return;
        }
        for offset in 0..seq.num_redrawn {
            let logit_row = self.add_logit_row(first_row + offset);
            self.input.samples.push(SampleRow::greedy(logit_row));
        }
        let last_row = first_row + seq.token_ids.len() as u32 - 1;
        // The row of the last known token, and with drafts one for each of them.
        for number in 0..=seq.num_drafts {
            // Several draw from one row only before their first token, where they all have the first mask.
            let mask = match number {
                0 => self.add_mask(seq.mask.as_ref()),
                _ => self.add_mask(seq.draft_masks.get(number as usize - 1)),
            };
            let logit_row = self.add_logit_row(last_row - seq.num_drafts + number);
            let accepted: Vec<TokenId> =
                seq.path(number as usize).into_iter().map(|number| seq.drafts()[number - 1]).collect();
            for sample in &seq.samples {
                samples.insert(sample.seq_id, self.input.samples.len() as u32);
                let row = self.sample_row(seq, sample, &accepted, logit_row);
                self.input.samples.push(SampleRow { mask: mask.clone(), ..row });
            }
        }
    }

    fn add_mask(&mut self, mask: Option<&Arc<Vec<u32>>>) -> Range<u32> {
        let first = self.input.masks.len() as u32;
        self.input.masks.extend(mask.iter().flat_map(|mask| mask.iter()));
        first..self.input.masks.len() as u32
    }

    fn add_logit_row(&mut self, token_row: u32) -> u32 {
        self.input.logit_rows.push(token_row);
        self.input.logit_rows.len() as u32 - 1
    }

    fn sample_row(
        &mut self,
        seq: &PlannedSeq,
        sample: &PlannedSample,
        accepted: &[TokenId],
        logit_row: u32,
    ) -> SampleRow {
        let params = &*seq.params;
        if params.beam.is_some() {
            return SampleRow {
                num_logprobs: Some(2 * params.num_sequences()),
                ..SampleRow::greedy(logit_row)
            };
        }
        let history = add_history(&mut self.input.history, sample.history.as_deref(), accepted);
        let num_output_tokens = sample.num_output_tokens + accepted.len() as u32;
        let ban_end = num_output_tokens < params.min_tokens;
        let bias = self.add_biases(params, if ban_end { Some(&*seq.end_token_ids) } else { None });
        // Only the ranking by cumulative log-probability needs them unasked.
        let num_logprobs = params.logprobs.or(params.selects_at_end().then_some(0));
        SampleRow {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            history,
            bias,
            seed: sequence_seed(
                params.seed.unwrap_or_else(|| mix(self.seed ^ mix(seq.request_id.0))),
                sample.index,
            ),
            counter: u64::from(num_output_tokens),
            num_logprobs,
            ..SampleRow::greedy(logit_row)
        }
    }

    /// `banned_ends`: the request's end tokens where it must not end yet. They come with the request, because the
    /// model's configuration is not all that knows how texts end: the tokenizer and the generation config do, too.
    fn add_biases(&mut self, params: &SamplingParams, banned_ends: Option<&[TokenId]>) -> Range<u32> {
        let biases = &mut self.input.biases;
        let first = biases.len() as u32;
        biases.extend_from_slice(&params.logit_bias);
        if let Some(ends) = banned_ends {
            let ban = |&token_id: &TokenId| (token_id, f32::NEG_INFINITY);
            biases.extend(params.stop_token_ids.iter().map(ban));
            biases.extend(ends.iter().map(ban));
        }
        first..biases.len() as u32
    }
}

/// The counts of a sequence, with guesses that stand before the position counted as output.
fn add_history(
    history: &mut Vec<TokenCount>,
    counts: Option<&Vec<TokenCount>>,
    accepted: &[TokenId],
) -> Range<u32> {
    let first = history.len();
    if let Some(counts) = counts {
        history.extend_from_slice(counts);
        for &token_id in accepted {
            // The known ones ascend by token; what the guesses add stands behind them.
            let known = counts.binary_search_by_key(&token_id, |count| count.token_id).ok();
            let added =
                || history[first + counts.len()..].iter().position(|count| count.token_id == token_id);
            match known.or_else(|| added().map(|place| counts.len() + place)) {
                Some(place) => history[first + place].num_output += 1,
                None => history.push(TokenCount { token_id, in_prompt: false, num_output: 1 }),
            }
        }
    }
    first as u32..history.len() as u32
}

/// Sorts the samples of a step back to the sequences of its Plan.
pub(crate) fn step_result(plan: &Plan, output: &StepOutput) -> StepResult {
    let mut samples = output.samples.iter();
    let mut next = || samples.next().expect("the device draws one sample for each row it was given");
    let logprobs = |sampled: &Sampled| PositionLogprobs {
        chosen: sampled.chosen,
        top: output.top[sampled.top.start as usize..sampled.top.end as usize].to_vec(),
    };
    let seqs = plan.seqs.iter().map(|seq| {
        let mut result = SeqResult {
            prompt_logprobs: seq.scored.clone().map(|_| logprobs(next())).collect(),
            ..SeqResult::default()
        };
        for _ in 0..seq.num_redrawn {
            next();
        }
        let wanted = seq.params.logprobs.is_some() || seq.params.selects_at_end();
        let taken = |sampled: &Sampled| SampledToken {
            token_id: sampled.chosen.token_id,
            logprobs: wanted.then(|| logprobs(sampled)),
        };
        if seq.num_drafts == 0 {
            for sampled in seq.samples.iter().map(|_| next()) {
                match seq.params.beam {
                    Some(_) => result.candidates = logprobs(sampled).top,
                    None => result.samples.push(taken(sampled)),
                }
            }
            return result;
        }
        let drawn: Vec<&Sampled> = (0..=seq.num_drafts).map(|_| next()).collect();
        // What was drawn after a wrong guess was drawn in vain.
        let mut number = Some(0);
        while let Some(at) = number {
            result.samples.push(taken(drawn[at]));
            number = seq.child(at, drawn[at].chosen.token_id);
        }
        result
    });
    StepResult { seqs: seqs.collect(), fetched: output.fetched.clone() }
}

fn copy_moves(from: &[BlockMove], to: &mut Vec<BlockCopy>) {
    to.extend(from.iter().map(|block| BlockCopy { from: block.from.0, to: block.to.0 }));
}

/// The first continuation draws from the request's own seed, so that it is the same whatever `n` is.
fn sequence_seed(seed: u64, index: u32) -> u64 {
    if index == 0 { seed } else { mix(seed ^ mix(u64::from(index))) }
}

/// The finaliser of splitmix64: every bit of the input changes half of the output's.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
