//! The engine: graphs in, embeddings out, one step at a time.

use std::sync::Arc;
use std::time::Instant;

use baton_backend::graph::{
    ConvTask, GraphDevice, GraphDeviceInfo, LinearId, Moves, RowMap, RowSource, Segments, TableId,
};
use baton_core::RequestId;

use crate::blocks::Blocks;
use crate::config::GraphConfig;
use crate::features::{FeatureCache, Source, SourceId};
use crate::plan::{EdgeList, Plan, TaskSpec};
use crate::request::{Embeddings, GraphOutput, GraphRequest, Progress, RequestStatus};
use crate::scheduler::Scheduler;
use crate::stats::GraphStats;
use crate::{GraphData, GraphError, GraphModel};

/// Rows for sums of cut groups: more would not swap less.
const MAX_ACCUMULATORS: usize = 1 << 13;

/// Inference over many graphs at once. See the crate's documentation.
pub struct GraphEngine {
    device: Box<dyn GraphDevice>,
    scheduler: Scheduler,
    linears: Vec<LinearId>,
    /// Of each level from 1 on.
    tables: Vec<TableId>,
    /// Made while the step before it ran.
    planned: Option<Plan>,
    before: Moves,
    beside: Moves,
    /// For whole graphs' features on the device.
    resident_bytes_left: u64,
}

impl std::fmt::Debug for GraphEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GraphEngine({} requests)", self.scheduler.states.len())
    }
}

impl GraphEngine {
    /// Loads the model and works out how many blocks fit into the memory that it is given.
    pub fn new(
        model: GraphModel,
        mut device: Box<dyn GraphDevice>,
        config: GraphConfig,
    ) -> Result<Self, GraphError> {
        config.validate()?;
        let levels = 1..=model.stages().len();
        let row_bytes: usize = levels.clone().map(|level| model.width(level) * config.dtype.bytes()).sum();
        let block_bytes = (row_bytes * config.block_size) as u64;
        let sum_cols = model.stages().iter().filter_map(|stage| Some(model.width(stage.neighbours?.0))).max();
        let sum_bytes = 4 * sum_cols.unwrap_or(1) as u64;
        let num_accumulators = (config.device_bytes / 16 / sum_bytes).clamp(1, MAX_ACCUMULATORS as u64);
        let feature_bytes = (model.num_features() * config.dtype.bytes()) as u64;
        // Elsewhere an eighth of the memory is for the features of graphs that fit there, and an eighth for a cache of rows.
        let reads_host = device.info().reads_host_memory;
        let share = if config.feature_rows.is_some() || reads_host { 0 } else { config.device_bytes / 8 };
        let feature_rows = config.feature_rows.map_or(share / feature_bytes, |rows| rows as u64);
        let taken = num_accumulators * sum_bytes + feature_rows.saturating_mul(feature_bytes) + share;
        let bytes = config.device_bytes.saturating_sub(taken);
        let limit = u64::from(u32::MAX >> (config.shift() + 1));
        let num_device = (bytes / block_bytes).min(limit) as usize;
        if num_device < 2 {
            let what = "a graph engine";
            return Err(GraphError::TooLittleMemory { what, bytes, blocks: num_device, needed: 2 });
        }
        let num_host = (config.host_bytes / block_bytes).min(limit) as usize;
        let linears = model
            .stages()
            .iter()
            .map(|stage| device.load_linear(&stage.weight, stage.bias.as_deref()))
            .collect::<Result<_, _>>()?;
        let mut tables = Vec::new();
        for level in levels {
            let (rows, host) = (num_device * config.block_size, num_host * config.block_size);
            tables.push(device.create_table(rows, host, model.width(level), config.dtype)?);
        }
        device.create_accumulators(num_accumulators as usize, sum_cols.unwrap_or(1))?;
        let features = if feature_rows > 0 {
            let table = device.create_table(feature_rows as usize, 0, model.num_features(), config.dtype)?;
            Some(FeatureCache::new(table, feature_rows as usize, config.feature_policy))
        } else {
            None
        };
        let moves = Moves { block_rows: config.block_size, tables: tables.clone(), ..Moves::default() };
        let blocks = Blocks::new(num_device, num_host, config.eviction, config.shift());
        let scheduler = Scheduler::new(config, Arc::new(model), blocks, features, num_accumulators as usize);
        let resident_bytes_left = if reads_host { u64::MAX } else { share };
        Ok(Self {
            device,
            scheduler,
            linears,
            tables,
            planned: None,
            before: moves.clone(),
            beside: moves,
            resident_bytes_left,
        })
    }

    pub fn model(&self) -> &GraphModel {
        &self.scheduler.model
    }

    pub fn config(&self) -> &GraphConfig {
        &self.scheduler.config
    }

    pub fn device(&self) -> GraphDeviceInfo {
        self.device.info()
    }

    /// Queues a request; its embeddings come out of a later [`step`](Self::step).
    pub fn add_graph(&mut self, request: GraphRequest) -> Result<RequestId, GraphError> {
        self.scheduler.check(&request)?;
        let source = self.source_for(&request.data)?;
        Ok(self.scheduler.add(request, source))
    }

