//! Configurations of whole models, whose values were compared with what `AutoConfig` of transformers 5.22 makes of the
//! same files, and small variants, whose values follow from reading its source.

use baton_backend::{Activation, RopeStyle, WeightFormat};
use serde_json::{Value, json};

use super::{Architecture, ModelConfig, NameScheme, RopeConfig, RopeScaling};
use crate::ModelError;

macro_rules! fixture {
    ($name:literal) => {
        ModelConfig::from_json(include_bytes!(concat!("../../tests/data/configs/", $name, ".json")), None)
            .unwrap()
    };
}

fn parse(value: &Value) -> Result<ModelConfig, ModelError> {
    ModelConfig::from_json(value.to_string().as_bytes(), None)
}

/// A small configuration of an architecture with some keys replaced.
fn with(architecture: &str, changes: Value) -> Value {
    let mut config = json!({
        "architectures": [architecture], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 4096,
        "head_dim": 16,
    });
    let Value::Object(changes) = changes else { panic!("changes are an object") };
    for (key, value) in changes {
        config[&key] = value;
    }
    config
}

fn without(architecture: &str, key: &str) -> Value {
    let mut config = with(architecture, json!({}));
    config.as_object_mut().unwrap().remove(key);
    config
}

#[track_caller]
fn check_error(config: &Value, expected: &str) {
    let message = parse(config).expect_err(expected).to_string();
    assert!(message.contains(expected), "{message:?} does not contain {expected:?}");
}

#[test]
fn llama_2() {
    let config = fixture!("llama-2-7b");
    assert_eq!(config.architecture, Architecture::Llama);
    assert_eq!(config.names, NameScheme::HuggingFace);
    assert_eq!((config.hidden_size, config.intermediate_size, config.vocab_size), (4096, 11008, 32000));
    assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (32, 32, 128));
    assert_eq!((config.layers.len(), config.max_model_len), (32, 4096));
    assert_eq!(config.attention_kinds(), [None]);
    let rope = RopeConfig { theta: 10_000.0, rotary_dim: 128, scaling: RopeScaling::None };
    assert_eq!(config.ropes, [rope]);
    assert_eq!((config.rope_style, config.activation), (RopeStyle::Half, Activation::Silu));
    assert_eq!((config.norm_eps, config.norm_weight_offset, config.embed_scale), (1e-5, 0.0, 1.0));
    assert_eq!(config.attention_scale, 1.0 / 128_f32.sqrt());
    assert!(!config.qkv_bias && !config.attention_output_bias && !config.mlp_bias && !config.qk_norm);
    assert!(!config.tied_embeddings && !config.post_norms);
    assert_eq!(config.dtype, WeightFormat::BF16);
    assert_eq!((config.bos_token_id, config.eos_token_ids.as_slice()), (Some(1), [2].as_slice()));
}

#[test]
fn llama_3_is_not_stretched_again() {
    let config = fixture!("llama-3.1-8b");
    assert_eq!(config.max_model_len, 131_072);
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    assert_eq!(config.ropes, [RopeConfig { theta: 500_000.0, rotary_dim: 128, scaling }]);
    let config = fixture!("llama-3.2-1b");
    assert!(config.tied_embeddings);
    assert_eq!((config.layers.len(), config.head_dim), (16, 64));
}

#[test]
fn qwen() {
    let config = fixture!("qwen3-8b");
    assert_eq!(config.architecture, Architecture::Qwen3);
    assert!(config.qk_norm && !config.qkv_bias && !config.post_norms);
    assert_eq!((config.head_dim, config.max_model_len), (128, 40_960));
    let config = fixture!("qwen2.5-7b-instruct");
    assert_eq!(config.architecture, Architecture::Qwen2);
    assert!(config.qkv_bias && !config.attention_output_bias && !config.qk_norm);
    assert_eq!((config.head_dim, config.num_kv_heads), (128, 4));
    assert_eq!(config.attention_kinds(), [None], "its window is switched off");
    // transformers' default is not hidden_size / heads here.
    assert_eq!(parse(&without("Qwen3ForCausalLM", "head_dim")).unwrap().head_dim, 128);
    assert_eq!(parse(&without("Qwen2ForCausalLM", "head_dim")).unwrap().head_dim, 16);
}

