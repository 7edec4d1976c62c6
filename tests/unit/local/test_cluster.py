"""A whole run: Services, discovery, the run folder, two runs side by side, and an end that leaves nothing."""

import asyncio
import errno
import json
import os
import signal
import socket
import stat
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from unit.local.conftest import alive, ask

from mmrouter_cli.local import cluster as local_cluster
from mmrouter_cli.local.cluster import write_atomically
from mmrouter_cli.local.folders import SHM, LocalError, make_folders, run_root
from mmrouter_cli.local.pods.container_process import engine_commands, inherited_env

FRONTEND = {"mmrouter.io/role": "frontend"}


async def who(url: str) -> str:
    return str((await ask(url))["env"]["POD_IP"])


async def test_a_service_takes_ready_pods_in_turn_and_the_next_one_where_one_is_gone(run: Any, kit: Any) -> None:
    async with run(kit.deployment("web", kit.server(), replicas=3), kit.service("web")) as cluster:
        assert cluster.endpoint.endswith(":8801")
        counts = Counter([await who(cluster.endpoint) for _ in range(6)])
        assert counts == Counter({pod.ip: 2 for pod in cluster.pods})
        victim = cluster.pods[0]
        os.kill(victim.pids["web"], signal.SIGKILL)
        # No request fails: not before the death is noticed, not after, not when the pod comes back.
        for _ in range(30):
            assert await who(cluster.endpoint) != victim.ip or victim.container("web").restarts == 1
        await cluster.wait_ready(10)
        assert {await who(cluster.endpoint) for _ in range(3)} == {pod.ip for pod in cluster.pods}


async def test_a_service_without_a_ready_pod_resets_the_connection(run: Any, kit: Any) -> None:
    async with run(kit.deployment("web", kit.server(), replicas=0), kit.service("web")) as cluster:
        with pytest.raises(aiohttp.ClientError):
            await who(cluster.endpoint)


async def test_bytes_pass_both_ways_and_a_broken_side_breaks_the_other(run: Any, kit: Any) -> None:
    """A stream that is cut must not look like one that ended well."""
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.readexactly(3)
        writer.write(data * 100_000)
        await writer.drain()
        await reader.read()
        gone.set()
        writer.close()

    async with run(kit.deployment("web", kit.server()), kit.service("web", target=8899)) as cluster:
        backend = await asyncio.start_server(serve, cluster.pods[0].ip, 8899)
        host, port = cluster.endpoint.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"abc")
        assert await reader.readexactly(300_000) == b"abc" * 100_000
        writer.close()
        async with asyncio.timeout(15):
            await gone.wait()  # the backend learns at once that its client has left
        backend.close()


async def test_frontends_learn_who_is_there_and_ready(run: Any, kit: Any) -> None:
    worker = {"mmrouter.io/pool": "big", "mmrouter.io/role": "worker"}
    config = {"volumes": [{"name": "config", "emptyDir": {}}]}
    ports = [{"name": "http", "containerPort": 8800}, {"name": "control", "containerPort": 8802}]
    front = kit.server(ports=ports, volumeMounts=[{"name": "config", "mountPath": "/etc/mmrouter"}])
    objects = [
        kit.deployment("web", kit.server(), replicas=2, labels=worker),
        kit.deployment("front", front, replicas=2, labels=FRONTEND, **config),
    ]
    async with run(*objects) as cluster:
        files = [pod.volumes["config"] / "workers.json" for pod in cluster.pods[2:]]
        texts = [json.loads(file.read_text()) for file in files]
        assert texts[0] == texts[1]
        first = cluster.pods[0]
        named = {"uid": first.plan.uid, "name": "web-0", "ip": first.ip, "node": "local", "compatibility": ""}
        state = {"pool": "big", "role": "worker", "ready": True, "draining": False, "tls": False}
        assert texts[0]["workers"][0] == {**named, **state}
        assert [f["name"] for f in texts[0]["frontends"]] == ["front-0", "front-1"]
        os.kill(first.pids["web"], signal.SIGKILL)
        await cluster.wait_until(lambda: not first.ready, 60)  # the bound only ends a hang
        assert [w["ready"] for w in json.loads(files[1].read_text())["workers"]] == [False, True]
        assert [f.control for f in cluster.frontends] == [f"http://{pod.ip}:8802" for pod in cluster.pods[2:]]


