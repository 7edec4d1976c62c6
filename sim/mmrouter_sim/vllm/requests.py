"""Request bodies as vLLM's OpenAI server takes them, and their prompts: token ids and named images.

Fields that are not named are ignored, as the engine ignores them; sampling parameters are among them, because the
text is not sampled. Fields that would change what a client gets and are not simulated are refused by name.
"""

import re
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from mmrouter_lib.prompt.segment_cache import OWNER
from mmrouter_sim import media
from mmrouter_sim.core.requests import Media
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, parameter_error, validation_error


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Generation(msgspec.Struct, kw_only=True):
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
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int | None = None
    temperature: float | None = None
    tool_choice: str | dict[str, Any] | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: str | None = None  # this and the next two: SGLang's
    regex: str | None = None
    ebnf: str | None = None
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


def last_words(body: Generation) -> frozenset[str]:
    """Return the words of a chat's last message where the user wrote it: letters, digits, ``_`` and ``-``."""
    messages = getattr(body, "messages", None) or [{}]
    content = messages[-1].get("content") if messages[-1].get("role") == "user" else None
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [str(part.get("text") or "") for part in parts if isinstance(part, dict)]
    return frozenset(word for text in texts for word in re.findall(r"[\w-]+", text))


class CompletionRequest(Generation, kw_only=True):
    prompt: str | list[int | str | list[int]]
    add_special_tokens: bool = True


Body = TypeVar("Body", bound=msgspec.Struct)

_NOT_SIMULATED: dict[str, tuple[Any, ...]] = {
    # field -> values that ask for nothing
    "best_of": (None, 1),
    "prompt_logprobs": (None, 0),
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
}


def parse(raw: bytes, kind: type[Body]) -> Body:
    """Return a request body. Raises :class:`RequestError` (400) for what is no JSON or not of the form."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise validation_error(f"JSON decode error: {error}") from error


def check(body: Generation) -> None:
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
    if body.n is not None and body.n < 1:
        raise parameter_error(f"n must be at least 1, got {body.n}.", "n", body.n)
    if (body.n or 1) > 1 and body.temperature == 0:
        raise RequestError(f"n must be 1 when using greedy sampling, got {body.n}.")
    if body.echo and (body.logprobs is not None or isinstance(body, ChatRequest)):
        raise parameter_error("The echo of a chat, or with probabilities, is not simulated.", "echo", body.echo)
    if answer is not None and answer < 1:
        raise parameter_error(f"max_tokens must be at least 1, got {answer}.", "max_tokens", answer)
    if isinstance(body.tool_choice, dict) and body.structured_outputs:
        raise RequestError("You can only either use constraints for structured outputs or tools, not both.")
    if body.min_tokens < 0:
        raise parameter_error(f"min_tokens must not be negative, got {body.min_tokens}.", "min_tokens")
    if body.cache_salt == "":
        raise parameter_error("cache_salt must be a non-empty string if provided.", "cache_salt")
    if any(not text for text in body.stops):
        raise parameter_error("stop cannot contain an empty string.", "stop")
    if body.stream_options is not None and not body.stream:
        raise parameter_error("Stream options can only be defined when `stream=True`.", "stream_options")


_IMAGES = ("image_url", "input_image")
_OTHER_MEDIA = {"video_url": "video", "audio_url": "audio", "input_audio": "audio"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """An expanded prompt, and the visual tokens in it (``None`` without images)."""

    ids: "array[int]"
    media: tuple[Media, ...] = ()
    padded: "array[int] | None" = None  # ids with sentinels for images (SGLang)

    @property
    def visual_tokens(self) -> int | None:
        return sum(item.length for item in self.media) or None


def from_messages(engine: SimulatedEngine, body: ChatRequest) -> Prompt:
    """Return the prompt of a chat. Raises :class:`RequestError` (400)."""
    if not body.messages:
        raise RequestError("list index out of range", param="messages")
    parts = list(_image_parts(body.messages))
    limit = engine.settings.image_limit
    if limit is not None and len(parts) > limit:
        raise parameter_error(f"At most {limit} image(s) may be provided in one prompt.", "image", len(parts))
    # All parts are fetched and decoded before the first is looked up by its name.
    pictures = [_fetch(engine, part) for part in parts]
    images = [_name(engine, n, part, fetched) for n, (part, fetched) in enumerate(zip(parts, pictures, strict=True))]
    OWNER.set(body.cache_salt or "")  # tenants share no tokenized text, because engines have no cache of it
    text = engine.model.render(body.messages, body)
    return Prompt(*engine.model.expand(text, images, add_special_tokens=body.add_special_tokens))


def features(prompt: Prompt) -> dict[str, Any] | None:
    """Return the positions of images in a prompt, as in the renderer's answer; ``None`` without images."""
    if not prompt.media:
        return None
    return {
        "mm_hashes": {"image": [item.identifier for item in prompt.media]},
        "mm_placeholders": {"image": [{"offset": item.offset, "length": item.length} for item in prompt.media]},
        "kwargs_data": None,
    }


