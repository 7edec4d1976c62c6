"""The encoder's budget: which images are encoded in a step, and which encoder outputs are kept.

The engine encodes an image in the step in which its first placeholder is computed, keeps the output until its last
placeholder is computed, and after that until the space is needed. An image that does not fit into the budget or the
space ends the step's tokens right before it, which splits a prompt of two large images into more BlockStored events
than its length alone would (capture ``phi3v-nosw``, "two images A B").
"""

from collections import OrderedDict
from collections.abc import Sequence

from mmrouter_sim.core.hashing import Media


class EncoderCache:
    """Encoder outputs of one rank, at most ``room`` visual tokens. ``room`` is also the budget of one step."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._users: dict[str, set[str]] = {}  # identifier -> requests that still need it
        self._size: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # kept but not needed, oldest first
        self._kept = 0
        self.held = 0  # visual tokens that requests still need

    @property
    def identifiers(self) -> set[str]:
        """The images whose outputs are kept."""
        return set(self._size)

    def plan(
        self, request: str, media: Sequence[Media], computed: int, wanted: int, budget: int
    ) -> tuple[int, list[Media]]:
        """Return how many of the ``wanted`` tokens after ``computed`` can run, and the images to encode for them.

        Marks images that are already encoded as needed by this request. ``budget`` is what is left of this step's.
        """
        fresh: list[Media] = []
        planned = 0
        for item in media:
            if item.offset >= computed + wanted:
                break
            if item.end <= computed or any(item.identifier == other.identifier for other in fresh):
                continue
            if item.identifier in self._size:
                self._need(item.identifier, request)
                continue
            if planned + item.length > budget or self.held + planned + item.length > self.room:
                return max(item.offset - computed, 0), fresh
            planned += item.length
            fresh.append(item)
        return wanted, fresh

    def add(self, request: str, item: Media) -> None:
        """Keep an image's output for a request; idle outputs are dropped, least recently used first."""
        while self._kept + item.length > self.room:
            name, _ = self._idle.popitem(last=False)
            self._kept -= self._size.pop(name)
            del self._users[name]
        self._size[item.identifier] = item.length
        self._users[item.identifier] = {request}
        self._kept += item.length
        self.held += item.length

    def done(self, request: str, identifier: str) -> None:
        """Release an image's output for a request."""
        users = self._users.get(identifier)
        if users is None or request not in users:
            return
        users.remove(request)
        if not users:
            self._idle[identifier] = None
            self.held -= self._size[identifier]

    def clear(self) -> None:
        """Drop the outputs that no request needs."""
        for name in self._idle:
            self._kept -= self._size.pop(name)
            del self._users[name]
        self._idle.clear()

    def _need(self, identifier: str, request: str) -> None:
        if identifier in self._idle:
            del self._idle[identifier]
            self.held += self._size[identifier]
        self._users[identifier].add(request)
