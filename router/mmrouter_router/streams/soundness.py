"""Whether another engine can continue a stream (docs/streams.md)."""

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

Cause = Literal["engine_lost", "stalled", "ended_early", "engine_failed"]
"""Connection lost; no byte from an engine that hangs; end without the last event; error event of the engine."""

Refusal = Literal[
    "off",
    "route",
    "sampled",
    "too_long",
    "limit",
    "diverged",
    "unreadable",
    "request_quarantined",
    "no_worker",
    "queue_full",
    "engine_refused",
]
"""Why a broken stream was not continued."""

CONTINUED: Final = ("/v1/chat/completions", "/v1/completions")
MAX_CONTINUATIONS: Final = 2  # of one stream

_TEXTS: Final[Mapping[str, str]] = {
    "off": "spec.routing.continueStreams is false",
    "route": "streams of this route are not continued",
    "sampled": "another engine would sample other tokens, and the request cannot be continued by token ids",
    "too_long": "the answer is longer than the router keeps",
    "limit": f"it was already continued {MAX_CONTINUATIONS} times",
    "diverged": "another engine gave a different answer",
    "unreadable": "an event has a form that the router does not know",
    "request_quarantined": "engines ended while they served this request",
    "no_worker": "no other engine can take the request",
    "queue_full": "the queues of all available engines are full",
    "engine_refused": "another engine refused the request",
}
assert set(_TEXTS) == set(get_args(Refusal))


def why_not(path: str, fields: Mapping[str, Any]) -> Refusal | None:
    """Return why a repetition of this request may differ from what was sent, ``None`` where the answer is the same."""
    if path not in CONTINUED:
        return "route"
    temperature, seed = fields.get("temperature"), fields.get("seed")
    greedy = (_is_number(temperature) and temperature == 0) or fields.get("top_k") == 1
    return None if greedy or (isinstance(seed, int) and not isinstance(seed, bool)) else "sampled"


def describe(refusal: str) -> str:
    """Return the sentence of the error event."""
    return f"The engine failed during the answer, and no other engine continued it: {_TEXTS[refusal]}."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
