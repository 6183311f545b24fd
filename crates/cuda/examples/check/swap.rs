//! Blocks that are swapped at random while steps run: what every step reads must be what was written, whatever overlaps.
//!
//! A token's value in the cache is its row of the head, so the most likely token after attending to a single key is the token
//! that was written there. Two steps are always in flight.

use std::collections::VecDeque;
use std::time::Instant;

use baton_backend::testing::Random;
use baton_backend::{
    Attention, AttentionItem, AttentionPlan, Backend, BlockCopy, BufferId, Embed, KvDtype, KvLayerSpec,
    KvSpec, Linear, Logits, NO_PARTIAL, Ops, Precision, Program, Qkv, SampleRow, SharedBytes, StepInput,
    StepLimits, StepOutput, Tensor, WeightFormat, WeightId, WeightUse,
};
use baton_cuda::CudaBackend;

use crate::backend;
use crate::table::Table;

const VOCAB: usize = 1000;
const HEADS: usize = 2;
const HEAD_DIM: usize = 128;
const HIDDEN: usize = HEADS * HEAD_DIM;
const LAYERS: usize = 8;
const BLOCK_SIZE: usize = 64;
const DEVICE_BLOCKS: usize = 96;
const HOST_BLOCKS: usize = 64;
const ROWS: usize = 64;
const MOST_SWAPS: usize = 24;
/// Products that keep the device busy for about as long as the swaps take.
const WIDE: usize = 4096;
const NUM_PRODUCTS: usize = 24;

struct Echo {
    embedding: WeightId,
    projection: WeightId,
    wide: WeightId,
    hidden: BufferId,
    query: BufferId,
    attended: BufferId,
    logits: BufferId,
    busy: BufferId,
    also_busy: BufferId,
}

impl Program for Echo {
    fn run(&self, ops: &mut dyn Ops) {
        ops.embed(&Embed { weight: self.embedding, scale: 1.0, output: self.hidden });
        for layer in 0..LAYERS {
            ops.qkv(&Qkv {
                input: self.hidden,
                norm: None,
                weight: self.projection,
                bias: None,
                q_norm: None,
                k_norm: None,
                rope: None,
                num_heads: HEADS,
                layer,
                output: self.query,
            });
            for _ in 0..NUM_PRODUCTS / LAYERS {
                ops.linear(&Linear {
                    input: self.busy,
                    norm: None,
                    weight: self.wide,
                    bias: None,
                    output: self.also_busy,
                    accumulate: false,
                });
            }
        }
        ops.attention(&Attention {
            layer: LAYERS - 1,
            plan: 0,
            // Each query sees the one key at its position.
            window: Some(1),
            num_heads: HEADS,
            scale: 1.0,
            softcap: None,
            alibi: None,
            query: self.query,
            output: self.attended,
        });
        ops.logits(&Logits {
            input: self.attended,
            norm: None,
            weight: self.embedding,
            softcap: None,
            output: self.logits,
        });
        ops.sample(self.logits);
    }
}

fn bf16_tensor(rows: usize, cols: usize, value: impl Fn(usize, usize) -> f32) -> Tensor {
    let at = |i: usize| half::bf16::from_f32(value(i / cols, i % cols)).to_le_bytes();
    let bytes = (0..rows * cols).flat_map(at).collect();
    Tensor::new(WeightFormat::BF16, rows, cols, SharedBytes::from_vec(bytes)).expect("shape")
}

