//! The compiled kernels of a device: modules loaded once, functions by name.

use std::collections::HashMap;
use std::ffi::CString;
use std::path::PathBuf;
use std::thread::JoinHandle;

use baton_backend::{BackendError, KvDtype, KvSpec, WeightFormat};
use cudarc::driver::result as driver;
use cudarc::driver::sys;

use crate::compile::{HEAD_DIMS, TILED_CACHES, Unit, architecture, cubin};
use crate::gpu::{Function, Gpu, failed};

/// Activation rows that one launch of a product kernel takes, in the order of [`Products::plain`].
pub(crate) const PRODUCT_ROWS: [u32; 4] = [1, 2, 4, 8];

#[derive(Debug)]
pub(crate) struct Kernels {
    compiler: Compiler,
    modules: Vec<Module>,
    pub(crate) norm: Function,
    pub(crate) rope_and_cache: Function,
    pub(crate) rope_whole_heads: Function,
    pub(crate) gated_activation: Function,
    pub(crate) add_bias: Function,
    pub(crate) softcap: Function,
    pub(crate) move_blocks: Function,
    pub(crate) fill_random: Function,
    /// There with the first bf16 weight.
    skinny: Option<Skinny>,
    pub(crate) attention_any: Function,
    pub(crate) merge_partials: Function,
    pub(crate) sample_prepare: Function,
    pub(crate) sample_choose: Function,
    products: HashMap<WeightFormat, Products>,
    attention: HashMap<(usize, KvDtype), TiledAttention>,
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

/// The kernels of one weight format.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Products {
    pub(crate) plain: [Function; 4],
    pub(crate) gated: [Function; 4],
    pub(crate) embed: Function,
    pub(crate) convert: Function,
}

/// The tensor-core kernels of one head size and cache type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TiledAttention {
    pub(crate) few: Function,
    pub(crate) few_shared_bytes: u32,
    pub(crate) many: Function,
    pub(crate) many_shared_bytes: u32,
    pub(crate) many_threads: u32,
}

#[derive(Debug)]
struct Module(sys::CUmodule);
// SAFETY: a module may be used from any thread; the backend is used by one at a time.
unsafe impl Send for Module {}

impl Kernels {
    /// Compiles what every model needs; the rest comes with the weights and the cache.
    pub(crate) fn new(gpu: &Gpu, cache_dir: Option<PathBuf>) -> Result<Self, BackendError> {
        let architecture = architecture(gpu.properties.capability);
        let mut compiler = Compiler { architecture, cache_dir, jobs: HashMap::new() };
        let units = [Unit::Basic, Unit::AttentionAny, Unit::Sample];
        for unit in units {
            compiler.start(unit);
        }
        let [basic, attention, sample] = units.map(|unit| compiler.load(unit));
        let (basic, attention, sample) = (basic?, attention?, sample?);
        Ok(Self {
            norm: basic.function("row_norm")?,
            rope_and_cache: basic.function("rope_and_cache")?,
            rope_whole_heads: basic.function("rope_whole_heads")?,
            gated_activation: basic.function("gated_activation")?,
            add_bias: basic.function("add_bias")?,
            softcap: basic.function("softcap")?,
            move_blocks: basic.function("move_blocks")?,
            fill_random: basic.function("fill_random")?,
            skinny: None,
            attention_any: attention.function("attention_any")?,
            merge_partials: attention.function("merge_partials")?,
            sample_prepare: sample.function("sample_prepare")?,
            sample_choose: sample.function("sample_choose")?,
            products: HashMap::new(),
            attention: HashMap::new(),
            modules: vec![basic, attention, sample],
            compiler,
        })
    }

    /// Starts to compile what will be asked for.
    pub(crate) fn expect(&mut self, formats: &[WeightFormat], cache: &KvSpec) {
        for format in formats {
            self.compiler.start(Unit::Product(*format));
            if *format == WeightFormat::BF16 {
                for tiles in SKINNY_TILES {
                    self.compiler.start(Unit::Skinny { tiles });
                }
            }
        }
        for layer in &cache.layers {
            if HEAD_DIMS.contains(&layer.head_dim) && TILED_CACHES.contains(&cache.dtype) {
                self.compiler.start(Unit::Attention { head_dim: layer.head_dim, cache: cache.dtype });
            }
        }
    }

