//! Tokenizers from tokenizer.json: the same ids and texts as the Python library gives (`data/make_tokenizers.py`), and
//! no panic whatever the file contains.

use std::path::Path;
use std::sync::Arc;

use baton_text::{EncodeOptions, IncrementalDecoder, Tokenizer};
use serde_json::Value;

const NAMES: [&str; 3] = ["byte-level", "sentencepiece", "wordpiece"];

fn file(name: &str) -> Vec<u8> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizers").join(format!("{name}.json"));
    std::fs::read(path).expect("fixture")
}

fn load(name: &str) -> Arc<Tokenizer> {
    let config = br#"{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "T"}"#;
    Arc::new(Tokenizer::from_hf(&file(name), Some(config)).expect("loads"))
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn stream(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip_special: bool) -> String {
    let mut decoder = IncrementalDecoder::new(Arc::clone(tokenizer), skip_special);
    let mut text = String::new();
    for &id in ids {
        decoder.push(&[id], &mut text).expect("decodes");
    }
    decoder.finish(&mut text).expect("decodes");
    text
}

#[test]
fn ids_and_texts_are_those_of_the_python_library() {
    let expected: Value = serde_json::from_slice(&file("expected")).expect("JSON");
    for name in NAMES {
        let tokenizer = load(name);
        for case in expected[name].as_array().expect("cases") {
            let text = case["text"].as_str().expect("text");
            let encoded = tokenizer.encode(text, false).expect("encodes");
            assert_eq!(encoded, ids(&case["ids"]), "{name} {text:?}");
            let plain = EncodeOptions { add_special: false, parse_special: false };
            assert_eq!(
                tokenizer.encode_with(text, plain).expect("encodes"),
                ids(&case["plain_ids"]),
                "{name} {text:?}"
            );
            let with_special = tokenizer.encode(text, true).expect("encodes");
            let mut expect = ids(&case["with_special"]);
            if tokenizer.bos_id().is_some_and(|bos| expect.starts_with(&[bos, bos])) {
                expect.remove(0);
            }
            assert_eq!(with_special, expect, "{name} {text:?}");
            for (skip, key) in [(false, "decoded"), (true, "decoded_without_special")] {
                let decoded = tokenizer.decode(&encoded, skip).expect("decodes");
                assert_eq!(decoded, case[key].as_str().expect("text"), "{name} {text:?}");
                assert_eq!(stream(&tokenizer, &encoded, skip), decoded, "{name} {text:?}");
            }
        }
    }
}

#[test]
fn the_vocabulary_can_be_asked() {
    let tokenizer = load("byte-level");
    assert_eq!(tokenizer.bos_id(), Some(0));
    assert_eq!(tokenizer.eos_id(), Some(1));
    assert_eq!(tokenizer.token_to_id("<|end|>"), Some(2));
    assert!(tokenizer.end_token_ids().starts_with(&[1]) && tokenizer.end_token_ids().contains(&2));
    assert!(tokenizer.is_special(2) && !tokenizer.is_special(50));
    let user = tokenizer.token_to_id("<|user|>").expect("added");
    assert!(!tokenizer.is_special(user));
    assert_eq!(tokenizer.vocab_size(), user as usize + 1);
    assert_eq!(tokenizer.chat_template(), Some("T"));
    let space = tokenizer.token_to_id("Ġ").expect("space");
    assert_eq!(tokenizer.token_bytes(space).as_ref(), b" ");
    assert_eq!(tokenizer.token_text(space), Some("Ġ"));
    let hex = load("sentencepiece");
    let byte = hex.token_to_id("<0xE6>").expect("byte token");
    assert_eq!(hex.token_bytes(byte).as_ref(), [0xE6]);
    // The beginning of a character is held back; with the wrong continuation it becomes U+FFFD.
    assert_eq!(stream(&hex, &[byte, byte], false), "\u{FFFD}\u{FFFD}");
    assert_eq!(hex.decode(&[byte, byte], false).expect("decodes"), "\u{FFFD}\u{FFFD}");
}

#[test]
fn any_ids_stream_as_they_decode() {
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    for name in NAMES {
        let tokenizer = load(name);
        for round in 0..200 {
            let ids: Vec<u32> = (0..round % 23)
                .map(|_| {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    ((random >> 33) % (tokenizer.vocab_size() as u64 + 3)) as u32
                })
                .collect();
            for skip in [false, true] {
                let decoded = tokenizer.decode(&ids, skip).expect("decodes");
                assert_eq!(stream(&tokenizer, &ids, skip), decoded, "{name} {ids:?}");
            }
        }
    }
}

/// Damages one value of the JSON tree, chosen by `choice`.
fn damage(value: &mut Value, choice: &mut u64) {
    fn count(value: &Value) -> u64 {
        1 + match value {
            Value::Array(items) => items.iter().map(count).sum::<u64>(),
            Value::Object(items) => items.values().map(count).sum::<u64>(),
            _ => 0,
        }
    }
    let kind = *choice % 9;
    let mut at = (*choice / 9) % count(value);
    let mut node = value;
    while at > 0 {
        at -= 1;
        let children: Vec<&mut Value> = match node {
            Value::Array(items) => items.iter_mut().collect(),
            Value::Object(items) => items.values_mut().collect(),
            _ => unreachable!("a leaf has no children"),
        };
        node = 'found: {
            for child in children {
                let size = count(child);
                if at < size {
                    break 'found child;
                }
                at -= size;
            }
            unreachable!("the index is within the tree")
        };
    }
    *node = match kind {
        0 => Value::Null,
        1 => Value::from(-1),
        2 => Value::from(u64::MAX),
        3 => Value::from(4_000_000_000_u64),
        4 => Value::from("("),
        5 => Value::Array(vec![]),
        6 => Value::Object(serde_json::Map::new()),
        7 => Value::from(true),
        _ => Value::from("Sequence"),
    };
}

