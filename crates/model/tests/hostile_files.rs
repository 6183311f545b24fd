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

fn check(name: &str, original: &[u8], parse: impl Fn(&[u8]) -> bool) {
    check_rounds(name, original, parse, ROUNDS, 0);
}

/// `given` bytes are no part of what is changed, but of the file.
fn check_rounds(name: &str, original: &[u8], parse: impl Fn(&[u8]) -> bool, rounds: u64, given: usize) {
    assert!(parse(original), "{name}: the unchanged file must open");
    let mut random = Random(0x5eed);
    let mut opened = 0;
    for round in 0..rounds {
        let bytes = mutate(original, &mut random);
        let before = LIVE.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        opened += u64::from(parse(&bytes));
        let taken = PEAK.load(Ordering::Relaxed).saturating_sub(before);
        let limit = FIXED_BYTES + BYTES_PER_FILE_BYTE * (bytes.len() + given);
        assert!(taken <= limit, "{name}, round {round}: {taken} bytes taken for a file of {}", bytes.len());
    }
    // If nothing or everything opened, the mutations would test nothing.
    assert!(opened > rounds / 400 && opened < rounds - rounds / 400, "{name}: {opened} of {rounds} opened");
}

/// `[rows, cols]` of a dtype for each name.
type Parts = &'static [(&'static str, &'static str, &'static [usize])];

/// A quantised module of 64 x 64 in each scheme.
const QUANTISED: [(&str, Parts); 7] = [
    (
        r#"{"quant_method":"awq","bits":4,"group_size":32,"version":"gemm"}"#,
        &[("qweight", "I32", &[64, 8]), ("qzeros", "I32", &[2, 8]), ("scales", "F16", &[2, 64])],
    ),
    (
        r#"{"quant_method":"gptq","bits":4,"group_size":32,"desc_act":true,"sym":false}"#,
        &[
            ("g_idx", "I32", &[64]),
            ("qweight", "I32", &[8, 64]),
            ("qzeros", "I32", &[2, 8]),
            ("scales", "F16", &[2, 64]),
        ],
    ),
    (
        r#"{"quant_method":"gptq","bits":8,"group_size":-1}"#,
        &[("qweight", "I32", &[16, 64]), ("qzeros", "I32", &[1, 16]), ("scales", "BF16", &[1, 64])],
    ),
    (
        r#"{"quant_method":"compressed-tensors","format":"pack-quantized","config_groups":{"g":{"weights":
            {"num_bits":4,"type":"int","symmetric":false,"strategy":"group","group_size":32}}}}"#,
        &[
            ("weight_packed", "I32", &[64, 8]),
            ("weight_scale", "F16", &[64, 2]),
            ("weight_shape", "I64", &[2]),
            ("weight_zero_point", "I32", &[8, 2]),
        ],
    ),
    (
        r#"{"quant_method":"fp8","weight_block_size":[48,48],"activation_scheme":"static"}"#,
        &[
            ("input_scale", "F32", &[1]),
            ("weight", "F8_E4M3", &[64, 64]),
            ("weight_scale_inv", "F32", &[2, 2]),
        ],
    ),
    (
        r#"{"quant_method":"compressed-tensors","format":"int-quantized","config_groups":{"g":{"weights":
            {"num_bits":8,"type":"int"}}},"ignore":["lm_head"]}"#,
        &[("weight", "I8", &[64, 64]), ("weight_scale", "F32", &[64, 1])],
    ),
    (
        r#"{"quant_method":"compressed-tensors","format":"mxfp4-pack-quantized","config_groups":{"g":{"weights":
            {"num_bits":4,"type":"float"}}}}"#,
        &[("weight_packed", "U8", &[64, 32]), ("weight_scale", "U8", &[64, 2])],
    ),
];

/// The header and the data of a file with these parts of the module "m". All bytes are 0, 1 or 64 where that makes sense.
fn quantised_file(parts: Parts) -> (Vec<u8>, Vec<u8>) {
    let (mut header, mut data) = (Vec::new(), Vec::new());
    for (part, dtype, shape) in parts {
        let size = match *dtype {
            "F16" | "BF16" => 2,
            "I32" | "F32" => 4,
            "I64" => 8,
            _ => 1,
        };
        let (start, count) = (data.len(), shape.iter().product::<usize>());
        let end = start + count * size;
        let value = match *part {
            "weight_shape" => 64,
            "g_idx" => 0,
            _ => 1,
        };
        data.extend((0..end - start).map(|i| if i % size == 0 { value } else { 0 }));
        header.push(format!(
            r#""m.{part}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#
        ));
    }
    (format!("{{{}}}", header.join(",")).into_bytes(), data)
}

fn check_quantised() {
    for (config, parts) in QUANTISED {
        let (header, data) = quantised_file(parts);
        let file = |header: &[u8], data: &[u8]| {
            [(header.len() as u64).to_le_bytes().as_slice(), header, data].concat()
        };
        let whole = file(&header, &data);
        let name = config.split_at(config.len().min(60)).0;
        // Decoded to f16, four bits are four times as many.
        check_rounds(
            name,
            config.as_bytes(),
            |config| untrusted::quantised(config, &whole),
            2_000,
            whole.len(),
        );
        let of_header = |header: &[u8]| untrusted::quantised(config.as_bytes(), &file(header, &data));
        check_rounds(name, &header, of_header, 2_000, whole.len());
        let of_data = |data: &[u8]| untrusted::quantised(config.as_bytes(), &file(&header, data));
        check_rounds(name, &data, of_data, 1_000, whole.len());
    }
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
    check_quantised();
}
