//! `trace`: the requests of a real service with their arrival times. Mooncake's JSON lines name a prompt's blocks of 512 tokens
//! by hash, so that shared prefixes stay shared; CSV files like Azure's and BurstGPT's have lengths only.
//!
//! A trace does not contain the prompts themselves. Each block is generated from its hash, every other prompt from its index.

use std::path::Path;

use serde::Deserialize;

use super::{MAX_LEN, Prompt, Sample, Segment, check_len, read_text};
use crate::BenchError;
use crate::random::Random;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TraceOptions {
    /// Tokens of a block of `hash_ids`.
    pub block_len: usize,
    /// 2 plays the trace in half the time.
    pub speed: f64,
    /// 0.1 makes prompts, answers and blocks a tenth as long, for models with short contexts.
    pub length_scale: f64,
}

impl Default for TraceOptions {
    fn default() -> Self {
        Self { block_len: 512, speed: 1.0, length_scale: 1.0 }
    }
}

/// A request as the file has it.
struct Entry {
    at_s: f64,
    input_len: usize,
    output_len: usize,
    hash_ids: Vec<u64>,
}

pub fn read(path: &Path, limit: usize, options: &TraceOptions, seed: u64) -> Result<Vec<Sample>, BenchError> {
    let sound = |value: f64| value.is_finite() && value > 0.0;
    if !sound(options.speed) || !sound(options.length_scale) || !(1..=MAX_LEN).contains(&options.block_len) {
        return Err(BenchError::options(
            "--trace-speed, --trace-length-scale and --trace-block-size are above 0",
        ));
    }
    let text = read_text(path)?;
    let entries = if text.trim_start().starts_with('{') {
        json_lines(path, &text, limit)?
    } else {
        comma_separated(path, &text, limit)?
    };
    if entries.is_empty() {
        return Err(BenchError::file(path, "there are no requests"));
    }
    let start_s = entries.iter().map(|entry| entry.at_s).fold(f64::INFINITY, f64::min);
    let mut samples: Vec<Sample> = entries
        .iter()
        .enumerate()
        .map(|(index, entry)| sample(entry, index, start_s, options, seed))
        .collect();
    samples.sort_by(|a, b| a.at_s.unwrap_or(0.0).total_cmp(&b.at_s.unwrap_or(0.0)));
    Ok(samples)
}

fn sample(entry: &Entry, index: usize, start_s: f64, options: &TraceOptions, seed: u64) -> Sample {
    let scale = |len: usize| ((len as f64 * options.length_scale).round() as usize).clamp(1, MAX_LEN);
    let (input_len, block_len) = (scale(entry.input_len), scale(options.block_len));
    let seed_of = |kind: u64, number: u64| {
        Random::new(seed ^ kind.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number.rotate_left(17)).next_u64()
    };
    let mut segments = Vec::with_capacity(entry.hash_ids.len() + 1);
    let mut left = input_len;
    for &hash in &entry.hash_ids {
        let len = left.min(block_len);
        if len > 0 {
            segments.push(Segment { seed: seed_of(1, hash), len });
            left -= len;
        }
    }
    if left > 0 {
        segments.push(Segment { seed: seed_of(2, index as u64), len: left });
    }
    Sample {
        prompt: Prompt::Synthetic(segments),
        input_len: Some(input_len),
        output_len: scale(entry.output_len),
        at_s: Some((entry.at_s - start_s) / options.speed),
    }
}

#[derive(Debug, Deserialize)]
struct Line {
    /// Milliseconds.
    timestamp: f64,
    input_length: usize,
    output_length: usize,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

fn json_lines(path: &Path, text: &str, limit: usize) -> Result<Vec<Entry>, BenchError> {
    let mut entries = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).take(limit) {
        let number = index + 1;
        let line: Line = serde_json::from_str(line).map_err(|cause| BenchError::line(path, number, cause))?;
        entries.push(Entry {
            at_s: line.timestamp / 1e3,
            input_len: check_len(path, number, "input_length", line.input_length)?,
            output_len: check_len(path, number, "output_length", line.output_length)?,
            hash_ids: line.hash_ids,
        });
    }
    Ok(entries)
}

fn comma_separated(path: &Path, text: &str, limit: usize) -> Result<Vec<Entry>, BenchError> {
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let header: Vec<String> = lines
        .next()
        .map(|(_, line)| line.split(',').map(|name| name.trim().to_ascii_lowercase()).collect())
        .unwrap_or_default();
    let column = |names: &[&str]| {
        let found = header.iter().position(|name| names.contains(&name.as_str()));
        found.ok_or_else(|| {
            let cause = "it is neither JSON lines nor CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens";
            BenchError::file(path, cause)
        })
    };
    let time = column(&["timestamp", "arrival_timestamp"])?;
    let input = column(&["contexttokens", "request tokens", "input_length", "num_prefill_tokens"])?;
    let output = column(&["generatedtokens", "response tokens", "output_length", "num_decode_tokens"])?;
    let mut entries = Vec::new();
    for (index, line) in lines {
        if entries.len() == limit {
            break;
        }
        let number = index + 1;
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let field = |column: usize| {
            let missing = || BenchError::line(path, number, format!("there is no column {}", column + 1));
            fields.get(column).copied().ok_or_else(missing)
        };
        let length = |column: usize| {
            let text = field(column)?;
            let wrong = |_| BenchError::line(path, number, format!("{text:?} is not a number of tokens"));
            text.parse::<usize>().map_err(wrong)
        };
        let stamp = field(time)?;
        let wrong = || BenchError::line(path, number, format!("{stamp:?} is not a time"));
        let at_s = seconds(stamp).ok_or_else(wrong)?;
        // Requests that failed have no answer in some traces.
        let (input_len, output_len) = (length(input)?, length(output)?);
        if input_len > 0 && output_len > 0 {
            let input_len = check_len(path, number, "the prompt", input_len)?;
            let output_len = check_len(path, number, "the answer", output_len)?;
            entries.push(Entry { at_s, input_len, output_len, hash_ids: Vec::new() });
        }
    }
    Ok(entries)
}

