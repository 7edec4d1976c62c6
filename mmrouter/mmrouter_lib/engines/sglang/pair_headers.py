"""Headers that pair a prefill and a decode engine of SGLang for a request, and how such a request fails.

Both engines get the client's request unchanged, at the same time, with the address of the prefill engine's bootstrap
server and a room number that no other request has. The client gets the decode engine's answer
(docs/engine-facts/sglang.md#prefill-decode).
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
"""Flags that engines which exchange KV blocks must agree on -> values that an engine may choose by itself."""
KV_EXACT_BLOCK_SIZE: Final = True
"""A decode engine of 0.5.23 refuses a prefill engine with another page size or another cache format."""

ROOMS: Final = 1 << 63
"""Upper bound of room numbers."""

_STREAMED_ERROR = re.compile(rb'(?:\A|\n\n)data: (\{"error": ?\{.*)')
_CODE = re.compile(rb'"code": ?(\d{3})\b')


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


def prefill_headers(meeting: Meeting) -> dict[str, str]:
    """Return the headers that make an engine compute the prompt and hand it over."""
    headers = {
        "x-override-bootstrap-host": meeting.host,
        "x-override-bootstrap-port": str(meeting.port),
        "x-override-bootstrap-room": str(meeting.room),
    }
    return headers | ({"x-override-routed-dp-rank": str(meeting.rank)} if meeting.ranks > 1 else {})


def decode_headers(meeting: Meeting, rank: int = 0, ranks: int = 1) -> dict[str, str]:
    """Return the headers that make rank ``rank`` of a decode engine with ``ranks`` ranks fetch the prompt and answer.

    They name the prefill engine's rank, so that the pair also works where a flag distributes requests in another way.
    """
    headers = prefill_headers(Meeting(meeting.host, meeting.room, port=meeting.port))
    headers |= {"x-override-disagg-prefill-dp-rank": str(meeting.rank)} if meeting.ranks > 1 else {}
    return headers | ({"x-override-routed-dp-rank": str(rank)} if ranks > 1 else {})


class Failure(NamedTuple):
    """An engine's error: status and body."""

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
