// Formulas: TeX as MathML. The converter is loaded with the first formula. Until then, and where it finds no valid TeX, a
// formula is shown as it is written.

import { el } from "./dom.js";

const LIMITS = { throwOnError: true, maxExpand: 200, maxSize: [20, 20] };      // macros, and sizes in em

let converter = null;

/** Return a formula as an element. `source`: the TeX with its delimiters. */
export function formula(source, tex, isDisplay) {
  const element = el("span", { class: isDisplay ? "formula display" : "formula", text: source });
  converter ??= import("./temml.js");
  converter.then(({ default: temml }) => {
    const math = temml.__renderToMathMLTree(tex, { ...LIMITS, displayMode: isDisplay });
    allowed(math);
    element.replaceChildren(math.toNode());
  }).catch(() => element.classList.add("raw"));
  return element;
}

/** Move styles that are attributes to properties: the content security policy forbids them as attributes. */
function allowed({ attributes, style, children = [] }) {
  for (const part of attributes?.style?.split(";").filter(Boolean) ?? []) {
    const [name, value] = part.split(":");
    style[name.trim()] = value.trim();
  }
  delete attributes?.style;
  children.forEach(allowed);
}
