"""Generated files are current, and docs/observability.md agrees with the code in its example and its spans."""

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Histogram
from unit.render.objects import container, pod_of, variables

import mmrouter_router
from hack import generate
from hack.generators import dashboard, tables
from mmrouter_lib.api import parse_deployment

PAGE = (generate.DOCS / "observability.md").read_text()


def test_an_outdated_file_is_reported_and_then_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "crd.yaml"
    file.write_text("old")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "GENERATED", {"crd": (file, lambda: "new")})
    assert generate.main(["--check", "crd"]) == 1
    assert (file.read_text(), capsys.readouterr().out) == ("old", "crd.yaml: not current: make generate\n")
    assert generate.main(["crd"]) == 0
    assert (file.read_text(), capsys.readouterr().out) == ("new", "crd.yaml: written\n")
    assert generate.main(["--check", "crd"]) == 0


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        generate.main(["crds"])
    assert "no such name: crds" in capsys.readouterr().err


def test_a_page_without_the_marks_of_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="the page has no <!-- a: begin -->"):
        tables.replaced("text", "a", "table")


def test_a_chart_value_without_a_comment_is_refused() -> None:
    with pytest.raises(tables.UndescribedError, match=r"^a\.c$"):
        list(tables.value_rows("a:\n  # One.\n  b: 1\n  c: 2\n"))


def test_a_row_of_a_chart_value_has_the_default_and_the_whole_comment() -> None:
    assert list(tables.value_rows("# Of the file.\n\na:\n  # One\n  # and two.\n  b: {c: 1}\n")) == [
        ("a.b", '{"c": 1}', "One and two.")
    ]


def test_every_metric_begins_with_its_process() -> None:
    for process, registry in tables.registries().items():
        prefix = "mmrouter_" if process == "router" else f"mmrouter_{process}_"
        assert [name for name, *_ in tables.metric_rows(registry) if not name.startswith(prefix)] == []


def test_a_row_of_a_metric_has_name_type_labels_unit_and_meaning() -> None:
    registry = CollectorRegistry()
    Counter("a_bytes_total", "Of a.", ["b", "c"], registry=registry)
    Histogram("d_seconds", "Time.", registry=registry)
    assert list(tables.metric_rows(registry)) == [
        ("a_bytes_total", "counter", "`b`, `c`", "bytes", "Of a"),
        ("d_seconds", "histogram", "", "seconds", "Time"),
    ]


def test_a_metric_without_a_meaning_is_refused() -> None:
    registry = CollectorRegistry()
    Counter("a", "", registry=registry)
    with pytest.raises(ValueError, match="a has no meaning"):
        list(tables.metric_rows(registry))


def test_the_example_reaches_the_router() -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    dep = parse_deployment(yaml.safe_load(example))
    env = variables(container(pod_of(dep, "frontend"), "router"))
    assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == dep.spec.observability.otlp_endpoint
    assert env["OTEL_TRACES_SAMPLER_ARG"] == "0.5"


def test_the_page_names_every_stage_of_a_request() -> None:
    sources = Path(mmrouter_router.__file__).parent.rglob("*.py")
    begun = {name for file in sources for name in re.findall(r'\bchild_span\("([a-z ]+)"', file.read_text())}
    named = re.findall(r"^\| `([^`]+)` \| (?:internal|client) \|", PAGE, re.MULTILINE)
    assert sorted(named) == sorted(begun)


def test_a_reason_without_a_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "REASONS", {**tables.REASONS, "Ready": {"Sunny": "True"}})
    with pytest.raises(ValueError, match=r"differ in Ready: .*Sunny"):
        tables.conditions_page((generate.DOCS / "conditions.md").read_text())


def test_a_panel_selects_what_was_chosen_and_takes_description_and_legend_from_its_metric() -> None:
    described = {"title": "A", "unit": "ops", "query": 'sum by (code) (rate(mmrouter_a_total{code!="x"}))'}
    panel = dashboard.panel(described, {"mmrouter_a": "Counts a"})
    assert panel["description"] == "Counts a."
    (target,) = panel["targets"]
    assert target["legendFormat"] == "{{code}}"
    chosen = 'namespace=~"$namespace",mmrouter_deployment=~"$deployment",code!="x"'
    assert target["expr"] == f"sum by (code) (rate(mmrouter_a_total{{{chosen}}}[$__rate_interval]))"
