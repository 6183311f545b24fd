//! The half of a model that knows text: tokenizer, chat template, end tokens. Threads may share it.
//!
//! This is the only place where `model`'s plain tokenizer data becomes a tokenizer of `text`.

use std::path::Path;
use std::sync::Arc;

use baton_core::{Constraint, Request, StructuredOutput, TokenId};
use baton_grammar::GrammarCompiler;
use baton_hub::{Quiet, locate};
use baton_model::{GgufVocabFields, LoadFormat, ModelFiles, TokenizerSource};
use baton_text::{ChatTemplate, GgufVocab, OutputOptions, OutputStream, RenderOptions, Tokenizer};

use crate::Error;

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, or what else the chat template knows.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl Message {
    /// A message of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }

    /// How the model is to behave.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// What the user says.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// What the model said.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new("assistant", content)
    }
}

/// What turns text into tokens and back for one model.
#[derive(Debug)]
pub struct TextModel {
    /// What the model is called in output.
    pub name: String,
    /// Absent for dummy weights beside a lone config.json; prompts must then be token ids.
    tokenizer: Option<Arc<Tokenizer>>,
    template: Option<ChatTemplate>,
    eos_token_ids: Arc<[TokenId]>,
}

impl TextModel {
    /// That of a model's files.
    pub fn new(name: String, files: &ModelFiles) -> Result<Self, Error> {
        let tokenizer = match files.tokenizer_source()? {
            None => None,
            Some(TokenizerSource::HuggingFace { tokenizer_json, tokenizer_config_json }) => {
                Some(Tokenizer::from_hf(&tokenizer_json, tokenizer_config_json.as_deref())?)
            }
            Some(TokenizerSource::Gguf(fields)) => Some(Tokenizer::from_gguf(gguf_vocab(*fields))?),
        };
        let token_text = |id: Option<TokenId>| tokenizer.as_ref()?.token_text(id?);
        let (bos, eos) =
            tokenizer.as_ref().map_or((None, None), |tokenizer| (tokenizer.bos_id(), tokenizer.eos_id()));
        let template = files.chat_template()?;
        let template = template.map(|source| ChatTemplate::new(&source, token_text(bos), token_text(eos)));
        let mut eos_token_ids = files.config().eos_token_ids.clone();
        for &token in tokenizer.iter().flat_map(Tokenizer::end_token_ids) {
            if !eos_token_ids.contains(&token) {
                eos_token_ids.push(token);
            }
        }
        Ok(Self {
            name,
            template: template.transpose()?,
            tokenizer: tokenizer.map(Arc::new),
            eos_token_ids: eos_token_ids.into(),
        })
    }

    /// The text side alone: of a model, of a directory with a `tokenizer.json`, or of such a file.
    pub fn of_tokenizer(given: &str) -> Result<Self, Error> {
        let path = Path::new(given);
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        let is_alone = file.extension().is_some_and(|ending| ending == "json")
            && file.is_file()
            && !file.with_file_name("config.json").is_file();
        if !is_alone {
            let found = locate(Some(given), None, &mut Quiet, &mut |_| {})?;
            let files = ModelFiles::open(&found.path, LoadFormat::Auto)?;
            return Self::new(found.name, &files);
        }
        let json = std::fs::read(&file).map_err(|cause| {
            Error::usage(
                format!("cannot read {}: {cause}", file.display()),
                "check the path and its permissions",
            )
        })?;
        let config = std::fs::read(file.with_file_name("tokenizer_config.json")).ok();
        let tokenizer = Tokenizer::from_hf(&json, config.as_deref())?;
        Ok(Self {
            name: given.to_owned(),
            template: None,
            eos_token_ids: tokenizer.end_token_ids().to_vec().into(),
            tokenizer: Some(Arc::new(tokenizer)),
        })
    }

    /// The same with another chat template: a file, or the template itself.
    pub(crate) fn with_template(mut self, given: &str) -> Result<Self, Error> {
        let source = if Path::new(given).is_file() {
            std::fs::read_to_string(given).map_err(|cause| {
                Error::usage(
                    format!("--chat-template: cannot read {given}: {cause}"),
                    "save it as UTF-8 text",
                )
            })?
        } else if given.contains("{{") || given.contains("{%") {
            given.to_owned()
        } else {
            return Err(Error::usage(
                format!("--chat-template: there is no file {given:?}, and it is no template either"),
                "give the path of a Jinja file, or the template itself",
            ));
        };
        let text = |id: Option<TokenId>| self.tokenizer.as_ref()?.token_text(id?);
        let ids = self.tokenizer.as_ref().map(|tokenizer| (tokenizer.bos_id(), tokenizer.eos_id()));
        let (bos, eos) = ids.unwrap_or((None, None));
        self.template = Some(ChatTemplate::new(&source, text(bos), text(eos))?);
        Ok(self)
    }

