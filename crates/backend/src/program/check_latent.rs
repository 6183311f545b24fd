//! The checks of the ops around attention over latents.

use super::check::{Checked, Checker, KvLayerNeeds, require};
use crate::{HeadLinear, LatentKv, WeightUse};

impl Checker<'_> {
    pub(super) fn head_linear(&mut self, op: &HeadLinear) -> Checked {
        let weight = self.weight(op.weight)?;
        let (rows, cols) = (weight.rows, weight.cols);
        let WeightUse::Experts(heads) = weight.usage else {
            return Err(format!("weight {} was not loaded as the matrices of heads", op.weight.0));
        };
        require(heads > 0 && rows.is_multiple_of(heads), || format!("{heads} heads in {rows} rows"))?;
        require(op.input != op.output, || "a product of heads over its own input".to_owned())?;
        for (what, buffer, least) in [("the input", op.input, cols), ("the output", op.output, rows / heads)]
        {
            let width = self.activations(buffer)?.cols;
            require(width.is_multiple_of(heads) && width / heads >= least, || {
                format!("{what} has {width} columns for {heads} heads of at least {least}")
            })?;
        }
        Ok(())
    }

    pub(super) fn latent_kv(&mut self, index: usize, op: &LatentKv) -> Checked {
        let head_dim = self.activations(op.latent)?.cols;
        let rotary = *self
            .handles
            .ropes
            .get(op.rope.0 as usize)
            .ok_or_else(|| format!("no such rotary table as {}", op.rope.0))?;
        require(rotary < head_dim, || format!("{rotary} of {head_dim} values of a latent are rotated"))?;
        self.norm(Some(&op.norm), head_dim - rotary)?;
        let query = self.activations(op.query)?.cols;
        require(
            op.num_heads > 0 && query.is_multiple_of(op.num_heads) && query / op.num_heads >= rotary,
            || format!("{query} columns for {} heads of at least {rotary}", op.num_heads),
        )?;
        require(op.query != op.output, || "queries over themselves".to_owned())?;
        self.width("the output", op.output, op.num_heads * head_dim)?;
        self.kv_layer(KvLayerNeeds {
            op: index,
            layer: op.layer,
            num_heads: op.num_heads,
            head_dim,
            num_kv_heads: Some(1),
        })
    }
}
