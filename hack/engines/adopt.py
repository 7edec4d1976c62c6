"""Say whether a release of an engine is what this project predicts, without a model: ``make adopt``.

    python -m hack.engines.adopt vllm 0.33.0             # a table of what changed since the proved release
    python -m hack.engines.adopt vllm 0.33.0 --write     # adds its column to docs/conformance.md too
    python -m hack.engines.adopt vllm 0.33.0 --only field    # the tests with a text in their name; other rows stay

The release's own code runs in an environment of its own (``newer_vllm_env.py``, ``older_sglang_env.py``), which takes
everything else from that of the proved release, except transformers where the release does not permit its version. The
tests are those of ``tests/conformance`` that are marked ``adopts``. Exit status: 0, every one of them passed; 1, some
failed or did not run; 3, this machine cannot make the environment, with the reason.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from subprocess import run as run_process
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hack.build_once import CANNOT, ROOT, CannotMakeError, FailedError, captured, last_line, note, status_of
from hack.engines import newer_vllm_env, older_sglang_env
from hack.engines.sglang_env import SGLANG
from hack.engines.vllm_env import VLLM

PROVED = {"vllm": VLLM, "sglang": SGLANG}
WHEELS = {"vllm": newer_vllm_env.WHEEL, "sglang": older_sglang_env.WHEEL}
TOOLS = {"vllm": "hack.engines.newer_vllm_env", "sglang": "hack.engines.older_sglang_env"}
DECIDE_PROMPTS = {"transformers", "tokenizers", "huggingface-hub"}
"""Packages by which prompts are made, and what they are imported with."""
UNBOUNDED = {"vllm==0.30.0": "transformers<5.17"}
"""Releases without an upper bound that a later version breaks: transformers 5.17 renamed a class of Pixtral's, and 0.30
cannot import its modules of Pixtral and LLaVA.
"""
FIGURES = ROOT / "docs" / "conformance.json"


def wheels(engine: str, release: str) -> str:
    """Return the lines of a requirements file for a release, with the hashes that are pinned here or else those of the
    package index: the engine, and the newest packages that decide its prompts of those that it permits, where it does
    not permit every later one. Raises :class:`CannotMakeError`.
    """
    if WHEELS[engine].startswith(f"{engine}=={release} "):
        return WHEELS[engine]
    wanted = [one for one in (f"{engine}=={release}", UNBOUNDED.get(f"{engine}=={release}")) if one]
    found = resolved(*wanted)
    while more := [line for line in bounds(found) if line not in wanted]:
        wanted += more
        found = resolved(*wanted)
    lines = "\n".join(map(requirement, found))
    note(f"not pinned in {TOOLS[engine]}:\n{lines}")
    return lines


def resolved(*wanted: str) -> list[dict[str, Any]]:
    """Return what pip would install for these requirements alone. Raises :class:`CannotMakeError`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--dry-run"]
    done = captured([*command, "--ignore-installed", "--no-deps", "--only-binary=:all:", "--report=-", *wanted])
    if done.returncode:
        raise CannotMakeError(f"pip finds no wheel of {', '.join(wanted)}: {done.stderr.strip().splitlines()[-1]}")
    return list(json.loads(done.stdout)["install"])


