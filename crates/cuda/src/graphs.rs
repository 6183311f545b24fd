//! Recorded steps. A decode step launches some hundred small kernels; recorded once for a number of rows (a bucket), they
//! are started by one call and follow each other without the host.
//!
//! A graph belongs to a program and a [`Shape`]. Those of an engine's program are
//! recorded before it is ready (`warm_up`). Of any other program the first step of a shape runs unrecorded, which also makes
//! the libraries load what they need; the second is recorded.

use std::collections::HashMap;

use baton_backend::{AttentionItem, AttentionPlan, BackendError, ProgramId, StepInput};
use cudarc::driver::result as driver;
use cudarc::driver::sys;

use crate::gpu::{Gpu, failed};
use crate::ops::Scoring;
use crate::pack::MAX_PLANS;

/// Larger steps are not recorded: their kernels take longer than their launches.
const MAX_GRAPH_ROWS: usize = 512;
/// Rows of a sequence whose guesses are checked, at most, in a recorded step. Where there are so many, its attention is launched for
/// few and for many rows of an item, whatever the items are: each kernel passes over those of the other.
pub(crate) const MAX_CHECKED_ROWS: u32 = 33;
/// With up to so many queries of an item, steps of other numbers are not replayed for them.
const MAX_FEW_QUERIES: u32 = 8;

/// What the launches of a step depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) tokens: u32,
    pub(crate) logit_rows: u32,
    pub(crate) samples: u32,
    /// Rows without logits may be dropped where the program says so. Never in a recorded step, which has none.
    pub(crate) can_keep: bool,
    pub(crate) plans: [PlanShape; MAX_PLANS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct PlanShape {
    /// Fewest and most queries of an item of one sequence; 0 without items. Two at most are more than one: a sequence has several rows.
    pub(crate) min_queries: u32,
    pub(crate) max_queries: u32,
    /// Some items read what several sequences share.
    pub(crate) shares: bool,
}

impl Shape {
    pub(crate) fn exact(input: &StepInput, block_size: u32) -> Self {
        let mut shape = Self {
            tokens: input.num_tokens() as u32,
            logit_rows: input.logit_rows.len() as u32,
            samples: input.samples.len() as u32,
            can_keep: input.can_keep_logit_rows(),
            ..Self::default()
        };
        for (plan, shape) in input.attention.iter().zip(&mut shape.plans) {
            let queries = || plan.own_items().iter().map(|item| item.num_queries);
            *shape = PlanShape {
                min_queries: queries().min().unwrap_or(0),
                max_queries: queries().max().unwrap_or(0).max(if has_runs(plan, block_size) { 2 } else { 0 }),
                shares: plan.num_shared_items > 0,
            };
        }
        shape
    }

    /// The bucket of a step in which every row gives a token: of `max_decodes` sequences at most with one row each, or of up to
    /// `max_checked` rows of sequences whose guesses are checked.
    pub(crate) fn bucket(&self, max_decodes: usize, max_checked: usize) -> Option<Self> {
        let all_draw = self.tokens > 0 && self.tokens == self.logit_rows && self.tokens == self.samples;
        let most_queries = self.plans.iter().map(|plan| plan.max_queries).max().unwrap_or(0);
        let max_rows = if most_queries <= 1 { max_decodes } else { max_checked };
        let rows = self.tokens as usize;
        if !all_draw || most_queries > MAX_CHECKED_ROWS || rows > max_rows.min(MAX_GRAPH_ROWS) {
            return None;
        }
        let shares = self.plans.iter().any(|plan| plan.shares);
        let mut bucket = Self::decode(bucket_rows(rows).min(max_rows), shares);
        if most_queries > 1 {
            let is_few = most_queries <= MAX_FEW_QUERIES;
            let max_queries = if is_few { most_queries.next_power_of_two() } else { MAX_CHECKED_ROWS };
            bucket.plans.iter_mut().for_each(|plan| plan.max_queries = max_queries);
        }
        Some(bucket)
    }

    /// The step of so many decodes, whatever they share. Plans that a model does not have have no items and no ops.
    fn decode(rows: usize, shares: bool) -> Self {
        let rows = rows as u32;
        let plan = PlanShape { min_queries: 1, max_queries: 1, shares };
        Self { tokens: rows, logit_rows: rows, samples: rows, can_keep: false, plans: [plan; MAX_PLANS] }
    }

    /// The same without attention and sampling.
    pub(crate) fn products(self) -> Self {
        Self { samples: 0, plans: Default::default(), ..self }
    }

    /// A step of so many tokens of prompts that are not at their end.
    pub(crate) fn prompts(tokens: usize) -> Self {
        Self { tokens: tokens as u32, ..Self::default() }
    }

    /// Every bucket for steps of up to `max_rows` that share nothing. Those that share are recorded when they are first met, so
    /// that they do not hold up the start.
    pub(crate) fn buckets(max_rows: usize) -> impl Iterator<Item = Self> {
        let max_rows = max_rows.min(MAX_GRAPH_ROWS);
        let whole = (1..=max_rows).filter(move |&rows| bucket_rows(rows) == rows || rows == max_rows);
        whole.map(|rows| Self::decode(rows, false))
    }
}

/// Whether a sequence has several rows, if only in several items.
fn has_runs(plan: &AttentionPlan, block_size: u32) -> bool {
    let first_page = |item: &AttentionItem| item.pages_start.wrapping_sub(item.kv_start / block_size);
    let is_run = |pair: &[AttentionItem]| {
        pair[0].query_start != pair[1].query_start && first_page(&pair[0]) == first_page(&pair[1])
    };
    plan.own_items().windows(2).any(is_run)
}

fn bucket_rows(rows: usize) -> usize {
    if rows <= 8 { rows.next_power_of_two() } else { rows.next_multiple_of(8) }
}

#[derive(Debug, Default)]
pub(crate) struct Graphs {
    states: HashMap<(ProgramId, Shape), State>,
}

#[derive(Debug)]
enum State {
    Seen,
    /// And what was left out of it.
    Ready(Graph, Option<Scoring>),
    /// Could not be recorded; it is not tried again.
    Refused,
}

/// What to do with a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Run,
    Record,
    Replay,
}