    fn source_for(&mut self, data: &Arc<GraphData>) -> Result<SourceId, GraphError> {
        let sources = &mut self.scheduler.sources;
        let is_same =
            |source: &Source| (source.data.id(), source.data.version()) == (data.id(), data.version());
        if let Some(place) = sources.iter().position(|source| source.as_ref().is_some_and(is_same)) {
            let known = &sources[place].as_ref().expect("it was just found").data;
            let size =
                |data: &GraphData| (data.num_nodes(), data.graph().num_edges(), data.features().cols());
            if !Arc::ptr_eq(known, data) && size(known) != size(data) {
                let (id, version) = (data.id().to_owned(), data.version());
                return Err(GraphError::VersionReused { id, version });
            }
            return Ok(place);
        }
        let values = data.features().to_dtype(self.scheduler.config.dtype);
        let bytes = values.bytes() as u64;
        let adopts = self.scheduler.features.is_none() || bytes <= self.resident_bytes_left;
        let start = Instant::now();
        let adopted = if adopts { Some(self.device.adopt_rows(values.clone())?) } else { None };
        self.scheduler.stats.moving_seconds += start.elapsed().as_secs_f64();
        if adopted.is_some() {
            self.resident_bytes_left = self.resident_bytes_left.saturating_sub(bytes);
        }
        let source = Some(Source::new(Arc::clone(data), values, adopted));
        let place = sources.iter().position(Option::is_none).unwrap_or(sources.len());
        if place == sources.len() {
            sources.push(source);
        } else {
            sources[place] = source;
        }
        Ok(place)
    }

    /// Ends a request. False if it is not there (any more).
    pub fn abort(&mut self, request_id: RequestId) -> bool {
        let was_there = self.scheduler.remove(request_id).is_some();
        self.scheduler.stats.requests_aborted += u64::from(was_there);
        self.clean_up();
        was_there
    }

    /// Forgets a graph in all versions. Requests for it are ended; which ones is returned.
    pub fn remove_graph(&mut self, id: &str) -> Vec<RequestId> {
        let requests = self.scheduler.remove_graph(id);
        for &request in &requests {
            self.abort(request);
        }
        self.clean_up();
        requests
    }

    pub fn has_requests(&self) -> bool {
        !self.scheduler.states.is_empty()
    }

    /// Whether a step would do anything: requests, or a plan that holds blocks of requests that were ended.
    pub fn has_work(&self) -> bool {
        self.has_requests() || self.planned.is_some()
    }

    pub fn progress(&self, request_id: RequestId) -> Option<Progress> {
        let state = self.scheduler.states.get(&request_id)?;
        Some(Progress { status: state.status, num_rows: state.num_rows, num_rows_done: state.num_rows_done })
    }

    pub fn stats(&self) -> GraphStats {
        self.scheduler.stats()
    }

    /// Runs one plan, and makes the next one meanwhile. What has ended comes out.
    pub fn step(&mut self) -> Result<Vec<GraphOutput>, GraphError> {
        let plan = if let Some(plan) = self.planned.take() {
            plan
        } else {
            let mut plan = self.scheduler.schedule();
            plan.early(&mut self.before);
            self.run(&Plan::default(), true)?;
            plan
        };
        let mut next = self.scheduler.schedule();
        plan.late(&mut self.before);
        next.early(&mut self.beside);
        self.run(&plan, false)?;
        let outputs = self.finish(plan)?;
        self.planned = Some(next);
        // Nothing was left to do: whatever it holds is given back.
        if !self.has_requests()
            && let Some(last) = self.planned.take()
        {
            last.late(&mut self.before);
            self.beside.clear();
            self.run(&Plan::default(), true)?;
            self.scheduler.apply(last);
            self.clean_up();
        }
        Ok(outputs)
    }

    fn run(&mut self, plan: &Plan, only_before: bool) -> Result<(), GraphError> {
        if only_before {
            self.beside.clear();
        }
        if plan.tasks.is_empty() && self.before.is_empty() && self.beside.is_empty() {
            return Ok(());
        }
        let tasks: Vec<ConvTask<'_>> = plan
            .tasks
            .iter()
            .map(|task| conv_task(&self.scheduler, &self.linears, &self.tables, task))
            .collect();
        let times = self.device.run(&self.before, &tasks, &self.beside)?;
        let stats = &mut self.scheduler.stats;
        stats.num_steps += 1;
        stats.moving_seconds += times.moving_seconds;
        stats.computing_seconds += times.computing_seconds;
        Ok(())
    }

