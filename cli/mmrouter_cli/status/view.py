"""The view of `mmrouter status`: a deployment's state from its resource in a cluster, or from its frontends' states."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mmrouter_cli.status.control_endpoint import ControlEndpoint
from mmrouter_cli.status.frontend_state import Frontend, State, Unread, client, fetch

EVERY_SECONDS = 1.0
"""Interval of --watch."""
UNKNOWN = "-"

Object = Mapping[str, Any]


class StatusError(Exception):
    """There is nothing to show."""


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One pool. ``None``: unknown from this source."""

    name: str
    role: str
    desired: int | None
    ready: int
    routable: int
    verified: int


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One engine pod. ``exact``: True, False or Unknown, with the reason in brackets."""

    name: str
    pool: str
    routable: bool
    exact: str
    where: str = ""
    """Its node."""
    blocks: int | None = None
    """Blocks that frontends know it to hold."""
    in_flight: int | None = None
    heard_seconds_ago: float | None = None


@dataclass(frozen=True, slots=True)
class View:
    """The state of one deployment as it is displayed."""

    name: str
    phase: str
    endpoint: str
    frontends: str
    """Ready of wanted."""
    exact_ratio: str
    hit_ratio: str
    pools: tuple[PoolRow, ...] = ()
    workers: tuple[WorkerRow, ...] = ()
    conditions: tuple[Mapping[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the view as plain values."""
        return asdict(self)


# -- from a cluster ------------------------------------------------------------------------------------------------


def of_resource(resource: Object, pods: Sequence[Object]) -> View:
    # Imported here because it is not needed for a URL.
    from mmrouter_cli.status.pod_boot import waits_for
    from mmrouter_operator.model.labels import ROUTABLE, VERIFIED
    from mmrouter_operator.model.views import pod_view

    metadata, status = resource["metadata"], resource.get("status") or {}
    routing, frontend = status.get("routing") or {}, status.get("frontend") or {}
    pools = tuple(
        PoolRow(p["name"], p["role"], *(p.get(key, 0) for key in ("desired", "ready", "routable", "verified")))
        for p in status.get("pools") or []
    )
    views = sorted((pod_view(pod) for pod in pods), key=lambda view: (view.pool, view.name))
    waiting = {pod["metadata"]["name"]: waits_for(pod) for pod in pods}
    workers = tuple(
        WorkerRow(
            view.name,
            view.pool,
            view.gates.get(ROUTABLE, False),
            "True"
            if view.gates.get(VERIFIED)
            else f"Unknown ({_waiting_reason(view) or waiting[view.name] or 'not proved yet'})",
            where=view.node,
        )
        for view in views
        if view.pool and not view.deleting
    )
    generation = metadata.get("generation", 0)
    notes = ["no operator has processed it yet"] if not status else []
    if status and status.get("observedGeneration", 0) < generation:
        notes.append(f"the status is of generation {status.get('observedGeneration', 0)}, the spec of {generation}")
    return View(
        name=f"{metadata['namespace']}/{metadata['name']}",
        phase=status.get("phase", "Unknown"),
        endpoint=status.get("endpoint", ""),
        frontends=f"{frontend.get('ready', 0)}/{frontend.get('desired', 0)}" if frontend else UNKNOWN,
        exact_ratio=str(routing.get("exactRatio", UNKNOWN)),
        hit_ratio=str(routing.get("hitRatio", UNKNOWN)),
        pools=pools,
        workers=workers,
        conditions=tuple(
            {key: str(item.get(key, "")) for key in ("type", "status", "reason", "message")}
            for item in status.get("conditions") or []
        ),
        notes=tuple(notes),
    )


def _waiting_reason(view: Any) -> str:
    return str(view.waiting[1]) if view.waiting is not None else ""


# -- from frontends ------------------------------------------------------------------------------------------------


