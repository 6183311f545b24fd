//! `baton complete`: continues prompts. One prompt with one continuation streams; everything else is printed at the end.

use std::io::{IsTerminal, Read, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use baton::GenerationConfig;
use baton_core::{Request, SamplingParams, TokenId};
use baton_hub::{RepoName, catalogue};

use crate::args::CompleteArgs;
use crate::errors::hinted;
use crate::generate::{self, Answer};
use crate::report::{Asked, CompletionReport, timing_report};
use crate::sampling_args::parse_token_ids;
use crate::session::{Message, Session, TextModel};

/// Where neither a flag nor the model says otherwise: reproducible, and long enough to see something.
const DEFAULT_TEMPERATURE: f32 = 0.0;
const DEFAULT_MAX_TOKENS: u32 = 128;

pub fn run(args: &CompleteArgs, out: &mut dyn Write) -> Result<()> {
    // What is wrong with the flags is said before a model is loaded.
    args.engine.refuse_synthetic()?;
    let text = args.model.as_deref().filter(|given| is_text(args, given));
    let model = args.model.as_deref().filter(|_| text.is_none());
    let prompts = Prompts::read(args, text)?;
    let neutral = args.engine.generation_config == GenerationConfig::Neutral;
    let defaults = SamplingParams {
        temperature: if neutral { 1.0 } else { DEFAULT_TEMPERATURE },
        max_tokens: Some(DEFAULT_MAX_TOKENS),
        ..SamplingParams::default()
    };
    let wish = args.structured.wish()?;
    args.sampling.apply(&defaults, args.engine.seed).validate(u32::MAX)?;

    let mut session = Session::open(model, &args.engine)?;
    let params = SamplingParams {
        structured_outputs: wish,
        ..args.sampling.apply(&session.sampling.over(defaults), args.engine.seed)
    };
    if args.verbose {
        eprintln!("{}", session.engine.memory_plan());
        eprintln!("sampling defaults: {}", session.sampling);
    }
    let prompts = prompts.encode(args, &session.text)?;
    let vocab_size = session.engine.model_config().vocab_size;
    let wish = params.structured_outputs.as_ref();
    let constraint = wish.map(|wish| session.text.compile(wish, vocab_size)).transpose()?;
    let params = Arc::new(params);
    let requests: Vec<Request> = prompts
        .into_iter()
        .map(|prompt_token_ids| Request {
            params: Arc::clone(&params),
            priority: args.request.priority,
            cache_salt: args.request.cache_salt.as_deref().map(Arc::from),
            constraint: constraint.clone(),
            ..Request::new(session.engine.new_request_id(), prompt_token_ids, SamplingParams::default())
        })
        .collect();

    let streams = requests.len() == 1 && params.n == 1 && !args.json;
    let answers = generate::run(
        &mut session.engine,
        &session.text,
        requests,
        args.sampling.skip_special_tokens,
        &AtomicBool::new(false),
        &mut |_, _, piece| {
            if streams {
                out.write_all(piece.as_bytes())?;
                out.flush()?;
            }
            Ok(())
        },
    )?;
    if args.json {
        print_json(&answers, &session, &params, out)?;
    } else if streams {
        writeln!(out)?;
    } else {
        print_texts(&answers, out)?;
    }
    if args.verbose {
        for answer in &answers {
            print_speed(answer, session.load_s);
        }
    }
    Ok(())
}

/// `baton complete "some text"`: what is given in the place of the model is no model, but what is to be continued.
fn is_text(args: &CompleteArgs, given: &str) -> bool {
    args.prompt.is_empty()
        && args.prompt_token_ids.is_empty()
        && !std::path::Path::new(given).exists()
        && catalogue::find(given).is_none()
        && !RepoName::looks_like(given)
        && given.contains(char::is_whitespace)
}

/// What is to be continued, before there is a tokenizer.
#[derive(Debug)]
struct Prompts {
    texts: Vec<String>,
    token_ids: Vec<Vec<TokenId>>,
}

impl Prompts {
    fn read(args: &CompleteArgs, text: Option<&str>) -> Result<Self> {
        if let Some(text) = text {
            return Ok(Self { texts: vec![text.to_owned()], token_ids: Vec::new() });
        }
        if args.prompt.is_empty() && args.prompt_token_ids.is_empty() {
            return Err(hinted(
                "there is nothing to continue",
                "give a prompt: -p TEXT, -p - for standard input, or --prompt-token-ids 1,2,3",
            ));
        }
        let token_ids = args.prompt_token_ids.iter().map(|ids| match parse_token_ids(ids) {
            Ok(ids) if ids.is_empty() => {
                Err(hinted("--prompt-token-ids is empty", "write for example 1,2,3"))
            }
            Ok(ids) => Ok(ids),
            Err(error) => Err(hinted(error, "--prompt-token-ids takes numbers with commas between")),
        });
        let mut stdin_used = false;
        let texts = args.prompt.iter().map(|text| {
            if text != "-" {
                return Ok(text.clone());
            }
            if std::mem::replace(&mut stdin_used, true) {
                return Err(hinted("standard input can be read only once", "give `-p -` only once"));
            }
            read_stdin()
        });
        Ok(Self { token_ids: token_ids.collect::<Result<_>>()?, texts: texts.collect::<Result<_>>()? })
    }

    fn encode(self, args: &CompleteArgs, text: &TextModel) -> Result<Vec<Vec<TokenId>>> {
        let mut prompts = Vec::with_capacity(self.texts.len() + self.token_ids.len());
        for prompt in self.texts {
            let token_ids = if args.chat {
                let system = args.system.iter().map(|system| Message::system(system.clone()));
                let messages: Vec<Message> = system.chain([Message::user(prompt)]).collect();
                text.encode_chat(&messages)?
            } else {
                text.encode(&prompt)?
            };
            if token_ids.is_empty() {
                return Err(hinted(
                    "the prompt is empty",
                    "this model needs at least one token to begin with",
                ));
            }
            prompts.push(token_ids);
        }
        prompts.extend(self.token_ids);
        Ok(prompts)
    }
}

fn read_stdin() -> Result<String> {
    if std::io::stdin().is_terminal() {
        eprintln!("reading the prompt from the terminal; end it with Ctrl-D");
    }
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("cannot read standard input as UTF-8 text")?;
    // `echo` ends its line; the prompt does not mean that.
    let trimmed = text.strip_suffix('\n').map(|text| text.strip_suffix('\r').unwrap_or(text));
    Ok(trimmed.unwrap_or(&text).to_owned())
}

fn print_json(
    answers: &[Answer],
    session: &Session,
    params: &SamplingParams,
    out: &mut dyn Write,
) -> Result<()> {
    let asked = Asked {
        logprobs: params.logprobs.is_some(),
        prompt_logprobs: params.prompt_logprobs.is_some(),
        scores: params.logprobs.is_some() || params.selects_at_end(),
    };
    for answer in answers {
        let report = CompletionReport::new(answer, &session.text, session.load_s, asked);
        let one = answers.len() == 1;
        let json = if one { serde_json::to_string_pretty(&report)? } else { serde_json::to_string(&report)? };
        writeln!(out, "{json}")?;
    }
    Ok(())
}

fn print_texts(answers: &[Answer], out: &mut dyn Write) -> Result<()> {
    for (prompt, answer) in answers.iter().enumerate() {
        for (index, continuation) in answer.continuations.iter().enumerate() {
            match (answers.len(), answer.continuations.len()) {
                (1, _) => writeln!(out, "── {}", index + 1)?,
                (_, 1) => writeln!(out, "── prompt {}", prompt + 1)?,
                _ => writeln!(out, "── prompt {}, {}", prompt + 1, index + 1)?,
            }
            writeln!(out, "{}", continuation.text)?;
        }
    }
    Ok(())
}

fn print_speed(answer: &Answer, load_s: f64) {
    let timing = timing_report(answer, load_s);
    let shown =
        |speed: Option<f64>| speed.map_or_else(|| "–".to_owned(), |speed| format!("{speed:.1} tokens/s"));
    eprintln!(
        "{} prompt tokens ({} cached), {} new · prefill {} · decode {} · load {load_s:.2} s",
        answer.prompt_token_ids.len(),
        answer.num_cached_tokens,
        answer.num_completion_tokens(),
        shown(timing.prefill_tokens_per_s),
        shown(timing.decode_tokens_per_s),
    );
}
