//! Whatever is wrong, the user gets one line that says so, and a non-zero exit code. Never a panic.

mod common;

use std::io::Read;

use common::{Baton, assert_is_error, data, finish, model_arg};

#[test]
fn what_is_no_model_is_refused() {
    let baton = Baton::new();
    let file = |name: &str, bytes: &[u8]| {
        let path = baton.home.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.display().to_string()
    };
    let directory = baton.home.path().join("empty");
    std::fs::create_dir(&directory).unwrap();
    let empty_directory = directory.display().to_string();
    for (model, expect) in [
        ("no/such/model".to_owned(), "there is no model"),
        (empty_directory, "has no config.json"),
        (file("empty.gguf", b""), "empty.gguf"),
        (file("text.gguf", b"this is not a model at all"), "text.gguf"),
        (file("text.txt", b"hello"), "text.txt"),
        (file("weights.bin", b"hello"), "pickled"),
        (file("config.json", b"{"), ""),
        (file("other.json", b"{\"model_type\": \"mamba\"}"), ""),
        (file("huge.gguf", &[b"GGUF\x03\0\0\0".as_slice(), &[0xff; 64]].concat()), "huge.gguf"),
    ] {
        for command in [&["inspect", &model][..], &["plan", &model], &["complete", &model, "-p", "x"]] {
            baton.fails(command, expect);
        }
        let ran = baton.run_with(&["chat", &model], "hello\n");
        assert_eq!(ran.code, 1);
        assert_is_error(&ran, expect);
    }
}

#[test]
fn a_cut_file_is_refused() {
    let baton = Baton::new();
    let mut start = vec![0; 4 << 20];
    std::fs::File::open(model_arg()).unwrap().read_exact(&mut start).unwrap();
    for len in [5, 100, 10_000, 1 << 20, 4 << 20] {
        let path = baton.home.path().join(format!("cut-{len}.gguf"));
        std::fs::write(&path, &start[..len]).unwrap();
        baton.fails(&["complete", &path.display().to_string(), "-p", "x"], "cut-");
    }
}

#[test]
fn a_configuration_without_weights_cannot_run() {
    let baton = Baton::new();
    baton.fails(&["complete", &data("llama-3.2-1b"), "-p", "x"], "--load-format dummy");
}

#[test]
fn prompts_are_checked() {
    let baton = Baton::new();
    let model = model_arg();
    baton.fails(&["complete", &model], "there is nothing to continue");
    baton.fails(&["complete", &model, "--prompt-token-ids", "1,x"], "\"x\" is not a token id");
    baton.fails(&["complete", &model, "--prompt-token-ids", ""], "--prompt-token-ids is empty");
    baton.fails(&["complete", &model, "--prompt-token-ids", "49152"], "49152");
    baton.fails(&["complete", &model, "-p", "", "--max-tokens", "1"], "the prompt is empty");
    baton.fails(&["complete", &model, "-p", "-", "-p", "-"], "only once");
    let long = "word ".repeat(600);
    baton.fails(&["complete", &model, "-p", &long, "--max-model-len", "512"], "512");
    let mut command = baton.command(&["complete", &model, "-p", "x"]);
    command.arg("-p").arg("-");
    let ran = finish_bytes(command, b"\xff\xfe");
    assert_eq!(ran.code, 1);
    assert_is_error(&ran, "UTF-8");
}

