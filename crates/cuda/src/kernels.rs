//! The compiled kernels of a device: modules loaded once, functions by name.

pub(crate) mod expert_kernels;
mod packed_kernels;

use std::collections::HashMap;
use std::ffi::CString;
use std::path::PathBuf;
use std::thread::JoinHandle;

use baton_backend::{BackendError, KvDtype, KvSpec, Precision, WeightFormat};
use cudarc::driver::result as driver;
use cudarc::driver::sys;

use crate::compile::{HEAD_DIMS, SkinnyWeights, TILED_CACHES, Tiling, Unit, architecture, cubin, has_gated};
use crate::gated::{GATED_SHAPES, GatedShape};
use crate::gpu::{Function, failed};
use crate::layout::{Layout, device_format};
use crate::probe::Properties;
pub(crate) use expert_kernels::{ExpertKernels, ExpertProducts, LatentAttention};
pub(crate) use packed_kernels::WideKernels;

/// Activation rows that the product kernels of plain weights take.
const PRODUCT_ROWS: [u32; 4] = [1, 2, 4, 8];
/// Tiles of eight activation rows that those of packed weights take at a time.
pub(crate) const PACKED_TILES: [u32; 2] = [1, 2];

/// Multiprocessors with less shared memory than this get smaller rings.
const SMALL_SHARED_BYTES: u32 = 120 << 10;
/// Shared memory of an attention block beside what it asks for: its own small arrays and the driver's.
pub(crate) const RESERVED_SHARED: u32 = 2048;

#[derive(Debug)]
pub(crate) struct Kernels {
    compiler: Compiler,
    precision: Precision,
    /// Shared memory of a multiprocessor.
    shared_bytes: u32,
    modules: Vec<Module>,
    core: Option<Core>,
    sampler: Option<Sampler>,
    /// There with the first weight of their kind.
    skinny: HashMap<SkinnyWeights, Skinny>,
    /// The same, for each of [`GATED_SHAPES`], where the device can: of bf16, and of e4m3.
    gated: [Vec<Function>; 2],
    /// There with the first program that has experts.
    experts: Option<ExpertKernels>,
    expert_products: HashMap<WeightFormat, ExpertProducts>,
    embeds: HashMap<Layout, Function>,
    packs: HashMap<WeightFormat, Function>,
    /// Each from few activation rows to many.
    products: HashMap<Layout, Vec<ProductKernels>>,
    /// Those of more rows, where the device can.
    wide: HashMap<Layout, WideKernels>,
    converts: HashMap<Layout, Function>,
    attention: HashMap<(usize, KvDtype), TiledAttention>,
    latent_attention: HashMap<KvDtype, LatentAttention>,
}

/// What every model needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Core {
    pub(crate) norm: Function,
    pub(crate) quantize_rows: Function,
    pub(crate) order_columns: Function,
    pub(crate) fill_bytes: Function,
    pub(crate) rope_and_cache: Function,
    pub(crate) rope_whole_heads: Function,
    pub(crate) gated_activation: Function,
    pub(crate) activate_rows: Function,
    pub(crate) norm_heads: Function,
    pub(crate) add_logit_bias: Function,
    pub(crate) rotate_rows: Function,
    pub(crate) encoder_attention: Function,
    pub(crate) add_bias: Function,
    pub(crate) softcap: Function,
    pub(crate) keep_rows: Function,
    pub(crate) move_blocks: Function,
    pub(crate) fill_random: Function,
    pub(crate) read_memory: Function,
    pub(crate) attention_any: Function,
    pub(crate) merge_partials: Function,
    /// The same for heads of more than 256.
    pub(crate) attention_large: Function,
    pub(crate) merge_large: Function,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Sampler {
    pub(crate) prepare: Function,
    pub(crate) choose: Function,
    pub(crate) score: Function,
}

