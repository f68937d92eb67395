"use strict";
// A chart under the pointer or focus is drawn again by Vega: values, and a legend that selects. Its interpreter is used,
// so that the page's policy needs to allow no evaluation of text.
(() => {
  const awake = async (box, spec) => {
    const live = document.createElement("div");
    const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: true, config: CHART_CONFIG, defaultStyle: false };
    const tooltip = { disableDefaultStyle: true, theme: "page" };
    await vegaEmbed(live, JSON.parse(spec.content.textContent), { ...options, tooltip });
    const drawn = live.querySelector("svg"), still = box.querySelector("svg");
    drawn.setAttribute("role", "img");
    drawn.setAttribute("aria-label", still.getAttribute("aria-label"));
    box.replaceChildren(live);
    box.dataset.live = "";
  };
  for (const figure of document.querySelectorAll("figure.chart")) {
    const box = figure.querySelector(".drawn"), spec = figure.querySelector("template");
    box.tabIndex = 0;
    let once = () => {
      once = () => {};
      return awake(box, spec);
    };
    for (const event of ["pointerenter", "focus"]) box.addEventListener(event, () => once(), { once: true });
  }
})();
