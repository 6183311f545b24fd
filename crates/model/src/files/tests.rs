//! Whole models on disk: what opens, what it gives, and what is said of those that do not.

use std::fs;
use std::path::Path;

use baton_backend::WeightFormat;
use tempfile::TempDir;

use super::{LoadFormat, ModelFiles, TokenizerSource};
use crate::Architecture;
use crate::test_support::gguf_writer::tiny;

const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10, "torch_dtype": "bfloat16", "eos_token_id": 2}"#;

fn directory(files: &[(&str, &str)]) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, content) in files {
        fs::write(directory.path().join(name), content).unwrap();
    }
    directory
}

fn open(path: &Path) -> ModelFiles {
    ModelFiles::open(path, LoadFormat::Auto).unwrap()
}

#[track_caller]
fn check_error(path: &Path, format: LoadFormat, expected: &str) {
    let message = ModelFiles::open(path, format).map(|_| ()).expect_err(expected).to_string();
    assert!(message.contains(expected), "{message:?} does not contain {expected:?}");
}

/// A safetensors file with one f32 tensor of two values.
fn safetensors(name: &str) -> Vec<u8> {
    let header = format!(r#"{{"{name}":{{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}}}"#);
    [(header.len() as u64).to_le_bytes().as_slice(), header.as_bytes(), &[0; 8]].concat()
}

#[test]
fn a_gguf_file_brings_everything() {
    let directory = directory(&[]);
    let path = directory.path().join("model.gguf");
    fs::write(&path, tiny("llama").f32_tensor("output_norm.weight", &[8], &[1.0; 8]).finish()).unwrap();
    let files = open(&path);
    assert_eq!(files.config().architecture, Architecture::Llama);
    assert!(files.weights().unwrap().tensor("output_norm.weight").unwrap().is_some());
    assert_eq!(files.chat_template().unwrap().as_deref(), Some("{{ messages }}"));
    let Some(TokenizerSource::Gguf(vocabulary)) = files.tokenizer_source().unwrap() else {
        panic!("no tokens")
    };
    assert_eq!((vocabulary.model.as_str(), vocabulary.tokens.len()), ("gpt2", 5));
    assert_eq!((vocabulary.token_types.as_slice(), vocabulary.merges.len()), ([2, 1, 1, 3, 3].as_slice(), 1));
    assert_eq!((vocabulary.eos_token_id, vocabulary.eot_token_id), (Some(4), None));
    let description = files.describe();
    assert_eq!(
        (description.kind.as_str(), description.num_tensors, description.total_bytes),
        ("GGUF v3", 1, 32)
    );
    assert!(files.gguf().unwrap().metadata().get("llama.block_count").is_some());
    check_error(&path, LoadFormat::Dummy, "is a GGUF file; use --load-format gguf or auto");
    // The extension does not matter where the content is clear.
    let renamed = directory.path().join("blob");
    fs::rename(&path, &renamed).unwrap();
    assert_eq!(open(&renamed).config().vocab_size, 5);
}

#[test]
fn vocabularies_that_disagree_with_themselves_are_refused() {
    let directory = directory(&[]);
    let path = directory.path().join("model.gguf");
    let error = |bytes: Vec<u8>| {
        fs::write(&path, bytes).unwrap();
        open(&path).tokenizer_source().unwrap_err().to_string()
    };
    let scores = error(tiny("llama").f32s("tokenizer.ggml.scores", &[1.0]).finish());
    assert!(scores.contains("tokenizer.ggml.scores has 1 entries for 5 tokens"), "{scores}");
    let unknown = error(tiny("llama").u32("tokenizer.ggml.unknown_token_id", 5).finish());
    assert!(unknown.contains("tokenizer.ggml.unknown_token_id is 5, but there are 5 tokens"), "{unknown}");
}

#[test]
fn a_hugging_face_directory() {
    let directory = directory(&[
        ("config.json", CONFIG),
        (
            "generation_config.json",
            r#"{"temperature": 0.6, "top_p": 0.9, "top_k": 0, "eos_token_id": [2, 7]}"#,
        ),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", r#"{"chat_template": "one"}"#),
    ]);
    let path = directory.path();
    fs::write(path.join("model.safetensors"), safetensors("model.layers.0.self_attn.q_proj.weight")).unwrap();
    let files = open(path);
    assert_eq!(files.config().eos_token_ids, [2, 7]);
    assert_eq!(files.config().dtype, WeightFormat::F32, "what the file holds");
    let generation = files.generation_defaults();
    assert_eq!((generation.temperature, generation.top_p, generation.top_k), (Some(0.6), Some(0.9), None));
    assert_eq!(files.weights().unwrap().total_bytes(), 8);
    assert_eq!(files.describe().kind, "safetensors");
    let expected = TokenizerSource::HuggingFace {
        tokenizer_json: b"{}".to_vec(),
        tokenizer_config_json: Some(br#"{"chat_template": "one"}"#.to_vec()),
    };
    assert_eq!(files.tokenizer_source().unwrap(), Some(expected));
    assert_eq!(files.chat_template().unwrap().as_deref(), Some("one"));
    check_error(path, LoadFormat::Gguf, "is not a .gguf file");
    fs::write(path.join("model.safetensors"), &safetensors("a")[..40]).unwrap();
    check_error(path, LoadFormat::Auto, "the download may be incomplete");
}

#[test]
fn chat_templates_lie_in_several_places() {
    let template = |files: &[(&str, &str)]| {
        let directory = directory(&[&[("config.json", CONFIG)], files].concat());
        open(directory.path()).chat_template().map_err(|error| error.to_string())
    };
    assert_eq!(template(&[]), Ok(None));
    assert_eq!(template(&[("tokenizer_config.json", r#"{"bos_token": {"content": "<s>"}}"#)]), Ok(None));
    let named =
        r#"{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}"#;
    assert_eq!(template(&[("tokenizer_config.json", named)]), Ok(Some("d".to_owned())));
    assert_eq!(
        template(&[("tokenizer_config.json", named), ("chat_template.jinja", "j")]),
        Ok(Some("j".to_owned()))
    );
    assert_eq!(
        template(&[("tokenizer_config.json", "{}"), ("chat_template.json", r#"{"chat_template": "c"}"#)]),
        Ok(Some("c".to_owned()))
    );
    let error = template(&[("tokenizer_config.json", r#"{"chat_template": 1}"#)]).unwrap_err();
    assert!(error.contains("tokenizer_config.json is not a usable model file"), "{error}");
}

#[test]
fn a_configuration_alone_can_be_planned_and_filled_with_noise() {
    let directory = directory(&[("config.json", CONFIG)]);
    for path in [directory.path().to_owned(), directory.path().join("config.json")] {
        let files = open(&path);
        assert_eq!(files.describe().kind, "configuration only");
        assert!(files.tokenizer_source().unwrap().is_none());
        let error = files.weights().unwrap_err().to_string();
        assert!(error.contains("no *.safetensors; use --load-format dummy"), "{error}");
        let weights = ModelFiles::open(&path, LoadFormat::Dummy).unwrap().weights().unwrap();
        assert_eq!(weights.names().len(), 3 + 2 * 9);
    }
    fs::write(directory.path().join("pytorch_model.bin"), "").unwrap();
    let error = open(directory.path()).weights().unwrap_err().to_string();
    assert!(error.contains("pickled PyTorch weights are not read"), "{error}");
}

#[test]
fn what_is_not_a_model_is_named() {
    let directory = directory(&[("x.pt", ""), ("x.safetensors", ""), ("x.txt", ""), ("x.gguf", "GGUF")]);
    let path = directory.path();
    check_error(&path.join("absent"), LoadFormat::Auto, "does not exist");
    check_error(path, LoadFormat::Auto, "has no config.json; to use the GGUF file in it, give");
    check_error(&path.join("x.pt"), LoadFormat::Auto, "can run code and are not read");
    check_error(&path.join("x.safetensors"), LoadFormat::Auto, "give the directory with its config.json");
    check_error(&path.join("x.txt"), LoadFormat::Auto, "neither a .gguf file nor a config.json");
    check_error(&path.join("x.gguf"), LoadFormat::Auto, "the file is damaged or incomplete");
    fs::write(path.join("config.json"), vec![b' '; (16 << 20) + 1]).unwrap();
    check_error(path, LoadFormat::Auto, "more than the limit of 16777216");
}
