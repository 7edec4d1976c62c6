"""What goes into the images: the lock's own versions, what the extras need, and nothing of this machine."""

import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import uvloop.loop
from artefacts import run_tool_or_skip
from packaging.requirements import Requirement
from unit.hack.test_programs import command

from docker.strip import stripped
from hack.build_once import FailedError, unreached
from hack.images import build_images as images
from hack.images.base_image import write_image
from hack.images.image_index import join_all
from hack.supply_chain.bill_of_materials import locked_names, read_lock
from hack.supply_chain.image_content import read_image

ROOT = Path(__file__).resolve().parents[3]
LOCK = ROOT / "requirements.lock"
EXTRAS = (("cli", "operator", "router", "sidecar"), ("sim",))
AARCH64 = 183  # in the header of an ELF file
SECRET = "https://someone:pass%40word@index.example/simple"


@pytest.fixture(scope="module")
def requirements() -> ModuleType:
    spec = importlib.util.spec_from_file_location("image_requirements", ROOT / "docker" / "requirements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def part(requirements: ModuleType, *extras: str) -> dict[str, str]:
    """Return name -> the lines of the lock's part for extras."""
    project = requirements.tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = requirements.closure(requirements.wanted(project, list(extras)), requirements.packages(LOCK.read_text()))
    return {requirements.normal(line): line for line in lines}


def needed(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> set[str]:
    """Return what an installed package needs, by its own metadata."""
    if (name, extras) in seen:
        return set()
    seen.add((name, extras))
    names = set()
    for text in importlib.metadata.requires(name) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            other = re.sub(r"[-_.]+", "-", requirement.name).lower()
            names |= {other} | needed(other, frozenset(requirement.extras), seen)
    return names


@pytest.mark.parametrize("extras", EXTRAS)
def test_an_image_has_all_that_its_extras_need_and_no_tool_of_development(
    requirements: ModuleType, extras: tuple[str, ...]
) -> None:
    packages = part(requirements, *extras)
    assert needed("mmrouter-k8s", frozenset(extras), set()) <= set(packages)
    assert not {"pytest", "ruff", "mypy", "hypothesis", "openai", "torch", "vllm", "pip", "hatchling"} & set(packages)


@pytest.mark.parametrize("extras", [*EXTRAS, ("build",)])
def test_every_package_of_an_image_is_pinned_as_in_the_lock_with_its_hashes(
    requirements: ModuleType, extras: tuple[str, ...]
) -> None:
    lock = LOCK.read_text()
    for lines in part(requirements, *extras).values():
        assert re.match(r"[a-z0-9.-]+==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", lines)
        assert lines in lock


@pytest.mark.long_form
@pytest.mark.parametrize("extras", EXTRAS)
def test_every_package_of_an_image_has_a_wheel_for_arm64(
    requirements: ModuleType, extras: tuple[str, ...], tmp_path: Path
) -> None:
    """A machine of that architecture builds the release's image, from wheels alone."""
    locked = part(requirements, *extras)
    (tmp_path / "requirements.txt").write_text("\n".join(locked.values()))
    accepted = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 26, 27, 28)]
    python = ["--implementation=cp", "--python-version=3.11", "--abi=cp311", "--abi=abi3", "--abi=none"]
    chosen = ["--no-deps", "--only-binary=:all:", "--require-hashes", *python, *accepted]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", f"--dest={tmp_path}"]
    done = subprocess.run([*pip, *chosen, f"--requirement={tmp_path / 'requirements.txt'}"], check=False)
    if done.returncode != 0 and (why := unreached(sys.executable)):
        pytest.skip(f"not run: {why}")
    assert done.returncode == 0
    wheels = list(tmp_path.glob("*.whl"))
    assert len(wheels) == len(locked)
    heads = [head for wheel in wheels for head in modules(wheel)]
    assert {int.from_bytes(head[18:20], "little") for head in heads} == {AARCH64}


def modules(wheel: Path) -> Iterator[bytes]:
    """Yield the first bytes of each ELF file in a wheel."""
    with zipfile.ZipFile(wheel) as content:
        heads = (content.open(name).read(20) for name in content.namelist())
        yield from (head for head in heads if head.startswith(b"\x7fELF"))


def test_an_unknown_extra_is_refused(requirements: ModuleType) -> None:
    with pytest.raises(KeyError, match="nothing"):
        part(requirements, "nothing")


