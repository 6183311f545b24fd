//! The block formats as the kernels see them: bit-planes, kinds of scales, offsets; and how a block of a file is taken
//! apart into unsigned quants and scales.
//!
//! Every format is `value = scale · (q − offset) + min` with an unsigned `q`. Nothing is rounded here: the packed
//! weight holds the same numbers as the file.

use baton_backend::WeightFormat;
use baton_backend::quant::{self, GridBlock};

/// Rows of a panel: one lane of a 16-wide vector each.
pub const PANEL_ROWS: usize = 16;
/// Values along k that share one activation scale.
pub const BLOCK: usize = 32;
/// Where rows are split (`kernels::amx::bf16`): values along k of a group, and tokens of a tile.
pub const SPLIT_COLS: usize = 32;
pub const SPLIT_TOKENS: usize = 16;
/// The most values one block of a file can have.
pub const SUPER_BLOCK: usize = 256;

/// Formats whose scales within a super-block are integers of few enough bits that a super-block can be added up in integers:
/// see `kernels::supers`.
pub const fn adds_up_in_supers(format: WeightFormat) -> bool {
    matches!(format, WeightFormat::Q4_K | WeightFormat::Q5_K | WeightFormat::Q6_K)
}

/// How the quants of a `16 rows × 32 k` block lie in bit-planes. A plane's byte `row * 4 + i` holds values of eight
/// groups `g`, value `i` of group `g` being `k = 4 g + i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planes {
    /// Two bits: two lines; group `g` is in bits `2 (g % 4)` of line `g / 4`.
    Two,
    /// Two bits, and a third one in a line of its own (bit `g`).
    TwoOne,
    /// Nibbles: four lines; group `g` is in the low (`g < 4`) or high nibble of line `g % 4`.
    Four,
    /// Nibbles, and a fifth bit in a line of its own (bit `g`).
    FourOne,
    /// Nibbles, and two more bits in two lines as in `Two`.
    FourTwo,
    /// Whole bytes: eight lines.
    Eight,
}

impl Planes {
    /// Bytes of a block of 16 rows.
    pub const fn bytes(self) -> usize {
        64 * match self {
            Self::Two => 2,
            Self::TwoOne => 3,
            Self::Four => 4,
            Self::FourOne => 5,
            Self::FourTwo => 6,
            Self::Eight => 8,
        }
    }
}

/// How the scales of 16 rows lie. All arrays have 16 entries, one per row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// A block of 32: `d` (f16).
    Plain,
    /// A block of 32: `d`, `min` (f16).
    WithMin,
    /// A super-block of 256: `d`, `dmin` (f16), then for each 32 values `scale`, `min` (u8).
    SubMin32,
    /// A super-block of 256: `d` (f16), then for each 32 values one `scale` (i8).
    SubSigned32,
    /// A super-block of 256: `d` (f16), then for each 32 values two `scale` (i8), one for each 16.
    SubSigned16,
    /// A super-block of 256: `d`, `dmin` (f16), then for each 32 values two bytes: scale low, min high nibble.
    SubNibble16,
}

impl Scales {
    /// 32-blocks that share a header.
    pub const fn blocks_per_header(self) -> usize {
        match self {
            Self::Plain | Self::WithMin => 1,
            Self::SubMin32 | Self::SubSigned32 | Self::SubSigned16 | Self::SubNibble16 => 8,
        }
    }

    /// Bytes of the f16 part.
    pub const fn header_bytes(self) -> usize {
        match self {
            Self::Plain | Self::SubSigned32 | Self::SubSigned16 => 32,
            Self::WithMin | Self::SubMin32 | Self::SubNibble16 => 64,
        }
    }

    /// Bytes of the small scales of a 32-block.
    pub const fn sub_bytes(self) -> usize {
        match self {
            Self::Plain | Self::WithMin => 0,
            Self::SubSigned32 => 16,
            Self::SubMin32 | Self::SubSigned16 | Self::SubNibble16 => 32,
        }
    }

    /// Bytes of a header with all its blocks.
    pub const fn group_bytes(self) -> usize {
        self.header_bytes() + self.sub_bytes() * self.blocks_per_header()
    }
}

/// A quantised format at compile time.
pub trait Quant: 'static {
    const PLANES: Planes;
    const SCALES: Scales;
    /// The offset is two to this power; `None` where the format has mins instead.
    const OFFSET_SHIFT: Option<u32>;
    /// What packed quants stand for, where they do not stand for themselves.
    const LOOKUP: Option<&'static [u8; 16]>;
    /// Significant bits of an unpacked value.
    const BITS: u32;
    /// What `d` and `dmin` are multiplied with: a power of two, so that nothing is rounded.
    const FACTOR: f32;
}

