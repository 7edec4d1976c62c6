"""The podTemplate overlay does what `kubectl patch --local --type=strategic` does.

`golden/kubectl-overlay.json` holds a pod template, patches, and kubectl's answers. Where kubectl is installed, one
answer is recorded again; MMROUTER_UPDATE_GOLDEN=1 records all of them and rewrites the file.
"""

import copy
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.conftest import examples
from unit.render.objects import SHORTEST, change, container, named, pod_of, rendered, template_labels, with_pool

from mmrouter_lib.api import MMRouterDeployment, SpecError
from mmrouter_operator.model.kinds import INPUTS_HASH
from mmrouter_operator.render import overridden
from mmrouter_operator.render.pod.strategic_merge import MERGE_KEYS, OverlayError, overlay

FILE = Path(__file__).parent / "golden" / "kubectl-overlay.json"
GOLDEN = json.loads(FILE.read_text())
TEMPLATE: dict[str, Any] = GOLDEN["template"]
CASES = {case["title"]: case for case in GOLDEN["cases"]}


def ask_kubectl(patch: dict[str, Any], folder: Path) -> dict[str, Any]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("not run: no kubectl")
    obj = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}}
    file = folder / "deployment.json"
    file.write_text(json.dumps({**obj, "spec": {"selector": {}, "template": TEMPLATE}}))
    text = json.dumps({"spec": {"template": patch}})
    command = [kubectl, "patch", "--local", "-f", str(file), "--type=strategic", "-p", text, "-o", "json"]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    template: dict[str, Any] = json.loads(done.stdout)["spec"]["template"]
    return template


@pytest.mark.parametrize("title", sorted(CASES))
def test_the_overlay_equals_kubectl(title: str) -> None:
    case = CASES[title]
    assert overlay(TEMPLATE, case["patch"]) == case["result"]


def test_the_recorded_answers_are_kubectls(tmp_path: Path) -> None:
    if os.environ.get("MMROUTER_UPDATE_GOLDEN") == "1":
        for case in GOLDEN["cases"]:
            case["result"] = ask_kubectl(case["patch"], tmp_path)
        cases = ",\n".join(json.dumps(case, sort_keys=True) for case in GOLDEN["cases"])
        FILE.write_text(f'{{"template": {json.dumps(TEMPLATE)},\n"cases": [\n{cases}\n]}}\n')
    case = CASES["many at once"]
    assert ask_kubectl(case["patch"], tmp_path) == case["result"]


def test_nulls_and_deletions_in_something_new_have_nothing_to_delete() -> None:
    """kubectl leaves them in for the API server to drop; nothing drops them after us."""
    patch = {"spec": {"containers": [{"name": "n", "tty": None, "env": [{"name": "B", "$patch": "delete"}]}]}}
    assert overlay(TEMPLATE, patch)["spec"]["containers"][0] == {"name": "n", "env": []}