#[test]
fn qwen_windows_begin_at_a_layer() {
    let changes = json!({"use_sliding_window": true, "sliding_window": 32, "max_window_layers": 5});
    let windows = |config: &Value| -> Vec<Option<u32>> {
        parse(config).unwrap().layers.iter().map(|layer| layer.window).collect()
    };
    let (full, sliding) = (None, Some(32));
    let config = with("Qwen2ForCausalLM", changes.clone());
    assert_eq!(windows(&config), [full, full, full, full, full, sliding, sliding, sliding]);
    let mut config = with("Qwen3ForCausalLM", changes);
    let types = ["sliding_attention", "full_attention"].repeat(4);
    config["layer_types"] = json!(types);
    assert_eq!(windows(&config), [sliding, full].repeat(4));
    config["use_sliding_window"] = json!(false);
    assert_eq!(windows(&config), [full; 8]);
    config["layer_types"] = json!(["full_attention"]);
    check_error(&config, "layer_types has 1 entries for 8 layers");
    config["layer_types"] = json!((["chunked_attention"].repeat(8)));
    check_error(&config, "\"chunked_attention\", which is not supported");
}

#[test]
fn mistral_windows() {
    let config = fixture!("mistral-7b-v0.1");
    assert_eq!(config.architecture, Architecture::Mistral);
    assert_eq!(config.attention_kinds(), [Some(4096)]);
    assert_eq!((config.max_model_len, config.head_dim, config.num_kv_heads), (32_768, 128, 8));
    let kinds = |config: Value| parse(&config).unwrap().attention_kinds();
    assert_eq!(kinds(with("MistralForCausalLM", json!({"sliding_window": null}))), [None]);
    assert_eq!(kinds(with("MistralForCausalLM", json!({}))), [Some(4096)]);
    assert_eq!(kinds(with("LlamaForCausalLM", json!({"sliding_window": 5}))), [None]);
    check_error(&with("MistralForCausalLM", json!({"sliding_window": 0})), "sliding_window is 0");
    check_error(&with("MistralForCausalLM", json!({"sliding_window": 1_u64 << 32})), "does not fit 32 bits");
}

#[test]
fn gemma_of_text_alone() {
    let config = fixture!("gemma-3-1b-it");
    assert_eq!(config.architecture, Architecture::Gemma3);
    assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (4, 1, 256));
    assert_eq!((config.norm_weight_offset, config.embed_scale), (1.0, 1152_f32.sqrt()));
    assert_eq!(config.attention_scale, 1.0 / 16.0);
    assert_eq!(config.activation, Activation::GeluTanh);
    assert!(config.qk_norm && config.post_norms && config.tied_embeddings);
    assert_eq!(config.max_model_len, 32_768);
    assert_eq!(config.eos_token_ids, [1, 106]);
    for (index, layer) in config.layers.iter().enumerate() {
        let expected = if index % 6 == 5 { (None, Some(0)) } else { (Some(512), Some(1)) };
        assert_eq!((layer.window, layer.rope), expected, "layer {index}");
    }
    let rope = |theta| RopeConfig { theta, rotary_dim: 256, scaling: RopeScaling::None };
    assert_eq!(config.ropes, [rope(1_000_000.0), rope(10_000.0)]);
    assert_eq!((config.attention_softcap, config.logit_softcap), (None, None));
}

#[test]
fn gemma_within_a_multimodal_checkpoint() {
    let config = fixture!("gemma-3-4b-it");
    assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (8, 4, 256));
    assert_eq!((config.hidden_size, config.layers.len(), config.vocab_size), (2560, 34, 262_208));
    assert_eq!(config.max_model_len, 131_072, "it is stated already stretched");
    assert_eq!(config.ropes[0].scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!(config.ropes[1].scaling, RopeScaling::None);
    assert_eq!((config.dtype, config.eos_token_ids.as_slice()), (WeightFormat::BF16, [1, 106].as_slice()));
    assert!(config.tied_embeddings);
}

