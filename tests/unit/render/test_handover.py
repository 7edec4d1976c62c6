"""What pods have so that images reach engines otherwise than inside requests: memory of the node, and our plugin."""

from importlib.util import find_spec
from itertools import combinations
from typing import Any

import pytest
from unit.render.objects import (
    Object,
    change,
    children,
    container,
    containers,
    load,
    named,
    pod_of,
    rendered,
    variables,
)
from unit.render.test_networkpolicy import SITE, STRANGER, engine, frontend, passes
from unit.render.test_template_hashes import hashes, templates

from mmrouter_handover.plugin.item_exchange import read_settings
from mmrouter_lib.api import MMRouterDeployment, SpecError, to_json
from mmrouter_lib.pod_paths import PLUGIN_DIR, SHARED_DIR
from mmrouter_operator.model.external_refs import references
from mmrouter_operator.render.pod.pod_security_violations import violations
from mmrouter_operator.render.pod.shared_memory import SHARED_GROUP, transfer_line

NODE = {"scope": "node"}
GIB = 1 << 30


def pool(name: str, role: str, kind: str = "nvidia", **fields: Any) -> dict[str, Any]:
    return {"name": name, "role": role, "accelerator": {"kind": kind}, **fields}


def roles(**fields: Any) -> list[dict[str, Any]]:
    """Return pools of every role; all on CPUs."""
    names = ("encoder", "prefill", "decode", "renderer")
    return [pool(name, name, "cpu", **fields) for name in names]


@pytest.fixture
def over() -> MMRouterDeployment:
    return load("handover")


def transferred(dep: MMRouterDeployment, transfer: str, pools: list[dict[str, Any]]) -> MMRouterDeployment:
    connector = {"ec_connector": "ECExampleConnector", "ec_connector_extra_config": {"shared_storage_path": SHARED_DIR}}
    settings = {**to_json(dep)["spec"]["engine"], "ecConnector": connector}
    return change(dep, routing={"transfer": transfer}, pools=pools, engine=settings)


def engine_args(pod: Object) -> list[str]:
    found: list[str] = container(pod, "engine")["args"]
    return found


def test_engines_and_renderers_read_files_of_the_nodes_memory_and_of_nothing_else(over: MMRouterDeployment) -> None:
    dep = transferred(over, "shm", roles(sharedMemory=NODE))
    for one in dep.spec.pools:
        args = engine_args(pod_of(dep, one.name))
        assert args[args.index("--allowed-local-media-path") + 1] == SHARED_DIR
    apart = transferred(over, "nixl", [*roles(), pool("near", "decode", "cpu", sharedMemory=NODE)])
    allowed = {one.name for one in apart.spec.pools if _reads_files(pod_of(apart, one.name))}
    assert allowed == {"near"}
    quiet = transferred(over, "none", roles(sharedMemory=NODE))
    assert not any(_reads_files(pod_of(quiet, one.name)) for one in quiet.spec.pools)


@pytest.mark.parametrize(("shared", "resolved"), [(NODE, "shm"), ({}, "none")])
def test_auto_is_shm_where_every_pool_shares_the_nodes_memory(
    over: MMRouterDeployment, shared: dict[str, str], resolved: str
) -> None:
    """The settings of the pods are the same; the frontend reads the mode itself."""
    pools = [*roles(sharedMemory=NODE)[:-1], pool("renderer", "renderer", "cpu", sharedMemory=shared)]
    by_default, explicit = transferred(over, "auto", pools), transferred(over, resolved, pools)
    assert by_default.spec.transfer == resolved
    for one in explicit.spec.pools:
        assert pod_of(by_default, one.name)["containers"] == pod_of(explicit, one.name)["containers"]


def _reads_files(pod: Object) -> bool:
    return "--allowed-local-media-path" in engine_args(pod)


