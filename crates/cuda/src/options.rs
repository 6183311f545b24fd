//! How a device is opened.

use std::path::PathBuf;

use baton_backend::{KvSpec, Precision, WeightFormat};

use crate::gated::MIN_BUSY;

const SKINNY_ROWS: usize = 8;

#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Which device, as `nvidia-smi` numbers them.
    pub ordinal: usize,
    /// Launch every kernel of every step instead of replaying recorded steps.
    pub enforce_eager: bool,
    /// Where compiled kernels and the choices of products are kept; `None` keeps none.
    pub cache_dir: Option<PathBuf>,
    /// Memory for partial results of attention that is split over a long context.
    pub partial_bytes: usize,
    /// Products of bf16 weights with at most this many tokens are done by our own tensor-core kernels, larger ones by
    /// cuBLASLt.
    pub skinny_rows: usize,
    /// Gated products of bf16 weights that keep at least so much of the device busy, in percent, are one kernel of our own with
    /// their activation.
    pub gated_min_busy: usize,
    /// [`Precision::Full`] takes no tensor cores and is many times slower.
    pub precision: Precision,
    /// All products of bf16 weights are cuBLASLt's, whatever the other options say: to compare with.
    pub library_products: bool,
    /// What will be loaded, if that is known: its kernels are compiled while the device starts.
    pub expected: Option<Expected>,
}

#[derive(Clone, Debug)]
pub struct Expected {
    pub formats: Vec<WeightFormat>,
    pub cache: KvSpec,
}

impl Default for CudaOptions {
    fn default() -> Self {
        let cache = std::env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
        Self {
            ordinal: 0,
            enforce_eager: false,
            cache_dir: cache.map(|cache| cache.join("baton/kernels")),
            partial_bytes: 256 << 20,
            skinny_rows: SKINNY_ROWS,
            gated_min_busy: MIN_BUSY,
            precision: Precision::Fast,
            library_products: false,
            expected: None,
        }
    }
}
