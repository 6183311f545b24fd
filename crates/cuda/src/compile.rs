//! From the text of a kernel to machine code of the device, by NVRTC, kept on disk.
//!
//! The name of a cached file is a hash of everything that determines its contents: source, options, architecture, version of
//! NVRTC. So a file is never stale, only unused. A cache that cannot be written is no error.

use std::ffi::CString;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use baton_backend::{BackendError, KvDtype, Precision, WeightFormat};
use cudarc::nvrtc::{result as nvrtc, sys};

use crate::kernels::{PACKED_TILES, SKINNY_TILES};
use crate::layout::{device_format, packed_bits};

const COMMON: &str = include_str!("kernels/common.cuh");
const HOPPER: &str = include_str!("kernels/hopper.cuh");
const BASIC: &str = include_str!("kernels/basic.cu");
const HEADS: &str = include_str!("kernels/heads.cu");
const ENCODER: &str = include_str!("kernels/encoder.cu");
const WEIGHTS: &str = include_str!("kernels/weights.cuh");
const PRODUCT: &str = include_str!("kernels/product.cu");
const PACKED_SHARED: &str = include_str!("kernels/packed.cuh");
const PACKED: &str = include_str!("kernels/packed.cu");
const WIDE: &str = include_str!("kernels/wide.cuh");
const PACKED_WIDE: &str = include_str!("kernels/packed_wide.cu");
const FP8_WIDE: &str = include_str!("kernels/fp8_wide.cu");
const BF16_WIDE: &str = include_str!("kernels/bf16_wide.cu");
const PRODUCT_SHARED: &str = include_str!("kernels/product.cuh");
const ATTENTION_SHARED: &str = include_str!("kernels/attention.cuh");
const ATTENTION_ANY: &str = include_str!("kernels/attention_any.cu");
const ATTENTION_LATENT: &str = include_str!("kernels/attention_latent.cu");
const ATTENTION_LATENT_MANY: &str = include_str!("kernels/attention_latent_many.cu");
const ATTENTION_TILE: &str = include_str!("kernels/attention_tile.cuh");
const ATTENTION_FP8: &str = include_str!("kernels/attention_fp8.cuh");
const ATTENTION_FEW: &str = include_str!("kernels/attention_few.cu");
const ATTENTION_MANY: &str = include_str!("kernels/attention_many.cu");
const ATTENTION_WIDE: &str = include_str!("kernels/attention_wide.cu");
const SKINNY: &str = include_str!("kernels/skinny.cu");
const GATED: &str = include_str!("kernels/gated.cu");
const GROUPED: &str = include_str!("kernels/grouped.cu");
const GROUPED_FEW: &str = include_str!("kernels/grouped_few.cu");
const LATENT_SHARED: &str = include_str!("kernels/latent.cuh");
const ROUTE_TILES: &str = include_str!("kernels/route_tiles.cu");
const EXPERTS_SHARED: &str = include_str!("kernels/experts.cuh");
const EXPERTS: &str = include_str!("kernels/experts.cu");
const EXPERT_PRODUCT: &str = include_str!("kernels/expert_product.cu");
const GRAPH: &str = include_str!("kernels/graph.cu");
const SAMPLE_SHARED: &str = include_str!("kernels/sample.cuh");
const SAMPLE_CHOOSE: &str = include_str!("kernels/sample_choose.cu");
const SAMPLE_SCORE: &str = include_str!("kernels/sample_score.cu");

/// Every architecture the kernels are known to compile for.
pub const ARCHITECTURES: [&str; 4] = ["sm_80", "sm_89", "sm_90a", "sm_100"];

/// Head sizes that the tensor-core attention is made for.
pub(crate) const HEAD_DIMS: [usize; 3] = [64, 128, 256];

/// Types of cache that it is made for.
pub(crate) const TILED_CACHES: [KvDtype; 3] = [KvDtype::F16, KvDtype::BF16, KvDtype::F8E4M3];

/// Bits of a value that weights are packed into.
pub(crate) const PACKED_BITS: [u32; 4] = [4, 5, 6, 8];

