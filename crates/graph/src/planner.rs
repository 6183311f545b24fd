//! From running requests to a plan: whose nodes, of which stage, over which blocks.
//!
//! Each request gets an equal share of the step, those that had least first; what one does not use goes to the others. A
//! node is planned when all it reads can be held at once. Where too few nodes can, a group of them is cut: its sums grow over
//! several plans, each with as many blocks of neighbours as fit.

use baton_backend::graph::Partial;
use baton_core::RequestId;

use crate::blocks::Owner;
use crate::model::Stage;
use crate::plan::{Collect, EdgeList, Plan, TaskSpec};
use crate::request::{Cut, RequestStatus, State};
use crate::scheduler::Scheduler;

/// With fewer nodes at a time than this it is better to cut.
const FEW_NODES: usize = 64;

/// What a plan may still take.
#[derive(Clone, Copy, Debug)]
struct Budget {
    nodes: usize,
    edges: usize,
    blocks: usize,
    rows: usize,
}

/// A page that a node needs: a block of embeddings, or a row of features.
#[derive(Clone, Copy, Debug)]
enum Page {
    Block(u32),
    Row(u32),
}

impl Scheduler {
    /// The next plan. It counts what earlier plans compute as there.
    pub(crate) fn schedule(&mut self) -> Plan {
        self.admit();
        self.plan_number += 1;
        let mut plan = Plan { number: self.plan_number, ..Plan::default() };
        self.preload_features(&mut plan);
        let mut order: Vec<(i32, u64, RequestId)> = self
            .states
            .values()
            .filter(|state| state.status == RequestStatus::Running)
            .map(|state| (self.class(state), state.served, state.id))
            .collect();
        order.sort_unstable();
        let mut budget = self.budget();
        // Those of a class share; what they leave is the next class's.
        for class in order.chunk_by(|a, b| a.0 == b.0) {
            for round in 0..2 {
                for (place, &(_, _, id)) in class.iter().enumerate() {
                    let num_left = if round == 0 { class.len() - place } else { 1 };
                    self.plan_request(id, num_left, &mut budget, &mut plan);
                }
            }
        }
        for &(_, _, id) in &order {
            if let Some(state) = self.states.get_mut(&id) {
                state.steps_in_turn += 1;
            }
        }
        self.blocks.save_ahead(&mut self.views, self.config.high_water, &mut plan.moves);
        plan.views.sort_unstable();
        plan.views.dedup();
        for &view in &plan.views {
            self.view_mut(view).num_plans += 1;
        }
        plan
    }

    fn budget(&self) -> Budget {
        let num_device = self.blocks.num_device();
        // While all fits nothing is driven out, and plans may hold everything; else half is the next plan's.
        let all_fits = self.num_running_blocks <= num_device;
        let rows = self.features.as_ref().map_or(usize::MAX, |features| {
            let nodes: usize = self.sources.iter().flatten().map(|source| source.pages.len()).sum();
            // Rows that the static policy holds are nobody else's.
            let passing = (features.num_passing_rows() / 2).max(1);
            if nodes <= features.num_rows() { features.num_rows() } else { passing }
        });
        Budget {
            nodes: self.config.max_step_nodes,
            edges: self.config.max_step_edges,
            blocks: if all_fits { num_device } else { (num_device / 2).max(1) },
            rows,
        }
    }

    fn preload_features(&mut self, plan: &mut Plan) {
        let Some(features) = &mut self.features else { return };
        for id in 0..self.sources.len() {
            let is_new = self.sources[id]
                .as_mut()
                .is_some_and(|source| !std::mem::replace(&mut source.was_planned, true));
            let is_adopted = self.sources[id].as_ref().is_some_and(|source| source.adopted.is_some());
            if is_new && !is_adopted {
                features.preload(&mut self.sources, id, &mut plan.uploads);
            }
        }
    }

