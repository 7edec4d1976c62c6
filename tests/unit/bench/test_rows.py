"""A figure's shape, its goal, and where it is shown."""

import json
import pkgutil

import pytest

from bench import __main__ as command
from bench import report
from bench.report import NOT_RUN, markdown, not_run, percentile, row, table, to_json

ROWS = [
    row("fast enough", 3.14159, "us", goal="<= 4"),
    row("too slow", 5.0, "us", goal="<= 4"),
    row("ratio", 4.0, "x", peer="other 1.0: 12 us", goal=">= 4"),
    row("no goal", 12345.678, "us"),
    not_run("peer missing", "x", "no index", goal=">= 4"),
]


def test_json_has_exactly_the_fields_of_the_contract():
    shown = json.loads(to_json(ROWS))
    assert list(shown) == ["rows"]
    assert all(list(item) == ["name", "value", "unit", "peer", "goal", "met"] for item in shown["rows"])
    assert [item["met"] for item in shown["rows"]] == [True, False, True, None, None]
    assert [item["value"] for item in shown["rows"]] == [3.142, 5.0, 4.0, 12350.0, None], "four digits"
    assert shown["rows"][-1]["peer"] == NOT_RUN + "no index"


def test_a_goal_that_cannot_be_read_is_an_error():
    with pytest.raises(ValueError, match="begins with"):
        row("x", 1.0, "us", goal="< 4")


def test_percentiles_are_values_that_were_measured():
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_tables_have_one_line_per_row():
    assert table(ROWS).row_count == len(ROWS)
    assert len(markdown(ROWS).splitlines()) == len(ROWS) + 2


def test_the_page_takes_the_figures_of_a_part_and_keeps_all_other_parts_and_the_rest():
    page = f"before\n\n{report.BEGIN}\n### proxy\n\nolder\n\n### memory\n\nold\n{report.END}\n\nafter\n"
    once = report.insert(page, "memory", ROWS, "a machine")
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "older" in once
    assert "old\n" not in once
    assert "`python -m bench memory` on a machine" in once
    assert "| too slow | 5 us | <= 4 | no |" in once
    assert report.insert(once, "memory", ROWS, "a machine") == once
    more = report.insert(once, "decision", ROWS, "a machine")
    assert [name for name, _ in report.SECTION.findall(more)] == ["decision", "memory", "proxy"]
    with pytest.raises(report.PageError):
        report.insert("no markers", "memory", ROWS, "a machine")


def test_the_projects_page_has_the_markers():
    assert report.insert(report.PAGE.read_text(), "memory", ROWS, "a machine")


def test_a_part_that_fails_loses_no_other_part_of_the_page(monkeypatch, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"{report.BEGIN}\n{report.END}\n")
    write = report.write
    monkeypatch.setattr(report, "write", lambda *arguments: write(*arguments, page=page))

    def part(name):
        if name == "memory":
            raise RuntimeError("blocks are missing")
        return ROWS[:1]

    monkeypatch.setattr(command, "run_benchmark", part)
    assert command.main(["memory", "proxy", "--write"]) == 1
    assert "failed: memory" in capsys.readouterr().err
    assert [name for name, _ in report.SECTION.findall(page.read_text())] == ["proxy"]
    with pytest.raises(RuntimeError, match="blocks"):
        command.main(["memory"])


def test_an_unknown_benchmark_is_refused_and_the_known_ones_are_named(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["nonesuch"])
    assert ended.value.code == 2
    assert "decision" in capsys.readouterr().err


def test_every_name_is_a_benchmark():
    assert all(callable(pkgutil.resolve_name(f"bench.{place}")) for place in command.BENCHMARKS.values())
