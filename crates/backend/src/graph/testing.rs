//! What every [`GraphDevice`] must do, as one check against the oracle: for the tests of the crates that have one.

use super::{
    ConvTask, GraphDevice, HostRows, LinearId, Moves, Partial, Reduce, ReferenceGraph, RowDtype, RowMap,
    RowSource, Segments, TableId, Upload,
};
use crate::testing::Random;
use crate::{BlockCopy, Tensor};

const SHIFT: u32 = 2;
const NUM_NODES: usize = 203;
const NUM_PAGES: usize = NUM_NODES.div_ceil(1 << SHIFT);

/// A random graph over pages in a random order.
struct Case {
    cols: usize,
    outputs: usize,
    dtype: RowDtype,
    offsets: Vec<u32>,
    sources: Vec<u32>,
    scales: Vec<f32>,
    pages: Vec<u32>,
    targets: Vec<u32>,
    features: HostRows,
    weights: Vec<Tensor>,
    bias: Vec<f32>,
}

impl Case {
    fn new(cols: usize, outputs: usize, dtype: RowDtype, random: &mut Random) -> Self {
        let mut offsets = vec![0];
        let mut sources = Vec::new();
        for _ in 0..NUM_NODES {
            // Some have none, most a few, some very many.
            let degree = [0, 1, 2, 5, 9, 40, 300][random.below(7)];
            sources.extend((0..degree).map(|_| random.below(NUM_NODES) as u32));
            offsets.push(sources.len() as u32);
        }
        let scale_of = |pair: &[u32]| 1.0 / ((pair[1] - pair[0] + 1) as f32).sqrt();
        let scales = offsets.windows(2).map(scale_of).collect();
        let mut pages: Vec<u32> = (0..NUM_PAGES as u32).collect();
        for i in (1..pages.len()).rev() {
            pages.swap(i, random.below(i + 1));
        }
        let scale = 1.0 / (cols as f32).sqrt();
        let mut weight = |cols: usize| {
            let values: Vec<f32> = random.normals(outputs * cols).iter().map(|x| x * scale).collect();
            Tensor::from_f32(outputs, cols, &values).expect("a matrix")
        };
        let weights = vec![weight(cols), weight(2 * cols)];
        let features = HostRows::from_f32(NUM_NODES, cols, random.normals(NUM_NODES * cols));
        Self {
            cols,
            outputs,
            dtype,
            offsets,
            sources,
            scales,
            pages,
            targets: (0..NUM_NODES as u32).collect(),
            features: features.expect("a matrix").to_dtype(dtype),
            weights,
            bias: random.normals(outputs),
        }
    }
}

/// A device with what a case needs.
struct Loaded<'a> {
    device: &'a mut dyn GraphDevice,
    input: TableId,
    output: TableId,
    linears: Vec<LinearId>,
}

impl<'a> Loaded<'a> {
    fn new(device: &'a mut dyn GraphDevice, case: &Case) -> Self {
        let rows = NUM_PAGES << SHIFT;
        let input = device.create_table(rows, rows, case.cols, case.dtype).expect("a table");
        let output = device.create_table(rows, 0, case.outputs, case.dtype).expect("a table");
        let linears = vec![
            device.load_linear(&case.weights[0], None).expect("a weight"),
            device.load_linear(&case.weights[1], Some(&case.bias)).expect("a weight"),
        ];
        let map = RowMap::Pages { pages: &case.pages, shift: SHIFT };
        let rows = (0..NUM_NODES as u32).map(|node| (node, map.row(node) as u32)).collect();
        let upload = Upload { table: input, values: case.features.clone(), rows };
        let moves = Moves { uploads: vec![upload], ..Moves::default() };
        device.run(&moves, &[], &Moves::default()).expect("uploads");
        Self { device, input, output, linears }
    }

