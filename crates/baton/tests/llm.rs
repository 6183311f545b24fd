//! The library on a tiny model: what is generated does not depend on how it is asked for.

use std::future::poll_fn;
use std::path::Path;
use std::pin::Pin;

use baton::{Device, FinishReason, GenerationConfig, Llm, Message, OpenOptions, Params};
use futures_core::Stream;

/// The golden model, whose vocabulary is small; it comes with no chat template.
fn options() -> OpenOptions {
    OpenOptions {
        device: Device::Cpu,
        threads: Some(1),
        generation_config: GenerationConfig::Neutral,
        chat_template: Some("{% for m in messages %}{{ m.content }} {% endfor %}".to_owned()),
        tokenizer: Some(tokenizer()),
        ..OpenOptions::default()
    }
}

fn golden() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/data/golden/llama").display().to_string()
}

/// A tokenizer of whole words for the golden model.
fn tokenizer() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizer.json").display().to_string()
}

fn llm() -> Llm {
    Llm::open_with(&golden(), &options()).expect("the golden model opens")
}

#[test]
fn all_ways_give_the_same_text() {
    let llm = llm();
    let params = Params::new().max_tokens(12).temperature(0.0);
    let whole = llm.generate(&["a b c", "d e"], &params).unwrap();
    assert_eq!((whole.len(), whole[0].completion_tokens), (2, 12));
    assert_eq!(whole[0].finish_reason, FinishReason::Length);
    let streamed: String = llm.stream("a b c", &params).unwrap().map(Result::unwrap).collect();
    assert_eq!(streamed, whole[0].text);
    assert_eq!(
        llm.chat_with(&[Message::user("a b"), Message::user("c")], &params).unwrap().completion_tokens,
        12
    );
    let shared = llm.clone();
    let other =
        std::thread::spawn(move || shared.generate(&["d e"], &Params::new().max_tokens(12).temperature(0.0)));
    assert_eq!(other.join().unwrap().unwrap()[0].text, whole[1].text);
}

#[test]
fn async_code_gets_the_same() {
    let llm = llm();
    let params = Params::new().max_tokens(9).temperature(0.0);
    let expect = llm.generate(&["a"], &params).unwrap().swap_remove(0).text;
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let got = runtime.block_on(async {
        let (mut stream, mut text) = (llm.stream("a", &params).unwrap(), String::new());
        while let Some(piece) = poll_fn(|cx| Pin::new(&mut stream).poll_next(cx)).await {
            text.push_str(&piece.unwrap());
        }
        text
    });
    assert_eq!(got, expect);
}

#[test]
fn shapes_and_seeds_are_kept() {
    let llm = llm();
    let shaped = llm.generate(&["a"], &Params::new().choice(["b", "c"])).unwrap().swap_remove(0);
    assert!(["b", "c"].contains(&shaped.text.as_str()), "{shaped:?}");
    let drawn =
        |seed| llm.generate(&["a"], &Params::new().max_tokens(20).temperature(1.5).seed(seed)).unwrap();
    assert_eq!(drawn(1), drawn(1));
    assert_ne!(drawn(1), drawn(2));
    let unseeded = || llm.generate(&["a"], &Params::new().max_tokens(20).temperature(1.5)).unwrap();
    assert_ne!(unseeded(), unseeded(), "without a seed it is random");
    assert_eq!(llm.generate(&["a"], &Params::new().n(3).max_tokens(2)).unwrap().len(), 3);
}

#[test]
fn vectors_have_unit_length() {
    let vectors = llm().embed(&["a b", "c"]).unwrap();
    for vector in &vectors {
        let length: f32 = vector.iter().map(|value| value * value).sum();
        assert!((length - 1.0).abs() < 1e-4, "{length}");
    }
    assert_ne!(vectors[0], vectors[1]);
}

#[test]
fn what_cannot_be_is_an_error_with_a_hint() {
    let llm = llm();
    let long = "a ".repeat(llm.max_model_len() + 5);
    let error = llm.generate(&[long], &Params::new()).unwrap_err();
    assert!(error.to_string().contains("leaves no room for a reply") && error.hint().is_some(), "{error}");
    assert!(llm.generate(&["a"], &Params::new().temperature(-1.0)).is_err());
    assert!(llm.generate(&["a"], &Params::new().regex("(")).is_err());
    assert!(llm.generate(&[""], &Params::new()).is_err());
    let error = Llm::open("no/such/model").unwrap_err();
    assert!(error.hint().is_some_and(|hint| hint.contains("owner/name")), "{error}");
}

/// A stream that nobody reads to its end holds nothing.
#[test]
fn a_dropped_stream_ends_its_request() {
    let llm = llm();
    let mut stream = llm.stream("a", &Params::new().temperature(0.0).max_tokens(100)).unwrap();
    let _ = stream.next();
    drop(stream);
    for _ in 0..500 {
        if llm.stats().unwrap().scheduler.num_running == 0 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("it is still running: {:?}", llm.stats());
}

/// The golden model with a tokenizer of its own, in which one token may have another name.
fn model_with_tokens(name: &str, renamed: Option<(&str, &str)>) -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("baton-draft-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(Path::new(&golden()).join(file), folder.join(file)).unwrap();
    }
    let mut json = std::fs::read_to_string(tokenizer()).unwrap();
    if let Some((old, new)) = renamed {
        assert!(json.contains(old));
        json = json.replacen(old, new, 1);
    }
    std::fs::write(folder.join("tokenizer.json"), json).unwrap();
    folder
}

#[test]
fn a_draft_model_has_the_same_tokens_and_gives_the_same_text() {
    let target = model_with_tokens("target", None);
    let draft = model_with_tokens("draft", None);
    let other = model_with_tokens("other", Some((r#""f": "#, r#""ff": "#)));
    let with_draft = |draft: &Path| {
        let speculative = serde_json::json!({"method": "draft_model", "model": draft, "adaptive": false});
        let mut options = OpenOptions { tokenizer: None, ..options() };
        options.engine.speculative = Some(serde_json::from_value(speculative).unwrap());
        Llm::open_with(&target.display().to_string(), &options)
    };
    let params = Params::new().max_tokens(12).temperature(0.0);
    let text = |llm: &Llm| llm.generate(&["a b c"], &params).unwrap().swap_remove(0).text;
    assert_eq!(text(&with_draft(&draft).unwrap()), text(&llm()));
    let error = with_draft(&other).expect_err("another token").to_string();
    assert!(error.contains(r#"is "ff" there and "f" here"#), "{error}");
    for folder in [target, draft, other] {
        std::fs::remove_dir_all(folder).unwrap();
    }
}
