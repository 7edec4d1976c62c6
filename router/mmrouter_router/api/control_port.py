"""The app of the port for control (8001), with a token (docs/architecture.md).

Importing FastAPI takes a fifth of the router's start, so :class:`.lazy_app.LazyApp` does it while other ports serve.
"""

import asyncio
import hmac
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import Counter

from mmrouter_lib.engines.base.request_fields import Endpoint
from mmrouter_lib.prompt import AnyPrompter
from mmrouter_router.api.chat import Chat
from mmrouter_router.api.client_port import error_response
from mmrouter_router.api.live_page import page_routes
from mmrouter_router.api.live_view import MAX_PAGES, MAX_STATUS, LiveView
from mmrouter_router.api.operator_report import Reporter, encoder_standing, events
from mmrouter_router.core.errors import RequestError
from mmrouter_router.core.request_ids import without_prefix
from mmrouter_router.core.settings import CONTROL_PORT
from mmrouter_router.dispatch.sglang_pair import choose_pair
from mmrouter_router.dispatch.stages import Stages
from mmrouter_router.encoding.encoder_pods import ProbeState
from mmrouter_router.explain.decisions import trace_of
from mmrouter_router.explain.differences import rendering_json
from mmrouter_router.explain.parity_check import verdict_json
from mmrouter_router.fleet.holder_table import Slot, bits
from mmrouter_router.fleet.membership import Peer
from mmrouter_router.fleet.workers import Fleet, Worker
from mmrouter_router.http.engine_connection import address
from mmrouter_router.intake.api_key_auth import DEFAULT
from mmrouter_router.request.prepared import CHAT
from mmrouter_router.scheduling.candidates import NoWorkerError
from mmrouter_router.scheduling.placer import Placer
from mmrouter_router.verify.sampling import ParitySampler

PEER_SECONDS = 2.0
PARITY_SECONDS = 0.5  # how long a requested comparison waits for missing blocks


