//! The decoder without a device: which weights it hands over, which ops it runs, what it refuses. Whether the numbers
//! are right is for `tests/golden.rs`.

use std::collections::BTreeMap;

use baton_backend::{
    Activation, Backend, BackendError, BufferId, DeviceInfo, KvSpec, MockBackend, MockOptions, Op, Program,
    ProgramId, RopeId, RopeSpec, StepExecutor, StepInput, StepLimits, StepOutput, Tensor, VectorId,
    WeightFormat, WeightId, WeightUse,
};

use super::{Decoder, LoadProgress};
use crate::tensor_names::expected_tensors;
use crate::{
    Architecture, LayerConfig, ModelConfig, ModelError, NameScheme, QkvLayout, RopeConfig, RopeScaling,
    WeightSource,
};

/// Remembers what it was given.
#[derive(Default)]
struct Recorder {
    weights: Vec<(Vec<usize>, WeightUse)>,
    vectors: Vec<Vec<f32>>,
    buffers: Vec<(usize, usize)>,
    ropes: Vec<RopeSpec>,
}

impl StepExecutor for Recorder {
    fn submit(&mut self, _: &StepInput, _: ProgramId) -> Result<(), BackendError> {
        unreachable!()
    }

    fn collect(&mut self, _: &mut StepOutput) -> Result<(), BackendError> {
        unreachable!()
    }

    fn read_buffer(&mut self, _: BufferId, _: usize) -> Result<Vec<f32>, BackendError> {
        unreachable!()
    }
}

impl Backend for Recorder {
    fn device(&self) -> DeviceInfo {
        unreachable!("the decoder does not ask which device it is on")
    }

    fn load_weight(&mut self, parts: &[Tensor], usage: WeightUse) -> Result<WeightId, BackendError> {
        self.weights.push((parts.iter().map(Tensor::rows).collect(), usage));
        Ok(WeightId(self.weights.len() as u32 - 1))
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<VectorId, BackendError> {
        self.vectors.push(values.to_vec());
        Ok(VectorId(self.vectors.len() as u32 - 1))
    }

    fn create_rope(&mut self, spec: &RopeSpec) -> Result<RopeId, BackendError> {
        self.ropes.push(spec.clone());
        Ok(RopeId(self.ropes.len() as u32 - 1))
    }

    fn set_limits(&mut self, _: &StepLimits) -> Result<(), BackendError> {
        assert!(self.buffers.is_empty(), "limits come before buffers");
        Ok(())
    }

    fn create_buffer(&mut self, rows: usize, cols: usize) -> Result<BufferId, BackendError> {
        self.buffers.push((rows, cols));
        Ok(BufferId(self.buffers.len() as u32 - 1))
    }

    fn create_logits(&mut self, rows: usize, vocab_size: usize) -> Result<BufferId, BackendError> {
        self.create_buffer(rows, vocab_size)
    }

    fn compile(&mut self, _: &Program) -> Result<ProgramId, BackendError> {
        unreachable!("the engine compiles what the decoder wrote")
    }

    fn create_kv_cache(&mut self, _: &KvSpec, _: usize, _: usize) -> Result<(), BackendError> {
        unreachable!("the KV cache is the engine's")
    }

    fn weight_bytes(&self) -> u64 {
        0
    }
}

/// The ops by name; those that add to their output with a plus.
fn op_names(decoder: &Decoder) -> Vec<String> {
    let name = |op: &Op| format!("{}{}", op.name(), if op.accumulates() { "+" } else { "" });
    decoder.program().ops.iter().map(name).collect()
}

macro_rules! all_ops {
    ($decoder:expr, $kind:ident) => {
        $decoder
            .program()
            .ops
            .iter()
            .filter_map(|op| if let Op::$kind(op) = op { Some(op) } else { None })
            .collect::<Vec<_>>()
    };
}

#[derive(Debug)]
struct Checkpoint(BTreeMap<String, Tensor>);

impl Checkpoint {
    /// Every tensor of the configuration; the values of the n-th tensor are all n.
    fn of(config: &ModelConfig) -> Self {
        let tensors = expected_tensors(config).into_iter().enumerate().map(|(number, tensor)| {
            let values = vec![number as f32; tensor.rows * tensor.cols];
            (tensor.name, Tensor::from_f32(tensor.rows, tensor.cols, &values).unwrap())
        });
        Self(tensors.collect())
    }

