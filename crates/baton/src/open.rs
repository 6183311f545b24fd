//! From a name to an engine that is ready: files, tokenizer, chat template, device, weights, KV cache.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_backend::{Backend, MockBackend, MockOptions, Precision, WeightFormat};
use baton_cluster::TransferServer;
use baton_cpu::{CpuBackend, CpuOptions, Machine};
use baton_cuda::{CudaBackend, CudaOptions, Expected, Missing, StartError};
use baton_engine::{EncoderEngine, Engine, EngineConfig};
use baton_hub::{Located, Progress, Quiet};
use baton_model::{LoadFormat, LoadProgress, ModelConfig, ModelFiles, RoundTo, joint_kv_spec};

use crate::draft::DraftFiles;
use crate::sampling::{GenerationConfig, SamplingDefaults};
use crate::stores::StoreOptions;
use crate::{Error, TextModel};

/// Sequences and tokens of a step on a GPU, unless said otherwise.
const GPU_SEQS: usize = 256;
const GPU_STEP_TOKENS: usize = 8192;
/// Tokens of a step of an encoder on a CPU: enough for products to be fast, few enough to stay in its caches.
const ENCODER_STEP_TOKENS: usize = 1024;

/// What to run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The first GPU, or the CPU where there is none.
    #[default]
    Auto,
    /// This machine's processor.
    Cpu,
    /// The GPU of this number.
    Cuda(usize),
    /// No weights and no computing: every step takes this long and gives the same token. For measurements.
    Mock(Duration),
}

/// How a model is opened. The defaults suit most uses.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// What to run on.
    pub device: Device,
    /// Threads of the CPU backend; without it, one per physical core.
    pub threads: Option<usize>,
    /// Branch, tag or commit of a repository on the hub; without it, `main`.
    pub revision: Option<String>,
    /// How the weights are read.
    pub load_format: LoadFormat,
    /// A model, directory or `tokenizer.json` whose tokenizer is used instead of the model's own.
    pub tokenizer: Option<String>,
    /// A chat template instead of the model's own: a file, or the template itself.
    pub chat_template: Option<String>,
    /// Where sampling defaults come from.
    pub generation_config: GenerationConfig,
    /// Sampling defaults given by hand, as JSON with the names of `generation_config.json`.
    pub override_generation_config: Option<String>,
    /// The type that the weights should have; they are used as they are stored.
    pub dtype: Option<WeightFormat>,
    /// What the weights of an unquantised checkpoint are rounded to: `fp8`, `q8` or `q4`. Any other name is the method that a
    /// quantised one should have.
    pub quantization: Option<String>,
    /// Do not record steps for replay (GPU only).
    pub enforce_eager: bool,
    /// Sequences in one step; without it, 64, on a GPU 256.
    pub max_num_seqs: Option<usize>,
    /// Tokens in one step; without it, 512, on a GPU 8192.
    pub max_num_batched_tokens: Option<usize>,
    /// Memory, KV cache, scheduling.
    pub engine: EngineConfig,
    /// Where KV is kept beyond the host's memory.
    pub stores: StoreOptions,
}

/// A model that is loaded and ready, before its engine gets a thread.
#[derive(Debug)]
pub struct Opened {
    /// Driven by hand, or given a thread.
    pub engine: Engine,
    /// Keeps KV for other processes. It computes prompts for them once it is told of the engine's thread.
    pub transfer: Option<Arc<TransferServer>>,
    /// Tokenizer, chat template, end tokens.
    pub text: TextModel,
    /// What a request that says nothing gets.
    pub sampling: SamplingDefaults,
    /// From opening the files to being ready.
    pub load_time: Duration,
    /// What the user should know, one line each.
    pub notes: Vec<String>,
}

/// An encoder that is loaded and ready: it embeds texts or scores pairs of them.
#[derive(Debug)]
pub struct OpenedEncoder {
    /// Driven by hand, or given a thread.
    pub engine: EncoderEngine,
    /// The tokenizer.
    pub text: TextModel,
    /// From opening the files to being ready.
    pub load_time: Duration,
    /// What the user should know, one line each.
    pub notes: Vec<String>,
}

