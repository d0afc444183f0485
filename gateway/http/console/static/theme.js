// Colours like the system, light or dark. Loaded before the page is drawn, so that it never flashes.
"use strict";
(() => {
  const NAMES = { auto: "like the system", light: "light", dark: "dark" };
  const NEXT = { auto: "light", light: "dark", dark: "auto" };
  const SIGNS = { auto: "◐", light: "○", dark: "●" };
  const read = () => {
    try {
      const kept = localStorage.getItem("forebay-theme");
      return kept in NAMES ? kept : "auto";
    } catch {
      return "auto";
    }
  };
  const apply = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = SIGNS[theme];
      button.setAttribute("aria-label", `Colours: ${NAMES[theme]}`);
      button.title = `Colours: ${NAMES[theme]}`;
    }
    document.dispatchEvent(new Event("forebay:theme"));
  };
  apply(read());
  document.addEventListener("DOMContentLoaded", () => {
    apply(read());
    document.getElementById("theme").addEventListener("click", () => {
      const theme = NEXT[read()];
      try {
        localStorage.setItem("forebay-theme", theme);
      } catch {
        // Not kept, but applied.
      }
      apply(theme);
    });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(read()));
})();
