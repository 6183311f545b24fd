//! Configurations from the metadata of small GGUF files.

use std::path::Path;

use baton_backend::{Activation, RopeStyle, SharedBytes, WeightFormat};

use super::{Architecture, ModelConfig, NameScheme, RopeScaling};
use crate::test_support::gguf_writer::{GgufWriter, tiny};
use crate::{GenerationDefaults, GgufFile, ModelError};

fn parse(writer: &GgufWriter) -> Result<ModelConfig, ModelError> {
    let bytes = SharedBytes::from_vec(writer.finish());
    ModelConfig::from_gguf(&GgufFile::from_bytes(Path::new("test.gguf"), bytes).unwrap())
}

#[track_caller]
fn check_error(writer: &GgufWriter, expected: &str) {
    let message = parse(writer).expect_err(expected).to_string();
    assert!(message.contains(expected), "{message:?} does not contain {expected:?}");
}

#[test]
fn llama() {
    let config = parse(&tiny("llama").f32_tensor("output.weight", &[8, 5], &[0.0; 40])).unwrap();
    assert_eq!((config.architecture, config.names), (Architecture::Llama, NameScheme::Gguf));
    assert_eq!((config.hidden_size, config.intermediate_size, config.vocab_size), (8, 16, 5));
    assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (4, 2, 2));
    assert_eq!((config.layers.len(), config.max_model_len), (2, 64));
    assert_eq!((config.rope_style, config.activation), (RopeStyle::Interleaved, Activation::Silu));
    assert_eq!((config.ropes.len(), config.ropes[0].theta, config.ropes[0].rotary_dim), (1, 10_000.0, 2));
    assert_eq!(config.ropes[0].scaling, RopeScaling::None);
    assert!(!config.tied_embeddings && !config.qkv_bias && !config.qk_norm && !config.post_norms);
    assert_eq!((config.bos_token_id, config.eos_token_ids.as_slice()), (Some(1), [4, 3].as_slice()));
    assert!(parse(&tiny("llama")).unwrap().tied_embeddings);
    assert_eq!(
        parse(&tiny("llama").u32("llama.attention.sliding_window", 16)).unwrap().attention_kinds(),
        [Some(16)]
    );
}

#[test]
fn tensors_decide_what_the_metadata_leaves_open() {
    let config = parse(
        &tiny("qwen2")
            .f32_tensor("blk.0.attn_q.bias", &[8], &[0.0; 8])
            .tensor("blk.0.attn_q.weight", &[32, 8], 8, &[0; 272])
            .u32("qwen2.attention.sliding_window", 16),
    )
    .unwrap();
    assert!(config.qkv_bias && !config.attention_output_bias && config.tied_embeddings);
    assert_eq!((config.dtype, config.rope_style), (WeightFormat::Q8_0, RopeStyle::Half));
    assert_eq!(config.attention_kinds(), [None], "qwen's window is not used");
    let config = parse(&tiny("llama").f32_tensor("rope_freqs.weight", &[1], &[4.0])).unwrap();
    assert_eq!(config.ropes[0].scaling, RopeScaling::Factors { divisors: vec![4.0] });
    let factors =
        |values: &[f32]| tiny("llama").f32_tensor("rope_freqs.weight", &[values.len() as u64], values);
    check_error(&factors(&[1.0, 2.0]), "there are 2 rope factors, expected 1");
    check_error(&factors(&[0.0]), "a rope factor is 0");
    check_error(&tiny("llama").tensor("rope_freqs.weight", &[2], 1, &[0; 4]), "expected one row of F32");
}

