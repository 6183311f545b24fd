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

/// What happens to a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    /// Taken: it asks for what is so anyway.
    Quiet,
    /// Taken, and this is said.
    Note(&'static str),
    /// Taken where its value asks for nothing (0, 1, none, auto, false), else refused with this.
    Only(&'static str),
    /// Refused with this, and with what to do instead.
    Refuse(&'static str, &'static str),
}

use Effect::{Note, Only, Quiet, Refuse};

/// A flag, whether it has a value of its own, and what happens.
const FLAGS: &[(&str, bool, Effect)] = &[
    // vLLM
    (
        "tensor-parallel-size",
        true,
        Only("Baton runs on one device: start one server per GPU behind `baton route`"),
    ),
    (
        "pipeline-parallel-size",
        true,
        Only("Baton runs on one device: start one server per GPU behind `baton route`"),
    ),
    ("data-parallel-size", true, Only("start one server per GPU behind `baton route`")),
    ("expert-parallel-size", true, Only("Baton runs on one device, which holds all experts")),
    (
        "enable-expert-parallel",
        false,
        Refuse("Baton runs on one device, which holds all experts", "leave the flag out"),
    ),
    ("distributed-executor-backend", true, Note("there is one process, which needs no executor")),
    ("worker-use-ray", false, Note("there is one process, which needs no executor")),
    ("disable-custom-all-reduce", false, Quiet),
    ("trust-remote-code", false, Note("no code of a model is ever run")),
    ("enable-chunked-prefill", false, Quiet),
    (
        "no-enable-chunked-prefill",
        false,
        Note(
            "prompts longer than a step are always cut into chunks; --max-num-batched-tokens sets their size",
        ),
    ),
    ("max-num-partial-prefills", true, Note("prompts share a step as they come")),
    ("long-prefill-token-threshold", true, Note("prompts share a step as they come")),
    ("num-scheduler-steps", true, Note("steps overlap by themselves")),
    ("async-scheduling", false, Quiet),
    ("no-async-scheduling", false, Note("steps overlap by themselves")),
    ("disable-async-output-proc", false, Note("outputs are always handled beside the steps")),
    ("disable-log-requests", false, Quiet),
    ("no-enable-log-requests", false, Quiet),
    ("enable-log-requests", false, Note("every request is logged at --log-level debug")),
    ("max-log-len", true, Quiet),
    ("disable-log-stats", false, Quiet),
    ("uvicorn-log-level", true, Note("use --log-level")),
    ("disable-uvicorn-access-log", false, Quiet),
    ("disable-frontend-multiprocessing", false, Quiet),
    ("api-server-count", true, Quiet),
    ("enable-server-load-tracking", false, Quiet),
    ("enable-tokenizer-info-endpoint", false, Quiet),
    ("enable-prompt-tokens-details", false, Quiet),
    ("enable-force-include-usage", false, Note("ask for usage with stream_options")),
    ("tokenizer-mode", true, Quiet),
    ("tokenizer-revision", true, Note("use --revision")),
    ("code-revision", true, Note("no code of a model is ever run")),
    ("skip-tokenizer-init", false, Note("prompts may be token ids anyway")),
    ("tokenizer-pool-size", true, Quiet),
    ("max-seq-len-to-capture", true, Note("recorded graphs cover every length")),
    ("cuda-graph-sizes", true, Note("graphs are recorded for every size that is used")),
    ("compilation-config", true, Note("kernels are compiled at start and kept")),
    ("use-v2-block-manager", false, Quiet),
    ("guided-decoding-backend", true, Note("there is one grammar engine")),
    ("structured-outputs-config", true, Note("there is one grammar engine")),
    ("structured-outputs-config.backend", true, Note("there is one grammar engine")),
    ("response-role", true, Note("the role of answers is assistant")),
    ("chat-template-content-format", true, Quiet),
    ("trust-request-chat-template", false, Note("requests cannot bring templates")),
    ("config-format", true, Quiet),
    ("download-dir", true, Note("models are kept in $HF_HOME or $BATON_HOME")),
    ("cpu-offload-gb", true, Only("weights are not split between devices: take a smaller quantisation")),
    ("enable-lora", false, Refuse("adapters are not supported", "merge the adapter into the model")),
    ("lora-modules", true, Refuse("adapters are not supported", "merge the adapter into the model")),
    ("speculative-model", true, Refuse("the flag is an old one", "use --speculative-config")),
    ("num-speculative-tokens", true, Refuse("the flag is an old one", "use --speculative-config")),
    (
        "kv-transfer-config",
        true,
        Refuse("its parts are flags of their own", "use --kv-role, --kv-store and --kv-disk-path"),
    ),
    ("limit-mm-per-prompt", true, Note("models take text only")),
    ("mm-processor-kwargs", true, Note("models take text only")),
    ("task", true, Note("every model generates and embeds")),
    ("runner", true, Note("every model generates and embeds")),
    ("convert", true, Note("every model generates and embeds")),
    ("hf-overrides", true, Refuse("configurations are read as they are", "edit a copy of config.json")),
    ("rope-scaling", true, Refuse("configurations are read as they are", "edit a copy of config.json")),
    ("rope-theta", true, Refuse("configurations are read as they are", "edit a copy of config.json")),
    ("middleware", true, Refuse("the server runs no code of others", "put a proxy before it")),
    ("profile", false, Note("`baton serve --profile FILE` writes a trace of the step loop")),
    ("profile-result-dir", true, Note("`baton serve --profile FILE` writes a trace of the step loop")),
    // llama.cpp
    ("n-gpu-layers", true, Note("all layers run on one device; --device chooses it")),
    ("gpu-layers", true, Note("all layers run on one device; --device chooses it")),
    ("flash-attn", true, Quiet),
    ("cont-batching", false, Quiet),
    ("no-mmap", false, Note("files are mapped and then copied to the device")),
    ("mlock", false, Note("weights are copied into memory of the process")),
    ("ubatch-size", true, Note("use --max-num-batched-tokens")),
    ("main-gpu", true, Note("use --device cuda:N")),
    ("split-mode", true, Quiet),
    ("tensor-split", true, Only("Baton runs on one device")),
    ("numa", true, Quiet),
    ("jinja", false, Quiet),
    ("no-webui", false, Note("use --disable-console")),
    ("slots", false, Quiet),
    ("props", false, Quiet),
    ("metrics", false, Quiet),
    ("keep-alive", true, Quiet),
];

/// Short flags of several letters, and single ones that clap would read otherwise.
const SHORTS: &[(&str, &str)] = &[
    ("-tp", "--tensor-parallel-size"),
    ("-pp", "--pipeline-parallel-size"),
    ("-dp", "--data-parallel-size"),
    ("-ngl", "--n-gpu-layers"),
    ("-np", "--max-num-seqs"),
    ("-fa", "--flash-attn"),
    ("-cb", "--cont-batching"),
    ("-ub", "--ubatch-size"),
    ("-mg", "--main-gpu"),
    ("-hf", "--model"),
    ("-hfr", "--model"),
    ("-m", "--model"),
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
    let arg = |&(name, has_value, _): &(&'static str, bool, Effect)| {
        let arg = Arg::new(name).long(name).hide(true).action(ArgAction::Set);
        match has_value {
            true if name == "flash-attn" => arg.num_args(0..=1).default_missing_value("on"),
            true => arg.num_args(1).allow_hyphen_values(true),
            false => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
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
        let asks_nothing = ["0", "1", "none", "auto", "false"].contains(&value.to_ascii_lowercase().as_str());
        match effect {
            Quiet => {}
            Note(text) => eprintln!("note: --{name}: {text}"),
            Only(_) if asks_nothing => {}
            Only(why) => return Err(hinted(format!("--{name} {value} cannot be done"), why)),
            Refuse(why, instead) => return Err(hinted(format!("--{name}: {why}"), instead)),
        }
    }
    Ok(())
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
}

impl Reader {
    fn new(command: &Command, takes_model: bool) -> Self {
        let shorts = command
            .get_arguments()
            .filter_map(|arg| Some((arg.get_short()?, arg.get_action().takes_values())));
        Self { longs: longs(command).collect(), shorts: shorts.collect(), takes_model, model: None }
    }

    fn read(&mut self, words: Vec<String>) -> Vec<String> {
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

    /// What clap knows a flag by, where it knows it at all.
    fn long_form(&self, flag: &str) -> String {
        if let Some(name) = flag.strip_prefix("--") {
            let hyphens = format!("--{}", name.replace('_', "-"));
            let is_ours = self.knows(&hyphens) || MODEL_FLAGS.contains(&hyphens.as_str());
            return if is_ours { hyphens } else { flag.to_owned() };
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