async def test_a_pod_is_restarted_and_reported_though_the_disk_is_full(
    run: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True

    def write(path: Path, text: str) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(path, text)

    monkeypatch.setattr(local_cluster, "RETRY_SECONDS", 0.05)
    config = {"volumes": [{"name": "config", "emptyDir": {}}]}
    front = kit.server(volumeMounts=[{"name": "config", "mountPath": "/etc/mmrouter"}])
    worker = {"mmrouter.io/pool": "big", "mmrouter.io/role": "worker"}
    objects = [
        kit.deployment("web", kit.server(), labels=worker),
        kit.deployment("front", front, labels=FRONTEND, **config),
    ]
    async with run(*objects) as cluster:
        pod, file = cluster.pods[0], cluster.pods[1].volumes["config"] / "workers.json"
        before = file.read_text()
        monkeypatch.setattr(local_cluster, "write_atomically", write)
        os.kill(pod.pids["web"], signal.SIGKILL)
        await cluster.wait_until(lambda: not pod.ready, 60)
        await cluster.wait_until(lambda: pod.ready, 60)
        assert file.read_text() == before
        full = False
        os.kill(pod.pids["web"], signal.SIGKILL)
        await cluster.wait_until(lambda: not pod.ready, 60)
        assert not json.loads(file.read_text())["workers"][0]["ready"]


async def test_a_run_describes_itself_while_it_lasts_and_leaves_nothing(run: Any, kit: Any, root: Path) -> None:
    shm = [{"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "config", "emptyDir": {}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "config", "mountPath": "/etc/mmrouter"}]
    pod = kit.deployment("web", kit.server(volumeMounts=mounts), labels=FRONTEND, volumes=shm)
    async with run(pod, kit.service("web", **FRONTEND), name="demo") as cluster:
        (file,) = run_root().glob("*/run.json")
        assert file.parent.name == f"demo-{os.getpid()}"
        assert run_root() == root / f"mmrouter-{os.getuid()}"
        described = json.loads(file.read_text())
        assert (described["deployment"], described["pid"]) == ("demo", os.getpid())
        assert described["endpoint"] == cluster.endpoint
        assert described["frontends"][0]["url"] == f"http://{cluster.pods[0].ip}:8800"
        assert described["control_token"] == str(cluster.pods[0].volumes["config"] / "secrets" / "control.token")
        assert {stat.S_IMODE(folder.stat().st_mode) for folder in (run_root(), file.parent)} == {0o700}
        tmpfs = cluster.pods[0].volumes["shm"]
        assert tmpfs.is_relative_to(SHM)
        (tmpfs / "big").write_bytes(b"x")
        pids = [pid for pid in cluster.pods[0].pids.values() if pid]
    assert not run_root().exists()
    assert not tmpfs.exists()
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_two_runs_stand_side_by_side_with_the_same_ports(run: Any, kit: Any) -> None:
    objects = [kit.deployment("web", kit.server()), kit.service("web")]
    async with run(*objects) as one, run(*objects) as two:
        assert one.endpoint != two.endpoint
        assert one.run_dir != two.run_dir
        assert await who(one.endpoint) == one.pods[0].ip
        assert await who(two.endpoint) == two.pods[0].ip


async def test_a_port_that_is_taken_everywhere_is_named(run: Any, kit: Any) -> None:
    message = "port 8803 is taken by a process that listens on all addresses"
    with socket.create_server(("0.0.0.0", 8803)), pytest.raises(LocalError, match=message):
        async with run(kit.deployment("web", kit.server(port=8803))):
            pytest.fail("started")


SCRIPT = """
import asyncio, json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import container, deployment
from mmrouter_cli.local.cluster import run_local

async def main():
    web = container("web", "children", volumeMounts=[{"name": "shm", "mountPath": "/dev/shm"}])
    pod = deployment("web", web, volumes=[{"name": "shm", "emptyDir": {"medium": "Memory"}}])
    async with run_local([pod], base_dir=Path("."), log=lambda source, line: None) as cluster:
        await cluster.wait_ready(10)
        print(json.dumps([str(cluster.run_dir), str(cluster.pods[0].volumes["shm"].parent)]), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_killed_run_leaves_no_process_and_no_file(root: Path) -> None:
    """Also processes that left their group: after SIGKILL only the guard can clean up."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, str(Path(__file__).parent), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    folders = [Path(text) for text in json.loads(await process.stdout.readline())]
    family: list[int] = []
    async with asyncio.timeout(10):
        while len(family) < 4:  # the guard, the container and its two children
            family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            await asyncio.sleep(0.01)
    assert all(folder.exists() for folder in folders)
    process.kill()
    await process.wait()
    async with asyncio.timeout(10):
        while any(map(alive, family)) or any(folder.exists() for folder in folders):
            await asyncio.sleep(0.02)
    assert list(root.iterdir()) == []


def test_the_next_run_removes_what_a_dead_one_left(root: Path) -> None:
    """The guard may have been killed, too."""
    run_root().mkdir(mode=0o700)
    stale = run_root() / "demo-4194305"  # above the largest process id
    stale.mkdir()
    (stale / "run.json").touch()
    folders = make_folders("a-name-of-more-than-twenty-letters")
    try:
        assert not stale.exists()
        assert folders.run.name == f"a-name-of-more-than--{os.getpid()}"
        again = make_folders("a-name-of-more-than-twenty-letters")
        assert again.run != folders.run
    finally:
        for path in (folders.tmpfs, again.tmpfs):
            path.rmdir()


def test_a_root_that_others_can_read_is_refused(root: Path) -> None:
    run_root().mkdir(mode=0o755)
    run_root().chmod(0o755)
    with pytest.raises(LocalError, match="is not a private folder of this user"):
        make_folders("demo")


def test_commands_mean_this_interpreter_the_simulator_or_an_environment(tmp_path: Path) -> None:
    simulated = engine_commands("sim", None, tmp_path / "bin")
    assert simulated.resolve("mmrouter", {}) == [sys.executable, "-m", "mmrouter_cli"]
    for engine in ("vllm", "sglang"):
        assert simulated.resolve(engine, {"PATH": "/nowhere"}) == [str(tmp_path / "bin" / engine)]
    with pytest.raises(LocalError, match=r"^there is no command trtllm in /nowhere$"):
        simulated.resolve("trtllm", {"PATH": "/nowhere"})
    with pytest.raises(LocalError, match="add --engines path"):
        engine_commands("sim", tmp_path, tmp_path / "bin")
    with pytest.raises(LocalError, match="has no folder bin"):
        engine_commands("path", tmp_path / "none", tmp_path / "bin")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    real = tmp_path / "venv" / "bin" / "vllm"
    real.touch(mode=0o755)
    assert engine_commands("path", tmp_path / "venv", tmp_path).resolve("vllm", {}) == [str(real)]
    assert engine_commands("path", None, tmp_path).resolve("vllm", {"PATH": str(real.parent)}) == [str(real)]
    with pytest.raises(LocalError, match="name the environment that has it with --engine-env"):
        engine_commands("path", None, tmp_path).resolve("vllm", {"PATH": "/nowhere"})


def test_an_engine_that_is_started_by_python_has_the_python_and_the_command_of_its_environment(tmp_path: Path) -> None:
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "python3").touch(mode=0o755)
    real = engine_commands("path", tmp_path / "venv", tmp_path)
    assert real.resolve("python3", {"PATH": "/usr/bin"}) == [str(folder / "python3")]
    assert real.path({"PATH": "/usr/bin"}) == f"{folder}:/usr/bin"
    simulated = engine_commands("sim", None, tmp_path / "sim")
    assert simulated.resolve("python3", {"PATH": "/nowhere"}) == [sys.executable]
    assert simulated.path({"PATH": "/usr/bin"}) == f"{tmp_path / 'sim'}:/usr/bin"
    assert engine_commands("path", None, tmp_path).path({"PATH": "/usr/bin"}) == "/usr/bin"


def test_nothing_private_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("MMROUTER_SIM_SPEED", "10")
    env = inherited_env()
    assert "OPENAI_API_KEY" not in env
    assert env["MMROUTER_SIM_SPEED"] == "10"
    assert "PATH" in env
