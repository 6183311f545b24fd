//! The router of a mixture: its products, and what they end with. Of few tokens it is one launch, which ends with as much of what
//! comes next as it can.

use baton_backend::{
    BackendError, BufferId, GroupScore, Norm, NormKind, Op, Program, Route, RouteScores, WeightFormat,
    WeightId,
};

use crate::grouped::FEW_TILE;
use crate::kernels::SKINNY_TILES;
use crate::kernels::expert_kernels::ROUTE_RING_BYTES;
use crate::layout::Layout;
use crate::ops::{Run, unsupported};
use crate::params::{RouteParams, RouteTilesParams, SkinnyParams, SortParams};
use crate::products::Product;
use crate::weights::Part;

/// Rows of a router that a block takes: one per warp.
const BLOCK_ROWS: u32 = 4;
/// With more tokens the router's product is a library's, or with more columns than a block can keep in shared memory as f32.
const MAX_FEW: u32 = 16;
const MAX_STAGED: usize = 8_704;
/// Slots that the last block of the choice sorts, and experts that the products of a few tokens choose from.
const MAX_SORTED_SLOTS: usize = 1024;
const MAX_FOUND_EXPERTS: usize = 128;

/// As in `route_tiles.cu`: rows of a block, blocks of a cluster, tokens whose slots its last block sorts, slots of a token, threads.
const TILE_ROWS: usize = 16;
const MAX_CLUSTER: usize = 8;
const MAX_TILED: usize = 256;
const MAX_TILED_SLOTS: usize = 64;
const TILED_THREADS: u32 = 512;

/// A router and the experts whose op follows it at once, with the same input.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mixture {
    pub(crate) route: Route,
    gated: WeightId,
    linear: WeightId,
}

/// What the router's launches end with, by the numbers that `experts.cuh` knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The experts of each token are chosen.
    Chosen = 0,
    /// And slots are sorted by expert.
    Sorted = 1,
    /// The experts' own products choose.
    Products = 2,
}

impl Mixture {
    pub(crate) fn find(program: &Program) -> impl Iterator<Item = Self> {
        program.ops.windows(3).filter_map(|ops| match ops {
            [Op::Route(route), Op::ExpertGated(gated), Op::ExpertLinear(linear)]
                if gated.input == route.input
                    && gated.norm == route.norm
                    && gated.routing == route.routing
                    && linear.routing == route.routing
                    && linear.input == gated.output =>
            {
                Some(Self { route: *route, gated: gated.weight, linear: linear.weight })
            }
            _ => None,
        })
    }

    /// Whether these are its experts' weights.
    pub(crate) fn has(&self, experts: WeightId) -> bool {
        self.gated == experts || self.linear == experts
    }
}

