//! Every golden model (`tests/data/golden`, made with PyTorch) in every way a serving engine may cut its work: whole prompts,
//! chunks, single tokens, mixed batches, shared prefixes, swapped blocks. The logits must not care.

mod harness;

use std::path::{Path, PathBuf};

use baton_backend::{Backend, KvDtype, ReferenceBackend};
use baton_cpu::{CpuBackend, CpuOptions, Isa};
use baton_model::{LoadFormat, ModelFiles};
use harness::{Harness, Options, Run, argmax, relay_plan};
use serde_json::Value;

/// Of the largest logit. Only the order of additions may differ from PyTorch: all backends stay below 1e-5, while a scale that
/// is off by a hundredth gives 1e-2 and a wrong epsilon 7e-4.
const TOLERANCE: f32 = 5e-5;
/// Where tiles of bf16 multiply: of activations they keep sixteen bits and more, which these small models make as much of as 1.1e-4.
const TILE_TOLERANCE: f32 = 3e-4;

struct Prompt {
    tokens: Vec<u32>,
    greedy: Vec<u32>,
    logits: Vec<Vec<f32>>,
}

struct Golden {
    prompts: Vec<Prompt>,
    max_model_len: usize,
}

impl Golden {
    fn read(folder: &Path) -> Self {
        let text = std::fs::read_to_string(folder.join("golden.json")).expect("golden.json");
        let json: Value = serde_json::from_str(&text).expect("golden.json is JSON");
        let bytes = std::fs::read(folder.join("logits.f32")).expect("logits.f32");
        let floats: Vec<f32> = bytes
            .chunks_exact(4)
            .map(|four| f32::from_le_bytes(four.try_into().expect("four bytes")))
            .collect();
        let tokens = |value: &Value| -> Vec<u32> {
            let ids = value.as_array().expect("token ids").iter();
            ids.map(|id| id.as_u64().expect("a token id") as u32).collect()
        };
        let prompts = json["prompts"].as_array().expect("prompts");
        let num_rows: usize = prompts.iter().map(|prompt| tokens(&prompt["token_ids"]).len()).sum();
        let mut rows = floats.chunks(floats.len() / num_rows).map(<[f32]>::to_vec);
        let prompts = prompts
            .iter()
            .map(|prompt| {
                let ids = tokens(&prompt["token_ids"]);
                let logits = rows.by_ref().take(ids.len()).collect();
                Prompt { tokens: ids, greedy: tokens(&prompt["greedy"]), logits }
            })
            .collect();
        let max_model_len = json["max_model_len"].as_u64().expect("max_model_len") as usize;
        Self { prompts, max_model_len }
    }

    /// The long one, which is longer than windows and original contexts.
    fn longest(&self) -> &Prompt {
        self.prompts.iter().max_by_key(|prompt| prompt.tokens.len()).expect("a prompt")
    }
}

/// One model on one backend, with the largest error so far.
struct Case {
    harness: Harness,
    block_size: usize,
    name: String,
    tolerance: f32,
    worst: f32,
}

impl Case {
    fn check(&mut self, what: &str, prompt: &Prompt, start: usize, rows: &[Vec<f32>]) {
        for (position, row) in (start..).zip(rows) {
            let expected = &prompt.logits[position];
            let largest = expected.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
            let error = row.iter().zip(expected).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
            // Not `max`, which would drop a NaN.
            let relative = error / largest;
            assert!(
                relative <= self.tolerance,
                "{}: {what}: position {position}: off by {relative} of the largest logit",
                self.name
            );
            self.worst = self.worst.max(relative);
        }
    }

    fn whole_prompts(&mut self, golden: &Golden) {
        for prompt in &golden.prompts {
            let pages = self.harness.take_pages(prompt.tokens.len());
            let rows = self.harness.step(&[Run { tokens: &prompt.tokens, start: 0, pages: &pages }]);
            self.check("whole prompt", prompt, 0, &rows);
            self.harness.give_pages(&pages);
        }
    }

