//! Files written by hand and by the reference library, right and wrong.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use baton_backend::{SharedBytes, WeightFormat};
use safetensors::tensor::{Dtype, TensorView, serialize};

use super::{INDEX_FILE, SINGLE_FILE, Safetensors};
use crate::{ModelError, WeightSource};

fn file(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

fn entry(name: &str, dtype: &str, shape: &str, start: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}"#)
}

fn open(bytes: Vec<u8>) -> Result<Safetensors, ModelError> {
    Safetensors::from_bytes(Path::new("test.safetensors"), SharedBytes::from_vec(bytes))
}

#[track_caller]
fn check_error(entries: &[String], data_len: usize, expected: &str) {
    let bytes = file(&format!("{{{}}}", entries.join(",")), &vec![0; data_len]);
    let message = open(bytes).expect_err(expected).to_string();
    assert!(message.contains(expected), "{message:?} does not contain {expected:?}");
}

#[test]
fn reads_what_the_reference_library_writes() {
    let values: Vec<u8> = (0..24).collect();
    let views = [
        ("f32", Dtype::F32, vec![2, 3], &values[..24]),
        ("bf16", Dtype::BF16, vec![5], &values[..10]),
        ("f16", Dtype::F16, vec![2, 2, 3], &values[..24]),
        ("scalar", Dtype::F32, vec![], &values[..4]),
        ("ids", Dtype::I64, vec![1], &values[..8]),
    ];
    let views = views.map(|(name, dtype, shape, data)| (name, TensorView::new(dtype, shape, data).unwrap()));
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let checkpoint = open(serialize(views, Some(metadata)).unwrap()).unwrap();
    let check = |name: &str, format, rows, cols, bytes: &[u8]| {
        let tensor = checkpoint.tensor(name).unwrap().unwrap();
        assert_eq!((tensor.format(), tensor.rows(), tensor.cols()), (format, rows, cols), "{name}");
        assert_eq!(tensor.bytes(), bytes, "{name}");
    };
    check("f32", WeightFormat::F32, 2, 3, &values);
    check("bf16", WeightFormat::BF16, 1, 5, &values[..10]);
    check("f16", WeightFormat::F16, 4, 3, &values);
    check("scalar", WeightFormat::F32, 1, 1, &values[..4]);
    assert!(checkpoint.tensor("absent").unwrap().is_none());
    assert_eq!(checkpoint.total_bytes(), 24 + 10 + 24 + 4 + 8);
    let error = checkpoint.tensor("ids").unwrap_err().to_string();
    assert!(error.contains("tensor \"ids\" has the dtype I64; only F32, F16 and BF16"), "{error}");
    assert_eq!(checkpoint.entry("ids").unwrap().shape, [1]);
}

