// Runs the page's Markdown renderer without a browser: node markdown_runner.mjs FOLDER, with the page's scripts in FOLDER.
// Standard input: {"texts": [TEXT, …], "measured": [[BEFORE, REPEATED, AFTER], …], "characters": LENGTH}. Standard output:
// {"elements": [TEXT, …], "measured": [{"growth": …, "cost": …}, …]}, where `growth` is the time of a text of four times
// the length divided by the time of the text, and `cost` the time of the longer text divided by that of ordinary text.

import { readFileSync, writeSync } from "node:fs";

const ATTEMPTS = 4;      // collections of garbage and the compiler disturb single measurements
const REPEATS = 3;
const SHORTEST = 300;      // microseconds; below it, times are those of the clock and not of the text
const ORDINARY = "Some *words* with `code`, [a link](https://a.b) and **more**.\n";

class Node {
  constructor(tag) {
    Object.assign(this, { tag, tagName: tag.toUpperCase(), childNodes: [], href: null });
  }
  setAttribute(name, value) { if (name === "href" && this.tag === "a") this.href = value; }
  addEventListener() {}
  append(...nodes) { for (const node of nodes) this.childNodes.push(node); }
  set textContent(text) { this.childNodes = [text]; }
}
globalThis.document = { createElement: (tag) => new Node(tag), createElementNS: (_, tag) => new Node(tag) };

const { render } = await import(`${process.argv[2]}/markdown.js`);
const { texts = [], measured = [], characters = 0 } = JSON.parse(readFileSync(0, "utf8"));

function rendered(text) {
  const target = new Node("main");
  render(target, text);
  return target.childNodes;
}

const written = (node) =>
  typeof node === "string" ? node : `<${node.tag}${node.href ? ` ${node.href}` : ""}>${node.childNodes.map(written).join("")}</${node.tag}>`;

/** Return the least processor time of a rendering in microseconds, and at least SHORTEST. */
function time(text) {
  let least = Infinity;
  for (let i = 0; i < REPEATS; i += 1) {
    const began = process.cpuUsage();
    rendered(text);
    const { user, system } = process.cpuUsage(began);
    least = Math.min(least, user + system);
  }
  return Math.max(least, SHORTEST);
}

function measure([before, repeated, after]) {
  const text = (length) => before + repeated.repeat(Math.ceil(length / repeated.length)) + after;
  let growth = Infinity, cost = Infinity;
  for (let i = 0; i < ATTEMPTS && (growth >= 12 || cost >= 40); i += 1) {
    const [part, whole, ordinary] = [text(characters), text(4 * characters), ORDINARY.repeat((4 * characters) / ORDINARY.length)].map(time);
    growth = Math.min(growth, whole / part);
    cost = Math.min(cost, whole / ordinary);
  }
  return { growth, cost };
}

const elements = texts.map((text) => rendered(text).map(written).join(""));
writeSync(1, JSON.stringify({ elements, measured: measured.map(measure) }));
process.exit();      // formulas would be converted now