fn build(cuda: &mut CudaBackend, dtype: KvDtype) -> Echo {
    let limits = StepLimits {
        max_tokens: ROWS,
        max_seqs: ROWS,
        max_logit_rows: ROWS,
        max_samples: ROWS,
        max_model_len: BLOCK_SIZE,
        vocab_size: VOCAB,
    };
    cuda.set_limits(&limits).expect("limits");
    let mut random = Random::new(1);
    let signs: Vec<f32> =
        (0..VOCAB * HIDDEN).map(|_| if random.below(2) == 0 { 1.0 } else { -1.0 }).collect();
    let embedding = bf16_tensor(VOCAB, HIDDEN, |row, col| signs[row * HIDDEN + col]);
    let is_value = |row: usize, col: usize| row == 2 * HIDDEN + col;
    let projection = bf16_tensor(3 * HIDDEN, HIDDEN, |row, col| f32::from(u8::from(is_value(row, col))));
    let mut load = |tensor, usage| cuda.load_weight(&[tensor], usage).expect("loads");
    let embedding = load(embedding, WeightUse::EmbeddingAndLinear);
    let projection = load(projection, WeightUse::Linear);
    let wide = load(bf16_tensor(WIDE, WIDE, |_, _| 0.0), WeightUse::Linear);
    let layer = KvLayerSpec { num_kv_heads: HEADS, head_dim: HEAD_DIM };
    let spec = KvSpec { layers: vec![layer; LAYERS], dtype, block_size: BLOCK_SIZE };
    cuda.create_kv_cache(&spec, DEVICE_BLOCKS, HOST_BLOCKS).expect("the cache fits");
    let logits = cuda.create_logits(ROWS, VOCAB).expect("creates");
    let mut buffer = |cols| cuda.create_buffer(ROWS, cols).expect("creates");
    Echo {
        embedding,
        projection,
        wide,
        hidden: buffer(HIDDEN),
        query: buffer(HIDDEN),
        attended: buffer(HIDDEN),
        logits,
        busy: buffer(WIDE),
        also_busy: buffer(WIDE),
    }
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

pub fn check(num_steps: usize, table: &mut Table) {
    for dtype in [KvDtype::BF16, KvDtype::F8E4M3] {
        check_contents(dtype, num_steps, table);
    }
    overlap();
}

fn check_contents(dtype: KvDtype, num_steps: usize, table: &mut Table) {
    let mut cuda = backend(Precision::Fast);
    let program = build(&mut cuda, dtype);
    let mut random = Random::new(2);
    let mut mirror = Mirror {
        device: vec![[None; BLOCK_SIZE]; DEVICE_BLOCKS],
        host: vec![[None; BLOCK_SIZE]; HOST_BLOCKS],
    };
    let (mut wrong, mut read, mut swapped) = (0, 0, 0);
    let mut in_flight: VecDeque<Vec<Option<u32>>> = VecDeque::new();
    let mut collect = |cuda: &mut CudaBackend, expected: Vec<Option<u32>>| {
        let mut output = StepOutput::default();
        cuda.collect(&mut output).expect("the step ends");
        for (sampled, expected) in output.samples.iter().zip(expected) {
            let Some(expected) = expected else { continue };
            read += 1;
            wrong += usize::from(sampled.chosen.token_id != expected);
        }
    };
    for _ in 0..num_steps {
        let (input, expected) = random_step(&mut mirror, &mut random);
        swapped += input.swap_out.len() + input.swap_in.len();
        cuda.submit(&input, &program).expect("the step starts");
        in_flight.push_back(expected);
        if in_flight.len() == 2 {
            let expected = in_flight.pop_front().expect("two are in flight");
            collect(&mut cuda, expected);
        }
    }
    for expected in in_flight {
        collect(&mut cuda, expected);
    }
    table.line(
        &format!("swaps beside steps, {dtype:?}"),
        wrong == 0 && read > num_steps * ROWS / 4,
        &format!("{wrong} of {read} reads wrong, {num_steps} steps, {swapped} blocks swapped"),
    );
}

/// How much of the swaps' time is hidden: steps alone, and steps that each swap blocks out and others in.
fn overlap() {
    let mut cuda = backend(Precision::Fast);
    let program = build(&mut cuda, KvDtype::BF16);
    let block_bytes = 4 * HIDDEN * BLOCK_SIZE * LAYERS;
    println!("{:>12} {:>12} {:>10}", "blocks a way", "ms a step", "GB/s");
    for count in [0, 4, 8, 16, 24] {
        let mut random = Random::new(3);
        let num_steps = 200;
        let mut start = Instant::now();
        for step in 0..num_steps + 10 {
            if step == 10 {
                start = Instant::now();
            }
            let mut input = StepInput::default();
            // Away from the blocks that the step uses, as a preempted sequence is.
            let outs = draw(count, 32, &mut random);
            input.swap_out = outs.iter().map(|&block| BlockCopy { from: 64 + block, to: block }).collect();
            let ins = draw(count, 32, &mut random);
            input.swap_in = ins.iter().map(|&block| BlockCopy { from: 32 + block, to: 32 + block }).collect();
            fill_simple(&mut input);
            cuda.submit(&input, &program).expect("the step starts");
            if step > 0 {
                cuda.collect(&mut StepOutput::default()).expect("the step ends");
            }
        }
        cuda.collect(&mut StepOutput::default()).expect("the step ends");
        let seconds = start.elapsed().as_secs_f64() / f64::from(num_steps);
        let rate = (2 * count * block_bytes) as f64 / seconds / 1e9;
        println!("{count:>12} {:>12.3} {rate:>10.1}", seconds * 1e3);
    }
}

/// One row for each of the first blocks.
fn fill_simple(input: &mut StepInput) {
    let mut plan = AttentionPlan::default();
    for row in 0..ROWS as u32 {
        input.token_ids.push(row);
        input.positions.push(row % BLOCK_SIZE as u32);
        input.slots.push(row / 2 * BLOCK_SIZE as u32 + row % BLOCK_SIZE as u32);
        input.pages.push(row / 2);
        sample_over_page(input, &mut plan, row);
    }
    input.attention.push(plan);
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
