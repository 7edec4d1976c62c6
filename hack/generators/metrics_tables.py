"""The tables of metrics in docs/observability.md, made from the registries of router, sidecar and operator."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry

from hack.generators.tables import replaced, table
from mmrouter_lib.engines.base.adapter import RankLoad
from mmrouter_operator.metrics import Metrics as OperatorMetrics
from mmrouter_router.telemetry.metrics import Metrics as RouterMetrics
from mmrouter_sidecar.metrics import HotPathCounts
from mmrouter_sidecar.metrics import Metrics as SidecarMetrics

UNITS = ("seconds", "bytes", "ratio")
Row = tuple[str, str, str, str, str]
"""Name, type, labels, unit, meaning."""


def registries() -> dict[str, CollectorRegistry]:
    """Return what each of our processes exposes, with a value for what appears only with one."""
    sidecar = SidecarMetrics()
    sidecar.watch(lambda: HotPathCounts(batches=1, events={"stored": 1}, held=1, aside=1))
    sidecar.load.update("", {0: RankLoad(0, 0, 0.5)})
    return {"router": RouterMetrics().registry, "sidecar": sidecar.registry, "operator": OperatorMetrics().registry}


def rows(registry: CollectorRegistry) -> Iterator[Row]:
    """Yield the metrics of a registry by name. Raises ``ValueError`` for one without a meaning."""
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


def current(page: str) -> str:
    """Return the page with the tables of these registries. Raises ``ValueError`` where it lacks their marks."""
    for process, registry in registries().items():
        body = ((f"`{name}`", *cells) for name, *cells in rows(registry))
        page = replaced(page, process, table(("metric", "type", "labels", "unit", "what"), body))
    return page
