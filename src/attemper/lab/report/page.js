
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

  // Tables go out as CSV and charts as PNG, made here from what is on the page: nothing is fetched for it.
  const save = (blob, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    told.textContent = `Saved ${name}`;
  };
  const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "attemper";
  const button = (text, name, action) => {
    const made = document.createElement("button");
    made.type = "button";
    made.className = "save";
    made.textContent = text;
    made.setAttribute("aria-label", `${text} of ${name}`);
    made.addEventListener("click", action);
    return made;
  };
  const plain = (cell) => {
    const copy = cell.cloneNode(true);
    copy.querySelectorAll("svg, .arrow").forEach((each) => each.remove());
    copy.querySelectorAll("small").forEach((each) => each.prepend("; "));
    const text = copy.textContent.trim().replace(/^; /, "");
    const harmless = /^[=+@\t\r]/.test(text) && isNaN(text.replace(/ .*$|;.*$/, "")) ? `'${text}` : text;
    return `"${harmless.replace(/"/g, '""')}"`;
  };
  for (const table of document.querySelectorAll("table")) {
    const name = table.caption.textContent;
    const csv = () => [...table.rows].map((row) => [...row.cells].map(plain).join(",")).join("\n") + "\n";
    const add = button("CSV", name, () => save(new Blob(["\ufeff" + csv()], { type: "text/csv" }), `${slug(name)}.csv`));
    table.closest(".scroll").after(add);
  }
  const drawn = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linecap",
    "stroke-linejoin", "font-size", "font-family", "font-weight", "text-anchor", "paint-order", "opacity", "display", "vector-effect"];
  const picture = (svg) => {
    const edge = 60, box = svg.getBoundingClientRect(), copy = svg.cloneNode(true);
    const from = [svg, ...svg.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
    from.forEach((each, at) => {
      const style = getComputedStyle(each);
      drawn.forEach((property) => to[at].setAttribute(property, style.getPropertyValue(property)));
      to[at].removeAttribute("class");
    });
    copy.querySelectorAll("title").forEach((each) => each.remove());
    copy.setAttribute("width", box.width);
    copy.setAttribute("height", box.height);
    copy.setAttribute("x", edge);
    copy.setAttribute("y", edge);
    copy.setAttribute("overflow", "visible");
    const whole = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const width = box.width + 2 * edge, height = box.height + 2 * edge;
    whole.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    whole.setAttribute("width", width);
    whole.setAttribute("height", height);
    const ground = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    ground.setAttribute("width", "100%");
    ground.setAttribute("height", "100%");
    ground.setAttribute("fill", getComputedStyle(document.body).backgroundColor);
    whole.append(ground, document.querySelector(".symbols defs").cloneNode(true), copy);
    const image = new Image(), text = new XMLSerializer().serializeToString(whole);
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    return image.decode().then(() => new Promise((give) => {
      const canvas = document.createElement("canvas");
      canvas.width = 2 * width;
      canvas.height = 2 * height;
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob(give, "image/png");
    }));
  };
  for (const figure of document.querySelectorAll("figure.chart")) {
    const name = figure.querySelector("figcaption").firstChild.textContent;
    figure.append(button("PNG", name, () => picture(figure.querySelector("svg.plot")).then((blob) => save(blob, `${slug(name)}.png`))));
  }

  // What is typed into a filter hides the rows of the page's tables whose recipe does not have it.
  for (const field of document.querySelectorAll("[data-filter]")) {
    field.addEventListener("input", () => {
      const wanted = field.value.trim().toLowerCase();
      let shown = 0;
      for (const row of document.querySelectorAll(".sortable tbody tr")) {
        row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
        shown += !row.hidden;
      }
      told.textContent = `${shown} rows`;
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
