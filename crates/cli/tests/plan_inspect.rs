//! `baton plan` and `baton inspect` on configurations of well-known models, whose numbers are public.

mod common;
#[allow(dead_code, reason = "shared with the tests of the model crate")]
#[path = "../../model/tests/support/gguf_writer.rs"]
mod gguf_writer;

use common::{Baton, data, model_arg};
use serde_json::json;

#[test]
fn kv_of_a_token_is_what_the_shape_says() {
    let baton = Baton::new();
    // layers × 2 × KV heads × head size × bytes
    for (model, dtype, expect) in [
        ("llama-2-7b", "f16", 32 * 2 * 32 * 128 * 2),
        ("llama-3.1-8b", "f16", 32 * 2 * 8 * 128 * 2),
        ("llama-3.1-8b", "f32", 32 * 2 * 8 * 128 * 4),
        ("llama-3.2-1b", "bf16", 16 * 2 * 8 * 64 * 2),
        ("llama-3.2-1b", "fp8", 16 * 2 * 8 * 64),
        ("llama-3.2-1b", "fp8_e4m3", 16 * 2 * 8 * 64),
        ("qwen3-8b", "f16", 36 * 2 * 8 * 128 * 2),
        // and the factor of each head.
        ("llama-3.1-8b", "int8", 32 * 2 * 8 * (128 + 4)),
    ] {
        let plan = baton.json(&["plan", &data(model), "--device", "h200", "--kv-cache-dtype", dtype]);
        assert_eq!(plan["kv_bytes_per_token"], json!(expect), "{model} {dtype}");
    }
}

#[test]
fn the_plan_adds_up() {
    let baton = Baton::new();
    let plan = baton.json(&[
        "plan",
        &data("llama-3.1-8b/config.json"),
        "--device=h200",
        "--gpu-memory-utilization=0.9",
        "--context=1000",
        "--context=131072",
        "--block-size=16",
        "--max-num-batched-tokens=2048",
        "--max-num-seqs=128",
    ]);
    let number = |key: &str| plan[key].as_u64().unwrap_or_else(|| panic!("{key} in {plan}"));
    assert_eq!(plan["model"], "llama-3.1-8b");
    assert_eq!(number("num_parameters"), 8_030_261_248);
    assert_eq!(plan["dtype"], "BF16");
    let weights = number("weight_bytes");
    assert!((2 * 8_030_261_248..2 * 8_030_261_248 + (1 << 20)).contains(&weights), "{weights}");
    assert_eq!(number("device_memory_bytes"), 143_771 << 20);
    let total = 143_771_u64 << 20;
    assert_eq!(number("usable_bytes"), ((total - total / 100) as f64 * 0.9) as u64);
    let left = number("usable_bytes") - weights - number("workspace_bytes") - number("graph_bytes");
    let block = 16 * number("kv_bytes_per_token");
    assert_eq!(number("num_blocks"), left / block);
    assert_eq!(number("kv_cache_bytes"), left / block * block);
    assert_eq!(number("kv_tokens"), left / block * 16);
    assert_eq!(plan["fits"], true);
    let sequences = plan["sequences"].as_array().unwrap();
    assert_eq!(sequences.len(), 2);
    assert_eq!(sequences[0], json!({ "context": 1000, "count": left / block / 63, "kv_bytes": 63 * block }));
    assert_eq!(
        sequences[1],
        json!({ "context": 131_072, "count": left / block / 8192, "kv_bytes": 8192 * block })
    );
}

/// Five layers of six see the last 1,024 tokens only, and keep no more.
#[test]
fn layers_with_windows_keep_a_quarter_of_a_long_context_at_most() {
    let model = data("gemma-3-12b");
    let plan =
        Baton::new().json(&["plan", &model, "--device=h200", "--kv-cache-dtype=bf16", "--context=32768"]);
    let sequence =
        plan["sequences"].as_array().and_then(|all| all.iter().find(|one| one["context"] == 32_768));
    let kv_bytes = sequence.expect("that context")["kv_bytes"].as_u64().expect("a number");
    // layers × 2 × KV heads × head size × bytes
    let whole = 32_768 * 48 * 2 * 8 * 256 * 2;
    assert!(kv_bytes > whole / 8 && kv_bytes <= whole / 4, "{kv_bytes} of {whole}");
}

