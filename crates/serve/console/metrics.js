/**
 * What `/metrics` says, as numbers: reads the text format of Prometheus, and takes rates and percentiles of what has
 * happened between two readings.
 */

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const BOUND = /(?:^|,)le="([^"]+)"/;

/** One reading: the sum of every series of a name, and the buckets of every histogram. */
export function parse(page, time) {
  const values = new Map();
  const buckets = new Map();
  for (const line of page.split("\n")) {
    const found = line.startsWith("#") ? null : line.match(LINE);
    if (!found) {
      continue;
    }
    const [, name, labels = "", text] = found;
    const value = Number(text);
    const bound = name.endsWith("_bucket") ? labels.match(BOUND) : null;
    if (bound) {
      const histogram = name.slice(0, -"_bucket".length);
      const counts = buckets.get(histogram) ?? new Map();
      const limit = bound[1] === "+Inf" ? Infinity : Number(bound[1]);
      counts.set(limit, (counts.get(limit) ?? 0) + value);
      buckets.set(histogram, counts);
    } else {
      values.set(name, (values.get(name) ?? 0) + value);
    }
  }
  return { time, values, buckets };
}

export function value(reading, name) {
  return reading.values.get(name) ?? 0;
}

/** Whether the server has a metric of this name. */
export const has = (reading, name) => reading.values.has(name);

/** How much a counter has grown; a restarted server counts from zero. */
export function growth(before, now, name) {
  return Math.max(0, value(now, name) - value(before, name));
}

/** Growth per second. */
export function rate(before, now, name) {
  const seconds = (now.time - before.time) / 1000;
  return seconds > 0 ? growth(before, now, name) / seconds : 0;
}

/** The share `part / whole` of what has been counted between two readings; `null` where nothing was. */
export function share(before, now, part, whole) {
  const total = growth(before, now, whole);
  return total > 0 ? growth(before, now, part) / total : null;
}

/** A quantile of what a histogram has seen between two readings, within a bucket by interpolation. */
export function quantile(before, now, histogram, q) {
  const counts = now.buckets.get(histogram);
  if (!counts) {
    return null;
  }
  const earlier = before.buckets.get(histogram) ?? new Map();
  const limits = [...counts.keys()].sort((a, b) => a - b);
  const grown = limits.map((limit) => Math.max(0, counts.get(limit) - (earlier.get(limit) ?? 0)));
  const total = grown.at(-1);
  if (!total) {
    return null;
  }
  const rank = q * total;
  const index = grown.findIndex((count) => count >= rank);
  const [low, below] = index > 0 ? [limits[index - 1], grown[index - 1]] : [0, 0];
  if (limits[index] === Infinity) {
    return low;
  }
  const inside = grown[index] - below;
  return low + (limits[index] - low) * (inside > 0 ? (rank - below) / inside : 1);
}