#[test]
fn gemma() {
    let gemma = || tiny("gemma3").u32("gemma3.attention.key_length", 4).f32("gemma3.rope.freq_base", 1e6);
    let windowed = || gemma().u32("gemma3.attention.sliding_window", 16);
    let config = parse(&windowed()).unwrap();
    assert_eq!((config.head_dim, config.attention_scale, config.embed_scale), (4, 0.5, 8_f32.sqrt()));
    assert_eq!((config.norm_weight_offset, config.activation), (0.0, Activation::GeluTanh));
    assert!(config.qk_norm && config.post_norms);
    assert_eq!((config.ropes[0].theta, config.ropes[1].theta), (1e6, 1e4));
    assert_eq!(config.attention_kinds(), [Some(16)], "two layers of which none is a sixth");
    let config = parse(&windowed().u32("gemma3.attention.sliding_window_pattern", 2)).unwrap();
    assert_eq!((config.layers[0].window, config.layers[0].rope), (Some(16), Some(1)));
    assert_eq!((config.layers[1].window, config.layers[1].rope), (None, Some(0)));
    let flags = |flags: &[bool]| windowed().bools("gemma3.attention.sliding_window_pattern", flags);
    assert_eq!(parse(&flags(&[false, true])).unwrap().layers[0].window, None);
    check_error(&flags(&[true]), "has 1 entries for 2 layers");
    let config = parse(&gemma().f32("gemma3.final_logit_softcapping", 30.0)).unwrap();
    assert_eq!(
        (config.attention_kinds(), config.layers[0].rope, config.logit_softcap),
        (vec![None], Some(0), Some(30.0))
    );
    let scaled = windowed().str("gemma3.rope.scaling.type", "linear").f32("gemma3.rope.scaling.factor", 8.0);
    let config = parse(&scaled).unwrap();
    assert_eq!(config.ropes[0].scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!((config.ropes[1].scaling.clone(), config.max_model_len), (RopeScaling::None, 64));
}

#[test]
fn the_27b_gemma_scales_by_its_hidden_size() {
    let mut writer = tiny("gemma3").u32("gemma3.attention.key_length", 4);
    writer.metadata[1] = GgufWriter::default().u32("gemma3.block_count", 62).metadata.remove(0);
    let config = parse(&writer).unwrap();
    assert_eq!((config.layers.len(), config.attention_scale), (62, 0.5_f32.sqrt()));
}

#[test]
fn qwen3_has_norms_on_heads() {
    let config = parse(&tiny("qwen3").u32("qwen3.attention.key_length", 8)).unwrap();
    assert_eq!((config.architecture, config.head_dim, config.qk_norm), (Architecture::Qwen3, 8, true));
}

#[test]
fn yarn_in_llama_cpp_terms() {
    let yarn = || {
        tiny("llama")
            .str("llama.rope.scaling.type", "yarn")
            .f32("llama.rope.scaling.factor", 4.0)
            .u32("llama.rope.scaling.original_context_length", 32)
    };
    let config = parse(&yarn()).unwrap();
    let expected = RopeScaling::Yarn {
        factor: 4.0,
        original_max_position_embeddings: 32,
        attention_factor: None,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: None,
        mscale_all_dim: None,
        truncate: true,
    };
    assert_eq!((config.ropes[0].scaling.clone(), config.max_model_len), (expected, 128));
    let config = parse(&yarn().f32("llama.rope.scaling.attn_factor", 0.5)).unwrap();
    let RopeScaling::Yarn { attention_factor: Some(factor), .. } = config.ropes[0].scaling else {
        panic!("{:?}", config.ropes[0].scaling)
    };
    assert!((factor - 0.5 * (0.1 * 4_f32.ln() + 1.0)).abs() < 1e-6);
    check_error(&tiny("llama").str("llama.rope.scaling.type", "ntk"), "\"ntk\" is not supported");
}

#[test]
fn per_layer_numbers_must_be_the_same() {
    let mut writer = tiny("llama");
    writer.metadata[5] = GgufWriter::default().i32s("llama.attention.head_count", &[4, 4]).metadata.remove(0);
    assert_eq!(parse(&writer).unwrap().num_heads, 4);
    writer.metadata[5] = GgufWriter::default().i32s("llama.attention.head_count", &[4, 2]).metadata.remove(0);
    check_error(&writer, "\"llama.attention.head_count\" differs between layers");
    writer.metadata[5] = GgufWriter::default().i32s("llama.attention.head_count", &[]).metadata.remove(0);
    check_error(&writer, "\"llama.attention.head_count\" has no usable value");
}

#[test]
fn missing_and_wrong_keys_are_named() {
    let names = [
        (1, "block_count"),
        (2, "context_length"),
        (3, "embedding_length"),
        (4, "feed_forward_length"),
        (5, "attention.head_count"),
        (7, "attention.layer_norm_rms_epsilon"),
    ];
    for (index, name) in names {
        let mut writer = tiny("llama");
        writer.metadata.remove(index);
        check_error(&writer, &format!("the GGUF file has no metadata \"llama.{name}\""));
        let mut writer = tiny("llama");
        writer.metadata[index] = GgufWriter::default().str(&format!("llama.{name}"), "4").metadata.remove(0);
        check_error(&writer, &format!("metadata \"llama.{name}\" should be"));
    }
    for (index, name) in &names[..5] {
        for value in [0, u32::MAX] {
            let mut writer = tiny("llama");
            writer.metadata[*index] =
                GgufWriter::default().u32(&format!("llama.{name}"), value).metadata.remove(0);
            assert!(parse(&writer).is_err(), "{name} = {value}");
        }
    }
    let mut writer = tiny("llama");
    writer.metadata.remove(6);
    assert_eq!(parse(&writer).unwrap().num_kv_heads, 4);
    check_error(&tiny("mamba"), "architecture \"mamba\" is not supported");
    check_error(&GgufWriter::default(), "no \"general.architecture\"");
    check_error(&tiny("llama").u32("llama.expert_count", 8), "llama.expert_used_count");
    check_error(&tiny("qwen2").u32("qwen2.expert_count", 8), "mixtures of experts");
    check_error(&tiny("llama").u32("llama.attention.value_length", 6), "they must be the same");
}

#[test]
fn sampling_that_the_makers_recommend_is_read() {
    let read = |writer: &GgufWriter| {
        let bytes = SharedBytes::from_vec(writer.finish());
        let file = GgufFile::from_bytes(Path::new("test.gguf"), bytes).unwrap();
        GenerationDefaults::from_gguf(file.metadata())
    };
    assert!(!read(&tiny("llama")).unwrap().samples());
    let with = tiny("llama").f32("general.sampling.temp", 0.6).f32("general.sampling.top_p", 0.95);
    let found = read(&with.u32("general.sampling.top_k", 20)).unwrap();
    assert_eq!((found.temperature, found.top_p, found.top_k), (Some(0.6), Some(0.95), Some(20)));
    assert!(found.samples() && found.min_p.is_none());
    let wrong = read(&tiny("llama").f32("general.sampling.temp", -1.0)).unwrap_err().to_string();
    assert!(wrong.contains("general.sampling.temp is -1"), "{wrong}");
    let both = GenerationDefaults { top_p: Some(0.5), ..GenerationDefaults::default() }.or(&found);
    assert_eq!((both.temperature, both.top_p), (Some(0.6), Some(0.5)));
}
