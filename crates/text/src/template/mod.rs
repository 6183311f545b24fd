//! Chat templates: a conversation to the one text that the model was trained to continue.
//!
//! A template is Jinja2 as transformers sets it up, and comes with the model or from the user: it is not trusted.
//! Before it is compiled it is rewritten (see `rewrite`) so that everything it does is counted; it is rendered on a
//! thread of its own, whose stack is large enough for the deepest value its fuel can build. Whatever it does, it ends
//! within a second or so, in a text or an error, and without much memory.

use std::cell::Cell;
use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use jiff::Zoned;
use jiff::tz::TimeZone;
use minijinja::machinery;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind};
use serde_json::Map;

use crate::TextError;
use crate::answer::{ReasoningFormat, ToolFormat};
use crate::contain::contain;

mod abilities;
mod arithmetic;
mod budget;
mod clock;
mod filters;
mod format;
mod json;
mod methods;
mod print;
mod python;
mod rewrite;

pub use abilities::{ArgumentsForm, TemplateAbilities};

/// The longest template. Those in use have up to about 20 KiB.
pub const MAX_TEMPLATE_BYTES: usize = 256 << 10;
/// The longest rendered prompt.
pub const MAX_RENDERED_BYTES: usize = 16 << 20;
/// Instructions of the template engine; a message costs about a hundred.
const FUEL: u64 = 2_000_000;
/// Room for the recursion that a value built with that much fuel can cause when it is printed or dropped. Only what
/// is used is ever backed by memory.
pub const TEMPLATE_STACK_BYTES: usize = 512 << 20;
const NAME: &str = "chat template";

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: Option<String>,
    eos_token: Option<String>,
    tool_format: Option<ToolFormat>,
    reasoning_format: Option<ReasoningFormat>,
}

/// What goes into a prompt besides the messages.
#[derive(Clone, Debug, Default)]
pub struct RenderOptions {
    /// End with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// The last message is the beginning of the answer: leave it open.
    pub continue_final_message: bool,
    /// Functions that the model may call, as the client described them.
    pub tools: Option<serde_json::Value>,
    /// Texts for templates that support retrieval.
    pub documents: Option<serde_json::Value>,
    /// Further variables of the template, such as `enable_thinking`. They take precedence over all others.
    pub chat_template_kwargs: Map<String, serde_json::Value>,
    /// The clock for `strftime_now`, in UTC; without it, the system's in local time.
    pub now: Option<SystemTime>,
}

thread_local! {
    static HAS_LARGE_STACK: Cell<bool> = const { Cell::new(false) };
}

/// Says that the calling thread has a stack of [`TEMPLATE_STACK_BYTES`], so that templates may run right on it.
pub fn declare_large_stack() {
    HAS_LARGE_STACK.set(true);
}

/// Runs `work` on a thread with a large stack, which may be this one; a panic there becomes an error.
fn on_large_stack<T: Send>(work: impl FnOnce() -> Result<T, TextError> + Send) -> Result<T, TextError> {
    if HAS_LARGE_STACK.get() {
        let gave_up = || Err(TextError::TemplateRender("the template engine gave up on it".to_owned()));
        return contain(work).unwrap_or_else(gave_up);
    }
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("chat-template".to_owned())
            .stack_size(TEMPLATE_STACK_BYTES)
            .spawn_scoped(scope, work)
            .map_err(|error| TextError::NoThread(error.to_string()))?;
        thread.join().unwrap_or_else(|_| {
            Err(TextError::TemplateRender("the template engine gave up on it".to_owned()))
        })
    })
}

/// The message of an error and of what caused it, on one line.
fn describe(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// transformers marks the assistant's part with `{% generation %}`; for rendering the mark means nothing.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let inner_start = open + 2;
        let Some(length) = rest[inner_start..].find("%}") else { break };
        let inner = &rest[inner_start..inner_start + length];
        let word = inner.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        let replacement = match word {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        out.push_str(&rest[..inner_start]);
        match replacement {
            Some(replacement) => out.push_str(&inner.replacen(word, replacement, 1)),
            None => out.push_str(inner),
        }
        rest = &rest[inner_start + length..];
    }
    out.push_str(rest);
    out
}

