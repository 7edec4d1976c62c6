"""A file that the project's own files name is there: every reference can be followed."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMED = re.compile(
    r"(?<![\w/.-])(?:(?:docs|examples|crds|tests|charts|bench|docker)/[\w./-]+\.(?:md|ya?ml|py|json|sh)|[A-Z]{4,}\.md)\b"
)


def named(file: Path) -> set[str]:
    """Return what a file names, from the repository's root; of one that is no text nothing."""
    try:
        return set(NAMED.findall(file.read_text()))
    except UnicodeDecodeError:
        return set()


def test_every_page_example_and_test_that_a_file_names_is_there() -> None:
    git = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False)
    if git.returncode != 0:
        pytest.skip("not run: this is no checkout of git, so nobody knows which files are the project's")
    files = [file for line in git.stdout.splitlines() if (file := ROOT / line).is_file()]
    assert "docs/architecture.md" in named(ROOT / "CONTRIBUTING.md")
    pairs = {(str(file.relative_to(ROOT)), name) for file in files for name in named(file)}
    assert {(file, name) for file, name in pairs if not (ROOT / name).exists()} == set()
