//! Names and shapes of the tensors of a mixture of experts, in the ways that checkpoints have them: a matrix for each expert, or all
//! experts one below the other.

use crate::tensor_names::{ExpectedTensor, Role};
use crate::{Architecture, ExpertConfig, ModelConfig, NameScheme};

/// What a tensor of a mixture is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ExpertTensor {
    Router,
    /// Added to the router's products.
    RouterBias,
    /// Added to scores before experts are chosen.
    SelectionBias,
    /// The router's row for shared experts.
    SharedGate,
    Gate(usize),
    Up(usize),
    Down(usize),
    /// Of all experts, one below the other.
    AllGates,
    AllUps,
    AllDowns,
    /// Gate and up of each, of all of them.
    AllGatesAndUps,
    /// A row for each expert.
    AllGateBiases,
    AllUpBiases,
    AllDownBiases,
    /// The shared experts as one MLP.
    SharedGates,
    SharedUps,
    SharedDowns,
}

use ExpertTensor as T;

impl ExpertTensor {
    fn is_bias(self) -> bool {
        use ExpertTensor::{AllDownBiases, AllGateBiases, AllUpBiases, RouterBias, SelectionBias};
        matches!(self, RouterBias | SelectionBias | AllGateBiases | AllUpBiases | AllDownBiases)
    }
}

/// The name of a tensor of a layer, whether or not the model has it.
pub(crate) fn expert_tensor_name(config: &ModelConfig, layer: usize, tensor: ExpertTensor) -> String {
    match config.names {
        NameScheme::Gguf => format!("blk.{layer}.{}", gguf_name(tensor)),
        NameScheme::HuggingFace => format!("model.layers.{layer}.{}", hugging_face_name(config, tensor)),
    }
}

fn gguf_name(tensor: ExpertTensor) -> String {
    match tensor {
        T::Router => "ffn_gate_inp.weight".to_owned(),
        T::RouterBias => "ffn_gate_inp.bias".to_owned(),
        T::SelectionBias => "exp_probs_b.bias".to_owned(),
        T::SharedGate => "ffn_gate_inp_shexp.weight".to_owned(),
        T::Gate(expert) => format!("ffn_gate.{expert}.weight"),
        T::Up(expert) => format!("ffn_up.{expert}.weight"),
        T::Down(expert) => format!("ffn_down.{expert}.weight"),
        T::AllGates => "ffn_gate_exps.weight".to_owned(),
        T::AllUps => "ffn_up_exps.weight".to_owned(),
        T::AllDowns => "ffn_down_exps.weight".to_owned(),
        T::AllGatesAndUps => "ffn_gate_up_exps.weight".to_owned(),
        T::AllGateBiases => "ffn_gate_exps.bias".to_owned(),
        T::AllUpBiases => "ffn_up_exps.bias".to_owned(),
        T::AllDownBiases => "ffn_down_exps.bias".to_owned(),
        T::SharedGates => "ffn_gate_shexp.weight".to_owned(),
        T::SharedUps => "ffn_up_shexp.weight".to_owned(),
        T::SharedDowns => "ffn_down_shexp.weight".to_owned(),
    }
}

