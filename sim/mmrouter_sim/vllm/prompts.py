"""Render messages to token ids and named images, as the engine's renderer does. Runs in the renderer's thread."""

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from mmrouter_lib.prompt import PlaceholderError, TemplateError, render_arguments
from mmrouter_sim import media
from mmrouter_sim.core.hashing import Media
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, parameter_error
from mmrouter_sim.vllm.schema import Common

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


def from_messages(engine: SimulatedEngine, body: Common, messages: list[dict[str, Any]], *, special: bool) -> Prompt:
    """Return the prompt of a chat. Raises :class:`RequestError` (400)."""
    if not messages:
        raise RequestError("list index out of range", param="messages")
    parts = list(_image_parts(messages))
    limit = engine.settings.image_limit
    if limit is not None and len(parts) > limit:
        raise parameter_error(f"At most {limit} image(s) may be provided in one prompt.", "image", len(parts))
    # All parts are fetched and decoded before the first is looked up by its name.
    pictures = [_fetch(engine, part) for part in parts]
    images = [_name(engine, n, part, found) for n, (part, found) in enumerate(zip(parts, pictures, strict=True))]
    try:
        text = engine.model.prompter.render(messages, **render_arguments(msgspec.structs.asdict(body)))
        return Prompt(*engine.model.expand(text, images, add_special_tokens=special))
    except (TemplateError, PlaceholderError) as error:
        raise RequestError(str(error)) from error


def features(prompt: Prompt) -> dict[str, Any] | None:
    """Return the positions of images in a prompt, as in the renderer's answer; ``None`` without images."""
    if not prompt.media:
        return None
    return {
        "mm_hashes": {"image": [item.identifier for item in prompt.media]},
        "mm_placeholders": {"image": [{"offset": item.offset, "length": item.length} for item in prompt.media]},
        "kwargs_data": None,
    }


def from_text(engine: SimulatedEngine, prompt: str | list[int | str], *, special: bool) -> Prompt:
    """Return the prompt of a completion: one text, or token ids. Raises :class:`RequestError` (400)."""
    if isinstance(prompt, list):
        if all(isinstance(token, int) for token in prompt):
            return _from_ids(engine, [token for token in prompt if isinstance(token, int)])
        if len(prompt) != 1:
            raise parameter_error("A list of prompts is not simulated.", "prompt")
        prompt = str(prompt[0])
    try:
        return Prompt(*engine.model.expand(prompt, [], add_special_tokens=special))
    except (TemplateError, PlaceholderError) as error:
        raise RequestError(str(error)) from error


def _from_ids(engine: SimulatedEngine, tokens: list[int]) -> Prompt:
    size = engine.model.tokenizer.get_vocab_size()
    for token in tokens:
        if not 0 <= token < size:
            raise parameter_error(f"Token id {token} is out of vocabulary", "prompt")
    return Prompt(array("I", tokens))


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
    engine: SimulatedEngine, number: int, part: dict[str, Any], found: tuple[bytes, media.Picture] | None
) -> tuple[str, int]:
    """Return an image's identifier and token count. A cached one is not processed again."""
    identifier = part.get("uuid")
    if not identifier and found is not None:
        identifier = media.default_identifier(engine.model.name, found[0], found[1].mode)
    identifier = str(identifier)
    count = engine.images.get(identifier)
    if count is None and engine.plugin is not None:
        count = engine.plugin.claim(identifier)
    if count is None:
        if found is None:
            raise RequestError(f"Cache miss for image at index {number} but data is not provided.")
        count = engine.model.count(found[1].width, found[1].height)
        time.sleep(count * engine.settings.cost.process / engine.settings.cost.speed)
        engine.images.put(identifier, count)
    return identifier, count
