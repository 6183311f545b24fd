//! Input rows on a device that does not read host memory: a cache of single rows.
//!
//! Its pages are rows, so the map of a graph is a block table with blocks of one node. LRU and LFU are the pool's own orders;
//! the static policy holds the rows of the nodes that most others listen to and never gives them up.

use std::sync::Arc;

use baton_backend::graph::{HostRows, TableId, Upload};
use baton_core::BlockId;
use baton_kv::{BlockPool, EvictionPolicy};

use crate::view::NONE;
use crate::{FeaturePolicy, GraphData};

pub(crate) type SourceId = usize;

/// The features of one graph.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) data: Arc<GraphData>,
    /// As the device is given them.
    pub(crate) values: HostRows,
    /// Where the device reads host memory.
    pub(crate) adopted: Option<TableId>,
    /// The row of each node; empty where they are adopted.
    pub(crate) pages: Vec<u32>,
    pub(crate) pinned_by: Vec<u64>,
    pub(crate) counted_by: Vec<u64>,
    /// Views of it.
    pub(crate) num_views: usize,
    /// The static policy has had its chance.
    pub(crate) was_planned: bool,
    static_rows: Vec<u32>,
}

impl Source {
    pub(crate) fn new(data: Arc<GraphData>, values: HostRows, adopted: Option<TableId>) -> Self {
        let len = if adopted.is_some() { 0 } else { data.num_nodes() };
        Self {
            data,
            values,
            adopted,
            pages: vec![NONE; len],
            pinned_by: vec![0; len],
            counted_by: vec![0; len],
            num_views: 0,
            was_planned: false,
            static_rows: Vec::new(),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FeatureCounts {
    /// Rows that a plan needed and found.
    pub hits: u64,
    /// Rows that had to be uploaded.
    pub misses: u64,
    /// Rows that were uploaded because the static policy wants them.
    pub preloaded: u64,
}

impl FeatureCounts {
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / (self.hits + self.misses).max(1) as f64
    }
}

/// Rows of the cache and whose they are.
#[derive(Debug)]
pub(crate) struct FeatureCache {
    pub(crate) table: TableId,
    pool: BlockPool,
    owners: Vec<Option<(SourceId, u32)>>,
    policy: FeaturePolicy,
    /// Rows that the static policy may still take.
    num_static_left: usize,
    /// Rows that it holds.
    num_static: usize,
    pub(crate) counts: FeatureCounts,
}

impl FeatureCache {
    pub(crate) fn new(table: TableId, num_rows: usize, policy: FeaturePolicy) -> Self {
        let eviction = if policy == FeaturePolicy::Lfu { EvictionPolicy::Lfu } else { EvictionPolicy::Lru };
        Self {
            table,
            pool: BlockPool::new(num_rows, eviction),
            owners: vec![None; num_rows],
            policy,
            // A quarter is left for what is read less often, which has to go through the cache too.
            num_static_left: if policy == FeaturePolicy::Static { num_rows / 4 * 3 } else { 0 },
            num_static: 0,
            counts: FeatureCounts::default(),
        }
    }

    /// Rows that nodes without a place of their own go through.
    pub(crate) fn num_passing_rows(&self) -> usize {
        self.pool.num_blocks() - self.num_static
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.pool.num_blocks()
    }

    /// The rows that the static policy keeps of a graph that is new.
    pub(crate) fn preload(
        &mut self,
        sources: &mut [Option<Source>],
        id: SourceId,
        uploads: &mut Vec<Upload>,
    ) {
        if self.policy != FeaturePolicy::Static {
            return;
        }
        let degrees = source_of(sources, id).data.graph().out_degrees();
        let mut nodes: Vec<u32> = (0..degrees.len() as u32).collect();
        nodes.sort_by_key(|&node| (std::cmp::Reverse(degrees[node as usize]), node));
        nodes.truncate(self.num_static_left);
        for node in nodes {
            let Some(row) = self.take(sources, id, node, uploads) else { return };
            source_of(sources, id).static_rows.push(row);
            self.num_static_left -= 1;
            self.num_static += 1;
            self.counts.preloaded += 1;
        }
    }

    /// Makes a node's row resident and holds it. False where every row is held.
    pub(crate) fn pin(
        &mut self,
        sources: &mut [Option<Source>],
        id: SourceId,
        node: u32,
        uploads: &mut Vec<Upload>,
    ) -> bool {
        let page = source_of(sources, id).pages[node as usize];
        if page != NONE {
            self.pool.share(BlockId(page));
            self.pool.count_hit(BlockId(page));
            self.counts.hits += 1;
            return true;
        }
        let is_there = self.take(sources, id, node, uploads).is_some();
        self.counts.misses += u64::from(is_there);
        is_there
    }

    pub(crate) fn unpin(&mut self, page: u32) {
        self.pool.release(BlockId(page), true);
    }

    fn take(
        &mut self,
        sources: &mut [Option<Source>],
        id: SourceId,
        node: u32,
        uploads: &mut Vec<Upload>,
    ) -> Option<u32> {
        let row = self.pool.take()?;
        if let Some((owner, old)) = self.owners[row.index()].replace((id, node)) {
            source_of(sources, owner).pages[old as usize] = NONE;
        }
        let source = source_of(sources, id);
        source.pages[node as usize] = row.0;
        if let Some(upload) = uploads.iter_mut().find(|upload| upload.values.is_same(&source.values)) {
            upload.rows.push((node, row.0));
        } else {
            let values = source.values.clone();
            uploads.push(Upload { table: self.table, values, rows: vec![(node, row.0)] });
        }
        Some(row.0)
    }

    /// No plan holds a row of this graph.
    pub(crate) fn forget(&mut self, sources: &mut [Option<Source>], id: SourceId) {
        let source = source_of(sources, id);
        self.num_static_left += source.static_rows.len();
        self.num_static -= source.static_rows.len();
        for row in source.static_rows.drain(..) {
            self.pool.release(BlockId(row), false);
        }
        for page in source.pages.iter_mut().filter(|page| **page != NONE) {
            self.owners[*page as usize] = None;
            self.pool.forget(BlockId(*page));
            *page = NONE;
        }
    }
}

fn source_of(sources: &mut [Option<Source>], id: SourceId) -> &mut Source {
    sources[id].as_mut().expect("features stay while a view has them")
}
