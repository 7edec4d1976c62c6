"""The noise of a benchmark's figures, and what its page shows of two runs."""

import itertools
import random
from typing import Any

import msgspec
from unit.cli.test_bench import Parsed, result

from mmrouter_cli.bench import run_statistics
from mmrouter_cli.bench.html_report import page
from mmrouter_cli.bench.types import AnswerRow, Result


def drawn(seed: int, **values: Any) -> Result:
    """A run of 200 answers whose times are drawn from one distribution."""
    draw = random.Random(seed)
    rows = [
        AnswerRow(n / 10, draw.expovariate(10), draw.expovariate(2), 500, draw.choice((0, 480)), draw.expovariate(50))
        for n in range(200)
    ]
    spreads = {
        field: run_statistics.spread([getattr(row, column) for row in rows])
        for field, column in (("first_token", "first"), ("end_to_end", "total"), ("per_token", "per_token"))
    }
    ratio = sum(row.cached or 0 for row in rows) / 100_000
    return result(rows=rows, hit_ratio=ratio, **spreads, **values)


def test_runs_of_one_distribution_rarely_differ_by_more_than_their_noise() -> None:
    """The same figures without intervals call most of them better or worse."""
    runs = [drawn(seed) for seed in range(40)]
    compared = [line for one, other in itertools.pairwise(runs) for line in run_statistics.lines(one, other)]
    wrong = [line for line in compared if line.judgement]
    assert len(wrong) < len(compared) / 50
    blind = [run_statistics.Line(each.name, each.unit, each.better, each.first, each.second) for each in compared]
    assert sum(bool(line.judgement) for line in blind) > len(compared) / 3


def test_half_the_time_is_more_than_noise() -> None:
    slow = drawn(1)
    fast = result(
        rows=[msgspec.structs.replace(row, first=row.first / 2) for row in slow.rows],
        first_token=run_statistics.spread([row.first / 2 for row in slow.rows]),
    )
    found = {line.name: line.judgement for line in run_statistics.lines(slow, fast)}
    assert (found["first token, p50"], found["first token, p95"]) == ("better", "better")


def test_a_page_shows_tiles_before_plots_and_answers_by_worker_and_image() -> None:
    rows = [
        AnswerRow(n / 10, 0.1 * (1 + n % 2), 0.5, 500, 250 * (n % 2), 0.01, f"w-{n % 2}", n % 2) for n in range(200)
    ]
    whole = result(rows=rows)
    shown = page([whole])
    assert shown.index("verdict") < shown.index('class="tile"') < shown.index("<svg") < shown.index("<table")
    found = run_statistics.groups(whole)
    assert [(each.name, each.requests, each.p50, each.hit_ratio) for each in found["worker"]] == [
        ("w-0", 100, 0.1, 0.0),
        ("w-1", 100, 0.2, 0.5),
    ]
    assert [each.name for each in found["image"]] == ["with a picture", "without a picture"]
    text = Parsed(shown).text
    for part in ("by worker", "w-1", "by image", "without a picture", "requests per second"):
        assert part in text
    assert "by worker" not in Parsed(page([result()])).text  # a result of an earlier release
