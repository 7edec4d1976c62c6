"""The janitors of two pods of one node, as the processes that they are: hand-overs between processes that are killed.

Writers, readers and a janitor are killed with -9. Every hand-over is read as it was written or falls back, and what the
processes leave is removed by the janitors alone.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from local.rig import metric
from long_form import IS_LONG
from waiting import answers_ok, wait_for

from bench.feed.fake_sidecars import Curve
from handover.tests.shm.test_soak import FELL_BACK, READ, Soak
from handover.tests.support import bytes_below, shared_root

HAND_OVERS, KILLS = (1000, 100) if IS_LONG else (200, 20)
JANITOR_KILLS = [HAND_OVERS * tenths // 10 for tenths in (2, 5, 8)]
HANG_SECONDS = 20.0
STARTED_SECONDS = 30
ADDRESS = "127.87.{}.{}"


class Sidecar:
    """One pod's sidecar: a process with files and variables as a pod has them."""

    def __init__(self, folder: Path, shared: Path, number: int) -> None:
        self.ip = ADDRESS.format(os.getpid() % 250, number)
        self.uid = f"pod-{number}"
        self._env = {
            **os.environ,
            "MMROUTER_CONFIG": str(folder / "config"),
            "MMROUTER_STATE_DIR": str(folder / self.uid),
            "MMROUTER_POOL": "worker",
            "MMROUTER_SHARED_DIR": str(shared),
            "MMROUTER_SHARED_LIMIT_BYTES": str(1 << 30),
            "POD_UID": self.uid,
            "POD_IP": self.ip,
            "POD_LOOPBACK": self.ip,
        }
        self._log = (folder / f"{self.uid}.log").open("a")
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-m", "mmrouter_sidecar"], env=self._env, stderr=self._log)

    def answers(self) -> bool:
        assert self.process.poll() is None, Path(self._log.name).read_text()
        return answers_ok(f"http://{self.ip}:9090/healthz")

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        try:
            return self.process.wait(STARTED_SECONDS)
        finally:
            self._log.flush()


def configure(folder: Path) -> None:
    """Write what every pod of a deployment is given."""
    pool = {"name": "worker", "role": "worker", "accelerator": {"kind": "nvidia"}, "sharedMemory": {"scope": "node"}}
    spec = {"model": {"id": "org/model"}, "engine": {"type": "vllm"}, "pools": [pool]}
    kind = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment"}
    resource = {**kind, "metadata": {"name": "vl"}, "spec": spec}
    secrets = {"identity.key": bytes(range(32)), "engine.key": b"secret"}
    Curve.fresh().write_config(folder / "config", resource, secrets)


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_root() as folder:
        yield folder


@pytest.fixture
def sidecars(tmp_path: Path, shared: Path) -> Iterator[Callable[[int], Sidecar]]:
    """Starts the sidecar of one more pod of the node; it answers when this returns."""
    configure(tmp_path)
    started: list[Sidecar] = []

    def start(number: int) -> Sidecar:
        started.append(Sidecar(tmp_path, shared, number))
        wait_for(started[-1].answers, STARTED_SECONDS, f"the sidecar of {started[-1].uid} answers")
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def test_hand_overs_between_processes_that_are_killed_leave_no_byte_and_fail_nothing(
    shared: Path, sidecars: Callable[[int], Sidecar]
) -> None:
    one, two = sidecars(1), sidecars(2)
    numbers = iter(range(HAND_OVERS))

    def after_each(_: bool) -> None:
        if next(numbers) in JANITOR_KILLS:
            two.stop(signal.SIGKILL)
            two.start()

    with closing(Soak(shared, "1")) as hand_overs:
        hand_overs.run(HAND_OVERS, KILLS, after_each)
        assert hand_overs.outcomes[READ] > HAND_OVERS // 2, hand_overs.outcomes
        assert hand_overs.outcomes[FELL_BACK] >= HAND_OVERS // 7, hand_overs.outcomes
    wait_for(lambda: not bytes_below(shared), HANG_SECONDS, "the janitors have cleared what dead processes left")
    wait_for(two.answers, STARTED_SECONDS, "the janitor that was killed is back")
    assert metric(one.ip, "mmrouter_sidecar_shm_reclaimed_total", reason="dead_writer") > 0
    assert [metric(each.ip, "mmrouter_sidecar_shm_errors_total") for each in (one, two)] == [0, 0]
    assert one.stop() == 0
    assert os.listdir(shared) == [f"sidecar-{two.uid}"]
    assert two.stop() == 0
    assert os.listdir(shared) == []


def test_what_the_last_pod_of_a_node_left_is_gone_before_the_next_ones_sidecar_answers(
    shared: Path, sidecars: Callable[[int], Sidecar]
) -> None:
    """The kubelet starts an engine when its sidecar answers."""
    with closing(Soak(shared, "2")) as hand_overs:
        hand_overs.run(10, 1, lambda _: None)
    (shared / "m1-aa").mkdir()
    (shared / "m1-aa" / "encoder_cache.safetensors").write_bytes(bytes(1 << 20))
    assert bytes_below(shared) > 1 << 20
    sidecars(3)
    assert bytes_below(shared) == 0
