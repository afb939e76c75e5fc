// Running requests as dots that move from the router to a prefill worker, then to a decode worker.

import { $, count, h, mark, plural, s, setText, seconds, shortId } from "./dom.js";

const LANES = 6, DOT = 6, STEP = 16, PAD = 13, HEAD = 31, GAP = 14, ROWS = 3;
const STAGES = ["queue", "route", "reserve", "prefill", "transfer", "commit", "decode"];
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const still = () => calm.matches || document.hidden; // in a hidden tab an animation would never finish

export class Flow {
  constructor() {
    this.links = s("g", { class: "links" });
    this.boxes = s("g");
    this.dots = s("g");
    this.travelling = s("g"); // below the boxes, so that no dot covers a counter or another box on its way
    this.svg = s("svg", { "aria-hidden": "true" }, this.links, this.travelling, this.boxes, this.dots);
    $("flow").append(this.svg);
    this.known = new Map(); // by request and choice: {dot, at, stage}
    this.numbers = new Map();
    this.shape = "";
    this.view = null;
    new ResizeObserver(() => this.view && this.show(this.view)).observe($("flow"));
    $("requests").addEventListener("toggle", () => this.describe());
  }

  show(view) {
    this.view = view;
    const moved = this.lay(view);
    const slots = new Map(), seen = new Set(), inside = new Map();
    for (const one of view.requests.toReversed()) {
      const key = `${one.request_id}.${one.choice}`;
      const place = this.place(one, slots);
      seen.add(key);
      inside.set(place.box.key, (inside.get(place.box.key) ?? 0) + 1);
      this.move(key, one, place, moved);
    }
    for (const [key, { dot, stage, at }] of this.known) {
      if (seen.has(key)) continue;
      this.known.delete(key);
      this.dots.append(dot);
      leave(dot, at, stage === "decode" ? this.width + 20 : at[0]);
    }
    for (const [key, text] of this.numbers) setText(text, String(inside.get(key) ?? 0));
    this.describe();
  }

  // Computes the boxes. They are drawn again only after the workers or the width changed.
  lay({ status, requests }) {
    this.width = $("flow").clientWidth;
    const of = (role) => status.workers.filter((one) => one.info.role === role && one.state === "connected");
    this.lanes = { prefill: lanes(of("prefill")), decode: lanes(of("decode")) };
    const rows = Math.max(1, this.lanes.prefill.names.length, this.lanes.decode.names.length);
    const narrow = this.width < 560, each = 84;
    this.height = Math.max(2 * each, rows * (each + GAP));
    const column = (role, left, right, names) => names.map((name, at) => {
      const space = this.height / names.length, key = `${role} ${name}`; // both roles may have a box "3 others"
      return { key, role, name, x: left * this.width, y: space * at + (space - each) / 2, w: (right - left) * this.width, h: each };
    });
    this.router = { key: "router", role: "router", name: "router", x: 1, y: this.height / 2 - 70, w: (narrow ? 0.24 : 0.18) * this.width, h: 140 };
    this.prefill = column("prefill", 0.36, narrow ? 0.62 : 0.6, this.lanes.prefill.names);
    this.decode = column("decode", narrow ? 0.73 : 0.76, 0.998, this.lanes.decode.names);
    const shape = [this.width, this.height, ...this.lanes.prefill.names, "|", ...this.lanes.decode.names].join();
    if (shape === this.shape) return false;
    this.shape = shape;
    mark(this.svg, { viewBox: `0 0 ${this.width} ${this.height}`, height: this.height });
    const boxes = [this.router, ...this.prefill, ...this.decode];
    this.numbers.clear();
    this.boxes.replaceChildren(...boxes.map((one) => s("g", { class: one.role },
      s("rect", { x: one.x, y: one.y, width: one.w, height: one.h, rx: 10 }), s("text", { x: one.x + PAD, y: one.y + 21 }, fit(one)), this.number(one, narrow))));
    const first = this.prefill.length ? this.prefill : this.decode; // without prefill workers, decode workers compute the prompts
    const links = [...first.map((to) => [this.router, to]), ...this.prefill.flatMap((from) => this.decode.map((to) => [from, to]))];
    this.links.replaceChildren(...links.map(([from, to]) => s("path", { d: curve(from, to) })));
    return true;
  }

  // Text in the corner of a box: the number of requests in it or on their way to it.
  number(box, narrow) {
    const y = box.y + (narrow ? box.h - 9 : 21);
    const text = s("text", { class: "number", x: box.x + box.w - PAD, y, "text-anchor": "end" });
    this.numbers.set(box.key, text);
    return text;
  }

