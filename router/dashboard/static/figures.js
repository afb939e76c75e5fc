// What a reader wants to know first, in a row of figures.

import { $, count, h, rate, say, seconds } from "./dom.js";

const NONE = "–";
const spread = (quantiles) => (Number(quantiles.count) ? seconds(quantiles.p50) : NONE);
const tail = (quantiles) => (Number(quantiles.count) ? `p99 ${seconds(quantiles.p99)}` : "none lately");

const FIGURES = [
  ["Running", ({ status }) => count(status.running), ({ status }) => `${count(status.queued)} queued`],
  ["First token", ({ window }) => spread(window.ttft), ({ window }) => tail(window.ttft)],
  ["Between tokens", ({ window }) => spread(window.itl), ({ window }) => tail(window.itl)],
  ["Tokens per second", ({ lately }) => rate(lately.tokens_per_s),
    ({ lately }) => `${rate(lately.prompt_tokens_per_s)} of prompts`],
  ["Requests per second", ({ window }) => rate(window.requests_per_s),
    ({ status }) => `${count(status.finished)} finished`],
  ["Kept to the SLO", ({ window }) => (window.slo_share < 0 ? NONE : `${(100 * window.slo_share).toFixed(0)} %`),
    ({ window }) => trouble(window)],
];

function trouble({ failed, refused, recoveries }) {
  const parts = [[failed, "failed"], [refused, "refused"], [recoveries, "recovered"]];
  const some = parts.filter(([number]) => Number(number)).map(([number, what]) => `${count(number)} ${what}`);
  return some.join(", ") || "no failure";
}

export class Figures {
  constructor() {
    this.cells = FIGURES.map(([title]) => {
      const cell = { value: h("dd", { class: "value" }, NONE), note: h("dd", { class: "muted" }, " ") };
      $("figures").append(h("dl", { class: "panel figure" }, h("dt", { class: "muted" }, title), cell.value, cell.note));
      return cell;
    });
  }

  show(view) {
    FIGURES.forEach(([, value, note], at) => {
      say(this.cells[at].value, value(view));
      say(this.cells[at].note, note(view));
    });
  }
}
