//! `baton quantize`: a model in another format, as a file that others read. A GGUF file becomes a GGUF file with the same
//! metadata; a directory of safetensors becomes one whose linear layers are e4m3 or int8 with a scale per row, which vLLM and
//! transformers know as compressed-tensors.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use baton_backend::{Tensor, WeightFormat, quant};
use serde_json::{Map, Value, json};

use crate::gguf::{GgufFile, GgufValue, Planned, write_gguf};
use crate::quantization::round_tensor;
use crate::tensor_names::{Role, expected_tensors, is_transposed};
use crate::{LoadProgress, ModelError, ModelFiles, WeightSource};

/// What a model is quantised to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportFormat {
    /// A GGUF file: matrices in this format, the embedding and the head in one of more bits.
    Gguf(WeightFormat),
    /// A directory of safetensors: linear layers in e4m3.
    Fp8,
    /// The same in integers of eight bits.
    Int8,
}

/// Names on the command line, with llama.cpp's number of the file type.
const GGUF_FORMATS: [(&str, WeightFormat, u32); 9] = [
    ("f16", WeightFormat::F16, 1),
    ("bf16", WeightFormat::BF16, 32),
    ("q4_0", WeightFormat::Q4_0, 2),
    ("q4_1", WeightFormat::Q4_1, 3),
    ("q5_0", WeightFormat::Q5_0, 8),
    ("q5_1", WeightFormat::Q5_1, 9),
    ("q8_0", WeightFormat::Q8_0, 7),
    ("q4_k", WeightFormat::Q4_K, 14),
    ("q6_k", WeightFormat::Q6_K, 18),
];

impl std::str::FromStr for ExportFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.to_ascii_lowercase();
        if let Some((_, format, _)) = GGUF_FORMATS.iter().find(|(name, ..)| *name == text) {
            return Ok(Self::Gguf(*format));
        }
        match text.as_str() {
            "fp8" => Ok(Self::Fp8),
            "int8" => Ok(Self::Int8),
            _ => {
                let names: Vec<&str> = GGUF_FORMATS.iter().map(|(name, ..)| *name).collect();
                Err(format!("for a GGUF file use {}; for safetensors fp8 or int8", names.join(", ")))
            }
        }
    }
}

fn wrong(what: impl Into<String>) -> ModelError {
    ModelError::Config { what: what.into() }
}

fn failed(path: &Path) -> impl Fn(io::Error) -> ModelError + '_ {
    move |cause| ModelError::Io { path: path.to_owned(), cause }
}

