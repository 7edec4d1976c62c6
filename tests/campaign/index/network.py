"""Virtual time, and connections that lose, delay, duplicate and reorder messages as a seeded generator draws. Pure."""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

Act = Callable[[], None]


class VirtualTime:
    """Acts in the order of their times, in seconds; acts at equal times in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Act]] = []
        self._numbers = itertools.count()

    def at(self, time: float, act: Act) -> None:
        heapq.heappush(self._queue, (max(time, self.now), next(self._numbers), act))

    def after(self, seconds: float, act: Act) -> None:
        self.at(self.now + seconds, act)

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, act = heapq.heappop(self._queue)
            act()
        self.now = until


class Node:
    """A process: its actions wait in their order while it is paused, and are dropped once it has ended."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self.alive = True
        self.stands_until = 0.0
        self._waiting: list[Act] = []

    def stand_still(self, seconds: float) -> None:
        self.stands_until = max(self.stands_until, self._time.now + seconds)

    def act(self, act: Act) -> None:
        """Act now, or when the process runs again."""
        if not self.alive:
            return
        if self._time.now >= self.stands_until and not self._waiting:
            act()
            return
        self._waiting.append(act)
        if len(self._waiting) == 1:
            self._time.at(self.stands_until, self._resume)

    def _resume(self) -> None:
        if self._time.now < self.stands_until:  # the pause was extended
            self._time.at(self.stands_until, self._resume)
            return
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            self.act(act)

    def act_after(self, seconds: float, act: Act) -> None:
        self._time.after(seconds, lambda: self.act(act))

    def repeat(self, seconds: float, act: Act) -> None:
        """Act now and every so many seconds."""

        def again() -> None:
            act()
            self.act_after(seconds, again)

        self.act(again)


@dataclass
class Weather:
    """How a link treats messages. ``loss``, ``twice``: shares of them. ``jitter``: largest extra delay in seconds.

    ``cut_until``: until when nothing passes. With ``ordered`` a message never overtakes another.
    """

    loss: float = 0.0
    twice: float = 0.0
    delay: float = 0.0005
    jitter: float = 0.0
    ordered: bool = True
    cut_until: float = 0.0


class Link:
    """One direction of a connection to ``receiver``."""

    def __init__(self, time: VirtualTime, dice: random.Random, receiver: Node, weather: Weather) -> None:
        self._time, self._dice, self._receiver, self.weather = time, dice, receiver, weather
        self._last = 0.0

    def send(self, act: Act, *, reliable: bool = False) -> bool:
        """Let the receiver act on a message when it arrives; return whether it does. ``reliable``: it is lost only
        where the link is cut.
        """
        weather, dice, now = self.weather, self._dice, self._time.now
        if now < weather.cut_until or (not reliable and weather.loss and dice.random() < weather.loss):
            return False
        for _ in range(2 if not reliable and weather.twice and dice.random() < weather.twice else 1):
            arrival = now + weather.delay + (dice.random() * weather.jitter if weather.jitter else 0.0)
            if weather.ordered or reliable:
                arrival = self._last = max(arrival, self._last)
            self._time.at(arrival, lambda: self._receiver.act(act))
        return True
