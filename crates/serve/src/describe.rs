//! What the server offers, for documentation that is made from the code instead of beside it.

use baton_engine::EngineStats;
use baton_graph::GraphStats;

use crate::metrics::{CacheInfo, Metrics, ServerFigures};
use crate::routes::ROUTES;

#[derive(Clone, Copy, Debug)]
pub struct RouteInfo {
    pub method: &'static str,
    pub path: &'static str,
    pub summary: &'static str,
}

#[derive(Clone, Debug)]
pub struct MetricInfo {
    pub name: String,
    /// `counter`, `gauge` or `histogram`.
    pub kind: String,
    pub help: String,
}

/// Every route of the API; the files of the console are not part of it.
pub fn routes() -> Vec<RouteInfo> {
    let info = |route: &crate::routes::Route| RouteInfo {
        method: route.method,
        path: route.path,
        summary: route.summary,
    };
    ROUTES.iter().map(info).collect()
}

/// Every metric, read from the page that a server without any request shows.
pub fn metrics() -> Vec<MetricInfo> {
    let cache = CacheInfo { block_size: 1, num_gpu_blocks: 1, num_cpu_blocks: 0 };
    let figures =
        ServerFigures { num_in_flight: 0, uptime_s: 0.0, num_lost_log_lines: 0, models: Some((1, 0, 0)) };
    let page =
        Metrics::new("", 1, cache).render(&EngineStats::default(), Some(&GraphStats::default()), figures);
    let lines: Vec<&str> = page.lines().collect();
    let metric = |pair: &[&str]| {
        let (name, help) = pair[0].strip_prefix("# HELP ")?.split_once(' ')?;
        let (_, kind) = pair[1].strip_prefix("# TYPE ")?.split_once(' ')?;
        Some(MetricInfo { name: name.to_owned(), kind: kind.to_owned(), help: help.to_owned() })
    };
    lines.windows(2).filter_map(metric).collect()
}