/// One unit of compilation: a text and what is defined in front of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Unit {
    Basic(Precision),
    Product(WeightFormat, Precision),
    /// Products, or gated products and lookups: two, so that they compile beside each other.
    Packed {
        bits: u32,
        tiles: u32,
        is_gated: bool,
    },
    /// Those of up to some hundred tokens, where [`has_gated`].
    PackedWide {
        bits: u32,
        is_gated: bool,
    },
    Skinny {
        tiles: u32,
        weights: SkinnyWeights,
    },
    /// Where [`has_gated`].
    Gated {
        is_fp8: bool,
    },
    /// Other products of e4m3 with up to some hundred tokens, where [`has_gated`].
    Fp8Wide,
    /// Those of bf16 with more tokens than the skinny ones take, and up to 64.
    Bf16Wide,
    /// The same for experts.
    Grouped,
    /// Their router, of up to this many tiles of eight tokens a block.
    RouteTiles {
        tiles: u32,
    },
    /// What stands around the products of experts.
    Experts(Precision),
    /// Products of few tokens with experts of a format.
    ExpertProduct(WeightFormat, Precision),
    AttentionAny(Precision),
    /// Of latents in f16, or else in bf16.
    AttentionLatent {
        is_f16: bool,
    },
    AttentionFew(Tiling),
    AttentionMany(Tiling),
    SampleChoose,
    SampleScore,
    /// Layers of graph networks.
    Graph,
}

/// What the weights of skinny products are, by the number that `skinny.cu` knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SkinnyWeights {
    Bf16 = 0,
    /// e4m3 with a scale per row.
    Fp8Rows = 1,
    /// e4m3 with scales of blocks of 128 by 128.
    Fp8Blocks = 2,
}

impl SkinnyWeights {
    const ALL: [Self; 3] = [Self::Bf16, Self::Fp8Rows, Self::Fp8Blocks];

    /// Columns that a warp takes at a time.
    pub(crate) fn unit(self) -> usize {
        if self == Self::Bf16 { 64 } else { 128 }
    }
}

/// What the tensor-core attention is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tiling {
    pub(crate) head_dim: usize,
    pub(crate) cache: KvDtype,
    /// The device has little shared memory, so that less is asked for ahead.
    pub(crate) is_small: bool,
}

impl Unit {
    /// Devices of `architecture` have little shared memory if it is sm_89.
    fn every(architecture: &str) -> Vec<Self> {
        let is_small = architecture == "sm_89";
        let mut units = vec![Self::SampleChoose, Self::SampleScore, Self::Graph];
        for precision in [Precision::Fast, Precision::Full] {
            units.extend([Self::Basic(precision), Self::AttentionAny(precision), Self::Experts(precision)]);
            let formats =
                WeightFormat::ALL.into_iter().filter(|&format| device_format(format, precision) == format);
            for format in formats {
                units.push(Self::Product(format, precision));
                // Experts of e4m3 become bf16.
                units.extend(
                    (format != WeightFormat::F8_E4M3).then_some(Self::ExpertProduct(format, precision)),
                );
            }
        }
        units.extend([false, true].map(|is_f16| Self::AttentionLatent { is_f16 }));
        for weights in SkinnyWeights::ALL {
            units.extend(SKINNY_TILES.map(|tiles| Self::Skinny { tiles, weights }));
        }
        for bits in PACKED_BITS {
            units.extend(Self::packed(bits, architecture));
        }
        if has_gated(architecture) {
            units.extend([false, true].map(|is_fp8| Self::Gated { is_fp8 }));
            units.extend([Self::Fp8Wide, Self::Bf16Wide, Self::Grouped]);
            units.extend(SKINNY_TILES.map(|tiles| Self::RouteTiles { tiles }));
        }
        for head_dim in HEAD_DIMS {
            for cache in TILED_CACHES {
                let tiling = Tiling { head_dim, cache, is_small };
                units.extend([Self::AttentionFew(tiling), Self::AttentionMany(tiling)]);
            }
        }
        units
    }

    /// All of one packing.
    pub(crate) fn packed(bits: u32, architecture: &str) -> Vec<Self> {
        let mut units = Vec::new();
        for is_gated in [false, true] {
            units.extend(PACKED_TILES.map(|tiles| Self::Packed { bits, tiles, is_gated }));
            units.extend(has_gated(architecture).then_some(Self::PackedWide { bits, is_gated }));
        }
        units
    }