Text = str | list[int | str | list[int]]
"""A completion's ``prompt``: a text or token ids, or a list of either."""


def texts_of(prompt: Text) -> list[Text]:
    """Return each prompt of a completion."""
    if isinstance(prompt, list) and any(isinstance(each, str | list) for each in prompt):
        return [[*each] if isinstance(each, list) else str(each) for each in prompt]
    return [prompt]


def from_text(engine: SimulatedEngine, prompt: Text, *, special: bool) -> Prompt:
    """Return the prompt of a completion: one text, or token ids. Raises :class:`RequestError` (400)."""
    if isinstance(prompt, list):
        tokens = [token for token in prompt if isinstance(token, int)]
        size = engine.model.tokenizer.get_vocab_size()
        for token in tokens:
            if not 0 <= token < size:
                raise parameter_error(f"Token id {token} is out of vocabulary", "prompt")
        return Prompt(array("I", tokens))
    return Prompt(*engine.model.expand(prompt, [], add_special_tokens=special))


def _image_parts(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict):
                continue
            # A part without a type has the type of its key.
            kind = part.get("type") or next((key for key in (*_IMAGES, *_OTHER_MEDIA) if key in part), None)
            if kind in _IMAGES:
                yield part
            elif kind in _OTHER_MEDIA:
                modality = _OTHER_MEDIA[kind]
                raise parameter_error(f"At most 0 {modality}(s) may be provided in one prompt.", modality)


def _fetch(engine: SimulatedEngine, part: dict[str, Any]) -> tuple[bytes, media.Picture] | None:
    """Return an image's bytes and its decoded form; ``None`` for a part with only a uuid."""
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if url is None:
        if not part.get("uuid"):
            raise RequestError("image_url must be given when uuid is not", param="image_url")
        return None
    if not isinstance(url, str):
        raise RequestError("image_url.url must be a string", param="image_url")
    data = media.load(url, engine.settings.media_root)
    return data, media.decode(data, rotates=engine.model.family.rotates_exif)


def _name(
    engine: SimulatedEngine, number: int, part: dict[str, Any], fetched: tuple[bytes, media.Picture] | None
) -> tuple[str, int]:
    """Return an image's identifier and token count. A cached one is not processed again."""
    identifier = part.get("uuid")
    if not identifier and fetched is not None:
        identifier = media.default_identifier(engine.model.name, fetched[0], fetched[1].mode)
    identifier = str(identifier)
    count = engine.images.use(identifier)
    if count is None and engine.plugin is not None:
        count = engine.plugin.claim(identifier)
    if count is None:
        if fetched is None:
            raise RequestError(f"Cache miss for image at index {number} but data is not provided.")
        count = engine.model.count(fetched[1].width, fetched[1].height)
        time.sleep(count * engine.settings.cost.process_seconds / engine.settings.cost.speed)
        engine.images.put(identifier, count)
    return identifier, count
