"""The whole routing cost: both ways make the same prompt of a request and choose the same overlap."""

import json
from array import array

import pytest

from bench.placing import request_path
from bench.placing.request_path import COLD, NAIVE, WARM, AnswersDifferError, Naive, Timed, measure, rows
from bench.placing.tokenization import TINY


async def test_both_ways_have_equal_tokens_and_overlaps_or_nothing_is_said(monkeypatch):
    monkeypatch.setattr(request_path, "NAIVE_EVERY", 1)
    monkeypatch.setattr(request_path, "PROMPT_TOKENS", 1024)
    found = await measure("tiny tokenizer", TINY, rounds=2)
    assert all(item.value for item in found)
    answer = Naive.route
    monkeypatch.setattr(Naive, "route", lambda naive, raw: (answer(naive, raw)[0], -1))
    with pytest.raises(AnswersDifferError, match="request 1"):
        await measure("tiny tokenizer", TINY, rounds=1)


async def test_a_cold_image_is_another_one_to_the_router_and_the_conversation_is_the_same(monkeypatch):
    monkeypatch.setattr(request_path, "PROMPT_TOKENS", 256)
    ours = request_path.Ours(TINY)
    talk = request_path.Talk(ours)
    warm, cold = talk.body(1), talk.body(1, image=1)
    assert len(warm) > request_path.IMAGE_BYTES
    await ours.fill(warm)
    (sent, ids, overlap), (_, same, none) = await ours.route(warm), await ours.route(cold)
    await ours.close()
    assert ids == same == array("I", ids)
    assert overlap > none
    assert json.loads(sent)["messages"][1]["content"][0]["uuid"]


def test_figures_are_medians_and_ratios_to_the_naive_way():
    timed = Timed({WARM: [2.0, 2.0, 9.0], COLD: [8.5] * 3, NAIVE: [40.0]})
    found = {item.name.partition(": ")[2]: item for item in rows("tiny", timed)}
    assert (found["warm, p50"].value, found["warm, p50"].met) == (2.0, True)
    assert (found["cold image, p50"].value, found["cold image, p50"].met) == (8.5, False)
    assert found["warm, below the naive way"].value == 20.0