def test_the_machines_index_comes_to_the_build_as_a_secret_that_only_its_user_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = tmp_path / "authority.pem"
    authority.write_text("CERTIFICATE")
    monkeypatch.setenv("PIP_INDEX_URL", SECRET)
    monkeypatch.setenv("PIP_CERT", str(authority))
    with images.secrets() as file_of:
        content = file_of["pip"].read_text()
        assert file_of["ca"].read_text() == "CERTIFICATE"
        assert file_of["pip"].parent.stat().st_mode & 0o077 == 0
    assert not file_of["pip"].exists()
    assert f"index-url = {SECRET.replace('%', '%%')}\n" in content
    assert "cert = /run/secrets/ca\n" in content


def test_a_docker_without_a_daemon_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, status in (("docker", 1), ("buildah", 0)):
        command(tmp_path, name, f"echo no daemon >&2\nexit {status}")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MMROUTER_BUILDER", raising=False)
    assert images.builder(None).program == str(tmp_path / "buildah")
    (tmp_path / "buildah").unlink()
    with pytest.raises(
        images.CannotMakeError, match="docker has no daemon: no daemon; there is no podman; there is no b"
    ):
        images.builder(None)


@pytest.mark.parametrize("program", ["docker", "podman", "buildah"])
def test_each_builder_gets_stage_name_time_and_secrets(tmp_path: Path, program: str) -> None:
    log = tmp_path / "said"
    command(tmp_path, program, f'printf "%s\\n" "$DOCKER_BUILDKIT" "$@" >{log}')
    builder = images.BUILDERS[program](str(tmp_path / program), tmp_path / "layers")
    pip = tmp_path / "pip"
    builder.build("sim", "docker.io/mmrouter/sim:1", {"VERSION": "1"}, {"pip": pip}, "1700000000")
    buildkit, *argv = log.read_text().splitlines()
    assert argv[-1] == "."
    assert {"build", "--target=sim", "--tag=docker.io/mmrouter/sim:1", "--build-arg=VERSION=1"} <= set(argv)
    assert f"--secret=id=pip,src={pip}" in argv
    if program == "docker":  # by BuildKit, which takes the time as an argument and has layers of its own
        assert buildkit == "1"
        assert "--build-arg=SOURCE_DATE_EPOCH=1700000000" in argv
    else:
        assert {"--timestamp=1700000000", "--layers", f"--root={tmp_path / 'layers' / 'root'}"} <= set(argv)
    assert ("--isolation=chroot" in argv) == (program == "buildah")


@pytest.mark.long_form
def test_images_for_arm64_have_its_modules_alone_and_run_there(tmp_path: Path) -> None:
    """QEMU runs the build and the program; a release's images are built by a machine of that architecture."""
    for_arm64 = {"MMROUTER_ARCHITECTURE": "arm64"}
    base = str(Path(run_tool_or_skip("images.base_image", **for_arm64), "base.tar"))
    folders = f"--export={tmp_path / 'arm64'}", f"--storage={tmp_path / 'storage'}"
    run_tool_or_skip("images.build_images", *folders, MMROUTER_BASE_IMAGE=base, **for_arm64)
    for name, program in (("mmrouter", ["mmrouter", "--version"]), ("sim", ["vllm", "--help"])):
        root = tmp_path / name
        unpack(tmp_path / "arm64" / f"{name}.tar", root)
        files = [file for file in root.rglob("*") if file.is_file() and not file.is_symlink()]
        heads = [head for file in files if (head := first_bytes(file)).startswith(b"\x7fELF")]
        assert len(heads) > 50
        assert {int.from_bytes(head[18:20], "little") for head in heads} == {AARCH64}
        done = subprocess.run(["chroot", root, f"/opt/{name}/bin/{program[0]}", *program[1:]], capture_output=True)
        assert done.returncode == 0, done.stderr
        assert name == "sim" or done.stdout.decode().split()[-1] == images.version()


def unpack(archive: Path, root: Path) -> None:
    """Unpack the layers of an image. None of them removes a file of another."""
    root.mkdir()
    with tarfile.open(archive) as content:
        for layer in json.load(content.extractfile("manifest.json") or io.BytesIO())[0]["Layers"]:
            with tarfile.open(fileobj=content.extractfile(layer)) as files:
                files.extractall(root, filter="tar")


def first_bytes(file: Path) -> bytes:
    with file.open("rb") as content:
        return content.read(20)


