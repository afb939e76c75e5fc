// Sends a prompt and shows the streamed answer with a timeline of its stages.

import { $, plural, setText, seconds } from "./dom.js";
import { events, headers, problem } from "./feed.js";
import { Timeline } from "./timeline.js";

export class Prompt {
  constructor() {
    this.timeline = new Timeline($("timeline"));
    this.running = null;
    this.stages = []; // stages of the running request, as the views report them: [stage, time of the view]
    this.id = "";
    this.model = undefined; // the served model
    $("prompt").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send().catch((error) => this.ended(error.name === "AbortError" ? "stopped" : error.message));
    });
    $("prompt-stop").addEventListener("click", () => this.running?.abort());
    $("prompt-text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("prompt").requestSubmit();
    });
  }

  // Records the stage of the running request from each view, in case the router keeps no trace of it.
  show({ requests, status }) {
    this.model = status.model;
    const mine = this.running && this.id && requests.find((one) => one.request_id === this.id);
    if (mine && mine.stage !== this.stages.at(-1)?.[0]) this.stages.push([mine.stage, performance.now()]);
  }

  async send() {
    if (this.running) return;
    this.running = new AbortController();
    Object.assign(this, { id: "", stages: [] });
    this.busy(true);
    setText($("answer"), "");
    setText($("answer-note"), "sent");
    this.timeline.clear();
    const sent = performance.now();
    const response = await fetch(this.path(), { method: "POST", signal: this.running.signal, body: JSON.stringify(this.body()),
      headers: headers({ "content-type": "application/json" }) });
    if (!response.ok) {
      this.ended(`rejected: ${await problem(response)}`);
      return;
    }
    this.id = response.headers.get("x-request-id") ?? "";
    const { first, tokens, failed } = await this.read(response);
    const done = performance.now(), at = (time) => (time - sent) / 1000;
    const note = failed ? `failed: ${failed}` : `${plural(tokens, "token")} in ${seconds(at(done))}, first token after ${seconds(at(first ?? done))}`;
    this.ended(note);
    await this.timeline.draw(this.id, { first: at(first ?? done), done: at(done), stages: this.stages.map(([stage, time]) => [stage, at(time)]) });
  }

  path() {
    return $("prompt-as").value === "chat" ? "v1/chat/completions" : "v1/completions";
  }

  body() {
    const text = $("prompt-text").value;
    const asked = $("prompt-as").value === "chat" ? { messages: [{ role: "user", content: text }] } : { prompt: text };
    return { ...asked, model: this.model, max_tokens: Number($("prompt-tokens").value),
      temperature: Number($("prompt-temperature").value), stream: true, stream_options: { include_usage: true } };
  }

  async read(response) {
    let first = null, tokens = 0, failed = "";
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const { choices, usage, error } = JSON.parse(data);
      failed = error?.message ?? failed;
      tokens = usage?.completion_tokens ?? tokens;
      const [{ text: plain, delta } = {}] = choices ?? [];
      const text = plain ?? delta?.reasoning_content ?? delta?.content ?? "";
      if (!text) continue;
      first ??= performance.now();
      $("answer").append(text);
    }
    return { first, tokens, failed };
  }

  busy(now) {
    $("answer").hidden = false;
    mark($("answer"), now);
    $("prompt-send").disabled = now;
    $("prompt-stop").disabled = !now;
  }

  ended(note) {
    setText($("answer-note"), note);
    this.running = null;
    this.busy(false);
    if (document.activeElement === document.body) $("prompt-send").focus(); // the disabled Stop button lost the focus
  }
}

const mark = (element, busy) => element.setAttribute("aria-busy", String(busy));
