// Draws the figures of a report with plotly.js, in the reader's colours, when they come into view.
"use strict";

const BUTTONS = [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "resetScale2d", "toImage"]];
// In pixels of paper, of a figure that fills the width and of one in two columns: what is printed is laid out
// after `beforeprint`, so that sizes of the screen would not fit.
const PAPER = { whole: { width: 690, height: 300 }, half: { width: 330, height: 230 } };
const dark = matchMedia("(prefers-color-scheme: dark)");
let content = null; // the figures, their template, and the dark page's colours by those of the light one
let printing = false;
let watcher = null;
// A figure changes its width without the window when a scroll bar or a column comes or goes.
const resizer = new ResizeObserver((entries) => {
  if (printing) return;
  for (const entry of entries) {
    if (entry.target.dataset.drawn) Plotly.Plots.resize(entry.target);
  }
});

function figureOf(place) {
  const figure = content.figures[Number(place.dataset.figure)];
  figure.layout.template = content.template;
  let text = JSON.stringify(figure);
  if (dark.matches && !printing) {
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
  layout.uirevision = isLog ? "log" : "linear"; // a zoom stays when the page is refreshed
  layout.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom"; // a finger scrolls the page
  if (printing) Object.assign(layout, place.closest(".whole") ? PAPER.whole : PAPER.half);
  place.dataset.drawn = layout.uirevision;
  return Plotly.react(place, data, layout, { displaylogo: false, modeBarButtons: BUTTONS });
}

function places(selector = "") {
  return [...document.querySelectorAll(`.plot${selector}`)];
}

function drawAgain() {
  return Promise.all(places("[data-drawn]").map(draw));
}

function readContent() {
  content = JSON.parse(document.getElementById("figures").textContent);
  watcher?.disconnect();
  resizer.disconnect();
  watcher = new IntersectionObserver(
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

function setPrinting(value) {
  printing = value;
  return Promise.all(places(value ? "" : "[data-drawn]").map(draw));
}

// A live page: new content replaces the old; plots of the same place and title keep their zoom.
function replaceContent(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const kept = new Map(places("[data-drawn]").map((place) => [place.id, place]));
  for (const place of fresh.querySelectorAll(".plot")) {
    const old = kept.get(place.id);
    if (old === undefined) continue;
    old.dataset.figure = place.dataset.figure;
    place.replaceWith(old);
  }
  for (const button of document.querySelectorAll("button.log[aria-pressed=true]")) {
    fresh.getElementById(button.id)?.setAttribute("aria-pressed", "true");
  }
  if (document.querySelector("details")?.open) fresh.querySelector("details")?.setAttribute("open", "");
  const at = scrollY;
  document.querySelector("main").replaceWith(fresh.querySelector("main"));
  scrollTo(0, at);
  readContent();
  return drawAgain();
}

async function refresh(seconds, version) {
  const began = performance.now();
  let told = "";
  try {
    const answer = await fetch("content", { headers: version ? { "If-None-Match": version } : {}, cache: "no-store" });
    if (answer.status === 200) {
      await replaceContent(await answer.text());
      version = answer.headers.get("ETag");
    } else if (answer.status !== 304) told = await answer.text();
  } catch {
    told = "The server does not answer; the page shows its last state.";
  }
  document.getElementById("told").textContent = told;
  const wait = Math.max(seconds, (5 * (performance.now() - began)) / 1000); // a long record is read less often
  setTimeout(refresh, 1000 * wait, seconds, version);
}

async function start() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (it) => it.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.log");
    if (button === null) return;
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
    for (const place of button.closest("section").querySelectorAll(".plot[data-drawn]")) draw(place);
  });
  dark.addEventListener("change", drawAgain);
  addEventListener("beforeprint", () => setPrinting(true));
  addEventListener("afterprint", () => setPrinting(false));
  readContent();
  const seconds = Number(document.body.dataset.live ?? 0);
  if (seconds) setTimeout(refresh, 1000 * seconds, seconds, null);
}

start();
