//! Blocks that are swapped and copied at random while steps run: what every step reads must be what was written, whatever
//! overlaps.
//!
//! A token's value in the cache is its row of the head, so the most likely token after attending to a single key is the token
//! that was written there. As many steps as the device takes are always in flight.

use std::collections::VecDeque;

use super::{Case, Outcome};
use crate::testing::Random;
use crate::{
    Attention, AttentionItem, AttentionPlan, Backend, BackendError, BlockCopy, Embed, KvDtype, KvLayerSpec,
    KvSpec, Linear, Logits, NO_PARTIAL, NormSpan, Op, Program, ProgramId, Qkv, Sample, SampleRow,
    SharedBytes, StepInput, StepLimits, StepOutput, Tensor, WeightFormat, WeightUse,
};

const VOCAB: usize = 1000;
const HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const HIDDEN: usize = HEADS * HEAD_DIM;
const LAYERS: usize = 3;
const BLOCK_SIZE: usize = 64;
const DEVICE_BLOCKS: usize = 96;
const HOST_BLOCKS: usize = 64;
const ROWS: usize = 64;
const MOST_SWAPS: usize = 24;
const NUM_STEPS: usize = 300;
/// Products keep a fast device busy for about as long as the swaps of a step take.
const WIDE: usize = 4096;
const BUSY_SECONDS: f64 = 1e-3;
const MAX_PRODUCTS: usize = 24;

pub(super) fn cases() -> Vec<Case> {
    let case = |dtype: KvDtype| {
        Case::own(format!("swap beside steps {dtype:?}"), move |backend| check(dtype, backend))
    };
    [KvDtype::BF16, KvDtype::F8E4M3, KvDtype::Int8].map(case).into_iter().collect()
}

fn bf16_tensor(rows: usize, cols: usize, value: impl Fn(usize, usize) -> f32) -> Tensor {
    let at = |i: usize| half::bf16::from_f32(value(i / cols, i % cols)).to_le_bytes();
    let bytes = (0..rows * cols).flat_map(at).collect();
    Tensor::new(WeightFormat::BF16, rows, cols, SharedBytes::from_vec(bytes)).expect("shape")
}

fn build(dtype: KvDtype, backend: &mut dyn Backend) -> Result<ProgramId, BackendError> {
    let layer = KvLayerSpec { num_kv_heads: HEADS, head_dim: HEAD_DIM };
    let spec = KvSpec::full(layer, LAYERS, dtype, BLOCK_SIZE);
    backend.check_kv_spec(&spec)?;
    backend.set_limits(&StepLimits {
        max_tokens: ROWS,
        max_seqs: ROWS,
        max_logit_rows: ROWS,
        max_samples: ROWS,
        max_model_len: BLOCK_SIZE,
        vocab_size: VOCAB,
    })?;
    let mut random = Random::new(1);
    let signs: Vec<f32> =
        (0..VOCAB * HIDDEN).map(|_| if random.below(2) == 0 { 1.0 } else { -1.0 }).collect();
    let embedding = bf16_tensor(VOCAB, HIDDEN, |row, col| signs[row * HIDDEN + col]);
    let embedding = backend.load_weight(&[embedding], WeightUse::EmbeddingAndLinear)?;
    let is_value = |row: usize, col: usize| row == 2 * HIDDEN + col;
    let projection = bf16_tensor(3 * HIDDEN, HIDDEN, |row, col| f32::from(u8::from(is_value(row, col))));
    let projection = backend.load_weight(&[projection], WeightUse::Linear)?;
    backend.create_kv_cache(&spec, DEVICE_BLOCKS, HOST_BLOCKS)?;
    let logits = backend.create_logits(ROWS, VOCAB)?;
    let mut buffer = |cols| backend.create_buffer(ROWS, cols);
    let (hidden, query, attended) = (buffer(HIDDEN)?, buffer(HIDDEN)?, buffer(HIDDEN)?);
    let mut ops = vec![Op::Embed(Embed { weight: embedding, scale: 1.0, output: hidden })];
    for layer in 0..LAYERS {
        ops.push(Op::Qkv(Qkv {
            input: hidden,
            norm: None,
            weight: projection,
            bias: None,
            q_norm: None,
            k_norm: None,
            norm_span: NormSpan::Head,
            rope: None,
            num_heads: HEADS,
            layer,
            output: query,
        }));
    }
    ops.extend(busy_ops(backend)?);
    ops.push(Op::Attention(Attention {
        layer: LAYERS - 1,
        plan: 0,
        // Each query sees the one key at its position.
        window: Some(1),
        num_heads: HEADS,
        scale: 1.0,
        softcap: None,
        alibi: None,
        sinks: None,
        query,
        output: attended,
    }));
    let (norm, softcap) = (None, None);
    ops.push(Op::Logits(Logits {
        input: attended,
        norm,
        weight: embedding,
        bias: None,
        softcap,
        output: logits,
    }));
    ops.push(Op::Sample(Sample { logits }));
    backend.compile(&Program::new(ops))
}

/// None on a device on which a step takes longer than its swaps anyway.
fn busy_ops(backend: &mut dyn Backend) -> Result<Vec<Op>, BackendError> {
    let macs = backend.device().macs_per_second * BUSY_SECONDS;
    let num_products = ((macs / (ROWS * WIDE * WIDE) as f64) as usize).min(MAX_PRODUCTS);
    if num_products == 0 {
        return Ok(Vec::new());
    }
    let weight = backend.load_weight(&[bf16_tensor(WIDE, WIDE, |_, _| 0.0)], WeightUse::Linear)?;
    let (input, output) = (backend.create_buffer(ROWS, WIDE)?, backend.create_buffer(ROWS, WIDE)?);
    let linear = Linear { input, norm: None, weight, bias: None, output, accumulate: false };
    Ok(vec![Op::Linear(linear); num_products])
}

