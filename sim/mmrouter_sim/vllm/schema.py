"""Request bodies as vLLM's OpenAI server takes them, as far as they mean something here.

Fields that are not named are ignored, as the engine ignores them; sampling parameters are among them, because the
text is not sampled. Fields that would change what a client gets and are not simulated are refused by name.
"""

from typing import Any, TypeVar

import msgspec

from mmrouter_sim.errors import RequestError, parameter_error, validation_error


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Common(msgspec.Struct, kw_only=True):
    """What chats, completions and ``/tokenize`` share."""

    model: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


class Generation(Common, kw_only=True):
    """What chats and completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    logprobs: bool | int | None = None
    echo: bool | None = None
    best_of: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    suffix: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(Generation, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_special_tokens: bool = False


class CompletionRequest(Generation, kw_only=True):
    prompt: str | list[int | str]
    add_special_tokens: bool = True


class TokenizeRequest(Common, kw_only=True):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


Body = TypeVar("Body", bound=msgspec.Struct)

_NOT_SIMULATED: dict[str, tuple[Any, ...]] = {
    # field -> values that ask for nothing
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None, False, 0),
    "prompt_logprobs": (None, 0),
    "echo": (None, False),
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
}


def parse(raw: bytes, kind: type[Body]) -> Body:
    """Return a request body. Raises :class:`RequestError` (400) for what is no JSON or not of the form."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise validation_error(f"JSON decode error: {error}") from error


def check(body: Common) -> None:
    """Refuse what the engine refuses by default. Raises :class:`RequestError`."""
    for name, effect in (("mm_processor_kwargs", "preprocessing"), ("media_io_kwargs", "media loading")):
        if getattr(body, name):
            raise parameter_error(
                f"Per-request {name} are disabled by default because they can change multimodal {effect} resource "
                "usage. Start the server with --trust-request-mm-kwargs only when clients are trusted.",
                name,
            )
    if body.chat_template is not None:
        raise RequestError(
            "Chat template is passed with request, but --trust-request-chat-template is not set. "
            "Refused request with untrusted chat template."
        )
    if body.add_generation_prompt and body.continue_final_message:
        raise validation_error("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")


def check_generation(body: Generation, answer: int | None) -> None:
    """Refuse values out of range and options that are not simulated. ``answer`` is the wanted length in tokens."""
    for name, neutral in _NOT_SIMULATED.items():
        if getattr(body, name) not in neutral:
            raise parameter_error(f"{name} is not simulated.", name, getattr(body, name))
    if answer is not None and answer < 1:
        raise parameter_error(f"max_tokens must be at least 1, got {answer}.", "max_tokens", answer)
    if body.min_tokens < 0:
        raise parameter_error(f"min_tokens must not be negative, got {body.min_tokens}.", "min_tokens")
    if body.cache_salt == "":
        raise parameter_error("cache_salt must be a non-empty string if provided.", "cache_salt")
    if any(not text for text in body.stops):
        raise parameter_error("stop cannot contain an empty string.", "stop")
    if body.stream_options is not None and not body.stream:
        raise parameter_error("Stream options can only be defined when `stream=True`.", "stream_options")
