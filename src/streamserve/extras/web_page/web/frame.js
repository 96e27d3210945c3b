// The frame of the pages: the sidebar, and the theme.

import { at } from "./dom.js";

const THEME = "streamserve.theme";      // light, dark, or "" for the system's

/** Whether the sidebar covers the page. */
export const NARROW = window.matchMedia("(max-width: 60rem)");

/** Show or hide the sidebar. */
export function setSide(shown) {
  document.body.classList.toggle("side-shown", shown);
  document.body.classList.toggle("side-hidden", !shown);
  at("to-side").setAttribute("aria-expanded", String(shown));
}

/** Return whether the sidebar covers the page now. */
export const sideCovers = () => NARROW.matches && document.body.classList.contains("side-shown");

function showTheme() {
  const theme = localStorage.getItem(THEME) ?? "";
  document.documentElement.dataset.theme = theme;
  at("theme").value = theme;
}

at("to-side").addEventListener("click", () => setSide(at("side").offsetParent === null || getComputedStyle(at("side")).visibility === "hidden"));
at("shade").addEventListener("click", () => setSide(false));
at("theme").addEventListener("change", () => {
  localStorage.setItem(THEME, at("theme").value);
  showTheme();
});
window.addEventListener("storage", showTheme);      // chosen in another tab
showTheme();
