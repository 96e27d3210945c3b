// Elements without markup text: whatever comes from a model, a file or a person is only ever a text node.

const SVG = "http://www.w3.org/2000/svg";

/** Return an element. `properties`: attributes, `text`, `on` (listeners by event); null and false are left out. */
export function el(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

/** Return an SVG element. */
export function svg(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

function filled(element, { text, on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  if (text !== undefined) element.textContent = text;
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return an icon of the sprite in index.html. */
export const icon = (name) => svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#icon-${name}` }));

/** Return a button with an icon alone, named for those who do not see it. */
export const iconButton = (name, label, click, properties = {}) =>
  el("button", { type: "button", class: "ghost", title: label, "aria-label": label, on: { click }, ...properties }, icon(name));

/** Return the element with an id. */
export const at = (id) => document.getElementById(id);

/** Show a message for a few seconds, with a button if there is an action. */
export function notify(text, action, run) {
  const box = at("notice");
  clearTimeout(Number(box.dataset.timer));
  const hide = () => { box.hidden = true; };
  const button = action && el("button", { type: "button", text: action, on: { click: () => { hide(); run(); } } });
  box.replaceChildren(el("span", { text }), ...(button ? [button] : []));
  box.hidden = false;
  box.dataset.timer = setTimeout(hide, 8000);
}

/** Copy a text, and show at the button that it was. Without a secure context there is no clipboard interface. */
export async function copy(text, button) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else copyBySelection(text);
  button.classList.add("done");
  button.replaceChild(icon("check"), button.querySelector(".icon"));
  setTimeout(() => {
    button.classList.remove("done");
    button.replaceChild(icon("copy"), button.querySelector(".icon"));
  }, 1500);
}

function copyBySelection(text) {
  const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Offer a text as a file. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Return a number with separators, and with `digits` digits after the point; an en dash if it is unknown. */
export function number(value, digits = 0) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Return a time in milliseconds, in the unit that suits it. */
export function duration(milliseconds) {
  if (milliseconds === null || milliseconds === undefined || !Number.isFinite(milliseconds)) return "–";
  if (milliseconds < 100) return `${Number(milliseconds.toFixed(1))} ms`;
  return milliseconds < 1000 ? `${number(milliseconds)} ms` : `${number(milliseconds / 1000, milliseconds < 10_000 ? 2 : 1)} s`;
}
