//! Graphs from files and embeddings into them: NumPy (`.npy`, `.npz`), CSV and Parquet.
//!
//! Files are not trusted: sizes are checked before anything is allocated, and every number before it is used. What is wrong is
//! said with the file's name.

mod csv;
mod npy;
mod npz;
mod parquet;

use std::io::Write;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use crate::{Embeddings, GraphError, HostRows};
pub use npy::{Array, Numbers};

/// The largest file that is read, unless told otherwise.
pub const MAX_FILE_BYTES: u64 = 1 << 36;

/// Edges as a file has them: `(source, target)` columns of equal length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EdgeColumns {
    pub sources: Vec<i64>,
    pub targets: Vec<i64>,
}

/// What the content of a file is, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    Npy,
    Npz,
    Csv,
    Parquet,
}

impl FileKind {
    pub fn of(path: &Path) -> Option<Self> {
        let end = path.extension()?.to_str()?.to_ascii_lowercase();
        match end.as_str() {
            "npy" => Some(Self::Npy),
            "npz" => Some(Self::Npz),
            "csv" | "tsv" | "txt" => Some(Self::Csv),
            "parquet" | "pq" => Some(Self::Parquet),
            _ => None,
        }
    }
}

fn read(path: &Path) -> Result<(FileKind, Vec<u8>), GraphError> {
    let fail = |what: String| GraphError::File { path: path.to_owned(), what };
    let kind = FileKind::of(path).ok_or_else(|| {
        fail("is of no known kind: .npy, .npz, .csv, .tsv, .txt and .parquet are read".to_owned())
    })?;
    let metadata = std::fs::metadata(path).map_err(|error| fail(format!("cannot be read: {error}")))?;
    if metadata.len() > MAX_FILE_BYTES {
        return Err(fail(format!("is larger than {MAX_FILE_BYTES} bytes")));
    }
    let bytes = std::fs::read(path).map_err(|error| fail(format!("cannot be read: {error}")))?;
    Ok((kind, bytes))
}

/// `[2, edges]` as PyTorch Geometric's `edge_index`, or `[edges, 2]`.
pub fn read_edges(path: &Path) -> Result<EdgeColumns, GraphError> {
    let (kind, bytes) = read(path)?;
    parse_edges(kind, bytes).map_err(|what| GraphError::File { path: path.to_owned(), what })
}

/// `[nodes, features]`.
pub fn read_features(path: &Path) -> Result<HostRows, GraphError> {
    let (kind, bytes) = read(path)?;
    parse_features(kind, bytes).map_err(|what| GraphError::File { path: path.to_owned(), what })
}

/// Node numbers.
pub fn read_nodes(path: &Path) -> Result<Vec<i64>, GraphError> {
    let (kind, bytes) = read(path)?;
    parse_nodes(kind, bytes).map_err(|what| GraphError::File { path: path.to_owned(), what })
}

/// Targets as nodes of a graph. Their numbers are checked here, the rest by the engine.
pub fn targets_of(nodes: &[i64], num_nodes: usize) -> Result<Vec<u32>, GraphError> {
    let last = num_nodes.saturating_sub(1);
    let target = |&node: &i64| match u32::try_from(node) {
        Ok(target) if target as usize <= last => Ok(target),
        _ => Err(GraphError::TargetOutOfRange { node, last }),
    };
    nodes.iter().map(target).collect()
}

/// Edges from the bytes of a file.
pub fn parse_edges(kind: FileKind, bytes: Vec<u8>) -> Result<EdgeColumns, String> {
    let array = match kind {
        FileKind::Npy => npy::parse(&bytes)?,
        FileKind::Npz => npz::find(bytes, &["edge_index", "edges"])?,
        FileKind::Csv => return csv::edges(&bytes),
        FileKind::Parquet => return parquet::edges(Bytes::from(bytes)),
    };
    let (shape, values) = array.into_ints()?;
    match shape[..] {
        [2, num_edges] => {
            let (sources, targets) = values.split_at(num_edges);
            Ok(EdgeColumns { sources: sources.to_vec(), targets: targets.to_vec() })
        }
        [_, 2] => {
            let (pairs, _) = values.as_chunks::<2>();
            Ok(EdgeColumns {
                sources: pairs.iter().map(|pair| pair[0]).collect(),
                targets: pairs.iter().map(|pair| pair[1]).collect(),
            })
        }
        _ => Err(format!("edges of shape {shape:?}: [2, edges] or [edges, 2] is needed")),
    }
}

/// Features from the bytes of a file.
pub fn parse_features(kind: FileKind, bytes: Vec<u8>) -> Result<HostRows, String> {
    let array = match kind {
        FileKind::Npy => npy::parse(&bytes)?,
        FileKind::Npz => npz::find(bytes, &["x", "features"])?,
        FileKind::Csv => csv::matrix(&bytes)?,
        FileKind::Parquet => parquet::matrix(Bytes::from(bytes))?,
    };
    let (shape, values) = array.into_floats();
    match shape[..] {
        [rows, cols] if cols > 0 => HostRows::from_f32(rows, cols, values)
            .ok_or_else(|| format!("features of shape {shape:?} do not fit their values")),
        _ => Err(format!("features of shape {shape:?}: [nodes, features] is needed")),
    }
}

/// Node numbers from the bytes of a file.
pub fn parse_nodes(kind: FileKind, bytes: Vec<u8>) -> Result<Vec<i64>, String> {
    let array = match kind {
        FileKind::Npy => npy::parse(&bytes)?,
        FileKind::Npz => npz::find(bytes, &["targets", "nodes"])?,
        FileKind::Csv => csv::column(&bytes)?,
        FileKind::Parquet => parquet::column(Bytes::from(bytes))?,
    };
    let (shape, values) = array.into_ints()?;
    match shape[..] {
        [_] | [_, 1] => Ok(values),
        _ => Err(format!("nodes of shape {shape:?}: a list of numbers is needed")),
    }
}

/// Bytes of a stranger as a file of every kind: must return whatever they are. For fuzzing.
#[doc(hidden)]
pub fn untrusted(bytes: &[u8]) {
    for kind in [FileKind::Npy, FileKind::Npz, FileKind::Csv, FileKind::Parquet] {
        if let (Ok(edges), Ok(features)) =
            (parse_edges(kind, bytes.to_vec()), parse_features(kind, bytes.to_vec()))
        {
            let edge = |edge: usize| (edges.sources[edge], edges.targets[edge]);
            let _ = crate::Graph::from_columns(features.rows(), edges.sources.len(), edge);
        }
        let _ = parse_nodes(kind, bytes.to_vec());
    }
}

/// Writes embeddings as `.npy` of f32, `[nodes, cols]`.
pub fn write_embeddings(path: &Path, embeddings: &Embeddings) -> Result<(), GraphError> {
    let fail = |error: std::io::Error| GraphError::File {
        path: PathBuf::from(path),
        what: format!("cannot be written: {error}"),
    };
    let file = std::fs::File::create(path).map_err(fail)?;
    let mut out = std::io::BufWriter::with_capacity(1 << 20, file);
    npy::write_f32(&mut out, embeddings.cols, &embeddings.values).map_err(fail)?;
    out.flush().map_err(fail)
}
