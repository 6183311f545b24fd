//! Where weights come from, seen by the decoder: names to tensors.

use baton_backend::{Tensor, WeightFormat};

use crate::ModelError;

/// Powers of two that keys and values are divided by, so that a cache of eight-bit floats has them in its range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvScales {
    pub key: f32,
    pub value: f32,
}

/// A checkpoint: GGUF, safetensors or dummy.
pub trait WeightSource: Send + Sync + std::fmt::Debug {
    /// The tensor of that name, as a matrix (vectors have one row), or `None` if the checkpoint has none.
    fn tensor(&self, name: &str) -> Result<Option<Tensor>, ModelError>;
    /// All names, for `inspect` and error messages.
    fn names(&self) -> Vec<String>;
    /// Bytes of all tensors together.
    fn total_bytes(&self) -> u64;

    /// What the checkpoint was calibrated to for the layer whose keys come from this weight.
    fn kv_scales(&self, _key_weight: &str) -> Result<Option<KvScales>, ModelError> {
        Ok(None)
    }

    /// Every format that a matrix has.
    fn formats(&self) -> Result<Vec<WeightFormat>, ModelError> {
        let mut formats = Vec::new();
        for name in self.names() {
            let matrix = self.tensor(&name)?.filter(|tensor| tensor.rows() > 1);
            if let Some(matrix) = matrix.filter(|matrix| !formats.contains(&matrix.format())) {
                formats.push(matrix.format());
            }
        }
        Ok(formats)
    }
}
