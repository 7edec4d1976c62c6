"""Pods that no canary proves: encoders are asked for their health, decoders for one token (DESIGN.md 5.3).

Every router asks for itself, because the question is whether *this* frontend reaches the pod. The answers are for the
readiness gates alone; no client's request is placed by them.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import NamedTuple

import orjson

from mmrouter.engines.launching import HTTP_PORT
from mmrouter_router.fleet import Fleet, Worker
from mmrouter_router.own import new_nonce
from mmrouter_router.upstream import Upstream, UpstreamError

log = logging.getLogger("mmrouter.probes")

STEP_SECONDS = 1.0
"""How often is looked who is to be asked, and how soon an encoder that did not answer is asked again."""
AGAIN_SECONDS = 10.0
"""When an encoder that answered, or a decoder that failed, is asked again."""
HEALTH_SECONDS, GENERATE_SECONDS = 5.0, 30.0
MAX_ANSWER = 64 << 10


class Standing(NamedTuple):
    """What the table of DESIGN.md 5.3 asks of one pod. ``verified``: True, False or Unknown.

    ``cause`` is one of few words, empty where both are true; ``message`` is a sentence for people.
    """

    routable: bool
    verified: str
    cause: str = ""
    message: str = ""


class _Asked(NamedTuple):
    """The last question to a pod: to which start of its engine, when, and what was wrong (empty: nothing)."""

    boot: str
    at: float
    error: str


class Probes:
    """Asks encoders and decoders, and knows what they said."""

    def __init__(self, fleet: Fleet, upstream: Upstream, engine: str, engine_key: str, served_model: str) -> None:
        self._fleet, self._upstream, self._engine = fleet, upstream, engine
        self._key, self._model = engine_key, served_model
        self._asked: dict[str, _Asked] = {}
        self._running: set[str] = set()

    def encoder(self, worker: Worker) -> Standing:
        """Routable once its health answers. Nothing proves an image yet: no request uses an encoder."""
        asked = self._asked.get(worker.member.uid)
        if worker.member.draining:
            return Standing(False, "Unknown", "draining", "it lets its last requests finish")
        if asked is None or asked.error:
            return Standing(False, "Unknown", "not_answered", asked.error if asked else "it has not answered yet")
        return Standing(True, "Unknown", "not_probed", "no image of ours is encoded to prove it")

    def decode(self, worker: Worker) -> Standing:
        """A decoder whose heartbeat is seen: verified once one generation through it worked, per engine start."""
        if self._engine != "vllm":
            return Standing(True, "Unknown", "not_probed", f"a decoder of {self._engine} answers no plain request")
        asked = self._asked.get(worker.member.uid)
        if asked is None or asked.boot != worker.id:
            return Standing(True, "Unknown", "pending", "nothing has been generated through it yet")
        return Standing(True, "False", "generation", asked.error) if asked.error else Standing(True, "True")

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
        asked = self._asked.get(worker.member.uid)
        age = self._fleet.now() - asked.at if asked else float("inf")
        if worker.member.role == "encoder":
            return age >= (STEP_SECONDS if asked and asked.error else AGAIN_SECONDS)
        if worker.member.role != "decode" or self._engine != "vllm" or not worker.serving:
            return False
        if asked is None or asked.boot != worker.id:
            return True
        return bool(asked.error) and age >= AGAIN_SECONDS

    async def _ask(self, worker: Worker) -> None:
        boot = worker.id
        try:
            if worker.member.role == "encoder":
                error = await self._question(worker, "GET", "/health", HEALTH_SECONDS)
            else:
                messages = [{"role": "user", "content": new_nonce()}]
                body = {"model": self._model, "messages": messages, "max_tokens": 1, "temperature": 0}
                error = await self._question(worker, "POST", "/v1/chat/completions", GENERATE_SECONDS, body)
        finally:
            self._running.discard(worker.member.uid)
        before = self._asked.get(worker.member.uid)
        if before is None or before.error != error:
            log.info("%s: %s", worker.member.name, error or "answered")
        self._asked[worker.member.uid] = _Asked(boot, self._fleet.now(), error)

    async def _question(
        self, worker: Worker, method: str, path: str, seconds: float, body: Mapping[str, object] | None = None
    ) -> str:
        """Return what was wrong with the answer; empty for a whole 200."""
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        raw = orjson.dumps(body) if body is not None else b""
        try:
            async with asyncio.timeout(seconds):
                answer = await self._upstream.request(worker.member.ip, HTTP_PORT, method, path, headers, raw)
                try:
                    said = await answer.read(MAX_ANSWER)
                finally:
                    answer.close()
        except TimeoutError:
            return f"no answer within {seconds:g} s"
        except UpstreamError as error:
            return str(error)
        return "" if answer.status == 200 else f"answered {answer.status}: {said[:200].decode(errors='replace')}"
