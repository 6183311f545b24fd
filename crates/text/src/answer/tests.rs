//! However a text is split, the events are the same; text that is not a call is never lost.

use proptest::prelude::*;

use super::*;

fn id() -> String {
    "id".to_owned()
}

fn parser(options: AnswerOptions, prompt: &str) -> AnswerParser {
    AnswerParser::new(options, prompt)
}

fn names() -> Arc<[String]> {
    Arc::from(["add".to_owned(), "get_weather".to_owned()])
}

fn calls(format: ToolFormat) -> AnswerOptions {
    AnswerOptions {
        reasoning: None,
        calls: CallMode::Auto { format, names: names() },
        parallel: true,
        new_id: id,
    }
}

fn thinking(format: ReasoningFormat) -> AnswerOptions {
    AnswerOptions { reasoning: Some(format), calls: CallMode::None, parallel: true, new_id: id }
}

/// The events of a text that comes in these pieces.
fn read<'a>(
    options: &AnswerOptions,
    prompt: &str,
    pieces: impl IntoIterator<Item = &'a str>,
) -> Vec<AnswerEvent> {
    let mut parser = parser(options.clone(), prompt);
    let mut all = Vec::new();
    for piece in pieces {
        let mut events = Vec::new();
        parser.push(piece, &mut events);
        append_events(&mut all, events);
    }
    let mut events = Vec::new();
    parser.finish(&mut events);
    append_events(&mut all, events);
    all
}

/// Short forms: `content`, `[reasoning]`, `name(arguments)`.
fn show(events: &[AnswerEvent]) -> String {
    let mut text = String::new();
    for event in events {
        match event {
            AnswerEvent::Content(content) => text.push_str(content),
            AnswerEvent::Reasoning(reasoning) => text.extend(["[", reasoning, "]"]),
            AnswerEvent::CallBegin { name, .. } => text.extend([name, "("]),
            AnswerEvent::Arguments { text: arguments, .. } => text.push_str(arguments),
            AnswerEvent::CallEnd { .. } => text.push(')'),
        }
    }
    text
}

/// The text in pieces that end where a bit is set.
fn cut(text: &str, is_cut: impl Fn(usize) -> bool) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut start = 0;
    for (number, (at, _)) in text.char_indices().skip(1).enumerate() {
        if is_cut(number) {
            pieces.push(&text[start..at]);
            start = at;
        }
    }
    pieces.push(&text[start..]);
    pieces
}

/// Checks the whole text and cuts of it: all cuts of a short text, else all cuts in one or two places and into letters.
fn check_with(options: &AnswerOptions, prompt: &str, text: &str, expect: &str) {
    let whole = read(options, prompt, [text]);
    assert_eq!(show(&whole), expect, "{text}");
    let length = text.chars().count();
    let same =
        |pieces: Vec<&str>| assert_eq!(read(options, prompt, pieces.iter().copied()), whole, "{pieces:?}");
    if length <= 15 {
        for bits in 0..1_u32 << length.saturating_sub(1) {
            same(cut(text, |number| bits >> number & 1 == 1));
        }
        return;
    }
    same(cut(text, |_| true));
    for first in 0..length {
        for second in first..length {
            same(cut(text, |number| number == first || number == second));
        }
    }
}

fn check(format: ToolFormat, text: &str, expect: &str) {
    check_with(&calls(format), "", text, expect);
}

#[test]
fn hermes() {
    let format = ToolFormat::Hermes;
    check(
        format,
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>",
        "add({\"a\": 1})",
    );
    check(
        format,
        "Sure.\n<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>\n<tool_call>{\"name\": \"x\", \"arguments\": {\"b\": \"</tool_call>\"}}</tool_call>\n",
        "Sure.add({})x({\"b\": \"</tool_call>\"})",
    );
    check(format, "<tool_call>{\"name\": \"x\"}</tool_call>", "x({})");
    check(format, "a < b <tool> \n", "a < b <tool> \n");
    check(format, "<tool_call>x", "<tool_call>x");
    check(format, "<tool_call>{bad}</tool_call>", "<tool_call>{bad}</tool_call>");
    check(format, " <tool_call>{\"name\": 5}</tool_call> x", " <tool_call>{\"name\": 5}</tool_call> x");
    check(format, "<tool_call>\n<tool_call>{\"name\": \"x\"}</tool_call>", "<tool_call>\nx({})");
    // Cut off by the length limit.
    check(format, "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": ", "add({\"a\": )");
    check(format, "<tool_call>{\"name\": \"add\"", "<tool_call>{\"name\": \"add\"");
    check(format, "<tool_call>{\"name\": \"x\"}</tool_", "x({})");
    // Wrong after it was announced.
    check(
        format,
        "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": oops}}</tool_call> ok",
        "add({\"a\": oops}}) ok",
    );
    check(format, "<tool_call>{\"name\": \"x\"}}</tool_call>", "x({})}</tool_call>");
}

