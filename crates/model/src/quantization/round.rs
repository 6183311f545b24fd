//! `--quantization`: weights in floats are rounded while they are loaded, so that an unquantised checkpoint runs small.
//!
//! `fp8` rounds linear layers to e4m3 with a scale per row, and leaves embeddings and the head, as vLLM's flag does. `q8` and `q4`
//! round everything: linear layers to Q8_0 or Q4_K (Q4_1 where rows are not whole blocks of 256), embeddings and head to Q8_0.
//! What is quantised already, vectors, routers of experts, and rows that are not whole blocks stay as they are; with `fp8` experts do
//! too.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use baton_backend::quant::quantize_row;
use baton_backend::{Scales, SharedBytes, Tensor, WeightFormat, e4m3_from_f32};

use crate::tensor_names::{ExpectedTensor, Role, expected_tensors, is_transposed};
use crate::{KvScales, ModelConfig, ModelError, WeightSource};

/// The largest e4m3.
const LARGEST_E4M3: f32 = 448.0;

/// What weights are rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundTo {
    Fp8,
    Q8,
    Q4,
}

impl FromStr for RoundTo {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "fp8" => Ok(Self::Fp8),
            "q8" => Ok(Self::Q8),
            "q4" => Ok(Self::Q4),
            _ => Err("use fp8, q8 or q4".to_owned()),
        }
    }
}

impl fmt::Display for RoundTo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fp8 => "fp8",
            Self::Q8 => "q8",
            Self::Q4 => "q4",
        })
    }
}

impl RoundTo {
    /// What a matrix of so many columns becomes; `None`: it stays.
    pub(crate) fn format(self, role: Role, cols: usize) -> Option<WeightFormat> {
        let is_table = role.is_table();
        let is_small = is_table && !matches!(role, Role::TokenEmbedding | Role::Output);
        let format = match self {
            _ if role.is_norm() || is_small => return None,
            Self::Fp8 if is_table || role == Role::Expert => return None,
            Self::Fp8 => WeightFormat::F8_E4M3,
            Self::Q8 => WeightFormat::Q8_0,
            Self::Q4 if is_table => WeightFormat::Q8_0,
            Self::Q4 if cols.is_multiple_of(256) => WeightFormat::Q4_K,
            Self::Q4 => WeightFormat::Q4_1,
        };
        cols.is_multiple_of(format.block_len()).then_some(format)
    }
}

/// The weights of another source, rounded as they are asked for.
#[derive(Debug)]
pub struct RoundedWeights {
    source: Arc<dyn WeightSource>,
    formats: HashMap<String, WeightFormat>,
}

impl RoundedWeights {
    pub fn new(source: Arc<dyn WeightSource>, config: &ModelConfig, to: RoundTo) -> Self {
        let formats =
            expected_tensors(config).into_iter().filter(|tensor| !tensor.is_bias).filter_map(|tensor| {
                // Stored as [in, out], they would be cut into blocks the wrong way. Routers are small and choose.
                let format = if is_transposed(config, tensor.role) || is_router(&tensor) {
                    None
                } else {
                    to.format(tensor.role, tensor.cols)
                };
                Some((tensor.name, format?))
            });
        Self { formats: formats.collect(), source }
    }
}

fn is_router(tensor: &ExpectedTensor) -> bool {
    let ends = ["gate.weight", "router.layer.weight", "router.weight", "_inp.weight", "_inp_shexp.weight"];
    tensor.role == Role::Expert && ends.iter().any(|end| tensor.name.ends_with(end))
}

impl WeightSource for RoundedWeights {
    fn tensor(&self, name: &str) -> Result<Option<Tensor>, ModelError> {
        let Some(tensor) = self.source.tensor(name)? else { return Ok(None) };
        let Some(&format) = self.formats.get(name).filter(|_| tensor.format().is_float()) else {
            return Ok(Some(tensor));
        };
        round_tensor(&tensor, format)
            .map(Some)
            .map_err(|cause| ModelError::Config { what: format!("tensor {name:?}: {cause}") })
    }

