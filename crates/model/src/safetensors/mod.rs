//! Safetensors checkpoints: one file, or shards listed by `model.safetensors.index.json`, memory-mapped.
//!
//! The header (130 lines) is parsed here. The `safetensors` crate, which the tests write files with, does not name the tensor
//! whose shape does not fit its bytes, takes the last of two tensors with the same name, and refuses a whole file for one dtype it
//! does not know, even if that tensor is never read.

mod header;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use baton_backend::{SharedBytes, Tensor, WeightFormat};
use serde::Deserialize;

use crate::mapped_file::{malformed, map, read_bounded};
use crate::{ModelError, WeightSource};
use header::parse_header;

const MAX_INDEX_BYTES: u64 = 64 << 20;
const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// A tensor of a checkpoint, as the header lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SafetensorsEntry {
    pub dtype: String,
    pub shape: Vec<usize>,
    shard: usize,
    range: Range<usize>,
}

/// A tensor that need not be one of weights. Its bytes are exactly what dtype and shape need.
#[derive(Clone, Debug)]
pub(crate) struct RawTensor {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: SharedBytes,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    bytes: SharedBytes,
}

/// An open checkpoint of one or more safetensors files.
#[derive(Debug, Default)]
pub struct Safetensors {
    shards: Vec<Shard>,
    tensors: BTreeMap<String, SafetensorsEntry>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Safetensors {
    /// The weights in a directory: `model.safetensors`, else what the index lists, else every `*.safetensors`.
    /// `None` if there are none.
    pub fn open_directory(directory: &Path) -> Result<Option<Self>, ModelError> {
        let single = directory.join(SINGLE_FILE);
        if single.exists() {
            return Self::open_files(&[single]).map(Some);
        }
        let index = directory.join(INDEX_FILE);
        if index.exists() {
            return Self::open_index(&index).map(Some);
        }
        let files = loose_files(directory)?;
        if files.is_empty() { Ok(None) } else { Self::open_files(&files).map(Some) }
    }

    /// Files that together are a checkpoint.
    pub fn open_files(paths: &[PathBuf]) -> Result<Self, ModelError> {
        let mut checkpoint = Self::default();
        for path in paths {
            checkpoint.add_shard(path, map(path)?)?;
        }
        Ok(checkpoint)
    }

    /// A file that already is in memory. `path` is only named in errors.
    pub fn from_bytes(path: &Path, bytes: SharedBytes) -> Result<Self, ModelError> {
        let mut checkpoint = Self::default();
        checkpoint.add_shard(path, bytes)?;
        Ok(checkpoint)
    }

    /// The shards that an index lists, which must hold what it says.
    pub fn open_index(index_path: &Path) -> Result<Self, ModelError> {
        let bytes = read_bounded(index_path, MAX_INDEX_BYTES)?;
        let index: Index =
            serde_json::from_slice(&bytes).map_err(|cause| malformed(index_path, cause.to_string()))?;
        let mut files: Vec<&str> = Vec::new();
        for (tensor, file) in &index.weight_map {
            if !is_plain_name(file) {
                let cause =
                    format!("it places {tensor:?} in {file:?}, which is not the name of a file beside it");
                return Err(malformed(index_path, cause));
            }
            files.push(file);
        }
        files.sort_unstable();
        files.dedup();
        let paths: Vec<PathBuf> = files.iter().map(|file| index_path.with_file_name(file)).collect();
        let checkpoint = Self::open_files(&paths)?;
        for (tensor, file) in &index.weight_map {
            let shard = checkpoint.tensors.get(tensor).map(|entry| &checkpoint.shards[entry.shard].path);
            if shard.and_then(|path| path.file_name()) != Some(file.as_ref()) {
                return Err(malformed(
                    index_path,
                    format!("it places {tensor:?} in {file:?}, which lacks it"),
                ));
            }
        }
        Ok(checkpoint)
    }

    /// The header's entry of a tensor.
    pub fn entry(&self, name: &str) -> Option<&SafetensorsEntry> {
        self.find(name).map(|(_, entry)| entry)
    }

    /// The format of a tensor, `None` if it is absent or of a dtype that is not supported.
    pub(crate) fn format(&self, name: &str) -> Option<WeightFormat> {
        self.find(name).and_then(|(_, entry)| weight_format(&entry.dtype))
    }

    /// A tensor of any dtype, as it lies in the file.
    pub(crate) fn raw(&self, name: &str) -> Result<Option<RawTensor>, ModelError> {
        let Some((name, entry)) = self.find(name) else { return Ok(None) };
        let shard = &self.shards[entry.shard];
        if entry.range.is_empty() {
            return Err(malformed(&shard.path, format!("tensor {name:?} of {:?} is empty", entry.shape)));
        }
        let bytes = shard.bytes.slice(entry.range.clone()).expect("ranges were checked with the header");
        let (dtype, shape) = (entry.dtype.clone(), entry.shape.clone());
        Ok(Some(RawTensor { name: name.clone(), dtype, shape, bytes }))
    }

    fn add_shard(&mut self, path: &Path, bytes: SharedBytes) -> Result<(), ModelError> {
        let tensors = parse_header(bytes.as_slice()).map_err(|cause| malformed(path, cause))?;
        let shard = self.shards.len();
        for (name, tensor) in tensors {
            let entry =
                SafetensorsEntry { dtype: tensor.dtype, shape: tensor.shape, shard, range: tensor.range };
            if self.tensors.insert(name.clone(), entry).is_some() {
                return Err(malformed(path, format!("tensor {name:?} is in an earlier shard already")));
            }
        }
        self.shards.push(Shard { path: path.to_owned(), bytes });
        Ok(())
    }

    /// Looks a name up as it is, then under the prefixes of multimodal checkpoints' language models.
    fn find(&self, name: &str) -> Option<(&String, &SafetensorsEntry)> {
        let mut candidates = vec![name.to_owned(), format!("language_model.{name}")];
        if let Some(rest) = name.strip_prefix("model.") {
            candidates.push(format!("model.language_model.{rest}"));
        }
        candidates.iter().find_map(|candidate| self.tensors.get_key_value(candidate))
    }
}

impl WeightSource for Safetensors {
    fn tensor(&self, name: &str) -> Result<Option<Tensor>, ModelError> {
        let Some((_, entry)) = self.find(name) else { return Ok(None) };
        let shard = &self.shards[entry.shard];
        let fail = |cause: String| malformed(&shard.path, format!("tensor {name:?} {cause}"));
        let format = weight_format(&entry.dtype).ok_or_else(|| {
            fail(format!(
                "has the dtype {}; only F32, F16 and BF16 are supported without a quantization_config",
                entry.dtype
            ))
        })?;
        if entry.range.is_empty() {
            return Err(fail(format!("of {:?} is empty", entry.shape)));
        }
        let cols = entry.shape.last().copied().unwrap_or(1);
        let rows = (entry.range.len() / format.block_bytes()) / cols;
        let bytes = shard.bytes.slice(entry.range.clone()).expect("ranges were checked with the header");
        Tensor::new(format, rows, cols, bytes)
            .map(Some)
            .map_err(|cause| ModelError::Tensor { name: name.to_owned(), cause })
    }

    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|entry| entry.range.len() as u64).sum()
    }
}

fn weight_format(dtype: &str) -> Option<WeightFormat> {
    match dtype {
        "F32" => Some(WeightFormat::F32),
        "F16" => Some(WeightFormat::F16),
        "BF16" => Some(WeightFormat::BF16),
        _ => None,
    }
}

/// True for a name without directories. Links are followed: the cache of the Hub is made of them.
fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let first = components.next();
    matches!(first, Some(Component::Normal(part)) if part == name)
        && components.next().is_none()
        && !name.contains(['/', '\\'])
}

/// Every `*.safetensors` except Mistral's `consolidated*`, which holds the same weights under other names.
fn loose_files(directory: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let io = |cause| ModelError::Io { path: directory.to_owned(), cause };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_safetensors = path.extension().is_some_and(|extension| extension == "safetensors");
        if is_safetensors && !name.starts_with("consolidated") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
