"""The README's tour of a cluster, command by command, on that of `make cluster` or of ``MMROUTER_KUBECONFIG``."""

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from artefacts import Record, go_programs
from chart.helm import NAMESPACE, RELEASE, Helm
from cluster.access import Access, existing
from doc_commands import tour
from e2e.conftest import ROOT
from e2e.node import Programs
from e2e.one_node_cluster import kept, sourced
from e2e.report import OPERATOR, Dumps, Place
from waiting import wait_for

from mmrouter_cli.local.process import Guard

STAND = ROOT / "tests" / "e2e" / "one_node_cluster.py"
ELSEWHERE = ("make ", "kind ", "source ")
"""What makes a cluster: the fixture, or the steps of `make kind`."""
TAKEN_AS_RUN = "x-mmrouter-request-id: (\\S+)"
STAND_SECONDS, COMMAND_SECONDS, STOP_SECONDS = 180, 150, 120


@pytest.fixture
def sourced_file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The file that a shell sources for the cluster."""
    if not os.environ.get("MMROUTER_KUBECONFIG"):
        yield request.getfixturevalue("one_node")
        return
    cluster: Access = request.getfixturevalue("cluster")
    helm = go_programs("helm")
    if Helm(helm / "helm", tmp_path, cluster.kubeconfig).run("status", RELEASE, f"-n={NAMESPACE}").returncode == 0:
        pytest.skip("not run: the cluster has the release that the tour installs")
    with sourced(tmp_path / "build" / "cluster.sh", cluster.kubeconfig, [cluster.bin, helm]):
        yield tmp_path / "build" / "cluster.sh"


@pytest.fixture
def one_node(images: list[Path], programs: Programs, tmp_path: Path, record: Record, dumps: Dumps) -> Iterator[Path]:
    """The file that `make cluster` writes; afterwards ctrl-C has ended it."""
    file, log, logs = tmp_path / "build" / "cluster.sh", tmp_path / "said" / "stand.log", tmp_path / "logs"
    log.parent.mkdir()
    command = [sys.executable, str(STAND), f"--images={images[0].parent}", f"--env={file}", f"--logs={logs}"]
    # A failed test's report covers this cluster, too; after its end only by its logs.
    place = dumps.places["tour"] = Place((log.parent, logs), None, ("default", OPERATOR))
    began = time.monotonic()
    # Without the guard's mark in its environment, by which the guard would find and kill the cluster's own guard, too.
    guard = Guard(uuid.uuid4().hex)
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    guard.send(f"+{process.pid}")
    asking = ExitStack()
    try:
        wait_for(lambda: file.is_file() or process.poll() is not None, STAND_SECONDS, "the cluster stands", every=0.1)
        assert process.poll() is None, log.read_text()
        record("tour: make cluster, images built before, s", round(time.monotonic() - began, 1))
        found = re.search(r"KUBECONFIG=(.+)", file.read_text())
        assert found, file.read_text()
        kubeconfig = Path(shlex.split(found[1])[0])
        (tmp_path / "asked").mkdir()
        place.cluster = asking.enter_context(existing(tmp_path / "asked", programs.kube, kubeconfig))
        place.logs = (log.parent, kubeconfig.parent / "log")
        yield file
    finally:
        asking.close()
        place.cluster, place.logs = None, (log.parent, logs)
        process.send_signal(signal.SIGINT)
        status = process.wait(STOP_SECONDS)
        asyncio.run(guard.close())
    assert (status, file.exists()) == (0, False), log.read_text()
    del dumps.places["tour"]


def test_the_logs_of_an_ended_cluster_are_kept_in_the_requested_folder(tmp_path: Path) -> None:
    logs, where = tmp_path / "run" / "log", tmp_path / "kept"
    with kept(logs, where):  # it did not come as far as having any
        pass
    assert not where.exists()
    logs.mkdir(parents=True)
    with suppress(KeyboardInterrupt), kept(logs, where):
        (logs / "etcd.log").write_text("no room")
        raise KeyboardInterrupt
    assert (where / "etcd.log").read_text() == "no room"


@pytest.fixture
def start(sourced_file: Path, tmp_path: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Start a command in a shell of its own; what still runs after the test is ended."""
    running: list[subprocess.Popen[str]] = []

    def do(command: str) -> "subprocess.Popen[str]":
        typed = command.replace(".venv/bin/mmrouter", f"{sys.executable} -m mmrouter_cli").removesuffix("&")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KUBE", "HELM_"))}
        process = subprocess.Popen(
            ["bash", "-c", f"source {sourced_file}\n{typed}"],
            cwd=ROOT,
            env={**kept, "HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        return process

    yield do
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.communicate()


def run_in_order(
    start: Callable[[str], "subprocess.Popen[str]"], commands: list[str], record: Record
) -> dict[str, str]:
    """Run commands one after the other, those that end with ``&`` beside the others; return what each printed.

    ``REQUEST_ID`` stands for the id of the last answer. Raises ``AssertionError`` with the output of one that fails.
    """
    outputs: dict[str, str] = {}
    request_id = ""
    for command in commands:
        began = time.monotonic()
        process = start(command.replace("REQUEST_ID", request_id))
        if command.endswith("&"):
            continue
        outputs[command], _ = process.communicate(timeout=COMMAND_SECONDS)
        assert process.returncode == 0, f"{command}\n{outputs[command]}"
        record(f"{command.splitlines()[0][:70]}, s", round(time.monotonic() - began, 1))
        if found := re.search(TAKEN_AS_RUN, outputs[command]):
            request_id = found[1]
    return outputs


def test_every_command_of_the_tour_succeeds_in_its_order(
    start: Callable[[str], "subprocess.Popen[str]"], record: Record
) -> None:
    outputs = run_in_order(start, [command for command in tour() if not command.startswith(ELSEWHERE)], record)
    (chat,) = (text for command, text in outputs.items() if command.startswith("curl"))
    assert "HTTP/1.1 200 OK" in chat
    (shown,) = (text for command, text in outputs.items() if command == "kubectl get mmrd")
    # The share of exact decisions is empty while there are none; a command before has waited until they are proved.
    assert re.search(r"^demo +vllm +1/1 +True +(1\.000 +([\d.]+ +)?)?\d+\w+$", shown, re.MULTILINE), shown
