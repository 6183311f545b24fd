//! Where weights come from, seen by the decoder: names to tensors.

use baton_backend::Tensor;

use crate::ModelError;

/// A checkpoint: GGUF, safetensors or dummy.
pub trait WeightSource: Send + Sync + std::fmt::Debug {
    /// The tensor of that name, as a matrix (vectors have one row), or `None` if the checkpoint has none.
    fn tensor(&self, name: &str) -> Result<Option<Tensor>, ModelError>;
    /// All names, for `inspect` and error messages.
    fn names(&self) -> Vec<String>;
    /// Bytes of all tensors together.
    fn total_bytes(&self) -> u64;
}
