"""Cost of each way by which an image reaches an engine, so that the cheapest is taken. Pure.

By file or in the body an image is the same to the engine, which processes it; the cost depends on its bytes. The
router's part of the time is measured with every image. The engine's part is a constant, measured by ``python -m bench
media``, because the router cannot observe it.

A processed image spares the engine its processing, which shows only in the time to the first byte. That time is
measured with and without a renderer, as it is for a remote prefill.
"""

from collections.abc import Mapping
from typing import Final, Literal

from mmrouter_router.core.linear_cost import Line, Rate
from mmrouter_router.scheduling.pipeline_form import OffloadPolicy

Raw = Literal["file", "bytes"]

FIRST: Final[Mapping[Raw, Line]] = {"file": Line(250e-6, 0.5e-9), "bytes": Line(20e-6, 1.5e-9)}
"""The router's part, seconds and seconds per byte, before any measurement."""
ENGINE: Final[Mapping[Raw, Line]] = {"file": Line(200e-6, 1e-9), "bytes": Line(0.0, 8e-9)}
"""The engine's part: opening and reading a file; reading a body, its JSON and base64."""
FEW_TOKENS: Final = 16
"""Below this number of visual tokens a renderer saves nothing."""


class WayCosts:
    """Costs of the ways to the engines of one pool. Estimates are medians, robust to a quarter of outliers."""

    def __init__(self, first: Mapping[Raw, Line] = FIRST, *, always: bool = False) -> None:
        """``first``: the router's part before any image. ``always``: hand over regardless of cost."""
        self._always = always
        self._raw = {way: Rate(line) for way, line in first.items()}
        self._processing = OffloadPolicy(0 if always else FEW_TOKENS)

    def seconds(self, way: Raw, size: int) -> float:
        """Return the estimated seconds of an image of ``size`` encoded bytes by a way, without its processing."""
        return self._raw[way].line.seconds(size) + ENGINE[way].seconds(size)

    def why_no_file(self, size: int) -> str:
        """Return why an image of ``size`` encoded bytes is sent in the body, empty where a file is cheaper."""
        if self._always or self.seconds("file", size) < self.seconds("bytes", size):
            return ""
        return "bytes_cheaper"

    def why_unprocessed(self, tokens: int) -> str:
        """Return why the engine processes images of so many visual tokens itself, empty where a renderer does."""
        why = self._processing.reason_local(tokens)
        return "small" if why == "short" else why

    def observe(self, way: Raw, size: int, seconds: float) -> None:
        """Record the router's part for one image."""
        if seconds >= 0:
            self._raw[way].observe(size, seconds)

    def observe_answer(self, tokens: int, seconds: float, *, processed: bool) -> None:
        """Record the time to first byte of an answer for images of so many visual tokens."""
        self._processing.observe(tokens, seconds, remote=processed)