def of_states(url: str, answers: Mapping[str, State | Unread]) -> View:
    """Return the view of frontends' states: totals, and each worker in its worst state."""
    states = {name: answer for name, answer in answers.items() if not isinstance(answer, Unread)}
    notes = [f"{name} cannot be queried: {a.why}" for name, a in answers.items() if isinstance(a, Unread)]
    ready = sum(bool(state.get("ready")) for state in states.values())
    rows_of: dict[str, list[Mapping[str, Any]]] = {}
    for state in states.values():
        for worker in state["workers"]:
            rows_of.setdefault(worker["uid"], []).append(worker)
    workers = [_worker(rows) for rows in rows_of.values()]
    workers += [
        WorkerRow(
            r["name"], r["pool"], r["answered"], "True" if r["verified"] else f"Unknown ({r['message'] or 'asked'})"
        )
        for r in (next(iter(states.values())).get("renderers") or [] if states else [])
    ]
    workers.sort(key=lambda worker: (worker.pool, worker.name))
    phase = "Unreachable" if not states else "Ready" if workers and ready == len(answers) else "Starting"
    if phase == "Ready" and not all(worker.routable for worker in workers):
        phase = "Degraded"
    return View(
        name=url,
        phase=phase,
        endpoint=url,
        frontends=f"{ready}/{len(answers)}",
        exact_ratio=_ratio(states.values(), "exact_decisions", "decisions"),
        hit_ratio=_ratio(states.values(), "hit_blocks", "prompt_blocks"),
        pools=_pools(workers, {row["pool"]: row["role"] for rows in rows_of.values() for row in rows}),
        workers=tuple(workers),
        notes=tuple(notes),
    )


def _worker(rows: Sequence[Mapping[str, Any]]) -> WorkerRow:
    first = rows[0]
    heard = [row["heard_seconds_ago"] for row in rows]
    canary = next((row for row in rows if row["canary"] == "False"), None)
    if canary is not None:
        exact = f"False ({canary['canary_cause']}: {canary['canary_message']})"
    elif all(row["canary"] == "True" for row in rows):
        exact = "True"
    else:
        exact = f"Unknown ({next((row.get('message') for row in rows if row.get('message')), '') or 'not proved yet'})"
    return WorkerRow(
        name=first["name"],
        pool=first["pool"],
        routable=all(row["routable"] for row in rows),
        exact=exact,
        blocks=sum(first["held"].values()),
        in_flight=sum(row["in_flight"] for row in rows),
        heard_seconds_ago=None if None in heard else max(heard),
    )


def _pools(workers: Sequence[WorkerRow], roles: Mapping[str, str]) -> tuple[PoolRow, ...]:
    count, routable, verified = Counter[str](), Counter[str](), Counter[str]()
    for worker in workers:
        count[worker.pool] += 1
        routable[worker.pool] += worker.routable
        verified[worker.pool] += worker.exact == "True"
    return tuple(
        PoolRow(name, roles.get(name, "renderer"), None, count[name], routable[name], verified[name])
        for name in sorted(count)
    )


def _ratio(states: Any, part: str, whole: str) -> str:
    total = sum(state.get(whole, 0) for state in states)
    # A count may run ahead of the other between two requests.
    return f"{min(sum(state.get(part, 0) for state in states) / total, 1.0):.3f}" if total else UNKNOWN


# -- reading, once or repeatedly -------- ------------------------------------------------------------------------------


async def from_cluster(
    name: str | None, namespace: str | None, kubeconfig: Path | None, *, watch: bool
) -> AsyncIterator[list[View]]:
    """Yield the views of a deployment, or of all of a namespace. Raises :class:`StatusError`."""
    from mmrouter_cli.cluster_reader import ClusterError, namespace_of, reading
    from mmrouter_operator.cluster.child_kinds import KINDS
    from mmrouter_operator.cluster.client import NotFound, Unavailable
    from mmrouter_operator.model.kinds import RESOURCE
    from mmrouter_operator.model.labels import DEPLOYMENT_LABEL

    namespace = namespace or namespace_of(kubeconfig)
    try:
        async with reading(kubeconfig) as reader:
            views: list[View] = []
            while True:
                try:
                    path = KINDS[RESOURCE].path(namespace, name or "")
                    resources = [await reader.read(path)] if name else await reader.items(path)
                    pods = await reader.items(KINDS["Pod"].path(namespace), labelSelector=DEPLOYMENT_LABEL)
                except NotFound as error:
                    what = (
                        f"MMRouterDeployment {name} in namespace {namespace}" if name else "MMRouterDeployment at all"
                    )
                    raise StatusError(f"there is no {what}: {error}") from error
                except Unavailable as error:
                    if not views:
                        raise
                    # Keep watching until the cluster is back.
                    note = f"the cluster does not answer: {error}"
                    yield [replace(view, notes=(*view.notes, note)) for view in views]
                    await asyncio.sleep(EVERY_SECONDS)
                    continue
                views = [of_resource(resource, _of(resource, pods)) for resource in resources]
                yield views
                if not watch:
                    return
                await asyncio.sleep(EVERY_SECONDS)
    except ClusterError as error:
        raise StatusError(str(error)) from error