@pytest.mark.long_form
def test_podman_builds_an_image_with_all_locked_packages_and_an_unprivileged_user(tmp_path: Path) -> None:
    """The level e2e builds with the first builder that works, and so not with podman beside a Docker daemon."""
    base = os.environ.get("MMROUTER_BASE_IMAGE") or str(Path(run_tool_or_skip("images.base_image"), "base.tar"))
    with tempfile.TemporaryDirectory(prefix="podman-") as storage:  # podman takes folders of at most 50 characters
        options = (f"--storage={storage}", f"--export={tmp_path}", "sim")
        run_tool_or_skip("images.build_images", *options, MMROUTER_BUILDER="podman", MMROUTER_BASE_IMAGE=base)
    archive = tmp_path / "sim.tar"
    assert images.name_in(archive) == f"docker.io/mmrouter/sim:{images.version()}"
    assert set(locked_names("sim", read_lock())) <= set(read_image(archive).python)
    with tarfile.open(archive) as content:
        manifest = json.load(content.extractfile("manifest.json") or io.BytesIO())
        config = json.load(content.extractfile(manifest[0]["Config"]) or io.BytesIO())["config"]
    assert config["User"] == "65532:65532"
    assert config["Labels"]["org.opencontainers.image.revision"] == images.git("rev-parse", "HEAD")


def test_the_base_is_pinned_by_digest() -> None:
    bases = re.findall(r"^ARG MMROUTER_BASE_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert len(bases) == 1
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+-slim-\w+@sha256:[0-9a-f]{64}", bases[0])


def test_an_archive_is_the_same_for_the_same_layer_and_names_its_image(tmp_path: Path) -> None:
    layer = tmp_path / "layer.tar"
    with tarfile.open(layer, "w") as out:
        out.addfile(tarfile.TarInfo("file"))
    made = [tmp_path / name for name in ("one.tar", "two.tar")]
    for archive in made:
        write_image(archive, layer, "localhost/it:1", {"Cmd": ["/bin/sh"]})
        os.utime(layer, (1, 1))
    assert made[0].read_bytes() == made[1].read_bytes()
    assert images.name_in(made[0]) == "localhost/it:1"


def test_an_index_has_the_image_of_each_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("buildah") is None:
        pytest.skip("not run: there is no buildah here")
    (tmp_path / "layer").touch()
    for architecture in ("amd64", "arm64"):
        monkeypatch.setenv("MMROUTER_ARCHITECTURE", architecture)
        (tmp_path / architecture).mkdir()
        write_image(tmp_path / architecture / "it.tar", tmp_path / "layer", "docker.io/team/it:1", {})
    join_all(str(tmp_path / "joined"), [tmp_path / "amd64", tmp_path / "arm64"])
    assert architectures_in(tmp_path / "joined" / "it.tar") == ["amd64", "arm64"]


@pytest.mark.parametrize("other", ["docker.io/team/it:2", None])
def test_images_that_do_not_belong_together_are_refused(tmp_path: Path, other: str | None) -> None:
    (tmp_path / "layer").touch()
    for folder, name in (("one", "docker.io/team/it:1"), ("two", other)):
        (tmp_path / folder).mkdir()
        if name:
            write_image(tmp_path / folder / "it.tar", tmp_path / "layer", name, {})
    with pytest.raises(FailedError, match="several names" if other else "the same archives"):
        join_all(str(tmp_path / "joined"), [tmp_path / "one", tmp_path / "two"])


def architectures_in(archive: Path) -> list[str]:
    """Return the architectures of an OCI archive's index."""
    with tarfile.open(archive) as content:

        def read(name: str) -> dict[str, Any]:
            found: dict[str, Any] = json.load(content.extractfile(name) or io.BytesIO())
            return found

        (index,) = read("index.json")["manifests"]
        images = read(f"blobs/sha256/{index['digest'].partition(':')[2]}")["manifests"]
    return [image["platform"]["architecture"] for image in images]


def test_an_images_labels_are_written_out_so_that_no_cache_has_those_of_another_commit() -> None:
    whole = (ROOT / "Dockerfile").read_text()
    for revision in ("a" * 40, "b" * 40):
        made = images.labelled(whole, {"VERSION": "1.2.3", "REVISION": revision})
        assert len(re.findall(rf'image\.revision="{revision}"', made)) == 2
        assert len(re.findall(r'image\.version="1\.2\.3"', made)) == 2
        assert "FROM ${MMROUTER_BASE_IMAGE}" in made


def test_a_stripped_module_is_smaller_and_loads(tmp_path: Path) -> None:
    whole = Path(uvloop.loop.__file__)
    module = tmp_path / whole.name
    module.write_bytes(stripped(whole.read_bytes()))
    assert module.stat().st_size < whole.stat().st_size / 2
    code = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("uvloop.loop", {str(module)!r})
loop = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loop)
print(loop.Loop().time() > 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
    assert stripped(module.read_bytes()) == module.read_bytes()


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01"])
def test_what_is_no_64_bit_elf_file_stays_as_it_is(content: bytes) -> None:
    assert stripped(content) == content
