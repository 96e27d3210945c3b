// Line charts as SVG: axes with round numbers and units, minutes before now, a reader of values under the pointer.

import { el, number, svg } from "./dom.js";
import { WINDOW } from "./metrics.js";

const HEIGHT = 132;
const LEFT = 40, RIGHT = 10, TOP = 10, BOTTOM = 20;

/** Return the view of a chart {title, unit, max, lines: [{name, of}]}: `element` and `draw(history, now)`. */
export function chart({ title, unit, max, lines }) {
  const value = el("output", {});
  const picture = svg("svg", { role: "img", height: HEIGHT });
  const legend = lines.length > 1 ? lines.map(({ name }, i) => el("span", { class: `key line-${i}`, text: name })) : [];
  const head = el("figcaption", {}, el("h3", { text: title }), ...legend, value);
  const element = el("figure", { class: "chart" }, head, picture);
  let pointer = null, last = null;
  const draw = (history, now) => {
    last = [history, now];
    const series = lines.map(({ of }) => history.points(of).filter((point) => point.at >= now - WINDOW));
    const top = max ?? roundUp(Math.max(0, ...series.flat().map((point) => point.value ?? 0)));
    const scale = scales(picture.clientWidth || 300, top, now);
    const read = pointer === null ? null : nearest(series, scale, pointer);
    picture.setAttribute("aria-label", summary(title, unit, lines, series));
    picture.replaceChildren(...axes(scale, top), ...series.flatMap((points, i) => line(points, scale, i, lines.length === 1)), ...marks(read, series, scale));
    value.textContent = reading(unit, lines, series, read, now);
  };
  const move = (event) => {
    pointer = event.type === "pointerleave" ? null : event.offsetX;
    if (last) draw(...last);
  };
  picture.addEventListener("pointermove", move);
  picture.addEventListener("pointerleave", move);
  return { element, draw };
}

function scales(width, top, now) {
  const x = (at) => LEFT + ((at - now + WINDOW) / WINDOW) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
  return { x, y, width, now };
}

/** Return the least of 1, 2, 2.5 and 5 times a power of ten that is not below a value. */
export function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 2.5, 5, 10].find((step) => step * power >= value * (1 - 1e-9));
}

function axes({ x, y, width, now }, top) {
  const levels = [0, top / 2, top].flatMap((value) => [
    svg("line", { class: value ? "grid" : "axis", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end", text: short(value) }),
  ]);
  const minutes = [5, 4, 3, 2, 1, 0].map((minute) => svg("text", {
    class: "tick", x: x(now - minute * 60_000), y: HEIGHT - 4, text: minute ? `−${minute} min` : "now",
    "text-anchor": minute === 5 ? "start" : minute ? "middle" : "end",
  }));
  return [...levels, ...(width < 330 ? minutes.filter((text, i) => i % 5 === 0) : minutes.filter((text, i) => width > 460 || i % 2 === 0 || i === 5))];
}

const short = (value) => {
  if (value >= 10_000) return `${number(value / 1000)}k`;
  return number(value, Number.isInteger(value) || value >= 10 ? 0 : value < 1 ? 2 : 1);
};

function line(points, { x, y }, order, filled) {
  const runs = runsOf(points);
  const path = runs.map((run) => run.map(({ at, value }, i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("")).join("");
  const areas = filled ? runs.map((run) => svg("path", { class: "area", d: areaOf(run, x, y) })) : [];
  const dots = runs.filter((run) => run.length === 1).map(([{ at, value }]) => svg("circle", { class: `dot line-${order}`, cx: x(at), cy: y(value), r: 2 }));
  return [...areas, svg("path", { class: `line line-${order}`, d: path }), ...dots];
}

function areaOf(run, x, y) {
  const top = run.map(({ at, value }) => `L${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  return `M${x(run[0].at).toFixed(1)} ${y(0)}${top}L${x(run.at(-1).at).toFixed(1)} ${y(0)}Z`;
}

function runsOf(points) {
  const runs = [[]];
  for (const point of points) {
    if (point.value === null) runs.push([]);
    else runs.at(-1).push(point);
  }
  return runs.filter((run) => run.length);
}

function nearest(series, { x }, pointer) {
  const times = series.flat().filter((point) => point.value !== null).map((point) => point.at);
  return times.length ? times.reduce((best, at) => (Math.abs(x(at) - pointer) < Math.abs(x(best) - pointer) ? at : best)) : null;
}

function marks(read, series, { x, y }) {
  if (read === null) return [];
  const dots = series.map((points, i) => [points.find((point) => point.at === read), i]).filter(([point]) => point?.value !== undefined && point.value !== null);
  return [
    svg("line", { class: "reader", x1: x(read), x2: x(read), y1: TOP, y2: HEIGHT - BOTTOM }),
    ...dots.map(([point, i]) => svg("circle", { class: `dot line-${i}`, cx: x(read), cy: y(point.value), r: 3 })),
  ];
}

const latest = (points) => points.findLast((point) => point.value !== null)?.value;

function reading(unit, lines, series, read, now) {
  const values = series.map((points) => (read === null ? latest(points) : points.find((point) => point.at === read)?.value));
  const text = values.map((value) => number(value, value !== undefined && value !== null && value < 100 && !Number.isInteger(value) ? 1 : 0)).join(" / ");
  return `${text}${unit ? ` ${unit}` : ""}${read === null ? "" : `, ${Math.round((now - read) / 1000)} s ago`}`;
}

function summary(title, unit, lines, series) {
  const parts = series.map((points, i) => {
    const values = points.map((point) => point.value).filter((value) => value !== null);
    return values.length ? `${lines[i].name ?? ""} ${number(values.at(-1), 1)} ${unit} now, at most ${number(Math.max(...values), 1)}`.trim() : "no values";
  });
  return `${title}, last five minutes: ${parts.join("; ")}`;
}
