//! From a wish to a grammar, within limits.
//!
//! Each compilation has a thread of its own with a deep stack, because schemas may nest; whoever asked waits for it, but
//! not past a deadline. What runs on past the deadline still ends by itself (the grammar engine counts its work) and
//! until then takes one of a few places, so that hostile schemas cannot pile up.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use baton_core::{Constraint, ConstraintMatcher, StructuredOutput, TokenId};
use baton_text::Tokenizer;
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, panic_utils};

use crate::matcher::TokenMatcher;
use crate::vocabulary::{Vocabulary, first_line};
use crate::{GrammarError, gbnf, schema};

/// Of any one text: a schema, an expression, a grammar, all choices together.
const MAX_SOURCE_BYTES: usize = 256 << 10;
const MAX_CHOICES: usize = 4096;
const DEADLINE: Duration = Duration::from_secs(10);
const MAX_COMPILATIONS: usize = 4;
/// Schemas come again and again; a compiled one takes up to a few megabytes.
const CACHE_LEN: usize = 32;
/// The grammar engine takes about 3 kB a level of nesting, and nesting is limited.
const STACK_BYTES: usize = 32 << 20;

/// Compiles the structured outputs of one model. Shared by threads.
pub struct GrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    eos_token_ids: Arc<[TokenId]>,
    /// Made for the first structured output: it takes a moment, and most servers never see one.
    vocabulary: OnceLock<Result<Arc<Vocabulary>, GrammarError>>,
    /// Newest last.
    cache: Mutex<VecDeque<(StructuredOutput, Arc<CompiledGrammar>)>>,
    places: Arc<Places>,
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
            cache: Mutex::default(),
            places: Arc::default(),
        }
    }

    /// Compiles, or finds what was compiled before. Blocks the thread for up to ten seconds.
    pub fn compile(&self, wish: &StructuredOutput) -> Result<Arc<CompiledGrammar>, GrammarError> {
        check_size(wish)?;
        if let Some(found) = self.cached(wish) {
            return Ok(found);
        }
        let deadline = Instant::now() + DEADLINE;
        let place = Places::take(&self.places, deadline)?;
        let vocabulary = self
            .vocabulary
            .get_or_init(|| {
                Vocabulary::new(&self.tokenizer, self.vocab_size, &self.eos_token_ids).map(Arc::new)
            })
            .clone()?;
        let (sender, receiver) = sync_channel(1);
        let (own_wish, what) = (wish.clone(), name(wish));
        let thread = std::thread::Builder::new().name("baton-grammar".to_owned()).stack_size(STACK_BYTES);
        let started = thread.spawn(move || {
            let _place = place;
            let _ = sender.send(compile(&vocabulary, &own_wish));
        });
        started.map_err(|_| GrammarError::Busy)?;
        let compiled = match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(compiled) => Arc::new(compiled?),
            Err(RecvTimeoutError::Timeout) => {
                return Err(GrammarError::TooSlow { what, seconds: DEADLINE.as_secs() });
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(GrammarError::Invalid { what, reason: "the compiler failed on it".to_owned() });
            }
        };
        self.remember(wish, &compiled);
        Ok(compiled)
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
    let parser = panic_utils::catch_unwind(AssertUnwindSafe(|| vocabulary.factory.create_parser(grammar)));
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

/// How many compilations run.
#[derive(Debug, Default)]
struct Places {
    taken: Mutex<usize>,
    freed: Condvar,
}

struct Place(Arc<Places>);

impl Places {
    fn take(places: &Arc<Self>, deadline: Instant) -> Result<Place, GrammarError> {
        let mut taken = lock(&places.taken);
        while *taken >= MAX_COMPILATIONS {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(GrammarError::Busy);
            }
            (taken, _) = places.freed.wait_timeout(taken, left).unwrap_or_else(PoisonError::into_inner);
        }
        *taken += 1;
        Ok(Place(Arc::clone(places)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *lock(&self.0.taken) -= 1;
        self.0.freed.notify_one();
    }
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

    #[test]
    fn only_so_many_compile_at_a_time() {
        let places = Arc::default();
        let soon = || Instant::now() + Duration::from_millis(20);
        let taken: Vec<Place> =
            (0..MAX_COMPILATIONS).map(|_| Places::take(&places, soon()).expect("a place")).collect();
        assert_eq!(Places::take(&places, soon()).map(drop), Err(GrammarError::Busy));
        drop(taken);
        assert!(Places::take(&places, soon()).is_ok());
    }
}
