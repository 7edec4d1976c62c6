// One decision in full: the prompt, every candidate's score term by term, images, and who holds which block now.
import { by, clock, el, number, percent, plural, set, short } from "./dom.js";

const SHOWN = 50; // candidates
const STRIP = 256; // blocks of the strip

let opened = ""; // the decision that is shown or awaited

export function start() {
  const dialog = by("explanation");
  by("close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // beside it
  });
}

/** Open the dialog; `ask(path)` returns the control API's answer. */
export async function open(id, ask) {
  opened = id;
  const body = by("explanation-body");
  set(by("explanation-title"), `Request ${id}`);
  body.replaceChildren(el("p", { class: "empty" }, "Asking the frontend…"));
  if (!by("explanation").open) by("explanation").showModal();
  const answer = await ask(`/control/decisions/${encodeURIComponent(id)}`);
  if (opened !== id) return; // another one was opened since
  if (answer.ok) body.replaceChildren(...parts(await answer.json()));
  else body.replaceChildren(el("p", { class: "empty" }, `This decision is kept no longer (${answer.status}).`));
}

function parts(trace) {
  const reasons = trace.reasons.length ? ` (${trace.reasons.join(", ")})` : "";
  const prompt =
    trace.predicted === "no"
      ? `${plural(trace.prompt_tokens, "prompt token")}; the prompt was not predicted`
      : `${plural(trace.prompt_tokens, "prompt token")} in ${plural(trace.blocks, "block")} of ${trace.block_size}, ` +
        `of which the worker held ${number(trace.overlap)}` +
        (trace.tier ? ` and, after those, ${number(trace.tier)} in lower tiers` : "");
  return [
    el("p", { class: "lead" }, `${trace.worker}: ${trace.why}`),
    trace.regret
      ? el("p", { class: "note" }, `Given away: ${plural(trace.regret, "block")} more that another worker held, for the load there.`)
      : null,
    el("p", { class: "note" }, `${clock(trace.at)}, policy ${trace.policy}, ${trace.exactness}${reasons}. ${prompt}.`),
    ...attempts(trace),
    ...candidates(trace),
    ...blocks(trace),
    ...images(trace),
    el("h3", {}, "In a terminal"),
    el("p", { class: "note" }, el("code", {}, `mmrouter explain ${trace.request_id} --parity`),
      " compares the prediction with what the engine holds."),
  ].filter((part) => part !== null);
}

function attempts(trace) {
  const said = [
    ...trace.attempts.map((attempt) => `${attempt.worker}: ${attempt.outcome}`),
    ...trace.chain.map((note) => `${note.stage}, ${note.workers.join(", ")}: ${note.outcome}`),
    ...trace.degraded.map((missing) => `served without: ${missing}`),
  ];
  if (said.length < 2 && !trace.chain.length) return [];
  return [el("h3", {}, "Attempts and stages"), el("ul", { class: "note" }, ...said.map((text) => el("li", {}, text)))];
}

function candidates(trace) {
  const shown = trace.candidates.slice(0, SHOWN);
  const terms = Object.keys(shown[0]?.terms ?? {}).filter((term) => trace.candidates.some((one) => one.terms[term]));
  const names = ["Overlap", "In cache", ...terms.map((term) => term[0].toUpperCase() + term.slice(1)), "Cost"];
  const head = el("tr", {}, el("th", { scope: "col" }, "Candidate"));
  head.append(...names.map((name) => el("th", { scope: "col", class: "number" }, name)));
  const lines = shown.map((one) => {
    const values = [one.overlap, one.held, ...terms.map((term) => one.terms[term] ?? 0), one.cost];
    const name = one.scored ? one.worker : `${one.worker} (not verified)`;
    const cells = values.map((value) => el("td", { class: "number" }, String(Math.round(value * 100) / 100)));
    return el("tr", { class: one.id === trace.worker_id ? "chosen" : undefined }, el("td", {}, name), ...cells);
  });
  const of = trace.candidates.length > SHOWN ? `, ${SHOWN} of ${number(trace.candidates.length)}` : "";
  return [
    el("h3", {}, `Candidates, the lowest cost first${of}`),
    el("div", { class: "candidates", tabindex: "0", role: "region", "aria-label": "Candidates" },
      el("table", {}, el("thead", {}, head), el("tbody", {}, ...lines))),
  ];
}

/** Who holds which blocks now: a strip per holder, the chosen worker first. */
function blocks(trace) {
  const holders = trace.holders_now;
  if (!holders.length) return [];
  const step = Math.ceil(holders.length / STRIP);
  const sampled = holders.filter((_, index) => index % step === 0);
  const counts = new Map();
  for (const names of sampled) for (const name of names) counts.set(name, (counts.get(name) ?? 0) + 1);
  const rank = (name) => (name === trace.worker ? Infinity : counts.get(name));
  const best = [...counts.keys()].sort((a, b) => rank(b) - rank(a)).slice(0, 6);
  const made = best.flatMap((name) => [
    el("p", { class: "note" }, `${name}: ${percent(counts.get(name) / sampled.length)}`),
    el("div", { class: "strip", "aria-hidden": "true" },
      ...sampled.map((names) => el("span", { class: names.includes(name) ? "has" : undefined }))),
  ]);
  const none = el("p", { class: "note" }, "No worker holds any of them any more.");
  const more = counts.size > best.length ? `, ${best.length} of ${plural(counts.size, "holder")}` : "";
  const every = step > 1 ? `, every ${step}th` : "";
  return [el("h3", {}, `The prompt's ${plural(holders.length, "block")} and who holds them now${every}${more}`),
    ...(made.length ? made : [none])];
}

function images(trace) {
  if (!trace.images.length) return [];
  const lines = trace.images.map((image) =>
    el("li", {}, `${image.param}: ${image.width} × ${image.height} pixels, ${plural(image.tokens, "token")}`,
      image.offset === null ? "" : ` from token ${number(image.offset)}`,
      image.unresolved ? `, not predicted: ${image.unresolved}` : "", ", ",
      el("span", { class: "id" }, short(image.identity))));
  const { provider, why } = trace.identity;
  return [el("h3", {}, "Images"), el("p", { class: "note" }, `Named by ${provider}: ${why}`),
    el("ul", { class: "note" }, ...lines)];
}
