//! Weights as the kernels read them. A matrix is a list of parts, each of one format, cut into panels of 16 rows.
//!
//! Not here: any arithmetic (`kernels`). What embeddings need stays a [`Tensor`], whose rows are opened on lookup.

pub mod formats;
mod pack;

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use baton_backend::{BackendError, Precision, SharedBytes, Tensor, TensorError, WeightFormat, WeightUse};

use crate::pool::{Pool, Worker};
use crate::units::{GroupUnits, Groups, Units};
pub use pack::PackedPart;

/// Sixteen rows (or fewer, at the end of a part) of a weight.
#[derive(Clone, Copy, Debug)]
pub struct Panel {
    pub part: u32,
    /// Which panel of the part.
    pub index: u32,
    /// First row in the whole matrix.
    pub row: u32,
    pub num_rows: u32,
}

/// The panels of one group of workers: `num_ranges` ranges, each `period` after the one before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PanelShare {
    pub first: Range<usize>,
    pub period: usize,
    pub num_ranges: usize,
}

/// What the kernels want beside the plain forms.
#[derive(Clone, Copy, Debug, Default)]
pub struct Forms {
    /// bf16 weights in pairs, with rows split in two bf16.
    pub splits: bool,
    /// Rows in super-blocks with k-quants.
    pub supers: bool,
}

/// A matrix that `linear` and its kin can multiply with.
#[derive(Debug)]
pub struct PackedMatrix {
    pub parts: Vec<PackedPart>,
    /// In the order of rows. Where the number of rows is even, the panels of the second half lie in it exactly as
    /// those of the first half do, so that gate and up rows pair.
    pub panels: Vec<Panel>,
    /// Which column of the input each packed column is multiplied with; `None`: they are in order. Of quantised parts only.
    pub columns: Option<Arc<[u32]>>,
    /// The number of rows is even.
    has_halves: bool,
    pub has_floats: bool,
    /// Quantised parts whose rows are quantised in blocks of 32.
    pub has_quants: bool,
    /// Those whose rows are quantised in super-blocks.
    pub has_supers: bool,
    /// Of bf16, packed to be multiplied with rows that were split in two bf16. One answer for the whole matrix: its
    /// rows are made ready once.
    pub is_split: bool,
}

/// One loaded weight.
#[derive(Debug)]
pub struct Weight {
    pub rows: usize,
    pub cols: usize,
    pub packed: Option<PackedMatrix>,
    /// One matrix each, where the weight is of experts.
    pub experts: Vec<PackedMatrix>,
    /// Kept for lookups, with the first row of each.
    pub tensors: Vec<(usize, Tensor)>,
}

impl Weight {
    pub fn load(
        parts: &[Tensor],
        usage: WeightUse,
        forms: Forms,
        precision: Precision,
        pool: &Pool,
    ) -> Result<Self, BackendError> {
        let unsupported = |what: &str| BackendError::Unsupported { what: what.to_owned() };
        let cols = parts.first().ok_or_else(|| unsupported("a weight without parts"))?.cols();
        if parts.iter().any(|part| part.cols() != cols) {
            return Err(unsupported("a weight whose parts have different numbers of columns"));
        }
        let mut rows = 0usize;
        let mut tensors = Vec::with_capacity(parts.len());
        let columns =
            common_columns(parts).filter(|_| precision == Precision::Fast && usage == WeightUse::Linear);
        for part in parts {
            tensors.push((rows, usable(part, usage, precision, columns.is_some(), pool)?));
            rows =
                rows.checked_add(part.rows()).ok_or_else(|| unsupported("a weight with that many rows"))?;
        }
        if rows == 0 || cols == 0 || u32::try_from(rows).is_err() {
            return Err(unsupported("an empty weight, or one with more than 2^32 rows"));
        }
        let pack = |tensors: &[(usize, Tensor)], rows: usize| {
            let unpacked = match precision {
                Precision::Fast => None,
                Precision::Full => Some(to_f32(tensors)?),
            };
            let matrix = PackedMatrix::new(unpacked.as_deref().unwrap_or(tensors), rows, forms, pool)?;
            Ok::<_, BackendError>(PackedMatrix { columns: columns.clone(), ..matrix })
        };
        let (mut packed, mut experts) = (None, Vec::new());
        match usage {
            WeightUse::Embedding => {}
            WeightUse::Linear | WeightUse::EmbeddingAndLinear => packed = Some(pack(&tensors, rows)?),
            WeightUse::Experts(count) => {
                if count == 0 || !rows.is_multiple_of(count) {
                    return Err(unsupported(&format!("{count} experts in {rows} rows")));
                }
                let size = rows / count;
                for expert in 0..count {
                    experts.push(pack(&rows_of(&tensors, expert * size..(expert + 1) * size), size)?);
                }
            }
        }
        if matches!(usage, WeightUse::Linear | WeightUse::Experts(_)) {
            tensors.clear();
        }
        Ok(Self { rows, cols, packed, experts, tensors })
    }

