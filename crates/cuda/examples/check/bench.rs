//! Decoding with dummy weights: how long a step takes, and what its parts take (by leaving them out).

use std::path::Path;
use std::time::Instant;

use baton_backend::{
    Attention, Backend, BufferId, Embed, GatedLinear, Linear, Logits, NormOp, Ops, PlannerOptions, Precision,
    Program, Qkv, SampleRow, SequenceQueries, SharedPrefixes, StepInput, StepLimits, StepOutput,
    choose_split, plan_attention,
};
use baton_cuda::CudaBackend;
use baton_model::{Decoder, LoadFormat, ModelConfig, ModelFiles};

use crate::{backend, kv_dtype};

const NUM_STEPS: usize = 128;
const BLOCK_SIZE: usize = 16;
const MAX_TOKENS: usize = 8192;
/// A prime larger than any factor of the number of pages.
const PAGE_STRIDE: usize = 1_000_003;
/// Of an H200, as the device says it.
const UNITS: usize = 264;

/// Which ops of the model run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    All,
    NoAttention,
    OnlyHead,
    OnlyAttention,
}

/// A loaded model.
struct Loaded {
    cuda: CudaBackend,
    decoder: Decoder,
    config: ModelConfig,
    max_model_len: usize,
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
        if self.has_layers() {
            self.ops.linear(op);
        }
    }

    fn gated_linear(&mut self, op: &GatedLinear) {
        if self.has_layers() {
            self.ops.gated_linear(op);
        }
    }

    fn qkv(&mut self, op: &Qkv) {
        if self.has_layers() {
            self.ops.qkv(op);
        }
    }

    fn attention(&mut self, op: &Attention) {
        if self.part == Part::OnlyAttention {
            self.ops.attention(op);
        }
    }

    fn keep_logit_rows(&mut self, buffers: &[BufferId]) {
        self.ops.keep_logit_rows(buffers);
    }

    fn logits(&mut self, op: &Logits) {
        if self.part != Part::OnlyAttention {
            self.ops.logits(op);
        }
    }

    fn sample(&mut self, logits: BufferId) {
        if self.part != Part::OnlyAttention {
            self.ops.sample(logits);
        }
    }
}

impl Filter<'_> {
    fn has_layers(&self) -> bool {
        self.part == Part::NoAttention
    }
}

/// Loads a model with dummy weights, for sequences of up to `max_len` tokens.
fn load(model: &Path, max_batch: usize, max_len: usize) -> Loaded {
    let files = ModelFiles::open(model, LoadFormat::Dummy).expect("the model opens");
    let config = files.config().clone();
    let max_model_len = max_len.next_multiple_of(BLOCK_SIZE) + BLOCK_SIZE;
    let limits = StepLimits {
        max_tokens: MAX_TOKENS.max(max_batch),
        max_seqs: max_batch,
        max_logit_rows: max_batch,
        max_samples: max_batch,
        max_model_len,
        vocab_size: config.vocab_size,
    };
    let start = Instant::now();
    let mut cuda = backend(Precision::Fast);
    println!("device ready in {:.2} s", start.elapsed().as_secs_f64());
    let start = Instant::now();
    let weights = files.weights().expect("weights");
    let decoder = Decoder::load(&config, &*weights, &mut cuda, &limits, &mut |_| ()).expect("loads");
    let spec = config.kv_spec(kv_dtype(), BLOCK_SIZE);
    let pages = max_batch * max_model_len.div_ceil(BLOCK_SIZE);
    cuda.create_kv_cache(&spec, pages, 0).expect("the KV cache fits");
    let seconds = start.elapsed().as_secs_f64();
    println!("{:.1} GB of weights in {seconds:.1} s", cuda.weight_bytes() as f64 / 1e9);
    Loaded { cuda, decoder, config, max_model_len }
}

pub fn run(model: &Path, batches: &[usize], context: usize, splits: &[usize]) {
    let max_batch = *batches.iter().max().expect("a batch");
    let mut loaded = load(model, max_batch, context + 2 * NUM_STEPS);
    println!(
        "{:>6} {:>6} {:>8} {:>13} {:>10} {:>10}  (context {context})",
        "batch", "split", "ops", "prefill tok/s", "ms a step", "tok/s"
    );
    for (&batch, &split) in batches.iter().flat_map(|batch| splits.iter().map(move |split| (batch, split))) {
        let mut state = Decode::new(&loaded, batch, split);
        let Loaded { cuda, decoder, .. } = &mut loaded;
        let prefill = state.prefill(cuda, &*decoder, context, 2);
        for (name, part) in [("all", Part::All), ("no attn", Part::NoAttention), ("head", Part::OnlyHead)] {
            if part != Part::All && split != splits[0] {
                continue;
            }
            let seconds = state.decode(cuda, &Some { decoder, part }, context);
            println!(
                "{batch:>6} {split:>6} {name:>8} {prefill:>13.0} {:>10.3} {:>10.1}",
                seconds * 1e3,
                batch as f64 / seconds
            );
        }
    }
}

