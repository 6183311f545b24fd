//! `baton inspect --program`: the ops a step of the model runs, as the decoder writes them for any device.
//!
//! The weights go to a device that keeps none, so that only norms and biases are read. Where there is a configuration alone,
//! weights are made up in its shapes.

use std::io::Write;

use anyhow::Result;
use baton_backend::{Backend, Handles, MockBackend, MockOptions, OpRow, Program, StepLimits};
use baton_model::{Decoder, LoadFormat, ModelFiles};

use crate::args::ProgramFormat;
use crate::table::{Align, Table};

/// A program and what its handles stand for.
#[derive(Debug)]
pub struct Listing {
    program: Program,
    handles: Handles,
}

impl Listing {
    pub fn new(files: &ModelFiles) -> Result<Self> {
        let dummy;
        let files = if files.describe().num_tensors > 0 {
            files
        } else {
            dummy = ModelFiles::open(&files.describe().path, LoadFormat::Dummy)?;
            &dummy
        };
        let config = files.config();
        // Rows of buffers are not shown, and a step of one row has all ops.
        let limits = StepLimits {
            max_tokens: 1,
            max_seqs: 1,
            max_logit_rows: 1,
            max_samples: 1,
            max_model_len: config.max_model_len,
            vocab_size: config.vocab_size,
        };
        let mut backend = MockBackend::new(MockOptions::default());
        let decoder = Decoder::load(config, &*files.weights()?, &mut backend, &limits, &mut |_| ())?;
        backend.compile(decoder.program())?;
        Ok(Self { program: decoder.program().clone(), handles: backend.handles().clone() })
    }

    pub fn rows(&self) -> Vec<OpRow> {
        self.program.rows(&self.handles)
    }

    pub fn print(&self, format: ProgramFormat, out: &mut dyn Write) -> Result<()> {
        match format {
            ProgramFormat::Table => write!(out, "{}", self.table())?,
            ProgramFormat::Dot => write!(out, "{}", self.program.to_dot(&self.handles))?,
        }
        Ok(())
    }

    fn table(&self) -> Table {
        let left = Align::Left;
        let mut table = Table::new(&[Align::Right, left, left, left, left, Align::Right, left]);
        table.row(["#", "OP", "INPUTS", "WEIGHT", "OUTPUT", "KV LAYER", "DETAILS"]);
        for row in self.rows() {
            let layer = row.kv_layer.map_or_else(String::new, |layer| layer.to_string());
            let number = row.number.to_string();
            table.row([&number, row.op, &row.inputs, &row.weight, &row.output, &layer, &row.details]);
        }
        table
    }
}
