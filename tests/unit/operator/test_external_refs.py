"""Objects that a resource refers to: which ones, and whether they exist."""

from collections import Counter
from typing import Any

import pytest
from unit.operator.simulated_world import deployment

from mmrouter_operator.cluster.client import Unavailable
from mmrouter_operator.cluster.existence import ExistenceCache
from mmrouter_operator.model.external_refs import references
from mmrouter_operator.model.kinds import Ref
from mmrouter_operator.model.snapshot import Missing

WHOLE: dict[str, Any] = {
    "model": {
        "id": "org/model",
        "volume": {"persistentVolumeClaim": {"claimName": "weights"}},
        "tokenSecret": {"name": "hub", "key": "token"},
    },
    "engine": {"type": "vllm", "chatTemplate": {"configMap": {"name": "template", "key": "jinja"}}},
    "frontend": {"apiKeys": {"secret": {"name": "keys"}}, "podTemplate": {"spec": {"priorityClassName": "high"}}},
    "pools": [
        {
            "name": "work",
            "role": "worker",
            "accelerator": {
                "kind": "nvidia",
                "claims": [
                    {"name": "gpu", "resourceClaimTemplateName": "one-gpu"},
                    {"name": "nic", "resourceClaimName": "rail"},
                ],
            },
            "podTemplate": {
                "spec": {
                    "runtimeClassName": "nvidia",
                    "serviceAccountName": "team",
                    "imagePullSecrets": [{"name": "registry"}],
                    "volumes": [
                        {"name": "a", "secret": {"secretName": "extra"}},
                        {"name": "b", "secret": {"secretName": "maybe", "optional": True}},
                        {"name": "c", "projected": {"sources": [{"configMap": {"name": "part"}}]}},
                        {"name": "d", "emptyDir": {}},
                    ],
                    "containers": [
                        {
                            "name": "engine",
                            "env": [
                                {"name": "X", "valueFrom": {"secretKeyRef": {"name": "env", "key": "x"}}},
                                {"name": "Y", "value": "plain"},
                                {
                                    "name": "Z",
                                    "valueFrom": {"configMapKeyRef": {"name": "o", "key": "z", "optional": True}},
                                },
                            ],
                            "envFrom": [{"configMapRef": {"name": "all"}}],
                        }
                    ],
                }
            },
        }
    ],
}


def test_every_reference_is_found_with_the_field_that_names_it() -> None:
    pod = "spec.pools[0].podTemplate.spec"
    assert [(ref.kind, ref.name, path) for ref, path in references(deployment(WHOLE))] == [
        ("PersistentVolumeClaim", "weights", "spec.model.volume.persistentVolumeClaim.claimName"),
        ("Secret", "hub", "spec.model.tokenSecret.name"),
        ("ConfigMap", "template", "spec.engine.chatTemplate.configMap.name"),
        ("Secret", "keys", "spec.frontend.apiKeys.secret.name"),
        ("PriorityClass", "high", "spec.frontend.podTemplate.spec.priorityClassName"),
        ("ResourceClaimTemplate", "one-gpu", "spec.pools[0].accelerator.claims[0].resourceClaimTemplateName"),
        ("ResourceClaim", "rail", "spec.pools[0].accelerator.claims[1].resourceClaimName"),
        ("RuntimeClass", "nvidia", f"{pod}.runtimeClassName"),
        ("ServiceAccount", "team", f"{pod}.serviceAccountName"),
        ("Secret", "registry", f"{pod}.imagePullSecrets[0].name"),
        ("Secret", "extra", f"{pod}.volumes[0].secret.secretName"),
        ("ConfigMap", "part", f"{pod}.volumes[2].projected.sources[0].configMap.name"),
        ("Secret", "env", f"{pod}.containers[0].env[0].valueFrom.secretKeyRef.name"),
        ("ConfigMap", "all", f"{pod}.containers[0].envFrom[0].configMapRef.name"),
    ]


def test_kinds_without_a_namespace_are_looked_for_without_one() -> None:
    by_kind = {ref.kind: ref for ref, _ in references(deployment(WHOLE))}
    assert by_kind["RuntimeClass"].namespace == ""
    assert by_kind["Secret"].namespace == "team"
    assert by_kind["ResourceClaim"].api == "resource.k8s.io/v1"


def test_a_malformed_overlay_is_no_reference_and_no_crash() -> None:
    spec = {
        **WHOLE,
        "pools": [{**WHOLE["pools"][0], "podTemplate": {"spec": {"volumes": "no", "containers": [1, {"env": {}}]}}}],
    }
    assert all("podTemplate" not in path or "frontend" in path for _, path in references(deployment(spec)))


def test_an_object_is_looked_up_once() -> None:
    spec = {**WHOLE, "frontend": {"apiKeys": {"secret": {"name": "hub"}}}}
    found = [path for ref, path in references(deployment(spec)) if (ref.kind, ref.name) == ("Secret", "hub")]
    assert found == ["spec.model.tokenSecret.name"]


THERE, GONE, BROKEN = (Ref("v1", "Secret", "team", name) for name in ("there", "gone", "broken"))
NAMED = [(ref, f"spec.{ref.name}") for ref in (THERE, GONE, BROKEN)]


class Few:
    """A cluster with one Secret, that fails for another until it is mended."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.broken = True

    async def exists(self, ref: Ref) -> bool:
        self.asked[ref.name] += 1
        if ref == BROKEN and self.broken:
            raise Unavailable("down")
        return ref == THERE


async def test_an_answer_that_fails_does_not_have_the_others_asked_for_again() -> None:
    few = Few()
    cluster: Any = few
    lookup = ExistenceCache(cluster)
    for _ in range(3):
        with pytest.raises(Unavailable):
            await lookup.missing(NAMED)
    few.broken = False
    expected = (Missing("Secret", "gone", "spec.gone"), Missing("Secret", "broken", "spec.broken"))
    assert await lookup.missing(NAMED) == expected
    assert await lookup.missing(NAMED) == expected
    assert few.asked == {"there": 1, "gone": 1, "broken": 4}
