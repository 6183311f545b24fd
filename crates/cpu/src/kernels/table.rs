//! The kernels of each instruction set as a table of function pointers.
//!
//! The macro wraps every generic kernel in a function that carries the target features, into which the kernel and the
//! vector operations are inlined.

use baton_backend::sampling::{SampleScratch, sample_row};
use baton_backend::{Activation, KvDtype, RopeStyle, RowLists, SampleRow, Sampled, WeightFormat};
use baton_core::TokenLogprob;

use super::attention::AttentionArgs;
use super::floats::ChunkKernel;
use super::gemm::PanelKernel;
use super::graph::{FinishArgs, ReduceArgs, Rows};
use super::peak::{PeakKernel, ReadKernel};
use super::rows::{Epilogue, NormArgs, Spread};
use crate::isa::Isa;
use crate::quantize::ActivationBlock;
use crate::weights::Forms;

/// [`sample_row`].
pub type SampleKernel =
    unsafe fn(&[f32], &SampleRow, RowLists<'_>, &mut SampleScratch, &mut Vec<TokenLogprob>) -> Sampled;

/// One instruction set's kernels.
///
/// # Safety
/// A pointer may be called if the processor has the instruction set the table was built for, and under the contract of
/// the generic function it stands for.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    /// Of all formats but the last, e4m3, which is converted when it is loaded.
    panels: [PanelKernel; WeightFormat::ALL.len() - 1],
    attend: [unsafe fn(&AttentionArgs); 4],
    /// Where caches of f16, bf16 and int8 are multiplied in pairs.
    pairs: Option<PairKernels>,
    pub fold_segments: unsafe fn(&AttentionArgs, *mut f32, usize),
    /// `(x, len, norm, out, accumulate)`.
    pub norm_row: unsafe fn(*const f32, usize, &NormArgs, *mut f32, bool),
    /// `(x, len, blocks, lanes)`.
    pub quantize_row: unsafe fn(*const f32, usize, *mut ActivationBlock, usize),
    /// `(epilogue, tile, count)`.
    pub finish_panel: unsafe fn(&Epilogue, *const f32, usize),
    /// `(epilogue, up_bias, activation, gate, up, count)`.
    pub finish_gated: unsafe fn(&Epilogue, *const f32, Activation, *const f32, *const f32, usize),
    /// `(x, cos, sin, half, style)`.
    pub rotate_head: unsafe fn(*mut f32, *const f32, *const f32, usize, RopeStyle),
    /// `(x, len, out, spread)`.
    pub write_f16: unsafe fn(*const f32, usize, *mut u16, Spread),
    /// Multiply-adds that some rounds of dot products of bytes, and of f32, were.
    pub peak_dot: PeakKernel,
    pub peak_fma: PeakKernel,
    pub peak_read: ReadKernel,
    /// Where bf16 weights are multiplied in tiles.
    pub split: Option<SplitKernels>,
    /// Where k-quants are added up in super-blocks.
    pub supers: Option<SuperKernels>,
    /// `(x, len, quants, spread, scale)`.
    pub write_int8: unsafe fn(*const f32, usize, *mut i8, Spread, *mut f32),
    pub sample: SampleKernel,
    /// Panels of f32 with rows of f32.
    pub multiply_chunk: ChunkKernel,
    /// `(args, kind)`.
    pub reduce_neighbours: unsafe fn(&ReduceArgs, u32) -> bool,
    pub finish_node: unsafe fn(&FinishArgs),
    /// `(rows, row, out)`.
    pub open_node: unsafe fn(&Rows, usize, *mut f32),
}

/// Attention with a cache that has its values in pairs: see [`Kernels::has_pairs`].
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Others have none.
struct PairKernels {
    f16: unsafe fn(&AttentionArgs),
    bf16: unsafe fn(&AttentionArgs),
    int8: unsafe fn(&AttentionArgs),
}

/// Products with rows that were split in two bf16 before, for matrices that were packed for it: see
/// [`PackedMatrix::is_split`](crate::weights::PackedMatrix).
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Others have none.
pub struct SplitKernels {
    /// Around the calls of the panels' kernels, on each thread.
    pub begin: unsafe fn(),
    pub end: unsafe fn(),
    /// `(x, len, out, row, tiles)`.
    pub split_row: unsafe fn(*const f32, usize, *mut f32, usize, usize),
    pub panels: PanelKernel,
    /// Multiply-adds that some rounds of products of bf16 were.
    pub peak: PeakKernel,
}

