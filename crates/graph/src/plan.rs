//! What one step will do: moves, tasks of several graphs, rows that are read afterwards.

use baton_backend::graph::{Moves, Partial, Upload};
use baton_core::RequestId;

use crate::blocks::{BlockMoves, Owner};
use crate::features::SourceId;
use crate::view::ViewId;

/// The neighbours of a task's targets.
#[derive(Debug)]
pub(crate) enum EdgeList {
    None,
    /// Of nodes in a row, as they lie in the graph.
    Whole {
        first: u32,
    },
    Own {
        offsets: Vec<u32>,
        sources: Vec<u32>,
    },
}

/// One stage of some nodes of a graph.
#[derive(Debug)]
pub(crate) struct TaskSpec {
    pub(crate) view: ViewId,
    pub(crate) source: SourceId,
    pub(crate) stage: usize,
    pub(crate) targets: Vec<u32>,
    pub(crate) edges: EdgeList,
    pub(crate) degrees: Option<Vec<u32>>,
    pub(crate) partial: Option<Partial>,
}

/// Rows of the last level that are read for a request.
#[derive(Debug)]
pub(crate) struct Collect {
    pub(crate) request_id: RequestId,
    pub(crate) view: ViewId,
    pub(crate) nodes: Vec<u32>,
}

#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) number: u64,
    pub(crate) tasks: Vec<TaskSpec>,
    pub(crate) collects: Vec<Collect>,
    /// Blocks and rows that are held until the plan has run.
    pub(crate) pins: Vec<Owner>,
    pub(crate) feature_pins: Vec<(SourceId, u32)>,
    pub(crate) views: Vec<ViewId>,
    pub(crate) moves: BlockMoves,
    pub(crate) uploads: Vec<Upload>,
}

impl Plan {
    /// Moves that may run beside the step before.
    pub(crate) fn early(&mut self, moves: &mut Moves) {
        moves.clear();
        moves.swap_out.extend_from_slice(&self.moves.swap_out);
        moves.swap_in.extend_from_slice(&self.moves.swap_in);
        moves.uploads.append(&mut self.uploads);
    }

    /// Those that come after them, before the plan's tasks.
    pub(crate) fn late(&self, moves: &mut Moves) {
        moves.clear();
        moves.swap_in.extend_from_slice(&self.moves.late_swap_in);
    }
}
