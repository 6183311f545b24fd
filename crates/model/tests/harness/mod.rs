//! A step by hand: builds the `StepInput` that the engine would build, so that a model can be tested without scheduler,
//! KV manager or engine. Pages are handed out in a shuffled order, so no test passes because pages happen to lie in a row.

use std::path::Path;

use baton_backend::{
    AttentionItem, AttentionMerge, AttentionPlan, Backend, BlockCopy, BufferId, KvDtype, PlannerOptions,
    ProgramId, SampleRow, SequenceQueries, StepInput, StepLimits, StepOutput, plan_attention,
};
use baton_model::{Decoder, LoadFormat, ModelConfig, ModelFiles, WeightSource};

#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub max_model_len: usize,
    pub max_tokens: usize,
    pub block_size: usize,
    pub num_pages: usize,
    pub kv_dtype: KvDtype,
    /// As in `PlannerOptions`.
    pub max_kv_per_item: u32,
    pub max_queries_per_item: u32,
}

/// Tokens of one sequence in a step, at positions `start..`, with the pages of positions `0..`.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    pub tokens: &'a [u32],
    pub start: usize,
    pub pages: &'a [u32],
}

pub struct Harness {
    backend: Box<dyn Backend>,
    decoder: Decoder,
    program: ProgramId,
    pub config: ModelConfig,
    options: Options,
    /// Of each lane of the cache.
    windows: Vec<Option<u32>>,
    free_pages: Vec<u32>,
    input: StepInput,
    output: StepOutput,
}

impl Harness {
    pub fn open(backend: Box<dyn Backend>, model: &Path, options: Options) -> Self {
        let files = ModelFiles::open(model, LoadFormat::Auto).expect("the model opens");
        let weights = files.weights().expect("the model has weights");
        Self::new(backend, files.config().clone(), &*weights, options)
    }

    pub fn new(
        mut backend: Box<dyn Backend>,
        config: ModelConfig,
        weights: &dyn WeightSource,
        options: Options,
    ) -> Self {
        let limits = StepLimits {
            max_tokens: options.max_tokens,
            max_seqs: 8,
            max_logit_rows: options.max_tokens,
            max_samples: 8,
            max_model_len: options.max_model_len,
            vocab_size: config.vocab_size,
        };
        let decoder = Decoder::load(&config, weights, &mut *backend, &limits, &mut |_| ())
            .unwrap_or_else(|error| panic!("the model does not load: {error}"));
        let program = backend.compile(decoder.program()).expect("the program is valid");
        let spec = config.kv_spec(options.kv_dtype, options.block_size);
        // A page is a block in each lane.
        let windows: Vec<Option<u32>> = spec.lane_windows().collect();
        let num_blocks = options.num_pages * windows.len();
        backend.create_kv_cache(&spec, num_blocks, num_blocks).expect("the KV cache fits");
        Self {
            backend,
            decoder,
            program,
            config,
            options,
            windows,
            free_pages: shuffled(options.num_pages),
            input: StepInput::default(),
            output: StepOutput::default(),
        }
    }

    pub fn take_pages(&mut self, num_tokens: usize) -> Vec<u32> {
        let count = num_tokens.div_ceil(self.options.block_size);
        let rest = self.free_pages.len().checked_sub(count).expect("enough pages");
        self.free_pages.split_off(rest)
    }

    pub fn give_pages(&mut self, pages: &[u32]) {
        // To the other end, so that the next sequence gets other pages.
        self.free_pages.splice(0..0, pages.iter().copied());
    }

    /// Moves that the next step makes before it computes: `(from, to)`.
    pub fn swap_out(&mut self, moves: &[(u32, u32)]) {
        self.input.swap_out.extend(copies(moves, self.windows.len() as u32));
    }

    pub fn swap_in(&mut self, moves: &[(u32, u32)]) {
        self.input.swap_in.extend(copies(moves, self.windows.len() as u32));
    }

    pub fn copy(&mut self, moves: &[(u32, u32)]) {
        self.input.copies.extend(copies(moves, self.windows.len() as u32));
    }

    /// The logits of every token, row by row.
    pub fn step(&mut self, runs: &[Run]) -> Vec<Vec<f32>> {
        self.step_with(runs, |_, _| ())
    }

    /// The same with a change of the plans of attention, by their window.
    pub fn step_with(
        &mut self,
        runs: &[Run],
        change: impl Fn(Option<u32>, &mut AttentionPlan),
    ) -> Vec<Vec<f32>> {
        let seqs = self.fill(runs);
        self.plan(&seqs, change);
        let num_tokens = self.input.num_tokens();
        self.submit();
        let rows = self.read(self.decoder.logits_buffer(), num_tokens, self.config.vocab_size);
        self.check_samples(runs, &rows);
        rows
    }

    /// The logits of every `every`-th token of a run, from its last one back, and of no others: what nobody asks for is not
    /// computed.
    pub fn some_rows(&mut self, run: Run, every: usize) -> Vec<Vec<f32>> {
        let seqs = self.fill(&[run]);
        let last = run.tokens.len() - 1;
        self.input.logit_rows.retain(|row| (last - *row as usize).is_multiple_of(every));
        let num_rows = self.input.logit_rows.len();
        self.input.samples = vec![SampleRow::greedy(num_rows as u32 - 1)];
        self.plan(&seqs, |_, _| ());
        self.submit();
        let rows = self.read(self.decoder.logits_buffer(), num_rows, self.config.vocab_size);
        assert_eq!(self.output.samples[0].chosen.token_id, argmax(&rows[num_rows - 1]));
        rows
    }

