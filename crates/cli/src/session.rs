//! Opens a model for use: files, tokenizer, chat template, device, engine. Every command that runs a model starts here.
//!
//! [`TextModel`] is the half that knows text and can be shared by threads; [`Session`] adds the engine, driven by hand.
//! This is the only place where `model`'s plain tokenizer data becomes a tokenizer of `text`.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use baton_backend::{Backend, MockBackend, MockOptions, WeightFormat};
use baton_core::{Constraint, Request, SamplingParams, StructuredOutput, TokenId};
use baton_cpu::{CpuBackend, CpuOptions, Machine};
use baton_cuda::{CudaBackend, CudaOptions, Expected, Missing, StartError};
use baton_engine::Engine;
use baton_grammar::GrammarCompiler;
use baton_model::{
    GenerationDefaults, GgufVocabFields, LoadFormat, ModelConfig, ModelFiles, TokenizerSource,
};
use baton_text::{ChatTemplate, GgufVocab, OutputOptions, OutputStream, RenderOptions, Tokenizer};

use crate::engine_args::{DeviceArg, EngineArgs, parse_dtype};
use crate::errors::hinted;
use crate::model_path;
use crate::progress;

/// A model that is loaded and ready.
#[derive(Debug)]
pub struct Session {
    pub engine: Engine,
    pub text: TextModel,
    /// From opening the files to being ready.
    pub load_s: f64,
}

impl Session {
    pub fn open(model: Option<&str>, args: &EngineArgs) -> Result<Self> {
        let mut config = args.resolve();
        config.validate()?;
        let wanted_dtype = parse_dtype(&args.dtype)?;
        let found = model_path::resolve(model)?;
        let started = Instant::now();
        let files = ModelFiles::open(&found.path, args.load_format(&found.path))?;
        let dtype = files.config().dtype;
        let is_other = |wanted: WeightFormat| wanted != dtype && wanted != WeightFormat::F32;
        if let Some(wanted) = wanted_dtype.filter(|&wanted| is_other(wanted)) {
            return Err(hinted(
                format!("--dtype {wanted} is asked for, but the weights are {dtype}"),
                "weights are used as they are stored: leave --dtype out, take a file of that format, or compute in float32",
            ));
        }
        let cache = files.config().kv_spec(config.kv_dtype, config.block_size.unwrap_or(1));
        let expected = Expected { formats: files.weights()?.formats()?, cache };
        // A device takes a while to start, and a large vocabulary to read.
        let (text, backend) = std::thread::scope(|scope| {
            let text = scope.spawn(|| {
                let text = TextModel::new(found.name, &files)?;
                let other = args.tokenizer.as_deref().map(TextModel::of_tokenizer).transpose();
                match other.context("--tokenizer")? {
                    Some(other) => text.with_tokenizer(other, files.config().vocab_size),
                    None => Ok(text),
                }
            });
            let backend = open_backend(args, Some(expected));
            (text.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), backend)
        });
        let (text, backend) = (text?, backend?);
        args.fit_to(&backend.device(), &mut config);
        let bar = progress::bytes("loading", files.describe().total_bytes);
        let engine = Engine::new(&files, backend, &config, &mut |progress| {
            bar.set_length(progress.total_bytes);
            bar.set_position(progress.done_bytes);
        });
        bar.finish_and_clear();
        Ok(Self { engine: engine?, text, load_s: started.elapsed().as_secs_f64() })
    }
}

