"""The control API: workers, decisions, explain and stream, on its own port with a token (docs/architecture.md)."""

import asyncio
import hmac
from collections.abc import Callable
from typing import Annotated, Any

import aiohttp
import msgspec
from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import Counter

from mmrouter_lib.prompt import Prompter
from mmrouter_router.api.chat import Chat
from mmrouter_router.api.control_stream import events
from mmrouter_router.core.errors import RequestError
from mmrouter_router.dispatch.sglang_pair import choose_pair
from mmrouter_router.dispatch.stages import Stages
from mmrouter_router.explain.decisions import DecisionTrace, trace_of
from mmrouter_router.explain.parity_check import verdict_json
from mmrouter_router.explain.render_diff import rendering_json
from mmrouter_router.fleet.membership import Peer
from mmrouter_router.fleet.workers import Fleet, Worker
from mmrouter_router.intake.tenant_keys import DEFAULT
from mmrouter_router.request.engine_request import CHAT
from mmrouter_router.request.renderer_client import Renderer
from mmrouter_router.scheduling.placer import NoWorkerError, Placer
from mmrouter_router.verify.sampling import ParitySampler

CONTROL_PORT = 8001
PEER_SECONDS = 2.0
PARITY_SECONDS = 0.5
"""How long a requested comparison waits for missing blocks."""


