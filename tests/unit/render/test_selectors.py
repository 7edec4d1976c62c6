"""All children of random deployments together: who owns them, whom they select, and what they name is there."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from unit.render.objects import Object, containers, name, rendered, selects

from mmrouter_lib.api import MMRouterDeployment, SpecError, parse_deployment
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.kinds import KEDA_API, POD_METRICS_APIS, POD_MONITOR_API, Capabilities

Rendered = tuple[MMRouterDeployment, list[Object]]

CONFIG = OperatorConfig(prometheus_address="http://prometheus:9090", pod_cidrs=("10.244.0.0/16",))
SERVED = st.sampled_from([(), (POD_MONITOR_API,), (POD_MONITOR_API, KEDA_API), (POD_MONITOR_API, POD_METRICS_APIS[0])])
ROLE_SETS = [
    ("worker",),
    ("worker", "worker", "worker"),
    ("worker", "renderer"),
    ("worker", "encoder"),
    ("prefill", "decode"),
    ("encoder", "prefill", "decode", "renderer"),
]
# Names that are beginnings of one another, where a selector by name alone would take too much.
NAMES = ["a", "a-b", "a-b-c", "b", "frontend-a"]
POOL_NAMES = ["a", "b", "b-c", "engine", "transfer", "config"]


@st.composite
def pools(draw: st.DrawFn, roles: tuple[str, ...]) -> list[Object]:
    names = draw(st.permutations(POOL_NAMES))
    found = []
    for called, role in zip(names, roles, strict=False):
        pool: Object = {
            "name": called,
            "role": role,
            "replicas": draw(st.integers(0, 3)),
            "accelerator": {"kind": "cpu" if role == "renderer" else "nvidia"},
            "image": "registry.example/engine:1",
        }
        if pool["replicas"] and role != "renderer" and draw(st.booleans()):
            metric = "encoderUtilization" if role == "encoder" else "kvUsage"
            pool["autoscaling"] = {"maxReplicas": draw(st.integers(1, 4)), "metric": metric}
        found.append(pool)
    return found


@st.composite
def deployments(draw: st.DrawFn) -> MMRouterDeployment:
    called = draw(st.sampled_from(NAMES))
    spec: Object = {
        "model": {"id": "org/model", "revision": "0" * 40},
        "engine": {"type": "vllm"},
        "frontend": {"replicas": draw(st.integers(1, 3))},
        "routing": draw(st.sampled_from([{}, {"media": {"fetch": "public"}}])),
        "pools": draw(pools(draw(st.sampled_from(ROLE_SETS)))),
        "networkPolicy": {"enabled": draw(st.booleans())},
    }
    if draw(st.booleans()):
        spec["model"]["volume"] = {"persistentVolumeClaim": {"claimName": "weights"}}
    return parse_deployment(
        {
            "apiVersion": "mmrouter.io/v1alpha1",
            "kind": "MMRouterDeployment",
            "metadata": {"name": called, "namespace": "inference", "uid": f"uid-of-{called}"},
            "spec": spec,
        }
    )


def children(dep: MMRouterDeployment, served: tuple[str, ...]) -> list[Object]:
    try:
        return rendered(dep, capabilities=Capabilities(frozenset(served)), config=CONFIG)
    except SpecError:
        assume(False)
        raise


def of(objects: list[Object], *kinds: str) -> Iterator[Object]:
    return (obj for obj in objects if obj["kind"] in kinds)


def pods(objects: list[Object]) -> dict[str, dict[str, str]]:
    """Deployment -> labels of its pods."""
    return {name(obj): obj["spec"]["template"]["metadata"]["labels"] for obj in of(objects, "Deployment")}


def selectors(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Every selector of pods in the objects, with what has it."""
    for obj in objects:
        spec, who = obj.get("spec", {}), f"{obj['kind']} {name(obj)}"
        match obj["kind"]:
            case "Service":
                yield who, {"matchLabels": spec["selector"]}
            case "Deployment" | "PodDisruptionBudget" | "PodMonitor":
                yield who, spec["selector"]
            case "InferencePool":
                yield who, spec["selector"]
            case "NetworkPolicy":
                yield who, spec["podSelector"]
                for rule in itertools.chain(spec["ingress"], spec["egress"]):
                    for peer in (*rule.get("from", []), *rule.get("to", [])):
                        if "podSelector" in peer and "namespaceSelector" not in peer:
                            yield who, peer["podSelector"]
        if obj["kind"] == "Deployment":
            template = spec["template"]["spec"]
            for constraint in template.get("topologySpreadConstraints", []):
                yield who, constraint["labelSelector"]


def container_ports(obj: Object) -> dict[str, int]:
    """Name -> number of every port that a pod's containers name."""
    return {port["name"]: port["containerPort"] for one in containers(obj) for port in one.get("ports", [])}


LIMITS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def random(test: Callable[[Rendered], None]) -> Callable[[], None]:
    """Run a test with random deployments, and what is rendered for each where some APIs are served."""
    return LIMITS(given(st.tuples(deployments(), SERVED).map(lambda drawn: (drawn[0], children(*drawn))))(test))


