"""Parts of the resource that are in Kubernetes' or an engine's own words, filled with anything that JSON can hold."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.conftest import examples
from unit.render.objects import Object, change, children, containers, load, rendered, with_pool

from mmrouter_lib.api import MMRouterDeployment, SpecError
from mmrouter_operator.model.external_refs import references
from mmrouter_operator.planning.rollout_progress import asks_of, strategy
from mmrouter_operator.render import overridden
from mmrouter_operator.render.pod.pod_security_violations import violations

Step = str | int
BASE = load("shortest")
TEMPLATES = {
    obj["metadata"]["labels"].get("mmrouter.io/pool", ""): obj["spec"]["template"]
    for obj in children(BASE, "Deployment")
}
POOL, FRONTEND = TEMPLATES[BASE.spec.pools[0].name], TEMPLATES[""]
KEYS = ("name", "conditionType", "mountPath", "containerPort", "topologyKey")

JUNK = st.recursive(
    st.sampled_from([None, 0, -1, 1.5, True, "", "x", "delete", "replace"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["x", "$patch", "$retainKeys", "add", "type", *KEYS]), inner, max_size=2)
    ),
    max_leaves=4,
)
UNUSED = """
    spec.hostAliases spec.imagePullSecrets spec.resourceClaims spec.schedulingGates spec.hostNetwork spec.affinity
    spec.securityContext.sysctls spec.securityContext.seLinuxOptions spec.securityContext.appArmorProfile
    spec.securityContext.windowsOptions spec.containers.0.securityContext.seccompProfile
    spec.containers.0.securityContext.capabilities.add spec.containers.0.securityContext.procMount
    spec.containers.0.envFrom metadata.finalizers
