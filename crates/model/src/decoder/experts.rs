//! The half of a layer that is a mixture of experts: its weights as three matrices, and its ops.
//!
//! Shared experts follow the routed ones in the same matrices. One that is as wide as several is cut into so many: what they give is
//! added up either way.

use baton_backend::{ExpertGated, ExpertLinear, Op, Route, Tensor, VectorId, WeightId, WeightUse};

use super::Buffers;
use super::loader::{Loader, float_values};
use crate::expert_names::{ExpertLayout, ExpertTensor, expert_layout};
use crate::tensor_names::Role;
use crate::{ExpertConfig, ModelConfig, ModelError};

pub(super) fn expert_half(
    config: &ModelConfig,
    experts: &ExpertConfig,
    loader: &mut Loader<'_>,
    layer: usize,
    buffers: &Buffers,
    ops: &mut Vec<Op>,
) -> Result<(), ModelError> {
    let (routing, inner) = buffers.experts.expect("made for a model with experts");
    let norm = Some(loader.norm(Role::FfnNorm, layer)?);
    let (router, selection_bias) = load_router(experts, loader, layer)?;
    let (gated, linear) = load_experts(config, experts, loader, layer)?;
    let biases = load_biases(experts, loader, layer)?;
    ops.push(Op::Route(Route {
        input: buffers.hidden,
        norm,
        weight: router,
        bias: biases.map(|biases| biases.router),
        scores: experts.scores,
        selection_bias,
        groups: experts.groups,
        top_k: experts.top_k,
        normalizes: experts.normalizes,
        scale: experts.scale,
        num_shared: experts.num_shared,
        has_shared_gate: experts.has_shared_gate,
        routing,
    }));
    ops.push(Op::ExpertGated(ExpertGated {
        input: buffers.hidden,
        norm,
        routing,
        weight: gated,
        bias: biases.map(|biases| biases.gated),
        activation: config.activation,
        output: inner,
    }));
    ops.push(Op::ExpertLinear(ExpertLinear {
        input: inner,
        routing,
        weight: linear,
        bias: biases.map(|biases| biases.linear),
        output: buffers.hidden,
        accumulate: true,
    }));
    Ok(())
}

fn load_router(
    experts: &ExpertConfig,
    loader: &mut Loader<'_>,
    layer: usize,
) -> Result<(WeightId, Option<VectorId>), ModelError> {
    let mut parts = vec![loader.expert_tensor(experts, layer, ExpertTensor::Router)?];
    if experts.has_shared_gate {
        parts.push(loader.expert_tensor(experts, layer, ExpertTensor::SharedGate)?);
    }
    if parts.iter().any(|part| part.format() != parts[0].format()) {
        let failed = |cause| ModelError::Tensor { name: "the router".to_owned(), cause };
        parts = parts.iter().map(|part| part.to_f32().map_err(failed)).collect::<Result<_, _>>()?;
    }
    let weight = loader.load(&parts, WeightUse::Linear)?;
    if !experts.has_selection_bias {
        return Ok((weight, None));
    }
    let bias = loader.expert_tensor(experts, layer, ExpertTensor::SelectionBias)?;
    let values = float_values("the bias of the experts' selection", &bias)?;
    Ok((weight, Some(loader.load_vector(&values, &bias)?)))
}

#[derive(Clone, Copy)]
struct Biases {
    router: VectorId,
    gated: VectorId,
    linear: VectorId,
}