    fn source(self) -> String {
        let parts: &[&str] = match self {
            Self::Basic(_) => &[COMMON, BASIC, HEADS, ENCODER],
            Self::Product(..) => &[COMMON, WEIGHTS, PRODUCT],
            Self::Packed { .. } => &[COMMON, WEIGHTS, PRODUCT_SHARED, PACKED_SHARED, PACKED],
            Self::PackedWide { .. } => {
                &[COMMON, HOPPER, WEIGHTS, PRODUCT_SHARED, PACKED_SHARED, WIDE, PACKED_WIDE]
            }
            Self::Fp8Wide => &[COMMON, HOPPER, PRODUCT_SHARED, WIDE, FP8_WIDE],
            Self::Bf16Wide => &[COMMON, HOPPER, PRODUCT_SHARED, WIDE, BF16_WIDE],
            Self::AttentionAny(_) => &[COMMON, ATTENTION_SHARED, ATTENTION_ANY],
            Self::AttentionLatent { .. } => {
                &[COMMON, HOPPER, ATTENTION_SHARED, ATTENTION_LATENT, ATTENTION_LATENT_MANY]
            }
            Self::AttentionFew(_) => {
                &[COMMON, ATTENTION_SHARED, ATTENTION_TILE, ATTENTION_FP8, ATTENTION_FEW]
            }
            Self::AttentionMany(_) => &[
                COMMON,
                HOPPER,
                ATTENTION_SHARED,
                ATTENTION_TILE,
                ATTENTION_FP8,
                ATTENTION_MANY,
                ATTENTION_WIDE,
            ],
            Self::Skinny { .. } => &[COMMON, SKINNY],
            Self::Gated { .. } => &[COMMON, HOPPER, GATED],
            Self::Grouped => &[COMMON, HOPPER, GROUPED, GROUPED_FEW],
            Self::RouteTiles { .. } => &[COMMON, SKINNY, EXPERTS_SHARED, ROUTE_TILES],
            Self::Experts(_) => &[COMMON, EXPERTS_SHARED, LATENT_SHARED, EXPERTS],
            Self::ExpertProduct(..) => {
                &[COMMON, WEIGHTS, PRODUCT, EXPERTS_SHARED, LATENT_SHARED, EXPERT_PRODUCT]
            }
            Self::SampleChoose => &[COMMON, SAMPLE_SHARED, SAMPLE_CHOOSE],
            Self::SampleScore => &[COMMON, SAMPLE_SHARED, SAMPLE_SCORE],
            Self::Graph => &[COMMON, GRAPH],
        };
        parts.concat()
    }

    fn defines(self) -> Vec<String> {
        match self {
            Self::Basic(precision) | Self::AttentionAny(precision) | Self::Experts(precision) => {
                activations(precision)
            }
            Self::ExpertProduct(format, precision) => {
                let mut defines = activations(precision);
                defines.extend([
                    format!("-DFORMAT={}", format_number(format)),
                    format!("-DBLOCK_LEN={}", format.block_len()),
                    format!("-DBLOCK_BYTES={}", format.block_bytes()),
                    "-DPACKED_BITS=0".to_owned(),
                    "-DEXPERTS".to_owned(),
                ]);
                defines
            }
            Self::Product(format, precision) => {
                let is_fast = precision == Precision::Fast;
                let mut defines = activations(precision);
                defines.extend([
                    format!("-DFORMAT={}", format_number(format)),
                    format!("-DBLOCK_LEN={}", format.block_len()),
                    format!("-DBLOCK_BYTES={}", format.block_bytes()),
                    format!("-DPACKED_BITS={}", if is_fast { packed_bits(format) } else { 0 }),
                ]);
                defines
            }
            Self::Packed { bits, tiles, is_gated } => vec![
                format!("-DBITS={bits}"),
                format!("-DTILES={tiles}"),
                format!("-DIS_GATED={}", u8::from(is_gated)),
            ],
            Self::PackedWide { bits, is_gated } => {
                vec![format!("-DBITS={bits}"), format!("-DIS_GATED={}", u8::from(is_gated))]
            }
            Self::AttentionFew(tiling) | Self::AttentionMany(tiling) => vec![
                format!("-DHEAD_DIM={}", tiling.head_dim),
                format!("-DIS_F16={}", u8::from(tiling.cache != KvDtype::BF16)),
                format!("-DIS_FP8={}", u8::from(tiling.cache == KvDtype::F8E4M3)),
                format!("-DIS_SMALL={}", u8::from(tiling.is_small)),
            ],
            Self::AttentionLatent { is_f16 } => vec![format!("-DIS_F16={}", u8::from(is_f16))],
            Self::Skinny { tiles, weights } => {
                vec![format!("-DTILES={tiles}"), format!("-DFP8={}", weights as u8)]
            }
            Self::RouteTiles { tiles } => {
                vec![format!("-DTILES={tiles}"), "-DFP8=0".to_owned(), "-DROUTER".to_owned()]
            }
            Self::Gated { is_fp8 } => vec![format!("-DFP8={}", u8::from(is_fp8))],
            Self::Fp8Wide
            | Self::Bf16Wide
            | Self::Grouped
            | Self::SampleChoose
            | Self::SampleScore
            | Self::Graph => Vec::new(),
        }
    }

