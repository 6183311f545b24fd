//! `baton complete` with the default model, as a script would use it.

mod common;

use std::io::Read;
use std::process::Stdio;

use common::{Baton, finish, model_arg};
use serde_json::{Value, json};

const FRANCE: &str = "The capital of France is";

const COUNTING: &str = "One, two, three, four, five,";

/// One short greedy completion with whatever else is asked.
fn complete(flags: &[&str]) -> Value {
    Baton::new()
        .json(&[&["complete", &model_arg(), "--temperature", "0", "--max-tokens", "12"], flags].concat())
}

fn text(result: &Value, index: usize) -> &str {
    result["outputs"][index]["text"].as_str().unwrap_or_else(|| panic!("no text {index} in {result}"))
}

#[test]
fn a_completion_has_all_that_is_documented() {
    let result = complete(&["-p", FRANCE]);
    assert_eq!(result["model"], "SmolLM2-135M-Instruct.Q4_1");
    assert_eq!(result["prompt_token_ids"], json!([504, 3575, 282, 4649, 314]));
    let output = &result["outputs"][0];
    assert!(text(&result, 0).starts_with(" Paris"), "{result}");
    assert_eq!(output["token_ids"].as_array().unwrap().len(), 12);
    assert_eq!((&output["finish_reason"], &output["stop_reason"]), (&json!("length"), &json!(null)));
    assert_eq!((&output["logprobs"], &output["cumulative_logprob"]), (&json!(null), &json!(null)));
    let usage =
        json!({ "prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17, "cached_tokens": 0 });
    assert_eq!(result["usage"], usage);
    for key in ["load_s", "ttft_s", "decode_s", "total_s", "prefill_tokens_per_s", "decode_tokens_per_s"] {
        assert!(result["timing"][key].as_f64().is_some_and(|value| value > 0.0), "{key} in {result}");
    }
}

#[test]
fn the_stream_is_the_same_text() {
    let baton = Baton::new();
    let model = model_arg();
    let streamed = baton.ok(&["complete", &model, "--temperature", "0", "-p", FRANCE, "--max-tokens", "12"]);
    assert_eq!(streamed, format!("{}\n", text(&complete(&["-p", FRANCE]), 0)));
    let piped = baton.run_with(
        &["complete", &model, "--temperature", "0", "-p", "-", "--max-tokens", "12"],
        &format!("{FRANCE}\n"),
    );
    assert_eq!(piped.stdout, streamed);
    assert_eq!(piped.stderr, "", "nothing but the text is said");
}

#[test]
fn token_ids_are_taken_as_they_are() {
    let by_text = complete(&["-p", FRANCE]);
    let by_ids = complete(&["--prompt-token-ids", "[504, 3575, 282, 4649, 314]"]);
    assert_eq!(by_text["outputs"], by_ids["outputs"]);
}

#[test]
fn several_prompts_are_one_object_a_line_in_their_order() {
    let args = [
        "complete",
        &model_arg(),
        "--temperature",
        "0",
        "--max-tokens=12",
        "-p",
        FRANCE,
        "-p",
        "One, two, three,",
        "--json",
    ];
    let lines = Baton::new().ok(&[&args[..], &["--prompt-token-ids", "504"]].concat());
    let results: Vec<Value> =
        lines.lines().map(|line| serde_json::from_str(line).expect("one object a line")).collect();
    assert_eq!(results.len(), 3);
    assert!(text(&results[0], 0).starts_with(" Paris"));
    assert!(text(&results[1], 0).starts_with(" four"), "{}", results[1]);
    assert_eq!(results[2]["prompt_token_ids"], json!([504]));
    let ids: Vec<&Value> = results.iter().map(|result| &result["id"]).collect();
    assert!(ids[0] != ids[1] && ids[1] != ids[2]);
}

#[test]
fn a_batch_gives_what_each_gives_alone() {
    let prompts = [FRANCE, "Once upon a time", "def fibonacci(n):", "Water boils at"];
    let baton = Baton::new();
    let mut args = vec![
        "complete".to_owned(),
        model_arg(),
        "--temperature=0".to_owned(),
        "--max-tokens=12".to_owned(),
        "--json".to_owned(),
        "--deterministic".to_owned(),
    ];
    args.extend(prompts.iter().flat_map(|prompt| ["-p".to_owned(), (*prompt).to_owned()]));
    let lines = baton.ok(&args.iter().map(String::as_str).collect::<Vec<_>>());
    for (line, prompt) in lines.lines().zip(prompts) {
        let together: Value = serde_json::from_str(line).unwrap();
        assert_eq!(together["outputs"], complete(&["-p", prompt, "--deterministic"])["outputs"], "{prompt}");
    }
}

#[test]
fn stop_texts_and_stop_tokens_end_the_output() {
    let long = complete(&["-p", COUNTING]);
    assert!(text(&long, 0).contains("seven"), "{long}");
    let stopped = complete(&["-p", COUNTING, "--stop", " seven"]);
    let output = &stopped["outputs"][0];
    assert_eq!((&output["finish_reason"], &output["stop_reason"]), (&json!("stop"), &json!(" seven")));
    assert_eq!(text(&stopped, 0), text(&long, 0).split(" seven").next().unwrap());
    let included = complete(&["-p", COUNTING, "--stop", " seven", "--include-stop-str-in-output"]);
    assert_eq!(text(&included, 0), format!("{} seven", text(&stopped, 0)));
    let token = long["outputs"][0]["token_ids"][2].as_u64().unwrap();
    let by_token = complete(&["-p", COUNTING, "--stop-token-ids", &token.to_string()]);
    let output = &by_token["outputs"][0];
    assert_eq!((&output["finish_reason"], &output["stop_reason"]), (&json!("stop"), &json!(token)));
}

#[test]
fn a_chat_ends_by_itself_unless_told_not_to() {
    let chat = ["--chat", "-p", "Say hello.", "--max-tokens", "64"];
    let result = Baton::new().json(&[&["complete", &model_arg(), "--temperature", "0"], &chat[..]].concat());
    assert_eq!(result["outputs"][0]["finish_reason"], "stop", "{result}");
    assert_eq!(result["outputs"][0]["stop_reason"], json!(null));
    assert!(!text(&result, 0).contains("<|im_end|>"));
    assert_eq!(result["outputs"][0]["token_ids"].as_array().unwrap().last(), Some(&json!(2)));
    let endless = Baton::new()
        .json(&[&["complete", &model_arg(), "--temperature", "0"], &chat[..], &["--ignore-eos"]].concat());
    assert_eq!(endless["outputs"][0]["finish_reason"], "length");
    assert_eq!(endless["usage"]["completion_tokens"], 64);
    let system = Baton::new().json(
        &[&["complete", &model_arg(), "--temperature", "0", "--system", "You are a pirate."], &chat[..]]
            .concat(),
    );
    assert_ne!(system["prompt_token_ids"], result["prompt_token_ids"]);
}

#[test]
fn special_tokens_are_shown_on_request() {
    let flags =
        ["--chat", "-p", "Say hello.", "--max-tokens=64", "--ignore-eos", "--skip-special-tokens=false"];
    let result = Baton::new().json(&[&["complete", &model_arg(), "--temperature", "0"], &flags[..]].concat());
    assert!(text(&result, 0).contains("<|im_end|>"), "{result}");
}

#[test]
fn log_probabilities_are_sound() {
    let result = complete(&["-p", FRANCE, "--logprobs", "3", "--prompt-logprobs", "2"]);
    let output = &result["outputs"][0];
    let positions = output["logprobs"].as_array().unwrap();
    assert_eq!(positions.len(), 12);
    let mut sum = 0.0;
    for (position, token) in positions.iter().zip(output["token_ids"].as_array().unwrap()) {
        assert_eq!(&position["token_id"], token);
        assert_eq!(position["rank"], 1, "greedy takes the most likely");
        assert_eq!(position["top"].as_array().unwrap().len(), 3);
        assert_eq!(position["top"][0]["token_id"], position["token_id"]);
        let values: Vec<f64> =
            position["top"].as_array().unwrap().iter().map(|t| t["logprob"].as_f64().unwrap()).collect();
        assert!(values.is_sorted_by(|a, b| a >= b) && values.iter().all(|&value| value <= 0.0), "{position}");
        sum += position["logprob"].as_f64().unwrap();
    }
    assert!((output["cumulative_logprob"].as_f64().unwrap() - sum).abs() < 1e-3);
    assert_eq!(positions[0]["token"], " Paris");
    let prompt = result["prompt_logprobs"].as_array().unwrap();
    assert_eq!((prompt.len(), &prompt[0]), (5, &json!(null)));
    assert_eq!(prompt[4]["token_id"], result["prompt_token_ids"][4]);
}

#[test]
fn the_same_seed_gives_the_same_texts_and_another_gives_others() {
    let flags = ["-p", "Once upon a time", "-n", "3", "--temperature", "1"];
    let run = |seed: &str| complete(&[&flags[..], &["--seed", seed]].concat())["outputs"].clone();
    let (first, again, other) = (run("1"), run("1"), run("2"));
    assert_eq!(first, again);
    assert_ne!(first, other);
    assert_eq!(first.as_array().unwrap().len(), 3);
    assert_ne!(first[0]["text"], first[1]["text"]);
}

#[test]
fn the_best_of_many_and_the_best_beams_come_first() {
    for flags in [
        &["--best-of", "4", "-n", "2", "--temperature", "1", "--seed", "3"][..],
        &["--beam-search", "-n", "2"],
    ] {
        let result = complete(&[&["-p", FRANCE], flags].concat());
        let scores: Vec<f64> =
            (0..2).map(|i| result["outputs"][i]["cumulative_logprob"].as_f64().expect("a score")).collect();
        assert!(scores[0] >= scores[1], "{scores:?}");
    }
    let greedy = complete(&["-p", FRANCE, "--logprobs", "0"]);
    let beam = complete(&["-p", FRANCE, "--beam-search", "-n", "1", "--best-of", "4", "--ignore-eos"]);
    let score = |result: &Value| result["outputs"][0]["cumulative_logprob"].as_f64().unwrap();
    assert!(score(&beam) >= score(&greedy) - 1e-3, "{} {}", score(&beam), score(&greedy));
}

#[test]
fn biases_and_penalties_reach_the_sampler() {
    let plain = complete(&["-p", FRANCE]);
    let paris = plain["outputs"][0]["token_ids"][0].as_u64().unwrap();
    let banned = complete(&["-p", FRANCE, "--logit-bias", &format!("{paris}=-100")]);
    assert_ne!(banned["outputs"][0]["token_ids"][0], json!(paris));
    let repeating = ["-p", "la la la la la la", "--max-tokens", "16"];
    let free = complete(&repeating);
    let penalised = complete(&[&repeating[..], &["--repetition-penalty", "2"]].concat());
    assert_ne!(free["outputs"], penalised["outputs"]);
}

#[test]
fn steps_blocks_threads_and_caches_of_any_size_give_the_same_text() {
    let long: String = "The quick brown fox jumps over the lazy dog. ".repeat(12);
    let reference = complete(&["-p", &long, "--kv-cache-dtype", "f32"]);
    for flags in [
        &["--max-num-batched-tokens=16", "--max-num-seqs=4"][..],
        &["--block-size=32"],
        &["--block-size=64"],
        &["--no-enable-prefix-caching"],
        &["--threads=1"],
        &["--max-model-len=256", "--kv-cache-memory=64MiB", "--swap-space=0"],
        &["--kv-cache-dtype=f16"],
        &["--enforce-eager", "--preemption-mode=swap", "--scheduling-policy=priority", "--priority=-3"],
    ] {
        let same = complete(&[&["-p", &long, "--kv-cache-dtype", "f32"], flags].concat());
        assert_eq!(same["outputs"][0]["text"], reference["outputs"][0]["text"], "{flags:?}");
    }
}

#[test]
fn in_float32_every_instruction_set_gives_the_same_tokens() {
    let flags = [
        "complete",
        &model_arg(),
        "--temperature",
        "0",
        "-p",
        COUNTING,
        "--max-tokens",
        "24",
        "--dtype",
        "float32",
    ];
    let best = Baton::new().json(&flags);
    let baton = Baton::new();
    let mut portable = baton.command(&[&flags[..], &["--json"]].concat());
    portable.env("BATON_CPU_ISA", "portable");
    let portable: Value = serde_json::from_str(&finish(portable, "").stdout).expect("JSON");
    assert_eq!(best["outputs"], portable["outputs"]);
    // Keys and values are not rounded either, unless that is asked for.
    let rounded = Baton::new().json(&[&flags[..], &["--kv-cache-dtype", "int8", "--logprobs", "0"]].concat());
    let exact = Baton::new().json(&[&flags[..], &["--logprobs", "0"]].concat());
    assert_ne!(rounded["outputs"][0]["cumulative_logprob"], exact["outputs"][0]["cumulative_logprob"]);
}

#[test]
fn outputs_have_the_shape_that_is_asked_for() {
    let chosen = complete(&[
        "-p",
        "Is water wet?",
        "--choice",
        "yes",
        "--choice",
        "no",
        "-n",
        "3",
        "--temperature",
        "2",
    ]);
    assert!((0..3).all(|index| ["yes", "no"].contains(&text(&chosen, index))), "{chosen}");
    assert_eq!(chosen["outputs"][0]["finish_reason"], "stop");
    let date = complete(&["-p", "Born on", "--regex", "[0-9]{4}-[0-9]{2}"]);
    assert!(text(&date, 0).len() == 7 && text(&date, 0).as_bytes()[4] == b'-', "{date}");
    let schema = r#"{"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"],
        "additionalProperties": false}"#;
    let json = complete(&["-p", "Is water wet?", "--json-schema", schema, "--ignore-eos"]);
    let value: Value = serde_json::from_str(text(&json, 0)).expect("JSON");
    assert!(value["wet"].is_boolean(), "{json}");
    let (baton, model) = (Baton::new(), model_arg());
    baton.fails(
        &["complete", &model, "--temperature", "0", "-p", "x", "--json-schema", "{\"not\": {}}"],
        "not supported: not",
    );
    baton.fails(
        &["complete", &model, "--temperature", "0", "-p", "x", "--regex", "("],
        "the regular expression cannot be used",
    );
    baton.fails(
        &["complete", &model, "--temperature", "0", "-p", "x", "--regex", "a", "--beam-search"],
        "beam search",
    );
    baton.fails(
        &["complete", &model, "--temperature", "0", "-p", "x", "--json-schema", "@/no/file"],
        "cannot read /no/file",
    );
}

#[test]
fn texts_without_json_are_told_apart() {
    let out = Baton::new().ok(&[
        "complete",
        &model_arg(),
        "--temperature",
        "0",
        "--max-tokens=4",
        "-p",
        FRANCE,
        "-p",
        "Hello",
    ]);
    assert!(out.contains("── prompt 1\n Paris") && out.contains("── prompt 2\n"), "{out}");
    let out = Baton::new().ok(&[
        "complete",
        &model_arg(),
        "--max-tokens=4",
        "-p",
        FRANCE,
        "-n",
        "2",
        "--temperature=1",
    ]);
    assert!(out.contains("── 1\n") && out.contains("── 2\n"), "{out}");
}

#[test]
fn verbose_says_where_memory_and_time_go() {
    let ran = Baton::new().run(&[
        "complete",
        &model_arg(),
        "--temperature",
        "0",
        "--max-tokens=4",
        "-p",
        FRANCE,
        "--verbose",
    ]);
    for word in ["weights", "KV cache", "tokens/s", "5 prompt tokens (0 cached), 4 new"] {
        assert!(ran.stderr.contains(word), "{word} is not in {}", ran.stderr);
    }
}

#[test]
fn a_reader_that_leaves_ends_it_quietly() {
    let baton = Baton::new();
    let mut command = baton.command(&[
        "complete",
        &model_arg(),
        "-p",
        "Once upon a time",
        "--max-tokens=256",
        "--ignore-eos",
    ]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut start = [0; 4];
    child.stdout.take().unwrap().read_exact(&mut start).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn models_are_sampled_as_their_makers_recommend() {
    let baton = Baton::new();
    let run = |flags: &[&str]| {
        let ran = baton.run(
            &[&["complete", &model_arg(), "-p", "Once upon a time", "--max-tokens", "24", "-v"], flags]
                .concat(),
        );
        assert_eq!(ran.code, 0, "{ran:?}");
        ran
    };
    let first = run(&[]);
    assert!(
        first.stderr.contains("sampling defaults: temperature 0.2, top_p 0.9 (from the catalogue)"),
        "{first:?}"
    );
    // With a temperature of 0.2 two of three runs may agree, but not all of these.
    let hot = ["--temperature", "1.5"];
    assert_ne!(run(&hot).stdout, run(&hot).stdout, "unseeded sampling is random");
    assert_eq!(
        run(&[&hot[..], &["--seed", "7"]].concat()).stdout,
        run(&[&hot[..], &["--seed", "7"]].concat()).stdout
    );
    let neutral = run(&["--generation-config", "vllm"]);
    assert!(neutral.stderr.contains("sampling defaults: neutral"), "{neutral:?}");
    let given = run(&["--override-generation-config", "{\"top_k\": 1}"]);
    assert!(
        given.stderr.contains("temperature 0.2, top_p 0.9, top_k 1 (from the catalogue and"),
        "{given:?}"
    );
    let file = baton.home.path().join("generation_config.json");
    std::fs::write(&file, "{\"temperature\": 0.0}").unwrap();
    let of_file = ["--generation-config", &file.display().to_string()];
    assert_eq!(run(&of_file).stdout, run(&["--temperature", "0"]).stdout);
    baton.fails(
        &["complete", &model_arg(), "-p", "x", "--generation-config", "/no/such"],
        "cannot read /no/such",
    );
}

#[test]
fn a_text_in_the_place_of_the_model_is_the_prompt() {
    let baton = Baton::new();
    baton.ok(&["pull", "--from", &model_arg()]);
    let flags = ["--temperature", "0", "--max-tokens", "12"];
    let plain = baton.ok(&[&["complete", FRANCE], &flags[..]].concat());
    assert_eq!(plain, baton.ok(&[&["complete", "-p", FRANCE], &flags[..]].concat()));
}

#[test]
fn a_context_that_does_not_fit_shrinks_and_says_so() {
    let baton = Baton::new();
    let run = |flags: &[&str]| {
        baton.run(&[&["complete", &model_arg(), "-p", "x", "--max-tokens", "2"], flags].concat())
    };
    let shrunk = run(&["--kv-cache-memory", "10MiB"]);
    assert_eq!(shrunk.code, 0, "{shrunk:?}");
    assert!(shrunk.stderr.contains("note: the context is 448 tokens, not the 8192"), "{shrunk:?}");
    assert!(shrunk.stderr.contains("--kv-cache-memory 180MiB makes it fit"), "{shrunk:?}");
    assert_eq!(run(&["--dtype", "half"]).stderr.lines().count(), 1, "a note, no error");
    assert_eq!(run(&["--max-model-len", "1k"]).stderr, "");
}
