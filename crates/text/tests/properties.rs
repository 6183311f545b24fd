//! Properties that hold for every text, every token stream and every way of cutting them.

use std::sync::Arc;

use baton_text::{
    EncodeOptions, GgufVocab, IncrementalDecoder, OutputOptions, OutputStream, StopStrings, Tokenizer,
};
use proptest::prelude::*;

/// The character that GPT-2 writes for a byte.
fn byte_character(byte: u8) -> char {
    let stands_for_itself = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if stands_for_itself(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&other| !stands_for_itself(other)).count() as u32;
    char::from_u32(0x100 + before).expect("a character")
}

/// 256 byte tokens, a few merges, a control token (260) and a user-defined one (261).
fn byte_level_vocab(pre: &str) -> GgufVocab {
    let mut tokens: Vec<String> = (0..=255).map(|byte| byte_character(byte).to_string()).collect();
    tokens.extend(["th", "Ġt", "Ġth", "ÃĹ", "<|end|>", "<user>"].map(String::from));
    let mut token_types = vec![1; 260];
    token_types.extend([3, 4]);
    GgufVocab {
        model: "gpt2".into(),
        pre: Some(pre.into()),
        tokens,
        token_types,
        merges: ["t h", "Ġ t", "Ġt h", "Ã Ĺ"].map(String::from).to_vec(),
        bos_token_id: Some(260),
        eos_token_id: Some(260),
        ..GgufVocab::default()
    }
}

/// `<unk>`, BOS, EOS, 256 byte tokens, then pieces with scores.
fn sentencepiece_vocab(add_space_prefix: bool) -> GgufVocab {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    let mut token_types = vec![2, 3, 3];
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    token_types.extend([6; 256]);
    let pieces = ["▁", "t", "h", "e", "▁t", "he", "▁the", "▁▁", "é", "日"];
    tokens.extend(pieces.map(String::from));
    token_types.extend([1; 10]);
    let scores = (0..tokens.len()).map(|id| -(id as f32)).collect();
    GgufVocab {
        model: "llama".into(),
        tokens,
        token_types,
        scores,
        bos_token_id: Some(1),
        eos_token_id: Some(2),
        unknown_token_id: Some(0),
        add_space_prefix: Some(add_space_prefix),
        ..GgufVocab::default()
    }
}

fn tokenizer(vocab: GgufVocab) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_gguf(vocab).expect("valid"))
}

/// Text with much white space, digits, marks and tokens written out.
fn texts() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        any::<String>(),
        "[ \\t\\r\\n\u{A0}]{1,4}",
        "[0-9]{1,5}",
        "[a-zA-Zéñ日本语ก็]{1,6}",
        Just("<|end|>".to_owned()),
        Just(" the".to_owned()),
        Just("<user>".to_owned()),
        Just("I'm they'LL".to_owned()),
        Just("🦙\u{200D}\u{301}".to_owned()),
    ];
    proptest::collection::vec(part, 0..8).prop_map(|parts| parts.concat())
}

