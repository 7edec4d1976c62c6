"""The series that the processes expose, and those that a query of Prometheus selects."""

import re

from hack.generators.tables import registries
from mmrouter_operator.render.podmonitor import DEPLOYMENT_TARGET_LABEL, POOL_TARGET_LABEL, ROLE_TARGET_LABEL

TARGET_LABELS = {"namespace", "pod", DEPLOYMENT_TARGET_LABEL, POOL_TARGET_LABEL, ROLE_TARGET_LABEL}
"""Labels that every scrape by the PodMonitors has."""
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
SERIES = re.compile(r"\b(mmrouter_[a-z_]+)\b(?:\{([^}]*)\})?")
GROUPING = re.compile(r"\bby\s*\(([^)]*)\)")


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


def selected(expression: str) -> list[tuple[str, set[str]]]:
    """Return the series of a query with the labels that it selects by."""
    bare = GROUPING.sub("", expression)
    return [
        (name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector or ""))) for name, selector in SERIES.findall(bare)
    ]


def grouped(expression: str) -> set[str]:
    """Return the labels that a query groups by."""
    return {label.strip() for row in GROUPING.findall(expression) for label in row.split(",")}


def assert_exposed(expression: str) -> None:
    """Every series of a query is exposed, with the labels that the query selects and groups by."""
    asked = selected(expression)
    assert asked, expression
    for name, labels in asked:
        assert name in EXPOSED, f"no process exposes {name}"
        unknown = (labels | grouped(expression)) - EXPOSED[name] - TARGET_LABELS
        assert not unknown, f"{name} has no label {', '.join(sorted(unknown))}"
