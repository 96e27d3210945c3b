// The list of conversations.

import { at, el, iconButton, notify } from "./dom.js";
import * as store from "./store.js";

const DAY = 86_400_000;

/** Show the stored conversations; `open` is called with the one that is chosen, and without one if it is deleted. */
export function showHistory(current, open) {
  const all = store.conversations();
  const groups = Map.groupBy ? Map.groupBy(all, period) : grouped(all);
  const parts = [...groups].flatMap(([name, conversations]) => [
    el("li", { class: "period", text: name }),
    ...conversations.map((conversation) => entry(conversation, current, open)),
  ]);
  at("history").replaceChildren(...parts);
}

function grouped(all) {
  const groups = new Map();
  for (const conversation of all) groups.set(period(conversation), [...(groups.get(period(conversation)) ?? []), conversation]);
  return groups;
}

function period({ updated }) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (updated >= midnight) return "Today";
  if (updated >= midnight - DAY) return "Yesterday";
  return updated >= midnight - 7 * DAY ? "This week" : "Earlier";
}

function entry(conversation, current, open) {
  const isCurrent = conversation.id === current.id;
  const title = el("button", {
    type: "button", class: "title", text: conversation.title || "Untitled", "aria-current": isCurrent ? "true" : null,
    on: { click: () => open(isCurrent ? current : conversation) },
  });
  const remove = iconButton("delete", `Delete ${conversation.title || "Untitled"}`, () => forget(isCurrent ? current : conversation, isCurrent, open));
  return el("li", {}, title, remove);
}

/** Delete a conversation; for some seconds it can be had back. */
function forget(conversation, isCurrent, open) {
  conversation.deleted = true;
  store.remove(conversation);
  if (isCurrent) open();
  else open(null);
  notify("Conversation deleted.", "Undo", () => {
    delete conversation.deleted;
    store.save(conversation);
    open(conversation);
  });
}