  // Returns the position of a request: in a box, or between two boxes.
  place({ stage, prefill_worker, decode_worker }, slots) {
    const prefill = this.prefill[this.lanes.prefill.of(prefill_worker)], decode = this.decode[this.lanes.decode.of(decode_worker)];
    const within = (box) => {
      const number = slots.get(box) ?? 0, across = Math.max(1, Math.floor((box.w - 2 * PAD + STEP - 2 * DOT) / STEP));
      const most = across * Math.max(1, Math.floor((box.h - HEAD - 6) / STEP));
      slots.set(box, number + 1);
      const at = Math.min(number, most - 1);
      return [box.x + PAD + DOT + (at % across) * STEP, box.y + HEAD + DOT + Math.floor(at / across) * STEP];
    };
    const between = (from, to) => { // a grid of ROWS rows in the middle of the way
      const x = (from.x + from.w + to.x) / 2, y = (middle(from) + middle(to)) / 2, key = `${x} ${y}`;
      const most = Math.max(1, Math.floor((to.x - from.x - from.w - 2 * DOT) / STEP)), number = slots.get(key) ?? 0;
      slots.set(key, number + 1);
      const column = Math.min(Math.floor(number / ROWS), most - 1), side = column % 2 ? -1 : 1;
      return [x + side * Math.ceil(column / 2) * STEP, y + ((number % ROWS) - (ROWS - 1) / 2) * STEP];
    };
    const via = prefill ? [prefill.x + prefill.w / 2, middle(prefill)] : null;
    const computes = prefill ?? decode;
    if (stage === "decode" && decode) return { box: decode, at: within(decode), via };
    if ((stage === "transfer" || stage === "commit") && prefill && decode) return { box: decode, at: between(prefill, decode), via };
    if (stage === "prefill" && computes) return { box: computes, at: within(computes) };
    if (stage === "reserve" && computes) return { box: this.router, at: between(this.router, computes) };
    return { box: this.router, at: within(this.router) };
  }

  move(key, one, { at, via }, jumps) {
    let known = this.known.get(key);
    const entering = !known;
    if (entering) {
      const dot = s("circle", { r: DOT }, s("title"));
      this.dots.append(dot);
      known = { dot, at: [this.router.x + PAD + DOT, middle(this.router)], stage: "queue" };
      this.known.set(key, known);
    }
    mark(known.dot, { class: `dot ${one.stage}${one.attempt > 1 ? " again" : ""}${one.deterministic ? " fixed" : ""}` });
    known.dot.firstChild.textContent = `${one.stage}: ${one.request_id}, ${plural(one.tokens, "token")}, ${seconds(one.age_s)}`;
    const before = STAGES.indexOf("prefill"), passed = via && STAGES.indexOf(known.stage) < before;
    if (entering || known.at[0] !== at[0] || known.at[1] !== at[1]) this.travel(known.dot, jumps ? [at] : passed ? [known.at, via, at] : [known.at, at]);
    Object.assign(known, { at, stage: one.stage });
  }

  travel(dot, points) {
    const last = points.at(-1);
    dot.style.transform = shift(last);
    if (still() || points.length < 2) return;
    this.travelling.append(dot);
    const frames = points.map((point) => ({ transform: shift(point) })), options = { duration: 220 * (points.length - 1), easing: "ease-in-out" };
    dot.animate(frames, options).onfinish = () => dot.parentNode === this.travelling && this.dots.append(dot);
  }

  describe() {
    if (!this.view) return;
    const { requests, status } = this.view, by = new Map();
    for (const { stage } of requests) by.set(stage, (by.get(stage) ?? 0) + 1);
    const parts = STAGES.filter((stage) => by.has(stage)).map((stage) => `${count(by.get(stage))} in ${stage}`);
    const more = status.running > requests.length ? ` (showing the newest ${requests.length})` : "";
    setText($("flow-text"), parts.length ? `${parts.join(", ")}${more}` : "no requests in progress");
    if (!$("requests").open) return;
    const names = ["request", "stage", "prefill", "decode", "prompt", "tokens", "age", "attempt"];
    const cells = (one) => [h("span", { title: one.request_id }, shortId(one.request_id)), one.stage, one.prefill_worker || "–", one.decode_worker || "–",
      count(one.prompt_tokens), count(one.tokens), seconds(one.age_s), one.attempt || "–"];
    $("requests").lastElementChild.replaceChildren(h("table", {},
      h("thead", {}, h("tr", {}, ...names.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, ...requests.map((one) => h("tr", {}, ...cells(one).map((cell) => h("td", {}, cell)))))));
  }
}

// Assigns workers to at most LANES lanes. The remaining workers share the last lane.
function lanes(workers) {
  const ids = workers.map((one) => one.info.ref.worker_id).sort(), rest = ids.length - LANES;
  const names = rest > 0 ? [...ids.slice(0, LANES - 1), `${rest + 1} others`] : ids;
  const at = new Map(ids.map((id, number) => [id, Math.min(number, names.length - 1)]));
  return { names, of: (id) => at.get(id) };
}

// Shortens a long name to its end, which distinguishes workers.
function fit({ name, w }) {
  const most = Math.floor((w - PAD - (w < 150 ? 6 : 44)) / 7);
  return name.length <= most ? name : `…${name.slice(1 - most)}`;
}

const middle = (box) => box.y + box.h / 2;

function curve(from, to) {
  const [x1, y1, x2, y2] = [from.x + from.w, middle(from), to.x, middle(to)], bend = (x2 - x1) / 2;
  return `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
}

const shift = ([x, y]) => `translate(${x}px, ${y}px)`;

function leave(dot, at, x) {
  if (still()) {
    dot.remove();
    return;
  }
  const frames = [{ transform: shift(at), opacity: 1 }, { transform: shift([x, at[1]]), opacity: 0 }];
  dot.animate(frames, { duration: 500, easing: "ease-in" }).onfinish = () => dot.remove();
}
