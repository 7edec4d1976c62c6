// Builds and updates elements. Text enters the page here only, as text nodes: names come from pods and clients.

/** Return an element with properties (`class`, `on`: listeners, else attributes) and children: nodes or texts. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (value !== undefined && value !== null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Return the element with this id. */
export const by = (id) => document.getElementById(id);

/** Set a text if it differs, so that nothing is drawn again in vain. */
export function set(node, text) {
  const value = String(text);
  if (node.textContent !== value) node.textContent = value;
}

/** Show or hide an element. */
export function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

/** Set the filled share of a bar, 0 to 1. */
export function fill(node, share) {
  const width = `${(Math.min(1, Math.max(0, share)) * 100).toFixed(1)}%`;
  if (node.style.width !== width) node.style.width = width;
}

/** Return an empty bar, or one that is filled to a share. */
export const bar = (share = 0) => {
  const inner = el("span");
  fill(inner, share);
  return el("span", { class: "bar", "aria-hidden": "true" }, inner);
};

const rowsOf = new WeakMap(); // parent -> key -> row

/**
 * Make the children of `parent` those of `items`, in this order: existing rows are updated and moved, not made again.
 * `make(item)` returns a row, `update(row, item)` fills it.
 */
export function sync(parent, items, keyOf, make, update) {
  const before = rowsOf.get(parent) ?? new Map();
  const after = new Map(items.map((item) => [keyOf(item), before.get(keyOf(item)) ?? make(item)]));
  // First, so that no other row has to move: a moved one loses the focus.
  for (const [key, row] of before) if (!after.has(key)) row.remove();
  let at = parent.firstChild;
  for (const item of items) {
    const row = after.get(keyOf(item));
    update(row, item);
    if (row === at) at = at.nextSibling;
    else parent.insertBefore(row, at);
  }
  rowsOf.set(parent, after);
}

const grouped = new Intl.NumberFormat("en");
export const number = (value) => grouped.format(Math.round(value));
export const percent = (share) => `${(share * 100).toFixed(1)} %`;
export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

/** Return a request id without its middle: its beginning names the frontend, its end is random. */
export const short = (id) => (id.length > 14 ? `…${id.slice(-10)}` : id);
