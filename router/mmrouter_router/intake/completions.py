"""Parser for the body of ``POST /v1/completions``, whose prompt is predicted where there is one (docs/exactness.md)."""

from array import array
from collections.abc import Mapping
from typing import Any, Final

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines.base.request_fields import COMPLETIONS
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import json_body
from mmrouter_router.intake.field_check import Reason, check_fields, inexact_fields
from mmrouter_router.intake.json_body import Raw, Served
from mmrouter_router.intake.request import HEAD_CHARACTERS, ChatRequest, Limits, Prompt

MAX_PROMPTS: Final = 64  # prompts of one request that are predicted


def parse_completion(raw: Raw, limits: Limits, served: Served, engine: EngineType = "vllm") -> ChatRequest:
    """Parse and check the body of a completion for one engine type. Raises :class:`RequestError` only.

    Several prompts are several requests inside the engine. Each is looked up, so their number is limited.
    """
    body = json_body.parse_object(raw, limits.max_request_bytes)
    model = json_body.model_of(body, served)
    check_fields(body, COMPLETIONS, engine)
    prompts = _prompts(body.get("prompt"))
    json_body.flag(body, "add_special_tokens", default=True)
    json_body.optional(body, "vllm_xargs", dict)
    several = (Reason("prompt", "several_prompts"),) if len(prompts) > MAX_PROMPTS else ()
    first = prompts[0]
    head = first[:HEAD_CHARACTERS] if isinstance(first, str) else str(first[:HEAD_CHARACTERS].tolist())
    return ChatRequest(
        model=model,
        messages=[{"role": "user", "content": head[:HEAD_CHARACTERS]}],
        media=(),
        stream=json_body.flag(body, "stream", nullable=True),
        max_tokens=json_body.max_tokens(body, "max_tokens"),
        body=body,
        inexact=(*several, *(each for each in inexact_fields(body, COMPLETIONS, engine) if _applies(each, body))),
        source=raw,
        endpoint=COMPLETIONS,
        prompts=tuple(prompts),
    )


def _applies(reason: Reason, body: Mapping[str, Any]) -> bool:
    """Return whether a field has its effect: of a completion, an engine scores the echoed prompt only on request."""
    return reason.field != "echo" or body.get("logprobs") is not None


def _prompts(value: Any) -> list[Prompt]:
    """Return the prompts, at least one: ``value`` is one text or list of token ids, or a list of either."""
    if value is None:
        raise RequestError.missing("prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise RequestError.wrong_type("prompt", "a string or a non-empty array", value)
    if isinstance(value[0], str):
        return [_checked_text(each, f"prompt[{number}]") for number, each in enumerate(value)]
    if isinstance(value[0], list):
        return [_token_ids(each, f"prompt[{number}]") for number, each in enumerate(value)]
    return [_token_ids(value, "prompt")]


def _checked_text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise RequestError.wrong_type(path, "a string", value)
    return value


def _token_ids(value: Any, path: str) -> "array[int]":
    try:
        if isinstance(value, list):
            return array("I", value)  # much faster than a look at each one of a million
    except (TypeError, OverflowError):
        pass
    raise RequestError.wrong_type(path, "an array of token ids", value)
