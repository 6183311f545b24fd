//! `sharegpt`: conversations of users with a model, as one JSON list. The first question is the prompt, the length of the first
//! answer is the output length.
//!
//! Published copies of the file are sometimes cut off; the whole conversations before the cut are used, with a note.

use std::path::Path;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, SeqAccess, Visitor};

use super::{CountTokens, Prompt, Sample, check_len};
use crate::BenchError;

/// Shorter ones measure nothing.
const MIN_LEN: usize = 4;
/// The limits that everybody uses with this dataset, so that results can be compared.
const MAX_PROMPT_LEN: usize = 1024;
const MAX_TOTAL_LEN: usize = 2048;

pub struct Read {
    pub samples: Vec<Sample>,
    pub notes: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Entry {
    #[serde(default, alias = "conversation")]
    conversations: Vec<Turn>,
}

#[derive(Debug, Deserialize)]
struct Turn {
    #[serde(default, alias = "content")]
    value: String,
}

/// A question and its answer.
type Pair = (String, String);

/// Collects pairs into a list that outlives a parse error.
struct Pairs<'a>(&'a mut Vec<Pair>);

impl<'de> DeserializeSeed<'de> for Pairs<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Pairs<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("a list of conversations")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while let Some(entry) = list.next_element::<Entry>()? {
            let mut turns = entry.conversations.into_iter();
            if let (Some(question), Some(answer)) = (turns.next(), turns.next()) {
                self.0.push((question.value, answer.value));
            }
        }
        if self.0.is_empty() {
            return Err(A::Error::custom("there is no conversation with a question and an answer"));
        }
        Ok(())
    }
}

pub fn read(path: &Path, count: CountTokens<'_>, output_len: Option<usize>) -> Result<Read, BenchError> {
    let text = std::fs::read(path).map_err(|cause| BenchError::file(path, cause))?;
    let (mut pairs, mut notes) = (Vec::new(), Vec::new());
    let mut deserializer = serde_json::Deserializer::from_slice(&text);
    match Pairs(&mut pairs).deserialize(&mut deserializer) {
        Err(error) if error.is_eof() && !pairs.is_empty() => {
            notes.push(format!("the file is cut off: its first {} conversations are used", pairs.len()));
        }
        Err(error) => return Err(BenchError::file(path, error)),
        Ok(()) => {}
    }
    let mut samples = Vec::new();
    for (question, answer) in pairs {
        let length = |text: &str| count(text).map_err(|cause| BenchError::file(path, cause));
        let input_len = length(&question)?;
        let output_len = match output_len {
            Some(len) => check_len(path, 1, "the output length", len)?,
            None => length(&answer)?,
        };
        let long_enough = input_len >= MIN_LEN && output_len >= MIN_LEN;
        if long_enough && input_len <= MAX_PROMPT_LEN && input_len + output_len <= MAX_TOTAL_LEN {
            let (prompt, input_len) = (Prompt::Text(question), Some(input_len));
            samples.push(Sample { prompt, input_len, output_len, at_s: None });
        }
    }
    if samples.is_empty() {
        return Err(BenchError::file(path, "no conversation has a usable length"));
    }
    Ok(Read { samples, notes })
}

#[cfg(test)]
mod tests {
    use super::super::DatasetKind;
    use super::super::tests::{error_of, options};
    use super::*;

    #[test]
    fn the_first_exchange_counts() {
        let words = |text: &str| Ok(text.split_whitespace().count());
        let workload = options(DatasetKind::ShareGpt, Some("sharegpt.json"), 2).load(Some(&words)).unwrap();
        assert_eq!(workload.notes, Vec::<String>::new());
        let first = &workload.samples[0];
        assert_eq!(first.prompt, Prompt::Text("Why is the sky blue by day?".to_owned()));
        assert_eq!((first.input_len, first.output_len), (Some(7), 8));
        // The second has one turn, the third is too short: only the fourth is left.
        assert_eq!(workload.samples[1].prompt, Prompt::Text("Write a short poem about rain.".to_owned()));
    }

    #[test]
    fn lengths_are_estimated_without_a_tokenizer() {
        let workload = options(DatasetKind::ShareGpt, Some("sharegpt.json"), 1).load(None).unwrap();
        assert_eq!(workload.samples[0].input_len, Some(7)); // 27 characters
        assert_eq!(workload.notes, ["lengths of texts are estimated: --tokenizer MODEL counts them"]);
    }

    #[test]
    fn a_cut_off_file_is_used_up_to_the_cut() {
        let text =
            r#"[{"conversations":[{"value":"a b c d e f g h i j"},{"value":"1 2 3 4 5 6 7 8 9 0"}]},{"conv"#;
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
        let read = read(file.path(), &|text| Ok(text.len()), None).unwrap();
        assert_eq!(read.samples.len(), 1);
        assert_eq!(read.notes, ["the file is cut off: its first 1 conversations are used"]);
    }

    #[test]
    fn malformed_files_are_refused() {
        let check = |text, expect: &str| {
            let error = error_of(DatasetKind::ShareGpt, text);
            assert!(error.contains(expect), "{error}");
        };
        check("", "EOF while parsing");
        check("{}", "expected a list of conversations");
        check("[]", "there is no conversation");
        check("[{\"conversations\": 3}]", "invalid type");
        check("[{\"conversations\": [{\"value\": \"a\"}, {\"value\": \"b\"}]}]", "usable length");
    }
}
