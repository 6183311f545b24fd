#![no_main]

libfuzzer_sys::fuzz_target!(|body: &[u8]| {
    let ask = baton_router::Ask::read(body, 1 << 10);
    assert!(ask.text.len() <= 1 << 10);
});