macro_rules! quant {
    ($name:ident, $planes:ident, $scales:ident, $offset:expr, $bits:expr) => {
        quant!($name, $planes, $scales, $offset, $bits, None, 1.0);
    };
    ($name:ident, $planes:ident, $scales:ident, $offset:expr, $bits:expr, $lookup:expr, $factor:expr) => {
        #[allow(non_camel_case_types)]
        #[derive(Debug)]
        pub struct $name;
        impl Quant for $name {
            const PLANES: Planes = Planes::$planes;
            const SCALES: Scales = Scales::$scales;
            const OFFSET_SHIFT: Option<u32> = $offset;
            const LOOKUP: Option<&'static [u8; 16]> = $lookup;
            const BITS: u32 = $bits;
            const FACTOR: f32 = $factor;
        }
    };
}

quant!(Q4_0, Four, Plain, Some(3), 4);
quant!(Q4_1, Four, WithMin, None, 4);
quant!(Q5_0, FourOne, Plain, Some(4), 5);
quant!(Q5_1, FourOne, WithMin, None, 5);
quant!(Q8_0, Eight, Plain, Some(7), 8);
quant!(Q2K, Two, SubNibble16, None, 2);
quant!(Q3K, TwoOne, SubSigned16, Some(2), 3);
quant!(Q4K, Four, SubMin32, None, 4);
quant!(Q5K, FourOne, SubMin32, None, 5);
quant!(Q6K, FourTwo, SubSigned16, Some(5), 6);
quant!(Iq4Nl, Four, Plain, Some(7), 8, Some(&IQ4_VALUES), 1.0);
// The grids have few levels, so that a value takes no more than a sign and two or three bits, and no grid need be kept.
quant!(Iq4Xs, Four, SubSigned32, Some(7), 8, Some(&IQ4_VALUES), factor(WeightFormat::IQ4_XS));
quant!(Iq3S, Four, SubSigned32, Some(4), 5, Some(&IQ3_S_VALUES), factor(WeightFormat::IQ3_S));
quant!(Iq3Xxs, Four, SubSigned32, Some(6), 7, Some(&IQ3_XXS_VALUES), factor(WeightFormat::IQ3_XXS));
quant!(Iq2S, TwoOne, SubSigned16, Some(6), 7, Some(&IQ2_VALUES), factor(WeightFormat::IQ2_S));
quant!(Iq2Xs, TwoOne, SubSigned16, Some(6), 7, Some(&IQ2_VALUES), factor(WeightFormat::IQ2_XS));
quant!(Iq2Xxs, TwoOne, SubSigned32, Some(6), 7, Some(&IQ2_VALUES), factor(WeightFormat::IQ2_XXS));
quant!(Iq1M, TwoOne, SubSigned16, Some(4), 5, Some(&IQ1_VALUES), factor(WeightFormat::IQ1_M));
// One shift for 32 values: it goes into the min, and three levels are left.
quant!(Iq1S, Two, SubMin32, None, 2, None, factor(WeightFormat::IQ1_S));

const fn factor(format: WeightFormat) -> f32 {
    quant::grid_factor(format).expect("a format of a grid")
}

/// The levels of formats with tables, plus the offset so that they are unsigned.
const IQ4_VALUES: [u8; 16] = values(&quant::IQ4_NL_VALUES, 128);
const IQ3_S_VALUES: [u8; 16] = values(&[-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15], 16);
const IQ3_XXS_VALUES: [u8; 16] =
    values(&[-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62], 64);
const IQ2_VALUES: [u8; 16] = values(&[-43, -25, -8, 8, 25, 43], 64);
const IQ1_VALUES: [u8; 16] = values(&[-9, -7, -1, 1, 7, 9], 16);

const fn values(levels: &[i8], offset: i16) -> [u8; 16] {
    let mut unsigned = [offset as u8; 16];
    let mut i = 0;
    while i < levels.len() {
        unsigned[i] = (levels[i] as i16 + offset) as u8;
        i += 1;
    }
    unsigned
}

/// How a quantised format is packed, as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantLayout {
    pub planes: Planes,
    pub scales: Scales,
    lookup: Option<&'static [u8; 16]>,
    offset: i16,
}

impl QuantLayout {
    fn of<Q: Quant>() -> Self {
        let offset = Q::OFFSET_SHIFT.map_or(0, |shift| 1 << shift);
        Self { planes: Q::PLANES, scales: Q::SCALES, lookup: Q::LOOKUP, offset }
    }