fn finish_bytes(mut command: std::process::Command, stdin: &[u8]) -> common::Ran {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), stdin).unwrap();
    command.stdin(std::fs::File::open(file.path()).unwrap());
    let output = command.output().unwrap();
    common::Ran {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

#[test]
fn impossible_flags_are_refused() {
    let baton = Baton::new();
    let model = model_arg();
    for (flags, expect) in [
        (&["--block-size", "0"][..], "--block-size must be"),
        (&["--block-size", "99999999"], "--block-size must be"),
        (&["--block-size", "8"], "a block size of 8"),
        (&["--max-num-seqs", "0"], "--max-num-seqs must be"),
        (&["--max-num-batched-tokens", "0"], "--max-num-batched-tokens must be"),
        (&["--max-num-batched-tokens", "8"], "at least --max-num-seqs (64)"),
        (&["--max-model-len", "0"], "--max-model-len"),
        (&["--max-model-len", "1000000"], "--max-model-len 1000000 is more than the 8192 tokens"),
        (&["--kv-cache-memory", "1KiB"], "the KV cache has room for 0 tokens"),
        (&["--kv-cache-memory", "10MiB", "--max-model-len", "8192"], "lower --max-model-len to"),
        (&["--kv-cache-memory", "100TiB"], ""),
        (&["--threads", "0"], "0 threads"),
        (&["--threads", "100000000"], "100000000 threads"),
        (&["--load-format", "safetensors"], "--load-format gguf"),
        (&["--load-format", "dummy"], "--load-format gguf"),
        (&["--dtype", "q8_0"], "--dtype Q8_0 is asked for, but the weights are"),
        (&["--dtype", "int3"], "--dtype \"int3\" is not known"),
    ] {
        baton.fails(&[&["complete", &model, "-p", "x"], flags].concat(), expect);
    }
}

#[test]
fn sampling_parameters_are_checked_before_anything_is_loaded() {
    let baton = Baton::new();
    for (flags, expect) in [
        (&["--temperature", "-1"][..], "temperature must be"),
        (&["--temperature", "nan"], "temperature must be"),
        (&["--top-p", "0"], "top_p must be"),
        (&["--top-p", "1.5"], "top_p must be"),
        (&["--min-p", "2"], "min_p must be"),
        (&["--repetition-penalty", "0"], "repetition_penalty must be"),
        (&["--presence-penalty", "3"], "presence_penalty must be"),
        (&["--frequency-penalty", "-3"], "frequency_penalty must be"),
        (&["--logit-bias", "5=1000"], "logit_bias must be"),
        (&["--max-tokens", "0"], "max_tokens must be"),
        (&["--min-tokens", "9", "--max-tokens", "8"], "min_tokens must be"),
        (&["--logprobs", "1000"], "logprobs must be"),
        (&["--prompt-logprobs", "1000"], "prompt_logprobs must be"),
        (&["-n", "0"], "n must be"),
        (&["-n", "1000"], "n must be"),
        (&["-n", "3", "--best-of", "2"], "best_of must be"),
        (&["--stop", ""], "stop must be"),
    ] {
        // There is no such model, but that is not what is said.
        baton.fails(&[&["complete", "no/such/model", "-p", "x"], flags].concat(), expect);
    }
}

#[test]
fn parameters_that_need_the_model_are_checked_with_it() {
    let baton = Baton::new();
    let model = model_arg();
    baton.fails(&["complete", &model, "-p", "x", "--stop-token-ids", "49152"], "stop_token_ids must be");
    baton.fails(&["complete", &model, "-p", "x", "--logit-bias", "49152=1"], "logit_bias must be");
    baton.fails(&["complete", &model, "-p", "x", "-n", "100"], "--max-num-seqs");
    let ran = baton.run_with(&["chat", &model, "-n", "2"], "");
    assert_eq!(ran.code, 1);
    assert_is_error(&ran, "one answer per turn");
}

#[test]
fn a_forced_kernel_path_that_is_unknown_is_refused() {
    let baton = Baton::new();
    let mut command = baton.command(&["complete", &model_arg(), "-p", "x"]);
    command.env("BATON_CPU_ISA", "abacus");
    let ran = finish(command, "");
    assert_eq!(ran.code, 1);
    assert_is_error(&ran, "BATON_CPU_ISA=abacus");
}

#[test]
fn a_system_prompt_that_cannot_be_used_is_named() {
    let (baton, model) = (Baton::new(), model_arg());
    let file = |name: &str, bytes: &[u8]| {
        let path = baton.home.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.display().to_string()
    };
    let long = "many words ".repeat(500);
    for (path, expect) in [
        ("/no/such/file".to_owned(), "cannot read /no/such/file"),
        (file("empty.txt", b" \n"), "empty.txt is empty"),
        (file("latin.txt", b"caf\xe9"), "latin.txt is not UTF-8 from byte 3 on"),
        (file("other=long.txt", long.as_bytes()), "raise --max-model-len"),
    ] {
        let flags = ["--load-format", "mock", "--max-model-len", "256", "--system-prompt-file", &path];
        let serve = ["serve", &model, "--port", "0", "--log-level", "off"];
        baton.fails(&[&serve[..], &flags].concat(), expect);
    }
    assert_eq!(baton.run(&["serve", &model, "--no-inject-system-prompt"]).code, 2, "it needs a prompt");
}
