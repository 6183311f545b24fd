//! Which requests run: queues, memory, turns. It knows no tensor, thread or clock; the same calls give the same plans.
//!
//! A request waits until its blocks fit into both tiers together, and beside those that run into the device. One that does not
//! fit alone runs alone, and swaps with itself. When others have to wait too long for those that run, these give their
//! blocks up for a while: they are swapped.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_core::RequestId;

use crate::blocks::{Blocks, Owner};
use crate::config::{GraphConfig, GraphPolicy};
use crate::features::{FeatureCache, Source, SourceId};
use crate::plan::Plan;
use crate::request::{GraphRequest, RequestStatus, State, check_targets};
use crate::stats::GraphStats;
use crate::view::{Need, View, ViewId, ViewKey};
use crate::{GraphError, GraphModel};

#[derive(Debug)]
pub(crate) struct Scheduler {
    pub(crate) config: GraphConfig,
    pub(crate) model: Arc<GraphModel>,
    pub(crate) views: Vec<Option<View>>,
    keys: BTreeMap<ViewKey, ViewId>,
    pub(crate) sources: Vec<Option<Source>>,
    /// Of each view.
    pub(crate) source_of: Vec<SourceId>,
    pub(crate) blocks: Blocks,
    pub(crate) features: Option<FeatureCache>,
    pub(crate) states: BTreeMap<RequestId, State>,
    next_id: u64,
    next_turn: u64,
    pub(crate) plan_number: u64,
    /// Counts the nodes whose pages are being counted; see the planner.
    pub(crate) count_number: u64,
    /// The request whose sums are in the accumulators.
    pub(crate) cutting: Option<RequestId>,
    pub(crate) num_accumulators: usize,
    /// Blocks that requests need: those that run, and those that run or are swapped.
    pub(crate) num_running_blocks: usize,
    num_reserved_blocks: usize,
    pub(crate) failures: Vec<(RequestId, GraphError)>,
    pub(crate) stats: GraphStats,
}

impl Scheduler {
    pub(crate) fn new(
        config: GraphConfig,
        model: Arc<GraphModel>,
        blocks: Blocks,
        features: Option<FeatureCache>,
        num_accumulators: usize,
    ) -> Self {
        Self {
            config,
            model,
            views: Vec::new(),
            keys: BTreeMap::new(),
            sources: Vec::new(),
            source_of: Vec::new(),
            blocks,
            features,
            states: BTreeMap::new(),
            next_id: 1,
            next_turn: 1,
            plan_number: 0,
            count_number: 0,
            cutting: None,
            num_accumulators,
            num_running_blocks: 0,
            num_reserved_blocks: 0,
            failures: Vec::new(),
            stats: GraphStats::default(),
        }
    }

    /// Blocks that all requests in work may need together.
    pub(crate) fn capacity(&self) -> usize {
        let (device, host) = (self.blocks.num_device(), self.blocks.num_host());
        // What a plan brings in and what it drives out are both on the host for a while.
        (device + host).saturating_sub(device / 2).max(device)
    }

    /// Everything that can be said of a request before its graph is looked at.
    pub(crate) fn check(&self, request: &GraphRequest) -> Result<(), GraphError> {
        let (data, model) = (&request.data, &self.model);
        let got = data.features().cols();
        if got != model.num_features() {
            return Err(GraphError::FeatureWidth { got, expected: model.num_features() });
        }
        if let Some(targets) = &request.targets {
            check_targets(targets, data.num_nodes())?;
        }
        if let Some(sampling) = &request.sampling {
            let (got, expected) = (sampling.fan_outs.len(), model.num_layers());
            if got != expected {
                return Err(GraphError::FanOuts { got, expected });
            }
            if sampling.fan_outs.contains(&0) {
                return Err(GraphError::ZeroFanOut);
            }
        }
        let waiting = self.count(RequestStatus::Waiting);
        if waiting >= self.config.max_waiting {
            return Err(GraphError::QueueFull { waiting });
        }
        let needed = data.num_nodes().div_ceil(self.config.block_size);
        if request.targets.is_none() && needed > self.capacity() {
            return Err(GraphError::TooLarge { needed, capacity: self.capacity() });
        }
        Ok(())
    }

