"use strict";
// Sorting, filtering and the theme button. Everything else of the page works without this file.
(() => {
  // Folded tables are on paper, too.
  const folded = () => [...document.querySelectorAll("details:not([open])")];
  let opened = [];
  addEventListener("beforeprint", () => { opened = folded(); for (const one of opened) one.open = true; });
  addEventListener("afterprint", () => { for (const one of opened) one.open = false; opened = []; });

  const keyOf = (row, index) => {
    const cell = row.cells[index];
    const value = cell.dataset.sort ?? cell.textContent.trim();
    const number = Number(value);
    return value === "" ? null : Number.isNaN(number) ? value : number;
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });

  for (const table of document.querySelectorAll("table.sheet")) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    const original = [...body.rows];
    heads.forEach((head, index) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.textContent = "";
      head.append(button);
      button.addEventListener("click", () => {
        const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
        const keyed = original.map((row) => [keyOf(row, index), row]);
        // Empty cells stay at the end in both directions.
        keyed.sort(([a], [b]) => (a === null) - (b === null) || (a === null ? 0 : direction * compare(a, b)));
        body.append(...keyed.map(([, row]) => row));
      });
    });

    if (original.length < 4) continue;
    const label = document.createElement("label");
    label.className = "filter";
    const input = document.createElement("input");
    input.type = "search";
    input.placeholder = "filter rows";
    input.setAttribute("aria-label", "Filter rows of this table");
    const count = document.createElement("span");
    label.append(input, count);
    table.closest(".scroll").before(label);
    const texts = new Map(original.map((row) => [row, [...row.cells].map((c) => c.textContent).join(" ").toLowerCase()]));
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of original) {
        const fits = words.every((word) => texts.get(row).includes(word));
        row.hidden = !fits;
        shown += fits;
      }
      count.textContent = words.length ? `${shown} of ${original.length} rows` : "";
    });
  }

  const theme = document.createElement("button");
  theme.type = "button";
  theme.className = "theme";
  const dark = () =>
    document.documentElement.dataset.theme
      ? document.documentElement.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => { theme.textContent = dark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    name();
  });
  name();
  document.querySelector("header .wide").append(theme);
})();