    fn name(self) -> String {
        match self {
            Self::Basic(precision) => format!("basic {precision:?}"),
            Self::Product(format, precision) => format!("product {format} {precision:?}"),
            Self::Packed { bits, tiles, is_gated } => format!("packed {bits} {tiles} {is_gated}"),
            Self::PackedWide { bits, is_gated } => format!("packed_wide {bits} {is_gated}"),
            Self::Skinny { tiles, weights } => format!("skinny {tiles} {weights:?}"),
            Self::Gated { is_fp8 } => format!("gated{}", if is_fp8 { " fp8" } else { "" }),
            Self::Fp8Wide => "fp8_wide".to_owned(),
            Self::Bf16Wide => "bf16_wide".to_owned(),
            Self::Grouped => "grouped".to_owned(),
            Self::RouteTiles { tiles } => format!("route_tiles {tiles}"),
            Self::Experts(precision) => format!("experts {precision:?}"),
            Self::ExpertProduct(format, precision) => format!("experts {format} {precision:?}"),
            Self::AttentionAny(precision) => format!("attention_any {precision:?}"),
            Self::AttentionLatent { is_f16 } => format!("attention_latent {is_f16}"),
            Self::AttentionFew(tiling) => format!("attention_few {} {:?}", tiling.head_dim, tiling.cache),
            Self::AttentionMany(tiling) => format!("attention_many {} {:?}", tiling.head_dim, tiling.cache),
            Self::SampleChoose => "sample_choose".to_owned(),
            Self::SampleScore => "sample_score".to_owned(),
            Self::Graph => "graph".to_owned(),
        }
    }
}

fn activations(precision: Precision) -> Vec<String> {
    (precision == Precision::Full).then(|| "-DF32_ACTIVATIONS".to_owned()).into_iter().collect()
}

/// The number that `product.cu` knows a format by.
fn format_number(format: WeightFormat) -> usize {
    WeightFormat::ALL.iter().position(|other| *other == format).expect("ALL lists every format")
}

/// The architecture to compile for: with its own features where we use them.
pub(crate) fn architecture((major, minor): (i32, i32)) -> String {
    if (major, minor) == (9, 0) { "sm_90a".to_owned() } else { format!("sm_{major}{minor}") }
}

/// True where `gated.cu` can run: it is written for the tensor cores of one generation.
pub(crate) fn has_gated(architecture: &str) -> bool {
    architecture == "sm_90a"
}

/// Machine code of a unit, from the cache or new.
pub(crate) fn cubin(
    unit: Unit,
    architecture: &str,
    cache_dir: Option<&Path>,
) -> Result<Vec<u8>, BackendError> {
    let path = cache_dir.map(|dir| dir.join(format!("{}.cubin", key(unit, architecture))));
    if let Some(bytes) = path.as_ref().and_then(|path| fs::read(path).ok()).filter(|bytes| is_elf(bytes)) {
        return Ok(bytes);
    }
    let (bytes, _) = compile(unit, architecture).map_err(|cause| BackendError::Device { cause })?;
    if let Some(path) = path {
        store(&path, &bytes);
    }
    Ok(bytes)
}

fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

/// Written beside and renamed, so that another process never reads half a file.
pub(crate) fn store(path: &Path, bytes: &[u8]) {
    let Some(dir) = path.parent() else { return };
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let written = fs::create_dir_all(dir)
        .and_then(|()| fs::write(&temporary, bytes))
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
}

fn key(unit: Unit, architecture: &str) -> String {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two integers.
    let _ = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    let mut hasher = blake3::Hasher::new();
    hasher.update(unit.source().as_bytes());
    for option in options(unit, architecture) {
        hasher.update(option.as_bytes()).update(b"\0");
    }
    hasher.update(format!("{major}.{minor}").as_bytes());
    hasher.finalize().to_hex()[..32].to_owned()
}

