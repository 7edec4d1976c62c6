"""Bills of materials list every locked package with hashes and licence, and nothing else; an audit names its result."""

import io
import json
import re
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from unit.hack.test_programs import command

from hack.build_once import CannotMakeError, FailedError
from hack.images.base_image import write_image
from hack.supply_chain import audit, bill_of_materials, licences
from hack.supply_chain.bill_of_materials import PARTS, bill, licence_faults
from hack.supply_chain.image_content import read_image

ROOT = Path(__file__).resolve().parents[3]
LOCK = (ROOT / "requirements.lock").read_text()
PINS = dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", LOCK, re.MULTILINE))


@pytest.fixture(scope="module", params=list(PARTS))
def part(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, bill(request.param)


def of_kind(content: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    prefix = f"pkg:{kind}/"
    return {each["name"]: each for each in content["components"] if each["purl"].startswith(prefix)}


def test_the_whole_lock_is_listed_and_nothing_else() -> None:
    content = bill("development")
    assert {name: each["version"] for name, each in of_kind(content, "pypi").items()} == PINS
    crates = tomllib.loads((ROOT / "native" / "Cargo.lock").read_text())["package"]
    expected = {(crate["name"], crate.get("checksum")) for crate in crates} - {("mmrouter-native", None)}
    assert {(name, each["hashes"][0]["content"]) for name, each in of_kind(content, "cargo").items()} == expected
    assert len(content["components"]) == len(PINS) + len(expected)


def test_an_images_bill_lists_what_the_dockerfile_installs() -> None:
    steps = re.findall(r"docker/packages\.sh /opt/(\w+) ([\w ]+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert {image: tuple(extras.split()) for image, extras in steps} == {
        name: PARTS[name] for name in ("mmrouter", "sim")
    }


def test_every_component_has_its_locked_hashes_and_an_accepted_licence(part: tuple[str, dict[str, Any]]) -> None:
    name, content = part
    packages = of_kind(content, "pypi")
    assert packages
    for each in packages.values():
        lines = LOCK[LOCK.index(f"{each['name']}=={each['version']} ") :].partition("    # via")[0]
        assert [item["content"] for item in each["hashes"]] == re.findall(r"sha256:(\w+)", lines)
    assert all(each["hashes"] for each in content["components"])
    assert licence_faults(content["components"]) == []
    unlicensed = [each["name"] for each in content["components"] if not each.get("licenses")]
    assert unlicensed == (["docker.io/library/python"] if name in bill_of_materials.IMAGES else [])


def test_references_resolve_and_every_component_is_reachable(part: tuple[str, dict[str, Any]]) -> None:
    _, content = part
    edges = {each["ref"]: each["dependsOn"] for each in content["dependencies"]}
    subject = content["metadata"]["component"]["bom-ref"]
    assert set(edges) == {subject, *(each["bom-ref"] for each in content["components"])}
    reached, rest = set(), [subject]
    while rest:
        reference = rest.pop()
        if reference not in reached:
            reached.add(reference)
            rest += edges[reference]
    assert reached == set(edges)


def test_the_same_lock_gives_the_same_bytes() -> None:
    assert json.dumps(bill("sim")) == json.dumps(bill("sim"))
    assert bill("sim")["serialNumber"] != bill("mmrouter")["serialNumber"]


@pytest.mark.parametrize(
    "expression", ["GPL-3.0-only", "MIT OR AGPL-3.0-only", "Apache-2.0 WITH Classpath-exception-2.0"]
)
def test_a_licence_that_is_not_accepted_is_named(expression: str) -> None:
    component = {"name": "thing", "licenses": [{"expression": expression}]}
    (fault,) = licence_faults([component])
    assert fault.startswith("thing: ")
    assert expression in fault


def test_a_distribution_without_a_known_licence_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "secretive-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: secretive\nVersion: 1\nLicense: ask me\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(licences.UnknownLicenceError, match="secretive"):
        licences.licence_of("secretive")


STATUS = """\
Package: base-files
Status: install ok installed
Architecture: amd64
Version: 12.4+deb12u1
Description: files
 of the base

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""


def archive(folder: Path, files: dict[str, str]) -> Path:
    layer = folder / "layer.tar"
    with tarfile.open(layer, "w") as out:
        for path, text in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(text.encode())
            out.addfile(entry, io.BytesIO(text.encode()))
    write_image(folder / "image.tar", layer, "localhost/it:1", {})
    return folder / "image.tar"


def test_an_archives_debian_packages_and_distributions_are_read(tmp_path: Path) -> None:
    metadata = "Metadata-Version: 2.4\nName: Jinja2\nVersion: 3.1.6\n\nA description.\n"
    files = {
        "./var/lib/dpkg/status": STATUS,
        "opt/mmrouter/lib/python3.11/site-packages/jinja2-3.1.6.dist-info/METADATA": metadata,
        "usr/lib/python3.11/site-packages/Of_Base-2.dist-info/METADATA": "Name: Of_Base\nVersion: 2\n",
        "opt/mmrouter/share/METADATA": "Name: other\nVersion: 1\n",
    }
    image = archive(tmp_path, files)
    found = read_image(image)
    assert found.python == {"jinja2": "3.1.6", "of-base": "2"}
    assert found.debian == {"base-files": ("12.4+deb12u1", "amd64")}
    content = bill("sim", image)
    assert of_kind(content, "pypi")["of-base"]["version"] == "2"
    packages = of_kind(content, "deb/debian")
    assert [each["purl"] for each in packages.values()] == ["pkg:deb/debian/base-files@12.4%2Bdeb12u1?arch=amd64"]


@pytest.mark.parametrize(
    ("script", "raised"),
    [
        ("echo 'No known vulnerabilities found' >&2", None),
        ("echo 'jinja2 3.1.6 CVE-1'; echo 'Found 1 known vulnerability in 1 package' >&2; exit 1", FailedError),
        ("echo 'Found 2 known vulnerabilities in 1 package' >&2; exit 1", FailedError),
        ("echo 'ConnectionError: no such host' >&2; exit 1", CannotMakeError),
    ],
)
def test_an_audit_distinguishes_a_vulnerable_lock_from_an_unreachable_database(
    tmp_path: Path, script: str, raised: type[Exception] | None
) -> None:
    command(tmp_path, "pip-audit", script)
    if raised is None:
        audit.audit(tmp_path / "pip-audit")
    else:
        with pytest.raises(raised):
            audit.audit(tmp_path / "pip-audit")