    /// Reads what the plan has finished, and gives back what it held.
    fn finish(&mut self, plan: Plan) -> Result<Vec<GraphOutput>, GraphError> {
        let cols = self.scheduler.model.num_outputs();
        let table = *self.tables.last().expect("a model has a stage");
        let mut touched = Vec::new();
        let start = Instant::now();
        for collect in &plan.collects {
            let Some(state) = self.scheduler.states.get_mut(&collect.request_id) else { continue };
            let view = self.scheduler.views[collect.view].as_ref().expect("a plan's view stays");
            let map = RowMap::Pages { pages: &view.pages, shift: self.scheduler.config.shift() };
            let source = RowSource { table, map };
            let nodes = &collect.nodes;
            // What others have computed comes in the order in which that was seen.
            let in_a_row = nodes.windows(2).all(|pair| pair[0] + 1 == pair[1]);
            if state.targets.is_none() && in_a_row {
                let first = nodes[0] as usize * cols;
                let rows = &mut state.output[first..first + nodes.len() * cols];
                self.device.read_rows(source, nodes, rows)?;
            } else {
                let mut rows = vec![0.0; nodes.len() * cols];
                self.device.read_rows(source, nodes, &mut rows)?;
                let places: Vec<usize> = state.places(nodes).collect();
                for (row, place) in rows.chunks_exact(cols).zip(places) {
                    state.output[place * cols..(place + 1) * cols].copy_from_slice(row);
                }
            }
            state.num_unread -= nodes.len();
            if state.num_unread == 0 {
                touched.push(state.id);
            }
        }
        self.scheduler.stats.moving_seconds += start.elapsed().as_secs_f64();
        self.scheduler.apply(plan);
        let mut outputs: Vec<GraphOutput> = touched
            .into_iter()
            .filter_map(|id| {
                let state = self.scheduler.remove(id)?;
                let result = Ok(Embeddings { nodes: state.targets, cols, values: state.output });
                Some(GraphOutput { request_id: id, result })
            })
            .collect();
        let stats = &mut self.scheduler.stats;
        stats.requests_finished += outputs.len() as u64;
        stats.requests_failed += self.scheduler.failures.len() as u64;
        let failures = self.scheduler.failures.drain(..);
        outputs.extend(failures.map(|(request_id, error)| GraphOutput { request_id, result: Err(error) }));
        self.clean_up();
        Ok(outputs)
    }

    fn clean_up(&mut self) {
        for id in self.scheduler.clean_up() {
            let Some(source) = self.scheduler.sources[id].take() else { continue };
            if let Some(table) = source.adopted {
                self.device.drop_table(table);
                let bytes = source.values.bytes() as u64;
                self.resident_bytes_left = self.resident_bytes_left.saturating_add(bytes);
            }
        }
    }

    /// Steps until every request has ended.
    pub fn run_all(&mut self) -> Result<Vec<GraphOutput>, GraphError> {
        let mut outputs = Vec::new();
        while self.has_requests() {
            outputs.extend(self.step()?);
        }
        Ok(outputs)
    }

    /// Panics where the books do not balance. For tests.
    pub fn check_invariants(&self) {
        let pins = self.planned.as_ref().map_or(&[][..], |plan| &plan.pins);
        self.scheduler.blocks.check(&self.scheduler.views, pins);
        if !self.has_requests() && self.planned.is_none() {
            self.scheduler.blocks.check_idle();
        }
        let running = self.scheduler.count(RequestStatus::Running);
        assert!(running <= self.scheduler.config.max_running, "more requests run than may");
    }
}

fn conv_task<'a>(
    scheduler: &'a Scheduler,
    linears: &[LinearId],
    tables: &[TableId],
    task: &'a TaskSpec,
) -> ConvTask<'a> {
    let stage = &scheduler.model.stages()[task.stage];
    let view = scheduler.view(task.view);
    let source = scheduler.sources[task.source].as_ref().expect("a plan's features stay");
    let pages = RowMap::Pages { pages: &view.pages, shift: scheduler.config.shift() };
    let rows = |level: usize| match (level, source.adopted, &scheduler.features) {
        (0, Some(table), _) => RowSource { table, map: RowMap::Identity },
        (0, None, Some(features)) => {
            RowSource { table: features.table, map: RowMap::Pages { pages: &source.pages, shift: 0 } }
        }
        _ => RowSource { table: tables[level - 1], map: pages },
    };
    let neighbours = stage.neighbours.map(|(level, reduce)| {
        let (offsets, sources): (&[u32], &[u32]) = match &task.edges {
            EdgeList::Own { offsets, sources } => (offsets, sources),
            EdgeList::Whole { first } => {
                let graph = view.adjacency[stage.layer].whole().expect("it is not sampled");
                let first = *first as usize;
                (&graph.offsets()[first..=first + task.targets.len()], graph.sources())
            }
            EdgeList::None => (&[], &[]),
        };
        let segments =
            Segments { offsets, sources, degrees: task.degrees.as_deref(), scales: view.scales_of(stage) };
        (rows(level), reduce, segments)
    });
    ConvTask {
        neighbours,
        own: stage.own.map(rows),
        targets: &task.targets,
        partial: task.partial,
        linear: linears[task.stage],
        relu: stage.relu,
        normalize: stage.normalize,
        output: rows(task.stage + 1),
    }
}