def _of(resource: Object, pods: Sequence[Object]) -> list[Object]:
    from mmrouter_operator.model.labels import DEPLOYMENT_LABEL

    return [pod for pod in pods if pod["metadata"]["labels"][DEPLOYMENT_LABEL] == resource["metadata"]["name"]]


async def from_url(endpoint: ControlEndpoint, *, watch: bool) -> AsyncIterator[list[View]]:
    """Yield the view of a deployment through its control APIs."""
    frontends = [Frontend(url.removeprefix("http://"), url) for url in endpoint.controls]
    async with client(endpoint.token) as asking:
        while True:
            yield [await _asked(asking, endpoint.url, frontends)]
            if not watch:
                return
            await asyncio.sleep(EVERY_SECONDS)


async def _asked(asking: httpx.AsyncClient, url: str, frontends: Sequence[Frontend]) -> View:
    answers = await asyncio.gather(*(fetch(asking, frontend) for frontend in frontends))
    return of_states(url, {frontend.name: answer for frontend, answer in zip(frontends, answers, strict=True)})


# -- display ------------------------------------------------------------------------------------------------------


def drawn(views: Sequence[View]) -> RenderableType:
    """Return the views for a terminal."""
    if not views:
        return Text("there is no MMRouterDeployment in this namespace")
    return Group(*(part for view in views for part in _parts(view)))


def _parts(view: View) -> list[RenderableType]:
    good = view.phase == "Ready"
    head = Text.assemble(
        (view.name, "bold"), "  ", (view.phase, "green" if good else "yellow"), f"  frontends {view.frontends}  "
    )
    head.append(f"exact {view.exact_ratio}  hit {view.hit_ratio}")
    if view.endpoint and view.endpoint != view.name:
        head.append(f"  {view.endpoint}")
    parts: list[RenderableType] = [head]
    if view.pools:
        parts.append(_pool_table(view.pools))
    if view.workers:
        parts.append(_worker_table(view.workers))
    if view.conditions:
        parts.append(_condition_table(view.conditions))
    return [*parts, *(Text(note, style="yellow") for note in view.notes), Text("")]


def _pool_table(pools: Sequence[PoolRow]) -> Table:
    table = Table(title="pools", title_justify="left")
    for heading in ("pool", "role", "ready", "routable", "verified"):
        table.add_column(heading, justify="left" if heading in ("pool", "role") else "right", overflow="fold")
    for pool in pools:
        of = "" if pool.desired is None else f"/{pool.desired}"
        table.add_row(pool.name, pool.role, f"{pool.ready}{of}", f"{pool.routable}{of}", f"{pool.verified}{of}")
    return table


def _worker_table(workers: Sequence[WorkerRow]) -> Table:
    live = any(worker.blocks is not None for worker in workers)
    table = Table(title="workers", title_justify="left")
    more = ("blocks", "in flight", "heard") if live else ("node",)
    for heading in ("worker", "pool", "routable", "exact", *more):
        numbers = heading in ("blocks", "in flight", "heard")
        table.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    for worker in workers:
        exact = Text(worker.exact, style="green" if worker.exact == "True" else "yellow")
        last = worker.heard_seconds_ago
        heard = UNKNOWN if last is None else f"{last:.1f} s ago"
        rest = (_count(worker.blocks), _count(worker.in_flight), heard) if live else (worker.where or UNKNOWN,)
        table.add_row(worker.name, worker.pool, "yes" if worker.routable else Text("no", style="yellow"), exact, *rest)
    return table


def _condition_table(conditions: Sequence[Mapping[str, str]]) -> Table:
    table = Table(title="conditions", title_justify="left")
    for heading in ("condition", "status", "reason", "message"):
        table.add_column(heading, overflow="fold")
    for item in conditions:
        table.add_row(item["type"], item["status"], item["reason"], Text(item["message"]))
    return table


def _count(number: int | None) -> str:
    return UNKNOWN if number is None else str(number)