/// A model of either kind.
#[derive(Debug)]
pub enum AnyOpened {
    /// Continues text.
    Decoder(Box<Opened>),
    /// Gives vectors or scores.
    Encoder(Box<OpenedEncoder>),
}

/// Told what happens while a model is opened.
pub trait Watch: Progress {
    /// The model is not here and is fetched.
    fn fetching(&mut self, name: &str);
}

impl Watch for Quiet {
    fn fetching(&mut self, _: &str) {}
}

/// Opens a model that continues text, by path or name; without either, the default one.
pub fn open(model: Option<&str>, options: &OpenOptions, watch: &mut dyn Watch) -> Result<Opened, Error> {
    match open_any(model, options, watch)? {
        AnyOpened::Decoder(opened) => Ok(*opened),
        AnyOpened::Encoder(_) => Err(Error::usage(
            "the model is an encoder: it gives embeddings or scores and continues no text".to_owned(),
            "serve it with `baton serve`: /v1/embeddings, /v1/rerank and /v1/score answer",
        )),
    }
}

/// Opens a model of either kind by path or name; without either, the default one.
pub fn open_any(
    model: Option<&str>,
    options: &OpenOptions,
    watch: &mut dyn Watch,
) -> Result<AnyOpened, Error> {
    let mut config = options.engine.clone();
    config.max_num_seqs = options.max_num_seqs.unwrap_or(config.max_num_seqs);
    config.max_num_batched_tokens = options.max_num_batched_tokens.unwrap_or(config.max_num_batched_tokens);
    config.store = options.stores.policy();
    config.validate()?;
    let found = find_model(model, options.revision.as_deref(), watch)?;
    let draft = DraftFiles::open(options, watch)?;
    let started = Instant::now();
    let mut files = ModelFiles::open(&found.path, load_format(options, &found.path))?;
    let mut notes = Vec::new();
    round(options, &mut files, &mut notes)?;
    check_dtype(options, files.config().dtype, &mut notes)?;
    if files.config().encoder.is_some() {
        let opened = open_encoder(found.name, &files, options, &config, watch)?;
        return Ok(AnyOpened::Encoder(Box::new(OpenedEncoder { load_time: started.elapsed(), ..opened })));
    }
    let sampling = SamplingDefaults::of(&options.generation_config, &files, &found.name, &found.origin)?;
    let sampling = match &options.override_generation_config {
        Some(json) => sampling.overridden(json)?,
        None => sampling,
    };
    let draft_files = draft.as_ref().map(|draft| &draft.files);
    let models: Vec<&ModelFiles> = [&files].into_iter().chain(draft_files).collect();
    let configs: Vec<&ModelConfig> = models.iter().map(|files| files.config()).collect();
    let cache = joint_kv_spec(&configs, config.kv_dtype, config.block_size.unwrap_or(1));
    let mut formats = files.weights()?.formats()?;
    if let Some(draft) = draft_files {
        for format in draft.weights()?.formats()? {
            if !formats.contains(&format) {
                formats.push(format);
            }
        }
    }
    let expected = Expected { formats, cache };
    // A device takes a while to start, and a large vocabulary to read.
    let (text, backend) = std::thread::scope(|scope| {
        let text = scope.spawn(|| text_side(found.name, &files, options));
        let backend = open_backend(options, Some(expected), &mut notes);
        (text.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), backend)
    });
    let (text, backend) = (text?, backend?);
    if let Some(draft) = &draft {
        draft.check_tokens(&text, &files)?;
    }
    if backend.device().wants_large_steps {
        // The engine's defaults suit a CPU.
        (config.max_num_seqs, config.max_num_batched_tokens) =
            gpu_steps(options.max_num_seqs, options.max_num_batched_tokens);
    }
    watch.begin("loading", models.iter().map(|files| files.describe().total_bytes).sum());
    let mut at = |progress: LoadProgress| watch.at(progress.done_bytes);
    let engine = Engine::with_draft(&files, draft_files, backend, &config, &mut at);
    watch.end();
    let mut engine = engine?;
    let transfer = options.stores.attach(&mut engine)?;
    notes.extend(engine.memory_plan().shrink_note());
    let opened = Opened { engine, transfer, text, sampling, load_time: started.elapsed(), notes };
    Ok(AnyOpened::Decoder(Box::new(opened)))
}

