//! What an encoder has besides: how the rows of a text become one vector, and the files of `sentence-transformers` that say so.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::ModelConfig;
use super::limits::config_error;
use crate::ModelError;
use crate::mapped_file::read_if_present;

const MAX_FILE_BYTES: u64 = 1 << 20;

/// How the rows of a text become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// Their mean.
    #[default]
    Mean,
    /// The first one.
    Cls,
    /// The last one.
    Last,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EncoderConfig {
    pub pooling: Pooling,
    /// The vector is made as long as 1.
    pub normalize: bool,
    /// Rows of the table that tells the texts of a pair apart; 0: there is none.
    pub num_token_types: usize,
    /// A head for classes: the model scores pairs of texts instead of embedding one.
    pub num_labels: Option<usize>,
    /// Scores are between 0 and 1.
    pub applies_sigmoid: bool,
    /// Two separators stand between the texts of a pair (roberta).
    pub double_separator: bool,
}

#[derive(Deserialize)]
struct Module {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    path: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
// As the file has them.
#[allow(clippy::struct_field_names)]
struct PoolingFile {
    pooling_mode: Option<String>,
    pooling_mode_cls_token: bool,
    pooling_mode_mean_tokens: bool,
    pooling_mode_lasttoken: bool,
    pooling_mode_max_tokens: bool,
    pooling_mode_mean_sqrt_len_tokens: bool,
    pooling_mode_weightedmean_tokens: bool,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct SentenceFile {
    max_seq_length: Option<u64>,
}

impl ModelConfig {
    /// Reads `modules.json`, the pooling's own `config.json` and `sentence_bert_config.json` of an encoder, where they are there.
    pub(crate) fn read_sentence_transformers(&mut self, directory: &Path) -> Result<(), ModelError> {
        let Some(encoder) = &mut self.encoder else { return Ok(()) };
        if let Some(modules) = json::<Vec<Module>>(directory, "modules.json")? {
            encoder.normalize = false;
            for module in &modules {
                match module.kind.rsplit('.').next().unwrap_or_default() {
                    "Transformer" => {}
                    "Normalize" => encoder.normalize = true,
                    "Pooling" => encoder.pooling = pooling(directory, &module.path)?,
                    other => {
                        return Err(config_error(format!(
                            "modules.json has the module {other:?}, which is not supported; Transformer, Pooling and \
                             Normalize are"
                        )));
                    }
                }
            }
        }
        let sentence = json::<SentenceFile>(directory, "sentence_bert_config.json")?.unwrap_or_default();
        if let Some(longest) = sentence.max_seq_length.and_then(|longest| usize::try_from(longest).ok()) {
            let longest = longest.max(1);
            // The table of positions stays as long as it is.
            self.max_encoded_len = Some(longest.min(self.max_model_len));
        }
        Ok(())
    }
}

fn pooling(directory: &Path, folder: &str) -> Result<Pooling, ModelError> {
    let inside = Path::new(folder).components().all(|part| matches!(part, std::path::Component::Normal(_)));
    if !inside {
        return Err(config_error(format!(
            "modules.json has the path {folder:?}, which leaves its directory"
        )));
    }
    let file: PoolingFile = json(&directory.join(folder), "config.json")?
        .ok_or_else(|| config_error(format!("{folder}/config.json, which says how to pool, is missing")))?;
    let other = file.pooling_mode_max_tokens
        || file.pooling_mode_mean_sqrt_len_tokens
        || file.pooling_mode_weightedmean_tokens;
    match (
        file.pooling_mode.as_deref(),
        file.pooling_mode_cls_token,
        file.pooling_mode_mean_tokens,
        file.pooling_mode_lasttoken,
    ) {
        (Some("mean"), ..) | (None, false, true, false) if !other => Ok(Pooling::Mean),
        (Some("cls"), ..) | (None, true, false, false) if !other => Ok(Pooling::Cls),
        (Some("lasttoken"), ..) | (None, false, false, true) if !other => Ok(Pooling::Last),
        _ => Err(config_error(format!(
            "{folder}/config.json asks for a pooling that is not supported; mean, cls and the last token are"
        ))),
    }
}

fn json<T: for<'de> Deserialize<'de>>(directory: &Path, name: &str) -> Result<Option<T>, ModelError> {
    let path = directory.join(name);
    let Some(bytes) = read_if_present(&path, MAX_FILE_BYTES)? else { return Ok(None) };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|cause| config_error(format!("{name} is not usable: {cause}")))
}
