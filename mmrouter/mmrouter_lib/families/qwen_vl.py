"""Qwen2-VL to Qwen3.6: one image processor, read from the folder as transformers 5.19 reads it, and two for videos.

Patches of 14 pixels (from Qwen3-VL on: 16) are merged 2x2, so sides are multiples of 28 (32) pixels. As published,
images are scaled to 3136 to 12845056 pixels, from Qwen3-VL on to 65536 to 16777216.

vLLM takes two frames a second of a video, and two frames make one slice of patches. Up to Qwen2.5-VL each frame is
scaled as an image is, and the slices are one run of placeholders. From Qwen3-VL on the frames share the pixels, and
each slice stands behind its time as text.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mmrouter_lib.families.base.family import (
    Family,
    ImageSizeError,
    ProcessorLimits,
    PromptImage,
    are_sizes,
    refuse_options,
    register,
)
from mmrouter_lib.model_folder import ModelFolderError, find_json, image_processor, vision_config, whole_number
from mmrouter_lib.video_header import VideoHeader

if TYPE_CHECKING:
    from mmrouter_lib.prompt.tokenizer import TokenizerCodec

# The processor class's own defaults, for keys that preprocessor_config.json leaves out.
DEFAULT_PATCH, DEFAULT_MERGE, DEFAULT_MIN_PIXELS, DEFAULT_MAX_PIXELS = 14, 2, 56 * 56, 28 * 28 * 1280

MAX_ASPECT = 200

LOADER_FPS, LOADER_MIN_FRAMES, LOADER_MAX_FRAMES = 2, 4, 768
"""What vLLM's loaders take of a video (``Qwen2VLVideoBackend``, ``Qwen3VLVideoBackend``); ``num_frames`` is ignored."""
SLICE = 2  # frames of a slice (``temporal_patch_size``)


@dataclass(frozen=True, slots=True)
class Videos:
    """How a folder's video processor scales frames. Pixels are those of a frame, or, with ``timed``, of all frames.

    ``timed``: from Qwen3-VL on. Then ``fps``, ``min_frames`` and ``max_frames`` apply to a video of which the loader
    takes all frames: the processor takes some of them.
    """

    placeholder_id: int
    min_pixels: int
    max_pixels: int
    timed: "Timed | None" = None


@dataclass(frozen=True, slots=True)
class Timed:
    """Tokens around each slice, and what the processor takes of a video whose frames are all loaded."""

    start_id: int
    end_id: int
    fps: float
    min_frames: int
    max_frames: int


