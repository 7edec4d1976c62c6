"""Checks of frontends' states: events flow from every engine, and decisions are exact. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from mmrouter_cli.doctor.findings import CAUSES, Finding, RoutingFacts, ok, problem, reason_advice, warning
from mmrouter_cli.status.control_api import NOT_RUNNING, State, Unread

STALE_SECONDS = 2.0
"""Age from which a heartbeat is missing; sidecars send several in that time."""
ENOUGH = 50
"""Decisions from which a share of them is meaningful."""
EXACT_SHARE = 0.95

_FOLLOWED = ("worker", "prefill", "decode")
"""Roles whose events frontends follow."""
_PROVED = ("worker", "prefill")

Worker = Mapping[str, Any]


def frontend_check(facts: RoutingFacts) -> Iterator[Finding]:
    """Check that frontends answer and know the same engines."""
    for frontend in facts.frontends:
        if isinstance(frontend.first, Unread):
            do = "See pods." if frontend.first.why == NOT_RUNNING else facts.advice
            yield warning(f"{frontend.name} cannot be queried: {frontend.first.why}", do)
        elif not frontend.first.get("ready", True):
            yield warning(f"{frontend.name} is not ready: it waits for its engines", "Wait, then see events.")
    answers = _answered(facts)
    if not facts.frontends:
        yield problem("none runs", "See pods and nodes.")
    if not answers:
        return
    by_frontend = {name: {worker["name"] for worker in first["workers"]} for name, (first, _) in answers.items()}
    engines = set().union(*by_frontend.values())
    for name, workers in by_frontend.items():
        if workers != engines:
            lacks = ", ".join(sorted(engines - workers))
            yield problem(
                f"{name} does not know {lacks}, which others do", f"See its log: {facts.log_of(name, 'router')}"
            )
    if not engines:
        yield problem("they know no engine", "See pods and nodes.")
    elif all(workers == engines for workers in by_frontend.values()):
        yield ok(f"{', '.join(answers)}: {len(engines)} engines known")


def event_check(facts: RoutingFacts) -> Iterator[Finding]:
    """Check that every engine's events arrive: heartbeats, snapshot, sequence numbers."""
    heard = []
    bad: set[Finding] = set()  # findings that name no frontend are yielded once
    for frontend, (first, second) in _answered(facts).items():
        before = {worker["uid"]: worker for worker in first["workers"]}
        for worker in second["workers"]:
            if worker["role"] not in _FOLLOWED or worker["draining"]:
                continue
            finding = _of_events(frontend, before.get(worker["uid"], worker), worker, facts)
            if finding is not None:
                if finding not in bad:
                    yield finding
                bad.add(finding)
            else:
                heard.append(f"{worker['name']} at {worker['seq']}")
    if heard and not bad:
        yield ok(f"every frontend receives every engine's events; sequence numbers: {', '.join(dict.fromkeys(heard))}")


def device_check(facts: RoutingFacts) -> Iterator[Finding]:
    """Check that engines compute on the devices that their pools ask for, as far as they report them."""
    devices: dict[str, tuple[str, str]] = {}
    for _, state in _answered(facts).values():
        for worker in state["workers"]:
            device = worker.get("device", "unknown")
            if device != "unknown" or worker["name"] not in devices:
                devices[worker["name"]] = device, worker.get("requested_device", "")
    as_requested, unknown = [], []
    for name, (device, requested) in sorted(devices.items()):
        if device == "unknown":
            unknown.append(name)
        elif requested in ("", device):
            as_requested.append(f"{name} on {device}")
        else:
            seen = f"{name} computes on {device}, and its pool asks for {requested}"
            yield problem(seen, reason_advice("DeviceMismatch", "OtherDevice"))
    if as_requested:
        yield ok(", ".join(as_requested))
    if unknown:
        yield ok(f"unknown, because the engine does not report it: {', '.join(unknown)}")


