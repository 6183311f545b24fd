//! A graph as its nodes' incoming neighbours.

use crate::GraphError;

/// Nodes are numbered by u32, and the last number is nobody's.
pub const MAX_NODES: usize = u32::MAX as usize - 1;
pub const MAX_EDGES: usize = u32::MAX as usize - 1;

/// Which nodes send to which: messages go along edges from source to target, as in PyTorch Geometric's `edge_index`.
/// Parallel edges count as often as they are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Graph {
    /// `[nodes + 1]`, into `sources`.
    offsets: Vec<u32>,
    /// The neighbours of each node, in rising order.
    sources: Vec<u32>,
}

impl Graph {
    /// From edges in any order.
    pub fn new(num_nodes: usize, edges: &[(u32, u32)]) -> Result<Self, GraphError> {
        Self::from_columns(num_nodes, edges.len(), |edge| {
            (i64::from(edges[edge].0), i64::from(edges[edge].1))
        })
    }

    /// From numbers as files have them, which are checked here.
    pub fn from_columns(
        num_nodes: usize,
        num_edges: usize,
        edge: impl Fn(usize) -> (i64, i64),
    ) -> Result<Self, GraphError> {
        if num_nodes == 0 {
            return Err(GraphError::EmptyGraph);
        }
        if num_nodes > MAX_NODES {
            return Err(GraphError::TooManyNodes { got: num_nodes, limit: MAX_NODES });
        }
        if num_edges > MAX_EDGES {
            return Err(GraphError::TooManyEdges { got: num_edges, limit: MAX_EDGES });
        }
        let last = num_nodes - 1;
        let is_node = |node: i64| usize::try_from(node).is_ok_and(|node| node <= last);
        // Sorted by source and then, keeping that order, by target: each list comes out in rising order.
        let mut by_source = vec![0u32; num_nodes + 1];
        let mut offsets = vec![0u32; num_nodes + 1];
        for number in 0..num_edges {
            let (source, target) = edge(number);
            if !is_node(source) || !is_node(target) {
                let (source_node, target_node) = (source, target);
                return Err(GraphError::EdgeOutOfRange { edge: number, source_node, target_node, last });
            }
            by_source[source as usize + 1] += 1;
            offsets[target as usize + 1] += 1;
        }
        for node in 0..num_nodes {
            by_source[node + 1] += by_source[node];
            offsets[node + 1] += offsets[node];
        }
        let mut order = vec![(0u32, 0u32); num_edges];
        for number in 0..num_edges {
            let (source, target) = edge(number);
            let place = &mut by_source[source as usize];
            order[*place as usize] = (source as u32, target as u32);
            *place += 1;
        }
        let mut next = offsets.clone();
        let mut sources = vec![0u32; num_edges];
        for (source, target) in order {
            let place = &mut next[target as usize];
            sources[*place as usize] = source;
            *place += 1;
        }
        Ok(Self { offsets, sources })
    }

    pub fn num_nodes(&self) -> usize {
        self.offsets.len() - 1
    }

    pub fn num_edges(&self) -> usize {
        self.sources.len()
    }

    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    pub fn sources(&self) -> &[u32] {
        &self.sources
    }

    pub fn neighbours(&self, node: u32) -> &[u32] {
        let (start, end) = (self.offsets[node as usize], self.offsets[node as usize + 1]);
        &self.sources[start as usize..end as usize]
    }

    pub fn degree(&self, node: u32) -> usize {
        self.neighbours(node).len()
    }

    /// How often each node is a neighbour of another: the rows that are read most.
    pub fn out_degrees(&self) -> Vec<u32> {
        let mut degrees = vec![0; self.num_nodes()];
        for &source in &self.sources {
            degrees[source as usize] += 1;
        }
        degrees
    }

    /// The same without edges from a node to itself, which GCN replaces by one of its own.
    #[must_use]
    pub fn without_loops(&self) -> Self {
        let mut offsets = Vec::with_capacity(self.offsets.len());
        let mut sources = Vec::with_capacity(self.sources.len());
        offsets.push(0);
        for node in 0..self.num_nodes() as u32 {
            sources.extend(self.neighbours(node).iter().filter(|&&source| source != node));
            offsets.push(sources.len() as u32);
        }
        Self { offsets, sources }
    }

    pub fn bytes(&self) -> usize {
        4 * (self.offsets.len() + self.sources.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_sorted_and_parallel_edges_kept() {
        let graph = Graph::new(4, &[(3, 0), (1, 0), (0, 2), (1, 0), (0, 0)]).expect("a graph");
        assert_eq!(graph.neighbours(0), [0, 1, 1, 3]);
        assert_eq!((graph.neighbours(1), graph.neighbours(2)), (&[][..], &[0][..]));
        assert_eq!(graph.without_loops().neighbours(0), [1, 1, 3]);
        assert_eq!(graph.out_degrees(), [2, 2, 0, 1]);
    }

    #[test]
    fn wrong_edges_are_named() {
        let error = Graph::new(3, &[(0, 1), (3, 1)]).expect_err("3 is no node");
        assert_eq!(error.to_string(), "edge 1 goes from node 3 to node 1, but the graph has nodes 0 to 2");
        let error = Graph::from_columns(3, 1, |_| (-1, 0)).expect_err("negative");
        assert!(error.to_string().contains("from node -1"), "{error}");
        assert!(matches!(Graph::new(0, &[]), Err(GraphError::EmptyGraph)));
        assert!(matches!(
            Graph::from_columns(MAX_NODES + 1, 0, |_| (0, 0)),
            Err(GraphError::TooManyNodes { .. })
        ));
        assert!(matches!(
            Graph::from_columns(1, MAX_EDGES + 1, |_| (0, 0)),
            Err(GraphError::TooManyEdges { .. })
        ));
        assert_eq!(Graph::new(2, &[]).expect("edges are not needed").num_edges(), 0);
    }
}
