//! Large products by cuBLASLt: `output[m, n] = input[m, k] · weight[n, k]ᵀ`, bf16 in, f32 sums.
//!
//! What a shape needs (descriptors, an algorithm) is made when it is first seen and kept. The workspace is one, because
//! all work is on one stream.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;

use baton_backend::BackendError;
use cudarc::cublaslt::{result as lt, sys};

use crate::gpu::{DeviceMemory, Gpu};

const WORKSPACE_BYTES: usize = 64 << 20;

/// A product: sizes, and how the result is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) output_stride: usize,
    pub(crate) is_f32: bool,
    /// Bytes that the output's address and rows are aligned to.
    pub(crate) output_alignment: u32,
}

#[derive(Debug)]
pub(crate) struct Gemm {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceMemory,
    plans: HashMap<Shape, Plan>,
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
}

fn failed(error: lt::CublasError) -> BackendError {
    BackendError::Device { cause: format!("cuBLASLt: {error}") }
}

impl Gemm {
    pub(crate) fn new(gpu: &Gpu) -> Result<Self, BackendError> {
        gpu.bind()?;
        let workspace = gpu.allocate(WORKSPACE_BYTES, "the workspace of products")?;
        Ok(Self { handle: lt::create_handle().map_err(failed)?, workspace, plans: HashMap::new() })
    }

    /// Adds to the output if `accumulate`.
    ///
    /// # Safety
    /// The addresses must be device memory of the sizes of `shape`.
    pub(crate) unsafe fn multiply(
        &mut self,
        gpu: &Gpu,
        shape: Shape,
        weight: u64,
        input: u64,
        output: u64,
        accumulate: bool,
    ) -> Result<(), BackendError> {
        if !self.plans.contains_key(&shape) {
            let plan = Plan::new(self.handle, &shape).map_err(failed)?;
            self.plans.insert(shape, plan);
        }
        let plan = &self.plans[&shape];
        let (alpha, beta) = (1.0_f32, f32::from(u8::from(accumulate)));
        // SAFETY: the descriptors belong to this shape, the workspace is ours, the caller vouches for the matrices.
        unsafe {
            lt::matmul(
                self.handle,
                plan.description,
                ptr::from_ref(&alpha).cast(),
                ptr::from_ref(&beta).cast(),
                weight as *const c_void,
                plan.weight,
                input as *const c_void,
                plan.input,
                output as *const c_void,
                plan.output,
                output as *mut c_void,
                plan.output,
                &raw const plan.algorithm,
                self.workspace.address() as *mut c_void,
                self.workspace.bytes(),
                gpu.stream.0.cast(),
            )
        }
        .map_err(failed)
    }
}

impl Plan {
    /// cuBLASLt counts columns first: our row-major matrices are its transposed ones.
    fn new(handle: sys::cublasLtHandle_t, shape: &Shape) -> Result<Self, lt::CublasError> {
        let (bf16, f32) = (sys::cudaDataType_t::CUDA_R_16BF, sys::cudaDataType_t::CUDA_R_32F);
        let (m, n, k) = (shape.m as u64, shape.n as u64, shape.k as u64);
        let weight = lt::create_matrix_layout(bf16, k, n, k as i64)?;
        let input = lt::create_matrix_layout(bf16, k, m, k as i64)?;
        let output_type = if shape.is_f32 { f32 } else { bf16 };
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
        let preference = lt::create_matmul_pref()?;
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let workspace_bytes = WORKSPACE_BYTES as u64;
        // SAFETY: the attributes take a u64 and u32s; the preference is destroyed once, below.
        let heuristic = unsafe {
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
                lt::set_matmul_pref_attribute(preference, attribute, ptr::from_ref(&alignment).cast(), size_of::<u32>())?;
            }
            let found =
                lt::get_matmul_algo_heuristic(handle, description, weight, input, output, output, preference);
            let _ = lt::destroy_matmul_pref(preference);
            found?
        };
        Ok(Self { description, weight, input, output, algorithm: heuristic.algo })
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        for plan in self.plans.values() {
            // SAFETY: made by `Plan::new`, destroyed here only.
            unsafe {
                let _ = lt::destroy_matrix_layout(plan.weight);
                let _ = lt::destroy_matrix_layout(plan.input);
                let _ = lt::destroy_matrix_layout(plan.output);
                let _ = lt::destroy_matmul_desc(plan.description);
            }
        }
        // SAFETY: as above.
        let _ = unsafe { lt::destroy_handle(self.handle) };
    }
}