    fn plan(&mut self, seqs: &[SequenceQueries], change: impl Fn(Option<u32>, &mut AttentionPlan)) {
        self.input.attention.resize(self.windows.len(), AttentionPlan::default());
        let pages_per_lane = (self.input.pages.len() / self.windows.len()) as u32;
        for (lane, (plan, &window)) in self.input.attention.iter_mut().zip(&self.windows).enumerate() {
            let options = PlannerOptions {
                block_size: self.options.block_size,
                window,
                max_kv_per_item: self.options.max_kv_per_item,
                max_kv_per_shared_item: 0,
                max_split_queries: 0,
                max_queries_per_item: self.options.max_queries_per_item,
            };
            let seqs: Vec<SequenceQueries> = seqs
                .iter()
                .map(|seq| SequenceQueries {
                    pages_start: seq.pages_start + lane as u32 * pages_per_lane,
                    ..*seq
                })
                .collect();
            plan_attention(&seqs, &options, plan);
            change(window, plan);
        }
    }

    fn submit(&mut self) {
        self.backend.submit(&self.input, self.program).expect("the step starts");
        self.backend.collect(&mut self.output).expect("the step ends");
        self.input.clear();
    }

    fn fill(&mut self, runs: &[Run]) -> Vec<SequenceQueries> {
        let block_size = self.options.block_size;
        let input = &mut self.input;
        let mut seqs = Vec::new();
        for run in runs {
            let end = run.start + run.tokens.len();
            assert!(run.pages.len() * block_size >= end, "the run has pages for its tokens");
            seqs.push(SequenceQueries {
                query_start: input.token_ids.len() as u32,
                num_queries: run.tokens.len() as u32,
                first_position: run.start as u32,
                pages_start: input.pages.len() as u32,
            });
            input.pages.extend(&run.pages[..end.div_ceil(block_size)]);
            for (position, &token) in (run.start..end).zip(run.tokens) {
                let page = run.pages[position / block_size];
                input.logit_rows.push(input.token_ids.len() as u32);
                input.token_ids.push(token);
                input.positions.push(position as u32);
                input.slots.push(page * block_size as u32 + (position % block_size) as u32);
            }
            input.samples.push(SampleRow::greedy(input.token_ids.len() as u32 - 1));
        }
        // So far these are pages; each has a block in every lane, which follow each other.
        let (pages, slots) = (std::mem::take(&mut input.pages), std::mem::take(&mut input.slots));
        let (lanes, size) = (self.windows.len() as u32, block_size as u32);
        for lane in 0..lanes {
            input.pages.extend(pages.iter().map(|page| page * lanes + lane));
            input.slots.extend(slots.iter().map(|slot| (slot / size * lanes + lane) * size + slot % size));
        }
        seqs
    }

    fn read(&mut self, buffer: BufferId, rows: usize, cols: usize) -> Vec<Vec<f32>> {
        let values = self.backend.read_buffer(buffer, rows).expect("the buffer can be read");
        assert_eq!(values.len(), rows * cols);
        values.chunks(cols).map(<[f32]>::to_vec).collect()
    }

    /// A greedy sample is the largest logit of its row.
    fn check_samples(&self, runs: &[Run], rows: &[Vec<f32>]) {
        let mut end = 0;
        assert_eq!(self.output.samples.len(), runs.len());
        for (run, sampled) in runs.iter().zip(&self.output.samples) {
            end += run.tokens.len();
            assert_eq!(sampled.chosen.token_id, argmax(&rows[end - 1]));
        }
    }
}

/// A page's block of each lane.
fn copies(moves: &[(u32, u32)], lanes: u32) -> impl Iterator<Item = BlockCopy> {
    let of_page = move |&(from, to): &(u32, u32)| {
        (0..lanes).map(move |lane| BlockCopy { from: from * lanes + lane, to: to * lanes + lane })
    };
    moves.iter().flat_map(of_page)
}

pub fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a))).expect("a vocabulary")
        as u32
}

/// The numbers below `count` in an order without pattern.
fn shuffled(count: usize) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..count as u32).collect();
    let mut state = 12345_u64;
    for i in (1..count).rev() {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        numbers.swap(i, (state >> 33) as usize % (i + 1));
    }
    numbers
}

/// Replaces the plan of lone queries, row `i` at position `positions[i]`, by a relay: one item reads the
/// `shared_len` keys that all of them share, one item for each row the rest of its keys, and a merge joins the two.
pub fn relay_plan(plan: &mut AttentionPlan, positions: &[u32], shared_len: u32, block_size: u32) {
    let own_pages: Vec<u32> = plan.items.iter().map(|item| item.pages_start).collect();
    assert_eq!(own_pages.len(), positions.len(), "one item for each lone query");
    let num_queries = positions.len() as u32;
    plan.clear();
    plan.items.push(AttentionItem {
        query_start: 0,
        num_queries,
        pages_start: own_pages[0],
        kv_start: 0,
        kv_len: shared_len,
        partial: 0,
    });
    for (row, (&position, &pages)) in positions.iter().zip(&own_pages).enumerate() {
        let row = row as u32;
        plan.items.push(AttentionItem {
            query_start: row,
            num_queries: 1,
            pages_start: pages + shared_len / block_size,
            kv_start: shared_len,
            kv_len: position + 1 - shared_len,
            partial: num_queries + row,
        });
        plan.merges.push(AttentionMerge { query: row, first: 2 * row, count: 2 });
        plan.merge_slots.extend([row, num_queries + row]);
    }
    plan.num_partials = 2 * num_queries;
}