    pub fn bytes(&self) -> u64 {
        let matrices = self.packed.iter().chain(&self.experts);
        let packed: usize = matrices.flat_map(|matrix| &matrix.parts).map(PackedPart::bytes).sum();
        let kept: usize = self.tensors.iter().map(|(_, tensor)| tensor.bytes().len()).sum();
        (if packed > 0 { packed } else { kept }) as u64
    }

    /// The tensor that holds `row`, and the row's place in it.
    pub fn tensor_of(&self, row: usize) -> Option<(&Tensor, usize)> {
        let (first, tensor) = self.tensors.iter().rev().find(|(first, _)| *first <= row)?;
        (row - first < tensor.rows()).then_some((tensor, row - first))
    }
}

/// The order of columns that all parts have, if they have one.
fn common_columns(parts: &[Tensor]) -> Option<Arc<[u32]>> {
    let first = parts.first()?.columns()?;
    parts.iter().all(|part| part.columns() == Some(first)).then(|| Arc::clone(first))
}

/// A tensor that there are kernels for. Eight-bit floats become Q8_0, which is as large and uses integer products; where rows
/// are no whole blocks, bf16. Columns out of order are put in order, unless all parts of the weight have them so.
fn usable(
    tensor: &Tensor,
    usage: WeightUse,
    precision: Precision,
    keeps_columns: bool,
    pool: &Pool,
) -> Result<Tensor, BackendError> {
    let failed = |error: TensorError| BackendError::Unsupported { what: error.to_string() };
    if precision == Precision::Full
        && (tensor.columns().is_some() || tensor.format() == WeightFormat::F8_E4M3)
    {
        return tensor.to_f32().map_err(failed);
    }
    if tensor.columns().is_some() && !keeps_columns {
        return tensor.to_f16().map_err(failed);
    }
    if tensor.format() != WeightFormat::F8_E4M3 {
        return Ok(tensor.clone());
    }
    if !tensor.cols().is_multiple_of(formats::BLOCK) || usage == WeightUse::Embedding {
        return tensor.to_bf16().map_err(failed);
    }
    let format = WeightFormat::Q8_0;
    let row_bytes = format.row_bytes(tensor.cols()).expect("whole blocks");
    let rows: Vec<Mutex<Vec<u8>>> = (0..tensor.rows()).map(|_| Mutex::default()).collect();
    let units = Units::new(tensor.rows());
    pool.run(&|_| {
        let mut values = vec![0.0; tensor.cols()];
        while let Some(row) = units.take() {
            tensor.dequantize_row(row, &mut values);
            let bytes = baton_backend::quant::quantize_row(format, &values);
            *rows[row].lock().unwrap_or_else(PoisonError::into_inner) = bytes;
        }
    });
    let mut bytes = Vec::with_capacity(row_bytes * tensor.rows());
    for row in rows {
        bytes.extend(row.into_inner().unwrap_or_else(PoisonError::into_inner));
    }
    Tensor::new(format, tensor.rows(), tensor.cols(), SharedBytes::from_vec(bytes)).map_err(failed)
}

/// A range of rows of tensors that stand one below the other, counted from its own first row.
fn rows_of(tensors: &[(usize, Tensor)], rows: Range<usize>) -> Vec<(usize, Tensor)> {
    let part = |(first, tensor): &(usize, Tensor)| {
        let start = rows.start.max(*first);
        let end = rows.end.min(first + tensor.rows());
        let slice = (start < end).then(|| tensor.slice_rows(start - first..end - first))?;
        Some((start - rows.start, slice.expect("the range lies within the tensor")))
    };
    tensors.iter().filter_map(part).collect()
}

