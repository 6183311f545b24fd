//! `baton graph`: embeddings of a graph's nodes, and how fast they come.

mod bench;
mod run;

use std::io::Write;

use anyhow::Result;
use baton_backend::graph::GraphDevice;
use baton_cpu::{CpuGraph, CpuOptions};
use baton_cuda::{CudaGraph, CudaOptions};

use crate::errors::hinted;
use crate::graph_args::{GraphCommand, GraphEngineArgs};

pub fn run(command: &GraphCommand, out: &mut dyn Write) -> Result<()> {
    match command {
        GraphCommand::Run(args) => run::run(args, out),
        GraphCommand::Bench(args) => bench::run(args, out),
    }
}

/// The device that a graph engine is to run on.
pub fn open_device(args: &GraphEngineArgs) -> Result<Box<dyn GraphDevice>> {
    match args.graph_device.as_str() {
        "cpu" => {
            let options = CpuOptions { threads: args.graph_threads, pin: true, ..CpuOptions::default() };
            Ok(Box::new(CpuGraph::new(options)?))
        }
        "cuda" => cuda(0),
        other if other.starts_with("cuda:") => {
            let number = other["cuda:".len()..].parse();
            cuda(number.map_err(|_| hinted(format!("--graph-device {other}"), "write cuda:0, cuda:1, …"))?)
        }
        other => Err(hinted(format!("--graph-device {other}: no such device"), "use cpu, cuda or cuda:N")),
    }
}

fn cuda(ordinal: usize) -> Result<Box<dyn GraphDevice>> {
    Ok(Box::new(CudaGraph::new(&CudaOptions { ordinal, ..CudaOptions::default() })?))
}
