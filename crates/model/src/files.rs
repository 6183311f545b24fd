//! A model on disk, seen as one thing: what it is, its weights, its tokenizer, its chat template, its makers' sampling
//! defaults; whether it is a GGUF file, a Hugging Face directory or only a `config.json`.
//!
//! Tokenizers and templates are handed out as bytes and plain data; `text` makes them work.

mod templates;
#[cfg(test)]
mod tests;
mod vocabulary;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use vocabulary::{GgufVocabFields, TokenizerSource};

use crate::dummy::DummyWeights;
use crate::gguf::GgufFile;
use crate::interleaved::InterleavedExperts;
use crate::mapped_file::{malformed, read_bounded, read_if_present};
use crate::quantization::QuantizedWeights;
use crate::safetensors::Safetensors;
use crate::tensor_names::{Role, weight_name};
use crate::{
    Architecture, GenerationDefaults, ModelConfig, ModelError, NameScheme, RoundTo, RoundedWeights,
    WeightSource,
};

const MAX_CONFIG_BYTES: u64 = 16 << 20;
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
/// Dummy weights are the same at every start.
const DUMMY_SEED: u64 = 0;

/// `--load-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadFormat {
    /// What the path holds.
    #[default]
    Auto,
    Safetensors,
    Gguf,
    /// Random weights for a `config.json`, made when a device reads them.
    Dummy,
}

#[derive(Debug)]
enum Weights {
    Gguf(Arc<GgufFile>),
    Safetensors(Arc<Safetensors>),
    /// Made up.
    Dummy,
    /// A configuration alone: enough to plan, not to run.
    Absent,
}

/// Where a model came from, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceDescription {
    pub path: PathBuf,
    /// `GGUF v3`, `safetensors`, `dummy` or `configuration only`.
    pub kind: String,
    pub num_tensors: usize,
    pub total_bytes: u64,
}

#[derive(Debug)]
pub struct ModelFiles {
    path: PathBuf,
    /// Where tokenizer and template lie; `None` for GGUF, which holds them itself.
    directory: Option<PathBuf>,
    config: ModelConfig,
    generation: GenerationDefaults,
    weights: Weights,
    round_to: Option<RoundTo>,
}

impl ModelFiles {
    /// Opens a `.gguf` file, a Hugging Face directory, or a `config.json`.
    pub fn open(path: &Path, format: LoadFormat) -> Result<Self, ModelError> {
        if !path.exists() {
            return Err(config_error(format!(
                "{} does not exist; give a .gguf file or a directory with config.json and *.safetensors",
                path.display()
            )));
        }
        if path.is_dir() {
            return Self::open_directory(path, path, format);
        }
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        match extension.to_ascii_lowercase().as_str() {
            "gguf" => Self::open_gguf(path, format),
            "json" => {
                let parent = path.parent().unwrap_or(Path::new("."));
                Self::open_directory(parent, path, format)
            }
            "safetensors" => Err(malformed(
                path,
                "weights alone do not describe a model; give the directory with its config.json".to_owned(),
            )),
            "bin" | "pt" | "pth" | "ckpt" => Err(malformed(
                path,
                "pickled PyTorch weights can run code and are not read; use safetensors or GGUF".to_owned(),
            )),
            _ if begins_with_gguf(path) => Self::open_gguf(path, format),
            _ => Err(malformed(path, "it is neither a .gguf file nor a config.json".to_owned())),
        }
    }

    fn open_gguf(path: &Path, format: LoadFormat) -> Result<Self, ModelError> {
        if !matches!(format, LoadFormat::Auto | LoadFormat::Gguf) {
            return Err(config_error(format!(
                "{} is a GGUF file; use --load-format gguf or auto",
                path.display()
            )));
        }
        let file = GgufFile::open(path)?;
        Ok(Self {
            path: path.to_owned(),
            directory: None,
            config: ModelConfig::from_gguf(&file)?,
            generation: GenerationDefaults::from_gguf(file.metadata())?,
            weights: Weights::Gguf(Arc::new(file)),
            round_to: None,
        })
    }

