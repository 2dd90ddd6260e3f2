// Curves with exact values under the pointer, a finger or the arrow keys, and tables that sort. No text is ever parsed as HTML.
"use strict";

const settings = JSON.parse(document.getElementById("data").textContent);
const MARGIN = { left: 52, right: 16, top: 10, bottom: 46 };
const MARKERS = 12; // on a curve, about
const REACH = 40; // pixels from the pointer within which a point is shown
const ARROW = 8; // pixels by which a table's last header may stand out
const AXES = { round: "round", uplink: "uploaded by all clients", total: "sent up and down, all clients" };

// Numbers

const percent = (value, digits) => (100 * value).toFixed(digits) + "%";
const whole = (value) => value.toLocaleString("en-US");

function shortBytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log10(value) / 3 + 1e-9));
  return `${+(value / 1000 ** power).toPrecision(3)} ${units[power]}`;
}

const extent = (values) =>
  values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

function linearTicks(low, high, most, least = 0) {
  const rough = Math.max((high - low) / most, least, 1e-9);
  const power = 10 ** Math.floor(Math.log10(rough) + 1e-9);
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9));
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) ticks.push(n * step);
  return { ticks, step };
}

// The finest of 1 2 5 10, 1 3 10, 1 10 or 1 100 ... whose ticks are so many pixels apart.
function logTicks(low, high, pixels, apart) {
  const decade = pixels / Math.log10(high / low);
  const factors = [[1, 2, 5], [1, 3]].find((choice) => Math.log10(choice[1]) * decade >= apart) ?? [1];
  const stride = Math.ceil(apart / decade);
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    if (power % stride === 0) ticks.push(...factors.map((factor) => factor * 10 ** power));
  }
  return ticks.filter((tick) => tick >= low && tick <= high);
}

// Drawing

function element(name, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent?.append(made);
  return made;
}

function label(parent, x, y, text, anchor) {
  element("text", { x, y, "text-anchor": anchor }, parent).textContent = text;
}

// Where values are: {x, y} in pixels, and the ticks of both axes.
function scales(points, key, target, width, height) {
  const [worst, best] = extent(points.map((point) => point.accuracy).concat(target ?? []));
  const pad = 0.04 * Math.max(0.02, best - worst);
  const [bottom, top] = [Math.max(0, worst - pad), Math.min(1, best + pad)];
  let [low, high] = extent(points.map((point) => point[key]));
  const log = key !== "round";
  if (log && high < 10 * low) {
    const middle = Math.sqrt(low * high); // a decade at least, or there might be no tick in it
    [low, high] = [middle / Math.sqrt(10), middle * Math.sqrt(10)];
  } else if (!log) {
    [low, high] = [Math.min(low, high - 1), high];
  }
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  const bend = log ? Math.log10 : (value) => value;
  return {
    x: (value) => MARGIN.left + (inner.width * (bend(value) - bend(low))) / (bend(high) - bend(low)),
    y: (value) => MARGIN.top + (inner.height * (top - value)) / (top - bottom),
    xTicks: log ? logTicks(low, high, inner.width, 60) : linearTicks(low, high, inner.width / 55, 1).ticks,
    yTicks: linearTicks(bottom, top, inner.height / 38),
  };
}

function drawAxes(svg, place, key, target, width, height) {
  const [left, right, base] = [MARGIN.left, width - MARGIN.right, height - MARGIN.bottom];
  const digits = Math.max(0, -Math.floor(Math.log10(100 * place.yTicks.step) + 1e-9));
  for (const tick of place.yTicks.ticks) {
    const y = place.y(tick);
    element("line", { x1: left, x2: right, y1: y, y2: y, class: "grid" }, svg);
    label(svg, left - 6, y + 4, percent(tick, digits), "end");
  }
  for (const tick of place.xTicks) {
    const x = place.x(tick);
    element("line", { x1: x, x2: x, y1: MARGIN.top, y2: base, class: "grid" }, svg);
    const anchor = x > right - 15 ? "end" : "middle";
    label(svg, anchor === "end" ? right + 8 : x, base + 20, key === "round" ? whole(tick) : shortBytes(tick), anchor);
  }
  label(svg, (left + right) / 2, height - 5, AXES[key], "middle");
  if (target !== null) {
    element("line", { x1: left, x2: right, y1: place.y(target), y2: place.y(target), class: "target" }, svg);
  }
}

