//! What the handles of a device stand for: the shapes of everything that was loaded or created, in the order of its ids.
//!
//! Every backend keeps one beside its own memory. Programs are checked against it, and it is what a printed program shows.

use serde::{Deserialize, Serialize};

use crate::{BackendError, BufferId, RopeId, RopeSpec, Tensor, VectorId, WeightFormat, WeightId, WeightUse};

/// Rows of a weight that have one format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightPart {
    pub format: WeightFormat,
    pub rows: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightShape {
    /// They stand one below the other.
    pub parts: Vec<WeightPart>,
    pub rows: usize,
    pub cols: usize,
    pub usage: WeightUse,
}

impl WeightShape {
    /// Refuses parts that cannot stand one below the other.
    pub fn new(parts: &[Tensor], usage: WeightUse) -> Result<Self, BackendError> {
        let cols = parts.first().map_or(0, Tensor::cols);
        if cols == 0 || parts.iter().any(|part| part.cols() != cols) {
            let widths: Vec<_> = parts.iter().map(Tensor::cols).collect();
            return Err(BackendError::Unsupported {
                what: format!("a weight whose parts have widths {widths:?}: they must be equal and not 0"),
            });
        }
        Ok(Self {
            parts: parts.iter().map(|part| WeightPart { format: part.format(), rows: part.rows() }).collect(),
            rows: parts.iter().map(Tensor::rows).sum(),
            cols,
            usage,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BufferShape {
    pub rows: usize,
    pub cols: usize,
    /// f32, made by `create_logits`; all others are activations.
    pub is_logits: bool,
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handles {
    pub weights: Vec<WeightShape>,
    /// Their lengths.
    pub vectors: Vec<usize>,
    /// How many dimensions of a head they rotate.
    pub ropes: Vec<usize>,
    pub buffers: Vec<BufferShape>,
}

impl Handles {
    pub fn add_weight(&mut self, shape: WeightShape) -> WeightId {
        WeightId(push(&mut self.weights, shape))
    }

    pub fn add_vector(&mut self, len: usize) -> VectorId {
        VectorId(push(&mut self.vectors, len))
    }

    pub fn add_rope(&mut self, spec: &RopeSpec) -> RopeId {
        RopeId(push(&mut self.ropes, 2 * spec.inv_freq.len()))
    }

    pub fn add_buffer(&mut self, shape: BufferShape) -> BufferId {
        BufferId(push(&mut self.buffers, shape))
    }

    pub fn weight(&self, id: WeightId) -> Option<&WeightShape> {
        self.weights.get(id.0 as usize)
    }

    pub fn buffer(&self, id: BufferId) -> Option<BufferShape> {
        self.buffers.get(id.0 as usize).copied()
    }
}

/// The index of what is added. A device holds some hundred of each.
fn push<T>(list: &mut Vec<T>, item: T) -> u32 {
    list.push(item);
    u32::try_from(list.len() - 1).expect("fewer handles than u32 has numbers")
}
