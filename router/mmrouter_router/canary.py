"""The canary: once per worker and epoch, two tiny images under one text, predicted and compared (DESIGN.md 5.1)."""

import asyncio
import base64
import io
import logging
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from PIL import Image

from mmrouter import feed
from mmrouter.blocks import block_keys
from mmrouter.engines.events import Stored
from mmrouter.engines.vllm import EventError, ImageRewrite, decode_batch, rewrite_chat
from mmrouter.identity import media_identity, to_wire
from mmrouter.prompt import PromptImage, TemplateError
from mmrouter_router.feeds import Feed
from mmrouter_router.fleet import Fleet, Worker
from mmrouter_router.forward import ENGINE_PORT
from mmrouter_router.metrics import Metrics
from mmrouter_router.parity import Difference, Prediction, first_difference
from mmrouter_router.prepare import Preparer
from mmrouter_router.upstream import Upstream, UpstreamError

log = logging.getLogger("mmrouter.canary")

LEASE_SECONDS = 30.0
EVENTS_SECONDS = 5.0
SIDE = 64  # pixels; a handful of tokens in every family


@dataclass(frozen=True, slots=True)
class Probe:
    """One canary request: its body for the engine and what we expect to be published."""

    body: bytes
    prediction: Prediction
    keys: "array[int]"


class CanaryError(Exception):
    """The canary could not be carried out; nothing is known about exactness. The message says why."""


