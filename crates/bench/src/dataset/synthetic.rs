//! Generated prompts: random tokens, alone or after shared prefixes.

use super::{MAX_LEN, Prompt, Sample};
use crate::BenchError;
use crate::random::Random;

/// Tokens that a seed decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub seed: u64,
    pub len: usize,
}

/// Which token ids are drawn. The first ones are control tokens and single bytes in most vocabularies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRange {
    pub first: u32,
    pub end: u32,
}

impl TokenRange {
    /// What is safe for nearly every model whose vocabulary has at least `vocab_size` tokens.
    pub fn of_vocabulary(vocab_size: usize) -> Self {
        let end = u32::try_from(vocab_size.max(1)).unwrap_or(u32::MAX);
        Self { first: if end > 1000 { 300 } else { 0 }, end }
    }

    fn draw(self, random: &mut Random) -> u32 {
        self.first + random.below(u64::from(self.end - self.first)) as u32
    }
}

/// Common short words, nearly all of them one token with the space before it in any English vocabulary.
const WORDS: [&str; 64] = [
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not",
    "he", "his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one",
    "you", "were", "all", "her", "she", "there", "would", "their", "we", "him", "been", "has", "when", "who",
    "will", "no", "more", "if", "out", "so", "up", "said", "what", "its", "about", "than", "into", "them",
    "can", "only", "other", "time", "new", "some",
];

/// The token ids of a recipe.
pub fn tokens(segments: &[Segment], range: TokenRange) -> Vec<u32> {
    let mut ids = Vec::with_capacity(segments.iter().map(|segment| segment.len).sum());
    for segment in segments {
        let mut random = Random::new(segment.seed);
        ids.extend((0..segment.len).map(|_| range.draw(&mut random)));
    }
    ids
}

