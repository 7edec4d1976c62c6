"""The Grafana dashboard against the registries of the code: a panel of a metric that no process exposes stays empty."""

import json
import re
from typing import Any

import pytest
from chart.helm import CHART, Helm

from hack.generators.tables import registries
from mmrouter_operator.render.podmonitor import DEPLOYMENT_TARGET_LABEL, POOL_TARGET_LABEL, ROLE_TARGET_LABEL

DASHBOARD = json.loads((CHART / "dashboards" / "mmrouter.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGET_LABELS = {"namespace", "pod", DEPLOYMENT_TARGET_LABEL, POOL_TARGET_LABEL, ROLE_TARGET_LABEL}
"""Labels that every scrape by the PodMonitors has."""
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
SERIES = re.compile(r"\b(mmrouter_[a-z_]+)\b(?:\{([^}]*)\})?")


def exposed() -> dict[str, set[str]]:
    """Return every series that operator, router and sidecar expose, with its own labels."""
    found: dict[str, set[str]] = {}
    for registry in registries().values():
        own = {
            name: set(getattr(collector, "_labelnames", ()))
            for collector, names in registry._collector_to_names.items()
            for name in names
        }
        for family in registry.collect():
            labels = own.get(family.name) or {label for sample in family.samples for label in sample.labels}
            more = {"le"} if family.type == "histogram" else set()
            for suffix in SUFFIXES[family.type]:
                found[family.name + suffix] = labels | more
    return found


EXPOSED = exposed()


def series(expression: str) -> list[tuple[str, set[str]]]:
    """Return the series of a query with the labels that it selects by."""
    bare = re.sub(r"\bby\s*\([^)]*\)", "", expression)
    return [
        (name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector or ""))) for name, selector in SERIES.findall(bare)
    ]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_series_that_are_exposed_by_labels_that_they_have(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    for target in panel["targets"]:
        asked, grouping = series(target["expr"]), re.findall(r"\bby\s*\(([^)]*)\)", target["expr"])
        assert asked, target["expr"]
        grouped = {label.strip() for row in grouping for label in row.split(",")}
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= grouped
        for name, selected in asked:
            assert name in EXPOSED, f"no process exposes {name}"
            unknown = (selected | grouped) - EXPOSED[name] - TARGET_LABELS
            assert not unknown, f"{name} has no label {', '.join(sorted(unknown))}"


def test_the_dashboard_has_a_stable_name_and_lets_people_choose() -> None:
    assert DASHBOARD["uid"] == "mmrouter"
    variables = {row["name"]: row for row in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", "deployment"]
    for name, label in (("namespace", "namespace"), ("deployment", DEPLOYMENT_TARGET_LABEL)):
        asked = re.fullmatch(r"label_values\((\w+).*, (\w+)\)", variables[name]["query"]["query"])
        assert asked is not None
        assert asked[1] in EXPOSED
        assert asked[2] == label
        assert variables[name]["multi"]
        assert variables[name]["includeAll"]


def test_the_config_map_is_what_grafanas_sidecar_looks_for(helm: Helm) -> None:
    made = helm.render().one("ConfigMap", "mmrouter-dashboard")
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(made["data"]["mmrouter.json"]) == DASHBOARD
