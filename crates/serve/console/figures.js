/** What the live view shows, and from which metrics each figure is made. */

import { bytes, longTime, percent, plural, seconds, short, whole } from "./format.js";
import { growth, has, quantile, rate, share, value } from "./metrics.js";

const percentiles = (name) => [0.5, 0.95, 0.99].map((q) => (before, now) => quantile(before, now, name, q));
const shareOf = (part, of) => (before, now) => share(before, now, part, of);
const rateOf = (name) => (before, now) => rate(before, now, name);
const gauge = (name) => (_, now) => value(now, name);

const HITS = ["vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"];
const SAVED = ["baton:relay_kv_bytes_saved_total", "baton:decode_kv_bytes_read_total"];
const DRAFTS = ["vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"];
const GENERATED = "vllm:generation_tokens_total";
const READ = "vllm:prompt_tokens_total";
const ANSWERED = "vllm:request_success_total";

/** The share of the KV that decodes need not read, because one read serves several requests. */
function saved(before, now) {
  const less = growth(before, now, SAVED[0]);
  const all = less + growth(before, now, SAVED[1]);
  return all > 0 ? less / all : null;
}

const orDash = (part) => (part === null ? "–" : percent(part));

/** Each tile: the figure, its unit, and a line under it. `needs` is a metric without which it is not shown. */
export const TILES = [
  {
    title: "Running",
    figure: (_, now) => plural(value(now, "vllm:num_requests_running"), "request").split(" "),
    under: (_, now) => `${whole(value(now, "vllm:num_requests_waiting"))} waiting`,
  },
  {
    title: "Generating",
    figure: (before, now) => [short(rate(before, now, GENERATED)), "tokens/s"],
    under: (_, now) => `${plural(value(now, GENERATED), "token")} since the start`,
  },
  {
    title: "Reading prompts",
    figure: (before, now) => [short(rate(before, now, READ)), "tokens/s"],
    under: (_, now) => `${plural(value(now, READ), "token")} since the start`,
  },
  {
    title: "KV cache",
    figure: (_, now) => [percent(value(now, "vllm:kv_cache_usage_perc")), "in use"],
    under: (_, now) => plural(value(now, "vllm:num_preemptions_total"), "preemption"),
  },
  {
    title: "Prefix cache",
    figure: (_, now) => [value(now, HITS[1]) > 0 ? percent(value(now, HITS[0]) / value(now, HITS[1])) : "–", "hits"],
    under: (_, now) => `${plural(value(now, HITS[0]), "token")} reused`,
  },
  {
    title: "Relay attention",
    figure: (before, now) => [orDash(saved(before, now)), "of reads saved"],
    under: (_, now) => `${bytes(value(now, SAVED[0])).join(" ")} since the start`,
  },
  {
    title: "Speculation",
    needs: DRAFTS[1],
    figure: (before, now) => [orDash(share(before, now, ...DRAFTS)), "accepted"],
    under: (_, now) => `${plural(value(now, DRAFTS[0]), "token")} guessed right`,
  },
  {
    title: "Answered",
    figure: (before, now) => [short(60 * rate(before, now, ANSWERED)), "per minute"],
    under: (_, now) => `${plural(value(now, ANSWERED), "request")} since the start`,
  },
  {
    title: "Memory",
    figure: (_, now) => bytes(value(now, "process_resident_memory_bytes")),
    under: (_, now) => `up for ${longTime(value(now, "baton:uptime_seconds"))}`,
  },
];

/** Each chart: its lines are functions of the reading a window ago and the newest one. */
export const CHARTS = [
  {
    id: "chart-tokens",
    title: "Tokens per second",
    series: ["generated", "read"],
    values: [rateOf(GENERATED), rateOf(READ)],
    format: short,
    least: 10,
  },
  {
    id: "chart-requests",
    title: "Requests",
    series: ["running", "waiting"],
    values: [gauge("vllm:num_requests_running"), gauge("vllm:num_requests_waiting")],
    format: short,
    least: 4,
  },
  {
    id: "chart-kv",
    title: "KV cache in use",
    series: ["blocks"],
    values: [gauge("vllm:kv_cache_usage_perc")],
    format: percent,
    least: 0.02,
    most: 1,
  },
  {
    id: "chart-ttft",
    title: "Time to first token",
    series: ["p50", "p95", "p99"],
    values: percentiles("vllm:time_to_first_token_seconds"),
    format: seconds,
    least: 0.01,
  },
  {
    id: "chart-itl",
    title: "Time between tokens",
    series: ["p50", "p95", "p99"],
    values: percentiles("vllm:inter_token_latency_seconds"),
    format: seconds,
    least: 0.01,
  },
  {
    id: "chart-savings",
    title: "Work saved by caching and relay",
    series: ["prompt tokens", "KV reads"],
    values: [shareOf(...HITS), saved],
    format: percent,
    least: 1,
    most: 1,
  },
  {
    id: "chart-speculation",
    title: "Speculation",
    needs: DRAFTS[1],
    series: ["accepted"],
    values: [shareOf(...DRAFTS)],
    format: percent,
    least: 1,
    most: 1,
  },
];

/** Whether the server has what a tile or a chart is made from. */
export const isMeasured = ({ needs }, now) => !needs || has(now, needs);
