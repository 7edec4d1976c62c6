"""Print the part of ``requirements.lock`` that an image needs, for pip's ``--require-hashes``.

    python3 docker/requirements.py EXTRA...     # what these extras of pyproject.toml need
    python3 docker/requirements.py build        # what building the wheel needs

Nothing is resolved anew: pip-compile wrote under each pinned package on whose behalf it is there (``# via``), and the
part is what the extras name and, again and again, what is there on behalf of something in the part. That can be a
package too many (one that only another extra of a dependency asks for), and never a version other than the lock's; a
package too few makes ``pip install --require-hashes`` fail. Runs on the standard library, inside the build.
"""

import re
import sys
import tomllib
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9._-]+")
BUILD = "build"
ROOT = Path(__file__).resolve().parent.parent


def normal(requirement: str) -> str:
    """Return the name in a requirement as indexes compare it. Raises ``ValueError``."""
    found = NAME.match(requirement)
    if found is None:
        raise ValueError(f"no requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def wanted(project: dict[str, dict[str, object]], extras: list[str]) -> set[str]:
    """Return what pyproject.toml names for the extras. Raises ``KeyError`` for an extra that it does not have."""
    if extras == [BUILD]:
        return {normal(line) for line in strings(project["build-system"]["requires"])}
    optional = project["project"]["optional-dependencies"]
    assert isinstance(optional, dict)
    lines = strings(project["project"]["dependencies"])
    for extra in extras:
        lines += strings(optional[extra])
    return {normal(line) for line in lines}


def strings(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(item) for item in value]


def packages(lock: str) -> dict[str, tuple[str, set[str]]]:
    """Return name -> (its lines, on whose behalf it is there)."""
    found: dict[str, tuple[str, set[str]]] = {}
    for block in re.split(r"\n(?=[A-Za-z0-9])", lock.strip()):
        pinned = "\n".join(line for line in block.splitlines() if not line.lstrip().startswith("#"))
        comments = [line.strip().removeprefix("#").strip() for line in block.splitlines() if line.startswith("    #")]
        on_behalf = {normal(line.removeprefix("via").strip()) for line in comments if line not in {"via", ""}}
        found[normal(block)] = (pinned, on_behalf)
    return found


def closure(names: set[str], lock: dict[str, tuple[str, set[str]]]) -> list[str]:
    """Return the lines of all that the names need. Raises ``KeyError`` for one that the lock does not have."""
    part = set(names)
    while more := {name for name, (_, on_behalf) in lock.items() if on_behalf & part} - part:
        part |= more
    return [lock[name][0] for name in sorted(part)]


def main() -> int:
    """Print the lines."""
    if len(sys.argv) < 2:
        print(f"usage: {sys.argv[0]} EXTRA... | {BUILD}", file=sys.stderr)
        return 2
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lock = packages((ROOT / "requirements.lock").read_text())
    print("\n".join(closure(wanted(project, sys.argv[1:]), lock)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
