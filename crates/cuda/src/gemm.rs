//! Large products by cuBLASLt: `output[m, n] = input[m, k] · weight[n, k]ᵀ`, bf16 or f32 in, f32 sums; or e4m3 in, with scales for
//! the rows of both, where the library and the device can.
//!
//! What a shape needs (descriptors, an algorithm) is made when it is first seen and kept. For shapes that will be replayed
//! many times the algorithm is the fastest of those that cuBLASLt proposes, each timed with cold caches, now or in an earlier
//! run ([`Choices`]). The workspace is one, because all work is on one stream.

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::Path;
use std::ptr;

use baton_backend::{BackendError, Precision};
use cudarc::cublaslt::{result as lt, sys};

use crate::choices::Choices;
use crate::gpu::{DeviceMemory, Gpu, Timer};

pub(crate) const WORKSPACE_BYTES: usize = 64 << 20;
/// Algorithms that are timed, and how often: first all of them (the first time loads a kernel), then those that came near the
/// fastest.
const NUM_CANDIDATES: usize = 32;
const NUM_TIMINGS: [usize; 2] = [2, 3];
const NEAR: f32 = 1.25;

/// The three matrices of a product, on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrices {
    pub(crate) weight: u64,
    pub(crate) input: u64,
    pub(crate) output: u64,
    /// Of e4m3: those of the weight's rows and of the input's.
    pub(crate) scales: Option<(u64, u64)>,
}

/// A product: sizes, and how the result is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Shape {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) output_stride: usize,
    pub(crate) is_f32: bool,
    /// The input and the weight are e4m3.
    pub(crate) is_fp8: bool,
    /// Bytes that the output's address and rows are aligned to.
    pub(crate) output_alignment: u32,
}

#[derive(Debug)]
pub(crate) struct Gemm {
    handle: sys::cublasLtHandle_t,
    /// What goes in, and comes out where it is not asked for as f32.
    activation: sys::cudaDataType_t,
    workspace: DeviceMemory,
    plans: HashMap<Shape, Plan>,
    choices: Choices,
    /// Whether it multiplies e4m3, once that was asked.
    has_fp8: bool,
}

// SAFETY: a handle may be used from any thread; the backend is used by one at a time.
unsafe impl Send for Gemm {}

#[derive(Debug)]
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    input: sys::cublasLtMatrixLayout_t,
    output: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
    /// What cuBLASLt proposed, best first by its own guess.
    candidates: Vec<sys::cublasLtMatmulAlgo_t>,
    is_timed: bool,
}

fn failed(error: lt::CublasError) -> BackendError {
    BackendError::Device { cause: format!("cuBLASLt: {error}") }
}

impl Gemm {
    pub(crate) fn new(
        gpu: &Gpu,
        precision: Precision,
        cache_dir: Option<&Path>,
    ) -> Result<Self, BackendError> {
        gpu.bind()?;
        // SAFETY: only reads a number.
        let version = unsafe { sys::cublasLtGetVersion() };
        let (activation, kind) = match precision {
            Precision::Fast => (sys::cudaDataType_t::CUDA_R_16BF, ""),
            Precision::Full => (sys::cudaDataType_t::CUDA_R_32F, ", f32"),
        };
        let owner = format!("{}{kind}", gpu.properties.name);
        let choices = Choices::load(cache_dir, &owner, version);
        let workspace = gpu.allocate(WORKSPACE_BYTES, "the workspace of products")?;
        let handle = lt::create_handle().map_err(failed)?;
        let gemm = Self { handle, activation, workspace, plans: HashMap::new(), choices, has_fp8: false };
        // For the first product of each kind cuBLASLt reads its tables, which takes a while.
        for is_f32 in [false, true] {
            let shape =
                Shape { m: 64, n: 64, k: 64, output_stride: 64, is_f32, is_fp8: false, output_alignment: 16 };
            drop(gemm.plan(&shape).map_err(failed)?);
        }
        Ok(gemm)
    }

    fn plan(&self, shape: &Shape) -> Result<Plan, lt::CublasError> {
        Plan::new(self.handle, self.activation, shape, self.workspace.address())
    }

    /// Called with the first weight of e4m3: asks the library for a product of it.
    pub(crate) fn look_for_fp8(&mut self) {
        let (m, n, k) = (64, 256, 512);
        let shape = Shape { m, n, k, output_stride: n, is_f32: false, is_fp8: true, output_alignment: 16 };
        self.has_fp8 = self.has_fp8 || self.plan(&shape).is_ok();
    }

    pub(crate) fn has_fp8(&self) -> bool {
        self.has_fp8
    }

    /// Keeps what was timed for the next start.
    pub(crate) fn save_choices(&mut self) {
        self.choices.save();
    }

