//! `baton chat` through a pipe: each line is a turn, and nothing is read from a terminal.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use common::{Baton, model_arg};

fn chat(flags: &[&str], lines: &str) -> String {
    let baton = Baton::new();
    let ran = baton
        .run_with(&[&["chat", &model_arg(), "--temperature=0", "--max-tokens=24"], flags].concat(), lines);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(ran.stderr, "");
    ran.stdout
}

#[test]
fn two_turns_and_a_reset() {
    let question = "Write one sentence about the sea.";
    let said =
        chat(&[], &format!("{question}\nAnd one more.\n/reset\n{question}\n/stats\n/quit\nnever said\n"));
    assert!(said.contains("the conversation begins anew"), "{said}");
    assert!(said.contains("3 turns"), "{said}");
    assert!(!said.contains("never said"), "{said}");
    let body = said.split_once('\n').expect("the first line names the model").1;
    let first = body.split(" tokens · ").next().expect("an answer and its length");
    assert!(first.trim().len() > 10, "{said}");
    // The first answer comes again after the reset, word for word; the second is another.
    assert_eq!(body.matches(first.trim_end_matches(char::is_numeric)).count(), 2, "{said}");
}

#[test]
fn what_was_said_before_is_not_computed_again() {
    let said = chat(&[], "Tell me about cats.\nMore.\n/stats\n");
    let (_, stats) = said.split_once("2 turns, ").expect("stats");
    let cached_tokens =
        stats.split_once('(').and_then(|(_, rest)| rest.split_once(' ')?.0.parse::<usize>().ok());
    assert!(cached_tokens.is_some_and(|count| count >= 32), "{said}");
}

#[test]
fn commands_change_the_chat() {
    let said = chat(
        &["--system", "You are a helpful assistant.", "--seed=1"],
        "/help\n/set temperature 0.5\n/set max_tokens 3\n/set top_p 7\n/set mood good\n/set\n/system Be brief.\n/dance\nTell me a long story about a river.\n",
    );
    for words in [
        "/reset ",
        "temperature is 0.5",
        "max_tokens is 3",
        "top_p must be in (0, 1], got 7",
        "there is no parameter mood",
        "temperature         0.5",
        "the system message is set",
        "Unknown command /dance. Try /help.",
        "3 tokens",
        "cut at the length limit",
    ] {
        assert!(said.contains(words), "{words:?} is not in:\n{said}");
    }
}

#[test]
fn the_model_its_device_and_its_sampling_are_said_first() {
    let said = chat(&[], "/bye\nnever said\n");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains(" · sampling: temperature 0.2, top_p 0.9 (from the catalogue)"), "{said}");
    let ran = Baton::new().run(&["run", &model_arg(), "--seed=1", "--max-tokens=8", "Say", "hello."]);
    assert!(ran.code == 0 && ran.stdout.trim().len() > 2, "{ran:?}");
}

#[test]
fn several_lines_are_one_turn() {
    let said = chat(&[], "\"\"\"\nWhat is the capital\nof France?\n\"\"\"\nSay \\\nhello.\n/stats\n");
    assert!(said.contains("2 turns"), "{said}");
}

#[test]
fn a_conversation_that_grows_too_long_says_so_and_goes_on() {
    let long = "word ".repeat(200);
    let said = chat(&["--max-model-len=128"], &format!("{long}\nHello\n/stats\n"));
    assert!(said.contains("error: ") && said.contains("128"), "{said}");
    assert!(said.contains("1 turns"), "{said}");
}

#[cfg(unix)]
#[test]
fn an_interrupt_stops_the_answer_only() {
    let baton = Baton::new();
    let mut command =
        baton.command(&["chat", &model_arg(), "--ignore-eos", "--max-tokens=4000", "--temperature=0"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    writeln!(stdin, "Tell me a long story.").unwrap();
    // The first byte of the answer: it is being written now.
    assert!(!lines.fill_buf().unwrap().is_empty());
    let killed = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    writeln!(stdin, "/stats").unwrap();
    drop(stdin);
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut lines, &mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{rest}");
    assert!(rest.contains("· stopped") && rest.contains("1 turns"), "{rest}");
}