#[test]
fn llama() {
    let format = ToolFormat::Llama3Json;
    check(format, "{\"name\": \"add\", \"parameters\": {\"a\": 1}}", "add({\"a\": 1})");
    check(
        format,
        "<|python_tag|>{\"name\": \"x\", \"parameters\": {}}; {\"name\": \"add\", \"parameters\": {}}",
        "x({})add({})",
    );
    check(format, "{\"name\": \"Bob\", \"age\": 5}", "{\"name\": \"Bob\", \"age\": 5}");
    check(format, "Call:\n{\"name\": \"add\", \"parameters\": {}} done", "Call:add({}) done");
    check(format, "x {\"name\": \"add\", \"parameters\": {}}", "x {\"name\": \"add\", \"parameters\": {}}");
    check(format, "{\"name\": \"add\", \"parameters\": {}};", "add({});");
    check(format, "{}{;", "{}{;");
    check(format, "<|python_tag|>print(1)", "<|python_tag|>print(1)");
}

#[test]
fn mistral() {
    let format = ToolFormat::Mistral;
    check(
        format,
        "[TOOL_CALLS] [{\"name\": \"a\", \"arguments\": {\"x\": [1]}}, {\"name\": \"b\", \"arguments\": {}}]",
        "a({\"x\": [1]})b({})",
    );
    check(format, "[TOOL_CALLS]get_weather[ARGS]{\"a\": {}}[TOOL_CALLS]b{}", "get_weather({\"a\": {}})b({})");
    check(format, "[TOOL_CALLS][]", "[TOOL_CALLS][]");
    check(format, "[TOOL_CALLS]f[ARX", "[TOOL_CALLS]f[ARX");
    check(format, "[1] [TOOL", "[1] [TOOL");
    check(format, "[TOOL_CALLS][{\"name\": \"a\", \"arguments\": {}}, 5]", "a({}), 5]");
}

#[test]
fn bare_json() {
    let format = ToolFormat::Json;
    check(format, "[{\"name\": \"add\", \"parameters\": {}}]", "add({})");
    check(format, "{\"name\": \"add\", \"arguments\": {\"a\": \"é\"}}", "add({\"a\": \"é\"})");
    check(format, "[1, 2]", "[1, 2]");
    check(format, "{\"arguments\": {}, \"name\": \"add\"}\n", "add({})");
    let required = AnswerOptions { calls: CallMode::Required { names: names() }, ..calls(format) };
    check_with(
        &required,
        "",
        " [{\"name\": \"add\", \"parameters\": {}}, {\"name\": \"add\", \"parameters\": {}}]",
        "add({})add({})",
    );
    // What is left of a call that was cut off is not content, wherever the cut is.
    let list = "[{\"name\": \"add\", \"parameters\": {\"a\": 1}}]";
    for end in 0..list.len() {
        let mut parser = AnswerParser::new(required.clone(), "");
        let mut events = Vec::new();
        parser.push(&list[..end], &mut events);
        parser.finish(&mut events);
        assert!(!events.iter().any(|event| matches!(event, AnswerEvent::Content(_))), "{end}: {events:?}");
    }
    let single = AnswerOptions { parallel: false, ..required };
    check_with(
        &single,
        "",
        "[{\"name\": \"add\", \"parameters\": {}}, {\"name\": \"add\", \"parameters\": {}}]",
        "add({})",
    );
}

#[test]
fn a_named_call_is_all_of_the_text() {
    let named = AnswerOptions { calls: CallMode::Named("add".to_owned()), ..calls(ToolFormat::Json) };
    check_with(&named, "", " {\"a\": 1} \n", "add({\"a\": 1})");
    check_with(&named, "", " \n", "");
}

