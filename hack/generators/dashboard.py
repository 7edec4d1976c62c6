"""The Grafana dashboard of the chart, made from ``dashboard.yaml`` and the registries of the processes.

A panel has a title, a unit, a width out of 24 columns, and a ``query`` or several ``queries`` by legend. Without
``what`` its description is the help text of its metric; without a legend it is labelled by what it is grouped by. Every
series of a frontend or sidecar gets the selectors of the chosen namespace and deployment, and every ``rate`` the
interval of the dashboard. A panel with ``steps`` shows one number in the colour of the highest step that it reaches.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from hack.generators.tables import metric_rows, registries

PANELS = Path(__file__).with_name("dashboard.yaml")
COLUMNS = 24
HEIGHTS = {"stat": 4, "timeseries": 8}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN = 'namespace=~"$namespace",mmrouter_deployment=~"$deployment"'
METRIC = re.compile(r"\bmmrouter_(?!deployment\b)\w+")
SERIES = re.compile(r"\b(mmrouter_(?!operator_|gateway_|deployment\b)\w+)(?:\{([^}]*)\})?")
RATE = re.compile(r"\brate\(([^()]+)\)")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
STAT_OPTIONS = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
SERIES_OPTIONS = {
    "legend": {"displayMode": "list", "placement": "bottom"},
    "tooltip": {"mode": "multi", "sort": "desc"},
}


def text() -> str:
    """Return the dashboard as JSON. Raises ``KeyError`` for a panel without ``what`` whose metric does not exist."""
    return json.dumps(dashboard(yaml.safe_load(PANELS.read_text())), indent=1, ensure_ascii=False) + "\n"


def dashboard(sections: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the dashboard with these sections, each a row and its panels from left to right."""
    help_texts = {
        re.sub(r"_total$", "", name): meaning
        for registry in registries().values()
        for name, *_, meaning in metric_rows(registry)
    }
    panels: list[dict[str, Any]] = []
    y = 0
    for section in sections:
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        row = {"type": "row", "title": section["row"], "collapsed": False, "gridPos": place, "panels": []}
        panels.append({"id": len(panels) + 1, **row})
        y, x, height = y + 1, 0, 0
        for described in section["panels"]:
            if x + described["width"] > COLUMNS:
                x, y = 0, y + height
            shown = panel(described, help_texts)
            height = HEIGHTS[shown["type"]]
            place = {"x": x, "y": y, "w": described["width"], "h": height}
            panels.append({"id": len(panels) + 1, **shown, "gridPos": place})
            x += described["width"]
        y += height
    return {
        "uid": "mmrouter",
        "title": "mmrouter",
        "description": "Exactness of routing, requests, engines, the feed between them, the operator and the gateway.",
        "tags": ["mmrouter"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                },
                variable("namespace", "label_values(mmrouter_workers, namespace)"),
                variable("deployment", 'label_values(mmrouter_workers{namespace=~"$namespace"}, mmrouter_deployment)'),
            ]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


def variable(name: str, query: str) -> dict[str, Any]:
    """Return a choice of several values, by default all."""
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def panel(described: dict[str, Any], help_texts: dict[str, str]) -> dict[str, Any]:
    """Return a panel without its place."""
    queries = described.get("queries") or {legend(described["query"]): described["query"]}
    steps = described.get("steps")
    defaults: dict[str, Any] = {"unit": described["unit"]}
    if steps:
        colours = [{"color": colour, "value": value} for colour, value in steps.items()]
        defaults["thresholds"] = {"mode": "absolute", "steps": colours}
    else:
        defaults |= dict(zip(("min", "max"), described.get("range", ()), strict=False))
        defaults["custom"] = {"fillOpacity": 10, "showPoints": "never"}
    return {
        "type": "stat" if steps else "timeseries",
        "title": described["title"],
        "description": described.get("what") or f"{help_texts[metric(next(iter(queries.values())))]}.",
        "datasource": SOURCE,
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": expression(query), "legendFormat": label}
            for place, (label, query) in enumerate(queries.items())
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": STAT_OPTIONS if steps else SERIES_OPTIONS,
    }


def legend(query: str) -> str:
    """Return the labels that a query groups by, as the legend of its series."""
    grouped = GROUPED.search(query)
    return " ".join(f"{{{{{label}}}}}" for label in re.split(r",\s*", grouped[1])) if grouped else ""


def metric(query: str) -> str:
    """Return the name of the first metric of a query, without the suffix of a series."""
    return re.sub(r"_(total|bucket)$", "", METRIC.findall(query)[0])


def expression(query: str) -> str:
    """Return a query in PromQL, with the selectors and intervals that every panel has."""
    chosen = SERIES.sub(lambda series: f"{series[1]}{{{','.join(filter(None, (CHOSEN, series[2])))}}}", query)
    return RATE.sub(r"rate(\1[$__rate_interval])", chosen)