/// Seconds, or `2023-11-16 18:15:46.6805900` with or without a zone, as seconds since 1970.
fn seconds(text: &str) -> Option<f64> {
    if let Ok(seconds) = text.parse::<f64>() {
        return seconds.is_finite().then_some(seconds);
    }
    let (date, time) = text.split_once([' ', 'T'])?;
    let time = time.trim_end_matches('Z').split(['+', '-']).next()?;
    let mut date = date.splitn(3, '-').map(str::parse::<i64>);
    let (year, month, day) = (date.next()?.ok()?, date.next()?.ok()?, date.next()?.ok()?);
    let mut time = time.splitn(3, ':');
    let hours: f64 = time.next()?.parse().ok()?;
    let minutes: f64 = time.next()?.parse().ok()?;
    let seconds: f64 = time.next()?.parse().ok()?;
    let midnight = crate::clock::seconds_of(year, month, day)?;
    Some(midnight as f64 + hours * 3600.0 + minutes * 60.0 + seconds)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{error_of, options};
    use super::super::{DatasetKind, TokenRange, synthetic};
    use super::*;

    fn ids(sample: &Sample) -> Vec<u32> {
        let Prompt::Synthetic(segments) = &sample.prompt else { panic!("not made up") };
        synthetic::tokens(segments, TokenRange { first: 300, end: 10_000 })
    }

    #[test]
    fn equal_hashes_are_equal_beginnings() {
        let samples = options(DatasetKind::Trace, Some("mooncake.jsonl"), 100).load(None).unwrap().samples;
        assert_eq!(samples.len(), 12);
        // Lines 1 and 2 of the file share their first block of 512 tokens and no more.
        let (first, second) = (ids(&samples[0]), ids(&samples[1]));
        assert_eq!((first.len(), samples[0].output_len), (6758, 500));
        assert_eq!(first[..512], second[..512]);
        assert_ne!(first[512..520], second[512..520]);
        assert!(samples.iter().all(|sample| sample.input_len == Some(ids(sample).len())));
        assert!(samples.is_sorted_by_key(|sample| sample.at_s));
    }

    #[test]
    fn time_and_lengths_are_scaled() {
        let mut options = options(DatasetKind::Trace, Some("mooncake.jsonl"), 100);
        let plain = options.load(None).unwrap().samples;
        options.trace = TraceOptions { speed: 2.0, length_scale: 0.125, ..TraceOptions::default() };
        let scaled = options.load(None).unwrap().samples;
        let last = plain.len() - 1;
        assert_eq!(scaled[last].at_s.unwrap() * 2.0, plain[last].at_s.unwrap());
        assert_eq!(scaled[0].input_len, Some(845)); // 6758 / 8
        assert_eq!(ids(&scaled[0])[..64], ids(&scaled[1])[..64]);
        assert_ne!(ids(&scaled[0])[64..70], ids(&scaled[1])[64..70]);
    }

    #[test]
    fn azures_times_are_relative() {
        let samples = options(DatasetKind::Trace, Some("azure.csv"), 3).load(None).unwrap().samples;
        assert_eq!(samples.len(), 3);
        assert_eq!(
            (samples[0].at_s, samples[0].input_len, samples[0].output_len),
            (Some(0.0), Some(374), 44)
        );
        assert!((samples[1].at_s.unwrap() - 4.314_579).abs() < 1e-4, "{:?}", samples[1].at_s);
    }

    #[test]
    fn times_are_read_in_all_their_forms() {
        assert_eq!(seconds("12.5"), Some(12.5));
        assert_eq!(seconds("1970-01-02 00:00:01.5"), Some(86_401.5));
        assert_eq!(seconds("2024-05-10T00:00:00.009930+00:00"), Some(1_715_299_200.009_93));
        for wrong in ["", "soon", "2024-13-01 00:00:00", "2024-05-10", "2024-05-10 1:2", "inf"] {
            assert_eq!(seconds(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn malformed_files_are_refused() {
        let check = |text, expect: &str| {
            let error = error_of(DatasetKind::Trace, text);
            assert!(error.contains(expect), "{error}");
        };
        check("", "neither JSON lines nor CSV");
        check("a,b\n1,2", "neither JSON lines nor CSV");
        check("{\"timestamp\": 0}", "line 1: missing field `input_length`");
        check("{\"timestamp\":0,\"input_length\":0,\"output_length\":1}", "line 1: input_length must be");
        check("{\"timestamp\":0,\"input_length\":99999999999,\"output_length\":1}", "must be in 1..=");
        check("TIMESTAMP,ContextTokens,GeneratedTokens\n", "there are no requests");
        check("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,1", "line 2: \"soon\" is not a time");
        check("TIMESTAMP,ContextTokens,GeneratedTokens\n1,x,1", "line 2: \"x\" is not a number of tokens");
        check("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2", "line 2: there is no column 3");
    }
}
