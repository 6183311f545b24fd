//! The kernels of packed weights, compiled with the first weight of a packing, and those of `wide.cuh`.

use baton_backend::{BackendError, WeightFormat};

use super::{Kernels, Module, PACKED_TILES, ProductKernel, ProductKernels, allow_shared};
use crate::compile::{Unit, has_gated};
use crate::gpu::Function;
use crate::layout::{Layout, TILE_ROWS, record_bytes};
use crate::wide::{
    BF16_TOKENS, FP8_TOKENS, PACKED_TOKENS, bf16_shared_bytes, few_shared_bytes, fp8_shared_bytes,
    packed_shared_bytes,
};

/// With fewer tokens, the kernels of tiles of 16 tokens are as fast; of bf16, the skinny ones.
const MIN_QUANTISED_TOKENS: u32 = 17;
const MIN_BF16_TOKENS: u32 = 9;

/// Those of `packed_wide.cu`, `fp8_wide.cu` or `bf16_wide.cu`.
#[derive(Clone, Debug)]
pub(crate) struct WideKernels {
    /// Tokens that each takes, and the fewest.
    pub(crate) tokens: &'static [u32],
    pub(crate) min_tokens: u32,
    /// Plain, and gated where there is one.
    pub(crate) functions: Vec<[Option<Function>; 2]>,
    /// Of e4m3, those of up to eight tokens, without and with a norm before: plain, and gated.
    pub(crate) few: Option<[[Function; 2]; 2]>,
}

impl WideKernels {
    /// The first kernel that takes so many tokens.
    pub(crate) fn find(&self, m: u32) -> Option<usize> {
        self.tokens.iter().position(|tokens| (self.min_tokens..=*tokens).contains(&m))
    }
}

impl Kernels {
    pub(super) fn prepare_packed(&mut self, bits: u32) -> Result<(), BackendError> {
        let layout = Layout::Packed { bits };
        if self.products.contains_key(&layout) {
            return Ok(());
        }
        let mut products = Vec::with_capacity(PACKED_TILES.len());
        for tiles in PACKED_TILES {
            let plain = self.compiler.load(Unit::Packed { bits, tiles, is_gated: false })?;
            let gated = self.compiler.load(Unit::Packed { bits, tiles, is_gated: true })?;
            products.push(packed_products(&plain, &gated, bits, tiles)?);
            if tiles == 1 {
                self.embeds.insert(layout, gated.function("packed_embed")?);
                self.converts.insert(layout, gated.function("packed_convert")?);
            }
            self.modules.extend([plain, gated]);
        }
        self.products.insert(layout, products);
        if has_gated(&self.compiler.architecture) {
            let plain = self.compiler.load(Unit::PackedWide { bits, is_gated: false })?;
            let gated = self.compiler.load(Unit::PackedWide { bits, is_gated: true })?;
            let find = |tokens: u32| {
                let shared_bytes = packed_shared_bytes(bits, tokens);
                let both =
                    [wide_kernel(&plain, tokens, shared_bytes)?, wide_kernel(&gated, tokens, shared_bytes)?];
                Ok(both.map(Some))
            };
            let functions = PACKED_TOKENS.into_iter().map(find).collect::<Result<_, BackendError>>()?;
            let kernels = WideKernels {
                tokens: &PACKED_TOKENS,
                min_tokens: MIN_QUANTISED_TOKENS,
                functions,
                few: None,
            };
            self.wide.insert(layout, kernels);
            self.modules.extend([plain, gated]);
        }
        Ok(())
    }

    /// With the first weight of e4m3 that has a scale a row.
    pub(super) fn prepare_fp8_wide(&mut self) -> Result<(), BackendError> {
        let module = self.compiler.load(Unit::Fp8Wide)?;
        let find = |tokens: u32| Ok([Some(wide_kernel(&module, tokens, fp8_shared_bytes(tokens))?), None]);
        let functions = FP8_TOKENS.into_iter().map(find);
        let functions = functions.collect::<Result<_, BackendError>>()?;
        let few = |name: &str| {
            let function = module.function(name)?;
            allow_shared(function, few_shared_bytes())?;
            Ok::<_, BackendError>(function)
        };
        let few = Some([
            [few("few_linear")?, few("few_gated")?],
            [few("few_normed_linear")?, few("few_normed_gated")?],
        ]);
        let kernels = WideKernels { tokens: &FP8_TOKENS, min_tokens: MIN_QUANTISED_TOKENS, functions, few };
        self.wide.insert(Layout::Plain(WeightFormat::F8_E4M3), kernels);
        self.modules.push(module);
        Ok(())
    }

    /// With the first weight of bf16.
    pub(super) fn prepare_bf16_wide(&mut self) -> Result<(), BackendError> {
        let module = self.compiler.load(Unit::Bf16Wide)?;
        let find = |tokens: u32| {
            let kernel = |name: String| {
                let function = module.function(&name)?;
                allow_shared(function, bf16_shared_bytes(tokens))?;
                Ok::<_, BackendError>(Some(function))
            };
            Ok([kernel(format!("wide_{tokens}"))?, kernel(format!("gated_wide_{tokens}"))?])
        };
        let functions = BF16_TOKENS.into_iter().map(find).collect::<Result<_, BackendError>>()?;
        let kernels = WideKernels { tokens: &BF16_TOKENS, min_tokens: MIN_BF16_TOKENS, functions, few: None };
        self.wide.insert(Layout::Plain(WeightFormat::BF16), kernels);
        self.modules.push(module);
        Ok(())
    }

    /// The kernels of more tokens than those of [`Self::products`] are for, where the device has them.
    pub(crate) fn wide(&self, layout: Layout) -> Option<&WideKernels> {
        self.wide.get(&layout)
    }
}

fn wide_kernel(module: &Module, tokens: u32, shared_bytes: u32) -> Result<Function, BackendError> {
    let function = module.function(&format!("wide_{tokens}"))?;
    allow_shared(function, shared_bytes)?;
    Ok(function)
}

fn packed_products(
    plain: &Module,
    gated: &Module,
    bits: u32,
    tiles: u32,
) -> Result<ProductKernels, BackendError> {
    // As in `packed.cu`: warps, each with a ring of records and activations, and tiles of 16 rows.
    let kernel =
        |module: &Module, name: &str, warps: u32, row_tiles: u32| -> Result<ProductKernel, BackendError> {
            let stages = if tiles == 1 && (row_tiles == 1 || bits == 4) { 4 } else { 3 };
            let stage_bytes = row_tiles * record_bytes(bits) as u32 + tiles * 8 * 128;
            let shared_bytes = warps * stages * stage_bytes;
            let function = module.function(name)?;
            allow_shared(function, shared_bytes)?;
            let rows = TILE_ROWS as u32 * row_tiles;
            Ok(ProductKernel { function, threads: 32 * warps, shared_bytes, rows, max_m: 8 * tiles })
        };
    let gated = kernel(gated, "packed_gated", 8, 2)?;
    Ok(ProductKernels {
        plain: kernel(plain, "packed_product", 8, 2)?,
        narrow: Some(kernel(plain, "packed_narrow", if tiles == 1 { 12 } else { 8 }, 1)?),
        gated: ProductKernel { rows: gated.rows / 2, ..gated },
    })
}
