//! Quantised checkpoints (`tests/data/quantised`) beside PyTorch with the same weights dequantised, and files whose scales are
//! missing or wrong.

#[allow(dead_code)]
mod harness;

use std::path::{Path, PathBuf};

use baton_backend::{Backend, KvDtype, Precision, ReferenceBackend, WeightFormat};
use baton_cpu::{CpuBackend, CpuOptions};
use baton_model::{LoadFormat, ModelFiles, RoundTo};
use half::bf16;
use harness::{Harness, Options, Run};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

/// Of the largest logit, where nothing is rounded but scales and minima of blocks to f16.
const EXACT: f32 = 3e-3;
/// Where activations are rounded to eight bits, and e4m3 to blocks of eight bits.
const ROUNDED: f32 = 6e-2;

/// What each becomes when it is read.
const MODELS: [(&str, WeightFormat); 18] = [
    ("fp8-tensor-static", WeightFormat::F8_E4M3),
    ("fp8-channel", WeightFormat::F8_E4M3),
    ("fp8-block", WeightFormat::F8_E4M3),
    ("awq-g32", WeightFormat::Q4_1),
    ("awq-g64", WeightFormat::Q4_1),
    ("awq-g128", WeightFormat::Q4_1),
    ("gptq-4-g128", WeightFormat::Q4_0),
    ("gptq-4-desc-g32", WeightFormat::Q4_1),
    ("gptq-4-desc-v2", WeightFormat::Q4_0),
    ("gptq-8-g64", WeightFormat::Q8_0),
    ("gptq-8-rows", WeightFormat::F16),
    ("w4a16-g128", WeightFormat::Q4_0),
    ("w4a16-g32-zeros", WeightFormat::Q4_1),
    ("w8a8-int8", WeightFormat::Q8_0),
    ("w4a16-g32-actorder", WeightFormat::Q4_1),
    ("mxfp4", WeightFormat::Q5_0),
    ("fp8-experts", WeightFormat::F8_E4M3),
    ("gpt-oss-mxfp4", WeightFormat::Q5_0),
];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/quantised").join(name)
}

fn logits(backend: Box<dyn Backend>, folder: &Path) -> Vec<f32> {
    logits_with(backend, folder, KvDtype::F32)
}

fn logits_with(backend: Box<dyn Backend>, folder: &Path, kv_dtype: KvDtype) -> Vec<f32> {
    let options = Options {
        max_model_len: 64,
        max_tokens: 32,
        block_size: 16,
        num_pages: 4,
        kv_dtype,
        max_kv_per_item: 1024,
        max_queries_per_item: 64,
    };
    let text = std::fs::read_to_string(folder.join("golden.json")).expect("golden.json");
    let golden: Value = serde_json::from_str(&text).expect("JSON");
    let tokens: Vec<u32> = golden["prompts"][0]["token_ids"]
        .as_array()
        .expect("ids")
        .iter()
        .map(|id| id.as_u64().expect("id") as u32)
        .collect();
    let mut harness = Harness::open(backend, folder, options);
    let pages = harness.take_pages(tokens.len());
    harness.step(&[Run { tokens: &tokens, start: 0, pages: &pages }]).concat()
}

fn check(name: &str, what: &str, got: &[f32], allowed: f32) {
    let bytes = std::fs::read(folder(name).join("logits.f32")).expect("logits");
    let expected: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
    assert_eq!(expected.len(), got.len());
    let largest = expected.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    let error = expected.iter().zip(got).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs())) / largest;
    println!("{name:18} {what:10} {error:.1e}");
    assert!(error <= allowed, "{name} on {what}: off by {error} of the largest logit");
}