/// Finds a model, or fetches it.
pub(crate) fn find_model(
    model: Option<&str>,
    revision: Option<&str>,
    watch: &mut dyn Watch,
) -> Result<Located, Error> {
    let mut missing = String::new();
    if let Some(found) = baton_hub::find(model, revision, &mut |name| name.clone_into(&mut missing))? {
        return Ok(found);
    }
    watch.fetching(&missing);
    Ok(baton_hub::pull(model, revision, watch)?)
}

fn open_encoder(
    name: String,
    files: &ModelFiles,
    options: &OpenOptions,
    config: &EngineConfig,
    watch: &mut dyn Watch,
) -> Result<OpenedEncoder, Error> {
    let mut notes = Vec::new();
    let text = text_side(name, files, options)?;
    let backend = open_backend(options, None, &mut notes)?;
    let mut config = config.clone();
    if backend.device().wants_large_steps {
        (_, config.max_num_batched_tokens) = gpu_steps(options.max_num_seqs, options.max_num_batched_tokens);
    } else if options.max_num_batched_tokens.is_none() {
        config.max_num_batched_tokens = ENCODER_STEP_TOKENS;
    }
    watch.begin("loading", files.describe().total_bytes);
    let engine = EncoderEngine::new(files, backend, &config, &mut |progress: LoadProgress| {
        watch.at(progress.done_bytes);
    });
    watch.end();
    Ok(OpenedEncoder { engine: engine?, text, load_time: Duration::ZERO, notes })
}

/// A mock reads nothing: a GGUF file is only mapped, and beside a configuration dummy weights are never made.
fn load_format(options: &OpenOptions, path: &Path) -> LoadFormat {
    let is_config = path.is_dir() || path.extension().is_some_and(|end| end == "json");
    match options.device {
        Device::Mock(_) if is_config => LoadFormat::Dummy,
        _ => options.load_format,
    }
}

fn text_side(name: String, files: &ModelFiles, options: &OpenOptions) -> Result<TextModel, Error> {
    let vocab_size = files.config().vocab_size;
    let mut text = TextModel::new(name, files)?;
    if let Some(other) = &options.tokenizer {
        text = text.with_tokenizer(TextModel::of_tokenizer(other)?, vocab_size)?;
    }
    match &options.chat_template {
        Some(template) => text.with_template(template),
        None => Ok(text),
    }
}

/// What `--quantization` means for this model.
fn round(options: &OpenOptions, files: &mut ModelFiles, notes: &mut Vec<String>) -> Result<(), Error> {
    let Some(name) = &options.quantization else { return Ok(()) };
    let stored = files.config().quantization.as_ref().map(ToString::to_string);
    if let Ok(to) = name.to_ascii_lowercase().parse::<RoundTo>() {
        match stored {
            Some(stored) => {
                notes.push(format!("--quantization {name}: the checkpoint is quantised already ({stored})"));
            }
            None => files.round_to(to),
        }
        return Ok(());
    }
    // vLLM's names of methods and of their kernels.
    let method = name.to_ascii_lowercase().replace('_', "-");
    let is_gguf = files.gguf().is_some();
    let is_stored = |kinds: &[&str]| {
        stored.as_deref().is_some_and(|stored| kinds.iter().any(|kind| stored.starts_with(kind)))
    };
    let agrees = match method.as_str() {
        "none" | "auto" => return Ok(()),
        "gguf" => is_gguf,
        "awq" | "awq-marlin" => is_stored(&["awq"]),
        "gptq" | "gptq-marlin" => is_stored(&["gptq"]),
        "compressed-tensors" => is_stored(&["compressed-tensors", "fp8", "int8"]),
        "fbgemm-fp8" | "modelopt" => is_stored(&["fp8"]),
        _ => false,
    };
    if !agrees {
        let stored =
            stored.unwrap_or_else(|| if is_gguf { "a GGUF file" } else { "not quantised" }.to_owned());
        return Err(Error::usage(
            format!("--quantization {name} is asked for, but the checkpoint is {stored}"),
            "leave the flag out, or round an unquantised checkpoint with --quantization fp8, q8 or q4",
        ));
    }
    Ok(())
}

