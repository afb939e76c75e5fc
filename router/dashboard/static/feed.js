// The stream of views from the router. It uses `fetch`, because an EventSource cannot send a token. Paths are relative,
// because the page may be served below a path prefix.

const KEY = "baton-token"; // in the session storage, which ends with the tab
const PAUSES_S = [1, 2, 4, 8, 15];
const SILENT_S = 5; // added to the interval; a frozen router sends no data and keeps its connections open
let kept = ""; // the token, if storage is disabled; it ends with the page

export const token = {
  get: () => {
    try {
      return sessionStorage.getItem(KEY) ?? kept;
    } catch {
      return kept;
    }
  },
  set: (value) => {
    kept = value;
    try {
      if (value) sessionStorage.setItem(KEY, value);
      else sessionStorage.removeItem(KEY);
    } catch { /* `kept` has it */ }
  },
  possible: (value) => /^[ -~]*$/.test(value), // characters that a header can carry and a router accepts
};

export function headers(more = {}) {
  return token.get() ? { ...more, authorization: `Bearer ${token.get()}` } : more;
}

// Yields the data of each server-sent event of a response.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
        const lines = text.slice(0, end).split("\n").filter((line) => line.startsWith("data: "));
        text = text.slice(end + 2);
        if (lines.length) yield lines.map((line) => line.slice(6)).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `status ${response.status}`;
  }
}

// Calls `onView` with each view and `onState` with each state of the connection, {state, text}. It never returns.
export async function follow(onView, onState, interval) {
  let failures = 0;
  for (;;) {
    const state = await once(onView, onState, interval).catch((error) => ({ state: "lost", text: error.message }));
    if (state.views) failures = 0;
    if (state.state === "sign-in") {
      await onState(state);
      continue;
    }
    const pause = state.state === "alone" ? 60 : PAUSES_S[Math.min(failures++, PAUSES_S.length - 1)];
    onState({ ...state, pause });
    await new Promise((resolve) => setTimeout(resolve, pause * 1000));
  }
}

// Runs one connection until it ends or is silent for too long.
async function once(onView, onState, interval) {
  const silence = new AbortController();
  let timer;
  const received = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(new Error("no data received")), (interval + SILENT_S) * 1000);
  };
  received();
  try {
    return await watch(onView, onState, interval, silence.signal, received);
  } finally {
    clearTimeout(timer);
  }
}

async function watch(onView, onState, interval, signal, received) {
  const response = await fetch(`live?interval_s=${interval}`, { headers: headers(), cache: "no-store", signal });
  if (response.status === 401 || response.status === 403) {
    const text = await problem(response);
    const foreign = !response.headers.get("www-authenticate") && !token.get();
    return foreign ? { state: "lost", text } : { state: "sign-in", text: token.get() ? text : "" };
  }
  if (response.status === 404) return { state: "alone", text: await problem(response) };
  if (!response.ok) return { state: "lost", text: await problem(response) };
  let views = 0;
  try {
    for await (const data of events(response)) {
      received();
      if (!views++) onState({ state: "live" });
      onView(JSON.parse(data));
    }
  } catch {
    return { state: "lost", text: signal.reason?.message ?? "the connection failed", views };
  }
  return { state: "lost", text: "the router closed the connection", views };
}
