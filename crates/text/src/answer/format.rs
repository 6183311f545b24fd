//! The formats in which models write tool calls and reasoning, with vLLM's names, and how to tell a template's format.

use std::str::FromStr;

use super::channels;

/// How a model writes calls of functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen 2.5 and 3, and models that are instructed to.
    Hermes,
    /// `{"name": …, "parameters": …}`, perhaps after `<|python_tag|>`, several with `;` between them.
    Llama3Json,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}]`, or `[TOOL_CALLS]name[ARGS]{…}` as newer ones do.
    Mistral,
    /// A message of the `commentary` channel to `functions.NAME`: gpt-oss.
    OpenAi,
    /// An object or a list of objects without any mark.
    Json,
}

/// How a model writes its reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// `<think>…</think>`, and the opening tag may be missing.
    DeepSeekR1,
    /// `<think>…</think>` where the model writes both or the prompt the first.
    Qwen3,
    /// `[THINK]…[/THINK]`.
    Mistral,
    /// Messages of the `analysis` channel: gpt-oss.
    OpenAi,
}

/// The name of a format that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not known: write {known}")]
pub struct UnknownFormat {
    name: String,
    known: &'static str,
}

impl ToolFormat {
    /// The text that begins a call; without one, a call is JSON at the beginning of a line.
    pub(super) fn marker(self) -> Option<&'static str> {
        match self {
            Self::Hermes => Some("<tool_call>"),
            Self::Llama3Json => Some("<|python_tag|>"),
            Self::Mistral => Some("[TOOL_CALLS]"),
            Self::OpenAi | Self::Json => None,
        }
    }

    /// The text that ends a call.
    pub(super) fn closing(self) -> Option<&'static str> {
        (self == Self::Hermes).then_some("</tool_call>")
    }

    /// A call need not be marked.
    pub(super) fn is_bare(self) -> bool {
        matches!(self, Self::Llama3Json | Self::Json)
    }

    /// What a template that shows calls of earlier turns teaches its model.
    pub fn of_template(source: &str) -> Option<Self> {
        if source.contains("<|channel|>commentary") {
            Some(Self::OpenAi)
        } else if source.contains("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else if source.contains("<tool_call>") {
            Some(Self::Hermes)
        } else if source.contains("<|python_tag|>") || source.contains("ipython") {
            Some(Self::Llama3Json)
        } else {
            None
        }
    }
}

impl ReasoningFormat {
    /// What stands before reasoning.
    pub(super) fn opening(self) -> &'static str {
        match self {
            Self::DeepSeekR1 | Self::Qwen3 => "<think>",
            Self::Mistral => "[THINK]",
            Self::OpenAi => channels::PROMPT_END,
        }
    }

    pub(super) fn closing(self) -> &'static str {
        match self {
            Self::DeepSeekR1 | Self::Qwen3 => "</think>",
            Self::Mistral => "[/THINK]",
            Self::OpenAi => channels::ANSWER_BEGIN,
        }
    }

    /// What a prompt that leaves reasoning to the model lacks for an answer without any.
    pub fn skipped_after(self, prompt: &str) -> Option<String> {
        let space = if self == Self::OpenAi { "" } else { "\n\n" };
        prompt.trim_end().ends_with(self.opening()).then(|| format!("{}{space}", self.closing()))
    }

    /// Whether a prompt opens the tag is seen in the prompt, so one format does for all that use these tags.
    pub fn of_template(source: &str) -> Option<Self> {
        if source.contains("<|channel|>analysis") {
            Some(Self::OpenAi)
        } else if source.contains("[THINK]") {
            Some(Self::Mistral)
        } else if source.contains("<think>") || source.contains("</think>") {
            Some(Self::Qwen3)
        } else {
            None
        }
    }
}

impl FromStr for ToolFormat {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        match name {
            "hermes" => Ok(Self::Hermes),
            "llama3_json" => Ok(Self::Llama3Json),
            "mistral" => Ok(Self::Mistral),
            "openai" => Ok(Self::OpenAi),
            "json" => Ok(Self::Json),
            _ => Err(UnknownFormat {
                name: name.to_owned(),
                known: "auto, none, hermes, llama3_json, mistral, openai or json",
            }),
        }
    }
}

impl FromStr for ReasoningFormat {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        match name {
            "deepseek_r1" => Ok(Self::DeepSeekR1),
            "qwen3" => Ok(Self::Qwen3),
            "mistral" => Ok(Self::Mistral),
            "openai_gptoss" => Ok(Self::OpenAi),
            _ => Err(UnknownFormat {
                name: name.to_owned(),
                known: "auto, none, deepseek_r1, qwen3, mistral or openai_gptoss",
            }),
        }
    }
}
