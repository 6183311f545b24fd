//! Compiles a structured output into a grammar, within limits.
//!
//! Compilation runs on the calling thread, which needs a deep stack ([`STACK_BYTES`]), because schemas may nest. It cannot be
//! cancelled, so every part of it has a limit: the size of the source, of the grammar and of the lexer, and the work to build
//! the lexer.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use baton_core::{Constraint, ConstraintMatcher, StructuredOutput, TokenFilter, TokenId};
use baton_text::{TextError, Tokenizer};
use llguidance::api::{GrammarInit, TopLevelGrammar};
use llguidance::{Matcher, panic_utils};

use crate::matcher::TokenMatcher;
use crate::vocabulary::{Vocabulary, first_line};
use crate::words::TokenOrder;
use crate::{FilteredConstraint, GrammarError, bounds, gbnf, schema};

/// Of any one text: a schema, an expression, a grammar, all choices together.
const MAX_SOURCE_BYTES: usize = 256 << 10;
const MAX_CHOICES: usize = 4096;
/// Schemas come again and again; a compiled one takes up to a few megabytes.
const CACHE_LEN: usize = 32;
/// Of a thread that compiles: the grammar engine takes about 3 kB a level of nesting, and nesting is limited.
pub const STACK_BYTES: usize = 32 << 20;

/// Compiles the structured outputs of one model. Shared by threads.
pub struct GrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    eos_token_ids: Arc<[TokenId]>,
    /// Made for the first structured output: it takes a moment, and most servers never see one.
    vocabulary: OnceLock<Result<Arc<Vocabulary>, GrammarError>>,
    /// Made for the first banned word.
    order: OnceLock<TokenOrder>,
    /// Newest last.
    cache: Mutex<VecDeque<(StructuredOutput, Arc<CompiledGrammar>)>>,
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarCompiler").field("vocab_size", &self.vocab_size).finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// `vocab_size` is the model's, which may be larger than the tokenizer's. The end tokens are those that end an
    /// output of this model.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize, eos_token_ids: Arc<[TokenId]>) -> Self {
        Self {
            tokenizer,
            vocab_size,
            eos_token_ids,
            vocabulary: OnceLock::new(),
            order: OnceLock::new(),
            cache: Mutex::default(),
        }
    }

    /// What was compiled before. Takes no time to speak of.
    pub fn find(&self, wish: &StructuredOutput) -> Option<Arc<CompiledGrammar>> {
        self.cached(wish)
    }

    /// Compiles, or finds what was compiled before. Takes milliseconds, up to a second or two for what is only just
    /// allowed, and a stack of [`STACK_BYTES`].
    pub fn compile(&self, wish: &StructuredOutput) -> Result<Arc<CompiledGrammar>, GrammarError> {
        check_size(wish)?;
        if let Some(found) = self.cached(wish) {
            return Ok(found);
        }
        let vocabulary = self
            .vocabulary
            .get_or_init(|| {
                Vocabulary::new(&self.tokenizer, self.vocab_size, &self.eos_token_ids).map(Arc::new)
            })
            .clone()?;
        let failed =
            |_| GrammarError::Invalid { what: name(wish), reason: "the compiler failed on it".to_owned() };
        let compiled = std::panic::catch_unwind(AssertUnwindSafe(|| compile(&vocabulary, wish)));
        let compiled = Arc::new(compiled.map_err(failed)??);
        self.remember(wish, &compiled);
        Ok(compiled)
    }

    /// Compiles on a thread of its own with a deep stack, for callers that have none.
    pub fn compile_apart(&self, wish: &StructuredOutput) -> Result<Arc<CompiledGrammar>, GrammarError> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("baton-grammar".to_owned()).stack_size(STACK_BYTES);
            let started = thread.spawn_scoped(scope, || self.compile(wish));
            let compiling = started.map_err(|error| GrammarError::NoThread { reason: error.to_string() })?;
            compiling.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// The filter of a request, over its grammar if it has one. Takes milliseconds.
    pub fn filter(
        &self,
        filter: &TokenFilter,
        grammar: Option<Arc<dyn Constraint>>,
        eos_token_ids: &[TokenId],
    ) -> Result<FilteredConstraint, TextError> {
        let order = self.order.get_or_init(|| TokenOrder::new(&self.tokenizer));
        let banned = order.ban_words(&self.tokenizer, &filter.bad_words)?;
        Ok(FilteredConstraint::with_banned(filter, banned, grammar, self.vocab_size, eos_token_ids))
    }

    fn cached(&self, wish: &StructuredOutput) -> Option<Arc<CompiledGrammar>> {
        let mut cache = lock(&self.cache);
        let position = cache.iter().position(|(known, _)| known == wish)?;
        let entry = cache.remove(position)?;
        let found = Arc::clone(&entry.1);
        cache.push_back(entry);
        Some(found)
    }

    fn remember(&self, wish: &StructuredOutput, compiled: &Arc<CompiledGrammar>) {
        let mut cache = lock(&self.cache);
        // Two may have compiled the same at the same time.
        cache.retain(|(known, _)| known != wish);
        if cache.len() == CACHE_LEN {
            cache.pop_front();
        }
        cache.push_back((wish.clone(), Arc::clone(compiled)));
    }
}

