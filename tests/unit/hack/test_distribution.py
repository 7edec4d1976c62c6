"""What a release publishes: the same bytes from the same commit, and commands that need no more than their extra."""

import hashlib
import json
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

from docker import requirements
from hack.distribution import CHART_LAYER, CHECKSUMS, PROVENANCE, ROOT, build, chart_files, git

WITHOUT = """
import sys

absent = set(sys.argv.pop(1).split(","))

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())
from mmrouter_cli.__main__ import main
main()
"""
NOTHING = "http://127.0.0.1:9"
PLAN = ("plan", str(ROOT / "examples" / "mmrouter.yaml"))


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist") / "first"
    build(folder)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def wheel_of(folder: Path) -> Path:
    (wheel,) = folder.glob("mmrouter_k8s-*.whl")
    return wheel


def absent(*extras: str) -> str:
    """Return the import packages that an installation with these extras does not have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lock = requirements.packages((ROOT / "requirements.lock").read_text())
    part = requirements.closure(requirements.wanted(project, list(extras)), lock)
    there = {requirements.normal(lines) for lines in part}
    known = packages_distributions().items()
    return ",".join(
        name for name, of in known if not {requirements.normal(one) for one in of} & {*there, "mmrouter-k8s"}
    )


def mmrouter(without: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", WITHOUT, without, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def test_the_same_commit_gives_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    build(tmp_path / "second")
    assert digests(tmp_path / "second") == digests(dist)


def test_a_released_chart_names_the_image_where_the_release_pushes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(name: str) -> str:
        return next(content for path, content in chart_files(ROOT).items() if Path(path).name == name).decode()

    assert yaml.safe_load(read("values.yaml"))["image"]["repository"] == "mmrouter/mmrouter"
    monkeypatch.setenv("MMROUTER_REGISTRY", "registry.example/team")
    repository = "registry.example/team/mmrouter/mmrouter"
    assert yaml.safe_load(read("values.yaml"))["image"]["repository"] == repository
    assert f"image: {repository}:" in read("Chart.yaml")


def test_checksums_and_provenance_name_every_file(dist: Path) -> None:
    found = digests(dist)
    lines = (dist / CHECKSUMS).read_text().splitlines()
    assert dict(reversed(line.split("  ")) for line in lines) == {n: d for n, d in found.items() if n != CHECKSUMS}
    statement = json.loads((dist / PROVENANCE).read_text())
    subjects = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    assert subjects == {name: found[name] for name in found if name not in (CHECKSUMS, PROVENANCE)}
    source, _ = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert source["digest"] == {"gitCommit": git("rev-parse", "HEAD")}


def test_the_sdist_builds_the_published_wheel(dist: Path, tmp_path: Path) -> None:
    (sdist,) = dist.glob("mmrouter_k8s-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path / "made")]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    published, made = (zipfile.ZipFile(wheel_of(folder)) for folder in (dist, tmp_path / "made"))
    assert {each.filename: each.CRC for each in made.infolist()} == {
        each.filename: each.CRC for each in published.infolist()
    }


def test_the_chart_archive_is_a_registrys_image_of_the_packaged_chart(dist: Path) -> None:
    (package,) = dist.glob("mmrouter-*.tgz")
    (layout,) = dist.glob("mmrouter-*.oci.tar")
    with tarfile.open(layout) as archive:
        blobs = {entry.name: read.read() for entry in archive if (read := archive.extractfile(entry)) is not None}
    for name, blob in blobs.items():
        if name.startswith("blobs/sha256/"):
            assert name.rpartition("/")[2] == hashlib.sha256(blob).hexdigest()

    def blob_of(descriptor: dict[str, str]) -> bytes:
        return blobs["blobs/" + descriptor["digest"].replace(":", "/")]

    (reference,) = json.loads(blobs["index.json"])["manifests"]
    manifest = json.loads(blob_of(reference))
    (layer,) = manifest["layers"]
    assert (layer["mediaType"], blob_of(layer)) == (CHART_LAYER, package.read_bytes())
    assert json.loads(blob_of(manifest["config"]))["name"] == "mmrouter"


def test_a_bare_installation_prints_the_definition_and_plans() -> None:
    without = absent()
    for arguments in (("--version",), ("--help",), ("crd",), PLAN, ("init", "-", "--yes")):
        done = mmrouter(without, *arguments)
        assert (done.returncode, done.stderr) == (0, ""), arguments
        assert done.stdout


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("local", ("up", "x")),
        ("local", ("demo",)),
        ("router", ("router",)),
        ("sidecar", ("sidecar",)),
        ("operator", ("operator",)),
        ("cli", ("status", "x")),
        ("cli", ("doctor", "x")),
        ("cli", ("rotate-keys", "x")),
        ("cli", ("bench", NOTHING)),
    ],
)
def test_a_command_whose_packages_are_absent_names_the_extra_that_installs_them(
    extra: str, arguments: tuple[str, ...]
) -> None:
    done = mmrouter(absent(), *arguments)
    assert done.returncode == 2
    assert f"pip install 'mmrouter-k8s[{extra}]' installs it" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("cli", ("status", "--kubeconfig", "/nowhere")),
        ("cli", ("doctor", "x", "--kubeconfig", "/nowhere")),
        ("cli", ("rotate-keys", "x", "--kubeconfig", "/nowhere")),
        ("cli", (*PLAN, "--against", "cluster", "--kubeconfig", "/nowhere")),
        ("cli", ("bench", NOTHING)),
        ("router", ("router",)),
        ("sidecar", ("sidecar",)),
        ("operator", ("operator", "--help")),
    ],
)
def test_an_extra_has_every_package_of_its_commands(extra: str, arguments: tuple[str, ...]) -> None:
    done = mmrouter(absent(extra), *arguments)
    assert "needs the package" not in done.stderr
    assert "Traceback" not in done.stderr
