//! The habits of people who come from vLLM, llama.cpp and Ollama.
//!
//! Flags that mean the same are flags of Baton's own, or aliases of them. What is here is the rest: flags that ask for
//! something Baton always does, never does, or cannot do. They are taken with a note or refused with a reason, never
//! with a guess at another flag. [`normalise`] reads what clap cannot: underscores, `-tp`, `--model`.

use std::collections::HashMap;

use anyhow::Result;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::errors::hinted;

mod flags;
use flags::FLAGS;

/// What happens to a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    /// Taken: it asks for what is so anyway.
    Quiet,
    /// Taken, and this is said.
    Note(&'static str),
    /// Taken where its value asks for nothing ([`asks_nothing`]), else refused with this.
    Only(&'static str),
    /// The same for what is counted from 1, as devices are.
    Single(&'static str),
    /// Refused with this, and with what to do instead.
    Refuse(&'static str, &'static str),
}

/// What follows a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arity {
    Switch,
    Value,
    /// One or more words, up to the next flag.
    Values,
}

use Effect::{Note, Only, Quiet, Refuse, Single};

/// Short flags of several letters, and single ones that clap would read otherwise.
const SHORTS: &[(&str, &str)] = &[
    // vLLM
    ("-tp", "--tensor-parallel-size"),
    ("-pp", "--pipeline-parallel-size"),
    ("-dp", "--data-parallel-size"),
    ("-dpl", "--data-parallel-size-local"),
    ("-dpn", "--data-parallel-rank"),
    ("-dpr", "--data-parallel-start-rank"),
    ("-dpa", "--data-parallel-address"),
    ("-dpp", "--data-parallel-rpc-port"),
    ("-dpb", "--data-parallel-backend"),
    ("-pcp", "--prefill-context-parallel-size"),
    ("-dcp", "--decode-context-parallel-size"),
    ("-ep", "--enable-expert-parallel"),
    ("-cc", "--compilation-config"),
    // llama.cpp
    ("-ngl", "--n-gpu-layers"),
    ("-np", "--max-num-seqs"),
    ("-fa", "--flash-attn"),
    ("-cb", "--cont-batching"),
    ("-b", "--batch-size"),
    ("-ub", "--ubatch-size"),
    ("-tb", "--threads-batch"),
    ("-mg", "--main-gpu"),
    ("-sm", "--split-mode"),
    ("-ts", "--tensor-split"),
    ("-dev", "--device"),
    ("-ot", "--override-tensor"),
    ("-cmoe", "--cpu-moe"),
    ("-ncmoe", "--n-cpu-moe"),
    ("-ctk", "--kv-cache-dtype"),
    ("-ctv", "--cache-type-v"),
    ("-cram", "--cache-ram"),
    ("-ctxcp", "--ctx-checkpoints"),
    ("-kvu", "--kv-unified"),
    ("-nkvo", "--no-kv-offload"),
    ("-nr", "--no-repack"),
    ("-dt", "--defrag-thold"),
    ("-a", "--served-model-name"),
    ("-s", "--seed"),
    ("-n", "--n-predict"),
    ("-sys", "--system"),
    ("-r", "--stop"),
    ("-mm", "--mmproj"),
    ("-mu", "--model-url"),
    ("-md", "--model-draft"),
    ("-ngld", "--n-gpu-layers-draft"),
    ("-to", "--timeout"),
    ("-sps", "--slot-prompt-similarity"),
    ("-lv", "--verbosity"),
    ("-v", "--log-verbose"),
    ("-e", "--escape"),
    ("-cnv", "--conversation"),
    ("-hff", "--hf-file"),
    ("-hft", "--hf-token"),
    ("-hf", "--model"),
    ("-hfr", "--model"),
    ("-m", "--model"),
];
/// Flags of llama.cpp's server that set what requests are sampled with, and their names in a `generation_config.json`.
const SAMPLING: &[(&str, &str)] = &[
    ("temp", "temperature"),
    ("temperature", "temperature"),
    ("top-k", "top_k"),
    ("top-p", "top_p"),
    ("min-p", "min_p"),
    ("repeat-penalty", "repetition_penalty"),
    ("repetition-penalty", "repetition_penalty"),
];
/// Flags that name the model, which is a plain argument here.
const MODEL_FLAGS: [&str; 3] = ["--model", "--hf-repo", "--model-path"];
/// The commands that take such flags.
const COMMANDS: [&str; 6] = ["serve", "complete", "chat", "run", "inspect", "plan"];

/// Adds what is taken out of habit to the commands that run a model. None of it is shown in the help.
pub fn add_to(mut command: Command) -> Command {
    for name in ["serve", "complete", "chat", "run"] {
        command = command.mut_subcommand(name, with_flags);
    }
    command.mut_subcommand("bench", |bench| {
        ["latency", "throughput", "startup"]
            .iter()
            .fold(bench, |bench, name| bench.mut_subcommand(name, with_flags))
    })
}

fn with_flags(command: Command) -> Command {
    let known: Vec<String> = longs(&command).map(|(name, _)| name).collect();
    let missing = FLAGS.iter().filter(|(name, ..)| !known.iter().any(|own| own == name));
    let arg = |&(name, arity, _): &(&'static str, Arity, Effect)| {
        let arg = Arg::new(name).long(name).hide(true).action(ArgAction::Set);
        match arity {
            Arity::Value if name == "flash-attn" => arg.num_args(0..=1).default_missing_value("on"),
            Arity::Value => arg.num_args(1).allow_hyphen_values(true),
            Arity::Values => arg.num_args(1..),
            Arity::Switch => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
        }
    };
    let args: Vec<Arg> = missing.map(arg).collect();
    command.args(args)
}

/// Long names and aliases, and whether they take a value that is an argument of its own.
fn longs(command: &Command) -> impl Iterator<Item = (String, bool)> + '_ {
    command.get_arguments().flat_map(|arg| {
        let needs_one = arg.get_num_args().is_none_or(|range| range.min_values() > 0);
        let takes_value = arg.get_action().takes_values() && !arg.is_require_equals_set() && needs_one;
        let names = arg.get_long().into_iter().chain(arg.get_all_aliases().unwrap_or_default());
        names.map(move |name| (name.to_owned(), takes_value)).collect::<Vec<_>>()
    })
}

