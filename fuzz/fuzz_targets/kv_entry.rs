#![no_main]

use baton_cluster::entry::{Sealer, parse_row_name};
use baton_engine::{BlockHash, BlockKey, KvIdentity};

// What a store gives back: nothing but what was sealed opens.
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let identity =
        KvIdentity { model: "m".to_owned(), layout: "l".to_owned(), row_bytes: vec![16] };
    let sealer = Sealer::new(&identity, "secret");
    let key = BlockKey { group: 0, hash: BlockHash::root(None) };
    assert!(sealer.open(key, bytes).is_none(), "nobody guesses a keyed hash");
    if let Ok(name) = std::str::from_utf8(bytes) {
        let _ = parse_row_name(name);
    }
});