#[test]
fn a_draft_model_is_counted() {
    let baton = Baton::new();
    let (target, draft) = (data("llama-3.1-8b"), data("llama-3.2-1b"));
    let json = format!(r#"{{"method": "draft_model", "model": {draft:?}, "num_speculative_tokens": 4}}"#);
    let number = |plan: &serde_json::Value, key: &str| plan[key].as_u64().expect("a number");
    for device in ["h200", "cpu"] {
        let flags = ["--device", device, "--device-memory", "200GiB"];
        let plan = |model: &str, more: &[&str]| baton.json(&[&["plan", model], &flags[..], more].concat());
        let both = plan(&target, &["--speculative-config", &json]);
        let (alone, small) = (plan(&target, &[]), plan(&draft, &[]));
        assert_eq!(both["draft_model"], "llama-3.2-1b");
        for key in ["weight_bytes", "kv_bytes_per_token"] {
            assert_eq!(number(&both, key), number(&alone, key) + number(&small, key), "{key} on {device}");
        }
        assert_eq!(number(&both, "draft_weight_bytes"), number(&small, "weight_bytes"));
        assert!(number(&both, "workspace_bytes") > number(&alone, "workspace_bytes"));
        assert!(number(&both, "num_blocks") < number(&alone, "num_blocks"));
    }
    let missing = r#"{"method": "draft_model"}"#;
    baton.fails(
        &["plan", &target, "--device=h200", "--speculative-config", missing],
        "a draft_model with a \"model\"",
    );
}

/// With the defaults of a GPU, not of the machine this runs on: an H200 had 57,004 blocks.
#[test]
fn the_plan_is_near_what_a_gpu_has() {
    let plan = Baton::new().json(&["plan", &data("llama-3.1-8b"), "--device=h200"]);
    assert_eq!((&plan["max_num_seqs"], &plan["max_num_batched_tokens"]), (&json!(256), &json!(8192)));
    let blocks = plan["num_blocks"].as_u64().unwrap();
    assert!(blocks.abs_diff(57_004) < 570, "{blocks}");
}

#[test]
fn smaller_formats_take_less() {
    let baton = Baton::new();
    let bytes = |dtype: &str| {
        let plan = baton.json(&["plan", &data("llama-3.1-8b"), "--device", "h100", "--dtype", dtype]);
        plan["weight_bytes"].as_u64().unwrap()
    };
    let (f32, bf16, q8_0, q4_k) = (bytes("f32"), bytes("bfloat16"), bytes("q8_0"), bytes("q4_k"));
    assert!(f32 > bf16 && bf16 > q8_0 && q8_0 > q4_k, "{f32} {bf16} {q8_0} {q4_k}");
    assert!((q4_k as f64 / bf16 as f64 - 4.5 / 16.0).abs() < 0.001);
}

#[test]
fn quantised_checkpoints_are_shown_and_counted() {
    let baton = Baton::new();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/data/quantised");
    // 147,456 values of linear layers, 12,288 of the embedding in bf16, some of norms.
    for (name, shown, bits) in [
        ("fp8-channel", "fp8 (e4m3), dynamic activation scales", 8.0),
        ("awq-g128", "awq, 4 bits, groups of 128", 5.0),
        ("gptq-4-g128", "gptq, 4 bits, groups of 128, symmetric", 4.5),
        ("gptq-8-g64", "gptq, 8 bits, groups of 64, symmetric", 8.5),
        ("w4a16-g128", "compressed-tensors, 4 bits, groups of 128, symmetric", 4.5),
        ("w8a8-int8", "int8, one scale per row", 8.5),
        ("mxfp4", "mxfp4, blocks of 32", 5.5),
    ] {
        let model = format!("{folder}/{name}");
        let inspection = baton.json(&["inspect", &model]);
        let plan = baton.json(&["plan", &model, "--device", "h200"]);
        assert_eq!((&inspection["quantization"], &plan["quantization"]), (&json!(shown), &json!(shown)));
        let expected = 12_288.0 * 2.0 + 147_456.0 * bits / 8.0;
        let counted = plan["weight_bytes"].as_u64().unwrap() as f64;
        assert!((counted / expected - 1.0).abs() < 0.02, "{name}: {counted}, expected about {expected}");
        let plain = baton.json(&["plan", &model, "--device", "h200", "--dtype", "bf16"]);
        assert!(plain["weight_bytes"].as_u64().unwrap() as f64 > 2.0 * 155_000.0, "{name}");
    }
}

#[test]
fn the_table_is_for_people() {
    let plan =
        Baton::new().ok(&["plan", &data("qwen3-8b"), "--device", "rtx4090", "--max-model-len", "8192"]);
    for word in
        ["qwen3-8b: Qwen3", "8,190,735,360", "NVIDIA GeForce RTX 4090", "weights", "15.2", "GiB", "8,192"]
    {
        assert!(plan.contains(word), "{word} is not in:\n{plan}");
    }
}

#[test]
fn what_does_not_fit_is_an_error_with_advice() {
    let baton = Baton::new();
    let large = data("llama-3.1-8b");
    baton.fails(&["plan", &large, "--device", "t4"], "the model does not fit: weights and workspace take");
    baton.fails(
        &["plan", &large, "--device", "rtx4090", "--max-model-len", "131072"],
        "one sequence of 131072 tokens does not fit",
    );
    let ran = baton.run(&["plan", &large, "--device", "t4", "--json"]);
    let plan: serde_json::Value =
        serde_json::from_str(&ran.stdout).expect("the plan is printed all the same");
    assert_eq!((plan["fits"].clone(), plan["kv_tokens"].clone()), (json!(false), json!(0)));
}

#[test]
fn any_memory_can_be_asked_about() {
    let baton = Baton::new();
    let plan = baton.json(&[
        "plan",
        &data("llama-3.2-1b"),
        "--device=my-card",
        "--device-memory=8GiB",
        "--max-model-len=4096",
    ]);
    assert_eq!((&plan["device"], &plan["device_memory_bytes"]), (&json!("my-card"), &json!(8_u64 << 30)));
    let cpu = baton.json(&["plan", &data("llama-3.2-1b"), "--device-memory=64GiB", "--max-model-len=4096"]);
    assert_eq!(cpu["device_memory_bytes"], json!(64_u64 << 30));
}

#[test]
fn impossible_plans_are_refused() {
    let baton = Baton::new();
    let model = data("llama-3.2-1b");
    baton.fails(&["plan", &model, "--device", "abacus"], "--device \"abacus\" is not known");
    baton.fails(&["plan", &model, "--device", "h100", "--dtype", "int3"], "--dtype \"int3\" is not known");
    baton.fails(&["plan", &model, "--device", "h100", "--block-size", "0"], "--block-size must be");
    baton.fails(&["plan", &model, "--device", "h100", "--max-num-seqs", "0"], "--max-num-seqs must be");
    baton.fails(
        &["plan", &model, "--device", "h100", "--max-model-len", "999999999"],
        "--max-model-len 999999999 is more",
    );
    baton.fails(&["plan", &model, "--device", "h100", "--max-model-len", "0"], "--max-model-len");
    baton.fails(&["plan", "no/such/model"], "there is no model \"no/such/model\"");
}

#[test]
fn a_configuration_alone_can_be_inspected() {
    let baton = Baton::new();
    let inspection = baton.json(&["inspect", &data("llama-3.1-8b")]);
    assert_eq!(inspection["format"], "configuration only");
    assert_eq!(inspection["architecture"], "llama");
    assert_eq!(inspection["num_parameters"], 8_030_261_248_u64);
    assert_eq!(inspection["tokenizer"], json!(null));
    assert_eq!(inspection["chat_template"], false);
    let config = &inspection["config"];
    assert_eq!((&config["num_heads"], &config["num_kv_heads"]), (&json!(32), &json!(8)));
    assert_eq!(config["ropes"][0]["scaling"]["rope_type"], "llama3");
    let text = baton.ok(&["inspect", &data("qwen3-8b")]);
    for line in
        ["architecture   Qwen3", "heads          32 query, 8 key/value, of 128 each", "layers         36"]
    {
        assert!(text.contains(line), "{line} is not in:\n{text}");
    }
}

/// A file of a type that is known by name only: both commands say that it cannot run.
#[test]
fn a_file_that_cannot_run_is_named() {
    let baton = Baton::new();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tiny.gguf");
    // The last tensor is of TQ2_0 (35): 256 values in 66 bytes.
    let file = gguf_writer::tiny("llama").tensor("blk.0.extra.weight", &[256], 35, &[0; 66]).finish();
    std::fs::write(&path, file).expect("written");
    let path = path.display().to_string();
    let inspection = baton.json(&["inspect", &path]);
    assert_eq!(inspection["unsupported_dtypes"], json!(["TQ2_0"]));
    let plan = baton.run(&["plan", &path, "--device-memory=8GiB", "--json"]);
    let plan: serde_json::Value = serde_json::from_str(&plan.stdout).expect("a plan");
    assert_eq!(plan["unsupported_dtypes"], json!(["TQ2_0"]));
    for command in ["inspect", "plan"] {
        let ran = baton.run(&[command, &path]);
        assert!(ran.stdout.contains("warning: this file cannot run"), "{}", ran.stdout);
    }
    let sound = baton.json(&["inspect", &model_arg()]);
    assert_eq!(sound["unsupported_dtypes"], json!([]));
}

#[test]
fn a_program_is_shown_op_by_op() {
    let baton = Baton::new();
    let model = model_arg();
    let text = baton.ok(&["inspect", &model, "--program"]);
    let lines: Vec<&str> = text.lines().collect();
    // Embedding, five ops in each of thirty layers, rows dropped once, logits, sampling.
    assert_eq!(lines.len(), 1 + 1 + 30 * 5 + 1 + 2, "{text}");
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
    assert_eq!(words(lines[0]), "# OP INPUTS WEIGHT OUTPUT KV LAYER DETAILS");
    assert_eq!(words(lines[1]), "0 embed tokens w0 Q8_0 49152 x 576 b0 [576]");
    assert!(
        words(lines[2]).starts_with("1 qkv b0 [576] w1 Q4_1 960 x 576 b1 [576] 0 9 heads"),
        "{}",
        lines[2]
    );
    assert!(words(lines[3]).starts_with("2 attention b1 [576] b2 [576] 0 9 heads, plan 0"), "{}", lines[3]);
    let dot = baton.ok(&["inspect", &model, "--program", "dot"]);
    assert!(dot.starts_with("digraph program {") && dot.contains("op0 -> op1"), "{dot}");
    let json = baton.json(&["inspect", &model, "--program"]);
    assert_eq!(json["program"][0]["weight"], "w0 Q8_0 49152 x 576");
    assert_eq!(json["program"][3]["op"], "linear");
    // Of a configuration alone, and with norms after each half.
    let text = baton.ok(&["inspect", &data("llama-3.1-8b"), "--program"]);
    assert!(text.contains("w0 BF16 128256 x 4096"), "{text}");
    assert_eq!(baton.run(&["inspect", &model, "--program", "svg"]).code, 2);
}

#[test]
fn the_default_model_is_what_it_should_be() {
    let baton = Baton::new();
    let model = model_arg();
    let inspection = baton.json(&["inspect", &model, "--tensors"]);
    assert_eq!(inspection["format"], "GGUF v3");
    assert_eq!(inspection["num_parameters"], 134_515_008);
    assert_eq!(inspection["config"]["max_model_len"], 8192);
    assert_eq!(inspection["tokenizer"], json!({ "kind": "gpt2 (smollm)", "vocab_size": 49152 }));
    assert_eq!(inspection["chat_template"], true);
    assert_eq!(inspection["metadata"]["general.license"], "apache-2.0");
    assert_eq!(inspection["metadata"]["tokenizer.ggml.tokens"]["len"], 49152);
    assert_eq!(inspection["dtypes"]["Q4_1"]["tensors"], 210);
    let tensors = inspection["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), 272);
    let embedding = tensors.iter().find(|tensor| tensor["name"] == "token_embd.weight").unwrap();
    assert_eq!((&embedding["shape"], &embedding["dtype"]), (&json!([49152, 576]), &json!("Q8_0")));
    let total: u64 = tensors.iter().map(|tensor| tensor["bytes"].as_u64().unwrap()).sum();
    assert_eq!(inspection["weight_bytes"], total);

    let text = baton.ok(&["inspect", &model, "--tensors"]);
    assert!(text.contains("token_embd.weight") && text.contains("49152 × 576"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() < 200), "a line is too long");
}
