//! Speculation: guesses of what running sequences draw next, which the next step checks all at once.
//!
//! After each step [`Speculation`] asks its [`Proposer`] for guesses, and the step times for how many of them are worth a row
//! each; the scheduler puts those into the next Plan. The device draws a token at every position with the request's own random
//! numbers, just as it would without guesses, and a guess is right if it is the token drawn. So outputs are the same with and
//! without speculation, sampled ones too; only when they come differs.
//!
//! Not here: the rows of a step (`sched`, `runner`) and masks along guesses (`masks`).

mod acceptance;
mod confidence;
mod config;
mod cost;
mod drafter;
mod filled;
mod hidden;
mod matches;
mod measure;
mod ngram;
mod proposer;
mod suffix;
mod synthetic;
mod tree;

use std::collections::HashMap;
use std::time::Duration;

use baton_core::{DraftCounts, RequestId, RequestOutput, SeqId, TokenId};
use baton_sched::{Plan, PlannedSeq, Scheduler, SequenceView, StepResult};
use serde::Serialize;

use acceptance::{Classes, Record};
use confidence::Confidence;
use config::{Method, Settings};
pub use config::{SpeculativeConfig, SpeculativeMethod};
use cost::StepTimes;
pub(crate) use drafter::{DraftLimits, Drafter, Drawn};
pub(crate) use filled::Filled;
pub(crate) use measure::measure_steps;
pub use proposer::{DraftRequest, Guess, NUM_CLASSES, Owner, Proposer};
use synthetic::Synthetic;
pub(crate) use tree::Beside;

use crate::EngineError;

/// Speculation in numbers, since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SpeculationStats {
    /// Steps of a sequence that checked guesses.
    pub num_drafts: u64,
    pub num_draft_tokens: u64,
    pub num_accepted_tokens: u64,
    /// How often the guess of each position was right.
    pub num_accepted_per_position: Vec<u64>,
}

impl SpeculationStats {
    /// Tokens that a step with guesses brought on average, the one after them included.
    pub fn mean_acceptance_length(&self) -> f64 {
        1.0 + self.num_accepted_tokens as f64 / self.num_drafts.max(1) as f64
    }

    fn count(&mut self, num_drafts: usize, num_right: usize) {
        self.num_drafts += 1;
        self.num_draft_tokens += num_drafts as u64;
        self.num_accepted_tokens += num_right as u64;
        if self.num_accepted_per_position.len() < num_drafts {
            self.num_accepted_per_position.resize(num_drafts, 0);
        }
        self.num_accepted_per_position[..num_right].iter_mut().for_each(|count| *count += 1);
    }
}

#[derive(Debug)]
pub(crate) struct Speculation {
    settings: Settings,
    proposer: Box<dyn Proposer>,
    synthetic: Option<Synthetic>,
    /// Of a draft model: how often it was right.
    confidence: Option<Confidence>,
    /// The same of tokens beside those that it drew.
    confidence_beside: Confidence,
    /// What the last guesses were reckoned with.
    pace: DraftPace,
    classes: Classes,
    seqs: HashMap<SeqId, Speculator>,
    times: StepTimes,
    /// Rows of logits that a step has.
    max_rows: usize,
    pub(crate) stats: SpeculationStats,
    /// What the proposer is told of the newest step.
    hidden: HashMap<SeqId, Vec<f32>>,
}

/// A sequence that speculates.
#[derive(Debug)]
struct Speculator {
    owner: Owner,
    most: usize,
    record: Record,
    /// What the next step checks, and how likely it was thought to be right.
    guess: Guess,
    chances: Vec<f64>,
    /// How sure a draft model was of each guess: see [`Confidence`].
    buckets: Vec<usize>,
    /// Guesses beside the chain that the next step checks.
    beside: Vec<Beside>,
    output: Vec<TokenId>,
}

/// What a draft model's next guess must bring to be worth its time.
#[derive(Clone, Copy, Debug, Default)]
struct DraftPace {
    /// Tokens per second that are expected anyway; 0 where costs do not count.
    rate: f64,
    row_seconds: f64,
}

