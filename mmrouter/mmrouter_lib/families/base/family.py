"""The interface of a model family, and the values that cross it."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from mmrouter_lib.block_keys import Span
from mmrouter_lib.media_identity import Modality
from mmrouter_lib.model_folder import ModelFolderError, read_json
from mmrouter_lib.video_header import VideoHeader
from mmrouter_lib.wav_header import WavHeader

if TYPE_CHECKING:
    from mmrouter_lib.prompt.tokenizer import TokenizerCodec


class ImageSizeError(ValueError):
    """The engine's processor refuses an image or a video of this size."""


class PlaceholderError(ValueError):
    """The placeholders in the prompt do not fit the images of the request."""


class NotModelledError(ValueError):
    """The engine builds this prompt in a way that is not modelled: the request is served without a prediction.

    ``reason``: the decision's reason, ``cause:subject``.
    """

    def __init__(self, message: str, reason: str = "not_modelled:messages") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image, video or audio of a request: its media identity (32 bytes) and the number of tokens it becomes.

    Images that cannot be resolved are included too, with a unique identity, because the presence of images can change
    how the text is tokenized (Phi-3). ``size``: (width, height) in pixels, after rotation; families whose images are
    rows or tiles need it. ``video``: its header, ``None`` of one whose tokens are not known. Of audio whose tokens are
    not known, ``count`` is one.
    """

    identity: bytes
    count: int
    size: tuple[int, int] | None = None
    modality: Modality = "image"
    video: VideoHeader | None = None


@dataclass(frozen=True, slots=True)
class Expanded:
    """An expanded prompt: ``ids`` (u32) and one span per item that the engine takes, in the order given.

    That is the order in the prompt, too, where all are images. Placeholders beyond the images stay plain tokens: those
    that a user typed, and those of unresolved images.
    """

    ids: "array[int]"
    spans: tuple[Span, ...]


class ProcessorLimits(Protocol):
    """Processor options of the resource, which override those of the checkpoint; ``None`` keeps the checkpoint's."""

    @property
    def min_pixels(self) -> int | None: ...

    @property
    def max_pixels(self) -> int | None: ...

    @property
    def num_crops(self) -> int | None: ...


