"""Frames of the feed between sidecars and routers: typed, versioned msgpack (docs/feed.md).

The PUB socket carries a :data:`Published` frame as ``[payload]``. On the ROUTER socket a :data:`Request` is answered by
one or more :data:`Reply` with its ``id``, each as ``[b"", payload]``; ``last`` marks the final part. ``Delta.seq``
counts from 1 in each epoch; a ``Snapshot`` at (epoch, seq) holds every delta up to ``seq``.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, TypeVar

import msgspec

from mmrouter_lib.cache_layout import CacheGroup

VERSION = 1
ACCEPTED = (VERSION,)  # versions that this code reads. Version 1 is the first, so there is no N-1 yet.
MAX_RANKS = 64  # of an engine, as in the resource: a router keeps columns for each
VIEW_BYTES = 8192  # payload size from which a memoryview costs less than a copy


class FeedError(ValueError):
    """A frame cannot be read; the message says why."""


class Delta(msgspec.Struct, frozen=True, array_like=True, tag="delta", gc=False):
    """Net change of one engine rank's cache since the last delta: keys that became present and keys that became absent.

    ``stored`` and ``removed`` are packed keys (``mmrouter_lib.block_keys.pack_keys``) and disjoint. ``cleared`` empties
    all groups and media of the rank before ``stored`` applies.
    """

    epoch: int
    seq: int
    sent: float  # seconds since 1970, sidecar clock
    rank: int
    group: int
    medium: str  # GPU, or that of a lower tier (``mmrouter_lib.cache_layout``), as published by the engine
    stored: bytes
    removed: bytes
    cleared: bool = False

    def __post_init__(self) -> None:
        """Raise ``ValueError``, which a decoder reports as malformed, for keys that are no multiple of 8 bytes."""
        if (len(self.stored) | len(self.removed)) & 7:
            raise ValueError("a key is cut off")


class LoadReport(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Load from the engine's own metrics, one frame per rank."""

    rank: int
    running: float
    waiting: float
    kv_usage: float  # 0..1


class Work(msgspec.Struct, frozen=True, array_like=True, tag="work"):
    """Blocks that one router's requests occupy on one rank; the sidecar publishes it unchanged and sends no reply."""

    router: str
    rank: int
    requests: int
    prefill: float  # of prompts and images not yet computed
    active: float  # of running prompts


class CanaryReport(msgspec.Struct, frozen=True, array_like=True):
    """Result of comparing predicted and published keys of two tiny images (docs/exactness.md)."""

    epoch: int
    result: Literal["True", "False", "Unknown"]
    cause: str = ""  # template | count | identity | block_size | salt | truncation | ... ; empty when True
    message: str = ""  # the first difference
    compared: int = 0  # blocks
    router: str = ""


