//! Where Hugging Face directories keep the chat template: a file of its own, or a string (or named strings) in
//! `tokenizer_config.json`.

use std::path::Path;

use serde::Deserialize;

use crate::ModelError;
use crate::mapped_file::{malformed, read_if_present};

#[derive(Deserialize)]
struct TokenizerConfig {
    #[serde(default)]
    chat_template: Option<Templates>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<Named>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

impl Templates {
    /// The one named "default", as a request without tools uses it.
    fn into_default(self) -> Option<String> {
        match self {
            Self::One(template) => Some(template),
            Self::Named(templates) => {
                templates.into_iter().find(|named| named.name == "default").map(|named| named.template)
            }
        }
    }
}

pub(super) fn from_directory(directory: &Path, limit: u64) -> Result<Option<String>, ModelError> {
    let jinja = directory.join("chat_template.jinja");
    if let Some(bytes) = read_if_present(&jinja, limit)? {
        let text = String::from_utf8(bytes).map_err(|cause| malformed(&jinja, cause.to_string()))?;
        return Ok(Some(text));
    }
    // The second file is what multimodal checkpoints wrote before the first was given named templates.
    for name in ["tokenizer_config.json", "chat_template.json"] {
        let path = directory.join(name);
        let Some(bytes) = read_if_present(&path, limit)? else { continue };
        let config: TokenizerConfig =
            serde_json::from_slice(&bytes).map_err(|cause| malformed(&path, cause.to_string()))?;
        if let Some(template) = config.chat_template.and_then(Templates::into_default) {
            return Ok(Some(template));
        }
    }
    Ok(None)
}
