//! The output of `baton bench kernels`: tables and JSON.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use crate::kernels::{KernelFigures, KernelsResult};
use crate::kernels_attention::AttentionFigures;
use crate::kernels_small::SmallFigures;

/// A figure, and its share of a limit that is known.
fn with_share(figure: f64, limit: Option<f64>, scale: f64) -> String {
    let digits = if scale < 1.0 && figure * scale < 10.0 { 2 } else { 1 };
    let shown = format!("{:.digits$}", figure * scale);
    match limit {
        Some(limit) => format!("{shown} ({:.0} %)", 100.0 * figure / limit.max(1e-9)),
        None => shown,
    }
}

/// A line for each case, with shares of the limits where these are known.
pub fn kernels_table(result: &KernelsResult) -> String {
    let (limits, sizes) = (&result.limits, result.sizes);
    let [(read, bytes_scale), (multiplied, scale)] = sizes.units();
    let mut text = String::new();
    for (limit, (unit, scale), what) in [
        (limits.memory_gb_per_s, (read, bytes_scale), "read from memory: the limit of decodes"),
        (limits.dot_gmac_per_s, (multiplied, scale), "of bytes: the limit of quantised weights"),
        (limits.fma_gmac_per_s, (multiplied, scale), "of f32: the limit of float weights and of attention"),
        (limits.bf16_gmac_per_s, (multiplied, scale), "of bf16 in tiles: twice the limit of bf16 weights"),
        (
            limits.tensor_gmac_per_s,
            (multiplied, scale),
            "of bf16 by the library, 8192 x 8192 x 8192: the limit of all products",
        ),
    ] {
        if let Some(limit) = limit {
            let _ = writeln!(text, "{:>8} {unit} {what}", with_share(limit, None, scale));
        }
    }
    let _ = write!(text, "\n{:<8} {:<18} {:>14}  {multiplied}:", "format", "shape", format!("decode {read}"));
    for rows in sizes.rows() {
        let _ = write!(text, " {:>14}", format!("M={rows}"));
    }
    text.push('\n');
    for one in &result.products {
        let decode = with_share(one.decode_gb_per_s, limits.memory_gb_per_s, bytes_scale);
        let indent = " ".repeat(multiplied.len() + 3);
        let _ = write!(text, "{:<8} {:<18} {decode:>14}{indent}", one.format.to_string(), one.shape);
        for &figure in &one.gmac_per_s {
            let _ = write!(text, " {:>14}", with_share(figure, limits.gmac_per_s(one.format), scale));
        }
        text.push('\n');
        if let Some(theirs) = &one.library_gmac_per_s {
            let _ = write!(text, "{:<8} {:<18} {:>14}{indent}", "", "times the library", "");
            for (ours, theirs) in one.gmac_per_s.iter().zip(theirs) {
                let _ = write!(text, " {:>14}", format!("{:.2} x", ours / theirs.max(1e-9)));
            }
            text.push('\n');
        }
    }
    if !result.attention.is_empty() {
        attention_table(result, &mut text);
    }
    if !result.small.is_empty() {
        small_table(result, &mut text);
    }
    text
}

fn attention_table(result: &KernelsResult, text: &mut String) {
    let limits = &result.limits;
    let [(read, bytes_scale), (multiplied, scale)] = result.sizes.units();
    let _ = writeln!(
        text,
        "\n{:<8} {:<10} {:>8} {:>8} {:>14} {:>10} {:>16}",
        "cache",
        "attention",
        "requests",
        "context",
        format!("decode {read}"),
        "us/layer",
        format!("prompt {multiplied}")
    );
    for one in &result.attention {
        let decode = with_share(one.decode_gb_per_s, limits.memory_gb_per_s, bytes_scale);
        let share = |figure| with_share(figure, limits.attention_gmac_per_s(), scale);
        let prompt = one.prompt_gmac_per_s.map(share).unwrap_or_default();
        let _ = writeln!(
            text,
            "{:<8} {:<10} {:>8} {:>8} {decode:>14} {:>10.1} {prompt:>16}",
            format!("{:?}", one.kv_dtype).to_lowercase(),
            one.heads,
            one.num_seqs,
            one.context,
            one.decode_us
        );
    }
}

fn small_table(result: &KernelsResult, text: &mut String) {
    let [(read, scale), _] = result.sizes.units();
    let _ = writeln!(text, "\n{:<22} {:<22} {:>10} {:>14}", "others", "size", "us", read);
    for one in &result.small {
        let limit = result.limits.memory_gb_per_s.filter(|_| one.is_memory);
        let rate = with_share(one.gb_per_s, limit, scale);
        let _ = writeln!(text, "{:<22} {:<22} {:>10.1} {rate:>14}", one.op, one.size, one.us);
    }
}

pub fn kernels_json(result: &KernelsResult) -> Map<String, Value> {
    let limits = &result.limits;
    let share = |figure: f64, limit: Option<f64>| limit.map(|limit| figure / limit);
    let one = |one: &KernelFigures| {
        let by_rows = |rates: &[f64], value: &dyn Fn(f64) -> Value| -> Map<String, Value> {
            let rows = result.sizes.rows().iter();
            rows.zip(rates).map(|(rows, &rate)| (rows.to_string(), value(rate))).collect()
        };
        let library = one.library_gmac_per_s.as_ref();
        let limit = limits.gmac_per_s(one.format);
        json!({
            "format": one.format.to_string(),
            "shape": one.shape,
            "decode_gb_per_s": one.decode_gb_per_s,
            "decode_share_of_memory": share(one.decode_gb_per_s, limits.memory_gb_per_s),
            "gmac_per_s": by_rows(&one.gmac_per_s, &|rate| json!(rate)),
            "share_of_peak": by_rows(&one.gmac_per_s, &|rate| json!(share(rate, limit))),
            "library_gmac_per_s": library.map(|rates| by_rows(rates, &|rate| json!(rate))),
        })
    };
    let attention = |one: &AttentionFigures| {
        json!({
            "kv_cache_dtype": one.kv_dtype,
            "heads": one.heads,
            "num_seqs": one.num_seqs,
            "context": one.context,
            "decode_gb_per_s": one.decode_gb_per_s,
            "decode_share_of_memory": share(one.decode_gb_per_s, limits.memory_gb_per_s),
            "decode_us_per_layer": one.decode_us,
            "prompt_gmac_per_s": one.prompt_gmac_per_s,
            "prompt_share_of_peak": one.prompt_gmac_per_s.and_then(|rate| share(rate, limits.attention_gmac_per_s())),
        })
    };
    let small = |one: &SmallFigures| {
        let limit = limits.memory_gb_per_s.filter(|_| one.is_memory);
        json!({
            "op": one.op,
            "size": one.size,
            "us": one.us,
            "gb_per_s": one.gb_per_s,
            "share_of_memory": share(one.gb_per_s, limit),
        })
    };
    let mut map = Map::new();
    map.insert("memory_gb_per_s".to_owned(), json!(limits.memory_gb_per_s));
    map.insert("dot_gmac_per_s".to_owned(), json!(limits.dot_gmac_per_s));
    map.insert("fma_gmac_per_s".to_owned(), json!(limits.fma_gmac_per_s));
    map.insert("bf16_gmac_per_s".to_owned(), json!(limits.bf16_gmac_per_s));
    map.insert("tensor_gmac_per_s".to_owned(), json!(limits.tensor_gmac_per_s));
    map.insert("kernels".to_owned(), result.products.iter().map(one).collect());
    map.insert("attention".to_owned(), result.attention.iter().map(attention).collect());
    map.insert("others".to_owned(), result.small.iter().map(small).collect());
    map
}