/// The vocabulary is most of a file; without it the damage hits the settings more often.
#[test]
fn damaged_files_are_survived() {
    let mut loaded = 0;
    for name in NAMES {
        let json: Value = serde_json::from_slice(&file(name)).expect("JSON");
        let mut choice = 0x2545_F491_4F6C_DD1D_u64;
        for round in 0..600 {
            choice = choice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let mut damaged = json.clone();
            let mut part = choice >> 16;
            if round % 4 == 0 {
                damage(&mut damaged, &mut part);
            } else {
                let keys =
                    ["added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model"];
                damage(&mut damaged[keys[round % keys.len()]], &mut part);
            }
            let bytes = serde_json::to_vec(&damaged).expect("JSON");
            if let Ok(tokenizer) = Tokenizer::from_hf(&bytes, None) {
                loaded += 1;
                let tokenizer = Arc::new(tokenizer);
                for text in ["", "Hello <s> wörld 🦙", "<|end|>\n"] {
                    if let Ok(ids) = tokenizer.encode(text, true) {
                        let _ = tokenizer.decode(&ids, true);
                        let mut decoder = IncrementalDecoder::new(Arc::clone(&tokenizer), false);
                        let _ = decoder.push(&ids, &mut String::new());
                    }
                }
            }
        }
        for cut in 0..40 {
            let bytes = file(name);
            assert!(Tokenizer::from_hf(&bytes[..bytes.len() * cut / 41], None).is_err());
        }
    }
    assert!(loaded > 100, "only {loaded} damaged files could be loaded: the damage is too coarse");
    assert!(Tokenizer::from_hf(&file("byte-level"), Some(b"{")).is_err());
    let deep = "[".repeat(100_000) + &"]".repeat(100_000);
    assert!(Tokenizer::from_hf(deep.as_bytes(), None).is_err());
}
