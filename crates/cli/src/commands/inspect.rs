//! `baton inspect`: what is in a model, for people or as JSON. It reads headers only; no weight is loaded.

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Result;
use baton_backend::OpRow;
use baton_core::TokenId;
use baton_model::{
    Architecture, GgufArray, GgufFile, GgufValue, LoadFormat, ModelConfig, ModelFiles, RopeConfig,
    TokenizerSource,
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::InspectArgs;
use crate::commands::program::Listing;
use crate::session::{self, unsupported_dtypes, unsupported_warning};
use crate::size::{grouped, show};
use crate::table::{Align, Table};

/// Longer arrays are shown by their first elements.
const SHOWN_ELEMENTS: usize = 6;
/// Longer strings are cut, in tables only.
const SHOWN_CHARS: usize = 72;

pub fn run(args: &InspectArgs, out: &mut dyn Write) -> Result<()> {
    let found = session::locate(args.model.as_deref())?;
    let files = ModelFiles::open(&found.path, LoadFormat::Auto)?;
    let program = args.program.map(|format| Ok::<_, anyhow::Error>((format, Listing::new(&files)?)));
    let program = program.transpose()?;
    if let Some((format, program)) = program.as_ref().filter(|_| !args.json) {
        return program.print(*format, out);
    }
    let mut inspection = Inspection::new(found.name, &files, args.tensors)?;
    inspection.program = program.map(|(_, program)| program.rows());
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&inspection)?)?;
    } else {
        inspection.print(out)?;
    }
    Ok(())
}

/// The shape of `--json`.
#[derive(Debug, Serialize)]
struct Inspection {
    name: String,
    path: String,
    format: String,
    architecture: Architecture,
    num_parameters: u64,
    num_tensors: usize,
    /// How linear layers are quantised, where the configuration says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    quantization: Option<String>,
    /// 0 where there is a configuration only.
    weight_bytes: u64,
    dtypes: BTreeMap<String, DtypeShare>,
    /// Those of them that no backend computes with: the file cannot run.
    unsupported_dtypes: Vec<String>,
    config: ConfigReport,
    tokenizer: Option<TokenizerReport>,
    chat_template: bool,
    metadata: Option<BTreeMap<String, Value>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<Vec<TensorReport>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<Vec<OpRow>>,
}

#[derive(Debug, Default, Serialize)]
struct DtypeShare {
    tensors: usize,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct ConfigReport {
    max_model_len: usize,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_layers: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    norm_eps: f32,
    activation: String,
    tied_embeddings: bool,
    qk_norm: bool,
    qkv_bias: bool,
    /// The sliding windows of its layers; `null` is full attention.
    attention_windows: Vec<Option<u32>>,
    ropes: Vec<RopeConfig>,
    bos_token_id: Option<TokenId>,
    eos_token_ids: Vec<TokenId>,
}

#[derive(Debug, Serialize)]
struct TokenizerReport {
    kind: String,
    vocab_size: Option<usize>,
}

#[derive(Debug, Serialize)]
struct TensorReport {
    name: String,
    dtype: String,
    /// Rows first.
    shape: Vec<u64>,
    bytes: u64,
}

impl Inspection {
    fn new(name: String, files: &ModelFiles, with_tensors: bool) -> Result<Self> {
        let source = files.describe();
        let tensors = match files.gguf() {
            Some(file) => gguf_tensors(file),
            None => other_tensors(files),
        };
        let mut dtypes: BTreeMap<String, DtypeShare> = BTreeMap::new();
        for tensor in &tensors {
            let share = dtypes.entry(tensor.dtype.clone()).or_default();
            share.tensors += 1;
            share.bytes += tensor.bytes;
        }
        let metadata = files.gguf().map(|file| {
            file.metadata().iter().map(|(key, value)| (key.to_owned(), metadata_json(value))).collect()
        });
        Ok(Self {
            name,
            path: source.path.display().to_string(),
            format: source.kind,
            architecture: files.config().architecture,
            num_parameters: baton_model::num_parameters(files.config()),
            num_tensors: source.num_tensors,
            quantization: files.config().quantization.as_ref().map(ToString::to_string),
            weight_bytes: source.total_bytes,
            dtypes,
            unsupported_dtypes: unsupported_dtypes(files),
            config: config_report(files.config()),
            tokenizer: files.tokenizer_source()?.map(|source| tokenizer_report(&source)),
            chat_template: files.chat_template()?.is_some(),
            metadata,
            tensors: with_tensors.then_some(tensors),
            program: None,
        })
    }