#[test]
fn reasoning() {
    let qwen = thinking(ReasoningFormat::Qwen3);
    check_with(&qwen, "", "<think>\na b\n</think>\n\nc d", "[a b]c d");
    check_with(&qwen, "", " <b>x", " <b>x");
    check_with(&qwen, "", "<thin", "<thin");
    check_with(&qwen, "", "<think>a</thi", "[a</thi]");
    check_with(&qwen, "", "<think>a<b</think>", "[a<b]");
    check_with(&qwen, "", "<think></think>x", "x");
    check_with(&qwen, "", "x <think>y</think>", "x <think>y</think>");
    // The prompt opened the tag, or closed it.
    check_with(&qwen, "<|assistant|><think>\n", "a</think>b", "[a]b");
    check_with(&qwen, "<think>", "<think>a</think>b", "[a]b");
    check_with(&qwen, "<think>\n\n</think>\n\n", "a", "a");
    let deepseek = thinking(ReasoningFormat::DeepSeekR1);
    check_with(&deepseek, "", "a</think>b", "[a]b");
    check_with(&deepseek, "", "<think>a", "[a]");
    check_with(&deepseek, "<think></think>", "a", "a");
    check_with(&thinking(ReasoningFormat::Mistral), "", "[THINK]a[/THINK]b", "[a]b");
}

#[test]
fn calls_follow_reasoning() {
    let both = AnswerOptions { reasoning: Some(ReasoningFormat::Qwen3), ..calls(ToolFormat::Hermes) };
    check_with(
        &both,
        "",
        "<think>I <tool_call> x</think>\n\n<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>",
        "[I <tool_call> x]add({})",
    );
}

#[test]
fn channels() {
    let (prompt, format) = ("<|start|>assistant", ReasoningFormat::OpenAi);
    let plain = thinking(format);
    check_with(
        &plain,
        prompt,
        "<|channel|>analysis<|message|>a b<|end|><|start|>assistant<|channel|>final<|message|>c < d",
        "[a b]c < d",
    );
    check_with(&plain, prompt, "<|channel|>final<|message|>x<|return|>", "x");
    check_with(&plain, prompt, "<|channel|>analysis<|message|>cut <|en", "[cut <|en]");
    check_with(&plain, prompt, "<|channel|>analysis<|mess", "");
    check_with(&plain, prompt, "", "");
    // Without a header, and with a prompt that has written it.
    check_with(&plain, prompt, "to be <b>", "to be <b>");
    check_with(&plain, "<|start|>assistant<|channel|>final<|message|>", "{\"a\": 1}", "{\"a\": 1}");
    check_with(&plain, "<|start|>assistant<|channel|>analysis<|message|>I", " see<|end|>", "[ see]");
    check_with(
        &plain,
        "<|start|>user<|message|>Hi<|end|><|start|>assistant",
        "<|channel|>final<|message|>x",
        "x",
    );
    // What nobody offered is not shown, and two headers in a row are one.
    check_with(&plain, prompt, "<|channel|>commentary to=python code<|message|>1 + 1<|call|>", "");
    check_with(&plain, prompt, "<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "[a]b");
    let both = AnswerOptions { reasoning: Some(format), ..calls(ToolFormat::OpenAi) };
    check_with(
        &both,
        prompt,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>\
         <|start|>assistant to=functions.add<|channel|>commentary <|constrain|>json<|message|>{\"a\": 1}<|call|>",
        "[Hm.]I look.add({\"a\": 1})",
    );
    check_with(
        &both,
        prompt,
        "<|channel|>commentary to=functions.x <|constrain|>json<|message|>{}<|call|>commentary to=functions.x",
        "x({})commentary to=functions.x",
    );
    check_with(
        &both,
        prompt,
        "<|channel|>commentary to=functions.add json<|message|>{\"a\": ",
        "add({\"a\": )",
    );
    check_with(
        &AnswerOptions { parallel: false, ..both.clone() },
        prompt,
        " to=functions.add<|channel|>commentary json<|message|>{}<|call|><|start|>assistant to=functions.x<|channel|>commentary json<|message|>{}<|call|>",
        "add({})",
    );
    // Reasoning that is not asked for is part of the answer.
    check_with(
        &calls(ToolFormat::OpenAi),
        prompt,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        "ab",
    );
    let required = AnswerOptions {
        reasoning: Some(format),
        calls: CallMode::Required { names: names() },
        ..calls(ToolFormat::OpenAi)
    };
    check_with(
        &required,
        "<|start|>assistant<|channel|>final<|message|>",
        "[{\"name\": \"add\", \"parameters\": {}}]",
        "add({})",
    );
    assert_eq!(format.skipped_after("x<|start|>assistant").as_deref(), Some("<|channel|>final<|message|>"));
    assert_eq!(format.skipped_after("x<|start|>assistant<|channel|>final<|message|>"), None);
    assert!(both.marks().contains(&"<|call|>"));
    // A header without an end is bounded.
    let long = format!("<|channel|>{}", "x".repeat(4096));
    assert_eq!(show(&read(&plain, prompt, [long.as_str()])), long);
}

#[test]
fn templates_choose_the_format() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/chat-templates");
    let check = |name: &str, format: Option<ToolFormat>, reasoning: Option<ReasoningFormat>| {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).expect("template");
        assert_eq!(ToolFormat::of_template(&source), format, "{name}");
        assert_eq!(ReasoningFormat::of_template(&source), reasoning, "{name}");
    };
    let (hermes, qwen3) = (Some(ToolFormat::Hermes), Some(ReasoningFormat::Qwen3));
    check("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", hermes, None);
    check("Qwen-Qwen2.5-7B-Instruct", hermes, None);
    check("Qwen-Qwen3-0.6B", hermes, qwen3);
    check("meta-llama-Llama-3.1-8B-Instruct", Some(ToolFormat::Llama3Json), None);
    check("meta-llama-Llama-3.2-3B-Instruct", Some(ToolFormat::Llama3Json), None);
    check("mistralai-Mistral-Nemo-Instruct-2407", Some(ToolFormat::Mistral), None);
    check("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", None, qwen3);
    check("google-gemma-2-2b-it", None, None);
    check("openai-gpt-oss-120b", Some(ToolFormat::OpenAi), Some(ReasoningFormat::OpenAi));
}

