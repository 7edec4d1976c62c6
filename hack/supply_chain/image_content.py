"""Read which Debian packages and Python distributions the layers of an image hold."""

import email
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

DPKG = re.compile(r"var/lib/dpkg/status(?:\.d/[^/]+)?")
PYTHON = re.compile(r"(?:.*/)?(?:site|dist)-packages/[^/]+\.dist-info/METADATA")


@dataclass
class Content:
    """``debian``: name -> version and architecture. ``python``: normalized name -> version."""

    debian: dict[str, tuple[str, str]] = field(default_factory=dict)
    python: dict[str, str] = field(default_factory=dict)


def read_image(archive: Path) -> Content:
    """Return what an archive as of ``docker save`` holds; a later layer's list replaces an earlier one's.

    Raises ``OSError``, ``tarfile.TarError``, ``KeyError``.
    """
    found = Content()
    for path, text in _files(archive):
        if PYTHON.fullmatch(path):
            metadata = email.message_from_string(text)
            found.python[re.sub(r"[-_.]+", "-", metadata["Name"]).lower()] = metadata["Version"]
        else:
            installed = (dict(_stanza(block)) for block in text.split("\n\n") if "\nStatus: install ok" in block)
            found.debian |= {each["Package"]: (each["Version"], each["Architecture"]) for each in installed}
    return found


def _files(archive: Path) -> Iterator[tuple[str, str]]:
    """Yield path and text of the lists in every layer, the lowest layer first."""
    with tarfile.open(archive) as image:
        manifest = image.extractfile("manifest.json")
        assert manifest is not None
        for name in json.load(manifest)[0]["Layers"]:
            with tarfile.open(fileobj=image.extractfile(name)) as layer:
                for member in layer:
                    path = member.name.removeprefix("./")
                    if member.isfile() and (DPKG.fullmatch(path) or PYTHON.fullmatch(path)):
                        content = layer.extractfile(member)
                        assert content is not None
                        yield path, content.read().decode(errors="replace")


def _stanza(block: str) -> Iterator[tuple[str, str]]:
    for line in block.splitlines():
        if line[:1].strip() and ": " in line:
            name, _, value = line.partition(": ")
            yield name, value
