//! Carries tensors from a checkpoint to a backend: by role, checked against the configuration, joined where the
//! decoder wants one matrix (q, k, v; gate and up), counted for the progress bar.

use baton_backend::{Backend, Norm, NormKind, Tensor, VectorId, WeightFormat, WeightId, WeightUse};
use half::{bf16, f16};

use crate::expert_names::{ExpertTensor, expert_tensor_name, expert_tensor_shape};
use crate::tensor_names::{
    Role, bias_name, grouped_rows, has_bias, is_transposed, num_token_types, optional_prefix, qkv_roles,
    shape, weight_name,
};
use crate::{ExpertConfig, KvScales, ModelConfig, ModelError, WeightSource};

/// How far loading has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    pub done_bytes: u64,
    pub total_bytes: u64,
}

pub(crate) struct Loader<'a> {
    config: &'a ModelConfig,
    weights: &'a dyn WeightSource,
    backend: &'a mut dyn Backend,
    progress: &'a mut dyn FnMut(LoadProgress),
    done_bytes: u64,
    total_bytes: u64,
}

impl<'a> Loader<'a> {
    pub(crate) fn new(
        config: &'a ModelConfig,
        weights: &'a dyn WeightSource,
        backend: &'a mut dyn Backend,
        progress: &'a mut dyn FnMut(LoadProgress),
    ) -> Self {
        let total_bytes = weights.total_bytes();
        Self { config, weights, backend, progress, done_bytes: 0, total_bytes }
    }

    /// The embedding and the head, which are one weight where they are tied.
    pub(crate) fn embedding_and_head(&mut self) -> Result<(WeightId, WeightId), ModelError> {
        let embedding = self.matrix(Role::TokenEmbedding, 0)?;
        if self.config.tied_embeddings {
            let weight = self.load(&[embedding], WeightUse::EmbeddingAndLinear)?;
            return Ok((weight, weight));
        }
        let mut head = self.matrix(Role::Output, 0)?;
        if self.config.normalized_head {
            head = normalized_rows(&head)?;
        }
        let embedding = self.load(&[embedding], WeightUse::Embedding)?;
        Ok((embedding, self.load(&[head], WeightUse::Linear)?))
    }

    /// The table of positions, where the model has learned them.
    pub(crate) fn positions(&mut self) -> Result<Option<WeightId>, ModelError> {
        if !self.config.learned_positions {
            return Ok(None);
        }
        let table = self.matrix(Role::PositionEmbedding, 0)?;
        // The rows before the first position are never looked up.
        let table =
            table.slice_rows(self.config.position_offset..table.rows()).expect("the shape was checked");
        self.load(&[table], WeightUse::Embedding).map(Some)
    }

    /// The embedding of an encoder that has no table of positions, with that of the first type of token added.
    pub(crate) fn embedding_with_types(&mut self) -> Result<WeightId, ModelError> {
        let mut embedding = self.matrix(Role::TokenEmbedding, 0)?;
        if !self.config.learned_positions && num_token_types(self.config) > 0 {
            let types = self.host_values(Role::TokenTypeEmbedding)?;
            let mut values = self.host_values(Role::TokenEmbedding)?;
            for row in values.chunks_exact_mut(self.config.hidden_size) {
                row.iter_mut().zip(&types).for_each(|(value, of_type)| *value += of_type);
            }
            embedding = self.host_tensor(embedding.rows(), &values)?;
        }
        self.load(&[embedding], WeightUse::Embedding)
    }

    /// The table of positions of an encoder, once for each type of token that is used.
    pub(crate) fn positions_with_types(&mut self) -> Result<Option<WeightId>, ModelError> {
        if !self.config.learned_positions {
            return Ok(None);
        }
        let width = self.config.hidden_size;
        let positions = self.host_values(Role::PositionEmbedding)?;
        let positions = &positions[self.config.position_offset * width..];
        let types = match num_token_types(self.config) {
            0 => vec![0.0; width],
            _ => self.host_values(Role::TokenTypeEmbedding)?,
        };
        let mut values = Vec::with_capacity(2 * positions.len());
        for of_type in types.chunks_exact(width).take(2) {
            for row in positions.chunks_exact(width) {
                values.extend(row.iter().zip(of_type).map(|(value, of_type)| value + of_type));
            }
        }
        let table = self.host_tensor(values.len() / width, &values)?;
        self.load(&[table], WeightUse::Embedding).map(Some)
    }