/// A structured output of one model, ready to follow any number of sequences.
pub struct CompiledGrammar {
    vocabulary: Arc<Vocabulary>,
    /// Before the first token. Locked only to be copied.
    matcher: Mutex<Matcher>,
    is_json: bool,
    first_mask: Vec<u32>,
}

impl std::fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompiledGrammar").field("is_json", &self.is_json).finish_non_exhaustive()
    }
}

impl Constraint for CompiledGrammar {
    fn first_mask(&self) -> &[u32] {
        &self.first_mask
    }

    fn start(&self) -> Box<dyn ConstraintMatcher> {
        // Sequences that shared the lexer would wait for each other at every token.
        let matcher = lock(&self.matcher).deep_clone();
        Box::new(TokenMatcher::new(Arc::clone(&self.vocabulary), matcher, self.is_json))
    }
}

fn compile(vocabulary: &Arc<Vocabulary>, wish: &StructuredOutput) -> Result<CompiledGrammar, GrammarError> {
    let what = name(wish);
    let invalid = |reason: String| GrammarError::Invalid { what, reason };
    let is_json = matches!(wish, StructuredOutput::Json(_) | StructuredOutput::JsonObject);
    let grammar = match wish {
        StructuredOutput::JsonObject => json_grammar(r#"{"type": "object"}"#).map_err(invalid)?,
        StructuredOutput::Json(text) => json_grammar(text).map_err(invalid)?,
        StructuredOutput::Regex(expression) => TopLevelGrammar::from_regex(without_anchors(expression)),
        StructuredOutput::Choice(choices) => {
            let alternatives: Vec<String> = choices.iter().map(|choice| escape(choice)).collect();
            TopLevelGrammar::from_regex(&format!("(?:{})", alternatives.join("|")))
        }
        StructuredOutput::Grammar(text) if text.contains("::=") => {
            TopLevelGrammar::from_lark(gbnf::to_lark(text).map_err(invalid)?)
        }
        StructuredOutput::Grammar(text) => TopLevelGrammar::from_lark(text.clone()),
    };
    let factory = &vocabulary.factory;
    let built = panic_utils::catch_unwind(AssertUnwindSafe(|| {
        let env = Some(factory.tok_env().clone());
        let (grammar, spec) = GrammarInit::Serialized(grammar).to_internal(env, factory.limits().clone())?;
        let checked = bounds::check_lexer(&spec, factory);
        Ok((grammar, spec, checked))
    }));
    let (grammar, spec, checked) = built.map_err(|error| invalid(reason(&error.to_string())))?;
    checked.map_err(|error| invalid(reason(&error)))?;
    let parser = panic_utils::catch_unwind(AssertUnwindSafe(|| {
        factory.create_parser_from_init_default(GrammarInit::Internal(grammar, spec))
    }));
    let parser = parser.map_err(|error| invalid(reason(&error.to_string())))?;
    let matcher = Matcher::new(Ok(parser));
    let mut first = TokenMatcher::new(Arc::clone(vocabulary), matcher.clone(), is_json);
    let mut first_mask = Vec::new();
    first.mask(&mut first_mask).map_err(|message| invalid(reason(&message)))?;
    Ok(CompiledGrammar {
        vocabulary: Arc::clone(vocabulary),
        matcher: Mutex::new(matcher),
        is_json,
        first_mask,
    })
}

fn json_grammar(text: &str) -> Result<TopLevelGrammar, String> {
    Ok(TopLevelGrammar::from_json_schema(schema::prepare(text)?))
}

/// The grammar engine's words, in ours where they name its own options.
fn reason(message: &str) -> String {
    let line = first_line(message);
    if line.starts_with("oneOf constraints are not supported") {
        return "its oneOf has options that are not told apart by type or by a constant property: use anyOf"
            .to_owned();
    }
    if let Some(keys) = line.strip_prefix("Unimplemented keys: ") {
        return format!(
            "these keywords are not supported: {}",
            keys.trim_matches(['[', ']']).replace('"', "")
        );
    }
    if let Some((address, _)) = line.strip_prefix("Resource '").and_then(|rest| rest.split_once('\'')) {
        return format!("$ref to {address} is not supported: only references within the schema are");
    }
    if line.contains("fuel exhausted") || line.contains("fuel ") && line.contains("exceeded") {
        return "it takes too much work to check: make it simpler".to_owned();
    }
    if line.contains("NoExtension") {
        return "there is nothing that it lets be written".to_owned();
    }
    line
}

fn name(wish: &StructuredOutput) -> &'static str {
    match wish {
        StructuredOutput::JsonObject | StructuredOutput::Json(_) => "the JSON schema",
        StructuredOutput::Regex(_) => "the regular expression",
        StructuredOutput::Choice(_) => "the choice",
        StructuredOutput::Grammar(_) => "the grammar",
    }
}