def are_sizes(options: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether a request's processor options are numbers from 1 under these names, and no others."""
    return all(name in names and type(value) is int and 0 < value < 2**63 for name, value in options.items())


def refuse_options(limits: ProcessorLimits | None, *names: str, family: str) -> None:
    """Raise :class:`ModelFolderError` where the resource sets a processor option that the family does not have."""
    for name in names:
        if getattr(limits, name, None) is not None:
            raise ModelFolderError(f"spec.engine.processor: {name} is no option of {family}")


class Family(ABC):
    """Image size -> placeholder tokens, and prompt text -> token ids, for one model folder.

    By default the placeholder is one token of the vocabulary: the text is tokenized once, then tokens are replaced.
    """

    __slots__ = ()

    name: str  # under which it is registered
    placeholder_id: int  # fills an image's span
    placeholder_text: str  # text of that token

    audio_text: ClassVar[str] = ""  # of the placeholder of audio
    media_text: ClassVar[Mapping[str, str]]
    """Modality -> text that stands for one item where a chat template takes plain strings.

    ``{number}`` in it stands for the item's number, from 1, among those of its modality in the whole chat.
    """
    chat_template: ClassVar[str | None] = None
    """The template that the engine takes where neither the resource nor the folder has one."""
    rotates_exif: ClassVar[bool] = True
    """Whether the engine rotates an image by its EXIF orientation before it counts tokens. vLLM does while it loads an
    image, except in Mistral's format, where the library counts the image as stored."""
    fragile: ClassVar[bool] = False
    """Whether placeholders that do not fit the images can end the engine: such a request must not be forwarded."""

    scales_together: ClassVar[bool] = False
    """Whether the engine scales the images of a request down together where they do not fit the context (``fits``)."""

    pads_images: ClassVar[bool] = False
    """Whether the engine pads the images of a request to the largest of them and names them by that (``paddings``)."""

    one_medium: ClassVar[bool] = False
    """Whether the engine has one kind for images and videos, so that a request's options for any of them name all."""

    places_images: ClassVar[bool] = True
    """Whether the place and length of images are known. Otherwise prompts without an image alone are predicted."""

    @property
    def may_have_states(self) -> bool:
        """Whether layers may keep states (mamba) beside or instead of the blocks of attention."""
        return False

    @property
    def pixel_options(self) -> dict[str, int]:
        """The processor options in force: they change pixels, so they belong to the media identity."""
        return {}

    def with_options(self, options: Mapping[str, Any]) -> Self | None:
        """Return the family for images under a request's processor options, ``None`` where these are not modelled."""
        return None

    @property
    def video_id(self) -> int | None:
        """The placeholder of a video, ``None`` where videos are not modelled."""
        return None

    @property
    def audio_id(self) -> int | None:
        """The placeholder of audio, ``None`` where the engine takes none or its place is not modelled."""
        return None

    def count_audio(self, audio: WavHeader) -> int | None:
        """Return the placeholder tokens of audio, ``None`` where they are not modelled."""
        return None

    @abstractmethod
    def count(self, width: int, height: int) -> int:
        """Return the tokens of an image (pixels, after rotation). Raises :class:`ImageSizeError`."""

    def fits(self, images: Sequence[int | None], room: int) -> bool:
        """Return whether the images of a request fit the context, so that the engine counts each of them alone.

        ``images``: tokens of each, ``None`` where they are unknown; ``room``: tokens that the smallest context of the
        engines has for them.
        """
        return True

    def paddings(self, sizes: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int] | None]:
        """Return for each image of a request the size that it is padded to, ``None`` for one that is not padded.

        An image of exactly that size has the same rows and columns, and is not padded beside this one. All are (width,
        height) in pixels.
        """
        return [None] * len(sizes)

    def count_video(self, video: VideoHeader) -> int:
        """Return the placeholder tokens of a video, where there is a ``video_id``. Raises :class:`ImageSizeError`."""
        raise TypeError(f"{self.name} models no videos")

    def tokens(self, codec: "TokenizerCodec", image: PromptImage, number: int) -> Sequence[int]:
        """Return the token ids that image ``number`` (from 0) of a prompt becomes, by default a run of placeholders."""
        placeholder = self.audio_id if image.modality == "audio" and self.audio_id else self.placeholder_id
        return placeholder_run("I", placeholder, number, image)

    def check(self, codec: "TokenizerCodec") -> None:
        """Raise :class:`ModelFolderError` for a tokenizer that has a placeholder under another id."""
        for text, wanted in ((self.placeholder_text, self.placeholder_id), (self.audio_text, self.audio_id)):
            if wanted is not None and (token := codec.token_id(text)) != wanted:
                raise ModelFolderError(f"the tokenizer has {text!r} as {token}, config.json as {wanted}")

    def expand(
        self, codec: "TokenizerCodec", text: str, images: Sequence[PromptImage], *, add_special_tokens: bool
    ) -> Expanded:
        """Return a prompt text's token ids with every image expanded. Raises :class:`PlaceholderError`."""
        ids = codec.encode(text, add_special_tokens=add_special_tokens)
        own = {"video": self.video_id, "audio": self.audio_id}
        others = {number: own[image.modality] for number, image in enumerate(images) if image.modality in own}
        runs = [self.tokens(codec, image, number) for number, image in enumerate(images)]
        return expand_ids(ids, self.placeholder_id, images, runs, others)

    def expand_text(
        self, codec: "TokenizerCodec", text: str, images: Sequence[PromptImage], *, add_special_tokens: bool
    ) -> Expanded:
        """Return a text's prompt on SGLang: as :meth:`expand`, but each span covers only the tokens that the engine
        overwrites with the image's identity. Raises :class:`PlaceholderError`, some families :class:`NotModelledError`.
        """
        return self.expand(codec, text, images, add_special_tokens=add_special_tokens)


