//! The page that Prometheus reads (text format 0.0.4).

use std::fmt::Write;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use baton_engine::{EngineStats, SpeculationStats, StoreStats};
use baton_graph::GraphStats;

use super::graph;
use super::{FINISH_REASONS, Histogram, Metrics, escape};

/// What of the server itself is shown.
#[derive(Clone, Copy, Debug)]
pub struct ServerFigures {
    pub num_in_flight: usize,
    pub uptime_s: f64,
    pub num_lost_log_lines: u64,
    /// Where models are loaded when they are asked for: how many are loaded, were loaded and unloaded.
    pub models: Option<(usize, u64, u64)>,
}

pub(super) struct Page {
    out: String,
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &str, value: f64) {
        let _ = match labels {
            "" => writeln!(self.out, "{name} {value:?}"),
            _ => writeln!(self.out, "{name}{{{labels}}} {value:?}"),
        };
    }

    pub(super) fn one(&mut self, name: &str, kind: &str, help: &str, labels: &str, value: f64) {
        self.head(name, kind, help);
        self.sample(name, labels, value);
    }
}

/// What each KV store has done, and how often it failed.
fn render_stores(stores: &[StoreStats], page: &mut Page) {
    if stores.is_empty() {
        return;
    }
    type Figure = (&'static str, &'static str, &'static str, fn(&StoreStats) -> Vec<(&'static str, u64)>);
    let figures: [Figure; 5] = [
        ("baton:kv_store_rows_total", "counter", "Rows of KV, by what a store did with them.", |store| {
            vec![
                ("asked", store.num_rows_asked),
                ("found", store.num_rows_found),
                ("fetched", store.num_rows_fetched),
                ("stored", store.num_rows_stored),
            ]
        }),
        ("baton:kv_store_bytes_total", "counter", "Bytes of KV that a store has moved.", |store| {
            vec![("fetched", store.bytes_fetched), ("stored", store.bytes_stored)]
        }),
        (
            "baton:kv_store_errors_total",
            "counter",
            "Answers of a KV store that were too late, broken, missing, or not even asked for.",
            |store| {
                vec![
                    ("timeout", store.num_timeouts),
                    ("corrupt", store.num_corrupt),
                    ("failed", store.num_failures),
                    ("skipped", store.num_skipped),
                ]
            },
        ),
        ("baton:kv_store_circuit_open", "gauge", "Whether a KV store is left alone for a while.", |store| {
            vec![("", u64::from(store.is_open))]
        }),
        ("baton:kv_store_used_bytes", "gauge", "Bytes that a KV store holds, where it knows.", |store| {
            vec![("", store.used_bytes)]
        }),
    ];
    for (name, kind, help, values) in figures {
        page.head(name, kind, help);
        for store in stores {
            for (what, value) in values(store) {
                let what = if what.is_empty() { String::new() } else { format!(",kind=\"{what}\"") };
                page.sample(name, &format!("store=\"{}\"{what}", store.name), value as f64);
            }
        }
    }
}

impl Metrics {
    pub fn render(&self, stats: &EngineStats, graphs: Option<&GraphStats>, server: ServerFigures) -> String {
        let mut page = Page { out: String::with_capacity(16 << 10) };
        self.render_engine(stats, &mut page);
        self.render_speculation(&stats.speculation, &mut page);
        self.render_counters(&mut page);
        self.render_histograms(&mut page);
        if let Some(graphs) = graphs {
            graph::render(graphs, &mut page);
        }
        self.render_server(server, &mut page);
        page.out
    }

