//! From a Plan to the flat arrays of a step, and from the step's samples back to a result for the scheduler.
//!
//! The runner decides nothing: which tokens run is the Plan's word, how they are computed the backend's. It owns the
//! step's arrays and fills them anew for each Plan.

use std::collections::HashMap;
use std::ops::Range;

use baton_backend::{
    AttentionCut, BlockCopy, KvLayerSpec, KvSpec, MAX_SPLIT_QUERIES, SampleRow, Sampled, SequenceQueries,
    SharedPrefixes, StepInput, StepOutput,
};
use baton_core::{PositionLogprobs, SamplingParams, SeqId, TokenId};
use baton_model::ModelConfig;
use baton_sched::{
    BlockMove, PENDING_TOKEN, Plan, PlannedSample, PlannedSeq, SampledToken, Scheduler, SeqResult, StepResult,
};

use crate::engine::pools;
use crate::history::Histories;
use crate::masks::Masks;
use crate::relay::{RelayStats, StepRelay, add_groups};

/// Layers of a model that attend alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AttentionKind {
    /// `None` is full attention.
    window: Option<u32>,
    /// Of all these layers together.
    bytes_per_token: u64,
}

impl AttentionKind {
    /// In the order of `StepInput::attention`.
    pub(crate) fn all(model: &ModelConfig, kv: &KvSpec) -> Vec<Self> {
        let of_window = |window: Option<u32>| {
            let layers = model.layers.iter().zip(&kv.layers).filter(|(layer, _)| layer.window == window);
            let bytes = |layer: &KvLayerSpec| 2 * layer.num_kv_heads * kv.dtype.head_bytes(layer.head_dim);
            let bytes_per_token = layers.map(|(_, layer)| bytes(layer) as u64).sum();
            Self { window, bytes_per_token }
        };
        model.attention_kinds().into_iter().map(of_window).collect()
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
    shared: SharedPrefixes,
    relayed: RelayStats,
    /// What is shared in the newest step.
    step_relay: StepRelay,
    /// Which sample of the newest submitted step belongs to which sequence.
    last_samples: HashMap<SeqId, u32>,
    /// Those of the step before, for when the newest could not be submitted.
    earlier_samples: HashMap<SeqId, u32>,
    histories: Histories,
}

impl Runner {
    pub(crate) fn new(block_size: usize, kinds: Vec<AttentionKind>, cut: AttentionCut, seed: u64) -> Self {
        let mut input = StepInput::default();
        input.attention.resize_with(kinds.len(), Default::default);
        Self {
            block_size,
            kinds,
            cut,
            seed,
            input,
            queries: Vec::new(),
            shared: SharedPrefixes::default(),
            relayed: RelayStats::default(),
            step_relay: StepRelay::default(),
            last_samples: HashMap::new(),
            earlier_samples: HashMap::new(),
            histories: Histories::default(),
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

    /// Fills the step's arrays. The history that penalties need comes from the scheduler.
    pub(crate) fn build(&mut self, plan: &Plan, scheduler: &Scheduler, masks: &Masks) -> &StepInput {
        self.input.clear();
        self.queries.clear();
        copy_moves(&plan.swap_out, &mut self.input.swap_out);
        copy_moves(&plan.swap_in, &mut self.input.swap_in);
        copy_moves(&plan.copies, &mut self.input.copies);
        let mut samples = HashMap::with_capacity(plan.seqs.len());
        for seq in &plan.seqs {
            self.add_tokens(seq);
            let mask = seq.samples.first().and_then(|sample| masks.of(seq.request_id, sample.seq_id));
            self.add_samples(seq, scheduler, mask, &mut samples);
        }
        self.earlier_samples = std::mem::replace(&mut self.last_samples, samples);
        self.histories.retain(|id| scheduler.contains(id));
        self.input.reads_hidden = pools(plan);
        self.step_relay.groups.clear();
        self.step_relay.num_tokens_saved = 0;
        for (kind, attention) in self.kinds.iter().zip(&mut self.input.attention) {
            let (queries, shared) = (&self.queries, &mut self.shared);
            self.cut.plan(queries, &self.input.pages, kind.window, shared, attention);
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
        }
        &self.input
    }

    /// The step that was built last could not be submitted: the device still holds the samples of the one before.
    pub(crate) fn take_back(&mut self) {
        self.last_samples = std::mem::take(&mut self.earlier_samples);
    }

    fn add_tokens(&mut self, seq: &PlannedSeq) {
        let input = &mut self.input;
        let first_row = input.token_ids.len() as u32;
        let pages_start = input.pages.len() as u32;
        for (offset, &token_id) in seq.token_ids.iter().enumerate() {
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
            let block = seq.block_table[position as usize / self.block_size];
            input.positions.push(position);
            input.slots.push(block.0 * self.block_size as u32 + position % self.block_size as u32);
        }
        let num_tokens = seq.token_ids.len() as u32;
        let num_pages = (seq.start + num_tokens).div_ceil(self.block_size as u32) as usize;
        input.pages.extend(seq.block_table[..num_pages].iter().map(|block| block.0));
        self.queries.push(SequenceQueries {
            query_start: first_row,
            num_queries: num_tokens,
            first_position: seq.start,
            pages_start,
        });
    }

    fn add_samples(
        &mut self,
        seq: &PlannedSeq,
        scheduler: &Scheduler,
        mask: Option<&[u32]>,
        samples: &mut HashMap<SeqId, u32>,
    ) {
        let first_row = (self.input.token_ids.len() - seq.token_ids.len()) as u32;
        for offset in seq.scored.clone() {
            let logit_row = self.add_logit_row(first_row + offset);
            let target = prompt_token(seq, offset + 1, scheduler);
            self.input.samples.push(SampleRow {
                forced: Some(target),
                num_logprobs: seq.params.prompt_logprobs,
                ..SampleRow::greedy(logit_row)
            });
        }
        if seq.samples.is_empty() {
            return;
        }
        let logit_row = self.add_logit_row(first_row + seq.token_ids.len() as u32 - 1);
        // Several draw from one row only before their first token, where they all have the first mask.
        let first_word = self.input.masks.len() as u32;
        self.input.masks.extend_from_slice(mask.unwrap_or_default());
        let mask = first_word..self.input.masks.len() as u32;
        for sample in &seq.samples {
            samples.insert(sample.seq_id, self.input.samples.len() as u32);
            let row = self.sample_row(seq, sample, logit_row, scheduler);
            self.input.samples.push(SampleRow { mask: mask.clone(), ..row });
        }
    }

    fn add_logit_row(&mut self, token_row: u32) -> u32 {
        self.input.logit_rows.push(token_row);
        self.input.logit_rows.len() as u32 - 1
    }

    fn sample_row(
        &mut self,
        seq: &PlannedSeq,
        sample: &PlannedSample,
        logit_row: u32,
        scheduler: &Scheduler,
    ) -> SampleRow {
        let params = &*seq.params;
        if params.beam.is_some() {
            return SampleRow {
                num_logprobs: Some(2 * params.num_sequences()),
                ..SampleRow::greedy(logit_row)
            };
        }
        let history = if params.has_penalties() {
            self.add_history(sample.seq_id, seq.seq_id, scheduler)
        } else {
            0..0
        };
        let bias = self.add_biases(params, if sample.ban_end { Some(&*seq.end_token_ids) } else { None });
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
            counter: u64::from(sample.num_output_tokens),
            num_logprobs,
            ..SampleRow::greedy(logit_row)
        }
    }

    /// Counts the tokens of a sequence so far. A continuation that is still to be forked has its parent's.
    fn add_history(&mut self, seq_id: SeqId, parent: SeqId, scheduler: &Scheduler) -> Range<u32> {
        let view = scheduler
            .sequence(seq_id)
            .or_else(|| scheduler.sequence(parent))
            .expect("a planned sequence is known until it is applied");
        let first = self.input.history.len() as u32;
        self.input.history.extend_from_slice(self.histories.counts(seq_id, &view));
        first..self.input.history.len() as u32
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
        for _ in &seq.samples {
            let sampled = next();
            if seq.params.beam.is_some() {
                result.candidates = logprobs(sampled).top;
            } else {
                let wanted = seq.params.logprobs.is_some() || seq.params.selects_at_end();
                result.samples.push(SampledToken {
                    token_id: sampled.chosen.token_id,
                    logprobs: wanted.then(|| logprobs(sampled)),
                });
            }
        }
        result
    });
    StepResult { seqs: seqs.collect() }
}

/// The token `offset` places after the run's first one; the last of a chunk is scored against the one after it.
fn prompt_token(seq: &PlannedSeq, offset: u32, scheduler: &Scheduler) -> TokenId {
    if let Some(&token_id) = seq.token_ids.get(offset as usize) {
        return token_id;
    }
    let view = scheduler.sequence(seq.seq_id).expect("a planned sequence is known until it is applied");
    view.token_ids[(seq.start + offset) as usize]
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
