//! A program for people: as rows of a table, or as a graph for Graphviz.
//!
//! Handles are printed by their letter and number (`b0` a buffer, `w3` a weight, `v1` a vector, `r0` a rotary table), with the
//! shapes that the device knows of them.

use std::fmt::Write;

use serde::Serialize;

use super::{Handles, Op, Program};
use crate::{BufferId, Norm, NormKind, NormSpan, Qkv, Route, VectorId, WeightId, WeightUse};

/// One op as a row of a table. Cells that do not apply are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OpRow {
    pub number: usize,
    pub op: &'static str,
    /// Buffers, with their columns.
    pub inputs: String,
    /// Format and shape.
    pub weight: String,
    pub output: String,
    pub kv_layer: Option<usize>,
    /// Norms, biases, heads, windows and the like.
    pub details: String,
}

impl Program {
    /// What each op reads, multiplies with and writes. The program was compiled against these handles.
    pub fn rows(&self, handles: &Handles) -> Vec<OpRow> {
        self.ops.iter().enumerate().map(|(number, op)| row(number, op, handles)).collect()
    }

    /// In the language of Graphviz: ops as boxes, an edge from the op that wrote a buffer to each that reads it.
    pub fn to_dot(&self, handles: &Handles) -> String {
        let mut dot = "digraph program {\n  node [shape=box, fontname=\"monospace\"];\n".to_owned();
        let mut writers: Vec<(BufferId, usize)> = Vec::new();
        for (row, op) in self.rows(handles).iter().zip(&self.ops) {
            let lines = [format!("{} {}", row.number, row.op), row.weight.clone(), row.details.clone()];
            let label: Vec<_> = lines.into_iter().filter(|line| !line.is_empty()).collect();
            writeln!(dot, "  op{} [label=\"{}\"];", row.number, label.join("\\n")).expect("a string grows");
            let adds_to = op.writes().filter(|_| op.accumulates());
            for buffer in op.reads().into_iter().chain(adds_to) {
                if let Some((_, writer)) = writers.iter().rev().find(|(written, _)| *written == buffer) {
                    let name = buffer_text(buffer, handles);
                    writeln!(dot, "  op{writer} -> op{} [label=\"{name}\"];", row.number)
                        .expect("a string grows");
                }
            }
            let moved = if let Op::KeepLogitRows(op) = op { op.buffers.as_slice() } else { &[] };
            writers.extend(op.writes().iter().chain(moved).map(|&buffer| (buffer, row.number)));
        }
        dot.push_str("}\n");
        dot
    }
}

fn row(number: usize, op: &Op, handles: &Handles) -> OpRow {
    let inputs: Vec<_> = op.reads().iter().map(|&buffer| buffer_text(buffer, handles)).collect();
    let output = op.writes().map_or_else(String::new, |buffer| buffer_text(buffer, handles));
    let weight = op.weight().map_or_else(String::new, |weight| weight_text(weight, handles));
    let (kv_layer, details) = match op {
        Op::Qkv(op) => (Some(op.layer), format!("{} heads", op.num_heads)),
        Op::LatentKv(op) => (Some(op.layer), format!("{} heads", op.num_heads)),
        Op::Attention(op) => {
            let window = op.window.map_or_else(String::new, |window| format!(", window {window}"));
            (Some(op.layer), format!("{} heads, plan {}{window}", op.num_heads, op.plan))
        }
        Op::EncoderAttention(op) => (None, format!("{} heads, both directions", op.num_heads)),
        Op::ActivatedLinear(op) => (None, format!("{:?}", op.activation).to_lowercase()),
        Op::GatedLinear(op) => (None, format!("{:?}", op.activation).to_lowercase()),
        Op::Route(op) => (None, route_text(op)),
        Op::ExpertGated(op) => (None, format!("{:?}", op.activation).to_lowercase()),
        _ => (None, String::new()),
    };
    OpRow {
        number,
        op: op.name(),
        inputs: match op {
            Op::Embed(_) => "tokens".to_owned(),
            Op::AddPositions(_) => "positions".to_owned(),
            _ => inputs.join(", "),
        },
        weight,
        output: format!("{}{output}", if op.accumulates() { "+= " } else { "" }),
        kv_layer,
        details: join([details, extras(op)]),
    }
}

