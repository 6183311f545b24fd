//! Which neighbours of a node a layer listens to: all, or a sample.
//!
//! The sample of a node depends on the seed, the layer and the node alone. So it is the same for every request that asks with
//! the same seed and fan-outs, whatever its targets: what was computed for one is there for all.

use std::sync::Arc;

use crate::Graph;

/// Neighbours are drawn without replacement; nodes with fewer keep all.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sampling {
    /// How many neighbours a node hears, by distance from the targets: those of the targets first, as in the
    /// `num_neighbors` of PyTorch Geometric's `NeighborLoader`. `usize::MAX` is all.
    pub fan_outs: Vec<usize>,
    pub seed: u64,
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Sampling {
    /// Of a layer, counted from the features.
    pub fn fan_out(&self, layer: usize) -> usize {
        self.fan_outs[self.fan_outs.len() - 1 - layer]
    }

    /// The neighbours that `node` hears in `layer`, in rising order, put after what is in `out`.
    ///
    /// Floyd's algorithm: as many draws as the sample has, each of an equal chance.
    pub fn sample(&self, neighbours: &[u32], node: u32, layer: usize, out: &mut Vec<u32>) {
        let fan_out = self.fan_out(layer);
        if neighbours.len() <= fan_out {
            out.extend_from_slice(neighbours);
            return;
        }
        let mut state = mix(self.seed ^ mix((layer as u64) << 32 | u64::from(node)));
        let first = out.len();
        for last in neighbours.len() - fan_out..neighbours.len() {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            // The high half of a product is uniform to within last / 2^64.
            let place = ((u128::from(mix(state)) * (last as u128 + 1)) >> 64) as u32;
            let is_new = !out[first..].contains(&place);
            out.push(if is_new { place } else { last as u32 });
        }
        out[first..].sort_unstable();
        for place in &mut out[first..] {
            *place = neighbours[*place as usize];
        }
    }
}

/// What one layer of a view hears.
#[derive(Clone, Debug)]
pub(crate) struct Adjacency {
    graph: Arc<Graph>,
    sampling: Option<(Sampling, usize)>,
}

impl Adjacency {
    pub(crate) fn new(graph: Arc<Graph>, sampling: Option<&Sampling>, layer: usize) -> Self {
        Self { graph, sampling: sampling.map(|sampling| (sampling.clone(), layer)) }
    }

    /// The whole lists, where nothing is sampled.
    pub(crate) fn whole(&self) -> Option<&Graph> {
        self.sampling.is_none().then_some(&*self.graph)
    }

    /// Puts the neighbours of a node after what is in `out`.
    pub(crate) fn extend(&self, node: u32, out: &mut Vec<u32>) {
        let neighbours = self.graph.neighbours(node);
        match &self.sampling {
            None => out.extend_from_slice(neighbours),
            Some((sampling, layer)) => sampling.sample(neighbours, node, *layer, out),
        }
    }

    pub(crate) fn degree(&self, node: u32) -> usize {
        let degree = self.graph.degree(node);
        self.sampling.as_ref().map_or(degree, |(sampling, layer)| degree.min(sampling.fan_out(*layer)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_subsets_of_the_right_size() {
        let neighbours: Vec<u32> = (0..50).map(|i| i * 3).collect();
        let sampling = Sampling { fan_outs: vec![49, 60, 10], seed: 7 };
        for (layer, len) in [(0, 10), (1, 50), (2, 49)] {
            for node in 0..20 {
                let mut sample = vec![9];
                sampling.sample(&neighbours, node, layer, &mut sample);
                assert_eq!((sample[0], sample.len()), (9, len + 1));
                assert!(sample[1..].is_sorted_by(|a, b| a < b), "each place once");
                assert!(sample[1..].iter().all(|node| neighbours.contains(node)));
            }
        }
    }

    #[test]
    fn every_neighbour_has_the_same_chance() {
        let neighbours: Vec<u32> = (0..20).collect();
        let mut counts = [0u32; 20];
        for seed in 0..2000 {
            let mut sample = Vec::new();
            Sampling { fan_outs: vec![5], seed }.sample(&neighbours, 3, 0, &mut sample);
            for &node in &sample {
                counts[node as usize] += 1;
            }
        }
        // 500 expected, with a deviation of about 19.
        assert!(counts.iter().all(|count| (400..600).contains(count)), "{counts:?}");
    }

    #[test]
    fn the_seed_the_layer_and_the_node_decide() {
        let neighbours: Vec<u32> = (0..100).collect();
        let draw = |seed, layer, node| {
            let mut out = Vec::new();
            Sampling { fan_outs: vec![8, 8], seed }.sample(&neighbours, node, layer, &mut out);
            out
        };
        assert_eq!(draw(1, 0, 5), draw(1, 0, 5));
        assert_ne!(draw(1, 0, 5), draw(2, 0, 5));
        assert_ne!(draw(1, 0, 5), draw(1, 1, 5));
        assert_ne!(draw(1, 0, 5), draw(1, 0, 6));
    }
}