    fn some_rows(&mut self, golden: &Golden) {
        for prompt in &golden.prompts {
            for every in [2, 3, prompt.tokens.len()] {
                let pages = self.harness.take_pages(prompt.tokens.len());
                let run = Run { tokens: &prompt.tokens, start: 0, pages: &pages };
                let rows = self.harness.some_rows(run, every);
                for (place, row) in rows.into_iter().rev().enumerate() {
                    let position = prompt.tokens.len() - 1 - place * every;
                    self.check(&format!("every {every}th row"), prompt, position, &[row]);
                }
                self.harness.give_pages(&pages);
            }
        }
    }

    fn two_chunks_at_every_split(&mut self, golden: &Golden) {
        let prompt = golden.longest();
        for split in 1..prompt.tokens.len() {
            let pages = self.harness.take_pages(prompt.tokens.len());
            let (first, second) = prompt.tokens.split_at(split);
            let rows = self.harness.step(&[Run { tokens: first, start: 0, pages: &pages }]);
            self.check("first chunk", prompt, 0, &rows);
            let rows = self.harness.step(&[Run { tokens: second, start: split, pages: &pages }]);
            self.check(&format!("second chunk from {split}"), prompt, split, &rows);
            self.harness.give_pages(&pages);
        }
    }

    fn token_by_token(&mut self, golden: &Golden) {
        let prompt = golden.longest();
        let pages = self.harness.take_pages(prompt.tokens.len());
        for (start, token) in prompt.tokens.iter().enumerate() {
            let rows = self.harness.step(&[Run { tokens: &[*token], start, pages: &pages }]);
            self.check("token by token", prompt, start, &rows);
        }
        self.harness.give_pages(&pages);
    }

    fn greedy(&mut self, golden: &Golden) {
        for prompt in &golden.prompts {
            let pages = self.harness.take_pages(golden.max_model_len);
            let rows = self.harness.step(&[Run { tokens: &prompt.tokens, start: 0, pages: &pages }]);
            let mut tokens = vec![argmax(rows.last().expect("a row"))];
            while tokens.len() < prompt.greedy.len() {
                let start = prompt.tokens.len() + tokens.len() - 1;
                let last = &tokens[tokens.len() - 1..];
                let rows = self.harness.step(&[Run { tokens: last, start, pages: &pages }]);
                tokens.push(argmax(&rows[0]));
            }
            assert_eq!(tokens, prompt.greedy, "{}: greedy continuation", self.name);
            self.harness.give_pages(&pages);
        }
    }

    /// All prompts at once, the longest twice, each advancing at its own pace: some decode while others are prefilled.
    fn mixed_batches(&mut self, golden: &Golden) {
        let mut prompts: Vec<&Prompt> = golden.prompts.iter().collect();
        prompts.insert(1, golden.longest());
        let paces = [[1, 1, 1], [17, 1, 3], [2, 1, 7], [1, 1, 30]];
        let pages: Vec<_> =
            prompts.iter().map(|prompt| self.harness.take_pages(prompt.tokens.len())).collect();
        let mut done = vec![0; prompts.len()];
        for step in 0.. {
            let mut runs = Vec::new();
            let mut who = Vec::new();
            for (i, prompt) in prompts.iter().enumerate() {
                let end = prompt.tokens.len().min(done[i] + paces[i][step % 3]);
                if done[i] < end {
                    let tokens = &prompt.tokens[done[i]..end];
                    runs.push(Run { tokens, start: done[i], pages: &pages[i] });
                    who.push(i);
                }
            }
            if runs.is_empty() {
                break;
            }
            let rows = self.harness.step(&runs);
            let mut first = 0;
            for (run, i) in runs.iter().zip(who) {
                let rows = &rows[first..first + run.tokens.len()];
                self.check("mixed batch", prompts[i], run.start, rows);
                first += run.tokens.len();
                done[i] += run.tokens.len();
            }
        }
        for pages in &pages {
            self.harness.give_pages(pages);
        }
    }

