#![no_main]

// What another process sends to hand KV over.
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some((kind, body)) = bytes.split_first() {
        let _ = baton_cluster::transfer::wire::Message::decode(*kind, body);
    }
});
