#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    baton_graph::files::untrusted(bytes);
});