def control_app(
    token: str,
    reporter: Reporter,
    placer: Placer,
    stages: Stages,
    chat: Chat,
    sampler: ParitySampler,
    prompter: AnyPrompter | None,
    peers: Callable[[], tuple[Peer, ...]],
    stopping: asyncio.Event,
    refusals: Counter,
    feed_keys: Callable[[], list[str]],
    live: LiveView,
    gateway_requests: Callable[[], int] | None = None,
) -> FastAPI:
    """Build the control application. Its streams end with ``stopping``.

    ``feed_keys``: fingerprints of the public keys that the router uses and expects.
    ``refusals``: counts requests without the token, by reason. ``gateway_requests``: how many requests gateways have
    asked the endpoint picker about; ``None`` without one.
    """
    fleet = reporter.fleet

    def authorized(authorization: Annotated[str, Header()] = "") -> None:
        if not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            refusals.labels("wrong" if authorization else "missing").inc()
            raise HTTPException(401, "the control token is missing or wrong")

    app = FastAPI(title="mmrouter control", openapi_url=None, dependencies=[Depends(authorized)])
    app.router.routes += page_routes()  # without the token, which the page itself sends

    app.add_exception_handler(RequestError, error_response)

    @app.get("/control/state")
    async def state() -> dict[str, Any]:
        return {
            **state_of(reporter.report(), fleet, placer),
            "predicts_images": prompter is None or prompter.family.places_images,
            "renderers": reporter.renderer.state(),
            "feed_keys": feed_keys(),
            **({"gateway_requests": gateway_requests()} if gateway_requests is not None else {}),
        }

    @app.get("/control/encoders")
    async def encoders() -> list[dict[str, Any]]:
        return stages.encoders()

    @app.get("/control/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(events(reporter.report, fleet, stopping), media_type="text/event-stream")

    @app.get("/control/live")
    async def live_events() -> StreamingResponse:
        if live.full:
            raise HTTPException(503, f"{MAX_PAGES} pages are open at this frontend: close one")
        return StreamingResponse(live.events(stopping), media_type="text/event-stream")

    @app.put("/control/status", status_code=204)
    async def status(request: Request) -> None:
        """Take the resource's status, which the operator sends for the live page."""
        raw = bytearray()
        async for piece in request.stream():
            raw += piece
            if len(raw) > MAX_STATUS:
                raise HTTPException(413, f"a status has at most {MAX_STATUS} bytes")
        try:
            live.take_status(bytes(raw))
        except ValueError as error:
            raise HTTPException(400, f"not a status: {error}") from error

    @app.get("/control/workers/{uid}/keys")
    async def keys(uid: str) -> dict[str, Any]:
        worker = fleet.workers.get(uid)
        if worker is None:
            raise HTTPException(404, f"no worker {uid}")

        def held(slot: Slot) -> list[str]:
            return sorted(f"{key:016x}" for key in fleet.index.keys(slot))

        return {
            "worker": worker.id,
            "epoch": worker.sync.epoch,
            "seq": worker.sync.seq,
            "synced": worker.sync.synced,
            "keys": {rank: held(slot) for rank, slot in worker.slots.items()},
            "tiers": {f"{rank}/{medium}": held(slot) for (rank, medium), slot in worker.below.items()},
        }

    @app.get("/control/decisions")
    async def latest(count: int = 50) -> list[dict[str, Any]]:
        return [trace.as_json() for trace in chat.decisions.latest(min(max(count, 1), 1000))]

    @app.get("/control/decisions/{request_id:path}")
    async def decision(request_id: str, ask: bool = True, parity: bool = False) -> JSONResponse:
        """Return a logged decision; with ``parity`` after comparing it with its worker's blocks."""
        trace = chat.decisions.get(request_id)
        if trace is not None:
            if parity:
                trace.parity = await sampler.check(trace, seconds=PARITY_SECONDS) or trace.parity
            evidence: dict[str, Any] = {"parity": None, "rendering": None}
            if trace.parity is not None and trace.expected is not None:
                evidence["parity"] = verdict_json(trace.parity, trace.expected, prompter)
            if trace.rendering is not None:
                evidence["rendering"] = rendering_json(trace.rendering, prompter)
            return JSONResponse({**_with_holders(await chat.describe(trace), fleet), **evidence})
        if ask and not without_prefix(request_id).startswith(f"{reporter.router_id}-"):
            answer = await _ask_peers(peers(), request_id, token, parity=parity)
            if answer is not None:
                return JSONResponse(answer)
        raise HTTPException(404, f"no decision {request_id} is kept")

    @app.post("/control/explain")
    async def explain(
        request: Request, path: Endpoint = CHAT, x_mmrouter_api_key: Annotated[str, Header()] = ""
    ) -> dict[str, Any]:
        """Run everything but the dispatch of a request for ``path``, for the tenant of the API key, if any."""
        tenant = chat.tenant(x_mmrouter_api_key) if x_mmrouter_api_key else DEFAULT
        prepared = await chat.prepare(path, await request.body(), tenant)
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
    if worker.member.role == "encoder" and verdict:
        verdict["standing"] = encoder_standing(ProbeState(**verdict))
    return verdict


def worker_of(worker: Worker, fleet: Fleet, placer: Placer) -> dict[str, Any]:
    beat, member = worker.heartbeat, worker.member
    return {
        **{name: getattr(member, name) for name in ("uid", "name", "ip", "pool", "role", "admitted")},
        "id": worker.id,
        "standing": placer.eligibility(worker),
        "routable": worker.routable,
        "synced": worker.sync.synced,
        "epoch": worker.sync.epoch,
        "seq": worker.sync.seq,
        **{name: getattr(beat, name, "") for name in ("engine", "engine_state", "engine_version")},
        "block_size": placer.block_size(worker),
        "draining": bool(beat and beat.draining) or worker.member.draining,
        "digests": beat.digests if beat else {},
        "canary": worker.canary,
        "canary_cause": beat.canary.cause if beat and beat.canary else "",
        "canary_message": beat.canary.message if beat and beat.canary else "",
        "feed_keys": beat.keys if beat else (),
        "device": (beat.device if beat else "") or "unknown",
        "devices": beat.devices if beat else 0,
        "requested_device": beat.requested_device if beat else "",
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
    sets = [fleet.index.holders(int(key, 16)) for key in trace["keys"]]
    held = {each: sorted(names[slot] for slot in bits(each) if slot in names) for each in set(sets)}
    return {**trace, "holders_now": [held[each] for each in sets]}


async def _ask_peers(peers: tuple[Peer, ...], request_id: str, token: str, *, parity: bool) -> Any | None:
    # Imported here, because only a request for a peer's decision needs it, and in a thread, to keep the loop free.
    aiohttp = await asyncio.to_thread(import_module, "aiohttp")
    headers, timeout = {"authorization": f"Bearer {token}"}, aiohttp.ClientTimeout(total=PEER_SECONDS)
    query = "ask=false&parity=true" if parity else "ask=false"
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for peer in peers:
            url = f"http://{address(peer.ip, CONTROL_PORT)}/control/decisions/{quote(request_id, safe='')}?{query}"
            try:
                async with session.get(url, headers=headers) as answer:
                    if answer.status == 200:
                        return await answer.json()
            except (aiohttp.ClientError, TimeoutError):
                continue  # the peer is down, and its decisions are lost
    return None
