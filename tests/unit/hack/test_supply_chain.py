"""Bills of materials list every locked package with hashes and licence, and nothing else; an audit names its result."""

import io
import json
import re
import tarfile
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    step = r"docker/packages\.sh /opt/(\w+) ([\w ]+?)(?: \$\{MMROUTER_EXTRAS\})?$"
    steps = re.findall(step, (ROOT / "Dockerfile").read_text(), re.MULTILINE)
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


def test_a_licence_that_is_accepted_outside_images_is_in_none_of_them() -> None:
    for name in ("wheel", *bill_of_materials.IMAGES):
        assert not licences.NOT_IN_IMAGES.keys() & of_kind(bill(name), "pypi").keys()
    assert licences.NOT_IN_IMAGES.keys() <= of_kind(bill("development"), "pypi").keys()


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

Package: libssl3
Status: install ok installed
Architecture: amd64
Source: openssl
Version: 3.0.11-1

Package: libc-bin
Status: install ok installed
Source: glibc (2.36-9)
Architecture: amd64
Version: 2.36-9+b1
"""
OS_RELEASE = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nVERSION_ID="12"\nID=debian\n'


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
        "usr/lib/os-release": OS_RELEASE,
        "opt/mmrouter/lib/python3.11/site-packages/jinja2-3.1.6.dist-info/METADATA": metadata,
        "usr/lib/python3.11/site-packages/Of_Base-2.dist-info/METADATA": "Name: Of_Base\nVersion: 2\n",
        "opt/mmrouter/share/METADATA": "Name: other\nVersion: 1\n",
    }
    image = archive(tmp_path, files)
    found = read_image(image)
    assert found.python == {"jinja2": "3.1.6", "of-base": "2"}
    assert found.debian == {
        "base-files": ("12.4+deb12u1", "amd64", ("base-files", "12.4+deb12u1")),
        "libssl3": ("3.0.11-1", "amd64", ("openssl", "3.0.11-1")),
        "libc-bin": ("2.36-9+b1", "amd64", ("glibc", "2.36-9")),
    }
    assert found.release == "debian-12"
    content = bill("sim", image)
    assert of_kind(content, "pypi")["of-base"]["version"] == "2"
    packages = of_kind(content, "deb/debian")
    assert {each["purl"].removeprefix("pkg:deb/debian/") for each in packages.values()} == {
        "base-files@12.4%2Bdeb12u1?arch=amd64&distro=debian-12&upstream=base-files%4012.4%2Bdeb12u1",
        "libssl3@3.0.11-1?arch=amd64&distro=debian-12&upstream=openssl%403.0.11-1",
        "libc-bin@2.36-9%2Bb1?arch=amd64&distro=debian-12&upstream=glibc%402.36-9",
    }


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


CRATE = next(each for each in bill_of_materials.crate_components() if each["name"] == "libc")
VULNERABLE_CRATE = ("crates.io", "libc", CRATE["version"])
OPENSSL, GLIBC = ("Debian:12", "openssl", "3.0.11-1"), ("Debian:12", "glibc", "2.36-9")


class Database(BaseHTTPRequestHandler):
    """OSV's API. ``known``: (ecosystem, package, version) -> its vulnerabilities, of which a page has one. ``fixed``:
    those that another version does not have.
    """

    known: dict[tuple[str, str, str], list[str]]
    fixed: set[str]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/querybatch":
            self.answer({"results": [self.page(query) for query in body["queries"]]})
        else:
            self.send_error(404)

    def page(self, query: dict[str, Any]) -> dict[str, Any]:
        number = int(query.get("page_token", "0"))
        found = self.known.get((query["package"]["ecosystem"], query["package"]["name"], query["version"]), [])
        page = {"vulns": [{"id": each, "modified": "2026-01-01T00:00:00Z"} for each in found[number : number + 1]]}
        return {**page, "next_page_token": str(number + 1)} if number + 1 < len(found) else page if found else {}

    def do_GET(self) -> None:
        identifier = self.path.removeprefix("/v1/vulns/")
        events = [{"introduced": "0"}, *([{"fixed": "9"}] if identifier in self.fixed else [])]
        affected = [
            {"package": {"ecosystem": ecosystem, "name": name}, "ranges": [{"type": "ECOSYSTEM", "events": events}]}
            for (ecosystem, name, _), found in self.known.items()
            if identifier in found
        ]
        elsewhere = {"package": {"ecosystem": "Debian:13", "name": "glibc"}, "ranges": [{"events": [{"fixed": "9"}]}]}
        self.answer({"id": identifier, "affected": [elsewhere, *affected]})

    def answer(self, body: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def database() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Database) as server:
        Database.known, Database.fixed = {}, set()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for name in bill_of_materials.IMAGES:
        image = archive(tmp_path, {"var/lib/dpkg/status": STATUS, "usr/lib/os-release": OS_RELEASE})
        image.rename(tmp_path / f"{name}.tar")
    return tmp_path


def audited(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    """Return the exit status of the command where pip-audit finds nothing."""
    command(folder, "pip-audit", "echo 'No known vulnerabilities found' >&2")
    monkeypatch.setattr(audit, "auditor", lambda: folder / "pip-audit")
    monkeypatch.setattr("sys.argv", ["audit", *arguments])
    return audit.main()


@pytest.mark.parametrize(
    ("known", "fixed", "status", "printed"),
    [
        ({}, set(), 0, "no known vulnerability"),
        ({VULNERABLE_CRATE: ["RUSTSEC-1"]}, set(), 1, f"libc {CRATE['version']} (crates.io): RUSTSEC-1\n"),
        ({OPENSSL: ["CVE-1", "CVE-2"]}, {"CVE-2"}, 1, "openssl 3.0.11-1 (Debian:12): CVE-2\n"),
        ({GLIBC: ["CVE-3"]}, {"CVE-3"}, 1, "glibc 2.36-9 (Debian:12): CVE-3\n"),
        ({GLIBC: ["CVE-3"]}, set(), 0, "glibc 2.36-9 (Debian:12): CVE-3, not fixed in this release\n"),
        ({("Debian:12", "libssl3", "3.0.11-1"): ["CVE-1"]}, {"CVE-1"}, 0, "no known vulnerability"),
    ],
)
def test_an_audit_fails_on_vulnerable_crates_and_on_what_debian_has_fixed_and_names_them(
    database: str,
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    known: dict[tuple[str, str, str], list[str]],
    fixed: set[str],
    status: int,
    printed: str,
) -> None:
    Database.known, Database.fixed = known, fixed
    assert audited(monkeypatch, images, f"--database={database}", f"--images={images}") == status
    assert printed in capsys.readouterr().err


def test_an_audit_without_database_or_images_says_what_was_not_run_and_how_old_the_locks_are(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audited(monkeypatch, tmp_path, f"--database={database}/absent") == 3
    error = capsys.readouterr().err
    assert "audit: not run" in error
    assert "Debian packages of images: not run" in error
    for lock in ("requirements.lock", "native/Cargo.lock"):
        assert re.search(rf"^(the age of )?{lock} (was changed \d+ days ago|is not known here)$", error, re.MULTILINE)
