//! The kernels of mixtures of experts and of attention over latents, compiled when a program has them.

use baton_backend::{BackendError, KvDtype, Precision, WeightFormat};

use super::{Kernels, Module, RESERVED_SHARED, SKINNY_TILES, allow_shared, prefer_shared};
use crate::compile::{Unit, has_gated};
use crate::gpu::Function;
use crate::grouped::{FEW_SHAPES, GROUPED_SHAPES};

/// As in `attention_latent.cu`: 64 keys, 16 rows of a query, and the scores of four warps.
pub(crate) const LATENT_SHARED_BYTES: u32 = (64 + 16) * 1152 + 4 * 2 * 32 * 16;

/// As in `attention_latent_many.cu`: queries and two tiles of keys, 64 rows each, and the weights of a tile.
pub(crate) const LATENT_MANY_SHARED_BYTES: u32 = 3 * 64 * 1152 + 64 * 128;

/// The tensor-core attention over latents of 512 + 64.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LatentAttention {
    pub(crate) few: Function,
    /// Joins partial results.
    pub(crate) merge: Function,
    /// For items of several queries, where the device can.
    pub(crate) many: Option<Function>,
}

/// As in `expert_product.cu`: rows of a block of `expert_linear_deep`, columns of a piece, pieces of the widest rows, and the ring.
pub(crate) const DEEP_ROWS: u32 = 16;
pub(crate) const DEEP_COLS: usize = 256;
pub(crate) const DEEP_CHUNKS: usize = 4;
pub(crate) const DEEP_RING_BYTES: u32 = 8 * 12 * 512;
/// Of a multiprocessor's memory: 100 KB, for three blocks of gate and up beside a ring.
const DEEP_SHARED_PERCENT: i32 = 43;

/// As in `expert_product.cu`: the columns that its kernels of heads take, and the rows of a block.
pub(crate) const HEAD_COLS: [usize; 3] = [128, 256, 512];
pub(crate) const HEAD_ROWS: [u32; 3] = [64, 32, 16];

/// As in `skinny.cu`: 16 warps with two stages.
pub(crate) const ROUTE_RING_BYTES: u32 = 16 * 2 * 2048;

/// Down projections of one token with a ring, and gate and up beside them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeepProducts {
    pub(crate) gated: Function,
    /// By how many pieces of [`DEEP_COLS`] columns a row has.
    pub(crate) linear: [Function; DEEP_CHUNKS],
}

/// What stands around the products of many tokens with experts, and those products where the device can.
#[derive(Clone, Debug)]
pub(crate) struct ExpertKernels {
    pub(crate) choose: Function,
    pub(crate) sort: Function,
    pub(crate) gather: Function,
    pub(crate) combine: Function,
    pub(crate) latent_kv: Function,
    /// For each of [`GROUPED_SHAPES`].
    pub(crate) grouped: Vec<Function>,
    /// For each of [`FEW_SHAPES`].
    pub(crate) grouped_few: Vec<Function>,
    /// Their router, for each of [`SKINNY_TILES`].
    pub(crate) route_tiles: Vec<Function>,
}

/// Products of few tokens with experts of one format.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertProducts {
    pub(crate) route: Function,
    pub(crate) gated: Function,
    pub(crate) linear: Function,
    /// For one token, where the device and the format have them.
    pub(crate) deep: Option<DeepProducts>,
    pub(crate) heads: Function,
    /// The same for rows of up to each of [`HEAD_COLS`].
    pub(crate) head_rows: [Function; 3],
}

impl DeepProducts {
    fn find(module: &Module) -> Result<Self, BackendError> {
        let gated = module.function("expert_gated_beside")?;
        // So that a block with a ring fits beside them. The rest is first cache, which the loads of gate and up want.
        prefer_shared(gated, DEEP_SHARED_PERCENT)?;
        let mut linear = [gated; DEEP_CHUNKS];
        for (number, function) in linear.iter_mut().enumerate() {
            *function = module.function(&format!("expert_linear_deep_{}", number + 1))?;
            allow_shared(*function, DEEP_RING_BYTES)?;
            prefer_shared(*function, DEEP_SHARED_PERCENT)?;
        }
        Ok(Self { gated, linear })
    }
}

