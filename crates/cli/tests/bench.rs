//! `baton bench` as a user runs it: against a real server with the mock engine, and with the default model.

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use common::{Baton, model_arg};
use serde_json::Value;

/// A server that ends with the test.
struct Server {
    _home: Baton,
    child: Child,
    url: String,
}

/// A configuration small enough for random weights on any machine, in a folder without a tokenizer.
const TINY: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 49408, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2}"#;

impl Server {
    fn start(more: &[&str]) -> Self {
        Self::start_model(&model_arg(), more)
    }

    fn start_model(model: &str, more: &[&str]) -> Self {
        let home = Baton::new();
        let mut args = vec!["serve", model, "--port", "0", "--max-model-len", "2048", "--log-level", "off"];
        args.extend(more);
        let mut command = home.command(&args);
        command.env_remove("BATON_API_KEY").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("the binary starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("the ready line");
        let url = line.split_whitespace().find(|word| word.starts_with("http://"));
        let url = url.unwrap_or_else(|| panic!("no address in {line:?}")).to_owned();
        Self { _home: home, child, url }
    }

    /// Runs `baton bench serve` against it; the summary and the result file.
    fn bench(&self, more: &[&str]) -> (String, Value) {
        let baton = Baton::new();
        let file = baton.home.path().join("result.json");
        let mut args = vec!["bench", "serve", "--base-url", &self.url, "--output-json"];
        args.push(file.to_str().expect("a plain path"));
        args.extend(more);
        let summary = baton.ok(&args);
        (summary, read_json(&file))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_json(file: &std::path::Path) -> Value {
    let text = std::fs::read_to_string(file).expect("the result was written");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn a_server_under_load_gives_vllms_figures() {
    let server = Server::start(&["--load-format", "mock", "--max-num-seqs", "16"]);
    let load = ["--num-prompts", "40", "--max-concurrency", "8", "--input-len", "20", "--output-len", "30"];
    let (summary, result) = server.bench(&[&load[..], &["--ignore-eos", "--seed", "3"]].concat());
    for line in
        ["Successful requests:                     40", "Total generated tokens:                  1200"]
    {
        assert!(summary.contains(line), "{summary}");
    }
    assert_eq!((&result["completed"], &result["failed"]), (&40.into(), &0.into()));
    assert_eq!((&result["total_input_tokens"], &result["total_output_tokens"]), (&800.into(), &1200.into()));
    assert_eq!((&result["request_rate"], &result["max_concurrency"]), (&"inf".into(), &8.into()));
    assert!(result["max_concurrent_requests"].as_u64() <= Some(8));
    let mut expect = vec![
        "date",
        "endpoint_type",
        "backend",
        "label",
        "model_id",
        "tokenizer_id",
        "num_prompts",
        "request_rate",
        "burstiness",
        "max_concurrency",
        "duration",
        "completed",
        "failed",
        "total_input_tokens",
        "total_output_tokens",
        "request_throughput",
        "request_goodput",
        "output_throughput",
        "total_token_throughput",
        "max_output_tokens_per_s",
        "max_concurrent_requests",
    ];
    let latencies: Vec<String> = ["ttft", "tpot", "itl", "e2el"]
        .iter()
        .flat_map(|metric| ["mean", "median", "std", "p99"].map(|word| format!("{word}_{metric}_ms")))
        .collect();
    expect.extend(latencies.iter().map(String::as_str));
    expect.extend(["total_chunks", "chunk_throughput"]);
    assert_eq!(keys(&result), expect);
    for key in &latencies {
        assert!(result[key].as_f64().is_some_and(|value| value >= 0.0), "{key}: {}", result[key]);
    }
}

#[test]
fn chats_traces_and_details_go_the_same_way() {
    let server = Server::start(&["--load-format", "mock"]);
    let (_, chat) = server.bench(&[
        "--backend",
        "openai-chat",
        "--num-prompts",
        "4",
        "--input-len",
        "10",
        "--output-len",
        "6",
        "--ignore-eos",
        "--save-detailed",
        "--goodput",
        "ttft:60000",
        "--metric-percentiles",
        "50,99.9",
    ]);
    assert_eq!((&chat["completed"], &chat["total_output_tokens"]), (&4.into(), &24.into()));
    assert_eq!(chat["request_goodput"], chat["request_throughput"]);
    assert!(chat["p99.9_e2el_ms"].is_number());
    assert_eq!(chat["output_lens"], serde_json::json!([6, 6, 6, 6]));
    for key in ["input_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"] {
        assert_eq!(chat[key].as_array().map(Vec::len), Some(4), "{key}");
    }
    assert!(chat["generated_texts"][0].as_str().is_some_and(|text| !text.is_empty()));
    // A trace with its own times: the last of three is sent 0.3 s after the first.
    let baton = Baton::new();
    let trace = baton.home.path().join("trace.jsonl");
    let line = |ms: u32| {
        format!("{{\"timestamp\":{ms},\"input_length\":600,\"output_length\":3,\"hash_ids\":[7,8]}}\n")
    };
    std::fs::write(&trace, [line(1000), line(1100), line(1600)].concat()).expect("written");
    let trace = trace.to_str().expect("a plain path");
    let (_, result) = server.bench(&[
        "--dataset-name",
        "trace",
        "--dataset-path",
        trace,
        "--trace-speed",
        "2",
        "--save-detailed",
        "--ignore-eos",
    ]);
    assert_eq!((&result["completed"], &result["total_input_tokens"]), (&3.into(), &1800.into()));
    let starts: Vec<f64> =
        result["start_times"].as_array().expect("a list").iter().filter_map(Value::as_f64).collect();
    assert!((0.29..2.0).contains(&(starts[2] - starts[0])), "{starts:?}");
    // And a report of both.
    let files = [baton.home.path().join("chat.json"), baton.home.path().join("trace.json")];
    std::fs::write(&files[0], chat.to_string()).expect("written");
    std::fs::write(&files[1], result.to_string()).expect("written");
    let page = baton.home.path().join("report.html");
    let paths: Vec<&str> =
        files.iter().chain([&page]).map(|path| path.to_str().expect("a plain path")).collect();
    let table = baton.ok(&["bench", "report", paths[0], paths[1], "--output", paths[2]]);
    assert!(table.contains("output tok/s"), "{table}");
    assert!(std::fs::read_to_string(&page).expect("the page").contains("<svg"));
    assert!(std::fs::read(page.with_extension("png")).expect("the picture").starts_with(b"\x89PNG"));
}

#[test]
fn the_default_model_is_measured_in_this_process_and_over_http() {
    let (baton, model) = (Baton::new(), model_arg());
    let file = baton.home.path().join("result.json");
    let output = ["--output-json", file.to_str().expect("a plain path")];
    let small = ["--max-model-len", "256", "--input-len", "16", "--output-len", "8"];
    let batch = ["--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "0"];
    let text = baton.ok(&[&["bench", "latency", &model][..], &small, &batch, &output].concat());
    assert!(text.starts_with("Avg latency: ") && text.contains("99% percentile latency: "), "{text}");
    let result = read_json(&file);
    assert_eq!(keys(&result)[..4], ["avg_latency", "std_latency", "latencies", "percentiles"]);
    assert_eq!(result["latencies"].as_array().map(Vec::len), Some(2));
    assert!(result["decode_tokens_per_second"].as_f64() > Some(0.0), "{result}");
    let text =
        baton.ok(&[&["bench", "throughput", &model, "--num-prompts", "3"][..], &small, &output].concat());
    assert!(text.starts_with("Throughput: ") && text.contains("output tokens/s"), "{text}");
    let result = read_json(&file);
    let expect =
        ["elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second"];
    assert_eq!(keys(&result)[..5], expect);
    assert_eq!((&result["total_num_tokens"], &result["total_output_tokens"]), (&72.into(), &24.into()));
    let server = Server::start(&[]);
    let (_, served) =
        server.bench(&["--num-prompts", "3", "--input-len", "16", "--output-len", "8", "--ignore-eos"]);
    assert_eq!((&served["completed"], &served["total_output_tokens"]), (&3.into(), &24.into()));
}

#[test]
fn starts_are_timed() {
    let (baton, model) = (Baton::new(), model_arg());
    let file = baton.home.path().join("result.json");
    let path = file.to_str().expect("a plain path");
    let iters = ["--num-iters-cold", "1", "--num-iters-warm=2", "--output-json", path];
    let text = baton.ok(&[&["bench", "startup", &model, "--load-format", "mock"][..], &iters].concat());
    assert!(text.contains("Warm startup: "), "{text}");
    let result = read_json(&file);
    assert_eq!(result["warm_startup_times"].as_array().map(Vec::len), Some(2));
    assert!(result["avg_warm_startup_time"].as_f64() > Some(0.0));
}

#[test]
fn mistakes_are_one_line() {
    let baton = Baton::new();
    // A port that nobody listens on.
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("it").port();
    let url = format!("http://127.0.0.1:{port}");
    baton.fails(&["bench", "serve", "--base-url", &url], "cannot be reached");
    baton.fails(&["bench", "serve", "--base-url", "https://example.com"], "https is not spoken");
    baton.fails(&["bench", "serve", "--dataset-name", "sharegpt"], "--dataset-path");
    baton
        .fails(&["bench", "serve", "--dataset-name", "custom", "--dataset-path", "/nowhere"], "No such file");
    baton.fails(&["bench", "serve", "--request-rate", "0"], "--request-rate");
    baton.fails(&["bench", "serve", "--goodput", "speed:1"], "--goodput");
    baton.fails(&["bench", "serve", "--percentile-metrics", "ttft,x"], "not one of");
    baton.fails(&["bench", "serve", "--metric-percentiles", "101"], "not a percentile");
    baton
        .fails(&["bench", "serve", "--backend", "openai", "--endpoint", "/v1/chat/completions"], "--backend");
    baton.fails(&["bench", "report", "/nowhere.json"], "No such file");
    let model = model_arg();
    let mock = ["bench", "latency", &model, "--load-format", "mock", "--max-model-len", "64"];
    baton.fails(
        &[&mock[..], &["--input-len", "60", "--output-len", "5"]].concat(),
        "exceed the longest sequence",
    );
    baton.fails(&[&mock[..], &["--batch-size", "0"]].concat(), "above 0");
    assert_eq!(baton.run(&["bench", "serve", "--extra-body", "3"]).code, 2);
    assert_eq!(baton.run(&["bench"]).code, 2);
}

#[test]
fn a_server_that_refuses_is_quoted() {
    let server = Server::start(&["--load-format", "mock", "--api-key", "secret"]);
    let baton = Baton::new();
    let args = [
        "bench",
        "serve",
        "--base-url",
        &server.url,
        "--num-prompts",
        "2",
        "--input-len",
        "5",
        "--output-len",
        "2",
    ];
    baton.fails(&args, "401");
    let with_key = [&args[..], &["--api-key", "secret"]].concat();
    assert!(baton.ok(&with_key).contains("Successful requests:                     2"));
    let too_long = [&with_key[..], &["--output-len", "5000"]].concat();
    baton.fails(&too_long, "says 400");
}

#[test]
fn relay_attention_is_measured_off_and_on() {
    let (baton, model) = (Baton::new(), model_arg());
    let file = baton.home.path().join("rows.json");
    let path = file.to_str().expect("a plain path");
    let rows = ["--row", "20x512+8/6", "--row", "tree:2x512,2x32,8x8/4", "--num-iters", "2"];
    let table = baton
        .ok(&[&["bench", "relay", &model, "--device", "cpu", "--output-json", path][..], &rows].concat());
    assert!(
        table.contains("20x512+8/6") && table.contains("40 / 40") && table.contains("64 / 64"),
        "{table}"
    );
    let result = read_json(&file);
    let row = &result["rows"][0];
    assert_eq!((&row["num_requests"], &row["equal_answers"]), (&20.into(), &40.into()));
    // In every run the whole prefix was cached, and nothing else.
    for mode in ["cached", "relay"] {
        assert_eq!(row[mode]["num_cached_tokens"], serde_json::json!([20 * 512, 20 * 512]), "{mode}");
        assert!(row[mode]["output_tok_s"].as_f64() > Some(0.0));
    }
    assert_eq!(row["cached"]["num_kv_tokens_saved"][1], 0);
    assert!(row["relay"]["num_kv_tokens_saved"][1].as_u64() > Some(0), "{row}");
}

#[test]
fn every_part_of_the_relay_benchmark_gives_figures_and_charts() {
    let baton = Baton::new();
    let (file, page) = (baton.home.path().join("relay.json"), baton.home.path().join("relay.html"));
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(common::data("llama-3.2-1b/config.json")).expect("a config"))
            .expect("JSON");
    for (key, value) in [("num_hidden_layers", 2), ("hidden_size", 256), ("intermediate_size", 256)] {
        config[key] = value.into();
    }
    for (key, value) in [("num_attention_heads", 4), ("num_key_value_heads", 2), ("vocab_size", 1000)] {
        config[key] = value.into();
    }
    config["head_dim"] = 64.into();
    let model = baton.home.path().join("config.json");
    std::fs::write(&model, config.to_string()).expect("written");
    let model = model.display().to_string();
    let flags = [
        &["--load-format", "dummy", "--device", "cpu", "--max-model-len", "4096", "--num-iters", "1"][..],
        &["--shared-lens", "64,1024", "--batch-sizes", "1,20", "--own-lens", "32", "--lengths", "8/4"],
        &[
            "--num-prompts",
            "20",
            "--request-rates",
            "200,400",
            "--slo-ttft-ms",
            "60000",
            "--slo-tpot-ms",
            "60000",
        ],
        &["--output-json", file.to_str().expect("plain"), "--plot", page.to_str().expect("plain")],
    ]
    .concat();
    let text = baton.ok(&[&["bench", "relay", &model][..], &flags].concat());
    let result = read_json(&file);
    // Two kinds of heads; two batches over two prefixes.
    let operator = result["operator"].as_array().expect("a list");
    assert_eq!(operator.len(), 8, "{text}");
    let last = &operator[3];
    assert_eq!((&last["batch_size"], &last["shared_len"]), (&20.into(), &1024.into()));
    let bytes = |mode: &str, key: &str| last[mode][key].as_u64().expect("a count");
    let token = 2 * 3 * 64 * 2;
    assert_eq!(bytes("cached", "read_bytes"), 20 * (1024 + 32) * token);
    assert_eq!(bytes("relay", "read_bytes"), (1024 + 20 * 32) * token);
    assert_eq!(bytes("no_cache", "memory_bytes"), 20 * (1024 + 32) * token);
    assert_eq!(result["offline"].as_array().map(Vec::len), Some(2));
    assert_eq!(result["sharegpt"].as_array().map(Vec::len), Some(2));
    assert!(result["sharegpt"][1]["relay"]["output_tok_s"].as_f64() > Some(0.0));
    assert_eq!(result["online"]["points"].as_array().map(Vec::len), Some(4));
    assert_eq!(result["online"]["highest_rates"][1]["relay"], 400.0, "{text}");
    let page_text = std::fs::read_to_string(&page).expect("the page");
    // One chart for each kind of heads, two workloads, three of each prefix that requests come with.
    assert_eq!(page_text.matches("<svg").count(), 2 + 2 + 6);
    assert_eq!(std::fs::read(page.with_extension("png")).expect("the picture")[..8], *b"\x89PNG\r\n\x1a\n");
    baton.fails(&["bench", "relay", &model, "--load-format", "dummy", "--parts", "rows"], "--row");
    assert_eq!(baton.run(&["bench", "relay", "--row", "64x2048"]).code, 2);
}

/// Random weights beside a lone config.json: only token ids and usage show what comes.
#[test]
fn a_server_without_a_tokenizer_is_counted() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("config.json");
    std::fs::write(&config, TINY).expect("written");
    let config = config.to_str().expect("a plain path");
    let load = ["--num-prompts", "6", "--input-len", "12", "--output-len", "9", "--ignore-eos"];
    let check = |server: &Server| {
        let (_, result) = server.bench(&load);
        assert_eq!((&result["completed"], &result["failed"]), (&6.into(), &0.into()), "{result}");
        assert_eq!((&result["total_input_tokens"], &result["total_output_tokens"]), (&72.into(), &54.into()));
        // So small a model may have said everything before its first event leaves: only the first token is sure to take time.
        assert!(result["mean_ttft_ms"].as_f64() > Some(0.0) && result["mean_tpot_ms"].as_f64() >= Some(0.0));
    };
    check(&Server::start_model(config, &["--load-format", "dummy"]));
    let model = model_arg();
    check(&Server::start_model(config, &["--load-format", "dummy", "--tokenizer", &model]));
    let baton = Baton::new();
    let small = folder.path().join("small.json");
    std::fs::write(&small, TINY.replace("49408", "1000")).expect("written");
    let small = small.to_str().expect("a plain path");
    baton.fails(
        &["complete", small, "--load-format", "dummy", "--tokenizer", &model, "-p", "a"],
        "the model's vocabulary has 1000",
    );
}

/// What a step of experts costs depends on how many of them its tokens chose, so the result says it.
#[test]
fn a_model_with_experts_says_how_many_were_chosen() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, file) = (folder.path().join("config.json"), folder.path().join("result.json"));
    let model = serde_json::json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
        "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 2, "norm_topk_prob": true,
        "vocab_size": 1000, "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "hidden_act": "silu",
        "tie_word_embeddings": false, "torch_dtype": "float32", "rope_theta": 10000.0
    });
    std::fs::write(&config, model.to_string()).expect("written");
    let (config, file_name) = (config.to_str().expect("plain"), file.to_str().expect("plain"));
    for (batch_size, touched) in [("1", 2..=2), ("32", 8..=16)] {
        let baton = Baton::new();
        let flags = ["bench", "latency", config, "--load-format", "dummy", "--device", "cpu"];
        let lengths = ["--batch-size", batch_size, "--input-len", "8", "--output-len", "4"];
        let rest = ["--num-iters-warmup", "0", "--num-iters", "1", "--output-json", file_name];
        let run = baton.run(&[&flags[..], &lengths, &rest].concat());
        assert_eq!(run.code, 0, "{}", run.stderr);
        let result: Value = serde_json::from_slice(&std::fs::read(&file).expect("the result")).expect("JSON");
        assert_eq!(result["num_experts"], 16);
        let found = result["num_experts_touched"].as_u64().expect("a number");
        assert!(touched.contains(&found), "{batch_size} tokens chose {found} experts");
    }
}
