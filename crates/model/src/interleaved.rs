//! The experts of gpt-oss's checkpoints, taken apart into a matrix for each, as the decoder asks for them.
//!
//! A layer has one tensor with the gates and ups of all its experts, whose outputs take turns: gate, up, gate, up. In floats it is
//! `[experts, hidden, 2 * width]`, inputs first; in MXFP4 `[experts, 2 * width, hidden / 32, 16]`, outputs first. Matrices are made
//! when they are looked at, so that no layer is in memory twice.

use std::collections::BTreeSet;
use std::sync::Arc;

use baton_backend::{SharedBytes, Tensor, WeightFormat};

use crate::quantization::{Mxfp4, in_parallel};
use crate::safetensors::{RawTensor, Safetensors};
use crate::{ExpertConfig, KvScales, ModelConfig, ModelError, WeightSource};

/// Outputs that are made together: so many neighbours of a row of inputs are a cache line or two.
const TILE: usize = 32;

#[derive(Debug)]
pub(crate) struct InterleavedExperts {
    files: Arc<Safetensors>,
    /// What else there is.
    source: Arc<dyn WeightSource>,
    hidden: usize,
    experts: ExpertConfig,
}

/// What of a layer is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Gate,
    Up,
    Down,
}

impl Part {
    /// In which of the file's tensors it lies, and at which of its outputs it begins, so many apart.
    fn place(self) -> (&'static str, usize, usize) {
        match self {
            Self::Gate => ("gate_up_proj", 0, 2),
            Self::Up => ("gate_up_proj", 1, 2),
            Self::Down => ("down_proj", 0, 1),
        }
    }
}

fn wrong(name: &str, cause: impl std::fmt::Display) -> ModelError {
    ModelError::Config { what: format!("tensor {name:?} {cause}") }
}

/// `model.layers.3.mlp.experts.7.up_proj.weight`: what stands before the expert, its number and the part.
fn parse(name: &str) -> Option<(&str, usize, Part)> {
    let (module, part) = name.strip_suffix(".weight")?.rsplit_once('.')?;
    let (prefix, expert) = module.rsplit_once('.')?;
    let part = match part {
        "gate_proj" => Part::Gate,
        "up_proj" => Part::Up,
        "down_proj" => Part::Down,
        _ => return None,
    };
    prefix.ends_with(".experts").then_some((prefix, expert.parse().ok()?, part))
}

impl InterleavedExperts {
    pub(crate) fn new(
        files: Arc<Safetensors>,
        source: Arc<dyn WeightSource>,
        config: &ModelConfig,
        experts: &ExpertConfig,
    ) -> Self {
        Self { files, source, hidden: config.hidden_size, experts: experts.clone() }
    }

    /// Inputs and outputs of the tensor in which a part lies.
    fn sizes(&self, part: Part) -> (usize, usize) {
        match part {
            Part::Gate | Part::Up => (self.hidden, 2 * self.experts.intermediate_size),
            Part::Down => (self.experts.intermediate_size, self.hidden),
        }
    }

    fn matrix(&self, prefix: &str, expert: usize, part: Part) -> Result<Option<Tensor>, ModelError> {
        let (stem, first, step) = part.place();
        let name = format!("{prefix}.{stem}");
        let (inputs, outputs) = self.sizes(part);
        if expert >= self.experts.num_experts {
            return Ok(None);
        }
        if let Some(codes) = self.files.raw(&format!("{name}_blocks"))? {
            let scales = self.files.raw(&format!("{name}_scales"))?;
            let scales =
                scales.ok_or_else(|| ModelError::MissingTensor { name: format!("{name}_scales") })?;
            return self.packed(&codes, &scales, (inputs, outputs), expert, (first, step)).map(Some);
        }
        let Some(values) = self.files.raw(&name)? else { return Ok(None) };
        if values.shape != [self.experts.num_experts, inputs, outputs] {
            let expected = [self.experts.num_experts, inputs, outputs];
            return Err(wrong(&name, format!("has the shape {:?}, expected {expected:?}", values.shape)));
        }
        let format = self.files.format(&name).filter(|format| format.is_float());
        let format = format.ok_or_else(|| wrong(&name, "is not of floats"))?;
        let size = format.block_bytes();
        let bytes = inputs * outputs * size;
        let bytes = values.bytes.slice(expert * bytes..(expert + 1) * bytes);
        let bytes = bytes.ok_or_else(|| wrong(&name, "is too short"))?;
        let rows = outputs / step;
        let lazy = SharedBytes::lazy(inputs * rows * size, move || {
            transposed(bytes.as_slice(), (inputs, outputs), (first, step), size)
        });
        let tensor = Tensor::new(format, rows, inputs, lazy);
        tensor.map(Some).map_err(|cause| ModelError::Tensor { name, cause })
    }

