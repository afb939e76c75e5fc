// Workers with their load and the state of their KV blocks. The blocks of each pool are summed and checked.

import { $, bytes, count, h, mark, plural, setText, sum } from "./dom.js";

const STATES = ["owned", "reserved", "quarantined", "cached", "free"]; // used ones first
const MEANINGS = {
  owned: "hold KV of running requests",
  reserved: "promised to requests whose KV is on its way",
  quarantined: "a failed transfer may still write into them; not usable until that is impossible",
  cached: "KV of earlier prompts, kept for reuse; given to requests when they need room",
  free: "hold nothing",
};
const TRANSPORTS = {
  shm: "shared memory of this host", gloo: "TCP, by torch.distributed", nccl: "between GPUs, by NCCL", grpc: "gRPC streams, encrypted if TLS is on",
  cuda_ipc: "reads the memory of the other GPU process", nixl: "reads remote staging, by NIXL", memory: "within one process",
};
const MOST = 48;
const ROLES = { prefill: 0, decode: 1 };

export class Workers {
  constructor() {
    this.cards = new Map();
    this.ledger = { prefill: new Ledger("Prefill pool", "prefill"), decode: new Ledger("Decode pool", "decode") };
    $("ledger").append(...Object.values(this.ledger).map((one) => one.element));
  }

  show({ status }) {
    const slots = new Map((status.control?.slots ?? []).map((slot) => [slot.worker_id, slot]));
    const order = (one) => [ROLES[one.info.role] ?? 2, one.info.ref.worker_id];
    const workers = status.workers.toSorted((a, b) => (order(a) < order(b) ? -1 : 1));
    for (const role of Object.keys(this.ledger)) {
      this.ledger[role].show(workers.filter((one) => one.info.role === role && one.state === "connected"));
    }
    const shown = workers.length <= MOST ? workers : noteworthy(workers);
    const here = new Set(workers.map((one) => one.info.ref.worker_id));
    const cards = shown.map((one) => this.card(one, slots.get(one.info.ref.worker_id)));
    cards.push(...[...slots.values()].filter((slot) => !here.has(slot.worker_id)).slice(0, MOST).map((slot) => this.place(slot)));
    if (cards.length !== $("workers").childElementCount || cards.some((card, at) => card !== $("workers").children[at])) {
      $("workers").replaceChildren(...cards);
    }
    $("more-workers").hidden = shown.length === workers.length;
    setText($("more-workers"), `and ${count(workers.length - shown.length)} more without warnings`);
    setText($("plan"), plan(status.control));
  }

  place({ worker_id, role, state, note }) {
    const key = `place ${worker_id} ${state} ${note}`;
    if (!this.cards.has(key)) {
      this.cards.set(key, h("article", { class: `worker absent ${role}`, "aria-label": `${role} worker ${worker_id}` },
        h("div", { class: "title" }, h("h3", {}, worker_id), h("span", { class: "role" }, role), h("span", { class: "pill small" }, state)),
        h("p", {}, reason(note) || "not connected yet")));
    }
    return this.cards.get(key);
  }

  card(worker, slot) {
    const { worker_id, incarnation } = worker.info.ref, key = `${worker_id}@${incarnation.epoch}.${incarnation.counter}`;
    let card = this.cards.get(key);
    if (!card) {
      card = new Card(worker);
      if (this.cards.size > 4 * MOST) this.cards.clear();
      this.cards.set(key, card);
    }
    card.show(worker, slot);
    return card.element;
  }
}

// First line of the controller's note on a worker, without the last output of its process.
const reason = (note) => note.split("\n")[0].replace(/:$/, "");

const trouble = (one) => one.state !== "connected" || one.note || one.load.draining;
const noteworthy = (workers) => [...workers.filter(trouble), ...workers.filter((one) => !trouble(one))].slice(0, MOST);

