"""Encode-only engines: images one by one, embeddings kept for others; and SGLang's distribution over them."""

import asyncio
import random
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from mmrouter_sim.core.requests import Media
from mmrouter_sim.core.step_cost import Cost
from mmrouter_sim.errors import RequestError
from mmrouter_sim.media import RecentImages
from mmrouter_sim.vllm.transfers import EcTransfer, write_embedding

DEFAULT_CAPACITY = 65_536
"""Visual tokens that are kept unless the connector's flags set another number."""


class ImageEncoder:
    """The encoder of one process."""

    def __init__(self, config: EcTransfer, cost: Cost, seed: int) -> None:
        self.stored = RecentImages(config.room or DEFAULT_CAPACITY)
        self.waiting = 0  # requests
        self.running = 0
        self.visual_tokens = 0  # encoded since the start
        self.images = self.hits = 0  # requested since the start, and found stored
        self._folder = config.folder
        self._cost, self._rng = cost, random.Random(seed)
        self._turn = asyncio.Lock()

    async def encode(self, media: Sequence[Media]) -> None:
        """Encode the images that are not stored. Raises ``OSError`` if a file cannot be written."""
        self.waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            for item in media:
                self.images += 1
                if self.stored.use(item.identifier):
                    self.hits += 1
                    continue
                seconds = self._cost.seconds(prefill=0, visual=item.length, decoding=False, rng=self._rng)
                await asyncio.sleep(seconds)
                self.visual_tokens += item.length
                if self._folder is not None:
                    write_embedding(self._folder, item.identifier, item.length)
                self.stored.put(item.identifier, item.length)
        finally:
            self.running -= 1
            self._turn.release()


RECEIVE_SECONDS: Final = 180.0
"""``SGLANG_ENCODER_RECV_TIMEOUT``."""
SEND_SECONDS: Final = 180.0
"""``SGLANG_ENCODER_SEND_TIMEOUT``."""
LOST = RequestError(
    "The encoder did not return multimodal embeddings. The request was not run locally in language-only mode.",
    status=503,
    kind="503",
)


class EncodeRequest(msgspec.Struct):
    req_id: str
    mm_items: list[str | dict[str, Any]]
    num_parts: int
    part_idx: int
    modality: str
    prefill_host: str
    embedding_port: int | None = None


class Embedding(NamedTuple):
    """A simulated embedding: a digest of the pixels, and the number of tokens."""

    digest: int
    tokens: int


class Part(msgspec.Struct):
    """Message from an encoder to the requesting engine: embeddings, or only an ``error``."""

    req_id: str
    part_idx: int
    num_parts: int
    embeddings: list[Embedding]
    error: str = ""


class EncoderShares:
    """The sockets at which one process's requests wait for encoders (``zmq_to_tokenizer`` of SGLang,
    docs/engine-facts/sglang.md#encoder-disaggregation). A language engine distributes the images of a request at random
    over its encoder URLs, posts each share to ``/encode`` and waits at its own socket for the results.
    """

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def send(self, host: str, port: int, part: Part) -> None:
        """Send a part; return once the kernel has it, as the engine does before its encoder answers. A part that is
        only queued would be lost with a process that is killed after its answer. Raises ``zmq.Again``.
        """
        with self._context.socket(zmq.PUSH) as socket:
            socket.linger, socket.sndtimeo, socket.copy_threshold = 1000, int(SEND_SECONDS * 1000), 0
            socket.set(zmq.IMMEDIATE, 1)
            socket.connect(f"tcp://{host}:{port}")
            sent = await socket.send(msgspec.msgpack.encode(part), copy=False, track=True)
            assert sent is not None
            await asyncio.to_thread(sent.wait, SEND_SECONDS)

    async def embeddings(self, host: str, urls: Sequence[str], images: list[dict[str, Any]]) -> list[Embedding]:
        """Have images encoded; return the embeddings in order. Raises :class:`RequestError` (503) if one is missing."""
        from mmrouter_sim.sglang.encoder_client import post_shares  # noqa: PLC0415

        name = uuid.uuid4().hex
        with self._context.socket(zmq.PULL) as socket:
            port = socket.bind_to_random_port(f"tcp://{host}")
            receiving = asyncio.create_task(_receive(socket, min(len(urls), len(images))))
            try:
                async with asyncio.timeout(RECEIVE_SECONDS):
                    # An encoder answers after it has sent its result, so after an error there is none.
                    if not await post_shares(split_shares(name, host, port, urls, images)):
                        raise LOST
                    parts = await receiving
            except TimeoutError as error:
                raise LOST from error
            finally:
                receiving.cancel()
                await asyncio.gather(receiving, return_exceptions=True)
        if any(part.error for part in parts):
            raise LOST
        return [each for part in sorted(parts, key=lambda part: part.part_idx) for each in part.embeddings]


async def _receive(socket: zmq.asyncio.Socket, shares: int) -> list[Part]:
    parts: dict[int, Part] = {}
    while len(parts) < shares:
        part = msgspec.msgpack.decode(await socket.recv(), type=Part)
        parts[part.part_idx] = part
    return list(parts.values())


def split_shares(
    name: str, host: str, port: int, urls: Sequence[str], images: list[dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield URL and body of every share: equal sizes, over the URLs in random order."""
    shuffled = random.sample(range(len(urls)), len(urls))
    base, rest = divmod(len(images), len(urls))
    counts = {place: base + (number < rest) for number, place in enumerate(shuffled)}
    taken = [place for place in range(len(urls)) if counts[place]]
    start = 0
    for number, place in enumerate(taken):
        items = images[start : start + counts[place]]
        start += counts[place]
        yield (
            f"{urls[place]}/encode",
            {
                "encoder_idx": place,
                "encoder_url": urls[place],
                "mm_items": [item["url"] if set(item) == {"url"} else item for item in items],
                "num_parts": len(taken),
                "part_idx": number,
                "req_id": f"{name}_local_part_{number}",
                "modality": "IMAGE",
                "prefill_host": host,
                "embedding_port": port,
                "time_stats_json": None,
            },
        )
