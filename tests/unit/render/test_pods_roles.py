"""Pods of every role: what is in them, in which order it starts, and how it ends."""

import asyncio
import os
import subprocess
import sys
import time
from itertools import count
from typing import Any

import pytest
from aiohttp import web
from unit.render.objects import container, containers, deployments, named, pod_of, variables
from unit.render.test_children import GOLDENS, load

from mmrouter_lib.api import MMRouterDeployment, SpecError
from mmrouter_operator.model.credentials import SecretData
from mmrouter_operator.render import render
from mmrouter_operator.render.pod.probes import DRAIN_PORT, NOTICE_SECONDS

ENGINE_PODS = [(name, pool.name, pool.role) for name in GOLDENS for pool in load(name).spec.pools]
GATES = [{"conditionType": "mmrouter.io/routable"}, {"conditionType": "mmrouter.io/verified"}]
_addresses = count(os.getpid() % 200 * 250)


@pytest.mark.parametrize(("name", "pool", "role"), ENGINE_PODS)
def test_an_engine_pod_starts_its_sidecar_first_and_waits_for_both_gates(
    name: str, pool: str, role: str, secrets: SecretData
) -> None:
    pod = pod_of(load(name), secrets, pool)
    assert pod["readinessGates"] == GATES
    native = [one["name"] for one in pod.get("initContainers", []) if one.get("restartPolicy") == "Always"]
    assert native == ([] if role == "renderer" else ["sidecar"])
    if native:
        assert container(pod, "sidecar")["startupProbe"]["httpGet"]["path"] == "/healthz"
        assert pod["initContainers"][-1]["name"] == "sidecar"
    assert pod["containers"][0]["name"] == "engine"


@pytest.mark.parametrize("name", GOLDENS)
def test_only_the_router_has_a_token_of_the_api(name: str, secrets: SecretData) -> None:
    dep = load(name)
    for obj in deployments(render(dep, secrets=secrets)):
        pod = obj["spec"]["template"]["spec"]
        routes = obj["metadata"]["name"].endswith("-frontend")
        assert pod["automountServiceAccountToken"] is routes
        assert pod["serviceAccountName"] == f"{dep.metadata.name}-{'frontend' if routes else 'engine'}"


@pytest.mark.parametrize("name", GOLDENS)
def test_what_is_mounted_is_a_volume_and_what_is_a_volume_is_mounted(name: str, secrets: SecretData) -> None:
    for obj in deployments(render(load(name), secrets=secrets)):
        mounted = {mount["name"] for one in containers(obj) for mount in one.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in obj["spec"]["template"]["spec"]["volumes"]}


def test_weights_are_read_only_everywhere(whole: MMRouterDeployment, secrets: SecretData) -> None:
    for obj in deployments(render(whole, secrets=secrets)):
        for one in containers(obj):
            mounts = [mount for mount in one.get("volumeMounts", []) if mount["name"] == "model"]
            assert all(mount.get("readOnly") for mount in mounts)


def test_shared_memory_of_the_pod_is_bounded_by_the_pools_size(whole: MMRouterDeployment, secrets: SecretData) -> None:
    sizes = {}
    for pool in whole.spec.pools:
        pod = pod_of(whole, secrets, pool.name)
        volume = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
        assert volume["emptyDir"]["medium"] == "Memory"
        sharing = ["engine"] if pool.role == "renderer" else ["engine", "sidecar"]
        for name in sharing:
            assert {"name": "shm", "mountPath": "/dev/shm"} in container(pod, name)["volumeMounts"]
        sizes[pool.name] = volume["emptyDir"]["sizeLimit"]
    assert sizes == {"big": "16Gi", "mig": "8Gi", "dra": "8Gi", "host": "8Gi"}


@pytest.mark.parametrize(("name", "pool", "role"), ENGINE_PODS)
def test_probes_leave_time_to_load_and_never_hurry_a_restart(
    name: str, pool: str, role: str, secrets: SecretData
) -> None:
    dep = load(name)
    obj = named(render(dep, secrets=secrets), "Deployment", f"{dep.metadata.name}-{pool}")
    one = container(obj["spec"]["template"]["spec"], "engine")
    startup, readiness, liveness = (one[kind] for kind in ("startupProbe", "readinessProbe", "livenessProbe"))
    budget = startup["periodSeconds"] * startup["failureThreshold"]
    assert budget >= 1800
    assert obj["spec"]["progressDeadlineSeconds"] > budget + dep.spec.verification.timeout_seconds
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 300
    for probe in (startup, readiness, liveness):
        assert probe["timeoutSeconds"] <= probe["periodSeconds"]
        assert probe["httpGet"]["port"] == "http"
    sglang = dep.spec.engine.type == "sglang"
    # An SGLang encoder has no other path; that of a language engine generates a token each time.
    expected = "/ready" if sglang and role != "encoder" else "/health"
    assert {probe["httpGet"]["path"] for probe in (startup, readiness, liveness)} == {expected}


