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
        "serve -m m -c 4096 -b 2048 -ub 512 -ctk q8_0 -ctv q8_0 -t 4 -tb 4 -s 1 -a name -dev CUDA0",
        "serve -m m -dev none --no-webui --cors-origins * --models-max 3 --temp 0.7 --top-k 40 --top-p 0.9 --min-p 0.05",
        "serve -m m --repeat-penalty 1.1 --mirostat 0 --xtc-probability 0.0 --top-n-sigma -1 -n -1 -v -lv 3 --no-warmup",
        "serve m -O3 -cc {} --compilation-config.mode 3 --no-enable-log-outputs --no-enforce-eager",
        "complete -m m -p a -r User: -e",
        "chat -m m -sys Hello -cnv --mirostat 0",
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
        ("serve m -tp 2", "--tensor-parallel-size 2 is not supported"),
        ("serve m --enable-lora", "adapters are not supported"),
        ("serve m --speculative-model d", "this is an old flag"),
        ("serve m --cpu-offload-gb 4", "--cpu-offload-gb 4 is not supported"),
        ("serve m --middleware x", "runs no code of others"),
        ("serve m --kv-transfer-config {}", "its parts are separate flags"),
        ("serve m --cpu-offload-gb 1", "--cpu-offload-gb 1 is not supported"),
        ("serve m --mirostat 1", "--mirostat 1 is not supported"),
        ("serve m --nnodes 2", "--nnodes 2 is not supported"),
        ("serve m --logprobs-mode processed_logits", "--logprobs-mode processed_logits is not supported"),
        ("serve -m m -md d.gguf", "draft models have a flag of their own"),
        ("serve m --mmproj p.gguf", "models take text only"),
        ("serve m --api-key-file keys", "keys are not read from a file"),
    ] {
        let error = judge(&matches(line).expect("it is read")).expect_err(line).to_string();
        assert!(error.contains(expect), "{line}: {error}");
    }
}

/// A flag is taken or refused with a reason, but never unknown.
#[test]
fn every_flag_of_vllm_is_known() {
    let flags = include_str!("../../tests/data/vllm_flags.txt");
    let flags: Vec<&str> = flags.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(flags.len() > 180, "{}", flags.len());
    let serve = command().find_subcommand("serve").expect("it is there").clone();
    let known: Vec<(String, bool)> = longs(&serve).collect();
    for flag in flags {
        let (name, has_value) = flag.strip_suffix(" VALUE").map_or((flag, false), |name| (name, true));
        if name == "model" {
            continue;
        }
        let found = known.iter().find(|(known, _)| known == name);
        let (_, takes_value) = found.unwrap_or_else(|| panic!("--{name} is unknown"));
        assert_eq!(*takes_value, has_value, "--{name}");
        if !has_value {
            parse(&format!("serve m --no-{name}"));
        }
    }
}

#[test]
fn nothing_is_listed_twice_or_has_another_meaning() {
    let serve = Cli::command().find_subcommand("serve").expect("it is there").clone();
    let own: Vec<String> = longs(&serve).map(|(name, _)| name).collect();
    for (at, (name, _, effect)) in FLAGS.iter().enumerate() {
        assert!(FLAGS[..at].iter().all(|(other, ..)| other != name), "--{name} is there twice");
        // `baton serve` has a --profile of its own; this one is for `baton bench`.
        assert!(
            *name == "profile" || !own.iter().any(|own| own == name),
            "--{name} is a flag of `baton serve`"
        );
        let (Note(text) | Only(text) | Single(text) | Refuse(text, _)) = effect else { continue };
        assert!(!text.ends_with('.') && text.len() > 10, "--{name}: {text}");
    }
    for (short, long) in SHORTS {
        let known = FLAGS.iter().any(|(name, ..)| *name == &long[2..]) || MODEL_FLAGS.contains(long);
        let of_a_command = ["serve", "complete", "chat"].iter().any(|name| {
            longs(command().find_subcommand(name).expect("a command")).any(|(name, _)| name == long[2..])
        });
        assert!(known || of_a_command, "{short} means {long}, which is nothing");
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
        (
            "serve m --temp 0.5 --top_k=3",
            "serve --override-generation-config={\"temperature\":0.5,\"top_k\":3} m",
        ),
        ("serve m --temp warm", "serve m --temp=warm"),
        ("serve m --reasoning off", "serve m --default-chat-template-kwargs={\"enable_thinking\":false}"),
        ("serve m --reasoning=on", "serve m --default-chat-template-kwargs={\"enable_thinking\":true}"),
        ("serve m --reasoning auto --reasoning loud", "serve m --reasoning=loud"),
        ("chat m --temp 0.5", "chat m --temp 0.5"),
        ("serve m --no-enforce-eager --no_trust_remote_code", "serve m"),
        ("serve m -O3 --compilation-config.mode 3", "serve m --optimization-level=3 --compilation-config 3"),
    ] {
        assert_eq!(normal(typed), meant, "{typed}");
    }
}

#[test]
fn a_tip_is_right_or_there_is_none() {
    for (line, tip) in [
        ("serve m --max-model-lne 5", Some("'--max-model-len'")),
        ("serve m --enable-flux-capacitor", None),
        ("serve m --kv-events-config x", None),
        ("serve m --prot 80", Some("'--port'")),
        ("serve m --toaster-setup x", None),
        ("complete -p x --beams 4", None),
    ] {
        let said = matches(line).expect_err(line).to_string();
        assert_eq!(said.contains("tip:"), tip.is_some(), "{line}: {said}");
        assert!(tip.is_none_or(|tip| said.contains(tip)), "{line}: {said}");
    }
    assert_eq!((distance("abc", "acb"), distance("", "ab"), distance("same", "same")), (1, 2, 0));
}
