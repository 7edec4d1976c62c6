"""Alignment of sightings with requests: in whatever order they come, no image is ever taught another's sentinels."""

from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.conftest import examples
from unit.engines.sglang_pages import page_hashes

from mmrouter_lib.block_keys import Span, block_keys
from mmrouter_lib.engines.base.events import Stored
from mmrouter_lib.engines.sglang.identity import SENTINEL_BASE, run_ids, sentinels
from mmrouter_router.sentinels import align
from mmrouter_router.sentinels.align import Aligner, SentRequest, places
from mmrouter_router.sentinels.table import SentinelTable, fill_sentinels, observe_sentinels

SIZE, SEED, PLACEHOLDER = 4, 99, 7
TOKENS = {b"a": 5, b"b": 5, b"c": 9, b"d": 4}
TRUTH = {name: sentinels(number, legacy=False) for number, name in enumerate(TOKENS)}
TRUTH_SINGLE = {name: values[:1] for name, values in TRUTH.items()}


def asked(*parts: bytes | int) -> SentRequest:
    """A prompt: a number stands for that many text tokens, a name for an image."""
    ids, spans = array("I"), []
    for part in parts:
        if isinstance(part, int):
            ids.extend(range(100, 100 + part))
        else:
            spans.append(Span(len(ids), TOKENS[part], part))
            ids.extend([PLACEHOLDER] * TOKENS[part])
    return SentRequest(ids, tuple(spans), SIZE, SEED)


@dataclass
class Engine:
    """What a radix cache with a sidecar beside it publishes: each image's first run, at the place where it stands."""

    truth: dict[bytes, tuple[int, ...]]
    stored: set[int] = field(default_factory=set)

    def compute(self, request: SentRequest) -> list[tuple[tuple[int | None, int], tuple[int, ...], int]]:
        ids = fill_sentinels(request.ids, request.spans, self.truth.get).ids
        keys = block_keys(ids, SIZE, (), SEED)
        end = len(keys) * SIZE
        found = []
        for span in request.spans:
            block = span.offset // SIZE
            if span.offset >= end or keys[block] in self.stored:
                continue
            place = (keys[block - 1] if block else None, span.offset % SIZE)
            length = min(span.end, end) - span.offset
            values = tuple(dict.fromkeys(ids[span.offset : span.offset + length]))[:4]
            found.append((place, values, length))
        self.stored.update(keys)
        return found


class Learner:
    """A table, its aligner, and an engine with the truth; what is queried and seen goes into the table."""

    def __init__(self, truth=TRUTH) -> None:
        self.table, self.engine = SentinelTable(), Engine(truth)
        self.aligner = Aligner(self.table)

    def take(self, lessons) -> list[bytes]:
        learned = []
        while lessons:
            for identity, values in lessons:
                self.table.put(identity, values, proven=True)
                learned.append(identity)
            lessons = self.aligner.resolve()
        return learned

    def ask(self, request: SentRequest) -> None:
        self.take(self.aligner.add_request(request))

    def see(self, sighting) -> list[bytes]:
        return self.take(self.aligner.add_sighting(*sighting, trusted=True))


@pytest.fixture
def rig():
    return Learner()


def test_image_is_learned_from_its_requested_place(rig):
    rig.ask(request := asked(6, b"a", 6))
    assert [rig.see(sighting) for sighting in rig.engine.compute(request)] == [[b"a"]]
    assert rig.table.get(b"a").values == TRUTH[b"a"]


def test_only_requests_waiting_for_a_learned_image_are_recomputed(monkeypatch):
    rig, looked = Learner(), []
    first, second = asked(6, b"a", 6, b"b", 6), asked(6, b"c", 6, b"d", 6)
    rig.aligner.add_request(first)
    rig.aligner.add_request(second)
    monkeypatch.setattr(align, "places", lambda request, table: looked.append(request) or places(request, table))
    for name, again in ((b"c", [second]), (b"a", [first]), (b"b", [])):
        rig.table.put(name, TRUTH[name], proven=True)
        rig.aligner.resolve()
        assert looked == again
        looked.clear()


