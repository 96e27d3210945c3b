// Presets: settings of a conversation, stored in this browser under a name.

import { el, iconButton } from "./dom.js";
import { chatSettings } from "./settings.js";
import * as store from "./store.js";

const MAX_NAME = 60;      // characters
const CHANGED = "\n";     // the choice that stands for settings of no preset; no name has it

/** Return the group in which a preset is chosen, stored and deleted, and a function that shows it for other settings.
 *  `choose` is called with the settings of a preset. */
export function presetGroup(settings, choose) {
  const select = el("select", { id: "preset", "aria-label": "Preset", on: { change: () => choose(store.presets().get(select.value) ?? {}) } });
  const remove = iconButton("delete", "Delete preset", () => { change((presets) => presets.delete(select.value)); });
  const name = el("input", { id: "preset-name", "aria-label": "Name of the preset", placeholder: "Save these as …", maxlength: MAX_NAME });
  const save = (event) => {
    event.preventDefault();
    const given = name.value.trim();
    if (given) change((presets) => presets.set(given, chatSettings(settings)));
    name.value = "";
  };
  const button = el("button", { type: "button", id: "save-preset", text: "Save", on: { click: save } });
  name.addEventListener("keydown", (event) => { if (event.key === "Enter") save(event); });

  function change(edit) {
    const presets = store.presets();
    edit(presets);
    store.savePresets(presets);
    show();
  }

  function show() {
    const presets = store.presets();
    const chosen = nameOf(settings, presets);
    const names = [["", "Defaults"], ...[...presets.keys()].map((key) => [key, key]), ...(chosen === CHANGED ? [[CHANGED, "(not saved)"]] : [])];
    select.replaceChildren(...names.map(([value, text]) => el("option", { value, text })));
    select.value = chosen;
    remove.disabled = !presets.has(chosen);
  }

  show();
  const group = el("fieldset", { id: "presets" }, el("legend", { text: "Preset" }), el("div", { class: "row" }, select, remove), el("div", { class: "row" }, name, button));
  return { group, show };
}

/** Return the name of the preset that has these settings, "" if there are none. */
function nameOf(settings, presets) {
  const own = canonical(chatSettings(settings));
  if (own === canonical({})) return "";
  return [...presets].find(([, preset]) => canonical(preset) === own)?.[0] ?? CHANGED;
}

const canonical = (settings) => JSON.stringify(Object.entries(settings).sort());