/// Jinja2 knows one end of line, in texts of the template as well.
fn with_plain_newlines(source: &str) -> std::borrow::Cow<'_, str> {
    if source.contains('\r') {
        source.replace("\r\n", "\n").replace('\r', "\n").into()
    } else {
        source.into()
    }
}

/// Operators chain without nesting, and the engine compiles a chain by recursion: bounds it.
fn check_tag_length(source: &str) -> Result<(), TextError> {
    const MAX_TAG_BYTES: usize = 64 << 10;
    let mut rest = source;
    while let Some(open) = rest.find('{') {
        let tag = &rest[open..];
        let close = tag.find("%}").into_iter().chain(tag.find("}}")).min().unwrap_or(tag.len());
        if (tag.starts_with("{%") || tag.starts_with("{{")) && close > MAX_TAG_BYTES {
            return Err(TextError::TemplateLimit(format!(
                "one of its tags is longer than {MAX_TAG_BYTES} bytes"
            )));
        }
        rest = &tag[1..];
    }
    Ok(())
}

impl ChatTemplate {
    /// Compiles a template. `bos_token` and `eos_token` are the texts of those tokens.
    pub fn new(source: &str, bos_token: Option<&str>, eos_token: Option<&str>) -> Result<Self, TextError> {
        if source.len() > MAX_TEMPLATE_BYTES {
            let length = source.len();
            return Err(TextError::TemplateLimit(format!(
                "it is {length} bytes long, at most {MAX_TEMPLATE_BYTES} are supported"
            )));
        }
        check_tag_length(source)?;
        let (tool_format, reasoning_format) =
            (ToolFormat::of_template(source), ReasoningFormat::of_template(source));
        let source = without_generation_marks(&with_plain_newlines(source));
        let environment = on_large_stack(|| Self::compile(&source))?;
        Ok(Self {
            environment,
            bos_token: bos_token.map(str::to_owned),
            eos_token: eos_token.map(str::to_owned),
            tool_format,
            reasoning_format,
        })
    }

    /// How its model writes calls of functions, if the template shows it.
    pub fn tool_format(&self) -> Option<ToolFormat> {
        self.tool_format
    }

    /// How its model writes reasoning, if the template shows it.
    pub fn reasoning_format(&self) -> Option<ReasoningFormat> {
        self.reasoning_format
    }