/// Tiles of eight tokens that the skinny kernels take, in the order of [`SkinnyKernels`].
pub(crate) const SKINNY_TILES: [u32; 2] = [1, 2];

/// The kernels of one op.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SkinnyKernels {
    /// For each of [`SKINNY_TILES`]: without a norm, and with.
    pub(crate) functions: [[Function; 2]; 2],
    pub(crate) threads: u32,
    /// The ring of weights.
    pub(crate) shared_bytes: u32,
}

/// Products of bf16 weights with few tokens, fused with what stands around them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Skinny {
    pub(crate) linear: SkinnyKernels,
    pub(crate) logits: SkinnyKernels,
    pub(crate) gated: SkinnyKernels,
    pub(crate) qkv: SkinnyKernels,
    /// The same with smaller blocks.
    pub(crate) small_qkv: SkinnyKernels,
}

/// The product kernels of one layout for a number of activation rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductKernels {
    pub(crate) plain: ProductKernel,
    /// The same in smaller blocks, for weights of few rows.
    pub(crate) narrow: Option<ProductKernel>,
    pub(crate) gated: ProductKernel,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductKernel {
    pub(crate) function: Function,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    /// What a block takes: rows of the weight (of the gate, if it is gated), and rows of activations.
    pub(crate) rows: u32,
    pub(crate) max_m: u32,
}

impl ProductKernel {
    pub(crate) fn blocks(&self, rows: u32, m: u32) -> u32 {
        rows.div_ceil(self.rows) * m.div_ceil(self.max_m)
    }
}

/// The tensor-core kernels of one head size and cache type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TiledAttention {
    pub(crate) few: Function,
    pub(crate) few_shared_bytes: u32,
    pub(crate) many: Function,
    pub(crate) many_shared_bytes: u32,
    pub(crate) many_threads: u32,
    /// `many` is attention_wide, which wants [`WideParams`](crate::params::WideParams).
    pub(crate) is_wide: bool,
}

fn core_units(precision: Precision) -> [Unit; 2] {
    [Unit::Basic(precision), Unit::AttentionAny(precision)]
}

#[derive(Debug)]
pub(crate) struct Module(sys::CUmodule);
// SAFETY: a module may be used from any thread; the backend is used by one at a time.
unsafe impl Send for Module {}

impl Kernels {
    /// Starts to compile what every model needs; the rest comes with the weights and the cache.
    pub(crate) fn new(properties: &Properties, precision: Precision, cache_dir: Option<PathBuf>) -> Self {
        let architecture = architecture(properties.capability);
        let mut compiler = Compiler { architecture, cache_dir, jobs: HashMap::new() };
        // What takes longest first.
        for unit in [Unit::SampleChoose, Unit::SampleScore].into_iter().chain(core_units(precision)) {
            compiler.start(unit);
        }
        Self {
            compiler,
            precision,
            shared_bytes: properties.shared_bytes_per_multiprocessor,
            modules: Vec::new(),
            core: None,
            sampler: None,
            skinny: HashMap::new(),
            gated: [Vec::new(), Vec::new()],
            experts: None,
            expert_products: HashMap::new(),
            embeds: HashMap::new(),
            packs: HashMap::new(),
            products: HashMap::new(),
            wide: HashMap::new(),
            converts: HashMap::new(),
            attention: HashMap::new(),
            latent_attention: HashMap::new(),
        }
    }