    /// The same model with the tokenizer of another, and with its chat template if it has none itself.
    pub(crate) fn with_tokenizer(self, other: Self, vocab_size: usize) -> Result<Self, Error> {
        let tokenizer = Arc::clone(other.tokenizer()?);
        if tokenizer.vocab_size() > vocab_size {
            return Err(Error::usage(
                format!(
                    "--tokenizer {} has {} tokens, but the model's vocabulary has {vocab_size}",
                    other.name,
                    tokenizer.vocab_size()
                ),
                "give the tokenizer that the model was made with, or a smaller one",
            ));
        }
        let mut eos_token_ids = self.eos_token_ids.to_vec();
        eos_token_ids.extend(other.eos_token_ids.iter().filter(|token| !self.eos_token_ids.contains(token)));
        Ok(Self {
            tokenizer: Some(tokenizer),
            template: self.template.or(other.template),
            eos_token_ids: eos_token_ids.into(),
            ..self
        })
    }

    /// Tokenizer, chat template and end tokens, for the server.
    pub fn into_parts(self) -> (Option<Arc<Tokenizer>>, Option<ChatTemplate>, Arc<[TokenId]>) {
        (self.tokenizer, self.template, self.eos_token_ids)
    }

    /// Whether it can be chatted with.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// A prompt as it stands, with what the model wants at its beginning.
    pub fn encode(&self, prompt: &str) -> Result<Vec<TokenId>, Error> {
        Ok(self.tokenizer()?.encode(prompt, true)?)
    }

    /// A conversation by the chat template, up to where the model answers.
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<TokenId>, Error> {
        let template = self.template.as_ref().ok_or_else(|| {
            Error::usage(
                format!("{} has no chat template", self.name),
                "leave out --chat, or use a chat model",
            )
        })?;
        let tokenizer = self.tokenizer()?;
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let messages = messages.iter().map(|message| serde_json::json!(message)).collect::<Vec<_>>();
        let rendered = template.render(&messages, &options)?;
        Ok(tokenizer.encode_chat(&rendered)?)
    }

    /// The tokenizer, where the model has one.
    pub fn maybe_tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// Every token that ends an answer.
    pub fn eos_token_ids(&self) -> &Arc<[TokenId]> {
        &self.eos_token_ids
    }

    /// What a token stands for, for people.
    pub fn token_text(&self, token: TokenId) -> String {
        let Some(tokenizer) = &self.tokenizer else { return String::new() };
        String::from_utf8_lossy(&tokenizer.token_bytes(token)).into_owned()
    }

    /// The text side of one continuation; `None` without a tokenizer.
    pub fn output_stream(
        &self,
        request: &Request,
        skip_special_tokens: bool,
    ) -> Result<Option<OutputStream>, Error> {
        let Some(tokenizer) = &self.tokenizer else { return Ok(None) };
        let options = OutputOptions::from_params(&request.params, skip_special_tokens);
        Ok(Some(OutputStream::new(Arc::clone(tokenizer), &request.prompt_token_ids, options)?))
    }

    /// Compiles what the output must be like, for a model of this vocabulary.
    pub fn compile(&self, wish: &StructuredOutput, vocab_size: usize) -> Result<Arc<dyn Constraint>, Error> {
        let tokenizer = Arc::clone(self.tokenizer()?);
        let compiler = GrammarCompiler::new(tokenizer, vocab_size, Arc::clone(&self.eos_token_ids));
        Ok(compiler.compile_apart(wish)?)
    }

    /// The configuration often names one end token where the vocabulary has several; a turn may end with any.
    pub fn with_end_tokens(&self, request: Request) -> Request {
        // A grammar always ends, so that its end tokens are never ignored.
        if request.params.ignore_eos && request.constraint.is_none() {
            return request;
        }
        Request { eos_token_ids: Arc::clone(&self.eos_token_ids), ..request }
    }

    pub(crate) fn tokenizer(&self) -> Result<&Arc<Tokenizer>, Error> {
        self.tokenizer.as_ref().ok_or_else(|| {
            Error::usage(
                format!("{} has no tokenizer", self.name),
                "give prompts as token ids: --prompt-token-ids 1,2,3",
            )
        })
    }
}

/// `model` reads the fields, `text` uses them; neither knows the other.
fn gguf_vocab(fields: GgufVocabFields) -> GgufVocab {
    GgufVocab {
        model: fields.model,
        name: fields.name,
        pre: fields.pre,
        tokens: fields.tokens,
        token_types: fields.token_types,
        scores: fields.scores,
        merges: fields.merges,
        bos_token_id: fields.bos_token_id,
        eos_token_id: fields.eos_token_id,
        eot_token_id: fields.eot_token_id,
        eom_token_id: None,
        unknown_token_id: fields.unknown_token_id,
        padding_token_id: fields.padding_token_id,
        precompiled_charsmap: fields.precompiled_charsmap,
        add_bos: fields.add_bos_token,
        add_eos: fields.add_eos_token,
        add_space_prefix: fields.add_space_prefix,
        chat_template: fields.chat_template,
    }
}
