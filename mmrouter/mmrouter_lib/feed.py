"""The wire between sidecar and router: typed, versioned frames (docs/feed.md).

A payload is one version byte followed by a msgpack array whose first item names the frame. A reader accepts its own
version and the one before; arrays may grow at the end, so a field added later does not need a new version.

Two sockets, both CURVE:

* **PUB** (sidecar -> every router): ``[payload]`` with a :data:`Published` frame.
* **ROUTER** (router asks with a DEALER): ``[b"", payload]`` with a :data:`Request`; the answer is one or more
  ``[b"", payload]`` with a :data:`Reply` that repeats the request's ``id``; ``last`` marks the final part. A
  :class:`Work` has no answer.

Ordering: ``Delta.seq`` counts from 1 in each epoch; a ``Snapshot`` at (epoch, seq) holds every delta up to ``seq``.
"""

from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

VERSION = 1
ACCEPTED = (VERSION,)
"""Versions that this code reads. Version 1 is the first, so there is no N-1 yet."""
VIEW_BYTES = 8192
"""From here on a view of a payload costs less than a copy of it."""


class FeedError(ValueError):
    """A frame cannot be read; the message says why."""


class Delta(msgspec.Struct, frozen=True, array_like=True, tag="delta", gc=False):
    """Net change of one engine rank's cache since the last delta: keys that became present and keys that became absent.

    ``stored`` and ``removed`` are packed keys (``mmrouter_lib.block_keys.pack_keys``) and disjoint. ``cleared`` empties
    everything the rank held (all groups and media) before ``stored`` applies.
    """

    epoch: int
    seq: int
    sent: float  # seconds since 1970, sidecar clock
    rank: int
    group: int
    medium: str  # GPU | CPU | STORAGE, as the engine says
    stored: bytes
    removed: bytes
    cleared: bool = False


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """What the engine says of its own load, one frame per rank."""

    rank: int
    running: float
    waiting: float
    kv_usage: float  # 0..1


class Work(msgspec.Struct, frozen=True, array_like=True, tag="work"):
    """What one router's requests occupy on one rank of the engine, in blocks; all zero where it has none there.

    The router tells the sidecar, which answers nothing and publishes the same to every router.
    """

    router: str
    rank: int
    requests: int
    prefill: float  # of prompts and images that are still to be computed
    active: float  # of prompts under way


class Canary(msgspec.Struct, frozen=True, array_like=True):
    """Result of comparing predicted and published keys of two tiny images (docs/exactness.md)."""

    epoch: int
    result: Literal["True", "False", "Unknown"]
    cause: str = ""  # template | count | identity | block_size | salt | truncation | ... ; empty when True
    message: str = ""  # first difference, in words
    compared: int = 0  # blocks
    router: str = ""


class Group(msgspec.Struct, frozen=True, array_like=True):
    """A cache group of which the engine's events have spoken, on any rank.

    ``kind`` is the engine's word for it, empty where it has none; ``window`` is 0 for full attention.
    """

    group: int
    kind: str
    window: int = 0  # tokens


def deciding(groups: Sequence[Group]) -> Group:
    """Return the group whose blocks tell what a hit is; group 0 with full attention where none is known.

    Full attention decides where it is present. Several windows without it: the widest one asks for most blocks.
    """
    full = [group for group in groups if not group.window]
    if full or not groups:
        return full[0] if full else Group(0, "")
    return max(groups, key=lambda group: (group.window, -group.group))


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """The node's shared directory (docs/transfer.md), as the sidecar's janitor saw it last. Bytes.

    ``taken``: what lies in it, of whomever. ``limit``: how much may; 0 where only the file system bounds it. ``above``:
    whether it is above its high-water mark, by either.
    """

    taken: int
    limit: int
    available: int  # what the file system still has
    capacity: int  # of the file system
    above: bool = False


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """Sent every half second and on every change: who this is and how far the stream is.

    ``worker`` is ``<pod uid>/<boot id>``; ``seq`` is the last delta's number, so a router that missed the newest delta
    notices without waiting for the next one. ``groups`` is in ascending order; ``facts`` is what media identity depends
    on beside the model (SGLang: version, model type, page size, flags; structured values as JSON texts). ``shared`` is
    of a pod that has its node's shared directory.
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
    ranks: int = 1
    draining: bool = False
    canary: Canary | None = None
    groups: tuple[Group, ...] = ()
    facts: dict[str, str] = {}
    shared: Shared | None = None


class Sighting(msgspec.Struct, frozen=True, array_like=True, tag="sighting"):
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


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """Ask for everything the engine holds."""

    id: int


class Replay(msgspec.Struct, frozen=True, array_like=True, tag="replay"):
    """Ask for the deltas of ``epoch`` from number ``first`` on."""

    id: int
    epoch: int
    first: int


class Detail(msgspec.Struct, frozen=True, array_like=True, tag="detail"):
    """Ask for the engine's raw event batches behind the deltas ``first`` .. ``end`` (both included)."""

    id: int
    epoch: int
    first: int
    end: int


