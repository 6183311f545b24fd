//! K-quants in tiles beside exact arithmetic, one row beside many, and real tiles beside emulated ones.

use baton_backend::conformance::{Outcome, cases};
use baton_backend::quant::dequantize_row;
use baton_backend::testing::{Random, random_tensor};
use baton_backend::{
    Backend, Embed, Linear, Op, Precision, Program, StepExecutor, StepInput, StepLimits, StepOutput, Tensor,
    WeightFormat, WeightUse,
};

use super::super::table::Kernels;
use super::open::{OPENED, TILE, high_shift, open};
use super::*;
use crate::backend::{CpuBackend, CpuOptions};
use crate::isa::Isa;
use crate::quantize::{SUPER_LINES, SuperPlaces, SuperSums};
use crate::weights::PackedPart;
use crate::weights::formats::{OpenBlock, Q4K, Q5K, Q6K, SPLIT_TOKENS};

const TABLE_ROWS: usize = 300;
/// The largest of 256 normal values is about a third larger than that of 32, and so is the rounding.
const SUPER_ROUNDING: f32 = 1.35;
const FORMATS: [WeightFormat; 3] = [WeightFormat::Q4_K, WeightFormat::Q5_K, WeightFormat::Q6_K];

/// Backends with the super-block kernels that this machine can run: those with emulated tiles, and real ones.
fn backends(threads: usize) -> Vec<CpuBackend> {
    let options = |isa| CpuOptions { threads: Some(threads), isa: Some(isa), ..CpuOptions::default() };
    let mut backends = Vec::new();
    if let Some(kernels) = Kernels::with_emulated_tiles() {
        let mut backend = CpuBackend::new(options(Isa::Avx512Vnni)).expect("available");
        backend.kernels = kernels;
        backends.push(backend);
    }
    if Isa::Amx.is_available() {
        backends.push(CpuBackend::new(options(Isa::Amx)).expect("available"));
    }
    if backends.is_empty() {
        println!("skipped: this processor has no AVX-512 VNNI");
    }
    backends
}

/// Products of a weight with rows of a table, whatever the step's tokens are.
fn products(mut backend: CpuBackend, parts: &[Tensor], table: &[f32]) -> impl FnMut(&[u32]) -> Vec<f32> {
    let (cols, rows) = (parts[0].cols(), parts.iter().map(Tensor::rows).sum());
    let limits = StepLimits {
        max_tokens: TABLE_ROWS,
        max_seqs: 1,
        max_logit_rows: 1,
        max_samples: 1,
        max_model_len: TABLE_ROWS,
        vocab_size: TABLE_ROWS,
    };
    backend.set_limits(&limits).expect("limits");
    let table = Tensor::from_f32(TABLE_ROWS, cols, table).expect("shape");
    let table = backend.load_weight(&[table], WeightUse::Embedding).expect("loads");
    let weight = backend.load_weight(parts, WeightUse::Linear).expect("loads");
    let input = backend.create_buffer(TABLE_ROWS, cols).expect("creates");
    let output = backend.create_buffer(TABLE_ROWS, rows).expect("creates");
    let linear = Linear { input, norm: None, weight, bias: None, output, accumulate: false };
    let embed = Embed { weight: table, scale: 1.0, output: input };
    let program = Program::new(vec![Op::Embed(embed), Op::Linear(linear)]);
    let program = backend.compile(&program).expect("compiles");
    move |ids| {
        let places: Vec<u32> = (0..ids.len() as u32).collect();
        let step = StepInput {
            token_ids: ids.to_vec(),
            positions: places.clone(),
            slots: places,
            ..StepInput::default()
        };
        backend.submit(&step, program).expect("runs");
        backend.collect(&mut StepOutput::default()).expect("ran");
        backend.read_buffer(output, ids.len()).expect("rows")
    }
}

/// Activations as they are quantised, in f64: one scale for 256.
fn quantised(row: &[f32]) -> Vec<f64> {
    let mut values = Vec::new();
    for block in row.chunks(SUPER_BLOCK) {
        let largest = block.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        let d = f64::from(largest / 127.0);
        values.extend(block.iter().map(|x| d * f64::from((x * inverse).round_ties_even())));
    }
    values
}

/// Rows of very different sizes, among them zeros.
fn inputs(cols: usize) -> Vec<f32> {
    let mut values = Random::new(3).normals(TABLE_ROWS * cols);
    for (i, x) in values.iter_mut().enumerate() {
        *x *= [1.0, 1e-6, 300.0, 0.0, 0.01][i / 48 % 5];
    }
    values[..SUPER_BLOCK].fill(0.0);
    values
}

