//! The tensors of a quantised checkpoint under the names that the decoder asks for.

use std::collections::BTreeSet;
use std::sync::Arc;

use baton_backend::{Scales, SharedBytes, Tensor, TensorError, WeightFormat};
use half::{bf16, f16};

use super::mxfp4::Mxfp4;
use super::packed::{BLOCK, Groups, Layout, Words, zeros};
use super::{QuantMethod, QuantizationConfig};
use crate::safetensors::{RawTensor, Safetensors};
use crate::{KvScales, ModelError, WeightSource};

/// What a module has beside its bias, by the ends of names.
const PARTS: [&str; 19] = [
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "input_scale",
    "input_zero_point",
    "activation_scale",
    "input_global_scale",
    "weight_global_scale",
    // Of the KV cache.
    "k_scale",
    "v_scale",
    "q_scale",
    "kv_scale",
];

#[derive(Debug)]
pub(crate) struct QuantizedWeights {
    files: Arc<Safetensors>,
    config: QuantizationConfig,
}

fn wrong(name: &str, cause: impl std::fmt::Display) -> ModelError {
    ModelError::Config { what: format!("tensor {name:?} {cause}") }
}

impl QuantizedWeights {
    pub(crate) fn new(files: Arc<Safetensors>, config: QuantizationConfig) -> Self {
        Self { files, config }
    }

    fn required(&self, name: &str) -> Result<RawTensor, ModelError> {
        self.files.raw(name)?.ok_or_else(|| ModelError::MissingTensor { name: name.to_owned() })
    }

    /// A module's weight, if it is quantised.
    fn quantised(&self, module: &str) -> Result<Option<Tensor>, ModelError> {
        let named = |part: &str| format!("{module}.{part}");
        if let Some(packed) = self.files.raw(&named("weight_packed"))? {
            if packed.dtype == "U8" {
                if self.files.entry(&named("weight_global_scale")).is_some() {
                    return Err(wrong(&packed.name, "is NVFP4, which is not supported; MXFP4 is"));
                }
                return self.mxfp4(packed, &named("weight_scale")).map(Some);
            }
            return self.compressed(module, &packed).map(Some);
        }
        if let Some(words) = self.files.raw(&named("qweight"))? {
            let groups = match self.config.method {
                QuantMethod::Awq { .. } => self.awq(module, &words),
                QuantMethod::Gptq { is_v2, .. } => self.gptq(module, &words, is_v2),
                _ => Err(wrong(&named("qweight"), "belongs to AWQ or GPTQ, but quant_method is another")),
            }?;
            return blocks(&named("qweight"), groups).map(Some);
        }
        let Some(weight) = self.files.raw(&named("weight"))? else { return Ok(None) };
        match weight.dtype.as_str() {
            "F8_E4M3" => self.fp8(module, &weight).map(Some),
            "I8" => self.int8(module, &weight).map(Some),
            _ => Ok(None),
        }
    }

    /// `codes` are `[.., cols / 2]` or `[.., cols / 32, 16]`, scales `[.., cols / 32]`; what stands before is rows.
    fn mxfp4(&self, codes: RawTensor, scales: &str) -> Result<Tensor, ModelError> {
        let scales = self.required(scales)?;
        for tensor in [&codes, &scales] {
            if !matches!(tensor.dtype.as_str(), "U8" | "F8_E8M0") {
                let cause = format!("has the dtype {}; values and scales of MXFP4 are U8", tensor.dtype);
                return Err(wrong(&tensor.name, cause));
            }
        }
        let (&blocks, outer) = scales.shape.split_last().unwrap_or((&0, &[]));
        let rows = outer.iter().try_fold(1_usize, |rows, dim| rows.checked_mul(*dim));
        let is_alike = codes.shape.starts_with(outer)
            && match codes.shape[outer.len()..] {
                [bytes] => blocks.checked_mul(BLOCK / 2) == Some(bytes),
                [blocks_too, bytes] => (blocks_too, bytes) == (blocks, BLOCK / 2),
                _ => false,
            };
        let (Some(rows), Some(cols)) = (rows.filter(|_| is_alike), blocks.checked_mul(BLOCK)) else {
            let cause =
                format!("has the shape {:?}, which fits no values of {:?}", scales.shape, codes.shape);
            return Err(wrong(&scales.name, cause));
        };
        let mxfp4 = Mxfp4::Pairs { codes: codes.bytes, scales: scales.bytes };
        mxfp4.tensor(rows, cols).map_err(|cause| wrong(&scales.name, cause))
    }

