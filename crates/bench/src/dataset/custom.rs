//! `custom`: JSON lines of one's own, `{"prompt": "…", "output_tokens": 64}`.

use std::path::Path;

use serde::Deserialize;

use super::{Prompt, Sample, check_len, read_text};
use crate::BenchError;

/// For lines that do not say.
const DEFAULT_OUTPUT_LEN: usize = 256;

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum PromptField {
    Text(String),
    Tokens(Vec<u32>),
}

#[derive(Debug, Deserialize)]
struct Line {
    prompt: Option<PromptField>,
    #[serde(alias = "max_tokens", alias = "output_len", alias = "max_completion_tokens")]
    output_tokens: Option<usize>,
}

/// All lines of a file, at least one. `output_len` overrides what they say.
pub fn read(path: &Path, output_len: Option<usize>) -> Result<Vec<Sample>, BenchError> {
    let text = read_text(path)?;
    let mut samples = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let number = index + 1;
        let parsed: Line =
            serde_json::from_str(line).map_err(|cause| BenchError::line(path, number, cause))?;
        let missing =
            || BenchError::line(path, number, "there is no \"prompt\", a text or a list of token ids");
        let prompt = match parsed.prompt.ok_or_else(missing)? {
            PromptField::Text(text) => Prompt::Text(text),
            PromptField::Tokens(ids) => Prompt::Tokens(ids),
        };
        if matches!(&prompt, Prompt::Tokens(ids) if ids.is_empty()) {
            return Err(BenchError::line(path, number, "the prompt has no tokens"));
        }
        let len = output_len.or(parsed.output_tokens).unwrap_or(DEFAULT_OUTPUT_LEN);
        samples.push(Sample {
            input_len: if let Prompt::Tokens(ids) = &prompt { Some(ids.len()) } else { None },
            prompt,
            output_len: check_len(path, number, "output_tokens", len)?,
            at_s: None,
        });
    }
    if samples.is_empty() {
        return Err(BenchError::file(path, "there is no line with a prompt"));
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::super::DatasetKind;
    use super::super::tests::{error_of, options};
    use super::*;

    #[test]
    fn lines_are_prompts() {
        let samples = options(DatasetKind::Custom, Some("custom.jsonl"), 3).load(None).unwrap().samples;
        assert_eq!(samples[0].prompt, Prompt::Text("Name three rivers.".to_owned()));
        assert_eq!((samples[0].output_len, samples[0].input_len), (12, None));
        assert_eq!((&samples[1].prompt, samples[1].output_len), (&Prompt::Tokens(vec![5, 6, 7]), 9));
        assert_eq!((samples[2].output_len, samples[1].input_len), (DEFAULT_OUTPUT_LEN, Some(3)));
    }

    #[test]
    fn few_prompts_are_repeated_and_many_cut() {
        let load = |count| options(DatasetKind::Custom, Some("custom.jsonl"), count).load(None).unwrap();
        let many = load(7);
        assert_eq!((many.samples.len(), &many.samples[6]), (7, &many.samples[0]));
        assert_eq!(many.notes, ["the file has 3 usable prompts: they are repeated up to 7"]);
        assert_eq!((load(2).samples.len(), load(2).notes.len()), (2, 0));
    }

    #[test]
    fn malformed_files_are_refused() {
        let check = |text, expect: &str| {
            let error = error_of(DatasetKind::Custom, text);
            assert!(error.starts_with(expect), "{error}");
        };
        check("{\"prompt\": \"a\"}\n{\"prompt\"", "line 2: EOF while parsing");
        check("{\"question\": \"a\"}", "line 1: there is no \"prompt\"");
        check("{\"prompt\": []}", "line 1: the prompt has no tokens");
        check("{\"prompt\": 3}", "line 1: data did not match");
        check("{\"prompt\": \"a\", \"max_tokens\": 0}", "line 1: output_tokens must be in 1..=");
        check("{\"prompt\": \"a\", \"max_tokens\": -1}", "line 1: invalid value");
        check("\n\n", "there is no line with a prompt");
    }
}
