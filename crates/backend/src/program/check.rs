//! The checks of a program when it is compiled, and what a step of it must then bring.
//!
//! Kernels index by the shapes that ops name, so nothing of an op is believed: every handle exists, every width agrees, a
//! weight was loaded for what it is used for, and rows that were dropped are not read again. Those of experts are in
//! `check_experts.rs`.

use crate::{
    ActivatedLinear, AddPositions, Attention, BackendError, BufferId, BufferShape, Embed, EncoderAttention,
    GatedLinear, Handles, KeepLogitRows, KvSpec, Linear, Logits, Norm, NormKind, NormOp, Op, Program, Qkv,
    RopeId, Sample, StepInput, VectorId, WeightId, WeightShape, WeightUse,
};

/// What a step brings for a program, and what the program needs of the KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepNeeds {
    /// Plans of attention that its items are in.
    pub num_plans: usize,
    /// The most tokens and rows of logits that its buffers hold.
    pub max_tokens: usize,
    pub max_logit_rows: usize,
    /// Token ids are below it, where tokens are looked up.
    pub vocab_size: Option<usize>,
    /// Positions are below it, where they are looked up.
    pub max_positions: Option<usize>,
    pub kv_layers: Vec<KvLayerNeeds>,
}

/// A layer of the cache as an op uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayerNeeds {
    /// Of the op in the program.
    pub op: usize,
    pub layer: usize,
    pub num_heads: usize,
    pub head_dim: usize,
    /// Where the op writes keys and values.
    pub num_kv_heads: Option<usize>,
}

impl StepNeeds {
    /// Whether a step brings what the program's ops index by. Part of [`StepInput::check`].
    pub fn check_step(&self, input: &StepInput) -> Result<(), BackendError> {
        let wrong = |cause: String| Err(BackendError::Device { cause });
        let (tokens, logit_rows) = (input.num_tokens(), input.logit_rows.len());
        if tokens > self.max_tokens || logit_rows > self.max_logit_rows {
            return wrong(format!(
                "a step of {tokens} tokens and {logit_rows} rows of logits, but the program's buffers have {} and {} rows",
                self.max_tokens, self.max_logit_rows
            ));
        }
        if input.attention.len() < self.num_plans && tokens > 0 {
            return wrong(format!(
                "a step with {} attention plans, but the program needs {}",
                input.attention.len(),
                self.num_plans
            ));
        }
        // Rows that take what the step before drew have no token yet.
        let is_fed = |row: usize| input.feedback.iter().any(|(fed, _)| *fed as usize == row);
        let unknown = |size: usize| {
            let mut rows = input.token_ids.iter().enumerate();
            rows.find(|&(row, &token)| token as usize >= size && !is_fed(row)).zip(Some(size))
        };
        if let Some(((_, token), size)) = self.vocab_size.and_then(unknown) {
            return wrong(format!("token {token} is outside the vocabulary of {size}"));
        }
        let is_beyond = |most: usize| input.positions.iter().find(|&&position| position as usize >= most);
        match self.max_positions.and_then(is_beyond) {
            Some(position) => wrong(format!("position {position} is beyond the model's table of positions")),
            None => Ok(()),
        }
    }

    /// Whether a cache has the layers.
    pub fn check_cache(&self, cache: &KvSpec) -> Result<(), BackendError> {
        for needs in &self.kv_layers {
            let name = if needs.num_kv_heads.is_some() { "qkv" } else { "attention" };
            let wrong = |cause: String| Err(BackendError::InvalidOp { op: needs.op, name, cause });
            let Some(layer) = cache.layers.get(needs.layer) else {
                return wrong(format!("layer {} of a KV cache of {}", needs.layer, cache.layers.len()));
            };
            if layer.head_dim != needs.head_dim {
                let KvLayerNeeds { head_dim, layer: number, .. } = needs;
                return wrong(format!(
                    "heads of {head_dim}, but layer {number} of the KV cache has {}",
                    layer.head_dim
                ));
            }
            if needs.num_kv_heads.is_some_and(|num_kv_heads| num_kv_heads != layer.num_kv_heads)
                || !needs.num_heads.is_multiple_of(layer.num_kv_heads)
            {
                return wrong(format!(
                    "{} heads over {} kv heads, but layer {} of the KV cache has {}",
                    needs.num_heads,
                    needs.num_kv_heads.map_or_else(|| "any".to_owned(), |heads| heads.to_string()),
                    needs.layer,
                    layer.num_kv_heads
                ));
            }
        }
        Ok(())
    }
}

