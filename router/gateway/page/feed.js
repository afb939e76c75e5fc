// The stream of views from the router. `fetch`, since an EventSource cannot send a token; paths are relative, since
// the page may lie behind a prefix.

const KEY = "baton-token"; // in the session storage: it goes with the tab
const PAUSES_S = [1, 2, 4, 8, 15];

export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
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

async function once(seen, told, interval) {
  const response = await fetch(`live?interval_s=${interval}`, { headers: headers(), cache: "no-store" });
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
      if (!views++) told({ state: "live" });
      seen(JSON.parse(data));
    }
  } catch (error) {
    return { state: "lost", text: "the connection broke", views };
  }
  return { state: "lost", text: "the router ended it", views };
}
