//! What steps of so many rows take on this device, measured once before the engine is ready.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_backend::{BackendError, KvSpec, ProgramId, StepExecutor, StepOutput};
use baton_core::{BlockId, RequestId, SamplingParams, SeqId};
use baton_sched::{Plan, PlannedSample, PlannedSeq};

use super::StepTimes;
use crate::runner::Runner;

/// Of these the fastest counts: others were held up by something.
const NUM_REPEATS: usize = 3;
/// Larger steps are not tried after this.
const MAX_TIME: Duration = Duration::from_millis(1500);

/// Runs steps in which every row gives a token, in blocks that nobody uses yet. Of the program: its id, the rows of its
/// largest step, its cache, and how many blocks that has.
pub(crate) fn measure_steps(
    backend: &mut dyn StepExecutor,
    runner: &mut Runner,
    (program, max_rows, cache, num_blocks): (ProgramId, usize, &KvSpec, usize),
) -> Result<StepTimes, BackendError> {
    let started = Instant::now();
    let mut points: Vec<(usize, f64)> = Vec::new();
    let mut output = StepOutput::default();
    for rows in StepTimes::sizes(max_rows) {
        let fits = rows.div_ceil(cache.block_size) * cache.num_lanes() <= num_blocks;
        if !points.is_empty() && (!fits || started.elapsed() > MAX_TIME) {
            break;
        }
        let plan = plan_of(rows, cache);
        let mut best = f64::INFINITY;
        for _ in 0..NUM_REPEATS {
            let input = runner.build(&plan);
            let start = Instant::now();
            backend.submit(input, program)?;
            backend.collect(&mut output)?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        points.push((rows, best));
    }
    Ok(StepTimes::new(points))
}

/// One sequence that begins, all its tokens but the first being guesses.
fn plan_of(rows: usize, cache: &KvSpec) -> Plan {
    let num_blocks = rows.div_ceil(cache.block_size);
    let blocks = |lane: usize| (0..num_blocks).map(|row| BlockId((lane * num_blocks + row) as u32)).collect();
    let sample =
        PlannedSample { seq_id: SeqId(0), index: 0, num_output_tokens: 0, ban_end: false, history: None };
    let seq = PlannedSeq {
        request_id: RequestId(0),
        seq_id: SeqId(0),
        start: 0,
        token_ids: vec![0; rows],
        num_drafts: rows as u32 - 1,
        branches: Vec::new(),
        num_redrawn: 0,
        block_tables: (0..cache.num_lanes()).map(blocks).collect(),
        samples: vec![sample],
        mask: None,
        draft_masks: Vec::new(),
        scored: 0..0,
        next_token_id: None,
        adapter: None,
        params: Arc::new(SamplingParams::greedy(1)),
        end_token_ids: Arc::from([]),
    };
    Plan { seqs: vec![seq], ..Plan::default() }
}