#[test]
fn gemma_variants() {
    let gemma = |changes| parse(&with("Gemma3ForCausalLM", changes)).unwrap();
    let config = gemma(json!({
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
        },
        "layer_types": (["full_attention", "sliding_attention"].repeat(4)),
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 168,
    }));
    assert_eq!(config.ropes[0].scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!((config.ropes[0].theta, config.ropes[1].theta), (1_000_000.0, 20_000.0));
    assert_eq!((config.layers[0].rope, config.layers[1].rope), (Some(0), Some(1)));
    assert_eq!((config.attention_softcap, config.logit_softcap), (Some(50.0), Some(30.0)));
    assert!((config.attention_scale - 1.0 / 168_f32.sqrt()).abs() < 1e-7);
    let globals = |config: &ModelConfig| -> Vec<usize> {
        (0..8).filter(|&layer| config.layers[layer].window.is_none()).collect()
    };
    assert_eq!(globals(&gemma(json!({}))), [5]);
    assert_eq!(globals(&gemma(json!({"sliding_window_pattern": 4}))), [3, 7]);
    assert_eq!(globals(&gemma(json!({"_sliding_window_pattern": 2}))), [1, 3, 5, 7]);
    assert!(!gemma(json!({"tie_word_embeddings": false})).tied_embeddings);
    check_error(
        &with("Gemma3ForCausalLM", json!({"sliding_window_pattern": 0})),
        "sliding_window_pattern is 0",
    );
    check_error(
        &with("Gemma3ForCausalLM", json!({"use_bidirectional_attention": true})),
        "only causal models are",
    );
}

#[test]
fn rope_scalings() {
    let scaling = |changes| {
        let config = parse(&with("LlamaForCausalLM", changes)).unwrap();
        (config.ropes[0].scaling.clone(), config.max_model_len)
    };
    assert_eq!(
        scaling(json!({"rope_scaling": {"type": "linear", "factor": 2.5}})),
        (RopeScaling::Linear { factor: 2.5 }, 10_240)
    );
    assert_eq!(
        scaling(json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2}})),
        (RopeScaling::Dynamic { factor: 2.0, original_max_position_embeddings: 4096 }, 8192)
    );
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_max_position_embeddings: 2048,
        attention_factor: None,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: None,
        mscale_all_dim: None,
        truncate: true,
    };
    let written = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048});
    assert_eq!(scaling(json!({"rope_scaling": written})), (yarn.clone(), 8192));
    assert_eq!(scaling(json!({"rope_parameters": written})), (yarn, 8192));
    let written = json!({
        "rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7,
        "mscale_all_dim": 0.8, "truncate": false,
    });
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_max_position_embeddings: 4096,
        attention_factor: Some(0.5),
        beta_fast: 16.0,
        beta_slow: 2.0,
        mscale: Some(0.7),
        mscale_all_dim: Some(0.8),
        truncate: false,
    };
    assert_eq!(scaling(json!({"rope_scaling": written})), (yarn, 16_384));
    assert_eq!(scaling(json!({"rope_scaling": {"rope_type": "default"}})), (RopeScaling::None, 4096));
    assert_eq!(scaling(json!({"rope_scaling": null})), (RopeScaling::None, 4096));
    let rope = |changes| parse(&with("LlamaForCausalLM", changes)).unwrap().ropes.remove(0);
    assert_eq!(rope(json!({"rope_parameters": {"rope_theta": 7.0}})).theta, 7.0);
    assert_eq!(rope(json!({"partial_rotary_factor": 0.5})).rotary_dim, 8);
    assert_eq!(rope(json!({"rope_parameters": {"partial_rotary_factor": 0.25}})).rotary_dim, 4);
}

