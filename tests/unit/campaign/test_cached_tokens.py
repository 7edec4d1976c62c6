"""The check of ``cached_tokens`` that the target ``faults`` uses: which claims of an answer it finds false."""

import pytest
from campaign.faults.cached_tokens import Claim, ClaimChecker, Placement
from campaign.index.history import CacheChange, Record, Unobserved

HELD = [CacheChange("a", 0, 0, ("x", "y"))]
OWN = [CacheChange("a", 9, 11, ("z",))]
"""What the request brings: it is placed at 10 and ends at 12."""


def wrong(
    cached: int, history: list[Record], *others: Placement, engines: str = "a", tries: int = 1, complete: bool = True
) -> list[str]:
    own = [Placement(engine, 10, ("x", "y", "z"), 16, tries) for engine in engines]
    placements = {"mine": own, "other": list(others)}
    return ClaimChecker(complete).wrong([Claim("mine", 64, cached, 12)], placements, history)


@pytest.mark.parametrize("cached", [0, 16, 32])
def test_blocks_that_were_held_before_the_request_may_be_claimed(cached: int) -> None:
    assert not wrong(cached, [*HELD, *OWN])


def test_a_block_that_only_the_request_itself_brought_may_not_be_claimed() -> None:
    known = "ended 2.000; cached from -1.000..1.000 to inf; requests "
    assert wrong(48, [*HELD, *OWN]) == [f"mine claims 48 cached tokens: a could not hold block 2 ({known})"]


def test_a_block_that_a_request_under_way_brought_may_be_claimed() -> None:
    assert not wrong(48, [*HELD, *OWN], Placement("a", 9, ("x", "y", "z"), 16))
    assert wrong(48, [*HELD, *OWN], Placement("a", 9, ("x", "y"), 16))
    assert wrong(48, [*HELD, *OWN], Placement("a", 11.5, ("x", "y", "z"), 16))
    assert wrong(48, [*HELD, *OWN], Placement("b", 9, ("x", "y", "z"), 16))


def test_a_block_that_left_before_the_request_may_not_be_claimed() -> None:
    assert wrong(32, [*HELD, CacheChange("a", 8, 9, (), ("y",))])
    assert not wrong(32, [*HELD, CacheChange("a", 9, 10.5, (), ("y",))])


def test_more_blocks_than_the_prompt_has_may_not_be_claimed() -> None:
    assert wrong(49, HELD) == ["mine claims 49 cached tokens: the prompt has 3 blocks"]


def test_a_request_that_was_at_several_engines_may_claim_what_one_of_them_held() -> None:
    assert not wrong(32, HELD, engines="ab")
    assert wrong(32, HELD, engines="b")


@pytest.mark.parametrize("known", [{"tries": 2}, {"complete": False}], ids=["tried again", "a lost decision"])
def test_a_block_of_the_requests_time_may_be_claimed_where_its_source_is_not_known(known: dict[str, int]) -> None:
    assert not wrong(48, [*HELD, *OWN], **known)  # type: ignore[arg-type]


def test_an_engine_that_was_not_observed_may_have_held_anything() -> None:
    assert not wrong(48, [*HELD, Unobserved("a", 9, 11)])
    assert wrong(48, [*HELD, Unobserved("a", 1, 9)])
