"""docs/observability.md against the code: its tables, its example, and the spans that it names."""

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Histogram
from unit.render.objects import container, pod_of, variables

import mmrouter_router
from hack.generators import metrics_tables
from mmrouter_lib.api import parse_deployment
from mmrouter_operator.model.credentials import new_secret_data

PAGE = metrics_tables.PAGE.read_text()


def test_the_page_has_every_metric_as_the_code_exposes_it() -> None:
    assert metrics_tables.current(PAGE) == PAGE, "python hack/metrics_tables.py --write"


def test_every_metric_begins_with_its_process() -> None:
    for process, registry in metrics_tables.registries().items():
        prefix = "mmrouter_" if process == "router" else f"mmrouter_{process}_"
        assert [name for name, *_ in metrics_tables.rows(registry) if not name.startswith(prefix)] == []


def test_a_row_has_name_type_labels_unit_and_meaning() -> None:
    registry = CollectorRegistry()
    Counter("a_bytes_total", "Of a.", ["b", "c"], registry=registry)
    Histogram("d_seconds", "Time.", registry=registry)
    assert list(metrics_tables.rows(registry)) == [
        ("a_bytes_total", "counter", "`b`, `c`", "bytes", "Of a"),
        ("d_seconds", "histogram", "", "seconds", "Time"),
    ]


def test_a_metric_without_a_meaning_is_found() -> None:
    registry = CollectorRegistry()
    Counter("a", "", registry=registry)
    with pytest.raises(ValueError, match="a has no meaning"):
        list(metrics_tables.rows(registry))


def test_the_example_reaches_the_router() -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    dep = parse_deployment(yaml.safe_load(example))
    env = variables(container(pod_of(dep, new_secret_data(), "frontend"), "router"))
    assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == dep.spec.observability.otlp_endpoint
    assert env["OTEL_TRACES_SAMPLER"] == "parentbased_traceidratio"


def test_the_page_names_every_stage_of_a_request() -> None:
    sources = Path(mmrouter_router.__file__).parent.rglob("*.py")
    begun = {name for file in sources for name in re.findall(r'\bstage\("([a-z ]+)"', file.read_text())}
    named = re.findall(r"^\| `([^`]+)` \| (?:internal|client) \|", PAGE, re.MULTILINE)
    assert sorted(named) == sorted(begun)