    /// Activation scales are not used, but one that makes no sense says that the file is broken.
    fn check_activations(&self, module: &str) -> Result<(), ModelError> {
        for part in ["input_scale", "activation_scale"] {
            if let Some(scale) = self.files.raw(&format!("{module}.{part}"))? {
                scale_values(&scale)?;
            }
        }
        Ok(())
    }

    fn fp8(&self, module: &str, weight: &RawTensor) -> Result<Tensor, ModelError> {
        self.check_activations(module)?;
        let (rows, cols) = matrix(weight)?;
        let inverse = self.files.raw(&format!("{module}.weight_scale_inv"))?;
        let scale = match inverse {
            Some(scale) => scale,
            None => self.required(&format!("{module}.weight_scale"))?,
        };
        let values = scale_values(&scale)?;
        let scales = match (scale.shape.as_slice(), self.config.method) {
            _ if values.len() == 1 => Scales::of_tensor(values[0]),
            ([_] | [_, 1], _) if values.len() == rows => Scales::of_rows(values),
            (&[down, across], QuantMethod::Fp8 { block, .. }) => {
                let (block_rows, block_cols) = block.unwrap_or((128, 128));
                if (down, across) != (rows.div_ceil(block_rows), cols.div_ceil(block_cols)) {
                    let cause = format!(
                        "is {down} x {across}; {rows} x {cols} values have {} x {} blocks of {block_rows} x {block_cols}",
                        rows.div_ceil(block_rows),
                        cols.div_ceil(block_cols)
                    );
                    return Err(wrong(&scale.name, cause));
                }
                Scales::of_blocks(values, block_rows, block_cols, across)
            }
            (shape, _) => {
                return Err(wrong(
                    &scale.name,
                    format!("has the shape {shape:?}, which fits no {rows} x {cols} weight"),
                ));
            }
        };
        let named = |cause: TensorError| ModelError::Tensor { name: weight.name.clone(), cause };
        let tensor = Tensor::new(WeightFormat::F8_E4M3, rows, cols, weight.bytes.clone()).map_err(named)?;
        tensor.with_scales(scales).map_err(named)
    }

    /// Symmetric, a scale for each row or for all. Blocks of 32 repeat it.
    fn int8(&self, module: &str, weight: &RawTensor) -> Result<Tensor, ModelError> {
        self.check_activations(module)?;
        let (rows, cols) = matrix(weight)?;
        let scale = self.required(&format!("{module}.weight_scale"))?;
        let zero = self.files.raw(&format!("{module}.weight_zero_point"))?;
        if let Some(zeros) = zero.filter(|zeros| zeros.bytes.as_slice().iter().any(|byte| *byte != 0)) {
            return Err(wrong(&zeros.name, "is not zero: only symmetric int8 is supported"));
        }
        let mut values = f16_values(&scale)?;
        if values.len() == 1 {
            values = vec![values[0]; rows];
        }
        if values.len() != rows {
            let cause = format!(
                "has {} scales for {rows} rows: only one for each row or for all is supported",
                values.len()
            );
            return Err(wrong(&scale.name, cause));
        }
        let is_whole = cols.is_multiple_of(32);
        let format = if is_whole { WeightFormat::Q8_0 } else { WeightFormat::F16 };
        let row_bytes = format.row_bytes(cols).ok_or_else(|| wrong(&weight.name, "is too large"))?;
        let total = row_bytes.checked_mul(rows).ok_or_else(|| wrong(&weight.name, "is too large"))?;
        let source = weight.bytes.clone();
        let bytes = SharedBytes::lazy(total, move || {
            let mut bytes = vec![0; total];
            super::round::in_parallel(&mut bytes, row_bytes, |row, out| {
                let quants = &source.as_slice()[row * cols..(row + 1) * cols];
                if is_whole {
                    for (out, quants) in out.chunks_exact_mut(34).zip(quants.chunks_exact(32)) {
                        out[..2].copy_from_slice(&f16::from_f32(values[row]).to_le_bytes());
                        out[2..].copy_from_slice(quants);
                    }
                } else {
                    for (out, quant) in out.chunks_exact_mut(2).zip(quants) {
                        let value = values[row] * f32::from(*quant as i8);
                        out.copy_from_slice(&f16::from_f32(value).to_le_bytes());
                    }
                }
            });
            bytes
        });
        Tensor::new(format, rows, cols, bytes)
            .map_err(|cause| ModelError::Tensor { name: weight.name.clone(), cause })
    }

