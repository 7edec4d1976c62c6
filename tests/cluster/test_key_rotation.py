"""`mmrouter rotate-keys` on a cluster: the Secret changes in steps, the pods follow, and none restarts."""

import base64
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.controlplane import ControlPlane
from cluster.load import load
from cluster.operators import mmrouter
from cluster.resources import condition
from waiting import wait_for

from mmrouter_cli.local.folders import run_root

PERIOD_SECONDS = 0.3


def entries(plane: ControlPlane, namespace: str) -> dict[str, bytes]:
    secret = plane.read(f"/api/v1/namespaces/{namespace}/secrets/demo-secrets")
    return {name: base64.b64decode(value) for name, value in secret["data"].items()}


@contextmanager
def mounts_followed(plane: ControlPlane, namespace: str) -> Iterator[None]:
    """Keep the Secret's files of the namespace's pods as the Secret is, as a kubelet does; one pod per period."""
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(PERIOD_SECONDS):
            data = entries(plane, namespace)
            for place in stale(data)[:1]:
                for file in place.iterdir():
                    if file.name in data and file.read_bytes() != data[file.name]:
                        fresh = file.with_name(f".{file.name}")
                        fresh.write_bytes(data[file.name])
                        fresh.rename(file)

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def stale(data: dict[str, bytes]) -> list[Path]:
    """Return the folders with files of a Secret that differ from it."""
    runs = run_root().glob(f"*-{os.getpid()}")  # of this process: others end meanwhile
    files = (path for run in runs for path in run.rglob("secrets/identity.key"))
    own = [path.parent for path in files if path.read_bytes() == data["identity.key"]]
    return [place for place in own if any(data.get(file.name) != file.read_bytes() for file in place.iterdir())]


def containers(plane: ControlPlane, namespace: str) -> dict[str, list[tuple[str, int]]]:
    """Return pod uid -> containers and their restarts."""
    found: dict[str, Any] = {}
    for pod in plane.pods(namespace, deployment="demo"):
        statuses = [*pod["status"].get("initContainerStatuses", ()), *pod["status"]["containerStatuses"]]
        found[pod["metadata"]["uid"]] = sorted((one["name"], one["restartCount"]) for one in statuses)
    return found


def test_keys_rotate_under_load_without_a_restart_or_a_failed_request(real: ControlPlane, proved: str) -> None:
    before, pods = entries(real, proved), containers(real, proved)
    with load(real, proved, "demo") as seen, mounts_followed(real, proved):
        done = mmrouter(real, "rotate-keys", "demo", "-n", proved)
        assert (done.returncode, done.stdout.split()) == (0, ["introduce", "switch", "retire"]), done.stderr
        wait_for(lambda: not stale(entries(real, proved)), 30, "the last step is mounted")
        answered = seen.answered
        wait_for(lambda: seen.answered > answered + 10, 30, "requests are answered after it")
    assert seen.failures == []
    assert seen.exact == seen.answered
    after = entries(real, proved)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f"{side}.curve.{half}" for side in ("router", "sidecar") for half in ("public", "secret")}
    assert containers(real, proved) == pods
    assert condition(real, "Progressing", proved)["status"] == "False"


def test_a_deployment_without_a_secret_is_named(real: ControlPlane, proved: str) -> None:
    done = mmrouter(real, "rotate-keys", "missing", "-n", proved)
    refusal = f"mmrouter: there is no Secret missing-secrets in namespace {proved}\n"
    assert (done.returncode, done.stderr) == (1, refusal)