    /// Adds to the output if `accumulate`. With `scratch`, which is as large as the output and may be it, a new shape's
    /// algorithm is chosen by time.
    ///
    /// # Safety
    /// The addresses must be device memory of the sizes of `shape`.
    pub(crate) unsafe fn multiply(
        &mut self,
        gpu: &Gpu,
        shape: Shape,
        matrices: Matrices,
        accumulate: bool,
        scratch: Option<u64>,
    ) -> Result<(), BackendError> {
        if !self.plans.contains_key(&shape) {
            let mut plan = self.plan(&shape).map_err(failed)?;
            if let Some(data) = self.choices.get(&shape) {
                plan.adopt(self.handle, sys::cublasLtMatmulAlgo_t { data });
            }
            self.plans.insert(shape, plan);
        }
        if let Some(output) = scratch.filter(|_| !self.plans[&shape].is_timed) {
            // SAFETY: by contract.
            let fastest = unsafe { self.fastest(gpu, &self.plans[&shape], Matrices { output, ..matrices }) }?;
            let plan = self.plans.get_mut(&shape).expect("just made");
            (plan.algorithm, plan.is_timed) = (fastest, true);
            self.choices.insert(shape, fastest.data);
        }
        let plan = &self.plans[&shape];
        // SAFETY: by contract.
        unsafe { self.run(gpu, plan, &plan.algorithm, matrices, accumulate) }.map_err(failed)
    }

    /// # Safety
    /// The addresses must be device memory of the sizes of the plan's shape.
    unsafe fn run(
        &self,
        gpu: &Gpu,
        plan: &Plan,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        matrices: Matrices,
        accumulate: bool,
    ) -> Result<(), lt::CublasError> {
        let (alpha, beta) = (1.0_f32, f32::from(u8::from(accumulate)));
        if let Some((weight, input)) = matrices.scales {
            plan.set_scales(weight, input)?;
        }
        // SAFETY: the descriptors belong to this shape, the workspace is ours, the caller vouches for the matrices.
        unsafe {
            lt::matmul(
                self.handle,
                plan.description,
                ptr::from_ref(&alpha).cast(),
                ptr::from_ref(&beta).cast(),
                matrices.weight as *const c_void,
                plan.weight,
                matrices.input as *const c_void,
                plan.input,
                matrices.output as *const c_void,
                plan.output,
                matrices.output as *mut c_void,
                plan.output,
                ptr::from_ref(algorithm),
                self.workspace.address() as *mut c_void,
                self.workspace.bytes(),
                gpu.stream.0.cast(),
            )
        }
    }

    /// # Safety
    /// As for `run`.
    unsafe fn fastest(
        &self,
        gpu: &Gpu,
        plan: &Plan,
        matrices: Matrices,
    ) -> Result<sys::cublasLtMatmulAlgo_t, BackendError> {
        let timer = Timer::new()?;
        let mut shortest = vec![f32::INFINITY; plan.candidates.len()];
        let fastest = |times: &[f32]| times.iter().copied().fold(f32::INFINITY, f32::min);
        for num_timings in NUM_TIMINGS {
            let limit = NEAR * fastest(&shortest);
            for (candidate, time) in
                plan.candidates.iter().zip(&mut shortest).filter(|(_, time)| **time <= limit)
            {
                for _ in 0..num_timings {
                    // The workspace is larger than the cache: writing it drives the weight out, as a whole step would.
                    self.workspace.clear(gpu)?;
                    timer.start(gpu)?;
                    // SAFETY: by contract.
                    let run = unsafe { self.run(gpu, plan, candidate, matrices, false) };
                    let milliseconds = timer.stop(gpu)?;
                    *time = time.min(if run.is_ok() { milliseconds } else { f32::INFINITY });
                }
            }
        }
        let best = fastest(&shortest);
        let found = plan.candidates.iter().zip(&shortest).find(|(_, time)| **time == best);
        Ok(found.map_or(plan.algorithm, |(candidate, _)| *candidate))
    }
}