class Canary:
    """Runs canaries against workers and hands the results to their sidecars."""

    def __init__(
        self,
        router_id: str,
        fleet: Fleet,
        preparer: Preparer,
        upstream: Upstream,
        engine_key: str,
        served_model: str,
        identity_key: bytes,
        metrics: Metrics,
    ) -> None:
        self._router_id, self._fleet, self._preparer, self._upstream = router_id, fleet, preparer, upstream
        self._engine_key, self._model, self._identity_key = engine_key, served_model, identity_key
        self._metrics = metrics

    async def verify(self, worker: Worker, feeder: Feed, block_size: int) -> feed.Canary | None:
        """Claim the canary of the worker's epoch and run it. ``None``: another router holds the claim, or it moved on.

        Raises :class:`CanaryError` or ``FeedSilentError`` when it could not be carried out.
        """
        epoch = worker.follower.epoch
        claim = (await feeder.question(lambda n: feed.CanaryClaim(n, epoch, self._router_id, LEASE_SECONDS)))[-1]
        if not isinstance(claim, feed.ClaimAnswer) or not claim.granted:
            return None
        difference: Difference | None = None
        compared = 0
        for rank in range(worker.ranks):
            difference, blocks = await self._compare(worker, rank, feeder, block_size)
            compared += blocks
            if difference is not None:
                break
        result = feed.Canary(
            epoch=epoch,
            result="True" if difference is None else "False",
            cause=difference.cause if difference else "",
            message=difference.message if difference else "",
            compared=compared,
            router=self._router_id,
        )
        self._metrics.parity.labels(result.result, result.cause).inc()
        await feeder.question(lambda n: feed.CanaryResult(n, result))
        log.info("%s: canary %s, %d blocks %s", worker.member.name, result.result, compared, result.message)
        return result

    async def _compare(self, worker: Worker, rank: int, feeder: Feed, block_size: int) -> tuple[Difference | None, int]:
        nonce = secrets.token_hex(8)
        compared = 0
        for colour in ("#c02030", "#2030c0"):
            probe = self._probe(nonce, colour, block_size)
            before = worker.follower.seq
            await self._send(worker, rank, probe)
            missing = await self._missing(worker, rank, probe)
            if missing:
                stored = await self._published(worker, rank, feeder, before)
                found = first_difference(probe.prediction, stored)
                return found or Difference(
                    "unknown", f"{missing} of {len(probe.keys)} predicted keys never came"
                ), compared
            compared += len(probe.keys)
        return None, compared

    def _probe(self, nonce: str, colour: str, block_size: int) -> Probe:
        family, prompter = self._preparer.family, self._preparer.prompter
        if family is None or prompter is None:
            raise CanaryError(f"family {self._preparer.unknown_family} is not modelled")
        picture = io.BytesIO()
        Image.new("RGB", (SIDE, SIDE), colour).save(picture, "PNG")
        data = picture.getvalue()
        identity = media_identity(data, family.pixel_options, key=self._identity_key)
        image = PromptImage(identity, family.count(SIDE, SIDE))
        # The nonce stands first, so no block of the canary is in a cache from an earlier one. The tail makes at least
        # one complete block follow the image, whatever the block size.
        tail = " ".join(nonce for _ in range(2 + block_size // 4))
        for system in (True, False):
            messages = _messages(nonce, tail, system=system)
            try:
                text = prompter.render(messages)
                break
            except TemplateError:
                if not system:
                    raise
        expanded = prompter.expand(text, [image])
        uri = "data:image/png;base64," + base64.b64encode(data).decode()
        body = {"model": self._model, "messages": messages, "max_tokens": 1, "temperature": 0}
        where = (len(messages) - 1, 1)
        rewritten = rewrite_chat(
            body,
            [ImageRewrite(message=where[0], part=where[1], url=uri, uuid=to_wire(identity))],
            model=self._model,
            cache_salt=None,
        )
        keys = block_keys(expanded.ids, block_size, expanded.spans, self._preparer.seed(None))
        prediction = Prediction(expanded.ids, expanded.spans, block_size, None, family.placeholder_id)
        return Probe(orjson.dumps(rewritten.body), prediction, keys)

    async def _send(self, worker: Worker, rank: int, probe: Probe) -> None:
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._engine_key}"}
        if worker.ranks > 1:
            headers["x-data-parallel-rank"] = str(rank)
        try:
            answer = await self._upstream.request(
                worker.member.ip, ENGINE_PORT, "POST", "/v1/chat/completions", headers, probe.body
            )
            try:
                body = await answer.read(64 * 1024)
            finally:
                answer.close()
        except UpstreamError as error:
            raise CanaryError(str(error)) from error
        if answer.status != 200:
            raise CanaryError(f"the engine answered {answer.status}: {body[:200].decode(errors='replace')}")

    async def _missing(self, worker: Worker, rank: int, probe: Probe) -> int:
        """Wait until every predicted key is in the index; return how many never came."""
        missing = len(probe.keys)
        try:
            async with asyncio.timeout(EVENTS_SECONDS):
                while True:
                    worker.moved.clear()
                    slot = worker.slots.get(rank)
                    held = self._fleet.index.match(probe.keys, [slot])[slot] if slot is not None else 0
                    missing = len(probe.keys) - held
                    if not missing:
                        return 0
                    await worker.moved.wait()
        except TimeoutError:
            return missing

    async def _published(self, worker: Worker, rank: int, feeder: Feed, before: int) -> Sequence[Stored]:
        """The blocks that the engine stored since delta ``before``, decoded from its raw batches."""
        end = worker.follower.seq
        if end <= before:
            return ()
        epoch = worker.follower.epoch
        stored: list[Stored] = []
        for part in await feeder.question(lambda n: feed.Detail(n, epoch, before + 1, end)):
            if isinstance(part, feed.DetailPart):
                for raw in part.batches:
                    try:
                        batch = decode_batch(raw.payload)
                    except EventError:
                        continue  # counted by the sidecar, which has seen the same bytes
                    if raw.rank == rank:
                        stored += [event for event in batch.events if isinstance(event, Stored)]
        return stored


def _messages(nonce: str, tail: str, *, system: bool) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": f"{nonce} look"},
        {"type": "image_url", "image_url": {"url": ""}},
        {"type": "text", "text": tail},
    ]
    head = [{"role": "system", "content": f"{nonce} canary"}] if system else []
    return [*head, {"role": "user", "content": content}]