    fn packed(
        &self,
        codes: &RawTensor,
        scales: &RawTensor,
        (inputs, outputs): (usize, usize),
        expert: usize,
        (first, step): (usize, usize),
    ) -> Result<Tensor, ModelError> {
        let expected = [self.experts.num_experts, outputs, inputs / 32];
        if codes.shape.get(..3) != Some(&expected[..]) || codes.shape.get(3..) != Some(&[16][..]) {
            let cause = format!("has the shape {:?}, expected {expected:?} and 16", codes.shape);
            return Err(wrong(&codes.name, cause));
        }
        if scales.shape != expected {
            return Err(wrong(
                &scales.name,
                format!("has the shape {:?}, expected {expected:?}", scales.shape),
            ));
        }
        for tensor in [codes, scales] {
            if !matches!(tensor.dtype.as_str(), "U8" | "F8_E8M0") {
                return Err(wrong(&tensor.name, format!("has the dtype {}; MXFP4 is U8", tensor.dtype)));
            }
        }
        let of_expert = |tensor: &RawTensor| {
            let bytes = tensor.bytes.len() / self.experts.num_experts;
            tensor.bytes.slice(expert * bytes..(expert + 1) * bytes).expect("a part of it")
        };
        let (codes, own) = (of_expert(codes), of_expert(scales));
        let mxfp4 = Mxfp4::Rows { codes, scales: own, first, step, blocks_per_row: inputs / 32 };
        mxfp4.tensor(outputs / step, inputs).map_err(|cause| wrong(&scales.name, cause))
    }

    /// Of gates or of ups, whose biases take turns as well.
    fn bias(&self, prefix: &str, part: Part) -> Result<Option<Tensor>, ModelError> {
        let (stem, first, step) = part.place();
        let name = format!("{prefix}.{stem}_bias");
        let Some(tensor) = self.files.tensor(&name)? else { return Ok(None) };
        let (count, outputs) = (self.experts.num_experts, self.sizes(part).1);
        if (tensor.rows(), tensor.cols()) != (count, outputs) {
            let cause = format!("is {} x {}, expected {count} x {outputs}", tensor.rows(), tensor.cols());
            return Err(wrong(&name, cause));
        }
        let size = tensor.format().block_bytes();
        let bytes = tensor.bytes().chunks_exact(size).skip(first).step_by(step).flatten().copied().collect();
        let own = Tensor::new(tensor.format(), count, outputs / step, SharedBytes::from_vec(bytes));
        own.map(Some).map_err(|cause| ModelError::Tensor { name, cause })
    }
}

/// Every `step`-th output from `first` on of `[inputs, outputs]` values of `size` bytes, outputs first.
fn transposed(
    values: &[u8],
    (inputs, outputs): (usize, usize),
    (first, step): (usize, usize),
    size: usize,
) -> Vec<u8> {
    let mut bytes = vec![0; values.len() / step];
    let row_bytes = inputs * size;
    in_parallel(&mut bytes, TILE * row_bytes, |tile, out| {
        for (input, row) in values.chunks_exact(outputs * size).enumerate() {
            for (i, out) in out.chunks_exact_mut(row_bytes).enumerate() {
                let at = (first + (tile * TILE + i) * step) * size;
                out[input * size..(input + 1) * size].copy_from_slice(&row[at..at + size]);
            }
        }
    });
    bytes
}

impl WeightSource for InterleavedExperts {
    fn tensor(&self, name: &str) -> Result<Option<Tensor>, ModelError> {
        if let Some((prefix, expert, part)) = parse(name) {
            return self.matrix(prefix, expert, part);
        }
        match name.rsplit_once('.') {
            Some((prefix, "gate_proj_bias")) => self.bias(prefix, Part::Gate),
            Some((prefix, "up_proj_bias")) => self.bias(prefix, Part::Up),
            _ => self.source.tensor(name),
        }
    }

