// The page: puts its parts together. Views are in the address (#chat, #fleet), so that back and reload work.

import { onKeyNeeded, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { at, el } from "./dom.js";
import { Fleet } from "./fleet.js";
import { NARROW, setSide, sideCovers } from "./frame.js";
import { showHistory } from "./history.js";
import * as models from "./models.js";
import { presetGroup } from "./presets.js";
import { changedCount, panel } from "./settings.js";
import * as store from "./store.js";
import { exportAll, importFile } from "./transfer.js";

const CHECK = 1_500;       // milliseconds between health checks
const SILENCE = 10_000;    // milliseconds without a reply after which the connection counts as lost

const chat = new Chat(() => list());
const fleet = new Fleet();

const list = () => showHistory(chat.conversation, open);

/** Open a conversation, by default a new one; null only shows the list. */
function open(conversation) {
  if (conversation !== null) {
    chat.open(conversation);
    location.hash = "chat";
    if (NARROW.matches) setSide(false);
  }
  showModel();
  showSettings();
  list();
}

function showView() {
  const isFleet = location.hash === "#fleet";
  at("fleet").hidden = !isFleet;
  at("chat").hidden = isFleet;
  document.body.dataset.view = isFleet ? "fleet" : "chat";
  for (const [name, current] of [["chat", !isFleet], ["fleet", isFleet]]) {
    if (current) at(`to-${name}`).setAttribute("aria-current", "page");
    else at(`to-${name}`).removeAttribute("aria-current");
  }
  fleet.shown = isFleet;
  if (isFleet && NARROW.matches) setSide(false);
}

// The models.

async function loadModels() {
  if (!await models.load()) return;
  at("key-form").hidden = true;
  chat.offerIdeas();
  showModel();
  showSettings();
  fleet.start();
}

async function refreshModels() {
  if (await models.load()) showModel();
}

const showModel = () => models.show(chat.conversation.settings);

at("model").addEventListener("change", () => {
  chat.set("model", at("model").value);
  showModel();
  showSettings();
});

at("unload-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (await models.unload()) refreshModels();
});

// The key.

onKeyNeeded(() => {
  if (!at("key-form").hidden) return;
  at("key-form").hidden = false;
  at("key").focus();
});

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key").value);
  loadModels();
});

// Settings.

function showSettings() {
  const { settings } = chat.conversation;
  const presets = presetGroup(settings, (preset) => { chat.choose(preset); showSettings(); });
  const changed = (name, value) => { chat.set(name, value); presets.show(); countSettings(); };
  at("fields").replaceChildren(presets.group, ...panel(settings, models.chosen(settings)?.default_sampling ?? {}, changed));
  countSettings();
}

function countSettings() {
  const count = changedCount(chat.conversation.settings);
  at("settings-count").textContent = count || "";
  at("settings-count").hidden = !count;
  at("to-settings").title = count ? `Settings: ${count} changed` : "Settings";
}

function setSettings(shown) {
  at("settings").hidden = !shown;
  at("to-settings").setAttribute("aria-expanded", String(shown));
  (shown ? at("close-settings") : at("to-settings")).focus();
}

at("to-settings").addEventListener("click", () => setSettings(at("settings").hidden));
at("close-settings").addEventListener("click", () => setSettings(false));
at("new").addEventListener("click", () => open());
for (const kind of ["markdown", "json"]) {
  at(`export-${kind}`).addEventListener("click", () => {
    chat.export(kind);
    at("export").open = false;
  });
}

at("search").addEventListener("input", list);
at("export-all").addEventListener("click", () => { exportAll(); at("transfer").open = false; });
at("import").addEventListener("click", () => { at("import-file").click(); at("transfer").open = false; });
at("import-file").addEventListener("change", async () => {
  const [file] = at("import-file").files;
  if (file) await importFile(file);
  at("import-file").value = "";
  list();
});

// Keys.

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") escape();
  else if (event.key === "/" && !/^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName)) {
    event.preventDefault();
    at("text").focus();
  } else if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    open();
  }
});

function escape() {
  const menu = document.querySelector(".menu[open]");
  if (menu) menu.open = false;
  else if (!at("settings").hidden) setSettings(false);
  else if (sideCovers()) setSide(false);
  else chat.stop();
}

// Whether the server is there.

async function check() {
  if (!document.hidden) {
    const { text, kind } = await health();
    at("state").textContent = text;
    at("state").dataset.kind = kind;
  }
  setTimeout(check, CHECK);
}

async function health() {
  const options = { cache: "no-store", signal: AbortSignal.timeout(SILENCE) };
  const reply = await fetch("health", options).then((each) => each.json()).catch(() => null);
  if (!reply) return { text: "no connection", kind: "bad" };  // also if a proxy replies instead of the server
  const { status, detail, models: states } = reply;
  const changed = models.changed(states);
  if (status === "ready" || status === "degraded") {
    if (!models.known()) loadModels();
    else if (changed) refreshModels();
  }
  return status === "ready" ? { text: "ready", kind: "good" } : { text: detail || status, kind: "busy" };
}

window.addEventListener("hashchange", showView);
store.onChange(list);
showView();
showSettings();
list();
check();
loadModels();
