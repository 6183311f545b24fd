//! The [`Backend`](baton_backend::Backend) on NVIDIA GPUs.
//!
//! Nothing of CUDA is needed to build this crate: the driver, NVRTC and cuBLASLt are looked for when it runs
//! ([`CudaBackend::probe`]), and the kernels (`src/kernels/*.cu`) are text in the binary, compiled for the device that is
//! found and kept on disk ([`compile`]).
//!
//! How a step goes: `pack` writes the [`StepInput`](baton_backend::StepInput) into one pinned array, which one copy brings
//! to the device, where kernels find every array through its header; `ops` launches the program, or a graph of the same
//! launches is replayed; the drawn tokens stay on the device for the next step and are copied to pinned memory for the
//! host. Two steps may be in flight.
//!
//! Activations are bf16, the residual stream included; sums, norms, scores and logits are f32. Weights are bf16, or quantised
//! and packed for the tensor cores ([`layout`]); rare formats keep that of their file. For few rows our own kernels read them
//! (bf16 fused with norms, rotary embedding and activations), larger products go to cuBLASLt, which gets what is not bf16
//! converted piece by piece.
//!
//! Not here: any model, any decision about which requests run, any CUDA outside `gpu`, `compile`, `gemm` and `ranges`.

mod backend;
mod choices;
mod clock;
mod compile;
mod device;
mod encoder;
mod estimate;
mod experts;
mod fp8;
mod gated;
mod gemm;
mod gpu;
mod graph;
mod graphs;
mod grouped;
mod heads;
mod host_blocks;
mod kernels;
mod kv;
mod latent;
mod layout;
mod ops;
mod options;
mod output;
mod pack;
mod params;
mod peak;
mod pinned;
mod positions;
mod probe;
mod products;
mod ranges;
mod route;
mod skinny;
mod swap;
mod weights;
mod wide;

pub use backend::CudaBackend;
pub use compile::{ARCHITECTURES, CompileReport, check_kernels};
pub use estimate::{free_bytes, step_memory};
pub use graph::CudaGraph;
pub use layout::loaded_bytes;
pub use options::{CudaOptions, Expected};
pub use peak::Peaks;
pub use probe::{Missing, StartError};
pub use products::MAX_PRODUCT_ROWS;
