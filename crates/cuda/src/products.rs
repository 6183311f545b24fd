//! Products with weights of any layout: up to a few rows by our own kernels, which read the weights as they are; larger
//! ones by cuBLASLt, which gets what is not as activations are converted piece by piece. Products of bf16 weights with few tokens go to
//! `skinny` before they come here.

use baton_backend::{BackendError, Precision, VectorId, WeightFormat, WeightId};

use crate::device::Device;
use crate::fp8::Input;
use crate::gemm;
use crate::kernels::ProductKernel;
use crate::layout::{Layout, activation_format};
use crate::ops::{Run, unsupported};
use crate::params::{Address, BiasParams, ConvertParams, ProductParams, SoftcapParams};
use crate::weights::Part;

/// More rows of bf16 weights than this go to cuBLASLt. Others get more, because those must be converted first.
pub const MAX_PRODUCT_ROWS: usize = 2;
const MAX_PLAIN_ROWS: usize = 8;
const MAX_PACKED_ROWS: usize = 96;

/// As in `packed.cu`: columns that a block converts.
const CONVERT_COLS: usize = 1024;

const BF16: Layout = Layout::Plain(WeightFormat::BF16);

/// A product and where its result goes.
pub(crate) struct Product {
    pub(crate) input: Address,
    /// The input is e4m3 with the device's scales, as [`Run::prepared`] makes it.
    pub(crate) is_fp8: bool,
    pub(crate) m: usize,
    /// Rows that input and output have room for.
    pub(crate) max_m: usize,
    pub(crate) weight: WeightId,
    pub(crate) bias: Option<VectorId>,
    pub(crate) output: Address,
    pub(crate) output_stride: usize,
    pub(crate) accumulate: bool,
    pub(crate) is_f32: bool,
    pub(crate) softcap: Option<f32>,
}

/// Rows of a large product: more than there are, so that there are few shapes. What the others hold does not matter.
fn padded_rows(m: usize) -> usize {
    m.next_multiple_of(if m <= 128 { 8 } else { 64 })
}

impl Device {
    /// Whether our own kernels do this; `is_f32`: of logits, which are tiles enough for any library.
    pub(crate) fn is_small(&self, part: &Part, m: usize, is_f32: bool) -> bool {
        m <= match part.layout {
            BF16 if self.kernels.precision() == Precision::Fast => {
                let is_wide = !is_f32 && self.small_bf16_rows > 0 && self.has_wide(part, m);
                if is_wide { m } else { self.small_bf16_rows }
            }
            // Few tokens go to `skinny`.
            Layout::Plain(WeightFormat::F8_E4M3) => 0,
            Layout::Plain(_) => MAX_PLAIN_ROWS,
            Layout::Packed { .. } if self.has_wide(part, m) => m,
            Layout::Packed { .. } => MAX_PACKED_ROWS,
        }
    }
}