    fn plan_request(&mut self, id: RequestId, num_left: usize, budget: &mut Budget, plan: &mut Plan) {
        let Some(mut state) = self.states.remove(&id) else { return };
        // Stages in which nothing was ever missing.
        while state.work.get(state.stage).is_some_and(Vec::is_empty) {
            state.stage += 1;
        }
        let mut share = *budget;
        share.nodes /= num_left;
        share.edges /= num_left;
        if state.stage == self.model.stages().len() {
            self.plan_leftover(&mut state, budget, plan);
        } else if state.last_plan < plan.number && share.nodes > 0 {
            let before = (share.nodes, share.edges);
            if state.cut.is_some() {
                self.plan_cut(&mut state, &mut share, plan);
            } else {
                self.plan_nodes(&mut state, &mut share, plan);
            }
            let (nodes, edges) = (before.0 - share.nodes, before.1 - share.edges);
            state.served += (nodes + edges) as u64;
            budget.nodes -= nodes;
            budget.edges -= edges;
            (budget.blocks, budget.rows) = (share.blocks, share.rows);
        }
        self.states.insert(id, state);
    }

    /// Targets that others have computed are only read.
    fn plan_leftover(&mut self, state: &mut State, budget: &mut Budget, plan: &mut Plan) {
        let Some((nodes, mut next)) = state.leftover.take() else { return };
        let mut read = Vec::new();
        while state.last_plan < plan.number && next < nodes.len() {
            let page = Page::Block(nodes[next] >> self.config.shift());
            if !self.hold_all(state, &[page], budget, plan) {
                break;
            }
            read.push(nodes[next]);
            next += 1;
        }
        state.leftover = Some((nodes, next));
        self.collect(state, read, plan);
    }

    #[allow(clippy::unused_self)]
    fn collect(&mut self, state: &State, nodes: Vec<u32>, plan: &mut Plan) {
        if !nodes.is_empty() {
            plan.collects.push(Collect { request_id: state.id, view: state.view, nodes });
        }
    }

    /// As many nodes of the request's stage as can be planned whole.
    fn plan_nodes(&mut self, state: &mut State, budget: &mut Budget, plan: &mut Plan) {
        let model = std::sync::Arc::clone(&self.model);
        let stage = &model.stages()[state.stage];
        let level = state.stage + 1;
        if self.is_cut_by_another(state) {
            return;
        }
        let work = std::mem::take(&mut state.work[state.stage]);
        let holds_all = self.hold_whole_graph(state, budget, plan);
        let mut targets = Vec::new();
        let (mut offsets, mut sources) = (vec![0u32], Vec::new());
        let (mut pages, mut is_full) = (Vec::new(), false);
        let mut num_edges = 0;
        while state.next < work.len() && targets.len() < budget.nodes {
            let node = work[state.next];
            if self.view(state.view).is_present(level, node) {
                self.skip(state, node, level);
                state.next += 1;
                continue;
            }
            let view = self.views[state.view].as_ref().expect("it has a request");
            let adjacency = view.adjacency_of(stage);
            let degree = adjacency.map_or(0, |adjacency| adjacency.degree(node));
            // A node with more edges than a step has goes alone.
            if num_edges + degree > budget.edges && !(targets.is_empty() && plan.tasks.is_empty()) {
                break;
            }
            if !holds_all {
                let first = sources.len();
                if let Some(adjacency) = adjacency {
                    adjacency.extend(node, &mut sources);
                }
                self.pages_of(state, node, &sources[first..], &mut pages);
                if !self.hold_all(state, &pages, budget, plan) {
                    sources.truncate(first);
                    is_full = true;
                    break;
                }
                offsets.push(sources.len() as u32);
            }
            num_edges += degree;
            targets.push(node);
            state.next += 1;
        }
        state.work[state.stage] = work;
        let should_cut = is_full && stage.neighbours.is_some() && targets.len() < FEW_NODES;
        if targets.is_empty() {
            self.end_stage(state, plan);
        } else {
            let edges = self.edge_list(state, stage, &targets, holds_all.then_some(()), (offsets, sources));
            budget.nodes -= targets.len();
            budget.edges = budget.edges.saturating_sub(num_edges);
            self.add_task(state, targets, edges, None, None, num_edges, plan);
        }
        if should_cut && self.cutting.is_none() {
            self.begin_cut(state, budget);
            if plan.tasks.is_empty() {
                self.plan_cut(state, budget, plan);
            }
        }
    }

