"""Qwen3-Omni: images as Qwen-VL's, and audio by its number of samples. Its videos are not modelled.

Covers ``qwen3_omni_moe``, whose thinker takes the media; on SGLang audio is not modelled. vLLM 0.32 pads audio to whole
frames of its feature extractor; 100 frames become 13 tokens, and fewer are halved three times.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

from mmrouter_lib.families.base.family import ProcessorLimits, refuse_options, register
from mmrouter_lib.families.qwen_vl import QwenVL
from mmrouter_lib.families.qwen_vl import load as load_images
from mmrouter_lib.model_folder import ModelFolderError, find_json, whole_number
from mmrouter_lib.wav_header import WavHeader

MODEL_TYPE = "qwen3_omni_moe"
FRAMES, TOKENS = 100, 13


@dataclass(frozen=True, slots=True)
class QwenOmni(QwenVL):
    """A Qwen3-Omni folder. ``rate``: samples a second that its feature extractor takes; ``hop``: samples of a frame."""

    audio_id: int | None = None
    rate: int = 16_000
    hop: int = 160
    audio_text: ClassVar[str] = "<|audio_pad|>"
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**QwenVL.media_text, "audio": "<|audio_start|><|audio_pad|><|audio_end|>"}
    )

    def with_options(self, options: Mapping[str, Any]) -> Self | None:
        """Return ``None``: no options are modelled."""
        return None

    def count_audio(self, audio: WavHeader) -> int | None:
        """Return the placeholder tokens, ``None`` for another rate, whose samples depend on the resampler."""
        if audio.rate != self.rate:
            return None
        frames = math.ceil(audio.samples / self.hop)
        rest = frames % FRAMES
        for _ in range(3):
            rest = (rest - 1) // 2 + 1
        return rest + frames // FRAMES * TOKENS


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> QwenOmni:
    """Return the family of a folder. Raises :class:`ModelFolderError` where its files contradict each other."""
    refuse_options(limits, "min_pixels", "max_pixels", "num_crops", family=MODEL_TYPE)
    file, thinker = str(folder / "config.json"), config.get("thinker_config")
    if not isinstance(thinker, dict):
        raise ModelFolderError(f"{file}: thinker_config is missing")
    images = load_images(folder, {**thinker, "model_type": MODEL_TYPE}, None)
    nested = (find_json(folder, "processor_config.json") or {}).get("feature_extractor")
    own = str(folder / "preprocessor_config.json")
    values = nested if isinstance(nested, dict) else find_json(folder, "preprocessor_config.json") or {}
    return QwenOmni(
        **{field.name: getattr(images, field.name) for field in fields(images)} | {"videos": None},
        audio_id=whole_number(file, thinker, "audio_token_id"),
        rate=whole_number(own, values, "sampling_rate", 16_000),
        hop=whole_number(own, values, "hop_length", 160),
    )


register(MODEL_TYPE, load, proved_on=("vllm", "sglang"))