#[test]
fn logits_are_those_of_the_dequantised_weights() {
    for (name, format) in MODELS {
        let files = ModelFiles::open(&folder(name), LoadFormat::Auto).expect("opens");
        let weights = files.weights().expect("has weights");
        let has_experts = matches!(name, "fp8-experts" | "gpt-oss-mxfp4");
        let mlp = if has_experts { "mlp.experts.0" } else { "mlp" };
        let down = format!("model.layers.0.{mlp}.down_proj.weight");
        let tensor = weights.tensor(&down).expect("reads").expect("is there");
        assert_eq!(tensor.format(), format, "{name}");
        assert!(weights.formats().expect("known").contains(&format) || format == WeightFormat::F16, "{name}");
        assert!(weights.names().contains(&down), "{name}");
        check(name, "reference", &logits(Box::new(ReferenceBackend::new()), &folder(name)), EXACT);
        let cpu = |precision| {
            let options = CpuOptions { threads: Some(2), precision, ..CpuOptions::default() };
            Box::new(CpuBackend::new(options).expect("starts"))
        };
        check(name, "CPU, f32", &logits(cpu(Precision::Full), &folder(name)), EXACT);
        check(name, "CPU", &logits(cpu(Precision::Fast), &folder(name)), ROUNDED);
    }
}

/// Keys and values are divided by calibrated scales before they are cached, and nothing else changes.
#[test]
fn calibrated_scales_of_the_cache_are_used() {
    // With norms of keys, with biases of keys and values, and without either.
    for (name, attention) in [("fp8-channel", ""), ("fp8-block", "k_proj."), ("fp8-experts", "")] {
        let run = |scales: [f32; 2], dtype| {
            let bytes = std::fs::read(folder(name).join("model.safetensors")).expect("reads");
            let tensors = SafeTensors::deserialize(&bytes).expect("parses");
            let scales = scales.map(f32::to_le_bytes);
            let mut views = tensors.tensors();
            for (part, scale) in ["k", "v"].iter().zip(&scales) {
                let module = attention.replace('k', part);
                let name = format!("model.layers.0.self_attn.{module}{part}_scale");
                views.push((name, TensorView::new(Dtype::F32, vec![1], scale).expect("a tensor")));
            }
            let directory = tempfile::tempdir().expect("a directory");
            for file in ["config.json", "golden.json"] {
                std::fs::copy(folder(name).join(file), directory.path().join(file)).expect("copies");
            }
            let file = safetensors::serialize(views, None).expect("serialises");
            std::fs::write(directory.path().join("model.safetensors"), file).expect("writes");
            logits_with(Box::new(ReferenceBackend::new()), directory.path(), dtype)
        };
        let plain = logits(Box::new(ReferenceBackend::new()), &folder(name));
        let largest = plain.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        let error = |got: Vec<f32>| {
            plain.iter().zip(&got).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs())) / largest
        };
        // A cache of f32 takes any scale.
        assert!(error(run([0.02, 0.02], KvDtype::F32)) < 1e-5, "{name}");
        let good = error(run([0.02, 0.02], KvDtype::F8E4M3));
        // Scales that are far too small: everything is larger than 448.
        let clipped = error(run([1e-6, 1e-6], KvDtype::F8E4M3));
        println!("{name}: {good} of the largest logit, clipped {clipped}");
        assert!(good < 0.1 && clipped > 2.0 * good, "{name}: {good}, clipped {clipped}");
    }
}

