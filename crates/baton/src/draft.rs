//! The draft model of `--speculative-config`: found and opened like any other. Its tokens must be those of the target.

use baton_model::{LoadFormat, ModelFiles};

use crate::open::{OpenOptions, Watch, find_model};
use crate::{Error, TextModel};

/// A draft model's files, and what it is called.
#[derive(Debug)]
pub(crate) struct DraftFiles {
    name: String,
    pub(crate) files: ModelFiles,
}

impl DraftFiles {
    /// That of the options; `None` where no model drafts.
    pub(crate) fn open(options: &OpenOptions, watch: &mut dyn Watch) -> Result<Option<Self>, Error> {
        let Some(config) = &options.engine.speculative else { return Ok(None) };
        let Some(model) = config.draft_model() else { return Ok(None) };
        let found = find_model(Some(model), config.revision.as_deref(), watch)?;
        // Dummy weights are for both; else a draft may be stored in another way than its target.
        let format = match options.load_format {
            LoadFormat::Dummy => LoadFormat::Dummy,
            _ => LoadFormat::Auto,
        };
        let files = ModelFiles::open(&found.path, format)?;
        if files.config().encoder.is_some() {
            return Err(Error::usage(
                format!("the draft model {} is an encoder, which continues no text", found.name),
                "name a small model of the target's family in --speculative-config",
            ));
        }
        Ok(Some(Self { name: found.name, files }))
    }

    /// Compares the tokens of both models one by one. Either may have more of them at the end: vocabularies are padded.
    pub(crate) fn check_tokens(&self, target: &TextModel, target_files: &ModelFiles) -> Result<(), Error> {
        let draft = TextModel::new(self.name.clone(), &self.files)?;
        let hint = "a draft must have the target's tokens: take a smaller model of the same family, or the method suffix";
        let (Ok(ours), Ok(theirs)) = (target.tokenizer(), draft.tokenizer()) else {
            let sizes = [target_files.config().vocab_size, self.files.config().vocab_size];
            if sizes[0] == sizes[1] {
                return Ok(());
            }
            let message = format!(
                "the draft model {} has a vocabulary of {}, and {} one of {}",
                self.name, sizes[1], target.name, sizes[0]
            );
            return Err(Error::usage(message, hint));
        };
        let shared = ours.vocab_size().min(theirs.vocab_size()) as u32;
        let different = (0..shared).find(|&id| ours.token_text(id) != theirs.token_text(id));
        let Some(id) = different else { return Ok(()) };
        let text = |text: Option<&str>| text.map_or_else(|| "nothing".to_owned(), |text| format!("{text:?}"));
        let message = format!(
            "the draft model {} has other tokens than {}: token {id} is {} there and {} here",
            self.name,
            target.name,
            text(theirs.token_text(id)),
            text(ours.token_text(id))
        );
        Err(Error::usage(message, hint))
    }
}
