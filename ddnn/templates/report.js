"use strict";
// Sorts the table and draws the learning curves of a page of `ddnn report`. Texts from run dirs are set as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const color = (run) => (run.color === "#000000" ? "var(--text)" : run.color); // black is not seen on black
const dashes = { "-": "", "--": "7 4", ":": "2 3", "-.": "8 3 2 3" };
const hidden = new Set(); // numbers of runs
let abscissa = 0; // of a point: 0 its epoch, 1 its seconds
const abscissas = ["epoch", "training time (seconds)"];

function element(parent, name, attributes = {}, text = "") {
  const svg = name === "svg" || parent.namespaceURI.endsWith("svg");
  const made = document.createElementNS(svg ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  parent.appendChild(made);
  return made;
}

function sortable(table) {
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    const label = header.textContent;
    header.textContent = "";
    element(header, "button", { type: "button", title: "sort" }, label).addEventListener("click", () => {
      const order = header.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      headers.forEach((other) => other.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", order);
      const rows = [...table.tBodies[0].rows];
      const cells = new Map(rows.map((row) => [row, row.cells[column]]));
      const known = rows.filter((row) => cells.get(row).textContent !== "-");
      const numeric = known.every((row) => cells.get(row).dataset.number !== undefined);
      known.sort((a, b) => {
        const [x, y] = [cells.get(a), cells.get(b)];
        const by = numeric ? x.dataset.number - y.dataset.number : x.textContent.localeCompare(y.textContent, undefined, { numeric: true });
        return order === "ascending" ? by : -by;
      });
      const unknown = rows.filter((row) => !known.includes(row));
      table.tBodies[0].append(...known, ...unknown); // what is not known is last in either order
    });
  });
}

function linearTicks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((size) => size >= rough);
  const ticks = [];
  for (let n = Math.ceil(low / step); n * step <= high * (1 + 1e-9); n++) ticks.push(n * step);
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let n = Math.floor(Math.log10(low)); n <= Math.ceil(Math.log10(high)); n++)
    for (const digit of high / low > 50 ? [1] : [1, 2, 5]) if (digit * 10 ** n >= low && digit * 10 ** n <= high) ticks.push(digit * 10 ** n);
  return ticks;
}

function number(value, panel) {
  const scaled = panel.percent ? 100 * value : value;
  const text = Math.abs(scaled) >= 1e5 || (scaled && Math.abs(scaled) < 1e-3) ? scaled.toExponential(2) : String(+scaled.toPrecision(5));
  return panel.percent ? `${text} %` : text;
}

