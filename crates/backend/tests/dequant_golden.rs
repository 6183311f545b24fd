//! `quant` against numbers made by the `gguf` Python package; see `tests/data/README.md`.

use std::collections::BTreeMap;

use baton_backend::WeightFormat;
use baton_backend::quant::{dequantize_row, quantize_row};

fn bytes_of_hex(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

fn floats_of_hex(hex: &str) -> Vec<f32> {
    bytes_of_hex(hex).as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect()
}

#[test]
fn every_format_decodes_to_the_last_bit() {
    let golden: BTreeMap<String, BTreeMap<String, String>> =
        serde_json::from_str(include_str!("data/dequant_golden.json")).unwrap();
    // No GGUF file has e4m3, whose codes `float8` tests one by one.
    let formats = WeightFormat::ALL.into_iter().filter(|format| *format != WeightFormat::F8_E4M3);
    assert_eq!(golden.len(), formats.clone().count());
    for format in formats {
        let entry = &golden[&format.to_string()];
        let expected = floats_of_hex(&entry["values"]);
        assert!(expected.len() >= 64, "{format}");
        let mut values = vec![f32::NAN; expected.len()];
        dequantize_row(format, &bytes_of_hex(&entry["bytes"]), &mut values);
        for (i, (value, expected)) in values.iter().zip(&expected).enumerate() {
            assert_eq!(value.to_bits(), expected.to_bits(), "{format} value {i}: {value} is not {expected}");
        }
    }
}

#[test]
fn the_closed_form_formats_encode_as_ggml() {
    let golden: BTreeMap<String, String> =
        serde_json::from_str(include_str!("data/quantize_golden.json")).unwrap();
    let values = floats_of_hex(&golden["values"]);
    let mut compared = 0;
    for format in WeightFormat::ALL {
        if let Some(expected) = golden.get(&format.to_string()) {
            assert_eq!(quantize_row(format, &values), bytes_of_hex(expected), "{format}");
            compared += 1;
        }
    }
    assert_eq!(compared, 7);
}
