// The resource's rollout and conditions, as the operator sends them to its frontends.
import { by, clock, el, set, show, sync } from "./dom.js";

const BAD = { Degraded: "True", ShmPressure: "True", DeviceMismatch: "True", Progressing: "Unknown" }; // others: False

export function update(part) {
  const known = part.received !== null;
  show(by("resource"), known);
  show(by("resource-absent"), !known);
  if (!known) return;
  set(by("resource-phase"), `${part.phase}, as the operator wrote it at ${clock(part.received)}`);
  const progressing = part.conditions.find((condition) => condition.type === "Progressing");
  set(by("resource-step"), progressing?.message ?? "");
  sync(by("steps"), part.steps, ({ action, kind, name }) => `${action} ${kind} ${name}`, () => el("li"), (row, step) =>
    set(row, `${step.action} ${step.kind} ${step.name}${step.why ? `: ${step.why}` : ""}`));
  show(by("steps"), part.steps.length > 0);
  const replicas = [...(part.frontend ? [{ ...part.frontend, name: "frontend" }] : []),
    ...part.pools.map((pool) => ({ ...pool, name: `pool ${pool.name}` }))];
  sync(by("replicas").tBodies[0], replicas, (row) => row.name, () => cells("Replicas of", "Updated", "Ready", "Verified"), (row, of) => {
    const counts = [of.updated, of.ready, of.verified].map((count) => (count === null ? "–" : `${count} of ${of.desired}`));
    fillIn(row, [of.name, ...counts]);
  });
  sync(by("conditions").tBodies[0], part.conditions, (row) => row.type,
    () => cells("Condition", "Status", "Reason", "Message", "Since"), (row, of) => {
      fillIn(row, [of.type, of.status, of.reason, of.message, since(of.lastTransitionTime)]);
      row.children[1].className = [BAD[of.type] ?? "False", "Unknown"].includes(of.status) ? "doubt" : "";
    });
}

/** Return a row of empty cells, named for narrow screens. */
const cells = (...names) => el("tr", {}, ...names.map((name) => el("td", { "data-name": name, class: ["Message", "Since"].includes(name) ? "wide" : undefined })));

const fillIn = (row, texts) => texts.forEach((text, place) => set(row.children[place], text));

/** Return a time of the API in the reader's time zone; a text that is none as it is. */
function since(text) {
  const time = new Date(text);
  return Number.isNaN(time.getTime()) ? text : `${time.toLocaleDateString("en-CA")} ${time.toLocaleTimeString("en-GB")}`;
}
