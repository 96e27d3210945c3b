// The server's metrics: parsed, kept for some minutes, and the series that are drawn of them.

export const WINDOW = 300_000;      // milliseconds that are kept
const GAP = 30_000;                 // milliseconds without a sample that break a line

/** Return a text in Prometheus' format as {sums, models}: values by name, summed over labels, of one model or of all.
 *  Of requests with latency targets also those that met them. */
export function parse(text, model) {
  const sums = {};
  const models = new Set();
  for (const line of text.split("\n")) {
    const match = /^streamserve:(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match || match[1].endsWith("_bucket")) continue;
    const [, name, labels = "", value] = match;
    const owner = /model_name="((?:[^"\\]|\\.)*)"/.exec(labels)?.[1];
    if (owner !== undefined) models.add(owner);
    if (model && owner !== undefined && owner !== model) continue;
    sums[name] = (sums[name] ?? 0) + Number(value);
    if (labels.includes('met="true"')) sums[`${name} met`] = (sums[`${name} met`] ?? 0) + Number(value);
  }
  return { sums, models };
}

/** Samples of the last minutes, oldest first: {at, sums, workers}. */
export class History {
  samples = [];

  /** Add a sample, and forget those that are too old. */
  add(sample) {
    this.samples.push(sample);
    while (this.samples[0].at < sample.at - WINDOW - GAP) this.samples.shift();
  }

  /** Return the points of a series: `of` returns the value at a sample, from it and the one before. */
  points(of) {
    const points = [];
    this.samples.forEach((now, i) => {
      const then = this.samples[i - 1];
      if (then && now.at - then.at > GAP) points.push({ at: then.at + 1, value: null });
      const value = of(now, then && now.at - then.at <= GAP ? then : null);
      if (value !== undefined) points.push({ at: now.at, value });
    });
    return points;
  }
}

const growth = (now, then, name) => Math.max(0, (now.sums[name] ?? 0) - (then.sums[name] ?? 0));

/** Increase of a counter per second. */
export const rate = (name, scale = 1) => (now, then) =>
  then ? (scale * 1000 * growth(now, then, name)) / (now.at - then.at) : undefined;

/** Mean of a histogram's new values; nothing where there are none. */
export const mean = (name, scale = 1000) => ratio(`${name}_sum`, `${name}_count`, scale);

/** Ratio of what two counters grew; nothing where the second did not. */
export function ratio(over, under, scale = 100) {
  return (now, then) => {
    if (!then) return undefined;
    const count = growth(now, then, under);
    return count > 0 ? (scale * growth(now, then, over)) / count : undefined;
  };
}

/** A gauge's value. */
export const gauge = (name, scale = 1) => (now) => (now.sums[name] === undefined ? undefined : scale * now.sums[name]);
