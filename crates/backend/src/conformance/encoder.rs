//! `encoder_attention`: rows of several sequences that see each other in both directions.

use super::{Built, Case, MAX_TOKENS, Rows, inputs, limits, tokens};
use crate::testing::{Random, random_tensor};
use crate::{
    Embed, EncoderAttention, Linear, Op, Program, RopeSpec, RopeStyle, StepInput, WeightFormat, WeightUse,
};

/// Sequences of these lengths, one after the other.
fn sequences(lengths: &[usize]) -> StepInput {
    let mut step = tokens(lengths.iter().sum());
    step.slots.clear();
    step.positions.clear();
    for &length in lengths {
        let start = step.slots.len() as u32;
        step.slots.extend(std::iter::repeat_n(start, length));
        step.positions.extend(0..length as u32);
    }
    step
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (heads, head_dim) in [(12, 32), (4, 64), (3, 24), (2, 128)] {
        for rope in [None, Some(RopeStyle::Half), Some(RopeStyle::Interleaved)] {
            cases.push(case(heads, head_dim, rope));
        }
    }
    cases
}

fn case(num_heads: usize, head_dim: usize, style: Option<RopeStyle>) -> Case {
    let name = format!("encoder_attention {num_heads}x{head_dim} rope {style:?}");
    let steps: [&[usize]; 6] = [&[1], &[5, 1, 9], &[33], &[64, 31, 32], &[150], &[7; 20]];
    Case::new(name, steps.iter().map(|lengths| sequences(lengths)).collect(), move |backend| {
        let (mut random, hidden_size) = (Random::new(21), 64);
        backend.set_limits(&limits())?;
        let source = inputs(MAX_TOKENS, hidden_size, &mut random);
        let source = backend.load_weight(&[source], WeightUse::Embedding)?;
        let width = num_heads * head_dim;
        let weight = random_tensor(WeightFormat::BF16, 3 * width, hidden_size, 0.15, &mut random);
        let weight = backend.load_weight(&[weight], WeightUse::Linear)?;
        let inv_freq = (0..head_dim / 4).map(|i| 0.8_f32.powi(i as i32)).collect();
        let style = style.map(|style| backend.create_rope(&RopeSpec { inv_freq, scale: 1.0, style }));
        let hidden = backend.create_buffer(MAX_TOKENS, hidden_size)?;
        let qkv = backend.create_buffer(MAX_TOKENS, 3 * width)?;
        let output = backend.create_buffer(MAX_TOKENS, width)?;
        let (norm, bias) = (None, None);
        let ops = vec![
            Op::Embed(Embed { weight: source, scale: 1.0, output: hidden }),
            Op::Linear(Linear { input: hidden, norm, weight, bias, output: qkv, accumulate: false }),
            Op::EncoderAttention(EncoderAttention {
                qkv,
                rope: style.transpose()?,
                num_heads,
                scale: 0.5 / (head_dim as f32).sqrt(),
                output,
            }),
        ];
        Ok(Built { program: backend.compile(&Program::new(ops))?, output, rows: Rows::Tokens })
    })
    .allowing(1.5)
}
