//! Quantised checkpoints of Hugging Face: what `quantization_config` says, and the weights that go with it.
//!
//! The file is believed before the configuration: which tensors a module has (`qweight`, `weight_packed`, an eight-bit
//! `weight` with its scales) says how it is stored, and bits and groups follow from shapes. The configuration tells apart what
//! shapes cannot (AWQ and GPTQ, GPTQ's two ways to store zeros), and what dummy weights and the memory plan should be.
//!
//! Weights of four and eight bits become blocks of 32 with a scale and a minimum or offset, which every device has kernels for;
//! nothing is expanded to floats unless groups are no multiples of 32. Eight-bit floats stay as they are, with their scales.
//! Scales of activations are checked and then not used: activations are rounded by what each token has.

mod mxfp4;
mod packed;
mod round;
#[cfg(test)]
mod tests;
mod weights;

use std::fmt;

use baton_backend::WeightFormat;
use fancy_regex::Regex;
use serde::Deserialize;
use serde_json::Value;

use crate::ModelError;
pub(crate) use mxfp4::Mxfp4;
pub use round::{RoundTo, RoundedWeights};
pub(crate) use round::{in_parallel, round_tensor};
pub(crate) use weights::QuantizedWeights;

/// How a checkpoint is quantised.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizationConfig {
    pub method: QuantMethod,
    ignore: Vec<Ignored>,
    head: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantMethod {
    /// e4m3 with a scale for each row or tensor, or for blocks of rows and columns.
    Fp8 {
        block: Option<(usize, usize)>,
        is_static: bool,
    },
    /// Integers of eight bits with a scale for each row.
    Int8,
    /// `group_size` columns share a scale and a zero; `None`: all of a row.
    Awq {
        bits: u32,
        group_size: Option<usize>,
        zero_point: bool,
    },
    Gptq {
        bits: u32,
        group_size: Option<usize>,
        desc_act: bool,
        sym: bool,
        is_v2: bool,
    },
    /// `pack-quantized` of compressed-tensors.
    Packed {
        bits: u32,
        group_size: Option<usize>,
        sym: bool,
    },
    /// e2m1 in blocks of 32 with a power of two each.
    Mxfp4,
}

/// Modules that stay as they are.
#[derive(Clone, Debug)]
enum Ignored {
    /// A module's name, or the end of one after a dot.
    Name(String),
    /// A part of the name.
    Part(String),
    Pattern(String, Regex),
}

impl PartialEq for Ignored {
    fn eq(&self, other: &Self) -> bool {
        self.text() == other.text()
    }
}

impl Ignored {
    fn text(&self) -> &str {
        match self {
            Self::Name(text) | Self::Part(text) | Self::Pattern(text, _) => text,
        }
    }

