#![no_main]

use baton_cluster::resp::{Reply, read_bulk, read_reply};

// What a Redis server sends: replies one after another, until one is none.
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut rest = bytes;
    while let Ok(reply) = read_reply(&mut rest) {
        if let Reply::Bulk(len) = reply {
            let mut value = vec![0; len.min(bytes.len())];
            if read_bulk(&mut rest, &mut value).is_err() {
                break;
            }
        }
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = text.parse::<baton_cluster::RedisUrl>();
    }
});