    fn print(&self, out: &mut dyn Write) -> Result<()> {
        writeln!(out, "{}\n", self.name)?;
        write!(out, "{}", self.summary())?;
        if let Some(warning) = unsupported_warning(&self.unsupported_dtypes) {
            writeln!(out, "\nwarning: {warning}")?;
        }
        if let Some(metadata) = &self.metadata {
            let mut table = Table::new(&[Align::Left, Align::Left]);
            for (key, value) in metadata {
                table.row([key, &metadata_text(value)]);
            }
            write!(out, "\nmetadata\n{table}")?;
        }
        if let Some(tensors) = &self.tensors {
            let mut table = Table::new(&[Align::Left, Align::Left, Align::Right, Align::Right]);
            table.row(["TENSOR", "DTYPE", "SHAPE", "BYTES"]);
            for tensor in tensors {
                let shape = tensor.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(" × ");
                table.row([&tensor.name, &tensor.dtype, &shape, &grouped(tensor.bytes)]);
            }
            write!(out, "\n{table}")?;
        }
        Ok(())
    }

    fn summary(&self) -> Table {
        let config = &self.config;
        let dtypes = self
            .dtypes
            .iter()
            .map(|(name, share)| format!("{name} × {} ({})", share.tensors, show(share.bytes)));
        let weights = if self.num_tensors == 0 {
            "none here".to_owned()
        } else {
            format!(
                "{} in {} tensors: {}",
                show(self.weight_bytes),
                self.num_tensors,
                dtypes.collect::<Vec<_>>().join(", ")
            )
        };
        let heads = format!(
            "{} query, {} key/value, of {} each",
            config.num_heads, config.num_kv_heads, config.head_dim
        );
        let windows = config.attention_windows.iter().map(|window| match window {
            None => "full".to_owned(),
            Some(window) => format!("window of {window}"),
        });
        let ropes = config.ropes.iter().map(|rope| {
            let scaling = serde_json::to_value(&rope.scaling).ok();
            let kind =
                scaling.as_ref().and_then(|value| value["rope_type"].as_str()).unwrap_or("none").to_owned();
            format!("theta {}, {} dimensions, scaling {kind}", rope.theta, rope.rotary_dim)
        });
        let tokenizer = self.tokenizer.as_ref().map_or_else(
            || "none here".to_owned(),
            |tokenizer| match tokenizer.vocab_size {
                Some(size) => format!("{}, {} tokens", tokenizer.kind, grouped(size as u64)),
                None => tokenizer.kind.clone(),
            },
        );
        let ends = config.eos_token_ids.iter().map(TokenId::to_string).collect::<Vec<_>>().join(", ");
        let begin = config.bos_token_id.map_or_else(|| "none".to_owned(), |token| token.to_string());
        let mut table = Table::new(&[Align::Left, Align::Left]);
        table.row(["path", &self.path]);
        table.row(["format", &self.format]);
        table.row(["architecture", &format!("{:?}", self.architecture)]);
        table.row(["parameters", &grouped(self.num_parameters)]);
        table.row(["weights", &weights]);
        if let Some(quantization) = &self.quantization {
            table.row(["quantization", quantization]);
        }
        table.row(["context", &format!("{} tokens", grouped(config.max_model_len as u64))]);
        table.row(["layers", &config.num_layers.to_string()]);
        table.row([
            "hidden",
            &format!("{}, MLP {} ({})", config.hidden_size, config.intermediate_size, config.activation),
        ]);
        table.row(["heads", &heads]);
        table.row(["attention", &windows.collect::<Vec<_>>().join(", ")]);
        let ropes = ropes.collect::<Vec<_>>().join("; ");
        table.row(["rope", if ropes.is_empty() { "none: positions are learned" } else { &ropes }]);
        table.row([
            "vocabulary",
            &format!("{}, begin {begin}, end {ends}", grouped(config.vocab_size as u64)),
        ]);
        table.row(["tokenizer", &tokenizer]);
        table.row(["chat template", if self.chat_template { "yes" } else { "no" }]);
        table
    }
}

fn config_report(config: &ModelConfig) -> ConfigReport {
    ConfigReport {
        max_model_len: config.max_model_len,
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_layers: config.layers.len(),
        num_heads: config.num_heads,
        num_kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
        norm_eps: config.norm_eps,
        activation: format!("{:?}", config.activation).to_lowercase(),
        tied_embeddings: config.tied_embeddings,
        qk_norm: config.qk_norm,
        qkv_bias: config.qkv_bias,
        attention_windows: config.attention_kinds(),
        ropes: config.ropes.clone(),
        bos_token_id: config.bos_token_id,
        eos_token_ids: config.eos_token_ids.clone(),
    }
}

fn tokenizer_report(source: &TokenizerSource) -> TokenizerReport {
    match source {
        TokenizerSource::HuggingFace { .. } => {
            TokenizerReport { kind: "tokenizer.json".to_owned(), vocab_size: None }
        }
        TokenizerSource::Gguf(vocab) => {
            let kind = match &vocab.pre {
                Some(pre) => format!("{} ({pre})", vocab.model),
                None => vocab.model.clone(),
            };
            TokenizerReport { kind, vocab_size: Some(vocab.tokens.len()) }
        }
    }
}

fn gguf_tensors(file: &GgufFile) -> Vec<TensorReport> {
    let report = |tensor: &baton_model::GgufTensor| TensorReport {
        name: tensor.name.clone(),
        dtype: tensor.ggml_type.name().to_owned(),
        shape: tensor.dims.iter().rev().copied().collect(),
        bytes: tensor.bytes,
    };
    file.tensors().iter().map(report).collect()
}

/// Tensors that no kernel can use are listed all the same, by their name.
fn other_tensors(files: &ModelFiles) -> Vec<TensorReport> {
    let Ok(weights) = files.weights() else { return Vec::new() };
    let report = |name: String| match weights.tensor(&name) {
        Ok(Some(tensor)) => TensorReport {
            dtype: tensor.format().to_string(),
            shape: if tensor.rows() == 1 {
                vec![tensor.cols() as u64]
            } else {
                vec![tensor.rows() as u64, tensor.cols() as u64]
            },
            bytes: tensor.num_bytes() as u64,
            name,
        },
        _ => TensorReport { name, dtype: "unsupported".to_owned(), shape: Vec::new(), bytes: 0 },
    };
    weights.names().into_iter().map(report).collect()
}

fn metadata_json(value: &GgufValue) -> Value {
    match value {
        GgufValue::U8(value) => json!(value),
        GgufValue::I8(value) => json!(value),
        GgufValue::U16(value) => json!(value),
        GgufValue::I16(value) => json!(value),
        GgufValue::U32(value) => json!(value),
        GgufValue::I32(value) => json!(value),
        GgufValue::U64(value) => json!(value),
        GgufValue::I64(value) => json!(value),
        // The shortest digits that mean the same f32, not those of the f64 it is widened to.
        GgufValue::F32(value) => json!(value.to_string().parse::<f64>().unwrap_or(f64::NAN)),
        GgufValue::F64(value) => json!(value),
        GgufValue::Bool(value) => json!(value),
        GgufValue::String(value) => json!(value),
        GgufValue::Array(array) => array_json(array),
    }
}

/// `{"type", "len", "first"}`: a vocabulary of a hundred thousand strings helps nobody here.
fn array_json(array: &GgufArray) -> Value {
    fn part<T: Serialize>(kind: &str, values: &[T]) -> Value {
        json!({ "type": kind, "len": values.len(), "first": values[..values.len().min(SHOWN_ELEMENTS)] })
    }
    match array {
        GgufArray::U8(values) => part("u8", values),
        GgufArray::I8(values) => part("i8", values),
        GgufArray::U16(values) => part("u16", values),
        GgufArray::I16(values) => part("i16", values),
        GgufArray::U32(values) => part("u32", values),
        GgufArray::I32(values) => part("i32", values),
        GgufArray::U64(values) => part("u64", values),
        GgufArray::I64(values) => part("i64", values),
        GgufArray::F32(values) => part("f32", values),
        GgufArray::F64(values) => part("f64", values),
        GgufArray::Bool(values) => part("bool", values),
        GgufArray::String(values) => part("string", values),
        GgufArray::Array(values) => {
            let shown: Vec<Value> = values.iter().take(SHOWN_ELEMENTS).map(array_json).collect();
            json!({ "type": "array", "len": values.len(), "first": shown })
        }
    }
}

/// One line, whatever a file put into its strings: control characters are escaped.
fn metadata_text(value: &Value) -> String {
    let text = match value {
        Value::String(text) => escape_controls(text),
        Value::Object(array) => {
            let first = array["first"].as_array().map(Vec::as_slice).unwrap_or_default();
            let shown = first.iter().map(Value::to_string).collect::<Vec<_>>().join(", ");
            let more = array["len"].as_u64().unwrap_or(0) > first.len() as u64;
            let (kind, len) = (array["type"].as_str().unwrap_or(""), &array["len"]);
            format!("{kind}[{len}] {shown}{}", if more { ", …" } else { "" })
        }
        other => other.to_string(),
    };
    if text.chars().count() <= SHOWN_CHARS {
        return text;
    }
    text.chars().take(SHOWN_CHARS).chain(['…']).collect()
}

fn escape_controls(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            out.extend(c.escape_debug());
        } else {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_are_cut_and_control_characters_escaped() {
        let long = metadata_json(&GgufValue::Array(GgufArray::I32((0..100).collect())));
        assert_eq!(metadata_text(&long), "i32[100] 0, 1, 2, 3, 4, 5, …");
        let short = metadata_json(&GgufValue::Array(GgufArray::String(vec!["a".to_owned()])));
        assert_eq!(metadata_text(&short), "string[1] \"a\"");
        assert_eq!(metadata_text(&json!("\u{1b}[31mred's\n")), "\\u{1b}[31mred's\\n");
        assert_eq!(metadata_text(&metadata_json(&GgufValue::F32(1e-5))), "0.00001");
        assert_eq!(metadata_text(&json!("x".repeat(100))).chars().count(), SHOWN_CHARS + 1);
    }
}