fn check_size(wish: &StructuredOutput) -> Result<(), GrammarError> {
    let bytes = match wish {
        StructuredOutput::JsonObject => 0,
        StructuredOutput::Json(text) | StructuredOutput::Regex(text) | StructuredOutput::Grammar(text) => {
            text.len()
        }
        StructuredOutput::Choice(choices) => {
            if choices.is_empty() || choices.len() > MAX_CHOICES {
                return Err(GrammarError::NumChoices { count: choices.len(), limit: MAX_CHOICES });
            }
            choices.iter().map(String::len).sum()
        }
    };
    if bytes > MAX_SOURCE_BYTES {
        return Err(GrammarError::TooLarge { what: name(wish), bytes, limit: MAX_SOURCE_BYTES });
    }
    Ok(())
}

/// The whole output is matched anyway, so the anchors that people write by habit say nothing.
fn without_anchors(expression: &str) -> &str {
    let expression = expression.strip_prefix('^').unwrap_or(expression);
    match expression.strip_suffix('$') {
        Some(rest) if rest.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 0 => rest,
        _ => expression,
    }
}

/// A regular expression that matches exactly this text.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        if r"\.+*?()|[]{}^$#&-~".contains(character) {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}

/// What the locks guard is never left half-changed, so a panic elsewhere does not spoil it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_are_cut_and_escaped_dollars_kept() {
        assert_eq!(without_anchors("^a+$"), "a+");
        assert_eq!(without_anchors(r"a\$"), r"a\$");
        assert_eq!(without_anchors(r"a\\$"), r"a\\");
        assert_eq!(without_anchors("$"), "");
    }

    #[test]
    fn sizes_are_limited() {
        let long = "x".repeat(MAX_SOURCE_BYTES + 1);
        assert!(matches!(check_size(&StructuredOutput::Regex(long)), Err(GrammarError::TooLarge { .. })));
        let none = check_size(&StructuredOutput::Choice(Vec::new())).unwrap_err().to_string();
        assert_eq!(none, "choice must hold 1 to 4096 texts, got 0");
        let many = StructuredOutput::Choice(vec![String::new(); MAX_CHOICES + 1]);
        assert!(matches!(check_size(&many), Err(GrammarError::NumChoices { .. })));
        assert_eq!(check_size(&StructuredOutput::JsonObject), Ok(()));
    }
}
