//! What a tokenizer is made of, as the files have it. Plain data: `text` builds the tokenizer.

use baton_core::TokenId;

use crate::ModelError;
use crate::gguf::{GgufArray, GgufFile};
use crate::mapped_file::malformed;

#[derive(Clone, Debug, PartialEq)]
pub enum TokenizerSource {
    HuggingFace { tokenizer_json: Vec<u8>, tokenizer_config_json: Option<Vec<u8>> },
    Gguf(Box<GgufVocabFields>),
}

/// The `tokenizer.*` keys of a GGUF file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufVocabFields {
    /// `general.name`, by which some tokenizers are told apart.
    pub name: Option<String>,
    /// `gpt2` (byte-level BPE), `llama` (SentencePiece) or another.
    pub model: String,
    /// Which regular expression splits text before BPE.
    pub pre: Option<String>,
    pub tokens: Vec<String>,
    /// 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte; one per token, or empty.
    pub token_types: Vec<i32>,
    /// One per token, or empty.
    pub scores: Vec<f32>,
    pub merges: Vec<String>,
    pub bos_token_id: Option<TokenId>,
    pub eos_token_id: Option<TokenId>,
    pub eot_token_id: Option<TokenId>,
    pub unknown_token_id: Option<TokenId>,
    pub padding_token_id: Option<TokenId>,
    /// How Unigram vocabularies normalise a text.
    pub precompiled_charsmap: Vec<u8>,
    pub add_bos_token: Option<bool>,
    pub add_eos_token: Option<bool>,
    pub add_space_prefix: Option<bool>,
    pub chat_template: Option<String>,
}

/// The vocabulary of a file, `None` if it has no tokens.
pub(super) fn from_gguf(file: &GgufFile) -> Result<Option<TokenizerSource>, ModelError> {
    read(file).map_err(|cause| malformed(file.path(), cause))
}

fn read(file: &GgufFile) -> Result<Option<TokenizerSource>, String> {
    let metadata = file.metadata();
    let Some(tokens) = metadata.get_strings("tokenizer.ggml.tokens")? else { return Ok(None) };
    let token_types = metadata.get_integers("tokenizer.ggml.token_type")?.unwrap_or_default();
    let token_types: Result<Vec<i32>, _> = token_types.into_iter().map(i32::try_from).collect();
    let token_types = token_types.map_err(|_| "tokenizer.ggml.token_type does not fit 32 bits".to_owned())?;
    let scores = metadata.get_f32s("tokenizer.ggml.scores")?.unwrap_or_default();
    for (name, count) in [("token_type", token_types.len()), ("scores", scores.len())] {
        if count != 0 && count != tokens.len() {
            return Err(format!("tokenizer.ggml.{name} has {count} entries for {} tokens", tokens.len()));
        }
    }
    let id = |name: &str| {
        let key = format!("tokenizer.ggml.{name}");
        match metadata.get_u32(&key)? {
            Some(id) if id as usize >= tokens.len() => {
                Err(format!("{key} is {id}, but there are {} tokens", tokens.len()))
            }
            other => Ok(other),
        }
    };
    let owned = |text: Option<&str>| text.map(str::to_owned);
    let model = metadata.get_str("tokenizer.ggml.model")?.ok_or("there is no tokenizer.ggml.model")?;
    Ok(Some(TokenizerSource::Gguf(Box::new(GgufVocabFields {
        name: owned(metadata.get_str("general.name")?),
        model: model.to_owned(),
        pre: owned(metadata.get_str("tokenizer.ggml.pre")?),
        tokens: tokens.to_vec(),
        token_types,
        scores: scores.to_vec(),
        merges: metadata.get_strings("tokenizer.ggml.merges")?.unwrap_or_default().to_vec(),
        bos_token_id: id("bos_token_id")?,
        eos_token_id: id("eos_token_id")?,
        eot_token_id: id("eot_token_id")?,
        unknown_token_id: id("unknown_token_id")?,
        padding_token_id: id("padding_token_id")?,
        precompiled_charsmap: match metadata.get_array("tokenizer.ggml.precompiled_charsmap")? {
            Some(GgufArray::U8(bytes)) => bytes.clone(),
            Some(GgufArray::I8(bytes)) => bytes.iter().map(|&byte| byte as u8).collect(),
            _ => Vec::new(),
        },
        add_bos_token: metadata.get_bool("tokenizer.ggml.add_bos_token")?,
        add_eos_token: metadata.get_bool("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: metadata.get_bool("tokenizer.ggml.add_space_prefix")?,
        chat_template: owned(metadata.get_str("tokenizer.chat_template")?),
    }))))
}
