//! `baton graph bench`: whole-graph inference again and again, or overlapping sets of targets with and without sharing.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use baton_graph::{
    Graph, GraphConfig, GraphData, GraphEngine, GraphModel, GraphModelConfig, GraphRequest, GraphStats,
    NanPolicy, files, synthetic,
};
use serde_json::json;

use super::open_device;
use crate::graph_args::GraphBenchArgs;

/// Targets of each overlapping set.
const SET_TARGETS: usize = 2000;

pub fn run(args: &GraphBenchArgs, out: &mut dyn Write) -> Result<()> {
    let model = match &args.model {
        Some(path) => GraphModel::open(path, None)?,
        None => synthetic::sage(&args.widths, GraphModelConfig::default(), 1)?,
    };
    let data = Arc::new(graph(args, model.num_features())?);
    match args.overlap {
        Some(sets) => overlapping(args, &model, &data, sets, out),
        None => whole(args, model, &data, out),
    }
}

fn graph(args: &GraphBenchArgs, cols: usize) -> Result<GraphData> {
    let (graph, features) = if let (Some(edges), Some(features)) = (&args.edges_file, &args.features) {
        let features = files::read_features(features)?;
        let edges = files::read_edges(edges)?;
        let edge = |edge: usize| (edges.sources[edge], edges.targets[edge]);
        (Graph::from_columns(features.rows(), edges.sources.len(), edge)?, features)
    } else {
        let graph = synthetic::power_law(args.nodes, args.num_edges, 1)?;
        let features = synthetic::features(args.nodes, cols, 2);
        (graph, features.ok_or_else(|| anyhow::anyhow!("--nodes {} is too large", args.nodes))?)
    };
    Ok(GraphData::new("bench", 1, graph, features, NanPolicy::Reject)?)
}

fn median(seconds: &[f64]) -> f64 {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

fn whole(args: &GraphBenchArgs, model: GraphModel, data: &Arc<GraphData>, out: &mut dyn Write) -> Result<()> {
    let num_layers = model.num_layers();
    let mut engine = GraphEngine::new(model, open_device(&args.engine)?, args.engine.config())?;
    let (mut seconds, mut before) = (Vec::new(), GraphStats::default());
    // The first one warms up.
    for repeat in 0..=args.repeat.max(1) {
        let start = Instant::now();
        engine.add_graph(GraphRequest::whole(Arc::clone(data)))?;
        let outputs = engine.run_all()?;
        let elapsed = start.elapsed().as_secs_f64();
        outputs.into_iter().try_for_each(|output| output.result.map(|_| ()))?;
        if repeat > 0 {
            seconds.push(elapsed);
        } else {
            before = engine.stats();
        }
        // Nothing is left for the next one to find.
        engine.remove_graph("bench");
    }
    let (median, stats) = (median(&seconds), engine.stats());
    let runs = seconds.len() as f64;
    let edges_per_second = (data.graph().num_edges() * num_layers) as f64 / median;
    let moving = (stats.moving_seconds - before.moving_seconds) / runs;
    let computing = (stats.computing_seconds - before.computing_seconds) / runs;
    if args.json {
        let result = json!({
            "device": engine.device().description, "nodes": data.num_nodes(), "edges": data.graph().num_edges(),
            "seconds": seconds, "median_seconds": median, "edges_per_second": edges_per_second,
            "moving_seconds": moving, "computing_seconds": computing,
            "swapped_out": stats.swaps.swapped_out, "swapped_in": stats.swaps.swapped_in,
            "feature_hit_rate": stats.features.hit_rate(),
        });
        writeln!(out, "{result}")?;
        return Ok(());
    }
    writeln!(out, "{}", engine.device().description)?;
    writeln!(out, "{} nodes, {} edges, {num_layers} layers", data.num_nodes(), data.graph().num_edges())?;
    writeln!(
        out,
        "{:.1} ms for the whole graph (median of {}), {:.1} M edges/s",
        median * 1e3,
        seconds.len(),
        edges_per_second / 1e6
    )?;
    writeln!(out, "{:.1} ms computing, {:.1} ms moving", computing * 1e3, moving * 1e3)?;
    if stats.features.hits + stats.features.misses > 0 {
        writeln!(out, "feature cache: {:.1} % hits", 100.0 * stats.features.hit_rate())?;
    }
    Ok(())
}

fn overlapping(
    args: &GraphBenchArgs,
    model: &GraphModel,
    data: &Arc<GraphData>,
    sets: usize,
    out: &mut dyn Write,
) -> Result<()> {
    let num_nodes = data.num_nodes() as u64;
    // Nine tenths of each set are common to all.
    let set = |set: usize| {
        let common = (0..SET_TARGETS as u64 * 9 / 10).map(|i| i * 7919 % num_nodes);
        let own = (0..SET_TARGETS as u64 / 10).map(|i| (i * 104_729 + set as u64 * 31 + 1) % num_nodes);
        let mut nodes: Vec<u32> = common.chain(own).map(|node| node as u32).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    };
    let requests: Vec<GraphRequest> = (0..sets)
        .map(|number| GraphRequest { targets: Some(set(number)), ..GraphRequest::whole(Arc::clone(data)) })
        .collect();
    let mut results = Vec::new();
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..args.repeat.max(1) {
        for (place, enable_sharing) in [true, false].into_iter().enumerate() {
            let config = GraphConfig { enable_sharing, ..args.engine.config() };
            let mut engine = GraphEngine::new(model.clone(), open_device(&args.engine)?, config)?;
            let start = Instant::now();
            for request in &requests {
                engine.add_graph(request.clone())?;
            }
            engine.run_all()?.into_iter().try_for_each(|output| output.result.map(|_| ()))?;
            times[place].push(start.elapsed().as_secs_f64());
            results.push((enable_sharing, engine.stats().rows_computed));
        }
    }
    let (with, without) = (median(&times[0]), median(&times[1]));
    let rows = |sharing| results.iter().find(|(with, _)| *with == sharing).map_or(0, |(_, rows)| *rows);
    if args.json {
        let result = json!({
            "sets": sets, "shared_seconds": with, "unshared_seconds": without, "speedup": without / with,
            "shared_rows": rows(true), "unshared_rows": rows(false),
        });
        writeln!(out, "{result}")?;
    } else {
        writeln!(
            out,
            "{sets} sets: {:.1} ms shared ({} rows), {:.1} ms without ({} rows): {:.1} times as fast",
            with * 1e3,
            rows(true),
            without * 1e3,
            rows(false),
            without / with
        )?;
    }
    Ok(())
}
