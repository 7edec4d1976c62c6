// The map of the index: which share of a conversation's blocks each worker holds.
import { by, el, number, plural, set, show, short, sync } from "./dom.js";

const HORIZONTAL = 6; // up to so many names of workers are written horizontally

let explain = () => {};

export function update(part) {
  const shown = part.rows.length > 0;
  show(by("map-empty"), !shown);
  show(by("map-scroller"), shown);
  const most = part.of > part.workers.length ? ` and the ${part.workers.length} of ${number(part.of)} workers most used` : "";
  set(by("map-note"), shown ? `The ${plural(part.rows.length, "conversation")} with the newest requests${most}` : "");
  if (!shown) return;
  const table = by("map-scroller").firstElementChild;
  table.classList.toggle("narrow", part.workers.length > HORIZONTAL);
  const names = ["Conversation", "Requests", "Blocks", ...part.workers];
  sync(
    table.tHead.rows[0],
    names.map((name, index) => ({ name, index })),
    (item) => item.index,
    ({ index }) => el("th", { scope: "col", class: index > 2 ? "of" : index ? "number" : undefined }),
    (cell, item) => {
      set(cell, item.name);
      cell.title = item.name;
    },
  );
  sync(table.tBodies[0], part.rows, (row) => row.conversation, make, (node, row) => refresh(node, row, part.workers));
}

function make(row) {
  const parts = { newest: row.request_id, images: el("span", { class: "sub" }), shares: [] };
  parts.button = el("button", { type: "button", class: "link id", on: { click: () => explain(parts.newest) } });
  const counts = [el("td", { class: "number" }), el("td", { class: "number" })];
  return Object.assign(el("tr", {}, el("td", {}, parts.button, parts.images), ...counts), { parts });
}

function refresh(node, row, workers) {
  const { parts, cells } = node;
  parts.newest = row.request_id;
  set(parts.button, short(row.conversation));
  parts.button.setAttribute("aria-label", `Explain the newest request of conversation ${row.conversation}`);
  set(parts.images, row.images ? plural(row.images, "image") : "");
  set(cells[1], number(row.requests));
  set(cells[2], number(row.blocks));
  while (parts.shares.length < workers.length) {
    const share = el("span");
    parts.shares.push(share);
    node.append(el("td", { class: "cell" }, share));
  }
  while (parts.shares.length > workers.length) parts.shares.pop().parentNode.remove();
  parts.shares.forEach((share, index) => {
    const held = row.held[index];
    set(share, held ? `${Math.round(held * 100)} %` : "·");
    share.className = held ? "" : "none";
    share.style.setProperty("--share", held);
    share.title = `${workers[index]} holds ${Math.round(held * 100)} % of the sampled blocks`;
  });
}

export function start(open) {
  explain = open;
}