class SharedDirectory(msgspec.Struct, frozen=True, array_like=True):
    """The node's shared directory (docs/transfer.md), at the last pass of the sidecar's janitor. In bytes.

    ``taken`` counts the files of all deployments. ``limit`` is 0 where only the file system bounds it. ``above``:
    ``taken`` or the file system's use is above its high-water mark.
    """

    taken: int
    limit: int
    available: int  # on the file system
    capacity: int  # of the file system
    above: bool = False


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """Identity and state of a sidecar and its engine, sent every half second and on every change.

    ``worker`` is ``<pod uid>/<boot id>``; ``seq`` is the last delta's number, so a router that missed the newest delta
    notices without waiting for the next one. ``groups`` is in ascending order, full attention first, because older
    routers index the first group without a window. ``facts`` are the engine settings that media identity depends on
    (SGLang: version, model type, page size, flags; structured values as JSON). ``shared`` is set in pods with the
    node's shared directory. ``keys`` has the fingerprints of the sidecar's public key and of the routers' keys that it
    accepts (:mod:`.feed_keys`). ``device`` is PyTorch's type of the device that the engine reports, empty while
    unknown, ``devices`` their number, and ``requested_device`` the type that its pool asks for. ``all_groups``:
    ``groups`` and the deltas have every group that events have named; older sidecars leave out mamba, and blocks of
    windows beside full attention.
    ``routes``: passed routes (:mod:`.engines.base.passed_routes`) that the engine serves. ``context_length``: tokens of
    prompt and answer together, 0 while unknown. ``drafter``: what the engine's drafter does to hits
    (:mod:`.engines.vllm.drafters`). ``adapters``: LoRA adapters that it had loaded when it came up. ``lower_media``:
    media other than device memory that events have named; older sidecars send none, and their keys of such blocks lack
    images and salts. ``keys_of_full``: blocks of windows have the keys of full attention's, also where their size
    differs. ``has_aside``: the engine may hold blocks whose keys are not known.
    """

    worker: str
    epoch: int
    seq: int
    engine: str  # vllm | sglang
    engine_state: Literal["starting", "up", "down"]
    engine_version: str
    block_size: int  # tokens; 0 until known
    model: str
    revision: str
    digests: dict[str, str]  # metadata file name -> BLAKE3 hex
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    draining: bool = False
    canary: CanaryReport | None = None
    groups: tuple[CacheGroup, ...] = ()
    facts: dict[str, str] = {}
    shared: SharedDirectory | None = None
    keys: tuple[str, ...] = ()
    device: str = ""
    devices: int = 0
    requested_device: str = ""
    all_groups: bool = False
    routes: tuple[str, ...] = ()
    context_length: int = 0
    drafter: str = ""
    adapters: tuple[str, ...] = ()
    lower_media: tuple[str, ...] = ()
    keys_of_full: bool = False
    has_aside: bool = True


class ImageObservation(msgspec.Struct, frozen=True, array_like=True, tag="sighting"):
    """An image run seen for the first time in the engine's events.

    ``parent`` is the key of the block before the one in which the run starts (``None``: it starts in the first block)
    and ``offset`` the start within that block; ``length`` counts the tokens seen so far. vLLM names the image by
    ``identity`` (32 bytes), SGLang by ``sentinels``: the run's distinct ids in the order in which they cycle from its
    start.
    """

    rank: int
    group: int
    parent: int | None
    offset: int
    length: int
    identity: bytes = b""
    sentinels: tuple[int, ...] = ()


class _Numbered(msgspec.Struct, frozen=True, array_like=True):
    """A request with a number, or a part of the reply to it."""

    id: int


class SnapshotRequest(_Numbered, frozen=True, tag="snapshot"):
    """Request all keys that the engine holds."""


class ReplayRequest(_Numbered, frozen=True, tag="replay"):
    """Request the deltas of ``epoch`` from number ``first`` on."""

    epoch: int
    first: int


class DetailRequest(_Numbered, frozen=True, tag="detail"):
    """Request the engine's raw event batches behind the deltas ``first`` .. ``end`` (both included)."""

    epoch: int
    first: int
    end: int


class ObservationsRequest(_Numbered, frozen=True, tag="sighted"):
    """Request the image observations that the sidecar keeps, so that a restarted router gets those of the past."""


class CanaryClaim(_Numbered, frozen=True, tag="canary_claim"):
    """Request the lease to run the canary of ``epoch``, granted to one router for ``lease_s`` seconds."""

    epoch: int
    router: str
    lease_s: float


class CanaryResult(_Numbered, frozen=True, tag="canary_result"):
    """Store a canary's result in the sidecar, which sends it in its heartbeats until the epoch ends."""

    canary: CanaryReport


class EncoderAddresses(_Numbered, frozen=True, tag="encoders"):
    """Name and address of each encoder pod that a router sees up, for SGLang's sidecars; valid until its next frame."""

    router: str
    encoders: tuple[tuple[str, str], ...]


class EmbeddingClaim(_Numbered, frozen=True, tag="embedding_claim"):
    """Request the place of an image's embedding, or else the lease to request its encoding, for ``lease_s`` seconds.

    ``key``: the image's identity. ``encoders``: those whose embeddings the router can use.
    """

    router: str
    key: bytes
    encoders: tuple[str, ...]
    lease_s: float


