// Connects to the control API that served this page, and hands each part of its stream to its section.
import { by, set, show } from "./dom.js";
import * as conversations from "./conversations.js";
import * as decisions from "./decisions.js";
import * as explanation from "./explanation.js";
import * as rollout from "./rollout.js";
import * as summary from "./summary.js";
import * as workers from "./workers.js";

const KEPT = "mmrouter-control-token"; // in this tab only
const THEME = "mmrouter-theme";
const RETRY_MS = 1000;
const SECTIONS = { summary, rollout, workers, decisions, map: conversations };

let token = "";
let stream = null; // AbortController of the connection

/** Take the token from the address, where no server sees it, and remove it from there and from the history. */
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(KEPT, given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(KEPT) ?? "";
}

const ask = (path, signal) => fetch(path, { headers: { authorization: `Bearer ${token}` }, signal, cache: "no-store" });

function connection(state, text) {
  by("connection").dataset.state = state;
  set(by("connection"), text);
}

function signIn(why) {
  sessionStorage.removeItem(KEPT);
  connection("waiting", "not connected");
  show(by("live"), false);
  show(by("sign-in"), true);
  if (why) set(by("sign-in-why"), why);
  by("token").focus();
}

async function connect() {
  stream?.abort();
  const mine = (stream = new AbortController());
  while (!mine.signal.aborted) {
    const answer = await unlessBroken(ask("/control/live", mine.signal));
    if (answer?.status === 401) {
      signIn("The frontend rejects this token: it may belong to another deployment or have been replaced.");
      return;
    }
    if (answer?.ok) await follow(answer.body.getReader());
    if (mine.signal.aborted) return;
    const why = answer?.status === 503 ? (await unlessBroken(answer.json()))?.detail : "connection lost";
    connection("lost", `${why}, trying again`);
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

/** Return a promise's value, or nothing where the connection broke or was ended. */
const unlessBroken = (promise) => promise.catch(() => undefined);

/** Read server-sent events until the connection ends; each is one part. EventSource cannot send the token. */
async function follow(reader) {
  const decoder = new TextDecoder();
  let text = "";
  workers.clear();
  decisions.clear();
  for (;;) {
    const read = await unlessBroken(reader.read());
    if (!read || read.done) return;
    text += decoder.decode(read.value, { stream: true });
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      for (const [name, part] of Object.entries(JSON.parse(event.slice("data: ".length)))) SECTIONS[name].update(part);
    }
    show(by("sign-in"), false);
    show(by("live"), true);
    connection("live", "live");
  }
}

function theme() {
  const apply = (value) => {
    if (value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = value;
  };
  const chosen = localStorage.getItem(THEME) ?? "auto";
  apply(chosen);
  for (const input of document.querySelectorAll("input[name=theme]")) {
    input.checked = input.value === chosen;
    input.addEventListener("change", () => {
      localStorage.setItem(THEME, input.value);
      apply(input.value);
    });
  }
}

theme();
const open = (id) => explanation.open(id, ask);
workers.start();
decisions.start(open);
conversations.start(open);
explanation.start();
by("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = by("token").value.trim();
  sessionStorage.setItem(KEPT, token);
  by("token").value = "";
  connect();
});
// A page that is not looked at costs its frontend nothing.
document.addEventListener("visibilitychange", () => {
  if (!token) return;
  if (document.hidden) stream?.abort();
  else connect();
});
addEventListener("hashchange", () => {
  if (location.hash) location.reload(); // an address with a token was opened in this tab
});
token = takeToken();
if (token) connect();
else signIn("");