// `phase` (0 to 1) shifts the markers, so that curves which coincide do not hide each other's.
function drawRun(svg, run, spots, phase) {
  const group = element("g", { style: `--c: ${run.colour}` }, svg);
  const path = spots.map((spot, n) => `${n ? "L" : "M"}${spot.x.toFixed(1)},${spot.y.toFixed(1)}`).join("");
  element("path", { d: path, class: "curve", "stroke-dasharray": run.dashes }, group);
  const every = Math.max(1, Math.round(spots.length / MARKERS));
  const first = Math.floor(phase * every);
  const kind = run.hollow ? "marker hollow" : "marker";
  spots.forEach((spot, n) => {
    if (n % every !== first && n !== spots.length - 1) return;
    element("path", { d: run.marker, class: kind, transform: `translate(${spot.x},${spot.y})` }, group);
  });
  return group;
}

class Chart {
  constructor(figure, setting) {
    this.figure = figure;
    this.key = figure.dataset.x;
    this.runs = setting.runs;
    this.target = setting.target;
    this.hidden = setting.hidden;
    this.svg = element("svg", { class: "chart", role: "img", tabindex: 0, "aria-label": figure.dataset.label }, figure);
    this.tip = figure.appendChild(document.createElement("div"));
    Object.assign(this.tip, { className: "tip", hidden: true });
    this.tip.setAttribute("role", "status");
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    // A finger that is lifted leaves, too, but what it pointed at stays until the next touch.
    this.svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.show(null));
    this.svg.addEventListener("pointercancel", () => this.show(null)); // it scrolls the page
    addEventListener("pointerdown", (event) => this.svg.contains(event.target) || this.show(null));
    this.svg.addEventListener("blur", () => this.show(null));
    this.svg.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.draw()).observe(figure);
  }

  draw(again = false) {
    const width = Math.max(260, Math.round(this.figure.clientWidth));
    if (width === this.width && !again) return;
    this.width = width;
    const height = Math.round(Math.min(400, Math.max(240, 0.62 * width)));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    this.show(null);
    this.spots = [];
    this.groups = new Map();
    const shown = this.runs.filter((run) => !this.hidden.has(run));
    // Before the first byte there is no place on a logarithmic axis.
    const drawn = new Map(shown.map((run) => [run, run.points.filter((point) => point[this.key] > 0)]));
    const all = [...drawn.values()].flat();
    if (!all.length) {
      label(this.svg, width / 2, height / 2, shown.length ? "nothing was evaluated yet" : "no run is selected", "middle");
      return;
    }
    const place = scales(all, this.key, this.target, width, height);
    drawAxes(this.svg, place, this.key, this.target, width, height);
    for (const [run, points] of drawn) {
      const spots = points.map((point) => ({ run, point, x: place.x(point[this.key]), y: place.y(point.accuracy) }));
      this.groups.set(run, drawRun(this.svg, run, spots, this.groups.size / drawn.size));
      this.spots.push(...spots);
    }
    this.ring = element("circle", { r: 6, class: "hit", visibility: "hidden" }, this.svg);
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const scale = this.width / box.width;
    const [x, y] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    let [best, least] = [null, REACH];
    for (const spot of this.spots) {
      const distance = Math.hypot(spot.x - x, spot.y - y);
      if (distance < least) [best, least] = [spot, distance];
    }
    this.show(best);
  }

  // Left and right along a run, up and down from run to run.
  step(event) {
    if (event.key === "Escape") this.show(null);
    const along = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const across = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!(along || across) || !this.spots.length) return;
    event.preventDefault();
    const now = this.spot;
    if (!now) return this.show(this.spots[0]);
    if (along) {
      const own = this.spots.filter((spot) => spot.run === now.run);
      return this.show(own[Math.min(own.length - 1, Math.max(0, own.indexOf(now) + along))]);
    }
    const runs = [...new Set(this.spots.map((spot) => spot.run))];
    const next = runs[(runs.indexOf(now.run) + across + runs.length) % runs.length];
    const distance = (spot) => Math.abs(spot.x - now.x);
    const own = this.spots.filter((spot) => spot.run === next);
    this.show(own.reduce((best, spot) => (distance(spot) < distance(best) ? spot : best)));
  }

  show(spot) {
    if (spot === this.spot) return;
    this.spot = spot;
    this.tip.hidden = !spot;
    this.ring?.setAttribute("visibility", spot ? "visible" : "hidden");
    for (const [run, group] of this.groups ?? []) group.classList.toggle("faded", Boolean(spot) && run !== spot.run);
    if (!spot) return;
    this.ring.setAttribute("cx", spot.x);
    this.ring.setAttribute("cy", spot.y);
    const { round, accuracy, loss, uplink, total } = spot.point;
    const name = document.createElement("strong");
    name.textContent = spot.run.label;
    const lines = [`round ${whole(round)}`, `accuracy ${percent(accuracy, 3)}`];
    if (loss !== null) lines.push(`loss ${+loss.toPrecision(5)}`);
    lines.push(`${whole(uplink)} bytes up`, `${whole(total)} up and down`);
    this.tip.replaceChildren(name, ...lines.flatMap((line) => [line, document.createElement("br")]));
    this.place(spot);
  }

  // Beside the point, on the side that has room, and never beyond the figure.
  place(spot) {
    const [drawn, whole] = [this.svg.getBoundingClientRect(), this.figure.getBoundingClientRect()];
    const scale = drawn.width / this.width;
    const [x, y] = [drawn.left - whole.left + spot.x * scale, drawn.top - whole.top + spot.y * scale];
    const [width, height] = [this.tip.offsetWidth, this.tip.offsetHeight];
    const left = x + 14 + width <= this.figure.clientWidth ? x + 14 : x - 14 - width;
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${Math.max(0, y - height - 10)}px`;
  }
}

for (const section of document.querySelectorAll("[data-setting]")) {
  const setting = { ...settings[section.dataset.setting], hidden: new Set() };
  const charts = [...section.querySelectorAll("figure")].map((figure) => new Chart(figure, setting));
  section.querySelectorAll(".legend button").forEach((button, n) => {
    const run = setting.runs[n];
    button.addEventListener("click", () => {
      const shown = setting.hidden.has(run);
      shown ? setting.hidden.delete(run) : setting.hidden.add(run);
      button.setAttribute("aria-pressed", shown);
      charts.forEach((chart) => chart.draw(true));
    });
  });
}

// Tables: cells with data-value sort as numbers, others as text; what there is not comes last either way.

function sortBy(header, direction) {
  const column = [...header.parentNode.children].indexOf(header);
  const body = header.closest("table").tBodies[0];
  const number = (row) => (row.cells[column].dataset.value ? Number(row.cells[column].dataset.value) : null);
  const text = (row) => row.cells[column].textContent.trim();
  const numeric = header.classList.contains("number");
  const compare = (a, b) => {
    if (!numeric) return direction * text(a).localeCompare(text(b), "en", { numeric: true });
    const [x, y] = [number(a), number(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    return direction * (x - y);
  };
  body.append(...[...body.rows].sort(compare));
}

for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const header = button.closest("th");
    const up = header.getAttribute("aria-sort") !== "ascending";
    for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", up ? "ascending" : "descending");
    sortBy(header, up ? 1 : -1);
  });
}

// A table that is wider than its place fades at the edge behind which there is more.

for (const scroll of document.querySelectorAll(".scroll")) {
  const mark = () => {
    const behind = scroll.scrollWidth - scroll.clientWidth - scroll.scrollLeft;
    scroll.classList.toggle("more-left", scroll.scrollLeft > ARROW);
    scroll.classList.toggle("more-right", behind > ARROW);
  };
  scroll.addEventListener("scroll", mark, { passive: true });
  new ResizeObserver(mark).observe(scroll);
}

// On paper nothing can be unfolded.
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  folded.forEach((details) => (details.open = true));
});
addEventListener("afterprint", () => folded.forEach((details) => (details.open = false)));
