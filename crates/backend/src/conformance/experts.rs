//! Mixtures of experts: every way to choose them, and their products in every format of weights.

use super::ops::{built, steps};
use super::{Built, Case, inputs, limits};
use crate::reference::experts::route_row;
use crate::testing::{Random, random_tensor};
use crate::{
    Activation, Backend, BackendError, Embed, ExpertGated, ExpertLinear, GroupScore, Norm, NormKind, Op,
    Route, RouteGroups, RouteScores, StepLimits, Tensor, WeightFormat, WeightUse,
};

/// How far the products of a router may be off without another choice: twice what rounding its input and its weight to bf16
/// does to those of these cases.
const ROUTER_ERROR: f32 = 0.1;
/// Random errors that a token's choice must stand.
const NUM_TRIALS: usize = 32;
const EPS: f32 = 1e-5;

pub(super) fn cases() -> Vec<Case> {
    let plain = Mixture::default();
    let mut cases: Vec<Case> = WeightFormat::ALL
        .into_iter()
        .map(|format| mixture(format!("experts {format}"), Mixture { format, ..plain }))
        .collect();
    let groups = |score| Some(RouteGroups { count: 4, chosen: 2, score });
    let sigmoid = RouteScores::Sigmoid;
    let more = [
        ("softmax without normalising", Mixture { normalizes: false, ..plain }),
        ("in groups by their best", Mixture { groups: groups(GroupScore::Best), ..plain }),
        (
            "in groups by their two best, sigmoid with bias",
            Mixture { groups: groups(GroupScore::BestTwo), scores: sigmoid, has_bias: true, ..plain },
        ),
        ("with shared ones", Mixture { num_shared: 2, ..plain }),
        ("with a gate of shared ones", Mixture { num_shared: 1, has_shared_gate: true, ..plain }),
        ("with biases", Mixture { has_product_bias: true, ..plain }),
        ("gelu", Mixture { activation: Activation::GeluTanh, ..plain }),
        ("as of gpt-oss", Mixture { activation: Activation::ClampedSwiglu, has_product_bias: true, ..plain }),
        // Odd sizes: neither whole panels nor whole tiles.
        (
            "of odd sizes",
            Mixture { format: WeightFormat::F32, hidden: 88, width: 24, num_experts: 5, top_k: 5, ..plain },
        ),
        ("of one", Mixture { num_experts: 1, top_k: 1, ..plain }),
        ("of many", Mixture { num_experts: 128, top_k: 8, hidden: 256, width: 128, ..plain }),
    ];
    cases.extend(more.map(|(name, mix)| mixture(format!("experts {name}"), mix)));
    // Routers in the format of most files, and experts as wide as those of some models.
    let bf16 = Mixture { router: WeightFormat::BF16, ..plain };
    let wide = Mixture { hidden: 256, top_k: 8, ..bf16 };
    let more = [
        ("plain", bf16),
        (
            "softmax without normalising, with shared ones",
            Mixture { normalizes: false, num_shared: 2, ..bf16 },
        ),
        ("in groups by their best", Mixture { groups: groups(GroupScore::Best), ..bf16 }),
        ("sigmoid with bias", Mixture { scores: sigmoid, has_bias: true, ..bf16 }),
        ("with a gate of shared ones", Mixture { num_shared: 1, has_shared_gate: true, ..bf16 }),
        ("of one", Mixture { num_experts: 1, top_k: 1, ..bf16 }),
        ("of many", Mixture { num_experts: 128, width: 128, ..wide }),
        ("768 wide", Mixture { width: 768, ..wide }),
        (
            "1288 wide with shared ones",
            Mixture { num_experts: 8, top_k: 6, num_shared: 2, width: 1288, ..wide },
        ),
    ];
    cases.extend(more.map(|(name, mix)| mixture(format!("experts, router in bf16, {name}"), mix)));
    cases.push(many_tokens(Mixture { num_experts: 16, top_k: 4, width: 64, hidden: 256, ..bf16 }));
    for (hidden, width, num_experts) in [(256, 128, 4), (512, 256, 9), (320, 64, 8)] {
        let mix = Mixture { hidden, width, num_experts, top_k: 3, num_shared: 1, ..plain };
        cases.push(many_tokens(mix));
    }
    cases
}

