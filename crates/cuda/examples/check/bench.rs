//! Decoding with dummy weights: how long a step takes, and what its parts take (by leaving them out).

use std::path::Path;
use std::time::Instant;

use baton_backend::{
    Attention, Backend, BufferId, Embed, GatedLinear, KvDtype, Linear, Logits, NormOp, Ops, PlannerOptions,
    Program, Qkv, SampleRow, SequenceQueries, StepInput, StepLimits, StepOutput, plan_attention,
};
use baton_model::{Decoder, LoadFormat, ModelFiles};

use crate::backend;

const NUM_STEPS: usize = 128;
const BLOCK_SIZE: usize = 16;

/// Which ops of the model run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    All,
    NoAttention,
    OnlyLinear,
    OnlyHead,
}

struct Some<'a> {
    decoder: &'a Decoder,
    part: Part,
}

struct Filter<'a> {
    ops: &'a mut dyn Ops,
    part: Part,
}

impl Program for Some<'_> {
    fn run(&self, ops: &mut dyn Ops) {
        if self.part == Part::All {
            self.decoder.run(ops);
        } else {
            self.decoder.run(&mut Filter { ops, part: self.part });
        }
    }
}

impl Ops for Filter<'_> {
    fn embed(&mut self, op: &Embed) {
        self.ops.embed(op);
    }

    fn norm(&mut self, op: &NormOp) {
        self.ops.norm(op);
    }

    fn linear(&mut self, op: &Linear) {
        if self.part != Part::OnlyHead {
            self.ops.linear(op);
        }
    }

    fn gated_linear(&mut self, op: &GatedLinear) {
        let norm = op.norm.filter(|_| self.part == Part::NoAttention);
        if self.part != Part::OnlyHead {
            self.ops.gated_linear(&GatedLinear { norm, ..*op });
        }
    }

    fn qkv(&mut self, op: &Qkv) {
        let norm = op.norm.filter(|_| self.part == Part::NoAttention);
        if self.part != Part::OnlyHead {
            self.ops.qkv(&Qkv { norm, ..*op });
        }
    }

    fn attention(&mut self, _: &Attention) {}

    fn logits(&mut self, op: &Logits) {
        self.ops.logits(op);
    }

    fn sample(&mut self, logits: BufferId) {
        self.ops.sample(logits);
    }
}

pub fn run(model: &Path, batches: &[usize], context: usize, splits: &[usize]) {
    let files = ModelFiles::open(model, LoadFormat::Dummy).expect("the model opens");
    let config = files.config().clone();
    let max_batch = *batches.iter().max().expect("a batch");
    let max_model_len = (context + 2 * NUM_STEPS).next_multiple_of(BLOCK_SIZE) + BLOCK_SIZE;
    let limits = StepLimits {
        max_tokens: 8192.max(max_batch),
        max_seqs: max_batch,
        max_logit_rows: max_batch,
        max_samples: max_batch,
        max_model_len,
        vocab_size: config.vocab_size,
    };
    let start = Instant::now();
    let mut cuda = backend();
    println!("device ready in {:.2} s", start.elapsed().as_secs_f64());
    let start = Instant::now();
    let weights = files.weights().expect("weights");
    let decoder = Decoder::load(&config, &*weights, &mut cuda, &limits, &mut |_| ()).expect("loads");
    let spec = config.kv_spec(KvDtype::BF16, BLOCK_SIZE);
    let pages = max_batch * max_model_len.div_ceil(BLOCK_SIZE);
    cuda.create_kv_cache(&spec, pages, 0).expect("the KV cache fits");
    println!(
        "{:.1} GB of weights in {:.1} s",
        cuda.weight_bytes() as f64 / 1e9,
        start.elapsed().as_secs_f64()
    );
    println!(
        "{:>6} {:>6} {:>8} {:>13} {:>10} {:>10}  (context {context})",
        "batch", "split", "ops", "prefill tok/s", "ms a step", "tok/s"
    );
    for (&batch, &split) in batches.iter().flat_map(|batch| splits.iter().map(move |split| (batch, split))) {
        let mut state = Decode {
            batch,
            split,
            max_model_len,
            input: StepInput::default(),
            windows: config.attention_kinds(),
        };
        let prefill = state.prefill(&mut cuda, &decoder, context);
        for (name, part) in [
            ("all", Part::All),
            ("no attn", Part::NoAttention),
            ("linear", Part::OnlyLinear),
            ("head", Part::OnlyHead),
        ] {
            if part != Part::All && split != splits[0] {
                continue;
            }
            let seconds = state.decode(&mut cuda, &Some { decoder: &decoder, part }, context);
            println!(
                "{batch:>6} {split:>6} {name:>8} {prefill:>13.0} {:>10.3} {:>10.1}",
                seconds * 1e3,
                batch as f64 / seconds
            );
        }
    }
}

