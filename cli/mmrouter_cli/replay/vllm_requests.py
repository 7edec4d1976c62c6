"""Rebuilds the prompts of a vLLM capture's requests."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from mmrouter_cli.replay.capture import Capture, Row, load_model
from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.vllm.block_hashes import default_identifier
from mmrouter_lib.families import Family, ImageSizeError
from mmrouter_lib.image_size import ImageHeaderError, TooManyPixels, probe
from mmrouter_lib.media_identity import foreign_identity, from_wire
from mmrouter_lib.prompt import Expanded, PlaceholderError, Prompter, PromptImage, TemplateError, render_arguments

MAX_PIXELS = 1 << 30
UNKNOWN = b""
"""Identity of an image that only the events have."""


class NotRebuiltError(Exception):
    """This row's prompt is unknown; the message says why."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine computed for a request: ids including generated ones, and the places of images."""

    ids: "array[int]"
    prompt_tokens: int
    spans: tuple[Span, ...]
    lora: str | None
    salt: str | None
    placeholder_id: int
    returned: "array[int] | None"  # the engine's own ids where ``ids`` begins with the library's; None without --model


class _Image(NamedTuple):
    identity: bytes
    size: tuple[int, int] | None


class Requests:
    """Rebuilds prompts row by row, in order: an image with a uuid alone refers to an earlier one."""

    def __init__(self, capture: Capture, model_dir: Path | None) -> None:
        """Raises :class:`CaptureError` for a model folder that cannot be used."""
        self._images = capture.path.parent / "images"
        self._model = str(capture.meta.get("model", ""))
        # A capture names the folder's last part; the engine was started with the relative path (captures README).
        self._model_text = str(capture.meta.get("model_id") or f"models/{self._model}")
        self._model_dir = model_dir
        self._prompters: dict[str, tuple[Family, Prompter]] = {}
        self._by_uuid: dict[str, str] = {}
        self._token_ids: list[int] = []  # of the latest render: what a token-in request was given
        if model_dir is not None:
            self._prompter({})

    def prompt(self, row: Row) -> Prompt | None:
        """Return the prompt of a row's request, ``None`` if the engine computed nothing.

        Raises :class:`NotRebuiltError`.
        """
        raw = row.raw
        reply = raw.get("reply") or {}
        if row.kind == "render":
            self._token_ids = list(reply.get("token_ids") or [])
            return None
        if row.kind == "generate":
            return self._generated(raw, reply)
        request = raw.get("request")
        if request is None:
            raise NotRebuiltError("the capture does not hold its request")
        body = request.get("body")
        if not isinstance(body, dict):
            return None  # a query of the server, without a prompt
        if "messages" not in body:
            raise NotRebuiltError("the prompt is no chat" + (" but embeddings" if "prompt_embeds" in body else ""))
        images = [self._image(part, body) for part in _image_parts(body)]
        rendered = self._render(body, images)
        ids = reply.get("prompt_token_ids")
        if ids is None:
            if raw.get("status", 200) >= 400 and not row.frames:
                return None
            raise NotRebuiltError(f"the answer (status {raw.get('status')}) holds no prompt_token_ids")
        if rendered is not None:
            spans, placeholder = rendered.spans, self._prompter(body)[0].placeholder_id
        else:
            spans, placeholder = self._places(ids, images, reply)
        model = body.get("model")
        return Prompt(
            ids=(array("I", ids) if rendered is None else rendered.ids[:])
            + array("I", reply.get("output_token_ids") or []),
            prompt_tokens=len(ids) if rendered is None else len(rendered.ids),
            spans=spans,
            lora=model if model != self._model else None,
            salt=body.get("cache_salt"),
            placeholder_id=placeholder,
            returned=None if rendered is None else array("I", ids),
        )

    def _generated(self, raw: Mapping[str, Any], reply: Mapping[str, Any]) -> Prompt | None:
        if raw.get("status", 200) >= 400:
            return None
        features = raw["features"]
        names, places = features["mm_hashes"].get("image", []), features["mm_placeholders"].get("image", [])
        spans = tuple(Span(p["offset"], p["length"], _named(n)) for n, p in zip(names, places, strict=True))
        ids = self._token_ids
        if not ids:
            raise NotRebuiltError("the capture does not hold the rendered prompt")
        placeholder = ids[spans[0].offset] if spans else -1
        return Prompt(
            array("I", ids + (reply.get("output_token_ids") or [])), len(ids), spans, None, None, placeholder, None
        )

    def _render(self, body: Mapping[str, Any], images: Sequence[_Image]) -> Expanded | None:
        if self._model_dir is None:
            return None
        family, prompter = self._prompter(body)
        expand = []
        for image in images:
            if image.size is None:
                return None
            try:
                expand.append(PromptImage(image.identity, family.count(*image.size)))
            except ImageSizeError:
                return None  # refused, as the engine's own answer says
        try:
            text = prompter.render(body["messages"], **render_arguments(body))
            return prompter.expand(text, expand, add_special_tokens=bool(body.get("add_special_tokens", False)))
        except (TemplateError, PlaceholderError) as error:
            raise NotRebuiltError(f"the library refuses the request: {error}") from error

    def _prompter(self, body: Mapping[str, Any]) -> tuple[Family, Prompter]:
        """The family and prompter under a request's processor options."""
        options = body.get("mm_processor_kwargs") or {}
        loaded = self._prompters.get(key := repr(sorted(options.items())))
        if loaded is None:
            assert self._model_dir is not None
            limits = SimpleNamespace(**{"min_pixels": None, "max_pixels": None, "num_crops": None, **options})
            loaded = self._prompters[key] = load_model(self._model_dir, limits if options else None)
        return loaded

    def _image(self, part: Mapping[str, Any], body: Mapping[str, Any]) -> _Image:
        uuid = part.get("uuid")
        url = (part.get("image_url") or {}).get("url")
        name = url.get("$image", "") if isinstance(url, dict) else ""
        if not name and url is None and uuid is not None:
            name = self._by_uuid.get(uuid, "")
        elif uuid is not None:
            self._by_uuid.setdefault(uuid, name)
        path = self._images / name
        data = path.read_bytes() if name and path.is_file() and path.parent == self._images else None
        try:
            identifier = default_identifier(
                data,
                model=self._model_text,
                uuid=uuid,
                processor_options=body.get("mm_processor_kwargs"),
                media_options=body.get("media_io_kwargs"),
            )
            identity = _named(identifier)
        except ValueError:
            identity = UNKNOWN
        size = None
        if data is not None:
            rotates = self._prompter(body)[0].rotates_exif if self._model_dir is not None else True
            try:
                header = probe(data, max_pixels=MAX_PIXELS, exif=rotates)
                size = (header.width, header.height)
            except (ImageHeaderError, TooManyPixels):
                pass  # the engine rejected it too, or the row shows that it did not
        return _Image(identity, size)

    def _places(
        self, ids: Sequence[int], images: Sequence[_Image], reply: Mapping[str, Any]
    ) -> tuple[tuple[Span, ...], int]:
        """Find the images' runs in returned ids: the token that occurs as often as the engine counted image tokens."""
        if not images:
            return (), -1
        details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
        total = (details.get("multimodal_tokens") or {}).get("image")
        fitting = [
            (token, runs)
            for token in set(ids)
            if (total is None or ids.count(token) == total) and len(runs := _runs(ids, token)) == len(images)
        ]
        if len(fitting) != 1:
            raise NotRebuiltError("the places of its images do not follow from the ids alone: give --model")
        ((token, runs),) = fitting
        return tuple(
            Span(offset, length, image.identity) for (offset, length), image in zip(runs, images, strict=True)
        ), token


def _named(identifier: str) -> bytes:
    return from_wire(identifier) or foreign_identity(identifier)


def _image_parts(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for message in body["messages"]:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "image_url":
                yield part


def _runs(ids: Sequence[int], token: int) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for place, value in enumerate(ids):
        if value != token:
            continue
        if runs and runs[-1][0] + runs[-1][1] == place:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((place, 1))
    return runs
