/** The live view: what the server is, and what it does from the moment the page is opened. */

import { Chart } from "./chart.js";
import * as connection from "./connection.js";
import { byId, element } from "./dom.js";
import { CHARTS, isMeasured, TILES } from "./figures.js";
import { bytes, longTime, plural } from "./format.js";
import { value } from "./metrics.js";
import * as requests from "./requests.js";

/** Rates and percentiles are of this long: short enough to see a change, long enough to hold some requests. */
const WINDOW_MS = 10_000;
const SPAN_MS = 180_000;

let readings = [];
let tiles = [];
let charts = [];

export function start() {
  tiles = TILES.map((tile) => {
    const [figure, under] = [element("div", { class: "value" }), element("div", { class: "under" })];
    const shown = element("article", { class: "tile", hidden: Boolean(tile.needs) }, element("h2", {}, tile.title), figure, under);
    byId("tiles").append(shown);
    return { ...tile, shown, places: { figure, under } };
  });
  charts = CHARTS.map((chart) => ({ ...chart, drawn: new Chart({ ...chart, span: SPAN_MS }) }));
  byId("charts").append(...charts.map(({ drawn, needs }) => {
    drawn.shown.hidden = Boolean(needs);
    return drawn.shown;
  }));
  new ResizeObserver(() => charts.forEach(({ drawn }) => drawn.draw())).observe(byId("charts"));
  connection.on("metrics", take);
  connection.on("stats", (stats) => {
    head(stats);
    requests.draw(stats);
  });
}

/** What is served, on what. */
function head(stats) {
  const { kv_cache: kv } = stats;
  const facts = {
    model: stats.model,
    device: stats.device,
    version: `Baton ${stats.version}`,
    kv: `${plural(kv.num_tokens, "token")}, ${bytes(kv.bytes).join(" ")}`,
    context: plural(stats.max_model_len, "token"),
    uptime: longTime(stats.uptime_s),
  };
  for (const [name, text] of Object.entries(facts)) {
    byId(`fact-${name}`).textContent = text;
  }
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
  for (const tile of tiles) {
    tile.shown.hidden = !isMeasured(tile, now);
    const [number, unit] = tile.figure(before, now);
    tile.places.figure.replaceChildren(number, element("small", {}, unit));
    tile.places.under.textContent = tile.under(before, now);
  }
  for (const chart of charts) {
    chart.drawn.shown.hidden = !isMeasured(chart, now);
    chart.drawn.push(now.time, chart.values.map((line) => line(before, now)));
  }
}