    fn matches(&self, module: &str) -> bool {
        match self {
            Self::Name(name) => {
                module == name || module.strip_suffix(name).is_some_and(|rest| rest.ends_with('.'))
            }
            Self::Part(part) => module.contains(part.as_str()),
            Self::Pattern(_, pattern) => pattern.is_match(module).unwrap_or(false),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Raw {
    quant_method: Option<String>,
    quant_algo: Option<String>,
    // AWQ and GPTQ
    bits: Option<u32>,
    w_bit: Option<u32>,
    group_size: Option<i64>,
    q_group_size: Option<i64>,
    version: Option<String>,
    zero_point: Option<bool>,
    desc_act: Option<bool>,
    sym: Option<bool>,
    lm_head: Option<bool>,
    checkpoint_format: Option<String>,
    modules_to_not_convert: Option<Vec<String>>,
    dynamic: Option<serde_json::Map<String, Value>>,
    // FP8
    fmt: Option<String>,
    activation_scheme: Option<String>,
    weight_block_size: Option<Vec<usize>>,
    ignored_layers: Option<Vec<String>>,
    // compressed-tensors
    format: Option<String>,
    config_groups: Option<serde_json::Map<String, Value>>,
    ignore: Option<Vec<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawGroup {
    format: Option<String>,
    weights: Option<RawWeights>,
    input_activations: Option<RawWeights>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawWeights {
    num_bits: Option<u32>,
    r#type: Option<String>,
    symmetric: Option<bool>,
    strategy: Option<String>,
    group_size: Option<i64>,
    block_structure: Option<Value>,
    dynamic: Option<Value>,
}

fn wrong(what: impl fmt::Display) -> ModelError {
    ModelError::Config { what: format!("quantization_config: {what}") }
}

impl QuantizationConfig {
    /// From the value of `quantization_config`.
    pub fn from_json(value: &Value) -> Result<Self, ModelError> {
        let raw: Raw = serde_json::from_value(value.clone()).map_err(wrong)?;
        let method = raw.quant_method.as_deref().unwrap_or_default().to_ascii_lowercase();
        let config = match method.as_str() {
            "awq" => raw.awq()?,
            "gptq" => raw.gptq()?,
            "fp8" | "fbgemm_fp8" | "modelopt" => raw.fp8()?,
            "compressed-tensors" | "compressed_tensors" => raw.compressed()?,
            "mxfp4" => QuantMethod::Mxfp4,
            "" => return Err(wrong("it has no quant_method")),
            other => {
                return Err(wrong(format!(
                    "the method {other:?} is not supported; take a checkpoint quantised by fp8, awq, gptq, mxfp4 or \
                     compressed-tensors, the unquantised one with --quantization fp8, q8 or q4, or a GGUF file"
                )));
            }
        };
        let head = raw.lm_head == Some(true);
        Ok(Self { method: config, ignore: raw.ignored()?, head })
    }

    /// Whether a linear module of this name is quantised in a checkpoint as the configuration describes it.
    pub(crate) fn covers(&self, module: &str, is_head: bool) -> bool {
        (!is_head || self.head) && !self.ignore.iter().any(|ignored| ignored.matches(module))
    }

    /// The format that a linear module of so many columns has once it is read.
    pub(crate) fn weight_format(&self, cols: usize) -> WeightFormat {
        let blocks = |bits: u32, group_size: Option<usize>, is_symmetric: bool| {
            let is_whole = cols.is_multiple_of(32) && group_size.is_none_or(|size| size % 32 == 0);
            match (bits, is_symmetric) {
                _ if !is_whole => WeightFormat::F16,
                (4, true) => WeightFormat::Q4_0,
                (4, false) => WeightFormat::Q4_1,
                (_, true) => WeightFormat::Q8_0,
                (_, false) => WeightFormat::F16,
            }
        };
        match self.method {
            QuantMethod::Fp8 { .. } => WeightFormat::F8_E4M3,
            QuantMethod::Int8 => blocks(8, None, true),
            QuantMethod::Mxfp4 if !cols.is_multiple_of(32) => WeightFormat::F16,
            QuantMethod::Mxfp4 => WeightFormat::Q5_0,
            QuantMethod::Awq { bits, group_size, zero_point } => blocks(bits, group_size, !zero_point),
            QuantMethod::Gptq { bits, group_size, sym, .. }
            | QuantMethod::Packed { bits, group_size, sym } => blocks(bits, group_size, sym),
        }
    }
}

impl Raw {
    fn bits(&self) -> Result<u32, ModelError> {
        match self.bits.or(self.w_bit) {
            Some(bits @ (4 | 8)) => Ok(bits),
            Some(bits) => {
                Err(wrong(format!("weights of {bits} bits are not supported; those of 4 and 8 bits are")))
            }
            None => Err(wrong("it has no \"bits\"")),
        }
    }

    fn awq(&self) -> Result<QuantMethod, ModelError> {
        let version = self.version.as_deref().unwrap_or("gemm").to_ascii_lowercase();
        if version != "gemm" {
            return Err(wrong(format!(
                "the AWQ layout {version:?} is not supported; the layout \"gemm\" is"
            )));
        }
        let bits = self.bits()?;
        if bits != 4 {
            return Err(wrong(format!("AWQ of {bits} bits is not supported; of 4 bits it is")));
        }
        let group_size = group_size(self.group_size.or(self.q_group_size))?;
        Ok(QuantMethod::Awq { bits, group_size, zero_point: self.zero_point.unwrap_or(true) })
    }

    fn gptq(&self) -> Result<QuantMethod, ModelError> {
        let is_v2 = match self.checkpoint_format.as_deref().unwrap_or("gptq") {
            "gptq" => false,
            "gptq_v2" => true,
            other => {
                return Err(wrong(format!(
                    "the GPTQ layout {other:?} is not supported; \"gptq\" and \"gptq_v2\" are"
                )));
            }
        };
        Ok(QuantMethod::Gptq {
            bits: self.bits()?,
            group_size: group_size(self.group_size)?,
            desc_act: self.desc_act.unwrap_or(false),
            sym: self.sym.unwrap_or(true),
            is_v2,
        })
    }

    fn fp8(&self) -> Result<QuantMethod, ModelError> {
        if let Some(algorithm) = self.quant_algo.as_deref().filter(|algorithm| *algorithm != "FP8") {
            return Err(wrong(format!("quant_algo {algorithm:?} is not supported; FP8 is")));
        }
        if let Some(other) = self.fmt.as_deref().filter(|kind| *kind != "e4m3") {
            return Err(wrong(format!("eight-bit floats of the kind {other:?} are not supported; e4m3 is")));
        }
        let block = self.weight_block_size.as_deref().map(block_size).transpose()?;
        Ok(QuantMethod::Fp8 { block, is_static: self.activation_scheme.as_deref() == Some("static") })
    }

    fn compressed(&self) -> Result<QuantMethod, ModelError> {
        let first = self.config_groups.iter().flatten().next().map(|(_, group)| group);
        let group: RawGroup = match first {
            Some(group) => serde_json::from_value(group.clone()).map_err(wrong)?,
            None => return Err(wrong("it has no config_groups")),
        };
        // Where groups differ, the tensors tell; the first stands for all in memory plans.
        let own = group.format.as_deref().filter(|_| self.format.as_deref() == Some("mixed-precision"));
        let format = own.or(self.format.as_deref()).unwrap_or("");
        let weights = group.weights.ok_or_else(|| wrong("its weights are not quantised"))?;
        let is_float = weights.r#type.as_deref() == Some("float");
        let bits = weights.num_bits.unwrap_or(8);
        let sym = weights.symmetric.unwrap_or(true);
        let is_static =
            group.input_activations.and_then(|activations| activations.dynamic) == Some(Value::Bool(false));
        match (format, is_float, bits) {
            ("float-quantized" | "naive-quantized", true, 8) => {
                let block =
                    weights.block_structure.as_ref().filter(|_| weights.strategy.as_deref() == Some("block"));
                let block = block.map(block_structure).transpose()?;
                Ok(QuantMethod::Fp8 { block, is_static })
            }
            ("int-quantized" | "naive-quantized", false, 8) if sym => Ok(QuantMethod::Int8),
            ("pack-quantized", false, 4 | 8) => {
                let grouped = weights.strategy.as_deref() == Some("group");
                let group_size = if grouped { group_size(weights.group_size)? } else { None };
                Ok(QuantMethod::Packed { bits, group_size, sym })
            }
            ("mxfp4-pack-quantized", true, 4) => Ok(QuantMethod::Mxfp4),
            _ => Err(wrong(format!(
                "compressed-tensors of the format {format:?} with {} of {bits} bits is not supported; \
                 float-quantized (fp8), int-quantized (symmetric int8), pack-quantized (4 or 8 bits) and \
                 mxfp4-pack-quantized are",
                if is_float { "floats" } else { "integers" }
            ))),
        }
    }

    fn ignored(&self) -> Result<Vec<Ignored>, ModelError> {
        let pattern = |text: &str| {
            let anchored = format!("^(?:{text})");
            let found =
                Regex::new(&anchored).map_err(|cause| wrong(format!("the pattern {text:?}: {cause}")))?;
            Ok::<_, ModelError>(Ignored::Pattern(text.to_owned(), found))
        };
        let mut all = Vec::new();
        for name in self.ignore.iter().chain(&self.ignored_layers).flatten() {
            all.push(match name.strip_prefix("re:") {
                Some(text) => pattern(text)?,
                None => Ignored::Name(name.clone()),
            });
        }
        all.extend(self.modules_to_not_convert.iter().flatten().cloned().map(Ignored::Part));
        for text in self.dynamic.iter().flatten().filter_map(|(key, _)| key.strip_prefix("-:")) {
            all.push(pattern(text)?);
        }
        Ok(all)
    }
}

/// -1 is a whole row.
fn group_size(size: Option<i64>) -> Result<Option<usize>, ModelError> {
    match size {
        None | Some(-1) => Ok(None),
        Some(size) if (1..=1 << 20).contains(&size) => Ok(Some(size as usize)),
        Some(size) => Err(wrong(format!("a group_size of {size} makes no sense"))),
    }
}

fn block_size(size: &[usize]) -> Result<(usize, usize), ModelError> {
    match size {
        [rows, cols] if *rows > 0 && *cols > 0 => Ok((*rows, *cols)),
        _ => Err(wrong(format!("weight_block_size is {size:?}; it must be two sizes of at least 1"))),
    }
}

/// `[128, 128]`, in older files the text `128x128`.
fn block_structure(value: &Value) -> Result<(usize, usize), ModelError> {
    let sizes: Option<Vec<usize>> = match value {
        Value::String(text) => text.split('x').map(|size| size.parse().ok()).collect(),
        other => serde_json::from_value(other.clone()).ok(),
    };
    block_size(&sizes.unwrap_or_default())
}

impl fmt::Display for QuantizationConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups = |size: Option<usize>| size.map_or("rows".to_owned(), |size| format!("groups of {size}"));
        match self.method {
            QuantMethod::Fp8 { block, is_static } => {
                write!(f, "fp8 (e4m3)")?;
                if let Some((rows, cols)) = block {
                    write!(f, ", blocks of {rows} x {cols}")?;
                }
                write!(f, ", {} activation scales", if is_static { "static" } else { "dynamic" })
            }
            QuantMethod::Int8 => write!(f, "int8, one scale per row"),
            QuantMethod::Mxfp4 => write!(f, "mxfp4, blocks of 32"),
            QuantMethod::Awq { bits, group_size, .. } => {
                write!(f, "awq, {bits} bits, {}", groups(group_size))
            }
            QuantMethod::Gptq { bits, group_size, desc_act, sym, .. } => {
                let order = if desc_act { ", desc_act" } else { "" };
                let kind = if sym { "symmetric" } else { "with zeros" };
                write!(f, "gptq, {bits} bits, {}, {kind}{order}", groups(group_size))
            }
            QuantMethod::Packed { bits, group_size, sym } => {
                let kind = if sym { "symmetric" } else { "with zeros" };
                write!(f, "compressed-tensors, {bits} bits, {}, {kind}", groups(group_size))
            }
        }
    }
}
