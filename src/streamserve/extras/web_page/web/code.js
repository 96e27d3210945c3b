// Code with a copy button, in a few colours: comments, texts, numbers and the words that most languages share.

import { copy, el, iconButton } from "./dom.js";

const WORDS = new Set(
  ("and as async await break case catch class const continue def default del do done echo elif else end enum except export " +
    "extends false False fi finally fn for from func function global if impl import in interface is lambda let local loop match " +
    "mod mut namespace new nil None nonlocal not null or package pass private protected pub public raise return self static " +
    "struct super switch then this throw trait True true try type typedef use using var void while with yield " +
    "SELECT FROM WHERE JOIN GROUP ORDER BY INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE AND OR NOT NULL LIMIT").split(" "),
);
const TEXT = /"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|`(?:[^`\\]|\\.)*`?/.source;
const TRIPLE = /"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)/.source;
const SLASHES = /\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)/.source;
const HASH = /#[^\n]*/.source;
const DASHES = /--[^\n]*/.source;
const REST = /\b\d[\w.]*\b|[A-Za-z_$][\w$]*/.source;

const COMMENTS = { py: HASH, sh: HASH, sql: DASHES };
const KINDS = { python: "py", py: "py", ruby: "py", yaml: "py", yml: "py", toml: "py", r: "py", bash: "sh", sh: "sh", shell: "sh", zsh: "sh", sql: "sql", lua: "sql" };
const PLAIN = new Set(["text", "txt", "plain", "plaintext", "output", "log", "csv", "markdown", "md"]);
const MAX_COLOURED = 50_000;

/** Return code as an element with its language and a copy button. */
export function codeBlock(code, language) {
  const button = iconButton("copy", "Copy code", () => copy(code, button));
  const head = el("figcaption", {}, el("span", { text: language || "code" }), button);
  return el("figure", { class: "code" }, head, el("pre", { tabindex: "0" }, el("code", {}, ...coloured(code, language))));
}

/** Return code as nodes, with parts in a class that gives them their colour. */
export function coloured(code, language) {
  if (PLAIN.has(language) || code.length > MAX_COLOURED) return [code];
  const kind = KINDS[language.toLowerCase()] ?? "c";
  const pattern = new RegExp(`(${COMMENTS[kind] ?? SLASHES})|(${kind === "py" ? `${TRIPLE}|` : ""}${TEXT})|${REST}`, "g");
  const nodes = [];
  let done = 0;
  for (const match of code.matchAll(pattern)) {
    const name = nameOf(match);
    if (!name) continue;
    nodes.push(code.slice(done, match.index), el("span", { class: name, text: match[0] }));
    done = match.index + match[0].length;
  }
  return [...nodes, code.slice(done)];
}

function nameOf([all, comment, text]) {
  if (comment) return "comment";
  if (text) return "string";
  if (/^\d/.test(all)) return "number";
  return WORDS.has(all) ? "keyword" : null;
}
