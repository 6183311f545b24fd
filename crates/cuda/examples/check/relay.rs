//! Decodes that share a beginning: attention alone, with the shared keys read by each sequence and read once for all. Prints
//! what a layer takes and how far the two are apart.

use baton_backend::testing::{List, Op, Random};
use baton_backend::{
    Attention, AttentionCut, AttentionHeads, AttentionPlan, Backend, CutOptions, Embed, KvLayerSpec, KvSpec,
    Precision, Qkv, SampleRow, SequenceQueries, SharedPrefixes, StepInput, StepLimits, StepOutput, Tensor,
    WeightUse,
};

use crate::table::Table;
use crate::{backend, kv_dtype};

const BLOCK_SIZE: usize = 16;
const HIDDEN: usize = 64;
const NUM_TOKENS: usize = 4096;
const NUM_STEPS: usize = 24;
/// Caches of the layers together are several times the L2.
const CACHE_BYTES: usize = 1 << 30;

#[derive(Clone, Copy, Debug)]
pub struct Heads {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
}

impl Heads {
    /// `HEADS/KV_HEADSxDIM`.
    pub fn parse(text: &str) -> Option<Self> {
        let (heads, dim) = text.split_once('x')?;
        let (num_heads, num_kv_heads) = heads.split_once('/')?;
        Some(Self {
            num_heads: num_heads.parse().ok()?,
            num_kv_heads: num_kv_heads.parse().ok()?,
            head_dim: dim.parse().ok()?,
        })
    }
}

/// Requests below each other: `GROUPSxKEYS` levels from the root down, the last one the requests with their own keys.
#[derive(Clone, Debug)]
pub struct Tree(Vec<(usize, usize)>);

impl Tree {
    /// `1x4096+256x64`: 256 requests with 64 keys of their own below one prefix of 4,096.
    pub fn parse(text: &str) -> Option<Self> {
        let level = |text: &str| {
            let (count, keys) = text.split_once('x')?;
            Some((count.parse().ok()?, keys.parse().ok()?))
        };
        text.split('+').map(level).collect::<Option<_>>().map(Self)
    }

    /// Tables of pages, depth first. A level's keys are whole pages but for the last level's.
    fn tables(&self) -> (Vec<Vec<u32>>, u32) {
        let mut next_page = 0;
        let mut tables = vec![Vec::new()];
        for &(count, keys) in &self.0 {
            tables = tables
                .into_iter()
                .flat_map(|table| std::iter::repeat_n(table, count))
                .map(|mut table| {
                    let pages = keys.div_ceil(BLOCK_SIZE) as u32;
                    table.extend(next_page..next_page + pages);
                    next_page += pages;
                    table
                })
                .collect();
        }
        (tables, next_page)
    }

    fn context(&self) -> usize {
        let (own, above) = self.0.split_last().expect("a level");
        above.iter().map(|(_, keys)| keys.next_multiple_of(BLOCK_SIZE)).sum::<usize>() + own.1
    }
}

struct Bench {
    cuda: Box<dyn Backend>,
    fill: List,
    attention: List,
    output: baton_backend::BufferId,
    num_layers: usize,
    num_slots: usize,
    tables: Vec<Vec<u32>>,
}

fn build(heads: Heads, tree: &Tree) -> Bench {
    let Heads { num_heads, num_kv_heads, head_dim } = heads;
    let (tables, num_pages) = tree.tables();
    let layer = KvLayerSpec { num_kv_heads, head_dim };
    let one = KvSpec { layers: vec![layer], dtype: kv_dtype(), block_size: BLOCK_SIZE };
    let bytes = one.bytes_per_block() * num_pages as usize;
    let num_layers = (CACHE_BYTES / bytes).clamp(2, 32);
    let spec = KvSpec { layers: vec![layer; num_layers], ..one };
    let mut cuda: Box<dyn Backend> = Box::new(backend(Precision::Fast));
    let max_seqs = tables.len();
    cuda.set_limits(&StepLimits {
        max_tokens: NUM_TOKENS,
        max_seqs,
        max_logit_rows: max_seqs,
        max_samples: max_seqs,
        max_model_len: tree.context() + BLOCK_SIZE,
        vocab_size: 8,
    })
    .expect("limits");
    let mut random = Random::new(3);
    let mut load = |rows: usize, usage: WeightUse| {
        let values: Vec<f32> = random.normals(rows * HIDDEN).iter().map(|value| value * 0.3).collect();
        cuda.load_weight(&[Tensor::from_f32(rows, HIDDEN, &values).expect("shape")], usage).expect("loads")
    };
    let table = load(NUM_TOKENS, WeightUse::Embedding);
    let weight = load((num_heads + 2 * num_kv_heads) * head_dim, WeightUse::Linear);
    cuda.create_kv_cache(&spec, num_pages as usize, 0).expect("the cache fits");
    let input = cuda.create_buffer(NUM_TOKENS, HIDDEN).expect("creates");
    let query = cuda.create_buffer(NUM_TOKENS, num_heads * head_dim).expect("creates");
    let output = cuda.create_buffer(NUM_TOKENS, num_heads * head_dim).expect("creates");
    let embed = Op::Embed(Embed { weight: table, scale: 1.0, output: input });
    let qkv = |layer| {
        let (norm, bias, q_norm, k_norm, rope) = (None, None, None, None, None);
        Op::Qkv(Qkv { input, norm, weight, bias, q_norm, k_norm, rope, num_heads, layer, output: query })
    };
    let scale = 1.0 / (head_dim as f32).sqrt();
    let attention = |layer| {
        let (plan, window, softcap, alibi) = (0, None, None, None);
        Op::Attention(Attention { layer, plan, window, num_heads, scale, softcap, alibi, query, output })
    };
    let fill = List(std::iter::once(embed).chain((0..num_layers).map(qkv)).collect());
    let attention = List((0..num_layers).map(attention).collect());
    let num_slots = num_pages as usize * BLOCK_SIZE;
    Bench { cuda, fill, attention, output, num_layers, num_slots, tables }
}

