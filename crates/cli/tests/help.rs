//! What a user sees without running anything: help, version, completions, manual pages, wrong usage.

mod common;

use baton_cpu::{ISA_VARIABLE, Isa};
use common::{Baton, finish, model_arg};

const COMMANDS: [&str; 15] = [
    "pull",
    "inspect",
    "plan",
    "complete",
    "chat",
    "run",
    "list",
    "rm",
    "ps",
    "serve",
    "route",
    "bench",
    "graph",
    "completions",
    "man",
];

#[test]
fn help_lists_every_command_with_examples() {
    let help = Baton::new().ok(&["--help"]);
    for command in COMMANDS {
        assert!(help.contains(&format!("\n  {command} ")), "{command} is not in:\n{help}");
    }
    assert!(help.contains("Examples:") && help.contains("BATON_HOME"), "{help}");
}

#[test]
fn every_command_explains_itself() {
    for command in COMMANDS {
        let help = Baton::new().ok(&[command, "--help"]);
        assert!(help.contains("Usage: baton") && help.contains("Example"), "{help}");
    }
}

#[test]
fn engine_flags_have_vllms_names_and_their_own_headings() {
    let help = Baton::new().ok(&["complete", "--help"]);
    for heading in ["Sampling:", "Engine:", "KV cache:", "Request:"] {
        assert!(help.contains(&format!("\n{heading}\n")), "{heading} is not in:\n{help}");
    }
    for flag in [
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--max-model-len",
        "--block-size",
        "--gpu-memory-utilization",
        "--kv-cache-dtype",
        "--dtype",
        "--load-format",
        "--enforce-eager",
        "--seed",
        "--no-enable-prefix-caching",
        "--swap-space",
        "--scheduling-policy",
    ] {
        assert!(help.contains(flag), "{flag} is not in:\n{help}");
    }
}

#[test]
fn version_says_what_this_build_is() {
    let version = Baton::new().ok(&["--version"]);
    assert!(version.starts_with(&format!("baton {}", env!("CARGO_PKG_VERSION"))), "{version}");
    assert!(version.contains("debug") || version.contains("release"), "{version}");
    // The name comes from the code: a processor may have paths that this test has never heard of.
    assert!(version.contains(&format!("{} kernels", Isa::best())), "{version}");
    let paths = version.lines().find_map(|line| line.strip_prefix("kernel paths: ")).expect("a line of them");
    let paths: Vec<Isa> = paths.split(", ").map(|name| name.parse().expect("a path")).collect();
    assert!(paths.iter().all(|isa| isa.is_available()) && paths.contains(&Isa::best()), "{version}");
}

#[test]
fn every_path_of_this_processor_can_be_asked_for() {
    let baton = Baton::new();
    let model = model_arg();
    let available = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    let mut num_paths = 0;
    for isa in available {
        let mut command = baton.command(&["complete", &model, "-p", "The sky is", "--max-tokens", "4"]);
        command.env(ISA_VARIABLE, isa.to_string());
        let ran = finish(command, "");
        assert_eq!(ran.code, 0, "{isa}: {ran:?}");
        assert!(!ran.stdout.trim().is_empty(), "{isa}: {ran:?}");
        num_paths += 1;
    }
    assert!(num_paths > 0, "there is always the portable path");
}

#[test]
fn no_command_is_wrong_usage() {
    assert_eq!(Baton::new().run(&[]).code, 2);
}

#[test]
fn wrong_usage_is_exit_code_2() {
    let baton = Baton::new();
    for args in [
        &["dance"][..],
        &["complete", "--no-such-flag"],
        &["complete", "-p", "x", "--kv-cache-memory", "lots"],
        &["complete", "-p", "x", "--gpu-memory-utilization", "1.5"],
        &["complete", "-p", "x", "--device", "abacus"],
        &["complete", "-p", "x", "--logit-bias", "5"],
        &["complete", "-p", "x", "--length-penalty", "1"],
        &["complete", "-p", "x", "--max-num-seqs", "-1"],
        &["complete", "-p", "x", "--system", "y"],
        &["completions", "cmd.exe"],
        &["serve", "--ssl-certfile", "cert.pem"],
        &["serve", "--otlp-traces-endpoint", "https://collector"],
    ] {
        let ran = baton.run(args);
        assert_eq!(ran.code, 2, "{args:?}: {ran:?}");
        assert!(ran.stderr.starts_with("error: "), "{args:?}: {ran:?}");
    }
}

#[test]
fn completions_know_the_flags() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = Baton::new().ok(&["completions", shell]);
        assert!(script.contains("max-num-batched-tokens"), "{shell}");
    }
}

#[test]
fn manual_pages_are_written() {
    let baton = Baton::new();
    assert!(baton.ok(&["man"]).contains(".TH baton 1"));
    let directory = baton.home.path().join("man");
    baton.ok(&["man", "--out", &directory.display().to_string()]);
    for command in COMMANDS {
        let page = std::fs::read_to_string(directory.join(format!("baton-{command}.1"))).expect(command);
        assert!(page.contains(".SH NAME"), "{command}");
    }
}