/// The device that `--device` means: `auto` is the first GPU, or the CPU where CUDA is missing or finds none.
/// What will be loaded is told if it is known.
pub fn open_backend(args: &EngineArgs, expected: Option<Expected>) -> Result<Box<dyn Backend>> {
    if args.is_mock() {
        let step_time = Duration::from_secs_f64(args.mock_step_ms / 1e3);
        return Ok(Box::new(MockBackend::new(MockOptions { step_time })));
    }
    if let Some(options) = cuda_options(args) {
        match CudaBackend::new(CudaOptions { expected, ..options }) {
            Ok(backend) => return Ok(Box::new(backend)),
            // Where there is a driver, a GPU was probably meant.
            Err(StartError::Missing(missing)) if args.device == DeviceArg::Auto => {
                if missing != Missing::Driver {
                    eprintln!("note: this runs on the CPU: {missing}");
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    let all = Machine::read().default_threads();
    let threads = args.threads.unwrap_or(all);
    // Threads for all cores are bound to them, so that each finds its weights on its own NUMA node. Fewer are the system's
    // to place: two servers must not meet on the same cores.
    let options = CpuOptions {
        threads: Some(threads),
        pin: threads == all,
        precision: args.precision(),
        ..CpuOptions::default()
    };
    Ok(Box::new(CpuBackend::new(options)?))
}

/// How the GPU that `--device` means is opened, if there is one; nothing where it means the CPU.
pub fn cuda_options(args: &EngineArgs) -> Option<CudaOptions> {
    let ordinal = match args.device {
        _ if args.is_mock() => return None,
        DeviceArg::Cuda(ordinal) => ordinal,
        DeviceArg::Auto => 0,
        DeviceArg::Cpu => return None,
    };
    let (enforce_eager, precision) = (args.enforce_eager, args.precision());
    Some(CudaOptions { ordinal, enforce_eager, precision, ..CudaOptions::default() })
}

/// A model's configuration without its engine, for the calculator.
#[derive(Debug)]
pub struct OpenedConfig {
    pub name: String,
    pub config: ModelConfig,
    /// Of the file, where there are weights.
    pub weight_bytes: Option<u64>,
    /// Types of tensors that no backend computes with: the file cannot run.
    pub unsupported_dtypes: Vec<String>,
}

/// Types of a GGUF file's tensors that no backend computes with, each once.
pub fn unsupported_dtypes(files: &ModelFiles) -> Vec<String> {
    let tensors = files.gguf().map_or(&[][..], |file| file.tensors());
    let mut names: Vec<String> = tensors
        .iter()
        .filter(|tensor| tensor.ggml_type.weight_format().is_none())
        .map(|tensor| tensor.ggml_type.name().to_owned())
        .collect();
    names.sort();
    names.dedup();
    names
}

/// What to say of a file that cannot run.
pub fn unsupported_warning(dtypes: &[String]) -> Option<String> {
    let types = dtypes.join(", ");
    (!dtypes.is_empty()).then(|| {
        format!("this file cannot run: it has tensors of the type {types}, which are not supported; take one quantised as Q4_K_M, Q8_0 or another of the usual types")
    })
}

pub fn open_config(model: Option<&str>) -> Result<OpenedConfig> {
    let found = model_path::resolve(model)?;
    let files = ModelFiles::open(&found.path, LoadFormat::Auto)?;
    let bytes = files.describe().total_bytes;
    Ok(OpenedConfig {
        name: found.name,
        config: files.config().clone(),
        weight_bytes: (bytes > 0).then_some(bytes),
        unsupported_dtypes: unsupported_dtypes(&files),
    })
}

/// One message of a conversation.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Message {
    role: &'static str,
    content: String,
}

impl Message {
    pub fn new(role: &'static str, content: impl Into<String>) -> Self {
        Self { role, content: content.into() }
    }
}

/// What turns text into tokens and back for one model.
#[derive(Debug)]
pub struct TextModel {
    pub name: String,
    pub generation: GenerationDefaults,
    /// Absent for dummy weights beside a lone config.json; prompts must then be token ids.
    tokenizer: Option<Arc<Tokenizer>>,
    template: Option<ChatTemplate>,
    eos_token_ids: Arc<[TokenId]>,
}

impl TextModel {
    pub fn new(name: String, files: &ModelFiles) -> Result<Self> {
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
            generation: files.generation_defaults().clone(),
            template: template.transpose()?,
            tokenizer: tokenizer.map(Arc::new),
            eos_token_ids: eos_token_ids.into(),
        })
    }

    /// The text side alone: of a model, of a directory with a `tokenizer.json`, or of such a file.
    pub fn of_tokenizer(given: &str) -> Result<Self> {
        let path = Path::new(given);
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        let is_alone = file.extension().is_some_and(|ending| ending == "json")
            && file.is_file()
            && !file.with_file_name("config.json").is_file();
        if !is_alone {
            let found = model_path::resolve(Some(given))?;
            let files = ModelFiles::open(&found.path, LoadFormat::Auto)?;
            return Self::new(found.name, &files);
        }
        let json = std::fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let config = std::fs::read(file.with_file_name("tokenizer_config.json")).ok();
        let tokenizer = Tokenizer::from_hf(&json, config.as_deref())?;
        Ok(Self {
            name: given.to_owned(),
            generation: GenerationDefaults::default(),
            template: None,
            eos_token_ids: tokenizer.end_token_ids().to_vec().into(),
            tokenizer: Some(Arc::new(tokenizer)),
        })
    }

    /// The same model with the tokenizer of another, and with its chat template if it has none itself.
    fn with_tokenizer(self, other: Self, vocab_size: usize) -> Result<Self> {
        let tokenizer = Arc::clone(other.tokenizer()?);
        if tokenizer.vocab_size() > vocab_size {
            return Err(hinted(
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

    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// A prompt as it stands, with what the model wants at its beginning.
    pub fn encode(&self, prompt: &str) -> Result<Vec<TokenId>> {
        Ok(self.tokenizer()?.encode(prompt, true)?)
    }

    /// A conversation by the chat template, up to where the model answers.
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<TokenId>> {
        let template = self.template.as_ref().ok_or_else(|| {
            hinted(format!("{} has no chat template", self.name), "leave out --chat, or use a chat model")
        })?;
        let tokenizer = self.tokenizer()?;
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let messages = messages.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
        let rendered = template.render(&messages, &options)?;
        Ok(tokenizer.encode_chat(&rendered)?)
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
    ) -> Result<Option<OutputStream>> {
        let Some(tokenizer) = &self.tokenizer else { return Ok(None) };
        let options = OutputOptions::from_params(&request.params, skip_special_tokens);
        Ok(Some(OutputStream::new(Arc::clone(tokenizer), &request.prompt_token_ids, options)?))
    }

    /// Compiles what the output must be like, for a model of this vocabulary.
    pub fn compile(&self, wish: &StructuredOutput, vocab_size: usize) -> Result<Arc<dyn Constraint>> {
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

    fn tokenizer(&self) -> Result<&Arc<Tokenizer>> {
        self.tokenizer.as_ref().ok_or_else(|| {
            hinted(
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

/// The makers' wishes over the command's defaults.
pub fn with_generation_defaults(params: SamplingParams, wishes: &GenerationDefaults) -> SamplingParams {
    SamplingParams {
        temperature: wishes.temperature.unwrap_or(params.temperature),
        top_p: wishes.top_p.unwrap_or(params.top_p),
        top_k: wishes.top_k.unwrap_or(params.top_k),
        min_p: wishes.min_p.unwrap_or(params.min_p),
        repetition_penalty: wishes.repetition_penalty.unwrap_or(params.repetition_penalty),
        ..params
    }
}
