/**
 * A line chart over time, drawn as SVG by hand: a few series, an own scale, and what they were under the pointer or,
 * with the arrow keys, at a moment of choice. It begins with the page and grows until its span is full.
 */

import { element, svg } from "./dom.js";

const HEIGHT = 152;
const MARGIN = { left: 48, right: 8, top: 8, bottom: 20 };
/** A chart that has just begun is not blown up further than this. */
const LEAST_SPAN_MS = 15_000;
/** Nothing was read for so long: no line is drawn across. */
const GAP_MS = 5000;

export class Chart {
  /** `series` are the names of the lines; `format` writes a value; `least` is the smallest top of the scale. */
  constructor({ title, series, format, least = 1, most = Infinity, span, id }) {
    Object.assign(this, { title, series, format, least, most, span });
    // Areas over areas only hide each other.
    this.filled = series.length < 3;
    this.points = [];
    /** The time of the moment that is looked at. */
    this.looked = null;
    this.legend = series.map((name, index) => {
      const value = element("span");
      return { value, item: element("li", { class: `colour-${index}` }, element("b", {}, name), " ", value) };
    });
    this.canvas = svg("svg", { role: "img" });
    this.tip = element("div", { class: "tip", hidden: true });
    this.plot = element("div", { class: "plot", tabindex: 0, role: "group", "aria-label": `${title}: arrow keys read earlier values` }, this.canvas, this.tip);
    this.said = element("span", { class: "hidden", role: "status" });
    const head = element("header", {}, element("h2", {}, title), element("ul", { class: "legend" }, ...this.legend.map(({ item }) => item)));
    this.shown = element("article", { class: "chart", id }, head, this.plot, this.said);
    this.plot.addEventListener("pointermove", (event) => this.look(this.timeAt(event.offsetX)));
    this.plot.addEventListener("pointerleave", () => this.look(null));
    this.plot.addEventListener("blur", () => this.look(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
  }

  /** Appends the values of one moment, `null` where there is none. */
  push(time, values) {
    this.points.push({ time, values });
    const oldest = time - this.span;
    while (this.points.length > 2 && this.points[1].time < oldest) {
      this.points.shift();
    }
    this.draw();
  }

  look(time) {
    this.looked = time;
    this.draw();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || this.points.length === 0) {
      return;
    }
    event.preventDefault();
    const at = this.points.indexOf(this.marked() ?? this.points.at(-1));
    const next = this.points[Math.min(Math.max(at + step, 0), this.points.length - 1)];
    this.look(next.time);
    this.said.textContent = `${this.ago(next.time)}: ${this.words(next)}`;
  }

  /** The first moment of the scale, and how long it is. */
  scale() {
    const last = this.points.at(-1).time;
    const from = Math.max(last - this.span, this.points[0].time);
    return { from, length: Math.max(last - from, LEAST_SPAN_MS), width: this.plot.clientWidth - MARGIN.left - MARGIN.right };
  }

  timeAt(offset) {
    if (this.points.length === 0) {
      return null;
    }
    const { from, length, width } = this.scale();
    return from + (length * (offset - MARGIN.left)) / width;
  }

  draw() {
    const width = this.plot.clientWidth;
    const last = this.points.at(-1);
    if (!width || !last) {
      return;
    }
    const { from, length, width: inner } = this.scale();
    const height = HEIGHT - MARGIN.top - MARGIN.bottom;
    const values = this.points.flatMap((point) => point.values).filter((value) => value !== null);
    const top = Math.min(niceTop(Math.max(this.least, ...values)), this.most);
    const x = (time) => MARGIN.left + (inner * (time - from)) / length;
    const y = (value) => MARGIN.top + height * (1 - Math.min(value, top) / top);
    const parts = [...this.grid(width, top, y), ...this.times(x, from, last.time)];
    this.series.forEach((_, index) => parts.push(...this.line(index, x, y, from)));
    const marked = this.marked();
    if (marked) {
      parts.push(...this.cross(marked, x, y));
    }
    this.placeTip(marked, x, width);
    this.canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.canvas.replaceChildren(...parts);
    this.legend.forEach(({ value }, index) => (value.textContent = this.write(last.values[index])));
    this.canvas.setAttribute("aria-label", `${this.title}: ${this.words(last)}`);
  }

  words(point) {
    return this.series.map((name, index) => `${name} ${this.write(point.values[index])}`).join(", ");
  }

  write(value) {
    return value === null || value === undefined ? "–" : this.format(value);
  }

  ago(time) {
    const past = Math.round((this.points.at(-1).time - time) / 1000);
    if (past < 1) return "now";
    return past < 120 ? `${past} s ago` : `${Math.floor(past / 60)} min ${past % 60 ? `${past % 60} s ` : ""}ago`;
  }

  *grid(width, top, y) {
    for (const value of [0, top / 2, top]) {
      yield svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) });
      yield svg("text", { class: "axis", x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end" }, this.format(value));
    }
  }

