// The list of conversations.

import { at, el, iconButton, notify } from "./dom.js";
import * as store from "./store.js";

const DAY = 86_400_000;
const MAX_TITLE = 100;      // characters

/** Show the stored conversations in which the searched text occurs; `open` is called with the one that is chosen, without
 *  one if the current one is deleted, and with null if only the list has changed. */
export function showHistory(current, open) {
  const searched = at("search").value.trim().toLowerCase();
  const all = store.conversations().filter((conversation) => has(conversation, searched));
  const groups = Map.groupBy ? Map.groupBy(all, period) : grouped(all);
  const parts = [...groups].flatMap(([name, conversations]) => [
    el("li", { class: "period", text: name }),
    ...conversations.map((conversation) => entry(conversation, current, open)),
  ]);
  at("history").replaceChildren(...parts, ...(searched && !all.length ? [el("li", { class: "period", text: "Nothing found" })] : []));
}

function has({ title, nodes }, searched) {
  const texts = [title, ...Object.values(nodes).flatMap((node) => [node.content, ...(node.files ?? []).map((file) => file.name)])];
  return texts.some((text) => text.toLowerCase().includes(searched));
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
  const item = el("li", {}, title);
  const rename = iconButton("edit", `Rename ${conversation.title || "Untitled"}`, () => item.replaceChildren(titleField(isCurrent ? current : conversation, open)));
  const remove = iconButton("delete", `Delete ${conversation.title || "Untitled"}`, () => forget(isCurrent ? current : conversation, isCurrent, open));
  item.append(rename, remove);
  return item;
}

/** Return a field to change a title: Enter and leaving it save, Escape does not. */
function titleField(conversation, open) {
  const field = el("input", { "aria-label": "Title", maxlength: MAX_TITLE });
  field.value = conversation.title;
  const done = (save) => {
    const title = field.value.trim();
    field.value = "";      // removing the field leaves it, which must not save again
    if (save && title) store.save(Object.assign(conversation, { title }));
    open(null);
  };
  field.addEventListener("blur", () => done(true));
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.stopPropagation();
    done(event.key === "Enter");
  });
  queueMicrotask(() => field.select());
  return field;
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