impl Plan {
    /// cuBLASLt counts columns first: our row-major matrices are its transposed ones.
    fn new(
        handle: sys::cublasLtHandle_t,
        activation: sys::cudaDataType_t,
        shape: &Shape,
        scratch: u64,
    ) -> Result<Self, lt::CublasError> {
        let operand = if shape.is_fp8 { sys::cudaDataType_t::CUDA_R_8F_E4M3 } else { activation };
        let f32 = sys::cudaDataType_t::CUDA_R_32F;
        let (m, n, k) = (shape.m as u64, shape.n as u64, shape.k as u64);
        let weight = lt::create_matrix_layout(operand, k, n, k as i64)?;
        let input = lt::create_matrix_layout(operand, k, m, k as i64)?;
        let output_type = if shape.is_f32 { f32 } else { activation };
        let output = lt::create_matrix_layout(output_type, n, m, shape.output_stride as i64)?;
        let description = lt::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, f32)?;
        // CUBLAS_OP_T, which this library's bindings leave to those of cuBLAS.
        let transposed = 1_i32;
        // SAFETY: the attribute takes an enum of 32 bits.
        unsafe {
            lt::set_matmul_desc_attribute(
                description,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                ptr::from_ref(&transposed).cast(),
                size_of_val(&transposed),
            )?;
        }
        if shape.is_fp8 {
            set_fp8(description, scratch)?;
        }
        let preference = lt::create_matmul_pref()?;
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let workspace_bytes = WORKSPACE_BYTES as u64;
        // SAFETY: the attributes take a u64 and u32s; the preference is destroyed once, below.
        let candidates = unsafe {
            lt::set_matmul_pref_attribute(
                preference,
                Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                ptr::from_ref(&workspace_bytes).cast(),
                size_of::<u64>(),
            )?;
            for (attribute, alignment) in [
                (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, 16_u32),
                (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, 16),
                (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, shape.output_alignment),
                (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, shape.output_alignment),
            ] {
                let value = ptr::from_ref(&alignment).cast();
                lt::set_matmul_pref_attribute(preference, attribute, value, size_of::<u32>())?;
            }
            let found = propose(handle, description, [weight, input, output], preference);
            let _ = lt::destroy_matmul_pref(preference);
            found?
        };
        let algorithm =
            *candidates.first().ok_or(lt::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED))?;
        Ok(Self { description, weight, input, output, algorithm, candidates, is_timed: false })
    }

    /// Where the scales of e4m3 are: of the weight's rows and of the input's.
    fn set_scales(&self, weight: u64, input: u64) -> Result<(), lt::CublasError> {
        set_scales(self.description, weight, input)
    }

    /// Takes an algorithm that was the fastest in an earlier run, if cuBLASLt can run it here.
    fn adopt(&mut self, handle: sys::cublasLtHandle_t, algorithm: sys::cublasLtMatmulAlgo_t) {
        // SAFETY: the struct is plain numbers, for which zero is a value.
        let mut found: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptors are alive; only the result is written.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                handle,
                self.description,
                self.weight,
                self.input,
                self.output,
                self.output,
                &raw const algorithm,
                &raw mut found,
            )
        };
        if status.result().is_ok() && found.workspaceSize <= WORKSPACE_BYTES {
            (self.algorithm, self.is_timed) = (algorithm, true);
        }
    }
}

/// Products of e4m3 with a scale for each row of both sides, summed as the tensor cores do it.
fn set_fp8(description: sys::cublasLtMatmulDesc_t, scratch: u64) -> Result<(), lt::CublasError> {
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    let by_rows = sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F as i32;
    let fast = 1_i8;
    // SAFETY: the attributes take a byte and enums of 32 bits.
    unsafe {
        lt::set_matmul_desc_attribute(
            description,
            Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM,
            ptr::from_ref(&fast).cast(),
            size_of_val(&fast),
        )?;
        for attribute in
            [Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE]
        {
            lt::set_matmul_desc_attribute(
                description,
                attribute,
                ptr::from_ref(&by_rows).cast(),
                size_of_val(&by_rows),
            )?;
        }
    }
    set_scales(description, scratch, scratch)
}

fn set_scales(
    description: sys::cublasLtMatmulDesc_t,
    weight: u64,
    input: u64,
) -> Result<(), lt::CublasError> {
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    for (attribute, address) in [
        (Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, weight),
        (Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, input),
    ] {
        // SAFETY: the attributes take an address of the device.
        unsafe {
            lt::set_matmul_desc_attribute(
                description,
                attribute,
                ptr::from_ref(&address).cast(),
                size_of::<u64>(),
            )?;
        };
    }
    Ok(())
}

/// The algorithms that cuBLASLt thinks best, best first.
///
/// # Safety
/// The descriptors must be alive.
unsafe fn propose(
    handle: sys::cublasLtHandle_t,
    description: sys::cublasLtMatmulDesc_t,
    [weight, input, output]: [sys::cublasLtMatrixLayout_t; 3],
    preference: sys::cublasLtMatmulPreference_t,
) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, lt::CublasError> {
    // SAFETY: the struct is plain numbers, for which zero is a value.
    let mut found: [sys::cublasLtMatmulHeuristicResult_t; NUM_CANDIDATES] = unsafe { std::mem::zeroed() };
    let mut count = 0;
    // SAFETY: by contract; the array has as many places as are asked for.
    unsafe {
        sys::cublasLtMatmulAlgoGetHeuristic(
            handle,
            description,
            weight,
            input,
            output,
            output,
            preference,
            NUM_CANDIDATES as i32,
            found.as_mut_ptr(),
            &raw mut count,
        )
    }
    .result()?;
    let usable = found[..count.max(0) as usize].iter().filter(|found| found.state.result().is_ok());
    Ok(usable.map(|found| found.algo).collect())
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed here only.
        unsafe {
            let _ = lt::destroy_matrix_layout(self.weight);
            let _ = lt::destroy_matrix_layout(self.input);
            let _ = lt::destroy_matrix_layout(self.output);
            let _ = lt::destroy_matmul_desc(self.description);
        }
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed here only.
        let _ = unsafe { lt::destroy_handle(self.handle) };
    }
}
