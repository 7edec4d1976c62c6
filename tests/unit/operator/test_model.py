"""What is read out of a resource: defaulted fields of a newer definition, and the objects that it refers to."""

import copy
from collections import Counter
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.operator.simulated_world import deployment

from mmrouter_lib.api.crd import definition
from mmrouter_operator.cluster.client import Unavailable
from mmrouter_operator.cluster.existence import ExistenceCache
from mmrouter_operator.model.external_refs import references
from mmrouter_operator.model.kinds import Ref
from mmrouter_operator.model.newer_crd_fields import schema_in, without_defaults

RESOURCE: dict[str, Any] = {
    "metadata": {"name": "vl"},
    "spec": {
        "model": {"id": "m"},
        "engine": {"type": "vllm"},
        "routing": {"policy": "kv", "media": {"maxImages": 4}},
        "pools": [{"name": "a", "role": "worker", "podTemplate": {"spec": {"free": 1}}}, {"name": "b"}],
    },
}


def served(**fields: Any) -> dict[str, Any]:
    """Return the published schema of a definition with more fields: `routing__novelty=3` has that default."""
    schema: dict[str, Any] = copy.deepcopy(definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    for place, default in fields.items():
        *way, last = place.split("__")
        node = schema["properties"]["spec"]
        for part in way:
            node = node["items"] if part == "each" else node["properties"][part]
        node["properties"][last] = {"type": "object"} if default is None else {"default": default}
    return schema


def test_what_the_definition_filled_in_is_taken_out_wherever_it_stands() -> None:
    resource = copy.deepcopy(RESOURCE)
    resource["spec"]["section"] = {"one": 1, "two": []}
    resource["spec"]["routing"]["media"]["novelty"] = "x"
    resource["spec"]["pools"][1]["novelty"] = 7
    schema = served(section={"one": 1, "two": []}, routing__media__novelty="x", pools__each__novelty=7)
    known, dropped, complete = without_defaults(resource, schema)
    assert (known, complete) == (RESOURCE, True)
    assert set(dropped) == {"spec.section", "spec.routing.media.novelty", "spec.pools[1].novelty"}


def test_a_set_field_stays_and_the_parser_refuses_it() -> None:
    resource = copy.deepcopy(RESOURCE)
    resource["spec"]["pools"][0]["novelty"] = 8
    resource["spec"]["section"] = {}
    assert without_defaults(resource, served(pools__each__novelty=7, section=None)) == (resource, (), True)


def test_a_field_that_the_published_schema_lacks_is_reported_as_incomplete() -> None:
    resource = copy.deepcopy(RESOURCE)
    resource["spec"]["routing"]["novelty"] = 7
    assert without_defaults(resource, served()) == (resource, (), False)
    assert without_defaults(resource, {}) == (resource, (), True), "nothing is published at all: nothing to wait for"


def test_a_document_without_our_kind_has_no_schema() -> None:
    assert schema_in({}) == {}
    assert schema_in({"components": {"schemas": {"Other": {"type": "object"}}}}) == {}


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


SERVED = served()


@settings(max_examples=30)
@given(JSON)
def test_whatever_a_spec_is_nothing_that_we_know_is_touched(spec: Any) -> None:
    assert without_defaults({"spec": spec}, {})[0] == {"spec": spec}
    mixed = {**RESOURCE["spec"], "pools": spec}
    assert without_defaults({"spec": mixed}, SERVED)[0] == {"spec": mixed}


WHOLE: dict[str, Any] = yaml.safe_load("""
model:
  id: org/model
  volume: {persistentVolumeClaim: {claimName: weights}}
  tokenSecret: {name: hub, key: token}
engine: {type: vllm, chatTemplate: {configMap: {name: template, key: jinja}}, tls: {secretName: engines}}
frontend:
  service: {port: 443}
  apiKeys: {secret: {name: keys}}
  tls: {secretName: tls}
  podTemplate: {spec: {priorityClassName: high}}
pools:
- name: work
  role: worker
  accelerator:
    kind: nvidia
    claims: [{name: gpu, resourceClaimTemplateName: one-gpu}, {name: nic, resourceClaimName: rail}]
  podTemplate:
    spec:
      runtimeClassName: nvidia
      serviceAccountName: team
      imagePullSecrets: [{name: registry}]
      volumes:
      - {name: a, secret: {secretName: extra}}
      - {name: b, secret: {secretName: maybe, optional: true}}
      - {name: c, projected: {sources: [{configMap: {name: part}}]}}
      - {name: d, emptyDir: {}}
      containers:
      - name: engine
        env:
        - {name: X, valueFrom: {secretKeyRef: {name: env, key: x}}}
        - {name: "Y", value: plain}
        - {name: Z, valueFrom: {configMapKeyRef: {name: o, key: z, optional: true}}}
        envFrom: [{configMapRef: {name: all}}]
""")


def test_every_reference_is_found_with_the_field_that_names_it() -> None:
    pod = "spec.pools[0].podTemplate.spec"
    expected = f"""
        PersistentVolumeClaim weights  spec.model.volume.persistentVolumeClaim.claimName
        Secret                hub      spec.model.tokenSecret.name
        ConfigMap             template spec.engine.chatTemplate.configMap.name
        Secret                engines  spec.engine.tls.secretName
        Secret                keys     spec.frontend.apiKeys.secret.name
        Secret                tls      spec.frontend.tls.secretName
        PriorityClass         high     spec.frontend.podTemplate.spec.priorityClassName
        ResourceClaimTemplate one-gpu  spec.pools[0].accelerator.claims[0].resourceClaimTemplateName
        ResourceClaim         rail     spec.pools[0].accelerator.claims[1].resourceClaimName
        RuntimeClass          nvidia   {pod}.runtimeClassName
        ServiceAccount        team     {pod}.serviceAccountName
        Secret                registry {pod}.imagePullSecrets[0].name
        Secret                extra    {pod}.volumes[0].secret.secretName
        ConfigMap             part     {pod}.volumes[2].projected.sources[0].configMap.name
        Secret                env      {pod}.containers[0].env[0].valueFrom.secretKeyRef.name
        ConfigMap             all      {pod}.containers[0].envFrom[0].configMapRef.name
    """
    found = [f"{ref.kind} {ref.name} {path}" for ref, path in references(deployment(WHOLE))]
    assert found == [" ".join(line.split()) for line in expected.strip().splitlines()]


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
    expected = ((GONE, "spec.gone"), (BROKEN, "spec.broken"))
    assert await lookup.missing(NAMED) == expected
    assert await lookup.missing(NAMED) == expected
    assert few.asked == {"there": 1, "gone": 1, "broken": 4}