    /// A second sequence starts from blocks that the first one filled, and copies the block that it shares in part.
    fn shared_prefix(&mut self, golden: &Golden) {
        let prompt = golden.longest();
        let length = prompt.tokens.len();
        let first = self.harness.take_pages(length);
        self.harness.step(&[Run { tokens: &prompt.tokens, start: 0, pages: &first }]);
        let block_size = self.block_size;
        for shared in [block_size, 2 * block_size, 4 * block_size + 3] {
            let whole = shared / block_size;
            let own = self.harness.take_pages(length - whole * block_size);
            if !shared.is_multiple_of(block_size) {
                self.harness.copy(&[(first[whole], own[0])]);
            }
            let pages = [&first[..whole], &own].concat();
            let tokens = &prompt.tokens[shared..];
            let rows = self.harness.step(&[Run { tokens, start: shared, pages: &pages }]);
            self.check(&format!("prefix of {shared}"), prompt, shared, &rows);
            self.harness.give_pages(&own);
        }
        self.harness.give_pages(&first);
    }

    /// Sequences that share a prefix decode together, its keys read once for all of them.
    fn relay(&mut self, golden: &Golden) {
        let prompt = golden.longest();
        let block_size = self.block_size as u32;
        let shared_len = 3 * self.block_size;
        let first = self.harness.take_pages(prompt.tokens.len());
        self.harness.step(&[Run { tokens: &prompt.tokens, start: 0, pages: &first }]);
        // Decodes at different positions; each computes its last token again.
        let positions = [shared_len, shared_len + 5, shared_len + 1, 69];
        let runs: Vec<_> = positions
            .iter()
            .map(|&start| Run { tokens: &prompt.tokens[start..=start], start, pages: &first })
            .collect();
        let as_u32 = positions.map(|position| position as u32);
        let rows = self.harness.step_with(&runs, |window, plan| {
            if window.is_none() {
                relay_plan(plan, &as_u32, shared_len as u32, block_size);
            }
        });
        for (&position, row) in positions.iter().zip(&rows) {
            self.check("relay", prompt, position, std::slice::from_ref(row));
        }
        self.harness.give_pages(&first);
    }

    /// Half a prompt leaves for the host, another sequence takes its blocks, and it comes back to other ones.
    fn swapped(&mut self, golden: &Golden) {
        let prompt = golden.longest();
        let half = 37;
        let (first, second) = prompt.tokens.split_at(half);
        let old = self.harness.take_pages(half);
        self.harness.step(&[Run { tokens: first, start: 0, pages: &old }]);

        let host: Vec<u32> = (0..old.len() as u32).map(|page| 3 * page + 1).collect();
        let out: Vec<_> = old.iter().copied().zip(host.iter().copied()).collect();
        self.harness.swap_out(&out);
        let other: Vec<u32> = first.iter().rev().copied().collect();
        self.harness.step(&[Run { tokens: &other, start: 0, pages: &old }]);

        let new = self.harness.take_pages(prompt.tokens.len());
        let back: Vec<_> = host.into_iter().zip(new.iter().copied()).collect();
        self.harness.swap_in(&back);
        let rows = self.harness.step(&[Run { tokens: second, start: half, pages: &new }]);
        self.check("swapped", prompt, half, &rows);
        self.harness.give_pages(&old);
        self.harness.give_pages(&new);
    }
}

/// The backends to test, by name and with what they may be off by; the best one on the CPU with `num_threads`.
fn backends(num_threads: usize) -> Vec<(String, f32, Box<dyn Backend>)> {
    let reference: Box<dyn Backend> = Box::new(ReferenceBackend::new());
    let mut backends = vec![("reference".to_owned(), TOLERANCE, reference)];
    let available = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    // More threads than one only once: they wait by spinning, which is slow where tests share the cores.
    let cpus = available.map(|isa| (isa, if isa == Isa::best() { num_threads } else { 1 }));
    for (isa, threads) in cpus {
        let options = CpuOptions { threads: Some(threads), isa: Some(isa), ..CpuOptions::default() };
        let cpu = CpuBackend::new(options).expect("the CPU is a CPU");
        let tolerance = if isa >= Isa::AmxBf16 { TILE_TOLERANCE } else { TOLERANCE };
        backends.push((format!("cpu {isa} with {threads} threads"), tolerance, Box::new(cpu)));
    }
    backends
}