    fn host_tensor(&self, rows: usize, values: &[f32]) -> Result<Tensor, ModelError> {
        let wrong = |cause| ModelError::Tensor { name: "the embeddings".to_owned(), cause };
        Tensor::from_f32(rows, self.config.hidden_size, values).map_err(wrong)
    }

    /// The values of a matrix of any format.
    fn host_values(&self, role: Role) -> Result<Vec<f32>, ModelError> {
        let name = weight_name(self.config.names, self.config.architecture, role, 0);
        let tensor = self.matrix(role, 0)?;
        let plain = tensor.to_f32().map_err(|cause| ModelError::Tensor { name: name.clone(), cause })?;
        float_values(&name, &plain)
    }

    /// A product that is computed on the host: its weight and its bias.
    pub(crate) fn host_product(
        &self,
        role: Role,
        rows: usize,
        cols: usize,
    ) -> Result<(Vec<f32>, Vec<f32>), ModelError> {
        debug_assert_eq!(shape(self.config, role), (rows, cols));
        let name = bias_name(self.config.names, self.config.architecture, role, 0);
        let bias = self.find(&name)?.ok_or_else(|| ModelError::MissingTensor { name: name.clone() })?;
        check_shape(&name, &bias, 1, rows)?;
        Ok((self.host_values(role)?, float_values(&name, &bias)?))
    }

    /// The weights of `roles`, one below the other, with their biases.
    pub(crate) fn linear(
        &mut self,
        roles: &[Role],
        layer: usize,
    ) -> Result<(WeightId, Option<VectorId>), ModelError> {
        let scales = self.kv_scales(layer)?;
        let part = |&role: &Role| {
            let tensor = self.matrix(role, layer)?;
            Ok(match self.kv_factor(role, scales) {
                Some(factor) => tensor.times_power_of_two(factor).expect("checked with the scales"),
                None => tensor,
            })
        };
        let parts = roles.iter().map(part).collect::<Result<Vec<_>, ModelError>>()?;
        let bias = self.bias(roles, layer)?;
        Ok((self.load(&parts, WeightUse::Linear)?, bias))
    }

    /// Calibrated scales of a layer's cache, where they can be put into its weights: keys and values come out divided by them, the
    /// scale of the attention makes up for keys, the output's weight for values. So no kernel need know of them.
    pub(crate) fn kv_scales(&self, layer: usize) -> Result<Option<KvScales>, ModelError> {
        let config = self.config;
        if config.latent.is_some() || config.encoder.is_some() || qkv_roles(config).len() == 1 {
            return Ok(None);
        }
        let key = weight_name(config.names, config.architecture, Role::AttnK, layer);
        let Some(scales) = self.weights.kv_scales(&key)? else { return Ok(None) };
        for role in [Role::AttnK, Role::AttnV, Role::AttnOutput] {
            let tensor = self.matrix(role, layer)?;
            let formats = [WeightFormat::F8_E4M3, WeightFormat::BF16, WeightFormat::F32];
            if tensor.columns().is_some() || !formats.contains(&tensor.format()) {
                return Ok(None);
            }
        }
        Ok(Some(scales))
    }

    /// What the weight and bias of a role are multiplied with. Norms of keys undo what comes before them.
    fn kv_factor(&self, role: Role, scales: Option<KvScales>) -> Option<f32> {
        let scales = scales?;
        match role {
            Role::AttnK => (!self.config.qk_norm).then_some(1.0 / scales.key),
            Role::AttnKNorm => Some(1.0 / scales.key),
            Role::AttnV => Some(1.0 / scales.value),
            Role::AttnOutput => Some(scales.value),
            _ => None,
        }
    }

    /// The bias of the head, where it has one.
    pub(crate) fn head_bias(&mut self) -> Result<Option<VectorId>, ModelError> {
        if self.config.head_bias { self.bias(&[Role::Output], 0) } else { Ok(None) }
    }

    /// The weight of a norm, as it is multiplied with.
    pub(crate) fn norm_values(&self, role: Role, layer: usize) -> Result<Vec<f32>, ModelError> {
        let name = weight_name(self.config.names, self.config.architecture, role, layer);
        let mut values = float_values(&name, &self.matrix(role, layer)?)?;
        for value in &mut values {
            *value += self.config.norm_weight_offset;
        }
        Ok(values)
    }

