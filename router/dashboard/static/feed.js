// The stream of views from the router. `fetch`, since an EventSource cannot send a token; paths are relative, since
// the page may lie behind a prefix.

const KEY = "baton-token"; // in the session storage: it goes with the tab
const PAUSES_S = [1, 2, 4, 8, 15];
const SILENT_S = 5; // beyond the interval: a router that is frozen says nothing, and breaks no connection
let kept = ""; // the token, where storage is switched off: it goes with the page

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
    } catch { /* then it is kept above */ }
  },
  possible: (value) => /^[ -~]*$/.test(value), // what a header can carry, and what a router takes
};

export function headers(more = {}) {
  return token.get() ? { ...more, authorization: `Bearer ${token.get()}` } : more;
}

// The data of each event of a response that is a stream of them.
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

// Calls `seen` with each view and `told` with what becomes of the connection, for ever: {state, text}.
export async function follow(seen, told, interval) {
  let failures = 0;
  for (;;) {
    const state = await once(seen, told, interval).catch((error) => ({ state: "lost", text: error.message }));
    if (state.views) failures = 0;
    if (state.state === "sign-in") {
      await told(state);
      continue;
    }
    const pause = state.state === "alone" ? 60 : PAUSES_S[Math.min(failures++, PAUSES_S.length - 1)];
    told({ ...state, pause });
    await new Promise((resolve) => setTimeout(resolve, pause * 1000));
  }
}

// Until the connection ends, or nothing was heard on it for too long.
async function once(seen, told, interval) {
  const silence = new AbortController();
  let timer;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(new Error("it says nothing")), (interval + SILENT_S) * 1000);
  };
  heard();
  try {
    return await watch(seen, told, interval, silence.signal, heard);
  } finally {
    clearTimeout(timer);
  }
}

async function watch(seen, told, interval, signal, heard) {
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
      heard();
      if (!views++) told({ state: "live" });
      seen(JSON.parse(data));
    }
  } catch {
    return { state: "lost", text: signal.reason?.message ?? "the connection broke", views };
  }
  return { state: "lost", text: "the router ended it", views };
}
