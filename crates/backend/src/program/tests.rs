//! What is refused when a program is compiled, and what is known of one that is not.

use super::*;
use crate::{
    Activation, KvDtype, KvLayerSpec, Norm, NormKind, NormSpan, RopeId, RopeSpec, RopeStyle, Tensor,
    VectorId, WeightId, WeightUse,
};

const HIDDEN: usize = 8;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 4;
const INTERMEDIATE: usize = 6;
const VOCAB: usize = 10;

const EMBEDDING: WeightId = WeightId(0);
const QKV: WeightId = WeightId(1);
const OUT: WeightId = WeightId(2);
const GATED: WeightId = WeightId(3);
const DOWN: WeightId = WeightId(4);
const HEAD: WeightId = WeightId(5);
const NORM: VectorId = VectorId(0);
const HEAD_NORM: VectorId = VectorId(1);
const BIAS: VectorId = VectorId(2);
const HIDDEN_BUFFER: BufferId = BufferId(0);
const QUERY: BufferId = BufferId(1);
const ATTENDED: BufferId = BufferId(2);
const MLP: BufferId = BufferId(3);
const LOGITS: BufferId = BufferId(4);

fn handles() -> Handles {
    let mut handles = Handles::default();
    let shapes = [
        (VOCAB, HIDDEN, WeightUse::Embedding),
        ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, WeightUse::Linear),
        (HIDDEN, HEADS * HEAD_DIM, WeightUse::Linear),
        (2 * INTERMEDIATE, HIDDEN, WeightUse::Linear),
        (HIDDEN, INTERMEDIATE, WeightUse::Linear),
        (VOCAB, HIDDEN, WeightUse::Linear),
    ];
    for (rows, cols, usage) in shapes {
        let tensor = Tensor::from_f32(rows, cols, &vec![0.0; rows * cols]).unwrap();
        handles.add_weight(WeightShape::new(&[tensor], usage).unwrap());
    }
    for len in [HIDDEN, HEAD_DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM] {
        handles.add_vector(len);
    }
    handles.add_rope(&RopeSpec { inv_freq: vec![1.0; HEAD_DIM / 2], scale: 1.0, style: RopeStyle::Half });
    handles.add_rope(&RopeSpec { inv_freq: vec![1.0; HEAD_DIM], scale: 1.0, style: RopeStyle::Half });
    for cols in [HIDDEN, HEADS * HEAD_DIM, HEADS * HEAD_DIM, INTERMEDIATE] {
        handles.add_buffer(BufferShape { rows: 16, cols, is_logits: false });
    }
    handles.add_buffer(BufferShape { rows: 3, cols: VOCAB, is_logits: true });
    handles
}

fn norm(weight: VectorId) -> Norm {
    Norm { kind: NormKind::Rms, weight, eps: 1e-5 }
}

fn qkv() -> Qkv {
    Qkv {
        input: HIDDEN_BUFFER,
        norm: Some(norm(NORM)),
        weight: QKV,
        bias: Some(BIAS),
        q_norm: Some(norm(HEAD_NORM)),
        k_norm: Some(norm(HEAD_NORM)),
        norm_span: NormSpan::Head,
        rope: Some(RopeId(0)),
        num_heads: HEADS,
        layer: 1,
        output: QUERY,
    }
}

fn attention() -> Attention {
    Attention {
        layer: 1,
        plan: 2,
        window: Some(5),
        num_heads: HEADS,
        scale: 0.5,
        softcap: None,
        alibi: None,
        sinks: None,
        query: QUERY,
        output: ATTENDED,
    }
}

fn linear(input: BufferId, weight: WeightId) -> Linear {
    Linear { input, norm: None, weight, bias: None, output: HIDDEN_BUFFER, accumulate: true }
}

fn gated() -> GatedLinear {
    GatedLinear {
        input: HIDDEN_BUFFER,
        norm: Some(norm(NORM)),
        weight: GATED,
        bias: None,
        activation: Activation::Silu,
        output: MLP,
    }
}

