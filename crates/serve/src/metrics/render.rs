//! The page that Prometheus reads (text format 0.0.4).

use std::fmt::Write;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use baton_engine::EngineStats;

use super::{FINISH_REASONS, Histogram, Metrics, escape};

/// What of the server itself is shown.
#[derive(Clone, Copy, Debug)]
pub struct ServerFigures {
    pub num_in_flight: usize,
    pub uptime_s: f64,
}

struct Page {
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

    fn one(&mut self, name: &str, kind: &str, help: &str, labels: &str, value: f64) {
        self.head(name, kind, help);
        self.sample(name, labels, value);
    }
}

impl Metrics {
    pub fn render(&self, stats: &EngineStats, server: ServerFigures) -> String {
        let mut page = Page { out: String::with_capacity(16 << 10) };
        self.render_engine(stats, &mut page);
        self.render_counters(&mut page);
        self.render_histograms(&mut page);
        self.render_server(server, &mut page);
        page.out
    }

    fn render_engine(&self, stats: &EngineStats, page: &mut Page) {
        let scheduler = &stats.scheduler;
        let kv = &scheduler.kv;
        let preemptions = scheduler.num_preemptions_swap + scheduler.num_preemptions_recompute;
        let figures: [(&str, &str, &str, f64); 15] = [
            (
                "vllm:num_requests_running",
                "gauge",
                "Requests that are part of the steps.",
                scheduler.num_running as f64,
            ),
            (
                "vllm:num_requests_waiting",
                "gauge",
                "Requests that wait for their first step.",
                scheduler.num_waiting as f64,
            ),
            (
                "vllm:num_requests_swapped",
                "gauge",
                "Preempted requests whose KV is in host memory.",
                scheduler.num_swapped as f64,
            ),
            ("vllm:kv_cache_usage_perc", "gauge", "The part of the KV blocks in use, 0 to 1.", kv.usage()),
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
            ("vllm:num_preemptions_total", "counter", "Requests that had to make room.", preemptions as f64),
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
                "Time that the device has worked on steps.",
                stats.device_busy_s.unwrap_or(0.0),
            ),
            (
                "baton:relay_tokens_read_total",
                "counter",
                "Tokens of KV that were read once for several requests, in each layer.",
                stats.relay.num_tokens_read as f64,
            ),
            (
                "baton:relay_tokens_saved_total",
                "counter",
                "Tokens of KV that need not be read because of that.",
                stats.relay.num_tokens_saved as f64,
            ),
            (
                "baton:relay_kv_bytes_saved_total",
                "counter",
                "Bytes of KV, of all layers, that need not be read because of that.",
                stats.relay.num_bytes_saved as f64,
            ),
            (
                "baton:decode_kv_bytes_read_total",
                "counter",
                "Bytes of KV, of all layers, that decodes have read.",
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
        page.one("vllm:cache_config_info", "gauge", "How the KV cache was set up.", &labels, 1.0);
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
        page.head("vllm:request_success_total", "counter", "Requests that have ended, by how they ended.");
        for ((_, reason), count) in FINISH_REASONS.iter().zip(&self.request_success) {
            let labels = format!("{},finished_reason=\"{reason}\"", self.labels);
            page.sample("vllm:request_success_total", &labels, count.load(Ordering::Relaxed) as f64);
        }
    }

    fn render_histograms(&self, page: &mut Page) {
        let histograms: [(&str, &str, &Histogram); 14] = [
            ("vllm:iteration_tokens_total", "Tokens of a step.", &self.iteration_tokens),
            (
                "vllm:time_to_first_token_seconds",
                "From arrival to the first token.",
                &self.time_to_first_token,
            ),
            ("vllm:inter_token_latency_seconds", "From one token to the next.", &self.inter_token_latency),
            (
                "vllm:request_time_per_output_token_seconds",
                "Mean time of a token after the first, one a request.",
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
            ("vllm:request_prompt_tokens", "Prompt tokens of a request.", &self.request_prompt_tokens),
            (
                "vllm:request_generation_tokens",
                "Generated tokens of a request.",
                &self.request_generation_tokens,
            ),
            (
                "vllm:request_max_num_generation_tokens",
                "Tokens of a request's longest continuation.",
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
        page.one("baton:uptime_seconds", "gauge", "Since the server started.", "", server.uptime_s);
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
