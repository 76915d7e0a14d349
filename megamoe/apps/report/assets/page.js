// Draws the panels of a report with plotly.js, in the reader's colours, when they come into view.
"use strict";

const BUTTONS = [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "resetScale2d", "toImage"]];
// In pixels of paper, of a panel that fills the width and of one in two columns: what is printed is laid out
// after `beforeprint`, so that sizes of the screen would not fit.
const PAPER = { whole: { width: 690, height: 300 }, half: { width: 330, height: 230 } };
const MAP_MARGIN = { l: 56, r: 8, t: 8, b: 44 };
const dark = matchMedia("(prefers-color-scheme: dark)");
let content = null; // the panels, and the colours of both themes
let printing = false;
let watcher = null;
// A panel changes its width without the window when a scroll bar or a column comes or goes.
const resizer = new ResizeObserver((entries) => {
  if (printing) return;
  for (const entry of entries) {
    if (entry.target.dataset.drawn) Plotly.Plots.resize(entry.target);
  }
});

function theme() {
  return content.themes[dark.matches && !printing ? "dark" : "light"];
}

function colour(pair) {
  return pair[dark.matches && !printing ? 1 : 0];
}

function translucent(hex, alpha) {
  const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return `rgba(${parts.join(",")},${alpha})`;
}

function curveTraces(panel, curve) {
  const line = { color: colour(curve.colour), width: curve.faint ? 1 : 1.8, dash: curve.dashed ? "dash" : "solid" };
  const base = { type: "scatter", x: content.x[curve.x], line, name: curve.name, legendgroup: curve.name };
  const traces = [];
  if (curve.low) {
    const edge = { ...base, mode: "lines", line: { width: 0 }, showlegend: false, hoverinfo: "skip" };
    traces.push({ ...edge, y: curve.low });
    traces.push({ ...edge, y: curve.high, fill: "tonexty", fillcolor: translucent(line.color, 0.2) });
  }
  traces.push({
    ...base,
    y: curve.y,
    mode: curve.points ? "lines+markers" : "lines",
    marker: { size: 6 },
    opacity: curve.faint ? 0.45 : 1,
    showlegend: curve.named && !curve.faint,
    hovertemplate: "%{y:.5~g}<extra>%{fullData.name}</extra>",
    connectgaps: false,
  });
  return traces;
}

function mapTrace(panel) {
  const map = panel.map;
  const colours = theme();
  const even = 1 / map.highest;
  const scale =
    map.scale === "load"
      ? [[0, colours.load[0]], [even, colours.load[1]], [1, colours.load[2]]]
      : [[0, colours.background], [1, colours.blue]];
  return {
    type: "heatmap",
    x: map.x,
    z: map.z,
    zmin: 0,
    zmax: map.highest,
    colorscale: scale,
    colorbar: {
      title: { text: map.value, side: "right", font: { size: 11 } }, thickness: 9, outlinewidth: 0,
      tickfont: { size: 10 }, nticks: 5,
    },
    hovertemplate: `step %{x}<br>${panel.y.split(" (")[0]} %{y}<br>%{z:.3~g}<extra></extra>`,
    hoverongaps: false,
  };
}

function layoutOf(panel, isLog) {
  const colours = theme();
  const axis = {
    gridcolor: colours.grid, linecolor: colours.grid, zeroline: false, automargin: true, tickfont: { size: 11 }, nticks: 7,
  };
  const yaxis = { ...axis, title: { text: panel.y, font: { size: 12 } }, type: isLog ? "log" : "linear" };
  if (panel.limits && !isLog) yaxis.range = panel.limits;
  if (isLog) Object.assign(yaxis, { dtick: "D2", exponentformat: "power" });
  if (panel.map) Object.assign(yaxis, { showgrid: false, tickformat: "d", nticks: 8 });
  const named = panel.curves.filter((curve) => curve.named && !curve.faint).length;
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: panel.map ? colours.grid : "rgba(0,0,0,0)",
    font: { color: colours.muted, size: 12 },
    margin: panel.map ? MAP_MARGIN : { l: 56, r: 8, t: named > 1 ? 4 : 8, b: 44 },
    xaxis: { ...axis, title: { text: panel.x, font: { size: 12 } }, showgrid: !panel.map },
    yaxis,
    showlegend: named > 1,
    legend: { orientation: "h", x: 0, y: 1.01, yanchor: "bottom", font: { size: 11 }, itemwidth: 30 },
    hovermode: panel.map ? "closest" : panel.curves.length > 9 ? "closest" : "x unified",
    hoverdistance: panel.map || panel.curves.length > 9 ? 20 : -1, // -1: the nearest step, however far
    hoverlabel: { bgcolor: colours.background, bordercolor: colours.grid, font: { color: colours.text } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colours.muted, activecolor: colours.blue },
    uirevision: isLog ? "log" : "linear", // a zoom stays when the page is refreshed
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
  };
  if (panel.level !== null && !isLog) {
    const line = { color: colours.muted, width: 1, dash: "dash" };
    layout.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: panel.level, y1: panel.level, line }];
  }
  return layout;
}

