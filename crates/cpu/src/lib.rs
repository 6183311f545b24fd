//! The [`Backend`](baton_backend::Backend) on threads and SIMD: float and GGUF-quantised weights, paged KV, batches of
//! prompts and decodes alike.
//!
//! ```
//! use baton_backend::Backend;
//! use baton_cpu::{CpuBackend, CpuOptions};
//!
//! let backend = CpuBackend::new(CpuOptions { threads: Some(1), ..CpuOptions::default() })?;
//! assert_eq!(backend.device().name, "cpu");
//! # Ok::<(), baton_backend::BackendError>(())
//! ```
//!
//! An op is one fork and join of [`pool`]; its phases (normalise and quantise the input, multiply, finish) are separated
//! by barriers. Weights are repacked at load ([`weights`]) so that a vector lane is an output row. The arithmetic is in
//! [`kernels`], built for each instruction set and chosen at run time ([`Isa`]).
//!
//! The result of a row depends neither on the other rows of the batch nor on the number of threads, to the last bit.
//! Different instruction sets agree to rounding only.

// Casts of byte pointers to wider ones: all memory starts on a cache line, and loads of lanes are unaligned ones.
#![allow(clippy::cast_ptr_alignment)]

mod backend;
mod buffers;
mod cgroup;
mod expert_scratch;
mod graph;
mod isa;
mod kernels;
mod kv;
mod memory;
mod ops;
mod peak;
mod pool;
mod quantize;
mod scratch;
mod topology;
mod units;
mod weights;

pub use backend::{CpuBackend, CpuOptions};
pub use graph::CpuGraph;
pub use isa::{ISA_VARIABLE, Isa};
pub use peak::Peaks;
pub use topology::{Core, Machine};
pub use weights::loaded_bytes;