    /// All nodes through one layer, in `cuts` tasks after each other.
    fn layer(&mut self, case: &Case, reduce: Option<Reduce>, own: bool, finish: (bool, bool), cuts: usize) {
        let map = RowMap::Pages { pages: &case.pages, shift: SHIFT };
        let source = RowSource { table: self.input, map };
        let degrees: Vec<u32> = case.offsets.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let linear = self.linears[usize::from(reduce.is_some() && own)];
        for cut in 0..cuts {
            // The same share of every node's sources in each cut.
            let (mut offsets, mut sources) = (vec![0], Vec::new());
            for pair in case.offsets.windows(2) {
                let all = &case.sources[pair[0] as usize..pair[1] as usize];
                sources.extend_from_slice(&all[all.len() * cut / cuts..all.len() * (cut + 1) / cuts]);
                offsets.push(sources.len() as u32);
            }
            let segments = Segments {
                offsets: &offsets,
                sources: &sources,
                degrees: (cuts > 1).then_some(&degrees),
                scales: (reduce == Some(Reduce::Gcn)).then_some(&case.scales),
            };
            let partial =
                (cuts > 1).then_some(Partial { first_row: 3, begins: cut == 0, ends: cut + 1 == cuts });
            let task = ConvTask {
                neighbours: reduce.map(|reduce| (source, reduce, segments)),
                own: own.then_some(source),
                targets: &case.targets,
                partial,
                linear,
                relu: finish.0,
                normalize: finish.1,
                output: RowSource { table: self.output, map },
            };
            self.device.run(&Moves::default(), &[task], &Moves::default()).expect("runs");
        }
    }

    fn output(&mut self, case: &Case) -> Vec<f32> {
        let map = RowMap::Pages { pages: &case.pages, shift: SHIFT };
        let mut values = vec![0.0; NUM_NODES * case.outputs];
        let source = RowSource { table: self.output, map };
        self.device.read_rows(source, &case.targets, &mut values).expect("reads");
        values
    }
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    // A NaN on one side only is a difference.
    let difference = |(a, b): (&f32, &f32)| {
        if a.is_nan() == b.is_nan() { (a - b).abs() / a.abs().max(1.0) } else { f32::INFINITY }
    };
    a.iter().zip(b).map(difference).fold(0.0, f32::max)
}

/// Compares a device with the oracle: every reduction, odd widths, both precisions, cut tasks, swaps. Panics where they differ.
pub fn check_device(make: &mut dyn FnMut() -> Box<dyn GraphDevice>) {
    let mut random = Random::new(11);
    for (cols, outputs) in [(128, 128), (1, 1), (34, 7), (200, 65), (16, 300)] {
        for dtype in [RowDtype::F32, RowDtype::BF16] {
            let case = Case::new(cols, outputs, dtype, &mut random);
            let mut device = make();
            let mut oracle = ReferenceGraph::new(true);
            for device in [&mut *device, &mut oracle as &mut dyn GraphDevice] {
                device.create_accumulators(NUM_NODES + 3, cols).expect("accumulators");
            }
            let mut device = Loaded::new(&mut *device, &case);
            let mut oracle = Loaded::new(&mut oracle, &case);
            check_layers(&case, &mut device, &mut oracle);
            check_swaps(&case, &mut device);
        }
    }
}

fn check_layers(case: &Case, device: &mut Loaded<'_>, oracle: &mut Loaded<'_>) {
    let tolerance = if case.dtype == RowDtype::F32 { 5e-6 } else { 8e-3 };
    let kinds = [
        (Some(Reduce::Mean), true),
        (Some(Reduce::Max), true),
        (Some(Reduce::Gcn), false),
        (Some(Reduce::Mean), false),
        (None, true),
    ];
    for (reduce, own) in kinds {
        for finish in [(false, false), (true, false), (false, true), (true, true)] {
            let name = format!("{reduce:?} own {own} finish {finish:?} {}x{}", case.cols, case.outputs);
            oracle.layer(case, reduce, own, finish, 1);
            device.layer(case, reduce, own, finish, 1);
            let whole = device.output(case);
            let difference = largest_difference(&oracle.output(case), &whole);
            assert!(difference <= tolerance, "{name} {:?}: differs by {difference}", case.dtype);
            if reduce.is_some() {
                device.layer(case, reduce, own, finish, 3);
                let cut = device.output(case);
                assert!(cut.iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}: cut");
            }
        }
    }
}

