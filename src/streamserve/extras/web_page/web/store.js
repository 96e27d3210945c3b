// The history: in this browser's storage and nowhere else. One entry for each conversation.

const CHAT = "streamserve.chat.";
const SETTINGS = "streamserve.settings";
const PRESETS = "streamserve.presets";
const OPEN = "streamserve.open";      // in the storage of this tab

/** Return all stored conversations, the one used last first. Entries that cannot be read are left out. */
export function conversations() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(CHAT));
  const all = names.map((name) => parsed(localStorage.getItem(name))).filter(isConversation);
  return all.sort((one, other) => other.updated - one.updated);
}

/** Store a conversation. Returns whether there was space for it. */
export const save = (conversation) => stored(CHAT + conversation.id, conversation);

/** Return the conversation that this tab showed before it was reloaded; null if it is not stored. */
export function loadOpen() {
  const conversation = parsed(localStorage.getItem(CHAT + sessionStorage.getItem(OPEN)));
  return isConversation(conversation) ? conversation : null;
}

/** Note which conversation this tab shows. */
export const saveOpen = ({ id }) => sessionStorage.setItem(OPEN, id);

/** Remove a conversation from the storage. */
export const remove = (conversation) => localStorage.removeItem(CHAT + conversation.id);

/** Return the settings that were changed last. */
export const loadSettings = () => parsed(localStorage.getItem(SETTINGS)) ?? {};

/** Store the settings that were changed last. */
export const saveSettings = (settings) => stored(SETTINGS, settings);

/** Return the presets: settings by name. */
export const presets = () => new Map(parsed(localStorage.getItem(PRESETS)) ?? []);

/** Store the presets. Returns whether there was space for them. */
export const savePresets = (presets) => stored(PRESETS, [...presets]);

/** Call a listener when another tab has changed the history. */
export function onChange(listener) {
  window.addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(CHAT)) listener();
  });
}

function stored(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

const isConversation = (value) =>
  value && typeof value.id === "string" && value.nodes && typeof value.nodes === "object" && typeof value.settings === "object";
