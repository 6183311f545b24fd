//! The golden models of `crates/model` (made with PyTorch in f32) on the device, whose activations are bf16, and in full precision.

use std::path::Path;

use baton_backend::conformance::compare;
use baton_backend::{KvDtype, Precision};
use baton_model::{LoadFormat, ModelFiles};
use serde_json::Value;

use crate::harness::{Harness, Options, Run, argmax, relay_plan};
use crate::{Report, open};

const BLOCK_SIZE: usize = 16;

/// Of the largest logit. Transformers' own bf16 is off by up to 0.06 on these models (qwen3), which are small and wild.
fn tolerance(precision: Precision) -> f32 {
    match precision {
        Precision::Fast => 6e-2,
        Precision::Full => 1e-4,
    }
}

struct Prompt {
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
}

fn read(folder: &Path) -> (Vec<Prompt>, usize, Option<f32>) {
    let text = std::fs::read_to_string(folder.join("golden.json")).expect("golden.json");
    let json: Value = serde_json::from_str(&text).expect("golden.json is JSON");
    let bytes = std::fs::read(folder.join("logits.f32")).expect("logits.f32");
    let floats: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect();
    let tokens = |value: &Value| -> Vec<u32> {
        value.as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
    };
    let prompts: Vec<Vec<u32>> = json["prompts"]
        .as_array()
        .expect("prompts")
        .iter()
        .map(|prompt| tokens(&prompt["token_ids"]))
        .collect();
    let num_rows: usize = prompts.iter().map(Vec::len).sum();
    let mut rows = floats.chunks(floats.len() / num_rows).map(<[f32]>::to_vec);
    let with_logits =
        |tokens: Vec<u32>| Prompt { logits: rows.by_ref().take(tokens.len()).collect(), tokens };
    (
        prompts.into_iter().map(with_logits).collect(),
        json["max_model_len"].as_u64().expect("a length") as usize,
        json["full_tolerance"].as_f64().map(|tolerance| tolerance as f32),
    )
}

pub fn check(root: &Path, report: &mut Report) {
    let mut folders: Vec<_> = std::fs::read_dir(root)
        .expect("the folder of golden models")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.join("golden.json").exists())
        .collect();
    folders.sort();
    for folder in folders {
        for kv_dtype in [KvDtype::BF16, KvDtype::F16, KvDtype::F32] {
            for split in [0, 32] {
                check_model(&folder, &folder, (Precision::Fast, kv_dtype), split, report);
            }
        }
        check_model(&folder, &folder, (Precision::Full, KvDtype::F32), 0, report);
        let gguf = folder.join("model.gguf");
        if gguf.exists() {
            check_model(&folder, &gguf, (Precision::Fast, KvDtype::BF16), 0, report);
        }
    }
}