/// Products of k-quants with rows quantised in super-blocks: see `kernels::supers`.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Others have none.
pub struct SuperKernels {
    /// `(x, len, out, row, tiles)`.
    pub quantize_row: unsafe fn(*const f32, usize, *mut u8, usize, usize),
    q4_k: PanelKernel,
    q5_k: PanelKernel,
    q6_k: PanelKernel,
}

impl SuperKernels {
    fn panel(&self, format: WeightFormat) -> Option<PanelKernel> {
        match format {
            WeightFormat::Q4_K => Some(self.q4_k),
            WeightFormat::Q5_K => Some(self.q5_k),
            WeightFormat::Q6_K => Some(self.q6_k),
            _ => None,
        }
    }
}

impl Kernels {
    /// The kernels of `isa`, which the processor must have.
    pub fn new(isa: Isa) -> Self {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2_table::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512_table::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => avx512_vnni_table::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => BF16_KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::AmxBf16 => amx_table::FLOATS,
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => amx_table::ALL,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon_table::KERNELS,
            _ => portable_table::KERNELS,
        }
    }

    /// Those of AMX for k-quants on a processor that has VNNI: for tests.
    #[cfg(all(test, target_arch = "x86_64"))]
    pub fn with_emulated_tiles() -> Option<Self> {
        Isa::Avx512Vnni.is_available().then_some(amx_table::EMULATED)
    }

    pub fn panel(&self, format: WeightFormat) -> PanelKernel {
        self.supers.and_then(|supers| supers.panel(format)).unwrap_or(self.panels[format as usize])
    }

    /// How weights are to be packed, and their rows made ready.
    pub fn forms(&self) -> Forms {
        Forms { splits: self.split.is_some(), supers: self.supers.is_some() }
    }

    /// Attention over a cache of `dtype`, in pairs or not.
    pub fn attend(&self, dtype: KvDtype, is_paired: bool) -> unsafe fn(&AttentionArgs) {
        match (&self.pairs, dtype) {
            (Some(pairs), KvDtype::F16) if is_paired => pairs.f16,
            (Some(pairs), KvDtype::BF16) if is_paired => pairs.bf16,
            (Some(pairs), KvDtype::Int8) if is_paired => pairs.int8,
            _ => self.attend[dtype as usize],
        }
    }

    /// Whether a cache of `dtype` is to have its values in pairs.
    pub fn has_pairs(&self, dtype: KvDtype, head_dim: usize) -> bool {
        let is_narrow = matches!(dtype, KvDtype::F16 | KvDtype::BF16 | KvDtype::Int8);
        self.pairs.is_some() && is_narrow && head_dim.is_multiple_of(2)
    }
}

