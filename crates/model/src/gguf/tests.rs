//! Right files give what was written; wrong ones say what is wrong and where.

use std::path::Path;

use baton_backend::{SharedBytes, WeightFormat};

use super::{GgufArray, GgufFile, GgufValue};
use crate::test_support::gguf_writer::{GgufWriter, string, tiny};
use crate::{ModelError, WeightSource};

fn open(bytes: Vec<u8>) -> Result<GgufFile, ModelError> {
    GgufFile::from_bytes(Path::new("test.gguf"), SharedBytes::from_vec(bytes))
}

#[track_caller]
fn check_error(writer: &GgufWriter, expected: &str) {
    let message = open(writer.finish()).expect_err(expected).to_string();
    assert!(message.starts_with("test.gguf is not a usable model file: "), "{message}");
    assert!(message.contains(expected), "{message:?} does not contain {expected:?}");
}

#[test]
fn every_value_type_comes_back() {
    let nested: Vec<u8> =
        [4_u32.to_le_bytes().as_slice(), &1_u64.to_le_bytes(), &9_u32.to_le_bytes()].concat();
    let writer = GgufWriter::default()
        .raw("u8", 0, &[200])
        .raw("i8", 1, &[0xff])
        .u16("u16", 65535)
        .raw("i16", 3, &(-2_i16).to_le_bytes())
        .u32("u32", 7)
        .raw("i32", 5, &(-3_i32).to_le_bytes())
        .f32("f32", 1.5)
        .bool("bool", true)
        .str("str", "héllo")
        .raw("u64", 10, &(1_u64 << 40).to_le_bytes())
        .raw("i64", 11, &(-4_i64).to_le_bytes())
        .raw("f64", 12, &2.5_f64.to_le_bytes())
        .strings("strings", &["a", ""])
        .i32s("i32s", &[1, -1])
        .bools("bools", &[true, false])
        .array("nested", 9, 1, &nested);
    for version in [2, 3] {
        let file = open(GgufWriter { version, ..writer.clone() }.finish()).unwrap();
        let metadata = file.metadata();
        assert_eq!(file.version(), version);
        assert_eq!(metadata.get_u32("u8").unwrap(), Some(200));
        assert_eq!(metadata.get("i8"), Some(&GgufValue::I8(-1)));
        assert_eq!(metadata.get_u32("u16").unwrap(), Some(65535));
        assert_eq!(metadata.get("i16"), Some(&GgufValue::I16(-2)));
        assert_eq!(metadata.get("i32"), Some(&GgufValue::I32(-3)));
        assert_eq!(metadata.get_f32("f32").unwrap(), Some(1.5));
        assert_eq!(metadata.get_bool("bool").unwrap(), Some(true));
        assert_eq!(metadata.get_str("str").unwrap(), Some("héllo"));
        assert_eq!(metadata.get_u64("u64").unwrap(), Some(1 << 40));
        assert_eq!(metadata.get("i64"), Some(&GgufValue::I64(-4)));
        assert_eq!(metadata.get_f32("f64").unwrap(), Some(2.5));
        assert_eq!(
            metadata.get_strings("strings").unwrap(),
            Some(["a".to_owned(), String::new()].as_slice())
        );
        assert_eq!(metadata.get_integers("i32s").unwrap(), Some(vec![1, -1]));
        assert_eq!(metadata.get_array("bools").unwrap(), Some(&GgufArray::Bool(vec![true, false])));
        let nested = GgufArray::Array(vec![GgufArray::U32(vec![9])]);
        assert_eq!(metadata.get("nested"), Some(&GgufValue::Array(nested)));
        assert_eq!(metadata.get_u32("absent").unwrap(), None);
        let error = metadata.get_u32("u64").unwrap_err();
        assert_eq!(error, "metadata \"u64\" should be an integer of 32 bits, but is U64(1099511627776)");
        assert!(metadata.get_str("u32").unwrap_err().contains("should be a string"));
        assert!(metadata.get_u32("i32").is_err());
        assert!(metadata.get_f32s("i32s").unwrap_err().contains("an array of 2 values"));
    }
}