function draw(place) {
  const panel = content.panels[Number(place.dataset.panel)];
  const button = place.closest("section").querySelector("button.log");
  const isLog = button !== null && button.getAttribute("aria-pressed") === "true" && !panel.map;
  const traces = panel.map ? [mapTrace(panel)] : panel.curves.flatMap((curve) => curveTraces(panel, curve));
  place.dataset.drawn = isLog ? "log" : "linear";
  const options = { displaylogo: false, modeBarButtons: BUTTONS };
  const layout = layoutOf(panel, isLog);
  if (printing) Object.assign(layout, place.closest(".whole") ? PAPER.whole : PAPER.half);
  return Plotly.react(place, traces, layout, options);
}

function places(selector = "") {
  return [...document.querySelectorAll(`.plot${selector}`)];
}

function drawAgain() {
  return Promise.all(places("[data-drawn]").map(draw));
}

function readContent() {
  content = JSON.parse(document.getElementById("panels").textContent);
}

function watch() {
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

document.addEventListener("click", (event) => {
  const button = event.target.closest("button.log");
  if (button === null) return;
  button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
  for (const place of button.closest("section").querySelectorAll(".plot[data-drawn]")) draw(place);
});

dark.addEventListener("change", drawAgain);
addEventListener("beforeprint", () => {
  printing = true;
  places().forEach(draw);
});
addEventListener("afterprint", () => {
  printing = false;
  drawAgain();
});

// A live page: new content replaces the old; plots of the same place and title keep their zoom.
function replaceContent(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const kept = new Map(places("[data-drawn]").map((place) => [place.id, place]));
  const pressed = new Set([...document.querySelectorAll("button.log[aria-pressed=true]")].map((it) => it.id));
  const open = document.querySelector("details")?.open;
  for (const place of fresh.querySelectorAll(".plot")) {
    const old = kept.get(place.id);
    if (old === undefined) continue;
    old.dataset.panel = place.dataset.panel;
    place.replaceWith(old);
  }
  for (const button of fresh.querySelectorAll("button.log")) {
    button.setAttribute("aria-pressed", String(pressed.has(button.id)));
  }
  if (open) fresh.querySelector("details")?.setAttribute("open", "");
  const at = scrollY;
  document.querySelector("main").replaceWith(fresh.querySelector("main"));
  readContent();
  scrollTo(0, at);
  watch();
  return drawAgain();
}

async function refresh(seconds, version) {
  const began = performance.now();
  let wait = seconds;
  try {
    const answer = await fetch("content", { headers: version ? { "If-None-Match": version } : {}, cache: "no-store" });
    if (answer.status === 200) {
      await replaceContent(await answer.text());
      version = answer.headers.get("ETag");
    }
    document.getElementById("told").textContent = answer.ok || answer.status === 304 ? "" : await answer.text();
  } catch {
    document.getElementById("told").textContent = "The server does not answer; the page shows its last state.";
  }
  wait = Math.max(wait, (5 * (performance.now() - began)) / 1000); // a long record is read less often
  setTimeout(refresh, 1000 * wait, seconds, version);
}

readContent();
watch();
if (document.body.dataset.live) {
  const seconds = Number(document.body.dataset.live);
  setTimeout(refresh, 1000 * seconds, seconds, null);
}