    fn names(&self) -> Vec<String> {
        self.source.names()
    }

    fn total_bytes(&self) -> u64 {
        self.source.total_bytes()
    }

    fn kv_scales(&self, key_weight: &str) -> Result<Option<KvScales>, ModelError> {
        self.source.kv_scales(key_weight)
    }

    fn formats(&self) -> Result<Vec<WeightFormat>, ModelError> {
        let mut formats = self.source.formats()?;
        for format in self.formats.values() {
            if !formats.contains(format) {
                formats.push(*format);
            }
        }
        Ok(formats)
    }
}

/// A matrix of floats in another format. Values that are not finite are an error.
pub(crate) fn round_tensor(tensor: &Tensor, format: WeightFormat) -> Result<Tensor, String> {
    let (rows, cols) = (tensor.rows(), tensor.cols());
    let made = |error: baton_backend::TensorError| error.to_string();
    if let Some(fill) = tensor.random_fill() {
        return Tensor::random(format, rows, cols, fill).map_err(made);
    }
    let row_bytes =
        format.row_bytes(cols).ok_or_else(|| format!("rows of {cols} are no whole blocks of {format}"))?;
    let total = row_bytes.checked_mul(rows).ok_or("it is too large")?;
    let mut bytes = vec![0; total];
    let is_fp8 = format == WeightFormat::F8_E4M3;
    let not_finite = AtomicUsize::new(usize::MAX);
    let scales: Vec<AtomicU32> = (0..if is_fp8 { rows } else { 0 }).map(|_| AtomicU32::new(0)).collect();
    in_parallel(&mut bytes, row_bytes.max(1), |row, out| {
        let mut values = vec![0.0_f32; cols];
        tensor.dequantize_row(row, &mut values);
        let largest = values.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        if !values.iter().all(|value| value.is_finite()) {
            not_finite.fetch_min(row, Ordering::Relaxed);
            return;
        }
        if is_fp8 {
            let scale = if largest > 0.0 { largest / LARGEST_E4M3 } else { 1.0 };
            let inverse = scale.recip();
            out.iter_mut().zip(&values).for_each(|(out, value)| *out = e4m3_from_f32(value * inverse));
            scales[row].store(scale.to_bits(), Ordering::Relaxed);
        } else {
            out.copy_from_slice(&quantize_row(format, &values));
        }
    });
    match not_finite.into_inner() {
        usize::MAX => {}
        row => return Err(format!("row {row} has values that are not finite")),
    }
    let rounded = Tensor::new(format, rows, cols, SharedBytes::from_vec(bytes)).map_err(made)?;
    if !is_fp8 {
        return Ok(rounded);
    }
    let scales = scales.into_iter().map(|bits| f32::from_bits(bits.into_inner())).collect();
    rounded.with_scales(Scales::of_rows(scales)).map_err(made)
}

/// Gives pieces of `out` (the last may be shorter) with their numbers to all threads of the machine.
pub(crate) fn in_parallel(out: &mut [u8], piece: usize, work: impl Fn(usize, &mut [u8]) + Sync) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let num_pieces = out.len().div_ceil(piece.max(1));
    // A run of pieces for each thread; some runs more than threads, so that none waits long.
    let run = num_pieces.div_ceil(threads * 4).max(1);
    let runs: Vec<Mutex<Option<&mut [u8]>>> =
        out.chunks_mut(run * piece.max(1)).map(|run| Mutex::new(Some(run))).collect();
    let next = AtomicUsize::new(0);
    let worker = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(slot) = runs.get(index) else { return };
            let taken = slot.lock().ok().and_then(|mut slot| slot.take());
            for (i, piece) in taken.into_iter().flat_map(|taken| taken.chunks_mut(piece.max(1))).enumerate() {
                work(index * run + i, piece);
            }
        }
    };
    if runs.len() <= 1 || threads == 1 {
        return worker();
    }
    std::thread::scope(|scope| {
        for _ in 0..threads.min(runs.len()) {
            scope.spawn(worker);
        }
    });
}