    /// Another request is cutting the same stage of the same view: its nodes will be there soon.
    fn is_cut_by_another(&self, state: &State) -> bool {
        let other = self.cutting.and_then(|id| self.states.get(&id));
        other.is_some_and(|other| (other.view, other.stage) == (state.view, state.stage))
    }

    /// For a whole graph that fits: all of its blocks and rows are held at once, without a look at each edge.
    fn hold_whole_graph(&mut self, state: &State, budget: &mut Budget, plan: &mut Plan) -> bool {
        let num_blocks = self.view(state.view).num_blocks();
        let source = self.sources[self.source_of[state.view]].as_ref().expect("a view's features stay");
        let num_rows = source.pages.len();
        let fits = |number: usize, left: usize| number <= left;
        if !state.is_whole() || !fits(num_blocks, budget.blocks) || !fits(num_rows, budget.rows) {
            return false;
        }
        let needs_rows = self.model.stages()[state.stage].reads_features() && num_rows > 0;
        let mut pages: Vec<Page> = (0..num_blocks as u32).map(Page::Block).collect();
        if needs_rows {
            pages.extend((0..num_rows as u32).map(Page::Row));
        }
        self.hold_all(state, &pages, budget, plan)
    }

    fn edge_list(
        &self,
        state: &State,
        stage: &Stage,
        targets: &[u32],
        is_whole: Option<()>,
        own: (Vec<u32>, Vec<u32>),
    ) -> EdgeList {
        let Some(adjacency) = self.view(state.view).adjacency_of(stage) else { return EdgeList::None };
        let in_a_row = targets.last().is_some_and(|last| (last - targets[0]) as usize + 1 == targets.len());
        if adjacency.whole().is_some() && in_a_row {
            return EdgeList::Whole { first: targets[0] };
        }
        if is_whole.is_none() {
            return EdgeList::Own { offsets: own.0, sources: own.1 };
        }
        let (mut offsets, mut sources) = (vec![0], Vec::new());
        for &node in targets {
            adjacency.extend(node, &mut sources);
            offsets.push(sources.len() as u32);
        }
        EdgeList::Own { offsets, sources }
    }

    /// A node of the work list that another request has computed.
    fn skip(&mut self, state: &mut State, node: u32, level: usize) {
        self.stats.rows_reused += 1;
        state.num_rows_done += 1;
        if level == self.model.stages().len()
            && let Some((nodes, _)) = &mut state.leftover
        {
            nodes.push(node);
        }
    }

    #[allow(clippy::too_many_arguments)] // The parts of a task.
    fn add_task(
        &mut self,
        state: &mut State,
        targets: Vec<u32>,
        edges: EdgeList,
        degrees: Option<Vec<u32>>,
        partial: Option<Partial>,
        num_edges: usize,
        plan: &mut Plan,
    ) {
        let level = state.stage + 1;
        self.stats.edges_reduced += num_edges as u64;
        plan.views.push(state.view);
        if partial.is_none_or(|partial| partial.ends) {
            let mut last = None;
            for &node in &targets {
                self.view_mut(state.view).set_present(level, node);
                let block = node >> self.config.shift();
                if last.replace(block) != Some(block) {
                    self.blocks.mark_written(&mut self.views, Owner { view: state.view, block });
                }
            }
            self.stats.rows_computed += targets.len() as u64;
            state.num_rows_done += targets.len() as u64;
            if level == self.model.stages().len() {
                self.collect(state, targets.clone(), plan);
            }
        }
        let (view, source, stage) = (state.view, self.source_of[state.view], state.stage);
        plan.tasks.push(TaskSpec { view, source, stage, targets, edges, degrees, partial });
        self.end_stage(state, plan);
    }

    /// Goes to the next stage, from the next plan on, where all nodes of this one are planned.
    #[allow(clippy::unused_self)]
    fn end_stage(&mut self, state: &mut State, plan: &Plan) {
        if state.cut.is_none() && state.next == state.work[state.stage].len() {
            state.work[state.stage] = Vec::new();
            state.last_plan = plan.number;
            state.stage += 1;
            state.next = 0;
        }
    }

