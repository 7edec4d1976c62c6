"""Pods as processes: order, probes, environment, volumes, restarts."""

import asyncio
import json
import os
import signal
import stat
import sys
from contextlib import ExitStack
from mmap import mmap
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import psutil
import pytest
from unit.local.conftest import alive, ask

from mmrouter_cli.local.cleanup_guard import objects, shared_memory
from mmrouter_cli.local.devices import DeviceRequest
from mmrouter_cli.local.folders import SHM, LocalError
from mmrouter_cli.local.pods.pod_processes import VAIN_STARTS, VainError
from mmrouter_lib.engines.launchers import LAUNCHERS

VLLM = LAUNCHERS["vllm"]


async def test_init_then_sidecar_then_container_each_when_the_one_before_is_up(run: Any, kit: Any, log: Any) -> None:
    volume = [{"name": "v", "mountPath": "/v"}]
    prepare = kit.container("prepare", "write", "/v/prepared", "yes", volumeMounts=volume)
    startup = {"httpGet": {"path": "/", "port": 8810}, "periodSeconds": 1}
    sidecar = {
        **kit.container("sidecar", "$(POD_IP)", "8810", volumeMounts=volume),
        "restartPolicy": "Always",
        "startupProbe": startup,
    }
    main = kit.container("main", "check-then-sleep", "/v/prepared", volumeMounts=volume)
    pod = kit.deployment("web", main, initContainers=[prepare, sidecar], volumes=[{"name": "v", "emptyDir": {}}])
    async with run(pod) as cluster:
        (web,) = cluster.pods
        assert (web.container("main").restarts, web.container("sidecar").restarts) == (0, 0)
        assert web.pids["prepare"] is None
        born = {name: psutil.Process(pid).create_time() for name, pid in web.pids.items() if pid}
        assert born["sidecar"] < born["main"]
        assert log.of("web-0/sidecar") == [f"listening on {web.ip}:8810"]