#[test]
fn tensors_have_rows_last_in_the_file_and_first_here() {
    let values: Vec<f32> = (0..6_u8).map(f32::from).collect();
    let file = open(
        GgufWriter::default()
            .f32_tensor("vector", &[3], &values[..3])
            .f32_tensor("matrix", &[3, 2], &values)
            .tensor("quantised", &[64, 2], 3, &[7; 80])
            .tensor("exotic", &[256], 35, &[0; 66])
            .finish(),
    )
    .unwrap();
    let vector = file.tensor("vector").unwrap().unwrap();
    assert_eq!((vector.rows(), vector.cols()), (1, 3));
    let matrix = file.tensor("matrix").unwrap().unwrap();
    assert_eq!((matrix.rows(), matrix.cols()), (2, 3));
    assert_eq!(matrix.row(1)[..4], 3_f32.to_le_bytes());
    let quantised = file.tensor("quantised").unwrap().unwrap();
    assert_eq!((quantised.format(), quantised.rows(), quantised.cols()), (WeightFormat::Q4_1, 2, 64));
    assert!(file.tensor("absent").unwrap().is_none());
    // It can be listed but not computed with.
    assert_eq!(file.tensors()[3].ggml_type.name(), "TQ2_0");
    let error = file.tensor("exotic").unwrap_err().to_string();
    assert!(error.contains("tensor \"exotic\" has the type TQ2_0, which is not supported"), "{error}");
    assert_eq!(file.total_bytes(), 12 + 24 + 80 + 66);
    assert_eq!(file.names(), ["vector", "matrix", "quantised", "exotic"]);
}

#[test]
fn other_files_and_versions_are_named() {
    let with_magic = |magic: &[u8; 4]| {
        let mut bytes = tiny("llama").finish();
        bytes[..4].copy_from_slice(magic);
        open(bytes).unwrap_err().to_string()
    };
    assert!(with_magic(b"PK\x03\x04").contains("it is not a GGUF file"));
    assert!(with_magic(b"FUGG").contains("big-endian"));
    check_error(&GgufWriter { version: 3_u32.swap_bytes(), ..GgufWriter::default() }, "big-endian");
    check_error(&GgufWriter { version: 1, ..GgufWriter::default() }, "GGUF version 1 is not supported");
    check_error(&GgufWriter { version: 4, ..GgufWriter::default() }, "GGUF version 4 is not supported");
}

#[test]
fn counts_that_lie_are_caught_before_memory_is_taken() {
    let lying = |count| GgufWriter { metadata_count: Some(count), ..tiny("llama") };
    check_error(&lying(u64::MAX), "the key of metadata entry 15 of 18446744073709551615 at byte");
    let lying = |count| GgufWriter { tensor_count: Some(count), ..tiny("llama") };
    check_error(&lying(u64::MAX), "the name of tensor 0 of 18446744073709551615");
    for element_type in 0..=12 {
        for count in [u64::MAX, 1 << 61, 1 << 40] {
            let writer = GgufWriter::default().array("a", element_type, count, &[0; 64]);
            check_error(&writer, "metadata \"a\" at byte");
        }
    }
    check_error(&GgufWriter::default().raw("s", 8, &u64::MAX.to_le_bytes()), "metadata \"s\" at byte");
}

#[test]
fn wrong_metadata_is_named() {
    check_error(&GgufWriter::default().u32("a", 1).u32("a", 2), "metadata \"a\" is there twice");
    check_error(&GgufWriter::default().raw("a", 13, &[]), "metadata \"a\" has the unknown value type 13");
    check_error(&GgufWriter::default().array("a", 99, 1, &[0]), "an array of the unknown value type 99");
    check_error(&GgufWriter::default().raw("a", 7, &[2]), "neither false (0) nor true (1)");
    let bad_utf8 = [2_u64.to_le_bytes().as_slice(), &[0xff, 0xfe]].concat();
    check_error(&GgufWriter::default().raw("a", 8, &bad_utf8), "metadata \"a\" at byte 37 is not UTF-8");
    let level = [9_u32.to_le_bytes().as_slice(), &1_u64.to_le_bytes()].concat();
    check_error(&GgufWriter::default().array("a", 9, 1, &level.repeat(8)), "nested deeper than 4");
    for alignment in [0, 24, 1 << 21] {
        check_error(&GgufWriter::default().u32("general.alignment", alignment), "general.alignment is");
    }
}

