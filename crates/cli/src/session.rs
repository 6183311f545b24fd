//! Opens a model for the commands: flags become the library's options, and what it tells goes to the terminal.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use baton::{AnyOpened, Device, OpenOptions, Opened, SamplingDefaults, Watch};
use baton_backend::{Backend, WeightFormat};
use baton_cuda::{CudaOptions, Expected};
use baton_engine::{EncoderEngine, Engine};
use baton_hub::{Located, Progress};
use baton_model::{LoadFormat, ModelConfig, ModelFiles};
use indicatif::ProgressBar;

use crate::engine_args::EngineArgs;
use crate::progress;

pub use baton::{Message, TextModel};

/// A model that is loaded and ready.
#[derive(Debug)]
pub struct Session {
    pub engine: Engine,
    /// Keeps KV for other processes.
    pub transfer: Option<Arc<baton::TransferServer>>,
    pub text: TextModel,
    /// What a request that says nothing gets.
    pub sampling: SamplingDefaults,
    /// From opening the files to being ready.
    pub load_s: f64,
}

impl Session {
    pub fn open(model: Option<&str>, args: &EngineArgs) -> Result<Self> {
        let opened = baton::open(model, &args.options()?, &mut Bars::default())?;
        for note in &opened.notes {
            eprintln!("note: {note}");
        }
        let load_s = opened.load_time.as_secs_f64();
        Ok(Self {
            engine: opened.engine,
            transfer: opened.transfer,
            text: opened.text,
            sampling: opened.sampling,
            load_s,
        })
    }
}

/// A model of either kind, for the server.
#[derive(Debug)]
pub enum AnySession {
    Decoder(Box<Session>),
    Encoder(Box<EncoderSession>),
}

/// An encoder that is loaded and ready.
#[derive(Debug)]
pub struct EncoderSession {
    pub engine: EncoderEngine,
    pub text: TextModel,
    pub load_s: f64,
}

impl AnySession {
    pub fn open(model: Option<&str>, args: &EngineArgs) -> Result<Self> {
        let say = |notes: &[String]| notes.iter().for_each(|note| eprintln!("note: {note}"));
        Ok(match baton::open_any(model, &args.options()?, &mut Bars::default())? {
            AnyOpened::Decoder(opened) => {
                say(&opened.notes);
                let load_s = opened.load_time.as_secs_f64();
                let Opened { engine, transfer, text, sampling, .. } = *opened;
                Self::Decoder(Box::new(Session { engine, transfer, text, sampling, load_s }))
            }
            AnyOpened::Encoder(opened) => {
                say(&opened.notes);
                let load_s = opened.load_time.as_secs_f64();
                Self::Encoder(Box::new(EncoderSession { engine: opened.engine, text: opened.text, load_s }))
            }
        })
    }
}

/// Progress on stderr, where that is a terminal.
#[derive(Debug, Default)]
pub struct Bars {
    bar: Option<ProgressBar>,
    /// What is about to be fetched, said once something comes.
    fetching: Option<String>,
}

impl Bars {
    fn announce(&mut self) {
        if let Some(name) = self.fetching.take() {
            eprintln!("fetching {name}, once");
        }
    }
}

impl Progress for Bars {
    fn doing(&mut self, what: Option<&str>) {
        self.announce();
        self.end();
        self.bar = what.map(|what| progress::spinner(what.to_owned()));
    }

    fn begin(&mut self, what: &str, total: u64) {
        self.announce();
        self.end();
        self.bar = Some(progress::bytes(what.to_owned(), total));
    }

