"""Write the software bills of materials of the wheel and the images, as CycloneDX 1.6 in JSON.

    python -m hack.supply_chain.bill_of_materials DIR [--images FOLDER]
    python -m hack.supply_chain.bill_of_materials --check

Writes ``wheel.cdx.json``, ``mmrouter.cdx.json``, ``sim.cdx.json`` and ``development.cdx.json`` into DIR: every
dependency of ``requirements.lock`` that the part has, with its version, the lock's hashes, its licence and the
packages that require it. ``--images``: the archives of ``make images ARGS="--export FOLDER"``, from which the packages
of the base image are read; without them an image's bill names the base by its digest. ``--check`` writes nothing: exit
status 1 where a dependency has no licence that the project accepts (``hack/supply_chain/licences.py``).

The same lock gives the same bytes. Licences are read from the installed distributions.
"""

import argparse
import json
import re
import sys
import tomllib
import uuid
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from docker import requirements
from hack.build_once import ROOT
from hack.supply_chain.image_content import DebianPackage, read_image
from hack.supply_chain.licences import CRATE, CRATES, NOT_IN_IMAGES, UnknownLicenceError, licence_of, refused_parts

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "wheel": ("local",),
    "mmrouter": ("cli", "operator", "router", "sidecar"),
    "sim": ("sim",),
    "development": (),
}
"""Bill -> the extras whose dependencies it lists; none: the whole lock. The images' are those of the Dockerfile."""
IMAGES: Final = ("mmrouter", "sim")
OWN: Final = ("mmrouter-k8s", "mmrouter-native")
"""Distributions of this project."""
NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_DNS, "mmrouter.io")
Component = dict[str, Any]
Lock = dict[str, tuple[str, set[str]]]
"""Name -> (its lines in the lock, the packages that require it)."""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def read_lock() -> Lock:
    return requirements.packages((ROOT / "requirements.lock").read_text())


def locked_names(part: str, lock: Lock) -> list[str]:
    """Return the names of the dependencies of a part of :data:`PARTS`, sorted."""
    if not PARTS[part]:
        return sorted(lock)
    extras = [extra for name in PARTS[part] for extra in _extras(name)]
    return [requirements.normal(lines) for lines in requirements.closure(requirements.wanted(project(), extras), lock)]


def _extras(name: str) -> list[str]:
    """Return the extras that an extra consists of: ``local`` names others of this project."""
    (first, *_) = project()["project"]["optional-dependencies"][name]
    combined = re.fullmatch(r"mmrouter-k8s\[([\w,]+)\]", first)
    return combined[1].split(",") if combined else [name]


def python_component(name: str, lines: str) -> Component:
    """Return a locked dependency. Raises as :func:`licence_of`."""
    version = re.search(r"==(\S+)", lines)
    assert version is not None
    purl = f"pkg:pypi/{name}@{version[1]}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version[1],
        "purl": purl,
        "licenses": [{"expression": licence_of(name)}],
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in re.findall(r"sha256:([0-9a-f]{64})", lines)],
    }


def crate_components() -> list[Component]:
    """Return the crates of the compiled form, which the wheel ``mmrouter-native`` is built from."""
    components = []
    for crate in tomllib.loads((ROOT / "native" / "Cargo.lock").read_text())["package"]:
        if "checksum" in crate:  # the project's own has none
            purl = f"pkg:cargo/{crate['name']}@{crate['version']}"
            components.append(
                {
                    "type": "library",
                    "bom-ref": purl,
                    "name": crate["name"],
                    "version": crate["version"],
                    "purl": purl,
                    "scope": "optional",
                    "licenses": [{"expression": CRATES.get(crate["name"], CRATE)}],
                    "hashes": [{"alg": "SHA-256", "content": crate["checksum"]}],
                }
            )
    return components


