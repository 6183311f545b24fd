//! The profile run: steps of nothing before there is a cache, so that what they take is known when the rest goes to the cache.

use baton_backend::{BackendError, ProgramId, RandomFill, StepInput};

use super::CudaBackend;
use crate::device::Device;
use crate::graphs::{Graphs, Shape};
use crate::kv::KvCache;
use crate::ops::unsupported;
use crate::pack::pack;
use crate::weights::fill;

impl CudaBackend {
    /// A step that failed on its way leaves nothing running that a later one does not know of.
    pub(super) fn settle(&self) {
        let _ = self.device.gpu.synchronize();
        if let Some(swapper) = &self.swapper {
            let _ = swapper.synchronize();
        }
    }

    /// Runs steps of nothing, so that products are chosen by time and kernels are loaded. Returns what recording them will take.
    pub(super) fn profile_steps(&mut self, program: ProgramId) -> Result<u64, BackendError> {
        let compiled = self.programs.get(program)?;
        let ops = compiled.ops.as_slice();
        let limits = self.limits.ok_or_else(|| unsupported("a profile run before set_limits"))?;
        self.fill_activations()?;
        // Kernels that read a step's counts do nothing, products go over whatever is there.
        let slots = self.slots.as_mut().expect("made with the limits");
        let packed = pack(&StepInput::default(), slots[0].step.words_mut(), 0)?;
        self.device.gpu.upload(&slots[0].step, &self.device.step, 0, 4 * packed.num_words)?;
        self.launch(Shape::prompts(limits.max_tokens), [true, false], &[], ops)?;
        let buckets = self.buckets();
        for bucket in &buckets {
            self.launch(bucket.products(), [true, false], &[], ops)?;
        }
        self.device.gemm.as_mut().expect("opened with the first weight").save_choices();
        self.finish_kernels()?;
        let Some(bucket) = buckets.last() else { return self.device.gpu.synchronize().map(|()| 0) };
        // Kernels are loaded by their first launch, which must not be a recorded one.
        if let Some(scoring) = self.launch(*bucket, [true, false], &[], ops)? {
            scoring.launch(&self.device.gpu)?;
        }
        self.device.gpu.synchronize()?;
        let free_bytes = self.device.gpu.free_bytes();
        self.record((program, *bucket), &[], ops)?;
        let graph_bytes = free_bytes.saturating_sub(self.device.gpu.free_bytes());
        self.graphs = Graphs::default();
        // Of each size one that shares nothing, and one that does.
        Ok(2 * graph_bytes * buckets.len() as u64)
    }

    /// Waits for the kernels that take longest to compile, for which nothing has to wait before.
    fn finish_kernels(&mut self) -> Result<(), BackendError> {
        for layer in 0..self.device.kv.as_ref().map_or(0, KvCache::num_layers) {
            self.device.tiled_attention(layer)?;
        }
        self.device.kernels.sampler().map(drop)
    }

    /// Random values where products read, because a device is faster on zeros.
    fn fill_activations(&self) -> Result<(), BackendError> {
        let Device { gpu, kernels, buffers, normed, .. } = &self.device;
        let activations = buffers.iter().filter(|buffer| !buffer.is_logits).map(|buffer| &buffer.memory);
        for memory in activations.chain([normed]) {
            fill(gpu, kernels, memory, RandomFill { seed: memory.address(), largest: 1.0 })?;
        }
        Ok(())
    }
}