def test_frontends_have_the_nodes_memory_where_they_hand_over_and_some_pool_shares_it(over: MMRouterDeployment) -> None:
    near = [*to_json(over)["spec"]["pools"], pool("near", "worker", sharedMemory=NODE)]
    pod = pod_of(change(over, pools=near), "frontend")
    router = container(pod, "router")
    assert {"name": "shared", "mountPath": SHARED_DIR} in router["volumeMounts"]
    assert variables(router)["MMROUTER_SHARED_DIR"] == SHARED_DIR
    assert pod["securityContext"]["supplementalGroups"] == [SHARED_GROUP]
    assert [one["name"] for one in pod["initContainers"]] == ["shared-memory"]
    worker = pod_of(change(over, pools=near), "near")
    paths = [v["hostPath"] for v in (*pod["volumes"], *worker["volumes"]) if v["name"] == "shared"]
    assert paths[0] == paths[1]
    for dep in (over, change(over, pools=near, routing={})):
        assert "shared" not in str(pod_of(dep, "frontend")["volumes"])
        assert "MMROUTER_SHARED_DIR" not in variables(container(pod_of(dep, "frontend"), "router"))


def limits(dep: MMRouterDeployment, component: str) -> dict[str, int]:
    obj = named(rendered(dep), "Deployment", f"{dep.metadata.name}-{component}")
    found = {one["name"]: variables(one).get("MMROUTER_SHARED_LIMIT_BYTES") for one in containers(obj)}
    return {name: int(value) for name, value in found.items() if value is not None}


