"""The view of `mmrouter status`: a deployment's state from its resource in a cluster, or from its frontends' states."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mmrouter_cli.options import table
from mmrouter_cli.status.control_api import ControlEndpoint, Frontend, State, Unread, client, fetch

EVERY_SECONDS = 1.0
"""Interval of --watch."""
UNKNOWN = "-"
UNREACHABLE = "Unreachable"
"""Phase of a deployment none of whose frontends answers."""

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
    """One engine pod."""

    name: str
    pool: str
    routable: bool
    exact: str
    """True, False or Unknown, with the reason in brackets."""
    unroutable: str = ""
    """Why it is not routable."""
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


# -- from a cluster ------------------------------------------------------------------------------------------------


def of_resource(resource: Object, pods: Sequence[Object]) -> View:
    # Imported here because it is not needed for a URL.
    from mmrouter_cli.status.pod_boot import waits_for
    from mmrouter_operator.model.kinds import ROUTABLE, VERIFIED
    from mmrouter_operator.model.views import pod_view

    metadata, status = resource["metadata"], resource.get("status") or {}
    routing, frontend = status.get("routing") or {}, status.get("frontend") or {}
    pools = tuple(
        PoolRow(p["name"], p["role"], *(p.get(key, 0) for key in ("desired", "ready", "routable", "verified")))
        for p in status.get("pools") or []
    )
    views = sorted((pod_view(pod) for pod in pods), key=lambda view: (view.pool, view.name))
    waiting = {pod["metadata"]["name"]: waits_for(pod) for pod in pods}
    waiting |= {view.name: view.waiting[1] for view in views if view.waiting is not None and view.waiting[1]}
    workers = tuple(
        WorkerRow(
            view.name,
            view.pool,
            view.gates.get(ROUTABLE, False),
            "True" if view.gates.get(VERIFIED) else f"Unknown ({waiting[view.name] or 'not proved yet'})",
            unroutable="" if view.gates.get(ROUTABLE) else waiting[view.name] or "its readiness gate is closed",
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
    for row in (next(iter(states.values())).get("renderers") or []) if states else []:
        exact = "True" if row["verified"] else f"Unknown ({row['message'] or 'asked'})"
        workers.append(WorkerRow(row["name"], row["pool"], row["answered"], exact, row["message"] or "no answer yet"))
    workers.sort(key=lambda worker: (worker.pool, worker.name))
    phase = UNREACHABLE if not states else "Ready" if workers and ready == len(answers) else "Starting"
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
    left_out = next((row for row in rows if not row["routable"]), None)
    return WorkerRow(
        unroutable="" if left_out is None else left_out.get("message") or left_out.get("cause") or "no report yet",
        name=first["name"],
        pool=first["pool"],
        routable=all(row["routable"] for row in rows),
        exact=exact,
        blocks=sum(first["held"].values()),
        in_flight=sum(row["in_flight"] for row in rows),
        heard_seconds_ago=None if None in heard else max(heard),
    )


def _pools(workers: Sequence[WorkerRow], roles: Mapping[str, str]) -> tuple[PoolRow, ...]:
    rows = []
    for name, members in groupby(workers, key=lambda worker: worker.pool):
        mine = list(members)
        counts = (len(mine), sum(row.routable for row in mine), sum(row.exact == "True" for row in mine))
        rows.append(PoolRow(name, roles.get(name, "renderer"), None, *counts))
    return tuple(rows)


def _ratio(states: Any, part: str, whole: str) -> str:
    total = sum(state.get(whole, 0) for state in states)
    # A count may run ahead of the other between two requests.
    return f"{min(sum(state.get(part, 0) for state in states) / total, 1.0):.3f}" if total else UNKNOWN


# -- reading, once or repeatedly --------------------------------------------------------------------------------------


async def from_cluster(
    name: str | None, namespace: str | None, kubeconfig: Path | None, *, watch: bool
) -> AsyncIterator[list[View]]:
    """Yield the views of a deployment, or of all of a namespace. Raises :class:`StatusError`."""
    from mmrouter_cli.cluster.reader import ClusterError, namespace_of, reading
    from mmrouter_operator.cluster.client import NotFound, Unavailable
    from mmrouter_operator.cluster.operator_kinds import KINDS
    from mmrouter_operator.model.kinds import DEPLOYMENT_LABEL, RESOURCE

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
                    where = f"{name} in namespace {namespace}" if name else "at all"
                    raise StatusError(f"there is no MMRouterDeployment {where}: {error}") from error
                except Unavailable as error:
                    if not views:
                        raise
                    # Keep watching until the cluster is back.
                    note = f"the cluster does not answer: {error}"
                    yield [replace(view, notes=(*view.notes, note)) for view in views]
                    await asyncio.sleep(EVERY_SECONDS)
                    continue
                views = []
                for resource in resources:
                    own = resource["metadata"]["name"]
                    mine = [pod for pod in pods if pod["metadata"]["labels"][DEPLOYMENT_LABEL] == own]
                    views.append(of_resource(resource, mine))
                yield views
                if not watch:
                    return
                await asyncio.sleep(EVERY_SECONDS)
    except ClusterError as error:
        raise StatusError(str(error)) from error


async def from_url(endpoint: ControlEndpoint, *, watch: bool) -> AsyncIterator[list[View]]:
    frontends = [Frontend(url.removeprefix("http://"), url) for url in endpoint.controls]
    async with client(endpoint.token) as asking:
        while True:
            answers = await asyncio.gather(*(fetch(asking, frontend) for frontend in frontends))
            names = (frontend.name for frontend in frontends)
            yield [of_states(endpoint.url, dict(zip(names, answers, strict=True)))]
            if not watch:
                return
            await asyncio.sleep(EVERY_SECONDS)


# -- display ------------------------------------------------------------------------------------------------------


def drawn(views: Sequence[View]) -> RenderableType:
    if not views:
        return Text("there is no MMRouterDeployment in this namespace")
    return Group(*(part for view in views for part in _parts(view)))


def _parts(view: View) -> list[RenderableType]:
    counts = f"  frontends {view.frontends}  exact {view.exact_ratio}  hit {view.hit_ratio}"
    counts += f"  {view.endpoint}" if view.endpoint and view.endpoint != view.name else ""
    head = Text.assemble(
        (view.name, "bold"), "  ", (view.phase, "green" if view.phase == "Ready" else "yellow"), counts
    )
    parts: list[RenderableType] = [head]
    parts += [_pool_table(view.pools)] if view.pools else []
    parts += [_worker_table(view.workers)] if view.workers else []
    parts += [_condition_table(view.conditions)] if view.conditions else []
    return [*parts, *(Text(note, style="yellow") for note in view.notes), Text("")]


def _pool_table(pools: Sequence[PoolRow]) -> Table:
    numbers = ("ready", "routable", "verified")
    shown = table("pools", "pool", "role", *numbers, right=numbers, title_justify="left")
    for pool in pools:
        of = "" if pool.desired is None else f"/{pool.desired}"
        shown.add_row(pool.name, pool.role, *(f"{count}{of}" for count in (pool.ready, pool.routable, pool.verified)))
    return shown


def _worker_table(workers: Sequence[WorkerRow]) -> Table:
    live = any(worker.blocks is not None for worker in workers)
    numbers = ("blocks", "in flight", "heard")
    headings = ("worker", "pool", "routable", "exact", *(numbers if live else ("node",)))
    shown = table("workers", *headings, right=numbers, title_justify="left")
    for worker in workers:
        proved = worker.exact.replace("True", "yes", 1).replace("False", "no", 1)
        exact = Text(proved, style="green" if worker.exact == "True" else "yellow")
        last = worker.heard_seconds_ago
        rest = [UNKNOWN if count is None else str(count) for count in (worker.blocks, worker.in_flight)]
        rest = [*rest, UNKNOWN if last is None else f"{last:.1f} s ago"] if live else [worker.where or UNKNOWN]
        routable = "yes" if worker.routable else Text(f"no: {worker.unroutable or UNKNOWN}", style="yellow")
        shown.add_row(worker.name, worker.pool, routable, exact, *rest)
    return shown


def _condition_table(conditions: Sequence[Mapping[str, str]]) -> Table:
    shown = table("conditions", "condition", "status", "reason", "message", title_justify="left")
    for item in conditions:
        shown.add_row(item["type"], item["status"], item["reason"], Text(item["message"]))
    return shown
