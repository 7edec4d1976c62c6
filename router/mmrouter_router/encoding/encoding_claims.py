"""A frontend's claims of images that it wants encoded, so that each is encoded once (docs/disaggregation.md).

One encoder's sidecar keeps the claim and the place of the embedding of an image; rendezvous hashing selects the same
one in all frontends. A frontend without peers claims nothing. If the sidecar does not answer, every claim is granted.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple

import orjson

from mmrouter_lib import feed
from mmrouter_router.fleet.feed_client import FeedClient, FeedRequestError

log = logging.getLogger("mmrouter.encoding")

LEASE_SECONDS: Final = 3.0  # time without a renewal after which another frontend gets the claim
RENEW_SECONDS: Final = 1.0
ANSWER_SECONDS: Final = 0.5


class Held(NamedTuple):
    """An embedding that another frontend requested. ``answer``: the encoder's parameters for it."""

    encoder: str
    size: int
    answer: dict[str, Any]


class EncodingClaims:
    """Claims images at the sidecars of the encoders, and reports embeddings to them."""

    def __init__(
        self,
        router_id: str,
        encoder_pods: Callable[[], Iterable[str]],
        feed_of: Callable[[str], FeedClient | None],
        has_peers: Callable[[], bool],
    ) -> None:
        """``encoder_pods``: uids of the pods whose sidecars get claims; ``feed_of``: uid -> its feed client."""
        self._router_id, self._pods, self._feed_of, self._has_peers = router_id, encoder_pods, feed_of, has_peers
        self._leases: dict[bytes, tuple[str, ...]] = {}  # key -> the encoders that the claim named
        self._reporting: set[asyncio.Task[feed.Reply | None]] = set()

    async def claim(self, key: bytes, encoders: Collection[str]) -> Held | Literal["granted", "pending"]:
        """Claim an image for this frontend, or return where its embedding is or that another frontend has the claim."""
        if not self._has_peers():
            return "granted"
        named = tuple(encoders)
        reply = await self._ask(key, lambda n: feed.EmbeddingClaim(n, self._router_id, key, named, LEASE_SECONDS))
        if not isinstance(reply, feed.EmbeddingAnswer):
            return "granted"
        if reply.state == "held":
            with suppress(orjson.JSONDecodeError):
                return Held(reply.encoder, reply.size, orjson.loads(reply.answer))
        if reply.state == "pending":
            return "pending"
        self._leases[key] = named
        return "granted"

    def encoded(self, key: bytes, encoder: str, size: int, answer: dict[str, Any]) -> None:
        """Report an embedding that this frontend requested, which ends its claim."""
        self._leases.pop(key, None)
        if self._has_peers():
            raw = orjson.dumps(answer)
            self._report(key, lambda n: feed.EmbeddingReport(n, self._router_id, key, encoder, size, raw))

    def release(self, key: bytes) -> None:
        """End the claim of an image that is no longer being encoded, if there is one."""
        if self._leases.pop(key, None) is not None:
            self._report(key, lambda n: feed.EmbeddingReport(n, self._router_id, key, "", 0, b""))

    async def run(self) -> None:
        """Renew the claims until cancelled."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            await asyncio.gather(*(self._renew(key, named) for key, named in list(self._leases.items())))

    async def _renew(self, key: bytes, named: tuple[str, ...]) -> None:
        if key in self._leases:
            await self._ask(key, lambda n: feed.EmbeddingClaim(n, self._router_id, key, named, LEASE_SECONDS))

    def _report(self, key: bytes, build: Callable[[int], feed.Request]) -> None:
        task = asyncio.create_task(self._ask(key, build), name="report of an embedding")
        self._reporting.add(task)
        task.add_done_callback(self._reporting.discard)

    async def _ask(self, key: bytes, build: Callable[[int], feed.Request]) -> feed.Reply | None:
        feeds = {uid: client for uid in self._pods() if (client := self._feed_of(uid)) is not None}
        if not feeds:
            return None
        home = max(feeds, key=lambda uid: blake2b(uid.encode() + b"\0" + key, digest_size=8).digest())
        try:
            return (await feeds[home].request(build, ANSWER_SECONDS))[-1]
        except FeedRequestError as error:
            log.debug("the sidecar of pod %s: %s", home, error)
            return None
