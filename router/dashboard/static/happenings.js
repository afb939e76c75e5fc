// Events, newest first: workers that joined or left, failed or recovered requests, decisions of the controller.

import { $, h, shortId } from "./dom.js";

const MOST = 100;

export class Happenings {
  constructor() {
    this.none = h("li", { class: "muted" }, "no events yet");
    $("happenings").append(this.none);
    this.known = new Set(); // after a reconnect the router sends the latest events again
    this.router = "";
  }

  show({ happenings, status }) {
    if (this.router && this.router !== status.router_id) {
      this.add({ time_s: Date.now() / 1000, kind: "router", text: `connected to another router: ${status.router_id}` });
    }
    this.router = status.router_id;
    for (const one of happenings) {
      const key = [one.time_s, one.kind, one.text, one.worker_id].join(" ");
      if (!this.known.has(key)) this.add(one);
      this.known.add(key);
    }
    if (this.known.size > 10 * MOST) this.known = new Set([...this.known].slice(-5 * MOST)) // a router sends at most 300 again;
  }

  add({ time_s, kind, text, worker_id, request_id }) {
    this.none.remove();
    if (kind === "refused") [text, request_id] = this.folded(text, request_id);
    const ids = [worker_id, shortId(request_id ?? "")].filter(Boolean).join(" · ");
    const older = [...$("happenings").children].find((each) => Number(each.dataset.at) <= time_s) ?? null;
    $("happenings").insertBefore(h("li", { "data-kind": kind, "data-at": time_s, "data-text": text, title: request_id ? `request ${request_id}` : null },
      h("time", { datetime: new Date(time_s * 1000).toISOString() }, new Date(time_s * 1000).toLocaleTimeString("en-GB")),
      h("span", { class: "kind" }, kind), h("span", { class: "text" }, text, ids ? h("small", { class: "muted" }, ` ${ids}`) : "")), older);
    while ($("happenings").childElementCount > MOST) $("happenings").lastElementChild.remove();
  }

  // Rejections with the same reason share one line, at the time of the last one. Numbers may differ, such as waits.
  folded(text, request_id) {
    const reason = (one) => one.replace(/ \(\d+ times\)$/, "").replace(/\d+(\.\d+)?/g, "#");
    const times = (one) => Number(one.match(/ \((\d+) times\)$/)?.[1] ?? 1);
    const same = [...$("happenings").children].find((each) => each.dataset.kind === "refused" && reason(each.dataset.text) === reason(text));
    if (!same) return [text, request_id];
    same.remove();
    return [`${text.replace(/ \(\d+ times\)$/, "")} (${times(text) + times(same.dataset.text)} times)`, ""];
  }
}