/// `model` is a folder, or a file in it, under `tests/data/golden`.
fn check_model(model: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden").join(model);
    let folder: PathBuf =
        if path.is_dir() { path.clone() } else { path.parent().expect("a folder").to_owned() };
    let golden = Golden::read(&folder);
    // Once with everything in one item, once with long contexts and long runs split over many.
    for splits in [false, true] {
        for (name, tolerance, backend) in backends(if splits { 2 } else { 1 }) {
            // The reference takes any size: a small one has more seams.
            let block_size = if name == "reference" { 8 } else { backend.device().block_size };
            let options = Options {
                max_model_len: golden.max_model_len,
                max_tokens: 128,
                block_size,
                num_pages: 64,
                kv_dtype: KvDtype::F32,
                max_kv_per_item: if splits { 2 * block_size as u32 } else { 0 },
                max_queries_per_item: if splits { 5 } else { 0 },
            };
            let harness = Harness::open(backend, &path, options);
            let name = format!("{model} on {name}, {} items", if splits { "split" } else { "whole" });
            let mut case = Case { harness, block_size, name, tolerance, worst: 0.0 };
            case.whole_prompts(&golden);
            case.greedy(&golden);
            // The same weights by other names are the same program, which the checkpoint beside has gone through.
            if !path.is_dir() && splits {
                continue;
            }
            case.some_rows(&golden);
            case.token_by_token(&golden);
            case.mixed_batches(&golden);
            case.shared_prefix(&golden);
            case.swapped(&golden);
            if !splits {
                case.relay(&golden);
                case.two_chunks_at_every_split(&golden);
            }
            println!("{}: largest error {:.1e} of the largest logit", case.name, case.worst);
        }
    }
}

