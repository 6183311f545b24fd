//! Carries tensors from a checkpoint to a backend: by role, checked against the configuration, joined where the
//! decoder wants one matrix (q, k, v; gate and up), counted for the progress bar.

use baton_backend::{Backend, Norm, NormKind, Tensor, VectorId, WeightFormat, WeightId, WeightUse};
use half::{bf16, f16};

use crate::tensor_names::{Role, bias_name, has_bias, shape, weight_name};
use crate::{ModelConfig, ModelError, WeightSource};

/// How far loading has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    pub done_bytes: u64,
    pub total_bytes: u64,
}

pub(super) struct Loader<'a> {
    config: &'a ModelConfig,
    weights: &'a dyn WeightSource,
    backend: &'a mut dyn Backend,
    progress: &'a mut dyn FnMut(LoadProgress),
    done_bytes: u64,
    total_bytes: u64,
}

impl<'a> Loader<'a> {
    pub(super) fn new(
        config: &'a ModelConfig,
        weights: &'a dyn WeightSource,
        backend: &'a mut dyn Backend,
        progress: &'a mut dyn FnMut(LoadProgress),
    ) -> Self {
        let total_bytes = weights.total_bytes();
        Self { config, weights, backend, progress, done_bytes: 0, total_bytes }
    }

    /// The embedding and the head, which are one weight where they are tied.
    pub(super) fn embedding_and_head(&mut self) -> Result<(WeightId, WeightId), ModelError> {
        let embedding = self.matrix(Role::TokenEmbedding, 0)?;
        if self.config.tied_embeddings {
            let weight = self.load(&[embedding], WeightUse::EmbeddingAndLinear)?;
            return Ok((weight, weight));
        }
        let head = self.matrix(Role::Output, 0)?;
        let embedding = self.load(&[embedding], WeightUse::Embedding)?;
        Ok((embedding, self.load(&[head], WeightUse::Linear)?))
    }

    /// The weights of `roles`, one below the other, with their biases.
    pub(super) fn linear(
        &mut self,
        roles: &[Role],
        layer: usize,
    ) -> Result<(WeightId, Option<VectorId>), ModelError> {
        let parts = roles.iter().map(|&role| self.matrix(role, layer)).collect::<Result<Vec<_>, _>>()?;
        let bias = self.bias(roles, layer)?;
        Ok((self.load(&parts, WeightUse::Linear)?, bias))
    }

    /// The weight of a norm, as it is multiplied with.
    pub(super) fn norm_values(&self, role: Role, layer: usize) -> Result<Vec<f32>, ModelError> {
        let name = weight_name(self.config.names, self.config.architecture, role, layer);
        let mut values = float_values(&name, &self.matrix(role, layer)?)?;
        for value in &mut values {
            *value += self.config.norm_weight_offset;
        }
        Ok(values)
    }

    pub(super) fn norm(&mut self, role: Role, layer: usize) -> Result<Norm, ModelError> {
        let tensor = self.matrix(role, layer)?;
        let weight = self.backend.load_vector(&self.norm_values(role, layer)?)?;
        self.count(&tensor);
        Ok(Norm { kind: NormKind::Rms, weight, eps: self.config.norm_eps })
    }

    pub(super) fn norm_if(
        &mut self,
        wanted: bool,
        role: Role,
        layer: usize,
    ) -> Result<Option<Norm>, ModelError> {
        wanted.then(|| self.norm(role, layer)).transpose()
    }

    /// Tensors that the decoder does not use are done as well.
    pub(super) fn finish(self) {
        (self.progress)(LoadProgress { done_bytes: self.total_bytes, total_bytes: self.total_bytes });
    }

    /// One vector over all parts, zero where a part has none.
    fn bias(&mut self, roles: &[Role], layer: usize) -> Result<Option<VectorId>, ModelError> {
        let mut values = Vec::new();
        let mut missing = None;
        let mut found = false;
        for &role in roles {
            let name = bias_name(self.config.names, self.config.architecture, role, layer);
            let (rows, _) = shape(self.config, role);
            let tensor = self.weights.tensor(&name)?;
            match (tensor, has_bias(self.config, role)) {
                (Some(tensor), true) => {
                    check_shape(&name, &tensor, 1, rows)?;
                    values.extend(float_values(&name, &tensor)?);
                    self.count(&tensor);
                    found = true;
                }
                (Some(_), false) => {
                    // Left out, it would give wrong answers that look right.
                    return Err(ModelError::Config {
                        what: format!("the checkpoint has a bias {name:?}, but its configuration has none"),
                    });
                }
                (None, wanted) => {
                    values.resize(values.len() + rows, 0.0);
                    missing = missing.or(wanted.then_some(name));
                }
            }
        }
        match (found, missing) {
            (true, _) => Ok(Some(self.backend.load_vector(&values)?)),
            (false, Some(name)) => Err(ModelError::MissingTensor { name }),
            (false, None) => Ok(None),
        }
    }

    /// The weight of a role, of exactly the shape that the configuration says.
    fn matrix(&self, role: Role, layer: usize) -> Result<Tensor, ModelError> {
        let name = weight_name(self.config.names, self.config.architecture, role, layer);
        let tensor =
            self.weights.tensor(&name)?.ok_or_else(|| ModelError::MissingTensor { name: name.clone() })?;
        let (rows, cols) = shape(self.config, role);
        check_shape(&name, &tensor, rows, cols)?;
        Ok(tensor)
    }

    fn load(&mut self, parts: &[Tensor], usage: WeightUse) -> Result<WeightId, ModelError> {
        let weight = self.backend.load_weight(parts, usage)?;
        for part in parts {
            self.count(part);
        }
        Ok(weight)
    }

    fn count(&mut self, tensor: &Tensor) {
        self.done_bytes = (self.done_bytes + tensor.num_bytes() as u64).min(self.total_bytes);
        (self.progress)(LoadProgress { done_bytes: self.done_bytes, total_bytes: self.total_bytes });
    }
}

fn check_shape(name: &str, tensor: &Tensor, rows: usize, cols: usize) -> Result<(), ModelError> {
    if (tensor.rows(), tensor.cols()) == (rows, cols) {
        return Ok(());
    }
    Err(ModelError::WrongShape {
        name: name.to_owned(),
        expected: format!("{rows} x {cols}"),
        got: format!("{} x {}", tensor.rows(), tensor.cols()),
    })
}

/// A norm weight or a bias. These are never quantised in any checkpoint.
fn float_values(name: &str, tensor: &Tensor) -> Result<Vec<f32>, ModelError> {
    let bytes = tensor.bytes();
    let pairs = || bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
    match tensor.format() {
        WeightFormat::F32 => Ok(bytes
            .chunks_exact(4)
            .map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]))
            .collect()),
        WeightFormat::F16 => Ok(pairs().map(|pair| f16::from_le_bytes(pair).to_f32()).collect()),
        WeightFormat::BF16 => Ok(pairs().map(|pair| bf16::from_le_bytes(pair).to_f32()).collect()),
        format => Err(ModelError::Config {
            what: format!("tensor {name:?} is {format}; norm weights and biases must be F32, F16 or BF16"),
        }),
    }
}
