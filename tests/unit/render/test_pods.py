"""Pods of every role: what is in them, which fields of the resource reach them, how they start and how they end."""

import asyncio
import os
import subprocess
import sys
import time
from itertools import count
from typing import Any

import pytest
from aiohttp import web
from unit.render.objects import (
    GOLDENS,
    SHORTEST,
    change,
    children,
    container,
    containers,
    deployments,
    load,
    named,
    pod_of,
    rendered,
    template_labels,
    valid,
    variables,
)

from mmrouter_lib.api import MMRouterDeployment, SpecError, to_json
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render.pod.parts import DRAIN_PORT, NOTICE_SECONDS

TOKEN = {"secretKeyRef": {"name": "hf", "key": "token"}}


def test_the_hubs_token_reaches_only_containers_that_download() -> None:
    dep = change(SHORTEST, model={"id": "a/b", "tokenSecret": {"name": "hf", "key": "token"}})
    worker, frontend = pod_of(dep, "worker"), pod_of(dep, "frontend")
    assert variables(container(worker, "engine"))["HF_TOKEN"] == TOKEN
    assert variables(container(frontend, "model-metadata"))["HF_TOKEN"] == TOKEN
    assert "HF_TOKEN" not in variables(container(worker, "sidecar")) | variables(container(frontend, "router"))


def test_a_mirror_of_the_hub_reaches_downloads() -> None:
    endpoint = "https://hub.site.example"
    objects = children(SHORTEST, "Deployment", config=OperatorConfig(hub_endpoint=endpoint))
    every = [(one["name"], variables(one)) for obj in objects for one in containers(obj)]
    assert {name for name, env in every if env.get("HF_ENDPOINT") == endpoint} == {"engine", "model-metadata"}


@pytest.mark.parametrize(
    ("source", "read_only"),
    [
        ({"persistentVolumeClaim": {"claimName": "weights", "readOnly": False}}, True),
        ({"csi": {"driver": "weights.example"}}, True),
        ({"nfs": {"server": "files.example", "path": "/weights"}}, True),
        ({"hostPath": {"path": "/weights"}}, None),
        ({"emptyDir": {}}, None),
    ],
)
def test_a_volume_that_can_be_read_only_is_so_that_no_kubelet_gives_its_files_to_the_pods_group(
    source: dict[str, Any], read_only: bool | None
) -> None:
    dep = change(SHORTEST, model={"id": "a/b", "volume": source})
    (kind,) = source
    for component in ("frontend", "worker"):
        volume = next(v for v in pod_of(dep, component)["volumes"] if v["name"] == "model")
        assert volume[kind].get("readOnly") is read_only
    valid(children(dep, "Deployment"))


def test_a_field_that_is_written_with_its_default_changes_no_pod() -> None:
    """The API server writes defaults into the resource; a reader of it must not restart anything for that."""
    spec = to_json(SHORTEST)["spec"]
    pool = spec["pools"][0] | {
        "parallelism": {"tensor": 1, "data": 1},
        "nodeSelector": {},
        "tolerations": [],
        "args": [],
        "image": "",
        "sharedMemory": {"size": "8Gi", "scope": "pod"},
        "resources": {"requests": {}, "limits": {}},
        "updates": {"maxSurge": 1, "maxUnavailable": 0, "drainSeconds": 60},
        "podTemplate": {},
    }
    defaulted = change(
        SHORTEST,
        model=spec["model"] | {"revision": "main", "trustRemoteCode": False},
        engine=spec["engine"] | {"image": "", "processor": {}, "args": [], "kvConnector": {}, "ecConnector": {}},
        frontend={"replicas": 2, "resources": {"requests": {}}, "service": {"type": "ClusterIP", "port": 80}},
        sidecar={"resources": {}, "bufferEvents": 10000},
        pools=[pool],
    )
    assert defaulted.spec.pools[0].resources.model_fields_set == {"requests", "limits"}
    for component in ("worker", "frontend"):
        assert pod_of(defaulted, component) == pod_of(SHORTEST, component)


