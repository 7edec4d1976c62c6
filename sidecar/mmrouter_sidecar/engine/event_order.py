"""Order of one engine rank's event stream: replay, backlog and live messages by sequence number. Pure; no I/O.

Messages arrive twice (live and replayed), late, or not at all; what leaves is every batch exactly once and in order,
or the statement that something was lost. The caller asks the engine for a replay when told to (:class:`Ask`), hands in
what comes, and says when the answer ended or failed.

A frame carries no engine instance (docs/engine-facts/vllm.md#event-frames), so instances are told apart by what they
sent: a batch that is
seen again under its number must be the same bytes. A restarted sidecar begins with the last batch of its journal as
proof.
"""

from array import array
from dataclasses import dataclass

import msgspec
from xxhash import xxh3_64_intdigest

RECENT = 16_384
"""Batches whose digests are remembered: more than an engine replays, so that late duplicates are recognised."""
MAX_HELD = 20_000
MAX_HELD_BYTES = 64 << 20
"""Bounds of what waits behind a gap; beyond either the gap is given up."""
GIVEN_UP = 0
MAX_FAILURES = 3
"""Replays without an answer before a gap is given up."""

SAME_ENGINE = frozenset({"history", "backlog", "unanswered"})
"""Reasons of :class:`Lost` where the engine is still the same one; every other reason means another instance."""


class Ready(msgspec.Struct, frozen=True, gc=False):
    """The next batch of the stream. A struct, because there is one per batch."""

    seq: int
    payload: bytes
    digest: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask for a replay from number ``first`` on; a replay that is under way is abandoned."""

    first: int


@dataclass(frozen=True, slots=True)
class Lost:
    """What was applied before is not proved any more; the steps that follow belong to a stream that begins anew."""

    reason: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """Batches ``first`` .. ``end`` (both included) are gone: knowledge begins after them."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A batch came again, as it may, or after it was given up."""


Step = Ready | Ask | Lost | Skipped | Duplicate


def digest_of(payload: bytes) -> int:
    """Return the 64-bit digest by which a batch is recognised."""
    return xxh3_64_intdigest(payload)