/// What every block should hold: a token a slot, `None` where nothing was ever written.
struct Mirror {
    device: Vec<[Option<u32>; BLOCK_SIZE]>,
    host: Vec<[Option<u32>; BLOCK_SIZE]>,
}

impl Mirror {
    fn move_blocks(&mut self, input: &StepInput) {
        for copy in &input.swap_out {
            self.host[copy.to as usize] = self.device[copy.from as usize];
        }
        for copy in &input.swap_in {
            self.device[copy.to as usize] = self.host[copy.from as usize];
        }
        for copy in &input.copies {
            self.device[copy.to as usize] = self.device[copy.from as usize];
        }
    }
}

/// So many different numbers below `bound`.
fn draw(count: usize, bound: usize, random: &mut Random) -> Vec<u32> {
    let mut all: Vec<u32> = (0..bound as u32).collect();
    for i in 0..count {
        let other = i + random.below(bound - i);
        all.swap(i, other);
    }
    all.truncate(count);
    all
}

fn swaps(count: usize, from: usize, to: usize, random: &mut Random) -> Vec<BlockCopy> {
    let (from, to) = (draw(count, from, random), draw(count, to, random));
    from.into_iter().zip(to).map(|(from, to)| BlockCopy { from, to }).collect()
}

/// A step that moves blocks, writes tokens to random slots and reads random ones, most of them of blocks that just moved.
/// Returns what it should read.
fn random_step(mirror: &mut Mirror, random: &mut Random) -> (StepInput, Vec<Option<u32>>) {
    let mut input = StepInput::default();
    let some = |random: &mut Random| if random.below(3) == 0 { random.below(MOST_SWAPS + 1) } else { 0 };
    let (num_out, num_in, num_copies) = (some(random), some(random), some(random) / 4);
    input.swap_out = swaps(num_out, DEVICE_BLOCKS, HOST_BLOCKS, random);
    input.swap_in = swaps(num_in, HOST_BLOCKS, DEVICE_BLOCKS, random);
    input.copies = swaps(num_copies, DEVICE_BLOCKS, DEVICE_BLOCKS, random);
    mirror.move_blocks(&input);
    let mut moved: Vec<u32> = input.swap_out.iter().map(|copy| copy.from).collect();
    moved.extend(input.swap_in.iter().chain(&input.copies).map(|copy| copy.to));
    let block = |random: &mut Random| match moved.len() {
        count if count > 0 && random.below(3) > 0 => moved[random.below(count)],
        _ => random.below(DEVICE_BLOCKS) as u32,
    };
    // Slots are distinct, because two writes of one step to the same place have no order.
    let offsets = draw(ROWS, BLOCK_SIZE, random);
    for offset in offsets {
        let (to, token) = (block(random), random.below(VOCAB) as u32);
        input.slots.push(to * BLOCK_SIZE as u32 + offset);
        input.token_ids.push(token);
        mirror.device[to as usize][offset as usize] = Some(token);
    }
    let mut expected = Vec::with_capacity(ROWS);
    let mut plan = AttentionPlan::default();
    for row in 0..ROWS as u32 {
        let (from, offset) = (block(random), random.below(BLOCK_SIZE));
        input.positions.push(offset as u32);
        input.pages.push(from);
        sample_over_page(&mut input, &mut plan, row);
        expected.push(mirror.device[from as usize][offset]);
    }
    input.attention.push(plan);
    (input, expected)
}

fn check(dtype: KvDtype, backend: &mut dyn Backend) -> Result<Outcome, BackendError> {
    let program = build(dtype, backend)?;
    let max_in_flight = backend.device().max_steps_in_flight;
    let mut random = Random::new(2);
    let mut mirror = Mirror {
        device: vec![[None; BLOCK_SIZE]; DEVICE_BLOCKS],
        host: vec![[None; BLOCK_SIZE]; HOST_BLOCKS],
    };
    let (mut wrong, mut read, mut swapped) = (0, 0, 0);
    let mut in_flight: VecDeque<Vec<Option<u32>>> = VecDeque::new();
    for step in 0..NUM_STEPS + max_in_flight {
        if step < NUM_STEPS {
            let (input, expected) = random_step(&mut mirror, &mut random);
            swapped += input.swap_out.len() + input.swap_in.len();
            backend.submit(&input, program)?;
            in_flight.push_back(expected);
        }
        if in_flight.len() < max_in_flight && step < NUM_STEPS {
            continue;
        }
        let Some(expected) = in_flight.pop_front() else { break };
        let mut output = StepOutput::default();
        backend.collect(&mut output)?;
        for (sampled, expected) in output.samples.iter().zip(expected) {
            let Some(expected) = expected else { continue };
            read += 1;
            wrong += usize::from(sampled.chosen.token_id != expected);
        }
    }
    let detail = format!("{wrong} of {read} reads wrong, {NUM_STEPS} steps, {swapped} blocks swapped");
    let is_good = wrong == 0 && read > NUM_STEPS * ROWS / 4 && swapped > NUM_STEPS;
    Ok(if is_good { Outcome::Passed { detail } } else { Outcome::Failed { detail } })
}

/// Row `row` attends to its own page, the `row`-th, and draws a token.
fn sample_over_page(input: &mut StepInput, plan: &mut AttentionPlan, row: u32) {
    plan.items.push(AttentionItem {
        query_start: row,
        num_queries: 1,
        pages_start: row,
        kv_start: 0,
        kv_len: BLOCK_SIZE as u32,
        partial: NO_PARTIAL,
    });
    input.logit_rows.push(row);
    input.samples.push(SampleRow::greedy(row));
}
