/** The live view: reads `/metrics` once a second and shows what the server does. */

import { metricsPage } from "./api.js";
import { Chart } from "./chart.js";
import { byId, element } from "./dom.js";
import { growth, parse, quantile, rate, share, value } from "./metrics.js";

const EVERY_MS = 1000;
/** Rates and percentiles are of this long: short enough to see a change, long enough to hold some requests. */
const WINDOW_MS = 10_000;
const SPAN_MS = 180_000;

const percent = (part) => `${(part * 100).toFixed(part > 0 && part < 0.0995 ? 1 : 0)}%`;
const whole = (number) => Math.round(number).toLocaleString("en");
const short = (number) => (number < 10 && number % 1 ? number.toFixed(1) : whole(number));
const seconds = (time) => {
  if (time === 0) return "0";
  if (time < 0.0995) return `${(time * 1000).toFixed(time < 0.00995 ? 1 : 0)} ms`;
  return time < 9.95 ? `${time.toFixed(2)} s` : `${time.toFixed(0)} s`;
};

const percentiles = (name) => [0.5, 0.95, 0.99].map((q) => (before, now) => quantile(before, now, name, q));
const shareOf = (part, of) => (before, now) => share(before, now, part, of);
const rateOf = (name) => (before, now) => rate(before, now, name);
const gauge = (name) => (_, now) => value(now, name);

const SAVED = ["baton:relay_kv_bytes_saved_total", "baton:decode_kv_bytes_read_total"];
const HITS = ["vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"];

/** Each chart: its lines are functions of the reading a window ago and the newest one. */
const CHARTS = [
  {
    id: "chart-tokens",
    title: "Tokens a second",
    series: ["generated", "read"],
    values: [rateOf("vllm:generation_tokens_total"), rateOf("vllm:prompt_tokens_total")],
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
    least: 0.001,
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
    id: "chart-hits",
    title: "Prefix cache hits",
    series: ["prompt tokens"],
    values: [shareOf(...HITS)],
    format: percent,
    least: 1,
    most: 1,
  },
];

/** Each tile: the figure, its unit, and a line under it. */
const TILES = [
  {
    title: "Running",
    figure: (_, now) => [whole(value(now, "vllm:num_requests_running")), "requests"],
    under: (_, now) => `${whole(value(now, "vllm:num_requests_waiting"))} waiting`,
  },
  {
    title: "Generating",
    figure: (before, now) => [short(rate(before, now, "vllm:generation_tokens_total")), "tokens/s"],
    under: (_, now) => `${whole(value(now, "vllm:generation_tokens_total"))} since the start`,
  },
  {
    title: "Reading prompts",
    figure: (before, now) => [short(rate(before, now, "vllm:prompt_tokens_total")), "tokens/s"],
    under: (_, now) => `${whole(value(now, "vllm:prompt_tokens_total"))} since the start`,
  },
  {
    title: "KV cache",
    figure: (_, now) => [percent(value(now, "vllm:kv_cache_usage_perc")), "in use"],
    under: (_, now) => `${whole(value(now, "vllm:num_preemptions_total"))} preemptions`,
  },
  {
    title: "Prefix cache",
    figure: (_, now) => {
      const queries = value(now, HITS[1]);
      return [queries > 0 ? percent(value(now, HITS[0]) / queries) : "–", "hits"];
    },
    under: (_, now) => `${whole(value(now, HITS[0]))} tokens reused`,
  },
  {
    title: "KV reads saved",
    figure: (before, now) => {
      const saved = growth(before, now, SAVED[0]);
      const all = saved + growth(before, now, SAVED[1]);
      return [all > 0 ? percent(saved / all) : "–", "of decoding"];
    },
    under: (_, now) => `${bytes(value(now, SAVED[0])).join(" ")} since the start`,
  },
  {
    title: "Answered",
    figure: (before, now) => [short(60 * rate(before, now, "vllm:request_success_total")), "a minute"],
    under: (_, now) => `${whole(value(now, "vllm:request_success_total"))} since the start`,
  },
  {
    title: "Memory",
    figure: (_, now) => bytes(value(now, "process_resident_memory_bytes")),
    under: (_, now) => `up for ${uptime(value(now, "baton:uptime_seconds"))}`,
  },
];

function bytes(count) {
  const gib = count / 2 ** 30;
  return gib >= 1 ? [gib.toFixed(1), "GiB"] : [whole(count / 2 ** 20), "MiB"];
}

function uptime(time) {
  const [days, hours, minutes] = [Math.floor(time / 86400), Math.floor(time / 3600) % 24, Math.floor(time / 60) % 60];
  if (days > 0) return `${days} d ${hours} h`;
  return hours > 0 ? `${hours} h ${minutes} min` : `${minutes} min ${Math.floor(time % 60)} s`;
}

let readings = [];
let tiles = [];
let charts = [];

export function start() {
  tiles = TILES.map((tile) => {
    const [figure, under] = [element("div", { class: "value" }), element("div", { class: "under" })];
    byId("tiles").append(element("article", { class: "tile" }, element("h2", {}, tile.title), figure, under));
    return { ...tile, shown: { figure, under } };
  });
  charts = CHARTS.map((chart) => ({ ...chart, shown: new Chart({ ...chart, span: SPAN_MS }) }));
  byId("charts").append(...charts.map((chart) => chart.shown.shown));
  new ResizeObserver(redraw).observe(byId("charts"));
  poll();
}

function redraw() {
  for (const chart of charts) {
    chart.shown.draw();
  }
}

async function poll() {
  const begun = performance.now();
  // Nobody looks at a hidden page.
  if (!document.hidden) {
    try {
      take(parse(await metricsPage(), performance.now()));
    } catch (error) {
      pulse("lost", "no connection");
    }
  }
  setTimeout(poll, Math.max(100, EVERY_MS - (performance.now() - begun)));
}

function take(now) {
  const last = readings.at(-1);
  if (last && value(now, "baton:uptime_seconds") < value(last, "baton:uptime_seconds")) {
    // Another server: its counters have nothing to do with those before.
    readings = [];
  }
  readings.push(now);
  while (readings.length > 2 && readings[1].time <= now.time - WINDOW_MS) {
    readings.shift();
  }
  const before = readings[0];
  for (const { figure, under, shown } of tiles) {
    const [number, unit] = figure(before, now);
    shown.figure.replaceChildren(number, element("small", {}, unit));
    shown.under.textContent = under(before, now);
  }
  for (const { values, shown } of charts) {
    shown.push(now.time, values.map((line) => line(before, now)));
  }
  const running = value(now, "vllm:num_requests_running") + value(now, "vllm:num_requests_waiting");
  const speed = rate(last ?? now, now, "vllm:generation_tokens_total");
  const busy = running > 0 || growth(last ?? now, now, "vllm:generation_tokens_total") > 0;
  pulse(busy ? "busy" : "idle", busy ? `${whole(running)} running, ${whole(speed)} tokens/s` : "ready");
}

function pulse(state, text) {
  byId("pulse").dataset.state = state;
  byId("pulse-text").textContent = text;
}
