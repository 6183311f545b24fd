//! Norms of q and k over other spans than a head with a shared weight, and the bias of a head: launches between a product and what
//! follows it, for the few models that have them.

use baton_backend::{BackendError, Norm, NormKind, NormSpan, Qkv, VectorId};

use crate::ops::Run;
use crate::params::{Address, HeadNormParams, LogitBiasParams};

impl Run<'_> {
    /// True where the norms of q and k are none that the rotary kernels know.
    pub(crate) fn has_other_head_norms(op: &Qkv) -> bool {
        let is_layer = |norm: Option<Norm>| norm.is_some_and(|norm| norm.kind != NormKind::Rms);
        let has_norm = op.q_norm.is_some() || op.k_norm.is_some();
        has_norm && (op.norm_span != NormSpan::Head || is_layer(op.q_norm) || is_layer(op.k_norm))
    }

    /// Adds the bias and norms q and k where the projection left them.
    pub(crate) fn norm_heads(
        &self,
        op: &Qkv,
        projected: Address,
        num_kv_heads: usize,
        head_dim: usize,
    ) -> Result<(), BackendError> {
        let shift = |norm: Option<Norm>| match norm.map(|norm| norm.kind) {
            Some(NormKind::Layer { bias }) => self.vector(bias),
            Some(NormKind::Rms) | None => 0,
        };
        let centred = |norm: Option<Norm>| u32::from(norm.is_some_and(|norm| norm.kind != NormKind::Rms));
        let weight = |norm: Option<Norm>| self.vector(norm.map(|norm| norm.weight));
        let params = HeadNormParams {
            step: self.device.step.address(),
            projected,
            bias: self.vector(op.bias),
            q_weight: weight(op.q_norm),
            q_bias: shift(op.q_norm),
            k_weight: weight(op.k_norm),
            k_bias: shift(op.k_norm),
            num_heads: op.num_heads as u32,
            num_kv_heads: num_kv_heads as u32,
            head_dim: head_dim as u32,
            span: match op.norm_span {
                NormSpan::Head => 0,
                NormSpan::EachHead => 1,
                NormSpan::Row => 2,
            },
            q_is_layer_norm: centred(op.q_norm),
            k_is_layer_norm: centred(op.k_norm),
            q_eps: op.q_norm.map_or(0.0, |norm| norm.eps),
            k_eps: op.k_norm.map_or(0.0, |norm| norm.eps),
        };
        let segments =
            if op.norm_span == NormSpan::Row { 3 } else { (op.num_heads + 2 * num_kv_heads) as u32 };
        let function = self.device.kernels.core().norm_heads;
        // SAFETY: the struct is the kernel's; the projection has a row for each of the shape's tokens.
        unsafe { self.device.gpu.launch(function, (self.shape.tokens, segments), 256, 0, &params) }
    }

    /// Logits without a bias become those with one.
    pub(crate) fn add_logit_bias(
        &self,
        logits: Address,
        bias: VectorId,
        width: usize,
    ) -> Result<(), BackendError> {
        let count = self.shape.logit_rows as usize * width;
        if count == 0 {
            return Ok(());
        }
        let params = LogitBiasParams {
            values: logits,
            bias: self.vector(Some(bias)),
            count: count as u64,
            width: width as u32,
        };
        let blocks = count.div_ceil(256).clamp(1, 2048) as u32;
        // SAFETY: the struct is the kernel's; the logits have the shape's rows.
        unsafe {
            self.device.gpu.launch(self.device.kernels.core().add_logit_bias, (blocks, 1), 256, 0, &params)
        }
    }
}
