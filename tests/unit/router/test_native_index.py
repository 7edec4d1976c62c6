"""The compiled table of the index answers as the Python one, which is the reference, whatever changed before."""

import random
from array import array
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib import native
from mmrouter_router.fleet.holder_table import HolderTable, bits, mask_of
from mmrouter_router.fleet.index import NOWHERE, HitRule, Index, TailRule

pytestmark = pytest.mark.usefixtures("compiled")

CANDIDATES = 70  # more than a word of the compiled sets has bits
CHANGED = (0, 1, 62, 63, 64, 69)
# Keys with equal upper and lower bytes share a shard and a place in it, at its beginning and at its end.
COLLIDING = [upper << 56 | number << 32 | lower for upper in (0, 255) for number in range(9) for lower in (0, 255)]
KEYS = st.lists(st.one_of(st.sampled_from(COLLIDING), st.integers(0, 12), st.just((1 << 64) - 1)), max_size=20)
CANDIDATE = st.sampled_from(CHANGED)
STEP = st.one_of(
    st.tuples(st.just("store"), CANDIDATE, KEYS),
    st.tuples(st.just("remove"), CANDIDATE, KEYS),
    st.tuples(st.just("replace"), CANDIDATE, st.none()),
    st.tuples(st.just("sweep"), st.integers(1, 9), st.none()),
)
CANDIDATE_SETS = st.sets(CANDIDATE)
RULE = st.tuples(CANDIDATE_SETS, st.lists(st.tuples(st.integers(1, 6), CANDIDATE_SETS), max_size=2), CANDIDATE_SETS)


class Candidates:
    """An index and its candidates by number: forms may give other slots after sweeps that take another time."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.slots = [index.join() for _ in range(CANDIDATES)]

    def apply(self, action: str, number: int, keys: list[int] | None) -> None:
        index, slots = self.index, self.slots
        if action == "store":
            index.store(slots[number], array("Q", keys or ()))
        elif action == "remove":
            index.remove(slots[number], array("Q", keys or ()))
        elif action == "replace":
            index.retire(slots[number])
            slots[number] = index.join()
        else:
            index.sweep(number)

    def held(self) -> list[int]:
        return [self.index.held(slot) for slot in self.slots]

    def keys(self) -> list[set[int]]:
        return [self.index.keys(slot) for slot in self.slots]

    def holders(self, key: int) -> set[int]:
        return {self.slots.index(slot) for slot in bits(self.index.holders(key))}

    def leading(self, prompt: list[int], wanted: set[int]) -> list[int]:
        found = self.index.leading(array("Q", prompt), mask_of(self.slots[number] for number in wanted))
        assert found[NOWHERE] == 0
        return [found[slot] for slot in self.slots]

    def hits(self, prompt: list[int], rules: dict[int, tuple]) -> dict[int, int]:
        def mask(numbers: set[int]) -> int:
            return mask_of(self.slots[number] for number in numbers)

        own = {
            self.slots[number]: HitRule(
                mask(whole), tuple(TailRule(need, mask(some)) for need, some in tails), mask(again)
            )
            for number, (whole, tails, again) in rules.items()
        }
        found = self.index.match_groups(array("Q", prompt), own)
        return {self.slots.index(slot): blocks for slot, blocks in found.items()}


def forms() -> tuple[Candidates, Candidates]:
    """Return the reference and the compiled form."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "HolderTable", None)
        reference = Candidates(Index())
    return reference, Candidates(Index())


@given(st.lists(STEP, max_size=40), KEYS, st.sets(st.integers(0, CANDIDATES - 1)), st.dictionaries(CANDIDATE, RULE))
def test_both_forms_answer_alike(steps, prompt, others, rules):
    reference, compiled = both = forms()
    for step in steps:
        for form in both:
            form.apply(*step)
        assert compiled.held() == reference.held()
    assert compiled.keys() == reference.keys()
    assert [compiled.holders(key) for key in prompt] == [reference.holders(key) for key in prompt]
    for wanted in (set(CHANGED), others):
        assert compiled.leading(prompt, wanted) == reference.leading(prompt, wanted)
    assert compiled.hits(prompt, rules) == reference.hits(prompt, rules)
    for form in both:
        while form.index.sweep(3):
            pass
    assert len(compiled.index) == len(reference.index)
    assert compiled.keys() == reference.keys()