/// A text of as many words, for servers that take no token ids. How many tokens it is, the server says.
pub fn words(segments: &[Segment]) -> String {
    let mut text = String::new();
    for segment in segments {
        let mut random = Random::new(segment.seed);
        for _ in 0..segment.len {
            if !text.is_empty() {
                text.push(' ');
            }
            text.push_str(WORDS[random.below(WORDS.len() as u64) as usize]);
        }
    }
    text
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomOptions {
    pub input_len: usize,
    pub output_len: usize,
    /// Lengths are drawn evenly from `len × (1 ± ratio)`.
    pub range_ratio: f64,
    /// Tokens that all prompts begin with, besides `input_len`.
    pub prefix_len: usize,
}

impl Default for RandomOptions {
    fn default() -> Self {
        Self { input_len: 1024, output_len: 128, range_ratio: 0.0, prefix_len: 0 }
    }
}

impl RandomOptions {
    pub(super) fn samples(&self, count: usize, random: &mut Random) -> Result<Vec<Sample>, BenchError> {
        if !(0.0..1.0).contains(&self.range_ratio) {
            return Err(BenchError::options("--random-range-ratio must be at least 0 and below 1"));
        }
        if self.input_len > MAX_LEN || self.output_len > MAX_LEN || self.prefix_len > MAX_LEN {
            return Err(BenchError::options(format!("lengths must be at most {MAX_LEN}")));
        }
        let bounds = |len: usize| {
            let low = (len as f64 * (1.0 - self.range_ratio)).floor() as usize;
            (low, (len as f64 * (1.0 + self.range_ratio)).ceil() as usize)
        };
        let (input, output) = (bounds(self.input_len), bounds(self.output_len));
        if self.prefix_len + input.0 == 0 || output.1 == 0 {
            return Err(BenchError::options("a prompt and an answer have at least one token each"));
        }
        let prefix = Segment { seed: random.next_u64(), len: self.prefix_len };
        let one = |_| {
            let own = Segment { seed: random.next_u64(), len: random.between(input.0, input.1) };
            let output_len = random.between(output.0.max(1), output.1);
            sample(&[prefix, own], output_len)
        };
        Ok((0..count).map(one).collect())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixRepetitionOptions {
    pub prefix_len: usize,
    pub suffix_len: usize,
    pub num_prefixes: usize,
    pub output_len: usize,
}

impl Default for PrefixRepetitionOptions {
    fn default() -> Self {
        Self { prefix_len: 256, suffix_len: 256, num_prefixes: 10, output_len: 128 }
    }
}

impl PrefixRepetitionOptions {
    pub(super) fn samples(
        &self,
        count: usize,
        random: &mut Random,
        shuffle: bool,
    ) -> Result<Vec<Sample>, BenchError> {
        if self.num_prefixes == 0 || count < self.num_prefixes {
            return Err(BenchError::options(format!(
                "--prefix-repetition-num-prefixes must be in 1..=--num-prompts ({count})"
            )));
        }
        if self.prefix_len > MAX_LEN || self.suffix_len > MAX_LEN || self.output_len > MAX_LEN {
            return Err(BenchError::options(format!("lengths must be at most {MAX_LEN}")));
        }
        if self.prefix_len + self.suffix_len == 0 || self.output_len == 0 {
            return Err(BenchError::options("a prompt and an answer have at least one token each"));
        }
        let prefixes: Vec<Segment> = (0..self.num_prefixes)
            .map(|_| Segment { seed: random.next_u64(), len: self.prefix_len })
            .collect();
        let mut samples: Vec<Sample> = (0..count)
            .map(|index| {
                // As many prompts for each prefix, one prefix after the other unless shuffled.
                let prefix = prefixes[index * self.num_prefixes / count];
                let suffix = Segment { seed: random.next_u64(), len: self.suffix_len };
                sample(&[prefix, suffix], self.output_len)
            })
            .collect();
        if shuffle {
            random.shuffle(&mut samples);
        }
        Ok(samples)
    }
}

fn sample(segments: &[Segment], output_len: usize) -> Sample {
    let segments: Vec<Segment> = segments.iter().copied().filter(|segment| segment.len > 0).collect();
    Sample {
        input_len: Some(segments.iter().map(|segment| segment.len).sum()),
        prompt: Prompt::Synthetic(segments),
        output_len,
        at_s: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: TokenRange = TokenRange { first: 300, end: 10_000 };

    fn ids(sample: &Sample) -> Vec<u32> {
        let Prompt::Synthetic(segments) = &sample.prompt else { panic!("not made up") };
        tokens(segments, RANGE)
    }

    #[test]
    fn lengths_are_exact_and_within_the_range() {
        let options = RandomOptions { input_len: 100, output_len: 10, range_ratio: 0.5, prefix_len: 7 };
        let samples = options.samples(300, &mut Random::new(1)).unwrap();
        for sample in &samples {
            let ids = ids(sample);
            assert_eq!(Some(ids.len()), sample.input_len);
            assert!((57..=157).contains(&ids.len()) && (5..=15).contains(&sample.output_len));
            assert!(ids.iter().all(|id| (300..10_000).contains(id)));
            assert_eq!(ids[..7], super::tests::ids(&samples[0])[..7], "all share the prefix");
        }
        assert_ne!(ids(&samples[0])[7..12], ids(&samples[1])[7..12]);
        assert_eq!(samples, options.samples(300, &mut Random::new(1)).unwrap());
    }

    #[test]
    fn prefixes_repeat() {
        let options =
            PrefixRepetitionOptions { prefix_len: 5, suffix_len: 3, num_prefixes: 3, output_len: 2 };
        let samples = options.samples(7, &mut Random::new(1), true).unwrap();
        let mut prefixes: Vec<Vec<u32>> = samples.iter().map(|sample| ids(sample)[..5].to_vec()).collect();
        prefixes.sort();
        prefixes.dedup();
        assert_eq!(prefixes.len(), 3);
        let mut wholes: Vec<Vec<u32>> = samples.iter().map(ids).collect();
        wholes.sort();
        wholes.dedup();
        assert_eq!(wholes.len(), 7, "suffixes differ");
    }

    #[test]
    fn words_are_as_many_as_tokens() {
        let text = words(&[Segment { seed: 1, len: 3 }, Segment { seed: 2, len: 4 }]);
        assert_eq!(text.split(' ').count(), 7);
        assert!(words(&[Segment { seed: 1, len: 3 }]).len() < text.len());
        assert!(text.starts_with(&words(&[Segment { seed: 1, len: 3 }])));
    }

    #[test]
    fn wrong_options_are_refused() {
        let check = |options: RandomOptions| options.samples(1, &mut Random::new(0)).unwrap_err().to_string();
        let default = RandomOptions::default();
        assert!(check(RandomOptions { range_ratio: 1.0, ..default }).contains("--random-range-ratio"));
        assert!(check(RandomOptions { input_len: 0, ..default }).contains("at least one token"));
        assert!(check(RandomOptions { input_len: usize::MAX, ..default }).contains("at most"));
        let options = PrefixRepetitionOptions::default();
        assert!(options.samples(3, &mut Random::new(0), false).is_err());
        let tiny = TokenRange::of_vocabulary(32);
        assert_eq!((tiny.first, tiny.end), (0, 32));
    }
}
