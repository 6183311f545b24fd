#![no_main]

libfuzzer_sys::fuzz_target!(|source: &str| {
    if let Ok(template) = baton_text::ChatTemplate::new(source, Some("<s>"), Some("</s>")) {
        let messages = [serde_json::json!({"role": "user", "content": "Hello"})];
        let _ = template.render(&messages, &baton_text::RenderOptions::default());
    }
});