def bounds(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what wheels require of the packages that decide prompts, where they do not permit every later version."""
    needed = [Requirement(line) for wheel in found for line in wheel["metadata"].get("requires_dist", [])]
    return [
        str(one)
        for one in needed
        if canonicalize_name(one.name) in DECIDE_PROMPTS
        and not {each.operator for each in one.specifier}.isdisjoint(("<", "<=", "==", "~="))
        and (one.marker is None or one.marker.evaluate({"extra": ""}))
    ]


def requirement(wheel: Mapping[str, Any]) -> str:
    name, version = wheel["metadata"]["name"], wheel["metadata"]["version"]
    return f"{name}=={version} --hash=sha256:{wheel['download_info']['archive_info']['hashes']['sha256']}"


def environment(engine: str, release: str) -> dict[str, str]:
    """Make the environment of a release, and return the variables by which tests take it. Raises
    :class:`CannotMakeError` and :class:`FailedError`.
    """
    if release == PROVED[engine]:
        return {}
    variables = {f"MMROUTER_{engine.upper()}_WHEEL": wheels(engine, release)}
    done = captured([sys.executable, "-m", TOOLS[engine]], cwd=ROOT, env=os.environ | variables)
    note(done.stderr.strip())
    if done.returncode:
        error = CannotMakeError if done.returncode == CANNOT else FailedError
        raise error(last_line(done.stderr))
    return variables


def rows_of(engine: str, variables: Mapping[str, str], only: str) -> list[dict[str, Any]]:
    """Run the marked tests, whose output is on stderr; return their rows. ``only``: pytest's ``-k``."""
    inherited = {name: value for name, value in os.environ.items() if name != "MMROUTER_CONFORMANCE_DIR"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        own = {"MMROUTER_ADOPTION": str(file), "MMROUTER_FAMILIES": "all", **variables}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-o",
            "verbosity_assertions=2",
            "-m",
            f"adopts(engine='{engine}')",
            "-k",
            only,
        ]
        tests = (ROOT / "tests" / "conformance").rglob("test_*.py")
        marked = sorted(test for test in tests if "mark.adopts(" in test.read_text())
        run_process([*command, *marked], cwd=ROOT, env=inherited | own, stdout=sys.stderr)
        return list(json.loads(file.read_text())) if file.is_file() else []


def adopt(engine: str, release: str, *, write: bool, only: str = "") -> None:
    """Print how a release differs from the proved one. Raises :class:`FailedError` where it is not good."""
    sys.path.insert(0, str(ROOT / "tests"))
    releases = importlib.import_module("conformance.releases")
    report = importlib.import_module("conformance.report")

    def known() -> dict[str, Any]:
        releases_known: dict[str, Any] = json.loads(FIGURES.read_text())["releases"].get(engine, {})
        return releases_known

    def add(**measured: Any) -> None:
        figures = json.loads(FIGURES.read_text())
        figures["releases"].setdefault(engine, {})[release] = {"date": report.today(), **measured}
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
        FIGURES.with_suffix(".md").write_text(report.table(figures))

    try:
        variables = environment(engine, release)
    except (CannotMakeError, FailedError) as error:
        if write and not known().get(release, {}).get("rows"):
            add(rows=[], not_run=str(error))
        raise
    measured = rows_of(engine, variables, only)
    rows, proved = releases.read({"rows": measured}), PROVED[engine]
    before = releases.read(known().get(proved, {"rows": []}))
    print("\n".join(releases.comparison(before, rows, proved, release)))
    if write and rows:
        earlier = releases.read(known().get(release, {"rows": []})) if only else []
        merged = {row.name: row for row in (*earlier, *rows)}
        add(rows=[asdict(row) for row in merged.values()])
    judge(f"{engine} {release}", [row.result == releases.PASSED for row in rows])


def judge(release: str, passed: Sequence[bool]) -> None:
    """Say whether a release is good by its checks. Raises :class:`FailedError` where it is not, or nothing ran."""
    if not all(passed) or not passed:
        raise FailedError(f"{release}: {passed.count(False)} of {len(passed)} checks failed or did not run")
    note(f"{release}: all {len(passed)} checks passed")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Compare a release of an engine with the predictions, without a model."
    )
    parser.add_argument("engine", choices=PROVED)
    parser.add_argument("release")
    parser.add_argument("--write", action="store_true", help="write docs/conformance.json and docs/conformance.md")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="tests with this in their name; with --write, other rows stay"
    )
    given = parser.parse_args(argv)
    if not given.release:
        parser.error("RELEASE is empty; write make adopt ENGINE=vllm RELEASE=0.33.0")
    return status_of(lambda: adopt(given.engine, given.release, write=given.write, only=given.only))


if __name__ == "__main__":
    sys.exit(main())
