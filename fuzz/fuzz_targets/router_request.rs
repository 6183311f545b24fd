#![no_main]

libfuzzer_sys::fuzz_target!(|body: &[u8]| {
    let body = baton_router::BodySummary::read(body, 1 << 10);
    assert!(body.text.len() <= 1 << 10);
});