impl Run<'_> {
    /// The mixture of a router, or one with these experts.
    pub(crate) fn mixture(&self, is_it: impl Fn(&Mixture) -> bool) -> Option<Mixture> {
        let memory = self.device.experts.as_ref().expect("made when the program was compiled");
        memory.mixtures.iter().find(|mixture| is_it(mixture)).copied()
    }

    /// Whether the router's product is our own kernel's.
    fn is_few_route(&self, op: &Route) -> bool {
        let weight = &self.device.weights[op.weight.0 as usize];
        matches!(weight.parts.as_slice(), [Part { layout: Layout::Plain(_), .. }])
            && self.shape.tokens <= MAX_FEW
            && weight.cols <= MAX_STAGED
            && op.norm.is_none_or(|norm| norm.kind == NormKind::Rms)
    }

    /// Whether all of the router is one launch of clusters, `route_tiles.cu`.
    fn is_tiled_route(&self, mixture: &Mixture) -> bool {
        let op = &mixture.route;
        let weight = &self.device.weights[op.weight.0 as usize];
        !self.device.kernels.experts().route_tiles.is_empty()
            && self.grouped_tile(mixture.gated, op.num_slots()).is_some()
            && matches!(weight.parts.as_slice(), [part] if part.layout == Layout::Plain(WeightFormat::BF16))
            && weight.rows <= TILE_ROWS * MAX_CLUSTER
            && weight.cols.is_multiple_of(64)
            && self.tokens() <= MAX_TILED
            && op.num_slots() <= MAX_TILED_SLOTS
            && op.norm.is_some_and(|norm| norm.kind == NormKind::Rms)
    }

    pub(crate) fn route_finish(&self, mixture: &Mixture) -> Finish {
        let op = &mixture.route;
        let weights = &self.device.weights;
        if self.is_tiled_route(mixture) {
            return Finish::Sorted;
        }
        let is_few = self.is_few_route(op);
        let num_experts = weights[op.weight.0 as usize].rows - usize::from(op.has_shared_gate);
        let num_slots = self.tokens() * op.num_slots();
        let is_whole = |id: WeightId| weights[id.0 as usize].parts.len() == 1;
        match self.grouped_tile(mixture.gated, op.num_slots()) {
            Some(FEW_TILE) if is_few => Finish::Sorted,
            Some(_) if !is_few && num_slots <= MAX_SORTED_SLOTS => Finish::Sorted,
            None if is_few
                && num_experts <= MAX_FOUND_EXPERTS
                && is_whole(mixture.gated)
                && is_whole(mixture.linear) =>
            {
                Finish::Products
            }
            _ => Finish::Chosen,
        }
    }

    /// How the router before these experts ended, if it stands right before them.
    pub(crate) fn finish_before(&self, experts: WeightId) -> Option<Finish> {
        self.mixture(|mixture| mixture.has(experts)).map(|mixture| self.route_finish(&mixture))
    }

    pub(crate) fn route(&mut self, op: &Route) -> Result<(), BackendError> {
        let tokens = self.shape.tokens;
        if tokens == 0 {
            return Ok(());
        }
        let mixture = self.mixture(|mixture| mixture.route == *op);
        let finish = mixture.map_or(Finish::Chosen, |mixture| self.route_finish(&mixture));
        let mut params = RouteParams { finish: finish as u32, ..self.route_params(op)? };
        if let (Finish::Sorted, Some(mixture)) = (finish, mixture) {
            params.sort = self.sort_params(mixture.gated, op.routing);
        }
        if mixture.is_some_and(|mixture| self.is_tiled_route(&mixture)) {
            return self.route_tiles(op, params);
        }
        let weight = &self.device.weights[op.weight.0 as usize];
        if let [Part { layout: Layout::Plain(format), .. }] = weight.parts.as_slice()
            && self.is_few_route(op)
        {
            if finish == Finish::Sorted && op.norm.is_some() {
                params.normed = self.device.normed.address();
            }
            let function = self.device.kernels.expert_products(*format).route;
            let grid = (params.num_rows.div_ceil(BLOCK_ROWS), tokens);
            // SAFETY: the struct is the kernel's; products and arrivals were made for the largest step.
            return unsafe { self.device.gpu.launch(function, grid, 128, 4 * params.cols, &params) };
        }
        self.route_many(op, &params)
    }

    fn route_tiles(&self, op: &Route, route: RouteParams) -> Result<(), BackendError> {
        let device = &*self.device;
        let weight = &device.weights[op.weight.0 as usize];
        let tokens = self.shape.tokens;
        let which = usize::from(tokens > 8 * SKINNY_TILES[0]);
        let cluster = weight.rows.div_ceil(TILE_ROWS) as u32;
        let params = RouteTilesParams {
            product: SkinnyParams {
                step: route.step,
                weight: route.weight,
                input: route.input,
                norm: route.norm,
                eps: route.eps,
                num_rows: route.num_rows,
                cols: route.cols,
                num_tokens: tokens,
                ..SkinnyParams::default()
            },
            route: RouteParams { normed: device.normed.address(), ..route },
            cluster,
        };
        let blocks = cluster * tokens.div_ceil(8 * SKINNY_TILES[which]);
        let function = device.kernels.experts().route_tiles[which];
        // SAFETY: the struct is the kernel's; normed rows and arrivals were made for the largest step.
        unsafe {
            device.gpu.launch_clusters(function, (blocks, cluster), TILED_THREADS, ROUTE_RING_BYTES, &params)
        }
    }

    fn route_many(&mut self, op: &Route, params: &RouteParams) -> Result<(), BackendError> {
        let tokens = self.shape.tokens;
        let (rows, cols) = self.weight_size(op.weight);
        let input = self.normed(op.input, op.norm.as_ref(), cols)?;
        self.product(&Product {
            input,
            is_fp8: false,
            m: self.tokens(),
            max_m: self.device.max_tokens,
            weight: op.weight,
            bias: None,
            output: params.products,
            output_stride: rows,
            accumulate: false,
            is_f32: true,
            softcap: None,
        })?;
        let function = self.device.kernels.experts().choose;
        // SAFETY: the struct is the kernel's; the products are those of these tokens.
        unsafe { self.device.gpu.launch(function, (tokens.div_ceil(4), 1), 128, 0, params) }
    }

    /// The rows of experts, normed as their router's were: those that the router has left, or new ones.
    pub(crate) fn normed_for_experts(
        &mut self,
        experts: WeightId,
        input: BufferId,
        norm: Option<&Norm>,
    ) -> Result<u64, BackendError> {
        let cols = self.device.weights[experts.0 as usize].cols;
        let mixture = self.mixture(|mixture| mixture.has(experts));
        let is_there = match mixture {
            Some(mixture) if !self.is_few_route(&mixture.route) => true,
            Some(mixture) => self.route_finish(&mixture) == Finish::Sorted,
            None => false,
        };
        if is_there && norm.is_some() {
            return Ok(self.device.normed.address());
        }
        self.normed(input, norm, cols)
    }

    pub(crate) fn sort_params(&self, experts: WeightId, routing: BufferId) -> SortParams {
        let device = &*self.device;
        let memory = device.experts.as_ref().expect("made when the program was compiled");
        let (routing, num_slots) = self.routing(routing);
        let tile = self.grouped_tile(experts, num_slots).unwrap_or(FEW_TILE);
        SortParams {
            step: device.step.address(),
            routing,
            num_tiles: memory.num_tiles(),
            tiles: memory.tiles(),
            places: memory.places.address(),
            sources: memory.sources.address(),
            num_tokens: self.shape.tokens,
            num_slots: num_slots as u32,
            num_experts: device.weights[experts.0 as usize].num_experts as u32,
            tile_rows: tile as u32,
        }
    }

    pub(crate) fn route_params(&self, op: &Route) -> Result<RouteParams, BackendError> {
        let device = &*self.device;
        let memory = device.experts.as_ref().expect("made when the program was compiled");
        let weight = &device.weights[op.weight.0 as usize];
        let part = weight.parts.first().ok_or_else(|| unsupported("a router without rows"))?;
        Ok(RouteParams {
            step: device.step.address(),
            weight: part.memory.address(),
            row_bytes: part.unit_bytes as u64,
            input: self.buffer(op.input, weight.cols)?,
            norm: self.vector(op.norm.map(|norm| norm.weight)),
            bias: self.vector(op.bias),
            selection_bias: self.vector(op.selection_bias),
            products: memory.products.address(),
            arrivals: memory.arrivals.address(),
            normed: 0,
            routing: self.routing(op.routing).0,
            num_tokens: self.shape.tokens,
            num_rows: weight.rows as u32,
            cols: weight.cols as u32,
            num_experts: (weight.rows - usize::from(op.has_shared_gate)) as u32,
            top_k: op.top_k as u32,
            num_shared: op.num_shared as u32,
            has_shared_gate: u32::from(op.has_shared_gate),
            is_sigmoid: u32::from(op.scores == RouteScores::Sigmoid),
            normalizes: u32::from(op.normalizes),
            num_groups: op.groups.map_or(0, |groups| groups.count as u32),
            chosen_groups: op.groups.map_or(0, |groups| groups.chosen as u32),
            sums_two: u32::from(op.groups.is_some_and(|groups| groups.score == GroupScore::BestTwo)),
            eps: op.norm.map_or(0.0, |norm| norm.eps),
            scale: op.scale,
            finish: Finish::Chosen as u32,
            sort: SortParams::default(),
        })
    }
}
