"""Order of one engine rank's event stream: replay, backlog and live messages by sequence number. Pure; no I/O.

Messages arrive twice (live and replayed), late, or not at all. The output is every batch exactly once and in order, or
a report of a loss. The caller requests a replay from the engine for each :class:`ReplayRequest`, passes on the
messages, and reports when the answer ended or failed.

A frame does not name its engine instance (docs/engine-facts/vllm.md#event-frames), so instances are distinguished by
their batches: a batch that is seen again under its number must have the same bytes. A restarted sidecar begins with the
last batch of its journal as proof.
"""

from array import array

import msgspec
from xxhash import xxh3_64_intdigest

RECENT = 16_384  # number of remembered digests: more than an engine replays, to recognise late duplicates
MAX_HELD = 20_000
MAX_HELD_BYTES = 64 << 20  # both bound the batches that wait behind a gap; beyond either it is given up
GIVEN_UP = 0
MAX_FAILURES = 3  # replays without an answer before a gap is given up


class NextBatch(msgspec.Struct, frozen=True, gc=False):
    """The next batch in order. A struct, because there is one per batch."""

    seq: int
    payload: bytes
    digest: int


class ReplayRequest(msgspec.Struct, frozen=True):
    """A replay from number ``first`` on is needed; a replay in progress is abandoned."""

    first: int


class Lost(msgspec.Struct, frozen=True):
    """Earlier batches are no longer proved; the next steps belong to a new stream."""

    reason: str


class Skipped(msgspec.Struct, frozen=True):
    """Batches ``first`` .. ``end`` (both included) are lost."""

    first: int
    end: int


class Duplicate(msgspec.Struct, frozen=True):
    """A batch was received again, or after it was given up."""


Step = NextBatch | ReplayRequest | Lost | Skipped | Duplicate


def digest_of(payload: bytes) -> int:
    return xxh3_64_intdigest(payload)