    /// Whether the features of its graph go through the cache of rows.
    fn has_rows(&self, state: &State) -> bool {
        let source = self.sources[self.source_of[state.view]].as_ref().expect("a view's features stay");
        self.features.is_some() && source.adopted.is_none()
    }

    /// Pages of what a node reads and writes.
    fn pages_of(&self, state: &State, node: u32, sources: &[u32], pages: &mut Vec<Page>) {
        let stage = &self.model.stages()[state.stage];
        let shift = self.config.shift();
        let has_rows = self.has_rows(state);
        pages.clear();
        pages.push(Page::Block(node >> shift));
        if has_rows && (stage.own == Some(0) || stage.reads_own_features_by_loop()) {
            pages.push(Page::Row(node));
        }
        match stage.neighbours {
            Some((0, _)) if has_rows => pages.extend(sources.iter().map(|&source| Page::Row(source))),
            Some((level, _)) if level > 0 => {
                pages.extend(sources.iter().map(|&source| Page::Block(source >> shift)));
            }
            _ => {}
        }
    }

    /// Holds all pages, or none that counts: false where the budget has too few, or they have to wait for earlier plans.
    fn hold_all(&mut self, state: &State, pages: &[Page], budget: &mut Budget, plan: &mut Plan) -> bool {
        self.count_number += 1;
        let (number, count) = (plan.number, self.count_number);
        let source_id = self.source_of[state.view];
        let view = self.views[state.view].as_mut().expect("it has a request");
        let source = self.sources[source_id].as_mut().expect("a view's features stay");
        let (mut new_blocks, mut new_rows) = (0, 0);
        for page in pages {
            let (pinned, counted, new) = match *page {
                Page::Block(block) => {
                    (view.pinned_by[block as usize], &mut view.counted_by[block as usize], &mut new_blocks)
                }
                Page::Row(row) => {
                    (source.pinned_by[row as usize], &mut source.counted_by[row as usize], &mut new_rows)
                }
            };
            if pinned != number && std::mem::replace(counted, count) != count {
                *new += 1;
            }
        }
        if new_blocks > budget.blocks || new_rows > budget.rows {
            return false;
        }
        plan.views.push(state.view);
        pages.iter().all(|&page| self.hold(state, page, budget, plan))
    }

    fn hold(&mut self, state: &State, page: Page, budget: &mut Budget, plan: &mut Plan) -> bool {
        match page {
            Page::Block(block) => {
                if self.view(state.view).pinned_by[block as usize] == plan.number {
                    return true;
                }
                let owner = Owner { view: state.view, block };
                if budget.blocks == 0 || !self.blocks.pin(&mut self.views, owner, &mut plan.moves) {
                    return false;
                }
                self.view_mut(state.view).pinned_by[block as usize] = plan.number;
                plan.pins.push(owner);
                budget.blocks -= 1;
            }
            Page::Row(node) => {
                let id = self.source_of[state.view];
                let source = self.sources[id].as_ref().expect("a view's features stay");
                if source.pinned_by[node as usize] == plan.number {
                    return true;
                }
                let Some(features) = self.features.as_mut().filter(|_| budget.rows > 0) else { return false };
                if !features.pin(&mut self.sources, id, node, &mut plan.uploads) {
                    return false;
                }
                self.sources[id].as_mut().expect("a view's features stay").pinned_by[node as usize] =
                    plan.number;
                plan.feature_pins.push((id, node));
                budget.rows -= 1;
            }
        }
        true
    }

