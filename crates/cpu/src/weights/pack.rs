//! Repacking of a matrix into panels of 16 rows, in which a vector lane is an output row.
//!
//! Quantised: for each panel and 32-block, bit-planes of `[16 rows × 4 k]` groups; the scales lie in a second stream.
//! Floats: for each panel and k, 16 values of the format, or for each two k 16 pairs (see `kernels::amx::bf16`). Rows past the end are zero.

use baton_backend::{BackendError, Tensor, WeightFormat};

use super::formats::{BLOCK, OpenBlock, PANEL_ROWS, Planes, QuantLayout, Scales};
use crate::memory::AlignedBytes;

/// Rows of one format, packed.
#[derive(Debug)]
pub struct PackedPart {
    pub format: WeightFormat,
    pub rows: usize,
    quants: AlignedBytes,
    scales: AlignedBytes,
    /// Bytes.
    pub quants_per_panel: usize,
    pub scales_per_panel: usize,
    in_pairs: bool,
}

impl PackedPart {
    /// Room for a tensor, untouched. The number of columns is whole blocks: `Tensor` has checked it.
    /// `in_pairs`: floats lie in pairs of k, an even number of them.
    pub fn new(tensor: &Tensor, in_pairs: bool) -> Result<Self, BackendError> {
        let (format, rows, cols) = (tensor.format(), tensor.rows(), tensor.cols());
        let too_large = || BackendError::Unsupported {
            what: format!("a weight of {rows} x {cols} values: it is too large"),
        };
        let num_panels = rows.div_ceil(PANEL_ROWS);
        let (quants_per_panel, scales_per_panel) = match QuantLayout::new(format) {
            None => (PANEL_ROWS.checked_mul(format.block_bytes()).and_then(|n| n.checked_mul(cols)), Some(0)),
            Some(layout) => (
                (cols / BLOCK).checked_mul(layout.planes.bytes()),
                (cols / BLOCK / layout.scales.blocks_per_header()).checked_mul(layout.scales.group_bytes()),
            ),
        };
        let quants_per_panel = quants_per_panel.ok_or_else(too_large)?;
        let scales_per_panel = scales_per_panel.ok_or_else(too_large)?;
        let what = "a weight";
        Ok(Self {
            format,
            rows,
            quants: AlignedBytes::zeroed(
                quants_per_panel.checked_mul(num_panels).ok_or_else(too_large)?,
                what,
            )?,
            scales: AlignedBytes::zeroed(
                scales_per_panel.checked_mul(num_panels).ok_or_else(too_large)?,
                what,
            )?,
            quants_per_panel,
            scales_per_panel,
            in_pairs,
        })
    }

    pub fn num_panels(&self) -> usize {
        self.rows.div_ceil(PANEL_ROWS)
    }

    /// The panel's quants (or floats).
    pub fn panel_quants(&self, panel: usize) -> *const u8 {
        debug_assert!(panel < self.num_panels());
        // SAFETY: within the allocation, which holds `num_panels` panels.
        unsafe { self.quants.as_mut_ptr().add(panel * self.quants_per_panel) }
    }

    /// The panel's scales.
    pub fn panel_scales(&self, panel: usize) -> *const u8 {
        debug_assert!(panel < self.num_panels());
        // SAFETY: within the allocation, which holds `num_panels` panels.
        unsafe { self.scales.as_mut_ptr().add(panel * self.scales_per_panel) }
    }

    pub fn bytes(&self) -> usize {
        self.quants.len() + self.scales.len()
    }