@pytest.mark.parametrize(
    ("patch", "path", "message"),
    [
        ({"kind": "Pod"}, "kind", "`metadata` and `spec` only"),
        ({"spec": "x"}, "spec", "is an object, not 'x'"),
        ({"spec": {"nodeSelector": []}}, "spec.nodeSelector", "is an object, not a list"),
        ({"spec": {"containers": {"name": "engine"}}}, "spec.containers", "is a list, not an object"),
        ({"spec": {"containers": ["engine"]}}, "spec.containers", "holds objects, not 'engine'"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers", "needs its `name`"),
        ({"spec": {"containers": [{"$patch": "delete"}]}}, "spec.containers", "needs its `name`"),
        ({"spec": {"containers": [{"name": None}]}}, "spec.containers.name", "as a text or a number, not null"),
        ({"spec": {"containers": [{"name": ["engine"]}]}}, "spec.containers.name", "as a text or a number, not a list"),
        ({"spec": {"containers": [{"name": "n", "env": [{"x": 1}]}]}}, "spec.containers.env", "needs its `name`"),
        ({"spec": {"nodeSelector": {"$patch": "remove"}}}, "spec.nodeSelector.$patch", "`delete` or `replace`"),
        ({"spec": {"$setElementOrder/containers": []}}, "spec.$setElementOrder/containers", "not supported"),
        ({"spec": {"nodeSelector": {"$retainKeys": ["a"], "b": "1"}}}, "spec.nodeSelector.b", "must list every key"),
    ],
)
def test_a_malformed_patch_is_an_error_with_its_place(patch: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(OverlayError, match=message.replace("$", r"\$")) as caught:
        overlay(TEMPLATE, patch)
    assert caught.value.path == path


SCALARS = st.text("ab", max_size=3) | st.integers(0, 9) | st.booleans()
MAPS = st.dictionaries(st.sampled_from("wxyz"), SCALARS, max_size=3)


def keyed(key: str, more: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[list[dict[str, Any]]]:
    item = st.builds(lambda name, rest: {**rest, key: name}, st.sampled_from("abcd"), more)
    return st.lists(item, max_size=4, unique_by=lambda element: element[key])


CONTAINER = st.fixed_dictionaries(
    {},
    optional={
        "image": st.text("ab", max_size=3),
        "args": st.lists(st.text("ab", max_size=2), max_size=3),
        "env": keyed("name", st.fixed_dictionaries({}, optional={"value": st.text("ab", max_size=2)})),
        "volumeMounts": keyed("mountPath", MAPS),
        "resources": st.fixed_dictionaries({}, optional={"limits": MAPS}),
    },
)
TEMPLATES = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries({}, optional={"labels": MAPS}),
        "spec": st.fixed_dictionaries(
            {}, optional={"containers": keyed("name", CONTAINER), "volumes": keyed("name", MAPS), "nodeSelector": MAPS}
        ),
    }
)


@settings(max_examples=examples(60), deadline=None)
@given(TEMPLATES, TEMPLATES)
def test_a_patch_wins_everywhere_and_only_where_it_speaks(template: dict[str, Any], patch: dict[str, Any]) -> None:
    before = copy.deepcopy((template, patch))
    merged = overlay(template, patch)
    assert (template, patch) == before
    assert overlay(merged, patch) == merged
    assert overlay(template, {}) == template
    assert overlay(template, template) == template
    _covers(merged, patch, template, ())


def _covers(merged: Any, patch: Any, template: Any, path: tuple[str, ...]) -> None:
    """Every value of the patch is in the result; every other value of the result is the template's."""
    if isinstance(merged, dict):
        patch, template = patch or {}, template or {}
        assert merged.keys() == patch.keys() | template.keys()
        for key in merged:
            _covers(merged[key], patch.get(key), template.get(key), (*path, key))
    elif isinstance(merged, list) and path in MERGE_KEYS and isinstance(patch, list):
        name = MERGE_KEYS[path]
        sides = [{item[name]: item for item in side or []} for side in (merged, patch, template)]
        assert sides[0].keys() == sides[1].keys() | sides[2].keys()
        for key in sides[0]:
            _covers(*(side.get(key) for side in sides), path)
    else:
        assert merged == (template if patch is None else patch)


PATH = "spec.pools[0].podTemplate"


def patched(dep: MMRouterDeployment, patch: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the worker's pod template with a patch, and the places that were put back, within the patch."""
    dep = with_pool(dep, podTemplate=patch)
    obj = named(rendered(dep), "Deployment", f"{dep.metadata.name}-worker")
    places = {place.removeprefix(f"{PATH}.") for place in overridden(dep)}
    return obj["spec"]["template"], places


def in_engine(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


def in_sidecar(**fields: Any) -> dict[str, Any]:
    return {"spec": {"initContainers": [{"name": "sidecar", **fields}]}}


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"spce": {}}, ".spce: a pod template has"),
        (in_engine(**{"$patch": "delete"}), ".spec.containers: container `engine` cannot be removed"),
        ({"spec": None}, ".spec.initContainers: container `sidecar` cannot"),
        ({"spec": {"containers": [{"$patch": "replace"}, {"name": "engine", "env": [{}]}]}},
         ".spec.containers.env: every element needs its `name`"),
    ],
)  # fmt: skip
def test_what_cannot_be_laid_over_is_an_error_with_its_field(patch: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        rendered(with_pool(SHORTEST, podTemplate=patch))
    assert str(caught.value).startswith(f"{PATH}{message}")


def test_labels_and_hash_of_ours_survive() -> None:
    patch = {"metadata": {"labels": {"mmrouter.io/pool": "other", "team": "vision"}, "annotations": None}}
    template, places = patched(SHORTEST, patch)
    assert template["metadata"]["labels"]["mmrouter.io/pool"] == "worker"
    assert template["metadata"]["labels"]["team"] == "vision"
    assert INPUTS_HASH in template["metadata"]["annotations"]
    assert places == {"metadata.labels.mmrouter.io/pool", f"metadata.annotations.{INPUTS_HASH}"}


def test_readiness_gates_stay_and_others_may_join() -> None:
    theirs = [{"conditionType": "site.example/load-balanced"}]
    template, places = patched(SHORTEST, {"spec": {"readinessGates": theirs}})
    gates = [gate["conditionType"] for gate in template["spec"]["readinessGates"]]
    assert gates == ["mmrouter.io/routable", "mmrouter.io/verified", "site.example/load-balanced"]
    assert len(places) == 2


@pytest.mark.parametrize(
    ("patch", "place"),
    [
        ({"spec": {"volumes": [{"name": "config", "emptyDir": {}, "$retainKeys": ["name", "emptyDir"]}]}},
         "volumes[config]"),
        ({"spec": {"volumes": [{"name": "state", "$patch": "delete"}]}}, "volumes[state]"),
        (in_sidecar(command=["sh"]), "initContainers[sidecar].command"),
        (in_sidecar(restartPolicy=None), "initContainers[sidecar].restartPolicy"),
        (in_sidecar(volumeMounts=[{"mountPath": "/etc/mmrouter", "name": "tmp", "readOnly": None}]),
         "initContainers[sidecar].volumeMounts[/etc/mmrouter]"),
        (in_sidecar(startupProbe={"httpGet": {"port": 1}}), "initContainers[sidecar].startupProbe.httpGet"),
        (in_engine(readinessProbe={"httpGet": {"path": "/"}}), "containers[engine].readinessProbe.httpGet"),
        (in_engine(ports=[{"containerPort": 8000, "$patch": "delete"}]), "containers[engine].ports[http]"),
        (in_engine(env=[{"name": "POD_IP", "$patch": "delete"}]), "containers[engine].env[POD_IP]"),
        (in_engine(env=[{"name": "VLLM_API_KEY", "value": "known", "valueFrom": None}]),
         "containers[engine].env[VLLM_API_KEY]"),
    ],
)  # fmt: skip
def test_what_we_cannot_do_without_is_put_back_and_named(patch: dict[str, Any], place: str) -> None:
    plain, _ = patched(SHORTEST, {})
    template, places = patched(SHORTEST, patch)
    assert places == {f"spec.{place}"}
    assert _comparable(template) == _comparable(plain)


def _comparable(template: dict[str, Any]) -> dict[str, Any]:
    """Return a template without its hash, which depends on the patch, and without the order of keyed lists."""
    found = copy.deepcopy(template)
    del found["metadata"]["annotations"]
    found["spec"]["volumes"].sort(key=lambda volume: volume["name"])
    for one in [*found["spec"]["initContainers"], *found["spec"]["containers"]]:
        for name, key in (("env", "name"), ("ports", "name"), ("volumeMounts", "mountPath")):
            one.get(name, []).sort(key=lambda item: item[key])
    return found


def test_the_rest_is_the_users() -> None:
    env = [{"name": "HOME", "value": "/home"}, {"name": "NCCL_DEBUG", "value": "INFO"}]
    patch = in_engine(livenessProbe=None, startupProbe={"failureThreshold": 9}, env=env)
    patch["spec"] |= {"serviceAccountName": "mine", "runtimeClassName": "nvidia", "affinity": None}
    patch["spec"]["volumes"] = [{"name": "hub", "emptyDir": None, "persistentVolumeClaim": {"claimName": "cache"}}]
    template, places = patched(SHORTEST, patch)
    assert places == set()
    pod = template["spec"]
    assert (pod["serviceAccountName"], pod["runtimeClassName"], "affinity" in pod) == ("mine", "nvidia", False)
    assert {"name": "hub", "persistentVolumeClaim": {"claimName": "cache"}} in pod["volumes"]
    engine = container(pod, "engine")
    assert "livenessProbe" not in engine
    assert engine["startupProbe"]["failureThreshold"] == 9
    assert engine["startupProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert all(item in engine["env"] for item in env)


def test_the_frontends_patch_is_held_to_the_same() -> None:
    router = {"name": "router", "command": ["sh"], "args": ["-c", "true"]}
    patch = {"metadata": {"labels": {"mmrouter.io/role": "worker"}}, "spec": {"containers": [router]}}
    dep = change(SHORTEST, frontend={"podTemplate": patch})
    frontend = named(rendered(dep), "Deployment", "qwen-vl-frontend")
    assert template_labels(frontend)["mmrouter.io/role"] == "frontend"
    router = container(pod_of(dep, "frontend"), "router")
    assert (router["command"], "args" in router) == (["mmrouter", "router"], False)
    assert set(overridden(dep)) == {
        "spec.frontend.podTemplate.metadata.labels.mmrouter.io/role",
        "spec.frontend.podTemplate.spec.containers[router].command",
        "spec.frontend.podTemplate.spec.containers[router].args",
    }
