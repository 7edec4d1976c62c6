"""Check the repository's prose: no dialect words, and every citation and link resolves.

    python hack/prose_lint.py [--only RULE]... [PATHS...]

Without paths, every tracked text file is checked. Prints one line per finding and a count per rule; exit status 1 when
there are findings. Rules:

- ``words``: the phrases of :data:`BANNED`, in prose and in identifiers.
- ``citations``: a file of the repository that a text names exists, and so does the heading of ``docs/page.md#heading``.
  A module in backticks may be named by the end of its path.
- ``links``: the target of a relative Markdown link exists, and its anchor is a heading of that page.

Runs on the standard library alone.
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".pyi", ".md", ".yaml", ".yml", ".toml", ".rs", ".sh", ".go", ".tpl", ".txt", ""}
EXEMPT = {"hack/prose_lint.py", "tests/unit/hack/test_prose_lint.py", "LICENSE", "requirements.lock"}
"""This file and its test quote what they ban; the others are text that the project did not write."""
BE = "(?:is|are|was|were|be|been|being)"
BANNED = {
    "nobody": "name who does not, or use the passive: 'no client', 'is not used'",
    "somebody": "name who: 'a client', 'another process', 'a user'",
    "anybody": "name who: 'any user', 'any process'",
    "(?:whoever|whomever)": "name who: 'the caller', 'a client that'",
    "came of": "say what resulted: 'the outcome of', 'the result of'",
    f"{BE} told": "say how: 'receives', 'is given', 'reads ... from'",
    f"{BE} asked": "say how: 'receives a request', 'is queried', 'is requested'",
    "(?:goes|go|going) without": "say what happens: 'skips', 'runs with no'",
    "(?:knows|know|knowing) (?:of|nothing of)": "say what it holds: 'has a record of', 'does not depend on'",
}
"""Pattern of a phrase -> what to write instead. A space stands for any gap, over the end of a line, too."""
GAP = r"(?:[\s_]|\n\s*(?:#|//+!?)\s*)+"
WORDS = [
    (re.compile(f"(?<![A-Za-z]){phrase.replace(' ', GAP)}(?![A-Za-z])", re.IGNORECASE), advice)
    for phrase, advice in BANNED.items()
]
UNRESOLVED = re.compile(r"\bfacts on\s+\w+|\bDESIGN(?:\.md)?\b(?! =)")
TOP_FOLDERS = (
    "docs|examples|crds|tests|charts|bench|docker|hack|mmrouter|router|operator|sidecar|handover|sim|cli|native"
)
NAMED = re.compile(
    rf"(?<![\w/.${{}}\\-])((?:{TOP_FOLDERS})/[\w./-]+\.(?:md|ya?ml|py|json|sh|rs)|[A-Z]{{4,}}\.md)\b(?:#([\w-]+))?"
)
MODULE = re.compile(r"`((?:\w+/)*\w+\.py)`")
ENGINES_FILES = ROOT / "docs" / "engine-facts"
"""Pages that name files of the engines."""
PLACEHOLDER = re.compile(r"(?:\b|_)(?:NAME|ENGINE)(?=\b|_)")
LINK = re.compile(r"\[[^\]\[]*\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Finding:
    file: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        file = self.file.relative_to(ROOT) if self.file.is_relative_to(ROOT) else self.file
        return f"{file}:{self.line}: {self.rule}: {self.text}"


@cache
def anchors(page: Path) -> frozenset[str]:
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return frozenset(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings)


@cache
def module_ends() -> frozenset[tuple[str, ...]]:
    """Return the last parts of every module's path, in any number."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "*.py"], capture_output=True, text=True, check=True)
    paths = [Path(line).parts for line in listed.stdout.splitlines()]
    return frozenset(parts[at:] for parts in paths for at in range(len(parts)))


def words(file: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield (offset, message) of each banned phrase."""
    for pattern, advice in WORDS:
        for match in pattern.finditer(text):
            yield match.start(), f"{' '.join(match[0].split())!r}: {advice}"


def citations(file: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield (offset, message) of each citation that does not resolve inside the repository."""
    for match in UNRESOLVED.finditer(text):
        yield match.start(), f"{match[0]!r} is not in the repository: cite a section of docs/"
    for match in NAMED.finditer(text):
        name, anchor = match.groups()
        if "..." in name or PLACEHOLDER.search(name):  # a shortened path, a path of a recipe
            continue
        if not (ROOT / name).is_file():
            yield match.start(), f"there is no {name}"
        elif anchor and name.endswith(".md") and anchor not in anchors(ROOT / name):
            yield match.start(), f"{name} has no heading #{anchor}"
    for match in MODULE.finditer(text) if file.parent != ENGINES_FILES else ():
        name = match[1]
        if not (NAMED.fullmatch(name) or PLACEHOLDER.search(name) or Path(name).parts in module_ends()):
            yield match.start(), f"there is no {name}"


def links(file: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield (offset, message) of each relative link of a Markdown page that leads nowhere."""
    for match in LINK.finditer(text) if file.suffix == ".md" else ():
        target, anchor = match.groups()
        if "://" in target or target.startswith("mailto:"):
            continue
        page = file.parent / target if target else file
        if not page.exists():
            yield match.start(), f"there is no {target}"
        elif anchor and page.suffix == ".md" and anchor not in anchors(page.resolve()):
            yield match.start(), f"{target or file.name} has no heading #{anchor}"


RULES = {"words": words, "citations": citations, "links": links}


def check(files: Iterable[Path], rules: Iterable[str] = RULES) -> list[Finding]:
    """Return the findings of the rules in files, in their order."""
    findings = []
    for file in files:
        text = file.read_text()
        located = sorted((offset, rule, message) for rule in rules for offset, message in RULES[rule](file, text))
        findings += [Finding(file, text.count("\n", 0, offset) + 1, rule, text_) for offset, rule, text_ in located]
    return findings


def text_files(paths: Iterable[Path] = ()) -> list[Path]:
    """Return the tracked text files below the paths. Raises ``subprocess.CalledProcessError`` outside of a checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--", *(str(path.resolve()) for path in paths)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name and name not in EXEMPT]
    return [file for name in names if (file := ROOT / name).is_file() and is_text(file)]


def is_text(file: Path) -> bool:
    if file.suffix not in SUFFIXES or file.is_symlink():
        return False
    try:
        file.read_text()
    except UnicodeDecodeError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Check words, citations and links of the repository's texts.")
    parser.add_argument("paths", nargs="*", type=Path, help="by default the whole repository")
    parser.add_argument("--only", action="append", choices=list(RULES), metavar="RULE", help="words, citations, links")
    options = parser.parse_args()
    findings = check(text_files(options.paths), options.only or RULES)
    for finding in findings:
        print(finding)
    counts = Counter(finding.rule for finding in findings)
    if findings:
        print(", ".join(f"{rule}: {counts[rule]}" for rule in RULES if counts[rule]), file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
