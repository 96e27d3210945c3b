// Messages as elements. A view has its `element`, and `update` to show what its node is now.

import { figures } from "./answer.js";
import { siblings } from "./conversation.js";
import { coloured } from "./code.js";
import { copy, duration, el, icon, iconButton, number } from "./dom.js";
import { render } from "./markdown.js";

/** Return the view of a node. `acts`: what its buttons do: edit, regenerate, turn, sendResult. */
export const viewOf = (node, conversation, acts) => VIEWS[node.role](node, conversation, acts);

const VIEWS = { user: userView, assistant: answerView, tool: toolView };

function userView(node, conversation, acts) {
  const element = el("article", { class: "message user", "aria-label": "You" });
  const chips = (node.files ?? []).map((file) => el("li", {}, icon("file"), el("span", { text: file.name })));
  const bubble = el("div", { class: "bubble" }, chips.length ? el("ul", { class: "files" }, ...chips) : null, el("div", { class: "typed", text: node.content }));
  const copyButton = iconButton("copy", "Copy message", () => copy(node.content, copyButton));
  const edit = iconButton("edit", "Edit message", () => element.replaceChildren(editor(node, acts)));
  element.append(bubble, el("div", { class: "actions" }, pager(node, conversation, acts), edit, copyButton));
  element.edit = () => edit.click();
  return { element, update: () => {} };
}

/** Return a form to change a message; what follows it is asked for again. */
function editor(node, acts) {
  const text = el("textarea", { rows: Math.min(12, node.content.split("\n").length + 1), "aria-label": "Edited message" });
  text.value = node.content;
  const save = (event) => { event.preventDefault(); acts.edit(node, text.value.trim()); };
  const form = el("form", { class: "editor", on: { submit: save } }, text, el("div", { class: "row" },
    el("button", { type: "button", text: "Cancel", on: { click: () => acts.show() } }),
    el("button", { type: "submit", class: "primary", text: "Send" })));
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); acts.show(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) save(event);
  });
  queueMicrotask(() => text.focus());
  return form;
}

function toolView(node) {
  const result = el("pre", { text: node.content });
  return { element: el("article", { class: "message tool", "aria-label": "Tool result" }, el("h3", {}, icon("tool"), `Result of ${node.name}`), result), update: () => {} };
}

function answerView(node, conversation, acts) {
  const thought = el("details", { class: "reasoning", hidden: true }, el("summary"), el("div", { class: "markdown" }));
  const body = el("div", { class: "markdown" });
  const calls = el("div", { class: "calls" });
  const wait = el("p", { class: "wait", "aria-label": "waiting for the first token" }, el("i"), el("i"), el("i"));
  const problem = el("p", { class: "problem", role: "alert", hidden: true });
  const meta = el("dl", { class: "meta" });
  const copyButton = iconButton("copy", "Copy answer", () => copy(node.content, copyButton));
  const actions = el("div", { class: "actions" }, pager(node, conversation, acts), copyButton,
    iconButton("again", "Regenerate", () => acts.regenerate(node)));
  const element = el("article", { class: "message assistant", "aria-label": "Answer" }, thought, wait, body, calls, problem, meta, actions);
  const update = () => {
    const busy = node.state === "waiting" || node.state === "writing";
    element.setAttribute("aria-busy", String(busy));
    element.classList.toggle("busy", busy);
    wait.hidden = !(busy && !node.content && !node.reasoning && !node.calls.length);
    showReasoning(thought, node, busy);
    render(body, node.content);
    showCalls(calls, node, busy, acts);
    showProblem(problem, node);
    meta.replaceChildren(...facts(node));
    actions.hidden = busy;
  };
  update();
  return { element, update };
}

function showReasoning(box, node, busy) {
  box.hidden = !node.reasoning;
  if (!node.reasoning) return;
  const { thought, spoke, last } = node.timing;
  const thinking = busy && !node.content;
  const seconds = ((spoke ?? last) - thought) / 1000;
  box.firstChild.textContent = thinking ? "Thinking …" : `Thought for ${number(seconds, 1)} s`;
  box.classList.toggle("thinking", thinking);
  render(box.lastChild, node.reasoning);
}

function showCalls(box, node, busy, acts) {
  if (!node.calls.length) return;
  if (box.dataset.done) return;
  box.replaceChildren(...node.calls.filter(Boolean).map((call) => callCard(call, node, busy, acts)));
  if (!busy) box.dataset.done = "yes";
}

function callCard(call, node, busy, acts) {
  const head = el("h3", {}, icon("tool"), "Calls ", el("code", { text: call.name }));
  const card = el("section", { class: "call", "aria-label": `Call of ${call.name}` }, head, el("pre", {}, el("code", {}, ...coloured(indented(call.text), "json"))));
  if (!busy && node.state === "done" && acts.isLast(node)) card.append(resultForm(call, node, acts));
  return card;
}

function resultForm(call, node, acts) {
  const text = el("textarea", { rows: 1, "aria-label": `Result of ${call.name}`, placeholder: "Result to send back" });
  const send = (event) => { event.preventDefault(); acts.sendResult(node, call, text.value); };
  return el("form", { class: "row", on: { submit: send } }, text, el("button", { type: "submit", text: "Send result" }));
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function showProblem(box, node) {
  const text = node.error ?? (node.state === "stopped" ? "Stopped." : ENDS[node.finish]);
  box.hidden = !text;
  box.classList.toggle("mild", !node.error);
  box.textContent = text ?? "";
}

const ENDS = { length: "The answer reached its maximum length." };

/** Return what was measured of an answer, as terms and their values. */
function facts(node) {
  const known = figures(node);
  const entries = known ? [
    ["speed", `${number(known.rate, 1)} tokens/s`, known.rate !== null],
    ["tokens", `${number(known.tokens)} token${known.tokens === 1 ? "" : "s"}`],
    ["first token", `first token after ${duration(known.first)}`],
    ["prompt", promptFact(node, known)],
    ["draft tokens", `${number(known.accepted)} of ${number(known.drafted)} draft tokens accepted`, known.drafted > 0],
  ] : [];
  const shown = entries.filter(([, , when = true]) => when).map(([name, text]) => fact(name, text, name.replace(" ", "-")));
  const targets = known ? known.targets.map(targetFact) : [];
  const warning = node.warning ? [fact("not obeyed", `fields ${node.warning}`, "warning")] : [];
  return [...shown, ...targets, ...warning];
}

const fact = (name, text, kind) => el("div", { class: kind }, el("dt", { text: name }), el("dd", { text }));

function promptFact({ ahead }, { promptTokens, cached }) {
  if (ahead) return `${number(ahead.computed)} of ${number(ahead.tokens)} prompt tokens computed before it was sent`;
  return `${number(promptTokens)} prompt tokens${cached ? `, ${number(cached)} cached` : ""}`;
}

function targetFact({ name, limit, value, met, final }) {
  const text = `${name} ${duration(value)}, target ${duration(limit)}${final ? (met ? ": met" : ": missed") : ""}`;
  return fact("latency target", text, `target ${met ? "met" : "missed"}`);
}

/** Return buttons to turn to the alternatives of a node, if it has some. */
function pager(node, conversation, acts) {
  const all = siblings(conversation, node);
  if (all.length < 2) return null;
  const at = all.indexOf(node);
  return el("span", { class: "pager" },
    iconButton("before", "Previous version", () => acts.turn(node, -1), { disabled: at === 0 }),
    el("span", { text: `${at + 1} / ${all.length}` }),
    iconButton("after", "Next version", () => acts.turn(node, 1), { disabled: at === all.length - 1 }));
}
