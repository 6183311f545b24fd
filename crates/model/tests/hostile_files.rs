//! Files made by nobody's converter: thousands of seeded mutations of good ones. Each must be opened or refused, never
//! panic, and never take more memory than a small multiple of the file.
//!
//! The memory is measured by counting the allocations of this process, so this file has a single test.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use baton_model::untrusted;

#[path = "support/gguf_writer.rs"]
mod gguf_writer;

struct CountingAllocator;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged; only numbers are kept beside.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`, which is that of the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the pointer came from `alloc` above, thus from the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Room for error messages and the like, whatever the file's size. The files here have about a thousand bytes, so this
/// must stay small for the limit to mean anything; the worst seen is 7 bytes taken for one of the file.
const FIXED_BYTES: usize = 8 << 10;
const BYTES_PER_FILE_BYTE: usize = 16;
const ROUNDS: u64 = 20_000;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// One to four changes: bits, bytes, numbers that like to overflow, cuts, repetitions.
fn mutate(original: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = original.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        match random.below(7) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 if !bytes.is_empty() => bytes[at] = random.next() as u8,
            2 => bytes.truncate(at),
            3 => {
                let wild = [0, 1, 2, u64::from(u32::MAX), 1 << 40, u64::MAX / 2, u64::MAX - 31, u64::MAX];
                let wild = wild[random.below(wild.len())].to_le_bytes();
                let end = bytes.len().min(at + 8);
                bytes[at..end].copy_from_slice(&wild[..end - at]);
            }
            4 => {
                let piece = bytes[at..bytes.len().min(at + 1 + random.below(64))].to_vec();
                bytes.splice(at..at, piece);
            }
            5 => drop(bytes.drain(at..bytes.len().min(at + random.below(16)))),
            _ => bytes.extend((0..random.below(64)).map(|_| random.next() as u8)),
        }
    }
    bytes
}

fn check(name: &str, original: &[u8], parse: fn(&[u8]) -> bool) {
    assert!(parse(original), "{name}: the unchanged file must open");
    let mut random = Random(0x5eed);
    let mut opened = 0;
    for round in 0..ROUNDS {
        let bytes = mutate(original, &mut random);
        let before = LIVE.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        opened += u64::from(parse(&bytes));
        let taken = PEAK.load(Ordering::Relaxed).saturating_sub(before);
        let limit = FIXED_BYTES + BYTES_PER_FILE_BYTE * bytes.len();
        assert!(taken <= limit, "{name}, round {round}: {taken} bytes taken for a file of {}", bytes.len());
    }
    // If nothing or everything opened, the mutations would test nothing.
    assert!(opened > ROUNDS / 100 && opened < ROUNDS - ROUNDS / 100, "{name}: {opened} of {ROUNDS} opened");
}

#[test]
fn mutated_files_are_opened_or_refused() {
    let gguf = gguf_writer::tiny("gemma3")
        .u32("gemma3.attention.sliding_window", 16)
        .f32_tensor("output.weight", &[8, 5], &[0.5; 40])
        .f32_tensor("rope_freqs.weight", &[1], &[1.0])
        .tensor("blk.0.ffn_up.weight", &[32, 2], 8, &[1; 68])
        .finish();
    check("gguf", &gguf, untrusted::gguf);

    let header = br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
        "b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}"#;
    let safetensors = [(header.len() as u64).to_le_bytes().as_slice(), header, &[0; 32]].concat();
    check("safetensors", &safetensors, untrusted::safetensors);

    let config = include_bytes!("data/configs/llama-3.1-8b.json");
    check("config.json", config, untrusted::config_json);
    check("gemma's config.json", include_bytes!("data/configs/gemma-3-4b-it.json"), untrusted::config_json);
}
