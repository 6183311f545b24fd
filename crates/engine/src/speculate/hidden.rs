//! Hidden states for proposers that go on from what the model made of the text.

use baton_core::SeqId;
use baton_sched::{Plan, StepResult};

use super::Speculation;

impl Speculation {
    /// Whether the rows of this step are to be read back.
    pub(crate) fn wants_hidden(&self, plan: &Plan) -> bool {
        self.proposer.wants_hidden() && plan.seqs.iter().any(|seq| !seq.samples.is_empty())
    }

    /// Keeps the rows of the tokens that were right until the proposer is asked. `rows` are those of the whole step, `finish` is what
    /// the model does to each before its logits.
    pub(crate) fn take_hidden(
        &mut self,
        plan: &Plan,
        result: &StepResult,
        rows: &[f32],
        finish: impl Fn(&[f32]) -> Vec<f32>,
    ) {
        self.hidden.clear();
        let width = rows.len() / plan.num_tokens().max(1);
        let mut first = 0;
        for (planned, result) in plan.seqs.iter().zip(&result.seqs) {
            let last_known = first + planned.token_ids.len() - 1 - planned.num_drafts as usize;
            first += planned.token_ids.len();
            let mut numbers = vec![0];
            if planned.num_drafts > 0 {
                numbers.extend(planned.right_guesses(result.samples.iter().map(|one| one.token_id)));
            }
            for sample in &planned.samples {
                let kept = numbers.iter().flat_map(|number| {
                    let row = last_known + number;
                    finish(&rows[row * width..(row + 1) * width])
                });
                self.hidden.insert(sample.seq_id, kept.collect());
            }
        }
    }

    pub(crate) fn forget_hidden(&mut self, id: SeqId) {
        self.hidden.remove(&id);
    }
}