fn streamed(tokenizer: &Arc<Tokenizer>, ids: &[u32], cut: usize, skip_special: bool) -> String {
    let mut decoder = IncrementalDecoder::new(Arc::clone(tokenizer), skip_special);
    let mut text = String::new();
    for chunk in ids.chunks(cut) {
        let mut delta = String::new();
        decoder.push(chunk, &mut delta).expect("decodes");
        text.push_str(&delta);
    }
    decoder.finish(&mut text).expect("decodes");
    text
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn byte_level_round_trip(text in texts(), parse_special: bool) {
        for pre in ["gpt-2", "llama-bpe", "qwen2", "falcon", "smollm", "gpt-4o", "deepseek-v3", "default"] {
            let tokenizer = tokenizer(byte_level_vocab(pre));
            let options = EncodeOptions { add_special: false, parse_special };
            let ids = tokenizer.encode_with(&text, options).expect("encodes");
            prop_assert_eq!(tokenizer.decode(&ids, false).expect("decodes"), &*text, "{}", pre);
            if !parse_special {
                prop_assert!(!ids.contains(&260));
            }
        }
    }

    #[test]
    fn sentencepiece_round_trip(text in texts(), add_space_prefix: bool) {
        let tokenizer = tokenizer(sentencepiece_vocab(add_space_prefix));
        // SentencePiece cannot tell its own mark for a space from a space.
        let text = text.replace('\u{2581}', "_");
        let ids = tokenizer.encode(&text, false).expect("encodes");
        prop_assert_eq!(tokenizer.decode(&ids, false).expect("decodes"), text);
    }

    #[test]
    fn any_stream_gives_the_decoded_text(
        ids in proptest::collection::vec(prop_oneof![0u32..270, 195u32..256, 128u32..192, Just(260)], 0..40),
        cut in 1usize..5,
        skip_special: bool,
    ) {
        for tokenizer in [
            tokenizer(byte_level_vocab("gpt-2")),
            tokenizer(sentencepiece_vocab(true)),
            tokenizer(sentencepiece_vocab(false)),
        ] {
            let decoded = tokenizer.decode(&ids, skip_special).expect("decodes");
            prop_assert_eq!(streamed(&tokenizer, &ids, cut, skip_special), decoded);
        }
    }

    #[test]
    fn stop_strings_do_not_depend_on_the_cut(
        text in "[abé]{0,24}",
        stop in proptest::collection::vec("[abé]{1,4}", 0..4),
        include: bool,
        cuts in proptest::collection::vec(any::<bool>(), 24),
    ) {
        // By definition: the first end of any stop string, and of those that end there the longest.
        let mut ends = text.char_indices().map(|(at, character)| at + character.len_utf8());
        let hit = ends.find_map(|end| {
            let longest = stop.iter().filter(|stop| text[..end].ends_with(*stop)).max_by_key(|stop| stop.len())?;
            Some((end, longest.clone()))
        });
        let (expect_text, expect_stop) = match hit {
            Some((end, stop)) => (text[..if include { end } else { end - stop.len() }].to_owned(), Some(stop)),
            None => (text.clone(), None),
        };
        let mut stops = StopStrings::new(stop.clone(), include).expect("valid");
        let (mut shown, mut found, mut piece) = (String::new(), None, String::new());
        for (character, cut) in text.chars().zip(cuts.iter().chain(std::iter::repeat(&true))) {
            piece.push(character);
            if *cut {
                found = found.or(stops.push(&piece, true, &mut shown));
                piece.clear();
            }
        }
        found = found.or(stops.push(&piece, true, &mut shown));
        stops.finish(&mut shown);
        prop_assert_eq!(shown, expect_text);
        prop_assert_eq!(found, expect_stop);
    }

    #[test]
    fn output_does_not_depend_on_how_tokens_come(
        ids in proptest::collection::vec(prop_oneof![97u32..104, 0u32..262], 0..30),
        stop in proptest::collection::vec("[a-g]{1,2}", 0..3),
        min_tokens in 0u32..10,
        cut in 1usize..6,
    ) {
        let tokenizer = tokenizer(byte_level_vocab("gpt-2"));
        let run = |cut: usize| {
            let options = OutputOptions { stop: stop.clone(), min_tokens, ..OutputOptions::default() };
            let mut stream = OutputStream::new(Arc::clone(&tokenizer), &[5], options).expect("valid");
            let (mut text, mut stopped) = (String::new(), None);
            for chunk in ids.chunks(cut) {
                let delta = stream.push(chunk).expect("decodes");
                text.push_str(&delta.text);
                stopped = stopped.or(delta.stopped);
            }
            let delta = stream.finish().expect("decodes");
            text.push_str(&delta.text);
            (text, stopped.or(delta.stopped))
        };
        let (text, stopped) = run(cut);
        if let Some(stopped) = &stopped {
            prop_assert!(stopped.num_tokens > min_tokens as usize);
        } else {
            prop_assert_eq!(&text, &tokenizer.decode(&ids, true).expect("decodes"));
        }
        prop_assert_eq!((text, stopped), run(1));
    }

    /// Whatever a file says, loading gives a tokenizer or an error; what loads can be used.
    #[test]
    fn damaged_vocabularies_are_survived(
        spm: bool,
        damage in proptest::collection::vec((0usize..9, any::<u32>(), any::<String>()), 1..4),
        text in texts(),
    ) {
        let mut vocab = if spm { sentencepiece_vocab(true) } else { byte_level_vocab("llama-bpe") };
        for (kind, number, word) in damage {
            let at = number as usize % vocab.tokens.len().max(1);
            match kind {
                0 => vocab.tokens.truncate(at),
                1 => if let Some(token) = vocab.tokens.get_mut(at) { *token = word },
                2 => vocab.token_types.truncate(at),
                3 => if let Some(value) = vocab.token_types.get_mut(at) { *value = number as i32 % 9 },
                4 => vocab.merges.push(word),
                5 => vocab.eos_token_id = Some(number),
                6 => if let Some(score) = vocab.scores.get_mut(at) { *score = f32::from_bits(number) },
                7 => vocab.model = if number % 2 == 0 { "gpt2".into() } else { "gemma4".into() },
                _ => vocab.tokens.insert(at, "<|end|>".into()),
            }
        }
        if let Ok(tokenizer) = Tokenizer::from_gguf(vocab) {
            let ids = tokenizer.encode(&text, true).expect("encodes");
            let _ = tokenizer.decode(&ids, true).expect("decodes");
            prop_assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
        }
    }
}