impl Kernels {
    /// Makes the kernels of mixtures ready, and those of experts or routers of a format.
    pub(crate) fn prepare_experts(&mut self, formats: &[WeightFormat]) -> Result<(), BackendError> {
        let precision = self.precision;
        self.compiler.start(Unit::Experts(precision));
        for format in formats.iter().filter(|format| !self.expert_products.contains_key(format)) {
            self.compiler.start(Unit::ExpertProduct(*format, precision));
        }
        if self.experts.is_none() {
            let module = self.compiler.load(Unit::Experts(precision))?;
            let (mut grouped, mut grouped_few, mut route_tiles) = (Vec::new(), Vec::new(), Vec::new());
            if precision == Precision::Fast && has_gated(&self.compiler.architecture) {
                let routers = SKINNY_TILES.map(|tiles| Unit::RouteTiles { tiles });
                for unit in routers {
                    self.compiler.start(unit);
                }
                let module = self.compiler.load(Unit::Grouped)?;
                for shape in &GROUPED_SHAPES {
                    let function = module.function(shape.name)?;
                    allow_shared(function, shape.shared_bytes())?;
                    grouped.push(function);
                }
                for shape in &FEW_SHAPES {
                    let function = module.function(shape.name)?;
                    allow_shared(function, shape.shared_bytes())?;
                    grouped_few.push(function);
                }
                self.modules.push(module);
                for unit in routers {
                    let module = self.compiler.load(unit)?;
                    let function = module.function("route_tiles")?;
                    allow_shared(function, ROUTE_RING_BYTES)?;
                    route_tiles.push(function);
                    self.modules.push(module);
                }
            }
            self.experts = Some(ExpertKernels {
                choose: module.function("choose_many")?,
                sort: module.function("sort_slots")?,
                gather: module.function("gather_rows")?,
                combine: module.function("combine_rows")?,
                latent_kv: module.function("latent_kv")?,
                grouped,
                grouped_few,
                route_tiles,
            });
            self.modules.push(module);
        }
        for &format in formats {
            if self.expert_products.contains_key(&format) {
                continue;
            }
            let module = self.compiler.load(Unit::ExpertProduct(format, precision))?;
            let is_plain = matches!(format, WeightFormat::F16 | WeightFormat::BF16);
            let has_deep = is_plain && precision == Precision::Fast && self.has_deep();
            let deep = has_deep.then(|| DeepProducts::find(&module)).transpose()?;
            let products = ExpertProducts {
                deep,
                route: module.function("route_few")?,
                gated: module.function("expert_gated")?,
                linear: module.function("expert_linear")?,
                heads: module.function("head_linear")?,
                head_rows: [
                    module.function("head_rows_128")?,
                    module.function("head_rows_256")?,
                    module.function("head_rows_512")?,
                ],
            };
            self.expert_products.insert(format, products);
            self.modules.push(module);
        }
        Ok(())
    }

    pub(crate) fn experts(&self) -> &ExpertKernels {
        self.experts.as_ref().expect("made ready when a program with experts was compiled")
    }

    pub(crate) fn expert_products(&self, format: WeightFormat) -> ExpertProducts {
        self.expert_products[&format]
    }

    /// The tensor-core attention over latents of 512 + 64, where there is one.
    pub(crate) fn latent_attention(
        &mut self,
        cache: KvDtype,
    ) -> Result<Option<LatentAttention>, BackendError> {
        let fits = LATENT_SHARED_BYTES + RESERVED_SHARED <= self.shared_bytes;
        let is_made = matches!(cache, KvDtype::F16 | KvDtype::BF16);
        if self.precision != Precision::Fast || !fits || !is_made {
            return Ok(None);
        }
        if let Some(kernels) = self.latent_attention.get(&cache) {
            return Ok(Some(*kernels));
        }
        let module = self.compiler.load(Unit::AttentionLatent { is_f16: cache == KvDtype::F16 })?;
        let few = module.function("attention_latent")?;
        allow_shared(few, LATENT_SHARED_BYTES)?;
        let mut many = None;
        if has_gated(&self.compiler.architecture) {
            let function = module.function("attention_latent_many")?;
            allow_shared(function, LATENT_MANY_SHARED_BYTES)?;
            many = Some(function);
        }
        let merge = module.function("merge_latents")?;
        let kernels = LatentAttention { few, merge, many };
        self.latent_attention.insert(cache, kernels);
        self.modules.push(module);
        Ok(Some(kernels))
    }
}