/// Bytes that `bytes` of a file take once they are packed, but for rows that fill a panel up.
pub fn loaded_bytes(format: WeightFormat, bytes: u64) -> u64 {
    if format == WeightFormat::F8_E4M3 {
        return loaded_bytes(WeightFormat::Q8_0, bytes / 32 * WeightFormat::Q8_0.block_bytes() as u64);
    }
    let Some(layout) = formats::QuantLayout::new(format) else { return bytes };
    let blocks = format.block_len() / formats::BLOCK;
    let scales = layout.scales.group_bytes() * blocks / layout.scales.blocks_per_header();
    let packed = (layout.planes.bytes() * blocks + scales) / formats::PANEL_ROWS;
    (bytes / format.block_bytes() as u64).saturating_mul(packed as u64)
}

/// The same rows, unrounded.
fn to_f32(tensors: &[(usize, Tensor)]) -> Result<Vec<(usize, Tensor)>, BackendError> {
    let convert = |(first, tensor): &(usize, Tensor)| {
        let failed = |error: TensorError| BackendError::Unsupported { what: error.to_string() };
        Ok((*first, tensor.to_f32().map_err(failed)?))
    };
    tensors.iter().map(convert).collect()
}

impl PackedMatrix {
    fn new(
        tensors: &[(usize, Tensor)],
        rows: usize,
        forms: Forms,
        pool: &Pool,
    ) -> Result<Self, BackendError> {
        let is_fit = |tensor: &Tensor| {
            tensor.format() == WeightFormat::BF16 && tensor.cols().is_multiple_of(formats::SPLIT_COLS)
        };
        let mut matrix = Self {
            parts: Vec::new(),
            panels: Vec::new(),
            columns: None,
            has_halves: rows.is_multiple_of(2),
            has_floats: false,
            has_quants: false,
            has_supers: false,
            is_split: forms.splits && tensors.iter().all(|(_, tensor)| is_fit(tensor)),
        };
        let mut slices = Vec::new();
        let cuts = cuts(tensors, rows);
        for (first, tensor) in tensors {
            let inner = cuts.iter().copied().filter(|cut| (*first..first + tensor.rows()).contains(cut));
            let mut starts: Vec<usize> = inner.collect();
            starts.push(first + tensor.rows());
            for pair in starts.windows(2) {
                let slice =
                    tensor.slice_rows(pair[0] - first..pair[1] - first).expect("cuts lie within the tensor");
                matrix.push(&slice, pair[0], forms)?;
                slices.push(slice);
            }
        }
        matrix.for_each_panel(pool, |_, panel| {
            let Panel { part, index, .. } = matrix.panels[panel];
            // SAFETY: the panels are different ones.
            unsafe { matrix.parts[part as usize].pack_panel(&slices[part as usize], index as usize) };
        });
        Ok(matrix)
    }

    /// Panels before those that pair with the first ones.
    fn period(&self) -> usize {
        if self.has_halves { self.panels.len() / 2 } else { self.panels.len() }
    }

    /// The panels of a group among the first `num_panels`, as a first range and the distance to a next one of the same
    /// length, if there is one. Panels that pair have the same group, so a group's panels are the same whether all
    /// are walked over or pairs.
    pub fn share(&self, groups: &Groups, group: usize, num_panels: usize) -> PanelShare {
        let period = if groups.num_groups() == 1 { num_panels } else { self.period().min(num_panels) };
        PanelShare { first: groups.share(group, period), period, num_ranges: num_panels / period.max(1) }
    }