#[derive(Clone, Copy)]
struct Mixture {
    format: WeightFormat,
    hidden: usize,
    width: usize,
    num_experts: usize,
    top_k: usize,
    scores: RouteScores,
    normalizes: bool,
    groups: Option<RouteGroups>,
    has_bias: bool,
    has_product_bias: bool,
    num_shared: usize,
    has_shared_gate: bool,
    activation: Activation,
    /// The format of the router.
    router: WeightFormat,
}

impl Default for Mixture {
    fn default() -> Self {
        Self {
            format: WeightFormat::BF16,
            hidden: 512,
            width: 256,
            num_experts: 16,
            top_k: 4,
            scores: RouteScores::Softmax,
            normalizes: true,
            groups: None,
            has_bias: false,
            has_product_bias: false,
            num_shared: 0,
            has_shared_gate: false,
            activation: Activation::Silu,
            router: WeightFormat::F32,
        }
    }
}

impl Mixture {
    /// A program of the three ops, whose results are added to the rows that went in.
    fn build(
        &self,
        backend: &mut dyn Backend,
        limits: &StepLimits,
        random: &mut Random,
    ) -> Result<Built, BackendError> {
        backend.set_limits(limits)?;
        let max_tokens = limits.max_tokens;
        let hidden = backend.create_buffer(max_tokens, self.hidden)?;
        let all = self.num_experts + self.num_shared;
        let slots = self.top_k + self.num_shared;
        let rows = self.num_experts + usize::from(self.has_shared_gate);
        let router = random_tensor(self.router, rows, self.hidden, 0.3, random);
        let norm_weight = random.normals(self.hidden);
        let mut values = |len: usize, scale: f32| -> Vec<f32> {
            random.normals(len).iter().map(|value| value * scale).collect()
        };
        let (bias, selection_bias) = (values(rows, 0.3), values(self.num_experts, 0.3));
        let (gated_bias, linear_bias) = (values(all * 2 * self.width, 0.1), values(all * self.hidden, 0.1));
        let mut vector =
            |wanted: bool, values: &[f32]| wanted.then(|| backend.load_vector(values)).transpose();
        let norm = vector(true, &norm_weight)?;
        let norm = norm.map(|weight| Norm { kind: NormKind::Rms, weight, eps: EPS });
        let router_bias = vector(self.has_product_bias, &bias)?;
        let selection = vector(self.has_bias, &selection_bias)?;
        let gated_bias = vector(self.has_product_bias, &gated_bias)?;
        let linear_bias = vector(self.has_product_bias, &linear_bias)?;
        let mut experts = |rows: usize, cols: usize| {
            // Gate and up of an expert, and experts themselves, come as parts.
            let parts: Vec<_> =
                (0..all * 2).map(|_| random_tensor(self.format, rows / 2, cols, 0.1, random)).collect();
            backend.load_weight(&parts, WeightUse::Experts(all))
        };
        let gated = experts(2 * self.width, self.hidden)?;
        let linear = experts(self.hidden, self.width)?;
        let routing = backend.create_logits(max_tokens, 2 * slots)?;
        let inner = backend.create_buffer(max_tokens, slots * self.width)?;
        let route = Route {
            input: hidden,
            norm,
            weight: backend.load_weight(std::slice::from_ref(&router), WeightUse::Linear)?,
            bias: router_bias,
            scores: self.scores,
            selection_bias: selection,
            groups: self.groups,
            top_k: self.top_k,
            normalizes: self.normalizes,
            scale: 1.5,
            num_shared: self.num_shared,
            has_shared_gate: self.has_shared_gate,
            routing,
        };
        let choice = Choice {
            route: &route,
            router: floats(&router.to_f32().expect("a router is small")),
            norm: norm_weight,
            bias: self.has_product_bias.then_some(bias),
            selection_bias: self.has_bias.then_some(selection_bias),
            num_experts: self.num_experts,
        };
        let table = choice.settled_rows(max_tokens, random);
        let weight = backend.load_weight(&[table], WeightUse::Embedding)?;
        let ops = vec![
            Op::Embed(Embed { weight, scale: 1.0, output: hidden }),
            Op::Route(route),
            Op::ExpertGated(ExpertGated {
                input: hidden,
                norm,
                routing,
                weight: gated,
                bias: gated_bias,
                activation: self.activation,
                output: inner,
            }),
            Op::ExpertLinear(ExpertLinear {
                input: inner,
                routing,
                weight: linear,
                bias: linear_bias,
                output: hidden,
                accumulate: true,
            }),
        ];
        built(backend, ops, hidden)
    }
}

