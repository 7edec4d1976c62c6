"""Request bodies of SGLang's OpenAI server; fields without an effect in the simulator are ignored."""

from typing import Any

import msgspec

from mmrouter_sim.errors import RequestError
from mmrouter_sim.vllm.schema import Common, Generation


class ChatRequest(Generation, kw_only=True):
    """``/v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    rid: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    input_ids: list[int] | None = None
    return_prompt_token_ids: bool = False
    return_input_ids_in_sglext: bool = False


class CompletionRequest(Generation, kw_only=True):
    """``/v1/completions``."""

    prompt: str | list[int | str]
    rid: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None


class TokenizeRequest(Common, kw_only=True):
    """``/v1/tokenize``."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct):
    """``/v1/detokenize``."""

    tokens: list[int]
    skip_special_tokens: bool = True


def check(body: ChatRequest | CompletionRequest) -> None:
    """Refuse requests that are not simulated. Raises :class:`RequestError` (400)."""
    for name, nothing in (("n", (None, 1)), ("logprobs", (None, False, 0)), ("echo", (None, False))):
        if getattr(body, name) not in nothing:
            raise RequestError(f"{name} is not simulated.", param=name)
    if isinstance(body, ChatRequest):
        for name in ("input_ids", "mm_processor_kwargs", "chat_template"):
            if getattr(body, name):
                raise RequestError(f"{name} is not simulated.", param=name)
        if body.continue_final_message:
            raise RequestError("continue_final_message is not simulated.", param="continue_final_message")
    if any(not text for text in body.stops):
        raise RequestError("stop cannot contain an empty string.", param="stop")
