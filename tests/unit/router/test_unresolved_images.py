"""Unresolved images never lead to an overestimated overlap (tests/local runs 10,000 cases)."""

from unit.router.unresolved_images import play

from mmrouter_lib.prompt import PromptImage
from mmrouter_router.request.prepared import ResolvedImage

CASES = 300


def test_predicted_overlap_never_exceeds_the_true_one():
    hits = 0
    for case in range(CASES):
        for number, one in enumerate(play(case)):
            assert one.over == 0, (case, number, one)
            # All blocks before the first unresolved image are predicted.
            assert one.predicted == min(one.held, one.sure), (case, number, one)
            hits += one.predicted
    assert hits > CASES


def test_trusting_unresolved_images_overestimates_overlap():
    def trusting(image: ResolvedImage) -> PromptImage:
        return PromptImage(image.identity, image.tokens)

    assert sum(one.over > 0 for case in range(CASES) for one in play(case, in_prompt=trusting)) > 5