/// What decides a token's experts.
struct Choice<'a> {
    route: &'a Route,
    router: Vec<f32>, // [rows, hidden]
    norm: Vec<f32>,
    bias: Option<Vec<f32>>,
    selection_bias: Option<Vec<f32>>,
    num_experts: usize,
}

impl Choice<'_> {
    /// Rows whose experts do not hang on the last bits, so that a device which rounds must choose the same.
    fn settled_rows(&self, count: usize, random: &mut Random) -> Tensor {
        let hidden = self.norm.len();
        let mut rows = Vec::with_capacity(count * hidden);
        while rows.len() < count * hidden {
            let row = floats(&inputs(1, hidden, random));
            if self.is_settled(&row, random) {
                rows.extend(row);
            }
        }
        Tensor::from_f32(count, hidden, &rows).expect("as many values as the shape says")
    }

    fn is_settled(&self, row: &[f32], random: &mut Random) -> bool {
        let square = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
        let factor = (square + EPS).sqrt().recip();
        let normed: Vec<f32> = row.iter().zip(&self.norm).map(|(x, weight)| x * factor * weight).collect();
        let mut products: Vec<f32> = self
            .router
            .chunks_exact(row.len())
            .map(|weights| weights.iter().zip(&normed).map(|(weight, x)| weight * x).sum())
            .collect();
        for (product, bias) in products.iter_mut().zip(self.bias.iter().flatten()) {
            *product += bias;
        }
        let chosen = self.chosen(&products);
        (0..NUM_TRIALS).all(|_| {
            let mut off = |product: &f32| product + [ROUTER_ERROR, -ROUTER_ERROR][random.below(2)];
            let products: Vec<f32> = products.iter().map(&mut off).collect();
            self.chosen(&products) == chosen
        })
    }

    /// The numbers of the experts, in their order.
    fn chosen(&self, products: &[f32]) -> Vec<u32> {
        let row = route_row(self.route, products, self.num_experts, self.selection_bias.as_deref());
        let mut experts: Vec<u32> = row[..self.route.top_k].iter().map(|expert| *expert as u32).collect();
        experts.sort_unstable();
        experts
    }
}

/// The values of a tensor of F32.
fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.bytes().as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect()
}

fn mixture(name: String, mix: Mixture) -> Case {
    Case::new(name, steps([1, 2, 5, 8, 9, 40]), move |backend| {
        mix.build(backend, &limits(), &mut Random::new(21))
    })
    .allowing(2.0)
}

/// Enough tokens for several tiles of an expert.
fn many_tokens(mix: Mixture) -> Case {
    const TOKENS: usize = 520;
    let router = if mix.router == WeightFormat::F32 { "" } else { ", router in bf16" };
    let name =
        format!("experts of many tokens, {} x {} x {}{router}", mix.num_experts, mix.width, mix.hidden);
    Case::new(name, steps([9, 17, 130, 200, TOKENS]), move |backend| {
        let limits = StepLimits { max_tokens: TOKENS, ..limits() };
        mix.build(backend, &limits, &mut Random::new(22))
    })
    .allowing(2.0)
}