    /// Takes the next nodes of the stage as a group whose sums are made in parts.
    fn begin_cut(&mut self, state: &mut State, budget: &Budget) {
        let model = std::sync::Arc::clone(&self.model);
        let stage = &model.stages()[state.stage];
        let limits = self.budget();
        let view = self.view(state.view);
        let Some(adjacency) = view.adjacency_of(stage) else { return };
        let mut cut = Cut {
            nodes: Vec::new(),
            offsets: vec![0],
            sources: Vec::new(),
            taken: Vec::new(),
            pages: Vec::new(),
            next_page: 0,
            has_begun: false,
        };
        let needs_rows = self.has_rows(state) && (stage.own == Some(0) || stage.reads_own_features_by_loop());
        let (mut num_blocks, mut last) = (0, None);
        let max_nodes = self.num_accumulators.min(budget.nodes.max(1));
        let work = &state.work[state.stage];
        let mut next = state.next;
        while next < work.len() && cut.nodes.len() < max_nodes {
            let node = work[next];
            let block = node >> self.config.shift();
            let is_new = last != Some(block);
            let is_over = is_new && num_blocks == limits.blocks
                || needs_rows && cut.nodes.len() == limits.rows
                || cut.sources.len() > 4 * self.config.max_step_edges;
            if is_over && !cut.nodes.is_empty() {
                break;
            }
            next += 1;
            if view.is_present(state.stage + 1, node) {
                continue;
            }
            num_blocks += usize::from(is_new);
            last = Some(block);
            adjacency.extend(node, &mut cut.sources);
            cut.offsets.push(cut.sources.len() as u32);
            cut.nodes.push(node);
        }
        if cut.nodes.is_empty() {
            return;
        }
        let shift = if stage.reads_neighbour_features() { 0 } else { self.config.shift() };
        cut.taken = cut.offsets[..cut.nodes.len()].to_vec();
        cut.pages = cut.sources.iter().map(|source| source >> shift).collect();
        cut.pages.sort_unstable();
        cut.pages.dedup();
        self.cutting = Some(state.id);
        state.cut = Some(cut);
    }

    /// The next neighbours of a group, as many as fit.
    fn plan_cut(&mut self, state: &mut State, budget: &mut Budget, plan: &mut Plan) {
        let Some(mut cut) = state.cut.take() else { return };
        let model = std::sync::Arc::clone(&self.model);
        let stage = &model.stages()[state.stage];
        let are_rows = stage.reads_neighbour_features();
        let is_free = are_rows && !self.has_rows(state);
        let first = cut.next_page;
        while !is_free && cut.next_page < cut.pages.len() {
            let page = cut.pages[cut.next_page];
            let page = if are_rows { Page::Row(page) } else { Page::Block(page) };
            if !self.hold_all(state, &[page], budget, plan) {
                break;
            }
            cut.next_page += 1;
        }
        if is_free {
            cut.next_page = cut.pages.len();
        }
        let has_all = cut.next_page == cut.pages.len();
        // The nodes' own pages are needed at the end only.
        let ends = has_all && {
            let mut own = Vec::new();
            cut.nodes.iter().all(|&node| {
                self.pages_of(state, node, &[], &mut own);
                self.hold_all(state, &own, budget, plan)
            })
        };
        if cut.next_page == first && !ends {
            state.cut = Some(cut);
            return;
        }
        let shift = if are_rows { 0 } else { self.config.shift() };
        let end = if has_all { u64::MAX } else { u64::from(cut.pages[cut.next_page]) << shift };
        let (mut offsets, mut sources) = (vec![0], Vec::new());
        for (i, taken) in cut.taken.iter_mut().enumerate() {
            let rest = &cut.sources[*taken as usize..cut.offsets[i + 1] as usize];
            let count = rest.partition_point(|&source| u64::from(source) < end);
            sources.extend_from_slice(&rest[..count]);
            *taken += count as u32;
            offsets.push(sources.len() as u32);
        }
        let degrees = cut.offsets.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let partial = Partial { first_row: 0, begins: !cut.has_begun, ends };
        cut.has_begun = true;
        let num_edges = sources.len();
        budget.edges = budget.edges.saturating_sub(num_edges);
        let nodes = cut.nodes.clone();
        if ends {
            budget.nodes = budget.nodes.saturating_sub(nodes.len());
            self.cutting = None;
            // The group ends where its last node is in the list; what lies between was there already.
            let last = nodes.last().copied();
            let work = &state.work[state.stage];
            let passed = work[state.next..].iter().take_while(|&&node| Some(node) <= last).copied();
            let passed: Vec<u32> = passed.filter(|node| nodes.binary_search(node).is_err()).collect();
            state.next += passed.len() + nodes.len();
            for node in passed {
                self.skip(state, node, state.stage + 1);
            }
        } else {
            state.cut = Some(cut);
        }
        let edges = EdgeList::Own { offsets, sources };
        self.add_task(state, nodes, edges, Some(degrees), Some(partial), num_edges, plan);
    }
}
