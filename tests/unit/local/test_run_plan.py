"""Rendered objects as a plan: what is run, what is refused with a reason, and how variables and paths are written."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_cli.local.folders import LocalError
from mmrouter_cli.local.pods.container_process import expand, resolve_env, rewriter
from mmrouter_cli.local.pods.volumes import link_nested, make_volumes, mount_paths
from mmrouter_cli.local.run_plan import PodPlan, RunPlan, make_plan
from mmrouter_lib.api import parse_deployment
from mmrouter_lib.pod_paths import CHAT_TEMPLATE_PATH, CONFIG_DIR
from mmrouter_operator.model.credentials import new_secret_data
from mmrouter_operator.render import render


def rendered(**spec: Any) -> list[dict[str, Any]]:
    """What the operator renders of a small deployment; ``spec``: sections over its own."""
    pool = {"name": "worker", "role": "worker", "replicas": 3, "accelerator": {"kind": "cpu"}}
    model = {"id": "a/b", "volume": {"hostPath": {"path": "models"}}}
    kind = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment", "metadata": {"name": "demo"}}
    resource = {**kind, "spec": {"model": model, "engine": {"type": "vllm"}, "pools": [pool], **spec}}
    return list(render(parse_deployment(resource), secrets=new_secret_data()))


def volumes(plan: RunPlan, folder: Path) -> Iterator[tuple[PodPlan, dict[str, Path]]]:
    """Make the volumes of every pod."""
    (folder / "models").mkdir()
    for number, pod in enumerate(plan.pods):
        places = {"folder": folder / "run" / str(number), "tmpfs": folder / "tmpfs" / str(number)}
        yield pod, make_volumes(pod, plan, **places, base_dir=folder)


def test_what_the_operator_renders_can_be_planned() -> None:
    plan = make_plan(rendered())
    names = ("worker-0", "worker-1", "worker-2", "frontend-0", "frontend-1")
    assert [pod.name for pod in plan.pods] == [f"demo-{name}" for name in names]
    worker = plan.pods[0]
    assert [(c.name, c.sidecar) for c in worker.init] == [("sidecar", True)]
    assert worker.ports == {8000, 7557, 7558, 9090}
    assert (worker.port("http"), worker.port(1234), worker.port("none")) == (8000, 1234, None)
    assert plan.services[0].selector.items() <= plan.pods[3].labels.items()
    assert len(plan.secrets["demo-secrets"]["identity.key"]) == 32


def test_a_template_and_api_keys_lie_where_the_processes_look(tmp_path: Path) -> None:
    engine = {"type": "vllm", "chatTemplate": {"configMap": {"name": "templates", "key": "t.jinja"}}}
    objects = rendered(engine=engine, frontend={"apiKeys": {"secret": {"name": "keys"}}})
    named: list[dict[str, Any]] = [
        {"kind": "ConfigMap", "metadata": {"name": "templates"}, "data": {"t.jinja": "{{ messages }}"}},
        {"kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"red": "key-1"}},
    ]
    found: dict[str, dict[str, str]] = {}
    for pod, made in volumes(make_plan([*named, *objects]), tmp_path):
        for container in (*pod.init, *pod.containers):
            found[container.name] = mount_paths(container, made, pod.name)
            link_nested(found[container.name], [tmp_path])
    for name in ("engine", "sidecar", "router"):
        assert Path(rewriter(found[name])(CHAT_TEMPLATE_PATH)).read_text() == "{{ messages }}"
    assert (Path(found["router"][CONFIG_DIR]) / "api-keys" / "red").read_text() == "key-1"
    files = {path.name for path in Path(found["engine"][CONFIG_DIR]).rglob("*") if path.is_file()}
    assert files == {"template.jinja"}
    (tmp_path / "without").mkdir()
    with pytest.raises(LocalError, match="there is no configMap templates here"):
        next(volumes(make_plan(objects), tmp_path / "without"))


def test_memory_that_pods_share_is_one_folder_of_the_run(tmp_path: Path) -> None:
    pool = {"name": "worker", "role": "worker", "accelerator": {"kind": "cpu"}, "sharedMemory": {"scope": "node"}}
    plan = make_plan(rendered(pools=[{**pool, "replicas": 2}]))
    one, other = (made["shared"] for pod, made in volumes(plan, tmp_path) if "worker" in pod.name)
    assert one == other
    assert one.is_dir()
    assert one.is_relative_to(tmp_path / "tmpfs")


def test_what_hands_images_over_is_there_on_one_machine_too(tmp_path: Path) -> None:
    node = {"sharedMemory": {"scope": "node"}, "accelerator": {"kind": "cpu"}}
    pools = [{"name": n, "role": n, **node} for n in ("worker", "renderer")]
    roots, plugins = set(), set()
    for pod, made in volumes(make_plan(rendered(pools=pools, routing={"transfer": "shm"})), tmp_path):
        for container in (*pod.init, *pod.containers):
            rewrite = rewriter(mount_paths(container, made, pod.name))
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
    coded = {"a": base64.b64encode(b"1").decode()}
    plan = make_plan(
        [
            {"kind": "Secret", "metadata": {"name": "s"}, "data": coded, "stringData": {"b": "2"}},
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
def test_a_container_or_a_kind_that_cannot_be_run_is_refused(kit: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(LocalError, match=message):
        make_plan([kit.deployment("web", {**kit.server(), **change})])
    with pytest.raises(LocalError, match="StatefulSet x cannot be run locally"):
        make_plan([{"kind": "StatefulSet", "metadata": {"name": "x"}}])


PLACE = {"uid": "uid-1", "ip": "127.1.9.2", "node": "local"}
POD = PodPlan("web-0", "here", {"app": "web"}, {"note": "n"}, (), (), (), 30.0, **PLACE)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$$", "$"),
        ('{"endpoint":"tcp://$(A):5557"}', '{"endpoint":"tcp://1:5557"}'),
        *((text, text) for text in ("$(C)", "$A ${A} $ $(A", "$()")),
    ],
)
def test_references_are_expanded_as_in_kubernetes(text: str, result: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == result


CLUSTER = {"MMROUTER_DISCOVERY": "kubernetes", "MMROUTER_BIND": "all", "POD_LOOPBACK": "127.0.0.1"}
OWN = {"MMROUTER_DISCOVERY": "file", "MMROUTER_BIND": "pod", "POD_LOOPBACK": "127.1.9.2"}


@pytest.mark.parametrize(
    ("env", "result"),
    [
        ({"X": "$(Y)", "Y": "1", "Z": "$(Y)$(X)"}, {"X": "$(Y)", "Y": "1", "Z": "1$(Y)"}),
        ({**CLUSTER, "E": "tcp://$(POD_LOOPBACK):1"}, {**OWN, "E": "tcp://127.1.9.2:1"}),
    ],
    ids=["a value sees what stands before it", "a frontend reads its roster from a file and keeps to its address"],
)
def test_variables_have_their_local_values(env: dict[str, str], result: dict[str, str]) -> None:
    assert resolve_env([{"name": name, "value": value} for name, value in env.items()], [], POD, RunPlan()) == result


def test_downward_api_secrets_and_config_maps_become_values() -> None:
    fields = {"NAME": "metadata.name", "UID": "metadata.uid", "IP": "status.podIP", "NODE": "spec.nodeName"}
    fields |= {"APP": "metadata.labels['app']", "NOTE": "metadata.annotations['note']"}
    env: list[dict[str, Any]] = [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "TEXT", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "t"}}},
        {"name": "GONE", "valueFrom": {"secretKeyRef": {"name": "none", "key": "k", "optional": True}}},
        {"name": "BOTH", "value": "$(KEY)@$(IP)"},
    ]
    sources = [{"prefix": "P_", "secretRef": {"name": "s"}}]
    facts = {"NAME": "web-0", "UID": "uid-1", "IP": "127.1.9.2", "NODE": "local", "APP": "web", "NOTE": "n"}
    named = {"P_k": "v", "KEY": "v", "TEXT": "text", "BOTH": "v@127.1.9.2"}
    plan = RunPlan(config_maps={"c": {"t": b"text"}}, secrets={"s": {"k": b"v"}})
    assert resolve_env(env, sources, POD, plan) == {**facts, **named}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"fieldRef": {"fieldPath": "status.phase"}}, "status.phase is not known"),
        ({"resourceFieldRef": {"resource": "limits.cpu"}}, "resourceFieldRef is not supported"),
        ({"secretKeyRef": {"name": "none", "key": "k"}}, "there is no Secret none"),
        ({"configMapKeyRef": {"name": "c", "key": "none"}}, "c has no key none"),
    ],
)
def test_what_is_not_there_is_an_error(source: dict[str, object], message: str) -> None:
    with pytest.raises(LocalError, match=message):
        resolve_env([{"name": "X", "valueFrom": source}], [], POD, RunPlan(config_maps={"c": {}}))


MOUNTS = {
    "/tmp": "/run/1/tmp",
    "/etc/mmrouter": "/run/1/config",
    "/etc/mmrouter/api-keys": "/run/1/keys",
    "/dev/shm": "/dev/shm/r/1",
}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("/tmp", "/run/1/tmp"),
        ("/tmp/cache", "/run/1/tmp/cache"),
        ("--path=/tmp/x", "--path=/run/1/tmp/x"),
        ('{"dir":"/tmp","n":1}', '{"dir":"/run/1/tmp","n":1}'),
        ("/tmp:/etc/mmrouter", "/run/1/tmp:/run/1/config"),
        ("/etc/mmrouter/api-keys/a", "/run/1/keys/a"),
        ("/etc/mmrouter/api-keys2", "/run/1/config/api-keys2"),
        ("/dev/shm", "/dev/shm/r/1"),
        *((text, text) for text in ("/tmpfs", "/tmp.bak", "/var/tmp", "~/tmp", "http://host/tmp/x", "tmp")),
    ],
)
def test_mount_paths_are_rewritten_where_they_are_paths(text: str, result: str) -> None:
    assert rewriter(MOUNTS)(text) == result


@given(st.text("/tmpx.-= ", max_size=30))
def test_what_was_put_in_is_not_looked_at_again(text: str) -> None:
    marked = rewriter({"/tmp": "<>"})(text)
    assert rewriter({"/tmp": "/tmp/a/tmp"})(text) == marked.replace("<>", "/tmp/a/tmp")
    assert marked.replace("<>", "/tmp") == text
    assert rewriter({})(text) == text, "without mounts nothing changes"
