"""Read which Debian packages and Python distributions the layers of an image hold, and of which release it is."""

import email
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

RELEASE = "usr/lib/os-release"
DPKG = re.compile(r"var/lib/dpkg/status(?:\.d/[^/]+)?")
PYTHON = re.compile(r"(?:.*/)?(?:site|dist)-packages/[^/]+\.dist-info/METADATA")


class DebianPackage(NamedTuple):
    """``source``: name and version of the source package that it was built from."""

    version: str
    architecture: str
    source: tuple[str, str]


@dataclass
class Content:
    """``debian``: name -> package. ``python``: normalized name -> version. ``release``: ``debian-12``, empty where the
    image does not say it.
    """

    debian: dict[str, DebianPackage] = field(default_factory=dict)
    python: dict[str, str] = field(default_factory=dict)
    release: str = ""


def read_image(archive: Path) -> Content:
    """Return what an archive as of ``docker save`` holds; a later layer's list replaces an earlier one's.

    Raises ``OSError``, ``tarfile.TarError``, ``KeyError``.
    """
    content = Content()
    for path, text in _files(archive):
        if PYTHON.fullmatch(path):
            metadata = email.message_from_string(text)
            content.python[re.sub(r"[-_.]+", "-", metadata["Name"]).lower()] = metadata["Version"]
        elif path == RELEASE:
            values = dict(re.findall(r'^(\w+)="?([^"\n]*)', text, re.MULTILINE))
            content.release = f"{values.get('ID', '')}-{values.get('VERSION_ID', '')}"
        else:
            installed = (dict(_stanza(block)) for block in text.split("\n\n") if "\nStatus: install ok" in block)
            content.debian |= {each["Package"]: _package(each) for each in installed}
    return content


def _files(archive: Path) -> Iterator[tuple[str, str]]:
    """Yield path and text of the lists in every layer, the lowest layer first."""
    with tarfile.open(archive) as image:
        manifest = image.extractfile("manifest.json")
        assert manifest is not None
        for name in json.load(manifest)[0]["Layers"]:
            with tarfile.open(fileobj=image.extractfile(name)) as layer:
                for member in layer:
                    path = member.name.removeprefix("./")
                    if member.isfile() and (DPKG.fullmatch(path) or PYTHON.fullmatch(path) or path == RELEASE):
                        content = layer.extractfile(member)
                        assert content is not None
                        yield path, content.read().decode(errors="replace")


def _stanza(block: str) -> Iterator[tuple[str, str]]:
    for line in block.splitlines():
        if line[:1].strip() and ": " in line:
            name, _, value = line.partition(": ")
            yield name, value


def _package(stanza: dict[str, str]) -> DebianPackage:
    """Return a package of dpkg's list, which names a source only where that has another name or version."""
    name, _, version = stanza.get("Source", stanza["Package"]).partition(" (")
    return DebianPackage(
        stanza["Version"], stanza["Architecture"], (name, version.removesuffix(")") or stanza["Version"])
    )