    fn names(&self) -> Vec<String> {
        let mut names = BTreeSet::new();
        for name in self.source.names() {
            let of_experts = name.rsplit_once('.').filter(|(prefix, _)| prefix.ends_with(".experts"));
            let (prefix, parts): (&str, &[&str]) = match of_experts {
                Some((prefix, "gate_up_proj")) => (prefix, &["gate_proj", "up_proj"]),
                Some((prefix, "down_proj")) => (prefix, &["down_proj"]),
                Some((prefix, "gate_up_proj_bias")) => {
                    names.extend(["gate", "up"].map(|part| format!("{prefix}.{part}_proj_bias")));
                    continue;
                }
                _ => {
                    names.insert(name);
                    continue;
                }
            };
            for expert in 0..self.experts.num_experts {
                names.extend(parts.iter().map(|part| format!("{prefix}.{expert}.{part}.weight")));
            }
        }
        names.into_iter().collect()
    }

    fn total_bytes(&self) -> u64 {
        self.source.total_bytes()
    }

    fn kv_scales(&self, key_weight: &str) -> Result<Option<KvScales>, ModelError> {
        self.source.kv_scales(key_weight)
    }

    fn formats(&self) -> Result<Vec<WeightFormat>, ModelError> {
        self.source.formats()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use safetensors::tensor::{Dtype, TensorView};
    use serde_json::json;

    use super::*;

    const EXPERTS: usize = 3;
    const HIDDEN: usize = 32;
    const WIDTH: usize = 64;

    fn config() -> ModelConfig {
        let config = json!({
            "architectures": ["GptOssForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 50, "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
        });
        ModelConfig::from_json(config.to_string().as_bytes(), None).unwrap()
    }

    type Parts<'a> = Vec<(&'a str, Dtype, Vec<usize>, Vec<u8>)>;

    fn open(parts: &Parts<'_>) -> InterleavedExperts {
        let views = parts.iter().map(|(name, dtype, shape, bytes)| {
            (format!("m.experts.{name}"), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        let bytes = safetensors::serialize(views, None).unwrap();
        let files = Safetensors::from_bytes(Path::new("memory"), SharedBytes::from_vec(bytes)).unwrap();
        let files = Arc::new(files);
        let config = config();
        let experts = config.experts.clone().unwrap();
        InterleavedExperts::new(Arc::clone(&files), files, &config, &experts)
    }

    fn floats(shape: &[usize]) -> Vec<u8> {
        (0..shape.iter().product::<usize>()).flat_map(|i| (i as f32).to_le_bytes()).collect()
    }

    fn plain() -> Parts<'static> {
        let shapes = [
            ("gate_up_proj", vec![EXPERTS, HIDDEN, 2 * WIDTH]),
            ("down_proj", vec![EXPERTS, WIDTH, HIDDEN]),
            ("gate_up_proj_bias", vec![EXPERTS, 2 * WIDTH]),
            ("down_proj_bias", vec![EXPERTS, HIDDEN]),
        ];
        shapes.map(|(name, shape)| (name, Dtype::F32, shape.clone(), floats(&shape))).into()
    }

    fn value(source: &InterleavedExperts, name: &str, row: usize, col: usize) -> f32 {
        let tensor = source.tensor(name).unwrap().unwrap_or_else(|| panic!("no {name}"));
        let mut values = vec![0.0; tensor.cols()];
        tensor.dequantize_row(row, &mut values);
        values[col]
    }

    #[test]
    fn outputs_take_turns_and_inputs_come_first() {
        let source = open(&plain());
        let place = |expert: usize, input: usize, output: usize, outputs: usize, inputs: usize| {
            ((expert * inputs + input) * outputs + output) as f32
        };
        for (expert, output, input) in [(0, 0, 0), (2, 63, 31), (1, 40, 7)] {
            let named = |part: &str| format!("m.experts.{expert}.{part}_proj.weight");
            let gate = place(expert, input, 2 * output, 2 * WIDTH, HIDDEN);
            assert_eq!(value(&source, &named("gate"), output, input), gate);
            assert_eq!(value(&source, &named("up"), output, input), gate + 1.0);
            let down = place(expert, output, input, HIDDEN, WIDTH);
            assert_eq!(value(&source, &named("down"), input, output), down);
        }
        assert_eq!(value(&source, "m.experts.gate_proj_bias", 1, 3), (2 * WIDTH + 6) as f32);
        assert_eq!(value(&source, "m.experts.up_proj_bias", 1, 3), (2 * WIDTH + 7) as f32);
        assert_eq!(value(&source, "m.experts.down_proj_bias", 1, 3), (HIDDEN + 3) as f32);
        assert!(source.tensor("m.experts.3.up_proj.weight").unwrap().is_none());
        // All that is named is there, and nothing is named twice.
        let names = source.names();
        assert_eq!(names.len(), 3 * EXPERTS + 3);
        assert!(names.iter().all(|name| source.tensor(name).unwrap().is_some()), "{names:?}");
    }

    fn packed() -> Parts<'static> {
        let of = |outputs: usize, inputs: usize| {
            [vec![EXPERTS, outputs, inputs / 32, 16], vec![EXPERTS, outputs, inputs / 32]]
        };
        let [codes, scales] = of(2 * WIDTH, HIDDEN);
        let [down, down_scales] = of(HIDDEN, WIDTH);
        let bytes = |shape: &[usize], value: u8| vec![value; shape.iter().product()];
        // Twos, times one for gates and a half for ups.
        let turns: Vec<u8> = (0..scales.iter().product::<usize>()).map(|i| 127 - (i % 2) as u8).collect();
        vec![
            ("gate_up_proj_blocks", Dtype::U8, codes.clone(), bytes(&codes, 0x44)),
            ("gate_up_proj_scales", Dtype::U8, scales, turns),
            ("down_proj_blocks", Dtype::U8, down.clone(), bytes(&down, 0x22)),
            ("down_proj_scales", Dtype::U8, down_scales.clone(), bytes(&down_scales, 128)),
        ]
    }

    #[test]
    fn packed_outputs_take_turns() {
        let source = open(&packed());
        for (expert, row, col) in [(0, 0, 0), (2, 63, 31)] {
            let named = |part: &str| format!("m.experts.{expert}.{part}_proj.weight");
            assert_eq!(value(&source, &named("gate"), row, col), 2.0);
            assert_eq!(value(&source, &named("up"), row, col), 1.0);
            assert_eq!(value(&source, &named("down"), row / 2, col), 2.0);
        }
    }

    #[test]
    fn wrong_tensors_are_errors_that_name_them() {
        let refused = |parts: Parts<'_>, expected: &str| {
            let error = open(&parts).tensor("m.experts.1.gate_proj.weight").unwrap_err().to_string();
            assert!(error.contains(expected), "{error} does not say {expected:?}");
        };
        let with = |mut parts: Parts<'static>, number: usize, shape: &[usize], dtype: Dtype, size: usize| {
            let len = shape.iter().product::<usize>() * size;
            parts[number] = (parts[number].0, dtype, shape.to_vec(), vec![1; len]);
            parts
        };
        let few = [EXPERTS - 1, HIDDEN, 2 * WIDTH];
        refused(with(plain(), 0, &few, Dtype::F32, 4), "gate_up_proj\" has the shape [2, 32, 128]");
        // Outputs first: the same number of values.
        let turned = [EXPERTS, 2 * WIDTH, HIDDEN];
        refused(with(plain(), 0, &turned, Dtype::F32, 4), "expected [3, 32, 128]");
        refused(with(plain(), 0, &[EXPERTS, HIDDEN, 2 * WIDTH], Dtype::I32, 4), "is not of floats");
        refused(packed()[..1].to_vec(), "gate_up_proj_scales");
        let short = [EXPERTS, 2 * WIDTH, 1];
        refused(with(packed(), 0, &short, Dtype::U8, 1), "gate_up_proj_blocks\" has the shape [3, 128, 1]");
        refused(with(packed(), 1, &[EXPERTS, WIDTH, 1], Dtype::U8, 1), "gate_up_proj_scales\" has the shape");
        refused(with(packed(), 1, &short, Dtype::F32, 4), "the dtype F32; MXFP4 is U8");
        let mut parts = packed();
        parts[1].3[WIDTH * 2 + 4] = 255;
        refused(parts, "gate_up_proj_scales\" has the scale NaN at 2, which no sound weight has");
        let mut parts = plain();
        parts[2].2 = vec![2 * WIDTH, EXPERTS];
        let error = open(&parts).tensor("m.experts.up_proj_bias").unwrap_err().to_string();
        assert!(error.contains("gate_up_proj_bias\" is 128 x 3, expected 3 x 128"), "{error}");
    }
}