    fn render_engine(&self, stats: &EngineStats, page: &mut Page) {
        let scheduler = &stats.scheduler;
        let kv = &scheduler.kv;
        let preemptions = scheduler.num_preemptions_swap + scheduler.num_preemptions_recompute;
        let figures: [(&str, &str, &str, f64); 18] = [
            (
                "vllm:num_requests_running",
                "gauge",
                "Requests in the running batch.",
                scheduler.num_running as f64,
            ),
            (
                "vllm:num_requests_waiting",
                "gauge",
                "Requests waiting for their first step.",
                scheduler.num_waiting as f64,
            ),
            (
                "vllm:num_requests_swapped",
                "gauge",
                "Preempted requests whose KV is in host memory.",
                scheduler.num_swapped as f64,
            ),
            ("vllm:kv_cache_usage_perc", "gauge", "Fraction of the KV blocks in use, 0 to 1.", kv.usage()),
            (
                "vllm:prefix_cache_queries_total",
                "counter",
                "Tokens looked up in the prefix cache.",
                kv.prefix_cache_queries as f64,
            ),
            (
                "vllm:prefix_cache_hits_total",
                "counter",
                "Tokens found in the prefix cache.",
                kv.prefix_cache_hits as f64,
            ),
            (
                "vllm:external_prefix_cache_queries_total",
                "counter",
                "Tokens looked up in KV stores and on other machines.",
                kv.external_cache_queries as f64,
            ),
            (
                "vllm:external_prefix_cache_hits_total",
                "counter",
                "Tokens found in KV stores and on other machines.",
                kv.external_cache_hits as f64,
            ),
            (
                "baton:kv_store_late_total",
                "counter",
                "Requests that stopped waiting for a KV store and computed their prompt.",
                stats.tiers.num_late as f64,
            ),
            (
                "vllm:num_preemptions_total",
                "counter",
                "Requests preempted because KV blocks ran out.",
                preemptions as f64,
            ),
            (
                "baton:kv_blocks_used",
                "gauge",
                "KV blocks held by requests.",
                (kv.num_device_blocks_used - kv.num_pinned_blocks) as f64,
            ),
            (
                "baton:kv_blocks_pinned",
                "gauge",
                "KV blocks of system prompts, which are never given up.",
                kv.num_pinned_blocks as f64,
            ),
            ("baton:engine_steps_total", "counter", "Steps computed.", stats.num_steps as f64),
            (
                "baton:device_busy_seconds_total",
                "counter",
                "Seconds the device has spent on steps.",
                stats.device_busy_s.unwrap_or(0.0),
            ),
            (
                "baton:relay_tokens_read_total",
                "counter",
                "Tokens of KV read once for several requests, counted for one layer.",
                stats.relay.num_tokens_read as f64,
            ),
            (
                "baton:relay_tokens_saved_total",
                "counter",
                "Tokens of KV whose reading relay attention has saved, counted for one layer.",
                stats.relay.num_tokens_saved as f64,
            ),
            (
                "baton:relay_kv_bytes_saved_total",
                "counter",
                "Bytes of KV, over all layers, whose reading relay attention has saved.",
                stats.relay.num_bytes_saved as f64,
            ),
            (
                "baton:decode_kv_bytes_read_total",
                "counter",
                "Bytes of KV, over all layers, read by decodes.",
                stats.relay.num_bytes_read as f64,
            ),
        ];
        for (name, kind, help, value) in figures {
            page.one(name, kind, help, &self.labels, value);
        }
        let labels = format!(
            "block_size=\"{}\",cache_dtype=\"auto\",engine=\"0\",num_cpu_blocks=\"{}\",num_gpu_blocks=\"{}\"",
            self.cache.block_size, self.cache.num_cpu_blocks, self.cache.num_gpu_blocks
        );
        render_stores(&stats.tiers.stores, page);
        page.one("vllm:cache_config_info", "gauge", "How the KV cache was set up.", &labels, 1.0);
    }

    /// vLLM's, which are there from the first guess on.
    fn render_speculation(&self, stats: &SpeculationStats, page: &mut Page) {
        if stats.num_drafts == 0 {
            return;
        }
        for (name, help, value) in [
            (
                "vllm:spec_decode_num_drafts_total",
                "Sequences' steps that verified draft tokens.",
                stats.num_drafts,
            ),
            ("vllm:spec_decode_num_draft_tokens_total", "Draft tokens proposed.", stats.num_draft_tokens),
            (
                "vllm:spec_decode_num_accepted_tokens_total",
                "Draft tokens accepted.",
                stats.num_accepted_tokens,
            ),
        ] {
            page.one(name, "counter", help, &self.labels, value as f64);
        }
        let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
        page.head(name, "counter", "Draft tokens accepted, by their position in the draft.");
        for (position, count) in stats.num_accepted_per_position.iter().enumerate() {
            page.sample(name, &format!("{},position=\"{position}\"", self.labels), *count as f64);
        }
    }

