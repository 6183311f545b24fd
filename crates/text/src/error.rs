//! Errors of tokenisers and templates. Every message says what happened and what to do about it.

use thiserror::Error;

/// An error of the text layer.
#[derive(Debug, Error)]
pub enum TextError {
    /// `tokenizer.ggml.model` names a kind that is not built.
    #[error(
        "tokenizer model '{0}' is not supported: use a model whose tokenizer is gpt2 (byte-level BPE), llama (SentencePiece) or gemma4, or give its tokenizer.json"
    )]
    UnsupportedModel(String),
    /// `tokenizer.ggml.pre` names splitting rules that are not known.
    #[error(
        "pre-tokenizer '{0}' is not known, and guessing would give wrong token ids: give the model's tokenizer.json instead"
    )]
    UnknownPreTokenizer(String),
    /// The vocabulary contradicts itself.
    #[error("the vocabulary is not usable: {0}")]
    InvalidVocab(String),
    /// tokenizer.json or tokenizer_config.json cannot be used.
    #[error("{file} cannot be used: {reason}")]
    InvalidFile { file: &'static str, reason: String },
    /// A text could not be split or encoded.
    #[error("the text could not be tokenised: {0}")]
    Encode(String),
    /// Ids could not be turned into text.
    #[error("the token ids could not be decoded: {0}")]
    Decode(String),
    /// A stop string that could never or always match.
    #[error("a stop string must not be empty")]
    EmptyStopString,
    /// The model has no chat template and none was given.
    #[error(
        "this model has no chat template: give one (--chat-template), or use the completions endpoint with a ready prompt"
    )]
    NoChatTemplate,
    /// The chat template cannot be read.
    #[error("the chat template is not valid: {0}")]
    TemplateSyntax(String),
    /// The template itself refused the conversation (`raise_exception`).
    #[error("the chat template refused the conversation: {0}")]
    TemplateRefused(String),
    /// The template failed while it was rendered.
    #[error("the chat template could not be rendered: {0}")]
    TemplateRender(String),
    /// The system had no thread to render it on.
    #[error("no thread could be started for the chat template: {0}")]
    NoThread(String),
    /// The template needed more time, memory or output than any sound template does.
    #[error("the chat template was stopped: {0}")]
    TemplateLimit(String),
}