/// Weights are used as they are stored. Asking for half precision is a habit, and no mistake worth an error.
fn check_dtype(options: &OpenOptions, stored: WeightFormat, notes: &mut Vec<String>) -> Result<(), Error> {
    match options.dtype {
        None | Some(WeightFormat::F32) => Ok(()),
        Some(wanted) if wanted == stored => Ok(()),
        Some(wanted @ (WeightFormat::F16 | WeightFormat::BF16)) => {
            notes.push(format!(
                "--dtype {wanted} changes nothing: the weights are {stored} and are used as they are stored"
            ));
            Ok(())
        }
        Some(wanted) => Err(Error::usage(
            format!("--dtype {wanted} is asked for, but the weights are {stored}"),
            "weights are used as they are stored: leave --dtype out, take a file of that format, or compute in float32",
        )),
    }
}

/// Sequences and tokens of a step on a GPU, where they are not given.
pub fn gpu_steps(max_num_seqs: Option<usize>, max_num_batched_tokens: Option<usize>) -> (usize, usize) {
    let seqs = max_num_seqs.unwrap_or(GPU_SEQS);
    (seqs, max_num_batched_tokens.unwrap_or(GPU_STEP_TOKENS.max(seqs)))
}

impl OpenOptions {
    /// Whether nothing may be rounded.
    pub fn precision(&self) -> Precision {
        if self.dtype == Some(WeightFormat::F32) { Precision::Full } else { Precision::Fast }
    }

    /// How the GPU that is meant is opened, if there is one; nothing where the CPU is meant.
    pub fn cuda_options(&self) -> Option<CudaOptions> {
        let ordinal = match self.device {
            Device::Cuda(ordinal) => ordinal,
            Device::Auto => 0,
            Device::Cpu | Device::Mock(_) => return None,
        };
        let (enforce_eager, precision) = (self.enforce_eager, self.precision());
        Some(CudaOptions { ordinal, enforce_eager, precision, ..CudaOptions::default() })
    }
}

/// Whether `CUDA_VISIBLE_DEVICES` names none: then the CPU was meant, and nothing need be said about it.
fn gpus_are_hidden() -> bool {
    std::env::var("CUDA_VISIBLE_DEVICES").is_ok_and(|devices| matches!(devices.trim(), "" | "-1"))
}

/// The device that is meant: `auto` is the first GPU, or the CPU where CUDA is missing or finds none. What will be loaded is
/// told if it is known.
pub fn open_backend(
    options: &OpenOptions,
    expected: Option<Expected>,
    notes: &mut Vec<String>,
) -> Result<Box<dyn Backend>, Error> {
    if let Device::Mock(step_time) = options.device {
        return Ok(Box::new(MockBackend::new(MockOptions { step_time })));
    }
    let wants_none = options.device == Device::Auto && gpus_are_hidden();
    if let Some(cuda) = options.cuda_options().filter(|_| !wants_none) {
        match CudaBackend::new(CudaOptions { expected, ..cuda }) {
            Ok(backend) => return Ok(Box::new(backend)),
            // Where there is a driver, a GPU was probably meant.
            Err(StartError::Missing(missing)) if options.device == Device::Auto => {
                if missing != Missing::Driver {
                    notes.push(format!("this runs on the CPU: {missing}"));
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    let all = Machine::read().default_threads();
    let threads = options.threads.unwrap_or(all);
    // Threads for all cores are bound to them, so that each finds its weights on its own NUMA node. Fewer are the system's
    // to place: two servers must not meet on the same cores.
    let cpu = CpuOptions {
        threads: Some(threads),
        pin: threads == all,
        precision: options.precision(),
        ..CpuOptions::default()
    };
    Ok(Box::new(CpuBackend::new(cpu)?))
}
