"""Client side of SGLang's encoder disaggregation: distribute a request's images over encoders, and collect results.

It simulates ``zmq_to_tokenizer`` (docs/engine-facts/sglang.md#encoder-disaggregation). A language engine distributes
the images of a request at random over its encoder URLs, posts each share to ``/encode`` and waits at its own socket for
the results. A simulated embedding is a number made from the pixels, which also names the image, and a token count.
"""

import asyncio
import random
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from mmrouter_sim.errors import RequestError

RECEIVE_SECONDS: Final = 180.0
"""``SGLANG_ENCODER_RECV_TIMEOUT``."""
LOST = RequestError(
    "The encoder did not return multimodal embeddings. The request was not run locally in language-only mode.",
    status=503,
    kind="503",
)


class EncodeRequest(msgspec.Struct):
    """``POST /encode``."""

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
    embeddings: list[tuple[int, int]]
    error: str = ""


class EncoderShares:
    """The sockets at which one process's requests wait for encoders."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=0)

    async def send(self, host: str, port: int, part: Part) -> None:
        """Send a result to the engine that waits for it."""
        with self._context.socket(zmq.PUSH) as socket:
            socket.linger = 1000
            socket.connect(f"tcp://{host}:{port}")
            await socket.send(msgspec.msgpack.encode(part))

    async def embeddings(self, host: str, urls: Sequence[str], images: list[dict[str, Any]]) -> list[Embedding]:
        """Have images encoded; return the embeddings in order. Raises :class:`RequestError` (503) if one is missing."""
        name = uuid.uuid4().hex
        with self._context.socket(zmq.PULL) as socket:
            port = socket.bind_to_random_port(f"tcp://{host}")
            receiving = asyncio.create_task(_receive(socket, min(len(urls), len(images))))
            try:
                async with asyncio.timeout(RECEIVE_SECONDS), aiohttp.ClientSession() as session:
                    shares = split_shares(name, host, port, urls, images)
                    # An encoder answers after it has sent its result, so after an error there is none.
                    if not all(await asyncio.gather(*(_post(session, url, body) for url, body in shares))):
                        raise LOST
                    parts = await receiving
            except TimeoutError as error:
                raise LOST from error
            finally:
                receiving.cancel()
                await asyncio.gather(receiving, return_exceptions=True)
        if any(part.error for part in parts):
            raise LOST
        return [Embedding(*one) for part in sorted(parts, key=lambda part: part.part_idx) for one in part.embeddings]


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


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> bool:
    try:
        async with session.post(url, json=body) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False
