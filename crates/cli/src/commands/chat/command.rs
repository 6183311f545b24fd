//! The slash commands of a chat: reading them, and changing sampling parameters with `/set`.

use std::fmt::Write;

use baton_core::SamplingParams;

pub const HELP: &str = "\
/reset              begin a new conversation
/system TEXT        set the system message (alone: back to the model's own) and begin anew
/set NAME VALUE     change a sampling parameter, for example /set temperature 0.2
/set                show the sampling parameters
/stats              tokens, speed and memory so far
/help               this
/bye, /quit         leave (or Ctrl-D)
A line that ends with \\ goes on in the next one; \"\"\" begins and ends a text of several lines.
";

const NAMES: &str = "temperature, top_k, top_p, min_p, max_tokens, repetition_penalty, presence_penalty, \
                     frequency_penalty, seed";

#[derive(Debug, PartialEq)]
pub enum Command {
    Help,
    Quit,
    Reset,
    /// `None` goes back to what the chat template has by itself.
    System(Option<String>),
    Show,
    Set(String, String),
    Stats,
}

impl Command {
    /// `None` where the line is no command but something to say.
    pub fn parse(line: &str) -> Option<Result<Self, String>> {
        let line = line.trim();
        let rest = line.strip_prefix('/')?;
        let (word, rest) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let rest = rest.trim();
        Some(match (word, rest) {
            ("help" | "h" | "?", _) => Ok(Self::Help),
            ("quit" | "exit" | "bye" | "q", _) => Ok(Self::Quit),
            ("reset" | "clear", _) => Ok(Self::Reset),
            ("stats", _) => Ok(Self::Stats),
            ("system", "") => Ok(Self::System(None)),
            ("system", text) => Ok(Self::System(Some(text.to_owned()))),
            ("set", "") | ("show", _) => Ok(Self::Show),
            ("set", pair) => match pair.split_once(|c: char| c.is_whitespace() || c == '=') {
                Some((name, value)) => Ok(Self::Set(name.to_owned(), value.trim().to_owned())),
                None => Err(format!("/set needs a name and a value; the names are {NAMES}")),
            },
            _ => Err(format!("Unknown command /{word}. Try /help.")),
        })
    }
}

/// The parameters with one changed, or why that cannot be.
pub fn set(
    params: &SamplingParams,
    name: &str,
    value: &str,
    vocab_size: u32,
) -> Result<SamplingParams, String> {
    let mut params = params.clone();
    match name.replace('-', "_").as_str() {
        "temperature" => params.temperature = read(name, value)?,
        "top_k" => params.top_k = read(name, value)?,
        "top_p" => params.top_p = read(name, value)?,
        "min_p" => params.min_p = read(name, value)?,
        "max_tokens" => params.max_tokens = Some(read(name, value)?),
        "repetition_penalty" => params.repetition_penalty = read(name, value)?,
        "presence_penalty" => params.presence_penalty = read(name, value)?,
        "frequency_penalty" => params.frequency_penalty = read(name, value)?,
        "seed" => params.seed = Some(read(name, value)?),
        _ => return Err(format!("there is no parameter {name}; there are {NAMES}")),
    }
    params.validate(vocab_size).map_err(|error| error.to_string())?;
    Ok(params)
}

fn read<T: std::str::FromStr>(name: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{name} cannot be {value:?}: it must be a number"))
}

/// What `/set` alone shows.
pub fn show(params: &SamplingParams) -> String {
    let mut text = String::new();
    let optional = |value: Option<u64>| value.map_or_else(|| "none".to_owned(), |value| value.to_string());
    for (name, value) in [
        ("temperature", params.temperature.to_string()),
        ("top_k", params.top_k.to_string()),
        ("top_p", params.top_p.to_string()),
        ("min_p", params.min_p.to_string()),
        ("max_tokens", optional(params.max_tokens.map(u64::from))),
        ("repetition_penalty", params.repetition_penalty.to_string()),
        ("presence_penalty", params.presence_penalty.to_string()),
        ("frequency_penalty", params.frequency_penalty.to_string()),
        ("seed", optional(params.seed)),
    ] {
        writeln!(text, "{name:<20}{value}").expect("a string takes everything");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read() {
        assert_eq!(Command::parse("hello /reset"), None);
        assert_eq!(Command::parse(" /reset "), Some(Ok(Command::Reset)));
        assert_eq!(
            Command::parse("/system Be brief."),
            Some(Ok(Command::System(Some("Be brief.".to_owned()))))
        );
        assert_eq!(Command::parse("/system"), Some(Ok(Command::System(None))));
        let set = Command::Set("top_k".to_owned(), "3".to_owned());
        assert_eq!(Command::parse("/set top_k 3"), Some(Ok(set)));
        assert_eq!(Command::parse("/set"), Some(Ok(Command::Show)));
        assert!(matches!(Command::parse("/set top_k"), Some(Err(_))));
        assert!(matches!(Command::parse("/dance"), Some(Err(_))));
    }

    #[test]
    fn parameters_are_set_or_refused() {
        let params = SamplingParams::default();
        assert_eq!(set(&params, "temperature", "0.25", 9).unwrap().temperature, 0.25);
        assert_eq!(set(&params, "max-tokens", "7", 9).unwrap().max_tokens, Some(7));
        assert_eq!(set(&params, "top_p", "2", 9).unwrap_err(), "top_p must be in (0, 1], got 2");
        assert!(set(&params, "top_p", "much", 9).unwrap_err().contains("must be a number"));
        assert!(set(&params, "mood", "1", 9).unwrap_err().contains("temperature, top_k"));
    }
}