@pytest.mark.parametrize(("name", "pool", "role"), ENGINE_PODS)
def test_the_grace_period_holds_notice_drain_and_stop(name: str, pool: str, role: str, secrets: SecretData) -> None:
    dep = load(name)
    pod = pod_of(dep, secrets, pool)
    drain = dep.pool(pool).updates.drain_seconds
    assert pod["terminationGracePeriodSeconds"] >= NOTICE_SECONDS + drain + 10
    hook = container(pod, "engine")["lifecycle"]["preStop"]
    assert ("sleep" in hook) is (role == "renderer")
    if "exec" in hook:
        assert hook["exec"]["command"][-1] == str(NOTICE_SECONDS)


def test_the_frontend_serves_on_while_services_forget_it_and_gives_streams_their_time(
    shortest: MMRouterDeployment, secrets: SecretData
) -> None:
    pod = pod_of(shortest, secrets, "frontend")
    router = container(pod, "router")
    assert router["lifecycle"] == {"preStop": {"sleep": {"seconds": NOTICE_SECONDS}}}
    drain = int(variables(router)["MMROUTER_DRAIN_SECONDS"])
    assert pod["terminationGracePeriodSeconds"] >= NOTICE_SECONDS + drain + 10
    assert variables(router)["MMROUTER_DISCOVERY"] == "kubernetes"


def drain_command(dep: MMRouterDeployment, secrets: SecretData, pause: float) -> list[str]:
    """Return the engine's hook as the kubelet runs it, with this machine's Python and a shorter wait."""
    command = container(pod_of(dep, secrets, "worker"), "engine")["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "python3"
    return [sys.executable, *command[1:-1], str(pause)]


async def test_the_engines_hook_asks_the_sidecar_and_waits(shortest: MMRouterDeployment, secrets: SecretData) -> None:
    loopback = _loopback()
    asked: list[float] = []

    async def drain(request: web.Request) -> web.Response:
        asked.append(time.monotonic())
        return web.json_response({"draining": True})

    app = web.Application()
    app.add_routes([web.get("/drain", drain)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, loopback, DRAIN_PORT).start()
    try:
        process = await asyncio.create_subprocess_exec(
            *drain_command(shortest, secrets, 0.3), env={"POD_LOOPBACK": loopback}
        )
        assert await process.wait() == 0
    finally:
        await runner.cleanup()
    assert len(asked) == 1
    assert time.monotonic() - asked[0] >= 0.3


def test_the_hook_waits_all_the_same_when_no_sidecar_answers(shortest: MMRouterDeployment, secrets: SecretData) -> None:
    began = time.monotonic()
    env = {"POD_LOOPBACK": _loopback()}
    done = subprocess.run(drain_command(shortest, secrets, 0.3), env=env, capture_output=True, text=True)
    assert done.returncode == 0
    assert "drain: " in done.stderr
    assert time.monotonic() - began >= 0.3


def _loopback() -> str:
    """An address of its own, on which the hook's real port is free."""
    number = next(_addresses)
    return f"127.77.{number // 250 % 250 + 1}.{number % 250 + 1}"


def test_pods_spread_softly_over_nodes_and_zones_each_revision_for_itself(
    shortest: MMRouterDeployment, secrets: SecretData
) -> None:
    for component in ("worker", "frontend"):
        rules = pod_of(shortest, secrets, component)["topologySpreadConstraints"]
        assert [rule["topologyKey"] for rule in rules] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
        for rule in rules:
            assert rule["whenUnsatisfiable"] == "ScheduleAnyway"
            assert rule["matchLabelKeys"] == ["pod-template-hash"]
            assert rule["labelSelector"]["matchLabels"]["mmrouter.io/deployment"] == "qwen-vl"


def test_the_longest_names_still_make_valid_children(secrets: SecretData, shortest: MMRouterDeployment) -> None:
    metadata = shortest.metadata.model_copy(update={"name": "n" * 40})
    pool = shortest.spec.pools[0].model_copy(update={"name": "p" * 20})
    spec = shortest.spec.model_copy(update={"pools": [pool]})
    objects = render(shortest.model_copy(update={"metadata": metadata, "spec": spec}), secrets=secrets)
    assert max(len(obj["metadata"]["name"]) for obj in objects) == 61
    values: list[str] = [value for obj in deployments(objects) for value in _all_labels(obj)]
    assert max(len(value) for value in values) <= 63


def test_a_name_that_slipped_past_every_bound_is_an_error_with_its_field(
    secrets: SecretData, shortest: MMRouterDeployment
) -> None:
    metadata = shortest.metadata.model_copy(update={"name": "n" * 60})
    with pytest.raises(SpecError, match=r"^metadata\.name: is too long: ServiceAccount n{60}-frontend would have"):
        render(shortest.model_copy(update={"metadata": metadata}), secrets=secrets)


def _all_labels(obj: dict[str, Any]) -> list[str]:
    return [*obj["metadata"]["labels"].values(), *obj["spec"]["template"]["metadata"]["labels"].values()]


def test_a_renderer_pool_is_its_engine_alone_without_a_device(secrets: SecretData) -> None:
    pod = pod_of(load("disaggregated"), secrets, "render")
    assert "initContainers" not in pod
    engine = container(pod, "engine")
    assert engine["command"] == ["vllm", "launch", "render"]
    assert "limits" not in engine["resources"]
