"""The tables of pages that follow from code: metrics, reasons of conditions, and values of the chart.

Each lies between the two marks of its page. The operator's ``conditions.yaml`` has a line ``Reason: [meaning, what to
do]`` for every reason of every condition. Reasons of a blocked rollout appear on ``Progressing`` as they do on
``Degraded``; the page names them in a sentence. A comment right above a key of the chart's values.yaml describes it and
gives it one row, with its default; a section without a comment stands for the keys below it.
"""

import json
from collections.abc import Iterable, Iterator, Sequence

import yaml
from prometheus_client import CollectorRegistry

from mmrouter_lib.engines.base.adapter import RankLoad, TokenCounts
from mmrouter_operator.metrics import Metrics as OperatorMetrics
from mmrouter_operator.status.conditions import BLOCKS, PROGRESSING, REASONS, TEXTS
from mmrouter_router.gateway.metrics import GatewayMetrics
from mmrouter_router.telemetry.metrics import Metrics as RouterMetrics
from mmrouter_sidecar.metrics import HotPathCounts
from mmrouter_sidecar.metrics import Metrics as SidecarMetrics

HEADER = ("reason", "status", "meaning", "what to do")
UNITS = ("seconds", "bytes", "ratio")


class UndescribedError(ValueError):
    """A value has no comment; the text is its path."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" if cells[0] != "---" else f"|{'|'.join(cells)}|" for cells in lines)


def replaced(page: str, name: str, text: str) -> str:
    """Return the page with the text between ``<!-- NAME: begin -->`` and its end. Raises ``ValueError``."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, began, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (began and ended):
        raise ValueError(f"the page has no {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def registries() -> dict[str, CollectorRegistry]:
    """Return what each of our processes exposes, with a value for what appears only with one."""
    sidecar = SidecarMetrics()
    sidecar.watch(lambda: HotPathCounts(batches=1, events={"stored": 1}, held=1, aside=1))
    sidecar.load.update("", {0: RankLoad(0, 0, 0.5)}, TokenCounts())
    return {
        "router": RouterMetrics().registry,
        "sidecar": sidecar.registry,
        "gateway": GatewayMetrics().registry,
        "operator": OperatorMetrics().registry,
    }


def metric_rows(registry: CollectorRegistry) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield name, type, labels, unit and meaning of a registry's metrics. Raises ``ValueError`` without a meaning."""
    own = {
        name: list(getattr(collector, "_labelnames", ()))
        for collector, names in registry._collector_to_names.items()
        for name in names
    }
    for family in sorted(registry.collect(), key=lambda family: family.name):
        if not family.documentation:
            raise ValueError(f"{family.name} has no meaning")
        labels = own.get(family.name) or sorted({label for sample in family.samples for label in sample.labels})
        labels = [label for label in labels if label != "le"]
        unit = next((unit for unit in UNITS if family.name.endswith(f"_{unit}")), "")
        name = family.name + ("_total" if family.type == "counter" else "")
        yield name, family.type, ", ".join(f"`{label}`" for label in labels), unit, family.documentation.rstrip(".")


def metrics_page(page: str) -> str:
    """Return the page with the tables of these registries. Raises ``ValueError`` where it lacks their marks."""
    for process, registry in registries().items():
        body = ((f"`{name}`", *cells) for name, *cells in metric_rows(registry))
        page = replaced(page, process, table(("metric", "type", "labels", "unit", "what"), body))
    return page


def conditions_page(page: str) -> str:
    """Return the page with the tables of every condition. Raises ``ValueError`` where reasons and texts differ."""
    texts = yaml.safe_load(TEXTS.read_text())
    for condition in sorted(texts.keys() | REASONS.keys()):
        reasons, described = REASONS.get(condition, {}), texts.get(condition, {})
        expected = set(reasons) - {*BLOCKS, "ChildRefused"} if condition == PROGRESSING else set(reasons)
        if wrong := expected ^ set(described):
            raise ValueError(f"conditions.yaml and the operator differ in {condition}: {', '.join(sorted(wrong))}")
        body = [(f"`{reason}`", reasons[reason], *words) for reason, words in described.items()]
        page = replaced(page, condition, table(HEADER, body))
    return page


def value_rows(values: str) -> Iterator[tuple[str, str, str]]:
    """Yield path, default as JSON and description of each value, in order. Raises :class:`UndescribedError`."""
    root = yaml.compose(values)
    assert isinstance(root, yaml.MappingNode), "values.yaml is no mapping"
    yield from _section(root, yaml.safe_load(values), values.splitlines(), "")


def _section(
    node: yaml.MappingNode, value: dict[str, object], lines: list[str], prefix: str
) -> Iterator[tuple[str, str, str]]:
    for key, below in node.value:
        path, inner = f"{prefix}{key.value}", value[key.value]
        description = _comment(lines, key.start_mark.line)
        if description:
            yield path, json.dumps(inner), description
        elif isinstance(inner, dict) and inner and below.start_mark.line > key.start_mark.line:
            yield from _section(below, inner, lines, f"{path}.")
        else:
            raise UndescribedError(path)


def _comment(lines: list[str], line: int) -> str:
    """Return the comment that ends right above a line."""
    first = line
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join(text.lstrip().lstrip("#").strip() for text in lines[first:line])


def chart_readme(readme: str, values: str) -> str:
    """Return the README with the table of these values. Raises ``ValueError`` where it lacks the table's marks."""
    body = ((f"`{path}`", f"`{default}`", text.replace("|", "&#124;")) for path, default, text in value_rows(values))
    return replaced(readme, "values", table(("value", "default", "what"), body))