/// Says what is to be said of the flags that were given, or why one cannot be.
pub fn judge(matches: &ArgMatches) -> Result<()> {
    let mut matches = matches;
    while let Some((_, inner)) = matches.subcommand() {
        matches = inner;
    }
    for &(name, _, effect) in FLAGS {
        let given = matches.try_contains_id(name).unwrap_or(false)
            && matches.value_source(name) == Some(ValueSource::CommandLine);
        let Some(value) = given.then(|| matches.try_get_one::<String>(name).ok().flatten()).flatten() else {
            continue;
        };
        match effect {
            Quiet => {}
            Note(text) => eprintln!("note: --{name}: {text}"),
            Only(_) | Single(_) if asks_nothing(value) => {}
            Single(_) if value.parse() == Ok(1.0) => {}
            Only(why) | Single(why) => return Err(hinted(format!("--{name} {value} is not supported"), why)),
            Refuse(why, instead) => return Err(hinted(format!("--{name}: {why}"), instead)),
        }
    }
    Ok(())
}

/// Values that say of a feature that it is not wanted.
fn asks_nothing(value: &str) -> bool {
    let words = ["none", "auto", "false", "off", "raw_logprobs"];
    words.contains(&value.to_ascii_lowercase().as_str())
        || value.parse::<f64>().is_ok_and(|number| [-1.0, 0.0].contains(&number))
}

/// The command line as clap reads it: underscores become hyphens, short flags of several letters their long names, and a
/// model that was named by a flag comes first. Values are left alone.
pub fn normalise(command: &Command, typed: Vec<String>) -> Vec<String> {
    let mut words = typed.into_iter();
    let mut line: Vec<String> = words.next().into_iter().collect();
    let Some(name) = words.next() else { return line };
    let Some(mut chosen) = command.find_subcommand(&name).cloned() else {
        line.push(name);
        line.extend(words);
        return line;
    };
    let mut rest: Vec<String> = words.collect();
    let mut takes_model = COMMANDS.contains(&chosen.get_name());
    line.push(name);
    if chosen.has_subcommands()
        && let Some(inner) = rest.first().and_then(|word| chosen.find_subcommand(word)).cloned()
    {
        takes_model = inner.get_positionals().any(|arg| arg.get_id() == "model");
        chosen = inner;
        line.push(rest.remove(0));
    }
    let mut reader = Reader::new(&chosen, takes_model);
    let flags = reader.read(rest);
    line.extend(reader.model);
    line.extend(flags);
    line
}