    fn awq(&self, module: &str, words: &RawTensor) -> Result<Groups, ModelError> {
        let (cols, packed) = words_matrix(words)?;
        let scales = self.required(&format!("{module}.scales"))?;
        let (groups, rows) = matrix(&scales)?;
        let (bits, n) = (4, 8);
        if rows.div_ceil(n) != packed {
            let cause = format!("has scales for {rows} outputs; the weight has {packed} words of {n}");
            return Err(wrong(&scales.name, cause));
        }
        self.group_size(&scales, groups, cols)?;
        let zeros = self.required(&format!("{module}.qzeros"))?;
        check_words(&zeros, groups, rows.div_ceil(n))?;
        let zeros = zeros_of(Layout::Awq, bits, groups, rows, &zeros);
        let words = Words { layout: Layout::Awq, bits, rows, cols, bytes: words.bytes.clone() };
        self.grouped(words, &scales, groups, zeros, None)
    }

    fn gptq(&self, module: &str, words: &RawTensor, is_v2: bool) -> Result<Groups, ModelError> {
        let (packed, rows) = words_matrix(words)?;
        let scales = self.required(&format!("{module}.scales"))?;
        let (groups, scale_rows) = matrix(&scales)?;
        if scale_rows != rows {
            return Err(wrong(
                &scales.name,
                format!("has scales for {scale_rows} outputs; the weight has {rows}"),
            ));
        }
        let order = self.files.raw(&format!("{module}.g_idx"))?;
        let QuantMethod::Gptq { bits, .. } = self.config.method else { unreachable!("called for GPTQ only") };
        let cols = match &order {
            Some(order) => matrix(order)?.0,
            None => packed
                .checked_mul(32 / bits as usize)
                .ok_or_else(|| wrong(&words.name, "has too many rows of words"))?,
        };
        // Where modules have bits of their own, the shapes tell.
        let bits = bits_of(words, cols, packed)?;
        let n = 32 / bits as usize;
        self.group_size(&scales, groups, cols)?;
        let zeros = self.required(&format!("{module}.qzeros"))?;
        check_words(&zeros, groups, rows.div_ceil(n))?;
        let mut zeros = zeros_of(Layout::Gptq, bits, groups, rows, &zeros);
        if !is_v2 {
            for zero in &mut zeros {
                *zero += 1;
            }
        }
        let words = Words { layout: Layout::Gptq, bits, rows, cols, bytes: words.bytes.clone() };
        self.grouped(words, &scales, groups, zeros, order.as_ref())
    }

