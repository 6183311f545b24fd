#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(tokenizer) = baton_text::Tokenizer::from_hf(bytes, None) {
        let ids = tokenizer.encode("Hello, wörld! 1234 \u{1f600}", true).unwrap_or_default();
        let _ = tokenizer.decode(&ids, false);
    }
});
