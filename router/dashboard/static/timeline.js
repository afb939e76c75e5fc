// Stages of one request as bars, from the router's trace, or else from the times that this page measured.

import { h, setText, seconds } from "./dom.js";
import { headers } from "./feed.js";

const TRIES = 4; // workers report their spans shortly after the end of a request

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
    const source = spans.length ? "from the router's trace" : "measured by this page, because the router has no trace of the request";
    this.element.replaceChildren(h("h3", {}, `Timeline, ${seconds(total)} total`), h("p", { class: "muted" }, source), ...parts, table(found));
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

// Bars for the time to the first token and the remaining time, with the stages from the views.
function ofViews({ first, done, stages }) {
  const bars = [{ lane: "this page", name: "first token", role: "prefill", start: 0, lasts: first, text: "" },
    { lane: "this page", name: "remaining tokens", role: "decode", start: first, lasts: done - first, text: "" }];
  stages.forEach(([name, start], at) => {
    const end = stages[at + 1]?.[1] ?? done;
    bars.push({ lane: "router, sampled", name, role: name, start, lasts: end - start, text: "" });
  });
  return bars;
}

function row(lane, bars, total) {
  const track = h("div", { class: "track", "aria-hidden": "true" }, ...bars.map((one) => {
    const bar = h("span", { class: `span ${one.role} ${one.name}`, title: `${one.name}: ${seconds(one.lasts)} ${one.text}`.trim() });
    bar.style.left = `${(100 * one.start) / total}%`;
    bar.style.width = `${(100 * one.lasts) / total}%`;
    if (one.lasts / total > 0.12) setText(bar, one.name);
    return bar;
  }));
  return h("div", { class: "lane" }, h("span", { class: "muted" }, lane), track);
}

function table(bars) {
  const cells = (one) => [one.lane, one.name, seconds(one.start), seconds(one.lasts), one.text];
  return h("details", {}, h("summary", {}, "Show as table"), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Timeline" },
    h("table", {}, h("thead", {}, h("tr", {}, ...["process", "stage", "start", "duration", "attributes"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, ...bars.map((one) => h("tr", {}, ...cells(one).map((text) => h("td", {}, text))))))));
}