    fn compressed(&self, module: &str, packed: &RawTensor) -> Result<Tensor, ModelError> {
        let named = |part: &str| format!("{module}.{part}");
        let (rows, words_per_row) = words_matrix(packed)?;
        let shape = self.required(&named("weight_shape"))?;
        let sizes = integers(&shape)?;
        let &[out, cols] = sizes.as_slice() else {
            return Err(wrong(&shape.name, format!("has {} sizes instead of 2", sizes.len())));
        };
        if out != rows as i64 || !(1..=1 << 40).contains(&cols) {
            return Err(wrong(
                &shape.name,
                format!("says {out} x {cols}, but the packed weight has {rows} rows"),
            ));
        }
        let cols = cols as usize;
        let bits = bits_of(packed, cols, words_per_row)?;
        let scales = self.required(&named("weight_scale"))?;
        let (scale_rows, groups) = matrix(&scales)?;
        if scale_rows != rows {
            return Err(wrong(
                &scales.name,
                format!("has scales for {scale_rows} outputs; the weight has {rows}"),
            ));
        }
        self.group_size(&scales, groups, cols)?;
        let zeros = match self.files.raw(&named("weight_zero_point"))? {
            Some(zeros) => {
                check_words(&zeros, rows.div_ceil(32 / bits as usize), groups)?;
                zeros_of(Layout::Compressed, bits, groups, rows, &zeros)
            }
            None => vec![1 << (bits - 1); groups * rows],
        };
        let order = self.files.raw(&named("weight_g_idx"))?;
        let words = Words { layout: Layout::Compressed, bits, rows, cols, bytes: packed.bytes.clone() };
        blocks(&packed.name, self.grouped(words, &scales, groups, zeros, order.as_ref())?)
    }

    /// Checks all that goes with the words.
    fn grouped(
        &self,
        words: Words,
        scales: &RawTensor,
        groups: usize,
        zeros: Vec<u16>,
        order: Option<&RawTensor>,
    ) -> Result<Groups, ModelError> {
        let (rows, cols) = (words.rows, words.cols);
        let needed = words.num_words().and_then(|words| words.checked_mul(4));
        if needed != Some(words.bytes.len()) {
            let cause = format!(
                "of {} bytes does not hold {rows} x {cols} values of {} bits",
                words.bytes.len(),
                words.bits
            );
            return Err(wrong(&scales.name.replace("scales", "qweight"), cause));
        }
        let mut values = f16_values(scales)?;
        if words.layout == Layout::Compressed {
            values = (0..groups * rows).map(|i| values[i % rows * groups + i / rows]).collect();
        }
        let size = self.group_size(scales, groups, cols)?;
        let mut group_of: Vec<u32> = (0..cols).map(|column| (column / size) as u32).collect();
        let mut columns: Vec<u32> = (0..cols as u32).collect();
        if let Some(order) = order {
            let given = integers(order)?;
            if given.len() != cols {
                return Err(wrong(&order.name, format!("has {} entries for {cols} columns", given.len())));
            }
            // compressed-tensors writes -1 where it did not reorder.
            if given.iter().any(|group| *group != -1) {
                let bad = given.iter().find(|group| !(0..groups as i64).contains(*group));
                if let Some(bad) = bad {
                    return Err(wrong(&order.name, format!("names the group {bad}; there are {groups}")));
                }
                // Columns of a group become neighbours; those in order stay in order.
                columns.sort_by_key(|column| given[*column as usize]);
                group_of = columns.iter().map(|column| given[*column as usize] as u32).collect();
            }
        }
        Ok(Groups {
            words,
            scales: values.into(),
            zeros: zeros.into(),
            group_of: group_of.into(),
            columns: columns.into(),
        })
    }

    /// As the configuration says, where that gives as many groups as there are.
    fn group_size(&self, scales: &RawTensor, groups: usize, cols: usize) -> Result<usize, ModelError> {
        let said = match self.config.method {
            QuantMethod::Awq { group_size, .. }
            | QuantMethod::Gptq { group_size, .. }
            | QuantMethod::Packed { group_size, .. } => group_size,
            QuantMethod::Fp8 { .. } | QuantMethod::Int8 | QuantMethod::Mxfp4 => None,
        };
        if let Some(size) = said.filter(|size| cols.div_ceil(*size) == groups) {
            return Ok(size);
        }
        if groups > 0 && cols.is_multiple_of(groups) && (groups == 1 || said.is_none()) {
            return Ok(cols / groups);
        }
        let said = said.map_or("one group a row".to_owned(), |size| format!("groups of {size}"));
        Err(wrong(
            &scales.name,
            format!("has scales of {groups} groups; {cols} columns in {said} have another number"),
        ))
    }
}