struct Reader {
    longs: HashMap<String, bool>,
    shorts: HashMap<char, bool>,
    takes_model: bool,
    model: Option<String>,
    /// Sampling defaults that a server was given as flags.
    sampling: serde_json::Map<String, serde_json::Value>,
}

impl Reader {
    fn new(command: &Command, takes_model: bool) -> Self {
        let shorts = command
            .get_arguments()
            .filter_map(|arg| Some((arg.get_short()?, arg.get_action().takes_values())));
        Self {
            longs: longs(command).collect(),
            shorts: shorts.collect(),
            takes_model,
            model: None,
            sampling: serde_json::Map::new(),
        }
    }

    fn read(&mut self, words: Vec<String>) -> Vec<String> {
        let mut out = self.flags(words);
        if !self.sampling.is_empty() {
            // Before what was typed under its own name, which wins.
            let json = serde_json::Value::Object(std::mem::take(&mut self.sampling));
            out.insert(0, format!("--override-generation-config={json}"));
        }
        out
    }

    fn flags(&mut self, words: Vec<String>) -> Vec<String> {
        let mut out = Vec::with_capacity(words.len());
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            if word == "--" {
                out.push(word);
                out.extend(words);
                return out;
            }
            let (flag, value) = match word.split_once('=') {
                Some((flag, value)) if word.starts_with('-') => (flag.to_owned(), Some(value.to_owned())),
                _ => (word.clone(), None),
            };
            let flag = self.long_form(&flag);
            if self.takes_model && MODEL_FLAGS.contains(&flag.as_str()) && !self.knows(&flag) {
                self.model = value.or_else(|| words.next());
                continue;
            }
            if self.turns_off(&flag) && value.is_none() {
                continue;
            }
            if let Some(field) = self.sampling_field(&flag) {
                let text = value.clone().or_else(|| words.next()).unwrap_or_default();
                match serde_json::from_str::<serde_json::Number>(&text) {
                    Ok(number) => _ = self.sampling.insert(field.to_owned(), number.into()),
                    Err(_) => out.push(format!("{flag}={text}")),
                }
                continue;
            }
            if flag == "--reasoning" && self.knows("--default-chat-template-kwargs") {
                let word = value.clone().or_else(|| words.next());
                match word.as_deref() {
                    Some("on") => out.push(thinking(true)),
                    Some("off") => out.push(thinking(false)),
                    Some("auto") => {}
                    word => out.push(format!("{flag}={}", word.unwrap_or_default())),
                }
                continue;
            }
            let takes_value = self.takes_value(&flag) && value.is_none();
            // No layers on a GPU: that is the CPU.
            if ["--n-gpu-layers", "--gpu-layers"].contains(&flag.as_str()) {
                let layers = value.clone().or_else(|| words.next());
                match layers.as_deref() {
                    Some("0") => out.extend(["--device".to_owned(), "cpu".to_owned()]),
                    layers => out.push(format!("{flag}={}", layers.unwrap_or("all"))),
                }
                continue;
            }
            out.push(value.map_or_else(|| flag.clone(), |value| format!("{flag}={value}")));
            if takes_value {
                out.extend(words.next());
            }
        }
        out
    }

    fn knows(&self, flag: &str) -> bool {
        flag.strip_prefix("--").is_some_and(|name| self.longs.contains_key(name))
    }

    /// `--no-X` of a switch X that is off anyway.
    fn turns_off(&self, flag: &str) -> bool {
        let switch = flag.strip_prefix("--no-").and_then(|name| self.longs.get(name));
        switch == Some(&false) && !self.knows(flag)
    }

    /// The sampling default that a flag of llama.cpp's server sets.
    fn sampling_field(&self, flag: &str) -> Option<&'static str> {
        let is_server = self.knows("--override-generation-config") && !self.knows("--temperature");
        let field = SAMPLING.iter().find(|(name, _)| is_server && flag.strip_prefix("--") == Some(name));
        field.map(|(_, field)| *field)
    }

    /// What clap knows a flag by, where it knows it at all.
    fn long_form(&self, flag: &str) -> String {
        if let Some(name) = flag.strip_prefix("--") {
            let hyphens = format!("--{}", name.replace('_', "-"));
            // vLLM's way to give one field of a JSON value: `--compilation-config.mode 3`.
            let whole = hyphens.split('.').next().unwrap_or_default();
            let is_ours = |flag: &str| {
                let is_turned_off = self.turns_off(flag) || self.sampling_field(flag).is_some();
                self.knows(flag) || is_turned_off || MODEL_FLAGS.contains(&flag)
            };
            return match FLAGS.iter().any(|(name, ..)| whole.strip_prefix("--") == Some(*name)) {
                true => whole.to_owned(),
                false if is_ours(&hyphens) => hyphens,
                false => flag.to_owned(),
            };
        }
        // vLLM's `-O3`.
        if flag.len() > 2 && flag.starts_with("-O") && self.knows("--optimization-level") {
            return format!("--optimization-level={}", &flag[2..]);
        }
        let is_clap_short =
            flag.len() == 2 && flag.chars().nth(1).is_some_and(|c| self.shorts.contains_key(&c));
        let long = SHORTS.iter().find(|(short, _)| *short == flag && !is_clap_short).map(|(_, long)| *long);
        let usable = long.filter(|long| self.knows(long) || (self.takes_model && MODEL_FLAGS.contains(long)));
        usable.map_or_else(|| flag.to_owned(), str::to_owned)
    }

    fn takes_value(&self, flag: &str) -> bool {
        match flag.strip_prefix("--") {
            Some(name) => self.longs.get(name).copied().unwrap_or(false),
            None if flag.len() == 2 => {
                flag.chars().nth(1).and_then(|short| self.shorts.get(&short)).copied().unwrap_or(false)
            }
            None => false,
        }
    }
}