def changes(rnd: random.Random, chains: list["array[int]"], steps: int) -> Iterator[tuple[str, int, list[int] | None]]:
    """Draw what engines do: store prefixes of prompts, evict blocks anywhere, restart; and sweeps between them."""
    for _ in range(steps):
        action = rnd.choices(("store", "remove", "replace", "sweep"), (60, 30, 3, 7))[0]
        chain = rnd.choice(chains)
        first, end = sorted(rnd.sample(range(len(chain) + 1), 2))
        some = chain[:end] if action == "store" else chain[first:end]
        yield action, 1000 if action == "sweep" else rnd.randrange(CANDIDATES), list(some)


def test_tables_of_thousands_of_blocks_that_grow_and_shrink_answer_alike():
    rnd = random.Random(20)
    # Prompts of 300 blocks, of which 100 are those of another prompt.
    chains = [array("Q", [rnd.getrandbits(64) for _ in range(300)]) for _ in range(60)]
    chains += [rnd.choice(chains)[:100] + array("Q", [rnd.getrandbits(64) for _ in range(200)]) for _ in range(60)]
    reference, compiled = both = forms()
    most, everyone = 0, set(range(CANDIDATES))
    for round_ in range(4):
        for step in changes(rnd, chains, 400):
            for form in both:
                form.apply(*step)
        most = max(most, len(reference.index))
        assert compiled.held() == reference.held()
        for chain in chains:
            prompt = list(chain)
            assert compiled.leading(prompt, everyone) == reference.leading(prompt, everyone)
        if round_ == 2:
            for form in both:
                for number in range(60):
                    form.apply("replace", number, None)
                while form.index.sweep():
                    pass
            assert len(compiled.index) == len(reference.index)
    assert most > 10_000
    assert compiled.keys() == reference.keys()


def test_a_sweep_in_steps_keeps_what_is_stored_and_removed_meanwhile():
    reference, compiled = both = forms()
    keys = [number << 48 | number for number in range(4000)]
    for form in both:
        for number in (0, 1):
            form.apply("store", number, keys)
        form.apply("replace", 0, None)
    for start in range(0, 4000, 100):
        for form in both:
            form.apply("sweep", 50, None)
            form.apply("store", 0, keys[start : start + 60])
            form.apply("remove", 1, keys[start + 30 : start + 90])
    for form in both:
        while form.index.sweep(50):
            pass
    assert compiled.keys() == reference.keys()
    assert len(compiled.index) == len(reference.index) == len(reference.keys()[0] | reference.keys()[1])


@pytest.mark.parametrize(
    "kind", [list, tuple, lambda keys: array("Q", keys), lambda keys: memoryview(array("Q", keys))]
)
def test_keys_may_be_any_sequence(kind):
    assert native.HolderTable is not None
    for table in (HolderTable(), native.HolderTable()):
        assert table.add(65, kind([5, 6, 6, 1 << 63])) == 3
        assert table.add(2, kind([6])) == 1
        assert table.holders(kind([6, 7, 1 << 63])) == [1 << 65 | 1 << 2, 0, 1 << 65]
        assert table.leading(kind([5, 6, 7]), 1 << 65 | 1 << 2, 67) == [0] * 65 + [2, 0]
        assert table.discard(65, kind([6, 8])) == 1
        assert (len(table), table.keys(65), table.keys(2)) == (3, {5, 1 << 63}, {6})


def test_the_compiled_table_refuses_keys_that_are_no_block_keys():
    assert native.HolderTable is not None
    table = native.HolderTable()
    for key in (-1, 1 << 64):
        with pytest.raises(OverflowError):
            table.add(0, [key])
    with pytest.raises(TypeError):
        table.add(0, ["5"])  # type: ignore[list-item]
    assert len(table) == 0