    pub(crate) fn norm(&mut self, role: Role, layer: usize) -> Result<Norm, ModelError> {
        let tensor = self.matrix(role, layer)?;
        let mut values = self.norm_values(role, layer)?;
        // What the head sees is scaled instead of the logits.
        let scale = match role {
            Role::OutputNorm => self.config.logit_scale,
            Role::AttnKNorm => self.kv_factor(role, self.kv_scales(layer)?).unwrap_or(1.0),
            _ => 1.0,
        };
        for value in &mut values {
            *value *= scale;
        }
        let weight = self.backend.load_vector(&values)?;
        self.count(&tensor);
        let kind = if self.config.layer_norm {
            NormKind::Layer { bias: self.scaled_bias(&[role], layer, scale)? }
        } else {
            NormKind::Rms
        };
        Ok(Norm { kind, weight, eps: self.norm_eps(role) })
    }

    /// The residual stream is kept divided by its scale, so that nothing that is added to it need be multiplied: a norm then gives
    /// the same with an epsilon that is divided twice.
    pub(crate) fn norm_eps(&self, role: Role) -> f32 {
        let is_of_stream =
            !matches!(role, Role::AttnQNorm | Role::AttnKNorm | Role::PostAttnNorm | Role::PostFfnNorm);
        let scale = if is_of_stream { self.config.residual_scale } else { 1.0 };
        self.config.norm_eps / (scale * scale)
    }

    /// The bias of a norm, where norms have one.
    pub(crate) fn norm_bias_values(&self, role: Role, layer: usize) -> Result<Option<Vec<f32>>, ModelError> {
        if !self.config.layer_norm || !self.config.norm_bias {
            return Ok(None);
        }
        let name = bias_name(self.config.names, self.config.architecture, role, layer);
        let tensor = self.find(&name)?.ok_or_else(|| ModelError::MissingTensor { name: name.clone() })?;
        float_values(&name, &tensor).map(Some)
    }

    pub(crate) fn norm_if(
        &mut self,
        wanted: bool,
        role: Role,
        layer: usize,
    ) -> Result<Option<Norm>, ModelError> {
        wanted.then(|| self.norm(role, layer)).transpose()
    }

    /// The slopes of ALiBi, where positions are told by them.
    pub(crate) fn slopes(&mut self) -> Result<Option<VectorId>, ModelError> {
        let slopes = self.config.alibi_slopes.as_ref();
        Ok(slopes.map(|slopes| self.backend.load_vector(slopes)).transpose()?)
    }

    /// The scores of a layer's heads that have no value.
    pub(crate) fn sinks(&mut self, layer: usize) -> Result<Option<VectorId>, ModelError> {
        if !self.config.attention_sinks {
            return Ok(None);
        }
        let name = weight_name(self.config.names, self.config.architecture, Role::AttnSinks, layer);
        let tensor = self.matrix(Role::AttnSinks, layer)?;
        let values = float_values(&name, &tensor)?;
        if values.iter().any(|value| !value.is_finite()) {
            return Err(ModelError::Config {
                what: format!("tensor {name:?} has values that are not finite"),
            });
        }
        self.load_vector(&values, &tensor).map(Some)
    }

    /// Tensors that the decoder does not use are done as well.
    pub(crate) fn finish(self) {
        (self.progress)(LoadProgress { done_bytes: self.total_bytes, total_bytes: self.total_bytes });
    }

    /// One vector over all parts, zero where a part has none.
    fn bias(&mut self, roles: &[Role], layer: usize) -> Result<Option<VectorId>, ModelError> {
        self.scaled_bias(roles, layer, 1.0)
    }