  *times(x, from, last) {
    if (last - from >= LEAST_SPAN_MS / 2) {
      yield svg("text", { class: "axis", x: MARGIN.left, y: HEIGHT - 4 }, this.ago(from));
    }
    const at = x(last);
    yield svg("text", { class: "axis", x: at, y: HEIGHT - 4, "text-anchor": at < MARGIN.left + 30 ? "start" : "end" }, "now");
  }

  /** A line and what lies under it, broken where there is no value. */
  *line(index, x, y, from) {
    const colour = `colour-${index}`;
    for (const run of this.runs(index, from)) {
      const path = run.map(([time, value], at) => `${at ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`).join("");
      const [first, end] = [x(run[0][0]), x(run.at(-1)[0])];
      if (this.filled) {
        const area = `${path}L${end.toFixed(1)} ${y(0)}L${first.toFixed(1)} ${y(0)}Z`;
        yield svg("path", { class: `area ${colour}`, d: area });
      }
      // A single moment would be a line without length.
      yield svg("path", { class: `line ${colour}`, d: run.length > 1 ? path : `${path}h.1` });
    }
  }

  runs(index, from) {
    const runs = [];
    let run = null;
    for (const { time, values } of this.points) {
      if (values[index] === null || time < from) {
        run = null;
        continue;
      }
      if (!run || time - run.at(-1)[0] > GAP_MS) {
        runs.push((run = []));
      }
      run.push([time, values[index]]);
    }
    return runs;
  }

  *cross(marked, x, y) {
    const at = x(marked.time);
    yield svg("line", { class: "cross", x1: at, x2: at, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
    for (const [index, value] of marked.values.entries()) {
      if (value !== null) {
        yield svg("circle", { class: `mark colour-${index}`, cx: at, cy: y(value), r: 3.5 });
      }
    }
  }

  /** The values of the marked moment, beside it. */
  placeTip(marked, x, width) {
    this.tip.hidden = !marked;
    if (!marked) {
      return;
    }
    const rows = this.series.map((name, index) => element("div", { class: `colour-${index}` }, element("b", {}, name), element("span", {}, this.write(marked.values[index]))));
    this.tip.replaceChildren(element("small", {}, this.ago(marked.time)), ...rows);
    const at = x(marked.time);
    const left = at + 12 + this.tip.offsetWidth > width ? at - 12 - this.tip.offsetWidth : at + 12;
    this.tip.style.transform = `translateX(${Math.max(0, left)}px)`;
  }

  /** The moment that is looked at. */
  marked() {
    if (this.looked === null || this.points.length === 0) {
      return null;
    }
    const distance = (point) => Math.abs(point.time - this.looked);
    return this.points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
  }
}

/** The next of 1, 2, 4, 5, 10, … above a value. */
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].map((factor) => factor * power).find((top) => top >= value * 0.999);
}
