//! A tiny model of one attention layer with a naive twin, and the means to put sequences into steps.

mod attention;
mod contract;
mod naive;
mod ops;

use baton_core::TokenId;

use crate::testing::Random;
use crate::{
    Attention, AttentionPlan, Backend, BufferId, Embed, KvDtype, KvLayerSpec, KvSpec, Logits, Norm, NormKind,
    NormSpan, Op, PlannerOptions, Program, ProgramId, Qkv, ReferenceBackend, RopeSpec, RopeStyle, Sample,
    SampleRow, SequenceQueries, StepExecutor, StepInput, StepLimits, StepOutput, Tensor, WeightUse,
    plan_attention,
};

const VOCAB: usize = 24;
const HIDDEN: usize = 12;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 8;
const BLOCK_SIZE: usize = 4;
const NUM_BLOCKS: usize = 32;
const MAX_TOKENS: usize = 64;

/// What a test varies.
#[derive(Clone, Debug)]
struct Kind {
    window: Option<u32>,
    softcap: Option<f32>,
    alibi: bool,
    sinks: bool,
    rope: Option<RopeSpec>,
    qk_norm: bool,
    dtype: KvDtype,
}

impl Kind {
    fn plain() -> Self {
        let inv_freq = vec![1.0, 0.3, 0.1, 0.02];
        let rope = Some(RopeSpec { inv_freq, scale: 1.0, style: RopeStyle::Half });
        Self {
            window: None,
            softcap: None,
            alibi: false,
            sinks: false,
            rope,
            qk_norm: false,
            dtype: KvDtype::F32,
        }
    }
}

/// The model's numbers, shared by the backend under test and its naive twin.
struct Numbers {
    embedding: Vec<f32>, // [VOCAB, HIDDEN]
    qkv: Vec<f32>,       // [(HEADS + 2 · KV_HEADS) · HEAD_DIM, HIDDEN]
    head_norm: Vec<f32>, // [HEAD_DIM]
    slopes: Vec<f32>,    // [HEADS]
    sinks: Vec<f32>,     // [HEADS]
    head_bias: Vec<f32>, // [(HEADS + 2 · KV_HEADS) · HEAD_DIM]
    output: Vec<f32>,    // [VOCAB, HEADS · HEAD_DIM]
}

impl Numbers {
    fn new() -> Self {
        let mut random = Random::new(42);
        let qkv_rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
        Self {
            embedding: random.normals(VOCAB * HIDDEN),
            qkv: random.normals(qkv_rows * HIDDEN),
            head_norm: random.normals(HEAD_DIM),
            slopes: vec![0.5, 0.25, 0.125, 0.0625],
            sinks: vec![-4.0, 0.0, 1.5, 5.0],
            head_bias: random.normals(qkv_rows),
            output: random.normals(VOCAB * HEADS * HEAD_DIM),
        }
    }
}

const SCALE: f32 = 0.2;

fn limits() -> StepLimits {
    StepLimits {
        max_tokens: MAX_TOKENS,
        max_seqs: 8,
        max_logit_rows: 8,
        max_samples: 8,
        max_model_len: 64,
        vocab_size: VOCAB,
    }
}

/// A backend with the tiny model in it: embed, qkv, attention, logits, sample.
struct Bench {
    backend: ReferenceBackend,
    model: ProgramId,
    attended: BufferId,
    kind: Kind,
}

