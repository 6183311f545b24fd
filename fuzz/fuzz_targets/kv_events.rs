#![no_main]

use baton_events::Event;
use baton_router::{PrefixIndex, Stored};

// A batch from the network, and what the router makes of it.
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(batch) = baton_events::decode(bytes) else { return };
    let mut index = PrefixIndex::new(1 << 10);
    for event in &batch.events {
        match event {
            Event::BlockStored { block_hashes, parent_block_hash, token_ids, block_size, .. } => {
                let (parent, block_size) = (*parent_block_hash, *block_size);
                index.stored(0, &Stored { hashes: block_hashes, parent, token_ids, block_size });
                index.matches(token_ids);
            }
            Event::BlockRemoved { block_hashes, .. } => index.removed(0, block_hashes),
            Event::AllBlocksCleared => index.cleared(0),
        }
    }
    assert_eq!(baton_events::decode(&baton_events::encode(&batch)).map(|again| again.events), Ok(batch.events));
});