impl Speculation {
    pub(crate) fn new(config: &SpeculativeConfig, max_rows: usize) -> Result<Self, EngineError> {
        let settings = config.settings()?;
        let mut synthetic = None;
        let proposer: Box<dyn Proposer> = match &settings.method {
            Method::Ngram { min, max } => Box::new(ngram::Ngram::new(*min, *max)),
            Method::Suffix(options) => Box::new(suffix::Suffix::new(*options)),
            Method::DraftModel { .. } => {
                // A real draft, whose guesses are then right by chance.
                let forced = config.acceptance.map(|acceptance| (acceptance, config.seed.unwrap_or(0)));
                synthetic = forced.map(|(acceptance, seed)| Synthetic::new(acceptance, seed));
                Box::new(Reserve)
            }
            Method::Synthetic { acceptance, seed } => {
                synthetic = Some(Synthetic::new(*acceptance, *seed));
                Box::new(synthetic::Anything(*acceptance))
            }
            Method::Given => unreachable!("no configuration names it"),
        };
        Ok(Self::with(settings, proposer, synthetic, max_rows))
    }

    /// With a proposer of somebody else, all of whose guesses are checked.
    pub(crate) fn given(proposer: Box<dyn Proposer>, num_tokens: usize, max_rows: usize) -> Self {
        let settings = Settings { method: Method::Given, num_tokens, adaptive: false, max_batch: usize::MAX };
        Self::with(settings, proposer, None, max_rows)
    }

    fn with(
        settings: Settings,
        proposer: Box<dyn Proposer>,
        synthetic: Option<Synthetic>,
        max_rows: usize,
    ) -> Self {
        let classes = match &settings.method {
            Method::Synthetic { .. } | Method::DraftModel { .. } => Classes::new(|_| 1.0),
            // The longer the span that is alike, the likelier the guess.
            _ => Classes::new(|class| [0.2, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.92][class % 8]),
        };
        Self {
            confidence: matches!(settings.method, Method::DraftModel { .. }).then(Confidence::default),
            confidence_beside: Confidence::beside(),
            pace: DraftPace::default(),
            settings,
            proposer,
            synthetic,
            classes,
            seqs: HashMap::new(),
            // Until they are measured: a row costs a thirtieth of reading the weights.
            times: StepTimes::new(vec![(1, 1.0), (31, 2.0)]),
            max_rows,
            stats: SpeculationStats::default(),
            hidden: HashMap::new(),
        }
    }

    pub(crate) fn set_times(&mut self, times: StepTimes) {
        self.times = times;
    }

    /// A step in which every row gave a token took so long.
    pub(crate) fn took(&mut self, plan: &Plan, time: Duration) {
        let rows = plan.num_tokens();
        if rows > 0 && plan.seqs.iter().all(|seq| seq.token_ids.len() == seq.num_logit_rows()) {
            self.times.took(rows, time);
        }
    }

    /// Replaces what the device drew by what the test proposer wants to be right.
    pub(crate) fn force(&mut self, plan: &Plan, output: &mut baton_backend::StepOutput) {
        if let Some(synthetic) = &mut self.synthetic {
            synthetic.force(plan, output);
        }
    }