    /// Waits for what every model needs but the sampler. Called before anything is launched.
    pub(crate) fn make_ready(&mut self) -> Result<(), BackendError> {
        if self.core.is_some() {
            return Ok(());
        }
        let [basic, attention] = core_units(self.precision).map(|unit| self.compiler.load(unit));
        let (basic, attention) = (basic?, attention?);
        self.core = Some(Core {
            norm: basic.function("row_norm")?,
            quantize_rows: basic.function("quantize_rows")?,
            order_columns: basic.function("order_columns")?,
            fill_bytes: basic.function("fill_bytes")?,
            rope_and_cache: basic.function("rope_and_cache")?,
            rope_whole_heads: basic.function("rope_whole_heads")?,
            gated_activation: basic.function("gated_activation")?,
            activate_rows: basic.function("activate_rows")?,
            norm_heads: basic.function("norm_heads")?,
            add_logit_bias: basic.function("add_logit_bias")?,
            rotate_rows: basic.function("rotate_rows")?,
            encoder_attention: basic.function("encoder_attention")?,
            add_bias: basic.function("add_bias")?,
            softcap: basic.function("softcap")?,
            keep_rows: basic.function("keep_rows")?,
            move_blocks: basic.function("move_blocks")?,
            fill_random: basic.function("fill_random")?,
            read_memory: basic.function("read_memory")?,
            attention_any: attention.function("attention_any")?,
            merge_partials: attention.function("merge_partials")?,
            attention_large: attention.function("attention_large")?,
            merge_large: attention.function("merge_large")?,
        });
        self.modules.extend([basic, attention]);
        Ok(())
    }

    /// Waits for the sampler, which takes longest to compile, if it is not there yet.
    pub(crate) fn sampler(&mut self) -> Result<Sampler, BackendError> {
        if let Some(sampler) = self.sampler {
            return Ok(sampler);
        }
        let [choose, score] = [Unit::SampleChoose, Unit::SampleScore].map(|unit| self.compiler.load(unit));
        let (choose, score) = (choose?, score?);
        let sampler = Sampler {
            prepare: choose.function("sample_prepare")?,
            choose: choose.function("sample_choose")?,
            score: score.function("sample_score")?,
        };
        self.modules.extend([choose, score]);
        Ok(*self.sampler.insert(sampler))
    }

    pub(crate) fn precision(&self) -> Precision {
        self.precision
    }

    pub(crate) fn core(&self) -> &Core {
        self.core.as_ref().expect("made ready with the first weight or the cache")
    }

    fn tiling(&self, head_dim: usize, cache: KvDtype) -> Tiling {
        Tiling { head_dim, cache, is_small: self.shared_bytes < SMALL_SHARED_BYTES }
    }

    /// Starts to compile what will be asked for.
    pub(crate) fn expect(&mut self, formats: &[WeightFormat], cache: &KvSpec) {
        let precision = self.precision;
        for format in formats {
            let format = &device_format(*format, precision);
            self.compiler.start(Unit::Product(*format, precision));
            if let Layout::Packed { bits } = Layout::of_product(*format, precision) {
                for unit in Unit::packed(bits, &self.compiler.architecture) {
                    self.compiler.start(unit);
                }
            }
            let is_bf16 = Layout::of_product(*format, precision) == Layout::Plain(WeightFormat::BF16);
            if is_bf16 && precision == Precision::Fast {
                self.compiler.start(Unit::Product(WeightFormat::BF16, precision));
            }
            let is_fp8 = *format == WeightFormat::F8_E4M3;
            if (is_bf16 || is_fp8) && precision == Precision::Fast {
                let weights = if is_fp8 { SkinnyWeights::Fp8Rows } else { SkinnyWeights::Bf16 };
                for tiles in SKINNY_TILES {
                    self.compiler.start(Unit::Skinny { tiles, weights });
                }
                if has_gated(&self.compiler.architecture) {
                    self.compiler.start(Unit::Gated { is_fp8 });
                    self.compiler.start(if is_fp8 { Unit::Fp8Wide } else { Unit::Bf16Wide });
                }
            }
        }
        for layer in &cache.layers {
            if self.has_tiled_attention(layer.head_dim, cache.dtype) {
                let tiling = self.tiling(layer.head_dim, cache.dtype);
                self.compiler.start(Unit::AttentionFew(tiling));
                self.compiler.start(Unit::AttentionMany(tiling));
            }
        }
    }

