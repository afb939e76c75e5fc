// The row of key figures at the top of the page.

import { $, count, h, rate, setText, seconds } from "./dom.js";

const NONE = "–";
const spread = (quantiles) => (Number(quantiles.count) ? seconds(quantiles.p50) : NONE);
const tail = (quantiles) => (Number(quantiles.count) ? `p99 ${seconds(quantiles.p99)}` : "no samples");

const FIGURES = [ // title, window, value, note
  ["Running", "now", ({ status }) => count(status.running), ({ status }) => `${count(status.queued)} queued`],
  ["Time to first token", "last minute", ({ window }) => spread(window.ttft), ({ window }) => tail(window.ttft)],
  ["Inter-token latency", "last minute", ({ window }) => spread(window.itl), ({ window }) => tail(window.itl)],
  ["Tokens per second", "last 5 s", ({ lately }) => rate(lately.tokens_per_s),
    ({ lately }) => `${rate(lately.prompt_tokens_per_s)} prompt tokens`],
  ["Requests per second", "last minute", ({ window }) => rate(window.requests_per_s),
    ({ status }) => `${count(status.finished)} finished in all`],
  ["SLO attainment", "last minute", ({ window }) => (window.slo_share < 0 ? NONE : `${(100 * window.slo_share).toFixed(0)} %`),
    ({ window }) => trouble(window)],
];

function trouble({ failed, refused, recoveries }) {
  const parts = [[failed, "failed"], [refused, "rejected"], [recoveries, "recovered"]];
  const some = parts.filter(([number]) => Number(number)).map(([number, what]) => `${count(number)} ${what}`);
  return some.join(", ") || "no failures";
}

export class Figures {
  constructor() {
    this.cells = FIGURES.map(([title, window]) => {
      const cell = { value: h("dd", { class: "value" }, NONE), note: h("dd", { class: "muted" }, " ") };
      $("figures").append(h("dl", { class: "panel figure" },
        h("dt", { class: "muted" }, title, h("small", {}, window)), cell.value, cell.note));
      return cell;
    });
  }

  show(view) {
    FIGURES.forEach(([, , value, note], at) => {
      setText(this.cells[at].value, value(view));
      setText(this.cells[at].note, note(view));
    });
  }
}