#[test]
fn rows_are_the_same_in_every_batch_and_equal_exact_arithmetic() {
    let cols = 768;
    let table = inputs(cols);
    for format in FORMATS {
        let weight = random_tensor(format, 37, cols, 1.0, &mut Random::new(5));
        let mut values = vec![0.0; cols];
        for backend in backends(2) {
            let mut products = products(backend, std::slice::from_ref(&weight), &table);
            let alone: Vec<Vec<f32>> = (0..TABLE_ROWS as u32).map(|id| products(&[id])).collect();
            for row in 0..weight.rows() {
                dequantize_row(format, weight.row(row), &mut values);
                for (id, got) in alone.iter().enumerate() {
                    let input = quantised(&table[id * cols..][..cols]);
                    let terms = values.iter().zip(input).map(|(&w, x)| f64::from(w) * x);
                    let (sum, size) = (terms.clone().sum::<f64>(), terms.map(f64::abs).sum::<f64>());
                    let error = (f64::from(got[row]) - sum).abs();
                    assert!(
                        error <= 1e-6 * size,
                        "{format}, row {row}, token {id}: {} is not {sum}",
                        got[row]
                    );
                }
            }
            for count in [2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 33, 48, 64, 255, 256, 257, 272, TABLE_ROWS] {
                let ids: Vec<u32> = (0..count as u32).map(|i| (i * 7 + 3) % TABLE_ROWS as u32).collect();
                for (got, id) in products(&ids).chunks(37).zip(ids) {
                    let same = got.iter().zip(&alone[id as usize]).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{format}, {count} tokens, token {id}");
                }
            }
        }
    }
}

#[test]
fn parts_of_other_formats_stand_beside_them() {
    let cols = 512;
    let mut random = Random::new(9);
    let formats = [WeightFormat::Q4_K, WeightFormat::BF16, WeightFormat::Q6_K, WeightFormat::Q8_0];
    let parts = formats.map(|format| random_tensor(format, 24, cols, 1.0, &mut random));
    let table = random.normals(TABLE_ROWS * cols);
    let ids: Vec<u32> = (0..TABLE_ROWS as u32).rev().collect();
    for (mixed, apart) in backends(2).into_iter().zip(backends(1)) {
        let isa = apart.isa();
        let kernels = apart.kernels;
        let together = products(mixed, &parts, &table)(&ids);
        for (i, part) in parts.iter().enumerate().filter(|(_, part)| FORMATS.contains(&part.format())) {
            let options = CpuOptions { threads: Some(1), isa: Some(isa), ..CpuOptions::default() };
            let mut backend = CpuBackend::new(options).expect("available");
            backend.kernels = kernels;
            let alone = products(backend, std::slice::from_ref(part), &table)(&ids);
            for (token, alone) in alone.chunks(24).enumerate() {
                assert_eq!(together[token * 96 + i * 24..][..24], *alone, "part {i}, token {token}");
            }
        }
    }
}

#[test]
fn cases_with_k_quants_pass() {
    let mut num_cases = 0;
    for case in cases() {
        if !["_K", "three formats"].iter().any(|name| case.name.contains(name)) {
            continue;
        }
        for mut backend in backends(2) {
            num_cases += 1;
            match case.run_allowing(SUPER_ROUNDING, &mut backend, Precision::Fast) {
                Outcome::Passed { detail } => println!("{}: {detail}", case.name),
                outcome => panic!("{}: {outcome:?}", case.name),
            }
        }
    }
    assert!(num_cases > 20 || backends(1).is_empty(), "{num_cases} cases");
}