#[test]
fn wrong_headers_are_named() {
    let f32 = |name: &str, start, end| entry(name, "F32", "[2]", start, end);
    check_error(&[f32("a", 0, 8), f32("b", 4, 12)], 12, "tensors \"a\" and \"b\" overlap");
    check_error(&[f32("a", 0, 8), f32("a", 8, 16)], 16, "tensor \"a\" is there twice");
    check_error(&[f32("a", 0, 8)], 7, "tensor \"a\" lies at 0..8, but the file has 7 bytes");
    check_error(&[f32("a", 8, 0)], 8, "tensor \"a\" lies at 8..0");
    check_error(&[f32("a", 0, 4)], 4, "does not fit its 4 bytes");
    check_error(&[f32("a", u64::MAX, u64::MAX)], 8, "tensor \"a\" lies at");
    check_error(&[entry("a", "F32", "[4294967296,4294967296,4]", 0, 0)], 0, "does not fit its 0 bytes");
    check_error(&[entry("a", "F32", "[-1]", 0, 4)], 4, "its header: invalid value");
    check_error(&[r#""a":1"#.to_owned()], 4, "its header: invalid type");
    assert!(open(vec![1; 7]).unwrap_err().to_string().contains("too few"));
    assert!(open(vec![0xff; 64]).unwrap_err().to_string().contains("more than the limit"));
    let cut = open(file("{}", &[])[..9].to_vec()).unwrap_err().to_string();
    assert!(cut.contains("should have 2 bytes but the file ends after 1"), "{cut}");
    let deep = "[".repeat(100_000);
    assert!(open(file(&format!(r#"{{"__metadata__":{deep}"#), &[])).is_err());
    let empty = open(file(&format!("{{{}}}", entry("a", "F32", "[0,4]", 0, 0)), &[])).unwrap();
    assert!(empty.tensor("a").unwrap_err().to_string().contains("is empty"));
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let bytes = file(&format!("{{{}}}", entry("a", "F32", "[2]", 0, 8)), &[0; 8]);
    assert!(open(bytes.clone()).is_ok());
    for len in 0..bytes.len() {
        assert!(open(bytes[..len].to_vec()).is_err(), "{len} of {} bytes opened", bytes.len());
    }
}

#[test]
fn language_models_in_multimodal_checkpoints_are_found() {
    let header = [
        entry("language_model.model.norm.weight", "F32", "[1]", 0, 4),
        entry("model.language_model.embed_tokens.weight", "F32", "[1]", 4, 8),
        entry("language_model.lm_head.weight", "F32", "[1]", 8, 12),
    ];
    let checkpoint = open(file(&format!("{{{}}}", header.join(",")), &[0; 12])).unwrap();
    for name in ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"] {
        assert!(checkpoint.tensor(name).unwrap().is_some(), "{name}");
    }
    assert!(checkpoint.tensor("model.layers.0.mlp.up_proj.weight").unwrap().is_none());
}

fn write_shards(directory: &Path, weight_map: &[(&str, &str)]) {
    for (index, name) in ["a", "b"].iter().enumerate() {
        let bytes = file(&format!("{{{}}}", entry(name, "F32", "[1]", 0, 4)), &[index as u8; 4]);
        fs::write(directory.join(format!("{name}.safetensors")), bytes).unwrap();
    }
    let mut entries = String::new();
    for (tensor, shard) in weight_map {
        write!(entries, "{}{tensor:?}:{shard:?}", if entries.is_empty() { "" } else { "," }).unwrap();
    }
    let index = format!(r#"{{"metadata":{{"total_size":8}},"weight_map":{{{entries}}}}}"#);
    fs::write(directory.join(INDEX_FILE), index).unwrap();
}

#[test]
fn shards_are_opened_through_the_index() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    assert!(Safetensors::open_directory(path).unwrap().is_none());
    let open = || Safetensors::open_directory(path).map(Option::unwrap);
    write_shards(path, &[("a", "a.safetensors"), ("b", "b.safetensors")]);
    assert_eq!(open().unwrap().tensor("b").unwrap().unwrap().bytes(), [1; 4]);
    write_shards(path, &[("a", "b.safetensors")]);
    assert!(open().unwrap_err().to_string().contains("places \"a\" in \"b.safetensors\", which lacks it"));
    for outside in
        ["../a.safetensors", "/etc/passwd", "x/a.safetensors", "..", ".", "", "x\\a", "a.safetensors/"]
    {
        write_shards(path, &[("a", outside)]);
        let error = open().unwrap_err().to_string();
        assert!(error.contains("which is not the name of a file beside it"), "{outside}: {error}");
    }
    write_shards(path, &[("c", "c.safetensors")]);
    assert!(matches!(open(), Err(ModelError::Io { .. })));
    // Without an index the files are taken as they are; a single file has precedence over all.
    fs::remove_file(path.join(INDEX_FILE)).unwrap();
    fs::write(path.join("consolidated.safetensors"), b"other names").unwrap();
    assert_eq!(open().unwrap().names(), ["a", "b"]);
    fs::copy(path.join("a.safetensors"), path.join(SINGLE_FILE)).unwrap();
    assert_eq!(open().unwrap().names(), ["a"]);
}