impl WeightSource for QuantizedWeights {
    fn tensor(&self, name: &str) -> Result<Option<Tensor>, ModelError> {
        if let Some(module) = name.strip_suffix(".weight")
            && let Some(tensor) = self.quantised(module)?
        {
            return Ok(Some(tensor));
        }
        if let Some(codes) = self.files.raw(&format!("{name}_blocks"))? {
            return self.mxfp4(codes, &format!("{name}_scales")).map(Some);
        }
        self.files.tensor(name)
    }

    fn names(&self) -> Vec<String> {
        let is_mxfp4 = self.config.method == QuantMethod::Mxfp4;
        let shown = |name: String| {
            let (module, part) = name.rsplit_once('.').unwrap_or(("", &name));
            match part {
                "qweight" | "weight_packed" => Some(format!("{module}.weight")),
                _ if PARTS.contains(&part) || is_mxfp4 && part.ends_with("_scales") => None,
                _ if is_mxfp4 => Some(name.strip_suffix("_blocks").unwrap_or(&name).to_owned()),
                _ => Some(name),
            }
        };
        self.files.names().into_iter().filter_map(shown).collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn total_bytes(&self) -> u64 {
        self.files.total_bytes()
    }

    /// `self_attn.k_scale`, or with the projections; one for both in older files. Rounded up to powers of two, which change no
    /// value but its exponent.
    fn kv_scales(&self, key_weight: &str) -> Result<Option<KvScales>, ModelError> {
        let attention = key_weight.rsplitn(3, '.').nth(2).unwrap_or_default();
        let find = |names: [&str; 4]| {
            for name in names {
                if let Some(scale) = self.files.raw(&format!("{attention}.{name}"))? {
                    let largest = scale_values(&scale)?.into_iter().fold(0.0, f32::max);
                    let power = largest.log2().ceil().clamp(-24.0, 24.0).exp2();
                    return Ok(Some(power).filter(|_| largest > 0.0));
                }
            }
            Ok::<_, ModelError>(None)
        };
        let key = find(["k_scale", "attn.k_scale", "k_proj.k_scale", "kv_scale"])?;
        let value = find(["v_scale", "attn.v_scale", "v_proj.v_scale", "kv_scale"])?;
        Ok(key.zip(value).map(|(key, value)| KvScales { key, value }))
    }

    /// By the names and the configuration, so that no weight is looked at.
    fn formats(&self) -> Result<Vec<WeightFormat>, ModelError> {
        let mut formats = Vec::new();
        let mut add = |format| {
            if !formats.contains(&format) {
                formats.push(format);
            }
        };
        for name in self.files.names() {
            let Some(entry) = self.files.entry(&name) else { continue };
            match (name.rsplit_once('.').map(|(_, part)| part), entry.dtype.as_str()) {
                (Some("qweight" | "weight_packed"), _) => add(self.config.weight_format(256)),
                (Some(part), "U8") if part.ends_with("_blocks") => add(self.config.weight_format(256)),
                (Some("weight"), "F8_E4M3") => add(WeightFormat::F8_E4M3),
                (Some("weight"), "I8") => add(WeightFormat::Q8_0),
                (Some("weight"), _) if entry.shape.len() > 1 => {
                    self.files.format(&name).into_iter().for_each(&mut add);
                }
                _ => {}
            }
        }
        Ok(formats)
    }
}

/// Blocks that are made when they are looked at.
fn blocks(name: &str, groups: Groups) -> Result<Tensor, ModelError> {
    let format = groups.format();
    let (rows, cols) = (groups.words.rows, groups.words.cols);
    let total = format.row_bytes(cols).and_then(|bytes| bytes.checked_mul(rows));
    let total = total.ok_or_else(|| wrong(name, format!("of {rows} x {cols} values is too large")))?;
    let columns = Arc::clone(&groups.columns);
    let bytes = SharedBytes::lazy(total, move || groups.bytes(format));
    let named = |cause| ModelError::Tensor { name: name.to_owned(), cause };
    let tensor = Tensor::new(format, rows, cols, bytes).map_err(named)?;
    if columns.is_sorted() { Ok(tensor) } else { tensor.with_columns(columns).map_err(named) }
}

fn matrix(tensor: &RawTensor) -> Result<(usize, usize), ModelError> {
    match *tensor.shape.as_slice() {
        [rows, cols] if rows > 0 && cols > 0 => Ok((rows, cols)),
        [rows] if rows > 0 => Ok((rows, 1)),
        _ => Err(wrong(&tensor.name, format!("has the shape {:?}; a matrix is expected", tensor.shape))),
    }
}

fn words_matrix(tensor: &RawTensor) -> Result<(usize, usize), ModelError> {
    if tensor.dtype != "I32" {
        return Err(wrong(&tensor.name, format!("has the dtype {}; packed integers are I32", tensor.dtype)));
    }
    matrix(tensor)
}

/// Bits of a value, of which `count` lie in `words` words.
fn bits_of(tensor: &RawTensor, count: usize, words: usize) -> Result<u32, ModelError> {
    [4, 8].into_iter().find(|bits| count.div_ceil(32 / *bits as usize) == words).ok_or_else(|| {
        wrong(
            &tensor.name,
            format!("has {words} words for {count} values, which is neither 4 nor 8 bits a value"),
        )
    })
}

fn check_words(tensor: &RawTensor, rows: usize, cols: usize) -> Result<(), ModelError> {
    let found = words_matrix(tensor)?;
    if found == (rows, cols) {
        return Ok(());
    }
    Err(wrong(&tensor.name, format!("is {} x {}, expected {rows} x {cols}", found.0, found.1)))
}

fn zeros_of(layout: Layout, bits: u32, groups: usize, rows: usize, tensor: &RawTensor) -> Vec<u16> {
    zeros(layout, bits, groups, rows, tensor.bytes.as_slice())
}

/// The values of a tensor of floats, none of which is negative or not finite.
fn scale_values(tensor: &RawTensor) -> Result<Vec<f32>, ModelError> {
    let bytes = tensor.bytes.as_slice();
    let pairs = || bytes.as_chunks::<2>().0.iter();
    let values: Vec<f32> = match tensor.dtype.as_str() {
        "F32" => bytes.as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect(),
        "F16" => pairs().map(|raw| f16::from_le_bytes(*raw).to_f32()).collect(),
        "BF16" => pairs().map(|raw| bf16::from_le_bytes(*raw).to_f32()).collect(),
        other => {
            return Err(wrong(&tensor.name, format!("has the dtype {other}; scales are F32, F16 or BF16")));
        }
    };
    match values.iter().position(|value| !value.is_finite() || *value < 0.0) {
        None if values.is_empty() => Err(wrong(&tensor.name, "is empty")),
        None => Ok(values),
        Some(at) => Err(wrong(
            &tensor.name,
            format!("has the scale {} at {at}: it must be a number from 0 on", values[at]),
        )),
    }
}

/// Scales that are kept in f16.
fn f16_values(tensor: &RawTensor) -> Result<Vec<f32>, ModelError> {
    let values = scale_values(tensor)?;
    match values.iter().find(|value| **value > f16::MAX.to_f32() / 256.0) {
        Some(large) => Err(wrong(&tensor.name, format!("has the scale {large}, which no sound weight has"))),
        None => Ok(values),
    }
}

fn integers(tensor: &RawTensor) -> Result<Vec<i64>, ModelError> {
    let bytes = tensor.bytes.as_slice();
    match tensor.dtype.as_str() {
        "I64" => Ok(bytes.as_chunks::<8>().0.iter().map(|raw| i64::from_le_bytes(*raw)).collect()),
        "I32" => Ok(bytes.as_chunks::<4>().0.iter().map(|raw| i64::from(i32::from_le_bytes(*raw))).collect()),
        other => Err(wrong(&tensor.name, format!("has the dtype {other}; I32 or I64 is expected"))),
    }
}
