"""Whether another engine can continue a stream (docs/streams.md)."""

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from mmrouter_lib.engines.base.answer_takeover import AnswerTraits, Obstacle

Cause = Literal["engine_lost", "stalled", "ended_early", "engine_failed"]
"""Connection lost; no byte from an engine that hangs; end without the last event; error event of the engine."""

Refusal = Literal[
    Obstacle,
    "off",
    "gateway",
    "route",
    "engine",
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
_NO_SEED: Final = -1  # vLLM takes it for none

_SAMPLED: Final = "another engine would sample other tokens, and"
_IDS: Final = f"{_SAMPLED} a continuation by token ids does not support"
_TEXTS: Final[Mapping[str, str]] = {
    "off": "spec.routing.continueStreams is false",
    "gateway": "a gateway sends each request to one engine",
    "route": "streams of this route are not continued",
    "engine": f"{_SAMPLED} these engines neither apply seeds nor continue token ids",
    "prompts": f"{_SAMPLED} one seed would give equal prompts equal answers",
    "choices": f"{_IDS} several choices",
    "penalties": f"{_IDS} presence and frequency penalties",
    "tools": f"{_IDS} tools",
    "grammar": f"{_IDS} structured outputs",
    "stop": f"{_IDS} stop strings",
    "bad_words": f"{_IDS} bad words",
    "logprobs": f"{_IDS} these log probabilities",
    "reasoning": f"{_IDS} a reasoning parser",
    "field": f"{_IDS} a field of the request that continuation does not support",
    "too_long": "the answer is longer than the router keeps",
    "limit": f"it was already continued {MAX_CONTINUATIONS} times",
    "diverged": "another engine gave a different answer",
    "unreadable": "an event has a form that the router does not know",
    "request_quarantined": "engines ended while they served this request",
    "no_worker": "no other engine can take the request",
    "queue_full": "the queues of all available engines are full",
    "engine_refused": "another engine refused the request",
}
REFUSALS: Final = frozenset(get_args(Refusal))
assert set(_TEXTS) == REFUSALS


def is_reproducible(fields: Mapping[str, Any], traits: AnswerTraits) -> bool:
    """Return whether every engine gives the same answer to a request, so that a repetition continues it."""
    temperature, seed = fields.get("temperature"), fields.get("seed")
    if traits.reproducible == "all" or (_is_number(temperature) and temperature == 0) or fields.get("top_k") == 1:
        return True
    seeded = isinstance(seed, int) and not isinstance(seed, bool) and seed != _NO_SEED
    return seeded and traits.reproducible == "seeded"


def describe(refusal: str) -> str:
    """Return the sentence of the error event."""
    return f"The engine failed during the answer, and no other engine continued it: {_TEXTS[refusal]}."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
