// Markdown as elements. Text from a model only ever becomes text nodes; HTML in it is shown as it is written, links
// lead to http, https and mailto alone, and pictures are links. Time is linear in the length, depth is bounded.

import { codeBlock } from "./code.js";
import { el } from "./dom.js";
import { formula } from "./formula.js";

const MAX_DEPTH = 8;
const MAX_PARAGRAPH = 20_000;      // characters; what is longer is shown as it is
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*)|\s*)$/;
const DISPLAY = /^ {0,3}(?:\$\$|\\\[)/;
const MAX_FORMULA_LINES = 100;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

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
  const mark = FENCE.exec(lines[start])[1];
  const close = first(lines, start + 1, (line) => closes(line, mark));
  return Math.min(close + 1, lines.length);
}

/** Return the line after a formula that has lines for itself; 0 if it does not end. */
function endOfFormula(lines, start) {
  const rest = lines.slice(start, start + MAX_FORMULA_LINES).join("\n").trimStart();
  const close = rest.indexOf(CLOSE[rest.slice(0, 2)], 2);
  return close < 0 ? 0 : start + rest.slice(0, close).split("\n").length;
}

const closes = (line, mark) => {
  const text = line.trim();
  return text.length >= mark.length && text === mark[0].repeat(text.length);
};

/** A list goes on over empty lines, if an item or an indented line follows. Fences within it are skipped. */
function endOfList(lines, start) {
  const ordered = isOrdered(lines[start]);
  let end = start, trimmed;
  for (let i = start; i < lines.length;) {
    const line = lines[i];
    const inside = /^\s{2,}\S/.test(line);
    const item = ITEM.test(line) && !RULE.test(line) && (inside || isOrdered(line) === ordered);
    const lazy = line.trim() && i === end && !interrupts(line) && i > start;
    if (line.trim() && !(item || inside || lazy || i === start)) break;
    i = inside && FENCE.test(line.trim()) ? endOfFence(trimmed ??= lines.map((text) => text.trimStart()), i) : i + 1;
    if (line.trim()) end = i;
  }
  return end;
}

const isOrdered = (line) => /^\s*\d/.test(line);

const isTable = (lines, i) => lines[i].includes("|") && i + 1 < lines.length && lines[i + 1].includes("-") && DIVIDER.test(lines[i + 1]);

/** Return the element of one block. */
function block(lines, depth) {
  const [line] = lines;
  if (FENCE.test(line)) return fenced(lines);
  const heading = HEADING.exec(line);
  if (heading) return el(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2]));
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
  const task = /^\[([ xX])\]\s+(.*)$/.exec(lines[0]);
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