@dataclass(frozen=True, slots=True)
class QwenVL(Family):
    """A Qwen-VL folder: an image is one unbroken run of placeholders, one per merged square of patches."""

    name: str
    placeholder_id: int
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    videos: Videos | None = None
    placeholder_text: str = "<|image_pad|>"

    media_text: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"image": "<|vision_start|><|image_pad|><|vision_end|>", "video": "<|vision_start|><|video_pad|><|vision_end|>"}
    )

    @property
    def may_have_states(self) -> bool:
        return self.name.startswith("qwen3_5")

    @property
    def pixel_options(self) -> dict[str, int]:
        return {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}

    def with_options(self, options: Mapping[str, Any]) -> Self | None:
        """Return the family with a request's limits of pixels, which hold for videos in another way."""
        limits = {**self.pixel_options, **options}
        if not are_sizes(limits, self.pixel_options) or limits["min_pixels"] > limits["max_pixels"]:
            return None
        return replace(self, **limits, videos=None)

    def count(self, width: int, height: int) -> int:
        """Return the number of placeholder tokens: (width'/patch)(height'/patch)/merge^2 of the resized image."""
        unit = self.patch_size * self.merge_size
        wide, high = smart_resize(width, height, unit=unit, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        return (wide // unit) * (high // unit)

    @property
    def video_id(self) -> int | None:
        return None if self.videos is None else self.videos.placeholder_id

    def count_video(self, video: VideoHeader) -> int:
        """Return the number of placeholder tokens: those of a slice times the slices."""
        return self._slice(video) * math.ceil(len(self._frames(video)) / SLICE)

    def tokens(self, codec: "TokenizerCodec", image: PromptImage, number: int) -> Sequence[int]:
        """Return placeholders; of a video with times the ids of ``<1.5 seconds>`` and a begin before each slice, and an
        end behind it. A video without a header is one placeholder.
        """
        if image.modality != "video" or self.videos is None:
            return Family.tokens(self, codec, image, number)
        if image.video is None:
            return (self.videos.placeholder_id,)
        if (timed := self.videos.timed) is None:
            return list(repeat(self.videos.placeholder_id, self.count_video(image.video)))
        frames, ids = list(self._frames(image.video)), list[int]()
        slice_ids = [timed.start_id, *repeat(self.videos.placeholder_id, self._slice(image.video)), timed.end_id]
        times = [frame / image.video.fps for frame in (*frames, *frames[-1:] * (-len(frames) % SLICE))]
        for first, last in zip(times[::SLICE], times[SLICE - 1 :: SLICE], strict=True):
            text = f"<{(first + last) / 2:.1f} seconds>"
            ids += codec.tokenizer.encode(text, add_special_tokens=False).ids + slice_ids
        return ids

    def _frames(self, video: VideoHeader) -> Sequence[int]:
        """Return the frames that are taken. Raises :class:`ImageSizeError` for fewer than a slice."""
        assert self.videos is not None
        if video.frames < SLICE:
            raise ImageSizeError(f"a video of {video.frames} frame: at least {SLICE} are needed")
        if (timed := self.videos.timed) is None:
            return range(evenly(video))
        taken = spread(video, LOADER_FPS, LOADER_MIN_FRAMES, LOADER_MAX_FRAMES)
        there = [frame for frame in taken if frame < video.frames - video.missing]
        if len(there) == video.frames:
            return spread(video, timed.fps, timed.min_frames, timed.max_frames)
        return there

    def _slice(self, video: VideoHeader) -> int:
        """Return the placeholder tokens of a slice."""
        assert self.videos is not None
        unit, width, height = self.patch_size * self.merge_size, video.width, video.height
        low, high = self.videos.min_pixels, self.videos.max_pixels
        if self.videos.timed is None:
            wide, tall = smart_resize(width, height, unit=unit, min_pixels=low, max_pixels=high)
        else:
            frames = len(self._frames(video))
            wide, tall = resize_together(width, height, frames, unit=unit, min_pixels=low, max_pixels=high)
        return (wide // unit) * (tall // unit)


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> QwenVL:
    """Return the family of a folder. Raises :class:`ModelFolderError` for a geometry that is not modelled."""
    refuse_options(limits, "num_crops", family=str(config["model_type"]))
    file, processor = image_processor(folder)
    patch = whole_number(file, processor, "patch_size", DEFAULT_PATCH)
    merge = whole_number(file, processor, "merge_size", DEFAULT_MERGE)
    vision = vision_config(str(folder / "config.json"), config)
    network = (vision.get("patch_size", patch), vision.get("spatial_merge_size", merge))
    if network != (patch, merge):
        raise ModelFolderError(
            f"{file}: patch_size and merge_size {(patch, merge)} are not those of config.json's vision_config {network}"
        )
    if processor.get("do_resize") is False:
        raise ModelFolderError(f"{file}: do_resize false is not modelled")
    low, high = pixel_limits(file, processor, limits, (DEFAULT_MIN_PIXELS, DEFAULT_MAX_PIXELS))
    placeholder_id = whole_number(str(folder / "config.json"), config, "image_token_id")
    name = str(config["model_type"])
    videos = _videos(folder, config, (patch, merge), limits)
    return QwenVL(name, placeholder_id, patch, merge, min_pixels=low, max_pixels=high, videos=videos)


def _videos(
    folder: Path, config: dict[str, Any], geometry: tuple[int, int], limits: ProcessorLimits | None
) -> Videos | None:
    """Return how videos are scaled, ``None`` where an option is not modelled.

    transformers 5.19 reads the first of processor_config.json's ``video_processor``, video_preprocessor_config.json and
    preprocessor_config.json (``get_video_processor_dict``). vLLM 0.32 chooses its loader by the class that the latter
    two name, else by the ``model_type``.
    """
    timed = not str(config["model_type"]).startswith("qwen2")
    name = "Qwen3VLVideoProcessor" if timed else "Qwen2VLVideoProcessor"
    nested = (find_json(folder, "processor_config.json") or {}).get("video_processor")
    own, images = (find_json(folder, f"{kind}preprocessor_config.json") or {} for kind in ("video_", ""))
    values = nested if isinstance(nested, dict) else own or images
    modelled: dict[str, tuple[Any, ...]] = {
        "video_processor_type": (name,),
        "patch_size": geometry[:1],
        "merge_size": geometry[1:],
        "temporal_patch_size": (SLICE,),
        "do_resize": (True,),
        "num_frames": (None,),
        "cap_pixels_per_frame": (None, False),
    }
    defaults: dict[str, Any] = {"patch_size": 16 if timed else 14, "merge_size": 2, "temporal_patch_size": SLICE}
    defaults |= {"do_resize": True, "video_processor_type": name}
    if not timed:
        modelled |= {"do_sample_frames": (None, False), "fps": (None,)}
    known = all(values.get(key, defaults.get(key)) in allowed for key, allowed in modelled.items())
    classes = {file.get("video_processor_type", name) for file in (own, images)}
    ids: list[Any] = [config.get(f"{each}_token_id") for each in ("video", "vision_start", "vision_end")]
    overridden = limits is not None and (limits.min_pixels, limits.max_pixels) != (None, None)
    if not known or classes != {name} or overridden or not all(isinstance(each, int) for each in ids):
        return None
    unit = 32 if timed else 28  # of the classes' defaults, whatever the patches
    size = values.get("size") or {"shortest_edge": 128 * unit**2, "longest_edge": 768 * unit**2}
    edges = size if isinstance(size, dict) else {}
    low: Any = edges.get("shortest_edge")
    high: Any = edges.get("longest_edge")
    if not timed:
        low, high = values.get("min_pixels") or low, values.get("max_pixels") or high
    sampled: list[Any] = [
        values.get(key) or usual for key, usual in (("fps", 2), ("min_frames", 4), ("max_frames", 768))
    ]
    if not all(isinstance(each, int) and each > 0 for each in (low, high, *sampled)):
        return None
    return Videos(ids[0], low, high, Timed(*ids[1:], *sampled) if timed else None)


def pixel_limits(
    file: str, processor: dict[str, Any], limits: ProcessorLimits | None, defaults: tuple[int, int]
) -> tuple[int, int]:
    """Return (min, max) pixels: the resource, else ``min_pixels``/``max_pixels``, else ``size``, else the ``defaults``
    of the class.

    That is also the order where a file has both forms: transformers 5.19 writes the pixel keys into ``size`` on
    loading, and vLLM 0.32 writes the engine's ``--mm-processor-kwargs`` over the result.
    """
    size = processor.get("size")
    if size is None:
        size = dict(zip(("shortest_edge", "longest_edge"), defaults, strict=True))
    if not isinstance(size, dict) or set(size) - {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}:
        raise ModelFolderError(f"{file}: size must hold shortest_edge and longest_edge, not {size!r}")
    edges = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
    bounds = []
    for key, edge in edges.items():
        if (limit := getattr(limits, key, None)) is not None:
            bounds.append(whole_number("spec.engine.processor", {key: limit}, key))
        else:
            bounds.append(whole_number(file, processor if processor.get(key) is not None else {key: edge}, key))
    low, high = bounds
    if low > high:
        raise ModelFolderError(f"{file}: the least number of pixels, {low}, is above the greatest, {high}")
    return low, high


def smart_resize(width: int, height: int, *, unit: int, min_pixels: float, max_pixels: float) -> tuple[int, int]:
    """Return the (width, height) in pixels that an image is resized to: multiples of ``unit`` near its own shape.

    This is ``smart_resize`` of transformers 5.19 in double precision. The order of the floating-point operations is
    part of the rule, because a last bit decides a floor or a ceiling.

    Each side is rounded to the nearest multiple (half to even). A result of more than ``max_pixels`` is scaled down
    with floors of at least one unit, one of less than ``min_pixels`` is scaled up with ceilings. A side of half a unit
    or less rounds to 0 and so is scaled up: 112x14 at unit 28 and 3136 pixels becomes 168x28, not 112x28.

    Raises :class:`ImageSizeError` for an empty image or one whose sides differ by more than :data:`MAX_ASPECT` times.
    """
    if width < 1 or height < 1:
        raise ImageSizeError(f"an image of {width}x{height} pixels is empty")
    if max(width, height) / min(width, height) > MAX_ASPECT:
        raise ImageSizeError(f"an image of {width}x{height} pixels: its sides differ by more than {MAX_ASPECT} times")
    wide = round(width / unit) * unit
    high = round(height / unit) * unit
    if wide * high > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        wide = max(unit, math.floor(width / shrink / unit) * unit)
        high = max(unit, math.floor(height / shrink / unit) * unit)
    elif wide * high < min_pixels:
        stretch = math.sqrt(min_pixels / (height * width))
        wide = math.ceil(width * stretch / unit) * unit
        high = math.ceil(height * stretch / unit) * unit
    return wide, high


def evenly(video: VideoHeader) -> int:
    """Return the number of frames that ``Qwen2VLVideoBackend`` of vLLM 0.32 takes of a video, an even number at first.

    The frames are ``torch.arange(0, frames, frames / number)``, of which there can be one more: a last bit decides. The
    last frame, which can be :attr:`~VideoHeader.missing`, is that one more, or one of all.
    """
    most = min(LOADER_MAX_FRAMES, video.frames) // SLICE * SLICE
    number = min(max(video.frames / video.fps * LOADER_FPS, LOADER_MIN_FRAMES), most, video.frames)
    number = math.floor(number / SLICE) * SLICE
    taken = math.ceil(video.frames / (video.frames / number))
    return taken - video.missing if taken > number or number == video.frames else taken


def spread(video: VideoHeader, fps: float, least: int, most: int) -> list[int]:
    """Return the frames that ``Qwen3VLVideoBackend`` of vLLM 0.32 takes, and ``Qwen3VLVideoProcessor`` of transformers.

    They are spread from the first frame to the last one, each rounded half to even.
    """
    number = min(max(int(video.frames / video.fps * fps), least), most, video.frames)
    if number == 1:
        return [0]
    last = video.frames - 1
    step = last / (number - 1)
    return sorted({*(round(place * step) for place in range(number - 1)), last})


def resize_together(
    width: int, height: int, frames: int, *, unit: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return the (width, height) in pixels that the frames of a video are resized to.

    This is ``smart_resize`` of transformers 5.19 for Qwen3-VL's videos. The limits are those of all frames together,
    and a frame with a side below one unit is first scaled up. Raises :class:`ImageSizeError` as :func:`smart_resize`.
    """
    if width < 1 or height < 1:
        raise ImageSizeError(f"a video of {width}x{height} pixels is empty")
    if height < unit or width < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    if max(width, height) / min(width, height) > MAX_ASPECT:
        raise ImageSizeError(f"a video of {width}x{height} pixels: its sides differ by more than {MAX_ASPECT} times")
    wide, high = round(width / unit) * unit, round(height / unit) * unit
    pixels = round(frames / SLICE) * SLICE * high * wide
    if pixels > max_pixels:
        shrink = math.sqrt((frames * height * width) / max_pixels)
        wide = max(unit, math.floor(width / shrink / unit) * unit)
        high = max(unit, math.floor(height / shrink / unit) * unit)
    elif pixels < min_pixels:
        stretch = math.sqrt(min_pixels / (frames * height * width))
        wide = math.ceil(width * stretch / unit) * unit
        high = math.ceil(height * stretch / unit) * unit
    return wide, high


# Qwen3.6 has the type of Qwen3.5. The types with "moe" differ in the language model only.
for model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"):
    register(model_type, load, proved_on=("vllm", "sglang"))