    /// Makes the kernels of a weight format ready. Called when a weight is loaded.
    pub(crate) fn prepare_format(&mut self, format: WeightFormat) -> Result<(), BackendError> {
        if self.products.contains_key(&format) {
            return Ok(());
        }
        let module = self.compiler.load(Unit::Product(format))?;
        self.products.insert(format, module.products()?);
        self.modules.push(module);
        if format == WeightFormat::BF16 {
            let [one, two] = SKINNY_TILES.map(|tiles| self.compiler.load(Unit::Skinny { tiles }));
            let modules = [one?, two?];
            self.skinny = Some(Skinny::find(&modules)?);
            self.modules.extend(modules);
        }
        Ok(())
    }

    pub(crate) fn skinny(&self) -> &Skinny {
        self.skinny.as_ref().expect("loaded with the first bf16 weight")
    }

    /// Makes the tensor-core attention of a head size ready. Called when the KV cache is made.
    pub(crate) fn prepare_attention(&mut self, head_dim: usize, cache: KvDtype) -> Result<(), BackendError> {
        if !self.attention.contains_key(&(head_dim, cache)) {
            let module = self.compiler.load(Unit::Attention { head_dim, cache })?;
            let row_bytes = head_dim as u32 * 2;
            // As `attention_few.cu` and `attention_many.cu` lay it out: rings of keys and values, and beside them the sums
            // of four warps for eight rows, or 128 rows of queries and what a cache of eight bits is converted to.
            let is_fp8 = cache == KvDtype::F8E4M3;
            let raw_bytes = if is_fp8 { row_bytes / 2 } else { row_bytes };
            let few_stages = if head_dim > 128 { 2 } else { 384 / head_dim as u32 } * (row_bytes / raw_bytes);
            let (many_stages, many_keys) = match head_dim {
                64 => (3, 32),
                128 => (3, 64),
                _ => (2, 16),
            };
            let many_places = match head_dim {
                _ if !is_fp8 => 0,
                256 => 1,
                _ => 2,
            };
            // `attention_wide.cu`: two buffers of queries, four stages of 64 keys.
            let is_wide = self.compiler.architecture == "sm_90a" && head_dim == 128 && !is_fp8;
            let tiled = TiledAttention {
                few: module.function("attention_few")?,
                few_shared_bytes: 4 * few_stages * 2 * 16 * raw_bytes + 4 * 8 * head_dim as u32 * 4,
                many: module.function(if is_wide { "attention_wide" } else { "attention_many" })?,
                many_shared_bytes: if is_wide {
                    (2 * 128 + 4 * 2 * 64) * row_bytes
                } else {
                    (128 + many_places * 2 * many_keys) * row_bytes + many_stages * 2 * many_keys * raw_bytes
                },
                many_threads: if is_wide { 384 } else { 256 },
            };
            allow_shared(tiled.few, tiled.few_shared_bytes)?;
            allow_shared(tiled.many, tiled.many_shared_bytes)?;
            self.attention.insert((head_dim, cache), tiled);
            self.modules.push(module);
        }
        Ok(())
    }

    pub(crate) fn products(&self, format: WeightFormat) -> Products {
        self.products[&format]
    }

    pub(crate) fn tiled_attention(&self, head_dim: usize, cache: KvDtype) -> Option<TiledAttention> {
        self.attention.get(&(head_dim, cache)).copied()
    }
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
    fn load(code: &[u8]) -> Result<Self, BackendError> {
        // SAFETY: the code is a whole cubin, from NVRTC or from a file that has an ELF header; the driver checks the rest.
        unsafe { driver::module::load_data(code.as_ptr().cast()) }
            .map(Self)
            .map_err(failed("loading kernels"))
    }

    fn function(&self, name: &str) -> Result<Function, BackendError> {
        let name = CString::new(name).expect("kernel names have no zero bytes");
        // SAFETY: the module is loaded.
        unsafe { driver::module::get_function(self.0, name) }
            .map(Function)
            .map_err(failed("finding a kernel"))
    }

    fn products(&self) -> Result<Products, BackendError> {
        let four = |name: &str| -> Result<[Function; 4], BackendError> {
            let function = |rows| self.function(&format!("{name}_{rows}"));
            let [a, b, c, d] = PRODUCT_ROWS.map(function);
            Ok([a?, b?, c?, d?])
        };
        Ok(Products {
            plain: four("product")?,
            gated: four("gated")?,
            embed: self.function("embed")?,
            convert: self.function("convert")?,
        })
    }
}

impl Skinny {
    /// `modules` are those of [`SKINNY_TILES`].
    fn find(modules: &[Module; 2]) -> Result<Self, BackendError> {
        let all = |name: &str, warps: u32| -> Result<SkinnyKernels, BackendError> {
            // As in `skinny.cu`: stages of 2 KiB a warp.
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