impl Bench {
    fn new(kind: &Kind) -> Self {
        let numbers = Numbers::new();
        let mut backend = ReferenceBackend::new();
        backend.set_limits(&limits()).unwrap();
        let layer = KvLayerSpec { num_kv_heads: KV_HEADS, head_dim: HEAD_DIM };
        // Two layers, to see that the second is not written into the first.
        let spec = KvSpec::full(layer, 2, kind.dtype, BLOCK_SIZE);
        backend.create_kv_cache(&spec, NUM_BLOCKS, NUM_BLOCKS).unwrap();
        let mut weight = |rows: usize, values: &[f32], usage| {
            let tensor = Tensor::from_f32(rows, values.len() / rows, values).unwrap();
            backend.load_weight(&[tensor], usage).unwrap()
        };
        let embedding = weight(VOCAB, &numbers.embedding, WeightUse::Embedding);
        let qkv_weight = weight(numbers.head_bias.len(), &numbers.qkv, WeightUse::Linear);
        let output_weight = weight(VOCAB, &numbers.output, WeightUse::Linear);
        let bias = backend.load_vector(&numbers.head_bias).unwrap();
        let head_norm = backend.load_vector(&numbers.head_norm).unwrap();
        let slopes = backend.load_vector(&numbers.slopes).unwrap();
        let sinks = backend.load_vector(&numbers.sinks).unwrap();
        let rope = kind.rope.as_ref().map(|rope| backend.create_rope(rope).unwrap());
        let mut buffer = |cols| backend.create_buffer(MAX_TOKENS, cols).unwrap();
        let (hidden, query, attended) = (buffer(HIDDEN), buffer(HEADS * HEAD_DIM), buffer(HEADS * HEAD_DIM));
        let logits = backend.create_logits(MAX_TOKENS, VOCAB).unwrap();
        let norm = kind.qk_norm.then_some(Norm { kind: NormKind::Rms, weight: head_norm, eps: 1e-5 });
        let ops = vec![
            Op::Embed(Embed { weight: embedding, scale: 0.5, output: hidden }),
            Op::Qkv(Qkv {
                input: hidden,
                norm: None,
                weight: qkv_weight,
                bias: Some(bias),
                q_norm: norm,
                k_norm: norm,
                norm_span: NormSpan::Head,
                rope,
                num_heads: HEADS,
                layer: 1,
                output: query,
            }),
            Op::Attention(Attention {
                layer: 1,
                plan: 0,
                window: kind.window,
                num_heads: HEADS,
                scale: SCALE,
                softcap: kind.softcap,
                alibi: kind.alibi.then_some(slopes),
                sinks: kind.sinks.then_some(sinks),
                query,
                output: attended,
            }),
            Op::Logits(Logits {
                input: attended,
                norm: None,
                weight: output_weight,
                bias: None,
                softcap: None,
                output: logits,
            }),
            Op::Sample(Sample { logits }),
        ];
        let model = backend.compile(&Program::new(ops)).unwrap();
        Self { backend, model, attended, kind: kind.clone() }
    }

    fn run(&mut self, input: &StepInput) -> StepOutput {
        self.backend.submit(input, self.model).unwrap();
        let mut output = StepOutput::default();
        self.backend.collect(&mut output).unwrap();
        output
    }

    fn attended(&mut self, rows: usize) -> Vec<f32> {
        self.read(self.attended, rows)
    }

    fn read(&mut self, buffer: BufferId, rows: usize) -> Vec<f32> {
        self.backend.read_buffer(buffer, rows).unwrap()
    }

    /// Plans the step's attention and runs it.
    fn plan_and_run(
        &mut self,
        input: &mut StepInput,
        seqs: &[SequenceQueries],
        split: u32,
        queries: u32,
    ) -> StepOutput {
        let options = PlannerOptions {
            block_size: BLOCK_SIZE,
            window: self.kind.window,
            max_kv_per_item: split,
            max_kv_per_shared_item: 0,
            max_split_queries: 0,
            max_queries_per_item: queries,
        };
        let mut plan = AttentionPlan::default();
        plan_attention(seqs, &options, &mut plan);
        input.attention = vec![plan];
        self.run(input)
    }
}

/// A sequence and where its KV lies.
#[derive(Clone)]
struct Seq {
    tokens: Vec<TokenId>,
    blocks: Vec<u32>,
}

impl Seq {
    fn random(random: &mut Random, len: usize, blocks: &[u32]) -> Self {
        assert!(blocks.len() * BLOCK_SIZE >= len);
        Self { tokens: (0..len).map(|_| random.below(VOCAB) as TokenId).collect(), blocks: blocks.to_vec() }
    }

    /// Adds rows for these positions, and the page list.
    fn add_to(&self, input: &mut StepInput, positions: std::ops::Range<usize>) -> SequenceQueries {
        let seq = SequenceQueries {
            query_start: input.num_tokens() as u32,
            num_queries: positions.len() as u32,
            first_position: positions.start as u32,
            pages_start: input.pages.len() as u32,
        };
        input.pages.extend(&self.blocks);
        for position in positions {
            input.token_ids.push(self.tokens[position]);
            input.positions.push(position as u32);
            let block = self.blocks[position / BLOCK_SIZE] as usize;
            input.slots.push((block * BLOCK_SIZE + position % BLOCK_SIZE) as u32);
        }
        seq
    }
}

fn assert_close(actual: &[f32], expected: &[f32], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (i, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let close = (actual - expected).abs() <= 1e-4 * (1.0 + expected.abs());
        assert!(close, "{what}: value {i} is {actual}, expected {expected}");
    }
}
