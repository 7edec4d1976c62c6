"""The gate's judgement, on hand-made sightings: it passes only what is exact and fails on any doubt."""

from dataclasses import replace

import pytest

from mmrouter_cli.gate import Gate, Seen, _agree, _repeats, as_json

GOOD = Seen("r-1", "a", "exact", overlap=6, blocks=6, block_size=16, prompt_tokens=100, engine_tokens=100, cached=96)


@pytest.mark.parametrize(("tokens", "blocks", "cached"), [(100, 6, 96), (96, 6, 80), (97, 6, 96), (15, 0, 0)])
def test_an_engine_never_serves_the_last_token_from_its_cache(tokens, blocks, cached):
    assert replace(GOOD, engine_tokens=tokens).expected_cached(blocks) == cached


def test_whole_hits_on_the_same_worker_pass():
    assert _repeats("x", GOOD, [GOOD, GOOD]).passed
    assert _agree("x", [GOOD, GOOD]).passed


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"overlap": 5}, "5 of 6 blocks"),
        ({"worker": "b"}, "went to b"),
        ({"exactness": "partial"}, "partial, not exact"),
        ({"exactness": "affinity"}, "affinity, not exact"),
    ],
)
def test_one_bad_repeat_fails_and_is_named(broken, says):
    check = _repeats("x", GOOD, [GOOD, replace(GOOD, **broken)])
    assert not check.passed
    assert says in check.message


@pytest.mark.parametrize(("cached", "says"), [(None, "absent"), (80, "says 80"), (0, "says 0"), (100, "says 100")])
def test_cached_tokens_must_be_there_and_agree(cached, says):
    check = _agree("x", [GOOD, replace(GOOD, cached=cached)])
    assert not check.passed
    assert says in check.message


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"engine_tokens": 101}, "the engine counted 101"),
        ({"blocks": 0}, "no complete block"),
        ({"exactness": "affinity"}, "not exact"),
    ],
)
def test_a_first_request_that_proves_nothing_fails(broken, says):
    check = Gate._exact("x", [replace(GOOD, **broken)])
    assert not check.passed
    assert says in check.message


def test_no_check_at_all_is_no_pass():
    assert not as_json([])["passed"]
