//! Structured output: JSON Schemas, regular expressions, lists of choices and context-free grammars become masks over a
//! model's vocabulary, so that a model can only write what matches.
//!
//! The work is `llguidance`'s, an Earley parser over a lexer of regular-expression derivatives. Ours is what a server
//! needs around it: the vocabulary of our tokenizers, limits on size and time, a cache, JSON that always ends
//! (bounded white space and numbers), and strictness about schemas: a keyword that cannot be enforced is an error that names
//! it, never ignored.
//!
//! There is one [`GrammarCompiler`] per model. It turns a `baton_core::StructuredOutput` into a
//! `baton_core::Constraint`, which travels with the request; the engine asks it for masks without knowing this crate.
//! Compiling takes milliseconds to seconds: never on an async thread nor on the engine's.
#![forbid(unsafe_code)]

mod bounds;
mod closed;
mod compiler;
mod error;
mod filter;
mod formats;
mod gbnf;
mod matcher;
mod schema;
mod vocabulary;
mod words;

pub use closed::{close_objects, closed_schema};
pub use compiler::{CompiledGrammar, GrammarCompiler, STACK_BYTES};
pub use error::GrammarError;
pub use filter::FilteredConstraint;