    fn set(&mut self, name: &str, rows: usize, values: &[f32]) {
        let tensor = Tensor::from_f32(rows, values.len() / rows, values).unwrap();
        self.0.insert(name.to_owned(), tensor);
    }
}

impl WeightSource for Checkpoint {
    fn tensor(&self, name: &str) -> Result<Option<Tensor>, ModelError> {
        Ok(self.0.get(name).cloned())
    }
    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
    fn total_bytes(&self) -> u64 {
        self.0.values().map(|tensor| tensor.bytes().len() as u64).sum()
    }
}

fn config() -> ModelConfig {
    let rope = RopeConfig { theta: 10000.0, rotary_dim: 4, scaling: RopeScaling::None };
    ModelConfig {
        architecture: Architecture::Llama,
        names: NameScheme::HuggingFace,
        hidden_size: 8,
        intermediate_size: 10,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 4,
        vocab_size: 20,
        layers: vec![LayerConfig { window: None, rope: Some(0) }; 2],
        ropes: vec![rope],
        norm_eps: 1e-5,
        attention_scale: 0.5,
        tied_embeddings: true,
        max_model_len: 64,
        dtype: WeightFormat::F32,
        ..ModelConfig::default()
    }
}

fn gemma() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Gemma3,
        qk_norm: true,
        post_norms: true,
        norm_weight_offset: 1.0,
        layers: [Some(4), None, Some(4)].map(|window| LayerConfig { window, rope: Some(0) }).to_vec(),
        ..config()
    }
}

const LIMITS: StepLimits = StepLimits {
    max_tokens: 16,
    max_seqs: 4,
    max_logit_rows: 4,
    max_samples: 4,
    max_model_len: 64,
    vocab_size: 20,
};

fn load(config: &ModelConfig, weights: &Checkpoint) -> Result<(Decoder, Recorder), ModelError> {
    let mut backend = Recorder::default();
    let decoder = Decoder::load(config, weights, &mut backend, &LIMITS, &mut |_| ())?;
    Ok((decoder, backend))
}

fn refused(config: &ModelConfig, weights: &Checkpoint) -> String {
    load(config, weights).map(|_| ()).expect_err("must be refused").to_string()
}

#[test]
fn a_layer_is_five_ops() {
    let config = config();
    let (decoder, backend) = load(&config, &Checkpoint::of(&config)).unwrap();
    let layer = ["qkv", "attention", "linear+", "gated_linear", "linear+"];
    let last = ["qkv", "attention", "keep_logit_rows", "linear+", "gated_linear", "linear+"];
    let expected = [&["embed"][..], &layer, &last, &["logits", "sample"]].concat();
    assert_eq!(op_names(&decoder), expected);

    let linear = |rows: &[usize]| (rows.to_vec(), WeightUse::Linear);
    let layer = [linear(&[16, 8, 8]), linear(&[8]), linear(&[10, 10]), linear(&[8])];
    let tied = (vec![20], WeightUse::EmbeddingAndLinear);
    assert_eq!(backend.weights, [&[tied][..], &layer, &layer].concat());
    assert_eq!(all_ops!(decoder, Embed)[0].weight, all_ops!(decoder, Logits)[0].weight);
}

#[test]
fn norms_after_each_half_go_through_scratch() {
    let config = gemma();
    let (decoder, _) = load(&config, &Checkpoint::of(&config)).unwrap();
    let layer = ["qkv", "attention", "linear", "norm+", "gated_linear", "linear", "norm+"];
    let last = ["qkv", "attention", "keep_logit_rows", "linear", "norm+", "gated_linear", "linear", "norm+"];
    let expected = [&["embed"][..], &layer, &layer, &last, &["logits", "sample"]].concat();
    assert_eq!(op_names(&decoder), expected);
    for (norm, linear) in all_ops!(decoder, Norm).iter().zip(all_ops!(decoder, Linear)) {
        assert_eq!((norm.input, norm.output), (linear.output, decoder.hidden_buffer()));
    }
    assert!(all_ops!(decoder, Qkv).iter().all(|qkv| qkv.q_norm.is_some() && qkv.k_norm.is_some()));
    let plans: Vec<_> = all_ops!(decoder, Attention).iter().map(|attention| attention.plan).collect();
    assert_eq!(plans, [1, 0, 2], "a block holds one layer: the one with full attention goes first");
    assert_eq!(config.attention_kinds(), [Some(4), None]);
}

