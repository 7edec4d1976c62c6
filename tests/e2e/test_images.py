"""Images hold bytecode and labels and run as an unprivileged user; how fast a sidecar starts is recorded."""

import json
import re
import tarfile
import tomllib
from pathlib import Path

import pytest
from artefacts import Record
from e2e.conftest import NAMESPACE, ROOT, Deployed

from hack.supply_chain.bill_of_materials import OWN, bill, locked_names, read_lock
from hack.supply_chain.image_content import read_image

TITLES = {"mmrouter": "mmrouter", "sim": "mmrouter-sim"}
MOST_MB = {"mmrouter": 220, "sim": 200}
TRIES = 4
# A second sidecar in the container of the first, on another address that neither engine nor routers use.
START = f"""\
import os, subprocess, time, urllib.request
there = {{"POD_IP": "127.0.0.2", "POD_LOOPBACK": "127.0.0.2", "MMROUTER_STATE_DIR": "/var/lib/mmrouter/state/again"}}
for _ in range({TRIES}):
    began = time.monotonic()
    process = subprocess.Popen(["mmrouter", "sidecar"], env=os.environ | there, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            urllib.request.urlopen("http://127.0.0.2:9090/readyz").read()
            break
        except OSError:
            time.sleep(0.005)
    print(time.monotonic() - began, process.poll())
    process.terminate()
    process.wait()
"""
# Python says of each module that it loads where its code came from.
LOADED = """\
import subprocess, sys
said = subprocess.run([sys.executable, "-v", "-c", f"import {sys.argv[1]}"], capture_output=True, text=True).stderr
print(*(line for line in said.splitlines() if line.startswith("# code object from")), sep="\\n")
"""
IMPORT = "import sys, time; began = time.monotonic(); __import__(sys.argv[1]); print(time.monotonic() - began)"
COMMANDS = {
    "mmrouter sidecar": ("worker", "sidecar", "mmrouter_sidecar.app"),
    "mmrouter router": ("frontend", "router", "mmrouter_router.__main__"),
    "mmrouter verify": ("frontend", "router", "mmrouter_cli.app"),
    "mmrouter operator": ("frontend", "router", "mmrouter_operator.__main__"),
    "vllm of sim": ("worker", "engine", "mmrouter_sim.server"),
}
"""Command -> where its image runs (role, container), and the module that its process imports before anything else."""


def ran(deployed: Deployed, role: str, container: str, code: str, *arguments: str) -> list[str]:
    pod = deployed.pods(role)[0]["metadata"]["name"]
    done = deployed.execute(pod, container, "python3", "-c", code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_sidecar_becomes_ready_and_its_start_is_timed(deployed: Deployed, record: Record) -> None:
    tries = [line.split() for line in ran(deployed, "worker", "sidecar", START)]
    assert [status for _, status in tries] == ["None"] * TRIES
    seconds = min(float(text) for text, _ in tries)  # other load only adds
    record("sidecar ready after its start, s", round(seconds, 2))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_modules_of_a_command_are_bytecode_already(deployed: Deployed, record: Record, command: str) -> None:
    role, container, module = COMMANDS[command]
    loaded = ran(deployed, role, container, LOADED, module)
    assert len(loaded) > 100
    assert [line for line in loaded if not line.endswith((".pyc", ".pyc'"))] == []
    seconds = min(float(ran(deployed, role, container, IMPORT, module)[0]) for _ in range(3))
    record(f"import of {command}, s", round(seconds, 2))


def test_the_operators_pods_run_the_same_image(deployed: Deployed) -> None:
    items = deployed.cluster.read(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    operators = {pod["status"]["containerStatuses"][0]["imageID"] for pod in items}
    frontends = {pod["status"]["containerStatuses"][0]["imageID"] for pod in deployed.pods("frontend")}
    assert operators == frontends


def test_the_images_carry_their_labels_and_run_unprivileged(images: list[Path], revision: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    expected = {
        "version": project["version"],
        "revision": revision,
        "licenses": project["license"],
        "source": project.get("urls", {}).get("Source"),
    }
    assert {archive.stem for archive in images} == set(TITLES)
    for archive in images:
        with tarfile.open(archive) as content:
            found = content.extractfile("manifest.json")
            assert found is not None
            config = content.extractfile(json.load(found)[0]["Config"])
            assert config is not None
            image = json.load(config)
        labels = image["config"]["Labels"]
        actual = {name: labels.get(f"org.opencontainers.image.{name}") for name in (*expected, "title")}
        assert actual == {**expected, "title": TITLES[archive.stem]}
        assert image["config"]["User"] == "65532:65532"
        # The build's secrets are in no step of the image's history.
        assert not any("index-url" in json.dumps(step) for step in image["history"])


def test_the_images_keep_to_their_sizes(images: list[Path]) -> None:
    sizes = {archive.stem: archive.stat().st_size / 1e6 for archive in images}  # their layers are not compressed
    assert {name: size for name, size in sizes.items() if size > MOST_MB[name]} == {}


def test_an_image_holds_what_its_bill_of_materials_lists(images: list[Path]) -> None:
    for archive in images:
        content = read_image(archive)
        listed = bill(archive.stem, archive)["components"]
        python, debian = (
            {each["name"]: each["version"] for each in listed if each["purl"].startswith(f"pkg:{kind}/")}
            for kind in ("pypi", "deb")
        )
        assert {name: version for name, version in content.python.items() if name not in OWN} == python
        assert {name: package.version for name, package in content.debian.items()} == debian
        assert {"libc6", "base-files"} <= set(content.debian)
        assert re.fullmatch(r"[a-z]+-[0-9.]+", content.release)
        # Without the archive, the same dependencies: nothing is installed that the lock's part does not name.
        assert set(locked_names(archive.stem, read_lock())) <= set(content.python)