@random
def test_every_child_is_marked_and_owned(drawn: Rendered) -> None:
    dep, objects = drawn
    for obj in objects:
        metadata = obj["metadata"]
        assert metadata["namespace"] == "inference"
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", metadata["name"])
        assert metadata["labels"]["mmrouter.io/deployment"] == dep.metadata.name
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "mmrouter-operator"
        (owner,) = metadata["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("MMRouterDeployment", dep.metadata.name)
        assert owner["uid"] == dep.metadata.uid
        assert owner["controller"] is True
    assert max(Counter((obj["kind"], name(obj)) for obj in objects).values()) == 1


@random
def test_a_selector_takes_the_pods_that_it_is_for(drawn: Rendered) -> None:
    dep, objects = drawn
    labels = pods(objects)
    frontend, engines = f"{dep.metadata.name}-frontend", {f"{dep.metadata.name}-{p.name}" for p in dep.spec.pools}
    assert set(labels) == {frontend} | engines

    def taken(selector: Object) -> set[str]:
        return {pod for pod in labels if selects(selector, labels[pod])}

    for obj in of(objects, "Deployment", "PodDisruptionBudget"):
        assert taken(obj["spec"]["selector"]) == {name(obj)}
    (service,) = of(objects, "Service")
    assert taken({"matchLabels": service["spec"]["selector"]}) == {frontend}
    closed = [taken(obj["spec"]["podSelector"]) for obj in of(objects, "NetworkPolicy")]
    assert set().union(*closed) == (set(labels) if dep.spec.network_policy.enabled else set())
    for obj in of(objects, "NetworkPolicy"):
        expected = {frontend} if name(obj) == frontend else engines
        if name(obj) == f"{dep.metadata.name}-transfer":
            expected = {f"{dep.metadata.name}-{p.name}" for p in dep.spec.pools if p.role != "renderer"}
        assert taken(obj["spec"]["podSelector"]) == expected
    for obj in of(objects, "PodMonitor"):
        followed = {f"{dep.metadata.name}-{p.name}" for p in dep.spec.pools if p.role != "renderer"}
        assert taken(obj["spec"]["selector"]) == ({frontend} if name(obj) == frontend else followed)


@LIMITS
@given(deployments(), deployments(), SERVED)
def test_no_selector_takes_pods_of_another_deployment(
    dep: MMRouterDeployment, other: MMRouterDeployment, served: tuple[str, ...]
) -> None:
    assume(dep.metadata.name != other.metadata.name)
    strangers = pods(children(other, ()))
    strangers["not ours"] = {"app": "shop"}
    for who, selector in selectors(children(dep, served)):
        assert not [pod for pod, labels in strangers.items() if selects(selector, labels)], who


@random
def test_what_a_child_names_is_there(drawn: Rendered) -> None:
    _, objects = drawn
    there = {(obj["kind"], name(obj)) for obj in objects}
    for obj in of(objects, "Deployment"):
        template = obj["spec"]["template"]["spec"]
        assert ("ServiceAccount", template["serviceAccountName"]) in there
        for volume in template["volumes"]:
            for source in volume.get("projected", {}).get("sources", []):
                for kind, field in (("ConfigMap", "configMap"), ("Secret", "secret")):
                    assert field not in source or (kind, source[field]["name"]) in there
    for obj in of(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        target = obj["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in there
        assert target["name"] == name(obj)
    for obj in of(objects, "RoleBinding"):
        assert ("Role", obj["roleRef"]["name"]) in there
        for subject in obj["subjects"]:
            assert (subject["kind"], subject["name"]) in there
            assert subject["namespace"] == "inference"


@random
def test_ports_that_are_opened_and_scraped_are_ports_of_the_pods(drawn: Rendered) -> None:
    dep, objects = drawn
    deployed = {name(obj): obj for obj in of(objects, "Deployment")}
    labels = pods(objects)
    for obj in of(objects, "PodMonitor"):
        for pod in (pod for pod in deployed if selects(obj["spec"]["selector"], labels[pod])):
            for endpoint in obj["spec"]["podMetricsEndpoints"]:
                assert endpoint["port"] in container_ports(deployed[pod])
    (service,) = of(objects, "Service")
    assert service["spec"]["ports"][0]["targetPort"] in container_ports(deployed[f"{dep.metadata.name}-frontend"])
    for policy in of(objects, "NetworkPolicy"):
        if name(policy) == f"{dep.metadata.name}-transfer":
            continue
        opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        chosen = [pod for pod in deployed if selects(policy["spec"]["podSelector"], labels[pod])]
        served_ports = {number for pod in chosen for number in container_ports(deployed[pod]).values()}
        assert opened <= served_ports


@random
def test_engines_that_transfer_reach_each_others_ports_for_it(drawn: Rendered) -> None:
    dep, objects = drawn
    policies = [p for p in of(objects, "NetworkPolicy") if name(p) == f"{dep.metadata.name}-transfer"]
    ours = {"http", "metrics", "feed", "feed-requests"}
    for obj in of(objects, "Deployment"):
        if name(obj) == f"{dep.metadata.name}-frontend" or not dep.spec.network_policy.enabled:
            continue
        for port in (number for called, number in container_ports(obj).items() if called not in ours):
            (policy,) = policies
            (rule,) = policy["spec"]["ingress"]
            assert any(entry["port"] <= port <= entry.get("endPort", entry["port"]) for entry in rule["ports"])
