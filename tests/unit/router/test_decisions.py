"""What is kept of decisions is bounded, by their number and by their prompts."""

from dataclasses import replace

import pytest

from mmrouter_router.explain.decisions import DecisionLog, DecisionTrace


def trace(tokens: int) -> DecisionTrace:
    return DecisionTrace("r", None, tokens, None, [])


@pytest.mark.parametrize(
    ("prompts", "kept"),
    [
        ([1, 1, 1, 1, 1], [2, 3, 4]),  # three fit
        ([4, 4, 4], [1, 2]),  # of the tokens only two of these
        ([1, 1, 99], [2]),  # the newest stays, whatever it takes
        ([99, 1, 1], [1, 2]),
        ([99, 4, 4, 4, 1, 1], [3, 4, 5]),
    ],
)
def test_newest_traces_are_kept_within_the_token_bound(prompts, kept):
    decisions = DecisionLog(size=3, tokens=10)
    for number, tokens in enumerate(prompts):
        decisions.add(str(number), replace(trace(tokens), request_id=str(number)))
    assert [found.request_id for found in reversed(decisions.latest(9))] == [str(number) for number in kept]
    assert all((decisions.get(str(n)) is not None) is (n in kept) for n in range(len(prompts)))
