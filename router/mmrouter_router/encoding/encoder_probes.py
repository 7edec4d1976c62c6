"""Probe encoders, which no canary verifies: their health, and that they encode an image (docs/architecture.md).

Every router probes for itself, because the result is whether *this* frontend reaches the pod.
"""

import asyncio
import base64
import logging
from typing import NamedTuple

import orjson

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.base.request_rewriting import ImageRewrite
from mmrouter_lib.engines.vllm.stage_requests import StageError, encode_request, read_encoded
from mmrouter_router.core.probe_images import new_nonce, small_pictures
from mmrouter_router.fleet.workers import Fleet, Worker
from mmrouter_router.http.upstream import Upstream, UpstreamError

log = logging.getLogger("mmrouter.probes")

STEP_SECONDS = 1.0
"""Interval of the loop, and of probes of an encoder that failed."""
REPEAT_SECONDS = 10.0
"""Interval of probes of an encoder that succeeded."""
HEALTH_SECONDS, ENCODE_SECONDS = 5.0, 30.0
MAX_ANSWER = 64 << 10


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
        self._fleet, self._upstream, self._engine = fleet, upstream, adapter(engine)
        self._key, self._model = engine_key, served_model
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
            return ProbeState(
                True, "Unknown", "not_probed", f"an encoder of {self._engine.type} answers no plain request"
            )
        if result.encoded is None:
            return ProbeState(True, "Unknown", "pending", "no image has been encoded yet")
        return ProbeState(True, "False", "encoding", result.encoded) if result.encoded else ProbeState(True, "True")

    async def run(self) -> None:
        """Probe encoders that are due; ends only by cancellation."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for worker in self._fleet:
                    if worker.member.uid not in self._running and self._due(worker):
                        self._running.add(worker.member.uid)
                        tasks.create_task(self._probe(worker), name=f"probe {worker.member.name}")
                for uid in self._results.keys() - self._fleet.workers.keys():
                    del self._results[uid]
                await asyncio.sleep(STEP_SECONDS)

    def _due(self, worker: Worker) -> bool:
        if worker.member.role != "encoder":
            return False
        result = self._results.get(worker.member.uid)
        if result is None or result.boot != worker.id:
            return True
        failed = result.error or result.encoded
        return self._fleet.now() - result.at >= (STEP_SECONDS if failed else REPEAT_SECONDS)

    async def _probe(self, worker: Worker) -> None:
        boot, before = worker.id, self._results.get(worker.member.uid)
        encoded = before.encoded if before is not None and before.boot == boot else None
        try:
            error, _ = await self._ask(worker, "GET", "/health", HEALTH_SECONDS)
            if not error and not self._engine.asks_encoders_itself and encoded != "":
                encoded = await self._encode(worker)
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
        error, raw = await self._ask(worker, "POST", "/v1/chat/completions", ENCODE_SECONDS, body)
        if error:
            return error
        try:
            read_encoded(raw, [image.uuid])
        except StageError as unusable:
            return str(unusable)
        return ""

    async def _ask(
        self, worker: Worker, method: str, path: str, seconds: float, body: bytes = b""
    ) -> tuple[str, bytes]:
        """Return the error, empty for a complete 200, and the answer."""
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        try:
            async with asyncio.timeout(seconds):
                answer = await self._upstream.request(worker.member.ip, HTTP_PORT, method, path, headers, body)
                try:
                    raw = await answer.read(MAX_ANSWER)
                finally:
                    answer.close()
        except TimeoutError:
            return f"no answer within {seconds:g} s", b""
        except UpstreamError as error:
            return str(error), b""
        return "" if answer.status == 200 else f"answered {answer.status}: {raw[:200].decode(errors='replace')}", raw
