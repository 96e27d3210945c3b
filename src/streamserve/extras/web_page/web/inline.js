// Spans of Markdown as nodes: emphasis, code, links, formulas. Time is linear in the length of the text: where a span may
// end is looked up (`Places`), and never searched from each of its beginnings.

import { el } from "./dom.js";
import { formula } from "./formula.js";

export const MAX_DEPTH = 8;
const MAX_PARAGRAPH = 20_000;      // characters; what is longer is shown as it is
const MAX_FORMULA = 5000;          // characters
const MAX_LINK_TEXT = 500;         // characters

/** The ends of formulas by their beginnings. */
export const CLOSE = { "\\(": "\\)", "\\[": "\\]", "$$": "$$", "$": "$" };

const INLINE = /(\\[([]|\$\$?)|\\([!-/:-@[-`{-~])|(`+)|(!?\[)|<(https?:\/\/[^\s<>]+|mailto:[^\s<>]+)>|(https?:\/\/[^\s<>]*[^\s<>.,:;"')\]!?*_~])|(\*\*\*|\*\*|\*|___|__|_|~~)|\n/g;
const ADDRESS = /\s*<?([^\s<>()]{1,2000}(?:\([^\s()]{0,500}\)[^\s<>()]{0,500})?)>?(?:\s+"[^"\n]{0,500}")?\s*\)/y;
const TAGS = { "*": ["em"], "_": ["em"], "**": ["strong"], "__": ["strong"], "***": ["strong", "em"], "___": ["strong", "em"], "~~": ["del"] };

/** Where delimiters are in a text. Each is looked for once, if later calls for it do not go back. */
class Places {
  #found = new Map();
  #runs = null;             // of backticks: their places by their length
  #address = [-1, null];    // the last place at which an address was looked for, and what was found

  constructor(text) {
    this.text = text;
  }

  /** Return the first place of a delimiter from `start` on; -1 if there is none. A dollar is none after a backslash. */
  next(delimiter, start) {
    let place = this.#found.get(delimiter) ?? 0;
    if (place < 0 || place >= start && this.#found.has(delimiter)) return place;
    place = this.text.indexOf(delimiter, start);
    while (delimiter === "$" && place > start && this.text[place - 1] === "\\") place = this.text.indexOf("$", place + 1);
    this.#found.set(delimiter, place);
    return place;
  }

  /** Return the first place from `start` on at which exactly `length` backticks are; -1 if there is none. */
  backticks(length, start) {
    this.#runs ??= runs(this.text);
    const places = this.#runs.get(length) ?? [];
    let low = 0, high = places.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (places[middle] < start) low = middle + 1;
      else high = middle;
    }
    return places[low] ?? -1;
  }

  /** Return the match of a link's address, title and closing parenthesis at a place; null if there is none. */
  address(place) {
    if (this.#address[0] !== place) {
      ADDRESS.lastIndex = place;
      this.#address = [place, ADDRESS.exec(this.text)];
    }
    return this.#address[1];
  }
}

function runs(text) {
  const places = new Map();
  for (const { 0: { length }, index } of text.matchAll(/`+/g)) {
    if (places.has(length)) places.get(length).push(index);
    else places.set(length, [index]);
  }
  return places;
}

/** Return the nodes of text with emphasis, code, links and formulas. */
export function inline(text, depth = 0) {
  if (text.length > MAX_PARAGRAPH) return [text];
  const nodes = [];
  const places = new Places(text);
  const missing = new Set();       // emphasis that does not end after here
  const scan = new RegExp(INLINE);
  let done = 0;
  for (let match; (match = scan.exec(text));) {
    const found = element(places, match, missing, depth);
    if (!found) continue;
    if (match.index > done) nodes.push(text.slice(done, match.index));
    nodes.push(found.node);
    done = scan.lastIndex = found.end;
  }
  if (done < text.length) nodes.push(text.slice(done));
  return nodes;
}

/** Return what begins at a match and where it ends; null if it is only text. */
function element(places, match, missing, depth) {
  const [all, opening, escaped, ticks, bracket, angle, address, mark] = match;
  const end = match.index + all.length;
  if (opening) return formulaSpan(places, match.index, end, opening);
  if (escaped) return { node: escaped, end };
  if (ticks) return codeSpan(places, end, ticks.length);
  if (bracket) return depth < MAX_DEPTH ? link(places, end, bracket, depth) : null;
  if (angle ?? address) return { node: anchor(angle ?? address, [angle ?? address]), end };
  if (mark) return depth < MAX_DEPTH ? emphasis(places, match.index, mark, missing, depth) : null;
  return { node: el("br"), end };
}

function formulaSpan(places, at, start, opening) {
  const { text } = places;
  const close = places.next(CLOSE[opening], start);
  if (close <= start || close > start + MAX_FORMULA || (opening === "$" && isPrice(text, start, close))) return null;
  const end = close + opening.length;
  return { node: formula(text.slice(at, end), text.slice(start, close), opening === "$$" || opening === "\\["), end };
}

/** Whether two dollars are no formula: there is a space within them, or a digit after them. */
const isPrice = (text, start, close) => /\s/.test(text[start] + text[close - 1]) || /\d/.test(text[close + 1] ?? "");

function codeSpan(places, start, length) {
  const close = places.backticks(length, start);
  if (close < 0) return null;
  const code = places.text.slice(start, close).replaceAll("\n", " ");
  const padded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
  return { node: el("code", { text: padded ? code.slice(1, -1) : code }), end: close + length };
}

function link(places, start, bracket, depth) {
  const { text } = places;
  const close = places.next("]", start), line = places.next("\n", start);
  if (close < 0 || close > start + MAX_LINK_TEXT || text[close + 1] !== "(" || (line >= 0 && line < close)) return null;
  const found = places.address(close + 2);
  if (!found) return null;
  const label = text.slice(start, close) || found[1];
  const children = bracket === "![" ? [label] : inline(label, depth + 1);
  return { node: anchor(found[1], children), end: found.index + found[0].length };
}

/** Return a link, or its text alone if it leads elsewhere than to http, https or mailto. */
function anchor(address, children) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return el("span", {}, ...children);
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

function emphasis(places, at, mark, missing, depth) {
  const { text } = places;
  const start = at + mark.length;
  if (missing.has(mark) || !/\S/.test(text[start] ?? " ")) return null;
  if (mark[0] === "_" && /[\p{L}\p{N}]/u.test(text[at - 1] ?? " ")) return null;
  const close = closing(places, start, mark);
  if (close < 0) { missing.add(mark); return null; }
  const inner = inline(text.slice(start, close), depth + 1);
  const node = TAGS[mark].reduceRight((children, tag) => [el(tag, {}, ...children)], inner)[0];
  return { node, end: close + mark.length };
}

/** Return where emphasis that began before `start` ends; -1 if it does not. Code spans are skipped. */
function closing(places, start, mark) {
  const { text } = places;
  for (let i = start; i < text.length; i += 1) {
    if (text[i] === "\\") i += 1;
    else if (text[i] === "`") {
      const length = run(text, i);
      i = Math.max(i, places.backticks(length, i + length)) + length - 1;
    } else if (text[i] === mark[0]) {
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
