//! The oracle: the same op in plain loops. Tables are f32 and rounded where they are written.

use half::bf16;

use super::{
    ConvTask, GraphDevice, GraphDeviceInfo, GraphStepTimes, HostRows, LinearId, Moves, Reduce, RowDtype,
    RowSource, TableId,
};
use crate::{BackendError, Tensor};

struct Linear {
    rows: usize,
    cols: usize,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

struct Table {
    cols: usize,
    dtype: RowDtype,
    /// Device rows, then host rows.
    values: Vec<f32>,
    device_rows: usize,
}

impl Table {
    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..(row + 1) * self.cols]
    }

    fn write(&mut self, row: usize, values: &[f32]) {
        let dtype = self.dtype;
        let target = &mut self.values[row * self.cols..(row + 1) * self.cols];
        for (target, value) in target.iter_mut().zip(values) {
            *target = match dtype {
                RowDtype::F32 => *value,
                RowDtype::BF16 => bf16::from_f32(*value).to_f32(),
            };
        }
    }

    fn copy_rows(&mut self, from: usize, to: usize, count: usize) {
        let cols = self.cols;
        self.values.copy_within(from * cols..(from + count) * cols, to * cols);
    }
}

/// Plain loops on one thread.
#[derive(Default)]
pub struct ReferenceGraph {
    linears: Vec<Linear>,
    tables: Vec<Option<Table>>,
    accumulators: Vec<Vec<f32>>,
    reads_host_memory: bool,
}

impl std::fmt::Debug for ReferenceGraph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ReferenceGraph({} tables)", self.tables.len())
    }
}

impl ReferenceGraph {
    /// A device that reads features where they are, or one that has to be given them.
    pub fn new(reads_host_memory: bool) -> Self {
        Self { reads_host_memory, ..Self::default() }
    }

    fn table(&self, table: TableId) -> &Table {
        self.tables[table.0 as usize].as_ref().expect("a table is used before it is dropped")
    }

    fn table_mut(&mut self, table: TableId) -> &mut Table {
        self.tables[table.0 as usize].as_mut().expect("a table is used before it is dropped")
    }

    fn add_table(&mut self, table: Table) -> TableId {
        self.tables.push(Some(table));
        TableId(self.tables.len() as u32 - 1)
    }

    fn do_moves(&mut self, moves: &Moves) {
        let size = moves.block_rows;
        for &id in &moves.tables {
            let table = self.table_mut(id);
            let host = table.device_rows;
            for copy in &moves.swap_out {
                table.copy_rows(copy.from as usize * size, host + copy.to as usize * size, size);
            }
            for copy in &moves.swap_in {
                table.copy_rows(host + copy.from as usize * size, copy.to as usize * size, size);
            }
        }
        for upload in &moves.uploads {
            let mut values = vec![0.0; upload.values.cols()];
            for &(from, to) in &upload.rows {
                upload.values.read_row(from as usize, &mut values);
                self.table_mut(upload.table).write(to as usize, &values);
            }
        }
    }

    fn compute(&mut self, task: &ConvTask<'_>) {
        for (i, &target) in task.targets.iter().enumerate() {
            let mut input = Vec::new();
            if let Some((source, reduce, segments)) = &task.neighbours {
                let table = self.table(source.table);
                let mut sums = match task.partial {
                    Some(partial) if !partial.begins => {
                        self.accumulators[partial.first_row + i][..table.cols].to_vec()
                    }
                    _ => vec![if *reduce == Reduce::Max { f32::NEG_INFINITY } else { 0.0 }; table.cols],
                };
                let range = segments.offsets[i] as usize..segments.offsets[i + 1] as usize;
                let scale_of = |node: u32| segments.scales.map_or(1.0, |scales| scales[node as usize]);
                for &node in &segments.sources[range.clone()] {
                    for (sum, value) in sums.iter_mut().zip(table.row(source.map.row(node))) {
                        *sum = match reduce {
                            Reduce::Mean => *sum + value,
                            Reduce::Max => sum.max(*value),
                            Reduce::Gcn => scale_of(node).mul_add(*value, *sum),
                        };
                    }
                }
                if let Some(partial) = task.partial.filter(|partial| !partial.ends) {
                    self.accumulators[partial.first_row + i][..sums.len()].copy_from_slice(&sums);
                    continue;
                }
                let degree = segments.degrees.map_or(range.len(), |degrees| degrees[i] as usize);
                match reduce {
                    Reduce::Mean => sums.iter_mut().for_each(|sum| *sum /= degree.max(1) as f32),
                    Reduce::Max if degree == 0 => sums.fill(0.0),
                    Reduce::Max => {}
                    // Only here is the node's own row among those that are read.
                    Reduce::Gcn => {
                        let scale = scale_of(target);
                        for (sum, own) in sums.iter_mut().zip(table.row(source.map.row(target))) {
                            *sum = scale * scale.mul_add(*own, *sum);
                        }
                    }
                }
                input = sums;
            }
            if let Some(own) = &task.own {
                input.extend_from_slice(self.table(own.table).row(own.map.row(target)));
            }
            let output = self.finish(task, &input);
            let row = task.output.map.row(target);
            self.table_mut(task.output.table).write(row, &output);
        }
    }