class Stream:
    """One rank. ``proof`` is (number, digest) of the last batch that a journal holds."""

    def __init__(self, proof: tuple[int, int] | None = None) -> None:
        self.next = 0
        self._digests = array("Q", bytes(8 * RECENT))
        self._base = 0  # what came before this number is not known; 0 as a digest marks a number that was given up
        self._fresh = True  # nothing was applied yet
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._asked: int | None = None
        self._answered = False
        self._gap_known = False  # when the question was asked, something waited behind a gap already
        self._failures = 0
        self._proof = proof
        if proof is not None:
            seq, digest = proof
            self.next, self._base, self._fresh = seq + 1, seq, False
            self._digests[seq % RECENT] = digest

    @property
    def waiting(self) -> int:
        """Batches that wait behind a gap or for the end of a replay."""
        return len(self._held)

    @property
    def asking(self) -> bool:
        """Whether a replay is under way."""
        return self._asked is not None

    def ended(self) -> None:
        """The engine is gone and with it everything that it numbered."""
        self._reset()

    def connected(self) -> list[Step]:
        """The engine's publisher connected: whatever was sent before the subscription is in its replay buffer."""
        return [self._ask()]

    def quiet(self) -> list[Step]:
        """Nothing came for a while: the newest messages may be the ones that were dropped, so look for a tail."""
        return [] if self.asking else [self._ask()]

    def live(self, seq: int, payload: bytes) -> list[Step]:
        """Take a message of the live stream."""
        if seq < self.next and self._proof is None:
            return self._again(seq, payload)
        if seq == self.next and self._proof is None:
            ready = self._ready(seq, payload)
            return [ready, *self._drain()] if self._held else [ready]
        self._hold(seq, payload)
        if len(self._held) > MAX_HELD or self._held_bytes > MAX_HELD_BYTES:
            return self._give_up("backlog")
        return [] if self._asked is not None else [self._ask()]

    def replayed(self, seq: int, payload: bytes) -> list[Step]:
        """Take one batch of the answer to the last :class:`Ask`."""
        if self._asked is None:
            return []
        first_of_answer, self._answered = not self._answered, True
        if self._proof is not None:
            number, digest = self._proof
            if seq != number or digest_of(payload) != digest:
                return self._restart("other_instance")
            self._proof = None
            return [Duplicate(), *self._judge_early()]
        if seq < self.next:
            return self._again(seq, payload)
        if seq == self.next:
            return [self._ready(seq, payload), *self._drain()]
        if first_of_answer and seq > self._asked:
            # The engine's buffer begins after what was asked for.
            return [*self._jump(seq, "history"), self._ready(seq, payload), *self._drain()]
        self._hold(seq, payload)  # dropped on the way at a high-water mark; asked for again at the end
        return []

    def replay_ended(self) -> list[Step]:
        """The answer is complete."""
        if self._asked is None:
            return []
        if self._proof is not None:
            return self._restart("other_instance")
        asked, self._asked, self._failures = self._asked, None, 0
        steps = self._drain()
        if not self._held:
            return steps
        if self.next > asked or not self._gap_known:
            # It brought us further, so the rest may come too; or it was answered before the gap came about.
            return [*steps, self._ask()]
        return [*steps, *self._give_up("history")]

    def replay_failed(self) -> list[Step]:
        """No complete answer came in time."""
        if self._asked is None:
            return []
        self._failures += 1
        if self._failures < MAX_FAILURES or not self._held:
            # Without a gap behind which something waits there is nothing to give up; keep asking.
            self._failures = min(self._failures, MAX_FAILURES - 1)
            return [self._ask()]
        if self._proof is not None:
            return self._restart("other_instance")
        return self._give_up("unanswered")

    def _again(self, seq: int, payload: bytes) -> list[Step]:
        """A number below the next one: a duplicate when the bytes are the same, else another engine counts anew."""
        if seq >= max(self._base, self.next - RECENT):
            known = self._digests[seq % RECENT]
            if known in (GIVEN_UP, digest_of(payload)):
                return [Duplicate()]
        return self._restart("backwards", (seq, payload))

    def _judge_early(self) -> list[Step]:
        """Look at what came live, below the proved number, before anything was proved."""
        for seq in [seq for seq in self._held if seq < self.next]:
            payload = self._held[seq]
            self._release(seq)
            steps = self._again(seq, payload)
            if not isinstance(steps[0], Duplicate):
                return steps
        return self._drain()

    def _restart(self, reason: str, message: tuple[int, bytes] | None = None) -> list[Step]:
        """Begin with the stream of another instance; what waits came over its connection and is kept."""
        held = list(self._held.items()) if reason == "other_instance" else []
        self._reset()
        for seq, payload in [*held, *([message] if message else [])]:
            self._hold(seq, payload)
        return [Lost(reason), self._ask()]

    def _give_up(self, reason: str) -> list[Step]:
        """Go on after a gap that nothing will fill."""
        reason = reason if self._proof is None else "other_instance"
        self._asked, self._failures, self._proof = None, 0, None
        return [*self._jump(min(self._held), reason), *self._drain(), *([self._ask()] if self._held else [])]

    def _jump(self, seq: int, reason: str) -> list[Step]:
        missed = Skipped(self.next, seq - 1)
        for number in range(max(self.next, seq - RECENT), seq):
            self._digests[number % RECENT] = GIVEN_UP
        fresh, self.next = self._fresh, seq
        for old in [old for old in self._held if old < seq]:
            self._release(old)
        return [missed] if fresh else [Lost(reason), missed]

    def _reset(self) -> None:
        self.next, self._base, self._fresh = 0, 0, True
        self._held, self._held_bytes = {}, 0
        self._asked, self._proof, self._failures = None, None, 0

    def _ask(self) -> Ask:
        self._answered, self._gap_known = False, bool(self._held)
        self._asked = self._proof[0] if self._proof is not None else self.next
        return Ask(self._asked)

    def _ready(self, seq: int, payload: bytes) -> Ready:
        digest = digest_of(payload)
        self._digests[seq % RECENT] = digest
        self.next, self._fresh = seq + 1, False
        if self._held:
            self._release(seq)
        return Ready(seq, payload, digest)

    def _hold(self, seq: int, payload: bytes) -> None:
        if seq not in self._held:
            self._held[seq] = payload
            self._held_bytes += len(payload)

    def _release(self, seq: int) -> None:
        payload = self._held.pop(seq, None)
        if payload is not None:
            self._held_bytes -= len(payload)

    def _drain(self) -> list[Step]:
        steps: list[Step] = []
        while (payload := self._held.get(self.next)) is not None:
            steps.append(self._ready(self.next, payload))
        return steps