macro_rules! golden_models {
    ($($test:ident: $model:literal,)*) => {
        $(#[test] fn $test() { check_model($model); })*

        /// Kernels of a GPU read eight columns at once: a model with other sizes would not be checked there.
        #[test]
        fn every_golden_model_fits_a_gpu() {
            for model in [$($model),*] {
                let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden").join(model);
                let files = ModelFiles::open(&path, LoadFormat::Auto).expect("the model opens");
                let config = files.config();
                let inner = config.experts.as_ref().map_or(8, |experts| experts.intermediate_size);
                let attended = config.num_heads * config.head_dim;
                for width in [config.hidden_size, config.intermediate_size, attended, inner] {
                    assert!(width.is_multiple_of(8), "{model}: {width} columns");
                }
            }
        }

        #[test]
        fn every_golden_model_is_tested() {
            let tested = [$($model),*];
            let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden");
            for entry in std::fs::read_dir(data).expect("tests/data/golden") {
                let folder = entry.expect("an entry").path();
                let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
                if folder.join("golden.json").exists() {
                    assert!(tested.contains(&name.as_str()), "{name} is not tested");
                }
                if folder.join("model.gguf").exists() && !folder.join("encoder.json").exists() {
                    assert!(tested.contains(&format!("{name}/model.gguf").as_str()), "{name} is not tested");
                }
            }
        }
    };
}

golden_models! {
    llama: "llama",
    llama_gguf: "llama/model.gguf",
    llama_bias: "llama-bias",
    llama_linear: "llama-linear",
    llama_dynamic: "llama-dynamic",
    llama3: "llama3",
    llama3_gguf: "llama3/model.gguf",
    llama_yarn: "llama-yarn",
    llama_yarn_mscale: "llama-yarn-mscale",
    mistral: "mistral",
    qwen2: "qwen2",
    qwen2_gguf: "qwen2/model.gguf",
    qwen2_window: "qwen2-window",
    qwen3: "qwen3",
    qwen3_gguf: "qwen3/model.gguf",
    gemma3: "gemma3",
    gemma3_gguf: "gemma3/model.gguf",
    gemma3_softcap: "gemma3-softcap",
    gpt2: "gpt2",
    gpt2_gguf: "gpt2/model.gguf",
    deepseek_v2_lite: "deepseek-v2-lite",
    deepseek_v2_lite_gguf: "deepseek-v2-lite/model.gguf",
    deepseek_v2: "deepseek-v2",
    deepseek_v2_gguf: "deepseek-v2/model.gguf",
    deepseek_v3: "deepseek-v3",
    deepseek_v3_gguf: "deepseek-v3/model.gguf",
    granite_moe: "granite-moe",
    granite_moe_gguf: "granite-moe/model.gguf",
    gpt_oss: "gpt-oss",
    gpt_oss_gguf: "gpt-oss/model.gguf",
    olmoe: "olmoe",
    olmoe_gguf: "olmoe/model.gguf",
    mixtral: "mixtral",
    mixtral_gguf: "mixtral/model.gguf",
    qwen2_moe: "qwen2-moe",
    qwen2_moe_plain: "qwen2-moe-plain",
    qwen2_moe_plain_gguf: "qwen2-moe-plain/model.gguf",
    qwen3_moe: "qwen3-moe",
    qwen3_moe_gguf: "qwen3-moe/model.gguf",
    opt: "opt",
    gpt_neox: "gpt-neox",
    gpt_neox_gguf: "gpt-neox/model.gguf",
    bloom: "bloom",
    bloom_gguf: "bloom/model.gguf",
    mpt: "mpt",
    mpt_gguf: "mpt/model.gguf",
    falcon: "falcon",
    falcon_gguf: "falcon/model.gguf",
    falcon_new: "falcon-new",
    falcon_new_gguf: "falcon-new/model.gguf",
    falcon_alibi: "falcon-alibi",
    phi: "phi",
    phi_gguf: "phi/model.gguf",
    phi3: "phi3",
    phi3_gguf: "phi3/model.gguf",
    phi3_longrope: "phi3-longrope",
    starcoder2: "starcoder2",
    starcoder2_gguf: "starcoder2/model.gguf",
    cohere: "cohere",
    cohere_gguf: "cohere/model.gguf",
    cohere_plus: "cohere-plus",
    cohere_plus_gguf: "cohere-plus/model.gguf",
    cohere2: "cohere2",
    cohere2_gguf: "cohere2/model.gguf",
    olmo2: "olmo2",
    olmo2_gguf: "olmo2/model.gguf",
    granite: "granite",
    granite_gguf: "granite/model.gguf",
    gemma: "gemma",
    gemma_gguf: "gemma/model.gguf",
    gemma2: "gemma2",
    gemma2_gguf: "gemma2/model.gguf",
    smollm3: "smollm3",
    smollm3_gguf: "smollm3/model.gguf",
    glm: "glm",
    glm_gguf: "glm/model.gguf",
    glm4: "glm4",
    glm4_gguf: "glm4/model.gguf",
    internlm2: "internlm2",
    internlm2_gguf: "internlm2/model.gguf",
    baichuan: "baichuan",
    baichuan_gguf: "baichuan/model.gguf",
    baichuan_alibi: "baichuan-alibi",
    stablelm: "stablelm",
    stablelm_gguf: "stablelm/model.gguf",
    gptj: "gptj",
    gpt_bigcode: "gpt-bigcode",
    gpt_bigcode_gguf: "gpt-bigcode/model.gguf",
    nemotron: "nemotron",
    nemotron_gguf: "nemotron/model.gguf",
    arcee: "arcee",
    arcee_gguf: "arcee/model.gguf",
    seed_oss: "seed-oss",
    seed_oss_gguf: "seed-oss/model.gguf",
    ernie45: "ernie45",
    ernie45_gguf: "ernie45/model.gguf",
    exaone: "exaone",
    exaone_gguf: "exaone/model.gguf",
    exaone4: "exaone4",
    exaone4_gguf: "exaone4/model.gguf",
}