fn load_biases(
    experts: &ExpertConfig,
    loader: &mut Loader<'_>,
    layer: usize,
) -> Result<Option<Biases>, ModelError> {
    if !experts.has_bias {
        return Ok(None);
    }
    if experts.num_shared > 0 {
        return Err(ModelError::Config { what: "shared experts beside biases are not supported".to_owned() });
    }
    let find = |loader: &Loader<'_>, tensor| {
        let found = loader.expert_tensor(experts, layer, tensor)?;
        Ok::<_, ModelError>((float_values("the biases of experts", &found)?, found))
    };
    let (router, router_tensor) = find(loader, ExpertTensor::RouterBias)?;
    let (gates, gate_tensor) = find(loader, ExpertTensor::AllGateBiases)?;
    let (ups, _) = find(loader, ExpertTensor::AllUpBiases)?;
    let (downs, down_tensor) = find(loader, ExpertTensor::AllDownBiases)?;
    let width = experts.intermediate_size;
    let of_experts = gates.chunks_exact(width).zip(ups.chunks_exact(width));
    let gated: Vec<f32> = of_experts.flat_map(|(gate, up)| gate.iter().chain(up)).copied().collect();
    Ok(Some(Biases {
        router: loader.load_vector(&router, &router_tensor)?,
        gated: loader.load_vector(&gated, &gate_tensor)?,
        linear: loader.load_vector(&downs, &down_tensor)?,
    }))
}

/// Gate and up of every expert, and down of every expert.
fn load_experts(
    config: &ModelConfig,
    experts: &ExpertConfig,
    loader: &mut Loader<'_>,
    layer: usize,
) -> Result<(WeightId, WeightId), ModelError> {
    let (hidden, width) = (config.hidden_size, experts.intermediate_size);
    let (mut gated, mut linear) = (Vec::new(), Vec::new());
    let find = |tensor| loader.expert_tensor(experts, layer, tensor);
    match expert_layout(config) {
        ExpertLayout::Merged => {
            let (gates, ups) = (find(ExpertTensor::AllGates)?, find(ExpertTensor::AllUps)?);
            for expert in 0..experts.num_experts {
                gated.extend([rows_of(&gates, expert, width), rows_of(&ups, expert, width)]);
            }
            linear.push(find(ExpertTensor::AllDowns)?);
        }
        ExpertLayout::Fused => {
            gated.push(find(ExpertTensor::AllGatesAndUps)?);
            linear.push(find(ExpertTensor::AllDowns)?);
        }
        ExpertLayout::Separate => {
            for expert in 0..experts.num_experts {
                gated.extend([find(ExpertTensor::Gate(expert))?, find(ExpertTensor::Up(expert))?]);
                linear.push(find(ExpertTensor::Down(expert))?);
            }
        }
    }
    if experts.num_shared > 0 {
        let (gates, ups) = (find(ExpertTensor::SharedGates)?, find(ExpertTensor::SharedUps)?);
        let downs = find(ExpertTensor::SharedDowns)?;
        for expert in 0..experts.num_shared {
            gated.extend([rows_of(&gates, expert, width), rows_of(&ups, expert, width)]);
            linear.push(columns_of(&downs, expert, width)?);
        }
    }
    debug_assert_eq!(linear.iter().map(Tensor::rows).sum::<usize>(), experts.num_all() * hidden);
    let usage = WeightUse::Experts(experts.num_all());
    Ok((loader.load(&gated, usage)?, loader.load(&linear, usage)?))
}

/// The `number`-th piece of `height` rows.
fn rows_of(tensor: &Tensor, number: usize, height: usize) -> Tensor {
    if tensor.rows() == height {
        return tensor.clone();
    }
    tensor.slice_rows(number * height..(number + 1) * height).expect("the shape was checked")
}

/// The `number`-th piece of `width` columns. Where that cuts through a block, the values are opened.
fn columns_of(tensor: &Tensor, number: usize, width: usize) -> Result<Tensor, ModelError> {
    if tensor.cols() == width {
        return Ok(tensor.clone());
    }
    let range = number * width..(number + 1) * width;
    if let Some(part) = tensor.slice_cols(range.clone()) {
        return Ok(part);
    }
    let failed = |cause| ModelError::Tensor { name: "a shared expert".to_owned(), cause };
    Ok(tensor.to_f32().map_err(failed)?.slice_cols(range).expect("the shape was checked"))
}
