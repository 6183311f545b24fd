#![no_main]

use baton_cluster::transfer::wire::{Message, read_frame};

// What another process sends to hand KV over: a message of any kind, and frames one after another, until one is none.
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some((kind, body)) = bytes.split_first() {
        let _ = Message::decode(*kind, body);
    }
    let (mut rest, mut body) = (bytes, Vec::new());
    while let Ok((kind, _)) = read_frame(&mut rest, 1 << 12, &mut body) {
        assert!(body.len() <= bytes.len());
        if let Some(message) = Message::decode(kind, &body) {
            assert_eq!(message.encode(), (kind, body.clone()));
        }
    }
});