    /// `None` for the float formats.
    pub fn new(format: WeightFormat) -> Option<Self> {
        Some(match format {
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 | WeightFormat::F8_E4M3 => {
                return None;
            }
            WeightFormat::Q4_0 => Self::of::<Q4_0>(),
            WeightFormat::Q4_1 => Self::of::<Q4_1>(),
            WeightFormat::Q5_0 => Self::of::<Q5_0>(),
            WeightFormat::Q5_1 => Self::of::<Q5_1>(),
            WeightFormat::Q8_0 => Self::of::<Q8_0>(),
            WeightFormat::Q2_K => Self::of::<Q2K>(),
            WeightFormat::Q3_K => Self::of::<Q3K>(),
            WeightFormat::Q4_K => Self::of::<Q4K>(),
            WeightFormat::Q5_K => Self::of::<Q5K>(),
            WeightFormat::Q6_K => Self::of::<Q6K>(),
            WeightFormat::IQ4_NL => Self::of::<Iq4Nl>(),
            WeightFormat::IQ4_XS => Self::of::<Iq4Xs>(),
            WeightFormat::IQ3_S => Self::of::<Iq3S>(),
            WeightFormat::IQ3_XXS => Self::of::<Iq3Xxs>(),
            WeightFormat::IQ2_S => Self::of::<Iq2S>(),
            WeightFormat::IQ2_XS => Self::of::<Iq2Xs>(),
            WeightFormat::IQ2_XXS => Self::of::<Iq2Xxs>(),
            WeightFormat::IQ1_M => Self::of::<Iq1M>(),
            WeightFormat::IQ1_S => Self::of::<Iq1S>(),
        })
    }
}

/// A block of a file, taken apart.
#[derive(Clone, Debug)]
pub struct OpenBlock {
    /// Unsigned quants in the order of k; 32 or 256 are used.
    pub quants: [u8; SUPER_BLOCK],
    /// Bits of f16.
    pub d: u16,
    pub dmin: u16,
    /// The small scales as they are packed: see [`Scales`].
    pub sub: [u8; 16],
    pub sub_min: [u8; 8],
    grid: GridBlock,
}

impl Default for OpenBlock {
    fn default() -> Self {
        Self {
            quants: [0; SUPER_BLOCK],
            d: 0,
            dmin: 0,
            sub: [0; 16],
            sub_min: [0; 8],
            grid: GridBlock::default(),
        }
    }
}

impl OpenBlock {
    /// Takes a block apart. `bytes` is one whole block of a quantised `format`.
    pub fn read(&mut self, format: WeightFormat, bytes: &[u8]) {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        match format {
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 | WeightFormat::F8_E4M3 => {}
            WeightFormat::Q4_0 | WeightFormat::IQ4_NL => {
                self.d = half(0);
                self.nibbles(&bytes[2..18]);
            }
            WeightFormat::Q4_1 => {
                (self.d, self.dmin) = (half(0), half(2));
                self.nibbles(&bytes[4..20]);
            }
            WeightFormat::Q5_0 => {
                self.d = half(0);
                self.nibbles(&bytes[6..22]);
                self.fifth_bits(&bytes[2..6]);
            }
            WeightFormat::Q5_1 => {
                (self.d, self.dmin) = (half(0), half(2));
                self.nibbles(&bytes[8..24]);
                self.fifth_bits(&bytes[4..8]);
            }
            WeightFormat::Q8_0 => {
                self.d = half(0);
                for (quant, &byte) in self.quants.iter_mut().zip(&bytes[2..34]) {
                    *quant = byte ^ 0x80;
                }
            }
            WeightFormat::Q2_K => {
                self.sub.copy_from_slice(&bytes[..16]);
                self.crumbs(&bytes[16..80]);
                (self.d, self.dmin) = (half(80), half(82));
            }
            WeightFormat::Q3_K => {
                self.crumbs(&bytes[32..96]);
                for (k, quant) in self.quants.iter_mut().enumerate() {
                    *quant |= ((bytes[k % 32] >> (k / 32)) & 1) << 2;
                }
                self.six_bit_signed(&bytes[96..108]);
                self.d = half(108);
            }
            WeightFormat::Q4_K => {
                (self.d, self.dmin) = (half(0), half(2));
                self.six_bit_pairs(&bytes[4..16]);
                self.long_nibbles(&bytes[16..144]);
            }
            WeightFormat::Q5_K => {
                (self.d, self.dmin) = (half(0), half(2));
                self.six_bit_pairs(&bytes[4..16]);
                self.long_nibbles(&bytes[48..176]);
                for (k, quant) in self.quants.iter_mut().enumerate() {
                    *quant |= ((bytes[16 + k % 32] >> (k / 32)) & 1) << 4;
                }
            }
            WeightFormat::Q6_K => self.read_q6_k(bytes),
            WeightFormat::IQ1_S => self.read_iq1_s(bytes),
            WeightFormat::IQ4_XS
            | WeightFormat::IQ3_S
            | WeightFormat::IQ3_XXS
            | WeightFormat::IQ2_S
            | WeightFormat::IQ2_XS
            | WeightFormat::IQ2_XXS
            | WeightFormat::IQ1_M => self.read_grid(format, bytes),
        }
    }

