"""Build the site of the documentation with MkDocs.

    python -m hack.docs.build_site [DIR]      # `make docs`; DIR is build/site

The pages of this version go to ``DIR/VERSION``; other versions in DIR stay, and the newest is what ``DIR/index.html``
leads to. A link to a page, heading or file that is not there is an error. MkDocs comes from ``hack/docs/build.lock``,
into an environment of its own in the cache. Exit status: ``hack/build_once.py``.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

from hack.build_once import (
    ROOT,
    build_once,
    cache_dir,
    captured,
    digest,
    failed,
    interpreter,
    pip_install,
    run,
    status_of,
)
from mmrouter_lib import __version__

FOLDER = Path(__file__).parent
ALONE = {
    "README.md": "index.md",
    "handover/README.md": "handover.md",
    "charts/mmrouter/README.md": "chart.md",
    **{name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")},
}
"""Page of the repository -> page of the site, whose other pages are those of docs/."""
FILES = ("examples", "charts/mmrouter/dashboards", "charts/mmrouter/files")
"""Folders of files to which pages link."""
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)]*)?\))")
REDIRECT = (
    '<!doctype html><meta charset="utf-8"><title>mmrouter</title><meta http-equiv="refresh" content="0; url={}/">\n'
)


def mkdocs() -> Path:
    """Make the environment of MkDocs, or find it ready. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    lock = FOLDER / "build.lock"

    def make(folder: Path) -> None:
        run([sys.executable, "-m", "venv", str(folder)], "python -m venv")
        pip_install(str(folder / "bin" / "python"), ["--require-hashes", "--requirement", str(lock)], "pip install")

    recipe = digest(lock.read_text(), interpreter())
    build_once(folder := cache_dir() / "mkdocs", recipe, make, what="MkDocs (once, about 20 seconds)", free_gb=0.5)
    return folder / "bin" / "mkdocs"


def site_places() -> dict[Path, str]:
    """Return file of the repository -> its place in the site."""
    places = {ROOT / page: place for page, place in ALONE.items()}
    docs = ROOT / "docs"
    places |= {file: str(file.relative_to(docs)) for file in docs.rglob("*") if file.is_file()}
    return places | {
        file: str(file.relative_to(ROOT)) for folder in FILES for file in (ROOT / folder).rglob("*") if file.is_file()
    }


def moved(text: str, page: Path, places: dict[Path, str]) -> str:
    """Return a page with its relative links as they are in the site."""
    depth = places[page].count("/")

    def target(link: re.Match[str]) -> str:
        place = places.get((page.parent / link[2]).resolve())
        return link[0] if place is None else f"{link[1]}{'../' * depth}{place}{link[3]}"

    return LINK.sub(target, text)


def lay_out(folder: Path) -> None:
    """Write all pages and files of the site's sources into a folder."""
    places = site_places()
    for file, place in places.items():
        written = folder / place
        written.parent.mkdir(parents=True, exist_ok=True)
        if place.endswith(".md") and not place.startswith("examples/"):
            written.write_text(moved(file.read_text(), file, places))
        elif not place.endswith(".md"):
            shutil.copyfile(file, written)


def build(site: Path) -> None:
    """Build this version's pages. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    program = mkdocs()
    with tempfile.TemporaryDirectory(prefix="mmrouter-docs-") as name:
        sources = Path(name)
        lay_out(sources / "docs")
        shutil.copyfile(FOLDER / "mkdocs.yaml", sources / "mkdocs.yml")
        done = captured([str(program), "build", "--strict", "--site-dir", str(site / __version__)], cwd=sources)
        if done.returncode != 0:
            raise failed("mkdocs", done)
    versions = sorted((each.parent.name for each in site.glob("*/index.html")), key=numbers, reverse=True)
    listed = [{"version": each, "title": each, "aliases": ["latest"] * (each == versions[0])} for each in versions]
    (site / "versions.json").write_text(json.dumps(listed))
    (site / "index.html").write_text(REDIRECT.format(versions[0]))
    print(site / __version__)


def numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Build the site of the documentation.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "site", metavar="DIR")
    return status_of(partial(build, parser.parse_args().folder.resolve()))


if __name__ == "__main__":
    sys.exit(main())
