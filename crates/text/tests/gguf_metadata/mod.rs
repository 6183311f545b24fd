//! The least that reads `tokenizer.*` metadata of a trusted GGUF file, so that this crate's tests need no other.

use std::collections::HashMap;

use baton_text::GgufVocab;

#[derive(Debug)]
enum Value {
    Integer(i64),
    Float(f64),
    Text(String),
    Array(Vec<Value>),
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (head, rest) = self.0.split_at(N);
        self.0 = rest;
        head.try_into().expect("length N")
    }

    fn text(&mut self) -> String {
        let length = u64::from_le_bytes(self.take()) as usize;
        let (head, rest) = self.0.split_at(length);
        self.0 = rest;
        String::from_utf8(head.to_vec()).expect("UTF-8")
    }

    fn value(&mut self, kind: u32) -> Value {
        match kind {
            0 | 7 => Value::Integer(i64::from(self.take::<1>()[0])),
            1 => Value::Integer(i64::from(i8::from_le_bytes(self.take()))),
            2 => Value::Integer(i64::from(u16::from_le_bytes(self.take()))),
            3 => Value::Integer(i64::from(i16::from_le_bytes(self.take()))),
            4 => Value::Integer(i64::from(u32::from_le_bytes(self.take()))),
            5 => Value::Integer(i64::from(i32::from_le_bytes(self.take()))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.take()))),
            8 => Value::Text(self.text()),
            9 => {
                let kind = u32::from_le_bytes(self.take());
                let length = u64::from_le_bytes(self.take());
                Value::Array((0..length).map(|_| self.value(kind)).collect())
            }
            10 => Value::Integer(u64::from_le_bytes(self.take()) as i64),
            11 => Value::Integer(i64::from_le_bytes(self.take())),
            12 => Value::Float(f64::from_le_bytes(self.take())),
            other => panic!("metadata type {other}"),
        }
    }
}

/// The vocabulary of a GGUF file.
pub fn read_vocab(bytes: &[u8]) -> GgufVocab {
    let mut reader = Reader(bytes);
    assert_eq!(&reader.take::<4>(), b"GGUF");
    let _version = reader.take::<4>();
    let _tensors = reader.take::<8>();
    let count = u64::from_le_bytes(reader.take());
    let mut values = HashMap::new();
    for _ in 0..count {
        let key = reader.text();
        let kind = u32::from_le_bytes(reader.take());
        let value = reader.value(kind);
        if key == "general.name" || key.starts_with("tokenizer.") {
            values.insert(key.strip_prefix("tokenizer.").unwrap_or(&key).to_owned(), value);
        }
    }
    let mut array = |key: &str| match values.remove(key) {
        Some(Value::Array(items)) => items,
        _ => Vec::new(),
    };
    let text =
        |value: Value| if let Value::Text(text) = value { text } else { panic!("not a text: {value:?}") };
    let tokens = array("ggml.tokens").into_iter().map(text).collect();
    let merges = array("ggml.merges").into_iter().map(text).collect();
    let token_types = array("ggml.token_type")
        .into_iter()
        .map(|value| if let Value::Integer(kind) = value { kind as i32 } else { panic!("not an integer") })
        .collect();
    let scores = array("ggml.scores")
        .into_iter()
        .map(|value| if let Value::Float(score) = value { score as f32 } else { panic!("not a number") })
        .collect();
    let precompiled_charsmap = array("ggml.precompiled_charsmap")
        .into_iter()
        .map(|value| if let Value::Integer(byte) = value { byte as u8 } else { panic!("not an integer") })
        .collect();
    let integer = |key: &str| match values.get(key) {
        Some(Value::Integer(value)) => Some(*value),
        _ => None,
    };
    let id = |key: &str| integer(key).map(|value| value as u32);
    let flag = |key: &str| integer(key).map(|value| value != 0);
    let string = |key: &str| match values.get(key) {
        Some(Value::Text(text)) => Some(text.clone()),
        _ => None,
    };
    GgufVocab {
        name: string("general.name"),
        model: string("ggml.model").expect("tokenizer.ggml.model"),
        pre: string("ggml.pre"),
        tokens,
        token_types,
        scores,
        precompiled_charsmap,
        merges,
        bos_token_id: id("ggml.bos_token_id"),
        eos_token_id: id("ggml.eos_token_id"),
        eot_token_id: id("ggml.eot_token_id"),
        eom_token_id: id("ggml.eom_token_id"),
        unknown_token_id: id("ggml.unknown_token_id"),
        padding_token_id: id("ggml.padding_token_id"),
        add_bos: flag("ggml.add_bos_token"),
        add_eos: flag("ggml.add_eos_token"),
        add_space_prefix: flag("ggml.add_space_prefix"),
        chat_template: string("chat_template"),
    }
}
