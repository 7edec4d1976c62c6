"""Write every generated file of the repository, or with ``--check`` report those that are not current.

    python -m hack.generate [--check] [NAME...]

Names, by default all of them:

- ``crd``: ``crds/``, from the models of ``mmrouter_lib.api``; the chart links to it.
- ``metrics``: the tables of docs/observability.md, from the registries of router, sidecar and operator.
- ``conditions``: the tables of docs/conditions.md, from the operator's reasons and their texts.
- ``dashboard``: the chart's Grafana dashboard, from ``dashboard.yaml`` and the registries.
- ``values``: the table of the chart's README, from the comments of its values.yaml.
- ``rights``: the operator's ClusterRole in the chart, from the child kinds of ``mmrouter_operator.render``.
- ``conformance``: docs/conformance.md, from the figures of docs/conformance.json that ``make conformance`` measures.
- ``kv-events``: the table of docs/kv-events.md, from the figures in tests/kv_events.
- ``plots``: docs/performance.svg, from the figures of docs/performance-figures.md.
- ``tokenizer``, ``tokenizer-hybrid``: the tokenizers of examples/models, from a text.
- ``golden``: the rendered objects that ``tests/unit/render`` compares with. Review their diff: a difference restarts
  engines on upgrade. ``--check`` leaves them to those tests.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import plots
from bench.report import PAGE
from hack.build_once import ROOT
from hack.cluster import go_programs
from hack.generators import dashboard, kv_event_results, tables
from hack.generators.cluster_role import cluster_role
from hack.generators.tiny_tokenizer import byte_tokenizer_json, tokenizer_json
from mmrouter_cli.cluster_commands import crd_text

MODELS = ROOT / "examples" / "models"
CHART = ROOT / "charts" / "mmrouter"
DOCS = ROOT / "docs"
VALUES = (CHART / "README.md", CHART / "values.yaml")
GOLDEN = (sys.executable, "-m", "pytest", "-q", "tests/unit/render", "-k", "golden_file or recorded_answers")
UPDATE_GOLDEN = "MMROUTER_UPDATE_GOLDEN"


def metrics_page() -> str:
    return tables.metrics_page((DOCS / "observability.md").read_text())


def conformance_page() -> str:
    sys.path.insert(0, str(ROOT / "tests"))
    page: str = importlib.import_module("conformance.report").table(json.loads((DOCS / "conformance.json").read_text()))
    return page


GENERATED: Mapping[str, tuple[Path, Callable[[], str]]] = {
    "crd": (ROOT / "crds" / "mmrouter.io_mmrouterdeployments.yaml", crd_text),
    "metrics": (DOCS / "observability.md", metrics_page),
    "conditions": (DOCS / "conditions.md", lambda: tables.conditions_page((DOCS / "conditions.md").read_text())),
    "dashboard": (CHART / "dashboards" / "mmrouter.json", dashboard.text),
    "values": (CHART / "README.md", lambda: tables.chart_readme(*(file.read_text() for file in VALUES))),
    "rights": (CHART / "files" / "clusterrole.yaml", cluster_role),
    "conformance": (DOCS / "conformance.md", conformance_page),
    "kv-events": (DOCS / "kv-events.md", lambda: kv_event_results.page((DOCS / "kv-events.md").read_text())),
    "plots": (plots.FILE, lambda: plots.svg(PAGE.read_text())),
    "tokenizer": (MODELS / "tiny-qwen2-vl" / "tokenizer.json", tokenizer_json),
    "tokenizer-hybrid": (MODELS / "tiny-qwen3.5" / "tokenizer.json", byte_tokenizer_json),
}
"""Name -> the file and its content as it should be now."""
NAMES = (*GENERATED, "golden")


def outdated(names: Sequence[str]) -> dict[Path, str]:
    """Return the content of every file that is not current."""
    texts = {file: text() for file, text in (GENERATED[name] for name in names if name in GENERATED)}
    return {file: text for file, text in texts.items() if not file.is_file() or file.read_text() != text}


def write_golden() -> int:
    """Run the tests that write golden files; with kubectl, where it was built, they record its answers, too."""
    path = f"{go_programs.SETS['kubernetes'].folder()}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, UPDATE_GOLDEN: "1"}
    return subprocess.run(GOLDEN, cwd=ROOT, env=env, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the generated files of the repository.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; by default all")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a file is not current")
    options = parser.parse_args(argv)
    names = options.names or NAMES
    if unknown := set(names) - set(NAMES):
        parser.error(f"no such name: {', '.join(sorted(unknown))}")
    files = outdated(names)
    for file, text in files.items():
        if not options.check:
            file.write_text(text)
        print(f"{file.relative_to(ROOT)}: {'not current: make generate' if options.check else 'written'}")
    if options.check:
        return 1 if files else 0
    return write_golden() if "golden" in names else 0


if __name__ == "__main__":
    sys.exit(main())
