"""What an image costs by each way, so that a hand-over is taken only where it is the cheaper one. Pure.

By file or in the body an image is the same to the engine, which processes it. What differs depends on its bytes: the
router's part of the time is measured with every image, the engine's part is what was measured once of the real engine
(``python -m bench media``), because nobody outside sees it.

A processed image spares the engine its processing, whose time shows nowhere but in the answer. So the time to an
answer's first byte is measured with and without a renderer, as that of a prefill elsewhere is.
"""

from collections.abc import Mapping
from typing import Final, Literal

from mmrouter_router.core.linear_cost import Line, Rate
from mmrouter_router.scheduling.pipeline_form import Worth

Raw = Literal["file", "bytes"]

FIRST: Final[Mapping[Raw, Line]] = {"file": Line(250e-6, 0.5e-9), "bytes": Line(20e-6, 1.5e-9)}
"""The router's part, seconds and seconds per byte, where nothing was measured."""
ENGINE: Final[Mapping[Raw, Line]] = {"file": Line(200e-6, 1e-9), "bytes": Line(0.0, 8e-9)}
"""The engine's part: opening and reading a file; reading a body, its JSON and base64."""
FEW_TOKENS: Final = 16
"""A renderer is not asked for fewer visual tokens: there is nothing to spare."""


class Costs:
    """What the ways to the engines of one pool cost. Estimates are medians, which a quarter of wild values does not
    move."""

    def __init__(self, first: Mapping[Raw, Line] = FIRST, *, always: bool = False) -> None:
        """``first``: the router's part before any image. ``always``: a hand-over is taken whatever it costs."""
        self._always = always
        self._raw = {way: Rate(line) for way, line in first.items()}
        self._processing = Worth(0 if always else FEW_TOKENS)

    def seconds(self, way: Raw, size: int) -> float:
        """Return what an image of ``size`` encoded bytes takes by a way, processing aside."""
        return self._raw[way].line.seconds(size) + ENGINE[way].seconds(size)

    def why_no_file(self, size: int) -> str:
        """Return why an image of ``size`` encoded bytes is sent in the body, empty where a file is the cheaper way."""
        if self._always or self.seconds("file", size) < self.seconds("bytes", size):
            return ""
        return "bytes_cheaper"

    def why_unprocessed(self, tokens: int) -> str:
        """Return why an engine is to process images of so many visual tokens itself, empty where a renderer is to."""
        why = self._processing.why_here(tokens)
        return "small" if why == "short" else why

    def observe(self, way: Raw, size: int, seconds: float) -> None:
        """Take in what the router's part of one image took."""
        if seconds >= 0:
            self._raw[way].observe(size, seconds)

    def observe_answer(self, tokens: int, seconds: float, *, processed: bool) -> None:
        """Take in how long the first byte of an answer took for images of so many visual tokens."""
        self._processing.observe(tokens, seconds, apart=processed)