struct Decode {
    batch: usize,
    split: usize,
    max_model_len: usize,
    input: StepInput,
    windows: Vec<Option<u32>>,
}

impl Decode {
    /// A step of `len` tokens at `position` of the sequences `seqs`.
    fn fill(&mut self, seqs: std::ops::Range<usize>, position: usize, len: usize, feeds_back: bool) {
        let input = &mut self.input;
        input.clear();
        input.attention.resize_with(self.windows.len(), Default::default);
        let per_seq = self.max_model_len.div_ceil(BLOCK_SIZE);
        let mut queries = Vec::new();
        for seq in seqs {
            let page = |index: usize| (index * self.batch + seq) as u32 % (per_seq * self.batch) as u32;
            queries.push(SequenceQueries {
                query_start: input.token_ids.len() as u32,
                num_queries: len as u32,
                first_position: position as u32,
                pages_start: input.pages.len() as u32,
            });
            input.pages.extend((0..(position + len).div_ceil(BLOCK_SIZE)).map(page));
            for at in position..position + len {
                if feeds_back {
                    input.feedback.push((input.token_ids.len() as u32, input.samples.len() as u32));
                }
                input.token_ids.push((at * 37 + seq * 101) as u32 % 30000);
                input.positions.push(at as u32);
                input.slots.push(page(at / BLOCK_SIZE) * BLOCK_SIZE as u32 + (at % BLOCK_SIZE) as u32);
            }
            input.logit_rows.push(input.token_ids.len() as u32 - 1);
            input.samples.push(SampleRow::greedy(input.logit_rows.len() as u32 - 1));
        }
        for (&window, plan) in self.windows.iter().zip(&mut input.attention) {
            let options = PlannerOptions {
                block_size: BLOCK_SIZE,
                window,
                max_kv_per_item: self.split as u32,
                max_queries_per_item: 32,
            };
            plan_attention(&queries, &options, plan);
        }
    }

    /// Tokens a second; the second pass is timed.
    fn prefill(&mut self, cuda: &mut dyn Backend, decoder: &Decoder, context: usize) -> f64 {
        let at_once = (8192 / context).clamp(1, self.batch);
        let mut seconds = 0.0;
        for _ in 0..2 {
            let start = Instant::now();
            let mut first = 0;
            while first < self.batch {
                let end = self.batch.min(first + at_once);
                self.fill(first..end, 0, context, false);
                cuda.submit(&self.input, decoder).expect("the step starts");
                cuda.collect(&mut StepOutput::default()).expect("the step ends");
                first = end;
            }
            seconds = start.elapsed().as_secs_f64();
        }
        (self.batch * context) as f64 / seconds
    }

    /// Seconds a step, with two steps in flight.
    fn decode(&mut self, cuda: &mut dyn Backend, program: &dyn Program, context: usize) -> f64 {
        let mut output = StepOutput::default();
        let mut measured = 0.0;
        for round in 0..2 {
            let steps = if round == 0 { 8 } else { NUM_STEPS };
            let start = Instant::now();
            for step in 0..steps {
                self.fill(0..self.batch, context + step, 1, step > 0);
                cuda.submit(&self.input, program).expect("the step starts");
                if step > 0 {
                    cuda.collect(&mut output).expect("the step ends");
                }
            }
            cuda.collect(&mut output).expect("the step ends");
            measured = start.elapsed().as_secs_f64() / steps as f64;
        }
        measured
    }
}
