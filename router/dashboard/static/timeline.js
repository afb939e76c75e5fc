// Where the time of one request went, as bars: from the router's trace of it, or, without one, from what was seen here.

import { h, say, seconds } from "./dom.js";
import { headers } from "./feed.js";

const TRIES = 4; // what workers say of a request may come a little after its end

export class Timeline {
  constructor(element) {
    this.element = element;
  }

  clear() {
    this.element.hidden = true;
    this.element.replaceChildren();
  }

  async draw(id, seen) {
    const spans = id ? await trace(id) : [];
    const found = spans.length ? spans.map(ofTrace(spans)) : ofViews(seen);
    const total = Math.max(...found.map((one) => one.start + one.lasts), 1e-6);
    const rows = Map.groupBy(found, (one) => one.lane);
    const parts = [...rows].map(([lane, bars]) => row(lane, bars, total));
    const source = spans.length ? "from the router's trace" : "as seen from here: the router keeps no trace of it";
    this.element.replaceChildren(h("h3", {}, `Timeline, ${seconds(total)} in all`), h("p", { class: "muted" }, source), ...parts, table(found));
    this.element.hidden = false;
  }
}

async function trace(id) {
  for (let tries = 0; tries < TRIES; tries++) {
    const response = await fetch(`live/trace/${encodeURIComponent(id)}`, { headers: headers() }).catch(() => null);
    if (!response?.ok) return [];
    const found = await response.json();
    if (found.outcome !== "running" && new Set(found.spans.map((span) => span.role)).size > 1) return found.spans;
    if (tries === TRIES - 1) return found.spans;
    await new Promise((resolve) => setTimeout(resolve, 150));
  }
  return [];
}

const ofTrace = (spans) => {
  const begun = Math.min(...spans.map((span) => span.start_s));
  return (span) => ({
    lane: span.role === "router" ? "router" : span.process, name: span.name, role: span.role,
    start: span.start_s - begun, lasts: span.duration_s,
    text: Object.entries(span.attributes ?? {}).map(([name, value]) => `${name} ${value}`).join(", "),
  });
};

// Until the first token, and after it; with the stages that views have shown between.
function ofViews({ first, done, stages }) {
  const bars = [{ lane: "here", name: "first token", role: "prefill", start: 0, lasts: first, text: "" },
    { lane: "here", name: "the others", role: "decode", start: first, lasts: done - first, text: "" }];
  stages.forEach(([name, start], at) => {
    const end = stages[at + 1]?.[1] ?? done;
    bars.push({ lane: "router, as far as shown", name, role: name, start, lasts: end - start, text: "" });
  });
  return bars;
}

function row(lane, bars, total) {
  const track = h("div", { class: "track", "aria-hidden": "true" }, ...bars.map((one) => {
    const bar = h("span", { class: `span ${one.role} ${one.name}`, title: `${one.name}: ${seconds(one.lasts)} ${one.text}`.trim() });
    bar.style.left = `${(100 * one.start) / total}%`;
    bar.style.width = `${(100 * one.lasts) / total}%`;
    if (one.lasts / total > 0.12) say(bar, one.name);
    return bar;
  }));
  return h("div", { class: "lane" }, h("span", { class: "muted" }, lane), track);
}

function table(bars) {
  const cells = (one) => [one.lane, one.name, seconds(one.start), seconds(one.lasts), one.text];
  return h("details", {}, h("summary", {}, "As a table"), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Timeline" },
    h("table", {}, h("thead", {}, h("tr", {}, ...["where", "stage", "from", "lasts", ""].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, ...bars.map((one) => h("tr", {}, ...cells(one).map((text) => h("td", {}, text))))))));
}