Load = Callable[[Path, dict[str, Any], ProcessorLimits | None], Family | None]
_loaders: dict[str, Load] = {}
_proved: set[tuple[str, str]] = set()  # (name of a family, engine type)


def register(name: str, load: Load, *, proved_on: tuple[str, ...]) -> None:
    """Add a family under the ``model_type`` of its config.json, or under the architecture where that tells more.

    ``load`` gets the folder, its config.json and the resource's processor options, and returns ``None`` for a folder
    with a part that is not modelled. ``proved_on``: engine types whose prompts are proved to equal the family's, block
    by block (docs/conformance.md).
    """
    if name in _loaders:
        raise ValueError(f"model family {name} is registered twice")
    _loaders[name] = load
    _proved.update((name, engine_type) for engine_type in proved_on)


def family_name(config: Mapping[str, Any]) -> str:
    """Return the name under which a config.json's family is registered; of an unknown family its ``model_type``."""
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return first if isinstance(first, str) and first in _loaders else str(config.get("model_type", "unknown"))


def load_family(model_dir: Path, processor: ProcessorLimits | None) -> Family | None:
    """Return the family of a model folder, ``None`` for a ``model_type`` or vision tower that is not modelled.

    ``processor`` holds the resource's processor options, which override the folder's. Raises
    :class:`~mmrouter_lib.model_folder.ModelFolderError` for a folder whose config.json cannot be read, or of a
    registered family with a geometry that cannot be used.
    """
    config = read_json(model_dir, "config.json")
    load = _loaders.get(family_name(config))
    return None if load is None else load(model_dir, config, processor)


def family_names() -> frozenset[str]:
    """Return the names of all registered families."""
    return frozenset(_loaders)


def is_proved(name: str, engine_type: str) -> bool:
    """Whether the engine's prompts are proved to equal the family's, block by block (docs/conformance.md)."""
    return (name, engine_type) in _proved


def expand_ids(
    ids: "array[int]",
    placeholder: int,
    images: Sequence[PromptImage],
    runs: Sequence[Sequence[int]] = (),
    others: Mapping[int, int | None] | None = None,
) -> Expanded:
    """Replace each of the first ``len(images)`` placeholders by its image's tokens: ``runs``, else placeholders.

    ``others``: number of an image -> its own placeholder, as a video and audio have.

    The engine matches by position alone: a placeholder that a user typed takes an image from the template's own, which
    then stays a plain token (tests/conformance/vllm/test_tokenization.py). Raises :class:`PlaceholderError` when there
    are more images than placeholders, or an image of less than one token.
    """
    places: list[tuple[int, int]] = []  # where each image's placeholder stands, and the image's number
    behind: dict[int, int] = {}  # placeholder -> index behind its last use
    for number in range(len(images)):
        own = (others or {}).get(number)
        wanted = placeholder if own is None else own
        at = _find(ids, wanted, behind.get(wanted, 0))
        if at is None:
            what = "media" if others else "images"
            raise PlaceholderError(f"the prompt has a place for {number} {what}, the request has {len(images)}")
        places.append((at, number))
        behind[wanted] = at + 1
    out: array[int] = array(ids.typecode)
    spans: dict[int, Span] = {}
    done = 0
    for at, number in sorted(places):
        run = runs[number] if runs else placeholder_run(ids.typecode, placeholder, number, images[number])
        out += ids[done:at]
        spans[number] = Span(offset=len(out), length=len(run), identity=images[number].identity)
        out += array(ids.typecode, run)
        done = at + 1
    out += ids[done:]
    return Expanded(ids=out, spans=tuple(spans[number] for number in range(len(images))))


def placeholder_run(typecode: str, placeholder: int, number: int, image: PromptImage) -> "array[int]":
    """Return the placeholder tokens of image ``number``. Raises :class:`PlaceholderError` for less than one token."""
    if image.count < 1:
        raise PlaceholderError(f"image {number} has {image.count} tokens: at least one is needed")
    return array(typecode, [placeholder]) * image.count


def _find(ids: "array[int]", value: int, start: int) -> int | None:
    try:
        return ids.index(value, start)
    except ValueError:
        return None
