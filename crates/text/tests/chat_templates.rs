//! Real chat templates render exactly as transformers (Jinja2) renders them; what it refuses is refused here too.
//! The goldens are made by `data/make_goldens.py`.

use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use baton_text::{ArgumentsForm, ChatTemplate, RenderOptions, TemplateAbilities};
use serde_json::{Map, Value};

fn options(given: &Map<String, Value>, now: u64) -> RenderOptions {
    let mut kwargs = given.clone();
    let tools = kwargs.remove("tools");
    let add_generation_prompt = kwargs.remove("add_generation_prompt") == Some(Value::Bool(true));
    RenderOptions {
        add_generation_prompt,
        tools,
        chat_template_kwargs: kwargs,
        now: Some(UNIX_EPOCH + Duration::from_secs(now)),
        ..RenderOptions::default()
    }
}

#[test]
fn templates_render_as_in_transformers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/chat-templates");
    let goldens = std::fs::read_to_string(folder.join("goldens.json")).expect("goldens");
    let goldens: Value = serde_json::from_str(&goldens).expect("JSON");
    let now = goldens["now"].as_u64().expect("a moment");
    let mut compared = 0;
    let mut wrong = Vec::new();
    for (name, rendered) in goldens["rendered"].as_object().expect("templates") {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).expect("template");
        let template = ChatTemplate::new(&source, Some("<bos>"), Some("<eos>"))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        for (conversation, expect) in rendered.as_object().expect("conversations") {
            let given = &goldens["conversations"][conversation];
            let messages = given["messages"].as_array().expect("messages");
            let options = options(given["options"].as_object().expect("options"), now);
            let result = template.render(messages, &options);
            compared += 1;
            match (expect.as_str(), result) {
                (Some(expect), Ok(text)) if text == expect => {}
                (None, Err(_)) => {}
                (expect, result) => {
                    wrong.push(format!(
                        "{name}, {conversation}:\n  got      {result:?}\n  expected {expect:?}"
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {compared} differ:\n{}", wrong.len(), wrong.join("\n"));
    assert!(compared >= 150, "only {compared} renderings were compared");
}

/// FNV-1a with 64 bits, as in `make_goldens.py`.
fn hash_of(text: &str) -> String {
    let hash = text
        .bytes()
        .fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3));
    format!("{hash:016x}")
}

/// All templates that llama.cpp's repository lists, which `cargo xtask test` fetches.
fn fetched_templates() -> Option<std::path::PathBuf> {
    let data = std::env::var_os("BATON_TOKENIZER_DATA").map(std::path::PathBuf::from)?;
    Some(data.join("templates")).filter(|folder| folder.is_dir())
}

/// A template lies here or among the fetched ones: not every model's licence lets its template be copied.
fn template_source(name: &str) -> Option<String> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/chat-templates");
    [Some(here), fetched_templates()]
        .into_iter()
        .flatten()
        .find_map(|folder| std::fs::read_to_string(folder.join(format!("{name}.jinja"))).ok())
}

/// All templates of llama.cpp's collection with 64 conversations each. To see what a rendering should have been:
/// `make_goldens.py FOLDER NAME CONVERSATION`.
#[test]
fn every_template_of_the_collection_renders_as_in_transformers() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/chat-templates/hashes.json");
    let goldens: Value = serde_json::from_str(&std::fs::read_to_string(file).expect("hashes")).expect("JSON");
    let now = goldens["now"].as_u64().expect("a moment");
    let conversations = goldens["conversations"].as_object().expect("conversations");
    let (mut templates, mut wrong) = (0, Vec::new());
    for (name, hashes) in goldens["hashes"].as_object().expect("templates") {
        let Some(source) = template_source(name) else { continue };
        templates += 1;
        let template = match ChatTemplate::new(&source, Some("<bos>"), Some("<eos>")) {
            Ok(template) => template,
            Err(error) => {
                wrong.push(format!("{name}: {error}"));
                continue;
            }
        };
        let hashes = hashes.as_str().expect("hashes").split(' ');
        for ((conversation, given), expect) in conversations.iter().zip(hashes) {
            let messages = given["messages"].as_array().expect("messages");
            let options = options(given["options"].as_object().expect("options"), now);
            let result = template.render(messages, &options);
            let hash = result.as_ref().map_or("-".to_owned(), |text| hash_of(text));
            if hash != expect {
                let refused = if expect == "-" { " (should be refused)" } else { "" };
                wrong.push(format!("{name}, {conversation}{refused}: {result:?}"));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} renderings of {templates} templates differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(templates >= 35, "only {templates} templates were found");
    if fetched_templates().is_some() {
        assert_eq!(templates, goldens["hashes"].as_object().expect("templates").len());
    }
}

/// Single constructs: operators, filters, methods, tests and how values are printed.
#[test]
fn small_cases_render_as_in_transformers() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/chat-templates/small-cases.json");
    let goldens: Value = serde_json::from_str(&std::fs::read_to_string(file).expect("cases")).expect("JSON");
    let options = RenderOptions {
        chat_template_kwargs: goldens["variables"].as_object().expect("variables").clone(),
        now: Some(UNIX_EPOCH + Duration::from_secs(goldens["now"].as_u64().expect("a moment"))),
        ..RenderOptions::default()
    };
    let cases = goldens["cases"].as_array().expect("cases");
    let mut wrong = Vec::new();
    for case in cases {
        let source = case[0].as_str().expect("a template");
        let result =
            ChatTemplate::new(source, None, None).and_then(|template| template.render(&[], &options));
        let equal = match (case[1].as_str(), &result) {
            (Some(expect), Ok(text)) => text == expect,
            (None, Err(_)) => true,
            _ => false,
        };
        if !equal {
            wrong.push(format!("{source}\n  got      {result:?}\n  expected {:?}", case[1].as_str()));
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
    assert!(cases.len() >= 500);
}

#[test]
fn templates_are_asked_what_they_show() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/chat-templates");
    let abilities = |name: &str| {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).expect("template");
        ChatTemplate::new(&source, Some("<bos>"), Some("<eos>")).expect("sound").abilities()
    };
    let all = TemplateAbilities {
        system: true,
        tools: true,
        tool_calls: Some(ArgumentsForm::Object),
        tool_results: true,
        short_call_ids: false,
    };
    for name in [
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen3-0.6B",
        "meta-llama-Llama-3.1-8B-Instruct",
        "meta-llama-Llama-3.2-3B-Instruct",
    ] {
        assert_eq!(abilities(name), all, "{name}");
    }
    assert_eq!(
        abilities("mistralai-Mistral-Nemo-Instruct-2407"),
        TemplateAbilities { short_call_ids: true, ..all }
    );
    let deepseek = abilities("deepseek-ai-DeepSeek-R1-Distill-Llama-8B");
    assert_eq!((deepseek.system, deepseek.tools), (true, false));
    let gemma = abilities("google-gemma-2-2b-it");
    assert_eq!((gemma.system, gemma.tools, gemma.tool_calls), (false, false, None));
}

/// Random damage to real templates: an error or a text, never a panic or a hang.
#[test]
fn damaged_templates_are_survived() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/chat-templates");
    let messages = [serde_json::json!({"role": "user", "content": "Hi"})];
    let mut random = 0x1234_5678_9ABC_DEF1_u64;
    let mut next = |limit: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % limit as u64) as usize
    };
    let parts = [
        "{%", "%}", "{{", "}}", "|", "(", ")", "[", "]", "'", "~", "+", "*", " in ", "10**9", "messages",
        "-", "\\", "é",
    ];
    for entry in std::fs::read_dir(folder).expect("folder") {
        let path = entry.expect("entry").path();
        if path.extension().is_none_or(|ending| ending != "jinja") {
            continue;
        }
        let source: Vec<char> = std::fs::read_to_string(&path).expect("template").chars().collect();
        for _ in 0..40 {
            let mut damaged = source.clone();
            for _ in 0..=next(3) {
                let at = next(damaged.len());
                let end = at + next(8).min(damaged.len() - at);
                damaged.splice(at..end, parts[next(parts.len())].chars());
            }
            let damaged: String = damaged.into_iter().collect();
            if let Ok(template) = ChatTemplate::new(&damaged, None, None) {
                let _ = template.render(&messages, &RenderOptions::default());
            }
        }
    }
}
