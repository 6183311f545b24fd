//! Weights of quantised checkpoints: e4m3 with scales, and columns out of order.
//!
//! Few tokens: `skinny` multiplies e4m3 weights with bf16 activations. Many: activations are rounded to e4m3 with a scale a
//! token (and normed on the way), and cuBLASLt or `gated.cu` multiply e4m3 with e4m3. Scales of blocks, devices and
//! libraries that cannot do this, and odd shapes go by bf16, converted piece by piece.

use baton_backend::{
    BackendError, BufferId, Norm, NormKind, Precision, Scales, Tensor, TensorError, WeightFormat, WeightId,
    WeightUse,
};

use crate::compile::SkinnyWeights;
use crate::device::Device;
use crate::gemm::Gemm;
use crate::layout::{Layout, device_format};
use crate::ops::Run;
use crate::params::{Address, OrderParams, QuantizeParams};
use crate::weights::Part;

/// Rows and columns of a block that kernels know.
const BLOCK: usize = 128;
/// Rows of e4m3 weights that the skinny kernels take.
const SKINNY_ROWS: usize = 16;
/// cuBLASLt wants rows and columns of e4m3 in multiples of this.
const GEMM_UNIT: usize = 16;

/// The scales of a part, which lie behind its values, as `skinny.cu` wants them.
#[derive(Debug)]
pub(crate) struct PartScales {
    pub(crate) values: Vec<f32>,
    /// Blocks side by side; 0: one scale per row.
    pub(crate) across: usize,
}

impl PartScales {
    /// Of neighbours of one format, which [`usable`] has made fit each other.
    pub(crate) fn new(run: &[Tensor]) -> Option<Self> {
        if run[0].format() != WeightFormat::F8_E4M3 {
            return None;
        }
        let has_blocks = run[0].scales().is_some_and(|scales| scales.block_cols().is_some());
        let across = if has_blocks { run[0].cols().div_ceil(BLOCK) } else { 0 };
        let mut values: Vec<f32> = Vec::new();
        for tensor in run {
            for row in (0..tensor.rows()).step_by(if has_blocks { BLOCK } else { 1 }) {
                match tensor.scales() {
                    Some(scales) => values.extend_from_slice(scales.row(row)),
                    None => values.push(1.0),
                }
            }
        }
        Some(Self { values, across })
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }
}

impl Part {
    /// Where the scales of e4m3 are.
    pub(crate) fn scales_address(&self) -> Address {
        let is_there = self.across.is_some();
        if is_there { self.memory.address() + (self.rows * self.unit_bytes) as u64 } else { 0 }
    }

    /// Which fused kernels there are for it.
    pub(crate) fn skinny_weights(&self) -> Option<SkinnyWeights> {
        match (self.layout, self.across) {
            (Layout::Plain(WeightFormat::BF16), _) => Some(SkinnyWeights::Bf16),
            (Layout::Plain(WeightFormat::F8_E4M3), Some(across)) if across > 0 => {
                Some(SkinnyWeights::Fp8Blocks)
            }
            (Layout::Plain(WeightFormat::F8_E4M3), Some(_)) => Some(SkinnyWeights::Fp8Rows),
            _ => None,
        }
    }
}

impl Device {
    pub(crate) fn skinny_rows(&self, weights: SkinnyWeights) -> usize {
        match weights {
            SkinnyWeights::Bf16 => self.skinny_rows,
            _ if self.skinny_rows == 0 => 0,
            _ => SKINNY_ROWS,
        }
    }
}