def base_components(archive: Path | None, locked: Collection[str]) -> list[Component]:
    """Return what an image has from its base: Debian packages, and distributions that are neither locked nor ours.

    Without an archive it is one component: the base image that the Dockerfile names.
    """
    if archive is not None:
        content = read_image(archive)
        debian = (
            (name, package.version, debian_purl(name, package, content.release))
            for name, package in sorted(content.debian.items())
        )
        python = (
            (name, version, f"pkg:pypi/{name}@{version}")
            for name, version in sorted(content.python.items())
            if name not in locked and name not in OWN
        )
        return [
            {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
            for name, version, purl in (*debian, *python)
        ]
    base = re.search(r"^ARG MMROUTER_BASE_IMAGE=(\S+)@sha256:(\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert base is not None
    name, _, tag = base[1].rpartition(":")
    purl = f"pkg:docker/{name.removeprefix('docker.io/')}@sha256%3A{base[2]}"
    digest = {"alg": "SHA-256", "content": base[2]}
    return [{"type": "container", "bom-ref": purl, "name": name, "version": tag, "purl": purl, "hashes": [digest]}]


def debian_purl(name: str, package: DebianPackage, release: str) -> str:
    """Return what scanners find a Debian package by: vulnerabilities are listed by release and source package."""
    qualifiers = {"arch": package.architecture, "distro": release, "upstream": "@".join(package.source)}
    known = {key: value for key, value in qualifiers.items() if value}
    return f"pkg:deb/debian/{name}@{quote(package.version)}?{urlencode(known)}"


def bill(part: str, archive: Path | None = None) -> dict[str, Any]:
    """Return the bill of a part of :data:`PARTS`. ``archive``: the image's. Raises as :func:`licence_of`."""
    lock = read_lock()
    names = locked_names(part, lock)
    components = [python_component(name, lock[name][0]) for name in names]
    reference = {component["name"]: component["bom-ref"] for component in components}
    components += crate_components() if part != "sim" else []
    components += base_components(archive, names) if part in IMAGES else []
    version = project()["project"]["version"]
    subject = f"pkg:oci/{part}@{version}" if part in IMAGES else f"pkg:pypi/mmrouter-k8s@{version}"
    edges: dict[str, list[str]] = {ref: [] for ref in (subject, *(each["bom-ref"] for each in components))}
    for name in names:
        parents = [reference[parent] for parent in lock[name][1] if parent in reference]
        for parent in parents or [subject]:
            edges[parent].append(reference[name])
    edges[subject] += [each["bom-ref"] for each in components[len(names) :]]
    content = {
        "metadata": {
            "component": {
                "type": "container" if part in IMAGES else "library",
                "bom-ref": subject,
                "name": f"mmrouter-{part}" if part in IMAGES else "mmrouter-k8s",
                "version": version,
                "purl": subject,
                "licenses": [{"expression": project()["project"]["license"]}],
            }
        },
        "components": components,
        "dependencies": [{"ref": ref, "dependsOn": sorted(others)} for ref, others in sorted(edges.items())],
    }
    serial = uuid.uuid5(NAMESPACE, json.dumps(content, sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": f"urn:uuid:{serial}", "version": 1}
    return {**head, **content}


def licence_faults(components: Iterable[Component]) -> list[str]:
    """Return a sentence for each component with a licence that the project does not accept."""
    return [
        f"{component['name']}: {', '.join(refused)} in {licence['expression']} is not accepted"
        for component in components
        for licence in component.get("licenses", [])
        if NOT_IN_IMAGES.get(component["name"]) != licence["expression"]
        and (refused := refused_parts(licence["expression"]))
    ]


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write bills of materials, or check the dependencies' licences.")
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="where the bills are written")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="archives of the built images")
    parser.add_argument("--check", action="store_true", help="check the licences and write nothing")
    chosen = parser.parse_args()
    if chosen.check == (chosen.folder is not None):
        parser.error("name a folder, or --check")
    try:
        if chosen.check:
            components = bill("development")["components"]
            faults = licence_faults(components)
            print("\n".join(faults) or f"{len(components)} dependencies have accepted licences")
            return 1 if faults else 0
        chosen.folder.mkdir(parents=True, exist_ok=True)
        for part in PARTS:
            archive = chosen.images / f"{part}.tar" if chosen.images and part in IMAGES else None
            file = chosen.folder / f"{part}.cdx.json"
            file.write_text(json.dumps(bill(part, archive), indent=1) + "\n")
            print(file)
    except (UnknownLicenceError, PackageNotFoundError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