/// A copy of a model with one tensor changed or gone.
fn broken(
    name: &str,
    tensor: &str,
    change: impl Fn(&TensorView<'_>) -> Option<(Dtype, Vec<usize>, Vec<u8>)>,
) -> String {
    let bytes = std::fs::read(folder(name).join("model.safetensors")).expect("reads");
    let tensors = SafeTensors::deserialize(&bytes).expect("parses");
    let mut changed = Vec::new();
    for (key, view) in tensors.iter() {
        let made = if key == tensor {
            change(&view)
        } else {
            Some((view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        };
        changed.extend(made.map(|made| (key.to_owned(), made)));
    }
    let views = changed.iter().map(|(key, (dtype, shape, bytes))| {
        (key.clone(), TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor"))
    });
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::copy(folder(name).join("config.json"), directory.path().join("config.json")).expect("copies");
    let file = safetensors::serialize(views, None).expect("serialises");
    std::fs::write(directory.path().join("model.safetensors"), file).expect("writes");
    let files = ModelFiles::open(directory.path(), LoadFormat::Auto).expect("opens");
    let module = tensor.rsplit_once('.').expect("a part of a module").0;
    let weights = files.weights().expect("has weights");
    weights.tensor(&format!("{module}.weight")).expect_err("it is broken").to_string()
}

#[test]
fn wrong_scales_are_errors_that_name_the_tensor() {
    let q = "model.layers.0.self_attn.q_proj";
    let named = |part: &str| format!("{q}.{part}");
    let gone = |name: &str, part: &str| broken(name, &named(part), |_| None);
    for (name, part) in [
        ("fp8-channel", "weight_scale"),
        ("w8a8-int8", "weight_scale"),
        ("awq-g32", "scales"),
        ("awq-g32", "qzeros"),
        ("gptq-4-g128", "scales"),
        ("w4a16-g128", "weight_scale"),
        ("w4a16-g128", "weight_shape"),
    ] {
        let message = gone(name, part);
        assert!(message.contains(&named(part)), "{name} without {part}: {message}");
    }
    let edit = |name: &str, part: &str, edit: &dyn Fn(&mut Vec<usize>, &mut Vec<u8>)| {
        let message = broken(name, &named(part), |view| {
            let (mut shape, mut bytes) = (view.shape().to_vec(), view.data().to_vec());
            edit(&mut shape, &mut bytes);
            Some((view.dtype(), shape, bytes))
        });
        assert!(message.contains(&named(part)), "{name}, {part}: {message}");
        message
    };
    for name in ["fp8-channel", "w8a8-int8"] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.5] {
            let code = bf16::from_f32(bad).to_le_bytes();
            let message = edit(name, "weight_scale", &|_, bytes| bytes[2..4].copy_from_slice(&code));
            assert!(message.contains(&format!("scale {bad} at 1")), "{message}");
        }
    }
    for (name, part) in [("awq-g32", "scales"), ("gptq-4-g128", "scales"), ("w4a16-g128", "weight_scale")] {
        // NaN, both infinities, -0.5, and 32768, whose products are beyond f16.
        for bad in [0x7e01_u16, 0x7c00, 0xfc00, 0xb800, 0x7800] {
            let message = edit(name, part, &|_, bytes| bytes[2..4].copy_from_slice(&bad.to_le_bytes()));
            assert!(message.contains("scale"), "{message}");
        }
    }
    for bad in [255_u8, 200] {
        let message = edit("mxfp4", "weight_scale", &|_, bytes| bytes[1] = bad);
        assert!(message.contains("at 1, which no sound weight has"), "{message}");
    }
    edit("fp8-tensor-static", "input_scale", &|_, bytes| bytes[3] = 0xff);
    let half = |shape: &mut Vec<usize>, bytes: &mut Vec<u8>| {
        shape[0] /= 2;
        bytes.truncate(bytes.len() / 2);
    };
    let narrow = |shape: &mut Vec<usize>, bytes: &mut Vec<u8>| {
        shape[1] /= 2;
        bytes.truncate(bytes.len() / 2);
    };
    edit("fp8-channel", "weight_scale", &half);
    edit("fp8-block", "weight_scale_inv", &|shape, bytes| {
        *shape = vec![1, 3];
        bytes.resize(12, 0);
    });
    for part in ["scales", "qzeros"] {
        edit("awq-g32", part, &half);
        edit("awq-g32", part, &narrow);
        edit("gptq-4-g128", part, &narrow);
    }
    for (name, part) in
        [("w4a16-g32-zeros", "weight_zero_point"), ("w4a16-g128", "weight_scale"), ("mxfp4", "weight_scale")]
    {
        edit(name, part, &half);
    }
    edit("w4a16-g32-zeros", "weight_scale", &narrow);
    for bad in [99_u8, 4] {
        edit("gptq-4-desc-g32", "g_idx", &|_, bytes| bytes[0] = bad);
        edit("w4a16-g32-actorder", "weight_g_idx", &|_, bytes| bytes[0] = bad);
    }
    edit("gptq-4-desc-g32", "g_idx", &|_, bytes| bytes[..4].copy_from_slice(&(-2_i32).to_le_bytes()));
    edit("w4a16-g128", "weight_shape", &|_, bytes| bytes[0] += 1);
    edit("w4a16-g128", "weight_shape", &|_, bytes| bytes[..8].copy_from_slice(&i64::MAX.to_le_bytes()));
}

#[test]
fn values_that_are_cut_or_too_many_are_errors_that_name_the_tensor() {
    let q = "model.layers.0.self_attn.q_proj";
    for (name, part, with) in [
        ("awq-g32", "qweight", "scales"),
        ("gptq-4-g128", "qweight", "qweight"),
        ("gptq-8-g64", "qweight", "qzeros"),
        ("w4a16-g128", "weight_packed", "weight_shape"),
        ("w8a8-int8", "weight", "weight_scale"),
        ("fp8-channel", "weight", "weight_scale"),
        ("mxfp4", "weight_packed", "weight_scale"),
    ] {
        let message = broken(name, &format!("{q}.{part}"), |view| {
            let (mut shape, bytes) = (view.shape().to_vec(), view.data());
            shape[0] /= 2;
            Some((view.dtype(), shape, bytes[..bytes.len() / 2].to_vec()))
        });
        assert!(message.contains(&format!("{q}.{with}")), "{name}: {message}");
    }
    // As many columns as no file holds.
    for cols in [1_i64 << 39, (1 << 40) + 1, 0, -128] {
        let message = broken("w4a16-g128", &format!("{q}.weight_shape"), |view| {
            let mut bytes = view.data().to_vec();
            bytes[8..].copy_from_slice(&cols.to_le_bytes());
            Some((view.dtype(), view.shape().to_vec(), bytes))
        });
        assert!(message.contains(&format!("{q}.weight")), "{message}");
    }
}

#[test]
fn groups_of_another_size_than_the_configuration_says_are_errors() {
    for (name, said, other, part) in [
        ("awq-g32", "\"group_size\": 32", "\"group_size\": 64", "scales"),
        ("gptq-8-g64", "\"group_size\": 64", "\"group_size\": 32", "scales"),
        ("w4a16-g32-zeros", "\"group_size\": 32", "\"group_size\": 64", "weight_scale"),
        ("fp8-block", "128,\n   128", "64,\n   64", "weight_scale_inv"),
    ] {
        let directory = tempfile::tempdir().expect("a directory");
        let config = std::fs::read_to_string(folder(name).join("config.json")).expect("reads");
        assert!(config.contains(said), "{name}: {config}");
        std::fs::write(directory.path().join("config.json"), config.replace(said, other)).expect("writes");
        std::fs::copy(folder(name).join("model.safetensors"), directory.path().join("model.safetensors"))
            .expect("copies");
        let files = ModelFiles::open(directory.path(), LoadFormat::Auto).expect("opens");
        let weights = files.weights().expect("has weights");
        // The one that has several blocks of 128.
        let down = "model.layers.0.mlp.down_proj";
        let message = weights.tensor(&format!("{down}.weight")).expect_err("it lies").to_string();
        assert!(message.contains(&format!("{down}.{part}")), "{name}: {message}");
    }
}

/// The largest difference of a tensor of two models, in parts of its largest value.
fn difference(before: &ModelFiles, after: &ModelFiles, name: &str) -> f32 {
    let [before, after] = [before, after].map(|files| {
        let tensor = files.weights().expect("has weights").tensor(name).expect("reads").expect("is there");
        let mut values = vec![0.0; tensor.rows() * tensor.cols()];
        for (row, values) in values.chunks_mut(tensor.cols()).enumerate() {
            tensor.dequantize_row(row, values);
        }
        values
    });
    let largest = before.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    before.iter().zip(&after).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs())) / largest
}

