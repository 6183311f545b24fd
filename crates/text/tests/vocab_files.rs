//! Every test text of llama.cpp's vocabulary files must give exactly the token ids that come with it.
//!
//! The files (0.6 to 16 MB each) are part of the source package `llama-cpp-python` on PyPI, under
//! `vendor/llama.cpp/models`. `cargo xtask test` fetches them and names their folder in `BATON_TOKENIZER_DATA`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_text::{EncodeOptions, IncrementalDecoder, TextError, Tokenizer};

mod gguf_metadata;

/// The families that must be there.
const REQUIRED: [&str; 5] = ["falcon", "gpt-2", "llama-bpe", "llama-spm", "qwen2"];
/// WordPiece and Unigram: they change the text before they cut it, so that it does not come back.
const LOSSY: [&str; 2] = ["bert-bge", "nomic-bert-moe"];

/// Where `BATON_TOKENIZER_DATA` says, or where `cargo xtask setup` puts them. Without them the tests are skipped.
fn data_folder() -> Option<PathBuf> {
    let folder = std::env::var_os("BATON_TOKENIZER_DATA")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/tokenizers"), PathBuf::from);
    if !folder.is_dir() {
        println!("skipped: {} is not here; `cargo xtask setup` fetches it", folder.display());
    }
    folder.is_dir().then_some(folder)
}

/// Names of the vocabularies in the folder, sorted.
fn vocabularies(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter_map(|name| Some(name.strip_prefix("ggml-vocab-")?.strip_suffix(".gguf")?.to_owned()))
        .collect();
    names.sort();
    names
}

fn load(folder: &Path, name: &str) -> Result<Tokenizer, TextError> {
    let bytes = std::fs::read(folder.join(format!("ggml-vocab-{name}.gguf"))).expect("vocabulary file");
    Tokenizer::from_gguf(gguf_metadata::read_vocab(&bytes))
}

/// The texts and their ids, or `None` for a vocabulary that comes without.
fn cases(folder: &Path, name: &str) -> Option<Vec<(String, Vec<u32>)>> {
    let read =
        |ending: &str| std::fs::read_to_string(folder.join(format!("ggml-vocab-{name}.gguf.{ending}")));
    let (texts, ids) = (read("inp").ok()?, read("out").ok()?);
    let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
    let lines: Vec<&str> = ids.lines().collect();
    // The last text is followed by a separator of its own, so one empty piece may remain.
    assert!(
        texts.len() == lines.len() || texts.len() == lines.len() + 1,
        "{name}: texts and ids do not match"
    );
    let parse = |line: &str| line.split_whitespace().map(|id| id.parse().expect("a token id")).collect();
    Some(texts.iter().zip(lines).map(|(text, line)| ((*text).to_owned(), parse(line))).collect())
}

#[test]
fn every_case_gives_the_expected_ids() {
    let Some(folder) = data_folder() else { return };
    let names = vocabularies(&folder);
    for required in REQUIRED {
        assert!(names.iter().any(|name| name == required), "{required} is missing in {}", folder.display());
    }
    let plain = EncodeOptions { add_special: false, parse_special: false };
    let (mut checked, mut wrong) = (0, Vec::new());
    for name in &names {
        let tokenizer = Arc::new(load(&folder, name).unwrap_or_else(|error| panic!("{name}: {error}")));
        for (text, expect) in cases(&folder, name).unwrap_or_default() {
            checked += 1;
            let ids = tokenizer.encode_with(&text, plain).expect("encodes");
            if ids != expect {
                wrong.push(format!("{name} {text:?}\n  got      {ids:?}\n  expected {expect:?}"));
                continue;
            }
            if LOSSY.contains(&name.as_str()) {
                continue;
            }
            assert_eq!(tokenizer.decode(&ids, false).expect("decodes"), text, "{name}: round trip");
            let mut streamed = String::new();
            let mut decoder = IncrementalDecoder::new(Arc::clone(&tokenizer), false);
            for id in ids {
                decoder.push(&[id], &mut streamed).expect("decodes");
            }
            decoder.finish(&mut streamed).expect("decodes");
            assert_eq!(streamed, text, "{name}: stream");
        }
    }
    assert!(wrong.is_empty(), "{} of {checked} cases are wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(checked >= 5 * 40, "only {checked} cases were found");
}

/// The two that come with the package: BERT's words, and XLM-R's, whose ids are those of its own tokenizer.
#[test]
fn encoder_vocabularies_load() {
    let Some(folder) = data_folder() else { return };
    let encode =
        |name: &str, text: &str| load(&folder, name).expect("loads").encode(text, true).expect("encodes");
    assert_eq!(encode("bert-bge", "Hello, Wörld!"), [101, 7592, 1010, 2088, 999, 102]);
    assert_eq!(encode("nomic-bert-moe", "Hello world"), [0, 35378, 8999, 2]);
}

#[test]
fn kinds_that_are_not_built_are_named() {
    let vocab = baton_text::GgufVocab {
        model: "rwkv".to_owned(),
        tokens: vec!["a".to_owned()],
        ..baton_text::GgufVocab::default()
    };
    let error = Tokenizer::from_gguf(vocab).expect_err("not built");
    assert!(matches!(error, TextError::UnsupportedModel(_)), "{error}");
}

/// A megabyte without spaces, one without anything but spaces, and one of begun special tokens: time must grow with
/// the length, not with its square. The limit is generous; quadratic work would take minutes.
#[test]
fn long_texts_take_linear_time() {
    let Some(folder) = data_folder() else { return };
    for name in REQUIRED {
        let tokenizer = load(&folder, name).expect("loads");
        for unit in ["a", "ab1", " ", "<|", "é", "日本", "\n"] {
            let text = unit.repeat((1 << 20) / unit.len());
            let start = std::time::Instant::now();
            let ids = tokenizer.encode(&text, false).expect("encodes");
            assert_eq!(tokenizer.decode(&ids, false).expect("decodes"), text, "{name} {unit:?}");
            let seconds = start.elapsed().as_secs_f32();
            assert!(seconds < 10.0, "{name} {unit:?}: {seconds} s");
        }
    }
}