    fn render_counters(&self, page: &mut Page) {
        let counters = [
            ("vllm:prompt_tokens_total", "Prompt tokens processed.", &self.prompt_tokens),
            (
                "vllm:prompt_tokens_cached_total",
                "Prompt tokens whose KV came from the prefix cache.",
                &self.prompt_tokens_cached,
            ),
            ("vllm:generation_tokens_total", "Tokens generated.", &self.generation_tokens),
        ];
        for (name, help, value) in counters {
            page.one(name, "counter", help, &self.labels, value.load(Ordering::Relaxed) as f64);
        }
        page.head("vllm:request_success_total", "counter", "Finished requests, by finish reason.");
        for ((_, reason), count) in FINISH_REASONS.iter().zip(&self.request_success) {
            let labels = format!("{},finished_reason=\"{reason}\"", self.labels);
            page.sample("vllm:request_success_total", &labels, count.load(Ordering::Relaxed) as f64);
        }
    }

    fn render_histograms(&self, page: &mut Page) {
        let histograms: [(&str, &str, &Histogram); 14] = [
            ("vllm:iteration_tokens_total", "Tokens per step.", &self.iteration_tokens),
            (
                "vllm:time_to_first_token_seconds",
                "From arrival to the first token.",
                &self.time_to_first_token,
            ),
            ("vllm:inter_token_latency_seconds", "From one token to the next.", &self.inter_token_latency),
            (
                "vllm:request_time_per_output_token_seconds",
                "Mean time per output token after the first, one value per request.",
                &self.time_per_output_token,
            ),
            ("vllm:e2e_request_latency_seconds", "From arrival to the end.", &self.e2e_latency),
            ("vllm:request_queue_time_seconds", "From arrival to the first step.", &self.queue_time),
            (
                "vllm:request_inference_time_seconds",
                "From the first step to the last token.",
                &self.inference_time,
            ),
            (
                "vllm:request_prefill_time_seconds",
                "From the first step to the first token.",
                &self.prefill_time,
            ),
            ("vllm:request_decode_time_seconds", "From the first token to the last.", &self.decode_time),
            ("vllm:request_prompt_tokens", "Prompt tokens per request.", &self.request_prompt_tokens),
            (
                "vllm:request_generation_tokens",
                "Generated tokens per request.",
                &self.request_generation_tokens,
            ),
            (
                "vllm:request_max_num_generation_tokens",
                "Tokens of each request's longest continuation.",
                &self.request_max_generation_tokens,
            ),
            ("vllm:request_params_n", "n of a request.", &self.request_params_n),
            ("vllm:request_params_max_tokens", "max_tokens of a request.", &self.request_params_max_tokens),
        ];
        for (name, help, histogram) in histograms {
            page.head(name, "histogram", help);
            histogram.render(name, &self.labels, &mut page.out);
        }
    }

    fn render_server(&self, server: ServerFigures, page: &mut Page) {
        page.head("http_requests_total", "counter", "HTTP requests by route, method and class of status.");
        for ((handler, method, class), count) in
            self.http.lock().unwrap_or_else(PoisonError::into_inner).iter()
        {
            let labels =
                format!("handler=\"{}\",method=\"{}\",status=\"{class}xx\"", escape(handler), escape(method));
            page.sample("http_requests_total", &labels, *count as f64);
        }
        let name = "http_request_duration_highr_seconds";
        page.head(name, "histogram", "From an HTTP request to the head of its answer.");
        self.http_duration.render(name, "server=\"baton\"", &mut page.out);
        page.one(
            "baton:http_requests_in_flight",
            "gauge",
            "Generation requests being served.",
            "",
            server.num_in_flight as f64,
        );
        page.one("baton:uptime_seconds", "gauge", "Seconds since the server started.", "", server.uptime_s);
        page.one(
            "baton:log_lines_lost_total",
            "counter",
            "Log lines dropped because stderr was not read.",
            "",
            server.num_lost_log_lines as f64,
        );
        if let Some((loaded, loads, unloads)) = server.models {
            let help = "Models in memory, the one that always stays included.";
            page.one("baton:models_loaded", "gauge", help, "", loaded as f64);
            let help = "Models loaded because a request named them.";
            page.one("baton:model_loads_total", "counter", help, "", loads as f64);
            let help = "Models unloaded because they were idle, or to load others.";
            page.one("baton:model_unloads_total", "counter", help, "", unloads as f64);
        }
        if let Some(bytes) = resident_bytes() {
            page.one("process_resident_memory_bytes", "gauge", "Resident memory.", "", bytes as f64);
        }
    }
}

/// What the system says of this process; `None` where it does not say.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