function plan(control) {
  if (!control) return "no controller";
  const { prefill, decode, by } = control.plan;
  return `planned: ${prefill} prefill, ${decode} decode (${by})${control.outlook ? ` · ${control.outlook}` : ""}`;
}

class Card {
  constructor({ info }) {
    this.state = h("span", { class: "pill small" });
    this.does = h("p", {});
    this.did = h("p", {});
    this.bar = new Bar(true);
    this.note = h("p", { class: "warn", hidden: true });
    this.element = h("article", { class: `worker ${info.role}`, "aria-label": `${info.role} worker ${info.ref.worker_id}` },
      h("div", { class: "title" }, h("h3", {}, info.ref.worker_id), h("span", { class: "role" }, info.role), this.state),
      this.does, this.did, this.bar.element, this.bar.legend, this.note);
  }

  show({ info, load, state, dispatched, note }, slot) {
    const draining = load.draining && state === "connected";
    const shown = draining ? "draining" : slot && slot.state !== "ready" ? slot.state : state;
    setText(this.state, shown);
    mark(this.state, { "data-state": shown });
    const moved = Number(load.transfer_bytes) ? `, ${bytes(Number(load.transfer_bytes))} transferred by ${load.transport}` : "";
    mark(this.did, { title: moved ? `${load.transport}: ${TRANSPORTS[load.transport] ?? "transport of KV"}` : "" });
    const did = info.role === "prefill" ? `${count(load.prefill_tokens)} prompt tokens` : `${count(load.decode_tokens)} tokens`;
    setText(this.does, `${plural(dispatched, "request")} of this router · ${count(load.running)} running, ${count(load.waiting)} waiting`);
    setText(this.did, `${did}${moved}`);
    this.bar.show(load.blocks);
    const notes = [note, reason(slot?.note ?? ""), slot?.restarts ? `restarted ${plural(slot.restarts, "time")}` : ""].filter(Boolean);
    this.note.hidden = !notes.length;
    setText(this.note, notes.join("; "));
  }
}

// KV blocks by state, as one bar and as text.
class Bar {
  constructor(brief = false) {
    this.brief = brief; // hides states without blocks
    this.parts = STATES.map((state) => h("span", { class: `part ${state}` }));
    this.texts = STATES.map((state) => h("span", { class: `key ${state}`, title: `${state}: ${MEANINGS[state]}` }));
    this.element = h("div", { class: "bar", "aria-hidden": "true" }, ...this.parts);
    this.legend = h("p", { class: "legend" }, ...this.texts);
  }

  show(blocks) {
    const total = Number(blocks.total) || 1;
    STATES.forEach((state, at) => {
      this.parts[at].style.flexGrow = Number(blocks[state]) / total;
      setText(this.texts[at], `${count(blocks[state])} ${state}`);
      this.texts[at].hidden = this.brief && !Number(blocks[state]);
    });
  }
}

// KV blocks of a pool. The states must add up to the total.
class Ledger {
  constructor(title, role) {
    this.bar = new Bar();
    this.check = h("p", {});
    this.element = h("div", { class: `pool ${role}` }, h("h3", {}, title), this.check, this.bar.element, this.bar.legend);
  }

  show(workers) {
    const of = (state) => sum(workers, (one) => Number(one.load.blocks[state]));
    const blocks = Object.fromEntries([...STATES, "total"].map((state) => [state, of(state)]));
    const found = sum(STATES, (state) => blocks[state]), right = found === blocks.total;
    this.bar.show(blocks);
    const used = blocks.total - blocks.cached - blocks.free, share = blocks.total ? (100 * used) / blocks.total : 0;
    const what = `${plural(workers.length, "worker")}, ${count(used)} of ${plural(blocks.total, "KV block")} used (${share.toFixed(0)} %)`;
    setText(this.check, right ? `${what}, all accounted for` : `${what}, but ${count(found)} accounted for`);
    mark(this.check, { class: right ? "right" : "warn" });
  }
}
