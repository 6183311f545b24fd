//! `baton chat`: a conversation at the terminal. The whole conversation is rendered anew for every turn; the engine's
//! prefix cache sees to it that only what is new is computed.
//!
//! Input comes from a line editor, or from a pipe (`input`); lines with a slash are commands (`command`).

mod command;
mod input;

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use baton::GenerationConfig;
use baton_core::{FinishReason, Request, SamplingParams};

use crate::args::{ChatArgs, RunArgs};
use crate::errors::{hinted, one_line};
use crate::generate::{self, Answer};
use crate::report::timing_report;
use crate::session::{Message, Session};
use command::Command;
use input::{Input, Line};

/// Where neither a flag nor the model says otherwise.
const DEFAULT_TEMPERATURE: f32 = 0.7;
const DEFAULT_MAX_TOKENS: u32 = 1024;

/// `baton run`: a conversation, or with a prompt one answer.
pub fn run_once(args: RunArgs, out: &mut dyn Write) -> Result<()> {
    let RunArgs { model, words, system, verbose, sampling, engine } = args;
    let args = ChatArgs { model, system, verbose, sampling, engine };
    if words.is_empty() {
        return run(&args, out);
    }
    let mut chat = open(&args)?;
    chat.messages.push(Message::user(words.join(" ")));
    chat.answer(out)?;
    writeln!(out)?;
    Ok(())
}

pub fn run(args: &ChatArgs, out: &mut dyn Write) -> Result<()> {
    open(args)?.repl(&mut Input::open()?, out)
}

fn open(args: &ChatArgs) -> Result<Chat> {
    args.engine.refuse_synthetic()?;
    let session = Session::open(args.model.as_deref(), &args.engine)?;
    if !session.text.has_chat_template() {
        return Err(hinted(
            format!("{} has no chat template, so it is no chat model", session.text.name),
            "use `baton complete` with it",
        ));
    }
    if args.verbose {
        eprintln!("{}", session.engine.memory_plan());
    }
    let neutral = args.engine.generation_config == GenerationConfig::Neutral;
    let defaults = SamplingParams {
        temperature: if neutral { 1.0 } else { DEFAULT_TEMPERATURE },
        max_tokens: Some(DEFAULT_MAX_TOKENS),
        ..SamplingParams::default()
    };
    let params = args.sampling.apply(&session.sampling.over(defaults), args.engine.seed);
    params.validate(session.engine.model_config().vocab_size as u32)?;
    if params.n != 1 || params.selects_at_end() {
        return Err(hinted("a chat has one answer per turn", "leave out -n, --best-of and --beam-search"));
    }
    Ok(Chat {
        session,
        params,
        skip_special_tokens: args.sampling.skip_special_tokens,
        system: args.system.clone(),
        messages: Vec::new(),
        totals: Totals::default(),
        interrupted: listen_for_ctrl_c()?,
        style: Style::detect(),
    })
}

/// Ctrl-C sets the flag, which stops an answer. A second one while it is still set ends the program.
fn listen_for_ctrl_c() -> Result<Arc<AtomicBool>> {
    use signal_hook::consts::SIGINT;
    let flag = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register_conditional_shutdown(SIGINT, 130, Arc::clone(&flag))
        .and_then(|_| signal_hook::flag::register(SIGINT, Arc::clone(&flag)))
        .context("cannot listen for Ctrl-C")?;
    Ok(flag)
}

struct Chat {
    session: Session,
    params: SamplingParams,
    skip_special_tokens: bool,
    system: Option<String>,
    /// Without the system message.
    messages: Vec<Message>,
    totals: Totals,
    interrupted: Arc<AtomicBool>,
    style: Style,
}

#[derive(Debug, Default)]
struct Totals {
    turns: usize,
    prompt_tokens: usize,
    cached_tokens: usize,
    completion_tokens: usize,
    seconds: f64,
}

/// Escape codes, where the output is a terminal that wants them.
#[derive(Clone, Copy, Debug)]
struct Style {
    dim: &'static str,
    bold: &'static str,
    plain: &'static str,
}

impl Style {
    fn detect() -> Self {
        let wanted =
            std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
        if wanted {
            Self { dim: "\x1b[2m", bold: "\x1b[1m", plain: "\x1b[0m" }
        } else {
            Self { dim: "", bold: "", plain: "" }
        }
    }
}

