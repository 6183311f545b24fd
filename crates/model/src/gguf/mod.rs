//! GGUF files, version 2 and 3, little-endian, memory-mapped, whole or split into numbered parts.
//!
//! [`GgufFile`] checks every size when it is opened and hands out tensors that share the mapping. It does not
//! interpret the metadata: `config` makes a [`crate::ModelConfig`] of it, `files` a vocabulary.

mod cursor;
mod ggml_type;
mod parse;
#[cfg(test)]
mod tests;
mod value;
mod write;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use baton_backend::{SharedBytes, Tensor, WeightFormat};

pub use ggml_type::GgmlType;
pub use value::{GgufArray, GgufMetadata, GgufValue};
pub(crate) use write::{Planned, write_gguf};

use crate::mapped_file::{malformed, map};
use crate::quantization::Mxfp4;
use crate::{ModelError, WeightSource};
use parse::{ParsedFile, ParsedTensor, parse};

/// Models are never split into more parts than this.
const MAX_PARTS: u64 = 1000;

/// A tensor of a GGUF file, as its table lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    pub name: String,
    /// As in the file: the length of a row first.
    pub dims: Vec<u64>,
    pub ggml_type: GgmlType,
    pub bytes: u64,
    part: usize,
    range: Range<usize>,
}

impl GgufTensor {
    /// In the format that backends get; `None` for types that they do not support.
    pub fn loaded_bytes(&self) -> Option<u64> {
        let format = self.ggml_type.weight_format()?;
        let rows = self.dims[1..].iter().product::<u64>();
        (format.row_bytes(self.dims[0] as usize)? as u64).checked_mul(rows)
    }
}

/// An open GGUF model: the metadata of its first part and the tensors of all.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    version: u32,
    metadata: GgufMetadata,
    tensors: Vec<GgufTensor>,
    by_name: HashMap<String, usize>,
    parts: Vec<SharedBytes>,
}

impl GgufFile {
    /// Opens a file, and with the first part of a split model (`…-00001-of-00003.gguf`) all its other parts.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let mut file = Self::from_bytes(path, map(path)?)?;
        let count = file.split_number("split.count")?.unwrap_or(1);
        if count > 1 {
            file.open_other_parts(count)?;
        }
        Ok(file)
    }

    /// A file that already is in memory. `path` is only named in errors.
    pub fn from_bytes(path: &Path, bytes: SharedBytes) -> Result<Self, ModelError> {
        let ParsedFile { version, metadata, tensors } =
            parse(bytes.as_slice()).map_err(|cause| malformed(path, cause))?;
        let mut file = Self {
            path: path.to_owned(),
            version,
            metadata,
            tensors: Vec::new(),
            by_name: HashMap::new(),
            parts: Vec::new(),
        };
        file.add_part(path, bytes, tensors)?;
        Ok(file)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    pub fn metadata(&self) -> &GgufMetadata {
        &self.metadata
    }

    /// All tensors in the order of the file, those of unsupported types too.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    pub fn find(&self, name: &str) -> Option<&GgufTensor> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }

    fn add_part(
        &mut self,
        path: &Path,
        bytes: SharedBytes,
        tensors: Vec<ParsedTensor>,
    ) -> Result<(), ModelError> {
        let part = self.parts.len();
        for ParsedTensor { name, dims, ggml_type, range } in tensors {
            if self.by_name.insert(name.clone(), self.tensors.len()).is_some() {
                return Err(malformed(path, format!("tensor {name:?} is in an earlier part already")));
            }
            self.tensors.push(GgufTensor { name, dims, ggml_type, bytes: range.len() as u64, part, range });
        }
        self.parts.push(bytes);
        Ok(())
    }

    fn open_other_parts(&mut self, count: u64) -> Result<(), ModelError> {
        let fail = |cause| malformed(&self.path, cause);
        if count > MAX_PARTS {
            return Err(fail(format!("split.count is {count}; at most {MAX_PARTS} parts are possible")));
        }
        let suffix = format!("-00001-of-{count:05}.gguf");
        let name = self.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Some(stem) =
            name.strip_suffix(&suffix).filter(|_| self.split_number("split.no").ok() == Some(Some(0)))
        else {
            return Err(fail(format!(
                "it is one of {count} parts of a split model; give the first, whose name ends in {suffix:?}"
            )));
        };
        let stem = stem.to_owned();
        for number in 2..=count {
            let path = self.path.with_file_name(format!("{stem}-{number:05}-of-{count:05}.gguf"));
            let bytes = map(&path)?;
            let parsed = parse(bytes.as_slice()).map_err(|cause| malformed(&path, cause))?;
            let index = parsed.metadata.get_u64("split.no").map_err(|cause| malformed(&path, cause))?;
            if index != Some(number - 1) {
                return Err(malformed(&path, format!("split.no is {index:?}, expected {}", number - 1)));
            }
            self.add_part(&path, bytes, parsed.tensors)?;
        }
        let expected = self.split_number("split.tensors.count")?;
        if expected.is_some_and(|expected| expected != self.tensors.len() as u64) {
            let found = self.tensors.len();
            return Err(malformed(&self.path, format!("split.tensors.count is {expected:?}, found {found}")));
        }
        Ok(())
    }

    fn format(&self, tensor: &GgufTensor) -> Result<WeightFormat, ModelError> {
        tensor.ggml_type.weight_format().ok_or_else(|| {
            let cause = format!(
                "tensor {:?} has the type {}, which is not supported; use a file quantised as Q4_K_M, Q8_0 or another of \
                 the supported types",
                tensor.name,
                tensor.ggml_type.name()
            );
            malformed(&self.path, cause)
        })
    }

    fn split_number(&self, key: &str) -> Result<Option<u64>, ModelError> {
        self.metadata.get_u64(key).map_err(|cause| malformed(&self.path, cause))
    }
}

impl WeightSource for GgufFile {
    fn tensor(&self, name: &str) -> Result<Option<Tensor>, ModelError> {
        let Some(entry) = self.find(name) else { return Ok(None) };
        let format = self.format(entry)?;
        // Within usize: the bytes of at least one per 256 values lie in memory, and the product was checked.
        let cols = entry.dims[0] as usize;
        let rows = entry.dims[1..].iter().product::<u64>() as usize;
        let bytes = self.parts[entry.part]
            .slice(entry.range.clone())
            .expect("ranges were checked against the part when it was opened");
        if entry.ggml_type.is_mxfp4() {
            let tensor = Mxfp4::Gguf(bytes).tensor(rows, cols);
            return tensor
                .map(Some)
                .map_err(|cause| malformed(&self.path, format!("tensor {name:?} {cause}")));
        }
        Tensor::new(format, rows, cols, bytes)
            .map(Some)
            .map_err(|cause| ModelError::Tensor { name: name.to_owned(), cause })
    }

    fn names(&self) -> Vec<String> {
        self.tensors.iter().map(|tensor| tensor.name.clone()).collect()
    }

    fn total_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes).sum()
    }

    /// By the table, so that no weight is looked at.
    fn formats(&self) -> Result<Vec<WeightFormat>, ModelError> {
        let mut formats = Vec::new();
        for tensor in self.tensors.iter().filter(|tensor| tensor.dims[1..].iter().any(|&dim| dim > 1)) {
            let format = self.format(tensor)?;
            if !formats.contains(&format) {
                formats.push(format);
            }
        }
        Ok(formats)
    }
}
