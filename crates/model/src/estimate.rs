//! How large a model is, from its configuration alone: for the memory plan and for the calculator that answers before
//! anything is downloaded.

use baton_backend::{KvDtype, WeightFormat};

use crate::tensor_names::{ExpectedTensor, Role, expected_tensors};
use crate::{ModelConfig, QuantizationConfig};

/// Parameters of all tensors. A tied head is counted once.
pub fn num_parameters(config: &ModelConfig) -> u64 {
    expected_tensors(config).iter().map(num_values).fold(0, u64::saturating_add)
}

/// Bytes of the weights with matrices in `config.dtype` and vectors in f32. A checkpoint that mixes formats (most GGUF
/// files do) knows better: see [`crate::WeightSource::total_bytes`].
pub fn weight_bytes(config: &ModelConfig) -> u64 {
    expected_tensors(config)
        .iter()
        .map(|tensor| {
            if tensor.is_bias || tensor.role.is_norm() {
                return num_values(tensor).saturating_mul(size_of::<f32>() as u64);
            }
            let format = stored_format(config.dtype, config.quantization.as_ref(), tensor);
            // A row that is no whole number of blocks cannot have the format; its block is counted all the same.
            let row = tensor.cols.div_ceil(format.block_len()) as u64 * format.block_bytes() as u64;
            row.saturating_mul(tensor.rows as u64)
        })
        .fold(0, u64::saturating_add)
}

/// What a tensor is stored as in a checkpoint of `dtype` that is quantised so.
pub(crate) fn stored_format(
    dtype: WeightFormat,
    quantization: Option<&QuantizationConfig>,
    tensor: &ExpectedTensor,
) -> WeightFormat {
    let is_router = tensor.role == Role::Expert && !tensor.name.contains(".experts.");
    let is_table = is_router || (tensor.role.is_table() && tensor.role != Role::Output);
    let Some(quantization) = quantization.filter(|_| !is_table && !tensor.is_bias && !tensor.role.is_norm())
    else {
        return dtype;
    };
    let module = tensor.name.strip_suffix(".weight").unwrap_or(&tensor.name);
    let is_covered = quantization.covers(module, tensor.role == Role::Output);
    if is_covered { quantization.weight_format(tensor.cols) } else { dtype }
}

/// Bytes that one token takes in the KV cache, over all layers.
pub fn kv_bytes_per_token(config: &ModelConfig, dtype: KvDtype) -> u64 {
    let head = 2 * dtype.head_bytes(config.head_dim) as u64;
    head.saturating_mul(config.num_kv_heads as u64).saturating_mul(config.layers.len() as u64)
}

fn num_values(tensor: &ExpectedTensor) -> u64 {
    (tensor.rows as u64).saturating_mul(tensor.cols as u64)
}