impl Run<'_> {
    pub(crate) fn product(&mut self, product: &Product) -> Result<(), BackendError> {
        if product.m == 0 {
            return Ok(());
        }
        let num_parts = self.device.weights[product.weight.0 as usize].parts.len();
        let element = self.device.element_bytes(product.is_f32);
        let mut all_small = true;
        for number in 0..num_parts {
            let part = &self.device.weights[product.weight.0 as usize].parts[number];
            let output = product.output + (part.first_row * element) as u64;
            if self.device.is_small(part, product.m, product.is_f32) {
                self.small_product(product, number, output)?;
            } else {
                all_small = false;
                self.large_product(product, number, output)?;
            }
        }
        match product.softcap {
            Some(cap) if !all_small => {
                let count = (product.m * product.output_stride) as u64;
                let params = SoftcapParams { values: product.output, count, cap };
                // SAFETY: the struct is the kernel's; the output has these values.
                unsafe {
                    self.device.gpu.launch(self.device.kernels.core().softcap, (1024, 1), 256, 0, &params)
                }
            }
            _ => Ok(()),
        }
    }

    fn small_product(
        &mut self,
        product: &Product,
        number: usize,
        output: Address,
    ) -> Result<(), BackendError> {
        let device = &*self.device;
        let part = &device.weights[product.weight.0 as usize].parts[number];
        let params = self.product_params(product, number, output);
        if device.wide_product(part, &params, None, false)? {
            return Ok(());
        }
        let kernels = device.kernels.products(part.layout, product.m);
        // Fewer than two blocks a multiprocessor keep it waiting.
        let is_few =
            kernels.plain.blocks(params.num_rows, params.m) < 2 * device.gpu.properties.num_multiprocessors;
        let kernel = kernels.narrow.filter(|_| is_few).unwrap_or(kernels.plain);
        // SAFETY: the struct is the kernel's; input and output have `m` rows of the weight's sizes.
        unsafe { self.launch_product(&kernel, &params) }
    }

    fn product_params(&self, product: &Product, number: usize, output: Address) -> ProductParams {
        let device = &*self.device;
        let weight = &device.weights[product.weight.0 as usize];
        let part = &weight.parts[number];
        let bias = self.vector(product.bias);
        let all_small = weight.parts.iter().all(|part| device.is_small(part, product.m, product.is_f32));
        ProductParams {
            weight: part.memory.address(),
            unit_bytes: part.unit_bytes as u64,
            input: product.input,
            bias: if bias == 0 { 0 } else { bias + 4 * part.first_row as u64 },
            output,
            num_rows: part.rows as u32,
            cols: weight.cols as u32,
            m: product.m as u32,
            output_stride: product.output_stride as u32,
            accumulate: u32::from(product.accumulate),
            is_f32: u32::from(product.is_f32),
            // Where a large part follows, the softcap of the whole row comes afterwards.
            softcap: if all_small { product.softcap.unwrap_or(0.0) } else { 0.0 },
            activation: 0,
        }
    }

    /// # Safety
    /// The params are the kernel's, and what they point to has the sizes that they say.
    pub(crate) unsafe fn launch_product(
        &self,
        kernel: &ProductKernel,
        params: &ProductParams,
    ) -> Result<(), BackendError> {
        let blocks = kernel.blocks(params.num_rows, params.m);
        // SAFETY: promised by the caller.
        unsafe {
            self.device.gpu.launch(kernel.function, (blocks, 1), kernel.threads, kernel.shared_bytes, params)
        }
    }

    fn large_product(
        &mut self,
        product: &Product,
        number: usize,
        output: Address,
    ) -> Result<(), BackendError> {
        if product.is_fp8 {
            let part = &self.device.weights[product.weight.0 as usize].parts[number];
            let params = self.product_params(product, number, output);
            if self.device.wide_product(part, &params, Some(self.device.code_scales.address()), false)? {
                return Ok(());
            }
        }
        let activation_bytes = self.device.activation_bytes();
        let element = self.device.element_bytes(product.is_f32);
        let Device { gpu, gemm, kernels, weights, converted, projected, vectors, code_scales, .. } =
            &mut *self.device;
        let gemm = gemm.as_mut().expect("opened with the first weight");
        let weight = &weights[product.weight.0 as usize];
        let part = &weight.parts[number];
        let is_ready = product.is_fp8 || part.layout == Layout::Plain(activation_format(kernels.precision()));
        let part_scales = part.scales_address();
        let units_at_once = if is_ready {
            part.rows
        } else {
            converted.bytes() / activation_bytes / weight.cols / part.unit_rows
        };
        let piece = units_at_once.max(1) * part.unit_rows;
        for first in (0..part.rows).step_by(piece) {
            let rows = piece.min(part.rows - first);
            let mut source = part.memory.address() + (first / part.unit_rows * part.unit_bytes) as u64;
            if !is_ready {
                let params = ConvertParams {
                    weight: source,
                    unit_bytes: part.unit_bytes as u64,
                    output: converted.address(),
                    num_rows: rows as u32,
                    cols: weight.cols as u32,
                    first_row: first as u32,
                    across: part.across.unwrap_or(0) as u32,
                    scales: part_scales,
                };
                let blocks = rows.div_ceil(part.unit_rows) as u32;
                let (grid, threads) = match part.layout {
                    Layout::Plain(_) => ((blocks, 1), 128),
                    Layout::Packed { .. } => ((blocks, weight.cols.div_ceil(CONVERT_COLS) as u32), 256),
                };
                // SAFETY: the struct is the kernel's; `piece` rows fit the scratch.
                unsafe { gpu.launch(kernels.convert(part.layout), grid, threads, 0, &params) }?;
                source = converted.address();
            }
            let target = output + (first * element) as u64;
            let is_aligned = |bytes: u64| {
                target.is_multiple_of(bytes)
                    && ((product.output_stride * element) as u64).is_multiple_of(bytes)
            };
            let shape = gemm::Shape {
                m: padded_rows(product.m).min(product.max_m),
                n: rows,
                k: weight.cols,
                output_stride: product.output_stride,
                is_f32: product.is_f32,
                is_fp8: product.is_fp8,
                output_alignment: if is_aligned(16) { 16 } else { element as u32 },
            };
            let scales = product.is_fp8.then(|| (part_scales, code_scales.address()));
            let matrices = gemm::Matrices { weight: source, input: product.input, output: target, scales };
            // A product that adds to its output must not be timed there.
            let scratch = if product.accumulate { projected.address() } else { target };
            let fits = !product.accumulate || shape.m * shape.output_stride * element <= projected.bytes();
            let scratch = Some(scratch).filter(|_| self.is_bucket && fits);
            // SAFETY: the addresses are matrices of the shape's sizes.
            unsafe { gemm.multiply(gpu, shape, matrices, product.accumulate, scratch) }?;
        }
        let Some(bias) = product.bias else { return Ok(()) };
        if part.rows != weight.rows || product.output_stride != weight.rows || product.is_f32 {
            return Err(unsupported("a bias for a weight of several formats"));
        }
        let params = BiasParams {
            values: output,
            bias: vectors[bias.0 as usize].address(),
            rows: product.m as u32,
            width: weight.rows as u32,
        };
        // SAFETY: the struct is the kernel's; the output is `[m, rows]`.
        unsafe { gpu.launch(kernels.core().add_bias, (512, 1), 256, 0, &params) }
    }

    pub(crate) fn weight_size(&self, weight: WeightId) -> (usize, usize) {
        let weight = &self.device.weights[weight.0 as usize];
        (weight.rows, weight.cols)
    }

    /// Projects all rows into scratch, without bias.
    pub(crate) fn project(&mut self, input: Input, weight: WeightId) -> Result<Address, BackendError> {
        let output = self.device.projected.address();
        let (rows, _) = self.weight_size(weight);
        if self.tokens() * rows * self.device.activation_bytes() > self.device.projected.bytes() {
            return Err(unsupported("a projection wider than the weights that were loaded for one"));
        }
        self.product(&Product {
            input: input.address,
            is_fp8: input.is_fp8,
            m: self.tokens(),
            max_m: self.device.max_tokens,
            weight,
            bias: None,
            output,
            output_stride: rows,
            accumulate: false,
            is_f32: false,
            softcap: None,
        })?;
        Ok(output)
    }
}