/// The parts of a weight in formats and with scales that there are kernels for.
pub(crate) fn usable(
    parts: &[Tensor],
    usage: WeightUse,
    precision: Precision,
) -> Result<Vec<Tensor>, BackendError> {
    let failed = |error: TensorError| BackendError::Unsupported { what: error.to_string() };
    let columns = parts.first().and_then(Tensor::columns);
    let is_one_order = parts.iter().all(|part| part.columns() == columns);
    let has_blocks = |part: &Tensor| part.scales().is_some_and(|scales| scales.block_cols().is_some());
    let is_known = |scales: &Scales| scales.block_cols().is_none() || scales.blocks() == (BLOCK, BLOCK);
    let fp8_is_usable = usage == WeightUse::Linear
        && parts
            .iter()
            .all(|part| part.scales().is_none_or(is_known) && has_blocks(part) == has_blocks(&parts[0]))
        && (!has_blocks(&parts[0])
            || parts.iter().rev().skip(1).all(|part| part.rows().is_multiple_of(BLOCK)));
    let open = |part: &Tensor| {
        let format = device_format(part.format(), precision);
        let keeps_order = part.columns().is_none()
            || (is_one_order && precision == Precision::Fast && usage == WeightUse::Linear);
        let is_opened_fp8 = part.format() == WeightFormat::F8_E4M3 && !fp8_is_usable;
        if format == part.format() && keeps_order && !is_opened_fp8 {
            return Ok(part.clone());
        }
        if precision == Precision::Full { part.to_f32() } else { part.to_bf16() }.map_err(failed)
    };
    parts.iter().map(open).collect()
}

/// The rows that a product reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input {
    pub(crate) address: Address,
    /// As e4m3, in the device's own scratch, with their scales.
    pub(crate) is_fp8: bool,
}

impl Run<'_> {
    /// Whether products of this weight are of e4m3 on both sides.
    pub(crate) fn multiplies_fp8(&self, weight: WeightId) -> bool {
        let weight = &self.device.weights[weight.0 as usize];
        let [part] = weight.parts.as_slice() else { return false };
        part.skinny_weights() == Some(SkinnyWeights::Fp8Rows)
            && weight.cols.is_multiple_of(GEMM_UNIT)
            && weight.rows.is_multiple_of(GEMM_UNIT)
            && self.device.gemm.as_ref().is_some_and(Gemm::has_fp8)
    }

    /// The rows that a product of `weight` reads: normed, ordered as its columns, or rounded to e4m3.
    pub(crate) fn prepared(
        &mut self,
        input: BufferId,
        norm: Option<&Norm>,
        weight: WeightId,
    ) -> Result<Input, BackendError> {
        let (_, cols) = self.weight_size(weight);
        if self.multiplies_fp8(weight) {
            let address = self.buffer(input, cols)?;
            return self.quantized(address, norm, cols);
        }
        let address = self.normed(input, norm, cols)?;
        self.ordered(address, weight, self.shape.tokens)
    }

    /// Normed rows in the order of a weight's columns.
    pub(crate) fn ordered(&self, input: Address, weight: WeightId, rows: u32) -> Result<Input, BackendError> {
        let device = &*self.device;
        let weight = &device.weights[weight.0 as usize];
        let Some(columns) = &weight.columns else { return Ok(Input { address: input, is_fp8: false }) };
        let output = device.ordered.address();
        if rows > 0 {
            let (step, columns) = (device.step.address(), columns.address());
            let params = OrderParams { step, input, columns, output, cols: weight.cols as u32 };
            // SAFETY: the struct is the kernel's; input and scratch have these rows.
            unsafe { device.gpu.launch(device.kernels.core().order_columns, (rows, 1), 256, 0, &params) }?;
        }
        Ok(Input { address: output, is_fp8: false })
    }

    fn quantized(&self, input: Address, norm: Option<&Norm>, cols: usize) -> Result<Input, BackendError> {
        let device = &*self.device;
        let (is_layer_norm, bias) = match norm.map(|norm| norm.kind) {
            None | Some(NormKind::Rms) => (0, None),
            Some(NormKind::Layer { bias }) => (1, bias),
        };
        let params = QuantizeParams {
            step: device.step.address(),
            input,
            weight: self.vector(norm.map(|norm| norm.weight)),
            bias: self.vector(bias),
            output: device.codes.address(),
            scales: device.code_scales.address(),
            cols: cols as u32,
            eps: norm.map_or(0.0, |norm| norm.eps),
            is_layer_norm,
        };
        if self.shape.tokens > 0 {
            let function = device.kernels.core().quantize_rows;
            // SAFETY: the struct is the kernel's; the scratch is as large as the largest step of the widest weight.
            unsafe { device.gpu.launch(function, (self.shape.tokens, 1), 256, 0, &params) }?;
        }
        Ok(Input { address: device.codes.address(), is_fp8: true })
    }
}