function draw(panel, box) {
  const width = Math.max(260, box.clientWidth), height = 270, left = 58, right = 12, top = 12, bottom = 44;
  box.querySelector("svg")?.remove();
  const curves = data.runs.map((run, n) => ({ run, ...panel.curves[n] })).filter((_, n) => !hidden.has(n));
  const drawn = (points) => points.filter((p) => p[abscissa] !== null && p[2] !== null && (!panel.log || p[2] > 0));
  const splits = panel.log ? ["train"] : ["train", "cv"];
  const points = curves.flatMap((curve) => splits.flatMap((split) => drawn(curve[split])));
  const svg = element(box, "svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": panel.label });
  element(svg, "text", { x: 0.5 * (left + width - right), y: height - 8, "text-anchor": "middle" }, abscissas[abscissa]);
  if (!points.length) return;
  let low = Math.min(...points.map((p) => p[2])), high = Math.max(...points.map((p) => p[2]));
  if (panel.limit !== null && low < panel.limit && panel.limit < high) high = panel.limit;
  const end = Math.max(...points.map((p) => p[abscissa])) || 1;
  const scale = panel.log ? Math.log10 : (value) => value;
  const pad = 0.05 * (scale(high) - scale(low)) || (panel.log ? 0.3 : Math.abs(high) / 10 || 1);
  const [y0, y1] = [scale(low) - pad, scale(high) + pad];
  const px = (x) => left + ((width - left - right) * x) / end;
  const py = (y) => height - bottom - ((height - top - bottom) * (scale(y) - y0)) / (y1 - y0);
  for (const tick of panel.log ? logTicks(10 ** y0, 10 ** y1) : linearTicks(y0, y1, 5)) {
    element(svg, "line", { class: "grid", x1: left, x2: width - right, y1: py(tick), y2: py(tick) });
    element(svg, "text", { x: left - 6, y: py(tick) + 4, "text-anchor": "end" }, number(tick, panel));
  }
  for (const tick of linearTicks(0, end, Math.min(8, width / 70)).filter((tick) => abscissa || Number.isInteger(tick)))
    element(svg, "text", { x: px(tick), y: height - bottom + 18, "text-anchor": "middle" }, String(+tick.toPrecision(6)));
  const frame = { x: left, y: top, width: width - left - right, height: height - top - bottom };
  const clip = `clip${data.panels.indexOf(panel)}`;
  const rim = { x: frame.x - 6, y: frame.y - 6, width: frame.width + 12, height: frame.height + 6 }; // whole circles
  element(element(svg, "clipPath", { id: clip }), "rect", rim);
  const places = [];
  const layer = element(svg, "g", { "clip-path": `url(#${clip})` });
  for (const { run, train, cv } of curves) {
    const group = element(layer, "g", { class: "run", style: `color: ${color(run)}`, "data-run": run.name });
    for (const [split, own] of [["train", drawn(train)], ["cv", panel.log ? [] : drawn(cv)]]) {
      // A learning rate is that of a whole epoch: a step, from the end of the epoch before.
      const place = (p) => `${px(p[abscissa])},${py(p[2])}`;
      const steps = own.map((p, n) => (panel.log ? `${n ? "V" : `M${px(0)},`}${py(p[2])}H${px(p[abscissa])}` : `${n ? "L" : "M"}${place(p)}`));
      if (own.length) element(group, "path", { class: panel.log ? "cv" : split, d: steps.join(""), "stroke-dasharray": dashes[run.line] });
      for (const p of own) {
        const spot = { run, split, p, x: px(p[abscissa]), y: py(p[2]) };
        if (split === "cv") element(group, "circle", { class: p[3] ? "" : "rejected", cx: spot.x, cy: spot.y, r: 3 });
        if (spot.y > 0) places.push(spot);
      }
    }
  }
  const ring = element(svg, "circle", { class: "ring", r: 6, visibility: "hidden" });
  const tip = box.querySelector(".tip");
  svg.addEventListener("pointermove", (event) => {
    const origin = svg.getBoundingClientRect(), zoom = width / origin.width;
    const [x, y] = [(event.clientX - origin.left) * zoom, (event.clientY - origin.top) * zoom];
    const distance = (place) => Math.hypot(place.x - x, place.y - y);
    const nearest = places.reduce((best, place) => (distance(place) < distance(best) ? place : best));
    const what = panel.log ? "" : nearest.split === "train" ? "training" : nearest.p[3] ? "CV" : "CV, rejected";
    const where = `epoch ${nearest.p[0]}` + (nearest.p[1] === null ? "" : `, ${nearest.p[1].toFixed(1)} s`);
    tip.textContent = [nearest.run.name, where, `${what} ${number(nearest.p[2], panel)}`.trim()].join("\n");
    tip.style.left = `${Math.min(nearest.x + 10, width - tip.offsetWidth)}px`;
    tip.style.top = `${nearest.y + 10}px`;
    tip.style.visibility = "visible";
    for (const [key, value] of [["cx", nearest.x], ["cy", nearest.y], ["style", `color: ${color(nearest.run)}`], ["visibility", "visible"]]) ring.setAttribute(key, value);
  });
  svg.addEventListener("pointerleave", () => {
    tip.style.visibility = "hidden";
    ring.setAttribute("visibility", "hidden");
  });
}

function curves(place) {
  const legend = element(place, "div", { class: "legend" }), grid = element(place, "div", { class: "panels" });
  const boxes = data.panels.map((panel) => {
    const figure = element(grid, "figure");
    element(figure, "figcaption", {}, panel.label);
    const box = element(figure, "div", { class: "box" });
    element(box, "div", { class: "tip" });
    return box;
  });
  const redraw = () => data.panels.forEach((panel, n) => draw(panel, boxes[n]));
  data.runs.forEach((run, n) => {
    if (data.runs.length === 1) return;
    const entry = element(legend, "label", { style: `color: ${color(run)}` });
    const shown = element(entry, "input", { type: "checkbox", checked: "" });
    const line = element(entry, "svg", { width: 28, height: 10, "aria-hidden": "true" });
    element(line, "path", { class: "cv", d: "M0,5H28", "stroke-dasharray": dashes[run.line] });
    element(entry, "span", {}, run.name);
    shown.addEventListener("change", () => {
      hidden[shown.checked ? "delete" : "add"](n);
      redraw();
    });
  });
  const choice = element(element(legend, "label", { class: "axis" }, "against "), "select");
  abscissas.forEach((name, n) => element(choice, "option", { value: n }, name));
  choice.addEventListener("change", () => {
    abscissa = Number(choice.value);
    redraw();
  });
  let width = 0;
  new ResizeObserver(() => {
    if (place.clientWidth !== width) redraw();
    width = place.clientWidth;
  }).observe(place);
}

document.querySelectorAll("table.runs").forEach(sortable);
curves(document.getElementById("curves"));
