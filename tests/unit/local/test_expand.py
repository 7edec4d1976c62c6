"""Variables as Kubernetes expands them, and mount paths as they lie here."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_cli.local.environment import PodFacts, expand, resolve_env, rewriter
from mmrouter_cli.local.folders import LocalError

POD = PodFacts("web-0", "here", "uid-1", "127.1.9.2", "local", {"app": "web"}, {"note": "n"})


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$(C)", "$(C)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$$", "$"),
        ("$A ${A} $ $(A", "$A ${A} $ $(A"),
        ('{"endpoint":"tcp://$(A):5557"}', '{"endpoint":"tcp://1:5557"}'),
        ("$()", "$()"),
    ],
)
def test_references_are_expanded_as_in_kubernetes(text: str, result: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == result


def test_a_value_sees_only_what_stands_before_it() -> None:
    env = [{"name": "X", "value": "$(Y)"}, {"name": "Y", "value": "1"}, {"name": "Z", "value": "$(Y)$(X)"}]
    assert resolve_env(env, [], POD, {}, {}) == {"X": "$(Y)", "Y": "1", "Z": "1$(Y)"}


def test_downward_api_secrets_and_config_maps_become_values() -> None:
    def field(name: str, path: str) -> dict[str, object]:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    env = [
        field("NAME", "metadata.name"),
        field("UID", "metadata.uid"),
        field("IP", "status.podIP"),
        field("NODE", "spec.nodeName"),
        field("APP", "metadata.labels['app']"),
        field("NOTE", "metadata.annotations['note']"),
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "TEXT", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "t"}}},
        {"name": "GONE", "valueFrom": {"secretKeyRef": {"name": "none", "key": "k", "optional": True}}},
        {"name": "BOTH", "value": "$(KEY)@$(IP)"},
    ]
    values = resolve_env(
        env, [{"prefix": "P_", "secretRef": {"name": "s"}}], POD, {"c": {"t": b"text"}}, {"s": {"k": b"v"}}
    )
    assert values == {
        "P_k": "v",
        "NAME": "web-0",
        "UID": "uid-1",
        "IP": "127.1.9.2",
        "NODE": "local",
        "APP": "web",
        "NOTE": "n",
        "KEY": "v",
        "TEXT": "text",
        "BOTH": "v@127.1.9.2",
    }


def test_the_loopback_of_a_local_pod_is_its_own_address() -> None:
    env = [{"name": "POD_LOOPBACK", "value": "127.0.0.1"}, {"name": "E", "value": "tcp://$(POD_LOOPBACK):1"}]
    assert resolve_env(env, [], POD, {}, {})["E"] == "tcp://127.1.9.2:1"


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
        resolve_env([{"name": "X", "valueFrom": source}], [], POD, {"c": {}}, {})


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
        ("/tmpfs", "/tmpfs"),
        ("/tmp.bak", "/tmp.bak"),
        ("/var/tmp", "/var/tmp"),
        ("~/tmp", "~/tmp"),
        ("http://host/tmp/x", "http://host/tmp/x"),
        ("tmp", "tmp"),
    ],
)
def test_mount_paths_are_rewritten_where_they_are_paths(text: str, result: str) -> None:
    assert rewriter(MOUNTS)(text) == result


@given(st.text("/tmpx.-= ", max_size=30))
def test_what_was_put_in_is_not_looked_at_again(text: str) -> None:
    marked = rewriter({"/tmp": "<>"})(text)
    assert rewriter({"/tmp": "/tmp/a/tmp"})(text) == marked.replace("<>", "/tmp/a/tmp")
    assert marked.replace("<>", "/tmp") == text


def test_without_mounts_nothing_changes() -> None:
    assert rewriter({})("/tmp") == "/tmp"


def test_a_local_frontend_reads_its_roster_from_the_file_and_keeps_to_its_address_whatever_a_cluster_does() -> None:
    env = [{"name": "MMROUTER_DISCOVERY", "value": "kubernetes"}, {"name": "MMROUTER_BIND", "value": "all"}]
    assert resolve_env(env, [], POD, {}, {}) == {"MMROUTER_DISCOVERY": "file", "MMROUTER_BIND": "pod"}
