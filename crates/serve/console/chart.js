/** A line chart over time, drawn as SVG by hand: a few series, an own scale, and a cross under the pointer. */

import { element, svg } from "./dom.js";

const HEIGHT = 152;
const MARGIN = { left: 44, right: 6, top: 8, bottom: 20 };

export class Chart {
  /** `series` are the names of the lines; `format` writes a value; `least` is the smallest top of the scale. */
  constructor({ title, series, format, least = 1, most = Infinity, span, id }) {
    Object.assign(this, { title, series, format, least, most, span });
    // Areas over areas only hide each other.
    this.filled = series.length < 3;
    this.points = [];
    this.pointer = null;
    this.legend = series.map((name, index) => {
      const value = element("span");
      return { value, item: element("li", { class: `colour-${index}` }, element("b", {}, name), " ", value) };
    });
    const legend = element("ul", { class: "legend" }, ...this.legend.map(({ item }) => item));
    this.canvas = svg("svg", { role: "img" });
    this.plot = element("div", { class: "plot" }, this.canvas);
    const head = element("header", {}, element("h2", {}, title), legend);
    this.shown = element("article", { class: "chart", id }, head, this.plot);
    this.plot.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.plot.addEventListener("pointerleave", () => this.point(null));
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

  point(x) {
    this.pointer = x;
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    const last = this.points.at(-1);
    if (!width || !last) {
      return;
    }
    const inner = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
    const values = this.points.flatMap((point) => point.values).filter((value) => value !== null);
    const top = Math.min(niceTop(Math.max(this.least, ...values)), this.most);
    const x = (time) => MARGIN.left + inner.width * (1 - (last.time - time) / this.span);
    const y = (value) => MARGIN.top + inner.height * (1 - Math.min(value, top) / top);
    const parts = [...this.grid(width, top, y)];
    this.series.forEach((_, index) => parts.push(...this.line(index, x, y)));
    const marked = this.marked(x) ?? last;
    if (marked !== last) {
      const at = x(marked.time);
      parts.push(svg("line", { class: "cross", x1: at, x2: at, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    }
    this.canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.canvas.replaceChildren(...parts);
    this.legend.forEach(({ value }, index) => (value.textContent = this.write(marked.values[index])));
    const now = this.series.map((name, index) => `${name} ${this.write(last.values[index])}`);
    this.canvas.setAttribute("aria-label", `${this.title}: ${now.join(", ")}`);
  }

  write(value) {
    return value === null || value === undefined ? "–" : this.format(value);
  }

  *grid(width, top, y) {
    for (const value of [0, top / 2, top]) {
      yield svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) });
      const label = { class: "axis", x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end" };
      yield svg("text", label, this.format(value));
    }
    const minutes = Math.round(this.span / 60000);
    yield svg("text", { class: "axis", x: MARGIN.left, y: HEIGHT - 4 }, `${minutes} min ago`);
    yield svg("text", { class: "axis", x: width - MARGIN.right, y: HEIGHT - 4, "text-anchor": "end" }, "now");
  }

  /** A line and what lies under it, broken where there is no value. */
  *line(index, x, y) {
    const colour = `colour-${index}`;
    const oldest = this.points.at(-1).time - this.span;
    for (const run of this.runs(index, oldest)) {
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

  runs(index, oldest) {
    const runs = [];
    let run = null;
    for (const { time, values } of this.points) {
      if (values[index] === null || time < oldest) {
        run = null;
        continue;
      }
      if (!run) {
        runs.push((run = []));
      }
      run.push([time, values[index]]);
    }
    return runs;
  }

  /** The moment under the pointer. */
  marked(x) {
    if (this.pointer === null) {
      return null;
    }
    const distance = (point) => Math.abs(x(point.time) - this.pointer);
    return this.points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
  }
}

/** The next of 1, 2, 4, 5, 10, … above a value. */
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].map((factor) => factor * power).find((top) => top >= value * 0.999);
}
