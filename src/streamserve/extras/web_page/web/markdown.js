// Markdown as elements. Text from a model only ever becomes text nodes; HTML in it is shown as it is written, links
// lead to http, https and mailto alone, and pictures are links. Time is linear in the length, depth is bounded: no expression
// may match the same characters in two ways.

import { codeBlock } from "./code.js";
import { el } from "./dom.js";
import { CLOSE, inline, MAX_DEPTH } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/s;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*)|\s*)$/s;
const DISPLAY = /^ {0,3}(?:\$\$|\\\[)/;
const MAX_FORMULA_LINES = 100;
const QUOTE = /^ {0,3}> ?(.*)$/s;

/** Show a text in `target`, which may have an earlier state of it: only blocks that differ are made again. */
export function render(target, text) {
  const sources = blocks(text);
  const before = target.sources ?? [];
  let same = 0;
  while (same < before.length && same < sources.length && before[same] === sources[same]) same += 1;
  while (target.childNodes.length > same) target.lastChild.remove();
  target.append(...sources.slice(same).map((source) => block(source.split("\n"), 0)));
  target.sources = sources;
}

/** Return the top-level blocks of a text, as text. */
function blocks(text) {
  return grouped(text.replace(/\r\n?/g, "\n").split("\n")).map((lines) => lines.join("\n"));
}

/** Split lines into blocks. */
function grouped(lines) {
  const groups = [];
  for (let i = 0; i < lines.length;) {
    if (!lines[i].trim()) { i += 1; continue; }
    const end = endOf(lines, i);
    groups.push(lines.slice(i, end));
    i = end;
  }
  return groups;
}

/** Return the line after the block that begins at `start`. */
function endOf(lines, start) {
  const line = lines[start];
  if (FENCE.test(line)) return endOfFence(lines, start);
  if (HEADING.test(line) || RULE.test(line)) return start + 1;
  const afterFormula = DISPLAY.test(line) && endOfFormula(lines, start);
  if (afterFormula) return afterFormula;
  if (QUOTE.test(line)) return first(lines, start + 1, (next) => !QUOTE.test(next));
  if (ITEM.test(line)) return endOfList(lines, start);
  if (isTable(lines, start)) return first(lines, start + 2, (next) => !next.includes("|"));
  return first(lines, start + 1, (next, i) => !next.trim() || interrupts(next) || isTable(lines, i));
}

function first(lines, from, ends) {
  let i = from;
  while (i < lines.length && !ends(lines[i], i)) i += 1;
  return i;
}

const interrupts = (line) =>
  FENCE.test(line) || DISPLAY.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || /^\s*([-*+]|1[.)])\s+\S/.test(line);

function endOfFence(lines, start) {
  const mark = FENCE.exec(lines[start].trimStart())[1];
  const close = first(lines, start + 1, (line) => closes(line, mark));
  return Math.min(close + 1, lines.length);
}

/** Return the line after a formula that has lines for itself; 0 if it does not end. */
function endOfFormula(lines, start) {
  const opening = lines[start].trimStart().slice(0, 2);
  let from = lines[start].indexOf(opening) + 2;
  for (let i = start; i < lines.length && i < start + MAX_FORMULA_LINES; i += 1) {
    if (lines[i].indexOf(CLOSE[opening], from) >= 0) return i + 1;
    from = 0;
  }
  return 0;
}

const closes = (line, mark) => {
  const text = line.trim();
  return text.length >= mark.length && text === mark[0].repeat(text.length);
};

/** A list goes on over empty lines, if an item or an indented line follows. Fences within it are skipped. */
function endOfList(lines, start) {
  const ordered = isOrdered(lines[start]);
  let end = start;
  for (let i = start; i < lines.length;) {
    const line = lines[i];
    const inside = /^\s{2,}\S/.test(line);
    const item = ITEM.test(line) && !RULE.test(line) && (inside || isOrdered(line) === ordered);
    const lazy = line.trim() && i === end && !interrupts(line) && i > start;
    if (line.trim() && !(item || inside || lazy || i === start)) break;
    i = inside && FENCE.test(line.trim()) ? endOfFence(lines, i) : i + 1;
    if (line.trim()) end = i;
  }
  return end;
}

const isOrdered = (line) => /^\s*\d/.test(line);

const isTable = (lines, i) => lines[i].includes("|") && i + 1 < lines.length && cells(lines[i + 1]).every((cell) => /^:?-+:?$/.test(cell));

/** Return the element of one block. */
function block(lines, depth) {
  const [line] = lines;
  if (FENCE.test(line)) return fenced(lines);
  const heading = HEADING.exec(line);
  if (heading) return el(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2].trim().replace(/(^|\s)#+$/, "").trim()));
  if (RULE.test(line)) return el("hr");
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, depth);
  if (isTable(lines, 0)) return table(lines);
  return el("p", {}, ...inline(lines.map((text) => text.trim()).join("\n")));
}

function fenced(lines) {
  const [, mark, language] = FENCE.exec(lines[0]);
  const closed = lines.length > 1 && closes(lines.at(-1), mark);
  return codeBlock(lines.slice(1, closed ? -1 : undefined).join("\n"), language.trim().split(/\s/)[0]);
}

const quote = (lines, depth) =>
  el("blockquote", {}, ...grouped(lines.map((line) => QUOTE.exec(line)[1])).map((part) => block(part, depth + 1)));

function list(lines, depth) {
  const [, , mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const start = ordered && Number.parseInt(mark, 10) !== 1 ? String(Number.parseInt(mark, 10)) : null;
  return el(ordered ? "ol" : "ul", { start }, ...items(lines).map((item) => listItem(item, depth)));
}

/** Split a list's lines into items, without their marks and indentation. */
function items(lines) {
  const base = /^\s*/.exec(lines[0])[0].length;
  const all = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length < base + 2) all.push([match[3] ?? ""]);
    else all.at(-1).push(line.slice(Math.min(base + indentation(all.at(-1), line, base), /^\s*/.exec(line)[0].length)));
  }
  return all;
}

// The first indented line of an item says how far its others are indented; 2 to 4 columns are usual.
function indentation(item, line, base) {
  if (item.indent === undefined && line.trim()) item.indent = Math.min(4, Math.max(0, /^\s*/.exec(line)[0].length - base));
  return item.indent ?? 0;
}

function listItem(lines, depth) {
  const task = /^\[([ xX])\]\s+(.*)$/s.exec(lines[0]);
  const own = task ? [task[2], ...lines.slice(1)] : lines;
  const loose = own.some((line, i) => !line.trim() && i < own.length - 1);
  const parts = grouped(own).map((part) => block(part, depth + 1));
  const children = parts.flatMap((part) => (part.tagName === "P" && !loose ? [...part.childNodes] : [part]));
  if (!task) return el("li", {}, ...children);
  const box = el("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": "task" });
  return el("li", { class: "task" }, box, " ", ...children);
}

function table(lines) {
  const sides = cells(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : null));
  const row = (line, tag) => el("tr", {}, ...cells(line).map((cell, i) => el(tag, { class: sides[i] ?? null }, ...inline(cell))));
  const body = lines.slice(2).map((line) => row(line, "td"));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, row(lines[0], "th")), el("tbody", {}, ...body)));
}

const cells = (line) =>
  line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