def test_second_image_is_learned_once_the_first_fixes_its_place(rig):
    rig.ask(request := asked(6, b"a", 6, b"b", 6))
    second, first = reversed(rig.engine.compute(request))
    assert (rig.see(second), rig.see(first)) == ([], [b"a", b"b"])
    assert rig.table.get(b"b").values == TRUTH[b"b"]


def test_two_images_at_one_place_are_ambiguous():
    rig, requests = Learner(), (asked(6, b"a", 6), asked(6, b"b", 6))
    for request in requests:
        rig.ask(request)
    for request in requests:
        for sighting in rig.engine.compute(request):
            assert rig.see(sighting) == []
            assert rig.aligner.ambiguous(sighting[0])


def test_second_image_at_a_place_is_learned_once_the_first_is_known(rig):
    for request, name in ((asked(6, b"a", 6), b"a"), (asked(6, b"b", 6), b"b")):
        rig.ask(request)
        (sighting,) = rig.engine.compute(request)
        assert rig.see(sighting) == [name]


@pytest.mark.parametrize(("length", "teaches"), [(3, False), (4, True), (5, True), (6, False)])
def test_run_of_wrong_length_is_ignored(rig, length, teaches):
    rig.ask(request := asked(8, b"a", 6))
    place = (block_keys(array("Q", request.ids), SIZE, (), SEED)[1], 0)
    values = tuple(dict.fromkeys(run_ids(TRUTH[b"a"], length)))
    assert bool(rig.see((place, values, length))) is teaches


def test_sighting_before_the_request_is_another_image():
    rig, request = Learner(), asked(8, b"a", 6)
    place = (block_keys(array("Q", request.ids), SIZE, (), SEED)[1], 0)
    assert rig.see((place, TRUTH[b"b"], 5)) == []
    rig.ask(request)
    assert rig.see((place, TRUTH[b"b"], 5)) == []
    assert len(rig.table) == 0


def test_untrusted_sighting_is_ignored(rig):
    rig.ask(request := asked(6, b"a", 6))
    (sighting,) = rig.engine.compute(request)
    assert rig.aligner.add_sighting(*sighting, trusted=False) == []


def test_eviction_of_a_requested_image_marks_the_aligner_lost():
    aligner = Aligner(SentinelTable(), max_places=1)
    aligner.add_request(asked(6, b"a", 6))
    assert not aligner.lost
    aligner.add_request(asked(9, b"b", 6))
    assert aligner.lost


_part = st.one_of(st.integers(1, 6), st.sampled_from(sorted(TOKENS)))
_prompt = st.lists(_part, min_size=1, max_size=6).map(lambda parts: asked(*parts))


@settings(max_examples=examples(120))
@given(data=st.data(), single=st.booleans(), predicted=st.booleans())
def test_no_interleaving_teaches_a_wrong_image(data, single, predicted):
    truth = TRUTH_SINGLE if single else TRUTH
    rig = Learner(truth)
    table, engine, aligner = rig.table, rig.engine, rig.aligner
    if predicted:  # rightly predicted values prove themselves
        table.put(b"a", truth[b"a"], proven=False)
    pending: list[SentRequest] = []
    published: list[tuple] = []

    def check(lessons) -> None:
        rig.take(lessons)
        for name, values in truth.items():
            known = table.get(name)
            assert known is None or known.values == values

    for _ in range(data.draw(st.integers(1, 14))):
        step = data.draw(st.sampled_from(["ask", "compute", "sight", "elsewhere"]))
        if step == "ask":
            pending.append(data.draw(_prompt))
            check(aligner.add_request(pending[-1]))
        elif step == "compute" and pending:
            published += engine.compute(pending.pop(data.draw(st.integers(0, len(pending) - 1))))
        elif step == "sight" and published:
            check(aligner.add_sighting(*published.pop(data.draw(st.integers(0, len(published) - 1))), trusted=True))
        elif step == "elsewhere":  # learned on another engine of the scope
            name = data.draw(st.sampled_from(sorted(truth)))
            check([(name, truth[name])])


