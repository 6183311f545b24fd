//! The page `docs/models.md`, written from the tables: what is supported, under which names, and what is checked.

use std::fmt::Write;

use super::{FAMILIES, Family};

/// One row of the page.
struct Row {
    models: &'static str,
    classes: Vec<&'static str>,
    gguf: Vec<&'static str>,
    golden: Vec<&'static str>,
}

/// What `config` reads by itself: models, classes, GGUF, golden models.
type OwnRow = (&'static str, &'static [&'static str], &'static [&'static str], &'static [&'static str]);

const OWN: &[OwnRow] = &[
    (
        "Llama 1 to 3.3, Yi, SmolLM2, TinyLlama, Vicuna, Falcon 3 and all else that says llama",
        &["LlamaForCausalLM"],
        &["llama"],
        &[
            "llama",
            "llama-bias",
            "llama-linear",
            "llama-dynamic",
            "llama3",
            "llama-yarn",
            "llama-yarn-mscale",
        ],
    ),
    ("Mistral 7B, Nemo, Small; Ministral", &["MistralForCausalLM"], &["llama"], &["mistral"]),
    ("Qwen2, Qwen2.5, QwQ", &["Qwen2ForCausalLM"], &["qwen2"], &["qwen2", "qwen2-window"]),
    ("Qwen3", &["Qwen3ForCausalLM"], &["qwen3"], &["qwen3"]),
    (
        "Gemma 3 (text)",
        &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
        &["gemma3"],
        &["gemma3", "gemma3-softcap"],
    ),
    ("Mixtral 8x7B, 8x22B", &["MixtralForCausalLM"], &["llama"], &["mixtral"]),
    (
        "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        &["Qwen2MoeForCausalLM"],
        &["qwen2moe"],
        &["qwen2-moe", "qwen2-moe-plain"],
    ),
    ("Qwen3-30B-A3B, Qwen3-235B-A22B", &["Qwen3MoeForCausalLM"], &["qwen3moe"], &["qwen3-moe"]),
    (
        "DeepSeek-V2, V2-Lite, Coder-V2",
        &["DeepseekV2ForCausalLM"],
        &["deepseek2"],
        &["deepseek-v2-lite", "deepseek-v2"],
    ),
    ("DeepSeek-V3, V3.1, R1", &["DeepseekV3ForCausalLM"], &["deepseek2"], &["deepseek-v3"]),
    ("GPT-2", &["GPT2LMHeadModel"], &["gpt2"], &["gpt2"]),
];

const HEAD: &str = "# Supported models

This page is written by `cargo run -p baton-model --example models-page > docs/models.md`; a test of that crate checks
that it is current.

A checkpoint is a directory with `config.json` and `*.safetensors`, or a GGUF file. *Golden* names tiny random models under
`crates/model/tests/data/golden`: their logits and greedy tokens are compared with those of transformers in f32, on every backend,
with prompts whole, in chunks and token by token, in mixed batches, from cached prefixes, swapped out and back, and with shared
prefixes read once; *(GGUF)* where the same model is read from a GGUF file as well. What a `config.json` asks for and no program here
does is refused with an error that names the key.
";

/// The page, with golden models that `has_gguf` knows a GGUF file of marked.
pub fn models_page(has_gguf: impl Fn(&str) -> bool) -> String {
    let mut page = HEAD.to_owned();
    page.push_str("\n## Decoders\n\n| Models | Class | GGUF | Golden |\n|---|---|---|---|\n");
    let own = OWN.iter().map(|(models, classes, gguf, golden)| Row {
        models,
        classes: classes.to_vec(),
        gguf: gguf.to_vec(),
        golden: golden.to_vec(),
    });
    let decoders = FAMILIES.iter().filter(|family| !family.is_encoder()).map(|family| row(family));
    own.chain(decoders).for_each(|row| row.write(&mut page, &has_gguf));
    page.push_str(ENCODERS);
    let encoders = FAMILIES.iter().filter(|family| family.is_encoder()).map(|family| row(family));
    encoders.for_each(|row| row.write(&mut page, &has_gguf));
    page
}

const ENCODERS: &str = "
## Encoders

Served by `baton serve`: `/v1/embeddings` for those that embed, `/v1/rerank` and `/v1/score` for all of them. Pooling (mean, first or
last token) and normalisation come from `modules.json` and its folders, as sentence-transformers has them.

| Models | Class | GGUF | Golden |
|---|---|---|---|
";

fn row(family: &Family) -> Row {
    let is_class = |class: &&str| {
        class.starts_with(char::is_uppercase) && class.contains("For") || class.ends_with("Model")
    };
    Row {
        models: family.examples,
        classes: family.classes.iter().copied().filter(is_class).collect(),
        gguf: family.gguf.to_vec(),
        golden: family.golden.to_vec(),
    }
}

impl Row {
    fn write(&self, page: &mut String, has_gguf: &impl Fn(&str) -> bool) {
        let code = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
            if names.is_empty() { "–".to_owned() } else { names.join(", ") }
        };
        let mark = |name: &&str| format!("`{name}`{}", if has_gguf(name) { " (GGUF)" } else { "" });
        let golden: Vec<String> = self.golden.iter().map(mark).collect();
        let (classes, gguf) = (code(&self.classes), code(&self.gguf));
        writeln!(page, "| {} | {classes} | {gguf} | {} |", self.models, golden.join(", "))
            .expect("a string grows");
    }
}
