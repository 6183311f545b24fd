//! The sampling flags, and how they become [`SamplingParams`]: a flag wins over what the model's
//! makers recommend, which wins over the command's default.

use baton_core::{BeamParams, SamplingParams, TokenId};
use clap::{ArgAction, Args};

#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// End the output after this many tokens
    #[arg(long, value_name = "N", alias = "n-predict", alias = "predict")]
    pub max_tokens: Option<u32>,
    /// Do not end the output before this many tokens
    #[arg(long, value_name = "N")]
    pub min_tokens: Option<u32>,
    /// 0 takes the most likely token, more draws more freely
    #[arg(long, value_name = "T", alias = "temp", allow_hyphen_values = true)]
    pub temperature: Option<f32>,
    /// Keep the K most likely tokens; 0 keeps all
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Keep the smallest set of tokens whose probabilities reach P
    #[arg(long, value_name = "P", allow_hyphen_values = true)]
    pub top_p: Option<f32>,
    /// Drop tokens less likely than this fraction of the most likely one
    #[arg(long, value_name = "P", allow_hyphen_values = true)]
    pub min_p: Option<f32>,
    /// Divide the logits of tokens seen in prompt or output; 1 is off
    #[arg(long, value_name = "X", alias = "repeat-penalty", allow_hyphen_values = true)]
    pub repetition_penalty: Option<f32>,
    /// Subtract from the logits of tokens that occur in the output; 0 is off
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub presence_penalty: Option<f32>,
    /// Subtract once for each time a token occurs in the output; 0 is off
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub frequency_penalty: Option<f32>,
    /// Add BIAS (-100 to 100) to the logit of token ID (repeatable)
    #[arg(long, value_name = "ID=BIAS", value_parser = parse_bias)]
    pub logit_bias: Vec<(TokenId, f32)>,
    /// End the output where this text appears (repeatable)
    #[arg(long, value_name = "TEXT", alias = "reverse-prompt", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// End the output at these tokens, for example 2,7
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub stop_token_ids: Vec<TokenId>,
    /// Keep the stop text at the end of the output
    #[arg(long)]
    pub include_stop_str_in_output: bool,
    /// Leave special tokens out of the text
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_value_t = true, default_missing_value = "true",
          action = ArgAction::Set)]
    pub skip_special_tokens: bool,
    /// Go on past the model's end tokens
    #[arg(long)]
    pub ignore_eos: bool,
    /// Report the log-probability of each output token and of N alternatives
    #[arg(long, value_name = "N")]
    pub logprobs: Option<u32>,
    /// The same for each prompt token but the first
    #[arg(long, value_name = "N")]
    pub prompt_logprobs: Option<u32>,
    /// How many continuations to return
    #[arg(short, long, value_name = "N")]
    pub n: Option<u32>,
    /// How many continuations to draw; the best n are returned
    #[arg(long, value_name = "N")]
    pub best_of: Option<u32>,
    /// Beam search instead of drawing; the width is n, or --best-of where that is larger
    #[arg(long)]
    pub beam_search: bool,
    /// Beam search: divide scores by length to this power
    #[arg(long, value_name = "X", requires = "beam_search", allow_hyphen_values = true)]
    pub length_penalty: Option<f32>,
    /// Beam search: stop as soon as there are enough finished beams
    #[arg(long, requires = "beam_search")]
    pub early_stopping: bool,
}

impl SamplingArgs {
    /// The parameters, starting from the command's and the model's defaults.
    pub fn apply(&self, defaults: &SamplingParams, seed: Option<u64>) -> SamplingParams {
        let beam = self.beam_search.then(|| BeamParams {
            length_penalty: self.length_penalty.unwrap_or(BeamParams::default().length_penalty),
            early_stopping: self.early_stopping,
        });
        SamplingParams {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            logit_bias: self.logit_bias.clone(),
            seed,
            stop: self.stop.clone(),
            include_stop_str_in_output: self.include_stop_str_in_output,
            stop_token_ids: self.stop_token_ids.clone(),
            min_tokens: self.min_tokens.unwrap_or(defaults.min_tokens),
            max_tokens: self.max_tokens.or(defaults.max_tokens),
            ignore_eos: self.ignore_eos,
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            n: self.n.unwrap_or(defaults.n),
            best_of: self.best_of,
            beam,
            structured_outputs: None,
            token_filter: None,
            pooling: false,
            speculative_tokens: defaults.speculative_tokens,
        }
    }
}

fn parse_bias(text: &str) -> Result<(TokenId, f32), String> {
    let wrong = || format!("{text:?} is not ID=BIAS: write for example 42=-100");
    let (token, bias) = text.split_once('=').ok_or_else(wrong)?;
    Ok((token.trim().parse().map_err(|_| wrong())?, bias.trim().parse().map_err(|_| wrong())?))
}

/// Token ids as users write them: `1,2,3`, `[1, 2, 3]` or with spaces.
pub fn parse_token_ids(text: &str) -> Result<Vec<TokenId>, String> {
    let inner = text.trim().trim_start_matches('[').trim_end_matches(']');
    inner
        .split(|c: char| c == ',' || c.is_whitespace())
        .filter(|word| !word.is_empty())
        .map(|word| word.parse().map_err(|_| format!("{word:?} is not a token id: write for example 1,2,3")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_win_over_defaults() {
        let args =
            SamplingArgs { temperature: Some(0.2), n: Some(3), beam_search: true, ..SamplingArgs::default() };
        let defaults =
            SamplingParams { temperature: 0.9, top_k: 40, max_tokens: Some(7), ..SamplingParams::default() };
        let params = args.apply(&defaults, Some(5));
        assert_eq!((params.temperature, params.top_k, params.max_tokens, params.n), (0.2, 40, Some(7), 3));
        assert_eq!((params.seed, params.beam), (Some(5), Some(BeamParams::default())));
    }

    #[test]
    fn token_ids_and_biases_are_read() {
        assert_eq!(parse_token_ids("1,2, 3"), Ok(vec![1, 2, 3]));
        assert_eq!(parse_token_ids("[4 5]"), Ok(vec![4, 5]));
        assert_eq!(parse_token_ids(""), Ok(vec![]));
        assert!(parse_token_ids("1,x").is_err());
        assert!(parse_token_ids("-1").is_err());
        assert_eq!(parse_bias("42=-100"), Ok((42, -100.0)));
        assert!(parse_bias("42").is_err());
        assert!(parse_bias("a=1").is_err());
    }
}