const CLOSE = { "\\(": "\\)", "\\[": "\\]", "$$": "$$", "$": "$" };
const MAX_FORMULA = 5000;      // characters
const INLINE = /(\\[([]|\$\$?)|\\([!-/:-@[-`{-~])|(`+)|(!?\[)|<(https?:\/\/[^\s<>]+|mailto:[^\s<>]+)>|(https?:\/\/[^\s<>]*[^\s<>.,:;"')\]!?*_~])|(\*\*\*|\*\*|\*|___|__|_|~~)|\n/g;

/** Return the nodes of text with emphasis, code, links and formulas. */
function inline(text, depth = 0) {
  if (text.length > MAX_PARAGRAPH) return [text];
  const nodes = [];
  const missing = new Set();       // delimiters that do not occur after here
  const scan = new RegExp(INLINE);
  let done = 0;
  const push = (node, from, to) => {
    if (from > done) nodes.push(text.slice(done, from));
    nodes.push(node);
    done = scan.lastIndex = to;
  };
  for (let match; (match = scan.exec(text));) {
    const found = element(text, match, missing, depth);
    if (found) push(found.node, match.index, found.end);
  }
  if (done < text.length) nodes.push(text.slice(done));
  return nodes;
}

/** Return what begins at a match and where it ends; null if it is only text. */
function element(text, match, missing, depth) {
  const [all, opening, escaped, ticks, bracket, angle, address, mark] = match;
  const end = match.index + all.length;
  if (opening) return formulaSpan(text, match.index, end, opening, missing);
  if (escaped) return { node: escaped, end };
  if (ticks) return codeSpan(text, end, ticks, missing);
  if (bracket) return link(text, match.index, end, bracket, missing, depth);
  if (angle ?? address) return { node: anchor(angle ?? address, [angle ?? address]), end };
  if (mark) return depth < MAX_DEPTH ? emphasis(text, match.index, mark, missing, depth) : null;
  return { node: el("br"), end };
}

function formulaSpan(text, at, start, opening, missing) {
  if (missing.has(opening)) return null;
  const close = opening === "$" ? start + text.slice(start, start + MAX_FORMULA).search(/(?<!\\)\$/) : text.indexOf(CLOSE[opening], start);
  if (close < start && opening !== "$") missing.add(opening);
  const end = close + opening.length;
  if (close <= start || close > start + MAX_FORMULA || (opening === "$" && isPrice(text, start, close))) return null;
  return { node: formula(text.slice(at, end), text.slice(start, close), opening === "$$" || opening === "\\["), end };
}

/** Whether two dollars are no formula: there is a space within them, or a digit after them. */
const isPrice = (text, start, close) => /\s/.test(text[start] + text[close - 1]) || /\d/.test(text[close + 1] ?? "");

function codeSpan(text, start, ticks, missing) {
  if (missing.has(ticks)) return null;
  const close = new RegExp(`(?<!\`)${ticks}(?!\`)`, "g");
  close.lastIndex = start;
  const found = close.exec(text);
  if (!found) { missing.add(ticks); return null; }
  const code = text.slice(start, found.index).replaceAll("\n", " ");
  return { node: el("code", { text: /^ .*\S.* $/.test(code) ? code.slice(1, -1) : code }), end: found.index + ticks.length };
}

// A link's text and address are short: what is longer is no link.
const LINK = /^([^\]\n]{0,500})\]\(\s*<?([^\s<>()]{1,2000}(?:\([^\s()]{0,500}\)[^\s<>()]{0,500})?)>?(?:\s+"[^"\n]{0,500}")?\s*\)/;

function link(text, at, start, bracket, missing, depth) {
  const found = LINK.exec(text.slice(start, start + 4000));
  if (!found || depth >= MAX_DEPTH) return null;
  const end = start + found[0].length;
  const isPicture = bracket === "![";
  return { node: anchor(found[2], isPicture ? [found[1] || found[2]] : inline(found[1] || found[2], depth + 1)), end };
}

/** Return a link, or its text alone if it leads elsewhere than to http, https or mailto. */
function anchor(address, children) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return el("span", {}, ...children);
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

const TAGS = { "*": ["em"], "_": ["em"], "**": ["strong"], "__": ["strong"], "***": ["strong", "em"], "___": ["strong", "em"], "~~": ["del"] };

function emphasis(text, at, mark, missing, depth) {
  const start = at + mark.length;
  if (missing.has(mark) || !/\S/.test(text[start] ?? " ")) return null;
  if (mark[0] === "_" && /[\p{L}\p{N}]/u.test(text[at - 1] ?? " ")) return null;
  const close = closing(text, start, mark);
  if (close < 0) { missing.add(mark); return null; }
  const inner = inline(text.slice(start, close), depth + 1);
  const node = TAGS[mark].reduceRight((children, tag) => [el(tag, {}, ...children)], inner)[0];
  return { node, end: close + mark.length };
}

/** Return where emphasis that began before `start` ends; -1 if it does not. Code spans are skipped. */
function closing(text, start, mark) {
  for (let i = start; i < text.length; i += 1) {
    if (text[i] === "\\") i += 1;
    else if (text[i] === "`") i = Math.max(i, afterCode(text, i));
    else if (text[i] === mark[0]) {
      const length = run(text, i);
      const fits = length === mark.length || (length === 3 && mark[0] !== "~");
      const inWord = mark[0] === "_" && /[\p{L}\p{N}]/u.test(text[i + length] ?? " ");
      if (fits && i > start && /\S/.test(text[i - 1]) && !inWord) return i + length - mark.length;
      i += length - 1;
    }
  }
  return -1;
}

function run(text, start) {
  let end = start;
  while (text[end] === text[start]) end += 1;
  return end - start;
}

function afterCode(text, start) {
  const length = run(text, start);
  const close = text.indexOf("`".repeat(length), start + length);
  return close < 0 ? start + length - 1 : close + length - 1;
}