/// What many ops may have besides.
fn extras(op: &Op) -> String {
    let softcap = |cap: Option<f32>| cap.map_or_else(String::new, |cap| format!("softcap {cap}"));
    match op {
        Op::Embed(op) if op.scale != 1.0 => format!("times {}", op.scale),
        Op::Norm(op) => norm_text("", Some(&op.norm)),
        Op::Linear(op) => join([norm_text("of ", op.norm.as_ref()), bias_text(op.bias)]),
        Op::ActivatedLinear(op) => join([norm_text("of ", op.norm.as_ref()), bias_text(op.bias)]),
        Op::GatedLinear(op) => join([norm_text("of ", op.norm.as_ref()), bias_text(op.bias)]),
        Op::Route(op) => join([norm_text("of ", op.norm.as_ref()), bias_text(op.bias)]),
        Op::ExpertGated(op) => join([norm_text("of ", op.norm.as_ref()), bias_text(op.bias)]),
        Op::ExpertLinear(op) => bias_text(op.bias),
        Op::Qkv(op) => join([
            norm_text("of ", op.norm.as_ref()),
            bias_text(op.bias),
            norm_text("q ", op.q_norm.as_ref()),
            norm_text("k ", op.k_norm.as_ref()),
            span_text(op),
            op.rope.map_or_else(String::new, |rope| format!("rope r{}", rope.0)),
        ]),
        Op::EncoderAttention(op) => op.rope.map_or_else(String::new, |rope| format!("rope r{}", rope.0)),
        Op::Attention(op) => {
            let alibi = op.alibi.map_or_else(String::new, |slopes| format!("alibi v{}", slopes.0));
            let sinks = op.sinks.map_or_else(String::new, |sinks| format!("sinks v{}", sinks.0));
            join([softcap(op.softcap), alibi, sinks])
        }
        Op::LatentKv(op) => join([norm_text("of ", Some(&op.norm)), format!("rope r{}", op.rope.0)]),
        Op::Logits(op) => join([norm_text("of ", op.norm.as_ref()), bias_text(op.bias), softcap(op.softcap)]),
        _ => String::new(),
    }
}

/// `8 of 128 by softmax, normalised, 1 shared`
fn route_text(op: &Route) -> String {
    let groups = op.groups.map(|groups| format!("{} of {} groups", groups.chosen, groups.count));
    let shared = (op.num_shared > 0).then(|| format!("{} shared", op.num_shared));
    let scores = format!("{:?}", op.scores).to_lowercase();
    join([
        format!("top {} by {scores}", op.top_k),
        groups.unwrap_or_default(),
        if op.normalizes { "normalised".to_owned() } else { String::new() },
        if op.scale == 1.0 { String::new() } else { format!("times {}", op.scale) },
        shared.unwrap_or_default(),
    ])
}

fn join<const N: usize>(parts: [String; N]) -> String {
    let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    parts.join(", ")
}

fn norm_text(of: &str, norm: Option<&Norm>) -> String {
    norm.map_or_else(String::new, |norm| match norm.kind {
        NormKind::Rms => format!("{of}rms norm v{}", norm.weight.0),
        NormKind::Layer { bias: None } => format!("{of}layer norm v{}", norm.weight.0),
        NormKind::Layer { bias: Some(bias) } => format!("{of}layer norm v{} + v{}", norm.weight.0, bias.0),
    })
}

fn span_text(op: &Qkv) -> String {
    let span = match op.norm_span {
        _ if op.q_norm.is_none() && op.k_norm.is_none() => "",
        NormSpan::Head => "",
        NormSpan::EachHead => "norms with a weight for each head",
        NormSpan::Row => "norms over all heads",
    };
    span.to_owned()
}

fn bias_text(bias: Option<VectorId>) -> String {
    bias.map_or_else(String::new, |bias| format!("bias v{}", bias.0))
}

/// `b0 [576]`
fn buffer_text(id: BufferId, handles: &Handles) -> String {
    let cols = handles.buffer(id).map_or_else(|| "?".to_owned(), |buffer| buffer.cols.to_string());
    format!("b{} [{cols}]", id.0)
}

/// `w1 Q4_K+Q6_K 960 x 576`
fn weight_text(id: WeightId, handles: &Handles) -> String {
    let Some(weight) = handles.weight(id) else { return format!("w{} ?", id.0) };
    let mut formats: Vec<String> = Vec::new();
    for part in &weight.parts {
        let format = part.format.to_string();
        if !formats.contains(&format) {
            formats.push(format);
        }
    }
    let experts = match weight.usage {
        WeightUse::Experts(count) => format!("{count} x "),
        _ => String::new(),
    };
    let rows =
        if let WeightUse::Experts(count) = weight.usage { weight.rows / count.max(1) } else { weight.rows };
    format!("w{} {} {experts}{rows} x {}", id.0, formats.join("+"), weight.cols)
}
