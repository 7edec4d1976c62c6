"""Fields of the resource that reach pods: each one, where it takes effect."""

from collections.abc import Callable
from typing import Any

import pytest
from unit.render.objects import change, container, deployments, pod_of, variables, with_pool

from mmrouter_lib.api import MMRouterDeployment, to_json
from mmrouter_lib.api.pod_paths import API_KEYS_DIR, CHAT_TEMPLATE_PATH, CONFIG_DIR, HUB_CACHE_DIR, MODEL_DIR
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import SecretData
from mmrouter_operator.render import render

TOKEN = {"secretKeyRef": {"name": "hf", "key": "token"}}


def mounts(one: dict[str, Any]) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}


def arguments(pod: dict[str, Any]) -> list[str]:
    args: list[str] = container(pod, "engine")["args"]
    return args


def test_the_hubs_token_reaches_only_containers_that_download(
    shortest: MMRouterDeployment, secrets: SecretData
) -> None:
    dep = change(shortest, model={"id": "a/b", "tokenSecret": {"name": "hf", "key": "token"}})
    worker, frontend = pod_of(dep, secrets, "worker"), pod_of(dep, secrets, "frontend")
    assert variables(container(worker, "engine"))["HF_TOKEN"] == TOKEN
    assert variables(container(frontend, "model-metadata"))["HF_TOKEN"] == TOKEN
    assert "HF_TOKEN" not in variables(container(worker, "sidecar")) | variables(container(frontend, "router"))


def test_a_mirror_of_the_hub_reaches_downloads(shortest: MMRouterDeployment, secrets: SecretData) -> None:
    config = OperatorConfig(hub_endpoint="https://hub.site.example")
    objects = render(shortest, secrets=secrets, config=config)
    pods = [obj["spec"]["template"]["spec"] for obj in objects if obj["kind"] == "Deployment"]
    named = {
        one["name"]
        for pod in pods
        for one in [*pod.get("initContainers", []), *pod["containers"]]
        if variables(one).get("HF_ENDPOINT") == "https://hub.site.example"
    }
    assert named == {"engine", "model-metadata"}


def test_without_a_volume_the_frontend_fetches_metadata_before_the_router_reads_it(
    shortest: MMRouterDeployment, secrets: SecretData
) -> None:
    pod = pod_of(shortest, secrets, "frontend")
    assert [one["name"] for one in pod["initContainers"]] == ["model-metadata"]
    fetch, router = container(pod, "model-metadata"), container(pod, "router")
    assert fetch["command"] == ["mmrouter", "fetch-metadata"]
    assert mounts(fetch)[MODEL_DIR] == mounts(router)[MODEL_DIR] == "model"
    by_name = {volume["name"]: volume for volume in pod["volumes"]}
    assert by_name["model"] == {"name": "model", "emptyDir": {"sizeLimit": "1Gi"}}


def test_without_a_volume_the_sidecar_looks_where_the_engine_downloads_to(
    shortest: MMRouterDeployment, secrets: SecretData
) -> None:
    pod = pod_of(shortest, secrets, "worker")
    engine, sidecar = container(pod, "engine"), container(pod, "sidecar")
    assert variables(engine)["HF_HUB_CACHE"] == variables(sidecar)["HF_HUB_CACHE"] == HUB_CACHE_DIR
    assert mounts(engine)[HUB_CACHE_DIR] == mounts(sidecar)[HUB_CACHE_DIR]
    assert next(m for m in sidecar["volumeMounts"] if m["mountPath"] == HUB_CACHE_DIR)["readOnly"]


def test_a_volume_is_mounted_read_only_and_keeps_everybody_from_the_hub(
    whole: MMRouterDeployment, secrets: SecretData
) -> None:
    frontend, big = pod_of(whole, secrets, "frontend"), pod_of(whole, secrets, "big")
    assert "initContainers" not in frontend
    claim = {"name": "model", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}}
    for pod, name in ((frontend, "router"), (big, "engine"), (big, "sidecar")):
        assert claim in pod["volumes"]
        mount = next(m for m in container(pod, name)["volumeMounts"] if m["mountPath"] == MODEL_DIR)
        assert mount["readOnly"] is True
    assert variables(container(big, "engine"))["HF_HUB_OFFLINE"] == "1"
    assert arguments(big)[0] == MODEL_DIR


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
    shortest: MMRouterDeployment,
    secrets: SecretData,
    valid: Callable[[list[dict[str, Any]]], None],
    source: dict[str, Any],
    read_only: bool | None,
) -> None:
    dep = change(shortest, model={"id": "a/b", "volume": source})
    (kind,) = source
    for component in ("frontend", "worker"):
        volume = next(v for v in pod_of(dep, secrets, component)["volumes"] if v["name"] == "model")
        assert volume[kind].get("readOnly") is read_only
    valid(deployments(render(dep, secrets=secrets)))


def test_a_chat_template_lies_at_one_path_for_engine_sidecar_and_router(
    whole: MMRouterDeployment, secrets: SecretData
) -> None:
    big, frontend = pod_of(whole, secrets, "big"), pod_of(whole, secrets, "frontend")
    assert arguments(big)[arguments(big).index("--chat-template") + 1] == CHAT_TEMPLATE_PATH
    item = {"key": "qwen.jinja", "path": CHAT_TEMPLATE_PATH.removeprefix(f"{CONFIG_DIR}/")}
    source = {"configMap": {"name": "templates", "items": [item]}}
    for pod, name in ((big, "engine"), (big, "sidecar"), (frontend, "router")):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert source in volumes[mounts(container(pod, name))[CONFIG_DIR]]["projected"]["sources"]