    /// `given` is the directory or the configuration in it, whichever the user named.
    fn open_directory(directory: &Path, given: &Path, format: LoadFormat) -> Result<Self, ModelError> {
        if format == LoadFormat::Gguf {
            return Err(config_error(format!("{} is not a .gguf file", given.display())));
        }
        let config_path = if given.is_dir() { directory.join("config.json") } else { given.to_owned() };
        if !config_path.exists() {
            let hint = match first_gguf(directory) {
                Some(file) => format!("; to use the GGUF file in it, give {}", file.display()),
                None => String::new(),
            };
            return Err(config_error(format!("{} has no config.json{hint}", directory.display())));
        }
        let config = read_bounded(&config_path, MAX_CONFIG_BYTES)?;
        let generation = read_if_present(&directory.join("generation_config.json"), MAX_CONFIG_BYTES)?;
        let mut config = ModelConfig::from_json(&config, generation.as_deref())?;
        config.read_sentence_transformers(directory)?;
        let weights = match format {
            LoadFormat::Dummy => Weights::Dummy,
            _ => match Safetensors::open_directory(directory)? {
                Some(weights) => Weights::Safetensors(Arc::new(weights)),
                None => Weights::Absent,
            },
        };
        if let Weights::Safetensors(weights) = &weights {
            // What the file holds is truer than what the configuration says.
            let name = weight_name(NameScheme::HuggingFace, config.architecture, Role::AttnQ, 0);
            if let Some(format) = weights.format(&name) {
                config.dtype = format;
            }
        }
        let generation = generation
            .map_or(Ok(GenerationDefaults::default()), |bytes| GenerationDefaults::from_json(&bytes))?;
        Ok(Self {
            path: given.to_owned(),
            directory: Some(directory.to_owned()),
            config,
            generation,
            weights,
            round_to: None,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub fn generation_defaults(&self) -> &GenerationDefaults {
        &self.generation
    }

    /// The GGUF file itself, if it is one, for those who want its metadata.
    pub fn gguf(&self) -> Option<&GgufFile> {
        match &self.weights {
            Weights::Gguf(file) => Some(file),
            _ => None,
        }
    }

    /// The shape of a tensor of a directory, as its file has it.
    pub(crate) fn stored_shape(&self, name: &str) -> Option<&[usize]> {
        match &self.weights {
            Weights::Safetensors(weights) => weights.entry(name).map(|entry| entry.shape.as_slice()),
            _ => None,
        }
    }

    /// Weights in floats are rounded to this from now on.
    pub fn round_to(&mut self, to: RoundTo) {
        self.round_to = Some(to);
    }

    /// The weights, or an error that says how to go on without.
    pub fn weights(&self) -> Result<Arc<dyn WeightSource>, ModelError> {
        let stored = self.stored_weights()?;
        let weights = match (&self.weights, &self.config.experts) {
            (Weights::Safetensors(files), Some(experts))
                if self.config.architecture == Architecture::GptOss =>
            {
                let files = Arc::clone(files);
                Arc::new(InterleavedExperts::new(files, stored, &self.config, experts))
                    as Arc<dyn WeightSource>
            }
            _ => stored,
        };
        Ok(match self.round_to {
            Some(to) => Arc::new(RoundedWeights::new(weights, &self.config, to)),
            None => weights,
        })
    }

    /// The same by the names and in the shapes that the file has.
    pub(crate) fn stored_weights(&self) -> Result<Arc<dyn WeightSource>, ModelError> {
        Ok(match &self.weights {
            Weights::Gguf(file) => Arc::clone(file) as Arc<dyn WeightSource>,
            Weights::Safetensors(weights) => match &self.config.quantization {
                Some(config) => Arc::new(QuantizedWeights::new(Arc::clone(weights), config.clone())),
                None => Arc::clone(weights) as Arc<dyn WeightSource>,
            },
            Weights::Dummy => Arc::new(DummyWeights::new(&self.config, DUMMY_SEED)?),
            Weights::Absent => return Err(self.no_weights()),
        })
    }

    fn no_weights(&self) -> ModelError {
        let directory = self.directory.as_deref().unwrap_or(&self.path);
        let pickled = directory.join("pytorch_model.bin").exists()
            || directory.join("pytorch_model.bin.index.json").exists();
        let pickled = if pickled { " (pickled PyTorch weights are not read)" } else { "" };
        config_error(format!(
            "{} has a configuration but no *.safetensors{pickled}; use --load-format dummy for random weights",
            directory.display()
        ))
    }

    /// What `text` needs to make a tokenizer, if the model brings one.
    pub fn tokenizer_source(&self) -> Result<Option<TokenizerSource>, ModelError> {
        if let Some(file) = self.gguf() {
            return vocabulary::from_gguf(file);
        }
        let Some(directory) = &self.directory else { return Ok(None) };
        let Some(tokenizer_json) = read_if_present(&directory.join("tokenizer.json"), MAX_TOKENIZER_BYTES)?
        else {
            return Ok(None);
        };
        let tokenizer_config_json =
            read_if_present(&directory.join("tokenizer_config.json"), MAX_CONFIG_BYTES)?;
        Ok(Some(TokenizerSource::HuggingFace { tokenizer_json, tokenizer_config_json }))
    }

    /// The chat template as Jinja source, if the model brings one.
    pub fn chat_template(&self) -> Result<Option<String>, ModelError> {
        if let Some(file) = self.gguf() {
            let template = file.metadata().get_str("tokenizer.chat_template").map_err(config_error)?;
            return Ok(template.map(str::to_owned));
        }
        match &self.directory {
            Some(directory) => templates::from_directory(directory, MAX_CONFIG_BYTES),
            None => Ok(None),
        }
    }

    pub fn describe(&self) -> SourceDescription {
        let (kind, weights): (String, Option<&dyn WeightSource>) = match &self.weights {
            Weights::Gguf(file) => (format!("GGUF v{}", file.version()), Some(&**file)),
            Weights::Safetensors(weights) => ("safetensors".to_owned(), Some(&**weights)),
            Weights::Dummy => ("dummy".to_owned(), None),
            Weights::Absent => ("configuration only".to_owned(), None),
        };
        SourceDescription {
            path: self.path.clone(),
            kind,
            num_tensors: weights.map_or(0, |weights| weights.names().len()),
            total_bytes: weights.map_or(0, WeightSource::total_bytes),
        }
    }
}

fn config_error(what: impl Into<String>) -> ModelError {
    ModelError::Config { what: what.into() }
}

fn begins_with_gguf(path: &Path) -> bool {
    use std::io::Read;
    let mut magic = [0; 4];
    path.is_file()
        && std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok()
        && magic == *b"GGUF"
}

fn first_gguf(directory: &Path) -> Option<PathBuf> {
    let files = std::fs::read_dir(directory).ok()?.filter_map(Result::ok).map(|entry| entry.path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "gguf")).min()
}