class Sighted(msgspec.Struct, frozen=True, array_like=True, tag="sighted"):
    """Ask for the sightings that the sidecar remembers, so that a restarted router learns what others know."""

    id: int


class CanaryClaim(msgspec.Struct, frozen=True, array_like=True, tag="canary_claim"):
    """Ask to be the one router that runs the canary of ``epoch``; granted for ``lease_s`` seconds."""

    id: int
    epoch: int
    router: str
    lease_s: float


class CanaryResult(msgspec.Struct, frozen=True, array_like=True, tag="canary_result"):
    """Hand a canary's result to the sidecar, which carries it in its heartbeats until the epoch ends."""

    id: int
    canary: Canary


class Encoders(msgspec.Struct, frozen=True, array_like=True, tag="encoders"):
    """Tell a sidecar whose engine asks encoders through it (SGLang) which of them a router knows to be up.

    ``encoders``: pod name and address of each. It holds until the router's next word.
    """

    id: int
    router: str
    encoders: tuple[tuple[str, str], ...]


class SnapshotPart(msgspec.Struct, frozen=True, array_like=True, tag="snapshot_part"):
    """Keys held by one (rank, group, medium) at (epoch, seq). An empty cache answers one part without keys."""

    id: int
    worker: str
    epoch: int
    seq: int
    rank: int
    group: int
    medium: str
    keys: bytes
    last: bool


class ReplayPart(msgspec.Struct, frozen=True, array_like=True, tag="replay_part"):
    """Deltas in order. ``gone``: some of what was asked for has left the ring; ask for a snapshot."""

    id: int
    deltas: tuple[Delta, ...]
    last: bool
    gone: bool = False


class RawBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event batch exactly as the engine sent it."""

    seq: int  # number of the delta that it led to (the last one where it led to several)
    rank: int
    engine_seq: int
    payload: bytes


class DetailPart(msgspec.Struct, frozen=True, array_like=True, tag="detail_part"):
    """Raw batches in order. ``gone``: some have left the ring."""

    id: int
    batches: tuple[RawBatch, ...]
    last: bool
    gone: bool = False


class SightingsPart(msgspec.Struct, frozen=True, array_like=True, tag="sightings_part"):
    """Sightings of the present epoch, oldest first; the oldest ones may have been forgotten."""

    id: int
    sightings: tuple[Sighting, ...]
    last: bool


class ClaimAnswer(msgspec.Struct, frozen=True, array_like=True, tag="claim_answer"):
    """Whether the claim was granted; ``holder`` is the router that has it. ``last`` is always true."""

    id: int
    granted: bool
    holder: str
    last: bool = True


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The request was carried out."""

    id: int
    last: bool = True


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The request cannot be answered, and why (an old epoch, a frame that cannot be read)."""

    id: int
    reason: str
    last: bool = True


T = TypeVar("T")

Published = Delta | Load | Heartbeat | Sighting | Work
Request = Snapshot | Replay | Detail | CanaryClaim | CanaryResult | Sighted | Encoders | Work
Reply = SnapshotPart | ReplayPart | DetailPart | ClaimAnswer | Accepted | Refused | SightingsPart

_encoder = msgspec.msgpack.Encoder()
_published: "msgspec.msgpack.Decoder[Published]" = msgspec.msgpack.Decoder(Published)
_request: "msgspec.msgpack.Decoder[Request]" = msgspec.msgpack.Decoder(Request)
_reply: "msgspec.msgpack.Decoder[Reply]" = msgspec.msgpack.Decoder(Reply)


def encode(frame: Published | Request | Reply) -> bytes:
    """Return the payload of a frame in this code's version."""
    return bytes((VERSION,)) + _encoder.encode(frame)


def decode_published(payload: bytes) -> Published:
    """Read a PUB payload. Raises :class:`FeedError` for an unknown version or a frame that is not well formed."""
    return _decode(payload, _published)


def decode_request(payload: bytes) -> Request:
    """Read a request. Raises :class:`FeedError`."""
    return _decode(payload, _request)


def decode_reply(payload: bytes) -> Reply:
    """Read a reply. Raises :class:`FeedError`."""
    return _decode(payload, _reply)


def _decode(payload: bytes, decoder: "msgspec.msgpack.Decoder[T]") -> T:
    if not payload:
        raise FeedError("empty payload")
    if payload[0] not in ACCEPTED:
        raise FeedError(f"feed version {payload[0]} is not one of {ACCEPTED}")
    try:
        return decoder.decode(payload[1:] if len(payload) < VIEW_BYTES else memoryview(payload)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FeedError(str(error)) from error