fn options(unit: Unit, architecture: &str) -> Vec<String> {
    let mut options = vec![format!("--gpu-architecture={architecture}"), "--std=c++17".to_owned()];
    options.extend(unit.defines());
    options
}

/// Machine code and the compiler's report, or its complaint.
fn compile(unit: Unit, architecture: &str) -> Result<(Vec<u8>, String), String> {
    let source = CString::new(unit.source()).expect("kernel texts have no zero bytes");
    let failed =
        |error: nvrtc::NvrtcError| format!("compiling {} for {architecture}: {error:?}", unit.name());
    let program = nvrtc::create_program(&source, None).map_err(failed)?;
    let mut options = options(unit, architecture);
    // Not part of the key: it changes the report, not the code.
    options.push("--ptxas-options=--verbose".to_owned());
    // SAFETY: the program was just made and is destroyed below.
    let compiled = unsafe { nvrtc::compile_program(program, &options) };
    // SAFETY: as above.
    let log = unsafe { nvrtc::get_program_log(program) }.map_err(failed)?;
    let log: String = log.iter().map(|byte| *byte as u8 as char).filter(|c| *c != '\0').collect();
    let result = match compiled {
        Err(error) => Err(format!("{}\n{log}", failed(error))),
        // SAFETY: as above.
        Ok(()) => unsafe { machine_code(program) }.map(|code| (code, log)).map_err(failed),
    };
    // SAFETY: nothing uses the program after this.
    let _ = unsafe { nvrtc::destroy_program(program) };
    result
}

/// # Safety
/// `program` must be compiled and alive.
unsafe fn machine_code(program: sys::nvrtcProgram) -> Result<Vec<u8>, nvrtc::NvrtcError> {
    let mut size = 0;
    // SAFETY: by contract.
    unsafe { sys::nvrtcGetCUBINSize(program, &raw mut size) }.result()?;
    let mut code = vec![0_u8; size];
    // SAFETY: the buffer has the size that was asked for.
    unsafe { sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()) }.result()?;
    Ok(code)
}

/// What the compiler said about one unit for one architecture.
#[derive(Clone, Debug)]
pub struct CompileReport {
    pub unit: String,
    pub architecture: String,
    /// Lines of the log that tell of spilled registers or a stack frame.
    pub spills: Vec<String>,
    /// Largest number of registers of a kernel in it.
    pub max_registers: u32,
}

/// Compiles every kernel for every one of [`ARCHITECTURES`], which needs NVRTC but no device. `None` without NVRTC.
pub fn check_kernels() -> Option<Result<Vec<CompileReport>, String>> {
    // SAFETY: only tries to open a library.
    if !unsafe { sys::is_culib_present() } {
        return None;
    }
    let jobs: Vec<(Unit, &str)> = ARCHITECTURES
        .iter()
        .flat_map(|arch| Unit::every(arch).into_iter().map(move |unit| (unit, *arch)))
        .collect();
    // Each thread takes the next one: some take ten times as long as others.
    let next = AtomicUsize::new(0);
    let compile_some = || -> Vec<Result<CompileReport, String>> {
        let take = || jobs.get(next.fetch_add(1, Ordering::Relaxed));
        let compile_one = |&(unit, architecture): &(Unit, &str)| {
            compile(unit, architecture).map(|(_, log)| report(unit, architecture, &log))
        };
        std::iter::from_fn(take).map(compile_one).collect()
    };
    let num_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let reports: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(compile_some)).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Vec<_>>| {
            thread.join().expect("compiling a kernel does not panic")
        };
        threads.into_iter().flat_map(join).collect()
    });
    Some(reports.into_iter().collect())
}

fn report(unit: Unit, architecture: &str, log: &str) -> CompileReport {
    let spills = log.lines().filter(|line| {
        line.contains("bytes stack frame")
            && !line.contains("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")
    });
    let registers = log.lines().filter_map(|line| {
        let (before, _) = line.split_once(" registers")?;
        before.rsplit(' ').next()?.parse().ok()
    });
    CompileReport {
        unit: unit.name(),
        architecture: architecture.to_owned(),
        spills: spills.map(str::to_owned).collect(),
        max_registers: registers.max().unwrap_or(0),
    }
}