    /// The tensor-core attention is made for this, if the device has the shared memory for it.
    fn has_tiled_attention(&self, head_dim: usize, cache: KvDtype) -> bool {
        self.precision == Precision::Fast && HEAD_DIMS.contains(&head_dim) && TILED_CACHES.contains(&cache)
    }

    /// Makes the kernels of a weight format ready. Called when a weight is loaded.
    pub(crate) fn prepare_format(&mut self, format: WeightFormat) -> Result<(), BackendError> {
        self.make_ready()?;
        if self.embeds.contains_key(&Layout::Plain(format)) {
            return Ok(());
        }
        let module = self.compiler.load(Unit::Product(format, self.precision))?;
        let (plain, layout) = (Layout::Plain(format), Layout::of_product(format, self.precision));
        self.embeds.insert(plain, module.function("embed")?);
        if let Layout::Packed { bits } = layout {
            self.packs.insert(format, module.function("pack")?);
            self.prepare_packed(bits)?;
        } else {
            self.converts.insert(plain, module.function("convert")?);
        }
        if format == WeightFormat::F8_E4M3 {
            // Its products are those of `prepare_skinny` and of cuBLASLt.
        } else if layout == plain {
            self.products.insert(plain, module.plain_products()?);
        } else if let Layout::Plain(other) = layout {
            self.prepare_format(other)?;
        }
        self.modules.push(module);
        if format == WeightFormat::BF16 && self.precision == Precision::Fast {
            self.prepare_skinny(SkinnyWeights::Bf16)?;
        }
        Ok(())
    }

    /// Makes the fused kernels of a kind of weights ready. Called when one is loaded.
    pub(crate) fn prepare_skinny(&mut self, weights: SkinnyWeights) -> Result<(), BackendError> {
        if self.skinny.contains_key(&weights) {
            return Ok(());
        }
        let [one, two] = SKINNY_TILES.map(|tiles| self.compiler.load(Unit::Skinny { tiles, weights }));
        let modules = [one?, two?];
        self.skinny.insert(weights, Skinny::find(&modules)?);
        self.modules.extend(modules);
        let is_fp8 = weights == SkinnyWeights::Fp8Rows;
        if weights != SkinnyWeights::Fp8Blocks && has_gated(&self.compiler.architecture) {
            let module = self.compiler.load(Unit::Gated { is_fp8 })?;
            let find = |shape: &GatedShape| {
                let function = module.function(shape.name)?;
                allow_shared(function, shape.shared_bytes())?;
                Ok(function)
            };
            let functions = GATED_SHAPES.iter().map(find).collect::<Result<_, BackendError>>()?;
            self.gated[usize::from(is_fp8)] = functions;
            self.modules.push(module);
            if is_fp8 {
                self.prepare_fp8_wide()?;
            } else {
                self.prepare_bf16_wide()?;
            }
        }
        Ok(())
    }

    /// One for each of [`GATED_SHAPES`], where the device has them.
    pub(crate) fn gated(&self, is_fp8: bool) -> &[Function] {
        &self.gated[usize::from(is_fp8)]
    }

    pub(crate) fn skinny(&self, weights: SkinnyWeights) -> &Skinny {
        self.skinny.get(&weights).expect("loaded with the first weight of the kind")
    }

