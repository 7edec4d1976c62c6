"""Encoding of images by the encoder pods: which encoder encodes which image, and when.

:class:`EncoderScheduler` decides, without I/O: every call takes the time and returns an :class:`Outcome` to carry out.
Units are seconds and visual tokens.
"""

from mmrouter_router.encoding.scheduler import EncoderScheduler
from mmrouter_router.encoding.types import (
    Abort,
    Answer,
    Encoder,
    EncoderStatus,
    EncodingFailed,
    Image,
    ImagePlacement,
    Mode,
    Outcome,
    QueuesFull,
    Ready,
    Start,
)

__all__ = [
    "Abort",
    "Answer",
    "Encoder",
    "EncoderScheduler",
    "EncoderStatus",
    "EncodingFailed",
    "Image",
    "ImagePlacement",
    "Mode",
    "Outcome",
    "QueuesFull",
    "Ready",
    "Start",
]
