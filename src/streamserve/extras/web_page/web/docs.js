// The page at /docs: examples to copy, and to send from here.

import { call, onKeyNeeded, useKey } from "./api.js";
import { at, copy, duration, el, iconButton } from "./dom.js";
import { NARROW, setSide } from "./frame.js";

const EXAMPLE_SERVER = "http://localhost:8000/";      // in the commands, until they name this server
const MAX_SHOWN = 200_000;      // characters of a reply

/** Give an example a copy button, and a form to send it. */
function enliven(route) {
  const figure = route.querySelector(".code");
  const command = figure.querySelector("pre");
  command.textContent = command.textContent.replace(EXAMPLE_SERVER, new URL(".", location.href).href);
  const button = iconButton("copy", "Copy", () => copy(command.textContent, button));
  const buttons = el("span", { class: "row" }, button);
  figure.querySelector("figcaption").append(buttons);
  if (!route.dataset.method) return;
  const open = el("button", { type: "button", text: "Try it", "aria-expanded": "false" });
  const form = tryForm(route.dataset);
  open.addEventListener("click", () => {
    form.hidden = !form.hidden;
    open.setAttribute("aria-expanded", String(!form.hidden));
  });
  buttons.prepend(open);
  figure.after(form);
}

function tryForm({ method, path, example }) {
  const address = el("input", { "aria-label": "Path", spellcheck: "false" });
  address.value = path;
  const body = example ? el("textarea", { "aria-label": "Body", spellcheck: "false" }) : null;
  if (body) {
    body.value = JSON.stringify(JSON.parse(example), null, 2);
    body.rows = Math.min(16, body.value.split("\n").length);
  }
  const status = el("output", {});
  const reply = el("pre", { class: "reply", tabindex: "0", hidden: true });
  const send = (event) => {
    event.preventDefault();
    request(method, address.value, body?.value, status, reply);
  };
  return el("form", { class: "try", hidden: true, on: { submit: send } }, address, body,
    el("div", { class: "row" }, el("button", { type: "submit", class: "primary", text: `Send ${method}` }), status), reply);
}

/** Send a request, and show its reply as it comes. */
async function request(method, path, body, status, reply) {
  const start = performance.now();
  const took = () => duration(performance.now() - start);
  status.textContent = "waiting …";
  reply.hidden = false;
  reply.textContent = "";
  try {
    const answer = await call(method, path.replace(/^\/+/, ""), body);
    await show(answer, reply);
    status.textContent = `${answer.status} ${answer.statusText}, ${took()}`;
  } catch (error) {
    status.textContent = `${error.status || "failed"}, ${took()}`;
    reply.textContent = error.message;
  }
}

async function show(answer, reply) {
  if (!answer.headers.get("Content-Type")?.startsWith("text/event-stream")) {
    reply.textContent = indented(await answer.text()).slice(0, MAX_SHOWN);
    return;
  }
  for (const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader(); ;) {
    const { done, value } = await reader.read();
    if (done || reply.textContent.length > MAX_SHOWN) return;
    reply.append(value);
    reply.scrollTop = reply.scrollHeight;
  }
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text || "(empty)";
  }
}

/** Mark the route that is being read in the contents. */
function followReading() {
  const links = new Map([...document.querySelectorAll("#contents a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver((entries) => {
    const entry = entries.find(({ isIntersecting }) => isIntersecting);
    if (!entry) return;
    links.forEach((link) => link.removeAttribute("aria-current"));
    links.get(entry.target.id)?.setAttribute("aria-current", "true");
  }, { rootMargin: "0px 0px -75% 0px" });
  document.querySelectorAll(".route").forEach((route) => seen.observe(route));
}

document.querySelectorAll(".route:has(.code)").forEach(enliven);
document.querySelectorAll("#contents a").forEach((link) => link.addEventListener("click", () => { if (NARROW.matches) setSide(false); }));
at("to-docs").setAttribute("aria-current", "page");
at("key").addEventListener("input", () => useKey(at("key").value));
at("key-form").addEventListener("submit", (event) => event.preventDefault());
onKeyNeeded(() => { at("key-form").hidden = false; });
followReading();