fn gpt2() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Gpt2,
        num_heads: 2,
        num_kv_heads: 2,
        layers: vec![LayerConfig { window: None, rope: None }; 2],
        ropes: Vec::new(),
        learned_positions: true,
        layer_norm: true,
        gated_mlp: false,
        activation: Activation::GeluTanh,
        qkv_layout: QkvLayout::Concatenated,
        qkv_bias: true,
        attention_output_bias: true,
        mlp_bias: true,
        ..config()
    }
}

#[test]
fn learned_positions_and_a_plain_mlp_are_ops_of_their_own() {
    let config = gpt2();
    let mut weights = Checkpoint::of(&config);
    // Matrices are stored as [in, out].
    let stored = &weights.0["transformer.h.1.mlp.c_fc.weight"];
    assert_eq!((stored.rows(), stored.cols()), (8, 10));
    let (decoder, backend) = load(&config, &weights).unwrap();
    let layer = ["qkv", "attention", "linear+", "activated_linear", "linear+"];
    let last = ["qkv", "attention", "keep_logit_rows", "linear+", "activated_linear", "linear+"];
    let expected = [&["embed", "add_positions+"][..], &layer, &last, &["logits", "sample"]].concat();
    assert_eq!(op_names(&decoder), expected);
    let linear = |rows: usize| (vec![rows], WeightUse::Linear);
    let layer = [linear(24), linear(8), linear(10), linear(8)];
    let tables = [(vec![20], WeightUse::EmbeddingAndLinear), (vec![64], WeightUse::Embedding)];
    assert_eq!(backend.weights, [&tables[..], &layer, &layer].concat());
    let is_layer_norm = |norm: Option<baton_backend::Norm>| {
        matches!(norm.unwrap().kind, baton_backend::NormKind::Layer { bias: Some(_) })
    };
    assert!(all_ops!(decoder, Qkv).iter().all(|op| is_layer_norm(op.norm) && op.rope.is_none()));
    assert!(all_ops!(decoder, ActivatedLinear).iter().all(|op| is_layer_norm(op.norm) && op.bias.is_some()));
    assert!(is_layer_norm(all_ops!(decoder, Logits)[0].norm));

    // The first checkpoints have shorter names.
    weights.0 = weights
        .0
        .into_iter()
        .map(|(name, tensor)| (name.trim_start_matches("transformer.").to_owned(), tensor))
        .collect();
    load(&config, &weights).unwrap();
    let long = ModelConfig { max_model_len: 63, ..config };
    assert_eq!(refused(&long, &weights), "sequences of 64 tokens, but the model has learned 63 positions");
}

/// What every device checks before it runs a program.
#[test]
fn the_program_compiles() {
    for config in [config(), gemma(), gpt2()] {
        let mut backend = MockBackend::new(MockOptions::default());
        let weights = Checkpoint::of(&config);
        let decoder = Decoder::load(&config, &weights, &mut backend, &LIMITS, &mut |_| ()).unwrap();
        let program = backend.compile(decoder.program()).unwrap();
        assert_eq!(backend.compile(decoder.program()).unwrap(), program);
        backend.create_kv_cache(&config.kv_spec(baton_backend::KvDtype::F16, 16), 1, 0).unwrap();
    }
}

#[test]
fn the_offset_is_added_to_norm_weights_only() {
    let config = ModelConfig { qkv_bias: true, ..gemma() };
    let mut weights = Checkpoint::of(&config);
    weights.set("model.norm.weight", 1, &[0.25; 8]);
    weights.set("model.layers.0.self_attn.q_proj.bias", 1, &[0.5; 16]);
    let (decoder, backend) = load(&config, &weights).unwrap();
    let norm = all_ops!(decoder, Logits)[0].norm.unwrap().weight;
    assert_eq!(backend.vectors[norm.0 as usize], [1.25; 8]);
    let bias = all_ops!(decoder, Qkv)[0].bias.unwrap();
    assert_eq!(backend.vectors[bias.0 as usize][..16], [0.5; 16]);
}

