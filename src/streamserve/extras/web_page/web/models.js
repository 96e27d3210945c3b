// The models of the server: the list in which one is chosen, their states, and the menu that unloads the chosen one.

import { ApiError, callAsAdmin, hasKey, json } from "./api.js";
import { at, el, notify, number } from "./dom.js";

let models = [];
let states;      // of models on demand, as JSON, when they were looked at last

/** Ask the server for its models. Returns whether it has answered. */
export async function load() {
  try {
    models = (await json("GET", "v1/models")).data;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    return false;
  }
  return true;
}

/** Return whether the server has said which models it has. */
export const known = () => models.length > 0;

/** Return the model that settings choose, by default the server's first. */
export const chosen = (settings) => models.find(({ id }) => id === settings.model) ?? models[0];

/** Return whether the states of models on demand differ from those of the last call. */
export function changed(now) {
  const before = states;
  states = JSON.stringify(now);
  return states !== before;
}

/** Show the models, and what is known of the chosen one. */
export function show(settings) {
  const model = chosen(settings);
  if (model && settings.model !== model.id) delete settings.model;      // the server has others now
  const options = models.map(({ id, state }) => el("option", { value: id, text: state && state !== "loaded" ? `${id} (${state})` : id }));
  at("model").replaceChildren(...options);
  at("model").disabled = models.length < 2;
  if (!model) return;
  at("model").value = model.id;
  const facts = [model.precision, model.max_model_len && `${number(model.max_model_len)} tokens of context`];
  at("about").textContent = facts.filter(Boolean).join(" · ");
  at("welcome-model").textContent = model.id;
  showMenu(model);
}

/** Offer to unload a model if it is loaded on demand, and the server has admin keys. Only such a key unloads it: the page's
 *  own one is tried first. */
function showMenu({ id, state, memory, unloadable }) {
  const offered = Boolean(unloadable) && state === "loaded";
  if (!offered || at("unload").dataset.model !== id) closeMenu();
  at("unload").hidden = !offered;
  at("unload").dataset.model = id;
  at("unload-text").textContent = `${id} is loaded and takes ${bytes(memory)}. The next message to it loads it again.`;
}

function closeMenu() {
  at("unload").open = false;
  at("unload-problem").hidden = true;
  at("admin-key").hidden = hasKey();
}

/** Unload the model of the menu. Returns whether the server does that; what it says otherwise is shown. */
export async function unload() {
  const { model } = at("unload").dataset;
  try {
    await callAsAdmin("POST", `admin/unload?model=${encodeURIComponent(model)}`, at("admin-key").value);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) at("admin-key").hidden = false;
    at("unload-problem").textContent = error.status === 401 ? "This needs an admin key of the server." : error.message;
    at("unload-problem").hidden = false;
    return false;
  }
  closeMenu();
  notify(`${model} is unloaded.`);
  return true;
}

const bytes = (count) => (count < 1e9 ? `${number(count / 1e6)} MB` : `${number(count / 1e9, 1)} GB`);