def test_an_otlp_endpoint_reaches_only_the_router() -> None:
    def tracing_of(dep: MMRouterDeployment) -> dict[str, dict[str, Any]]:
        pods = {name: pod_of(dep, name) for name in ("frontend", "worker")}
        found = {one["name"]: variables(one) for pod in pods.values() for one in pod["containers"]}
        return {name: {key: env[key] for key in env if key.startswith("OTEL_")} for name, env in found.items()}

    assert not any(tracing_of(SHORTEST).values())
    endpoint = "http://otel-collector.monitoring.svc:4318"
    traced = tracing_of(change(SHORTEST, observability={"otlpEndpoint": endpoint}))
    assert [name for name, values in traced.items() if values] == ["router"]
    assert traced["router"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == endpoint
    about = dict(item.split("=") for item in traced["router"]["OTEL_RESOURCE_ATTRIBUTES"].split(","))
    assert about["k8s.namespace.name"] == SHORTEST.metadata.namespace
    assert about["k8s.deployment.name"] == traced["router"]["OTEL_SERVICE_NAME"] == f"{SHORTEST.metadata.name}-frontend"
    # A reference is expanded only where its variable stands before it.
    names = [row["name"] for row in container(pod_of(SHORTEST, "frontend"), "router")["env"]]
    for key, source in {"pod.name": "POD_NAME", "pod.uid": "POD_UID", "node.name": "NODE_NAME"}.items():
        assert about[f"k8s.{key}"] == f"$({source})"
        assert source in names


ENGINE_PODS = [(name, pool.name, pool.role) for name in GOLDENS for pool in load(name).spec.pools]
_addresses = count(os.getpid() % 200 * 250)


@pytest.mark.parametrize(("name", "pool", "role"), ENGINE_PODS)
def test_probes_leave_time_to_load_and_the_grace_period_holds_notice_drain_and_stop(
    name: str, pool: str, role: str
) -> None:
    dep = load(name)
    obj = named(rendered(dep), "Deployment", f"{dep.metadata.name}-{pool}")
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

    drain = dep.pool(pool).updates.drain_seconds
    if not sglang and role != "renderer":
        assert one["args"][one["args"].index("--shutdown-timeout") + 1] == str(drain)
    assert obj["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= NOTICE_SECONDS + drain + 10
    hook = one["lifecycle"]["preStop"]
    assert ("sleep" in hook) is (role == "renderer")
    if "exec" in hook:
        assert hook["exec"]["command"][-1] == str(NOTICE_SECONDS)


def drain_command(dep: MMRouterDeployment, pause: float) -> list[str]:
    """Return the engine's hook as the kubelet runs it, with this machine's Python and a shorter wait."""
    command = container(pod_of(dep, "worker"), "engine")["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "python3"
    return [sys.executable, *command[1:-1], str(pause)]


async def test_the_engines_hook_asks_the_sidecar_and_waits() -> None:
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
        process = await asyncio.create_subprocess_exec(*drain_command(SHORTEST, 0.3), env={"POD_LOOPBACK": loopback})
        assert await process.wait() == 0
    finally:
        await runner.cleanup()
    assert len(asked) == 1
    assert time.monotonic() - asked[0] >= 0.3


def test_the_hook_waits_all_the_same_when_no_sidecar_answers() -> None:
    began = time.monotonic()
    env = {"POD_LOOPBACK": _loopback()}
    done = subprocess.run(drain_command(SHORTEST, 0.3), env=env, capture_output=True, text=True)
    assert done.returncode == 0
    assert "drain: " in done.stderr
    assert time.monotonic() - began >= 0.3


def _loopback() -> str:
    """An address of its own, on which the hook's real port is free."""
    number = next(_addresses)
    return f"127.77.{number // 250 % 250 + 1}.{number % 250 + 1}"


def test_the_longest_names_still_make_valid_children() -> None:
    metadata = SHORTEST.metadata.model_copy(update={"name": "n" * 40})
    pool = SHORTEST.spec.pools[0].model_copy(update={"name": "p" * 20})
    spec = SHORTEST.spec.model_copy(update={"pools": [pool]})
    objects = rendered(SHORTEST.model_copy(update={"metadata": metadata, "spec": spec}))
    assert max(len(obj["metadata"]["name"]) for obj in objects) == 61
    labels = [{**obj["metadata"]["labels"], **template_labels(obj)} for obj in deployments(objects)]
    assert max(len(value) for each in labels for value in each.values()) <= 63


def test_a_name_that_slipped_past_every_bound_is_an_error_with_its_field() -> None:
    metadata = SHORTEST.metadata.model_copy(update={"name": "n" * 60})
    with pytest.raises(SpecError, match=r"^metadata\.name: is too long: ServiceAccount n{60}-frontend would have"):
        rendered(SHORTEST.model_copy(update={"metadata": metadata}))