fn logits() -> Logits {
    Logits {
        input: HIDDEN_BUFFER,
        norm: Some(norm(NORM)),
        weight: HEAD,
        bias: None,
        softcap: None,
        output: LOGITS,
    }
}

fn keep(buffers: &[BufferId]) -> Op {
    Op::KeepLogitRows(KeepLogitRows { buffers: buffers.to_vec() })
}

/// A model of one layer, all of whose ops are valid.
fn good() -> Vec<Op> {
    vec![
        Op::Embed(Embed { weight: EMBEDDING, scale: 1.0, output: HIDDEN_BUFFER }),
        Op::Qkv(qkv()),
        Op::Attention(attention()),
        keep(&[ATTENDED, HIDDEN_BUFFER]),
        Op::Linear(linear(ATTENDED, OUT)),
        Op::GatedLinear(gated()),
        Op::Linear(linear(MLP, DOWN)),
        Op::Logits(logits()),
        Op::Sample(Sample { logits: LOGITS }),
    ]
}

fn cache(num_layers: usize, num_kv_heads: usize, head_dim: usize) -> KvSpec {
    let layer = KvLayerSpec { num_kv_heads, head_dim };
    KvSpec::full(layer, num_layers, KvDtype::F16, 16)
}

#[track_caller]
fn refused(op: Op, expected: &str) {
    let error = Programs::default().compile(&Program::new(vec![op]), &handles()).expect_err(expected);
    assert!(error.to_string().contains(expected), "{error} does not say {expected:?}");
}

#[test]
fn a_good_program_says_what_its_steps_need() {
    let mut programs = Programs::default();
    let id = programs.compile(&Program::new(good()), &handles()).unwrap();
    let needs = programs.get(id).unwrap().needs.clone();
    assert_eq!((needs.num_plans, needs.max_tokens, needs.max_logit_rows), (3, 16, 3));
    assert_eq!((needs.vocab_size, needs.kv_layers.len()), (Some(VOCAB), 2));
    assert_eq!(needs.kv_layers[0].num_kv_heads, Some(KV_HEADS));

    // The same again is the same program; another one has its own id.
    assert_eq!(programs.compile(&Program::new(good()), &handles()).unwrap(), id);
    assert_ne!(programs.compile(&Program::new(good()[..1].to_vec()), &handles()).unwrap(), id);
    assert!(programs.get(ProgramId(2)).is_err());
}

