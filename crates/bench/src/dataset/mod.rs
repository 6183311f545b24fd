//! Workloads: prompts and output lengths, generated or read from a file.
//!
//! A generated prompt is stored as a list of segments, each a seed and a length. Equal segments give equal tokens, which
//! makes shared prefixes, and a trace of a hundred million tokens takes no memory until a request is sent.
//! Not here: when a request is sent (`arrival`), unless the file says so, and how (`client`).

mod custom;
mod sharegpt;
mod synthetic;
mod trace;

use std::path::{Path, PathBuf};

pub use synthetic::{PrefixRepetitionOptions, RandomOptions, Segment, TokenRange};
pub use trace::TraceOptions;

use crate::BenchError;
use crate::random::Random;

/// Sizes beyond this are a mistake, not a workload.
pub const MAX_LEN: usize = 16 << 20;
const MAX_PROMPTS: usize = 10_000_000;

#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    /// Made when it is needed.
    Synthetic(Vec<Segment>),
}

/// One request of a workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub prompt: Prompt,
    /// Tokens of the prompt, where they are known before the server has counted them.
    pub input_len: Option<usize>,
    pub output_len: usize,
    /// When it is sent, in seconds after the start, where the workload says so.
    pub at_s: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatasetKind {
    Random,
    ShareGpt,
    PrefixRepetition,
    Trace,
    Custom,
}

#[derive(Clone, Debug)]
pub struct DatasetOptions {
    pub kind: DatasetKind,
    /// Of the datasets that are files.
    pub path: Option<PathBuf>,
    pub num_prompts: usize,
    pub seed: u64,
    pub shuffle: bool,
    /// Overrides the answers' lengths of files.
    pub output_len: Option<usize>,
    pub random: RandomOptions,
    pub prefix_repetition: PrefixRepetitionOptions,
    pub trace: TraceOptions,
}

/// Counts the tokens of a text.
pub type CountTokens<'a> = &'a dyn Fn(&str) -> Result<usize, String>;

/// A workload, and what the user should know of how it came about.
#[derive(Clone, Debug)]
pub struct Workload {
    pub samples: Vec<Sample>,
    pub notes: Vec<String>,
}

impl DatasetOptions {
    /// Makes or reads the workload. Without `count`, lengths of texts are estimated at four characters a token.
    pub fn load(&self, count: Option<CountTokens<'_>>) -> Result<Workload, BenchError> {
        if self.num_prompts == 0 || self.num_prompts > MAX_PROMPTS {
            return Err(BenchError::options(format!("--num-prompts must be in 1..={MAX_PROMPTS}")));
        }
        let mut random = Random::new(self.seed);
        let mut notes = Vec::new();
        let mut samples = match self.kind {
            DatasetKind::Random => self.random.samples(self.num_prompts, &mut random)?,
            DatasetKind::PrefixRepetition => {
                self.prefix_repetition.samples(self.num_prompts, &mut random, self.shuffle)?
            }
            DatasetKind::Trace => {
                let path = self.path()?;
                trace::read(path, self.num_prompts, &self.trace, self.seed)?
            }
            DatasetKind::ShareGpt => {
                let path = self.path()?;
                let estimate = |text: &str| Ok(text.chars().count().div_ceil(4));
                let read = sharegpt::read(path, count.unwrap_or(&estimate), self.output_len)?;
                if count.is_none() {
                    notes.push("lengths of texts are estimated: --tokenizer MODEL counts them".to_owned());
                }
                notes.extend(read.notes);
                read.samples
            }
            DatasetKind::Custom => custom::read(self.path()?, self.output_len)?,
        };
        if matches!(self.kind, DatasetKind::ShareGpt | DatasetKind::Custom) {
            if self.shuffle {
                random.shuffle(&mut samples);
            }
            self.repeat(&mut samples, &mut notes);
        } else if samples.len() < self.num_prompts {
            notes.push(format!("the trace has {} requests", samples.len()));
        }
        Ok(Workload { samples, notes })
    }

    fn path(&self) -> Result<&Path, BenchError> {
        self.path
            .as_deref()
            .ok_or_else(|| BenchError::options("this dataset is a file: give --dataset-path FILE"))
    }

    /// Cuts to the wanted number, or begins again from the first until there are enough.
    fn repeat(&self, samples: &mut Vec<Sample>, notes: &mut Vec<String>) {
        let num_own = samples.len();
        if num_own < self.num_prompts {
            notes.push(format!(
                "the file has {num_own} usable prompts: they are repeated up to {}",
                self.num_prompts
            ));
            for index in num_own..self.num_prompts {
                samples.push(samples[index % num_own].clone());
            }
        }
        samples.truncate(self.num_prompts);
    }
}

/// The token ids of a prompt that is not a text.
pub fn prompt_tokens(prompt: &Prompt, range: TokenRange) -> Vec<u32> {
    match prompt {
        Prompt::Tokens(ids) => ids.clone(),
        Prompt::Synthetic(segments) => synthetic::tokens(segments, range),
        Prompt::Text(_) => Vec::new(),
    }
}

/// Random tokens that the seed decides.
pub fn synthetic_tokens(seed: u64, len: usize, range: TokenRange) -> Vec<u32> {
    synthetic::tokens(&[Segment { seed, len }], range)
}

/// A prompt as text: for token ids without a tokenizer, as many words.
pub fn prompt_text(prompt: &Prompt) -> String {
    match prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Synthetic(segments) => synthetic::words(segments),
        Prompt::Tokens(ids) => {
            let seed = ids.iter().fold(0_u64, |seed, &id| seed.rotate_left(5) ^ u64::from(id));
            synthetic::words(&[Segment { seed, len: ids.len() }])
        }
    }
}

/// Text of a file, or a sentence that says why not.
fn read_text(path: &Path) -> Result<String, BenchError> {
    std::fs::read_to_string(path).map_err(|cause| BenchError::file(path, cause))
}

fn check_len(path: &Path, line: usize, name: &str, value: usize) -> Result<usize, BenchError> {
    if value == 0 || value > MAX_LEN {
        return Err(BenchError::line(path, line, format!("{name} must be in 1..={MAX_LEN}, not {value}")));
    }
    Ok(value)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub fn options(kind: DatasetKind, path: Option<&str>, num_prompts: usize) -> DatasetOptions {
        let path = path.map(|name| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name));
        DatasetOptions {
            kind,
            path,
            num_prompts,
            seed: 0,
            shuffle: false,
            output_len: None,
            random: RandomOptions::default(),
            prefix_repetition: PrefixRepetitionOptions::default(),
            trace: TraceOptions::default(),
        }
    }

    /// Writes a file, loads it and gives the error without the path.
    pub fn error_of(kind: DatasetKind, text: &str) -> String {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::io::Write::write_all(&mut file, text.as_bytes()).expect("written");
        let mut options = options(kind, None, 4);
        options.path = Some(file.path().to_owned());
        let error = options.load(None).expect_err("must be refused").to_string();
        assert!(!error.contains('\n'), "{error:?} is not one line");
        error.strip_prefix(&format!("{}: ", file.path().display())).unwrap_or(&error).to_owned()
    }

    #[test]
    fn files_that_are_not_there_are_named() {
        let error = options(DatasetKind::Custom, Some("no-such-file"), 1).load(None).unwrap_err();
        assert!(error.to_string().contains("no-such-file: No such file"), "{error}");
        let error = options(DatasetKind::ShareGpt, None, 1).load(None).unwrap_err();
        assert_eq!(error.to_string(), "this dataset is a file: give --dataset-path FILE");
        assert!(options(DatasetKind::Random, None, 0).load(None).is_err());
    }
}
