"""The offline check of decisions: every read of a cache within its lag passes, and what no moment explains is found."""

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest
from campaign.index.history import CacheChange, Decision, Record, Unobserved, check
from hypothesis import given, settings
from hypothesis import strategies as st

PROMPT = ("a", "b", "c", "d")
LAG = 3


def states(changes: Iterable[CacheChange]) -> list[tuple[float, set]]:
    """The cache after every change, for changes that happen exactly at their ``at``."""
    held: set = set()
    found = [(float("-inf"), held)]
    for change in changes:
        held = (held - set(change.went)) | set(change.came)
        found.append((change.at, held))
    return found


def drawn_history(dice: random.Random, steps: int) -> list[Record]:
    """A cache that changes, and a reader whose views lag behind and never go back."""
    history: list[Record] = []
    held: set = set()
    now, view = 0, 0
    past: list[tuple[int, set]] = [(0, set())]
    for _ in range(steps):
        now += dice.randint(1, 2)
        if dice.random() < 0.5:
            came = [name for name in PROMPT if name not in held and dice.random() < 0.4]
            went = [name for name in PROMPT if name in held and dice.random() < 0.3]
            held = (held - set(went)) | set(came)
            past.append((now, set(held)))
            history.append(CacheChange("e", now, now, came, went))
        else:
            view = max(view, dice.randint(max(0, now - LAG), now))
            seen = next(names for at, names in reversed(past) if at <= view)
            overlap = next((n for n, name in enumerate(PROMPT) if name not in seen), len(PROMPT))
            history.append(Decision("r", "e", now, PROMPT, overlap, LAG))
    return history


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_reads_of_a_lagging_view_are_accepted(seed, steps):
    history = drawn_history(random.Random(seed), steps)
    checked = check(history)
    assert checked.violations == []
    assert checked.decisions == sum(isinstance(record, Decision) for record in history)
    assert checked.oldest <= LAG


def explained(history: list[Record]) -> bool:
    """Whether some assignment of moments explains all decisions, by trying every combination of half seconds."""
    changes = [record for record in history if isinstance(record, CacheChange)]
    decisions = [record for record in history if isinstance(record, Decision)]
    over_time = states(changes)

    def true_at(decision: Decision, moment: float) -> bool:
        # At the moment of a change, each of its names may be as before or as after it.
        before = [names for at, names in over_time if at < moment][-1]
        now = [names for at, names in over_time if at <= moment][-1]
        claimed, denied = PROMPT[: decision.overlap], (*PROMPT, None)[decision.overlap]
        return all(name in before | now for name in claimed) and denied not in before & now

    def moments(decision: Decision) -> list[float]:
        halves = [decision.at - n / 2 for n in range(2 * LAG + 1)]
        return [moment for moment in halves if true_at(decision, moment)]

    return any(list(choice) == sorted(choice) for choice in product(*map(moments, decisions)))


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_the_check_equals_a_search_over_all_moments(seed):
    dice = random.Random(seed)
    history = drawn_history(dice, 12)
    kept = [record for record in history if isinstance(record, Decision)][-4:]
    changes = [record for record in history if isinstance(record, CacheChange)]
    wild = [replace(record, overlap=dice.choice([record.overlap, dice.randint(0, 4)])) for record in kept]
    history = [*changes, *wild]
    assert (not check(history).violations) == explained(history)


def decided(at: float, overlap: int, *, reader: str = "r", lag: float = LAG, denies: bool = True) -> Decision:
    return Decision(reader, "e", at, PROMPT, overlap, lag, denies)


HELD = CacheChange("e", 1, 1, came=("a", "b"))


@pytest.mark.parametrize(
    ("history", "kind", "block"),
    [
        ([HELD, decided(5, 3)], "claimed", 2),
        ([HELD, CacheChange("e", 2, 2, went=("b",)), decided(6, 2)], "claimed", 1),
        ([HELD, decided(6, 1)], "missed", 1),
        ([HELD, CacheChange("e", 5, 5, went=("b",)), CacheChange("e", 6, 6, came=("c",)), decided(7, 3)], "torn", 2),
        (
            [
                *(HELD, CacheChange("e", 5, 5, went=("b",)), CacheChange("e", 6, 6, went=("a",))),
                *(decided(6.5, 0), decided(7, 2)),
            ],
            "backwards",
            1,
        ),
    ],
)
def test_a_read_that_no_moment_explains_is_found(history, kind, block):
    (violation,) = check(history).violations
    assert (violation.kind, violation.block, violation.decision) == (kind, block, history[-1])


def test_another_engines_blocks_explain_nothing():
    (violation,) = check([replace(HELD, engine="other"), decided(2, 1)]).violations
    assert violation.kind == "claimed"


def test_each_reader_has_its_own_past():
    left = CacheChange("e", 5, 5, went=("b",))
    assert check([HELD, left, decided(6, 1), decided(7, 2, reader="another")]).violations == []


def test_between_the_two_times_of_a_change_both_answers_are_true():
    vague = CacheChange("e", 2, 9, came=("c",))
    for overlap in (2, 3):
        assert check([HELD, vague, decided(5, overlap)]).violations == []
    assert check([HELD, vague, decided(14, 2)]).violations[0].kind == "missed"
    assert check([HELD, vague, decided(1.5, 3)]).violations[0].kind == "claimed"


def test_where_nothing_was_observed_anything_may_be_held_and_nothing_must():
    dark = Unobserved("e", 4, 5)
    for overlap in (0, 2, 4):
        assert check([HELD, dark, decided(8, overlap)]).violations == []
    assert check([HELD, dark, decided(8.5, 4)]).violations[0].kind == "claimed"


def test_a_reader_that_does_not_deny_may_know_less():
    assert check([HELD, decided(6, 0, denies=False)]).violations == []


def test_a_block_that_leaves_without_having_come_is_an_error_of_the_history():
    with pytest.raises(ValueError, match="did not hold"):
        check([CacheChange("e", 1, 1, went=("a",))])


def test_dropped_residences_change_no_result_and_bound_the_memory():
    """A long history keeps what its window needs: the same names come and leave all the time."""
    history: list[Record] = []
    for turn in range(2000):
        at = 10.0 * turn
        history.append(CacheChange("e", at, at, came=("a", "b")))
        history.append(decided(at + 2, 2))
        history.append(CacheChange("e", at + 3, at + 3, went=("a", "b")))
        history.append(decided(at + 7, 0))
    assert check(history).violations == []
    planted = [*history, decided(history[-1].at + 1, 1)]
    assert [violation.kind for violation in check(planted).violations] == ["claimed"]
