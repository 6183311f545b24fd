//! The arithmetic. Each kernel is one generic function over the sixteen-lane machine of [`simd`]; [`table`] builds it
//! for every instruction set and hands out pointers to the builds that a processor can run.
//!
//! Not here: threads, buffers or the order of work (`ops`).

#[cfg(target_arch = "x86_64")]
pub mod amx;
pub mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod float_products;
pub mod floats;
pub mod gemm;
pub mod graph;
pub mod int8_cache;
mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod pairs;
pub mod peak;
mod portable;
pub mod rows;
pub mod segments;
mod simd;
mod softmax;
#[cfg(target_arch = "x86_64")]
mod supers;
mod table;
mod tile;

pub use table::{Kernels, SplitKernels, SuperKernels};