#[test]
fn wrong_ropes_are_named() {
    let check = |changes, expected| check_error(&with("LlamaForCausalLM", changes), expected);
    check(json!({"rope_scaling": {"type": "ntk", "factor": 2}}), "\"ntk\" is not supported");
    check(json!({"rope_scaling": {"type": "longrope", "factor": 2}}), "longrope has no \"short_factor\"");
    check(json!({"rope_scaling": {"type": "linear"}}), "has no \"factor\"");
    check(json!({"rope_scaling": {"factor": 2}}), "has the factor 2 but no \"rope_type\"");
    check(json!({"rope_scaling": {"type": "linear", "factor": -1}}), "the longest sequence");
    check(json!({"rope_scaling": {"type": "linear", "factor": 1e300}}), "the longest sequence");
    check(json!({"rope_scaling": {"type": "llama3", "factor": 2}}), "has no \"low_freq_factor\"");
    let llama3 = json!({"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4});
    check(json!({"rope_scaling": llama3}), "must be above low_freq_factor");
    check(json!({"partial_rotary_factor": 0.2}), "3 of 16 dimensions");
    check(json!({"partial_rotary_factor": 2}), "partial_rotary_factor is 2");
    check(json!({"rope_theta": 0}), "rope_theta is 0");
    check(json!({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}}), "yarn needs more than 1");
    let by_type = json!({"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}});
    check(json!({"rope_parameters": by_type}), "differ between layer types");
}

#[test]
fn biases_and_ties() {
    let biases = |architecture, changes| {
        let config = parse(&with(architecture, changes)).unwrap();
        (config.qkv_bias, config.attention_output_bias, config.mlp_bias)
    };
    let all = json!({"attention_bias": true, "mlp_bias": true});
    assert_eq!(biases("LlamaForCausalLM", all.clone()), (true, true, true));
    assert_eq!(biases("LlamaForCausalLM", json!({})), (false, false, false));
    assert_eq!(biases("Qwen3ForCausalLM", all.clone()), (true, true, false));
    assert_eq!(biases("Qwen2ForCausalLM", json!({})), (true, false, false));
    assert_eq!(biases("MistralForCausalLM", all), (false, false, false));
    for (architecture, tied) in
        [("Llama", false), ("Mistral", false), ("Qwen2", false), ("Qwen3", false), ("Gemma3", true)]
    {
        let config = parse(&with(&format!("{architecture}ForCausalLM"), json!({}))).unwrap();
        assert_eq!(config.tied_embeddings, tied, "{architecture}");
    }
}

#[test]
fn heads_default_as_in_transformers() {
    let llama = |changes| parse(&with("LlamaForCausalLM", changes)).unwrap();
    assert_eq!(llama(json!({"num_key_value_heads": null})).num_kv_heads, 4);
    assert_eq!(parse(&without("LlamaForCausalLM", "num_key_value_heads")).unwrap().num_kv_heads, 4);
    let mut config = with("MistralForCausalLM", json!({"num_attention_heads": 16}));
    config.as_object_mut().unwrap().remove("num_key_value_heads");
    assert_eq!(parse(&config).unwrap().num_kv_heads, 8);
    assert_eq!(llama(json!({"head_dim": 32})).head_dim, 32);
    assert_eq!(llama(json!({"head_dim": null})).head_dim, 16);
}

#[test]
fn lengths() {
    let length = |changes| parse(&with("LlamaForCausalLM", changes)).unwrap().max_model_len;
    assert_eq!(length(json!({"max_seq_len": 100, "seq_length": 200, "model_max_length": 300})), 100);
    assert_eq!(length(json!({"max_position_embeddings": null, "n_positions": 77})), 77);
    assert_eq!(parse(&without("LlamaForCausalLM", "max_position_embeddings")).unwrap().max_model_len, 2048);
    let config = parse(&with("LlamaForCausalLM", json!({}))).unwrap();
    assert_eq!(config.resolve_max_model_len(None).unwrap(), 4096);
    assert_eq!(config.resolve_max_model_len(Some(4096)).unwrap(), 4096);
    assert_eq!(
        config.resolve_max_model_len(Some(4097)).unwrap_err().to_string(),
        "--max-model-len 4097 is more than the 4096 tokens that this model was made for"
    );
    assert!(config.resolve_max_model_len(Some(0)).is_err());
}

#[test]
fn dtypes_and_ends() {
    let llama = |changes| parse(&with("LlamaForCausalLM", changes)).unwrap();
    assert_eq!(llama(json!({"dtype": "float16"})).dtype, WeightFormat::F16);
    assert_eq!(llama(json!({"torch_dtype": "float32"})).dtype, WeightFormat::F32);
    assert_eq!(llama(json!({})).dtype, WeightFormat::BF16);
    check_error(&with("LlamaForCausalLM", json!({"dtype": "float8"})), "dtype \"float8\" is not one of");
    assert_eq!(llama(json!({"eos_token_id": [3, 4, 3]})).eos_token_ids, [3, 4]);
    assert_eq!(llama(json!({"eos_token_id": -1, "bos_token_id": -1})).bos_token_id, None);
    assert!(llama(json!({"eos_token_id": 1000})).eos_token_ids.is_empty(), "outside the vocabulary");
    let config = with("LlamaForCausalLM", json!({"eos_token_id": 3})).to_string();
    let generation = br#"{"eos_token_id": [3, 9], "temperature": 0.6, "top_k": 20}"#;
    let config = ModelConfig::from_json(config.as_bytes(), Some(generation)).unwrap();
    assert_eq!(config.eos_token_ids, [3, 9]);
}

#[test]
fn wrong_numbers_are_named() {
    let check = |changes, expected| check_error(&with("LlamaForCausalLM", changes), expected);
    for key in ["hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "num_hidden_layers"]
    {
        check_error(&without("LlamaForCausalLM", key), &format!("config.json has no \"{key}\""));
        check(json!({key: 0}), key);
        check(json!({key: 1_u64 << 39}), key);
        check(json!({key: u64::MAX}), "too large");
        check(json!({key: -1}), "config.json is not usable: invalid value");
        check(json!({key: "8"}), "config.json is not usable: invalid type");
    }
    check(json!({"num_key_value_heads": 0}), "num_key_value_heads is 0");
    check(json!({"num_key_value_heads": 3}), "must be a multiple of num_key_value_heads (3)");
    check(json!({"head_dim": 15}), "head_dim is 15; it must be even");
    check(json!({"head_dim": null, "hidden_size": 66}), "hidden_size (66) is not a multiple of");
    check(json!({"head_dim": null, "num_attention_heads": 0}), "num_attention_heads (0)");
    check(json!({"max_position_embeddings": 0}), "the longest sequence");
    check(json!({"rms_norm_eps": 0}), "rms_norm_eps is 0");
    check(json!({"hidden_act": "tanh"}), "hidden_act is \"tanh\"");
    check(json!({"quantization_config": {"quant_method": "awq"}}), "quantization_config: it has no \"bits\"");
    check(json!({"quantization_config": {"quant_method": "quip"}}), "the method \"quip\" is not supported");
    check(json!({"architectures": ["T5ForCausalLM"]}), "\"T5ForCausalLM\" is not supported");
    check(json!({"architectures": []}), "neither \"architectures\" nor \"model_type\"");
    let by_type = json!({"architectures": null, "model_type": "qwen2"});
    assert_eq!(parse(&with("", by_type)).unwrap().architecture, Architecture::Qwen2);
}

#[test]
fn a_configuration_cut_anywhere_is_an_error() {
    let config = include_bytes!("../../tests/data/configs/llama-3.1-8b.json").trim_ascii_end();
    for len in 0..config.len() {
        assert!(ModelConfig::from_json(&config[..len], None).is_err(), "{len} bytes");
    }
}

fn gpt2(change: impl FnOnce(&mut serde_json::Value)) -> Result<ModelConfig, ModelError> {
    let mut config = json!({
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_ctx": 96,
        "n_positions": 96, "vocab_size": 160, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
    });
    change(&mut config);
    ModelConfig::from_json(config.to_string().as_bytes(), None)
}

#[test]
fn gpt2_has_keys_of_its_own() {
    let config = gpt2(|_| ()).unwrap();
    assert_eq!((config.hidden_size, config.intermediate_size, config.head_dim), (48, 192, 12));
    assert_eq!((config.num_heads, config.num_kv_heads, config.layers.len()), (4, 4, 2));
    assert!(config.learned_positions && config.layer_norm && !config.gated_mlp && config.tied_embeddings);
    assert!(config.ropes.is_empty() && config.layers.iter().all(|layer| layer.rope.is_none()));
    assert_eq!((config.max_model_len, config.activation), (96, Activation::GeluTanh));
    assert_eq!(config.dtype, WeightFormat::F32);
    assert_eq!(gpt2(|config| config["n_inner"] = json!(80)).unwrap().intermediate_size, 80);
    for (key, value) in [
        ("scale_attn_by_inverse_layer_idx", json!(true)),
        ("scale_attn_weights", json!(false)),
        ("n_head", json!(5)),
        ("n_layer", json!(1_000_000)),
        ("activation_function", json!("tanh")),
    ] {
        assert!(gpt2(|config| config[key] = value).is_err(), "{key}");
    }
}
