"""Requests that two SGLang engines serve together: how they find each other.

See docs/engine-facts/sglang.md#prefill-decode.

Both get the client's request as it is, at once, and the same headers: where the prefill engine's bootstrap server
listens, and a room that is this request's alone. The client's answer is the decode engine's.
"""

import re
import secrets
from dataclasses import dataclass
from typing import Final, NamedTuple

from mmrouter_lib.engines.base.launch import BOOTSTRAP_PORT, SIXTEEN_BITS

KV_EXACT_FLAGS: Final[dict[str, frozenset[str] | None]] = {
    "--dtype": SIXTEEN_BITS,
    "--kv-cache-dtype": SIXTEEN_BITS,
    "--json-model-override-args": frozenset(),
}
"""Flags that engines which exchange KV blocks must agree on -> what an engine may choose by itself."""
KV_EXACT_BLOCK_SIZE: Final = True
"""A decode engine of 0.5.23 refuses a prefill engine that has another page size, or another format of its cache."""

ROOMS: Final = 1 << 63
"""Rooms are numbers below this."""

_STREAMED_ERROR = re.compile(rb'(?:\A|\n\n)data: (\{"error": ?\{.*)')
_CODE = re.compile(rb'"code": ?(\d{3})\b')


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the two engines of one request meet. ``rank`` of ``ranks``: which part of the prefill engine computes."""

    host: str
    room: int
    rank: int = 0
    ranks: int = 1
    port: int = BOOTSTRAP_PORT


def new_meeting(host: str, rank: int = 0, ranks: int = 1) -> Meeting:
    """Return a meeting at a prefill engine's rank, in a room that no other request has.

    The room is random, because several routers make them, and it names the rank: an engine of several ranks gives the
    request to rank ``room % ranks``, and fails one that is sent to another rank.
    """
    return Meeting(host, secrets.randbelow(ROOMS // ranks) * ranks + rank, rank, ranks)


def prefill_headers(meeting: Meeting) -> dict[str, str]:
    """Return the headers that make an engine compute the prompt and hand it over."""
    headers = {
        "x-override-bootstrap-host": meeting.host,
        "x-override-bootstrap-port": str(meeting.port),
        "x-override-bootstrap-room": str(meeting.room),
    }
    return headers | ({"x-override-routed-dp-rank": str(meeting.rank)} if meeting.ranks > 1 else {})


def decode_headers(meeting: Meeting, rank: int = 0, ranks: int = 1) -> dict[str, str]:
    """Return the headers that make rank ``rank`` of a decode engine with ``ranks`` of them fetch the prompt and answer.

    It is told the prefill engine's rank, so that it holds also where a flag spreads requests in another way.
    """
    headers = prefill_headers(Meeting(meeting.host, meeting.room, port=meeting.port))
    headers |= {"x-override-disagg-prefill-dp-rank": str(meeting.rank)} if meeting.ranks > 1 else {}
    return headers | ({"x-override-routed-dp-rank": str(rank)} if ranks > 1 else {})


class Failure(NamedTuple):
    """How an engine failed: the status of an error, and its body."""

    status: int
    body: bytes


def failure_of(status: int, answer: bytes) -> Failure | None:
    """Return how an answer, or the part of it that is there, failed; ``None``: it did not.

    A request that fails in a stream, even before its first token, is answered 200 with an error as the only event.
    """
    if status >= 400:
        return Failure(status, answer)
    found = _STREAMED_ERROR.search(answer)
    if found is None:
        return None
    code = _CODE.search(found[1])
    return Failure(int(code[1]) if code else 500, found[1])
