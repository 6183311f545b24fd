//! What a KV block holds. `kv` and `sched` never ask what is inside a block; this is where it is said.
//!
//! Layers that see the same part of a sequence are a group: all that have full attention, and those of each sliding window.
//! A group has block tables of its own, so that what lies behind a window can be given back. All blocks have the same number
//! of bytes and belong to whichever group needs them: a block holds `block_size` tokens of as many layers as the layout says,
//! and a group with more layers has several blocks for the same tokens, its lanes.
//!
//! So that kernels find what they are used to, a device keeps an array of all blocks for each place within a block: the first
//! layers of all lanes share the first array, the second ones the second, and so on.

use serde::{Deserialize, Serialize};

/// Storage of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    F32,
    F16,
    BF16,
    /// Whole numbers from -127 to 127 and one f32 factor for each token's key and each token's value of a head: its
    /// largest magnitude / 127.
    Int8,
    /// Eight bits, four of them exponent; keys and values are stored unscaled.
    #[serde(rename = "fp8_e4m3")]
    F8E4M3,
}

impl KvDtype {
    /// Of one value.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Int8 | Self::F8E4M3 => 1,
        }
    }

    /// Of the factor that stands beside one head of one token's key, and again beside its value; 0 without.
    pub fn scale_bytes(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 | Self::F8E4M3 => 0,
            Self::Int8 => 4,
        }
    }

    /// Of one head of one token's key, or of its value.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        head_dim * self.bytes() + self.scale_bytes()
    }
}

/// What one layer keeps for a token: `num_kv_heads × head_dim` keys and as many values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLayerSpec {
    pub num_kv_heads: usize,
    pub head_dim: usize,
}

/// Layers that see the same part of a sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvGroupSpec {
    /// Keys further back than this are not seen; `None`: all are.
    pub window: Option<u32>,
    /// The layers of each lane. A block of the group's tables holds those of one lane.
    pub lanes: Vec<Vec<usize>>,
}

/// The whole cache: which layers there are, and how they are laid out in blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSpec {
    pub layers: Vec<KvLayerSpec>,
    pub groups: Vec<KvGroupSpec>,
    pub dtype: KvDtype,
    pub block_size: usize,
    /// Keys behind a window that are kept nevertheless, for a draft model that is a few tokens behind its target.
    pub num_kept_behind: u32,
    /// For each layer its lane, counted over all groups, and its place within a block.
    places: Vec<(usize, usize)>,
    /// What each place within a block is large enough for.
    arrays: Vec<KvLayerSpec>,
}

/// More lanes are more block tables to keep and to upload: memory is wasted first.
const MAX_LANES: usize = 16;
/// Layers' worth of blocks that may be left empty, in percent, to have fewer lanes: of all groups, and of the one with full
/// attention, which has most of the blocks of a long sequence.
const MAX_PADDING_PERCENT: usize = 15;
const MAX_FULL_PADDING_PERCENT: usize = 3;

impl KvSpec {
    /// `windows` has one entry per layer.
    pub fn new(layers: Vec<KvLayerSpec>, windows: &[Option<u32>], dtype: KvDtype, block_size: usize) -> Self {
        assert_eq!(layers.len(), windows.len(), "each layer has a window or none");
        let mut kinds: Vec<Option<u32>> = windows.to_vec();
        kinds.sort_unstable();
        kinds.dedup();
        let of_kind = |window: &Option<u32>| -> Vec<usize> {
            (0..layers.len()).filter(|&layer| windows[layer] == *window).collect()
        };
        let members: Vec<Vec<usize>> = kinds.iter().map(of_kind).collect();
        // `None` is the first of the sorted windows.
        let counts: Vec<usize> = members.iter().map(Vec::len).collect();
        let num_full = if kinds.first() == Some(&None) { counts[0] } else { 0 };
        let per_lane = layers_per_lane(num_full, &counts[usize::from(num_full > 0)..]);
        let lanes = |members: &Vec<usize>| members.chunks(per_lane).map(<[usize]>::to_vec).collect();
        let groups: Vec<KvGroupSpec> = kinds
            .iter()
            .zip(&members)
            .map(|(&window, members)| KvGroupSpec { window, lanes: lanes(members) })
            .collect();
        let (places, arrays) = place_layers(&layers, &groups);
        Self { layers, groups, dtype, block_size, num_kept_behind: 0, places, arrays }
    }

    /// All layers alike, with full attention.
    pub fn full(layer: KvLayerSpec, num_layers: usize, dtype: KvDtype, block_size: usize) -> Self {
        Self::new(vec![layer; num_layers], &vec![None; num_layers], dtype, block_size)
    }

    pub fn num_lanes(&self) -> usize {
        self.groups.iter().map(|group| group.lanes.len()).sum()
    }

