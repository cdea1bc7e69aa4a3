
"use strict";
(() => {
  // Dark or light, as the reader's system has it until they choose. What they chose is kept where that is allowed.
  const root = document.documentElement, theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const name = () => { theme.textContent = dark() ? "Light theme" : "Dark theme"; };
  try { const kept = localStorage.getItem("attemper-theme"); if (kept) root.dataset.theme = kept; } catch { /* not allowed */ }
  theme.hidden = false;
  name();
  system.addEventListener("change", name);
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("attemper-theme", root.dataset.theme); } catch { /* not allowed */ }
    name();
  });

  // Tables sort by a click on a heading, and the other way round by the next. Cells without a key stay at the bottom.
  const told = document.getElementById("told");
  const key = (row, at) => row.cells[at].dataset.key;
  const compare = (a, b) => isNaN(a) || isNaN(b) ? a.localeCompare(b, undefined, { numeric: true }) : a - b;
  for (const button of document.querySelectorAll(".sortable th button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th"), table = button.closest("table"), at = head.cellIndex;
      const turned = { ascending: "descending", descending: "ascending" };
      const order = turned[head.getAttribute("aria-sort")] || button.dataset.first;
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [key(a, at), key(b, at)];
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
        return sign * compare(x, y);
      });
      table.tBodies[0].append(...rows);
      for (const other of head.parentNode.cells) other.setAttribute("aria-sort", other === head ? order : "none");
      told.textContent = `Sorted by ${button.textContent}, ${order}`;
    });
  }

  // A legend's buttons show and hide their series in the charts of their group.
  for (const group of document.querySelectorAll("[data-group]")) {
    const show = (button, on) => {
      button.setAttribute("aria-pressed", on);
      for (const shape of group.querySelectorAll(`[data-series="${button.dataset.switch}"]`)) {
        shape.classList.toggle("off", !on);
      }
    };
    const buttons = [...group.querySelectorAll("[data-switch]")];
    for (const button of buttons) {
      show(button, button.getAttribute("aria-pressed") === "true");
      button.addEventListener("click", () => show(button, button.getAttribute("aria-pressed") !== "true"));
    }
    for (const all of group.querySelectorAll("[data-all]")) {
      all.addEventListener("click", () => buttons.forEach((button) => show(button, all.dataset.all === "show")));
    }
  }
})();
