"""Runs of sentinels, split over events in any way, are observed once per place with their start and whole cycle."""

from array import array
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.block_keys import block_keys, chain
from mmrouter_lib.engines.base.events import Stored
from mmrouter_lib.engines.sglang.identity import run_ids, sentinels
from mmrouter_lib.feed import ImageObservation
from mmrouter_sidecar.blocks.image_observations import ImageObservations

SIZE = 4
SEED = 5
Parts = list[int | tuple[int, int]]


def prompt(parts: Parts, *, legacy: bool = False) -> tuple["array[int]", list[tuple[int, int, int]]]:
    """Return ids and (image, offset, length) of a prompt of texts (lengths) and images (number, length)."""
    ids, images = array("Q"), []
    for part in parts:
        if isinstance(part, int):
            ids.extend(range(1, part + 1))
        else:
            images.append((part[0], len(ids), part[1]))
            ids.extend(run_ids(sentinels(part[0], legacy=legacy), part[1]))
    return ids, images


def event(ids: "array[int]", first: int, end: int) -> Stored:
    """Blocks ``first`` .. ``end`` of a prompt; a block's hash is its number plus one."""
    hashes, parent = tuple(range(first + 1, end + 1)), first or None
    return Stored(hashes, parent, ids[first * SIZE : end * SIZE], SIZE, {}, (), None, None, 0, "GPU")


def look(seen: ImageObservations, ids: "array[int]", cuts: list[int]) -> list[ImageObservation]:
    keys = block_keys(ids, SIZE, (), SEED)
    found: list[ImageObservation] = []
    for first, end in pairwise(cuts):
        one = event(ids, first, end)
        parent = keys[first - 1] if first else SEED
        seen.observe(0, one, chain(one.ids, SIZE, end - first, {}, parent), parent)
        found += seen.take()
    return found


parts = st.lists(st.integers(1, 9) | st.tuples(st.integers(0, 3), st.integers(5, 300)), max_size=6)


@given(parts, st.lists(st.integers(0, 80), max_size=6), st.booleans())
def test_every_image_is_observed_at_its_place_with_its_cycle(parts: Parts, cuts: list[int], legacy: bool) -> None:
    # Equal images back to back are one run where the cycle happens to meet: nothing could tell them apart.
    parts = [part for n, part in enumerate(parts) if not (n and isinstance(part, tuple) and part == parts[n - 1])]
    apart = [item for part in parts for item in ((1, part) if isinstance(part, tuple) else (part,))]
    ids, images = prompt(apart, legacy=legacy)
    blocks = len(ids) // SIZE
    keys = block_keys(ids, SIZE, (), SEED)
    found = look(ImageObservations(), ids, sorted({0, blocks, *(cut for cut in cuts if cut < blocks)}))
    expected = {}
    for image, offset, length in images:
        values, shown = sentinels(image, legacy=legacy), min(length, blocks * SIZE - offset)
        if shown > len(values) or shown == len(values) == 4:  # else the prompt's last block shows too little of it
            number = offset // SIZE
            expected[keys[number - 1] if number else None, offset % SIZE] = values
    assert {(s.parent, s.offset): s.sentinels for s in found} == expected
    assert all(s.length >= len(s.sentinels) for s in found)


def test_two_images_side_by_side_are_two_runs() -> None:
    ids, _ = prompt([(1, 6), (2, 10)])
    first, second = look(ImageObservations(), ids, [0, 4])
    assert (first.parent, first.offset, first.length) == (None, 0, 6)
    assert (second.offset, second.length, second.sentinels) == (2, 10, sentinels(2, legacy=False))


def test_an_image_is_observed_once_per_place() -> None:
    seen = ImageObservations()
    ids, _ = prompt([2, (1, 8), 2])
    assert len(look(seen, ids, [0, 3])) == 1
    assert look(seen, ids, [0, 3]) == []
    other, _ = prompt([3, (1, 8), 1])
    assert len(look(seen, other, [0, 3])) == 1
    assert len(seen.remembered) == 2


def test_after_a_restart_a_run_at_an_events_start_proves_no_beginning() -> None:
    ids, _ = prompt([(1, 40)])
    seen = ImageObservations()
    seen.doubt()
    keys = block_keys(ids, SIZE, (), SEED)
    seen.observe(0, event(ids, 3, 10), keys[3:], keys[2])
    assert seen.take() == []
    fresh = ImageObservations()
    text, _ = prompt([4, (1, 8)])
    assert [s.parent for s in look(fresh, text, [0, 1, 3])] == [block_keys(text, SIZE, (), SEED)[0]]


def test_restored_observations_are_not_reported_again() -> None:
    ids, _ = prompt([2, (1, 8), 2])
    first, second = ImageObservations(), ImageObservations()
    look(first, ids, [0, 3])
    second.recall(first.remembered)
    assert second.remembered == first.remembered
    assert look(second, ids, [0, 3]) == []
