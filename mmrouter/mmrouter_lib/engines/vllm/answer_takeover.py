"""How vLLM's engines continue answers of another one (docs/streams.md).

By its tokens-in endpoint, and by a seed (docs/engine-facts/vllm.md#tokens-in and #seeds).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from mmrouter_lib.engines.base.answer_takeover import AnswerTraits, ContinuationError, Obstacle, TokenContinuation
from mmrouter_lib.engines.base.launch import chosen_flags

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "length_penalty": (None, 1),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "tools": (None,),
    "tool_choice": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "stop": (None, "", []),
    "bad_words": (None, []),
    "use_beam_search": (None, False),
    "echo": (None, False),
    "prompt_logprobs": (None,),
    "include_reasoning": (None, True),
    "return_token_ids": (None, False),
}
"""Fields whose effect depends on where the answer begins -> the values without effect. Penalties count the tokens of
the answer alone, a stop string or a bad word may begin in the part that was sent, and grammars, tool parsers and the
choices of `n` start with the answer."""
_OBSTACLES: Final[Mapping[str, Obstacle]] = {
    **dict.fromkeys(("n", "best_of", "use_beam_search"), "choices"),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), "penalties"),
    **dict.fromkeys(("tools", "tool_choice"), "tools"),
    **dict.fromkeys(("response_format", "structured_outputs"), "grammar"),
    "include_reasoning": "reasoning",
    "stop": "stop",
    "bad_words": "bad_words",
}
"""Field of the table above -> obstacle; any other field there has the obstacle ``field``."""
_ALLOWED: Final = frozenset(
    (
        *("model", "messages", "prompt", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"),
        *("max_completion_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias"),
        *("allowed_token_ids", "repetition_penalty", "skip_special_tokens", "spaces_between_special_tokens"),
        *("include_stop_str_in_output", "documents", "add_generation_prompt", "add_special_tokens"),
        *("chat_template_kwargs", "reasoning_effort", "cache_salt", "priority", "session_id", "user"),
        *("metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"),
    )
)
_IDS: Final = re.compile(rb',"(?:prompt_)?token_ids":(?:null|\[[0-9,]*\])')
"""Within a JSON string the quotes would have backslashes; the field is never the first of its object."""


def answer_traits(args: Sequence[Sequence[str]], config: Mapping[str, Any]) -> AnswerTraits:
    reasoning, tools = (
        any(chosen_flags(each, frozenset({flag})) for each in args)
        for flag in ("--reasoning-parser", "--tool-call-parser")
    )
    refuses_seeds = config.get("canvas_length") is not None  # a diffusion model
    return AnswerTraits("none" if refuses_seeds else "seeded", reasoning, tools)


def obstacle(path: str, body: Mapping[str, Any]) -> Obstacle | None:
    """Return why a request is not continued: a value that a continuation does not honour, or an unknown field."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "prompts"
    options = body.get("stream_options")
    if options is not None and not (isinstance(options, Mapping) and not set(options) - {"include_usage"}):
        return "field"
    for name, value in body.items():
        if name in ("logprobs", "top_logprobs"):
            if path == COMPLETIONS and value is not None:  # the form with offsets of characters
                return "logprobs"
        elif name not in _ALLOWED and name != "stream_options" and value not in _NEUTRAL.get(name, ()):
            return _OBSTACLES.get(name, "field")
    return None


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
        if isinstance(rendered, list):  # of a completion: one per prompt
            (rendered,) = rendered
        sampling = rendered["sampling_params"]
        left = sampling["max_tokens"] - len(sent)
        ids = [*rendered["token_ids"], *sent]
    except (ValueError, KeyError, TypeError) as error:
        raise ContinuationError("the rendered prompt has an unknown form") from error
    if rendered.get("reasoning_parser_kwargs") is not None:
        raise ContinuationError("a reasoning parser splits the answer", "reasoning")
    if left < 1:
        raise ContinuationError("no token is left to generate")
    sampling |= {"max_tokens": left, "min_tokens": max(0, sampling.get("min_tokens", 0) - len(sent))}
    rendered |= {"token_ids": ids, "sampling_params": sampling, "stream": True, "output_mode": "text"}
    return orjson.dumps(rendered)


def as_chunk(data: Mapping[str, Any], path: str, fields: Mapping[str, Any], sent: int) -> dict[str, Any]:
    """Return the chunk of a step. Raises ``KeyError`` and ``TypeError`` for unknown forms."""
    if data.get("error") is not None:
        return dict(data)
    chunk: dict[str, Any] = {"id": "", "object": "", "created": 0, "model": "", "choices": []}
    for choice in data["choices"]:
        finish = choice["finish_reason"]
        text = {"text": choice["text"]} if path == COMPLETIONS else {"delta": {"content": choice["text"]}}
        step = {"index": 0, **text, "logprobs": _logprobs(choice.get("logprobs"), fields), "finish_reason": finish}
        if finish is not None or path == COMPLETIONS:
            step["stop_reason"] = choice.get("stop_reason")
        chunk["choices"].append(step | {"token_ids": choice["token_ids"]})
    if (usage := data.get("usage")) is not None:
        prompt, answer = usage["prompt_tokens"] - sent, usage["completion_tokens"] + sent
        chunk["usage"] = usage | {"prompt_tokens": prompt, "completion_tokens": answer}
    return chunk


def _logprobs(logprobs: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a chat's log probabilities; for none of other tokens, the endpoint lists the chosen one all the same."""
    if logprobs is None or fields.get("top_logprobs"):
        return None if logprobs is None else dict(logprobs)
    return {"content": [{**entry, "top_logprobs": []} for entry in logprobs["content"]]}


CONTINUATION: Final = TokenContinuation(
    prompt_paths={path: f"{path}/render" for path in (CHAT, COMPLETIONS)},
    generate_path="/inference/v1/generate",
    text_path="/detokenize",
    obstacle=obstacle,
    reporting={"return_token_ids": True},
    strip=strip,
    text_request=text_request,
    ends_whole=ends_whole,
    build=build,
    as_chunk=as_chunk,
)