async def test_a_container_sees_its_pod_and_its_files_at_the_places_of_this_machine(
    run: Any, kit: Any, tmp_path: Path
) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    template = {"configMap": {"name": "c", "items": [{"key": "t", "path": "deployment.json"}]}}
    key = {"secret": {"name": "s", "items": [{"key": "k", "path": "secrets/key"}]}}
    volumes = [
        {"name": "config", "projected": {"sources": [template, key]}},
        {"name": "keys", "secret": {"secretName": "s"}},
        {"name": "model", "hostPath": {"path": "models/tiny"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "tmp", "emptyDir": {}},
    ]
    # The server is this interpreter by its path, so a mount over a checkout below /tmp would move it.
    tmp = "/var/lib/mine" if sys.executable.startswith("/tmp/") else "/tmp"
    mounts = [
        {"name": "config", "mountPath": "/etc/mmrouter"},
        {"name": "keys", "mountPath": "/etc/mmrouter/api-keys"},
        {"name": "model", "mountPath": "/var/lib/model", "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": tmp, "subPath": "mine"},
    ]
    env = [
        {"name": "CONFIG", "value": "/etc/mmrouter"},
        {"name": "CACHE", "value": f"{tmp}/cache"},
        {"name": "TWICE", "value": "$(CACHE)/more"},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "POD_LOOPBACK", "value": "127.0.0.1"},
    ]
    web = kit.server(env=env, volumeMounts=mounts)
    web["args"] += ["--model=/var/lib/model", "--shm", "/dev/shm", "$(CACHE)", '{"bind":"tcp://$(POD_LOOPBACK):1"}']
    objects = [
        {"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"t": "{}"}},
        {"kind": "Secret", "metadata": {"name": "s"}, "stringData": {"k": "hidden"}},
        kit.deployment("web", web, replicas=2, volumes=volumes),
    ]
    async with run(*objects) as cluster:
        first, second = cluster.pods
        assert first.ip != second.ip
        seen = await ask(f"http://{first.ip}:8800/")
        env_seen, argv = seen["env"], seen["argv"]
        assert (env_seen["POD_IP"], env_seen["POD_LOOPBACK"], env_seen["SECRET"]) == (first.ip, first.ip, "hidden")
        config = Path(env_seen["CONFIG"])
        assert (config / "deployment.json").read_text() == "{}"
        assert stat.S_IMODE((config / "secrets" / "key").stat().st_mode) == 0o600
        assert (config / "api-keys" / "k").read_text() == "hidden"  # a nested mount, seen through the outer one
        assert argv[2] == f"--model={tmp_path}/models/tiny"
        assert argv[4].startswith("/dev/shm/mmrouter-")
        assert Path(argv[4]).is_dir()
        assert argv[5] == env_seen["CACHE"] == str(cluster.run_dir / "0" / "tmp" / "mine" / "cache")
        assert env_seen["TWICE"] == env_seen["CACHE"] + "/more"
        if tmp == "/tmp":
            assert env_seen["TMPDIR"] == str(cluster.run_dir / "0" / "tmp" / "mine")
        assert json.loads(argv[6]) == {"bind": f"tcp://{first.ip}:1"}
        assert "SSH_AUTH_SOCK" not in env_seen
        assert env_seen["HOME"].startswith(str(cluster.run_dir))
        other = await ask(f"http://{second.ip}:8800/")
        assert other["env"]["CONFIG"] != env_seen["CONFIG"]


async def test_what_is_killed_comes_back_alone_and_finds_its_files(run: Any, kit: Any, log: Any) -> None:
    volume = [{"name": "v", "mountPath": "/v"}]
    sidecar = {**kit.server("sidecar", 8810, volumeMounts=volume), "restartPolicy": "Always"}
    sidecar["readinessProbe"]["httpGet"]["port"] = 8810
    pod = kit.deployment("web", kit.server(), initContainers=[sidecar], volumes=[{"name": "v", "emptyDir": {}}])
    async with run(pod) as cluster:
        (web,) = cluster.pods
        (web.volumes["v"] / "journal").write_text("kept")
        for name, other in (("web", "sidecar"), ("sidecar", "web")):
            before = dict(web.pids)
            os.kill(before[name], signal.SIGKILL)
            await cluster.wait_until(lambda: not web.ready, 60)
            await cluster.wait_ready(10)
            assert web.pids[other] == before[other]
            assert web.pids[name] != before[name]
            assert web.container(name).restarts == 1
        assert (web.volumes["v"] / "journal").read_text() == "kept"
        lines = log.of("web-0")
        assert lines[0] == "Ready"
        assert lines[1].startswith("not Ready (web: ")
        assert log.of("web-0/web")[1] == "killed by signal 9, restarts in 0.2 s"


async def test_the_pause_before_a_restart_doubles(run: Any, kit: Any, log: Any) -> None:
    async with run(kit.deployment("web", kit.container("web", "exit", "3")), ready=False) as cluster:
        await cluster.wait_until(lambda: cluster.pods[0].container("web").restarts >= 2, 60)
        assert log.of("web-0/web")[:2] == [
            "ended with status 3, restarts in 0.2 s",
            "ended with status 3, restarts in 0.4 s",
        ]


@pytest.mark.parametrize("failing", ["web", "prepare"])
async def test_what_ends_again_and_again_and_never_came_up_is_not_waited_for(
    run: Any, kit: Any, log: Any, failing: str
) -> None:
    """A container and an init container."""
    web = {**kit.server(), **({"args": ["exit", "3"]} if failing == "web" else {})}
    before = [kit.container("prepare", "exit", "3")] if failing == "prepare" else []
    objects = kit.deployment("web", web, initContainers=before), kit.deployment("fine", kit.server())
    async with run(*objects, ready=False) as cluster:
        message = rf"^web-0/{failing} has ended {VAIN_STARTS} times before it was up, its last output: none$"
        with pytest.raises(VainError, match=message):
            await cluster.wait_ready(60)
        assert failing == "prepare" or len(log.of("web-0/web")) == VAIN_STARTS


async def test_two_starts_that_fail_alike_are_enough(run: Any, kit: Any, log: Any) -> None:
    """The process id in the last line differs between the starts."""
    web = kit.container("web", "fail", "3", "no such flag", readinessProbe={"tcpSocket": {"port": 8812}})
    async with run(kit.deployment("web", web), ready=False) as cluster:
        message = r"^web-0/web has ended twice before it was up, its last output: \d+: no such flag$"
        with pytest.raises(VainError, match=message):
            await cluster.wait_ready(60)
        assert sum(line.endswith("no such flag") for line in log.of("web-0/web")) == 2


@pytest.mark.parametrize("how", ["exit", "kill"])
async def test_an_exception_is_the_reason_whatever_is_printed_after_it_and_however_the_process_ends(
    run: Any, kit: Any, how: str
) -> None:
    """SGLang ends its own process by SIGKILL, and vLLM's libraries report leaks after the exception."""
    web = kit.container("web", "raise", how, readinessProbe={"tcpSocket": {"port": 8812}})
    async with run(kit.deployment("web", web), ready=False) as cluster:
        message = r"^web-0/web has ended twice before it was up, its last output: a\.BadError: no adapter in \d+$"
        with pytest.raises(VainError, match=message):
            await cluster.wait_ready(60)


async def test_starts_that_fail_in_different_ways_are_repeated(run: Any, kit: Any, tmp_path: Path) -> None:
    never = {"tcpSocket": {"port": 8812}}
    web = kit.container("web", "fail-once-more", str(tmp_path / "starts"), readinessProbe=never)
    async with run(kit.deployment("web", web), ready=False) as cluster:
        with pytest.raises(VainError, match=rf"has ended {VAIN_STARTS} times .* after x{{{VAIN_STARTS}}}$"):
            await cluster.wait_ready(60)


async def test_what_a_signal_ends_before_it_was_up_is_started_again(run: Any, kit: Any) -> None:
    web = kit.server(readinessProbe={"tcpSocket": {"port": 8812}})
    async with run(kit.deployment("web", web), ready=False) as cluster:
        container = cluster.pods[0].container("web")
        for number in range(3):
            await _until(lambda: container.last_line.startswith("listening") and container.pid is not None)
            os.kill(container.pid, signal.SIGKILL)
            await cluster.wait_until(lambda number=number: container.restarts > number, 60)  # type: ignore[misc]
        assert (container.hopeless, container.trouble) == (False, "")


async def test_what_came_up_once_may_end_as_often_as_it_likes(run: Any, kit: Any) -> None:
    web = kit.server()
    web["args"] = ["answer-once", *web["args"]]
    async with run(kit.deployment("web", web), ready=False) as cluster:
        container = cluster.pods[0].container("web")
        await cluster.wait_until(lambda: container.restarts >= 3, 60)
        assert container.trouble == ""


async def test_readiness_follows_the_probe_both_ways(run: Any, kit: Any, tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    web = kit.server(env=[{"name": "BROKEN_FILE", "value": str(flag)}])
    web["readinessProbe"] |= {"periodSeconds": 0.05, "failureThreshold": 2}
    async with run(kit.deployment("web", web)) as cluster:
        (pod,) = cluster.pods
        flag.touch()
        await cluster.wait_until(lambda: not pod.ready, 60)
        assert pod.waiting_for() == "web: readiness probe: / answers 503"
        flag.unlink()
        await cluster.wait_ready(5)
        assert pod.container("web").restarts == 0


async def test_a_container_that_does_not_start_up_is_killed_and_tried_again(run: Any, kit: Any, log: Any) -> None:
    startup = {"tcpSocket": {"port": 8812}, "periodSeconds": 0.2, "failureThreshold": 1}
    web = kit.container("web", "sleep", startupProbe=startup)
    async with run(kit.deployment("web", web), ready=False) as cluster:
        await cluster.wait_until(lambda: cluster.pods[0].container("web").restarts >= 1, 60)
        with pytest.raises(TimeoutError, match=r"^not ready after 0.01 s: web-0 \(web: "):
            await cluster.wait_ready(0.01)
        at = f"{cluster.pods[0].ip}:8812"
    assert log.of("web-0/web")[0] == f"startup probe: no connection to {at} for 0.2 s: killed"


async def test_commands_and_sockets_can_be_probes(run: Any, kit: Any, tmp_path: Path) -> None:
    flag = tmp_path / "up"
    check = [sys.executable, "-S", "-c", "import os, sys; sys.exit(not os.path.exists('/v/up'))"]
    web = kit.server(
        startupProbe={"tcpSocket": {"port": "http"}, "timeoutSeconds": 5},
        readinessProbe={"exec": {"command": check}, "timeoutSeconds": 5},
        volumeMounts=[{"name": "v", "mountPath": "/v"}],
    )
    pod = kit.deployment("web", web, volumes=[{"name": "v", "hostPath": {"path": "."}}])
    async with run(pod, ready=False) as cluster:
        with pytest.raises(TimeoutError):
            await cluster.wait_ready(0.6)
        await _until(lambda: "ended with 1" in cluster.pods[0].waiting_for())
        flag.touch()
        await cluster.wait_ready(5)


async def test_a_probe_that_takes_too_long_ends_with_what_it_started(run: Any, kit: Any, tmp_path: Path) -> None:
    waits = ["/bin/sh", "-c", "sleep 600 & echo $! > /v/started; wait"]
    volume = {"name": "v", "mountPath": "/v"}
    probe = {"exec": {"command": waits}, "timeoutSeconds": 1, "periodSeconds": 600}
    web = kit.container("web", "sleep", volumeMounts=[volume], readinessProbe=probe)
    started = tmp_path / "started"
    async with run(
        kit.deployment("web", web, volumes=[{"name": "v", "hostPath": {"path": "."}}]), ready=False
    ) as cluster:
        await _until(lambda: started.is_file() and started.read_text().endswith("\n"))
        sleeper = int(started.read_text())
        await _until(lambda: not alive(sleeper))
        assert not cluster.pods[0].ready


async def test_what_a_container_started_ends_with_it(run: Any, kit: Any) -> None:
    async with run(kit.deployment("web", kit.container("web", "children"))) as cluster:
        (pod,) = cluster.pods
        process = psutil.Process(pod.pids["web"])
        # A child is seen from its fork on, but leaves the group a moment later.
        await _until(lambda: sorted(os.getsid(c.pid) == c.pid for c in process.children()) == [False, True])
        children = [child.pid for child in process.children()]
        stayed = [child for child in children if os.getsid(child) != child]
        process.kill()
        await cluster.wait_until(lambda: pod.container("web").restarts == 1, 60)
        await _until(lambda: not any(alive(child) for child in stayed))  # a signal takes its time
    assert not any(alive(child) for child in children)


async def test_shared_memory_ends_with_the_container_that_made_it(run: Any, kit: Any, log: Any) -> None:
    """In a pod /dev/shm is its own; here a killed engine would leave its objects on the machine."""
    shm = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    probe = {"exec": {"command": ["true"]}, "periodSeconds": 0.05}
    web = kit.container("web", "shared-memory", volumeMounts=mounts, readinessProbe=probe)
    async with run(kit.deployment("web", web, volumes=shm)) as cluster:
        container = cluster.pods[0].container("web")
        await _until(lambda: log.of("web-0/web"))
        first = Path(log.of("web-0/web")[0])
        os.utime(first, (0, 0))  # the wall clock is set back
        container.child.record_memory()  # as the next probe would
        container.child.process.kill()
        await cluster.wait_until(lambda: container.restarts == 1, 60)
        await _until(lambda: len(log.of("web-0/web")) == 3)
        second = Path(log.of("web-0/web")[2])
        assert not first.exists()
        assert second.exists()
    assert not second.exists()


def test_shared_memory_from_before_is_not_taken_for_that_of_a_container() -> None:
    with NamedTemporaryFile(dir=SHM) as old, ExitStack() as mapped:
        before = objects()
        with NamedTemporaryFile(dir=SHM) as new:
            for file in (old, new):
                file.truncate(1)
                mapped.enter_context(mmap(file.fileno(), 1))
            assert shared_memory([os.getpid()], before) == {new.name}


async def test_one_that_will_not_stop_is_killed_after_its_grace(run: Any, kit: Any, log: Any) -> None:
    pod = kit.deployment("web", kit.container("web", "stubborn"), terminationGracePeriodSeconds=0.2)
    async with run(pod) as cluster:
        pid = cluster.pods[0].pids["web"]
        await _until(lambda: "stubborn" in log.of("web-0/web"))
    assert not alive(pid)
    assert log.of("web-0/web")[-1] == "does not end within 0.2 s: killed"


async def test_every_line_is_logged_with_its_source_however_long(run: Any, kit: Any, log: Any) -> None:
    async with run(kit.deployment("web", kit.container("web", "say", "one", "two"))):
        await _until(lambda: sum(map(len, log.of("web-0/web"))) > 190_000)
        assert log.of("web-0/web")[:2] == ["one", "two"]


@pytest.mark.parametrize("devices", [[], ["a", "b"]])
async def test_pods_start_side_by_side_but_those_on_one_device_one_after_the_other(
    run: Any, kit: Any, tmp_path: Path, devices: list[str]
) -> None:
    """No container is up before the file is gone, so only containers that wait for no other run until then."""
    (hold := tmp_path / "hold").touch()
    probe = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 60}
    engine = kit.server("engine", startupProbe=probe, env=[{"name": "BROKEN_FILE", "value": str(hold)}])
    pods = kit.deployment("web", engine, replicas=3, labels={"mmrouter.io/pool": "gpu"})
    wanted = {"gpu": DeviceRequest("nvidia", "CUDA_VISIBLE_DEVICES", tuple(devices), 1, VLLM)} if devices else {}
    async with run(pods, ready=False, devices=wanted) as cluster:
        first = cluster.pods[: len(devices) or 3]
        await _until(lambda: all(pod.pids["engine"] for pod in first))
        assert [pod.pids["engine"] is not None for pod in cluster.pods] == [pod in first for pod in cluster.pods]
        hold.unlink()
        await cluster.wait_ready(30)


async def test_pods_share_the_folder_of_a_claim_of_the_run(run: Any, kit: Any, log: Any) -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "x"}, "spec": {}}
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "x"}}]
    mounts = [{"name": "v", "mountPath": "/v"}]
    write = kit.container("prepare", "write", "/v/made", "yes", volumeMounts=mounts)
    read = kit.container("main", "read-once-there", "/v/made", volumeMounts=mounts)
    first = kit.deployment("one", read, initContainers=[write], volumes=volumes)
    async with run(claim, first, kit.deployment("two", read, volumes=volumes)):
        await _until(lambda: log.of("one-0/main") == log.of("two-0/main") == ["yes"])


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([{"persistentVolumeClaim": {"claimName": "x"}}], "persistentVolumeClaim is not supported"),
        ([{"hostPath": {"path": "nowhere"}}], "nowhere does not exist"),
        ([{"secret": {"secretName": "none"}}], "there is no secret none here"),
        ([], "mounts volume v, which the pod does not have"),
    ],
)
async def test_a_volume_that_cannot_be_had_is_said_before_anything_starts(
    run: Any, kit: Any, root: Path, sources: list[dict[str, Any]], message: str
) -> None:
    web = kit.server(volumeMounts=[{"name": "v", "mountPath": "/v"}])
    with pytest.raises(LocalError, match=message):
        async with run(kit.deployment("web", web, volumes=[{"name": "v", **source} for source in sources])):
            pytest.fail("started")
    assert [path for path in root.rglob("*") if path.is_file()] == []


async def _until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)
