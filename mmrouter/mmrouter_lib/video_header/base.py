"""What the readers of all containers share: their result and their error."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Cause = Literal["video_format", "video_timing"]


class VideoHeaderError(ValueError):
    """A header that does not tell what an engine makes of the video; ``cause`` is that of a decision."""

    def __init__(self, message: str, cause: Cause = "video_format") -> None:
        super().__init__(message)
        self.cause: Cause = cause


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """Width and height in pixels as displayed, number of frames, frames per second.

    ``missing``: how many frames at the end vLLM counts that are not there: it leaves them out after sampling.
    """

    width: int
    height: int
    frames: int
    fps: float
    missing: int = 0


def reduced(rate: Fraction, most: int) -> Fraction:
    """Return the fraction nearest to a rate whose numerator and denominator are at most ``most``, as FFmpeg does.

    Raises :class:`VideoHeaderError` for a rate to which no such fraction is near.
    """
    if rate <= 1:
        return rate.limit_denominator(most)
    seconds = (1 / rate).limit_denominator(most)
    if not seconds:
        raise VideoHeaderError("the frames are too close together", "video_timing")
    return 1 / seconds
