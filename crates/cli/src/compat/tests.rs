//! Every flag that people bring from elsewhere.

use clap::{CommandFactory, FromArgMatches};

use super::*;
use crate::args::{Cli, Command as Chosen};

fn command() -> Command {
    add_to(Cli::command())
}

fn matches(line: &str) -> Result<ArgMatches, clap::Error> {
    let words = std::iter::once("baton").chain(line.split(' ')).map(str::to_owned).collect();
    command().try_get_matches_from(normalise(&command(), words)).map_err(without_wrong_tip)
}

fn parse(line: &str) -> Chosen {
    let matches = matches(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    judge(&matches).unwrap_or_else(|error| panic!("{line}: {error}"));
    Cli::from_arg_matches(&matches).unwrap_or_else(|error| panic!("{line}: {error}")).command
}

fn normal(line: &str) -> String {
    let words = std::iter::once("baton").chain(line.split(' ')).map(str::to_owned).collect();
    normalise(&command(), words)[1..].join(" ")
}

#[test]
fn the_command_line_is_consistent() {
    command().debug_assert();
}

/// What vLLM's, llama.cpp's and Ollama's users type.
#[test]
fn habits_are_understood() {
    for line in [
        "serve --model m.gguf",
        "serve -m m.gguf -c 4096 -ngl 99 --port 8080",
        "serve -hf owner/name:Q4_K_M",
        "serve m -tp 1",
        "serve m --tensor-parallel-size 1 --pipeline-parallel-size=1",
        "serve m --trust-remote-code",
        "serve m --enable-chunked-prefill",
        "serve m --enable-chunked-prefill=True",
        "serve m --enable-prefix-caching",
        "serve m --enable-relay-attention",
        "serve m --disable-log-requests --disable-log-stats",
        "serve m --quantization awq",
        "serve m -q awq",
        "serve m --chat-template template.jinja",
        "serve m --tokenizer other",
        "serve m --dtype half",
        "serve m --dtype bfloat16 --max_model_len 4k --gpu_memory_utilization 0.9",
        "serve m --max-model-len auto",
        "serve m --max-seq-len-to-capture 8192",
        "serve m --disable-async-output-proc",
        "serve m --generation-config vllm",
        "serve m --generation-config auto --override-generation-config {\"temperature\":0}",
        "serve m --served-model-name a b --api-key k",
        "serve m --enable-tokenizer-info-endpoint --enable-server-load-tracking",
        "serve m --enforce-eager --swap-space 4 --block-size 16 --seed 1",
        "serve m --load-format safetensors --revision main --tokenizer-mode auto",
        "serve m --max-num-seqs 256 --max-num-batched-tokens 8192 --max-logprobs 5",
        "serve m --guided-decoding-backend xgrammar --uvicorn-log-level info",
        "serve m --cpu-offload-gb 0 --num-scheduler-steps 8",
        "serve m --enable-auto-tool-choice --tool-call-parser hermes --structured-outputs-config.backend xgrammar",
        "serve m --ssl-certfile c --ssl-keyfile k --root-path /x --allowed-origins *",
        "serve m --ctx-size 4096 --parallel 4 --alias name --flash-attn --cont-batching -t 4",
        "serve m -np 4 -fa -cb --mlock --no-mmap --jinja",
        "bench latency --model m --input_len 32 --output_len 8 --batch_size 1",
        "bench latency m --profile --profile-result-dir out --disable-async-output-proc",
        "bench throughput --model m --num_prompts 10",
        "complete -m m -p text --n-predict 8 --temp 0.5",
        "chat -m m --temp 0.5",
        "run m",
        "run m Why is the sky blue?",
        "list",
        "ls",
        "ps",
        "rm m",
        "show m",
        "inspect --model m",
        "plan --model m --max-model-len 32K --context 4k",
    ] {
        parse(line);
    }
}

#[test]
fn what_cannot_be_done_is_refused_with_a_reason() {
    for (line, expect) in [
        ("serve m -tp 2", "--tensor-parallel-size 2 cannot be done"),
        ("serve m --enable-lora", "adapters are not supported"),
        ("serve m --speculative-model d", "the flag is an old one"),
        ("serve m --cpu-offload-gb 4", "--cpu-offload-gb 4 cannot be done"),
        ("serve m --middleware x", "runs no code of others"),
        ("serve m --kv-transfer-config {}", "flags of their own"),
    ] {
        let error = judge(&matches(line).expect("it is read")).expect_err(line).to_string();
        assert!(error.contains(expect), "{line}: {error}");
    }
}

#[test]
fn lines_are_read_as_they_were_meant() {
    for (typed, meant) in [
        ("serve --port 1 --model m.gguf --host ::1", "serve m.gguf --port 1 --host ::1"),
        ("serve --served-model-name a b --model=m", "serve m --served-model-name a b"),
        ("serve m --max_num_seqs=3", "serve m --max-num-seqs=3"),
        ("serve m -ngl 0", "serve m --device cpu"),
        ("serve m --n_gpu_layers=0", "serve m --device cpu"),
        ("complete m -p --max_tokens", "complete m -p --max_tokens"),
        ("complete m -p a_b --stop -m", "complete m -p a_b --stop -m"),
        ("complete m -- --model x", "complete m -- --model x"),
        ("bench serve --model name", "bench serve --model name"),
        ("bench latency --model m --input_len 3", "bench latency m --input-len 3"),
        ("dance --model m", "dance --model m"),
    ] {
        assert_eq!(normal(typed), meant, "{typed}");
    }
}

#[test]
fn a_tip_is_right_or_there_is_none() {
    for (line, tip) in [
        ("serve m --max-model-lne 5", Some("'--max-model-len'")),
        ("serve m --enable-dbo", None),
        ("serve m --kv-events-config x", None),
        ("serve m --prot 80", Some("'--port'")),
        ("serve m --override-pooler-config x", None),
        ("complete -p x --beams 4", None),
    ] {
        let said = matches(line).expect_err(line).to_string();
        assert_eq!(said.contains("tip:"), tip.is_some(), "{line}: {said}");
        assert!(tip.is_none_or(|tip| said.contains(tip)), "{line}: {said}");
    }
    assert_eq!((distance("abc", "acb"), distance("", "ab"), distance("same", "same")), (1, 2, 0));
}