    /// Takes in what a step brought: which guesses were right, new tokens, sequences that ended.
    pub(crate) fn learn(&mut self, plan: &Plan, result: &StepResult, outputs: &mut [RequestOutput]) {
        let mut counts: HashMap<RequestId, DraftCounts> = HashMap::new();
        for (planned, result) in plan.seqs.iter().zip(&result.seqs) {
            let num_drafts = planned.num_drafts as usize;
            if num_drafts == 0 {
                continue;
            }
            let num_right = result.samples.len().saturating_sub(1).min(num_drafts);
            self.stats.count(num_drafts, num_right);
            counts.entry(planned.request_id).or_default().add(DraftCounts {
                num_accepted: num_right as u32,
                num_rejected: (num_drafts - num_right) as u32,
            });
            if let Some(seq) = self.seqs.get_mut(&planned.seq_id) {
                let drawn: Vec<TokenId> = result.samples.iter().map(|sampled| sampled.token_id).collect();
                let of_chain = planned.num_right_of_chain(drawn.iter().copied()).min(num_right);
                let Speculator { guess, chances, record, .. } = seq;
                let checked = chances.len().min(planned.num_chain_drafts());
                let (chances, likelihoods) = (&chances[..checked], &guess.likelihoods[..checked]);
                self.classes.learn(guess.class, chances, likelihoods, of_chain.min(checked), record);
                if let Some(confidence) = &mut self.confidence {
                    let buckets = seq.buckets.iter().enumerate().take(of_chain + 1);
                    for (place, &bucket) in buckets.take(planned.num_chain_drafts()) {
                        confidence.checked(bucket, place < of_chain);
                    }
                }
                // A guess beside the chain was looked at where the one that it departs from was right.
                for beside in seq.beside.drain(..).filter(|beside| beside.parent <= of_chain) {
                    let is_right = beside.parent == of_chain && drawn.get(of_chain) == Some(&beside.token_id);
                    self.confidence_beside.checked(beside.bucket, is_right);
                }
            }
        }
        for output in outputs.iter_mut() {
            output.drafts = counts.remove(&output.request_id).unwrap_or_default();
        }
        self.note_tokens(plan, outputs);
    }

    fn note_tokens(&mut self, plan: &Plan, outputs: &[RequestOutput]) {
        if self.seqs.is_empty() {
            return;
        }
        let mut ids: HashMap<(RequestId, u32), SeqId> = HashMap::new();
        for planned in &plan.seqs {
            ids.extend(
                planned.samples.iter().map(|sample| ((planned.request_id, sample.index), sample.seq_id)),
            );
        }
        for output in outputs {
            for new in &output.outputs {
                let Some(id) = ids.get(&(output.request_id, new.index)) else { continue };
                let Some(seq) = self.seqs.get_mut(id) else { continue };
                seq.output.extend_from_slice(&new.token_ids);
            }
        }
    }

    /// Forgets sequences that have ended, whose outputs the proposer may keep.
    fn drop_ended(&mut self, scheduler: &Scheduler) {
        let is_live = |id: SeqId| scheduler.sequence(id).is_some_and(|view| !view.is_finished);
        let ended: Vec<SeqId> = self.seqs.keys().copied().filter(|&id| !is_live(id)).collect();
        for id in ended {
            let seq = self.seqs.remove(&id).expect("it was just found");
            self.forget_hidden(id);
            self.proposer.ended(id, &seq.output, &seq.owner);
        }
    }

    /// Makes guesses for the sequences that drew a token in the step, and says which sequences have some to be checked.
    /// Of a draft model they are places for guesses, and `drafts` has what its passes take.
    pub(crate) fn propose(
        &mut self,
        plan: &Plan,
        scheduler: &mut Scheduler,
        drafts: Option<&StepTimes>,
    ) -> HashMap<SeqId, Vec<TokenId>> {
        self.drop_ended(scheduler);
        let base_rows = scheduler.num_decodes();
        let mut asked: Vec<SeqId> = Vec::new();
        for planned in &plan.seqs {
            for sample in &planned.samples {
                if self.ask(planned, sample.seq_id, scheduler) {
                    asked.push(sample.seq_id);
                }
            }
        }
        let chances: Vec<Vec<f64>> = asked.iter().map(|id| self.seqs[id].chances.clone()).collect();
        let counts = if base_rows >= self.settings.max_batch {
            vec![0; asked.len()]
        } else if self.settings.adaptive {
            let most = self.max_rows.saturating_sub(base_rows);
            let choice = self.times.choose(base_rows, &chances, most, drafts);
            self.pace = DraftPace { rate: choice.rate, row_seconds: choice.row_seconds };
            choice.counts
        } else {
            chances.iter().map(Vec::len).collect()
        };
        let mut drafts = HashMap::with_capacity(asked.len());
        for (id, count) in asked.into_iter().zip(counts) {
            let seq = self.seqs.get_mut(&id).expect("it was asked");
            seq.guess.truncate(count);
            seq.chances.truncate(count);
            if count == 0 {
                seq.record.idle();
            }
            // Guesses need the last token: while some are to be expected, no step is planned ahead of it.
            scheduler.set_awaits_tokens(id, count > 0);
            let is_complete = scheduler.sequence(id).is_some_and(|view| view.num_pending == 0);
            if count > 0 && is_complete {
                drafts.insert(id, seq.guess.token_ids.clone());
            }
        }
        drafts
    }