    /// The tensor-core attention of a head size, where there is one. Waits for it if it is still being compiled.
    pub(crate) fn tiled_attention(
        &mut self,
        head_dim: usize,
        cache: KvDtype,
    ) -> Result<Option<TiledAttention>, BackendError> {
        if let Some(tiled) = self.attention.get(&(head_dim, cache)) {
            return Ok(Some(*tiled));
        }
        let tiling = self.tiling(head_dim, cache);
        let is_wide = self.compiler.architecture == "sm_90a" && head_dim <= 128 && cache != KvDtype::F8E4M3;
        let (few_shared_bytes, many_shared_bytes) = attention_shared_bytes(tiling, is_wide);
        let fits = few_shared_bytes.max(many_shared_bytes) + RESERVED_SHARED <= self.shared_bytes;
        if !self.has_tiled_attention(head_dim, cache) || !fits {
            return Ok(None);
        }
        let few = self.compiler.load(Unit::AttentionFew(tiling))?;
        let many = self.compiler.load(Unit::AttentionMany(tiling))?;
        let tiled = TiledAttention {
            few: few.function("attention_few")?,
            few_shared_bytes,
            many: many.function(if is_wide { "attention_wide" } else { "attention_many" })?,
            many_shared_bytes,
            many_threads: if is_wide { 384 } else { 256 },
            is_wide,
        };
        allow_shared(tiled.few, tiled.few_shared_bytes)?;
        allow_shared(tiled.many, tiled.many_shared_bytes)?;
        self.attention.insert((head_dim, cache), tiled);
        self.modules.extend([few, many]);
        Ok(Some(tiled))
    }

    pub(crate) fn embed(&self, layout: Layout) -> Function {
        self.embeds[&layout]
    }

    pub(crate) fn pack(&self, format: WeightFormat) -> Function {
        self.packs[&format]
    }

    pub(crate) fn convert(&self, layout: Layout) -> Function {
        self.converts[&layout]
    }

    /// The kernels for `m` activation rows.
    pub(crate) fn products(&self, layout: Layout, m: usize) -> ProductKernels {
        let all = &self.products[&layout];
        let fitting = all.iter().find(|kernels| m <= kernels.plain.max_m as usize);
        *fitting.or(all.last()).expect("a layout has product kernels")
    }
}

/// Shared memory of the two attention kernels, as their texts lay it out: rings of keys and values, and beside them the sums of
/// four warps for eight rows, or 128 rows of queries and what a cache of eight bits is converted to.
fn attention_shared_bytes(tiling: Tiling, is_wide: bool) -> (u32, u32) {
    let Tiling { head_dim, cache, is_small } = tiling;
    let row_bytes = head_dim as u32 * 2;
    let is_fp8 = cache == KvDtype::F8E4M3;
    let raw_bytes = if is_fp8 { row_bytes / 2 } else { row_bytes };
    let stages = if head_dim > 128 { 2 } else { (if is_small { 256 } else { 384 }) / head_dim as u32 };
    let few = 4 * stages * (row_bytes / raw_bytes) * 2 * 16 * raw_bytes + 4 * 8 * head_dim as u32 * 4;
    if is_wide {
        // Two buffers of queries, and stages of 64 keys.
        return (few, (2 * 128 + 512 / head_dim as u32 * 2 * 64) * row_bytes);
    }
    let keys = match head_dim {
        64 => 32,
        128 => 64,
        _ => 16,
    };
    let stages = if head_dim > 128 || is_small { 2 } else { 3 };
    let places = match head_dim {
        _ if !is_fp8 => 0,
        256 => 1,
        _ => 2,
    };
    (few, (128 + places * 2 * keys) * row_bytes + stages * 2 * keys * raw_bytes)
}

/// Compiles units, each on a thread of its own.
#[derive(Debug)]
struct Compiler {
    architecture: String,
    cache_dir: Option<PathBuf>,
    /// What is being compiled, or ready to be loaded.
    jobs: HashMap<Unit, JoinHandle<Result<Vec<u8>, BackendError>>>,
}

impl Compiler {
    fn start(&mut self, unit: Unit) {
        let (architecture, cache_dir) = (self.architecture.clone(), self.cache_dir.clone());
        self.jobs
            .entry(unit)
            .or_insert_with(|| std::thread::spawn(move || cubin(unit, &architecture, cache_dir.as_deref())));
    }

    fn load(&mut self, unit: Unit) -> Result<Module, BackendError> {
        self.start(unit);
        let job = self.jobs.remove(&unit).expect("just started");
        Module::load(&job.join().expect("compiling a kernel does not panic")?)
    }
}