fn hugging_face_name(config: &ModelConfig, tensor: ExpertTensor) -> String {
    if config.architecture == Architecture::GraniteMoe {
        let stem = match tensor {
            T::Router => "router.layer",
            T::AllDowns => "output_linear",
            _ => "input_linear",
        };
        return format!("block_sparse_moe.{stem}.weight");
    }
    let is_mixtral = config.architecture == Architecture::Mixtral;
    let (module, gate, up, down) = if is_mixtral {
        ("block_sparse_moe", "w1", "w3", "w2")
    } else {
        ("mlp", "gate_proj", "up_proj", "down_proj")
    };
    let is_qwen = config.architecture == Architecture::Qwen2Moe;
    let shared = if is_qwen { "shared_expert" } else { "shared_experts" };
    let router = if config.architecture == Architecture::GptOss { "router" } else { "gate" };
    match tensor {
        T::Router => format!("{module}.{router}.weight"),
        T::RouterBias => format!("{module}.{router}.bias"),
        T::SelectionBias => format!("{module}.gate.e_score_correction_bias"),
        T::SharedGate => format!("{module}.shared_expert_gate.weight"),
        T::Gate(expert) => format!("{module}.experts.{expert}.{gate}.weight"),
        T::Up(expert) => format!("{module}.experts.{expert}.{up}.weight"),
        T::Down(expert) => format!("{module}.experts.{expert}.{down}.weight"),
        T::AllGates => format!("{module}.experts.{gate}"),
        T::AllUps => format!("{module}.experts.{up}"),
        T::AllDowns => format!("{module}.experts.{down}"),
        T::AllGatesAndUps => format!("{module}.experts.gate_up_proj"),
        T::AllGateBiases => format!("{module}.experts.{gate}_bias"),
        T::AllUpBiases => format!("{module}.experts.{up}_bias"),
        T::AllDownBiases => format!("{module}.experts.{down}_bias"),
        T::SharedGates => format!("{module}.{shared}.gate_proj.weight"),
        T::SharedUps => format!("{module}.{shared}.up_proj.weight"),
        T::SharedDowns => format!("{module}.{shared}.down_proj.weight"),
    }
}

/// `(rows, cols)`.
pub(crate) fn expert_tensor_shape(
    hidden: usize,
    experts: &ExpertConfig,
    tensor: ExpertTensor,
) -> (usize, usize) {
    let (width, count, shared) = (experts.intermediate_size, experts.num_experts, experts.num_shared);
    match tensor {
        T::Router | T::AllDownBiases => (count, hidden),
        T::RouterBias | T::SelectionBias => (1, count),
        T::AllGateBiases | T::AllUpBiases => (count, width),
        T::SharedGate => (1, hidden),
        T::Gate(_) | T::Up(_) => (width, hidden),
        T::Down(_) => (hidden, width),
        T::AllGates | T::AllUps => (count * width, hidden),
        T::AllDowns => (count * hidden, width),
        T::AllGatesAndUps => (2 * count * width, hidden),
        T::SharedGates | T::SharedUps => (shared * width, hidden),
        T::SharedDowns => (hidden, shared * width),
    }
}

/// How the experts of a checkpoint lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertLayout {
    /// Tensors for each.
    Separate,
    /// Gates, ups and downs of all of them.
    Merged,
    /// The same with gate and up of each together.
    Fused,
}

pub(crate) fn expert_layout(config: &ModelConfig) -> ExpertLayout {
    match (config.names, config.architecture) {
        (NameScheme::Gguf, _) => ExpertLayout::Merged,
        (_, Architecture::GraniteMoe) => ExpertLayout::Fused,
        _ => ExpertLayout::Separate,
    }
}

/// What the checkpoint must have for a layer with experts.
pub(crate) fn expert_tensors(
    config: &ModelConfig,
    experts: &ExpertConfig,
    layer: usize,
) -> Vec<ExpectedTensor> {
    let mut tensors = vec![T::Router];
    tensors.extend(experts.has_selection_bias.then_some(T::SelectionBias));
    tensors.extend(experts.has_shared_gate.then_some(T::SharedGate));
    if experts.has_bias {
        tensors.extend([T::RouterBias, T::AllGateBiases, T::AllUpBiases, T::AllDownBiases]);
    }
    match expert_layout(config) {
        ExpertLayout::Merged => tensors.extend([T::AllGates, T::AllUps, T::AllDowns]),
        ExpertLayout::Fused => tensors.extend([T::AllGatesAndUps, T::AllDowns]),
        ExpertLayout::Separate => {
            let of_expert = |expert| [T::Gate(expert), T::Up(expert), T::Down(expert)];
            tensors.extend((0..experts.num_experts).flat_map(of_expert));
        }
    }
    if experts.num_shared > 0 {
        tensors.extend([T::SharedGates, T::SharedUps, T::SharedDowns]);
    }
    let expected = |tensor: ExpertTensor| {
        let (rows, cols) = expert_tensor_shape(config.hidden_size, experts, tensor);
        ExpectedTensor {
            name: expert_tensor_name(config, layer, tensor),
            role: Role::Expert,
            is_bias: tensor.is_bias(),
            rows,
            cols,
        }
    };
    tensors.into_iter().map(expected).collect()
}
