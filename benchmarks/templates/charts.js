"use strict";
// A chart under the pointer or focus is drawn again by Vega: values, and a legend that selects. Its interpreter is used,
// so that the page's policy needs to allow no evaluation of text. Charts in a fold are drawn when it is opened.
(() => {
  const rows = (columns) => {
    const names = Object.keys(columns);
    const values = names.map((name) => columns[name].of ? columns[name].at.map((i) => columns[name].of[i]) : columns[name]);
    return (values[0] ?? []).map((_, i) => Object.fromEntries(names.map((name, j) => [name, values[j][i]])));
  };
  const awake = async (box, template) => {
    if ("live" in box.dataset) return;
    box.dataset.live = "";
    const live = document.createElement("div");
    const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: true, config: CHART_CONFIG, defaultStyle: false };
    const tooltip = { disableDefaultStyle: true, theme: "page" };
    const spec = JSON.parse(template.content.textContent);
    for (const [name, columns] of Object.entries(spec.datasets)) spec.datasets[name] = rows(columns);
    await vegaEmbed(live, spec, { ...options, tooltip });
    const drawn = live.querySelector("svg");
    drawn.setAttribute("role", "img");
    drawn.setAttribute("aria-label", spec.description);
    box.removeAttribute("role");
    box.replaceChildren(live);
    box.dataset.drawn = "";
  };
  for (const figure of document.querySelectorAll("figure.chart")) {
    const box = figure.querySelector(".drawn"), template = figure.querySelector("template");
    box.tabIndex = 0;
    for (const event of ["pointerenter", "focus"]) box.addEventListener(event, () => awake(box, template), { once: true });
  }
  let isPrinting = false;
  addEventListener("beforeprint", () => { isPrinting = true; });
  addEventListener("afterprint", () => { isPrinting = false; });
  for (const fold of document.querySelectorAll("details.more")) {
    fold.addEventListener("toggle", async () => {
      if (!fold.open || isPrinting) return;
      for (const figure of fold.querySelectorAll("figure.chart"))
        await awake(figure.querySelector(".drawn"), figure.querySelector("template"));
    });
  }
})();
