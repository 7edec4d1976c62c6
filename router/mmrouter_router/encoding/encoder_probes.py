"""Encoders, which no canary proves: each is asked for its health, and once to encode an image (docs/architecture.md).

Every router asks for itself, because the question is whether *this* frontend reaches the pod.
"""

import asyncio
import base64
import logging
from typing import NamedTuple

import orjson

from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.base.request import ImageRewrite
from mmrouter_lib.engines.vllm.disaggregation import StageError, encode_request, read_encoded
from mmrouter_router.core.probe_images import new_nonce, small_pictures
from mmrouter_router.fleet.workers import Fleet, Worker
from mmrouter_router.http.upstream import Upstream, UpstreamError

log = logging.getLogger("mmrouter.probes")

STEP_SECONDS = 1.0
"""How often is looked who is to be asked, and how soon an encoder that did not answer is asked again."""
AGAIN_SECONDS = 10.0
"""When an encoder that answered is asked again."""
HEALTH_SECONDS, ENCODE_SECONDS = 5.0, 30.0
MAX_ANSWER = 64 << 10


class Standing(NamedTuple):
    """What the table of docs/architecture.md asks of one pod. ``verified``: True, False or Unknown.

    ``cause`` is one of few words, empty where both are true; ``message`` is a sentence for people.
    """

    routable: bool
    verified: str
    cause: str = ""
    message: str = ""


class _Asked(NamedTuple):
    """What one start of an encoder said when. ``encoded``: what was wrong with its image, ``None``: not asked."""

    boot: str
    at: float
    error: str
    encoded: str | None = None


class Probes:
    """Asks encoders, and knows what they said."""

    def __init__(self, fleet: Fleet, upstream: Upstream, engine: str, engine_key: str, served_model: str) -> None:
        self._fleet, self._upstream, self._engine = fleet, upstream, engine
        self._key, self._model = engine_key, served_model
        self._asked: dict[str, _Asked] = {}
        self._running: set[str] = set()

    def encoder(self, worker: Worker) -> Standing:
        """Routable once its health answers, verified once it encoded an image of ours."""
        asked = self._asked.get(worker.member.uid)
        if worker.member.draining:
            return Standing(False, "Unknown", "draining", "it lets its last requests finish")
        if asked is None or asked.error or asked.boot != worker.id:
            return Standing(False, "Unknown", "not_answered", asked.error if asked else "it has not answered yet")
        if adapter(self._engine).asks_encoders_itself:
            return Standing(True, "Unknown", "not_probed", f"an encoder of {self._engine} answers no plain request")
        if asked.encoded is None:
            return Standing(True, "Unknown", "pending", "no image has been encoded yet")
        return Standing(True, "False", "encoding", asked.encoded) if asked.encoded else Standing(True, "True")

    async def run(self) -> None:
        """Ask whoever is due; ends only by cancellation."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for worker in self._fleet:
                    if worker.member.uid not in self._running and self._due(worker):
                        self._running.add(worker.member.uid)
                        tasks.create_task(self._ask(worker), name=f"probe {worker.member.name}")
                for uid in self._asked.keys() - self._fleet.workers.keys():
                    del self._asked[uid]
                await asyncio.sleep(STEP_SECONDS)

    def _due(self, worker: Worker) -> bool:
        if worker.member.role != "encoder":
            return False
        asked = self._asked.get(worker.member.uid)
        if asked is None or asked.boot != worker.id:
            return True
        settled = not asked.error and not asked.encoded
        return self._fleet.now() - asked.at >= (AGAIN_SECONDS if settled else STEP_SECONDS)

    async def _ask(self, worker: Worker) -> None:
        boot, before = worker.id, self._asked.get(worker.member.uid)
        encoded = before.encoded if before is not None and before.boot == boot else None
        try:
            error, _ = await self._question(worker, "GET", "/health", HEALTH_SECONDS)
            if not error and not adapter(self._engine).asks_encoders_itself and encoded != "":
                encoded = await self._encode(worker)
        finally:
            self._running.discard(worker.member.uid)
        now = _Asked(boot, self._fleet.now(), error, encoded)
        self._asked[worker.member.uid] = now
        if before is None or before[2:] != now[2:] or before.boot != boot:
            log.info("%s: %s", worker.member.name, error or encoded or "encodes")
            self._fleet.changed()

    async def _encode(self, worker: Worker) -> str:
        """Return what was wrong with encoding a small image under a name that nobody else has; empty: nothing."""
        uri = f"data:image/png;base64,{base64.b64encode(small_pictures()[0]).decode()}"
        image = ImageRewrite(0, 0, uri, new_nonce())
        body = orjson.dumps(encode_request([image], model=self._model))
        error, raw = await self._question(worker, "POST", "/v1/chat/completions", ENCODE_SECONDS, body)
        if error:
            return error
        try:
            read_encoded(raw, [image.uuid])
        except StageError as unusable:
            return str(unusable)
        return ""

    async def _question(
        self, worker: Worker, method: str, path: str, seconds: float, body: bytes = b""
    ) -> tuple[str, bytes]:
        """Return what was wrong with the answer, empty for a whole 200, and the answer."""
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        try:
            async with asyncio.timeout(seconds):
                answer = await self._upstream.request(worker.member.ip, HTTP_PORT, method, path, headers, body)
                try:
                    said = await answer.read(MAX_ANSWER)
                finally:
                    answer.close()
        except TimeoutError:
            return f"no answer within {seconds:g} s", b""
        except UpstreamError as error:
            return str(error), b""
        return "" if answer.status == 200 else f"answered {answer.status}: {said[:200].decode(errors='replace')}", said