    /// Queues a request that was checked, for a graph whose features are known.
    pub(crate) fn add(&mut self, request: GraphRequest, source: SourceId) -> RequestId {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let view = self.view_for(&request, source, id);
        let num_targets = request.targets.as_ref().map_or(request.data.num_nodes(), Vec::len);
        let state = State {
            id,
            view,
            status: RequestStatus::Waiting,
            priority: request.priority,
            turn: self.take_turn(),
            order: order_of(request.targets.as_deref()),
            targets: request.targets,
            work: Vec::new(),
            stage: 0,
            next: 0,
            last_plan: 0,
            blocks: Vec::new(),
            cut: None,
            leftover: None,
            num_unread: num_targets,
            output: Vec::new(),
            served: 0,
            steps_in_turn: 0,
            num_rows: 0,
            num_rows_done: 0,
        };
        self.view_mut(view).num_requests += 1;
        self.states.insert(id, state);
        id
    }

    fn view_for(&mut self, request: &GraphRequest, source: SourceId, id: RequestId) -> ViewId {
        let sampling = request.sampling.as_ref();
        let key = ViewKey {
            graph: request.data.id().to_owned(),
            version: request.data.version(),
            fan_outs: sampling.map_or_else(Vec::new, |sampling| sampling.fan_outs.clone()),
            seed: sampling.map_or(0, |sampling| sampling.seed),
            private: if self.config.enable_sharing { 0 } else { id.0 },
        };
        if let Some(&view) = self.keys.get(&key) {
            return view;
        }
        let data = Arc::clone(&request.data);
        let view = View::new(key.clone(), data, sampling, &self.model, self.config.shift());
        let place = self.views.iter().position(Option::is_none).unwrap_or(self.views.len());
        if place == self.views.len() {
            self.views.push(None);
            self.source_of.push(0);
        }
        self.views[place] = Some(view);
        self.source_of[place] = source;
        self.sources[source].as_mut().expect("the caller made it").num_views += 1;
        self.keys.insert(key, place);
        place
    }

    fn take_turn(&mut self) -> u64 {
        self.next_turn += 1;
        self.next_turn
    }

    pub(crate) fn view(&self, id: ViewId) -> &View {
        self.views[id].as_ref().expect("a view stays while it has requests or plans")
    }

    pub(crate) fn view_mut(&mut self, id: ViewId) -> &mut View {
        self.views[id].as_mut().expect("a view stays while it has requests or plans")
    }

    pub(crate) fn count(&self, status: RequestStatus) -> usize {
        self.states.values().filter(|state| state.status == status).count()
    }

    /// Lower is earlier.
    pub(crate) fn class(&self, state: &State) -> i32 {
        if self.config.policy == GraphPolicy::Priority { state.priority } else { 0 }
    }

    /// Lets requests in, and makes those that run give way where it is time.
    pub(crate) fn admit(&mut self) {
        loop {
            let candidates = self.states.values().filter(|state| state.status != RequestStatus::Running);
            let Some(id) =
                candidates.min_by_key(|state| (self.class(state), state.turn)).map(|state| state.id)
            else {
                return;
            };
            self.estimate(id);
            let (new_running, new_reserved) = self.new_blocks(id);
            if new_reserved + self.num_reserved_blocks > self.capacity() {
                if self.num_reserved_blocks > 0 {
                    return;
                }
                let error = GraphError::TooLarge { needed: new_reserved, capacity: self.capacity() };
                self.remove(id);
                self.failures.push((id, error));
                continue;
            }
            let num_running = self.count(RequestStatus::Running);
            let fits = new_running + self.num_running_blocks <= self.blocks.num_device();
            if num_running == 0 || fits && num_running < self.config.max_running {
                self.start(id);
            } else if !self.preempt_for(id) {
                return;
            }
        }
    }

    /// Works out once which blocks a waiting request will need at most.
    fn estimate(&mut self, id: RequestId) {
        let state = &self.states[&id];
        if state.status == RequestStatus::Waiting && state.blocks.is_empty() {
            let blocks = self.need(state).blocks;
            self.states.get_mut(&id).expect("it was just there").blocks = blocks;
        }
    }

    fn need(&self, state: &State) -> Need {
        let view = self.view(state.view);
        match &state.targets {
            None => Need::of_all(view, &self.model),
            Some(targets) => Need::of(view, &self.model, targets, self.config.shift()),
        }
    }