impl Module {
    pub(crate) fn load(code: &[u8]) -> Result<Self, BackendError> {
        // SAFETY: the code is a whole cubin, from NVRTC or from a file that has an ELF header; the driver checks the rest.
        unsafe { driver::module::load_data(code.as_ptr().cast()) }
            .map(Self)
            .map_err(failed("loading kernels"))
    }

    pub(crate) fn function(&self, name: &str) -> Result<Function, BackendError> {
        let name = CString::new(name).expect("kernel names have no zero bytes");
        // SAFETY: the module is loaded.
        unsafe { driver::module::get_function(self.0, name) }
            .map(Function)
            .map_err(failed("finding a kernel"))
    }

    fn plain_products(&self) -> Result<Vec<ProductKernels>, BackendError> {
        let kernel = |name: &str, max_m: u32| -> Result<ProductKernel, BackendError> {
            let function = self.function(&format!("{name}_{max_m}"))?;
            Ok(ProductKernel { function, threads: 128, shared_bytes: 0, rows: 4, max_m })
        };
        let kernels = |max_m: u32| {
            Ok(ProductKernels {
                plain: kernel("product", max_m)?,
                narrow: None,
                gated: kernel("gated", max_m)?,
            })
        };
        PRODUCT_ROWS.into_iter().map(kernels).collect()
    }
}

impl Skinny {
    /// `modules` are those of [`SKINNY_TILES`].
    fn find(modules: &[Module; 2]) -> Result<Self, BackendError> {
        let all = |name: &str, warps: u32| -> Result<SkinnyKernels, BackendError> {
            // As in `skinny.cu`: stages of 2 KiB per warp.
            let shared_bytes = warps * (if warps == 16 { 2 } else { 3 }) * 2048;
            let both = |module: &Module| {
                let plain = module.function(&format!("{name}_{warps}"))?;
                let normed = module.function(&format!("normed_{name}_{warps}"))?;
                for function in [plain, normed] {
                    allow_shared(function, shared_bytes)?;
                }
                Ok::<_, BackendError>([plain, normed])
            };
            let functions = [both(&modules[0])?, both(&modules[1])?];
            Ok(SkinnyKernels { functions, threads: 32 * warps, shared_bytes })
        };
        Ok(Self {
            linear: all("linear", 16)?,
            logits: all("logits", 16)?,
            gated: all("gated", 16)?,
            qkv: all("qkv", 16)?,
            small_qkv: all("qkv", 8)?,
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`, unloaded here only. Failing (no context any more) leaves nothing behind.
        let _ = unsafe { driver::module::unload(self.0) };
    }
}

fn allow_shared(function: Function, bytes: u32) -> Result<(), BackendError> {
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: the function belongs to a loaded module.
    unsafe { driver::function::set_function_attribute(function.0, attribute, bytes as i32) }
        .map_err(failed("reserving shared memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_fits_the_shared_memory_of_every_generation() {
        let largest = |head_dim, cache, is_small, is_wide| {
            let (few, many) = attention_shared_bytes(Tiling { head_dim, cache, is_small }, is_wide);
            few.max(many) + RESERVED_SHARED
        };
        for head_dim in [64, 128] {
            assert!(largest(head_dim, KvDtype::BF16, false, true) <= 228 << 10);
        }
        for cache in TILED_CACHES {
            for head_dim in HEAD_DIMS {
                assert!(largest(head_dim, cache, false, false) <= 164 << 10, "{head_dim} {cache:?}");
            }
        }
        // Devices of little shared memory have the two usual head sizes, but not e4m3 at 128.
        for (head_dim, cache) in [(64, KvDtype::BF16), (128, KvDtype::F16), (64, KvDtype::F8E4M3)] {
            assert!(largest(head_dim, cache, true, false) <= 100 << 10, "{head_dim} {cache:?}");
        }
    }
}