#[test]
fn wrong_tensors_are_named() {
    let writer = || GgufWriter::default().f32_tensor("a", &[8], &[0.0; 8]).f32_tensor("b", &[8], &[0.0; 8]);
    let changed = |change: &dyn Fn(&mut GgufWriter)| {
        let mut writer = writer();
        change(&mut writer);
        writer
    };
    assert!(open(writer().finish()).is_ok());
    check_error(&changed(&|w| w.tensors[1].name = "a".to_owned()), "tensor \"a\" is there twice");
    check_error(&changed(&|w| w.tensors[1].offset = 0), "tensors \"a\" and \"b\" overlap");
    check_error(&changed(&|w| w.tensors[1].offset = 8), "is not a multiple of the alignment 32");
    check_error(&changed(&|w| w.tensors[1].offset = 64), "the download may be incomplete");
    check_error(&changed(&|w| w.tensors[1].offset = u64::MAX - 31), "lies beyond any possible file");
    check_error(&changed(&|w| w.tensors[1].type_id = 4), "tensor \"b\" has the unknown tensor type 4");
    check_error(&changed(&|w| w.tensors[1].type_id = 2), "rows that are not whole blocks");
    check_error(&changed(&|w| w.tensors[1].dims = vec![8, 0]), "has an empty dimension");
    check_error(&changed(&|w| w.tensors[1].dims = vec![]), "has 0 dimensions");
    check_error(&changed(&|w| w.tensors[1].dims = vec![1; 5]), "has 5 dimensions");
    check_error(&changed(&|w| w.tensors[1].dims = vec![1 << 32; 4]), "or is too large");
    check_error(&changed(&|w| w.tensors[1].dims = vec![1 << 40]), "the download may be incomplete");
    check_error(&changed(&|w| w.data.truncate(w.data.len() - 1)), "tensor \"b\" ends at byte");
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let bytes = tiny("llama").f32_tensor("t", &[8], &[1.0; 8]).finish();
    assert!(open(bytes.clone()).is_ok());
    for len in 0..bytes.len() {
        assert!(open(bytes[..len].to_vec()).is_err(), "{len} of {} bytes opened", bytes.len());
    }
}

#[test]
fn alignment_moves_the_data() {
    let writer = GgufWriter { alignment: 128, ..GgufWriter::default() }
        .u32("general.alignment", 128)
        .f32_tensor("a", &[1], &[5.0])
        .f32_tensor("b", &[1], &[6.0]);
    let file = open(writer.finish()).unwrap();
    assert_eq!(file.tensor("b").unwrap().unwrap().bytes(), 6_f32.to_le_bytes());
}

#[test]
fn split_files_are_opened_together() {
    let directory = tempfile::tempdir().unwrap();
    let part = |number: u16, name: &str| {
        GgufWriter::default()
            .u16("split.no", number)
            .u16("split.count", 2)
            .raw("split.tensors.count", 5, &2_i32.to_le_bytes())
            .f32_tensor(name, &[1], &[f32::from(number)])
            .finish()
    };
    let first = directory.path().join("m-00001-of-00002.gguf");
    let second = directory.path().join("m-00002-of-00002.gguf");
    std::fs::write(&first, part(0, "a")).unwrap();
    assert!(matches!(GgufFile::open(&first), Err(ModelError::Io { path, .. }) if path == second));
    std::fs::write(&second, part(1, "b")).unwrap();
    let file = GgufFile::open(&first).unwrap();
    assert_eq!(file.tensor("b").unwrap().unwrap().bytes(), 1_f32.to_le_bytes());
    let error = GgufFile::open(&second).unwrap_err().to_string();
    assert!(error.contains("give the first, whose name ends in \"-00001-of-00002.gguf\""), "{error}");
    std::fs::write(&second, part(1, "a")).unwrap();
    assert!(GgufFile::open(&first).unwrap_err().to_string().contains("is in an earlier part already"));
    std::fs::write(&second, part(0, "b")).unwrap();
    assert!(GgufFile::open(&first).unwrap_err().to_string().contains("split.no is Some(0), expected 1"));
}

#[test]
fn the_writer_writes_strings_as_the_format_has_them() {
    assert_eq!(string("ab"), [2, 0, 0, 0, 0, 0, 0, 0, b'a', b'b']);
}
