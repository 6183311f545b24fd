//! Figures of the graph engine.

use baton_graph::GraphStats;

use super::render::Page;

pub fn render(stats: &GraphStats, page: &mut Page) {
    let (swaps, features) = (&stats.swaps, &stats.features);
    let gauges = [
        ("baton:graph_requests_running", "Graph requests in the running batch.", stats.num_running),
        ("baton:graph_requests_waiting", "Graph requests that wait for blocks.", stats.num_waiting),
        (
            "baton:graph_requests_swapped",
            "Graph requests whose blocks were given to others.",
            stats.num_swapped,
        ),
        ("baton:graph_views", "Pairs of graph and sampling whose embeddings are kept.", stats.num_graphs),
        ("baton:graph_blocks", "Blocks of embeddings on the device.", stats.num_device_blocks),
        (
            "baton:graph_blocks_used",
            "Blocks on the device that hold embeddings.",
            stats.num_device_blocks_used,
        ),
        ("baton:graph_host_blocks_used", "Blocks of embeddings in host memory.", stats.num_host_blocks_used),
    ];
    for (name, help, value) in gauges {
        page.one(name, "gauge", help, "", value as f64);
    }
    let counters = [
        ("baton:graph_rows_computed_total", "Embeddings computed, of any layer.", stats.rows_computed),
        ("baton:graph_rows_reused_total", "Embeddings reused from earlier requests.", stats.rows_reused),
        ("baton:graph_edges_reduced_total", "Edges aggregated.", stats.edges_reduced),
        ("baton:graph_blocks_swapped_out_total", "Blocks saved to host memory.", swaps.swapped_out),
        ("baton:graph_blocks_swapped_in_total", "Blocks fetched from host memory.", swaps.swapped_in),
        ("baton:graph_feature_hits_total", "Input rows found on the device.", features.hits),
        ("baton:graph_feature_misses_total", "Input rows that had to be uploaded.", features.misses),
        (
            "baton:graph_preemptions_total",
            "Graph requests preempted because blocks ran out.",
            stats.preemptions,
        ),
        ("baton:graph_requests_finished_total", "Graph requests answered.", stats.requests_finished),
        (
            "baton:graph_requests_aborted_total",
            "Graph requests whose client disconnected.",
            stats.requests_aborted,
        ),
    ];
    for (name, help, value) in counters {
        page.one(name, "counter", help, "", value as f64);
    }
    for (name, help, value) in [
        ("baton:graph_moving_seconds_total", "Seconds spent moving blocks and rows.", stats.moving_seconds),
        (
            "baton:graph_computing_seconds_total",
            "Seconds spent computing embeddings.",
            stats.computing_seconds,
        ),
    ] {
        page.one(name, "counter", help, "", value);
    }
    let help = "Fraction of the input rows found on the device, 0 to 1.";
    page.one("baton:graph_feature_hit_rate", "gauge", help, "", features.hit_rate());
}
