//! `baton graph run`: files in, a NumPy file out.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use baton_graph::{
    Graph, GraphData, GraphEngine, GraphModel, GraphRequest, NanPolicy, Sampling,
    files::{self, EdgeColumns},
};

use super::open_device;
use crate::errors::hinted;
use crate::graph_args::{GraphRunArgs, NanArg};
use crate::progress;

pub fn run(args: &GraphRunArgs, out: &mut dyn Write) -> Result<()> {
    let model = GraphModel::open(&args.model, None)?;
    let data = read_graph(args)?;
    let nodes = args.targets.as_ref().map(|path| files::read_nodes(path)).transpose()?;
    let targets = nodes.map(|nodes| files::targets_of(&nodes, data.num_nodes())).transpose()?;
    let sampling = sampling(&args.fan_outs, args.seed)?;
    let mut engine = GraphEngine::new(model, open_device(&args.engine)?, args.engine.config())?;
    let start = Instant::now();
    let id = engine.add_graph(GraphRequest { data: Arc::new(data), targets, sampling, priority: 0 })?;
    let bar = progress::count(0);
    bar.set_message("rows");
    let mut outputs = Vec::new();
    while engine.has_requests() {
        outputs.extend(engine.step()?);
        if let Some(progress) = engine.progress(id) {
            bar.set_length(progress.num_rows);
            bar.set_position(progress.num_rows_done);
        }
    }
    bar.finish_and_clear();
    let seconds = start.elapsed().as_secs_f64();
    let output = outputs.pop().ok_or_else(|| anyhow::anyhow!("the engine gave no embeddings"))?;
    let embeddings = output.result?;
    files::write_embeddings(&args.out, &embeddings)?;
    let rows = embeddings.values.len() / embeddings.cols;
    writeln!(
        out,
        "{rows} embeddings of {} values in {seconds:.3} s: {}",
        embeddings.cols,
        args.out.display()
    )?;
    let stats = engine.stats();
    if stats.swaps.swapped_out > 0 {
        let (to, back) = (stats.swaps.swapped_out, stats.swaps.swapped_in);
        writeln!(
            out,
            "{to} blocks went to the host and {back} came back: --graph-memory is {} bytes",
            args.engine.graph_memory
        )?;
    }
    if stats.features.hits + stats.features.misses > 0 {
        writeln!(out, "feature cache: {:.1} % hits", 100.0 * stats.features.hit_rate())?;
    }
    Ok(())
}

fn read_graph(args: &GraphRunArgs) -> Result<GraphData> {
    let features = files::read_features(&args.features)?;
    let EdgeColumns { mut sources, mut targets } = files::read_edges(&args.edges)?;
    if args.undirected {
        let forward = sources.clone();
        sources.extend_from_slice(&targets);
        targets.extend(forward);
    }
    let graph = Graph::from_columns(features.rows(), sources.len(), |edge| (sources[edge], targets[edge]))?;
    let nan_policy = match args.nan {
        NanArg::Reject => NanPolicy::Reject,
        NanArg::Allow => NanPolicy::Allow,
    };
    Ok(GraphData::new("graph", 1, graph, features, nan_policy)?)
}

fn sampling(fan_outs: &[i64], seed: u64) -> Result<Option<Sampling>> {
    if fan_outs.is_empty() {
        return Ok(None);
    }
    let fan_out = |&fan_out: &i64| match fan_out {
        -1 => Ok(usize::MAX),
        _ => usize::try_from(fan_out)
            .map_err(|_| hinted(format!("--fan-outs {fan_out}"), "write numbers from 1 on, or -1 for all")),
    };
    let fan_outs = fan_outs.iter().map(fan_out).collect::<Result<_>>()?;
    Ok(Some(Sampling { fan_outs, seed }))
}