#[test]
fn beginning_and_end_are_added_once() {
    let mut vocab = sentencepiece_vocab(true);
    vocab.add_eos = Some(true);
    let spm = tokenizer(vocab);
    assert_eq!(spm.encode("the", true).expect("encodes"), [1, 265, 2]);
    assert_eq!(spm.encode("<s>the</s>", true).expect("encodes"), [1, 265, 2]);
    assert_eq!(spm.encode("", true).expect("encodes"), [1, 2]);
    assert_eq!(spm.encode_chat("<s>the").expect("encodes"), [1, 265]);
    assert_eq!(spm.encode_chat("the").expect("encodes"), [1, 265]);
    let bpe = tokenizer(byte_level_vocab("llama-bpe"));
    assert_eq!(bpe.encode("th", true).expect("encodes"), [260, 256]);
    let bpe = tokenizer(byte_level_vocab("gpt-2"));
    assert_eq!(bpe.encode("th", true).expect("encodes"), [256]);
    assert_eq!(bpe.end_token_ids(), [260]);
}

#[test]
fn special_tokens_are_read_or_not_as_asked() {
    let bpe = tokenizer(byte_level_vocab("gpt-2"));
    assert_eq!(bpe.encode("th<|end|><user>", false).expect("encodes"), [256, 260, 261]);
    let plain = EncodeOptions { add_special: false, parse_special: false };
    let ids = bpe.encode_with("<|end|><user>", plain).expect("encodes");
    assert_eq!(ids.last(), Some(&261), "user-defined tokens are always tokens");
    assert!(!ids.contains(&260));
    assert_eq!(bpe.decode(&[256, 260, 261], true).expect("decodes"), "th<user>");
    assert_eq!(bpe.decode(&[256, 260, 261], false).expect("decodes"), "th<|end|><user>");
}

#[test]
fn a_continuation_keeps_its_leading_space() {
    let spm = tokenizer(sentencepiece_vocab(true));
    let the = spm.token_to_id("▁the").expect("token");
    assert_eq!(spm.decode(&[the, the], false).expect("decodes"), "the the");
    let mut stream = OutputStream::new(Arc::clone(&spm), &[1, the], OutputOptions::default()).expect("valid");
    assert_eq!(stream.push(&[the]).expect("decodes").text, " the");
}
