// Draws the figures of a report with plotly.js, in the reader's colours, when they come into view.
"use strict";

const BUTTONS = ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "resetScale2d"];
const dark = matchMedia("(prefers-color-scheme: dark)");
let content = null; // the figures, their template, and the dark page's colours by those of the light one
// A figure changes its width without the window when a scroll bar or a column comes or goes.
const resizer = new ResizeObserver((entries) => {
  for (const entry of entries) {
    if (entry.target.dataset.drawn) Plotly.Plots.resize(entry.target);
  }
});

function figureOf(place) {
  const figure = content.figures[Number(place.dataset.figure)];
  figure.layout.template = content.template;
  let text = JSON.stringify(figure);
  if (dark.matches) {
    text = text.replace(/"(#[0-9a-f]{6})(33)?"/g, (_, colour, alpha = "") => `"${content.dark[colour] ?? colour}${alpha}"`);
  }
  return JSON.parse(text);
}

function draw(place) {
  const { data, layout } = figureOf(place);
  const button = place.closest("section").querySelector("button.log[aria-pressed=true]");
  const isLog = button !== null && data[0].type === "scatter";
  if (isLog) {
    Object.assign(layout.yaxis, { type: "log", dtick: "D2", exponentformat: "power" });
    delete layout.yaxis.range;
    delete layout.shapes;
  }
  const hidden = hiddenCurves(place);
  for (const trace of data) {
    if (hidden.has(trace.legendgroup)) trace.visible = false;
  }
  const kind = isLog ? "log" : "linear";
  layout.uirevision = kind; // a zoom stays where the axes are the same
  layout.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom"; // a finger scrolls the page
  place.dataset.drawn = kind;
  const save = { name: "toImage", title: "Save as PNG", icon: Plotly.Icons.camera, click: savePicture };
  return Plotly.react(place, data, layout, { displaylogo: false, modeBarButtons: [[...BUTTONS, save]] });
}

function savePicture(place) {
  const paper_bgcolor = getComputedStyle(place.closest("section")).backgroundColor;
  const title = { text: place.id, font: { size: 13 } };
  const margin = { ...place.layout.margin, t: 60 };
  const layout = { ...place.layout, showlegend: true, paper_bgcolor, title, margin };
  return Plotly.downloadImage({ data: place.data, layout }, { format: "png", filename: place.id, width: 900, height: 500 });
}

// The names in the legend of a figure, or in that of its section, whose buttons are not pressed.
function hiddenCurves(place) {
  const scopes = [place.closest("figure"), place.closest("section")];
  const buttons = scopes.flatMap((it) => [...it.querySelectorAll(":scope > .legend button[aria-pressed=false]")]);
  return new Set(buttons.map((it) => it.dataset.curve));
}

function places(selector = "") {
  return [...document.querySelectorAll(`.plot${selector}`)];
}

async function start() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (it) => it.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[aria-pressed]");
    if (button === null || button.closest(".plot") !== null) return;
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
    const scope = button.closest("figure") ?? button.closest("section");
    for (const place of scope.querySelectorAll(".plot[data-drawn]")) draw(place);
  });
  dark.addEventListener("change", () => places("[data-drawn]").forEach(draw));
  content = JSON.parse(document.getElementById("figures").textContent);
  const watcher = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting && !entry.target.dataset.drawn) draw(entry.target);
      }
    },
    { rootMargin: "600px" },
  );
  for (const place of places()) {
    watcher.observe(place);
    resizer.observe(place);
  }
}

start();
