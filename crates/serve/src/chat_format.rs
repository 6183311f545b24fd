//! How the served model speaks besides plain text: what its template can show, and how it writes calls and reasoning.

use baton_text::{AnswerOptions, ChatTemplate, ReasoningFormat, TemplateAbilities, ToolFormat};

use crate::config::ParserChoice;
use crate::tools::ToolUse;
use crate::{ServerConfig, ids};

#[derive(Clone, Copy, Debug)]
pub struct ChatFormat {
    pub abilities: TemplateAbilities,
    /// `None`: calls stay text.
    tool_format: Option<ToolFormat>,
    pub reasoning: Option<ReasoningFormat>,
}

impl ChatFormat {
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
            ParserChoice::Fixed(format) => Some(format),
            ParserChoice::Auto => Some(of_template),
            ParserChoice::Off => None,
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

#[cfg(test)]
mod tests {
    use baton_text::RenderOptions;
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::turns;

    fn chat_format(name: &str) -> (ChatTemplate, ChatFormat) {
        let folder =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../text/tests/data/chat-templates");
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).expect("template");
        let template = ChatTemplate::new(&source, Some("<bos>"), Some("<eos>")).expect("sound");
        let chat_format = ChatFormat::new(Some(&template), &ServerConfig::default());
        (template, chat_format)
    }

    /// A conversation with a call, as OpenAI's clients send it, through a model's own template.
    fn rendered(name: &str) -> String {
        let (template, chat_format) = chat_format(name);
        let messages: Vec<Map<String, Value>> = serde_json::from_value(json!([
            {"role": "user", "content": "Weather in Rome?"},
            {"role": "assistant", "content": null, "tool_calls": [{
                "id": "call_0123456789abcdef", "type": "function",
                "function": {"name": "get_weather", "arguments": "{\"city\": \"Rome\"}"},
            }]},
            {"role": "tool", "tool_call_id": "call_0123456789abcdef", "content": "21 degrees"},
        ]))
        .expect("messages");
        let tool = json!({"type": "function", "function": {
            "name": "get_weather",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where"}}},
        }});
        let tools = [tool];
        let told = Some(&tools[..]).filter(|_| !chat_format.abilities.tools);
        let turns = turns::for_template(messages, told, chat_format.abilities).expect("sound messages");
        let options = RenderOptions {
            add_generation_prompt: true,
            tools: chat_format.abilities.tools.then(|| json!(tools)),
            ..RenderOptions::default()
        };
        template.render(&turns, &options).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    #[test]
    fn conversations_with_calls_go_through_real_templates() {
        for (name, format) in [
            ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", ToolFormat::Hermes),
            ("Qwen-Qwen2.5-7B-Instruct", ToolFormat::Hermes),
            ("Qwen-Qwen3-0.6B", ToolFormat::Hermes),
            ("meta-llama-Llama-3.1-8B-Instruct", ToolFormat::Llama3Json),
            ("meta-llama-Llama-3.2-3B-Instruct", ToolFormat::Llama3Json),
            ("mistralai-Mistral-Nemo-Instruct-2407", ToolFormat::Mistral),
            // These are told in words.
            ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", ToolFormat::Hermes),
            ("google-gemma-2-2b-it", ToolFormat::Hermes),
            ("microsoft-Phi-3.5-mini-instruct", ToolFormat::Hermes),
        ] {
            assert_eq!(chat_format(name).1.tool_format, Some(format), "{name}");
            let text = rendered(name);
            assert!(text.contains("The weather"), "{name} is not told of the function: {text}");
            let call = text.contains("{\"city\": \"Rome\"}") || text.contains("{\"city\":\"Rome\"}");
            assert!(call, "{name} does not show the call: {text}");
            assert!(text.contains("21 degrees"), "{name} does not show the result: {text}");
        }
    }
}
