// The page: each view of the router goes to each part of it. Nothing is asked of any other host.

import { $, lasting, say } from "./dom.js";
import { follow, token } from "./feed.js";
import { Figures } from "./figures.js";
import { Charts } from "./charts.js";
import { Flow } from "./flow.js";
import { Workers } from "./workers.js";
import { Happenings } from "./happenings.js";
import { Prompt } from "./prompt.js";

const INTERVAL_S = 0.5;
const parts = [new Figures(), new Charts(), new Flow(), new Workers(), new Happenings(), new Prompt()];

function seen(view) {
  const { status } = view;
  say($("name"), status.name || "Baton");
  say($("about"), [status.model, status.router_id, status.version, `up ${lasting(status.uptime_s)}`].filter(Boolean).join(" · "));
  document.title = `${status.name || "Baton"}: ${status.running} running`;
  for (const part of parts) part.show(view);
}

const SAID = { live: "live", alone: "no router here", lost: "router gone", "sign-in": "token needed" };

// Says what became of the connection; for "sign-in", waits until there is a token to try.
function told({ state, text, pause }) {
  document.body.dataset.state = state;
  const again = state === "lost" ? `; asking again in ${pause} s` : "";
  say($("status"), `${SAID[state]}${text && state !== "sign-in" ? `: ${text}` : ""}${again}`);
  $("sign-in").hidden = state !== "sign-in";
  return state === "sign-in" ? signedIn(text) : undefined;
}

function signedIn(why) {
  if (why) because(why);
  $("token").focus();
  return new Promise((resolve) => {
    const submitted = (event) => {
      event.preventDefault();
      const given = $("token").value.trim();
      $("token").value = "";
      if (!token.possible(given)) {
        because("a token has letters, digits and signs of ASCII only");
        return;
      }
      $("sign-in").removeEventListener("submit", submitted);
      token.set(given);
      resolve();
    };
    $("sign-in").addEventListener("submit", submitted);
  });
}

const because = (why) => say($("sign-in-why"), `${why[0].toUpperCase()}${why.slice(1)}.`);

follow(seen, told, INTERVAL_S);
