"""Events and usage of ``/v1/responses``, which both engines write alike."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec


def numbered_events() -> Callable[..., bytes]:
    """Return a function that encodes an event of a kind with its fields and the next sequence number, from 0."""
    number = -1

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        data = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    return event


def response_usage(usage: Mapping[str, Any], **input_details: int) -> dict[str, Any]:
    """Return the usage of a chat as that of a response; ``input_details`` are further details of its prompt."""
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, **input_details},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
