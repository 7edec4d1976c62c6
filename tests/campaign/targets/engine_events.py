"""Batches of engine events through a sidecar and a router: the router's index holds no block that the sidecar does not.

Bytes that are no events are counted and clear the rank; nothing else ends the sidecar. A sidecar that is started again
on the journal holds the same. For batches of an engine that is modelled, with one cache group or several, the index
equals the engine's cache, group by group.
"""

import random
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec
from campaign.mutation import MSGPACK_WORDS, changed, mutated
from campaign.target import BrokenPropertyError, Target
from unit.sidecar.conftest import CLEARED, batch, keys_of, removed, stored
from unit.sidecar.test_cache_groups import FULL_GROUP, MAMBA_GROUP, window
from unit.sidecar.test_cache_groups import Engine as GroupedEngine
from unit.sidecar.test_ledger import SIZE, Model
from unit.sidecar.test_sliding_windows import Prompt

from mmrouter_lib import feed, native
from mmrouter_lib.block_keys import block_keys
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.events import EventError
from mmrouter_lib.media_identity import to_wire
from mmrouter_router.fleet.workers import Fleet, Member, Worker
from mmrouter_router.telemetry.metrics import Metrics as RouterMetrics
from mmrouter_sidecar.engine.event_order import digest_of
from mmrouter_sidecar.feed.relay import EventRelay
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import CurveKeys, Settings