impl Chat {
    fn repl(&mut self, input: &mut Input, out: &mut dyn Write) -> Result<()> {
        let Style { dim, bold, plain } = self.style;
        let device = &self.session.engine.memory_plan().device;
        let (name, sampling) = (&self.session.text.name, &self.session.sampling);
        writeln!(out, "{bold}{name}{plain} {dim}on {device} · sampling: {sampling}{plain}")?;
        if input.is_terminal() {
            writeln!(out, "{dim}/help for commands, Ctrl-C stops an answer, /bye or Ctrl-D leaves{plain}")?;
        }
        loop {
            out.flush()?;
            match input.next()? {
                Line::End => return Ok(()),
                Line::Interrupted => writeln!(out, "{dim}/quit or Ctrl-D leaves{plain}")?,
                Line::Text(text) if text.trim().is_empty() => {}
                Line::Text(text) => match Command::parse(&text) {
                    Some(Ok(Command::Quit)) => return Ok(()),
                    Some(Ok(command)) => self.obey(command, out)?,
                    Some(Err(message)) => writeln!(out, "{message}")?,
                    None => self.turn(text, out)?,
                },
            }
        }
    }

    fn obey(&mut self, command: Command, out: &mut dyn Write) -> Result<()> {
        match command {
            Command::Quit => {}
            Command::Help => write!(out, "{}", command::HELP)?,
            Command::Reset => {
                self.messages.clear();
                writeln!(out, "the conversation begins anew")?;
            }
            Command::System(text) => {
                self.messages.clear();
                let said = if text.is_some() { "set" } else { "the model's own" };
                self.system = text;
                writeln!(out, "the system message is {said}; the conversation begins anew")?;
            }
            Command::Show => write!(out, "{}", command::show(&self.params))?,
            Command::Set(name, value) => {
                let vocab_size = self.session.engine.model_config().vocab_size as u32;
                match command::set(&self.params, &name, &value, vocab_size) {
                    Ok(params) => {
                        self.params = params;
                        writeln!(out, "{name} is {value}")?;
                    }
                    Err(message) => writeln!(out, "{message}")?,
                }
            }
            Command::Stats => self.stats(out)?,
        }
        Ok(())
    }

    /// One question and its answer. What goes wrong is said, and the chat goes on without that question.
    fn turn(&mut self, question: String, out: &mut dyn Write) -> Result<()> {
        self.messages.push(Message::user(question));
        match self.answer(out) {
            Ok(answer) => {
                let continuation = &answer.continuations[0];
                self.messages.push(Message::assistant(continuation.text.clone()));
                self.totals.add(&answer);
                self.epilogue(&answer, out)
            }
            Err(error) if error.downcast_ref::<std::io::Error>().is_some() => Err(error),
            Err(error) => {
                self.messages.pop();
                writeln!(out, "error: {}", one_line(&format!("{error:#}")))?;
                if !self.messages.is_empty() {
                    writeln!(out, "hint: /reset begins a new conversation")?;
                }
                Ok(())
            }
        }
    }

    fn answer(&mut self, out: &mut dyn Write) -> Result<Answer> {
        let system = self.system.iter().map(|system| Message::system(system.clone()));
        let messages: Vec<Message> = system.chain(self.messages.iter().cloned()).collect();
        let prompt_token_ids = self.session.text.encode_chat(&messages)?;
        let engine = &mut self.session.engine;
        let request = Request::new(engine.new_request_id(), prompt_token_ids, self.params.clone());
        self.interrupted.store(false, Ordering::Relaxed);
        let answers = generate::run(
            engine,
            &self.session.text,
            vec![request],
            self.skip_special_tokens,
            &self.interrupted,
            &mut |_, _, piece| {
                out.write_all(piece.as_bytes())?;
                out.flush()?;
                Ok(())
            },
        );
        self.interrupted.store(false, Ordering::Relaxed);
        answers?.pop().context("the engine gave no answer")
    }

    fn epilogue(&self, answer: &Answer, out: &mut dyn Write) -> Result<()> {
        let Style { dim, plain, .. } = self.style;
        let timing = timing_report(answer, self.session.load_s);
        let why = match answer.continuations[0].finish_reason {
            Some(FinishReason::Abort) => " · stopped",
            Some(FinishReason::Length) => " · cut at the length limit",
            _ => "",
        };
        let speed =
            timing.decode_tokens_per_s.map(|speed| format!(" · {speed:.1} tokens/s")).unwrap_or_default();
        writeln!(out, "\n{dim}{} tokens{speed}{why}{plain}\n", answer.num_completion_tokens())?;
        Ok(())
    }

    fn stats(&self, out: &mut dyn Write) -> Result<()> {
        let Totals { turns, prompt_tokens, cached_tokens, completion_tokens, seconds } = self.totals;
        writeln!(
            out,
            "{turns} turns, {prompt_tokens} prompt tokens ({cached_tokens} from the prefix cache),"
        )?;
        writeln!(out, "{completion_tokens} new tokens in {seconds:.2} s")?;
        writeln!(out, "{}", self.session.engine.memory_plan())?;
        Ok(())
    }
}

impl Totals {
    fn add(&mut self, answer: &Answer) {
        self.turns += 1;
        self.prompt_tokens += answer.prompt_token_ids.len();
        self.cached_tokens += answer.num_cached_tokens as usize;
        self.completion_tokens += answer.num_completion_tokens();
        self.seconds += answer.timing.last_token.as_secs_f64();
    }
}