/// Attention alone, `(batch, context)` at a time: decodes by bytes a second, prompts by operations a second.
pub fn attention(model: &Path, shapes: &[(usize, usize)]) {
    let max_batch = shapes.iter().map(|shape| shape.0).max().expect("a shape");
    let max_len = shapes.iter().map(|shape| shape.1).max().expect("a shape") + 2 * NUM_STEPS;
    let mut loaded = load(model, max_batch, max_len);
    let config = loaded.config.clone();
    let layers = config.layers.len() as f64;
    println!("{:>6} {:>8} {:>12} {:>10} {:>14}", "batch", "context", "us a layer", "TB/s", "prompt TFLOP/s");
    for &(batch, context) in shapes {
        let mut state = Decode::new(&loaded, batch, 0);
        let Loaded { cuda, decoder, .. } = &mut loaded;
        // Fills the cache; the products alone are enough for that.
        state.prefill(cuda, &Some { decoder, part: Part::NoAttention }, context, 1);
        let only = Some { decoder, part: Part::OnlyAttention };
        let seconds = state.decode(cuda, &only, context) / layers;
        let token_bytes = (2 * kv_dtype().bytes() * config.num_kv_heads * config.head_dim) as f64;
        let bytes = batch as f64 * (context as f64 + NUM_STEPS as f64 / 2.0) * token_bytes;
        let rate = state.prefill(cuda, &only, context, 2);
        let mean_context = (context + 1) as f64 / 2.0;
        let per_token = 4.0 * mean_context * (config.num_heads * config.head_dim) as f64 * layers;
        println!(
            "{batch:>6} {context:>8} {:>12.1} {:>10.2} {:>14.0}",
            seconds * 1e6,
            bytes / seconds / 1e12,
            rate * per_token / 1e12
        );
    }
}

struct Decode {
    batch: usize,
    split: usize,
    max_model_len: usize,
    input: StepInput,
    windows: Vec<Option<u32>>,
    num_kv_heads: usize,
    group: usize,
}

impl Decode {
    /// A split of 0 is what the engine would choose.
    fn new(loaded: &Loaded, batch: usize, split: usize) -> Self {
        Self {
            batch,
            split,
            max_model_len: loaded.max_model_len,
            input: StepInput::default(),
            windows: loaded.config.attention_kinds(),
            num_kv_heads: loaded.config.num_kv_heads,
            group: loaded.config.num_heads / loaded.config.num_kv_heads,
        }
    }

    /// A step of `len` tokens at `position` of the sequences `seqs`.
    fn fill(&mut self, seqs: std::ops::Range<usize>, position: usize, len: usize, feeds_back: bool) {
        let input = &mut self.input;
        input.clear();
        input.attention.resize_with(self.windows.len(), Default::default);
        let per_seq = self.max_model_len.div_ceil(BLOCK_SIZE);
        let mut queries = Vec::new();
        for seq in seqs {
            // Neighbouring pages of a sequence lie apart, as they do after a while of serving.
            let pages = per_seq * self.batch;
            let page = |index: usize| ((index * self.batch + seq) * PAGE_STRIDE % pages) as u32;
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
            let mut options = PlannerOptions {
                block_size: BLOCK_SIZE,
                window,
                max_kv_per_item: self.split as u32,
                max_kv_per_shared_item: 0,
                max_split_queries: 8,
                max_queries_per_item: 128 / self.group as u32,
            };
            if self.split == 0 {
                options.max_kv_per_item =
                    choose_split(&queries, &SharedPrefixes::default(), &options, self.num_kv_heads, UNITS);
            }
            plan_attention(&queries, &options, plan);
        }
    }

    /// Tokens a second of the last of `passes`.
    fn prefill(
        &mut self,
        cuda: &mut dyn Backend,
        program: &dyn Program,
        context: usize,
        passes: usize,
    ) -> f64 {
        let at_once = (MAX_TOKENS / context).clamp(1, self.batch);
        let mut seconds = 0.0;
        for _ in 0..passes {
            let start = Instant::now();
            let mut first = 0;
            while first < self.batch {
                let end = self.batch.min(first + at_once);
                for position in (0..context).step_by(MAX_TOKENS) {
                    self.fill(first..end, position, MAX_TOKENS.min(context - position), false);
                    cuda.submit(&self.input, program).expect("the step starts");
                    cuda.collect(&mut StepOutput::default()).expect("the step ends");
                }
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
