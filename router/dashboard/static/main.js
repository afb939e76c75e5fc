// Entry of the page: passes each view of the router to all parts. The page sends requests to this host only.

import { $, duration, setText } from "./dom.js";
import { follow, token } from "./feed.js";
import { Figures } from "./figures.js";
import { Charts } from "./charts.js";
import { Flow } from "./flow.js";
import { Workers } from "./workers.js";
import { Happenings } from "./happenings.js";
import { Prompt } from "./prompt.js";

const INTERVAL_S = 0.5;
const parts = [new Figures(), new Charts(), new Flow(), new Workers(), new Happenings(), new Prompt()];

function showView(view) {
  const { status } = view;
  setText($("name"), status.name || "Baton");
  setText($("about"), [status.model, status.router_id, status.version, `up ${duration(status.uptime_s)}`].filter(Boolean).join(" · "));
  document.title = `${status.name || "Baton"}: ${status.running} running`;
  for (const part of parts) part.show(view);
}

const STATES = { live: "live", alone: "no live data", lost: "disconnected", "sign-in": "token required" };

// Shows the state of the connection. For "sign-in" it returns a promise that resolves when a token was entered.
function showState({ state, text, pause }) {
  document.body.dataset.state = state;
  const again = state === "lost" ? `; reconnecting in ${pause} s` : "";
  setText($("status"), `${STATES[state]}${text && state !== "sign-in" ? `: ${text}` : ""}${again}`);
  $("sign-in").hidden = state !== "sign-in";
  return state === "sign-in" ? signedIn(text) : undefined;
}

function signedIn(why) {
  if (why) showReason(why);
  $("token").focus();
  return new Promise((resolve) => {
    const submitted = (event) => {
      event.preventDefault();
      const given = $("token").value.trim();
      $("token").value = "";
      if (!token.possible(given)) {
        showReason("a token must have printable ASCII characters only");
        return;
      }
      $("sign-in").removeEventListener("submit", submitted);
      token.set(given);
      resolve();
    };
    $("sign-in").addEventListener("submit", submitted);
  });
}

const showReason = (why) => setText($("sign-in-why"), `${why[0].toUpperCase()}${why.slice(1)}.`);

follow(showView, showState, INTERVAL_S);
