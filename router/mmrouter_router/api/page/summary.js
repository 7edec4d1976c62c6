// The figures at the top, exactness and its reasons, and workers that take no requests or are not proved.
import { by, el, fill, number, percent, plural, set, show, sync } from "./dom.js";
import { inFlight } from "./workers.js";

const MEANING = {
  exact: "Every complete block of the prompt is predicted, images included.",
  bounded: "The whole prompt is predicted, but the engine may hit more than its events tell.",
  partial: "Predicted up to the first image that is not; nothing after it matches falsely.",
  affinity: "Not predicted: a hash of the conversation's beginning keeps its requests on one engine.",
};
const ORDER = Object.keys(MEANING);

export function update(part) {
  set(by("deployment"), part.deployment);
  document.title = `${part.deployment} · mmrouter`;
  set(by("version"), part.version);
  const others = part.frontends > 1 ? ` · frontend ${part.frontend}, 1 of ${part.frontends}` : "";
  set(by("about"), `${part.model} · ${part.engine} · policy ${part.policy}${others}`);
  hits(part);
  against(part.round_robin);
  exact(part);
  workers(part);
  unproved(part);
}

function hits({ counts }) {
  const found = counts.prompt_blocks ? Math.min(1, counts.hit_blocks / counts.prompt_blocks) : null;
  set(by("hit-value"), found === null ? "–" : percent(found));
  set(by("hit-note"), found === null
    ? "No predicted prompt yet."
    : `${number(counts.hit_blocks)} of ${number(counts.prompt_blocks)} blocks since this frontend started`);
}

function against({ decisions, blocks, hits: ours, found }) {
  show(by("against-bars"), blocks > 0);
  if (!blocks) {
    set(by("against-value"), "–");
    set(by("against-note"), "No prompt to compare yet.");
    return;
  }
  const [mine, theirs] = [ours / blocks, found / blocks];
  const points = (mine - theirs) * 100;
  const sign = points < 0 ? "−" : "+";
  by("against-value").replaceChildren(`${sign}${Math.abs(points).toFixed(1)} `, el("small", {}, "points"));
  fill(by("bar-ours"), mine);
  fill(by("bar-theirs"), theirs);
  set(by("ours"), percent(mine));
  set(by("theirs"), percent(theirs));
  set(by("against-note"), `The same ${plural(decisions, "request")}, sent in turn to caches that never evict`);
}

function exact({ counts, exactness, possible }) {
  const share = counts.decisions ? Math.min(1, counts.exact_decisions / counts.decisions) : null;
  set(by("exact-value"), share === null ? "–" : percent(share));
  set(by("exact-note"), share === null
    ? (possible ? "No predicted prompt yet." : "This model's prompts cannot be predicted.")
    : `${number(counts.exact_decisions)} of ${number(counts.decisions)} predicted prompts since this frontend started`);
  const all = exactness.reduce((sum, [, , count]) => sum + count, 0);
  const inexact = exactness.filter(([kind, , count]) => kind !== "exact" && count);
  show(by("exactness-empty"), all === 0);
  const summed = inexact.reduce((sum, [, , count]) => sum + count, 0);
  set(by("exactness-note"), all === 0 ? "" : inexact.length
    ? `${number(summed)} of ${plural(all, "decision")} not exact, by cause; a request may have several`
    : `All ${plural(all, "decision")} exact: nothing was left out of a prediction`);
  const rows = exactness.filter(([, , count]) => count)
    .sort((a, b) => ORDER.indexOf(a[0]) - ORDER.indexOf(b[0]) || b[2] - a[2]);
  sync(by("causes"), rows, ([kind, cause]) => `${kind} ${cause}`, cause, (node, [, , count]) => set(node.lastChild, number(count)));
}

function cause([kind, why]) {
  const label = el("span", { class: kind === "exact" ? "label" : "label doubt" }, why ? `${kind}: ${why}` : kind);
  return el("li", {}, label, el("span", { class: "sub" }, MEANING[kind] ?? ""), el("span", { class: "number" }));
}

function workers({ standings, index_keys: keys, ready }) {
  const total = Object.values(standings).reduce((sum, count) => sum + count, 0);
  const verified = standings.verified ?? 0;
  by("workers-value").replaceChildren(number(verified), el("small", {}, ` of ${number(total)}`));
  const flying = plural(inFlight(), "request");
  set(by("workers-note"), `${flying} in flight, ${number(keys)} distinct blocks known${ready ? "" : "; not ready yet"}`);
}

function unproved({ standings, degraded, deployment }) {
  const seen = ["draining", "waiting", "pending", "unsynced", "degraded", "refused"]
    .filter((state) => standings[state])
    .map((state) => `${number(standings[state])} ${state}`);
  const missing = degraded.length ? ` Requests are served without: ${degraded.join(", ")}.` : "";
  set(by("rollout-text"), (seen.length
    ? `Of the workers that this frontend sees, ${seen.join(", ")}.`
    : "No worker that this frontend sees is draining, waiting for its readiness gates, or unproved.") + missing);
  set(by("status-command"), `mmrouter status ${deployment}`);
  set(by("describe-command"), `kubectl describe mmrd ${deployment}`);
}