def create(
    *,
    token: str,
    router_id: str,
    fleet: Fleet,
    placer: Placer,
    stages: Stages,
    chat: Chat,
    sampler: ParitySampler,
    renderer: Renderer,
    prompter: Prompter | None,
    peers: Callable[[], tuple[Peer, ...]],
    report: Callable[[], dict[str, Any]],
    stopping: asyncio.Event,
    refusals: Counter,
) -> FastAPI:
    """Build the control application. ``report``: the content of the stream, which ends with ``stopping``.

    ``refusals``: counts requests without the token, by reason.
    """

    def authorized(authorization: Annotated[str, Header()] = "") -> None:
        if not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            refusals.labels("wrong" if authorization else "missing").inc()
            raise HTTPException(401, "the control token is missing or wrong")

    app = FastAPI(title="mmrouter control", openapi_url=None, dependencies=[Depends(authorized)])

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        return Response(error.to_body(), error.status, headers=error.headers, media_type="application/json")

    @app.get("/control/state")
    async def state() -> dict[str, Any]:
        return {**state_of(report(), fleet, placer), "renderers": renderer.state()}

    @app.get("/control/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(events(report, fleet, stopping), media_type="text/event-stream")

    @app.get("/control/workers/{uid}/keys")
    async def keys(uid: str) -> dict[str, Any]:
        worker = fleet.workers.get(uid)
        if worker is None:
            raise HTTPException(404, f"no worker {uid}")
        return {
            "worker": worker.id,
            "epoch": worker.sync.epoch,
            "seq": worker.sync.seq,
            "synced": worker.sync.synced,
            "keys": {rank: sorted(f"{k:016x}" for k in fleet.index.keys(slot)) for rank, slot in worker.slots.items()},
        }

    @app.get("/control/decisions")
    async def latest(count: int = 50) -> list[dict[str, Any]]:
        return [trace.as_json() for trace in chat.decisions.latest(min(max(count, 1), 1000))]

    @app.get("/control/decisions/{request_id}")
    async def decision(request_id: str, ask: bool = True, parity: bool = False) -> JSONResponse:
        """Return a logged decision; with ``parity`` after comparing it with its worker's blocks."""
        trace = chat.decisions.get(request_id)
        if trace is not None:
            if parity:
                trace.parity = await sampler.check(trace, seconds=PARITY_SECONDS) or trace.parity
            evidence = {"parity": _parity(trace, prompter), "rendering": _rendering(trace, prompter)}
            return JSONResponse({**_with_holders(await chat.describe(trace), fleet), **evidence})
        if ask and not request_id.startswith(f"{router_id}-"):
            answer = await _ask_peers(peers(), request_id, token, parity=parity)
            if answer is not None:
                return JSONResponse(answer)
        raise HTTPException(404, f"no decision {request_id} is kept")

    @app.post("/control/explain")
    async def explain(request: Request, x_mmrouter_api_key: Annotated[str, Header()] = "") -> dict[str, Any]:
        """Run everything but the dispatch of a request, for the tenant of the API key, if any."""
        tenant = chat.tenant(x_mmrouter_api_key) if x_mmrouter_api_key else DEFAULT
        prepared = await chat.prepare(CHAT, await request.body(), tenant)
        try:
            form = stages.form()
            if form.paired:
                answers, computes = choose_pair(placer, prepared, form.answers, dry_run=True)
                chosen = computes or answers
            else:
                chosen = placer.place(prepared, dry_run=True, roles=form.answers)
        except NoWorkerError as error:
            raise RequestError.no_worker(str(error)) from error
        trace = trace_of("dry-run", prepared, chosen)
        trace.form, trace.degraded = form.name, form.degraded
        return _with_holders(trace.as_json(), fleet)

    return app


def state_of(report: dict[str, Any], fleet: Fleet, placer: Placer) -> dict[str, Any]:
    """Return the report with the full state of every worker, as plain values."""
    rows = report["workers"]
    return {
        **report,
        "index_keys": len(fleet.index),
        "workers": [
            {**worker_of(worker, fleet, placer), **_verdict(worker, rows.get(worker.member.uid, {}))}
            for worker in fleet
        ],
    }


def _verdict(worker: Worker, row: dict[str, Any]) -> dict[str, Any]:
    verdict: dict[str, Any] = {name: row[name] for name in ("routable", "verified", "cause", "message") if name in row}
    if worker.member.role == "encoder" and verdict:  # encoders have no canary and no blocks
        proved = {"True": "verified", "False": "degraded"}.get(verdict["verified"], "pending")
        verdict["standing"] = proved if verdict["routable"] else "unsynced"
    return verdict


def worker_of(worker: Worker, fleet: Fleet, placer: Placer) -> dict[str, Any]:
    """Return one worker's state for people and tests."""
    beat = worker.heartbeat
    return {
        "uid": worker.member.uid,
        "name": worker.member.name,
        "ip": worker.member.ip,
        "pool": worker.member.pool,
        "role": worker.member.role,
        "id": worker.id,
        "standing": placer.eligibility(worker),
        "routable": worker.routable,
        "admitted": worker.member.admitted,
        "synced": worker.sync.synced,
        "epoch": worker.sync.epoch,
        "seq": worker.sync.seq,
        "engine": beat.engine if beat else "",
        "engine_state": beat.engine_state if beat else "",
        "engine_version": beat.engine_version if beat else "",
        "block_size": placer.block_size(worker),
        "draining": bool(beat and beat.draining) or worker.member.draining,
        "digests": beat.digests if beat else {},
        "canary": worker.canary,
        "canary_cause": beat.canary.cause if beat and beat.canary else "",
        "canary_message": beat.canary.message if beat and beat.canary else "",
        "shared": msgspec.structs.asdict(beat.shared) if beat and beat.shared else None,
        "held": {rank: fleet.index.held(slot) for rank, slot in worker.slots.items()},
        "heard_seconds_ago": round(fleet.now() - worker.heartbeat_at, 3) if worker.heartbeat_at else None,
        "waiting": sum(usage.others for usage in worker.usage.values()),
        "in_flight": sum(usage.requests for usage in worker.usage.values()),
        "in_flight_elsewhere": sum(usage.peer_requests for usage in worker.usage.values()),
    }


def _with_holders(trace: dict[str, Any], fleet: Fleet) -> dict[str, Any]:
    """Add the workers that hold each block now."""
    names = {slot: worker.member.name for worker in fleet for slot in worker.slots.values()}
    holders = [
        sorted(name for slot, name in names.items() if fleet.index.holds(slot, int(key, 16))) for key in trace["keys"]
    ]
    return {**trace, "holders_now": holders}


def _parity(trace: DecisionTrace, prompter: Prompter | None) -> dict[str, Any] | None:
    if trace.parity is None or trace.expected is None:
        return None
    return verdict_json(trace.parity, trace.expected, prompter)


def _rendering(trace: DecisionTrace, prompter: Prompter | None) -> dict[str, Any] | None:
    return rendering_json(trace.rendering, prompter) if trace.rendering is not None else None


async def _ask_peers(peers: tuple[Peer, ...], request_id: str, token: str, *, parity: bool) -> Any | None:
    headers = {"authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PEER_SECONDS)) as session:
        for peer in peers:
            query = "ask=false&parity=true" if parity else "ask=false"
            url = f"http://{peer.ip}:{CONTROL_PORT}/control/decisions/{request_id}?{query}"
            try:
                async with session.get(url, headers=headers) as answer:
                    if answer.status == 200:
                        return await answer.json()
            except (aiohttp.ClientError, TimeoutError):
                continue  # the peer is down, and its decisions are lost
    return None
