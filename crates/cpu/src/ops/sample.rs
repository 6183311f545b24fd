//! Draws the step's samples, one row of logits a unit, with the host's sampler, compiled for each instruction set.

use baton_backend::BufferId;
use baton_backend::sampling::push_sampled;

use super::{OpResult, Step, require};
use crate::buffers::Shared;
use crate::scratch::Draw;
use crate::units::Units;

impl Step<'_> {
    pub(super) fn run_sample(&mut self, logits: BufferId) -> OpResult {
        let input = self.input;
        if input.samples.is_empty() {
            return Ok(());
        }
        let logits = self.buffer(logits, input.logit_rows.len())?;
        require(logits.cols > 0, "the logits are empty")?;
        let in_vocabulary = |token: u32| (token as usize) < logits.cols;
        require(
            input.samples.iter().all(|sample| sample.forced.is_none_or(in_vocabulary)),
            "a token outside the logits is scored",
        )?;
        let scratch = &mut self.backend.scratch;
        scratch.draws.clear();
        scratch.draws.resize(input.samples.len(), None);
        scratch.samplers.iter_mut().for_each(|sampler| sampler.top.clear());
        // SAFETY: a worker uses its own sampler and the draws of the units it took.
        let shared = unsafe { Shared::new((scratch.samplers.as_mut_ptr(), scratch.draws.as_mut_ptr())) };
        let units = Units::new(input.samples.len());
        let sample = self.backend.kernels.sample;
        self.backend.pool.run(&|worker| {
            let (samplers, draws) = *shared.get();
            while let Some(unit) = units.take() {
                let row = &input.samples[unit];
                let lists = input.lists_of(row);
                // SAFETY: there is one sampler a worker and one draw a unit; the row of logits is only read. The processor has the
                // kernel's instructions.
                unsafe {
                    let values = std::slice::from_raw_parts(logits.row(row.logit_row as usize), logits.cols);
                    let sampler = &mut *samplers.add(worker.index);
                    let sampled = sample(values, row, lists, &mut sampler.scratch, &mut sampler.top);
                    *draws.add(unit) = Some(Draw { sampled, worker: worker.index });
                }
            }
        });
        for draw in self.backend.scratch.draws.iter().flatten() {
            push_sampled(self.output, &draw.sampled, &self.backend.scratch.samplers[draw.worker].top);
        }
        Ok(())
    }
}
