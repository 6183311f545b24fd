//! Graphs and models made up from a seed, for measurements: the same on every machine.

use std::path::Path;

use baton_backend::{RandomFill, Tensor, WeightFormat};

use crate::model::{GraphModel, GraphModelConfig, Stage};
use crate::{Graph, GraphError, HostRows};

fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A graph whose degrees follow a power law: an end of an edge is often an end of an earlier one. Nodes are numbered at
/// random, so that those with many edges are not neighbours in memory.
pub fn power_law(num_nodes: usize, num_edges: usize, seed: u64) -> Result<Graph, GraphError> {
    let mut state = seed;
    let mut below = |bound: usize| (next(&mut state) % bound.max(1) as u64) as usize;
    let mut names: Vec<u32> = (0..num_nodes as u32).collect();
    for place in (1..names.len()).rev() {
        names.swap(place, below(place + 1));
    }
    let mut ends: Vec<u32> = Vec::with_capacity(2 * num_edges);
    for _ in 0..num_edges {
        for _ in 0..2 {
            let is_old = below(10) < 6 && !ends.is_empty();
            let end = if is_old { ends[below(ends.len())] } else { below(num_nodes) as u32 };
            ends.push(end);
        }
    }
    let name = |end: u32| i64::from(names[end as usize]);
    Graph::from_columns(num_nodes, num_edges, |edge| (name(ends[2 * edge]), name(ends[2 * edge + 1])))
}

/// Uniform in [-1, 1).
pub fn features(rows: usize, cols: usize, seed: u64) -> Option<HostRows> {
    let mut state = seed;
    let value = |_| (next(&mut state) >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
    let values = (0..rows.checked_mul(cols)?).map(value).collect();
    HostRows::from_f32(rows, cols, values)
}

/// GraphSAGE with these widths, `[features, hidden, …, outputs]`, and random weights.
pub fn sage(widths: &[usize], config: GraphModelConfig, seed: u64) -> Result<GraphModel, GraphError> {
    let last = widths.len().saturating_sub(2);
    let stage = |(layer, pair): (usize, &[usize])| {
        let fill = RandomFill { seed: seed + layer as u64, largest: 1.0 / (pair[0] as f32).sqrt() };
        let weight = Tensor::random(WeightFormat::F32, pair[1], 2 * pair[0], fill);
        let weight = weight.map_err(|error| GraphError::model(Path::new("synthetic"), error.to_string()))?;
        Ok(Stage {
            layer,
            neighbours: Some((layer, config.aggr.into())),
            own: Some(layer),
            weight,
            bias: Some(vec![0.0; pair[1]]),
            relu: layer < last,
            normalize: config.normalize,
        })
    };
    let stages = widths.windows(2).enumerate().map(stage).collect::<Result<Vec<_>, GraphError>>()?;
    GraphModel::from_stages("synthetic", widths.first().copied().unwrap_or(0), stages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn degrees_follow_a_power_law() {
        let graph = power_law(2000, 20000, 1).expect("a graph");
        assert_eq!((graph.num_nodes(), graph.num_edges()), (2000, 20000));
        let mut degrees: Vec<usize> = (0..2000).map(|node| graph.degree(node)).collect();
        degrees.sort_unstable();
        assert!(degrees[1999] > 8 * degrees[1000].max(1), "{} and {}", degrees[1999], degrees[1000]);
        assert_eq!(graph, power_law(2000, 20000, 1).expect("a graph"));
    }
}
