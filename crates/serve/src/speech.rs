//! How the served model speaks besides plain text: what its template can show, and how it writes calls and reasoning.

use baton_text::{AnswerOptions, ChatTemplate, ReasoningFormat, TemplateAbilities, ToolFormat};

use crate::config::ParserChoice;
use crate::tools::ToolUse;
use crate::{ServerConfig, ids};

#[derive(Clone, Copy, Debug)]
pub struct Speech {
    pub abilities: TemplateAbilities,
    tool_format: ToolFormat,
    pub reasoning: Option<ReasoningFormat>,
}

impl Speech {
    /// Flags first, then what the template shows. A model whose template knows no functions is told of them in words,
    /// and answers as it was told.
    pub fn new(template: Option<&ChatTemplate>, config: &ServerConfig) -> Self {
        let nothing = TemplateAbilities {
            system: true,
            tools: false,
            tool_calls: None,
            tool_results: false,
            short_call_ids: false,
        };
        let abilities = template.map_or(nothing, ChatTemplate::abilities);
        let of_template = match template.and_then(ChatTemplate::tool_format) {
            Some(format) if abilities.tools => format,
            None if abilities.tools => ToolFormat::Json,
            _ => ToolFormat::Hermes,
        };
        let tool_format = match config.tool_call_parser {
            ParserChoice::Fixed(format) => format,
            ParserChoice::Auto | ParserChoice::Off => of_template,
        };
        let reasoning = match config.reasoning_parser {
            ParserChoice::Fixed(format) => Some(format),
            ParserChoice::Auto => template.and_then(ChatTemplate::reasoning_format),
            ParserChoice::Off => None,
        };
        Self { abilities, tool_format, reasoning }
    }

    /// How an answer to a request with these functions is read.
    pub fn answer_options(self, tools: &ToolUse) -> AnswerOptions {
        AnswerOptions {
            reasoning: self.reasoning,
            calls: tools.call_mode(self.tool_format),
            parallel: tools.parallel(),
            new_id: if self.abilities.short_call_ids { ids::short_call } else { ids::call },
        }
    }
}