    fn scaled_bias(
        &mut self,
        roles: &[Role],
        layer: usize,
        scale: f32,
    ) -> Result<Option<VectorId>, ModelError> {
        let mut values = Vec::new();
        let mut missing = None;
        let mut found = false;
        for &role in roles {
            let name = bias_name(self.config.names, self.config.architecture, role, layer);
            let (rows, cols) = shape(self.config, role);
            let rows = if role.is_norm() { cols } else { rows };
            let tensor = self.find(&name)?;
            match (tensor, has_bias(self.config, role)) {
                (Some(tensor), true) => {
                    check_shape(&name, &tensor, 1, rows)?;
                    let mut part = float_values(&name, &tensor)?;
                    // The bias of the output is added to what is as large as ever; norms have their factor in `scale`.
                    if matches!(role, Role::AttnK | Role::AttnV)
                        && let Some(factor) = self.kv_factor(role, self.kv_scales(layer)?)
                    {
                        for value in &mut part {
                            *value *= factor;
                        }
                    }
                    match grouped_rows(self.config).filter(|_| role == Role::AttnQkv) {
                        Some(order) => values.extend(order.into_iter().map(|row| part[row])),
                        None => values.extend(part),
                    }
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
            (true, _) => {
                for value in &mut values {
                    *value *= scale;
                }
                Ok(Some(self.backend.load_vector(&values)?))
            }
            (false, Some(name)) => Err(ModelError::MissingTensor { name }),
            (false, None) => Ok(None),
        }
    }

    /// The weight of a role, of exactly the shape that the configuration says.
    pub(super) fn matrix(&self, role: Role, layer: usize) -> Result<Tensor, ModelError> {
        let name = weight_name(self.config.names, self.config.architecture, role, layer);
        let tensor = self.find(&name)?.ok_or_else(|| ModelError::MissingTensor { name: name.clone() })?;
        let (rows, cols) = shape(self.config, role);
        if is_transposed(self.config, role) {
            check_shape(&name, &tensor, cols, rows)?;
            return tensor.transposed().map_err(|cause| ModelError::Tensor { name, cause });
        }
        if role.is_norm() && tensor.rows() * tensor.cols() == rows * cols {
            // The norms of heads have a row for each in some files.
            return tensor.reshaped(rows, cols).map_err(|cause| ModelError::Tensor { name, cause });
        }
        check_shape(&name, &tensor, rows, cols)?;
        // Random values are as good in any order.
        let order = grouped_rows(self.config).filter(|_| role == Role::AttnQkv);
        match order.filter(|_| tensor.random_fill().is_none()) {
            Some(order) => tensor.gather_rows(&order).map_err(|cause| ModelError::Tensor { name, cause }),
            None => Ok(tensor),
        }
    }

    /// A tensor of a mixture, of exactly the shape that the configuration says.
    pub(super) fn expert_tensor(
        &self,
        experts: &ExpertConfig,
        layer: usize,
        tensor: ExpertTensor,
    ) -> Result<Tensor, ModelError> {
        let name = expert_tensor_name(self.config, layer, tensor);
        let found = self.find(&name)?.ok_or_else(|| ModelError::MissingTensor { name: name.clone() })?;
        let (rows, cols) = expert_tensor_shape(self.config.hidden_size, experts, tensor);
        check_shape(&name, &found, rows, cols)?;
        Ok(found)
    }

    /// A vector that was read from a tensor.
    pub(super) fn load_vector(&mut self, values: &[f32], tensor: &Tensor) -> Result<VectorId, ModelError> {
        let vector = self.backend.load_vector(values)?;
        self.count(tensor);
        Ok(vector)
    }

    fn find(&self, name: &str) -> Result<Option<Tensor>, ModelError> {
        let tensor = self.weights.tensor(name)?;
        let short = optional_prefix(self.config.architecture).and_then(|prefix| name.strip_prefix(prefix));
        match (tensor, short) {
            (None, Some(short)) => self.weights.tensor(short),
            (tensor, _) => Ok(tensor),
        }
    }

    pub(super) fn load(&mut self, parts: &[Tensor], usage: WeightUse) -> Result<WeightId, ModelError> {
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

/// Rows divided by their length.
fn normalized_rows(tensor: &Tensor) -> Result<Tensor, ModelError> {
    let wrong = |cause| ModelError::Tensor { name: "the head".to_owned(), cause };
    let plain = tensor.to_f32().map_err(wrong)?;
    let mut values = float_values("the head", &plain)?;
    for row in values.chunks_exact_mut(tensor.cols()) {
        let length = row.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt().max(1e-12);
        for value in row {
            *value = (f64::from(*value) / length) as f32;
        }
    }
    let normalized = Tensor::from_f32(tensor.rows(), tensor.cols(), &values).map_err(wrong)?;
    if tensor.format() == WeightFormat::F32 { Ok(normalized) } else { normalized.to_bf16().map_err(wrong) }
}

/// A norm weight or a bias. These are never quantised in any checkpoint.
pub(super) fn float_values(name: &str, tensor: &Tensor) -> Result<Vec<f32>, ModelError> {
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