    fn finish(&self, task: &ConvTask<'_>, input: &[f32]) -> Vec<f32> {
        let linear = &self.linears[task.linear.0 as usize];
        assert_eq!(input.len(), linear.cols, "the input of a task is as wide as its weight");
        let mut output: Vec<f32> = (0..linear.rows)
            .map(|row| {
                let weights = &linear.weight[row * linear.cols..(row + 1) * linear.cols];
                let sum: f64 = weights.iter().zip(input).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                sum as f32 + linear.bias.as_ref().map_or(0.0, |bias| bias[row])
            })
            .collect();
        if task.normalize {
            let norm = output.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt().max(1e-12);
            for x in &mut output {
                *x = (f64::from(*x) / norm) as f32;
            }
        }
        if task.relu {
            // Not `max`, which would make a zero of a NaN.
            for x in &mut output {
                *x = if *x < 0.0 { 0.0 } else { *x };
            }
        }
        output
    }
}

impl GraphDevice for ReferenceGraph {
    fn info(&self) -> GraphDeviceInfo {
        GraphDeviceInfo {
            name: "reference".to_owned(),
            description: "plain f32 loops on one thread".to_owned(),
            free_bytes: 1 << 34,
            reads_host_memory: self.reads_host_memory,
        }
    }

    fn load_linear(&mut self, weight: &Tensor, bias: Option<&[f32]>) -> Result<LinearId, BackendError> {
        let (rows, cols) = (weight.rows(), weight.cols());
        let mut values = vec![0.0; rows * cols];
        for (row, target) in values.chunks_exact_mut(cols.max(1)).enumerate() {
            weight.dequantize_row(row, target);
        }
        self.linears.push(Linear { rows, cols, weight: values, bias: bias.map(<[f32]>::to_vec) });
        Ok(LinearId(self.linears.len() as u32 - 1))
    }

    fn create_table(
        &mut self,
        device_rows: usize,
        host_rows: usize,
        cols: usize,
        dtype: RowDtype,
    ) -> Result<TableId, BackendError> {
        // NaN, so that reading what nobody has written shows.
        let values = vec![f32::NAN; (device_rows + host_rows) * cols];
        Ok(self.add_table(Table { cols, dtype, values, device_rows }))
    }

    fn adopt_rows(&mut self, rows: HostRows) -> Result<TableId, BackendError> {
        let mut values = vec![0.0; rows.rows() * rows.cols()];
        for (row, target) in values.chunks_exact_mut(rows.cols().max(1)).enumerate() {
            rows.read_row(row, target);
        }
        let device_rows = rows.rows();
        Ok(self.add_table(Table { cols: rows.cols(), dtype: rows.dtype(), values, device_rows }))
    }

    fn drop_table(&mut self, table: TableId) {
        self.tables[table.0 as usize] = None;
    }

    fn create_accumulators(&mut self, rows: usize, cols: usize) -> Result<(), BackendError> {
        self.accumulators = vec![vec![f32::NAN; cols]; rows];
        Ok(())
    }

    fn run(
        &mut self,
        before: &Moves,
        tasks: &[ConvTask<'_>],
        beside: &Moves,
    ) -> Result<GraphStepTimes, BackendError> {
        self.do_moves(before);
        for task in tasks {
            self.compute(task);
        }
        self.do_moves(beside);
        Ok(GraphStepTimes::default())
    }

    fn read_rows(
        &mut self,
        source: RowSource<'_>,
        nodes: &[u32],
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        let table = self.table(source.table);
        for (&node, out) in nodes.iter().zip(out.chunks_exact_mut(table.cols)) {
            out.copy_from_slice(table.row(source.map.row(node)));
        }
        Ok(())
    }
}
