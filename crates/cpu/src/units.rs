//! Who does which piece of an op: numbers that workers take, each once.
//!
//! [`Units`] go to whoever asks first. [`NodeUnits`] are cut into shares of the machine's NUMA nodes: weights are written for
//! the first time, and so placed in memory, by workers of the node that will read them. With one node both are the same.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::pool::Worker;

/// The most nodes that are told apart; further ones are taken together.
pub const MAX_NODES: usize = 8;

/// Hands out the numbers below a limit, each once, to whichever worker asks first.
#[derive(Debug)]
pub struct Units {
    next: AtomicUsize,
    end: usize,
}

impl Units {
    pub fn new(end: usize) -> Self {
        Self { next: AtomicUsize::new(0), end }
    }

    pub fn take(&self) -> Option<usize> {
        let unit = self.next.fetch_add(1, Ordering::Relaxed);
        (unit < self.end).then_some(unit)
    }

    /// [`Self::take`] that leaves the counter alone when nothing is left: for those who come to see whether there is.
    fn take_if_any(&self) -> Option<usize> {
        if self.next.load(Ordering::Relaxed) < self.end { self.take() } else { None }
    }
}

/// How a pool's workers are spread over nodes. Only nodes with workers count, numbered from zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nodes {
    num_nodes: usize,
    /// Workers of a node and of those before it.
    ends: [usize; MAX_NODES],
}

impl Nodes {
    /// From the system's node of each worker; also the node that each has here.
    pub fn new(of_workers: &[usize]) -> (Self, Vec<usize>) {
        let mut numbers = of_workers.to_vec();
        numbers.sort_unstable();
        numbers.dedup();
        let num_nodes = numbers.len().clamp(1, MAX_NODES);
        let place = |number: &usize| numbers.partition_point(|other| other < number);
        let nodes: Vec<usize> =
            of_workers.iter().map(|number| place(number) * num_nodes / numbers.len()).collect();
        let mut ends = [0; MAX_NODES];
        for (node, end) in ends.iter_mut().enumerate().take(num_nodes) {
            *end = nodes.iter().filter(|&&of_worker| of_worker <= node).count();
        }
        (Self { num_nodes, ends }, nodes)
    }

    pub fn num_nodes(&self) -> usize {
        self.num_nodes
    }

    /// The part of `count` things in a row that is a node's: as large as its part of the workers.
    pub fn share(&self, node: usize, count: usize) -> Range<usize> {
        let total = self.ends[self.num_nodes - 1].max(1);
        let until = |workers: usize| count * workers / total;
        until(if node == 0 { 0 } else { self.ends[node - 1] })..until(self.ends[node])
    }
}

/// A node's own counter, on a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
struct Share(Units);

/// Units in shares of nodes.
#[derive(Debug)]
pub struct NodeUnits {
    num_nodes: usize,
    shares: [Share; MAX_NODES],
}

impl NodeUnits {
    /// `num_units(node)` of each node.
    pub fn new(nodes: &Nodes, num_units: impl Fn(usize) -> usize) -> Self {
        let units = |node| if node < nodes.num_nodes { num_units(node) } else { 0 };
        Self {
            num_nodes: nodes.num_nodes,
            shares: std::array::from_fn(|node| Share(Units::new(units(node)))),
        }
    }

    /// How many a node has.
    #[cfg(test)]
    pub fn len_of(&self, node: usize) -> usize {
        self.shares[node].0.end
    }

    /// The next number of the worker's node.
    pub fn take_own(&self, worker: &Worker<'_>) -> Option<usize> {
        self.shares[worker.node].0.take_if_any()
    }

    /// A node and the next number of it: of the worker's node, else of one that has not finished.
    pub fn take(&self, worker: &Worker<'_>) -> Option<(usize, usize)> {
        let nodes = (worker.node..self.num_nodes).chain(0..worker.node);
        nodes.into_iter().find_map(|node| Some((node, self.shares[node].0.take_if_any()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Pool;

    #[test]
    fn units_are_taken_once() {
        let pool = Pool::new(3, false).expect("threads");
        let taken: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
        let units = Units::new(taken.len());
        pool.run(&|_| {
            while let Some(unit) = units.take() {
                taken[unit].fetch_add(1, Ordering::Relaxed);
            }
        });
        assert!(taken.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn shares_cover_everything_in_proportion() {
        let (nodes, of_workers) = Nodes::new(&[3, 3, 7, 3]);
        assert_eq!(of_workers, [0, 0, 1, 0]);
        assert_eq!((nodes.share(0, 100), nodes.share(1, 100)), (0..75, 75..100));
        assert_eq!((nodes.share(0, 1), nodes.share(1, 1)), (0..0, 0..1));
        let (one, of_workers) = Nodes::new(&[5, 5]);
        assert_eq!((one.num_nodes(), one.share(0, 7), of_workers), (1, 0..7, vec![0, 0]));
        // More nodes than are told apart: neighbours are taken together.
        let (nodes, of_workers) = Nodes::new(&(0..20).collect::<Vec<_>>());
        assert_eq!(nodes.num_nodes(), MAX_NODES);
        assert!(of_workers.is_sorted() && of_workers.last() == Some(&(MAX_NODES - 1)));
        for count in [0, 1, 5, 8, 1001] {
            let mut end = 0;
            for node in 0..MAX_NODES {
                let share = nodes.share(node, count);
                assert_eq!(share.start, end);
                end = share.end;
            }
            assert_eq!(end, count);
        }
    }

    #[test]
    fn every_unit_of_every_node_is_taken_once() {
        // Node 2 has units but a slow worker: the others steal them.
        let pool = Pool::with_nodes(&[0, 0, 1, 2]).expect("threads");
        let counts = [40, 25, 300];
        let taken = counts.map(|count| (0..count).map(|_| AtomicUsize::new(0)).collect::<Vec<_>>());
        let units = NodeUnits::new(pool.nodes(), |node| counts[node]);
        pool.run(&|worker| {
            while let Some((node, unit)) = units.take(worker) {
                taken[node][unit].fetch_add(1, Ordering::Relaxed);
                if worker.node == 2 {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
            }
        });
        assert!(taken.iter().flatten().all(|count| count.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn workers_take_their_own_nodes_units_first() {
        let pool = Pool::with_nodes(&[0, 0, 1, 1]).expect("threads");
        let units = NodeUnits::new(pool.nodes(), |node| pool.nodes().share(node, 200).len());
        let done = AtomicUsize::new(0);
        pool.run(&|worker| {
            // As many each as an even split has: nobody has to steal.
            for _ in 0..50 {
                let (node, unit) = units.take(worker).expect("there are as many");
                assert_eq!(node, worker.node);
                assert!(unit < 100);
                done.fetch_add(1, Ordering::Relaxed);
            }
            worker.barrier();
            assert_eq!(units.take(worker), None);
            assert_eq!(units.take_own(worker), None);
        });
        assert_eq!(done.into_inner(), 200);
    }
}