def _of_events(frontend: str, before: Worker, worker: Worker, facts: RoutingFacts) -> Finding | None:
    name = worker["name"]
    age = worker["heard_seconds_ago"]
    logs, engine = f"See the sidecar's log: {facts.log_of(name, 'sidecar')}", facts.log_of(name, "engine")
    if age is None or age > STALE_SECONDS:
        last = "has received no heartbeat" if age is None else f"received the last heartbeat {age:.0f} s ago"
        do = f"{logs}. Ports 7557 and 7558 must be open from frontends, and all pods must have the same keys."
        return problem(f"{frontend} {last}: {name}", do)
    if worker["engine_state"] == "starting":
        return warning(f"{name}: its engine is starting", f"Wait, and see pods. Its log: {engine}")
    if worker["engine_state"] != "up":
        state = worker["engine_state"] or "not known yet"
        return problem(f"{name}: its engine is {state}", f"See its log: {engine}")
    if not worker["synced"]:
        return warning(f"{frontend} waits for the snapshot of {name}", f"Wait a moment. {logs}")
    if worker["epoch"] != before["epoch"]:
        return warning(f"{name} has lost its history and began epoch {worker['epoch']}", logs)
    busy = before["in_flight"] > 0 and worker["in_flight"] > 0 and before["waiting"] == worker["waiting"] == 0
    if busy and worker["seq"] == before["seq"]:
        seen = f"{name} computes requests, but its sequence number stays {worker['seq']} for {facts.seconds:.0f} s"
        return warning(seen, "Long answers fill few blocks: look again. " + CAUSES["no_events"])
    return None


def exactness_check(facts: RoutingFacts) -> Iterator[Finding]:
    """Check that the blocks that frontends predict are those that engines publish."""
    answers = _answered(facts)
    if not answers:
        return
    proved: set[str] = set()
    others: dict[str, Finding] = {}
    for _, state in answers.values():
        for worker in state["workers"]:
            if worker["role"] not in _PROVED or worker["draining"]:
                continue
            finding = _of_canary(worker, facts)
            if finding is None:
                proved.add(worker["name"])
                if worker["standing"] == "waiting":
                    seen = f"{worker['name']} is proved but used only as a last resort"
                    do = f"Why one is closed is in its conditions: kubectl describe pod {worker['name']}"
                    do = "mmrouter up opens them." if facts.is_local else f"The operator opens them. {do}"
                    yield warning(f"{seen}: its readiness gates are not open yet", do)
            else:
                others.setdefault(worker["name"], finding)
        for renderer in state.get("renderers") or []:
            if renderer["message"]:
                seen = f"renderer {renderer['name']}: {renderer['message']}"
                others.setdefault(renderer["name"], problem(seen, CAUSES["template"]))
    # A proof by one router reaches the others with the next heartbeat.
    yield from (finding for name, finding in others.items() if name not in proved)
    if proved:
        yield ok(f"proved: {', '.join(sorted(proved))}")
    yield from _ratios([state for _, state in answers.values()])


def _of_canary(worker: Worker, facts: RoutingFacts) -> Finding | None:
    name = worker["name"]
    if worker["canary"] == "True":
        return None
    if worker["canary"] == "False":
        cause = worker["canary_cause"]
        seen = f"{name} is not exact ({cause}): {worker['canary_message']}"
        return problem(seen, CAUSES.get(cause, CAUSES["unknown"]))
    cause, message = worker.get("cause", ""), worker.get("message", "")
    if cause == "not_modelled":
        do = "Add a renderer pool, which makes them exact, or take affinity as it is."
        return warning(f"{name}: {message}", do)
    if worker["standing"] in ("degraded", "refused"):
        how = "used without overlap" if worker["standing"] == "degraded" else "not used"
        seen = f"{name} was not proved in time and is {how}: {message or 'no cause is known'}"
        return problem(seen, f"See the sidecar's log: {facts.log_of(name, 'sidecar')}")
    return warning(f"{name} is not proved yet: {message or 'its canary is under way'}", "Wait a moment.")


def _ratios(states: list[State]) -> Iterator[Finding]:
    decisions = sum(state.get("decisions", 0) for state in states)
    if decisions < ENOUGH:
        return
    exact = sum(state.get("exact_decisions", 0) for state in states) / decisions
    blocks = sum(state.get("prompt_blocks", 0) for state in states)
    hit = sum(state.get("hit_blocks", 0) for state in states) / blocks if blocks else 0.0
    summary = f"{exact:.1%} of {decisions} decisions were exact, {hit:.1%} of their blocks found cached"
    if exact < EXACT_SHARE:
        do = "mmrouter_decisions_total{reason} on port 9090 counts why not; mmrouter explain shows one request."
        yield warning(summary, do)
    elif not hit:
        do = "Where prompts repeat, check with: mmrouter verify URL. Without repeated prompts this is normal."
        yield warning(summary, do)
    else:
        yield ok(summary)


def _answered(facts: RoutingFacts) -> dict[str, tuple[State, State]]:
    """Return the two states of each frontend that answered."""
    return {
        frontend.name: (frontend.first, frontend.second)
        for frontend in facts.frontends
        if not isinstance(frontend.first, Unread) and not isinstance(frontend.second, Unread)
    }
