"""Rendered objects as a plan: what is run, and what is refused with a reason."""

import base64
import copy
from pathlib import Path
from typing import Any

import pytest

from mmrouter_cli.local.environment import rewriter
from mmrouter_cli.local.folders import LocalError
from mmrouter_cli.local.run_plan import make_plan
from mmrouter_cli.local.volumes import link_nested, make_volumes, mount_paths
from mmrouter_lib.api import parse_deployment
from mmrouter_lib.api.pod_paths import CHAT_TEMPLATE_PATH, CONFIG_DIR
from mmrouter_operator.model.credentials import new_secret_data
from mmrouter_operator.render import render

RESOURCE: dict[str, Any] = {
    "apiVersion": "mmrouter.io/v1alpha1",
    "kind": "MMRouterDeployment",
    "metadata": {"name": "demo"},
    "spec": {
        "model": {"id": "a/b", "volume": {"hostPath": {"path": "models"}}},
        "engine": {"type": "vllm"},
        "pools": [{"name": "worker", "role": "worker", "replicas": 3, "accelerator": {"kind": "cpu"}}],
    },
}


def test_what_the_operator_renders_can_be_planned() -> None:
    plan = make_plan(render(parse_deployment(RESOURCE), secrets=new_secret_data()))
    assert [pod.name for pod in plan.pods] == [
        "demo-worker-0",
        "demo-worker-1",
        "demo-worker-2",
        "demo-frontend-0",
        "demo-frontend-1",
    ]
    worker = plan.pods[0]
    assert [(c.name, c.sidecar) for c in worker.init] == [("sidecar", True)]
    assert worker.ports == {8000, 7557, 7558, 9090}
    assert (worker.port("http"), worker.port(1234), worker.port("none")) == (8000, 1234, None)
    assert plan.services[0].selector.items() <= plan.pods[3].labels.items()
    assert len(plan.secrets["demo-secrets"]["identity.key"]) == 32


def test_a_template_and_api_keys_lie_where_the_processes_look(tmp_path: Path) -> None:
    resource = copy.deepcopy(RESOURCE)
    resource["spec"]["engine"]["chatTemplate"] = {"configMap": {"name": "templates", "key": "t.jinja"}}
    resource["spec"]["frontend"] = {"apiKeys": {"secret": {"name": "keys"}}}
    objects: list[dict[str, Any]] = [
        {"kind": "ConfigMap", "metadata": {"name": "templates"}, "data": {"t.jinja": "{{ messages }}"}},
        {"kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"red": "key-1"}},
    ]
    rendered = render(parse_deployment(resource), secrets=new_secret_data())
    (tmp_path / "models").mkdir()
    plan = make_plan([*objects, *rendered])
    found: dict[str, dict[str, str]] = {}
    for number, pod in enumerate(plan.pods):
        folder = tmp_path / str(number)
        volumes = make_volumes(pod, plan, folder=folder, tmpfs=folder / "shm", base_dir=tmp_path)
        for container in (*pod.init, *pod.containers):
            mounts = mount_paths(container, volumes, pod.name)
            link_nested(mounts, [tmp_path])
            found[container.name] = mounts
    for name in ("engine", "sidecar", "router"):
        template = Path(rewriter(found[name])(CHAT_TEMPLATE_PATH))
        assert template.read_text() == "{{ messages }}"
    assert (Path(found["router"][CONFIG_DIR]) / "api-keys" / "red").read_text() == "key-1"
    engine = {path.name for path in Path(found["engine"][CONFIG_DIR]).rglob("*") if path.is_file()}
    assert engine == {"template.jinja"}
    with pytest.raises(LocalError, match="there is no configMap templates here"):
        make_volumes(plan.pods[0], make_plan(rendered), folder=tmp_path / "x", tmpfs=tmp_path / "y", base_dir=tmp_path)


def test_memory_that_pods_share_is_one_folder_of_the_run(tmp_path: Path) -> None:
    resource = copy.deepcopy(RESOURCE)
    resource["spec"]["pools"][0]["sharedMemory"] = {"scope": "node"}
    plan = make_plan(render(parse_deployment(resource), secrets=new_secret_data()))
    (tmp_path / "models").mkdir()
    found = []
    for number, pod in enumerate(plan.pods[:2]):
        folders = {"folder": tmp_path / "run" / str(number), "tmpfs": tmp_path / "tmpfs" / str(number)}
        found.append(make_volumes(pod, plan, **folders, base_dir=tmp_path)["shared"])
    assert found[0] == found[1]
    assert found[0].is_dir()
    assert found[0].is_relative_to(tmp_path / "tmpfs")


def test_what_hands_images_over_is_there_on_one_machine_too(tmp_path: Path) -> None:
    resource = copy.deepcopy(RESOURCE)
    node = {"sharedMemory": {"scope": "node"}, "accelerator": {"kind": "cpu"}}
    resource["spec"]["pools"] = [{"name": n, "role": n, **node} for n in ("worker", "renderer")]
    resource["spec"]["routing"] = {"transfer": "shm"}
    plan = make_plan(render(parse_deployment(resource), secrets=new_secret_data()))
    (tmp_path / "models").mkdir()
    roots, plugins = set(), set()
    for number, pod in enumerate(plan.pods):
        folders = {"folder": tmp_path / "run" / str(number), "tmpfs": tmp_path / "tmpfs" / str(number)}
        volumes = make_volumes(pod, plan, **folders, base_dir=tmp_path)
        for container in (*pod.init, *pod.containers):
            rewrite = rewriter(mount_paths(container, volumes, pod.name))
            words = [rewrite(word) for word in container.command]
            if "--allowed-local-media-path" in words:
                roots.add(words[words.index("--allowed-local-media-path") + 1])
            if container.name in ("router", "engine", "sidecar"):
                roots |= {rewrite(v["value"]) for v in container.env if v["name"] == "MMROUTER_SHARED_DIR"}
            if container.name == "handover-plugin":
                plugins.add(words[-1])
            plugins |= {rewrite(v["value"]) for v in container.env if v["name"] == "PYTHONPATH"}
    assert len(roots) == 1  # every process of every pod: one folder
    assert len(plugins) == 2  # engine and renderer: one each


def test_data_is_read_in_all_its_forms() -> None:
    plan = make_plan(
        [
            {
                "kind": "Secret",
                "metadata": {"name": "s"},
                "data": {"a": base64.b64encode(b"1").decode()},
                "stringData": {"b": "2"},
            },
            {"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"t": "ä"}, "binaryData": {"b": "AA=="}},
            {"kind": "NetworkPolicy", "metadata": {"name": "n"}},
        ]
    )
    assert plan.secrets == {"s": {"a": b"1", "b": b"2"}}
    assert plan.config_maps == {"c": {"t": "ä".encode(), "b": b"\0"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"command": None}, "container web/web has no command"),
        ({"readinessProbe": {"grpc": {"port": 1}}}, "web/web: readinessProbe needs exactly one of"),
        ({"volumeMounts": [{"name": "v", "mountPath": "/x", "subPathExpr": "$(A)"}]}, "subPathExpr is not supported"),
        ({"volumeMounts": [{"name": "v", "mountPath": "/"}]}, "nothing can be mounted at /"),
    ],
)
def test_a_container_that_cannot_be_run_is_refused(kit: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(LocalError, match=message):
        make_plan([kit.deployment("web", {**kit.server(), **change})])


def test_a_kind_that_would_be_missed_is_refused() -> None:
    with pytest.raises(LocalError, match="StatefulSet x cannot be run locally"):
        make_plan([{"kind": "StatefulSet", "metadata": {"name": "x"}}])
