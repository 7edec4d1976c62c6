"""Ways that keep failing are left alone for a while, so that what is broken costs next to nothing. Pure."""

from collections.abc import Callable
from typing import Final, NamedTuple

from mmrouter_router.handover.types import Way

FAILURES: Final = 3
"""In a row, of one way to one engine."""
FIRST_SECONDS: Final = 1.0
LAST_SECONDS: Final = 60.0


class _State(NamedTuple):
    failures: int = 0
    until: float = 0.0


class Resting:
    """Which ways to which engines are not tried now. An engine is known by its pod and start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: seconds that only grow."""
        self._clock = clock
        self._states: dict[tuple[str, Way], _State] = {}

    def rests(self, engine: str, way: Way) -> bool:
        """Whether a way is not to be tried. After its rest it is tried once, and rests twice as long if that fails."""
        return self._states.get((engine, way), _State()).until > self._clock()

    def failed(self, engine: str, way: Way) -> None:
        """Note that a way did not work."""
        failures = self._states.get((engine, way), _State()).failures + 1
        rest = min(FIRST_SECONDS * 2.0 ** min(failures - FAILURES, 30), LAST_SECONDS) if failures >= FAILURES else 0.0
        self._states[engine, way] = _State(failures, self._clock() + rest if rest else 0.0)

    def worked(self, engine: str, way: Way) -> None:
        """Note that it works."""
        self._states.pop((engine, way), None)

    def keep(self, engines: set[str]) -> None:
        """Forget every engine that is not one of these."""
        self._states = {key: state for key, state in self._states.items() if key[0] in engines}
