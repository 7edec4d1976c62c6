"""The encoder pods of a deployment: probes of them, which of them take images, and how an image is posted to one.

Every router probes for itself, because the result is whether *this* frontend reaches the pod. SGLang's engines send
images to encoders themselves: their sidecars get the list from the router, so no engine pod needs the API server.
"""

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import orjson

from mmrouter_lib import feed
from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.adapter import ImageRewrite
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_lib.engines.sglang.launch import ASKS_ENCODERS
from mmrouter_lib.engines.vllm.stage_requests import StageError, encode_request, read_encoded
from mmrouter_router.core.settings import Settings
from mmrouter_router.encoding.encoder_queue import Encoder
from mmrouter_router.encoding.encoder_weights import EncoderWeights
from mmrouter_router.fleet.feed_client import FeedClient, FeedRequestError
from mmrouter_router.fleet.workers import Fleet, Worker, prefer_admitted
from mmrouter_router.handover.request_delivery import AddressedRequest, BufferedAnswer, Delivery
from mmrouter_router.http.engine_connection import Body, UpstreamError
from mmrouter_router.http.engine_requests import EngineRequestError, EngineRequests
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.request.prepared import CHAT, Outgoing, OutgoingImage
from mmrouter_router.request.renderer_client import new_nonce, small_pictures

log = logging.getLogger("mmrouter.encoders")

MAX_ANSWER = 1 << 20
PROBE_SECONDS = 1.0  # interval of the loop, and of probes of an encoder that failed
PROBE_AGAIN_SECONDS = 10.0  # interval of probes of an encoder that succeeded
HEALTH_SECONDS, ENCODE_SECONDS = 5.0, 30.0
ANNOUNCE_SECONDS = 0.5  # interval at which changes are announced
ANNOUNCE_AGAIN_SECONDS = 5.0  # interval at which an unchanged list is repeated, for sidecars that restarted

Listed = tuple[tuple[str, str], ...]


class ProbeState(NamedTuple):
    """State of one pod for the table of docs/architecture.md. ``verified``: True, False or Unknown.

    ``cause`` is a condition reason, empty where both are true; ``message`` is a sentence for people.
    """

    routable: bool
    verified: str
    cause: str = ""
    message: str = ""


class _Result(NamedTuple):
    """Result of probing one start of an encoder. ``encoded``: the error of encoding, ``None`` where not probed."""

    boot: str
    at: float
    error: str
    encoded: str | None = None


class EncoderProbes:
    """Probes the encoders of a fleet in the background and keeps the results."""

    def __init__(
        self, fleet: Fleet, upstream: Upstream, engine: EngineType, engine_key: str, served_model: str
    ) -> None:
        self._fleet, self._engine = fleet, adapter(engine)
        self._ask, self._model = EngineRequests(upstream, engine_key).ask, served_model
        self._results: dict[str, _Result] = {}
        self._running: set[str] = set()

    def encoder(self, worker: Worker) -> ProbeState:
        """Return an encoder's state: routable once its health answers, verified once it encoded a probe image."""
        result = self._results.get(worker.member.uid)
        if worker.member.draining:
            return ProbeState(False, "Unknown", "draining", "the pod is draining")
        if result is None or result.error or result.boot != worker.id:
            return ProbeState(False, "Unknown", "not_answered", result.error if result else "no answer yet")
        if self._engine.asks_encoders_itself:
            message = f"an encoder of {self._engine.type} answers no plain request"
            return ProbeState(True, "Unknown", "not_probed", message)
        if result.encoded is None:
            return ProbeState(True, "Unknown", "pending", "no image has been encoded yet")
        return ProbeState(True, "False", "encoding", result.encoded) if result.encoded else ProbeState(True, "True")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                for worker in self._fleet:
                    if worker.member.uid not in self._running and self._due(worker):
                        self._running.add(worker.member.uid)
                        tasks.create_task(self._probe(worker), name=f"probe {worker.member.name}")
                for uid in self._results.keys() - self._fleet.workers.keys():
                    del self._results[uid]
                await asyncio.sleep(PROBE_SECONDS)

    def _due(self, worker: Worker) -> bool:
        if worker.member.role != "encoder":
            return False
        result = self._results.get(worker.member.uid)
        if result is None or result.boot != worker.id:
            return True
        failed = result.error or result.encoded
        return self._fleet.now() - result.at >= (PROBE_SECONDS if failed else PROBE_AGAIN_SECONDS)

    async def _probe(self, worker: Worker) -> None:
        boot, before = worker.id, self._results.get(worker.member.uid)
        encoded = before.encoded if before is not None and before.boot == boot else None
        error = ""
        try:
            await self._ask(worker.member.ip, "/health", None, bytes, HEALTH_SECONDS, MAX_ANSWER)
            if not self._engine.asks_encoders_itself and encoded != "":
                encoded = await self._encode(worker)
        except EngineRequestError as failed:
            error = str(failed)
        finally:
            self._running.discard(worker.member.uid)
        now = _Result(boot, self._fleet.now(), error, encoded)
        self._results[worker.member.uid] = now
        if before is None or before[2:] != now[2:] or before.boot != boot:
            log.info("%s: %s", worker.member.name, error or encoded or "encodes")
            self._fleet.changed()

    async def _encode(self, worker: Worker) -> str:
        """Return the error of encoding a small image under a unique name, empty for success."""
        uri = f"data:image/png;base64,{base64.b64encode(small_pictures()[0]).decode()}"
        image = ImageRewrite(0, 0, uri, new_nonce())
        body = orjson.dumps(encode_request([image], model=self._model))
        try:
            raw = await self._ask(worker.member.ip, CHAT, body, bytes, ENCODE_SECONDS, MAX_ANSWER)
            read_encoded(raw, [image.uuid])
        except (EngineRequestError, StageError) as error:
            return str(error)
        return ""