    /// Blocks of a request that no other running one needs, and that none at all needs.
    fn new_blocks(&self, id: RequestId) -> (usize, usize) {
        let state = &self.states[&id];
        let view = self.view(state.view);
        let count =
            |counts: &[u32]| state.blocks.iter().filter(|&&block| counts[block as usize] == 0).count();
        let reserved = if state.status == RequestStatus::Swapped { 0 } else { count(&view.reserved) };
        (count(&view.running), reserved)
    }

    fn start(&mut self, id: RequestId) {
        let mut state = self.states.remove(&id).expect("a candidate is there");
        if state.status == RequestStatus::Waiting {
            // What is there may have changed since it was estimated.
            let need = self.need(&state);
            self.stats.rows_reused += need.num_reused;
            state.num_rows = need.work.iter().map(|nodes| nodes.len() as u64).sum();
            state.leftover = Some((self.targets_that_are_there(&state, &need), 0));
            (state.work, state.blocks) = (need.work, need.blocks);
            state.output = vec![0.0; state.num_unread * self.model.num_outputs()];
            self.reserve(&state);
        }
        let running = self.states.values().filter(|other| other.status == RequestStatus::Running);
        // A newcomer does not make up for the time before it came.
        state.served = running.map(|other| other.served).min().unwrap_or(0).max(state.served);
        state.status = RequestStatus::Running;
        state.steps_in_turn = 0;
        self.count_running(&state, true);
        self.states.insert(id, state);
    }

    fn targets_that_are_there(&self, state: &State, need: &Need) -> Vec<u32> {
        let missing = need.work.last().map_or(&[][..], Vec::as_slice);
        let is_there = |node: &u32| missing.binary_search(node).is_err();
        match &state.targets {
            None if missing.len() == self.view(state.view).data.num_nodes() => Vec::new(),
            None => (0..self.view(state.view).data.num_nodes() as u32).filter(is_there).collect(),
            Some(targets) => {
                let mut nodes: Vec<u32> = targets.iter().copied().filter(is_there).collect();
                nodes.sort_unstable();
                nodes
            }
        }
    }

    fn reserve(&mut self, state: &State) {
        for &block in &state.blocks {
            if self.view(state.view).reserved[block as usize] == 0 {
                self.blocks.reserve(&mut self.views, Owner { view: state.view, block });
                self.num_reserved_blocks += 1;
            }
            self.view_mut(state.view).reserved[block as usize] += 1;
        }
    }

    fn unreserve(&mut self, state: &State) {
        for &block in &state.blocks {
            let count = &mut self.view_mut(state.view).reserved[block as usize];
            *count -= 1;
            if *count == 0 {
                self.blocks.unreserve(&mut self.views, Owner { view: state.view, block });
                self.num_reserved_blocks -= 1;
            }
        }
    }

    fn count_running(&mut self, state: &State, begins: bool) {
        for &block in &state.blocks {
            let count =
                &mut self.views[state.view].as_mut().expect("it has a request").running[block as usize];
            match (begins, &mut *count) {
                (true, 0) => self.num_running_blocks += 1,
                (false, 1) => self.num_running_blocks -= 1,
                _ => {}
            }
            *count = if begins { *count + 1 } else { *count - 1 };
        }
    }

    /// Makes the last of those that may be driven out by `id` give way. False if there is none.
    fn preempt_for(&mut self, id: RequestId) -> bool {
        let class = self.class(&self.states[&id]);
        let gives_way = |state: &&State| {
            let is_over = state.steps_in_turn >= self.config.quantum_steps;
            // Sums that were begun are finished first.
            let has_no_sums = state.cut.is_none();
            state.status == RequestStatus::Running
                && has_no_sums
                && (class < self.class(state) || class == self.class(state) && is_over)
        };
        let victim =
            self.states.values().filter(gives_way).max_by_key(|state| (self.class(state), state.turn));
        let Some(victim) = victim.map(|state| state.id) else { return false };
        let turn = self.take_turn();
        let mut state = self.states.remove(&victim).expect("it was just found");
        self.count_running(&state, false);
        (state.status, state.turn) = (RequestStatus::Swapped, turn);
        self.states.insert(victim, state);
        self.stats.preemptions += 1;
        true
    }