/// Everything out and back to other blocks, some of it beside a task: the same rows.
fn check_swaps(case: &Case, device: &mut Loaded<'_>) {
    device.layer(case, Some(Reduce::Mean), true, (false, false), 1);
    let before = device.output(case);
    let moves = |swap_out: Vec<BlockCopy>, swap_in: Vec<BlockCopy>| Moves {
        block_rows: 1 << SHIFT,
        tables: vec![device.input],
        swap_out,
        swap_in,
        uploads: Vec::new(),
    };
    let num_pages = NUM_PAGES as u32;
    let out = (0..num_pages).map(|block| BlockCopy { from: block, to: num_pages - 1 - block }).collect();
    let back = (0..num_pages).map(|block| BlockCopy { from: block, to: (block + 5) % num_pages }).collect();
    let (out, back) = (moves(out, Vec::new()), moves(Vec::new(), back));
    device.device.run(&Moves::default(), &[], &out).expect("swaps out");
    device.device.run(&back, &[], &Moves::default()).expect("swaps in");
    let pages = case.pages.iter().map(|page| (num_pages - 1 - page + 5) % num_pages).collect();
    let moved = Case {
        pages,
        offsets: case.offsets.clone(),
        sources: case.sources.clone(),
        scales: case.scales.clone(),
        targets: case.targets.clone(),
        features: case.features.clone(),
        weights: case.weights.clone(),
        bias: case.bias.clone(),
        ..*case
    };
    device.layer(&moved, Some(Reduce::Mean), true, (false, false), 1);
    let after = device.output(&moved);
    assert!(before.iter().zip(&after).all(|(a, b)| a.to_bits() == b.to_bits()), "swapped rows differ");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oracle_agrees_with_itself() {
        check_device(&mut || Box::new(ReferenceGraph::new(true)));
    }

    /// A star by hand: the oracle is what PyTorch Geometric's formulas say.
    #[test]
    fn a_star_by_hand() {
        let mut device = ReferenceGraph::new(true);
        let rows =
            HostRows::from_f32(4, 2, vec![1.0, 2.0, 3.0, -4.0, 5.0, 6.0, 0.5, 0.25]).expect("a matrix");
        let features = device.adopt_rows(rows).expect("a table");
        let output = device.create_table(4, 0, 2, RowDtype::F32).expect("a table");
        let identity = Tensor::from_f32(2, 2, &[1.0, 0.0, 0.0, 1.0]).expect("a matrix");
        let linear = device.load_linear(&identity, Some(&[0.5, 0.0])).expect("a weight");
        let source = |table| RowSource { table, map: RowMap::Identity };
        let scales = [0.5, 1.0, 1.0, 1.0];
        let mut run = |reduce, relu, normalize| {
            let scales = (reduce == Reduce::Gcn).then_some(&scales[..]);
            let segments = Segments { offsets: &[0, 3, 3], sources: &[1, 2, 3], degrees: None, scales };
            let task = ConvTask {
                neighbours: Some((source(features), reduce, segments)),
                own: None,
                targets: &[0, 1],
                partial: None,
                linear,
                relu,
                normalize,
                output: source(output),
            };
            device.run(&Moves::default(), &[task], &Moves::default()).expect("runs");
            let mut values = vec![0.0; 4];
            device.read_rows(source(output), &[0, 1], &mut values).expect("reads");
            values
        };
        assert_eq!(run(Reduce::Mean, false, false), [8.5 / 3.0 + 0.5, 0.75, 0.5, 0.0]);
        assert_eq!(run(Reduce::Max, true, false), [5.5, 6.0, 0.5, 0.0]);
        // 0.5 · (8.5 + 0.5 · 1), 0.5 · (2.25 + 0.5 · 2); the second node has only its loop.
        assert_eq!(run(Reduce::Gcn, true, false), [5.0, 1.625, 3.5, 0.0]);
        assert_eq!(run(Reduce::Gcn, false, true)[2..], [3.5 / 28.25f32.sqrt(), -4.0 / 28.25f32.sqrt()]);
    }
}
