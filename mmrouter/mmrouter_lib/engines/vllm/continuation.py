"""Continuation of a chat by vLLM's tokens-in endpoint (docs/engine-facts/vllm.md#tokens-in)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from mmrouter_lib.engines.base.continuation import ContinuationError, TokenContinuation

_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "length_penalty": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "tools": (None,),
    "tool_choice": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "stop": (None, "", []),
    "use_beam_search": (None, False),
    "echo": (None, False),
    "prompt_logprobs": (None,),
    "include_reasoning": (None, True),
    "return_token_ids": (None, False),
}
"""Fields whose effect depends on where the answer begins -> the values without effect. Penalties count the tokens of
the answer alone, a stop string may begin in the part that was sent, and grammars, tool parsers and the choices of `n`
start with the answer."""
_ALLOWED: Final = frozenset(
    (
        *("model", "messages", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"),
        *("max_completion_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias", "bad_words"),
        *("allowed_token_ids", "repetition_penalty", "skip_special_tokens", "spaces_between_special_tokens"),
        *("include_stop_str_in_output", "documents", "add_generation_prompt", "add_special_tokens"),
        *("chat_template_kwargs", "reasoning_effort", "cache_salt", "priority", "session_id", "user"),
        *("metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"),
    )
)
_IDS: Final = re.compile(rb',"(?:prompt_)?token_ids":(?:null|\[[0-9,]*\])')
"""Within a JSON string the quotes would have backslashes; the field is never the first of its object."""


def applies(body: Mapping[str, Any]) -> bool:
    """Return whether only fields with a known effect are set, to values that a continuation honours."""
    options = body.get("stream_options")
    if options is not None and not (isinstance(options, Mapping) and not set(options) - {"include_usage"}):
        return False
    return all(
        name in _ALLOWED or name == "stream_options" or (name in _NEUTRAL and value in _NEUTRAL[name])
        for name, value in body.items()
    )


def strip(events: bytes) -> bytes:
    return _IDS.sub(b"", events)


def text_request(model: str, ids: Sequence[int]) -> bytes:
    return orjson.dumps({"model": model, "tokens": list(ids)})


def ends_whole(raw: bytes) -> bool:
    """Return whether a text ends with a complete character. Raises :class:`ContinuationError`."""
    try:
        return not str(orjson.loads(raw)["prompt"]).endswith("\ufffd")
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ContinuationError("no text") from error


def build(raw: bytes, sent: Sequence[int]) -> bytes:
    """Return the request for the tokens after ``sent``. Raises :class:`ContinuationError`."""
    try:
        rendered = orjson.loads(raw)
        sampling = rendered["sampling_params"]
        left = sampling["max_tokens"] - len(sent)
        ids = [*rendered["token_ids"], *sent]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ContinuationError("the rendered prompt has an unknown form") from error
    if rendered.get("reasoning_parser_kwargs") is not None:
        raise ContinuationError("a reasoning parser splits the answer")
    if left < 1:
        raise ContinuationError("no token is left to generate")
    sampling |= {"max_tokens": left, "min_tokens": max(0, sampling.get("min_tokens", 0) - len(sent))}
    rendered |= {"token_ids": ids, "sampling_params": sampling, "stream": True, "output_mode": "text"}
    return orjson.dumps(rendered)


def as_chunk(data: Mapping[str, Any], sent: int) -> dict[str, Any]:
    """Return the chat's chunk of a step. Raises ``KeyError`` and ``TypeError`` for unknown forms."""
    if data.get("error") is not None:
        return dict(data)
    chunk: dict[str, Any] = {"id": "", "object": "chat.completion.chunk", "created": 0, "model": "", "choices": []}
    for choice in data["choices"]:
        finish = choice["finish_reason"]
        ending = {"stop_reason": choice.get("stop_reason")} if finish is not None else {}
        delta = {"content": choice["text"]}
        step = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **ending}
        chunk["choices"].append(step | {"token_ids": choice["token_ids"]})
    if (usage := data.get("usage")) is not None:
        prompt, answer = usage["prompt_tokens"] - sent, usage["completion_tokens"] + sent
        chunk["usage"] = usage | {"prompt_tokens": prompt, "completion_tokens": answer}
    return chunk


CONTINUATION: Final = TokenContinuation(
    prompt_path="/v1/chat/completions/render",
    generate_path="/inference/v1/generate",
    text_path="/detokenize",
    applies=applies,
    reporting={"return_token_ids": True},
    strip=strip,
    text_request=text_request,
    ends_whole=ends_whole,
    build=build,
    as_chunk=as_chunk,
)
