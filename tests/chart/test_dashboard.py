"""The Grafana dashboard against the registries of the code: a panel of a metric that no process exposes stays empty."""

import json
import re
from typing import Any

import pytest
from chart.helm import CHART, Helm
from chart.series import EXPOSED, assert_exposed, grouped

from mmrouter_operator.render.podmonitor import DEPLOYMENT_TARGET_LABEL

DASHBOARD = json.loads((CHART / "dashboards" / "mmrouter.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_series_that_are_exposed_by_labels_that_they_have(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    for target in panel["targets"]:
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= grouped(target["expr"])
        assert_exposed(target["expr"])


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