    /// Whether a planned sequence may get guesses, now or later.
    pub(crate) fn speculates(planned: &PlannedSeq) -> bool {
        planned.params.speculative_tokens != Some(0) && planned.params.beam.is_none()
    }

    /// A draft model has made a guess for a sequence and gave it this probability. Returns the chance that it is right.
    pub(crate) fn drafted(&mut self, id: SeqId, probability: f32) -> f64 {
        let (Some(confidence), Some(seq)) = (&mut self.confidence, self.seqs.get_mut(&id)) else {
            return 0.0;
        };
        let bucket = Confidence::bucket(probability);
        confidence.made(bucket);
        if seq.buckets.is_empty() {
            seq.guess.truncate(0);
            seq.chances.clear();
        }
        let likelihood = confidence.chance(bucket);
        seq.buckets.push(bucket);
        seq.guess.push(0, likelihood as f32);
        let chance = self.classes.chances(&seq.guess, &seq.record).pop().unwrap_or(0.0);
        seq.chances.push(chance);
        chance
    }

    /// A draft model begins with the guesses of a sequence.
    pub(crate) fn begin_draft(&mut self, id: SeqId) {
        if let Some(seq) = self.seqs.get_mut(&id) {
            seq.buckets.clear();
            seq.beside.clear();
        }
    }

    /// Whether a guess is worth a row of the step, if it and those before it are right with this chance.
    pub(crate) fn pays_to_check(&self, chance: f64) -> bool {
        chance >= self.pace.rate * self.pace.row_seconds
    }

    /// Whether the guess after it is worth making, if its part of the draft's pass takes so long.
    pub(crate) fn pays_to_draft(&self, chance: f64, pass_seconds: f64) -> bool {
        let next = chance * self.confidence.as_ref().map_or(0.0, Confidence::average);
        next >= self.pace.rate * (self.pace.row_seconds + pass_seconds)
    }

    /// Asks the proposer about one sequence. False for one that does not speculate.
    fn ask(&mut self, planned: &PlannedSeq, id: SeqId, scheduler: &Scheduler) -> bool {
        let params = &planned.params;
        let wanted = params.speculative_tokens.map_or(self.settings.num_tokens, |count| count as usize);
        if wanted == 0 || params.beam.is_some() {
            return false;
        }
        let Some(view) = scheduler.sequence(id).filter(|view| !view.is_finished) else { return false };
        let seq = self.seqs.entry(id).or_insert_with(|| Speculator::new(&view, wanted));
        let request = DraftRequest {
            seq_id: id,
            token_ids: view.token_ids,
            num_prompt_tokens: view.num_prompt_tokens,
            prediction: view.prediction,
            owner: &seq.owner,
            most: seq.most,
            hidden: self.hidden.get(&id).map_or(&[], Vec::as_slice),
        };
        seq.guess = self.proposer.propose(&request);
        if let Some(confidence) = &self.confidence {
            seq.guess.likelihoods.fill(confidence.average() as f32);
        }
        seq.chances = self.classes.chances(&seq.guess, &seq.record);
        true
    }
}

impl Speculator {
    fn new(view: &SequenceView<'_>, most: usize) -> Self {
        Self {
            owner: Owner { tenant: view.tenant, salt: view.cache_salt.cloned() },
            most,
            record: Record::default(),
            guess: Guess::default(),
            chances: Vec::new(),
            buckets: Vec::new(),
            beside: Vec::new(),
            output: view.token_ids[view.num_prompt_tokens..].to_vec(),
        }
    }
}

/// Keeps places for the guesses of a draft model, which are made when there are blocks for them.
#[derive(Debug)]
struct Reserve;

impl Proposer for Reserve {
    fn propose(&mut self, request: &DraftRequest<'_>) -> Guess {
        Guess { token_ids: vec![0; request.most], likelihoods: vec![1.0; request.most], class: 0 }
    }

    fn ended(&mut self, _: SeqId, _: &[TokenId], _: &Owner) {}
}