fn check_planes<Q: Quant>(format: WeightFormat) {
    let mut random = Random::new(11);
    let tensor = random_tensor(format, PANEL_ROWS, 2 * SUPER_BLOCK, 1.0, &mut random);
    // Any bits are a block: the largest scales and quants are among them.
    let mut bytes = tensor.bytes().to_vec();
    for (byte, x) in bytes.iter_mut().zip(random.normals(tensor.bytes().len())) {
        *byte = match (x * 100.0) as i64 {
            ..-200 => 0x80,
            200.. => 0x7f,
            100..200 => 0xff,
            x => x as u8,
        };
    }
    let shared = baton_backend::SharedBytes::from_vec(bytes);
    let tensor = Tensor::new(format, PANEL_ROWS, 2 * SUPER_BLOCK, shared).expect("shape");
    let part = PackedPart::new(&tensor, false).expect("packs");
    // SAFETY: nobody else has the part.
    unsafe { part.pack_panel(&tensor, 0) };
    for super_block in 0..2 {
        let mut opened = vec![0u8; OPENED + 64];
        let start = opened.as_ptr().align_offset(64);
        let (quants, header) = (
            part.panel_quants(0).wrapping_add(super_block * BLOCKS * Q::PLANES.bytes()),
            part.panel_scales(0).wrapping_add(super_block * Q::SCALES.group_bytes()),
        );
        // SAFETY: the processor has AVX-512; the panel has two super-blocks, and there is room for one.
        unsafe { open_planes::<Q>(quants, header, opened[start..].as_mut_ptr()) };
        let planes = &opened[start..];
        for row in 0..PANEL_ROWS {
            let mut block = OpenBlock::default();
            let size = format.block_bytes();
            block.read(format, &tensor.row(row)[super_block * size..][..size]);
            for k in 0..SUPER_BLOCK {
                let at = k / 64 * 2 * TILE + k % 64 / 4 * 64 + row * 4 + k % 4;
                let (high, low) = (planes[at], planes[at + TILE]);
                let high = if has_mins::<Q>() { i32::from(high) } else { i32::from(high as i8) };
                let quant = i32::from(block.quants[k]);
                let expected = if has_mins::<Q>() {
                    quant * i32::from(block.sub[k / 32])
                } else {
                    (quant - 32) * i32::from(block.sub[k / 16] as i8)
                };
                assert_eq!((high << high_shift::<Q>()) + i32::from(low), expected, "{format}: {row}, {k}");
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn open_planes<Q: Quant>(quants: *const u8, header: *const u8, to: *mut u8) {
    open::<Q>(quants, header, to);
}

#[test]
fn planes_are_weights_times_scales() {
    if !Isa::Avx512Vnni.is_available() {
        println!("skipped: this processor has no AVX-512 VNNI");
        return;
    }
    check_planes::<Q4K>(WeightFormat::Q4_K);
    check_planes::<Q5K>(WeightFormat::Q5_K);
    check_planes::<Q6K>(WeightFormat::Q6_K);
}

#[test]
fn rows_lie_where_places_say_with_their_sums() {
    if !Isa::Avx512Vnni.is_available() {
        println!("skipped: this processor has no AVX-512 VNNI");
        return;
    }
    let cols = 3 * SUPER_BLOCK;
    let table = inputs(cols);
    for num_tiles in [0, 1, 3] {
        let num_rows = if num_tiles == 0 { 1 } else { num_tiles * SPLIT_TOKENS };
        let places = SuperPlaces::new(cols, num_tiles);
        let bytes = SuperPlaces::bytes(num_rows, cols).expect("small");
        let mut out = vec![0x55u8; bytes + 64];
        let start = out.as_ptr().align_offset(64);
        for row in 0..num_rows {
            let x = &table[row * cols..][..cols];
            // SAFETY: the processor has AVX-512; there is room for all rows.
            unsafe { quantize_row(x.as_ptr(), cols, out[start..].as_mut_ptr(), row, num_tiles) };
        }
        let out = &out[start..][..bytes];
        let mut is_used = vec![false; bytes];
        for (row, super_block) in (0..num_rows).flat_map(|row| (0..3).map(move |i| (row, i))) {
            let x = &table[row * cols + super_block * SUPER_BLOCK..][..SUPER_BLOCK];
            let at = places.sums(row, super_block);
            is_used[at..at + size_of::<SuperSums>()].fill(true);
            // SAFETY: aligned, and any bits are sums.
            let sums = unsafe { out.as_ptr().add(at).cast::<SuperSums>().read() };
            let mut quants = Vec::new();
            for line in 0..SUPER_LINES {
                let at = places.quants(row, super_block) + line * places.line_stride();
                assert!(!is_used[at], "row {row}");
                is_used[at..at + 64].fill(true);
                quants.extend(out[at..at + 64].iter().map(|&byte| byte as i8));
            }
            for ((quant, exact), x) in quants.iter().zip(quantised(x)).zip(x) {
                let value = f64::from(sums.d) * f64::from(*quant);
                assert!((value - exact).abs() <= 1e-12 * exact.abs(), "{value} for {x}, not {exact}");
            }
            let sum = |from: usize, len: usize| -> i16 {
                quants[from..from + len].iter().map(|&quant| i16::from(quant)).sum()
            };
            assert_eq!(sums.sums, std::array::from_fn(|i| sum(i * 32, 32)));
            assert_eq!(sums.halves, std::array::from_fn(|i| sum(i * 16, 16)));
        }
        assert!(is_used.iter().all(|&used| used), "every byte has one use");
    }
}