/// llama.cpp's `--reasoning on|off` is a variable of the chat template.
fn thinking(thinks: bool) -> String {
    format!("--default-chat-template-kwargs={{\"enable_thinking\":{thinks}}}")
}

/// Takes a tip away that is no typing mistake of the flag: a wrong tip is worse than none.
pub fn without_wrong_tip(mut error: clap::Error) -> clap::Error {
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let text = |value: Option<&ContextValue>| match value {
        Some(ContextValue::String(text)) => text.clone(),
        _ => String::new(),
    };
    let (given, tip) = (text(error.get(ContextKind::InvalidArg)), text(error.get(ContextKind::SuggestedArg)));
    let given = given.split(['=', ' ']).next().unwrap_or_default().to_owned();
    let is_close = !tip.is_empty() && distance(&given, tip.split(['=', ' ']).next().unwrap_or_default()) <= 2;
    if !is_close {
        error.remove(ContextKind::SuggestedArg);
    }
    // "to pass it as a value, use `-- --flag`" is never what was meant.
    error.remove(ContextKind::Suggested);
    error.remove(ContextKind::TrailingArg);
    error
}

/// How many letters must be changed, added, left out or exchanged with the next one.
fn distance(one: &str, other: &str) -> usize {
    let (one, other): (Vec<char>, Vec<char>) = (one.chars().collect(), other.chars().collect());
    let mut rows = vec![vec![0; other.len() + 1]; one.len() + 1];
    for i in 0..=one.len() {
        for j in 0..=other.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let changed = rows[i - 1][j - 1] + usize::from(one[i - 1] != other[j - 1]);
                let swapped = i > 1 && j > 1 && one[i - 1] == other[j - 2] && one[i - 2] == other[j - 1];
                let best = changed.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                if swapped { best.min(rows[i - 2][j - 2] + 1) } else { best }
            };
        }
    }
    rows[one.len()][other.len()]
}

#[cfg(test)]
mod tests;