class EncoderPods:
    """Encoders of the fleet for the image scheduler, by engine start, because a restart empties their caches."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        probes: EncoderProbes,
        upstream: Upstream,
        delivery: Delivery,
        weights: EncoderWeights,
    ) -> None:
        deployment, spec, self._weights = settings.deployment, settings.deployment.spec, weights
        self._pools = {pool.name: pool for pool in spec.pools if pool.role == "encoder"}
        cache_bytes = LAUNCHERS[spec.engine.type].embedding_cache_bytes
        self._cache_bytes = {name: cache_bytes(deployment, pool) for name, pool in self._pools.items()}
        self._admission_seconds = spec.verification.timeout_seconds
        self._refuses = spec.verification.on_failure == "Refuse"
        self._fleet, self._probes, self._upstream = fleet, probes, upstream
        self._model, self._delivery = settings.served_model, delivery
        self._headers = {
            "authorization": f"Bearer {settings.engine_key}",
            "content-type": "application/json",
            "accept-encoding": "identity",
        }

    def encoders(self) -> list[Encoder]:
        encoders = (w for w in self._fleet if w.member.role == "encoder" and w.member.pool in self._pools)
        taking = (worker for worker in encoders if self._takes_images(worker))
        admitted = prefer_admitted(taking, self._fleet.now(), self._admission_seconds)
        return [self._encoder(worker) for worker in admitted]

    def _encoder(self, worker: Worker) -> Encoder:
        pool = self._pools[worker.member.pool]
        encoder = Encoder(_id(worker), pool.accelerator.kind, weight=self._weights.of(pool.name))
        size = self._cache_bytes[pool.name]
        return encoder if size is None else replace(encoder, cache_bytes=size)

    async def post(
        self, encoder: str, image: OutgoingImage, headers: Mapping[str, str], transfers: list[dict[str, Any]]
    ) -> tuple[int, bytes]:
        """Send an image to an encoder; returns status and answer. ``transfers`` gets the image's transfer.

        Raises :class:`UpstreamError`.
        """
        worker = next((worker for worker in self._fleet if _id(worker) == encoder), None)
        if worker is None:
            raise UpstreamError(f"encoder {encoder} has left", sent=False)

        async def post(body: Body) -> BufferedAnswer:
            address, sent = (worker.member.ip, HTTP_PORT), {**headers, **self._headers}
            return BufferedAnswer(*await self._upstream.ask(address, "POST", CHAT, sent, body, limit=MAX_ANSWER))

        alone = replace(image, message=0, part=0)
        outgoing = Outgoing(CHAT, encode_request([alone.rewrite()], model=self._model), (alone,))
        answer = await self._delivery.send(AddressedRequest(worker, outgoing, outgoing.fields), post, transfers)
        return answer.status, answer.raw

    def _takes_images(self, worker: Worker) -> bool:
        state = self._probes.encoder(worker)
        down = worker.heartbeat is not None and not worker.serving  # the sidecar reports it before the next probe
        return state.routable and not down and not (self._refuses and state.verified != "True")


def _id(worker: Worker) -> str:
    """Return ``<pod name>/<boot id>``, which decisions show to people."""
    return f"{worker.member.name}/{worker.id.rpartition('/')[2]}"


def heard_encoders(fleet: Fleet) -> list[str]:
    """Return the uids of the encoder pods whose sidecars are not silent."""
    return [worker.member.uid for worker in fleet if worker.member.role == "encoder" and worker.sync.synced]


class EncoderAnnouncer:
    """Sends the list of encoders to every engine that needs it."""

    def __init__(
        self,
        router_id: str,
        fleet: Fleet,
        feeder_of: Callable[[str], FeedClient | None],
        admission_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``admission_seconds``: how long closed readiness gates keep an encoder off the list."""
        self._router_id, self._fleet, self._feeder_of = router_id, fleet, feeder_of
        self._admission_seconds, self._clock = admission_seconds, clock
        self._announced: dict[str, tuple[float, Listed]] = {}

    @property
    def listed(self) -> Listed:
        """Name and address of every admitted encoder whose engine is up and not draining."""
        up = (worker for worker in self._fleet if worker.member.role == "encoder" and worker.serving)
        encoders = prefer_admitted(up, self._fleet.now(), self._admission_seconds)
        return tuple(sorted((worker.member.name, worker.member.ip) for worker in encoders))

    async def run(self) -> None:
        while True:
            await self.announce()
            await asyncio.sleep(ANNOUNCE_SECONDS)

    async def announce(self) -> None:
        """Send the list to every engine that has another one, or got it :data:`ANNOUNCE_AGAIN_SECONDS` ago."""
        listed, now = self.listed, self._clock()
        engines = {w.member.uid: w for w in self._fleet if w.member.role in ASKS_ENCODERS}
        self._announced = {uid: sent for uid, sent in self._announced.items() if uid in engines}
        sent = self._announced.items()
        current = {uid for uid, (at, got) in sent if got == listed and now - at < ANNOUNCE_AGAIN_SECONDS}
        await asyncio.gather(*(self._announce(engines[uid], listed, now) for uid in engines.keys() - current))

    async def _announce(self, worker: Worker, listed: Listed, now: float) -> None:
        feeder = self._feeder_of(worker.member.uid)
        if feeder is None:
            return
        try:
            await feeder.request(lambda number: feed.EncoderAddresses(number, self._router_id, listed))
        except FeedRequestError as error:
            log.debug("%s: announcing the encoders failed: %s", worker.member.name, error)
        else:
            self._announced[worker.member.uid] = (now, listed)