impl Graphs {
    pub(crate) fn action(&mut self, key: (ProgramId, Shape)) -> Action {
        match self.states.get(&key) {
            None => {
                self.states.insert(key, State::Seen);
                Action::Run
            }
            Some(State::Seen) => Action::Record,
            Some(State::Ready(..)) => Action::Replay,
            Some(State::Refused) => Action::Run,
        }
    }

    pub(crate) fn replay(&self, gpu: &Gpu, key: (ProgramId, Shape)) -> Result<Option<Scoring>, BackendError> {
        let Some(State::Ready(graph, scoring)) = self.states.get(&key) else {
            unreachable!("only recorded graphs are replayed")
        };
        // SAFETY: the graph is instantiated, its memory lives as long as the backend.
        unsafe { driver::graph::launch(graph.executable, gpu.stream.0) }
            .map_err(failed("launching a graph"))?;
        Ok(*scoring)
    }

    pub(crate) fn store(&mut self, key: (ProgramId, Shape), graph: Option<Graph>, scoring: Option<Scoring>) {
        self.states.insert(key, graph.map_or(State::Refused, |graph| State::Ready(graph, scoring)));
    }
}

#[derive(Debug)]
pub(crate) struct Graph {
    executable: sys::CUgraphExec,
}
// SAFETY: used by the thread that uses the backend, one at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// Starts recording: what is launched from here to `end` is not run.
    pub(crate) fn begin(gpu: &Gpu) -> Result<(), BackendError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is ours and not recording.
        unsafe { driver::stream::begin_capture(gpu.stream.0, mode) }.map_err(failed("starting to record"))
    }

    pub(crate) fn end(gpu: &Gpu) -> Result<Self, BackendError> {
        // SAFETY: `begin` was called before.
        let graph = unsafe { driver::stream::end_capture(gpu.stream.0) }.map_err(failed("recording"))?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph was just made; it is not needed once it is instantiated.
        let instantiated =
            unsafe { sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0) }.result();
        // SAFETY: as above.
        let _ = unsafe { driver::graph::destroy(graph) };
        instantiated.map(|()| Self { executable }).map_err(failed("instantiating a graph"))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated by `end`, destroyed here only.
        let _ = unsafe { driver::graph::exec_destroy(self.executable) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_in_which_every_row_draws_have_a_bucket() {
        let decode = |rows| Shape { tokens: rows, logit_rows: rows, samples: rows, ..Shape::default() };
        let rows = |rows: u32| decode(rows).bucket(256, 300).map(|bucket| bucket.tokens);
        assert_eq!(
            [1, 2, 3, 8, 9, 33, 256, 257].map(rows).map(|rows| rows.unwrap_or(0)),
            [1, 2, 4, 8, 16, 40, 256, 0]
        );
        assert_eq!(decode(29).bucket(30, 99).map(|bucket| bucket.tokens), Some(30));
        assert_eq!(Shape { tokens: 2, ..decode(1) }.bucket(256, 256), None);
        let every: Vec<u32> = Shape::buckets(30).map(|bucket| bucket.tokens).collect();
        assert_eq!(every, [1, 2, 4, 8, 16, 24, 30]);
        assert!((1..=30).all(|rows| every.contains(&decode(rows).bucket(30, 99).unwrap().tokens)));
        let prompt = Shape { logit_rows: 1, samples: 1, ..decode(4) };
        assert_eq!(prompt.bucket(256, 256), None);
        // Two sequences with three guesses each have a bucket of their own, that of any such step of about as many rows.
        let checked = |rows, queries| {
            let mut shape = decode(rows);
            shape.plans[0].max_queries = queries;
            shape.bucket(4, 64)
        };
        assert_eq!(checked(8, 4).map(|bucket| bucket.tokens), Some(8));
        assert_ne!(checked(4, 4), decode(4).bucket(4, 64));
        assert_eq!(checked(8, 4), checked(7, 3));
        assert_ne!(checked(8, 4), checked(8, 2));
        assert_eq!((checked(18, 9), checked(33, 33)).0.map(|bucket| bucket.plans[0].max_queries), Some(33));
        assert_eq!((checked(65, 4), checked(40, 40)), (None, None));
        let mut sharing = decode(12);
        sharing.plans[1].shares = true;
        let bucket = sharing.bucket(256, 256).expect("decodes");
        assert!(bucket.tokens == 16 && bucket.plans.iter().all(|plan| plan.shares && plan.max_queries == 1));
    }

    /// A kernel that fetches keys of decodes early must not take two rows of a sequence for two decodes.
    #[test]
    fn rows_of_one_sequence_are_no_decodes() {
        let item = |query_start, pages_start, kv_start| AttentionItem {
            query_start,
            num_queries: 1,
            pages_start,
            kv_start,
            kv_len: 64,
            partial: 0,
        };
        let max_queries = |items: &[AttentionItem]| {
            let plan = AttentionPlan { items: items.to_vec(), ..AttentionPlan::default() };
            let input = StepInput { attention: vec![plan], ..StepInput::default() };
            Shape::exact(&input, 16).plans[0].max_queries
        };
        // Two decodes, the first split over its keys; two rows, the second seeing a split more.
        assert_eq!(max_queries(&[item(0, 0, 0), item(0, 4, 64), item(1, 6, 0)]), 1);
        assert_eq!(max_queries(&[item(0, 3, 0), item(1, 3, 0), item(1, 7, 64)]), 2);
    }
}
