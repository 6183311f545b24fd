//! Between text and token ids: tokenizers, chat templates, detokenisation of streams, stop strings, and the parts of an
//! answer (reasoning, content, calls of functions).
//!
//! Data comes from the server or the command line as text and messages and leaves for the engine as token ids; the
//! engine's token ids come back and leave as pieces of text. Nothing here knows a tensor, a protocol or a file: the
//! caller reads files and hands over their contents. All input is taken to be hostile, files of a model included:
//! whatever is wrong gives a [`TextError`], never a panic, a hang or a large allocation.
//!
//! ```
//! use std::sync::Arc;
//! use baton_text::{GgufVocab, OutputOptions, OutputStream, Tokenizer};
//!
//! let vocab = GgufVocab {
//!     model: "gpt2".into(),
//!     pre: Some("gpt-2".into()),
//!     tokens: ["h", "i", "!", "hi"].map(String::from).to_vec(),
//!     merges: vec!["h i".into()],
//!     ..GgufVocab::default()
//! };
//! let tokenizer = Arc::new(Tokenizer::from_gguf(vocab)?);
//! let ids = tokenizer.encode("hi!", false)?;
//! assert_eq!(ids, [3, 2]);
//!
//! let options = OutputOptions { stop: vec!["!".into()], ..OutputOptions::default() };
//! let mut stream = OutputStream::new(Arc::clone(&tokenizer), &[], options)?;
//! assert_eq!(stream.push(&ids)?.text, "hi");
//! # Ok::<(), baton_text::TextError>(())
//! ```
#![forbid(unsafe_code)]

mod answer;
mod bpe;
mod bytes;
mod contain;
mod encoder_vocab;
mod error;
mod hf;
mod incremental;
mod pretokenize;
mod special;
mod spm;
mod stop;
mod stream;
mod template;
mod tokenizer;
mod vocab;

pub use answer::{
    AnswerEvent, AnswerOptions, AnswerParser, CallMode, OutputParser, ReasoningFormat, ToolFormat,
    UnknownFormat, append_events,
};
pub use contain::panic_is_contained;
pub use error::TextError;
pub use incremental::IncrementalDecoder;
pub use stop::StopStrings;
pub use stream::{Delta, OutputOptions, OutputStream, StopMatch};
pub use template::{
    ArgumentsForm, ChatTemplate, MAX_RENDERED_BYTES, MAX_TEMPLATE_BYTES, RenderOptions, TEMPLATE_STACK_BYTES,
    TemplateAbilities, declare_large_stack,
};
pub use tokenizer::{EncodeOptions, Tokenizer};
pub use vocab::{GgufVocab, TokenKind};
