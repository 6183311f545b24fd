//! A model's tokens for the grammar engine: a trie of their bytes, without special tokens.
//!
//! A special token is never part of a text, so no grammar may allow it: its bytes get a marker that no text has. Ids past the
//! tokenizer's (models pad their output layer) have no bytes and are never allowed. End tokens are allowed exactly where
//! the output may end.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use baton_core::{TokenId, mask_words};
use baton_text::Tokenizer;
use llguidance::{ParserFactory, panic_utils};
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::GrammarError;

/// Longer tokens (runs of spaces, rulers) are never drawn: shorter ones write the same text. The trie is only so deep.
const MAX_TOKEN_BYTES: usize = 256;
/// The trie addresses its nodes with 22 bits; real vocabularies need a third of that.
const MAX_VOCABULARY_BYTES: usize = 4 << 20;
/// Memory of a lexer that is made lazily, at 1 to 2 kB a state.
const MAX_LEXER_STATES: usize = 50_000;

/// One model's tokens, ready for grammars.
pub(crate) struct Vocabulary {
    pub(crate) factory: ParserFactory,
    /// Words of a mask.
    pub(crate) mask_words: usize,
    vocab_size: usize,
    /// At `n` the tokens that begin with more than `n` digits, as long as there are any.
    pub(crate) digit_runs: Vec<Vec<u32>>,
    env: TokEnv,
}

impl Vocabulary {
    pub(crate) fn new(
        tokenizer: &Tokenizer,
        vocab_size: usize,
        eos_token_ids: &[TokenId],
    ) -> Result<Self, GrammarError> {
        let model = |reason: &str| GrammarError::Model { reason: reason.to_owned() };
        if !tokenizer.decodes_by_bytes() {
            return Err(model("the texts of its tokens depend on their neighbours"));
        }
        let ends: Vec<TokenId> =
            eos_token_ids.iter().copied().filter(|&id| (id as usize) < vocab_size).collect();
        let Some(&first_end) = ends.first() else {
            return Err(model("it has no end token"));
        };
        let words = (0..vocab_size as TokenId).map(|id| trie_word(tokenizer, id, ends.contains(&id)));
        let words: Vec<Vec<u8>> = words.collect();
        if words.iter().map(Vec::len).sum::<usize>() > MAX_VOCABULARY_BYTES {
            return Err(model("its vocabulary is too large"));
        }
        // The trie checks itself with assertions, and the vocabulary comes from a file.
        let built = panic_utils::catch_unwind(AssertUnwindSafe(|| {
            let info = TokRxInfo::new(vocab_size as u32, first_end);
            let trie = TokTrie::from(&info, &words).with_eos_tokens(&ends);
            let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let mut factory = ParserFactory::new_simple(&env)?;
            factory.quiet();
            factory.limits_mut().verbose_errors = false;
            factory.limits_mut().max_lexer_states = MAX_LEXER_STATES;
            Ok((factory, env))
        }));
        let (factory, env) = built.map_err(|error| model(&first_line(&error.to_string())))?;
        Ok(Self {
            factory,
            mask_words: mask_words(vocab_size),
            vocab_size,
            digit_runs: digit_runs(&words),
            env,
        })
    }

    /// The bytes that a token adds to a text.
    pub(crate) fn token_bytes(&self, token_id: TokenId) -> &[u8] {
        if token_id as usize >= self.vocab_size {
            return &[];
        }
        self.env.tok_trie().token(token_id)
    }

    /// A mask of exactly the vocabulary's length.
    pub(crate) fn copy_mask(&self, allowed: &toktrie::SimpleVob, mask: &mut Vec<u32>) {
        mask.clear();
        mask.extend(allowed.as_slice().iter().take(self.mask_words));
        mask.resize(self.mask_words, 0);
        let rest = self.vocab_size % 32;
        if let Some(last) = mask.last_mut().filter(|_| rest != 0) {
            *last &= (1 << rest) - 1;
        }
    }
}

fn trie_word(tokenizer: &Tokenizer, id: TokenId, is_end: bool) -> Vec<u8> {
    if id as usize >= tokenizer.vocab_size() {
        return Vec::new();
    }
    let bytes = tokenizer.token_bytes(id);
    if bytes.len() > MAX_TOKEN_BYTES {
        return Vec::new();
    }
    if is_end || tokenizer.is_special(id) {
        return [&[TokTrie::SPECIAL_TOKEN_MARKER], &*bytes].concat();
    }
    bytes.into_owned()
}

fn digit_runs(words: &[Vec<u8>]) -> Vec<Vec<u32>> {
    let mut runs: Vec<Vec<u32>> = Vec::new();
    for (id, word) in words.iter().enumerate() {
        let num_digits = word.iter().take_while(|byte| byte.is_ascii_digit()).count();
        while runs.len() < num_digits {
            runs.push(vec![0; mask_words(words.len())]);
        }
        runs[..num_digits].iter_mut().for_each(|mask| mask[id / 32] |= 1 << (id % 32));
    }
    runs
}

/// The part of the grammar engine's error that is for people: the first line, with the last of a syntax error, which
/// names it. A backtrace may follow.
pub(crate) fn first_line(message: &str) -> String {
    const MAX_CHARS: usize = 400;
    let message = message.split("<backtrace>").next().unwrap_or_default();
    let mut lines = message.lines().map(str::trim).filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or("no reason was given");
    let first = first.strip_prefix("panic: ").unwrap_or(first);
    let line = match lines.next_back() {
        Some(last) if first.ends_with(':') => {
            format!("{first} {}", last.strip_prefix("error: ").unwrap_or(last))
        }
        _ => first.to_owned(),
    };
    if line.chars().count() <= MAX_CHARS {
        return line;
    }
    line.chars().take(MAX_CHARS).chain(['…']).collect()
}
