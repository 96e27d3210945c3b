// Conversations as JSON files: export of all, and import. What an imported file says is checked, and made anew from the
// fields that are known; its texts are shown like those of any conversation, as text nodes.

import { download, notify } from "./dom.js";
import { settingKinds } from "./settings.js";
import * as store from "./store.js";

const MAX_BYTES = 20_000_000;
const MAX_CONVERSATIONS = 2000;
const MAX_NODES = 5000;      // of a conversation

/** Offer all conversations as a file, which can be imported. */
export const exportAll = () => download("conversations.json", JSON.stringify(store.conversations(), null, 2), "application/json");

/** Store the conversations of a file, one or a list of them. Those that are there already stay as they are. */
export async function importFile(file) {
  let found;
  try {
    if (file.size > MAX_BYTES) refuse(`it is larger than ${MAX_BYTES / 1e6} MB`);
    found = imported(JSON.parse(await file.text()));
  } catch (error) {
    notify(`${file.name} is not an export of conversations: ${error.message}`);
    return;
  }
  const known = new Set(store.conversations().map(({ id }) => id));
  const fresh = found.filter(({ id }) => !known.has(id));
  const kept = fresh.filter((conversation) => store.save(conversation)).length;
  const parts = [`${kept} imported`, found.length > fresh.length && `${found.length - fresh.length} were here already`,
    fresh.length > kept && `${fresh.length - kept} did not fit: the browser's storage is full`];
  notify(`Conversations: ${parts.filter(Boolean).join(", ")}.`);
}

/** Return the conversations of an export. Throws TypeError if a part is not as the page makes it. */
export const imported = (value) => list(conversation, MAX_CONVERSATIONS)(Array.isArray(value) ? value : [value]);

function refuse(reason) {
  throw new TypeError(reason);
}

// Each kind returns a checked copy of a value.

const of = (type) => (value) => (typeof value === type ? value : refuse(`${shown(value)} should be a ${type}`));
const shown = (value) => (JSON.stringify(value) ?? "a missing field").slice(0, 40);
const string = of("string"), number = of("number"), boolean = of("boolean");
const optional = (kind) => (value) => (value === undefined || value === null ? value : kind(value));
const table = (value) => (value && typeof value === "object" && !Array.isArray(value) ? value : refuse(`${shown(value)} should be an object`));
const list = (kind, limit = MAX_NODES) => (value) =>
  (Array.isArray(value) && value.length <= limit ? value.map((part) => kind(part)) : refuse(`${shown(value)} should be a list of at most ${limit}`));
const record = (kind) => (value) => Object.fromEntries(Object.entries(table(value)).map(([key, part]) => [key, kind(part)]));
const object = (kinds) => (value) => Object.fromEntries(Object.entries(kinds).map(([key, kind]) => [key, kind(table(value)[key])]));
const id = (value) => (/^[0-9a-f]{16}$/.test(string(value)) ? value : refuse(`${shown(value)} should be an id`));

const numbers = record((value) => (typeof value === "object" && value !== null ? record(optional(number))(value) : typeof value === "boolean" ? value : optional(number)(value)));
const call = object({ id: string, name: string, text: string });
const own = { id, content: string, parent: optional(id) };
const NODES = {
  user: object({ ...own, files: optional(list(object({ name: string, text: string }))) }),
  tool: object({ ...own, call: string, name: string }),
  assistant: object({
    ...own, reasoning: string, calls: (value) => list(call)(list((part) => part)(value).filter(Boolean)), state: string, timing: numbers,
    usage: optional(numbers), slo: optional(numbers), ahead: optional(numbers), results: optional(record(string)),
    model: optional(string), finish: optional(string), error: optional(string), warning: optional(string),
  }),
};

function node(value) {
  const { role } = table(value);
  const kind = Object.hasOwn(NODES, role) ? NODES[role] : refuse(`${shown(role)} should be a role`);
  return { role, ...kind(value), parent: value.parent ?? null };
}

/** A parent comes before its children, as the page stores them: so no message can be before itself. */
function nodes(value) {
  const all = new Map();
  for (const part of list(node)(Object.values(table(value)))) {
    if (part.parent !== null && !all.has(part.parent)) refuse(`message ${part.id} follows none`);
    all.set(part.id, part);
  }
  return Object.fromEntries(all);
}

const SETTINGS = { string: optional(string), number: optional(number), boolean: optional(boolean), list: optional(list(string)) };
const settings = (value) => object(Object.fromEntries(Object.entries(settingKinds).map(([name, kind]) => [name, SETTINGS[kind]])))(value);

function conversation(value) {
  const checked = object({ id, title: string, created: number, updated: number, settings, nodes, head: optional(id) })(value);
  return { ...checked, head: Object.hasOwn(checked.nodes, checked.head) ? checked.head : null };
}