#[test]
fn parts_without_bias_get_zeros() {
    let config = ModelConfig { qkv_bias: true, ..config() };
    let mut weights = Checkpoint::of(&config);
    weights.set("model.layers.1.self_attn.v_proj.bias", 1, &[7.0; 8]);
    weights.set("model.layers.1.self_attn.q_proj.bias", 1, &[5.0; 16]);
    weights.0.remove("model.layers.1.self_attn.k_proj.bias");
    let (decoder, backend) = load(&config, &weights).unwrap();
    let bias = all_ops!(decoder, Qkv)[1].bias.unwrap();
    assert_eq!(backend.vectors[bias.0 as usize], [&[5.0; 16][..], &[0.0; 8], &[7.0; 8]].concat());
    assert!(all_ops!(decoder, Linear).iter().all(|linear| linear.bias.is_none()));

    for part in ["q", "v"] {
        weights.0.remove(&format!("model.layers.1.self_attn.{part}_proj.bias"));
    }
    assert_eq!(
        refused(&config, &weights),
        "the checkpoint has no tensor \"model.layers.1.self_attn.q_proj.bias\"; it may be incomplete or of another architecture"
    );
}

#[test]
fn what_does_not_fit_is_named() {
    let good = config();
    let mut weights = Checkpoint::of(&good);
    weights.set("model.layers.1.mlp.down_proj.weight", 8, &[0.0; 8 * 11]);
    assert_eq!(
        refused(&good, &weights),
        "tensor \"model.layers.1.mlp.down_proj.weight\" is 8 x 11, expected 8 x 10"
    );
    let mut weights = Checkpoint::of(&good);
    weights.set("model.layers.0.mlp.up_proj.bias", 1, &[0.0; 10]);
    assert_eq!(
        refused(&good, &weights),
        "the checkpoint has a bias \"model.layers.0.mlp.up_proj.bias\", but its configuration has none"
    );
    let weights = Checkpoint::of(&good);
    let untied = ModelConfig { tied_embeddings: false, ..config() };
    assert_eq!(
        refused(&untied, &weights),
        "the checkpoint has no tensor \"lm_head.weight\"; it may be incomplete or of another architecture"
    );
    let wrong = ModelConfig { num_kv_heads: 3, ..config() };
    assert_eq!(refused(&wrong, &weights), "4 attention heads cannot share 3 key-value heads evenly");
    let wrong = ModelConfig { layers: vec![LayerConfig { window: None, rope: Some(1) }], ..config() };
    assert_eq!(refused(&wrong, &weights), "layer 0 has no rotary table 1");
    let wrong = ModelConfig { vocab_size: 21, ..config() };
    assert_eq!(
        refused(&wrong, &weights),
        "the step limits are for 20 tokens of vocabulary, the model has 21"
    );
}

#[test]
fn progress_grows_to_the_whole() {
    let config = gemma();
    let mut weights = Checkpoint::of(&config);
    weights.set("rope_freqs.weight", 1, &[1.0; 100]); // not used
    let mut seen = Vec::new();
    Decoder::load(&config, &weights, &mut Recorder::default(), &LIMITS, &mut |progress| seen.push(progress))
        .unwrap();
    let total_bytes = weights.total_bytes();
    assert!(seen.is_sorted_by_key(|progress| progress.done_bytes));
    let used = LoadProgress { done_bytes: total_bytes - 400, total_bytes };
    assert_eq!(seen[seen.len() - 2..], [used, LoadProgress { done_bytes: total_bytes, total_bytes }]);
}

#[test]
fn buffer_bytes_are_those_of_the_buffers() {
    for config in [config(), gemma()] {
        let (_, backend) = load(&config, &Checkpoint::of(&config)).unwrap();
        let elements: usize = backend.buffers.iter().map(|(rows, cols)| rows * cols).sum();
        assert_eq!(Decoder::buffer_bytes(&config, &LIMITS, 4), 4 * elements as u64);
        let logits = LIMITS.max_logit_rows * config.vocab_size;
        let half = 2 * (elements - logits) + 4 * logits;
        assert_eq!(Decoder::buffer_bytes(&config, &LIMITS, 2), half as u64);
    }
}

#[test]
fn estimates_agree_with_the_tensors() {
    for config in
        [config(), gemma(), gpt2(), ModelConfig { mlp_bias: true, tied_embeddings: false, ..config() }]
    {
        let total_bytes = Checkpoint::of(&config).total_bytes();
        assert_eq!(crate::weight_bytes(&config), total_bytes);
        assert_eq!(crate::num_parameters(&config), total_bytes / 4);
    }
    // 2 layers x (k and v) x 2 heads x 4 dimensions x 2 bytes.
    assert_eq!(crate::kv_bytes_per_token(&config(), baton_backend::KvDtype::F16), 64);
}
