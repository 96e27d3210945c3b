// The settings of a conversation: a table of fields, the panel made from it, and the request's fields.

import { el } from "./dom.js";

const EFFORTS = ["none", "minimal", "low", "medium", "high"];

/** Fields by group. `path`: where the value goes in the request. `empty`: what applies without a value, unless the server
 *  says it of the model. */
export const GROUPS = [
  {
    title: "Instructions",
    fields: [{ name: "system", kind: "text", label: "System prompt", rows: 4, hint: "Sent before the conversation." }],
  },
  {
    title: "Sampling",
    fields: [
      { name: "temperature", kind: "number", label: "Temperature", min: 0, max: 100, step: 0.01, hint: "0: always the most likely token" },
      { name: "top_p", kind: "number", label: "Top p", min: 0, max: 1, step: 0.01, hint: "the most likely tokens up to this total probability" },
      { name: "top_k", kind: "number", label: "Top k", min: 0, max: 1_000_000, step: 1, hint: "this many most likely tokens; 0: all" },
      { name: "min_p", kind: "number", label: "Min p", min: 0, max: 1, step: 0.01, hint: "at least this share of the highest probability" },
      { name: "frequency_penalty", kind: "number", label: "Frequency penalty", min: -2, max: 2, step: 0.01, empty: "0", hint: "subtracted for each occurrence of a token" },
      { name: "presence_penalty", kind: "number", label: "Presence penalty", min: -2, max: 2, step: 0.01, empty: "0", hint: "subtracted once for tokens that occurred" },
      { name: "seed", kind: "number", label: "Seed", min: -(2 ** 53), max: 2 ** 53, step: 1, empty: "random", hint: "the same seed gives the same text" },
      { name: "max_tokens", kind: "number", label: "Max tokens", min: 1, max: 2 ** 31, step: 1, empty: "context", hint: "length limit of the answer; without it, the end of the context" },
      { name: "stop", kind: "lines", label: "Stop at", rows: 1, hint: "texts that end the answer, one per line" },
    ],
  },
  {
    title: "Latency targets",
    fields: [
      { name: "ttft_ms", path: ["slo", "ttft_ms"], kind: "number", label: "First token (ms)", min: 0.1, max: 1e6, step: "any", empty: "none", hint: "each answer says whether it was met" },
      { name: "tpot_ms", path: ["slo", "tpot_ms"], kind: "number", label: "Per token (ms)", min: 0.1, max: 1e6, step: "any", empty: "none", hint: "mean time after the first token" },
    ],
  },
  {
    title: "Model",
    fields: [
      { name: "reasoning_effort", kind: "choice", label: "Reasoning", choices: EFFORTS, empty: "the model's", hint: "if the chat template supports it" },
      { name: "speculation", path: ["speculation", "enabled"], kind: "switch", label: "Draft tokens", hint: "off: slower, the same text" },
      { name: "extra", kind: "json", label: "More fields (JSON)", rows: 3, placeholder: '{"tools": [ … ]}', hint: "Added to the request: tools, response_format, …" },
    ],
  },
  {
    title: "Page",
    fields: [{ name: "ahead", kind: "choice", label: "Compute while I type", choices: ["always", "never"], empty: "with files", hint: "by a prompt stream" }],
  },
];

const NOT_SENT = new Set(["system", "extra", "ahead", "model"]);      // as fields of their name
const OF_PAGE = ["model", "ahead"];
const FIELDS = GROUPS.flatMap((group) => group.fields);

const TYPES = { number: "number", lines: "list", switch: "boolean" };

/** The type of each setting's value, by name: string, number, boolean, or list (of strings). */
export const settingKinds = { model: "string", ...Object.fromEntries(FIELDS.map(({ name, kind }) => [name, TYPES[kind] ?? "string"])) };

