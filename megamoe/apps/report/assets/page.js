// Draws the figures of a report with plotly.js, in the reader's colours, when they come into view.
"use strict";

const BUTTONS = ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "resetScale2d"];
// In pixels of paper, of a figure that fills the width and of one in two columns: what is printed is laid out
// after `beforeprint`, so that sizes of the screen would not fit.
const PAPER = { whole: { width: 690, height: 300 }, half: { width: 330, height: 230 } };
const dark = matchMedia("(prefers-color-scheme: dark)");
let content = null; // the figures, their template, and the dark page's colours by those of the light one
let printing = false;
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
  const hidden = hiddenCurves(place);
  for (const trace of data) {
    if (hidden.has(trace.legendgroup)) trace.visible = false;
  }
  const kind = isLog ? "log" : "linear";
  layout.uirevision = kind + (place.shownAll ?? ""); // else a zoom stays
  layout.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom"; // a finger scrolls the page
  if (printing) Object.assign(layout, place.closest(".whole") ? PAPER.whole : PAPER.half);
  place.dataset.drawn = kind;
  const save = { name: "toImage", title: "Save as PNG", icon: Plotly.Icons.camera, click: savePicture };
  const shown = Plotly.react(place, data, layout, { displaylogo: false, modeBarButtons: [[...BUTTONS, save]] });
  toolbar(place);
  return shown;
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

// One stop of the Tab key for the buttons over a figure; arrow keys go from one to the next.
function toolbar(place) {
  place.querySelectorAll(".modebar-btn").forEach((button, at) => (button.tabIndex = at ? -1 : 0));
}

function nextButton(button, by) {
  const all = [...button.parentElement.closest(".modebar, .legend").querySelectorAll("button")];
  all[(all.indexOf(button) + by + all.length) % all.length].focus();
}

// The values at a cursor that arrow keys move: along x, and in a map also along y.
function moveCursor(place, key) {
  const curves = place.data.filter((it) => it.visible !== false && it.hoverinfo !== "skip");
  if (curves.length === 0) return;
  const rows = curves[0].type === "heatmap" ? curves[0].z.length : 1;
  const xs = rows > 1 ? curves[0].x.slice(0, -1) : [...new Set(curves.flatMap((it) => it.x))].sort((a, b) => a - b);
  const cursor = place.cursor ?? { column: key === "ArrowLeft" ? xs.length : -1, row: 0 };
  const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -xs.length, End: xs.length };
  const within = (value, most) => Math.max(0, Math.min(most - 1, value));
  cursor.column = within(cursor.column + (steps[key] ?? 0), xs.length);
  cursor.row = within(cursor.row + ({ ArrowUp: 1, ArrowDown: -1 }[key] ?? 0), rows);
  place.cursor = cursor;
  const at = xs[cursor.column];
  const points = [];
  const told = [`${rows > 1 ? "from step" : place.layout.xaxis.title.text.split(" (")[0]} ${at}`];
  for (const curve of curves) {
    const index = curve.x.indexOf(at);
    if (index < 0) continue;
    points.push({ curveNumber: place.data.indexOf(curve), pointNumber: rows > 1 ? [cursor.row, index] : index });
    const spread = curve.customdata?.[index];
    if (rows > 1) told.push(`row ${cursor.row}: ${curve.z[cursor.row][index] ?? "none"}`);
    else told.push(`${curve.name} ${curve.y[index] ?? "none"}${spread ? `, from ${spread[1]} to ${spread[2]}` : ""}`);
  }
  const unified = place.layout.hovermode === "x unified" && rows === 1;
  Plotly.Fx.hover(place, unified ? { xval: at } : points, "xy");
  document.getElementById("values").textContent = told.join("; ");
}

function leave(place) {
  place.cursor = undefined;
  Plotly.Fx.unhover(place);
  document.getElementById("values").textContent = "";
}

function zoom(place, factor) {
  const update = {};
  for (const name of ["xaxis", "yaxis"]) {
    const [low, high] = place._fullLayout[name].range;
    const reach = ((high - low) * factor) / 2;
    update[`${name}.range`] = [(low + high) / 2 - reach, (low + high) / 2 + reach];
  }
  return Plotly.relayout(place, update);
}

function showAll(place) {
  place.shownAll = performance.now();
  return draw(place);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const at = event.target;
  const { key } = event;
  const by = { ArrowRight: 1, ArrowLeft: -1 }[key];
  if (key === "Escape") {
    const open = at.closest("details[open]");
    const button = at.closest(".modebar-btn");
    if (at.matches(".plot")) leave(at);
    else if (button !== null) button.closest(".plot").focus();
    else if (open !== null) {
      open.open = false;
      open.querySelector("summary").focus();
    } else return;
  } else if (by !== undefined && at.matches(".modebar-btn, .legend button")) nextButton(at, by);
  else if (!at.matches(".plot[data-drawn]")) return;
  else if (key === "+" || key === "=") zoom(at, 0.5);
  else if (key === "-") zoom(at, 2);
  else if (key === "0") showAll(at);
  else if (/^(Arrow|Page|Home|End)/.test(key)) moveCursor(at, key);
  else return;
  event.preventDefault();
}

function places(selector = "") {
  return [...document.querySelectorAll(`.plot${selector}`)];
}

function drawAgain() {
  return Promise.all(places("[data-drawn]").map(draw));
}

function setPrinting(value) {
  printing = value;
  return Promise.all(places(value ? "" : "[data-drawn]").map(draw));
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
  document.addEventListener("keydown", onKey);
  document.addEventListener("focusout", (event) => {
    if (event.target.matches?.(".plot[data-drawn]") && event.target.cursor !== undefined) leave(event.target);
  });
  dark.addEventListener("change", drawAgain);
  addEventListener("beforeprint", () => setPrinting(true));
  addEventListener("afterprint", () => setPrinting(false));
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
