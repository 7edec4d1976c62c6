"""Requests that several SGLang engines serve together: prefill and decode pairs, and encoders.

A prefill and a decode engine get the client's request at the same time, with the address of the prefill engine's
bootstrap server and a room number of their own; the client gets the decode engine's answer
(docs/engine-facts/sglang.md#prefill-decode).

A language engine posts the images of a request in random shares to its encoder URLs. It has more of them than requests
usually have images, all of them the sidecar's, so that each share is one image and the sidecar chooses the encoder
(docs/engine-facts/sglang.md#encoder-disaggregation). An image should keep to one: the engine identifies it by its
embedding, and two devices do not compute equal bits.
"""

import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple, TypeAlias

import msgspec
from blake3 import blake3

from mmrouter_lib.engines.base.launch import BOOTSTRAP_PORT

ROOMS: Final = 1 << 63  # upper bound of room numbers

_STREAMED_ERROR = re.compile(rb'(?:\A|\n\n)data: (\{"error": ?\{.*)')
_CODE = re.compile(rb'"code": ?(\d{3})\b')


MeetingFields: TypeAlias = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the two engines of one request meet. ``rank`` of ``ranks``: the prefill engine's rank that computes."""

    host: str
    room: int
    rank: int = 0
    ranks: int = 1
    port: int = BOOTSTRAP_PORT


def new_meeting(host: str, rank: int = 0, ranks: int = 1) -> Meeting:
    """Return a meeting at a prefill engine's rank, in a room that no other request has.

    The room is random, because several routers choose rooms independently, and it encodes the rank: an engine with
    several ranks serves the request at rank ``room % ranks``, and fails one that is sent to another rank.
    """
    return Meeting(host, secrets.randbelow(ROOMS // ranks) * ranks + rank, rank, ranks)


def prefill_fields(meeting: Meeting) -> MeetingFields:
    """Return the fields of a request that make an engine compute the prompt and hand it over."""
    fields: dict[str, str | int] = {
        "bootstrap_host": meeting.host,
        "bootstrap_port": meeting.port,
        "bootstrap_room": meeting.room,
    }
    return {**fields, **rank_field(meeting.rank, meeting.ranks)}


def rank_field(rank: int, ranks: int) -> dict[str, int]:
    """Return the field of a request that makes rank ``rank`` of an engine with ``ranks`` ranks serve it."""
    return {"routed_dp_rank": rank} if ranks > 1 else {}


def decode_fields(meeting: Meeting, rank: int = 0, ranks: int = 1) -> MeetingFields:
    """Return the fields that make rank ``rank`` of a decode engine with ``ranks`` ranks fetch the prompt and answer.

    They name the prefill engine's rank, so that the pair also works where a flag distributes requests in another way.
    """
    fields = dict(prefill_fields(Meeting(meeting.host, meeting.room, port=meeting.port)))
    fields |= {"disagg_prefill_dp_rank": meeting.rank} if meeting.ranks > 1 else {}
    return {**fields, **rank_field(rank, ranks)}


def override_headers(fields: MeetingFields) -> dict[str, str]:
    """Return headers that set the fields of a chat, whose body may be large and is then the same for both engines."""
    return {f"x-override-{name.replace('_', '-')}": str(value) for name, value in fields.items()}


class Failure(NamedTuple):
    status: int
    body: bytes


def failure_of(status: int, answer: bytes) -> Failure | None:
    """Return the error in an answer, or in the part received so far; ``None`` without one.

    A streamed request that fails, even before its first token, is answered 200 with an error as the only event.
    """
    if status >= 400:
        return Failure(status, answer)
    error = _STREAMED_ERROR.search(answer)
    if error is None:
        return None
    code = _CODE.search(error[1])
    return Failure(int(code[1]) if code else 500, error[1])


PORT: Final = 8002  # port of the sidecar's encoder proxy, on the pod's loopback
SLOTS: Final = 16
"""Encoder URLs of an engine. With more images in a request, some share a URL and go where the first of them goes."""
TRANSFER: Final = "zmq_to_tokenizer"
"""Transfer backend of embeddings. With any other, an encoder that fails ends the language engine (0.5.23), whose
scheduler fails on a request without token ids; with this one the request is answered 503."""
PATH: Final = "/encoders/{slot}/encode"
ENCODE: Final = "/encode"
BOUND: Final = 1.5
"""Load bound of the hashing: an encoder gets at most this multiple of its share of the images being encoded."""


class PartError(ValueError):
    """The body is no ``/encode`` request; the message says why."""


class Encoder(msgspec.Struct, frozen=True, array_like=True):
    """An encoder pod. Images are hashed to ``name``, which unlike the address survives a restart."""

    name: str
    ip: str


class _Part(msgspec.Struct):
    req_id: str
    mm_items: list[msgspec.Raw]


def urls(loopback: str) -> list[str]:
    return [f"http://{loopback}:{PORT}{PATH.format(slot=slot).removesuffix(ENCODE)}" for slot in range(SLOTS)]


def image_key(body: bytes) -> bytes:
    """Return the hash of the URL and options of a request's (first) image. Raises :class:`PartError`."""
    try:
        part = msgspec.json.decode(body, type=_Part)
    except msgspec.DecodeError as error:
        raise PartError(str(error)) from error
    if not part.mm_items:
        raise PartError("there is nothing to encode")
    return blake3(bytes(part.mm_items[0])).digest()


def ranked(key: bytes, encoders: Iterable[Encoder]) -> list[Encoder]:
    """Return encoders in rendezvous order: each image has its own, and an encoder that leaves moves only its images."""
    return sorted(encoders, key=lambda encoder: blake3(encoder.name.encode() + b"\0" + key).digest(), reverse=True)


def order(
    key: bytes, encoders: Collection[Encoder], busy: Mapping[str, Collection[bytes]], down: Collection[str]
) -> list[Encoder]:
    """Return the order in which encoders are tried for an image.

    ``busy``: name -> keys of the images it encodes now; another request for one of them adds no work. ``down``: names
    of encoders that failed recently; they come last, because one may be back.
    """
    images = set().union(*busy.values(), (key,))
    able = [encoder for encoder in encoders if encoder.name not in down]
    limit = ceil(BOUND * len(images) / max(1, len(able)))

    def rank(encoder: Encoder) -> int:
        if encoder.name in down:
            return 2
        held = busy.get(encoder.name, ())
        return int(key not in held and len(held) >= limit)

    return sorted(ranked(key, encoders), key=rank)