/** Return the settings that a new conversation takes from the latest one. All others belong to one conversation. */
export const pageSettings = (settings) => Object.fromEntries(OF_PAGE.filter((name) => settings[name] !== undefined).map((name) => [name, settings[name]]));

/** Return the settings that belong to one conversation. */
export const chatSettings = (settings) => Object.fromEntries(Object.entries(settings).filter(([name]) => !OF_PAGE.includes(name)));

/** Return the request's fields that the settings set. Throws SyntaxError if the further fields are no JSON object. */
export function requestFields(settings) {
  const body = settings.model ? { model: settings.model } : {};
  for (const { name, path = [name] } of FIELDS) {
    if (NOT_SENT.has(name) || settings[name] === undefined) continue;
    const [outer, inner] = path;
    body[outer] = inner ? { ...body[outer], [inner]: settings[name] } : settings[name];
  }
  return { ...body, ...furtherFields(settings.extra) };
}

function furtherFields(text) {
  if (!text) return {};
  const value = JSON.parse(text);
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new SyntaxError("it must be an object");
  return value;
}

/** Return how many settings of a conversation differ from the defaults. */
export const changedCount = (settings) => Object.keys(chatSettings(settings)).length;

/** Return the panel's groups for these settings, with the model's defaults where they are empty; `changed` is called with a
 *  field's name and value, or undefined. */
export const panel = (settings, defaults, changed) =>
  GROUPS.map(({ title, fields }) => el("fieldset", {}, el("legend", { text: title }),
    ...fields.map((field) => row({ ...field, empty: defaults[field.name] ?? field.empty }, settings[field.name], changed))));

function row(field, value, changed) {
  const id = `setting-${field.name}`;
  const help = el("small", { id: `${id}-help`, text: field.hint });
  const input = CONTROLS[field.kind](field, value);
  input.id = id;
  input.setAttribute("aria-describedby", help.id);
  input.addEventListener("change", () => take(field, input, help, changed));
  const wide = field.rows > 1 ? "setting wide" : "setting";
  return el("div", { class: wide }, el("label", { for: id, text: field.label }), input, help);
}

function take(field, input, help, changed) {
  const { value, problem } = READERS[field.kind](input);
  help.textContent = problem ?? field.hint;
  input.setAttribute("aria-invalid", String(Boolean(problem)));
  if (!problem) changed(field.name, value);
}

const area = ({ rows, placeholder }, value) => {
  const input = el("textarea", { rows, placeholder, spellcheck: "false" });
  input.value = value ?? "";
  return input;
};

const select = (options, value) => {
  const input = el("select", {}, ...options.map(([key, text]) => el("option", { value: key, text })));
  input.value = value;
  return input;
};

const CONTROLS = {
  number: ({ min, max, step, empty = "default" }, value) => {
    const input = el("input", { type: "number", inputmode: "decimal", min, max, step, placeholder: empty });
    input.value = value ?? "";
    return input;
  },
  text: area,
  json: area,
  lines: (field, value) => area(field, value?.join("\n")),
  choice: ({ choices, empty }, value) => select([["", empty], ...choices.map((name) => [name, name])], value ?? ""),
  switch: (field, value) => select([["", "on"], ["off", "off"]], value === false ? "off" : ""),
};

const READERS = {
  number: (input) => {
    if (!input.checkValidity()) return { problem: input.validationMessage };
    return { value: input.value === "" ? undefined : input.valueAsNumber };
  },
  text: (input) => ({ value: input.value.trim() || undefined }),
  json: (input) => {
    try {
      furtherFields(input.value.trim());
    } catch (error) {
      return { problem: `This is not a JSON object: ${error.message}` };
    }
    return { value: input.value.trim() || undefined };
  },
  lines: (input) => {
    const lines = input.value.split("\n").filter(Boolean);
    return { value: lines.length ? lines : undefined };
  },
  choice: (input) => ({ value: input.value || undefined }),
  switch: (input) => ({ value: input.value === "off" ? false : undefined }),
};
