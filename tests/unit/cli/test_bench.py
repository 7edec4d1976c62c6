"""`mmrouter bench`, its pure parts: what is sent, what is measured, and what is refused."""

import itertools
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrouter_cli.bench import run_statistics, terminal, traces, workload
from mmrouter_cli.bench.html_report import page
from mmrouter_cli.bench.types import (
    Answer,
    AnswerRow,
    BenchError,
    Conversation,
    Failure,
    LoadSpec,
    Result,
    Routing,
    Spread,
    Words,
)
from mmrouter_cli.bench.workload import BodyWriter, draw_text

STATISTICS = Path(__file__).parents[3] / "bench" / "encoders" / "servegen_images.json"
LOAD = LoadSpec(concurrency=4)


def plan(load: LoadSpec) -> list[Conversation]:
    return workload.select(workload.synthetic(load), load)[0]


def bodies(load: LoadSpec, salt: str) -> list[bytes]:
    writer = BodyWriter(salt, 1.0, "m", ignore_eos=False)
    return [writer.body(each, turn) for each in plan(load) for turn in range(len(each.turns))]


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), requests=st.integers(1, 30), turns=st.floats(1, 9))
def test_a_load_is_as_many_requests_as_it_says_and_the_same_again(seed: int, requests: int, turns: float) -> None:
    load = LoadSpec(seed=seed, requests=requests, turns=turns, rate=5.0)
    found = plan(load)
    assert sum(len(each.turns) for each in found) == requests
    assert found == plan(load)
    assert [each.at for each in found] == sorted(each.at for each in found)


def test_seed_and_salt_decide_every_byte_and_the_salt_alone_only_the_words() -> None:
    load = LoadSpec(requests=12, image_width=32, image_height=32, concurrency=1)
    assert bodies(load, "a") == bodies(load, "a")
    other = bodies(load, "b")
    assert not set(other) & set(bodies(load, "a"))
    shapes = [
        [(m["role"], type(m["content"]).__name__, json.loads(body)["max_tokens"]) for m in json.loads(body)["messages"]]
        for body in (*bodies(load, "a"), *other)
    ]
    assert shapes[:12] == shapes[12:]
    assert plan(load) != plan(msgspec.structs.replace(load, seed=2))


def test_a_turn_repeats_the_whole_conversation_before_it() -> None:
    load = LoadSpec(requests=40, turns=4, image_share=1.0, image_width=16, image_height=16, concurrency=1)
    conversation = next(each for each in plan(load) if len(each.turns) > 2)
    writer = BodyWriter("s", 1.0, "m", ignore_eos=True)
    asked = [json.loads(writer.body(conversation, turn)) for turn in range(len(conversation.turns))]
    for before, after in itertools.pairwise(asked):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert [message["role"] for message in after["messages"][-2:]] == ["assistant", "user"]
    assert asked[0]["messages"][1]["content"][0]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert asked[0]["ignore_eos"] is True


def test_shares_turns_and_rate_are_what_the_load_says() -> None:
    load = LoadSpec(requests=8_000, turns=2.5, image_share=0.3, rate=10.0)
    found = plan(load)
    pictures = [any(not isinstance(part, Words) for part in each.turns[0].parts) for each in found]
    assert statistics.fmean(pictures) == pytest.approx(0.3, abs=0.02)
    assert 8_000 / len(found) == pytest.approx(2.5, rel=0.03)
    assert 8_000 / found[-1].at == pytest.approx(10.0, rel=0.08)
    systems = Counter(each.system[0].name for each in found)
    assert len(systems) == load.system_prompts


@settings(deadline=None)
@given(words=st.integers(1, 50), more=st.integers(0, 50), ratio=st.floats(0.25, 8))
def test_fewer_tokens_of_a_text_are_the_beginning_of_more(words: int, more: int, ratio: float) -> None:
    short, long = (draw_text("s", ratio, Words("n", count)) for count in (words, words + more))
    assert long.startswith(short)
    assert len(short.split()) == max(1, round(words / ratio))


def test_requests_that_are_too_long_are_left_out_and_counted() -> None:
    load = LoadSpec(requests=100, turns=3, longest=700, concurrency=1)
    found, left_out = workload.select(workload.synthetic(load), load)
    assert left_out > 0
    assert sum(len(each.turns) for each in found) == 100
    longest = max(workload.prompt_tokens(each, turn) for each in found for turn in range(len(each.turns)))
    assert 400 < longest <= 700
    with pytest.raises(BenchError, match="longer than 10 tokens"):
        plan(LoadSpec(longest=10, concurrency=1))


def recorded(folder: Path, lines: list[dict[str, Any]]) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def line(**values: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2], **values}