APART = b"\n--\n"  # between batches of one input
FIELDS = (
    "type block_hashes parent_block_hash token_ids block_size lora_id lora_name medium extra_keys group_idx locality"
)
NAMES = (*FIELDS.split(), "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "cache_salt")
ODD: tuple[Any, ...] = (
    *(None, True, 0, 1, 2, 3, 4, -1, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan"), [], {}, b"", b"\1" * 32, [1, 2]),
    *([[1, 2]], [["salt"]], "", "GPU", "CPU", "REMOTE", "sliding_window", "mamba", "full_attention", "BlockRemoved"),
)
IMAGE = [[[to_wire(bytes(32)), 0]], None]
LAYOUTS = (
    (FULL_GROUP, window(5)),
    (window(9), window(9), FULL_GROUP),
    (MAMBA_GROUP, FULL_GROUP),
    (FULL_GROUP, window(5), MAMBA_GROUP, FULL_GROUP),
)


class OneGroup:
    """A modelled engine with one cache group."""

    def __init__(self) -> None:
        self._model = Model()

    def batches(self, script: bytes) -> Iterator[bytes]:
        """Yield the events of storing, removing and clearing as the bytes say."""
        for number, byte in enumerate(script[:200]):
            if byte < 130:
                blocks = [byte % 3, byte // 3 % 3, byte // 9 % 3, byte // 27 % 3][: 1 + (byte + number) % 4]
                yield batch(*self._model.store(tuple(block * 10 + place for block in blocks for place in range(SIZE))))
            elif byte < 250:
                yield batch(*self._model.remove(byte + number))
            else:
                yield batch(*self._model.clear(None))

    def held(self, seed: int) -> dict[int, set[int]]:
        """Return the keys that each group holds."""
        blocks = [block for block, copies in self._model.copies.items() if copies]
        return {0: {block_keys(array("I", block), SIZE, [], seed)[-1] for block in blocks}}


class SeveralGroups:
    """A modelled engine with full attention and other cache groups; the first byte of its script chooses them."""

    def __init__(self) -> None:
        self._prompts: list[Prompt] = []
        self._engine = GroupedEngine()

    def batches(self, script: bytes) -> Iterator[bytes]:
        """Yield the events of prompts, which share beginnings, and of removals, as the bytes say."""
        engine = self._engine = GroupedEngine(*LAYOUTS[script[0] % len(LAYOUTS)], chunk=1 + script[0] // 4 % 8)
        for number, byte in enumerate(script[1:100]):
            if byte < 150:
                words = [byte % 2, byte // 2 % 2, byte // 4 % 2, byte // 8 % 3][: 1 + (byte + number) % 4]
                prompt = Prompt([word * 10 + place for word in words for place in range(3 * SIZE)])
                self._prompts.append(prompt)
                yield batch(*engine.run(prompt))
            elif byte < 250:
                yield batch(*engine.drop(byte + number))
            else:
                for copies in engine.copies:
                    copies.clear()
                yield batch(CLEARED)

    def held(self, seed: int) -> dict[int, set[int]]:
        """Return the keys that each group holds."""
        keys: dict[bytes, int] = {}
        for prompt in self._prompts:
            keys |= zip(prompt.hashes, block_keys(array("I", prompt.ids), SIZE, [], seed), strict=True)
        copies = enumerate(self._engine.copies)
        return {number: {keys[name] for name, count in group.items() if count} for number, group in copies}


MODELS = {b"model": OneGroup, b"groups": SeveralGroups}


class EngineEvents(Target):
    """An input: a line with the engine, then batches; or one of ``MODELS``, then one byte for each step of a model."""

    name = "engine_events"
    short = 100
    words = (
        *MSGPACK_WORDS,
        *(b"\x91" * 40, b"\xdf\xff\xff\xff\xff", b"\xd3\x80" + bytes(7), b"\xcb\x7f\xf8" + bytes(6)),
        *(b"\xc4\x08" + bytes(8), b"\xc7\x00\x05", b"\xc1", b"\xe0"),
        *(b"\xa3CPU", b"\xb0AllBlocksCleared", b"\xacBlockRemoved", b"\xabBlockStored", APART),
    )

    def __enter__(self) -> Self:
        memory = Path("/dev/shm")
        self._folder = Path(tempfile.mkdtemp(prefix="campaign-", dir=memory if memory.is_dir() else None))
        self._fleet, self._metrics, self._number = Fleet(RouterMetrics()), Metrics(), 0
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def seeds(self) -> list[bytes]:
        first = stored([1, 2], ids=[1, 2, 3, 4]), stored([3], 2, ids=[5, 6])
        windowed: dict[str, Any] = {
            "kv_cache_spec_kind": "sliding_window",
            "kv_cache_spec_sliding_window": 4,
            "group_idx": 1,
        }
        digest: Any = b"\1" * 32
        batches = [
            [batch(*first), batch(removed(3)), batch(CLEARED)],
            [batch(stored([9, 8], ids=[1, 2, 3, 4], extra_keys=IMAGE)), batch(stored([7], ids=[1, 2], lora_name="l"))],
            [
                batch(stored([1, 2], ids=[1, 2, 3, 4], **windowed), stored([5], ids=[1, 2])),
                batch(removed(1, group_idx=1)),
            ],
            [batch(stored([1], ids=[1, 2], medium="CPU"), stored([1], ids=[1, 2])), batch(removed(1, medium="CPU"))],
            [batch(stored([digest], ids=[1, 2]), stored([2], digest, ids=[1, 2, 3], extra_keys=[["salt"]]))],
            [msgspec.msgpack.encode([1.0, [["BlockStored", [4], None, [1, 2], 2, None, "GPU"]], 0])],
        ]
        events = [engine + APART.join(each) for engine in (b"vllm\n", b"sglang\n") for each in batches]
        scripts = bytes(range(0, 250, 7)), bytes(range(250, 0, -3))
        return [*events, *(name + b"\n" + script for name in MODELS for script in scripts)]

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        if source.random() < 0.2:
            return source.choice(tuple(MODELS)) + b"\n" + source.randbytes(source.randrange(1, 120))
        chosen = source.choice(kept)
        head, _, rest = chosen.partition(b"\n")
        if head not in MODELS and source.random() < 0.7:
            payloads = rest.split(APART)
            place = source.randrange(len(payloads))
            with suppress(ValueError, TypeError, OverflowError, msgspec.MsgspecError):
                document = changed(source, msgspec.msgpack.decode(payloads[place]), NAMES, ODD)
                payloads[place] = msgspec.msgpack.encode(document)
                if source.random() < 0.3:
                    payloads.insert(source.randrange(len(payloads) + 1), source.choice(payloads))
                return head + b"\n" + APART.join(payloads[:20])
        return head + b"\n" + mutated(source, (rest, rest, source.choice(kept).partition(b"\n")[2]), self.words)[:4096]

    def check(self, data: bytes) -> str:
        head, _, rest = data.partition(b"\n")
        model = MODELS[head]() if head in MODELS and rest else None
        engine = "sglang" if head == b"sglang" else "vllm"
        payloads = model.batches(rest) if model is not None else iter(rest.split(APART)[:50])
        self._number += 1
        settings = self._settings(engine)
        frames: list[feed.Published] = []
        relay = EventRelay(settings, self._metrics, frames.append)
        worker = self._fleet.join(Member(f"uid-{self._number}", "w", "127.0.0.1", "worker", "worker"))
        try:
            self._answer(relay, worker, self._fleet.feed_connected(worker))
            for number, payload in enumerate(payloads):
                _same_forms(engine, payload)
                with self.product():
                    relay.batch(0, number, payload, digest_of(payload))
                    if number % 3 == 0:
                        relay.flush()
                    self._deliver(relay, worker, frames)
            relay.flush()
            relay.beat()
            self._deliver(relay, worker, frames)
            self._compare(relay, worker, model, settings)
            relay.close()
            again = EventRelay(settings, self._metrics, frames.append)
            if _held(again) != _held(relay):
                raise BrokenPropertyError("a sidecar that is started again on the journal holds something else")
            again.close()
        finally:
            self._fleet.leave(worker.member.uid)
            while self._fleet.index.sweep():
                pass
            shutil.rmtree(settings.state_dir, ignore_errors=True)
        return " ".join(
            (head[:6].decode("latin-1"), *sorted(name for name, count in relay.ledger.counts.items() if count))
        )

    def _settings(self, engine: str) -> Settings:
        folder, keys = self._folder / str(self._number), CurveKeys(b"", b"", ())
        pod = f"uid-{self._number}", "127.0.0.1", "127.0.0.1"
        return Settings(*pod, engine, "m", "main", 1, bytes(range(32)), keys, *[folder] * 4, buffer_events=100)

    def _deliver(self, relay: EventRelay, worker: Worker, frames: list[feed.Published]) -> None:
        """Send what was published over the wire's form."""
        while frames:
            frame = frames.pop(0)
            self._answer(relay, worker, self._fleet.on_published(worker, feed.decode_published(feed.encode(frame))))

    def _answer(self, relay: EventRelay, worker: Worker, requests: Sequence[feed.Request]) -> None:
        waiting = list(requests)
        for _ in range(100):
            if not waiting:
                return
            for reply in relay.answer(feed.decode_request(feed.encode(waiting.pop(0)))):
                waiting += self._fleet.on_reply(worker, feed.decode_reply(feed.encode(reply)))
        raise BrokenPropertyError("the router does not stop asking", "hang")

    def _compare(
        self, relay: EventRelay, worker: Worker, model: OneGroup | SeveralGroups | None, settings: Settings
    ) -> None:
        if not worker.sync.synced:
            raise BrokenPropertyError("the router is not in step at the end")
        primary = worker.layout.primary
        slots = {(rank, primary): slot for rank, slot in worker.slots.items()} | worker.beside
        indexed = {place: keys for place, slot in slots.items() if (keys := self._fleet.index.keys(slot))}
        held = {place[:2]: keys for place, keys in _held(relay).items() if place[2] == "GPU"}
        if any(keys - held.get(place, set()) for place, keys in indexed.items()):
            raise BrokenPropertyError(f"indexed {indexed}, the sidecar holds {held}")
        if model is None:
            return  # two hashes may have come with one content, which an engine never sends: the index has less
        keys = {(0, group): keys for group, keys in model.held(settings.seed(None, None)).items() if keys}
        if not keys == held == indexed:
            raise BrokenPropertyError(f"the engine holds {keys}, the sidecar {held}, indexed {indexed}")


def _held(relay: EventRelay) -> dict[tuple[int, int, str], set[int]]:
    return keys_of([part for part in relay.answer(feed.SnapshotRequest(1)) if isinstance(part, feed.SnapshotPart)])


def _same_forms(engine: str, payload: bytes) -> None:
    """The compiled form, where it is installed, reads what the Python form reads."""
    if native.pack_token_ids is None:
        return
    packs, native.pack_token_ids = native.pack_token_ids, None
    try:
        plain = _read(engine, payload)
    finally:
        native.pack_token_ids = packs
    if _read(engine, payload) != plain:
        raise BrokenPropertyError("the compiled form reads something else")


def _read(engine: str, payload: bytes) -> Any:
    try:
        return repr(adapter("sglang" if engine == "sglang" else "vllm").decode_batch(payload))
    except EventError:
        return "error"