def test_a_node_holds_the_largest_pools_size_and_each_writer_at_most_half_of_its_own_memory(
    over: MMRouterDeployment,
) -> None:
    pools = [
        pool("small", "worker", sharedMemory={**NODE, "size": "1Gi"}),
        pool("large", "worker", sharedMemory={**NODE, "size": "6Gi"}),
        pool("apart", "worker", sharedMemory={"size": "32Gi"}),
        pool("render", "renderer", "cpu", sharedMemory=NODE | {"size": "2Gi"}, resources={"limits": {"memory": "4Gi"}}),
    ]
    dep = change(over, pools=pools, frontend={"resources": {"limits": {"memory": "1Gi"}}})
    assert limits(dep, "small") == {"sidecar": 6 * GIB, "engine": 6 * GIB}
    assert limits(dep, "render") == {"engine": 2 * GIB}
    assert limits(dep, "frontend") == {"router": GIB // 2}
    assert limits(dep, "apart") == {}


def test_the_plugin_comes_to_engines_and_renderers_whose_images_stay_as_they_are(over: MMRouterDeployment) -> None:
    for transfer in ("shm", "nixl"):
        dep = transferred(over, transfer, roles(sharedMemory=NODE))
        for one in dep.spec.pools:
            pod = pod_of(dep, one.name)
            deliver, started = container(pod, "handover-plugin"), container(pod, "engine")
            assert deliver["command"] == ["mmrouter", "plugin", PLUGIN_DIR]
            assert deliver["image"].startswith("mmrouter/mmrouter:")
            assert started["image"].startswith("vllm/vllm-openai-cpu:")
            own = ["vllm", "launch", "render"] if one.role == "renderer" else ["vllm", "serve"]
            assert started["command"] == ["python3", "-m", "mmrouter_handover.plugin.start", *own]
            assert {"name": "plugin", "mountPath": PLUGIN_DIR, "readOnly": True} in started["volumeMounts"]
            assert {"name": "plugin", "mountPath": PLUGIN_DIR} in deliver["volumeMounts"]
            assert variables(started)["PYTHONPATH"] == PLUGIN_DIR
            ways = {"shm": "shm,inline", "nixl": "nixl,shm,inline"}
            assert variables(started)["MMROUTER_HANDOVER_WAYS"] == ways[transfer]
        assert "plugin" not in str(pod_of(dep, "frontend"))


def test_without_a_renderer_or_a_hand_over_engines_start_as_they_always_did(over: MMRouterDeployment) -> None:
    plain = [pool("worker", "worker", sharedMemory=NODE)]
    without = change(over, pools=plain, routing={"transfer": "shm"})
    for dep in (without, change(over, routing={})):
        pod = pod_of(dep, "worker")
        assert container(pod, "engine")["command"] == ["vllm", "serve"]
        assert PLUGIN_DIR not in str(pod)
        assert "MMROUTER_HANDOVER" not in str(pod)
        assert "PYTHONPATH" not in str(pod)


def test_a_renderer_keeps_no_more_for_others_than_its_memory_and_the_nodes_allow(over: MMRouterDeployment) -> None:
    def kept(**fields: Any) -> int:
        dep = change(over, pools=[pool("worker", "worker"), pool("render", "renderer", "cpu", **fields)])
        return int(variables(container(pod_of(dep, "render"), "engine"))["MMROUTER_HANDOVER_BYTES"])

    assert kept() == GIB
    assert kept(sharedMemory={"size": "64Mi"}) == GIB
    assert kept(sharedMemory=NODE | {"size": "64Mi"}) == 64 << 20
    assert kept(resources={"limits": {"memory": "1Gi"}}) == GIB // 2


def test_nixl_on_cpus_gets_the_available_transports(over: MMRouterDeployment) -> None:
    def transports(dep: MMRouterDeployment, name: str) -> Any:
        return variables(container(pod_of(dep, name), "engine")).get("UCX_TLS")

    assert transports(over, "worker") is None
    assert transports(over, "slow") == transports(over, "render") == "tcp,self,sm"
    near = [{**one, "sharedMemory": NODE} for one in to_json(over)["spec"]["pools"]]
    assert transports(change(over, pools=near, routing={"transfer": "shm"}), "slow") is None


def test_processed_images_cross_the_network_only_where_nixl_carries_them(over: MMRouterDeployment) -> None:
    near = [{**one, "sharedMemory": NODE} for one in to_json(over)["spec"]["pools"]]
    apart = children(over, "NetworkPolicy", config=SITE)
    together = children(change(over, pools=near, routing={"transfer": "shm"}), "NetworkPolicy", config=SITE)
    worker, renderer = engine("worker", "worker", "over"), engine("render", "renderer", "over")
    for port in (40000, 5600):
        assert passes(apart, worker, renderer, port)
        assert passes(apart, renderer, worker, port)
        assert not passes(together, worker, renderer, port)
        assert not passes(apart, STRANGER, renderer, port)
        assert not passes(apart, frontend("over"), renderer, port)
    assert not passes(apart, worker, renderer, 8000)
    assert passes(apart, frontend("over"), renderer, 8000)


def test_who_hands_over_how_restarts_those_whom_it_concerns(over: MMRouterDeployment) -> None:
    """Templates and hashes change together; without hand-overs nothing is hashed that was not before there were any."""
    near = [{**one, "sharedMemory": NODE} for one in to_json(over)["spec"]["pools"]]
    steps = {
        "none, apart": change(over, routing={}),
        "nixl, apart": over,
        "nixl, near": change(over, pools=near),
        "shm, near": change(over, pools=near, routing={"transfer": "shm"}),
        "shm, no renderer": change(over, pools=near[:2], routing={"transfer": "shm"}),
        "shm, one larger": change(
            over, pools=[{**near[0], "sharedMemory": NODE | {"size": "9Gi"}}, near[1]], routing={"transfer": "shm"}
        ),
    }
    found = {name: templates(dep) for name, dep in steps.items()}
    for (one, these), (other, those) in combinations(found.items(), 2):
        for component in these.keys() & those.keys():
            same = these[component] == those[component]
            assert same is (hashes(these)[component] == hashes(those)[component]), (one, other, component)
    changed = {name for name in found["shm, near"] if found["shm, near"][name] != found["nixl, near"][name]}
    assert changed == {"worker", "slow", "render", "frontend"}


def test_the_plugin_reads_the_pods_variables(over: MMRouterDeployment) -> None:
    near = [{**one, "sharedMemory": NODE | {"size": "64Mi"}} for one in to_json(over)["spec"]["pools"]]
    env = variables(container(pod_of(change(over, pools=near), "render"), "engine"))
    read = read_settings({name: value for name, value in env.items() if isinstance(value, str)})
    assert (read.shared_dir, set(read.ways), read.limit_bytes) == (SHARED_DIR, {"nixl", "shm", "inline"}, 64 << 20)
    assert find_spec(container(pod_of(over, "render"), "engine")["command"][2]) is not None


def test_a_podtemplate_cannot_take_the_plugin_away(over: MMRouterDeployment) -> None:
    other = {"name": "PYTHONPATH", "value": "/opt/other"}
    engines = {"containers": [{"name": "engine", "env": [other]}]}
    patch = {"spec": {"initContainers": [{"name": "handover-plugin", "command": ["true"]}], **engines}}
    patched = [{**one, "podTemplate": patch} for one in to_json(over)["spec"]["pools"]]
    pod = pod_of(change(over, pools=patched), "worker")
    assert container(pod, "handover-plugin")["command"] == ["mmrouter", "plugin", PLUGIN_DIR]
    assert variables(container(pod, "engine"))["PYTHONPATH"] == PLUGIN_DIR
    free = [{**one, "podTemplate": {"spec": engines}} for one in patched]
    without = pod_of(change(over, pools=free, routing={}), "worker")
    assert variables(container(without, "engine"))["PYTHONPATH"] == "/opt/other"


CLAIM = {"persistentVolumeClaim": {"claimName": "node-memory"}}


def test_a_volume_of_the_namespace_takes_the_place_of_the_hostpath_in_every_pod_that_shares(
    over: MMRouterDeployment,
) -> None:
    """The kubelet gives it to the pods' own group, so no container is root, and `restricted` allows the pods."""
    plain = transferred(over, "shm", roles(sharedMemory=NODE))
    made = change(plain, routing={"transfer": "shm", "sharedVolume": CLAIM})
    for one in ("frontend", *(pool.name for pool in made.spec.pools)):
        pod, before = pod_of(made, one), pod_of(plain, one)
        assert [v for v in pod["volumes"] if v["name"] == "shared"] == [{"name": "shared", **CLAIM}]
        assert list(violations(pod)) == []
        assert list(violations(before)) != []
        name = "router" if one == "frontend" else "engine"
        assert container(pod, name)["volumeMounts"] == container(before, name)["volumeMounts"]
    before, after = (hashes(templates(dep)) for dep in (plain, made))
    assert {name for name in after if after[name] != before[name]} == set(after)
    assert "node-memory" in str(references(made))
    with pytest.raises(SpecError, match="sharedVolume"):
        pod_of(change(plain, routing={"transfer": "shm", "sharedVolume": {"persistentVolumeClaim": {}}}), "prefill")


@pytest.mark.parametrize(
    ("routing", "memory", "sentence"),
    [
        (
            {"transfer": "auto"},
            [NODE, {}],
            "images: inside requests, because routing.transfer is auto, and sharedMemory.scope of b is pod",
        ),
        ({"transfer": "none"}, [NODE, NODE], "images: inside requests, because routing.transfer is none"),
        (
            {"transfer": "auto"},
            [NODE, NODE],
            "images: shm, processed by renderers while that is measured to be faster, through a hostPath ",
        ),
        (
            {"transfer": "auto", "sharedVolume": CLAIM},
            [NODE, NODE],
            "through the volume persistentVolumeClaim of routing.sharedVolume",
        ),
        (
            {"transfer": "auto", "sharedVolume": {"hostPath": {"path": "/x"}}},
            [NODE, NODE],
            "through the volume hostPath of routing.sharedVolume, which needs a namespace of level privileged",
        ),
        ({"transfer": "nixl"}, [{}, {}], "images: nixl, processed by renderers, through no shared memory"),
    ],
)
def test_a_plan_says_how_images_travel_through_what_and_why(
    over: MMRouterDeployment, routing: dict[str, Any], memory: list[dict[str, str]], sentence: str
) -> None:
    pools = [
        pool(*each, "cpu", sharedMemory=m) for each, m in zip((("a", "worker"), ("b", "renderer")), memory, strict=True)
    ]
    assert sentence in transfer_line(change(over, routing=routing, pools=pools))
