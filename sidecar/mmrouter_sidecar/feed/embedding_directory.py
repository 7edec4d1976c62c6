"""Claims of images by frontends, and the encoders that hold their embeddings. Pure; no I/O.

All frontends claim an image at the same sidecar, so that one of them requests its encoding and the others use the
embedding. The lease of a frontend that ends or hangs expires; then another frontend gets the claim.
"""

from collections import OrderedDict
from typing import Final

from mmrouter_lib.feed import Accepted, EmbeddingAnswer, EmbeddingClaim, EmbeddingReport, Refused

MAX_LEASE_S: Final = 30.0
MAX_ANSWER: Final = 64 << 10  # bytes of an encoder's answer, which is a few hundred for one image
MAX_ENTRIES: Final = 4096
"""Most embeddings, and most leases: as many as a router expects an encoder to hold. With ``n`` encoders each sidecar
gets the claims of the ``n``-th part of all images, so its table covers as much as one encoder holds."""


class EmbeddingDirectory:
    """Leases and held embeddings, least recently used out first. ``limit``: bytes of embeddings that are remembered."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[bytes, EmbeddingReport] = OrderedDict()
        self._bytes = 0
        self._leases: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # key -> (router, end), oldest first

    def claim(self, request: EmbeddingClaim, now: float) -> EmbeddingAnswer:
        """Answer where the embedding is, else grant or renew the lease to encode it, unless another router has it."""
        key = request.key
        if (held := self._held.get(key)) is not None:
            if held.encoder in request.encoders:
                self._held.move_to_end(key)
                return EmbeddingAnswer(request.id, "held", held.encoder, held.size, held.answer)
            self._forget(key)
        router, end = self._leases.get(key, ("", 0.0))
        if router not in ("", request.router) and now < end:
            return EmbeddingAnswer(request.id, "pending")
        self._leases[key] = (request.router, now + min(request.lease_s, MAX_LEASE_S))
        self._leases.move_to_end(key)
        while len(self._leases) > MAX_ENTRIES:
            self._leases.popitem(last=False)
        return EmbeddingAnswer(request.id, "granted")

    def report(self, request: EmbeddingReport) -> Accepted | Refused:
        """Remember an embedding, or end a lease without one."""
        if len(request.answer) > MAX_ANSWER or request.size < 0:
            return Refused(request.id, "the encoder's answer is too long, or its size is negative")
        if self._leases.get(request.key, ("",))[0] == request.router:
            del self._leases[request.key]
        if request.encoder:
            self._forget(request.key)
            self._held[request.key] = request
            self._bytes += request.size
            while self._bytes > self._limit or len(self._held) > MAX_ENTRIES:
                self._forget(next(iter(self._held)))
        return Accepted(request.id)

    def _forget(self, key: bytes) -> None:
        if (held := self._held.pop(key, None)) is not None:
            self._bytes -= held.size