macro_rules! table {
    ($module:ident, $simd:ty $(, $features:literal)?) => {
        mod $module {
            #![allow(unsafe_op_in_unsafe_fn)]
            use super::*;
            use super::super::attention;
            use super::super::float_products::{self, FloatProducts, OpenedKernels};
            use super::super::floats::{self, Element, ElementBf16, ElementF16, ElementF32, ElementI8, FloatArgs};
            use super::super::int8_cache;
            use super::super::gemm::{self, PanelArgs};
            use super::super::tile::{self, Class, TileArgs, TileKernel};
            use super::super::{graph, peak, rows, segments};
            use crate::weights::formats::{self, Quant};

            $(#[target_feature(enable = $features)])?
            unsafe fn quant_panels<Q: Quant>(args: &PanelArgs, first: usize, count: usize, out: *mut f32) {
                gemm::quant_panels::<$simd, Q>(args, first, count, out, tile_kernel(Class::of::<Q>()));
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn multiply_tile<const HALVES: usize, const MINS: bool, const BITS: u32>(args: &TileArgs) {
                tile::multiply::<$simd, HALVES, MINS, BITS>(args);
            }
            fn tile_kernel(class: Class) -> TileKernel {
                match class {
                    Class::WithMin => multiply_tile::<1, true, 5>,
                    Class::Plain5 => multiply_tile::<1, false, 5>,
                    Class::Plain8 => multiply_tile::<1, false, 8>,
                    Class::HalvesWithMin => multiply_tile::<2, true, 5>,
                    Class::Halves5 => multiply_tile::<2, false, 5>,
                    Class::Halves7 => multiply_tile::<2, false, 7>,
                }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn multiply_chunk(args: &FloatArgs) {
                floats::multiply_chunk::<$simd>(args);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn add_opened(args: &AttentionArgs, tile: usize, first: usize, last: usize) {
                float_products::add_opened::<$simd>(args, tile, first, last);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn float_panels<E: Element>(args: &PanelArgs, first: usize, count: usize, out: *mut f32) {
                floats::float_panels::<$simd, E>(args, first, count, out, multiply_chunk);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn attend<E: Element>(args: &AttentionArgs) {
                let opened = OpenedKernels { multiply: multiply_chunk, add_values: add_opened };
                attention::attend::<$simd, _>(args, &FloatProducts::<E>::new(opened));
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn fold_segments(args: &AttentionArgs, states: *mut f32, num_segments: usize) {
                segments::fold_segments::<$simd>(args, states, num_segments);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn norm_row(x: *const f32, len: usize, norm: &NormArgs, out: *mut f32, accumulate: bool) {
                rows::norm_row::<$simd>(x, len, norm, out, accumulate);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn quantize_row(x: *const f32, len: usize, blocks: *mut ActivationBlock, lanes: usize) {
                rows::quantize_row::<$simd>(x, len, blocks, lanes);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn finish_panel(epilogue: &Epilogue, tile: *const f32, count: usize) {
                rows::finish_panel::<$simd>(epilogue, tile, count);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn finish_gated(
                epilogue: &Epilogue,
                up_bias: *const f32,
                activation: Activation,
                gate: *const f32,
                up: *const f32,
                count: usize,
            ) {
                rows::finish_gated::<$simd>(epilogue, up_bias, activation, gate, up, count);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn rotate_head(
                x: *mut f32,
                cos: *const f32,
                sin: *const f32,
                half: usize,
                style: RopeStyle,
            ) {
                rows::rotate_head::<$simd>(x, cos, sin, half, style);
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn write_f16(x: *const f32, len: usize, out: *mut u16, spread: Spread) {
                rows::write_f16::<$simd>(x, len, out, spread);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn peak_dot(rounds: usize) -> f64 {
                peak::dot::<$simd>(rounds)
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn peak_fma(rounds: usize) -> f64 {
                peak::fma::<$simd>(rounds)
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn peak_read(from: *const u8, bytes: usize) {
                peak::read::<$simd>(from, bytes);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn write_int8(x: *const f32, len: usize, quants: *mut i8, spread: Spread, scale: *mut f32) {
                int8_cache::write_int8::<$simd>(x, len, quants, spread, scale);
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn sample(
                logits: &[f32],
                row: &SampleRow,
                lists: RowLists<'_>,
                scratch: &mut SampleScratch,
                top: &mut Vec<TokenLogprob>,
            ) -> Sampled {
                sample_row(logits, row, lists, scratch, top)
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn reduce_neighbours(args: &ReduceArgs, kind: u32) -> bool {
                graph::reduce::<$simd>(args, kind)
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn finish_node(args: &FinishArgs) {
                graph::finish::<$simd>(args);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn open_node(rows: &Rows, row: usize, out: *mut f32) {
                graph::open_row::<$simd>(rows, row, out);
            }

            pub const KERNELS: Kernels = Kernels {
                // In the order of `WeightFormat`.
                panels: [
                    float_panels::<ElementF32>,
                    float_panels::<ElementF16>,
                    float_panels::<ElementBf16>,
                    quant_panels::<formats::Q4_0>,
                    quant_panels::<formats::Q4_1>,
                    quant_panels::<formats::Q5_0>,
                    quant_panels::<formats::Q5_1>,
                    quant_panels::<formats::Q8_0>,
                    quant_panels::<formats::Q2K>,
                    quant_panels::<formats::Q3K>,
                    quant_panels::<formats::Q4K>,
                    quant_panels::<formats::Q5K>,
                    quant_panels::<formats::Q6K>,
                    quant_panels::<formats::Iq4Nl>,
                    quant_panels::<formats::Iq4Xs>,
                    quant_panels::<formats::Iq3S>,
                    quant_panels::<formats::Iq3Xxs>,
                    quant_panels::<formats::Iq2S>,
                    quant_panels::<formats::Iq2Xs>,
                    quant_panels::<formats::Iq2Xxs>,
                    quant_panels::<formats::Iq1M>,
                    quant_panels::<formats::Iq1S>,
                ],
                // In the order of `KvDtype`, whose last one has no kernels here.
                attend: [attend::<ElementF32>, attend::<ElementF16>, attend::<ElementBf16>, attend::<ElementI8>],
                pairs: None,
                fold_segments,
                norm_row,
                quantize_row,
                finish_panel,
                finish_gated,
                rotate_head,
                write_f16,
                write_int8,
                sample,
                multiply_chunk,
                reduce_neighbours,
                finish_node,
                open_node,
                peak_dot,
                peak_fma,
                peak_read,
                split: None,
                supers: None,
            };
        }
    };
}

table!(portable_table, super::super::portable::Portable);
#[cfg(target_arch = "aarch64")]
table!(neon_table, super::super::neon::Neon, "neon,dotprod");
#[cfg(target_arch = "x86_64")]
table!(avx2_table, super::super::avx2::Avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
table!(avx512_table, super::super::avx512::Avx512<false>, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl");
#[cfg(target_arch = "x86_64")]
table!(
    avx512_vnni_table,
    super::super::avx512::Avx512<true>,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
);

/// BF16 differs from VNNI in attention alone. On Intel's processors its dot products are no faster than f32, and those with
/// tiles have a path of their own.
#[cfg(target_arch = "x86_64")]
const BF16_KERNELS: Kernels = Kernels {
    pairs: Some(PairKernels {
        f16: super::pairs::attend::<super::floats::ElementF16>,
        bf16: super::pairs::attend::<super::floats::ElementBf16>,
        int8: super::pairs::attend::<super::floats::ElementI8>,
    }),
    ..avx512_vnni_table::KERNELS
};

/// AMX differs from VNNI in the products of bf16 weights and of k-quants.
#[cfg(target_arch = "x86_64")]
mod amx_table {
    #![allow(unsafe_op_in_unsafe_fn)]
    use super::super::amx::{self, bf16, int8};
    use super::super::gemm::PanelArgs;
    use super::super::supers::{self, TileUnit};
    use super::avx512_vnni_table::KERNELS as VNNI;
    use super::{Kernels, SplitKernels, SuperKernels};
    use crate::weights::formats::{Q4K, Q5K, Q6K, Quant};

    /// Tiles for float weights alone.
    pub const FLOATS: Kernels = Kernels {
        split: Some(SplitKernels {
            begin: bf16::begin,
            end: bf16::end,
            split_row: bf16::split_row,
            panels: bf16::panels,
            peak: amx::peak_bf16,
        }),
        ..VNNI
    };

    /// Tiles for k-quants as well.
    pub const ALL: Kernels =
        Kernels { supers: Some(super_kernels::<int8::Tiles>()), peak_dot: amx::peak_dot, ..FLOATS };

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn super_panels<U: TileUnit, Q: Quant>(
        args: &PanelArgs,
        first: usize,
        count: usize,
        out: *mut f32,
    ) {
        supers::panels::<U, Q>(args, first, count, out);
    }

    const fn super_kernels<U: TileUnit>() -> SuperKernels {
        SuperKernels {
            quantize_row: supers::quantize_row,
            q4_k: super_panels::<U, Q4K>,
            q5_k: super_panels::<U, Q5K>,
            q6_k: super_panels::<U, Q6K>,
        }
    }

    /// The kernels for k-quants of a processor with VNNI, tiles being emulated.
    #[cfg(test)]
    pub const EMULATED: Kernels = Kernels { supers: Some(super_kernels::<supers::Emulated>()), ..VNNI };
}
