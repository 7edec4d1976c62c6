"""The tables of metrics in docs/observability.md, made from the registries of router, sidecar and operator.

python hack/metrics_page.py            # exit status 1 when the page is not current
python hack/metrics_page.py --write    # brings it up to date
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from mmrouter_lib.engines.base.metrics import RankLoad
from mmrouter_operator.metrics import Metrics as OperatorMetrics
from mmrouter_router.media.types import MediaMetrics
from mmrouter_router.telemetry.metrics import Metrics as RouterMetrics
from mmrouter_sidecar.metrics import Counted
from mmrouter_sidecar.metrics import Metrics as SidecarMetrics

PAGE = Path(__file__).resolve().parents[2] / "docs" / "observability.md"
UNITS = ("seconds", "bytes", "ratio")
Row = tuple[str, str, str, str, str]
"""Name, type, labels, unit, meaning."""


def registries() -> dict[str, CollectorRegistry]:
    """Return what each of our processes exposes, with a value for what appears only with one."""
    router = RouterMetrics()
    MediaMetrics(router.registry)
    sidecar = SidecarMetrics()
    sidecar.watch(lambda: Counted(batches=1, events={"stored": 1}, held=1, aside=1))
    sidecar.load.saw("", {0: RankLoad(0, 0, 0.5)})
    return {"router": router.registry, "sidecar": sidecar.registry, "operator": OperatorMetrics().registry}


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


def table(registry: CollectorRegistry) -> str:
    """Return the rows as Markdown."""
    lines = ["| metric | type | labels | unit | what |", "|---|---|---|---|---|"]
    lines += [
        f"| `{name}` | {kind} | {labels} | {unit} | {what} |" for name, kind, labels, unit, what in rows(registry)
    ]
    return "\n".join(lines)


def current(page: str) -> str:
    """Return the page with every table between its marks. Raises ``ValueError`` without marks."""
    for process, registry in registries().items():
        begin, end = f"<!-- {process}: begin -->", f"<!-- {process}: end -->"
        before, began, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not (began and ended):
            raise ValueError(f"the page has no {begin} and {end}")
        page = f"{before}{begin}\n{table(registry)}\n{end}{after}"
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the tables of metrics in the docs.")
    parser.add_argument("--write", action="store_true", help="bring them up to date")
    wanted = current(PAGE.read_text())
    if parser.parse_args().write:
        PAGE.write_text(wanted)
    elif PAGE.read_text() != wanted:
        print(f"{PAGE.name} is not current: python hack/metrics_page.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