pub(super) type Checked<T = ()> = Result<T, String>;

pub(super) fn check(program: &Program, handles: &Handles) -> Result<StepNeeds, BackendError> {
    let needs = StepNeeds {
        num_plans: 0,
        max_tokens: usize::MAX,
        max_logit_rows: usize::MAX,
        vocab_size: None,
        max_positions: None,
        kv_layers: Vec::new(),
    };
    let mut checker = Checker { handles, needs, windows: Vec::new(), kept: None };
    for (index, op) in program.ops.iter().enumerate() {
        let checked = checker.check_rows(op).and_then(|()| checker.check_op(index, op));
        checked.map_err(|cause| BackendError::InvalidOp { op: index, name: op.name(), cause })?;
    }
    Ok(checker.needs)
}

pub(super) struct Checker<'a> {
    pub(super) handles: &'a Handles,
    pub(super) needs: StepNeeds,
    /// Of every plan that an op has named.
    windows: Vec<(usize, Option<u32>)>,
    /// The buffers that hold the rows with logits, once the others were dropped.
    kept: Option<Vec<BufferId>>,
}

pub(super) fn require(ok: bool, cause: impl FnOnce() -> String) -> Checked {
    if ok { Ok(()) } else { Err(cause()) }
}

impl Checker<'_> {
    /// After rows were dropped, only buffers that followed are read, and nothing mixes rows.
    fn check_rows(&mut self, op: &Op) -> Checked {
        if let (Op::KeepLogitRows(keep), None) = (op, &self.kept) {
            self.kept = Some(keep.buffers.clone());
            return Ok(());
        }
        let Some(kept) = &mut self.kept else { return Ok(()) };
        require(
            !matches!(
                op,
                Op::Qkv(_)
                    | Op::LatentKv(_)
                    | Op::Attention(_)
                    | Op::EncoderAttention(_)
                    | Op::Embed(_)
                    | Op::AddPositions(_)
            ),
            || "rows without logits were dropped before it".to_owned(),
        )?;
        let adds_to = op.writes().filter(|_| op.accumulates());
        if let Some(buffer) = op.reads().into_iter().chain(adds_to).find(|buffer| !kept.contains(buffer)) {
            return Err(format!(
                "buffer {} still has all rows, but those without logits were dropped",
                buffer.0
            ));
        }
        kept.extend(op.writes());
        Ok(())
    }

    fn check_op(&mut self, index: usize, op: &Op) -> Checked {
        match op {
            Op::Embed(op) => self.embed(op),
            Op::AddPositions(op) => self.add_positions(*op),
            Op::Norm(op) => self.norm_op(op),
            Op::Linear(op) => self.linear(op),
            Op::ActivatedLinear(op) => self.activated(op),
            Op::GatedLinear(op) => self.gated(op),
            Op::Route(op) => self.route(op),
            Op::ExpertGated(op) => self.expert_gated(op),
            Op::ExpertLinear(op) => self.expert_linear(op),
            Op::HeadLinear(op) => self.head_linear(op),
            Op::LatentKv(op) => self.latent_kv(index, op),
            Op::Qkv(op) => self.qkv(index, op),
            Op::Attention(op) => self.attention(index, op),
            Op::EncoderAttention(op) => self.encoder_attention(op),
            Op::KeepLogitRows(KeepLogitRows { buffers }) => {
                buffers.iter().try_for_each(|buffer| self.activations(*buffer).map(drop))
            }
            Op::Logits(op) => self.logits(op),
            Op::Sample(Sample { logits }) => self.logits_buffer(*logits).map(drop),
        }
    }

    fn embed(&mut self, op: &Embed) -> Checked {
        let (rows, cols) = self.table(op.weight)?;
        let vocab_size = self.needs.vocab_size.map_or(rows, |other| other.min(rows));
        self.needs.vocab_size = Some(vocab_size);
        self.width("the output", op.output, cols)
    }

    fn add_positions(&mut self, op: AddPositions) -> Checked {
        let (rows, cols) = self.table(op.weight)?;
        let max_positions = self.needs.max_positions.map_or(rows, |other| other.min(rows));
        self.needs.max_positions = Some(max_positions);
        self.width("the output", op.output, cols)
    }

    fn norm_op(&mut self, op: &NormOp) -> Checked {
        let cols = self.activations(op.input)?.cols;
        self.norm(Some(&op.norm), cols)?;
        self.width("the output", op.output, cols)
    }

    fn linear(&mut self, op: &Linear) -> Checked {
        let (rows, cols) = self.product(op.weight, op.bias)?;
        self.norm(op.norm.as_ref(), cols)?;
        self.width("the input", op.input, cols)?;
        self.width("the output", op.output, rows)
    }

    fn activated(&mut self, op: &ActivatedLinear) -> Checked {
        require(!op.activation.needs_gate(), || format!("{:?} without a gate", op.activation))?;
        let (rows, cols) = self.product(op.weight, op.bias)?;
        self.norm(op.norm.as_ref(), cols)?;
        self.width("the input", op.input, cols)?;
        self.width("the output", op.output, rows)
    }

    fn gated(&mut self, op: &GatedLinear) -> Checked {
        let (rows, cols) = self.product(op.weight, op.bias)?;
        require(rows.is_multiple_of(2), || format!("a gate and its product in {rows} rows"))?;
        self.norm(op.norm.as_ref(), cols)?;
        self.width("the input", op.input, cols)?;
        self.width("the output", op.output, rows / 2)
    }

    fn qkv(&mut self, index: usize, op: &Qkv) -> Checked {
        let (rows, cols) = self.product(op.weight, op.bias)?;
        self.norm(op.norm.as_ref(), cols)?;
        self.width("the input", op.input, cols)?;
        let head_dim = self.head_dim(op.output, op.num_heads)?;
        let kv_rows = rows.checked_sub(op.num_heads * head_dim).filter(|rows| *rows > 0);
        let kv_rows = kv_rows.filter(|rows| rows.is_multiple_of(2 * head_dim)).ok_or_else(|| {
            format!("a weight of {rows} rows has no q, k and v for {} heads of {head_dim}", op.num_heads)
        })?;
        let num_kv_heads = kv_rows / (2 * head_dim);
        self.norm(op.q_norm.as_ref(), op.norm_span.weight_len(op.num_heads, head_dim))?;
        self.norm(op.k_norm.as_ref(), op.norm_span.weight_len(num_kv_heads, head_dim))?;
        self.rope(op.rope, head_dim)?;
        self.kv_layer(KvLayerNeeds {
            op: index,
            layer: op.layer,
            num_heads: op.num_heads,
            head_dim,
            num_kv_heads: Some(num_kv_heads),
        })
    }

    fn attention(&mut self, index: usize, op: &Attention) -> Checked {
        let head_dim = self.head_dim(op.query, op.num_heads)?;
        self.width("the output", op.output, op.num_heads * head_dim)?;
        self.vector("the vector of slopes", op.alibi, op.num_heads)?;
        self.vector("the vector of sinks", op.sinks, op.num_heads)?;
        require(op.window != Some(0), || "a window of 0 keys".to_owned())?;
        match self.windows.iter().find(|(plan, _)| *plan == op.plan) {
            Some((plan, window)) => require(*window == op.window, || {
                format!("window {:?} by plan {plan}, which is for {window:?}", op.window)
            })?,
            None => self.windows.push((op.plan, op.window)),
        }
        self.needs.num_plans = self.needs.num_plans.max(op.plan.saturating_add(1));
        self.kv_layer(KvLayerNeeds {
            op: index,
            layer: op.layer,
            num_heads: op.num_heads,
            head_dim,
            num_kv_heads: None,
        })
    }

    fn encoder_attention(&mut self, op: &EncoderAttention) -> Checked {
        let head_dim = self.head_dim(op.output, op.num_heads)?;
        self.width("q, k and v", op.qkv, 3 * op.num_heads * head_dim)?;
        self.rope(op.rope, head_dim)
    }

    fn logits(&mut self, op: &Logits) -> Checked {
        let (rows, cols) = self.product(op.weight, op.bias)?;
        self.norm(op.norm.as_ref(), cols)?;
        self.width("the input", op.input, cols)?;
        let output = self.logits_buffer(op.output)?;
        require(output.cols == rows, || width_of("the width of the logits", output.cols, rows))
    }

    pub(super) fn weight(&self, id: WeightId) -> Checked<&WeightShape> {
        self.handles.weight(id).ok_or_else(|| format!("no such weight as {}", id.0))
    }

    /// Rows and columns of a weight in which rows are looked up.
    fn table(&self, id: WeightId) -> Checked<(usize, usize)> {
        let weight = self.weight(id)?;
        let is_table = matches!(weight.usage, WeightUse::Embedding | WeightUse::EmbeddingAndLinear);
        require(is_table, || format!("weight {} was not loaded for lookups", id.0))?;
        Ok((weight.rows, weight.cols))
    }

    /// Rows and columns of a weight that is multiplied with, whose bias has a value for each row.
    pub(super) fn product(&self, id: WeightId, bias: Option<VectorId>) -> Checked<(usize, usize)> {
        let weight = self.weight(id)?;
        require(weight.usage != WeightUse::Embedding, || {
            format!("weight {} was loaded for lookups only", id.0)
        })?;
        require(!matches!(weight.usage, WeightUse::Experts(_)), || {
            format!("weight {} was loaded as experts", id.0)
        })?;
        self.vector("the bias", bias, weight.rows)?;
        Ok((weight.rows, weight.cols))
    }

    pub(super) fn vector(&self, what: &str, id: Option<VectorId>, len: usize) -> Checked {
        let Some(id) = id else { return Ok(()) };
        let have = *self
            .handles
            .vectors
            .get(id.0 as usize)
            .ok_or_else(|| format!("no such vector as {} for {what}", id.0))?;
        require(have == len, || width_of(what, have, len))
    }

    pub(super) fn norm(&self, norm: Option<&Norm>, cols: usize) -> Checked {
        let Some(norm) = norm else { return Ok(()) };
        self.vector("the weight of a norm", Some(norm.weight), cols)?;
        match norm.kind {
            NormKind::Rms => Ok(()),
            NormKind::Layer { bias } => self.vector("the bias of a norm", bias, cols),
        }
    }

    fn rope(&self, id: Option<RopeId>, head_dim: usize) -> Checked {
        let Some(id) = id else { return Ok(()) };
        let rotary_dim = *self
            .handles
            .ropes
            .get(id.0 as usize)
            .ok_or_else(|| format!("no such rotary table as {}", id.0))?;
        require(rotary_dim <= head_dim, || {
            format!("a rotary table of {rotary_dim} dimensions for heads of {head_dim}")
        })
    }

    pub(super) fn buffer(&self, id: BufferId) -> Checked<BufferShape> {
        self.handles.buffer(id).ok_or_else(|| format!("no such buffer as {}", id.0))
    }

    /// A buffer with a row for every token, of those that are not dropped.
    pub(super) fn activations(&mut self, id: BufferId) -> Checked<BufferShape> {
        let buffer = self.buffer(id)?;
        require(!buffer.is_logits, || format!("buffer {} is for logits", id.0))?;
        self.needs.max_tokens = self.needs.max_tokens.min(buffer.rows);
        Ok(buffer)
    }

    fn logits_buffer(&mut self, id: BufferId) -> Checked<BufferShape> {
        let buffer = self.buffer(id)?;
        require(buffer.is_logits, || format!("buffer {} is not for logits: see create_logits", id.0))?;
        self.needs.max_logit_rows = self.needs.max_logit_rows.min(buffer.rows);
        Ok(buffer)
    }

    pub(super) fn width(&mut self, what: &str, id: BufferId, cols: usize) -> Checked {
        let buffer = self.activations(id)?;
        require(buffer.cols == cols, || width_of(what, buffer.cols, cols))
    }

    /// Of a buffer with a row of heads.
    fn head_dim(&mut self, id: BufferId, num_heads: usize) -> Checked<usize> {
        let cols = self.activations(id)?.cols;
        require(num_heads > 0 && cols.is_multiple_of(num_heads), || {
            format!("{num_heads} heads in a buffer of {cols} columns")
        })?;
        Ok(cols / num_heads)
    }

    /// Two ops of a layer see the same heads.
    pub(super) fn kv_layer(&mut self, needs: KvLayerNeeds) -> Checked {
        let same = self.needs.kv_layers.iter().filter(|other| other.layer == needs.layer);
        for other in same {
            require(other.head_dim == needs.head_dim, || {
                format!(
                    "heads of {}, but op {} uses layer {} with heads of {}",
                    needs.head_dim, other.op, needs.layer, other.head_dim
                )
            })?;
        }
        self.needs.kv_layers.push(needs);
        Ok(())
    }
}

pub(super) fn width_of(what: &str, have: usize, expected: usize) -> String {
    format!("{what} is of {have}, expected {expected}")
}
