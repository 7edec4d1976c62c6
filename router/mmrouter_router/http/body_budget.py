"""Bytes of request bodies that a router holds: bounded, so that a crowd is refused before memory is short."""

from mmrouter_router.core.errors import RequestError


class Room:
    """``limit`` bytes for all requests together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0


class Held:
    """What one request has of the room. Call ``release`` in every case."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._size = 0

    def grow(self, size: int) -> None:
        """Hold ``size`` bytes in all. Raises :class:`RequestError` (429) where others hold too many for that.

        A request that is alone is taken: how large one may be is another limit.
        """
        room, more = self._room, size - self._size
        if more <= 0:
            return
        if room.held > self._size and room.held + more > room.limit:
            raise RequestError.router_full(room.held, room.limit)
        room.held += more
        self._size = size

    def release(self) -> None:
        """Give everything back; may be called any number of times."""
        self._room.held -= self._size
        self._size = 0