class EmbeddingReport(_Numbered, frozen=True, tag="embedding_report"):
    """Store that an encoder has an embedding, which ends the lease; without ``encoder``, end the lease only.

    ``answer`` is the encoder's own, as JSON; ``size`` the embedding's bytes, 0 where it does not say.
    """

    router: str
    key: bytes
    encoder: str
    size: int
    answer: bytes


class SnapshotPart(_Numbered, frozen=True, tag="snapshot_part"):
    """Keys held by one (rank, group, medium) at (epoch, seq). An empty cache answers one part without keys."""

    worker: str
    epoch: int
    seq: int
    rank: int
    group: int
    medium: str
    keys: bytes
    last: bool

    def __post_init__(self) -> None:
        """Check the keys as :class:`Delta` does."""
        if len(self.keys) & 7:
            raise ValueError("a key is cut off")


class ReplayPart(_Numbered, frozen=True, tag="replay_part"):
    """Deltas in order. ``gone``: the ring has dropped some of the requested ones; request a snapshot."""

    deltas: tuple[Delta, ...]
    last: bool
    gone: bool = False


class RawBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event batch exactly as the engine sent it."""

    seq: int  # number of the last delta that it caused
    rank: int
    engine_seq: int
    payload: bytes


class DetailPart(_Numbered, frozen=True, tag="detail_part"):
    """Raw batches in order. ``gone``: the ring has dropped some."""

    batches: tuple[RawBatch, ...]
    last: bool
    gone: bool = False


class ObservationsPart(_Numbered, frozen=True, tag="sightings_part"):
    """Image observations of the current epoch, oldest first; the very oldest may have been dropped."""

    sightings: tuple[ImageObservation, ...]
    last: bool


class ClaimAnswer(_Numbered, frozen=True, tag="claim_answer"):
    """Whether the lease was granted; ``holder`` is the router that has it. ``last`` is always true."""

    granted: bool
    holder: str
    last: bool = True


class EmbeddingAnswer(_Numbered, frozen=True, tag="embedding_answer"):
    """``granted``: the router has the lease; ``pending``: another one has it; ``held``: the rest says where it is."""

    state: Literal["granted", "pending", "held"]
    encoder: str = ""
    size: int = 0
    answer: bytes = b""
    last: bool = True


class Accepted(_Numbered, frozen=True, tag="accepted"):
    """The request was executed."""

    last: bool = True


class Refused(_Numbered, frozen=True, tag="refused"):
    """The request cannot be answered, and why (an old epoch, a frame that cannot be read)."""

    reason: str
    last: bool = True


T = TypeVar("T")

Published = Delta | LoadReport | Heartbeat | ImageObservation | Work
Request = (
    SnapshotRequest
    | ReplayRequest
    | DetailRequest
    | CanaryClaim
    | CanaryResult
    | ObservationsRequest
    | EncoderAddresses
    | EmbeddingClaim
    | EmbeddingReport
    | Work
)
Reply = SnapshotPart | ReplayPart | DetailPart | ClaimAnswer | Accepted | Refused | ObservationsPart | EmbeddingAnswer

_encoder = msgspec.msgpack.Encoder()


def encode(frame: Published | Request | Reply) -> bytes:
    """Return the payload of a frame in this code's version."""
    return bytes((VERSION,)) + _encoder.encode(frame)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", payload: bytes) -> T:
    """Read one frame. Raises :class:`FeedError` for an unknown version or a frame that is not well formed."""
    if not payload:
        raise FeedError("empty payload")
    if payload[0] not in ACCEPTED:
        raise FeedError(f"feed version {payload[0]} is not one of {ACCEPTED}")
    try:
        return decoder.decode(payload[1:] if len(payload) < VIEW_BYTES else memoryview(payload)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FeedError(str(error)) from error


decode_published: Callable[[bytes], Published] = partial(_decode, msgspec.msgpack.Decoder(Published))
decode_request: Callable[[bytes], Request] = partial(_decode, msgspec.msgpack.Decoder(Request))
decode_reply: Callable[[bytes], Reply] = partial(_decode, msgspec.msgpack.Decoder(Reply))