    /// Runs `work` once for each panel, on a worker of the group that [`Self::share`] gives it to.
    fn for_each_panel(&self, pool: &Pool, work: impl Fn(&Worker<'_>, usize) + Sync) {
        let share = |group| self.share(pool.groups(), group, self.panels.len());
        let units = GroupUnits::new(pool.groups(), |group| share(group).first.len());
        pool.run(&|worker| {
            let share = share(worker.group);
            while let Some(unit) = units.take_own(worker) {
                for range in 0..share.num_ranges {
                    work(worker, range * share.period + share.first.start + unit);
                }
            }
        });
    }

    /// The group whose worker packs each panel.
    #[cfg(test)]
    pub fn groups_of_panels(&self, pool: &Pool) -> Vec<usize> {
        use std::sync::atomic::{AtomicUsize, Ordering};
        let groups: Vec<AtomicUsize> = self.panels.iter().map(|_| AtomicUsize::new(usize::MAX)).collect();
        self.for_each_panel(pool, |worker, panel| {
            assert_eq!(
                groups[panel].swap(worker.group, Ordering::Relaxed),
                usize::MAX,
                "panel {panel} is packed twice"
            );
        });
        groups.into_iter().map(AtomicUsize::into_inner).collect()
    }

    fn push(&mut self, tensor: &Tensor, row: usize, forms: Forms) -> Result<(), BackendError> {
        let part = PackedPart::new(tensor, self.is_split)?;
        for index in 0..part.num_panels() {
            let first = index * formats::PANEL_ROWS;
            self.panels.push(Panel {
                part: self.parts.len() as u32,
                index: index as u32,
                row: (row + first) as u32,
                num_rows: formats::PANEL_ROWS.min(part.rows - first) as u32,
            });
        }
        if tensor.format().is_float() {
            self.has_floats = true;
        } else if forms.supers && formats::adds_up_in_supers(tensor.format()) {
            self.has_supers = true;
        } else {
            self.has_quants = true;
        }
        self.parts.push(part);
        Ok(())
    }
}

/// Where parts begin: at each tensor, at half of an even number of rows, and at the same places in the other half.
fn cuts(tensors: &[(usize, Tensor)], rows: usize) -> Vec<usize> {
    let mut cuts: Vec<usize> = tensors.iter().map(|(first, _)| *first).collect();
    if rows.is_multiple_of(2) {
        let half = rows / 2;
        cuts.push(half);
        for i in 0..cuts.len() {
            cuts.push((cuts[i] + half) % rows);
        }
    }
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(rows: usize) -> Tensor {
        Tensor::from_f32(rows, 2, &vec![1.0; rows * 2]).expect("shape")
    }

    #[test]
    fn halves_pair() {
        let pool = Pool::new(2, false).expect("threads");
        for parts in [vec![floats(34)], vec![floats(5), floats(12), floats(17)], vec![floats(40), floats(2)]]
        {
            let rows: usize = parts.iter().map(Tensor::rows).sum();
            let weight = Weight::load(&parts, WeightUse::Linear, Forms::default(), Precision::Fast, &pool)
                .expect("loads");
            let panels = weight.packed.expect("packed").panels;
            let (gate, up) = panels.split_at(panels.len() / 2);
            for (gate, up) in gate.iter().zip(up) {
                assert_eq!((gate.row + rows as u32 / 2, gate.num_rows), (up.row, up.num_rows));
            }
            assert_eq!(panels.iter().map(|panel| panel.num_rows as usize).sum::<usize>(), rows);
        }
    }

    #[test]
    fn wrong_parts_are_refused() {
        let pool = Pool::new(1, false).expect("threads");
        let other = Tensor::from_f32(1, 3, &[0.0; 3]).expect("shape");
        assert!(
            Weight::load(&[floats(2), other], WeightUse::Linear, Forms::default(), Precision::Fast, &pool)
                .is_err()
        );
        assert!(Weight::load(&[], WeightUse::Linear, Forms::default(), Precision::Fast, &pool).is_err());
        assert!(
            Weight::load(&[floats(0)], WeightUse::Linear, Forms::default(), Precision::Fast, &pool).is_err()
        );
    }

    #[test]
    fn the_size_in_memory_is_known_before() {
        let pool = Pool::new(1, false).expect("threads");
        for format in WeightFormat::ALL {
            let values = vec![0.5; 32 * 512];
            let bytes = baton_backend::quant::quantize_row(format, &values);
            let (size, shared) = (bytes.len() as u64, baton_backend::SharedBytes::from_vec(bytes));
            let tensor = Tensor::new(format, 32, 512, shared).expect("shape");
            let weight = Weight::load(&[tensor], WeightUse::Linear, Forms::default(), Precision::Fast, &pool)
                .expect("loads");
            assert_eq!(loaded_bytes(format, size), weight.bytes(), "{format}");
        }
        // Near what the file has: three bits for a sign and three levels, without the grid.
        assert_eq!(loaded_bytes(WeightFormat::IQ2_XXS, 66), 106);
        assert_eq!(loaded_bytes(WeightFormat::IQ1_S, 50), 84);
    }

    #[test]
    fn rows_of_embeddings_are_found() {
        let pool = Pool::new(1, false).expect("threads");
        let weight = Weight::load(
            &[floats(3), floats(4)],
            WeightUse::Embedding,
            Forms::default(),
            Precision::Fast,
            &pool,
        )
        .expect("loads");
        assert_eq!(weight.tensor_of(2).map(|(_, row)| row), Some(2));
        assert_eq!(weight.tensor_of(5).map(|(_, row)| row), Some(2));
        assert!(weight.tensor_of(7).is_none());
        assert!(weight.packed.is_none());
    }
}
