// The table of workers: sorted, filtered, at most one page of rows in the document, however many workers there are.
import { bar, by, el, fill, number, percent, plural, set, show, sync } from "./dom.js";

const PAGE_ROWS = 25;
const names = new Intl.Collator("en", { numeric: true }); // one, because making one takes longer than a comparison
const RANK = { refused: 0, degraded: 1, unsynced: 2, waiting: 3, pending: 4, draining: 5, verified: 6 };
const COLUMNS = [
  { name: "Worker", value: (row) => row.name, text: true },
  { name: "Standing", value: (row) => RANK[row.standing] ?? 0, up: true },
  { name: "In flight", value: (row) => row.in_flight, number: true },
  { name: "Queue", value: (row) => row.queue, number: true, title: "Blocks that wait to be computed" },
  { name: "KV in use", value: (row) => row.kv_usage, number: true, title: "Memory for blocks that running requests use" },
  { name: "Cached blocks", value: (row) => row.held },
  { name: "Requests", value: (row) => row.decisions, number: true },
  { name: "Hits", value: (row) => (row.blocks ? row.hits / row.blocks : -1), number: true },
];

const rows = new Map(); // uid -> row, with the lap in which it was last seen
let lap = 0;
let total = 0;
let first = 0; // of the rows that are shown
let order = { column: 0, up: true };

/** Take the next rows of a lap over all workers; those that a whole lap leaves out are gone. */
export function update(part) {
  if (part.first === 0) lap += 1;
  total = part.total;
  for (const row of part.rows) rows.set(row.uid, { ...row, lap });
  if (part.first + part.rows.length >= total) {
    for (const [uid, row] of rows) if (row.lap !== lap) rows.delete(uid);
  }
  draw();
}

/** Return the requests in flight at all workers. */
export const inFlight = () => [...rows.values()].reduce((sum, row) => sum + row.in_flight, 0);

function chosen() {
  const wanted = by("filter").value.trim().toLowerCase();
  const found = [...rows.values()].filter(
    (row) => !wanted || [row.name, row.pool, row.role, row.standing].some((text) => text.toLowerCase().includes(wanted)),
  );
  const { value } = COLUMNS[order.column];
  const compare = (a, b) => {
    const [one, other] = [value(a), value(b)];
    const result = typeof one === "string" ? names.compare(one, other) : one - other;
    return (order.up ? result : -result) || names.compare(a.name, b.name);
  };
  return found.sort(compare);
}

function draw() {
  const all = chosen();
  first = Math.max(0, Math.min(first, Math.floor((all.length - 1) / PAGE_ROWS) * PAGE_ROWS));
  const shown = all.slice(first, first + PAGE_ROWS);
  const fullest = Math.max(1, ...[...rows.values()].map((row) => row.held));
  show(by("workers-table"), total > 0);
  show(by("workers-empty"), total === 0);
  show(by("pager"), all.length > PAGE_ROWS);
  by("previous").disabled = first === 0;
  by("next").disabled = first + PAGE_ROWS >= all.length;
  const range = all.length > PAGE_ROWS ? `${number(first + 1)} to ${number(first + shown.length)} of ` : "";
  const matching = all.length === rows.size ? "" : ` that match, ${number(total)} in all`;
  set(by("workers-shown"), total ? `${range}${plural(all.length, "worker")}${matching}` : "");
  sync(by("workers-table").tBodies[0], shown, (row) => row.uid, make, (node, row) => refresh(node, row, fullest));
}

function make() {
  const cells = COLUMNS.map((column) => el("td", { class: column.number ? "number" : undefined, "data-name": column.name }));
  const parts = {
    name: el("span"), pool: el("span", { class: "sub" }), standing: el("span"), why: el("span", { class: "sub" }),
    held: el("span"), bar: bar(),
  };
  cells[0].removeAttribute("data-name");
  cells[0].append(parts.name, parts.pool);
  cells[1].removeAttribute("data-name");
  cells[1].append(parts.standing, parts.why);
  cells[5].append(el("span", { class: "held" }, parts.bar, parts.held));
  return Object.assign(el("tr", {}, ...cells), { parts });
}

function refresh(node, row, fullest) {
  const { parts, cells } = node;
  set(parts.name, row.name);
  set(parts.pool, row.role === "worker" ? row.pool : `${row.pool}, ${row.role}`);
  set(parts.standing, row.standing);
  parts.standing.className = row.standing === "verified" ? "" : row.standing === "refused" ? "wrong" : "doubt";
  set(parts.why, row.why);
  set(cells[2], row.waiting ? `${number(row.in_flight)} + ${number(row.waiting)}` : number(row.in_flight));
  set(cells[3], number(row.queue));
  set(cells[4], percent(row.kv_usage));
  set(parts.held, number(row.held));
  fill(parts.bar.firstChild, row.held / fullest);
  set(cells[6], number(row.decisions));
  set(cells[7], row.blocks ? percent(row.hits / row.blocks) : "–");
}

function headings() {
  const line = by("workers-table").tHead.rows[0];
  COLUMNS.forEach((column, index) => {
    const sort = () => {
      order = { column: index, up: order.column === index ? !order.up : Boolean(column.text || column.up) };
      mark(line);
      draw();
    };
    const button = el("button", { type: "button", class: "link", title: column.title, on: { click: sort } }, column.name);
    line.append(el("th", { scope: "col", class: column.number ? "number" : undefined }, button));
  });
  mark(line);
}

function mark(line) {
  [...line.cells].forEach((cell, index) => {
    if (index === order.column) cell.setAttribute("aria-sort", order.up ? "ascending" : "descending");
    else cell.removeAttribute("aria-sort");
  });
}

function turn(step) {
  first += step * PAGE_ROWS;
  draw();
}

export function start() {
  headings();
  by("filter").addEventListener("input", draw);
  by("previous").addEventListener("click", () => turn(-1));
  by("next").addEventListener("click", () => turn(1));
}

/** Forget what an earlier connection showed. */
export function clear() {
  rows.clear();
  lap = 0;
}