fn check_model(
    folder: &Path,
    model: &Path,
    (precision, kv_dtype): (Precision, KvDtype),
    split: u32,
    report: &mut Report,
) {
    let (prompts, max_model_len, full_tolerance) = read(folder);
    let options = Options {
        max_model_len,
        max_tokens: 256,
        block_size: BLOCK_SIZE,
        num_pages: 64,
        kv_dtype,
        max_kv_per_item: split,
        max_queries_per_item: if split > 0 { 5 } else { 0 },
    };
    let mut harness = {
        let files = ModelFiles::open(model, LoadFormat::Auto).expect("the model opens");
        let weights = files.weights().expect("the model has weights");
        Harness::new(Box::new(open(precision)), files.config().clone(), &*weights, options)
    };
    let longest = prompts.iter().max_by_key(|prompt| prompt.tokens.len()).expect("a prompt");
    let mut got = Vec::new();
    let mut expected: Vec<&[f32]> = Vec::new();
    let mut keep = |rows: Vec<Vec<f32>>, prompt: &'_ Prompt, start: usize, expected: &mut Vec<Vec<f32>>| {
        expected.extend(prompt.logits[start..start + rows.len()].iter().cloned());
        got.extend(rows);
    };
    let mut wanted = Vec::new();
    for prompt in &prompts {
        let pages = harness.take_pages(prompt.tokens.len());
        let rows = harness.step(&[Run { tokens: &prompt.tokens, start: 0, pages: &pages }]);
        keep(rows, prompt, 0, &mut wanted);
        harness.give_pages(&pages);
    }
    // Only every third row's logits: the others go no further than the last layer's keys and values.
    for prompt in &prompts {
        let pages = harness.take_pages(prompt.tokens.len());
        let rows = harness.some_rows(Run { tokens: &prompt.tokens, start: 0, pages: &pages }, 3);
        for (place, row) in rows.into_iter().rev().enumerate() {
            keep(vec![row], prompt, prompt.tokens.len() - 1 - 3 * place, &mut wanted);
        }
        harness.give_pages(&pages);
    }
    // Token by token, all sequences at once: decodes, which are recorded and replayed.
    let shortest = prompts.iter().map(|prompt| prompt.tokens.len()).min().expect("a prompt");
    let pages: Vec<_> = prompts.iter().map(|_| harness.take_pages(longest.tokens.len())).collect();
    for start in 0..longest.tokens.len() {
        let together = if start < shortest { prompts.as_slice() } else { std::slice::from_ref(longest) };
        let own = |prompt: &Prompt| prompts.iter().position(|other| std::ptr::eq(other, prompt));
        let place = |prompt: &Prompt| {
            own(prompt)
                .unwrap_or_else(|| prompts.iter().position(|p| p.tokens == prompt.tokens).expect("a prompt"))
        };
        let runs: Vec<_> = together
            .iter()
            .map(|prompt| Run { tokens: &prompt.tokens[start..=start], start, pages: &pages[place(prompt)] })
            .collect();
        let rows = harness.step(&runs);
        for (row, prompt) in rows.into_iter().zip(together) {
            keep(vec![row], prompt, start, &mut wanted);
        }
    }
    // Swapped out after half the prompt, and back to other blocks.
    let half = longest.tokens.len() / 2;
    let old = harness.take_pages(half);
    harness.step(&[Run { tokens: &longest.tokens[..half], start: 0, pages: &old }]);
    let host: Vec<u32> = (0..old.len() as u32).map(|page| 3 * page + 1).collect();
    harness.swap_out(&old.iter().copied().zip(host.iter().copied()).collect::<Vec<_>>());
    let other: Vec<u32> = longest.tokens[..half].iter().rev().copied().collect();
    harness.step(&[Run { tokens: &other, start: 0, pages: &old }]);
    let new = harness.take_pages(longest.tokens.len());
    harness.swap_in(&host.into_iter().zip(new.iter().copied()).collect::<Vec<_>>());
    let rows = harness.step(&[Run { tokens: &longest.tokens[half..], start: half, pages: &new }]);
    keep(rows, longest, half, &mut wanted);
    // Relay: the keys of a shared prefix read once for several queries.
    let shared = 2 * BLOCK_SIZE;
    if longest.tokens.len() > shared + 8 {
        let positions = [shared, shared + 5, shared + 1, shared + 7];
        let runs: Vec<_> = positions
            .iter()
            .map(|&start| Run { tokens: &longest.tokens[start..=start], start, pages: &new })
            .collect();
        let rows = harness.step_with(&runs, |window, plan| {
            if window.is_none() && split == 0 {
                relay_plan(
                    plan,
                    &positions.map(|position| position as u32),
                    shared as u32,
                    BLOCK_SIZE as u32,
                );
            }
        });
        for (row, position) in rows.into_iter().zip(positions) {
            keep(vec![row], longest, position, &mut wanted);
        }
    }
    expected.extend(wanted.iter().map(Vec::as_slice));
    let same = expected.iter().zip(&got).filter(|(a, b)| argmax(a) == argmax(b)).count();
    let name = format!(
        "{} {precision:?} {kv_dtype:?} split {split} ({same} of {} best tokens the same)",
        model.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned()),
        expected.len()
    );
    let allowed = full_tolerance.filter(|_| precision == Precision::Full).unwrap_or(tolerance(precision));
    report.line(&name, &compare(&expected.concat(), &got.concat(), allowed));
}