    fn compile(source: &str) -> Result<Environment<'static>, TextError> {
        let invalid = |error: Error| TextError::TemplateSyntax(describe(&error));
        let syntax =
            SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(invalid)?;
        let parsed = machinery::parse(source, NAME, syntax).map_err(invalid)?;
        let rewritten = rewrite::Rewritten::from_ast(&parsed).map_err(TextError::TemplateSyntax)?;
        let mut environment = python::environment();
        environment.set_debug(false);
        environment.set_fuel(Some(FUEL));
        let constants = rewritten.constants;
        environment.add_function("__baton_constant", move |index: usize| -> Result<Value, Error> {
            constants
                .get(index)
                .cloned()
                .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "no such constant"))
        });
        environment.add_template_owned(NAME, rewritten.source).map_err(invalid)?;
        Ok(environment)
    }

    /// Renders a conversation. A message is an object with `role` and `content` and whatever else the template
    /// knows; `content` is a text or a list of parts.
    pub fn render(
        &self,
        messages: &[serde_json::Value],
        options: &RenderOptions,
    ) -> Result<String, TextError> {
        let context = self.context(messages, options);
        let now = options.now.unwrap_or_else(SystemTime::now);
        let seconds = match now.duration_since(UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
            Err(before) => i64::try_from(before.duration().as_secs()).map_or(i64::MIN, |seconds| -seconds),
        };
        let zone = if options.now.is_some() { TimeZone::UTC } else { TimeZone::system() };
        let moment = clock::moment(seconds, zone);
        let mut rendered = on_large_stack(|| self.render_here(context, moment))?;
        if options.continue_final_message {
            cut_after_final_message(&mut rendered, messages)?;
        }
        Ok(rendered)
    }

    fn context(
        &self,
        messages: &[serde_json::Value],
        options: &RenderOptions,
    ) -> Map<String, serde_json::Value> {
        let mut context = Map::new();
        let mut set = |name: &str, value: serde_json::Value| context.insert(name.to_owned(), value);
        set("messages", messages.into());
        set("tools", options.tools.clone().unwrap_or_default());
        set("documents", options.documents.clone().unwrap_or_default());
        set("add_generation_prompt", options.add_generation_prompt.into());
        for (name, token) in [("bos_token", &self.bos_token), ("eos_token", &self.eos_token)] {
            if let Some(token) = token {
                set(name, token.as_str().into());
            }
        }
        context.extend(options.chat_template_kwargs.clone());
        context
    }

    fn render_here(
        &self,
        context: Map<String, serde_json::Value>,
        moment: Zoned,
    ) -> Result<String, TextError> {
        budget::reset();
        let mut environment = self.environment.clone();
        environment.add_function("strftime_now", move |format: &str| {
            clock::strftime(&moment, format).map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
        });
        let template =
            environment.get_template(NAME).map_err(|error| TextError::TemplateRender(describe(&error)))?;
        let mut output = BoundedOutput::default();
        let result = template
            .render_captured_to(json::to_value(serde_json::Value::Object(context)), &mut output)
            .map(|_| ());
        match result {
            Ok(()) => String::from_utf8(output.bytes)
                .map_err(|_| TextError::TemplateRender("it gave bytes that are no text".to_owned())),
            Err(_) if output.is_full => {
                Err(TextError::TemplateLimit(format!("its output is longer than {MAX_RENDERED_BYTES} bytes")))
            }
            Err(error) => Err(rendering_error(&error)),
        }
    }
}

fn rendering_error(error: &Error) -> TextError {
    if let Some(message) = budget::take_refusal() {
        return TextError::TemplateRefused(message);
    }
    if budget::is_exhausted() || error.kind() == ErrorKind::OutOfFuel {
        return TextError::TemplateLimit("it does more work than any conversation needs".to_owned());
    }
    TextError::TemplateRender(describe(error))
}

/// Takes the rendered text, up to the limit.
#[derive(Debug, Default)]
struct BoundedOutput {
    bytes: Vec<u8>,
    is_full: bool,
}

impl io::Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_RENDERED_BYTES {
            self.is_full = true;
            return Err(io::Error::other("the output is too long"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Cuts the prompt off where the last message ends, so that the model goes on with it.
fn cut_after_final_message(rendered: &mut String, messages: &[serde_json::Value]) -> Result<(), TextError> {
    let content = messages.last().and_then(|message| message.get("content"));
    let text = match content {
        Some(serde_json::Value::String(text)) => Some(text.as_str()),
        Some(serde_json::Value::Array(parts)) => {
            parts.iter().rev().find_map(|part| part.get("text").and_then(serde_json::Value::as_str))
        }
        _ => None,
    };
    let text = text.map(str::trim).filter(|text| !text.is_empty()).ok_or_else(|| {
        TextError::TemplateRefused("continue_final_message needs a last message with text".to_owned())
    })?;
    let start = rendered.rfind(text).ok_or_else(|| {
        TextError::TemplateRefused(
            "the template changes the last message, so that it cannot be continued (continue_final_message)"
                .to_owned(),
        )
    })?;
    rendered.truncate(start + text.len());
    Ok(())
}

#[cfg(test)]
mod tests;
