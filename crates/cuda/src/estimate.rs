//! What steps take of a device that is not here: for the memory calculator. A backend measures it (`profile_run`).

use baton_backend::{StepLimits, StepMemory};

use crate::backend::CudaBackend;
use crate::gemm::WORKSPACE_BYTES;
use crate::graphs::Shape;
use crate::options::CudaOptions;

/// Kernels, and all scratch that is not worth counting.
const SMALL_BYTES: u64 = 64 << 20;
/// Of one recorded step, as drivers give it out.
const GRAPH_BYTES: u64 = 2 << 20;

/// What of a device's memory is free for us: the driver and a context take the rest, about a hundredth of a large one.
pub fn free_bytes(total_bytes: u64) -> u64 {
    total_bytes - total_bytes / 100
}

/// About what [`profile_run`](baton_backend::Backend::profile_run) says for a model of such widths: the largest input and output of
/// its linear layers.
pub fn step_memory(limits: &StepLimits, widest_input: usize, widest_output: usize) -> StepMemory {
    let bytes = |rows: usize, cols: usize, element: u64| {
        (rows as u64).saturating_mul(cols as u64).saturating_mul(element)
    };
    let workspace_bytes = [
        CudaOptions::default().partial_bytes as u64,
        WORKSPACE_BYTES as u64,
        bytes(limits.max_samples, limits.vocab_size, 4),
        bytes(limits.max_tokens, widest_input.saturating_add(widest_output), 2),
        SMALL_BYTES,
    ];
    StepMemory {
        workspace_bytes: workspace_bytes.into_iter().fold(0, u64::saturating_add),
        graph_bytes: 2 * GRAPH_BYTES * Shape::buckets(CudaBackend::max_decodes(limits)).count() as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Measured on an H200 with the default limits.
    #[test]
    fn is_near_what_a_device_takes() {
        let limits = |vocab_size| StepLimits {
            max_tokens: 8192,
            max_seqs: 256,
            max_logit_rows: 256,
            max_samples: 512,
            max_model_len: 8192,
            vocab_size,
        };
        let mib = |(vocab_size, input, output)| {
            let memory = step_memory(&limits(vocab_size), input, output);
            (memory.workspace_bytes >> 20, memory.graph_bytes >> 20)
        };
        let (llama_8b, smollm2) = (mib((128_256, 14336, 2 * 14336)), mib((49152, 1536, 2 * 1536)));
        assert!(llama_8b.0.abs_diff(1280) < 100 && smollm2.0.abs_diff(589) < 100, "{llama_8b:?} {smollm2:?}");
        assert_eq!((llama_8b.1, smollm2.1), (140, 140));
        assert_eq!(free_bytes(143_771 << 20) >> 20, 142_333); // 142,626 were
    }
}