    /// Fills a panel from the tensor that the part was made for.
    ///
    /// # Safety
    /// Nobody else uses the panel.
    pub unsafe fn pack_panel(&self, tensor: &Tensor, panel: usize) {
        // SAFETY: the caller has the panel to itself, and the ranges of panels are disjoint.
        let (quants, scales) = unsafe {
            (
                std::slice::from_raw_parts_mut(self.panel_quants(panel).cast_mut(), self.quants_per_panel),
                std::slice::from_raw_parts_mut(self.panel_scales(panel).cast_mut(), self.scales_per_panel),
            )
        };
        let first = panel * PANEL_ROWS;
        let rows = PANEL_ROWS.min(self.rows - first);
        match QuantLayout::new(self.format) {
            None => {
                let size = self.format.block_bytes();
                for row in 0..rows {
                    for (k, value) in tensor.row(first + row).chunks_exact(size).enumerate() {
                        let at = if self.in_pairs {
                            (k / 2 * PANEL_ROWS + row) * 2 + k % 2
                        } else {
                            k * PANEL_ROWS + row
                        } * size;
                        quants[at..at + size].copy_from_slice(value);
                    }
                }
            }
            Some(layout) => {
                for row in 0..rows {
                    pack_row(layout, self.format, tensor.row(first + row), row, quants, scales);
                }
            }
        }
    }
}

/// Adds one row to a zeroed panel.
fn pack_row(
    layout: QuantLayout,
    format: WeightFormat,
    bytes: &[u8],
    row: usize,
    quants: &mut [u8],
    scales: &mut [u8],
) {
    let mut block = OpenBlock::default();
    let num_blocks = layout.scales.blocks_per_header();
    let group_bytes = layout.scales.group_bytes();
    for (header, bytes) in bytes.chunks_exact(format.block_bytes()).enumerate() {
        block.read(format, bytes);
        pack_scales(layout.scales, &block, row, &mut scales[header * group_bytes..][..group_bytes]);
        for i in 0..num_blocks {
            let at = (header * num_blocks + i) * layout.planes.bytes();
            let values = &block.quants[i * BLOCK..][..BLOCK];
            pack_planes(layout.planes, values, row, &mut quants[at..][..layout.planes.bytes()]);
        }
    }
}

fn pack_scales(kind: Scales, block: &OpenBlock, row: usize, scales: &mut [u8]) {
    scales[row * 2..row * 2 + 2].copy_from_slice(&block.d.to_le_bytes());
    if kind.header_bytes() == 64 {
        scales[32 + row * 2..34 + row * 2].copy_from_slice(&block.dmin.to_le_bytes());
    }
    for i in 0..kind.blocks_per_header() {
        let at = kind.header_bytes() + i * kind.sub_bytes() + row;
        match kind {
            Scales::Plain | Scales::WithMin => {}
            Scales::SubMin32 => (scales[at], scales[at + 16]) = (block.sub[i], block.sub_min[i]),
            Scales::SubSigned32 => scales[at] = block.sub[2 * i],
            Scales::SubSigned16 | Scales::SubNibble16 => {
                (scales[at], scales[at + 16]) = (block.sub[2 * i], block.sub[2 * i + 1]);
            }
        }
    }
}

/// Ors 32 values of one row into the zeroed planes of their block.
fn pack_planes(planes: Planes, values: &[u8], row: usize, out: &mut [u8]) {
    for (k, &value) in values.iter().enumerate() {
        let (group, at) = (k / 4, row * 4 + k % 4);
        let crumb = |value: u8| (value & 3) << (group % 4 * 2);
        let crumb_line = group / 4 * 64;
        let nibble = (value & 15) << (group / 4 * 4);
        let nibble_line = group % 4 * 64;
        match planes {
            Planes::Two => out[crumb_line + at] |= crumb(value),
            Planes::TwoOne => {
                out[crumb_line + at] |= crumb(value);
                out[128 + at] |= (value >> 2) << group;
            }
            Planes::Four => out[nibble_line + at] |= nibble,
            Planes::FourOne => {
                out[nibble_line + at] |= nibble;
                out[256 + at] |= (value >> 4) << group;
            }
            Planes::FourTwo => {
                out[nibble_line + at] |= nibble;
                out[256 + crumb_line + at] |= crumb(value >> 4);
            }
            Planes::Eight => out[group * 64 + at] = value,
        }
    }
}
