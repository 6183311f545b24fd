//! Quantised checkpoints: what configurations say, what tensors must be there, and what is refused.

use serde_json::json;

use super::*;

fn parse(value: &Value) -> QuantizationConfig {
    QuantizationConfig::from_json(value).unwrap_or_else(|error| panic!("{value}: {error}"))
}

#[test]
fn configurations_are_read() {
    let awq =
        json!({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "GEMM"});
    assert_eq!(parse(&awq).to_string(), "awq, 4 bits, groups of 128");
    assert_eq!(parse(&awq).weight_format(4096), WeightFormat::Q4_1);
    assert_eq!(parse(&awq).weight_format(4100), WeightFormat::F16);
    let gptq = json!({"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": true, "sym": true});
    assert_eq!(parse(&gptq).to_string(), "gptq, 8 bits, rows, symmetric, desc_act");
    assert_eq!(parse(&gptq).weight_format(64), WeightFormat::Q8_0);
    let fp8 = json!({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"});
    assert_eq!(parse(&fp8).to_string(), "fp8 (e4m3), blocks of 128 x 128, dynamic activation scales");
    let weights = json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"});
    let blocks = json!({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": {
        "weights": weights, "input_activations": {"dynamic": false}}}});
    assert_eq!(parse(&blocks).method, QuantMethod::Fp8 { block: Some((128, 128)), is_static: true });
    let group = json!({"format": "mxfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float"}});
    let mixed = json!({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {"g": group}});
    for config in
        [mixed, json!({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})]
    {
        assert_eq!(parse(&config).to_string(), "mxfp4, blocks of 32");
        assert_eq!(parse(&config).weight_format(2880), WeightFormat::Q5_0);
    }
}

#[test]
fn what_is_not_supported_says_so() {
    for (value, expected) in [
        (json!({"quant_method": "bitsandbytes"}), "\"bitsandbytes\" is not supported; take a checkpoint"),
        (json!({}), "no quant_method"),
        (json!({"quant_method": "awq", "bits": 3}), "weights of 3 bits are not supported"),
        (json!({"quant_method": "awq", "bits": 4, "version": "gemv"}), "the layout \"gemm\" is"),
        (json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}), "\"gptq_v2\" are"),
        (json!({"quant_method": "gptq", "bits": 4, "group_size": 0}), "a group_size of 0"),
        (json!({"quant_method": "fp8", "fmt": "e5m2"}), "\"e5m2\" are not supported"),
        (json!({"quant_method": "fp8", "weight_block_size": [128]}), "it must be two sizes"),
        (
            json!({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"g": {"weights": {}}}}),
            "\"marlin-24\"",
        ),
        (json!({"quant_method": "compressed-tensors"}), "no config_groups"),
        (json!({"quant_method": "fp8", "ignored_layers": ["re:("]}), "the pattern \"(\""),
        (json!({"quant_method": 3}), "quantization_config: invalid type"),
    ] {
        let message = QuantizationConfig::from_json(&value).unwrap_err().to_string();
        assert!(message.contains(expected), "{value}: {message}");
    }
}

#[test]
fn ignored_modules_are_not_covered() {
    let config = parse(&json!({"quant_method": "compressed-tensors", "format": "int-quantized",
        "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}},
        "ignore": ["lm_head", "re:.*self_attn.*", "model.layers.1.mlp.gate_proj"]}));
    assert!(config.covers("model.layers.0.mlp.gate_proj", false));
    assert!(!config.covers("model.layers.1.mlp.gate_proj", false));
    assert!(!config.covers("model.layers.0.self_attn.q_proj", false));
    assert!(!config.covers("lm_head", true));
    let config = parse(&json!({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["visual"]}));
    assert!(
        !config.covers("visual.blocks.0.qkv", false) && config.covers("model.layers.0.mlp.up_proj", false)
    );
    let config =
        parse(&json!({"quant_method": "gptq", "bits": 4, "lm_head": true, "dynamic": {"-:.*down.*": {}}}));
    assert!(config.covers("lm_head", true) && !config.covers("model.layers.0.mlp.down_proj", false));
}