    /// Takes a request out, in whatever state it is.
    pub(crate) fn remove(&mut self, id: RequestId) -> Option<State> {
        let state = self.states.remove(&id)?;
        if state.status == RequestStatus::Running {
            self.count_running(&state, false);
        }
        if state.status != RequestStatus::Waiting {
            self.unreserve(&state);
        }
        if self.cutting == Some(id) {
            self.cutting = None;
        }
        let number = self.plan_number;
        let view = self.view_mut(state.view);
        view.num_requests -= 1;
        view.last_used = number;
        if !self.config.enable_sharing {
            self.forget_key(state.view);
        }
        Some(state)
    }

    fn forget_key(&mut self, id: ViewId) {
        let view = self.view_mut(id);
        view.is_removed = true;
        let key = view.key.clone();
        self.keys.remove(&key);
    }

    /// The plan has run: what it held is free again.
    pub(crate) fn apply(&mut self, mut plan: Plan) {
        for pin in &plan.pins {
            let page = self.view(pin.view).pages[pin.block as usize];
            self.blocks.unpin(page);
        }
        if let Some(features) = &mut self.features {
            for &(source, node) in &plan.feature_pins {
                let source = self.sources[source].as_ref().expect("a plan's features stay");
                features.unpin(source.pages[node as usize]);
            }
        }
        self.blocks.moves_are_done(&mut self.views, &mut plan.moves);
        for &view in &plan.views {
            self.view_mut(view).num_plans -= 1;
        }
    }

    /// No request may refer to the graph from now on. The requests that it has.
    pub(crate) fn remove_graph(&mut self, graph: &str) -> Vec<RequestId> {
        let mut requests = Vec::new();
        for id in 0..self.views.len() {
            if self.views[id].as_ref().is_some_and(|view| view.key.graph == graph && !view.is_removed) {
                self.forget_key(id);
                let of_view = self.states.values().filter(|state| state.view == id);
                requests.extend(of_view.map(|state| state.id));
            }
        }
        requests
    }

    /// Forgets views that were removed, and the oldest idle ones where there are too many. Sources without a view.
    pub(crate) fn clean_up(&mut self) -> Vec<SourceId> {
        let idle = |view: &&View| view.num_requests == 0 && view.num_plans == 0;
        let num_idle = self.views.iter().flatten().filter(idle).count();
        for _ in self.config.max_idle_views..num_idle {
            let all = self.views.iter().enumerate().filter_map(|(id, view)| Some((id, view.as_ref()?)));
            let oldest = all.filter(|(_, view)| idle(view) && !view.is_removed);
            match oldest.min_by_key(|(_, view)| view.last_used).map(|(id, _)| id) {
                Some(id) => self.forget_key(id),
                None => break,
            }
        }
        let mut unused = Vec::new();
        for id in 0..self.views.len() {
            if !self.views[id].as_ref().is_some_and(|view| idle(&view) && view.is_removed) {
                continue;
            }
            self.blocks.forget_view(&mut self.views, id);
            self.views[id] = None;
            let source = self.source_of[id];
            let of_source = self.sources[source].as_mut().expect("a view's features stay");
            of_source.num_views -= 1;
            if of_source.num_views == 0 {
                if let Some(features) = &mut self.features {
                    features.forget(&mut self.sources, source);
                }
                unused.push(source);
            }
        }
        unused
    }

    pub(crate) fn stats(&self) -> GraphStats {
        let features = self.features.as_ref().map(|features| features.counts).unwrap_or_default();
        GraphStats {
            swaps: self.blocks.counts,
            features,
            num_waiting: self.count(RequestStatus::Waiting),
            num_running: self.count(RequestStatus::Running),
            num_swapped: self.count(RequestStatus::Swapped),
            num_device_blocks: self.blocks.num_device(),
            num_device_blocks_used: self.blocks.num_owned(),
            num_host_blocks: self.blocks.num_host(),
            num_host_blocks_used: self.blocks.num_host_owned(),
            num_graphs: self.sources.iter().flatten().count(),
            ..self.stats
        }
    }
}

/// The places of targets by rising node.
fn order_of(targets: Option<&[u32]>) -> Vec<u32> {
    let targets = targets.unwrap_or_default();
    let mut order: Vec<u32> = (0..targets.len() as u32).collect();
    order.sort_unstable_by_key(|&place| targets[place as usize]);
    order
}
