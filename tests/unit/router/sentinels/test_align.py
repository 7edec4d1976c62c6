"""Alignment of sightings with requests: in whatever order they come, no image is ever taught another's sentinels."""

from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrouter_lib.block_keys import Span, block_keys
from mmrouter_lib.engines.sglang.identity import run_ids, sentinels
from mmrouter_router.sentinels import align, fill_sentinels
from mmrouter_router.sentinels.align import Aligner, SentRequest, places
from mmrouter_router.sentinels.table import SentinelTable

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


def take(table: SentinelTable, aligner: Aligner, lessons) -> list[bytes]:
    learned = []
    while lessons:
        for identity, values in lessons:
            table.put(identity, values, proven=True)
            learned.append(identity)
        lessons = aligner.resolve()
    return learned


def test_image_is_learned_from_its_requested_place():
    table, engine = SentinelTable(), Engine(TRUTH)
    aligner = Aligner(table)
    request = asked(6, b"a", 6)
    take(table, aligner, aligner.add_request(request))
    for sighting in engine.compute(request):
        assert take(table, aligner, aligner.add_sighting(*sighting, trusted=True)) == [b"a"]
    assert table.get(b"a").values == TRUTH[b"a"]


def test_only_requests_waiting_for_a_learned_image_are_recomputed(monkeypatch):
    table, looked = SentinelTable(), []
    aligner = Aligner(table)
    first, second = asked(6, b"a", 6, b"b", 6), asked(6, b"c", 6, b"d", 6)
    aligner.add_request(first)
    aligner.add_request(second)
    monkeypatch.setattr(align, "places", lambda request, table: looked.append(request) or places(request, table))
    for name, again in ((b"c", [second]), (b"a", [first]), (b"b", [])):
        table.put(name, TRUTH[name], proven=True)
        aligner.resolve()
        assert looked == again
        looked.clear()


def test_second_image_is_learned_once_the_first_fixes_its_place():
    table, engine = SentinelTable(), Engine(TRUTH)
    aligner = Aligner(table)
    request = asked(6, b"a", 6, b"b", 6)
    take(table, aligner, aligner.add_request(request))
    second, first = reversed(engine.compute(request))
    assert take(table, aligner, aligner.add_sighting(*second, trusted=True)) == []
    assert take(table, aligner, aligner.add_sighting(*first, trusted=True)) == [b"a", b"b"]
    assert table.get(b"b").values == TRUTH[b"b"]


def test_two_images_at_one_place_are_ambiguous():
    table, engine = SentinelTable(), Engine(TRUTH)
    aligner = Aligner(table)
    one, other = asked(6, b"a", 6), asked(6, b"b", 6)
    for request in (one, other):
        take(table, aligner, aligner.add_request(request))
    for request in (one, other):
        for sighting in engine.compute(request):
            assert take(table, aligner, aligner.add_sighting(*sighting, trusted=True)) == []
            assert aligner.ambiguous(sighting[0])


def test_second_image_at_a_place_is_learned_once_the_first_is_known():
    table, engine = SentinelTable(), Engine(TRUTH)
    aligner = Aligner(table)
    for request, name in ((asked(6, b"a", 6), b"a"), (asked(6, b"b", 6), b"b")):
        take(table, aligner, aligner.add_request(request))
        (sighting,) = engine.compute(request)
        assert take(table, aligner, aligner.add_sighting(*sighting, trusted=True)) == [name]


@pytest.mark.parametrize(("length", "teaches"), [(3, False), (4, True), (5, True), (6, False)])
def test_run_of_wrong_length_is_ignored(length, teaches):
    table = SentinelTable()
    aligner = Aligner(table)
    request = asked(8, b"a", 6)
    take(table, aligner, aligner.add_request(request))
    place = (block_keys(array("Q", request.ids), SIZE, (), SEED)[1], 0)
    values = tuple(dict.fromkeys(run_ids(TRUTH[b"a"], length)))
    assert bool(aligner.add_sighting(place, values, length, trusted=True)) is teaches


def test_sighting_before_the_request_is_another_image():
    table = SentinelTable()
    aligner = Aligner(table)
    request = asked(8, b"a", 6)
    place = (block_keys(array("Q", request.ids), SIZE, (), SEED)[1], 0)
    assert aligner.add_sighting(place, TRUTH[b"b"], 5, trusted=True) == []
    take(table, aligner, aligner.add_request(request))
    assert aligner.add_sighting(place, TRUTH[b"b"], 5, trusted=True) == []
    assert len(table) == 0


def test_untrusted_sighting_is_ignored():
    table, engine = SentinelTable(), Engine(TRUTH)
    aligner = Aligner(table)
    request = asked(6, b"a", 6)
    take(table, aligner, aligner.add_request(request))
    (sighting,) = engine.compute(request)
    assert aligner.add_sighting(*sighting, trusted=False) == []


def test_eviction_of_a_requested_image_marks_the_aligner_lost():
    table = SentinelTable()
    aligner = Aligner(table, max_places=1)
    aligner.add_request(asked(6, b"a", 6))
    assert not aligner.lost
    aligner.add_request(asked(9, b"b", 6))
    assert aligner.lost


_part = st.one_of(st.integers(1, 6), st.sampled_from(sorted(TOKENS)))
_prompt = st.lists(_part, min_size=1, max_size=6).map(lambda parts: asked(*parts))


@settings(max_examples=120)
@given(data=st.data(), single=st.booleans(), predicted=st.booleans())
def test_no_interleaving_teaches_a_wrong_image(data, single, predicted):
    truth = TRUTH_SINGLE if single else TRUTH
    table, engine = SentinelTable(), Engine(truth)
    aligner = Aligner(table)
    if predicted:  # rightly predicted values prove themselves
        table.put(b"a", truth[b"a"], proven=False)
    pending: list[SentRequest] = []
    published: list[tuple] = []

    def check(lessons) -> None:
        take(table, aligner, lessons)
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