#[test]
fn experts_are_rounded_and_routers_are_not() {
    let directory = tempfile::tempdir().expect("a directory");
    let config = std::fs::read_to_string(folder("fp8-experts").join("config.json")).expect("reads");
    let mut config: Value = serde_json::from_str(&config).expect("JSON");
    config.as_object_mut().expect("an object").remove("quantization_config");
    std::fs::write(directory.path().join("config.json"), config.to_string()).expect("writes");
    for (to, expert, linear) in [
        (RoundTo::Q4, WeightFormat::Q4_1, WeightFormat::Q4_1),
        (RoundTo::Q8, WeightFormat::Q8_0, WeightFormat::Q8_0),
        (RoundTo::Fp8, WeightFormat::BF16, WeightFormat::F8_E4M3),
    ] {
        let mut files = ModelFiles::open(directory.path(), LoadFormat::Dummy).expect("opens");
        files.round_to(to);
        let weights = files.weights().expect("has weights");
        let format = |name: &str| {
            let name = format!("model.layers.0.{name}.weight");
            weights.tensor(&name).expect("reads").unwrap_or_else(|| panic!("{name}")).format()
        };
        for name in ["mlp.experts.1.up_proj", "mlp.experts.2.down_proj", "mlp.shared_expert.gate_proj"] {
            assert_eq!(format(name), expert, "{to} {name}");
        }
        assert_eq!(format("self_attn.q_proj"), linear, "{to}");
        for name in ["mlp.gate", "mlp.shared_expert_gate"] {
            assert_eq!(format(name), WeightFormat::BF16, "{to} {name}");
        }
    }
}

