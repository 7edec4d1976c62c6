"""Request bodies of SGLang's server, fields without an effect ignored, and their prompts, with sentinels for images."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from PIL import Image

from mmrouter_sim import media
from mmrouter_sim.core.requests import Adapter
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError
from mmrouter_sim.sglang.pages import by_bytes, by_pixels, padded
from mmrouter_sim.sglang.pairing import HOST_HEADER, PORT_HEADER, RANK_HEADER, ROOM_HEADER
from mmrouter_sim.vllm.requests import Generation, Prompt, Text


class ChatRequest(Generation, kw_only=True):
    """``/v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    input_ids: list[int] | None = None
    reasoning: dict[str, Any] | None = None
    lora_path: str | None = None
    return_prompt_token_ids: bool = False


class WithoutOverrides(Generation, kw_only=True):
    """A request that has in its body what a chat has in headers of overrides."""

    bootstrap_host: str = ""
    bootstrap_port: int = 8998
    bootstrap_room: int | None = None
    routed_dp_rank: int | None = None

    @property
    def overrides(self) -> dict[str, str]:
        """The headers by which a chat would say the same."""
        values: dict[str, str | int | None] = {RANK_HEADER: self.routed_dp_rank, ROOM_HEADER: self.bootstrap_room}
        if self.bootstrap_room is not None:
            values |= {HOST_HEADER: self.bootstrap_host, PORT_HEADER: self.bootstrap_port}
        return {name: str(value) for name, value in values.items() if value is not None}


class CompletionRequest(WithoutOverrides, kw_only=True):
    """``/v1/completions``."""

    prompt: Text
    lora_path: str | None = None


def check(body: Generation) -> None:
    """Refuse requests that are not simulated. Raises :class:`RequestError` (400)."""
    if body.n is not None and body.n < 1:
        raise RequestError(f"n must be at least 1, got {body.n}.", param="n")
    if body.echo and body.logprobs is not None:
        raise RequestError("echo with logprobs is not simulated.", param="echo")
    formed = body.regex or body.ebnf or (body.response_format or {}).get("type", "text") != "text"
    if body.tools and formed and (body.tool_choice == "required" or isinstance(body.tool_choice, dict)):
        why = "tool_choice 'required' or a named tool cannot be combined with response_format, regex, or ebnf."
        raise RequestError(why, param="tool_choice")
    if isinstance(body, ChatRequest):
        for name in ("input_ids", "mm_processor_kwargs", "chat_template"):
            if getattr(body, name):
                raise RequestError(f"{name} is not simulated.", param=name)
    if any(not text for text in body.stops):
        raise RequestError("stop cannot contain an empty string.", param="stop")


def adapter_of(engine: SimulatedEngine, body: ChatRequest | CompletionRequest) -> Adapter | None:
    """Return the adapter that a request names, in ``model`` behind a colon, else in ``lora_path``.

    Raises :class:`RequestError` (400) for one that is not loaded.
    """
    served, model = engine.settings.served_names[0], body.model or ""
    _, _, behind = model.removeprefix(served).partition(":")
    name = behind.strip() or body.lora_path
    if not name:
        return None
    if not engine.adapters:
        raise RequestError(f"LoRA adapter '{name}' was requested, but LoRA is not enabled.")
    if name not in engine.adapters:
        raise RequestError(
            f"The following requested LoRA adapters are not loaded: {name}\nLoaded adapters: {[*engine.adapters]}."
        )
    return engine.adapters[name]


ONE_VALUE = frozenset({"llava", "llava_next"})
"""Model types whose tokens all get the first sentinel (docs/engine-facts/sglang.md#identity-per-family)."""

_ENVELOPE = frozenset({"type", "format", "url", "image", "video", "audio", "content_hash"})


def from_messages(
    engine: SimulatedEngine, body: ChatRequest, encoded: Sequence[tuple[int, int]] | None = None
) -> Prompt:
    """Return the prompt of a chat. ``encoded``: item hash and tokens of each image, if encoders returned them. Raises
    :class:`RequestError` (400).
    """
    parts = images_of(engine, body.messages)
    images = encoded if encoded is not None else [_name(engine, number, part) for number, part in enumerate(parts)]
    named = [(str(item), count) for item, count in images]
    ids, where = engine.model.prompt(msgspec.structs.asdict(body), named)
    runs = [(int(item.identifier), item.offset, item.length) for item in where]
    return Prompt(ids, where, padded(ids, runs, first_only=engine.model.model_type in ONE_VALUE))


def images_of(engine: SimulatedEngine, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the image parts of a chat. Raises :class:`RequestError` (400)."""
    if not messages:
        raise RequestError("Messages cannot be empty.", param="messages")
    parts = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "image_url":
                parts.append(part)
            elif kind in ("video_url", "audio_url", "input_audio"):
                raise RequestError(f"{kind} is not simulated.")
    limit = engine.settings.image_limit
    if limit is not None and len(parts) > limit:
        raise RequestError(f"Image count {len(parts)} exceeds limit {limit} per request.")
    return parts


def picture(engine: SimulatedEngine, image: Mapping[str, Any]) -> tuple[int, int]:
    """Return a hash of an image's pixels, and its token count. Raises :class:`RequestError`."""
    data = media.load(str(image.get("url")), None)
    try:
        decoded = media.decode(data, rotates=engine.model.family.rotates_exif)
    except RequestError as error:
        raise RequestError(f"Could not decode image: {error}") from error
    with Image.open(io.BytesIO(data)) as opened:
        pixels = opened.convert("RGB")
        return by_pixels(pixels.mode, pixels.size, pixels.tobytes()), engine.model.count(decoded.width, decoded.height)


def image_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return an image part's URL and options. Raises :class:`RequestError`."""
    image = part.get("image_url")
    image = {"url": image} if isinstance(image, str) else image
    if not isinstance(image, dict) or not isinstance(image.get("url"), str):
        raise RequestError("image_url.url must be a string", param="image_url")
    return image


def _name(engine: SimulatedEngine, number: int, part: dict[str, Any]) -> tuple[int, int]:
    image = image_of(part)
    pixels, count = picture(engine, image)
    if engine.fingerprint is None:
        return pixels, count
    data = media.load(image["url"], None)
    expected, computed = image.get("content_hash"), "sha256:" + hashlib.sha256(data).hexdigest()
    if expected is not None and expected != computed:
        raise RequestError(f"content hash mismatch for media_data[{number}]: expected {expected}, got {computed}")
    options = {
        name: value
        for name, value in image.items()
        if name not in _ENVELOPE and value is not None and (name, value) != ("detail", "auto")
    }
    return by_bytes(data, engine.fingerprint, options), count