/// Texts made of the parts that matter to the formats.
fn texts() -> impl Strategy<Value = String> {
    let parts = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<think>",
        "</think>",
        "<|channel|>",
        "<|message|>",
        "<|call|>",
        "<|start|>assistant",
        "analysis",
        "to=functions.add",
        "{",
        "}",
        "[",
        "]",
        "\"name\"",
        "\"arguments\"",
        "\"parameters\"",
        ":",
        ",",
        ";",
        "\"add\"",
        "\"x\"",
        "1",
        "\n",
        " ",
        "{\"name\": \"add\", \"arguments\": {\"a\": 1}}",
        "{\"name\": \"x\", \"parameters\": {}}",
        "é",
        "\\",
        "text",
    ];
    proptest::collection::vec(proptest::sample::select(parts.to_vec()), 0..24)
        .prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn random_cuts_change_nothing(text in texts(), cuts in proptest::collection::vec(any::<bool>(), 400)) {
        let formats = [ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::Mistral, ToolFormat::OpenAi, ToolFormat::Json];
        for format in formats {
            let ways = [ReasoningFormat::Qwen3, ReasoningFormat::DeepSeekR1, ReasoningFormat::OpenAi].map(Some);
            for reasoning in ways.into_iter().chain([None]) {
                let options = AnswerOptions { reasoning, ..calls(format) };
                let whole = read(&options, "", [text.as_str()]);
                let pieces = cut(&text, |number| cuts[number % cuts.len()]);
                prop_assert_eq!(read(&options, "", pieces), whole);
                let letters = cut(&text, |_| true);
                prop_assert_eq!(&read(&options, "", letters), &read(&options, "", [text.as_str()]));
            }
        }
    }

    #[test]
    fn without_a_call_no_letter_is_lost(text in texts()) {
        for format in [ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::Mistral, ToolFormat::Json] {
            let events = read(&calls(format), "", [text.as_str()]);
            if !events.iter().any(|event| matches!(event, AnswerEvent::CallBegin { .. })) {
                prop_assert_eq!(show(&events), &*text);
            }
        }
    }
}