#[test]
fn a_program_is_plain_data() {
    let program = Program::new(good());
    let text = serde_json::to_string(&program).unwrap();
    assert!(text.starts_with(r#"{"ops":[{"embed":{"weight":0,"scale":1.0,"output":0}}"#), "{text}");
    assert_eq!(serde_json::from_str::<Program>(&text).unwrap(), program);
}

#[test]
fn handles_and_shapes_are_checked() {
    let embed = Embed { weight: EMBEDDING, scale: 1.0, output: HIDDEN_BUFFER };
    refused(
        Op::Embed(Embed { weight: WeightId(6), ..embed }),
        "op 0 of the program (embed) is not valid: no such weight as 6",
    );
    refused(Op::Embed(Embed { weight: HEAD, ..embed }), "weight 5 was not loaded for lookups");
    refused(Op::Embed(Embed { output: QUERY, ..embed }), "the output is of 16, expected 8");
    refused(Op::Embed(Embed { output: BufferId(5), ..embed }), "no such buffer as 5");
    refused(Op::Embed(Embed { output: LOGITS, ..embed }), "buffer 4 is for logits");
    refused(Op::Linear(linear(ATTENDED, EMBEDDING)), "weight 0 was loaded for lookups only");
    refused(Op::Linear(linear(MLP, OUT)), "the input is of 6, expected 16");
    refused(Op::Linear(Linear { bias: Some(BIAS), ..linear(MLP, DOWN) }), "the bias is of 32, expected 8");
    refused(
        Op::Linear(Linear { norm: Some(norm(NORM)), ..linear(MLP, DOWN) }),
        "the weight of a norm is of 8",
    );
    let odd = NormKind::Layer { bias: Some(HEAD_NORM) };
    let layer_norm = Norm { kind: odd, weight: NORM, eps: 1e-5 };
    let norm_op = NormOp { input: HIDDEN_BUFFER, norm: layer_norm, output: HIDDEN_BUFFER, accumulate: false };
    refused(Op::Norm(norm_op), "the bias of a norm is of 4, expected 8");
    let no_vector = Norm { kind: NormKind::Rms, weight: VectorId(3), eps: 1e-5 };
    refused(Op::Norm(NormOp { norm: no_vector, ..norm_op }), "no such vector as 3");
    refused(
        Op::GatedLinear(GatedLinear { output: HIDDEN_BUFFER, ..gated() }),
        "the output is of 8, expected 6",
    );
    refused(Op::Logits(Logits { output: MLP, ..logits() }), "buffer 3 is not for logits");
    refused(
        Op::Logits(Logits { weight: OUT, input: QUERY, norm: None, ..logits() }),
        "the width of the logits is of 10",
    );
    refused(Op::Sample(Sample { logits: HIDDEN_BUFFER }), "buffer 0 is not for logits");
    refused(keep(&[BufferId(7)]), "no such buffer as 7");
}

#[test]
fn heads_are_checked() {
    refused(Op::Qkv(Qkv { num_heads: 3, ..qkv() }), "3 heads in a buffer of 16 columns");
    refused(Op::Qkv(Qkv { num_heads: 0, ..qkv() }), "0 heads");
    refused(Op::Qkv(Qkv { num_heads: 2, bias: None, ..qkv() }), "of a norm is of 4, expected 8");
    refused(
        Op::Qkv(Qkv { weight: GATED, bias: None, ..qkv() }),
        "12 rows has no q, k and v for 4 heads of 4",
    );
    refused(Op::Qkv(Qkv { rope: Some(RopeId(1)), ..qkv() }), "of 8 dimensions for heads of 4");
    refused(Op::Qkv(Qkv { rope: Some(RopeId(2)), ..qkv() }), "no such rotary table as 2");
    refused(Op::Attention(Attention { alibi: Some(NORM), ..attention() }), "the vector of slopes is of 8");
    refused(Op::Attention(Attention { sinks: Some(NORM), ..attention() }), "the vector of sinks is of 8");
    refused(Op::Attention(Attention { output: MLP, ..attention() }), "the output is of 6, expected 16");
    refused(Op::Attention(Attention { window: Some(0), ..attention() }), "a window of 0 keys");
}

#[test]
fn ops_that_do_not_go_together_are_refused() {
    let refused = |ops: Vec<Op>, expected: &str| {
        let error = Programs::default().compile(&Program::new(ops), &handles()).expect_err(expected);
        assert!(error.to_string().contains(expected), "{error} does not say {expected:?}");
    };
    let two = |change: Attention| vec![Op::Attention(attention()), Op::Attention(change)];
    refused(
        two(Attention { window: None, ..attention() }),
        "op 1 of the program (attention) is not valid: window None by plan 2",
    );
    refused(
        two(Attention { num_heads: 2, plan: 0, ..attention() }),
        "heads of 8, but op 0 uses layer 1 with heads of 4",
    );
    let mut ops = good();
    ops[3] = keep(&[HIDDEN_BUFFER]);
    refused(ops, "op 4 of the program (linear) is not valid: buffer 2 still has all rows");
    let mut ops = good();
    ops[3] = keep(&[ATTENDED]);
    refused(ops, "buffer 0 still has all rows");
    let mut ops = good();
    ops.insert(4, Op::Attention(attention()));
    refused(ops, "rows without logits were dropped before it");
}

/// Before the cache is made and after.
#[test]
fn layers_of_the_cache_are_checked() {
    let program = Program::new(good());
    for (spec, expected) in [
        (cache(1, KV_HEADS, HEAD_DIM), "op 1 of the program (qkv) is not valid: layer 1 of a KV cache of 1"),
        (cache(2, KV_HEADS, 8), "heads of 4, but layer 1 of the KV cache has 8"),
        (cache(2, 4, HEAD_DIM), "4 heads over 2 kv heads, but layer 1 of the KV cache has 4"),
    ] {
        let mut programs = Programs::default();
        programs.compile(&program, &handles()).unwrap();
        let error = programs.set_cache(&spec).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
        let mut programs = Programs::default();
        programs.set_cache(&spec).unwrap();
        let error = programs.compile(&program, &handles()).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
    // Without keys of its own, an op only needs heads that share evenly.
    let alone = Program::new(vec![Op::Attention(attention())]);
    let mut programs = Programs::default();
    programs.set_cache(&cache(2, 4, HEAD_DIM)).unwrap();
    programs.compile(&alone, &handles()).unwrap();
    let mut programs = Programs::default();
    programs.set_cache(&cache(2, 3, HEAD_DIM)).unwrap();
    assert!(programs.compile(&alone, &handles()).is_err());
}

#[test]
fn a_program_prints_itself() {
    let rows = Program::new(good()).rows(&handles());
    let cells = |row: &OpRow| [row.op.to_owned(), row.inputs.clone(), row.weight.clone(), row.output.clone()];
    assert_eq!(cells(&rows[0]), ["embed", "tokens", "w0 F32 10 x 8", "b0 [8]"]);
    assert_eq!(cells(&rows[1]), ["qkv", "b0 [8]", "w1 F32 32 x 8", "b1 [16]"]);
    assert_eq!(rows[1].details, "4 heads, of rms norm v0, bias v2, q rms norm v1, k rms norm v1, rope r0");
    assert_eq!((rows[2].kv_layer, rows[2].details.as_str()), (Some(1), "4 heads, plan 2, window 5"));
    assert_eq!(cells(&rows[3]), ["keep_logit_rows", "b2 [16], b0 [8]", "", ""]);
    assert_eq!(cells(&rows[4]), ["linear", "b2 [16]", "w2 F32 8 x 16", "+= b0 [8]"]);
    assert_eq!(cells(&rows[8]), ["sample", "b4 [10]", "", ""]);
}

/// Every edge goes from the last op that wrote a buffer.
#[test]
fn a_program_is_a_graph() {
    let dot = Program::new(good()).to_dot(&handles());
    let edges: Vec<&str> = dot.lines().filter(|line| line.contains("->")).map(str::trim).collect();
    assert_eq!(
        edges,
        [
            "op0 -> op1 [label=\"b0 [8]\"];",
            "op1 -> op2 [label=\"b1 [16]\"];",
            "op2 -> op3 [label=\"b2 [16]\"];",
            "op0 -> op3 [label=\"b0 [8]\"];",
            "op3 -> op4 [label=\"b2 [16]\"];",
            "op3 -> op4 [label=\"b0 [8]\"];",
            "op4 -> op5 [label=\"b0 [8]\"];",
            "op5 -> op6 [label=\"b3 [6]\"];",
            "op4 -> op6 [label=\"b0 [8]\"];",
            "op6 -> op7 [label=\"b0 [8]\"];",
            "op7 -> op8 [label=\"b4 [10]\"];",
        ]
    );
    assert!(dot.starts_with("digraph program {\n") && dot.ends_with("}\n"), "{dot}");
    assert!(dot.contains("op5 [label=\"5 gated_linear\\nw3 F32 12 x 8\\nsilu, of rms norm v0\"];"), "{dot}");
}
