//! `sample`: a device's sampler against the host's, on the device's own logits. The tokens must be the same, not close.

use super::{Case, Outcome};
use crate::sampling::{SampleScratch, push_sampled, sample_row};
use crate::testing::Random;
use crate::{
    Backend, BackendError, Embed, Logits, Op, Program, Sample, SampleRow, StepInput, StepLimits, StepOutput,
    Tensor, TokenCount, WeightUse,
};

const ROWS: usize = 160;
/// Rows of each step: one block of a device a row, or up to 32.
const STEPS: [usize; 7] = [48, 1, ROWS, 7, 100, 2, 48];
const HIDDEN: usize = 64;
/// Log-probabilities may be off by so much.
const MAX_ERROR: f32 = 1e-5;

pub(super) fn cases() -> Vec<Case> {
    let case =
        |vocab: usize| Case::own(format!("sample from {vocab} tokens"), move |backend| check(vocab, backend));
    [40, 1000, 32003, 128_256].map(case).into_iter().collect()
}

/// Coarse values, so that there are ties everywhere.
fn matrix(rows: usize, random: &mut Random) -> Tensor {
    let values: Vec<f32> =
        random.normals(rows * HIDDEN).iter().map(|value| (value * 4.0).round() / 8.0).collect();
    Tensor::from_f32(rows, HIDDEN, &values).expect("shape")
}

fn check(vocab: usize, backend: &mut dyn Backend) -> Result<Outcome, BackendError> {
    let mut random = Random::new(vocab as u64);
    backend.set_limits(&StepLimits {
        max_tokens: ROWS,
        max_seqs: ROWS,
        max_logit_rows: ROWS,
        max_samples: ROWS,
        max_model_len: ROWS,
        vocab_size: vocab,
    })?;
    let source = backend.load_weight(&[matrix(ROWS, &mut random)], WeightUse::Embedding)?;
    let head = backend.load_weight(&[matrix(vocab, &mut random)], WeightUse::Linear)?;
    let hidden = backend.create_buffer(ROWS, HIDDEN)?;
    let logits = backend.create_logits(ROWS, vocab)?;
    let program = backend.compile(&Program::new(vec![
        Op::Embed(Embed { weight: source, scale: 1.0, output: hidden }),
        Op::Logits(Logits {
            input: hidden,
            norm: None,
            weight: head,
            bias: None,
            softcap: None,
            output: logits,
        }),
        Op::Sample(Sample { logits }),
    ]))?;
    let (mut different, mut drawn, mut worst) = (Vec::new(), 0, 0.0_f32);
    for (round, rows) in (0..).zip(STEPS) {
        let input = step(vocab, round, rows, &mut random);
        backend.submit(&input, program)?;
        let mut got = StepOutput::default();
        backend.collect(&mut got)?;
        let expected = on_host(&input, &backend.read_buffer(logits, rows)?, vocab);
        for (row, (a, b)) in input.samples.iter().zip(expected.samples.iter().zip(&got.samples)) {
            drawn += 1;
            worst = worst.max((a.chosen.logprob - b.chosen.logprob).abs());
            let is_same = (a.chosen.token_id, a.chosen.rank) == (b.chosen.token_id, b.chosen.rank)
                && top(&expected, &a.top) == top(&got, &b.top);
            if !is_same {
                different.push(format!("{row:?} gave {b:?}, expected {a:?}"));
            }
        }
    }
    let detail = format!("{} of {drawn} differ, log-probabilities within {worst:.1e}", different.len());
    if different.is_empty() && worst < MAX_ERROR && drawn == STEPS.iter().sum::<usize>() {
        return Ok(Outcome::Passed { detail });
    }
    Ok(Outcome::Failed { detail: format!("{detail}: {}", different.first().map_or("", String::as_str)) })
}

fn top(output: &StepOutput, range: &std::ops::Range<u32>) -> Vec<(u32, u32)> {
    let tokens = &output.top[range.start as usize..range.end as usize];
    tokens.iter().map(|token| (token.token_id, token.rank)).collect()
}

fn step(vocab: usize, round: u32, rows: usize, random: &mut Random) -> StepInput {
    let ids: Vec<u32> = (0..rows as u32).collect();
    let mut input = StepInput {
        token_ids: ids.clone(),
        positions: ids.clone(),
        slots: ids.clone(),
        logit_rows: ids,
        ..StepInput::default()
    };
    for row in 0..rows as u32 {
        let pick = |random: &mut Random, odds: usize| random.below(odds) == 0;
        let history_start = input.history.len() as u32;
        if pick(random, 3) {
            let step = vocab / 30;
            for i in 0..20 {
                let token_id = (i * step + random.below(step.max(1))) as u32;
                let in_prompt = random.below(2) == 0;
                input.history.push(TokenCount { token_id, in_prompt, num_output: random.below(3) as u32 });
            }
        }
        let bias_start = input.biases.len() as u32;
        if pick(random, 3) {
            for _ in 0..10 {
                let bias = if pick(random, 3) { f32::NEG_INFINITY } else { random.normal() * 3.0 };
                input.biases.push((random.below(vocab + 5) as u32, bias));
            }
        }
        let mask_start = input.masks.len() as u32;
        if pick(random, 3) {
            let odds = 1 + random.below(40);
            let words = vocab.div_ceil(32);
            let bits = |random: &mut Random| {
                (0..32).fold(0, |word, bit| word | u32::from(random.below(odds) == 0) << bit)
            };
            input.masks.extend((0..words).map(|_| bits(random)));
            // At least one token is allowed.
            input.masks[mask_start as usize] |= 2;
        }
        let is_forced = pick(random, 10);
        input.samples.push(SampleRow {
            logit_row: rows as u32 - 1 - row,
            forced: is_forced.then(|| random.below(vocab) as u32),
            temperature: if pick(random, 4) { 0.0 } else { 0.3 + random.uniform() * 1.5 },
            top_k: if pick(random, 2) { 0 } else { 1 + random.below(60) as u32 },
            top_p: if pick(random, 2) { 1.0 } else { random.uniform() },
            min_p: if pick(random, 2) { 0.0 } else { random.uniform() * 0.2 },
            repetition_penalty: 1.0 + random.uniform(),
            presence_penalty: random.uniform(),
            frequency_penalty: random.uniform(),
            history: history_start..input.history.len() as u32,
            bias: bias_start..input.biases.len() as u32,
            mask: mask_start..input.masks.len() as u32,
            seed: random.next_u64(),
            counter: u64::from(round),
            num_logprobs: pick(random, 2).then(|| random.below(30) as u32),
        });
    }
    input
}

fn on_host(input: &StepInput, logits: &[f32], vocab: usize) -> StepOutput {
    let mut output = StepOutput::default();
    let mut scratch = SampleScratch::with_vocab_size(vocab);
    let mut top = Vec::new();
    for row in &input.samples {
        top.clear();
        let logits = &logits[row.logit_row as usize * vocab..][..vocab];
        let sampled = sample_row(logits, row, input.lists_of(row), &mut scratch, &mut top);
        push_sampled(&mut output, &sampled, &top);
    }
    output
}