def test_processor_and_parallelism_become_flags(whole: MMRouterDeployment, secrets: SecretData) -> None:
    args = arguments(pod_of(whole, secrets, "big"))
    assert args[args.index("--mm-processor-kwargs") + 1] == '{"min_pixels":3136,"max_pixels":1003520}'
    assert args[args.index("--tensor-parallel-size") + 1] == "2"
    assert args[args.index("--data-parallel-size") + 1] == "2"
    assert args[-4:] == ["--max-model-len", "32768", "--gpu-memory-utilization", "0.8"]


def test_api_keys_are_files_of_the_router_alone(whole: MMRouterDeployment, secrets: SecretData) -> None:
    pod = pod_of(whole, secrets, "frontend")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts(container(pod, "router"))[API_KEYS_DIR]]["secret"]["secretName"] == "keys"
    assert "keys" not in str(pod_of(whole, secrets, "big")["volumes"])
    without = change(whole, frontend={"replicas": 1})
    assert API_KEYS_DIR not in mounts(container(pod_of(without, secrets, "frontend"), "router"))


def test_engines_get_their_api_key_by_the_environment(
    shortest: MMRouterDeployment, sglang: MMRouterDeployment, secrets: SecretData
) -> None:
    for dep, variable in ((shortest, "VLLM_API_KEY"), (sglang, "SGLANG_API_KEY")):
        engine = container(pod_of(dep, secrets, "worker"), "engine")
        key = {"secretKeyRef": {"name": f"{dep.metadata.name}-secrets", "key": "engine.key"}}
        assert variables(engine)[variable] == key
        assert secrets.engine_key not in str(engine)


def test_resources_reach_their_containers(whole: MMRouterDeployment, secrets: SecretData) -> None:
    big, frontend = pod_of(whole, secrets, "big"), pod_of(whole, secrets, "frontend")
    assert container(big, "engine")["resources"]["requests"] == {"cpu": "8", "memory": "64Gi"}
    assert container(big, "engine")["resources"]["limits"] == {"memory": "96Gi", "amd.com/gpu": "4"}
    assert container(big, "sidecar")["resources"] == {"limits": {"memory": "512Mi"}}
    assert container(frontend, "router")["resources"] == {"requests": {"cpu": "2", "memory": "2Gi"}}


def test_drain_seconds_reach_the_engine(shortest: MMRouterDeployment, secrets: SecretData) -> None:
    dep = with_pool(shortest, updates={"drainSeconds": 7})
    args = arguments(pod_of(dep, secrets, "worker"))
    assert args[args.index("--shutdown-timeout") + 1] == "7"


def test_a_field_that_is_written_with_its_default_changes_no_pod(
    shortest: MMRouterDeployment, secrets: SecretData
) -> None:
    """The API server writes defaults into the resource; a reader of it must not restart anything for that."""
    spec = to_json(shortest)["spec"]
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
        shortest,
        model=spec["model"] | {"revision": "main", "trustRemoteCode": False},
        engine=spec["engine"] | {"image": "", "processor": {}, "args": [], "kvConnector": {}, "ecConnector": {}},
        frontend={"replicas": 2, "resources": {"requests": {}}, "service": {"type": "ClusterIP", "port": 80}},
        sidecar={"resources": {}, "bufferEvents": 10000},
        pools=[pool],
    )
    assert defaulted.spec.pools[0].resources.model_fields_set == {"requests", "limits"}
    for component in ("worker", "frontend"):
        assert pod_of(defaulted, secrets, component) == pod_of(shortest, secrets, component)


def test_an_otlp_endpoint_reaches_only_the_router(shortest: MMRouterDeployment, secrets: SecretData) -> None:
    def told(dep: MMRouterDeployment) -> dict[str, dict[str, Any]]:
        pods = {name: pod_of(dep, secrets, name) for name in ("frontend", "worker")}
        found = {one["name"]: variables(one) for pod in pods.values() for one in pod["containers"]}
        return {
            name: {key: value for key, value in values.items() if key.startswith("OTEL_")}
            for name, values in found.items()
        }

    assert not any(told(shortest).values())
    endpoint = "http://otel-collector.monitoring.svc:4318"
    traced = told(change(shortest, observability={"otlpEndpoint": endpoint}))
    assert [name for name, values in traced.items() if values] == ["router"]
    assert traced["router"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == endpoint
    about = dict(item.split("=") for item in traced["router"]["OTEL_RESOURCE_ATTRIBUTES"].split(","))
    assert about["k8s.namespace.name"] == shortest.metadata.namespace
    assert about["k8s.deployment.name"] == traced["router"]["OTEL_SERVICE_NAME"] == f"{shortest.metadata.name}-frontend"
    # A reference is expanded only where its variable stands before it.
    names = [row["name"] for row in container(pod_of(shortest, secrets, "frontend"), "router")["env"]]
    for key, source in {"pod.name": "POD_NAME", "pod.uid": "POD_UID", "node.name": "NODE_NAME"}.items():
        assert about[f"k8s.{key}"] == f"$({source})"
        assert source in names