SIZE = 4
VALUES = {bytes([n]): sentinels(n, legacy=False) for n in range(4)}


def prompt(parts: list[int]) -> tuple["array[int]", tuple[Span, ...]]:
    """Even numbers are text tokens, odd ones images of as many tokens."""
    ids, spans = array("I"), []
    for part in parts:
        if part % 2:
            spans.append(Span(len(ids), part, bytes([part % 4])))
        ids.extend([part] * (part if part % 2 else 1))
    return ids, tuple(spans)


@given(st.lists(st.integers(0, 9), max_size=30), st.sets(st.integers(0, 3)))
def test_keys_are_unique_from_the_first_unknown_image(parts, known):
    ids, spans = prompt(parts)
    exact = fill_sentinels(ids, spans, VALUES.get)
    one, two = [fill_sentinels(ids, spans, lambda name: VALUES[name] if name[0] in known else None) for _ in range(2)]
    assert (exact.unknown, len(exact.ids)) == (None, len(ids))
    keys = [block_keys(filled.ids, SIZE, (), 1) for filled in (exact, one, two)]
    if one.unknown is None:
        assert keys[0] == keys[1] == keys[2]
        return
    first = spans[one.unknown].offset // SIZE
    assert one.unknown == next(n for n, span in enumerate(spans) if span.identity[0] not in known)
    assert keys[0][:first] == keys[1][:first] == keys[2][:first]
    rest = [set(k[first:]) for k in keys]
    assert not rest[1] & rest[2]
    assert not rest[0] & rest[1]


def test_sentinels_cycle_within_each_run():
    ids, spans = prompt([0, 7, 2, 5, 4])
    filled = fill_sentinels(ids, spans, VALUES.get).ids
    for span in spans:
        values = VALUES[span.identity]
        assert list(filled[span.offset : span.end]) == [values[n % 4] for n in range(span.length)]
    text = [n for n in range(len(ids)) if not any(s.offset <= n < s.end for s in spans)]
    assert [filled[n] for n in text] == [ids[n] for n in text]


def stored(ids: "array[int]", first: int, end: int) -> Stored:
    """Blocks ``first`` .. ``end`` - 1 of a prompt, as an engine publishes them."""
    names = page_hashes(ids, SIZE)
    part = ids[first * SIZE : end * SIZE]
    return Stored(
        tuple(names[first:end]), names[first - 1] if first else None, part, SIZE, {}, (), None, None, 0, "GPU"
    )


@given(st.integers(0, 3), st.integers(0, 9), st.integers(1, 9))
def test_image_is_observed_across_split_events(offset, cut, tokens):
    ids = array("I", [*range(10, 10 + 2 * SIZE + offset), *[1] * tokens, *range(50, 60)])
    span = Span(2 * SIZE + offset, tokens, b"\x01")
    mine = fill_sentinels(ids, [span], VALUES.get).ids
    foreign = array("Q", range(90, 90 + 2 * SIZE + offset)) + array("Q", VALUES[b"\x02"] * 3)
    end = len(mine) // SIZE
    cut = min(cut, end)
    published = [stored(foreign, 0, len(foreign) // SIZE), stored(mine, 0, cut), stored(mine, cut, end)]
    seen = observe_sentinels(ids, span, SIZE, [event for event in published if event.hashes])
    assert seen == VALUES[b"\x01"][: min(4, tokens)]
    assert observe_sentinels(ids, span, SIZE, [stored(foreign, 0, len(foreign) // SIZE)]) is None


def test_single_sentinel_differs_from_text():
    ids = array("I", [*range(10, 18), *[1] * 6, *range(50, 60)])
    span = Span(8, 6, b"x")
    single = array("Q", ids)
    single[8:14] = array("Q", [SENTINEL_BASE + 9] * 6)
    assert observe_sentinels(ids, span, SIZE, [stored(single, 0, 6)]) == (SENTINEL_BASE + 9,)
    assert observe_sentinels(ids, span, SIZE, [stored(array("Q", ids), 0, 6)]) is None