    fn at(&mut self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(bytes);
        }
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Watch for Bars {
    fn fetching(&mut self, name: &str) {
        self.fetching = Some(name.to_owned());
    }
}

/// Finds a model's files, fetching them if need be.
pub fn locate(model: Option<&str>) -> Result<Located> {
    let mut bars = Bars::default();
    match baton_hub::find(model, None, &mut |name| bars.fetching(name))? {
        Some(found) => Ok(found),
        None => Ok(baton_hub::pull(model, None, &mut bars)?),
    }
}

/// The device that `--device` means.
pub fn open_backend(args: &EngineArgs, expected: Option<Expected>) -> Result<Box<dyn Backend>> {
    let mut notes = Vec::new();
    let backend = baton::open_backend(&args.options()?, expected, &mut notes)?;
    for note in notes {
        eprintln!("note: {note}");
    }
    Ok(backend)
}

/// How the GPU that `--device` means is opened, if there is one; nothing where it means the CPU.
pub fn cuda_options(args: &EngineArgs) -> Option<CudaOptions> {
    args.options().ok()?.cuda_options()
}

/// The device with what a mock needs.
pub fn device(args: &EngineArgs) -> Device {
    if args.is_mock() {
        return Device::Mock(Duration::from_secs_f64(args.mock_step_ms / 1e3));
    }
    args.device
}

/// A model's configuration without its engine, for the calculator.
#[derive(Debug)]
pub struct OpenedConfig {
    pub name: String,
    pub config: ModelConfig,
    /// In memory, of the file's weights, where there are any: on the CPU and on a GPU.
    pub weight_bytes: Option<LoadedBytes>,
    /// Types of tensors that no backend computes with: the file cannot run.
    pub unsupported_dtypes: Vec<String>,
}

/// What a file's weights take once they are loaded. Some formats are packed or opened to more than they were.
#[derive(Clone, Copy, Debug)]
pub struct LoadedBytes {
    pub cpu: u64,
    pub gpu: u64,
}

impl LoadedBytes {
    fn of(files: &ModelFiles, bytes: u64) -> Self {
        let Some(file) = files.gguf() else { return Self::of_safetensors(files, bytes) };
        file.tensors().iter().fold(Self { cpu: 0, gpu: 0 }, |sum, tensor| {
            let format = tensor.ggml_type.weight_format().zip(tensor.loaded_bytes());
            let loaded = |on: fn(WeightFormat, u64) -> u64| {
                format.map_or(tensor.bytes, |(format, bytes)| on(format, bytes))
            };
            Self {
                cpu: sum.cpu + loaded(baton_cpu::loaded_bytes),
                gpu: sum.gpu + loaded(baton_cuda::loaded_bytes),
            }
        })
    }
}

impl LoadedBytes {
    /// Tensors of unquantised checkpoints are as large as in their file.
    fn of_safetensors(files: &ModelFiles, bytes: u64) -> Self {
        let weights = files.weights().ok().filter(|_| files.config().quantization.is_some());
        let Some(weights) = weights else { return Self { cpu: bytes, gpu: bytes } };
        let tensors = weights.names().into_iter().filter_map(|name| weights.tensor(&name).ok().flatten());
        tensors.fold(Self { cpu: 0, gpu: 0 }, |sum, tensor| {
            let (format, bytes) = (tensor.format(), tensor.num_bytes() as u64);
            Self {
                cpu: sum.cpu + baton_cpu::loaded_bytes(format, bytes),
                gpu: sum.gpu + baton_cuda::loaded_bytes(format, bytes),
            }
        })
    }
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
    let found = locate(model)?;
    let files = ModelFiles::open(&found.path, LoadFormat::Auto)?;
    let bytes = files.describe().total_bytes;
    Ok(OpenedConfig {
        name: found.name,
        config: files.config().clone(),
        weight_bytes: (bytes > 0).then(|| LoadedBytes::of(&files, bytes)),
        unsupported_dtypes: unsupported_dtypes(&files),
    })
}

/// The options that most flags become.
pub fn options(args: &EngineArgs) -> Result<OpenOptions> {
    Ok(OpenOptions {
        device: device(args),
        threads: args.threads,
        revision: args.revision.clone(),
        load_format: args.load_format(),
        tokenizer: args.tokenizer.clone(),
        chat_template: args.chat_template.clone(),
        generation_config: args.generation_config.clone(),
        override_generation_config: args.override_generation_config.clone(),
        dtype: crate::engine_args::parse_dtype(&args.dtype)?,
        quantization: args.quantization.clone(),
        enforce_eager: args.enforce_eager,
        max_num_seqs: args.max_num_seqs,
        max_num_batched_tokens: args.max_num_batched_tokens,
        engine: args.resolve(),
        stores: args.stores.options()?,
    })
}
