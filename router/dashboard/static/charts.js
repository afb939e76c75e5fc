// Line charts of the last ten minutes. Each shows its latest values as text, and all values as a table.

import { $, h, mark, rate, s, setText, seconds } from "./dom.js";

const KEPT_S = 600, STEP_S = 1, HEIGHT = 130, LEFT = 60, BOTTOM = 22, TOP = 8;
const quantile = (name, of) => (view) => (Number(view.lately[name].count) ? view.lately[name][of] : null);

const CHARTS = [
  { title: "Time to first token", unit: seconds, lines: [["p50", quantile("ttft", "p50")], ["p99", quantile("ttft", "p99")]] },
  { title: "Inter-token latency", unit: seconds, lines: [["p50", quantile("itl", "p50")], ["p99", quantile("itl", "p99")]] },
  { title: "Tokens per second", unit: rate,
    lines: [["output", (view) => view.lately.tokens_per_s], ["prompt", (view) => view.lately.prompt_tokens_per_s]] },
];

export class Charts {
  constructor() {
    this.charts = CHARTS.map((chart) => new Chart(chart));
    $("charts").append(...this.charts.map((chart) => chart.element));
    this.last = 0;
  }

  show(view) {
    const passed = view.time_s - this.last;
    if (passed >= 0 && passed < STEP_S * 0.9) return;
    this.last = view.time_s;
    for (const chart of this.charts) chart.add(view);
  }
}

class Chart {
  constructor({ title, unit, lines }) {
    Object.assign(this, { title, unit, lines, points: [] });
    this.paths = lines.map((_, at) => s("path", { class: `line line-${at}` }));
    this.grid = s("g", { class: "grid" });
    this.svg = s("svg", { role: "img", height: HEIGHT, "aria-label": title }, this.grid, ...this.paths);
    this.keys = lines.map(([name], at) => h("span", { class: `key key-${at}` }, name));
    this.rows = h("tbody");
    this.table = h("details", {}, h("summary", {}, "Show as table"), h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "age"), ...lines.map(([name]) => h("th", { scope: "col" }, name)))),
      this.rows));
    this.table.addEventListener("toggle", () => this.describe());
    this.element = h("figure", { class: "panel chart" },
      h("figcaption", {},
        h("div", { class: "title" }, h("h2", {}, title), h("small", { class: "muted" }, "each point: 5 s")), h("span", { class: "keys" }, ...this.keys)), this.svg, this.table);
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  add(view) {
    this.points = this.points.filter(([time_s]) => time_s < view.time_s); // the clock may have been set back
    this.points.push([view.time_s, ...this.lines.map(([, value]) => value(view))]);
    while (this.points[0][0] < view.time_s - KEPT_S) this.points.shift();
    this.draw();
    this.describe();
  }

  text(value) {
    return value == null ? "–" : this.unit(value);
  }

  describe() {
    const last = this.points.at(-1) ?? [];
    const texts = this.lines.map(([name], at) => `${name} ${this.text(last[at + 1])}`);
    this.keys.forEach((key, at) => setText(key, texts[at]));
    mark(this.svg, { "aria-label": `${this.title}, latest: ${texts.join(", ")}` });
    if (!this.table.open) return;
    const now = last[0], each = [0, 5, 15, 30, 60, 120, 300, 600];
    const rows = each.map((ago) => [ago, this.points.findLast(([at]) => at <= now - ago)]).filter(([, found]) => found);
    this.rows.replaceChildren(...rows.map(([ago, found]) => h("tr", {}, h("th", { scope: "row" }, ago ? `${ago} s` : "now"),
      ...this.lines.map((_, at) => h("td", {}, this.text(found[at + 1]))))));
  }

  draw() {
    const width = this.svg.clientWidth, last = this.points.at(-1);
    if (!width || !last) return;
    const span = Math.min(KEPT_S, Math.max(60, last[0] - this.points[0][0]));
    const most = nice(Math.max(...this.points.flatMap((point) => point.slice(1).map((value) => value ?? 0))));
    const x = (time) => LEFT + (width - LEFT - 4) * (1 - (last[0] - time) / span);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / most);
    mark(this.svg, { viewBox: `0 0 ${width} ${HEIGHT}` });
    const levels = [0, most / 2, most].flatMap((value) => [
      s("line", { x1: LEFT, x2: width - 4, y1: y(value), y2: y(value) }),
      s("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, value ? this.unit(value) : "0")]);
    const ago = span >= 120 ? `${Math.round(span / 60)} min ago` : `${Math.round(span)} s ago`;
    const times = [s("text", { x: LEFT, y: HEIGHT - 5 }, ago), s("text", { x: width - 4, y: HEIGHT - 5, "text-anchor": "end" }, "now")];
    this.grid.replaceChildren(...levels, ...times);
    this.paths.forEach((path, at) => mark(path, { d: line(this.points, at + 1, x, y) }));
  }
}

// Path of a line with gaps where no value was measured.
function line(points, at, x, y) {
  let text = "", down = false;
  for (const point of points) {
    const value = point[at];
    if (value != null) text += `${down ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(value).toFixed(1)}`;
    down = value != null;
  }
  return text;
}

// Rounds up to 1, 2 or 5 times a power of ten.
function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((each) => each * power >= value) * power;
}
