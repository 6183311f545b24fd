/**
 * Whether the server is there, and what it says of itself: reads `/metrics` once a second and `/stats` as often as
 * somebody looks at it. Where the server cannot be reached, it is asked again after pauses that grow, and the page
 * says so.
 */

import { ApiError, metricsPage, stats } from "./api.js";
import { byId } from "./dom.js";
import { explain } from "./errors.js";
import { plural, short } from "./format.js";
import { growth, parse, rate, value } from "./metrics.js";

const EVERY_MS = 1000;
const STATS_EVERY = 15;
const MAX_PAUSE_MS = 10_000;
const GENERATED = "vllm:generation_tokens_total";

const readers = { metrics: [], stats: [], back: [] };
let lastReading = null;
let failures = 0;
let turn = 0;
let timer = null;
let nextAt = 0;

/** `metrics` hears each reading, `stats` each answer of `/stats`, `back` when the server is there again. */
export function on(kind, listener) {
  readers[kind].push(listener);
}

export function start() {
  byId("retry-now").addEventListener("click", pollNow);
  addEventListener("online", pollNow);
  document.addEventListener("visibilitychange", () => !document.hidden && pollNow());
  addEventListener("hashchange", () => (turn = 0));
  setInterval(countDown, 250);
  return poll();
}

function pollNow() {
  clearTimeout(timer);
  poll();
}

const tell = (kind, what) => readers[kind].forEach((listener) => listener(what));

async function poll() {
  const begun = performance.now();
  // Nobody looks at a hidden page.
  if (!document.hidden) {
    try {
      const reading = parse(await metricsPage(), performance.now());
      if (turn % (byId("view-live").hidden ? STATS_EVERY : 1) === 0) {
        tell("stats", await stats());
      }
      turn += 1;
      found(reading);
    } catch (error) {
      lost(error);
    }
  }
  const pause = failures > 0 ? Math.min(MAX_PAUSE_MS, EVERY_MS * 2 ** (failures - 1)) : EVERY_MS - (performance.now() - begun);
  nextAt = performance.now() + Math.max(100, pause);
  clearTimeout(timer);
  timer = setTimeout(poll, Math.max(100, pause));
  countDown();
}

function found(reading) {
  const wasLost = failures > 0;
  failures = 0;
  byId("lost").hidden = true;
  const before = lastReading ?? reading;
  lastReading = reading;
  tell("metrics", reading);
  const active = value(reading, "vllm:num_requests_running") + value(reading, "vllm:num_requests_waiting");
  const busy = active > 0 || growth(before, reading, GENERATED) > 0;
  pulse(busy ? "busy" : "idle", busy ? `${plural(active, "request")}, ${short(rate(before, reading, GENERATED))} tokens/s` : "ready");
  if (wasLost) {
    turn = 0;
    tell("back");
  }
}

function lost(error) {
  failures += 1;
  const answered = error instanceof ApiError;
  pulse("lost", answered ? "not ready" : "reconnecting");
  // A single reading may fail by itself.
  if (failures > 1) {
    const { title, advice } = explain(error);
    byId("lost-text").textContent = answered ? `${title} ${advice}` : "The server cannot be reached. Check that it is still running.";
    byId("lost").hidden = false;
  }
}

function countDown() {
  if (!byId("lost").hidden) {
    const left = Math.max(0, Math.ceil((nextAt - performance.now()) / 1000));
    byId("lost-when").textContent = left > 0 ? `Trying again in ${left} s.` : "Trying again…";
  }
}

function pulse(state, text) {
  byId("pulse").dataset.state = state;
  byId("pulse-text").textContent = text;
}