impl Bench {
    /// Writes keys and values to every slot. The last step leaves queries for every row.
    fn fill_cache(&mut self) {
        for first in (0..self.num_slots).step_by(NUM_TOKENS) {
            let count = NUM_TOKENS.min(self.num_slots - first);
            let ids: Vec<u32> = (0..NUM_TOKENS as u32).collect();
            let tokens = (0..count).map(|at| ids[(first / 7 + at * 31) % NUM_TOKENS]).collect();
            let input = StepInput {
                token_ids: tokens,
                positions: ids[..count].to_vec(),
                slots: (first as u32..(first + count) as u32).collect(),
                ..StepInput::default()
            };
            self.cuda.submit(&input, &self.fill).expect("starts");
            self.cuda.collect(&mut StepOutput::default()).expect("ends");
        }
    }

    fn step(&self, cut: &AttentionCut, context: usize) -> StepInput {
        let mut input = StepInput::default();
        let mut seqs = Vec::new();
        for (number, table) in self.tables.iter().enumerate() {
            // Not all of one length.
            let position = context - 1 - number % 13.min(context);
            seqs.push(SequenceQueries {
                query_start: number as u32,
                num_queries: 1,
                first_position: position as u32,
                pages_start: input.pages.len() as u32,
            });
            input.pages.extend_from_slice(&table[..position / BLOCK_SIZE + 1]);
            input.token_ids.push(0);
            input.positions.push(position as u32);
            input
                .slots
                .push(table[position / BLOCK_SIZE] * BLOCK_SIZE as u32 + (position % BLOCK_SIZE) as u32);
        }
        let mut plan = AttentionPlan::default();
        cut.plan(&seqs, &input.pages, None, &mut SharedPrefixes::default(), &mut plan);
        input.attention.push(plan);
        input.logit_rows = (0..self.tables.len() as u32).collect();
        input.samples = input.logit_rows.iter().map(|&row| SampleRow::greedy(row)).collect();
        input
    }

    /// Microseconds of a layer, the median, and the results.
    fn time(&mut self, input: &StepInput) -> (f64, Vec<f32>) {
        let mut times = Vec::new();
        for _ in 0..NUM_STEPS {
            self.cuda.submit(input, &self.attention).expect("starts");
            self.cuda.collect(&mut StepOutput::default()).expect("ends");
            let span = self.cuda.last_step_span().expect("a GPU tells");
            times.push((span.end - span.start).as_secs_f64() * 1e6 / self.num_layers as f64);
        }
        times.sort_by(f64::total_cmp);
        let output = self.cuda.read_buffer(self.output, input.num_tokens()).expect("reads");
        (times[NUM_STEPS / 2], output)
    }
}

pub fn run(heads: &[Heads], trees: &[Tree], table: &mut Table) {
    println!(
        "{:>12} {:>28} {:>7} {:>6} {:>10} {:>10} {:>7}",
        "heads", "tree", "shared", "parts", "plain us", "relay us", "times"
    );
    for &heads in heads {
        for tree in trees {
            let mut bench = build(heads, tree);
            bench.fill_cache();
            let Heads { num_heads, num_kv_heads, head_dim } = heads;
            let token_bytes = 2 * num_kv_heads * head_dim * kv_dtype().bytes();
            let heads = AttentionHeads { num_heads, num_kv_heads, head_dim, token_bytes };
            let cut = |relays, is_forced: bool| {
                let mut device = bench.cuda.device();
                if is_forced {
                    device.sharing.step_bytes = 0;
                }
                let options = CutOptions { block_size: BLOCK_SIZE, relays, is_fixed: false };
                AttentionCut::new(&device, &heads, &options)
            };
            let (plain, relay) = (cut(false, false), cut(true, true));
            let is_chosen = bench.step(&cut(true, false), tree.context()).attention[0].num_shared_items > 0;
            let (plain, relay) = (bench.step(&plain, tree.context()), bench.step(&relay, tree.context()));
            let (plain_us, expected) = bench.time(&plain);
            let (relay_us, got) = bench.time(&relay);
            let again_us = bench.time(&plain).0;
            let plan = &relay.attention[0];
            println!(
                "{:>12} {:>28} {:>7} {:>6} {:>10.1} {:>10.1} {:>7.2} {}",
                format!("{num_heads}/{num_kv_heads}x{head_dim}"),
                tree.0.iter().map(|(count, keys)| format!("{count}x{keys}")).collect::<Vec<_>>().join("+"),
                plan.num_shared_items,
                plan.merges.first().map_or(1, |merge| merge.count),
                plain_us.min(again_us),
                relay_us,
                plain_us.min(again_us) / relay_us,
                if is_chosen { "chosen" } else { "" }
            );
            table.compare(&format!("relay {tree:?} as plain"), &expected, &got, 1.5e-2);
        }
    }
}
