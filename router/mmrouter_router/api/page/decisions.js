// The list of decisions as they happen, the newest first.
import { bar, by, clock, el, fill, number, plural, set, show, short, sync } from "./dom.js";

const LIST_ROWS = 40;

let rows = []; // the newest first
let seen = 0;
let waiting = 0; // that came while the list was paused
let paused = false;
let explain = () => {};

/** Take the decisions since the last part; one that comes again has moved to another engine. */
export function update(part) {
  const came = new Set(part.rows.map((row) => row.request_id));
  const others = rows.filter((row) => !came.has(row.request_id));
  const fresh = part.rows.length - (rows.length - others.length) + part.left_out;
  seen += fresh;
  if (paused) waiting += fresh;
  rows = [...part.rows, ...others].slice(0, LIST_ROWS);
  draw();
}

function draw() {
  show(by("decisions-empty"), seen === 0);
  show(by("decisions-table"), seen > 0);
  set(by("pause"), paused ? `Resume (${number(waiting)} more)` : "Pause");
  if (paused) return;
  const more = seen > rows.length ? `, the newest of ${number(seen)}` : "";
  set(by("decisions-note"), seen ? `${number(rows.length)} shown${more}. Open one to see why.` : "");
  sync(by("decisions-table").tBodies[0], rows, (row) => row.request_id, make, refresh);
}

function make(row) {
  const open = () => explain(row.request_id);
  const button = el(
    "button",
    { type: "button", class: "link id", "aria-label": `Explain request ${row.request_id}`, title: row.request_id },
    short(row.request_id),
  );
  const parts = { held: el("span"), bar: bar(), kind: el("span"), reasons: el("span", { class: "sub" }) };
  const cells = [
    el("td", { class: "whole" }, clock(row.at)),
    el("td", { class: "whole" }, button),
    el("td", { class: "worker" }),
    el("td", { class: "wide" }, el("span", { class: "held" }, parts.bar, parts.held)),
    el("td", { class: "number", "data-name": "Round robin" }),
    el("td", {}, parts.kind, parts.reasons),
    el("td", { class: "why wide" }),
  ];
  const node = el("tr", { class: "open new", on: { click: open } }, ...cells);
  return Object.assign(node, { parts });
}

function refresh(node, row) {
  const { parts, cells } = node;
  set(cells[2], row.worker);
  fill(parts.bar.firstChild, row.blocks ? row.overlap / row.blocks : 0);
  set(parts.held, row.predicted ? `${number(row.overlap)} of ${number(row.blocks)}` : "not predicted");
  set(cells[4], row.round_robin === null ? "–" : number(row.round_robin));
  set(parts.kind, row.exactness);
  parts.kind.className = row.exactness === "exact" ? "" : "doubt";
  set(parts.reasons, row.reasons.join(", "));
  const images = row.images ? `, ${plural(row.images, "image")}` : "";
  const regret = row.regret ? `; gave away ${plural(row.regret, "block")} held elsewhere` : "";
  set(cells[6], `${row.why || `best of ${plural(row.candidates, "candidate")}${images}`}${regret}`);
}

/** Set up the section; `open(id)` is called for a decision that is clicked. */
export function start(open) {
  explain = open;
  by("pause").addEventListener("click", () => {
    paused = !paused;
    waiting = 0;
    by("pause").setAttribute("aria-pressed", String(paused));
    draw();
  });
}

export function clear() {
  rows = [];
  seen = 0;
}
