#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| {
    let _ = baton_router::parse_workers_file(text);
});
