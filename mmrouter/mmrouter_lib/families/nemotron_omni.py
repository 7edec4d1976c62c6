"""Nemotron 3 Omni: an image keeps its shape and becomes as many patches as it has, within limits; audio by its samples.

Covers the architectures ``NemotronH_*Omni_Reasoning_V3`` on vLLM, whose processor (0.30 to 0.33,
``DynamicResolutionImageTiler`` and ``ParakeetExtractor``) reads its geometry from config.json alone. Images of one
request that together may not fit into the context are scaled down together there, which is not modelled
(:meth:`NemotronOmni.fits`). Four patches become one token, and 30 seconds of audio are encoded at a time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from mmrouter_lib.families.base.family import Family, ImageSizeError, ProcessorLimits, refuse_options, register
from mmrouter_lib.families.base.layout import check_size, special_id
from mmrouter_lib.families.nemotron_vl import IMAGE, radio_settings
from mmrouter_lib.model_folder import ModelFolderError, added_token_id, find_json, has_tokenizer_code, whole_number
from mmrouter_lib.wav_header import WavHeader

if TYPE_CHECKING:
    from mmrouter_lib.families.base.family import PromptImage
    from mmrouter_lib.prompt.tokenizer import TokenizerCodec

ARCHITECTURES = tuple(f"NemotronH_{size}Omni_Reasoning_V3" for size in ("Nano_", "Super_", ""))
AUDIO = "<so_embedding>"
MERGE = 2  # patches on each side of the square that becomes one token
CLIP_SECONDS, LEAST_SECONDS = 30, 0.1
RESERVED = 4  # tokens of the context that vLLM never gives to images


@dataclass(frozen=True, slots=True)
class AudioEncoder:
    """How samples become tokens. ``rate``: samples a second; ``hop``: samples of a frame; ``layers``: convolutions, of
    which each keeps one frame of ``stride``, by a window of ``kernel`` frames.
    """

    rate: int
    hop: int
    layers: int
    kernel: int
    stride: int

    def count(self, samples: int) -> int:
        """Return the tokens of a recording, which is cut into clips."""
        clip, least = CLIP_SECONDS * self.rate, round(LEAST_SECONDS * self.rate)
        whole, rest = divmod(max(samples, least), clip)
        tokens = whole * self._clip(clip) + (self._clip(max(rest, least)) if rest else 0)
        return max(1, tokens)

    def _clip(self, samples: int) -> int:
        frames, padding = samples // self.hop, (self.kernel - 1) // 2 * 2 - self.kernel
        for _ in range(self.layers):
            frames = (frames + padding) // self.stride + 1
        return frames


@dataclass(frozen=True, slots=True)
class NemotronOmni(Family):
    """A Nemotron Omni folder. ``patch``: a patch's side in pixels; ``least``, ``most``: patches of an image, ``most``
    ``None`` where the context alone limits them; ``audio_id``, ``audio``: of folders that take audio.
    """

    placeholder_id: int
    patch: int
    least: int
    most: int | None
    audio_id: int | None = None
    audio: AudioEncoder | None = None
    name: str = ARCHITECTURES[0]
    placeholder_text: str = IMAGE
    scales_together: ClassVar[bool] = True
    audio_text: ClassVar[str] = AUDIO
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType({"image": IMAGE, "video": "<video>", "audio": AUDIO})

    @property
    def may_have_states(self) -> bool:
        return True  # its language model has layers of Mamba

    def count(self, width: int, height: int) -> int:
        """Return the tokens of an image and the two around it. Raises :class:`ImageSizeError` for one without pixels,
        or one that is scaled down until a side has no patch.
        """
        check_size(width, height)
        most = math.inf if self.most is None else self.most
        sides = [round(side / self.patch + 0.5) for side in (height, width)]
        factor = min(math.sqrt(most / math.prod(sides)), 1.0)
        sides = [math.floor(factor * side) for side in sides]
        if not all(sides):
            raise ImageSizeError(f"an image of {width}x{height} pixels is too thin for this model")
        if most > self.least > math.prod(sides):
            factor = math.sqrt(self.least / math.prod(sides))
            sides = [math.ceil(factor * side) for side in sides]
        high = _even(sides[0], sides[1], most)
        wide = _even(sides[1], high, most)
        return high * wide // MERGE**2 + 2

    def fits(self, images: Sequence[int | None], room: int) -> bool:
        """Return whether the engine counts each image alone: the room is more than any one may take, and all fit."""
        patches = MERGE**2 * (room - RESERVED)
        if patches < max(self.least + 1, self.most or 0):
            return False
        known = [tokens for tokens in images if tokens is not None]
        return len(known) == len(images) and MERGE**2 * sum(known) <= patches

    def tokens(self, codec: "TokenizerCodec", image: "PromptImage", number: int) -> Sequence[int]:
        """Return the placeholders of an image, or of audio, between begin and end; of audio that is not predicted the
        placeholder alone.
        """
        audio = image.modality == "audio"
        if audio and image.count < 3:
            return Family.tokens(self, codec, image, number)
        begin, end = ("<so_start>", "<so_end>") if audio else ("<img>", "</img>")
        run = Family.tokens(self, codec, image, number)
        return [special_id(codec, begin), *run[2:], special_id(codec, end)]

    def count_audio(self, audio: WavHeader) -> int | None:
        """Return the tokens of audio and the two around them, ``None`` for another rate, whose samples depend on the
        resampler.
        """
        return self.audio.count(audio.samples) + 2 if self.audio is not None and audio.rate == self.audio.rate else None

    def check(self, codec: "TokenizerCodec") -> None:
        """Raise :class:`ModelFolderError` for a tokenizer without one of the tokens around images and audio."""
        Family.check(self, codec)
        for text in ("<img>", "</img>") + ("<so_start>", "<so_end>") * (self.audio_id is not None):
            special_id(codec, text)


def _even(side: int, other: int, most: float) -> int:
    """Return a side of whole squares, the next larger one where the image stays within its limit."""
    over = side % MERGE
    if not over:
        return side
    up = side + MERGE - over
    return up if up * other <= most else max(MERGE, side - over)


def load(name: str, folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> NemotronOmni | None:
    """Return the family of a folder, ``None`` where images are cut into tiles or the tokenizer is code of its own.

    Raises :class:`ModelFolderError` for a geometry that is not modelled.
    """
    refuse_options(limits, "min_pixels", "max_pixels", "num_crops", family=name)
    file = str(folder / "config.json")
    settings = radio_settings(file, config)
    if "min_num_patches" not in settings or has_tokenizer_code(find_json(folder, "tokenizer_config.json") or {}):
        return None
    if config.get("downsample_ratio") != 1 / MERGE:
        raise ModelFolderError(f"{file}: downsample_ratio must be {1 / MERGE}, not {config.get('downsample_ratio')!r}")
    image, audio = added_token_id(folder, IMAGE), added_token_id(folder, AUDIO)
    if image is None:
        raise ModelFolderError(f"{file}: the tokenizer has no token {IMAGE}")
    least = whole_number(file, settings, "min_num_patches")
    most = whole_number(file, settings, "max_num_patches", least=0) or None
    if most is not None and most < least:
        raise ModelFolderError(f"{file}: max_num_patches must be at least min_num_patches, not {most}")
    encoder = _audio_encoder(file, config.get("sound_config"))
    return NemotronOmni(
        image, whole_number(file, config, "patch_size"), least, most, audio if encoder else None, encoder, name
    )


def _audio_encoder(file: str, values: Any) -> AudioEncoder | None:
    if not isinstance(values, dict):
        return None
    return AudioEncoder(
        rate=whole_number(file, values, "sampling_rate"),
        hop=whole_number(file, values, "hop_length", 160),
        layers=whole_number(file, values, "subsampling_factor").bit_length() - 1,
        kernel=whole_number(file, values, "subsampling_conv_kernel_size"),
        stride=whole_number(file, values, "subsampling_conv_stride"),
    )


for _name in ARCHITECTURES:
    register(_name, partial(load, _name), proved_on=("vllm",))