def test_equal_blocks_of_a_recorded_trace_are_equal_beginnings(tmp_path: Path) -> None:
    file = recorded(tmp_path, [line(timestamp=3000, hash_ids=[1, 3]), line(), line(input_length=500, hash_ids=[1])])
    trace = traces.read(file)
    load = traces.load_of(trace, LoadSpec(), 8)
    found, _ = workload.select(traces.conversations(trace, load), load)
    assert [each.at for each in found] == [0.0, 0.0, 3.0]
    writer = BodyWriter("s", 1.0, "m", ignore_eos=False)
    prompts = [json.loads(writer.body(each, 0))["messages"][0]["content"].split() for each in found]
    assert [len(words) for words in prompts] == [600, 500, 600]
    assert prompts[0][:500] == prompts[1]
    assert prompts[0][:512] == prompts[2][:512]
    assert prompts[0][512:] != prompts[2][512:]
    slower = msgspec.structs.replace(load, rate=0.1)
    assert [each.at for each in workload.select(traces.conversations(trace, slower), slower)[0]] == [0.0, 0.0, 20.0]


def test_statistics_are_drawn_with_their_shares_and_a_picture_has_one_size() -> None:
    trace = traces.read(STATISTICS)
    load = traces.load_of(trace, LoadSpec(requests=1500, turns=1.0), 8)
    assert (load.kind, load.concurrency, load.system_tokens) == ("statistics", 8, 0)
    found, _ = workload.select(traces.conversations(trace, load), load)
    busiest = max(range(len(trace.clients)), key=lambda which: trace.clients[which].share)
    asked = Counter(each.system[0].name for each in found)
    expected = trace.clients[busiest].share / sum(client.share for client in trace.clients)
    assert asked[f"i{busiest}"] / 1500 == pytest.approx(expected, abs=0.03)
    sizes: dict[str, set[tuple[int, int]]] = {}
    for each in found:
        for part in each.turns[0].parts:
            if not isinstance(part, Words):
                sizes.setdefault(part.name, set()).add((part.width, part.height))
    assert any(name.startswith("u") for name in sizes)
    assert all(len(seen) == 1 for seen in sizes.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(line()) + '\n{"timestamp": 1}\n', r"line 2: .*input_length"),
        (json.dumps(line(input_length=-1)), r"line 1: .*input_length"),
        (json.dumps(line(hash_ids=[1])), r"line 1: 1 hash_ids do not make 600 tokens"),
        ('{"clients": []}', r"clients"),
        ("no JSON\n", r"trace\.jsonl: "),
        ("", r"trace\.jsonl: "),
    ],
)
def test_a_bad_trace_is_refused_with_its_line_and_field(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(content)
    with pytest.raises(BenchError, match=message):
        traces.read(file)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles_are_those_of_numpy(values: list[float]) -> None:
    found = run_statistics.quantiles(values)
    np.testing.assert_allclose(found, np.percentile(values, range(101)), rtol=1e-9, atol=1e-6)
    spread = run_statistics.spread(values)
    assert spread is not None
    assert (spread.p50, spread.max, spread.count) == (found[50], max(values), len(values))
    assert spread.mean == pytest.approx(statistics.fmean(values))


@pytest.mark.parametrize(("point", "needed"), [("p90", 10), ("p95", 20), ("p99", 100)])
def test_no_percentile_is_of_fewer_values_than_it_takes_to_have_one_above_it(point: str, needed: int) -> None:
    values = [float(n) for n in range(needed)]
    enough, few = run_statistics.spread(values), run_statistics.spread(values[1:])
    assert (getattr(few, point), few.p50 if few else None) == (None, statistics.median(values[1:]))
    assert values[-2] <= getattr(enough, point) < values[-1]


def test_a_sample_is_bounded_and_every_value_has_the_same_chance() -> None:
    kept = Counter[float]()
    for seed in range(200):
        sample = run_statistics.Sample(size=20, seed=seed)
        for value in range(100):
            sample.add(value)
        assert (len(sample.values), sample.seen) == (20, 100)
        kept.update(sample.values)
    assert len(kept) == 100
    # 200 draws with chance 0.2 each: 40 on average, standard deviation 6.
    assert all(abs(count - 40) < 30 for count in kept.values())


def answer(**values: Any) -> Answer:
    base = {"started": 0.0, "first": 0.1, "last": 0.5, "total": 0.5, "tokens_seen": 5}
    return Answer(**{**base, "prompt": 100, "completion": 5, "cached": 50, **values})


def test_the_hit_ratio_is_one_of_sums_and_unknown_where_any_answer_is_silent() -> None:
    assert run_statistics.hit_ratio([answer(), answer(prompt=300, cached=0)]) == (50 / 400, "")
    ratio, why = run_statistics.hit_ratio([answer(), answer(cached=None)])
    assert (ratio, why[:18]) == (None, "1 of 2 answers hav")
    assert run_statistics.hit_ratio([answer(prompt=None)])[0] is None
    assert run_statistics.hit_ratio([])[0] is None


def test_errors_are_counted_by_kind_with_what_the_first_one_said() -> None:
    answers = [answer(), *(answer(error="timeout", message=str(n)) for n in range(3)), answer(error="connect")]
    assert run_statistics.failures(answers) == {"timeout": Failure(3, "0"), "connect": Failure(1, "")}


def test_time_per_token_counts_the_tokens_that_the_endpoint_counted() -> None:
    assert run_statistics.per_token([answer(completion=9)]) == [pytest.approx(0.4 / 8)]
    assert run_statistics.per_token([answer(completion=None)]) == [pytest.approx(0.4 / 4)]
    assert run_statistics.per_token([answer(completion=1)]) == []


@pytest.mark.parametrize(
    ("lag", "first", "token", "doubted"),
    [(0.011, 0.1, 0.05, True), (0.009, 0.1, 0.05, False), (0.009, 0.1, 0.008, True), (0.009, 0.1, None, False)],
)
def test_a_slow_client_is_reported(lag: float, first: float, token: float | None, doubted: bool) -> None:
    one, other = (value and Spread(200, 9, value, 9, 9, 9, 9) for value in (first, token))
    doubts = terminal.doubts(result(lag=lag, first_token=one, per_token=other))
    assert (doubts == [f"this client's own timers were {1000 * lag:.1f} ms late (p99): its machine is busy"]) is doubted


def test_only_requests_that_were_due_at_a_time_can_be_late() -> None:
    paced = [answer(late=late) for late in (0.0, 0.05, 0.3, None, None, None)]
    assert run_statistics.lateness(paced) == (pytest.approx(1 / 3), 0.3)
    assert run_statistics.lateness([answer()]) == (0.0, 0.0)
    doubts = terminal.doubts(result(late_share=1 / 3, latest=0.3))
    assert doubts == ["33.3% of the scheduled requests went out more than 100 ms after they were due, the latest 0.3 s"]


def result(**values: Any) -> Result:
    spread = Spread(200, 0.1, 0.1, 0.15, 0.2, 0.3, 0.4)
    base: dict[str, Any] = {
        "url": "http://a", "model": "m", "policy": "", "began": "2026-01-01T00:00:00+00:00", "salt": "s", "load": LOAD,
        "left_out": 0, "tokens_per_word": 1.0, "seconds": 20.0, "interrupted": False, "sent": 200, "answered": 200,
        "unanswered": 0, "failures": {}, "prompt_tokens": 100_000, "completion_tokens": 10_000, "hit_ratio": 0.5,
        "hit_unknown": "", "first_token": spread, "between_tokens": spread, "per_token": spread, "end_to_end": spread,
        "late_share": 0.0, "lag": 0.001, "routing": None,
        "rows": [AnswerRow(n / 10, 0.1 + n / 1000, 0.5, 500, 250) for n in range(200)],
        "gaps": [n / 1000 for n in range(101)],
    }  # fmt: skip
    return Result(**{**base, **values})


ON = Routing("on", "", {"exact": 200}, 0.5, {"w": 200})


@pytest.mark.parametrize("routing", [None, ON])
def test_two_whole_runs_of_one_load_are_compared(routing: Routing | None) -> None:
    slower = result(salt="t", routing=routing, first_token=Spread(200, 0.2, 0.2, 0.3, 0.4, 0.6, 0.8), hit_ratio=0.25)
    assert run_statistics.objections(result(routing=routing), slower) == []
    changes = {line.name: line.change for line in run_statistics.lines(result(), slower)}
    assert (changes["first token, p50"], changes["hit ratio"], changes["failed"]) == (2.0, 0.5, None)


@pytest.mark.parametrize(
    ("other", "part"),
    [
        ({"routing": msgspec.structs.replace(ON, events="off", why="w is degraded")}, "events were off: w is degraded"),
        ({"routing": msgspec.structs.replace(ON, events="unknown", why="no token")}, "events may have been off"),
        ({"hit_ratio": None, "hit_unknown": "not reported"}, "hit ratio is unknown: not reported"),
        ({"load": msgspec.structs.replace(LOAD, concurrency=8)}, "concurrency is 4 and 8"),
        ({"load": msgspec.structs.replace(LOAD, seed=2)}, "seed is 1 and 2"),
        ({"left_out": 3}, "0 and 3 requests were left out"),
        ({"prompt_tokens": 130_000}, "prompts have 500 and 650 tokens"),
        ({"completion_tokens": 5_000}, "answers have 50 and 25 tokens"),
        ({"failures": {"timeout": Failure(10, "")}, "answered": 190}, "0.0% and 5.0% of the requests failed"),
        ({"interrupted": True, "answered": 20}, "was interrupted after 20 of 200 requests"),
        ({"answered": 0}, "has no answer"),
        ({"late_share": 0.2}, "20.0% of its scheduled requests went out late"),
        ({"salt": "s", "seconds": 21.0}, "both sent the same words"),
    ],
)
def test_a_comparison_is_refused_with_the_reason(other: dict[str, Any], part: str) -> None:
    second = result(**{"salt": "t", **other})
    assert any(part in objection for objection in run_statistics.objections(result(), second))
    assert run_statistics.objections(second, result())


class Parsed:
    """A page's elements, attributes and text; ``ParseError`` for one that is no XML."""

    def __init__(self, source: str) -> None:
        elements = list(ElementTree.fromstring(source).iter())
        attributes = [(name.rpartition("}")[2], value) for each in elements for name, value in each.items()]
        self.count = Counter(each.tag.rpartition("}")[2] for each in elements)
        self.ids = {value for name, value in attributes if name == "id"}
        self.targets = [value for name, value in attributes if name in ("src", "href")]
        self.text = "".join(elements[0].itertext())


def test_a_page_stands_alone_and_what_endpoints_said_is_text_in_it() -> None:
    evil = "<script>alert(1)</script>"
    parsed = Parsed(page([result(failures={evil: Failure(1, evil)}, url=f"http://{evil}", model=evil)]))
    assert parsed.count["svg"] == 4
    assert parsed.count["circle"] == 200
    assert (parsed.count["script"], parsed.count["link"], parsed.count["img"], parsed.targets) == (0, 0, 0, [])
    assert parsed.text.count(evil) >= 4


def test_a_page_of_two_runs_has_their_comparison_or_why_there_is_none() -> None:
    both = Parsed(page([result(), result()]))
    assert "comparison" in both.ids
    assert "objections" not in both.ids
    assert both.count["svg"] == 4
    refused = Parsed(page([result(), result(hit_ratio=None, hit_unknown="not reported")]))
    assert "comparison" not in refused.ids
    assert "not reported" in refused.text


def test_two_runs_are_named_by_their_policies_and_an_unknown_percentile_is_a_dash() -> None:
    few = Spread(12, 0.1, 0.1, 0.15, None, None, 0.4)
    first, second = result(policy="kv", first_token=few), result(policy="roundRobin", salt="t")
    text = Parsed(page([first, second])).text
    for part in ("first, kv", "second, roundRobin", "p95 takes 20"):
        assert part in text
    assert terminal.figures(first)[0] == ["first token", "100.0", "100.0", "150.0", "-", "-", "400.0", "12"]
    assert terminal.TOO_FEW not in terminal.facts(second)
    changes = {line.name: line.change for line in run_statistics.lines(first, second)}
    assert (changes["first token, p50"], changes["first token, p95"]) == (1.0, None)


@pytest.mark.parametrize(
    ("first", "second", "judgement"),
    [(0.024, 0.016, ""), (0.02, 0.03, "worse"), (3.0, 2.0, "better"), (100.0, 100.5, ""), (0.0, 1.0, "")],
)
def test_figures_that_are_shown_as_equal_are_no_win(first: float, second: float, judgement: str) -> None:
    assert run_statistics.Line("first token, p50", "ms", -1, first, second).judgement == judgement


def test_two_runs_are_compared_in_a_sentence() -> None:
    slower = Spread(200, 0.4, 0.4, 0.6, 0.6, 0.6, 0.8)
    rows = [AnswerRow(n / 10, 2 * (0.1 + n / 1000), 0.5, 500, 250) for n in range(200)]
    first, second = result(), result(first_token=slower, rows=rows, salt="t")
    sentence = run_statistics.verdict(run_statistics.lines(first, second))
    assert "the second run is worse in " in sentence
    assert "first token, p50" in sentence
    assert sentence in Parsed(page([first, second])).text
    assert "do not differ by more than their noise" in run_statistics.verdict(run_statistics.lines(first, first))
    assert "half of them began within 100 ms" in Parsed(page([first])).text


def test_a_run_without_any_answer_is_shown_without_plots() -> None:
    none = result(
        answered=0, failures={"connect": Failure(200, "refused")}, first_token=None, between_tokens=None,
        per_token=None, end_to_end=None, rows=[], gaps=[], prompt_tokens=0, completion_tokens=0, hit_ratio=None,
    )  # fmt: skip
    parsed = Parsed(page([none]))
    assert parsed.count["svg"] == 0
    assert "refused" in parsed.text
    assert any("0 answered and 200 failed" in part for part in terminal.facts(none))