    /// The window of each lane.
    pub fn lane_windows(&self) -> impl Iterator<Item = Option<u32>> + '_ {
        self.groups.iter().flat_map(|group| group.lanes.iter().map(|_| group.window))
    }

    /// Which block table a layer goes by, counted over all groups.
    pub fn lane_of(&self, layer: usize) -> usize {
        self.places[layer].0
    }

    /// Which of a device's arrays a layer lies in.
    pub fn array_of(&self, layer: usize) -> usize {
        self.places[layer].1
    }

    /// What one token of a block takes in each array.
    pub fn arrays(&self) -> &[KvLayerSpec] {
        &self.arrays
    }

    /// Bytes of one token of one layer.
    pub fn layer_bytes(&self, layer: KvLayerSpec) -> usize {
        2 * layer.num_kv_heads * self.dtype.head_bytes(layer.head_dim)
    }

    /// Bytes of one token over all layers, as far as they see it.
    pub fn bytes_per_token(&self) -> usize {
        self.layers.iter().map(|&layer| self.layer_bytes(layer)).sum()
    }

    pub fn bytes_per_block(&self) -> usize {
        self.arrays.iter().map(|&layer| self.layer_bytes(layer)).sum::<usize>() * self.block_size
    }
}

/// How many layers a block holds: as many as leave little of the blocks empty, so that there are few lanes.
fn layers_per_lane(num_full: usize, windowed: &[usize]) -> usize {
    let counts = || windowed.iter().copied().chain([num_full]);
    let total: usize = counts().sum();
    let most = counts().max().unwrap_or(1).max(1);
    let lanes = |size: usize| counts().map(|count| count.div_ceil(size)).sum::<usize>();
    let padding = |size: usize| lanes(size) * size - total;
    let is_good = |size: &usize| {
        let full_padding = num_full.next_multiple_of(*size) - num_full;
        padding(*size) * 100 <= total * MAX_PADDING_PERCENT
            && full_padding * 100 <= num_full * MAX_FULL_PADDING_PERCENT
    };
    let may_be = || (1..=most).rev().filter(|&size| lanes(size) <= MAX_LANES);
    may_be().find(is_good).or_else(|| may_be().min_by_key(|&size| padding(size))).unwrap_or(most)
}

/// Layers of different shape never share an array: a block of it has one size.
fn place_layers(layers: &[KvLayerSpec], groups: &[KvGroupSpec]) -> (Vec<(usize, usize)>, Vec<KvLayerSpec>) {
    let mut places = vec![(0, 0); layers.len()];
    let mut arrays: Vec<KvLayerSpec> = Vec::new();
    for (lane, members) in groups.iter().flat_map(|group| &group.lanes).enumerate() {
        let mut is_taken = vec![false; arrays.len()];
        for &layer in members {
            let fits = |array: &usize| arrays[*array] == layers[layer] && !is_taken[*array];
            let array = (0..arrays.len()).find(fits).unwrap_or_else(|| {
                arrays.push(layers[layer]);
                is_taken.push(false);
                arrays.len() - 1
            });
            is_taken[array] = true;
            places[layer] = (lane, array);
        }
    }
    (places, arrays)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYER: KvLayerSpec = KvLayerSpec { num_kv_heads: 2, head_dim: 8 };

    fn spec(windows: &[Option<u32>]) -> KvSpec {
        KvSpec::new(vec![LAYER; windows.len()], windows, KvDtype::F16, 16)
    }

    #[test]
    fn one_kind_of_layers_is_one_lane() {
        let spec = KvSpec::full(LAYER, 30, KvDtype::F16, 16);
        assert_eq!((spec.groups.len(), spec.num_lanes(), spec.arrays().len()), (1, 1, 30));
        assert_eq!(spec.bytes_per_block(), 16 * spec.bytes_per_token());
        assert_eq!((spec.lane_of(29), spec.array_of(29)), (0, 29));
    }

    #[test]
    fn windows_get_lanes_of_their_own() {
        // Five layers with a window, then one without: Gemma 3 12B.
        let windows: Vec<Option<u32>> = (0..48).map(|i| (i % 6 != 5).then_some(1024)).collect();
        let spec = spec(&windows);
        assert_eq!((spec.groups.len(), spec.num_lanes(), spec.arrays().len()), (2, 6, 8));
        assert_eq!(spec.lane_windows().collect::<Vec<_>>()[..2], [None, Some(1024)]);
        // Every place of every lane is used once.
        let mut places: Vec<_> = (0..48).map(|layer| (spec.lane_of(layer), spec.array_of(layer))).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), 48);
        assert_eq!(spec.lane_of(5), 0);
    }

    #[test]
    fn blocks_are_nearly_full_and_lanes_are_few() {
        for (counts, expected) in [
            ([8, 40], 8),
            ([10, 52], 10), // Gemma 3 27B: 7 lanes
            ([4, 22], 4),   // 7 lanes
            ([16, 16], 16), // one of two has a window
            ([1, 100], 10),
            ([30, 0], 30),
            ([0, 30], 30),
        ] {
            let size = layers_per_lane(counts[0], &counts[1..]);
            let lanes: usize = counts.iter().map(|count| count.div_ceil(size)).sum();
            assert!(lanes <= MAX_LANES, "{counts:?}: {lanes} lanes");
            assert_eq!(size, expected, "{counts:?}");
        }
    }

    #[test]
    fn layers_of_different_shape_share_no_array() {
        let wide = KvLayerSpec { num_kv_heads: 4, head_dim: 16 };
        let spec =
            KvSpec::new(vec![LAYER, wide, LAYER, wide], &[None, Some(8), None, Some(8)], KvDtype::F32, 4);
        assert_eq!(spec.arrays(), [LAYER, LAYER, wide, wide]);
        assert_eq!((spec.array_of(1), spec.lane_of(1)), (2, 1));
    }
}