class EventStream:
    """The stream of one rank. ``proof``: (number, digest) of the last batch in the journal.

    ``resumed``: the journal's state may be outdated, because no replay has been complete since the start.
    """

    def __init__(self, proof: tuple[int, int] | None = None) -> None:
        self._digests = array("Q", bytes(8 * RECENT))
        self._base: int  # first known number; a digest of 0 marks a number that was given up
        self._fresh: bool  # no batch was applied yet
        self._held: dict[int, bytes]
        self._requested: int | None
        self._proof: tuple[int, int] | None
        self._answered = False
        self._gap_known = False  # batches waited behind a gap when the replay was requested
        self.ended()
        self._proof = proof
        self.resumed = proof is not None
        if proof is not None:
            seq, digest = proof
            self.next, self._base, self._fresh = seq + 1, seq, False
            self._digests[seq % RECENT] = digest

    @property
    def waiting(self) -> int:
        """Batches that wait behind a gap or for the end of a replay."""
        return len(self._held)

    def ended(self) -> None:
        """Reset: the engine has ended."""
        self.next, self._base, self._fresh = 0, 0, True
        self._held, self._held_bytes = {}, 0
        self._requested, self._proof, self._failures = None, None, 0
        self.resumed = False

    def connected(self) -> list[Step]:
        """The publisher connected: request the messages sent before the subscription."""
        return [self._request()]

    def quiet(self) -> list[Step]:
        """The stream is silent: request a replay, since the newest messages may have been dropped."""
        return [] if self._requested is not None else [self._request()]

    def live(self, seq: int, payload: bytes) -> list[Step]:
        if seq < self.next and self._proof is None:
            return self._again(seq, payload)
        if seq == self.next and self._proof is None:
            ready = self._ready(seq, payload)
            return [ready, *self._drain()] if self._held else [ready]
        self._hold(seq, payload)
        if len(self._held) > MAX_HELD or self._held_bytes > MAX_HELD_BYTES:
            return self._give_up("backlog")
        return [] if self._requested is not None else [self._request()]

    def replayed(self, seq: int, payload: bytes) -> list[Step]:
        """Process one batch of the answer to the last :class:`ReplayRequest`."""
        if self._requested is None:
            return []
        first_of_answer, self._answered = not self._answered, True
        if self._proof is not None:
            number, digest = self._proof
            if seq != number or digest_of(payload) != digest:
                return self._restart("other_instance")
            self._proof = None
            return [Duplicate(), *self._check_early()]
        if seq < self.next:
            return self._again(seq, payload)
        if seq == self.next:
            return [self._ready(seq, payload), *self._drain()]
        if first_of_answer and seq > self._requested:
            # The engine's buffer begins after the requested number.
            return [*self._jump(seq, "history"), self._ready(seq, payload), *self._drain()]
        self._hold(seq, payload)  # some were dropped at a high-water mark; requested again at the end
        return []

    def replay_ended(self) -> list[Step]:
        if self._requested is None:
            return []
        if self._proof is not None:
            return self._restart("other_instance")
        requested, self._requested, self._failures = self._requested, None, 0
        steps = self._drain()
        if not self._held:
            self.resumed = False
            return steps
        if self.next > requested or not self._gap_known:
            # The replay made progress, or it was answered before the gap arose: try again.
            return [*steps, self._request()]
        return [*steps, *self._give_up("history")]

    def replay_failed(self) -> list[Step]:
        if self._requested is None:
            return []
        self._failures += 1
        if self._failures < MAX_FAILURES or not self._held:
            # Without a gap there is nothing to give up: keep trying.
            self._failures = min(self._failures, MAX_FAILURES - 1)
            return [self._request()]
        if self._proof is not None:
            return self._restart("other_instance")
        return self._give_up("unanswered")

    def expire(self) -> list[Step]:
        """Stop waiting for the replay that confirms the journal: an unconfirmed proof counts as another instance's."""
        self.resumed = False
        return [] if self._proof is None else self._restart("other_instance")

    def _again(self, seq: int, payload: bytes) -> list[Step]:
        """Handle a number below the next one: a duplicate if the bytes are the same, else another engine instance."""
        if seq >= max(self._base, self.next - RECENT):
            known = self._digests[seq % RECENT]
            if known in (GIVEN_UP, digest_of(payload)):
                return [Duplicate()]
        return self._restart("backwards", (seq, payload))

    def _check_early(self) -> list[Step]:
        """Check live batches below the proved number that arrived before the proof."""
        for seq in [seq for seq in self._held if seq < self.next]:
            payload = self._held[seq]
            self._release(seq)
            steps = self._again(seq, payload)
            if not isinstance(steps[0], Duplicate):
                return steps
        return self._drain()

    def _restart(self, reason: str, message: tuple[int, bytes] | None = None) -> list[Step]:
        """Begin the stream of another instance, with the waiting batches, which came from it."""
        held = list(self._held.items()) if reason == "other_instance" else []
        self.ended()
        for seq, payload in [*held, *([message] if message else [])]:
            self._hold(seq, payload)
        return [Lost(reason), self._request()]

    def _give_up(self, reason: str) -> list[Step]:
        reason = reason if self._proof is None else "other_instance"
        self._requested, self._failures, self._proof = None, 0, None
        self.resumed = False
        return [*self._jump(min(self._held), reason), *self._drain(), *([self._request()] if self._held else [])]

    def _jump(self, seq: int, reason: str) -> list[Step]:
        missed = Skipped(self.next, seq - 1)
        for number in range(max(self.next, seq - RECENT), seq):
            self._digests[number % RECENT] = GIVEN_UP
        fresh, self.next = self._fresh, seq
        for old in [old for old in self._held if old < seq]:
            self._release(old)
        return [missed] if fresh else [Lost(reason), missed]

    def _request(self) -> ReplayRequest:
        self._answered, self._gap_known = False, bool(self._held)
        self._requested = self._proof[0] if self._proof is not None else self.next
        return ReplayRequest(self._requested)

    def _ready(self, seq: int, payload: bytes) -> NextBatch:
        digest = digest_of(payload)
        self._digests[seq % RECENT] = digest
        self.next, self._fresh = seq + 1, False
        if self._held:
            self._release(seq)
        return NextBatch(seq, payload, digest)

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
