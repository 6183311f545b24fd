//! Small vocabularies, and a reader that walks a text through a grammar token by token, as an engine would.
#![allow(dead_code, reason = "each test file uses its own part of this")]

use std::sync::Arc;

use baton_core::{Constraint, StructuredOutput, TokenId, mask_allows, mask_words};
use baton_grammar::{CompiledGrammar, GrammarCompiler, GrammarError};
use baton_text::{GgufVocab, Tokenizer};

/// Longer tokens than single bytes, chosen to straddle the parts of JSON.
const PIECES: [&str; 24] = [
    "{\"", "\":", "\": ", "\",\"", "\", \"", "\"}", "}}", "],", "[[", "null", "true", "false", "12", "00",
    "0.", ".5", "foo", "bar", "\"foo", "foo\"", "\n ", "\n  ", ", ", "<|end",
];

/// A model whose vocabulary is padded past its tokenizer's.
pub struct Model {
    pub tokenizer: Arc<Tokenizer>,
    pub vocab_size: usize,
    pub end: TokenId,
    pub compiler: GrammarCompiler,
}

impl Model {
    pub fn new(tokenizer: Tokenizer, end: TokenId) -> Self {
        let tokenizer = Arc::new(tokenizer);
        let vocab_size = tokenizer.vocab_size() + 7;
        let compiler = GrammarCompiler::new(Arc::clone(&tokenizer), vocab_size, Arc::from([end]));
        Self { tokenizer, vocab_size, end, compiler }
    }

    /// All bytes and some pieces, in GPT-2's alphabet.
    pub fn byte_level() -> Self {
        let mut tokens = vec!["<|end|>".to_owned(), "<|start|>".to_owned()];
        tokens.extend((0..=255).map(|byte| byte_character(byte).to_string()));
        tokens.extend(PIECES.iter().map(|piece| piece.bytes().map(byte_character).collect()));
        let vocab = GgufVocab {
            model: "gpt2".into(),
            pre: Some("gpt-2".into()),
            token_types: (0..tokens.len()).map(|id| if id < 2 { 3 } else { 1 }).collect(),
            tokens,
            eos_token_id: Some(0),
            ..GgufVocab::default()
        };
        Self::new(Tokenizer::from_gguf(vocab).expect("a vocabulary"), 0)
    }

    /// Byte tokens and pieces as SentencePiece writes them.
    pub fn sentence_piece() -> Self {
        let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
        tokens.extend((0..=255).map(|byte: u8| format!("<0x{byte:02X}>")));
        tokens.extend((b' '..=b'~').map(|byte| char::from(byte).to_string().replace(' ', "\u{2581}")));
        tokens.extend(PIECES.iter().map(|piece| piece.replace(' ', "\u{2581}")));
        let kind = |id: usize| match id {
            0 => 2,
            1 | 2 => 3,
            3..259 => 6,
            _ => 1,
        };
        let vocab = GgufVocab {
            model: "llama".into(),
            scores: vec![0.0; tokens.len()],
            token_types: (0..tokens.len()).map(kind).collect(),
            tokens,
            eos_token_id: Some(2),
            unknown_token_id: Some(0),
            ..GgufVocab::default()
        };
        Self::new(Tokenizer::from_gguf(vocab).expect("a vocabulary"), 2)
    }

    pub fn compile(&self, wish: &StructuredOutput) -> Result<Arc<CompiledGrammar>, GrammarError> {
        self.compiler.compile_apart(wish)
    }

    pub fn json(&self, schema: &serde_json::Value) -> Arc<CompiledGrammar> {
        self.compile(&StructuredOutput::Json(schema.to_string()))
            .unwrap_or_else(|error| panic!("{schema}: {error}"))
    }

    /// The text as tokens: the longest that fits each time, or single bytes.
    pub fn cut(&self, text: &str, into_bytes: bool) -> Vec<TokenId> {
        let mut rest = text.as_bytes();
        let mut tokens = Vec::new();
        while !rest.is_empty() {
            let fits = |&id: &TokenId| {
                let bytes = self.tokenizer.token_bytes(id);
                !self.tokenizer.is_special(id)
                    && !bytes.is_empty()
                    && rest.starts_with(&bytes)
                    && (!into_bytes || bytes.len() == 1)
            };
            let ids = (0..self.tokenizer.vocab_size() as TokenId).filter(fits);
            let best =
                ids.max_by_key(|&id| self.tokenizer.token_bytes(id).len()).expect("all bytes are tokens");
            rest = &rest[self.tokenizer.token_bytes(best).len()..];
            tokens.push(best);
        }
        tokens
    }

    /// Whether the masks let these tokens be drawn one after the other, and then the end.
    pub fn accepts_tokens(&self, grammar: &CompiledGrammar, tokens: &[TokenId]) -> bool {
        let mut mask = grammar.first_mask().to_vec();
        let mut matcher = grammar.start();
        for &token in tokens {
            assert_eq!(mask.len(), mask_words(self.vocab_size));
            if !mask_allows(&mask, token) {
                return false;
            }
            matcher.advance(token, &mut mask).expect("an allowed token can be taken");
        }
        mask_allows(&mask, self.end)
    }

    /// Whether a text is accepted; how it is cut into tokens must not matter.
    pub fn accepts(&self, grammar: &CompiledGrammar, text: &str) -> bool {
        let accepted = self.accepts_tokens(grammar, &self.cut(text, false));
        assert_eq!(accepted, self.accepts_tokens(grammar, &self.cut(text, true)), "single bytes: {text}");
        accepted
    }
}

/// GPT-2's character for a byte.
fn byte_character(byte: u8) -> char {
    let is_own = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_own(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&other| !is_own(other)).count() as u32;
    char::from_u32(0x100 + before).expect("a character")
}
