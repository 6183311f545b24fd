//! The text side of one running sequence: token ids in, text to show out, and the stop strings that end it.
//!
//! This is what the server and the command line use. After a stop match they abort the sequence in the engine, which
//! knows nothing of text. Tokens that end the output by their id are handled by the engine; the caller of `push`
//! leaves such a token out, unless it is a special one and special tokens are skipped anyway.

use std::sync::Arc;

use baton_core::{SamplingParams, TokenId};

use crate::TextError;
use crate::incremental::IncrementalDecoder;
use crate::stop::StopStrings;
use crate::tokenizer::Tokenizer;

/// What a sequence's text needs to know of its request.
#[derive(Clone, Debug)]
pub struct OutputOptions {
    /// Leave control tokens out of the text.
    pub skip_special_tokens: bool,
    pub stop: Vec<String>,
    pub include_stop_str_in_output: bool,
    /// Stop strings are not looked for until more than this many tokens have come.
    pub min_tokens: u32,
}

impl Default for OutputOptions {
    fn default() -> Self {
        Self { skip_special_tokens: true, stop: Vec::new(), include_stop_str_in_output: false, min_tokens: 0 }
    }
}

impl OutputOptions {
    pub fn from_params(params: &SamplingParams, skip_special_tokens: bool) -> Self {
        Self {
            skip_special_tokens,
            stop: params.stop.clone(),
            include_stop_str_in_output: params.include_stop_str_in_output,
            min_tokens: params.min_tokens,
        }
    }
}

/// The stop string that ended the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopMatch {
    pub stop: String,
    /// How many tokens of the sequence had come when it was complete. Later ones do not belong to the output.
    pub num_tokens: usize,
}

/// New text of a sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delta {
    pub text: String,
    pub stopped: Option<StopMatch>,
}

/// Turns the tokens of one sequence into the text a client sees.
#[derive(Debug)]
pub struct OutputStream {
    decoder: IncrementalDecoder,
    stops: StopStrings,
    min_tokens: usize,
    num_tokens: usize,
    stopped: bool,
}

impl OutputStream {
    /// `prompt` gives the context in which the first token is read: its leading space is kept.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        prompt: &[TokenId],
        options: OutputOptions,
    ) -> Result<Self, TextError> {
        Ok(Self {
            decoder: IncrementalDecoder::after_prompt(tokenizer, options.skip_special_tokens, prompt),
            stops: StopStrings::new(options.stop, options.include_stop_str_in_output)?,
            min_tokens: options.min_tokens as usize,
            num_tokens: 0,
            stopped: false,
        })
    }

    /// Takes the next tokens. After a stop match all further tokens are ignored.
    pub fn push(&mut self, ids: &[TokenId]) -> Result<Delta, TextError> {
        let mut delta = Delta::default();
        if self.stops.is_empty() {
            self.num_tokens += ids.len();
            self.decoder.push(ids, &mut delta.text)?;
            return Ok(delta);
        }
        let mut piece = String::new();
        for &id in ids {
            if self.stopped {
                break;
            }
            self.num_tokens += 1;
            piece.clear();
            self.decoder.push(&[id], &mut piece)?;
            self.show(&piece, &mut delta);
        }
        Ok(delta)
    }

    /// The sequence has ended: gives what was held back.
    pub fn finish(&mut self) -> Result<Delta, TextError> {
        let mut delta = Delta::default();
        if !self.stopped {
            let mut piece = String::new();
            self.decoder.finish(&mut piece)?;
            self.show(&piece, &mut delta);
            self.stops.finish(&mut delta.text);
        }
        Ok(delta)
    }

    fn show(&mut self, piece: &str, delta: &mut Delta) {
        let look = self.num_tokens > self.min_tokens;
        if let Some(stop) = self.stops.push(piece, look, &mut delta.text) {
            self.stopped = true;
            delta.stopped = Some(StopMatch { stop, num_tokens: self.num_tokens });
        }
    }
}