/// Writes the model to `out`, a file for GGUF, else a directory, which must not exist.
pub fn quantize(
    files: &ModelFiles,
    format: ExportFormat,
    out: &Path,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<(), ModelError> {
    if out.exists() {
        return Err(wrong(format!("{} is there already; give a new name", out.display())));
    }
    match (format, files.gguf()) {
        (ExportFormat::Gguf(format), Some(file)) => to_gguf(file, format, out, progress),
        (ExportFormat::Gguf(_), None) => Err(wrong(
            "a GGUF file is made of a GGUF file: convert the directory with llama.cpp's convert_hf_to_gguf.py, or use \
             --format fp8 or int8",
        )),
        (_, None) => to_safetensors(files, format, out, progress),
        (_, Some(_)) => Err(wrong(
            "safetensors are made of a directory of safetensors; for a GGUF file use --format q4_k",
        )),
    }
}

/// What a tensor becomes. Vectors and what no kernel knows stay; embedding and head keep more bits; rows that are no whole
/// blocks of 256 get the block of 32 with the next more bits, as llama.cpp does it.
fn gguf_format(name: &str, dims: &[u64], stored: WeightFormat, wanted: WeightFormat) -> WeightFormat {
    let is_matrix =
        dims.len() > 1 && name.ends_with(".weight") && !name.contains("norm") && !name.contains("_inp");
    if !is_matrix || name.starts_with("position_embd") || name.starts_with("rope_freqs") {
        return stored;
    }
    let is_table = name.starts_with("token_embd") || name.starts_with("output.");
    let wanted = match wanted {
        WeightFormat::Q4_K if is_table => WeightFormat::Q6_K,
        WeightFormat::Q4_0 | WeightFormat::Q4_1 | WeightFormat::Q5_0 | WeightFormat::Q5_1 if is_table => {
            WeightFormat::Q8_0
        }
        other => other,
    };
    let fits = |format: WeightFormat| dims[0].is_multiple_of(format.block_len() as u64);
    match wanted {
        _ if fits(wanted) => wanted,
        WeightFormat::Q4_K if fits(WeightFormat::Q5_0) => WeightFormat::Q5_0,
        WeightFormat::Q6_K if fits(WeightFormat::Q8_0) => WeightFormat::Q8_0,
        _ => WeightFormat::F16,
    }
}

fn to_gguf(
    file: &GgufFile,
    wanted: WeightFormat,
    out: &Path,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<(), ModelError> {
    let mut metadata: Vec<(String, GgufValue)> = file
        .metadata()
        .iter()
        .filter(|(key, _)| {
            !key.starts_with("split.")
                && !matches!(*key, "general.file_type" | "general.quantization_version")
        })
        .map(|(key, value)| (key.to_owned(), value.clone()))
        .collect();
    let number =
        GGUF_FORMATS.iter().find(|(_, format, _)| *format == wanted).map_or(0, |(.., number)| *number);
    metadata.push(("general.file_type".to_owned(), GgufValue::U32(number)));
    metadata.push(("general.quantization_version".to_owned(), GgufValue::U32(2)));
    let mut tensors = Vec::new();
    for tensor in file.tensors() {
        let stored = tensor.ggml_type.weight_format();
        let stored = stored.ok_or_else(|| {
            wrong(format!(
                "tensor {:?} has the type {}, which is not supported",
                tensor.name,
                tensor.ggml_type.name()
            ))
        })?;
        let format = gguf_format(&tensor.name, &tensor.dims, stored, wanted);
        let values: u64 = tensor.dims.iter().product();
        let bytes = values / format.block_len() as u64 * format.block_bytes() as u64;
        tensors.push(Planned { name: tensor.name.clone(), dims: tensor.dims.clone(), format, bytes });
    }
    let total_bytes = file.total_bytes();
    let mut done_bytes = 0;
    let written = File::create(out).map_err(failed(out)).and_then(|created| {
        let mut writer = BufWriter::with_capacity(1 << 20, created);
        write_gguf(&mut writer, &metadata, &tensors, |planned| {
            let tensor = file
                .tensor(&planned.name)?
                .ok_or_else(|| wrong(format!("tensor {:?} is gone", planned.name)))?;
            done_bytes += tensor.num_bytes() as u64;
            progress(LoadProgress { done_bytes, total_bytes });
            if tensor.format() == planned.format {
                return Ok(tensor);
            }
            let rounded = round_tensor(&tensor, planned.format);
            rounded.map_err(|cause| wrong(format!("tensor {:?}: {cause}", planned.name)).into())
        })
        .map_err(|error: WriteError| error.named(out))?;
        writer.flush().map_err(failed(out))
    });
    written.inspect_err(|_| drop(fs::remove_file(out)))
}

/// Of the writer, or of what is written.
enum WriteError {
    Io(io::Error),
    Model(ModelError),
}

impl From<io::Error> for WriteError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<ModelError> for WriteError {
    fn from(error: ModelError) -> Self {
        Self::Model(error)
    }
}

impl WriteError {
    fn named(self, path: &Path) -> ModelError {
        match self {
            Self::Io(cause) => ModelError::Io { path: path.to_owned(), cause },
            Self::Model(error) => error,
        }
    }
}

/// One tensor of a safetensors file.
struct Entry {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn to_safetensors(
    files: &ModelFiles,
    format: ExportFormat,
    out: &Path,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<(), ModelError> {
    let config = files.config();
    if config.quantization.is_some() {
        return Err(wrong("the checkpoint is quantised already; take the one it was made of"));
    }
    let directory = if files.path().is_dir() { files.path().to_owned() } else { parent(files.path()) };
    let weights = files.stored_weights()?;
    let expected = expected_tensors(config);
    let is_linear = |tensor: &crate::tensor_names::ExpectedTensor| {
        !tensor.is_bias
            && !tensor.role.is_norm()
            && !tensor.role.is_table()
            && tensor.role != Role::Expert
            && !is_transposed(config, tensor.role)
    };
    fs::create_dir_all(out).map_err(failed(out))?;
    let data_path = out.join("tensors.partial");
    let mut header = Map::new();
    let mut offset = 0_usize;
    let total_bytes = weights.total_bytes();
    let mut done_bytes = 0;
    // Readers take every linear module for quantised that is not named here.
    let mut ignored = vec!["lm_head".to_owned()];
    {
        let mut data =
            BufWriter::with_capacity(1 << 20, File::create(&data_path).map_err(failed(&data_path))?);
        for name in weights.names() {
            let Some(tensor) = weights.tensor(&name)? else { continue };
            let linear = expected.iter().find(|expected| expected.name == name).is_some_and(is_linear);
            let shape = files.stored_shape(&name).unwrap_or_default().to_vec();
            let module = name.strip_suffix(".weight").filter(|_| !linear && shape.len() > 1);
            ignored.extend(module.filter(|module| *module != "lm_head").map(str::to_owned));
            let entries =
                if linear { rounded(&name, &tensor, format)? } else { vec![kept(&name, &tensor, shape)] };
            for entry in entries {
                let end = offset + entry.bytes.len();
                let described =
                    json!({"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, end]});
                header.insert(entry.name, described);
                data.write_all(&entry.bytes).map_err(failed(&data_path))?;
                offset = end;
            }
            done_bytes += tensor.num_bytes() as u64;
            progress(LoadProgress { done_bytes, total_bytes });
        }
        data.flush().map_err(failed(&data_path))?;
    }
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    join(&out.join("model.safetensors"), &header, &data_path)?;
    copy_others(&directory, out)?;
    write_config(&directory, out, format, &ignored)
}

fn parent(path: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new(".")).to_owned()
}

/// The header, padded to eight bytes, before the data.
fn join(path: &Path, header: &Map<String, Value>, data: &Path) -> Result<(), ModelError> {
    let mut text = serde_json::to_vec(header).map_err(|cause| wrong(cause.to_string()))?;
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut file = File::create(path).map_err(failed(path))?;
    file.write_all(&(text.len() as u64).to_le_bytes())
        .and_then(|()| file.write_all(&text))
        .map_err(failed(path))?;
    let mut source = File::open(data).map_err(failed(data))?;
    io::copy(&mut source, &mut file).map_err(failed(path))?;
    fs::remove_file(data).map_err(failed(data))
}

fn kept(name: &str, tensor: &Tensor, shape: Vec<usize>) -> Entry {
    let dtype = match tensor.format() {
        WeightFormat::F32 => "F32",
        WeightFormat::F16 => "F16",
        _ => "BF16",
    };
    Entry { name: name.to_owned(), dtype, shape, bytes: tensor.bytes().to_vec() }
}

/// A linear layer with its scales.
fn rounded(name: &str, tensor: &Tensor, format: ExportFormat) -> Result<Vec<Entry>, ModelError> {
    let (rows, cols) = (tensor.rows(), tensor.cols());
    let (dtype, bytes, scales) = if format == ExportFormat::Fp8 {
        let rounded = round_tensor(tensor, WeightFormat::F8_E4M3);
        let rounded = rounded.map_err(|cause| wrong(format!("tensor {name:?}: {cause}")))?;
        let scales: Vec<f32> =
            (0..rows).map(|row| rounded.scales().map_or(1.0, |scales| scales.row(row)[0])).collect();
        ("F8_E4M3", rounded.bytes().to_vec(), scales)
    } else {
        let (mut bytes, mut scales, mut values) =
            (Vec::with_capacity(rows * cols), Vec::new(), vec![0.0_f32; cols]);
        for row in 0..rows {
            quant::dequantize_row(tensor.format(), tensor.row(row), &mut values);
            let largest = values.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
            if !largest.is_finite() {
                return Err(wrong(format!("tensor {name:?}: row {row} has values that are not finite")));
            }
            let scale = if largest > 0.0 { largest / 127.0 } else { 1.0 };
            bytes.extend(values.iter().map(|value| (value / scale).round() as i8 as u8));
            scales.push(scale);
        }
        ("I8", bytes, scales)
    };
    let scale_bytes = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    Ok(vec![
        Entry { name: name.to_owned(), dtype, shape: vec![rows, cols], bytes },
        Entry { name: format!("{name}_scale"), dtype: "F32", shape: vec![rows, 1], bytes: scale_bytes },
    ])
}

/// Tokenizer, templates, sampling defaults: all that is no weight and not the configuration.
fn copy_others(from: &Path, to: &Path) -> Result<(), ModelError> {
    for entry in fs::read_dir(from).map_err(failed(from))? {
        let path = entry.map_err(failed(from))?.path();
        let name = path.file_name().unwrap_or_default();
        let text = name.to_string_lossy();
        let is_weights =
            [".safetensors", ".bin", ".pth", ".gguf", ".index.json"].iter().any(|end| text.ends_with(end));
        if path.is_file() && !is_weights && text != "config.json" {
            fs::copy(&path, to.join(name)).map_err(failed(&path))?;
        }
    }
    Ok(())
}

fn write_config(from: &Path, to: &Path, format: ExportFormat, ignored: &[String]) -> Result<(), ModelError> {
    let path = from.join("config.json");
    let bytes = fs::read(&path).map_err(failed(&path))?;
    let mut config: Map<String, Value> = serde_json::from_slice(&bytes)
        .map_err(|cause| wrong(format!("config.json is not usable: {cause}")))?;
    let (kind, name) =
        if format == ExportFormat::Fp8 { ("float", "float-quantized") } else { ("int", "int-quantized") };
    let values = |strategy: &str, dynamic: bool| json!({"num_bits": 8, "type": kind, "symmetric": true, "strategy": strategy, "dynamic": dynamic});
    let group = json!({"targets": ["Linear"], "weights": values("channel", false), "input_activations": values("token", true)});
    let quantization = json!({
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    });
    config.insert("quantization_config".to_owned(), quantization);
    let path = to.join("config.json");
    let text = serde_json::to_string_pretty(&config).map_err(|cause| wrong(cause.to_string()))?;
    fs::write(&path, text + "\n").map_err(failed(&path))
}