    /// Levels as indices of the format's table.
    fn read_grid(&mut self, format: WeightFormat, bytes: &[u8]) {
        self.grid.read(format, bytes);
        let layout = QuantLayout::new(format).expect("a quantised format");
        let values = layout.lookup.expect("formats of grids have tables");
        let index = |level: i8| {
            let unsigned = (i16::from(level) + layout.offset) as u8;
            values.iter().position(|value| *value == unsigned).expect("tables have all levels") as u8
        };
        self.d = self.grid.d;
        for (quant, &level) in self.quants.iter_mut().zip(&self.grid.levels) {
            *quant = index(level);
        }
        for (sub, &scale) in self.sub.iter_mut().zip(&self.grid.scales) {
            *sub = scale as u8;
        }
    }

    /// Levels are in eighths, `8 (q - 1)` and one more or less: the eight goes to the scale, the rest to the min.
    fn read_iq1_s(&mut self, bytes: &[u8]) {
        self.grid.read(WeightFormat::IQ1_S, bytes);
        (self.d, self.dmin) = (self.grid.d, self.grid.d);
        for (quant, level) in self.quants.iter_mut().zip(&self.grid.levels) {
            *quant = ((level + 9) / 8) as u8;
        }
        for i in 0..SUPER_BLOCK / BLOCK {
            let (scale, level) = (self.grid.scales[2 * i] as u8, self.grid.levels[i * BLOCK]);
            self.sub[i] = 8 * scale;
            self.sub_min[i] = scale * if level.rem_euclid(8) == 1 { 7 } else { 9 };
        }
    }

    fn nibbles(&mut self, bytes: &[u8]) {
        for (i, &byte) in bytes.iter().enumerate() {
            self.quants[i] = byte & 15;
            self.quants[i + 16] = byte >> 4;
        }
    }

    fn fifth_bits(&mut self, bytes: &[u8]) {
        for (k, quant) in self.quants[..BLOCK].iter_mut().enumerate() {
            *quant |= ((bytes[k / 8] >> (k % 8)) & 1) << 4;
        }
    }

    /// 64 values in 32 bytes: the low nibbles first, then the high ones.
    fn long_nibbles(&mut self, bytes: &[u8]) {
        for (k, quant) in self.quants.iter_mut().enumerate() {
            *quant = (bytes[k / 64 * 32 + k % 32] >> (k / 32 % 2 * 4)) & 15;
        }
    }

    /// 128 values in 32 bytes: the lowest two bits first.
    fn crumbs(&mut self, bytes: &[u8]) {
        for (k, quant) in self.quants.iter_mut().enumerate() {
            *quant = (bytes[k / 128 * 32 + k % 32] >> (k / 32 % 4 * 2)) & 3;
        }
    }

    /// Eight scales and eight mins of six bits in twelve bytes.
    fn six_bit_pairs(&mut self, bytes: &[u8]) {
        for i in 0..4 {
            self.sub[i] = bytes[i] & 63;
            self.sub_min[i] = bytes[i + 4] & 63;
            self.sub[i + 4] = (bytes[i + 8] & 15) | ((bytes[i] >> 6) << 4);
            self.sub_min[i + 4] = (bytes[i + 8] >> 4) | ((bytes[i + 4] >> 6) << 4);
        }
    }

    /// Sixteen scales of six bits, stored plus 32, in twelve bytes; kept as i8.
    fn six_bit_signed(&mut self, bytes: &[u8]) {
        for (i, sub) in self.sub.iter_mut().enumerate() {
            let low = (bytes[i % 8] >> (i / 8 * 4)) & 15;
            let high = (bytes[8 + i % 4] >> (i / 4 * 2)) & 3;
            *sub = (low | (high << 4)).wrapping_sub(32);
        }
    }

    fn read_q6_k(&mut self, bytes: &[u8]) {
        let (low, high) = (&bytes[..128], &bytes[128..192]);
        for (k, quant) in self.quants.iter_mut().enumerate() {
            let (half, quarter, i) = (k / 128, k / 32 % 4, k % 32);
            let nibble = (low[half * 64 + quarter % 2 * 32 + i] >> (quarter / 2 * 4)) & 15;
            let crumb = (high[half * 32 + i] >> (quarter * 2)) & 3;
            *quant = nibble | (crumb << 4);
        }
        self.sub.copy_from_slice(&bytes[192..208]);
        self.d = u16::from_le_bytes([bytes[208], bytes[209]]);
    }
}