"""
"""Fields that no pod of ours has and that something after the merge reads."""


def paths(value: Any, here: tuple[Step, ...] = ()) -> Iterator[tuple[Step, ...]]:
    yield here
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in entries:
        yield from paths(inner, (*here, step))


def patch(path: tuple[Step, ...], leaf: Any, template: Any) -> Any:
    """Return a patch that reaches ``path`` of a template, through list elements by their merge keys."""
    if not path:
        return leaf
    step, *rest = path
    inner = template[step] if isinstance(template, list) else (template or {}).get(step)
    made = patch(tuple(rest), leaf, inner)
    if isinstance(step, str):
        return {step: made}
    if rest and isinstance(inner, dict) and isinstance(made, dict):
        made = {**{key: inner[key] for key in KEYS if key in inner}, **made}
    return [made]


def patches(template: dict[str, Any]) -> st.SearchStrategy[Any]:
    unused = (tuple(int(part) if part.isdigit() else part for part in text.split(".")) for text in UNUSED.split())
    places = [*(path for path in paths(template) if path), *unused]
    return st.builds(lambda path, leaf: patch(path, leaf, template), st.sampled_from(places), JUNK)


def everything(dep: MMRouterDeployment) -> list[Object]:
    """Do all that a reconcile does with a rendering, short of the cluster. Returns the Deployments."""
    references(dep)
    found = children(dep, "Deployment")
    for obj in found:
        list(violations(obj["spec"]["template"]["spec"]))
        asks_of(obj)
        strategy(obj)
        json.dumps(obj)
    overridden(dep)
    return found


def refused_at(dep: MMRouterDeployment, path: str) -> list[Object]:
    """Return the Deployments, none where the spec is refused, which it is with a field below ``path``."""
    try:
        return everything(dep)
    except SpecError as error:
        refused = error.errors
    assert refused
    assert all(place.startswith(path) and sentence for place, sentence in refused)
    return []


@settings(max_examples=examples(200), deadline=None)
@given(patches(POOL))
@example({"spec": {"topologySpreadConstraints": [{"topologyKey": []}]}})
@example({"spec": {"readinessGates": [None]}})
@example({"spec": {"readinessGates": [{"conditionType": []}]}})
@example({"spec": {"securityContext": {"sysctls": ["x"]}}})
@example({"spec": {"containers": [{"name": "engine", "env": [{"name": None}]}]}})
@example({"spec": {"containers": [{"name": "engine", "securityContext": {"capabilities": {"add": [[]]}}}]}})
@example({"spec": {"containers": [{"name": "engine", "livenessProbe": {"httpGet": {"port": {}}}}]}})
def test_any_pool_template_renders_or_is_refused_with_its_field(junk: dict[str, Any]) -> None:
    refused_at(with_pool(BASE, podTemplate=junk), "spec.pools[0].podTemplate.")


@settings(max_examples=examples(80), deadline=None)
@given(patches(FRONTEND))
def test_any_frontend_template_renders_or_is_refused_with_its_field(junk: dict[str, Any]) -> None:
    refused_at(change(BASE, frontend={"podTemplate": junk}), "spec.frontend.podTemplate.")


SOURCES = "persistentVolumeClaim hostPath nfs csi ephemeral emptyDir image iscsi projected x"
FIELDS = ["claimName", "path", "server", "driver", "readOnly", "volumeAttributes", "sources", "sizeLimit", "reference"]


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(SOURCES.split()), st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=3))
@example("persistentVolumeClaim", {"claimName": ["weights"]})
@example("emptyDir", {"sizeLimit": 1})
def test_any_model_volume_renders_or_is_refused_with_its_field(source: str, junk: dict[str, Any]) -> None:
    refused_at(change(BASE, model={"id": "a/b", "volume": {source: junk}}), "spec.model.volume.")


CONNECTOR = st.dictionaries(
    st.sampled_from(["kv_connector", "ec_connector", "kv_role", "transferBackend", "ibDevice", "x"]), JUNK, max_size=3
)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@settings(max_examples=examples(80), deadline=None)
@given(kv=CONNECTOR, ec=CONNECTOR)
@example(kv={"transferBackend": {}}, ec={"transferBackend": []})
@example(kv={"transferBackend": "nixl"}, ec={"transferBackend": None})
def test_any_connector_renders_or_is_refused_with_its_field(
    engine: str, kv: dict[str, Any], ec: dict[str, Any]
) -> None:
    roles = ("encoder", "prefill", "decode")
    pools = [{"name": role, "role": role, "accelerator": {"kind": "nvidia"}} for role in roles]
    dep = change(BASE, engine={"type": engine, "kvConnector": kv, "ecConnector": ec}, pools=pools)
    found = [one for obj in refused_at(dep, "spec.engine.") for one in containers(obj)]
    assert not {"None", "[]", "True", ""} & {argument for one in found for argument in one.get("args", [])}


def engine(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "engine", **fields}]}


@pytest.mark.parametrize(
    ("fields", "place", "sentence"),
    [
        ({"nodeSelector": {"rack": 7}}, "nodeSelector.rack", "is a text, not 7"),
        ({"hostNetwork": "yes"}, "hostNetwork", "is true or false, not 'yes'"),
        ({"readinessGates": [None]}, "readinessGates[0]", "is an object, not null"),
        (engine(securityContext={"capabilities": {"add": "SYS_PTRACE"}}),
         "containers[engine].securityContext.capabilities.add", "is a list, not 'SYS_PTRACE'"),
        (engine(livenessProbe={"httpGet": {"port": []}}),
         "containers[engine].livenessProbe.httpGet.port", "is a whole number or a text, not a list"),
        ({"containers": [{"name": "more", "ports": [{"containerPort": 9, "hostPort": "80"}]}]},
         "containers[more].ports[9].hostPort", "is a whole number, not '80'"),
        ({"volumes": [{"name": "w", "hostPath": {}}]}, "volumes[w].hostPath.path", "is required"),
        ({"tolerations": [{"tolerationSeconds": 1.5}]}, "tolerations[0].tolerationSeconds",
         "is a whole number, not 1.5"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_reported_with_its_place_and_the_right_type(
    fields: dict[str, Any], place: str, sentence: str
) -> None:
    with pytest.raises(SpecError) as caught:
        rendered(with_pool(BASE, podTemplate={"spec": fields}))
    assert caught.value.errors == ((f"spec.pools[0].podTemplate.spec.{place}", sentence),)


@pytest.mark.parametrize(
    "fields",
    [
        {"fieldOfANewerKubernetes": {"x": 1}},
        engine(fieldOfANewerKubernetes=[1]),
        engine(resources={"limits": {"cpu": 4}, "requests": {"cpu": 0.5}}),
        {"overhead": {"cpu": 1}},
        {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": 1073741824}}]},
        {"volumes": [{"name": "w", "iscsi": {"targetPortal": "10.0.0.1", "iqn": "iqn.2001-04.com.example:w"}}]},
        engine(lifecycle={"preStop": {"sleep": {}}}),
    ],
)
def test_what_the_api_server_takes_passes(fields: dict[str, Any]) -> None:
    everything(with_pool(BASE, podTemplate={"spec": fields}))