#[test]
fn what_is_written_is_read_again() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/llama");
    let directory = tempfile::tempdir().expect("a directory");
    let open = |path: &Path| ModelFiles::open(path, LoadFormat::Auto).expect("opens");
    let (q, norm) = ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight");
    // Half a step of e4m3 at its largest values, and of 127 steps.
    for (format, step) in [("fp8", 0.036), ("int8", 0.004)] {
        let (before, out) = (open(&golden), directory.path().join(format));
        baton_model::quantize(&before, format.parse().expect("a format"), &out, &mut |_| ()).expect("writes");
        let after = open(&out);
        assert!(after.config().quantization.is_some(), "{format}");
        let error = difference(&before, &after, q);
        assert!(error > 0.0 && error < step, "{format}: {error}");
        assert!(difference(&before, &after, norm) < f32::MIN_POSITIVE);
        let again = baton_model::quantize(&before, format.parse().expect("a format"), &out, &mut |_| ());
        assert!(again.expect_err("it is there").to_string().contains("is there already"));
    }
    // Experts stay as they are, and others are told so.
    let (before, out) = (open(&golden.with_file_name("qwen3-moe")), directory.path().join("experts"));
    baton_model::quantize(&before, "fp8".parse().expect("a format"), &out, &mut |_| ()).expect("writes");
    let config = std::fs::read_to_string(out.join("config.json")).expect("reads");
    assert!(config.contains("\"model.layers.0.mlp.experts.7.down_proj\"") && config.contains("mlp.gate\""));
    let up = "model.layers.1.mlp.experts.3.up_proj.weight";
    assert!(difference(&before, &open(&out), up) < f32::MIN_POSITIVE);
    let gguf = golden.join("model.gguf");
    let (before, out) = (open(&gguf), directory.path().join("model.gguf"));
    // Rows of 48 are no whole blocks: they become f16.
    baton_model::quantize(&before, "q8_0".parse().expect("a format"), &out, &mut |_| ()).expect("writes");
    let after = open(&out);
    assert!(difference(&before, &after, "blk.0.attn_q.weight") < 1e-3);
    let (old, new) = (before.gguf().expect("GGUF").metadata(), after.gguf().expect("GGUF").metadata());
    assert!(old.iter().all(|(key, value)| key == "general.file_type" || new.get(key) == Some(value)));
    assert!(baton_model::quantize(&before, "fp8".parse().expect("a format"), &out, &mut |_| ()).is_err());
}
