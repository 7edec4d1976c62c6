"""Learned linear cost model of an encoder: seconds = overhead + tokens / rate.

The line is fitted to recent images by the Theil-Sen estimator (the median of the slopes of all pairs), which tolerates
a quarter of outliers. Images of one size cannot separate slope from overhead: the line is scaled by the median ratio.
"""

from collections import deque
from itertools import combinations
from statistics import median
from typing import Final, NamedTuple

from mmrouter_lib.engines.base.launch import DEVICES

WINDOW: Final = 32  # images of one fit: a change of rate shows after half of them
EAGER: Final = 8  # images up to which each one triggers a fit; then every fourth does, because a fit compares all pairs
GUESSED_TOKENS_PER_SECOND: Final = 1000.0
GUESSED_OVERHEAD: Final = 0.005  # a first guess for the slowest kind of accelerator; it affects the first images only
_SPREAD: Final = 0.2  # a pair contributes a slope where its sizes differ by this share of the largest size
_PAIRS: Final = 10


class Line(NamedTuple):
    """Seconds for an image by its visual tokens."""

    overhead: float  # seconds per image
    per_token: float  # seconds per visual token

    def seconds(self, tokens: int, images: int = 1) -> float:
        """Return the time for ``images`` images of ``tokens`` visual tokens in total."""
        return images * self.overhead + tokens * self.per_token

    def scaled(self, factor: float) -> "Line":
        return Line(self.overhead * factor, self.per_token * factor)


def guess(kind: str) -> Line:
    """Return the initial line of an accelerator kind; an unknown kind counts as the slowest."""
    device = DEVICES.get(kind)
    speed = device.encoder_speed if device else 1.0
    return Line(GUESSED_OVERHEAD, 1.0 / (GUESSED_TOKENS_PER_SECOND * speed))


class Rate:
    """The line of one encoder, ``first`` until there are measurements."""

    def __init__(self, first: Line) -> None:
        self.line = first
        self.measured = 0
        self._last: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # tokens and seconds, per image
        self._batch = (0, 0, 0.0)  # images, tokens, seconds of the newest entry

    def observe(self, tokens: int, seconds: float, at_once: int = 1) -> None:
        """Add a measurement: an image took ``seconds`` of the encoder, whose batch limit is ``at_once``.

        The images of a batch return together, the first with all the seconds, so they count as one measurement.
        """
        if seconds < 0:
            raise ValueError(f"an image took {seconds} s")
        images, total, spent = self._batch
        if 0 < images < at_once and seconds < self.line.seconds(tokens) / 10:
            self._last.pop()
            self._batch = (images + 1, total + tokens, spent + seconds)
        else:
            self._batch = (1, tokens, seconds)
        self.measured += 1
        images, total, spent = self._batch
        self._last.append((total / images, spent / images))
        if len(self._last) <= EAGER or self.measured % 4 == 0:
            self._fit()

    def forget(self) -> None:
        """Drop the measurements, which may no longer hold; the line stays until there is a new one."""
        self._last.clear()
        self._batch = (0, 0, 0.0)

    def _fit(self) -> None:
        if all(seconds == 0 for _, seconds in self._last):
            return  # the clock did not advance
        least = _SPREAD * max(tokens for tokens, _ in self._last)
        slopes = [(d2 - d1) / (t2 - t1) for (t1, d1), (t2, d2) in combinations(self._last, 2) if abs(t2 - t1) > least]
        if len(slopes) >= _PAIRS and (slope := median(slopes)) > 0:
            overhead = max(0.0, median(d - slope * t for t, d in self._last))
            if overhead == 0.0:
                slope = median(d / max(t, 1) for t, d in self._last)
            self.line = Line(overhead, slope)
            return
        ratio = median(d / max(self.line.overhead + t * self.line.per_token, 1e-9) for t, d in self._last)
        if ratio > 0:
            self.line = self.line.scaled(ratio)
