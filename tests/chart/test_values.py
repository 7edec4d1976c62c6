"""The chart's values, their schema and README, and its files against the rest of the repository."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.helm import CHART, RELEASE, ROOT, TEMPLATE, Helm

import mmrouter_lib as mmrouter
from hack.distribution import build_chart
from mmrouter_lib.api import parse_deployment
from mmrouter_lib.api.crd import NAME, definition

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())

REFUSED: dict[str, dict[str, Any]] = yaml.safe_load("""
"at '': additional properties 'replica' not allowed": {replica: 2}
"at '/image': additional properties 'name' not allowed": {image: {name: x}}
"at '/operatorConfig': additional properties 'podCIDRs' not allowed": {operatorConfig: {podCIDRs: []}}
"at '/deployments/a': additional properties 'specs' not allowed": {deployments: {a: {spec: {}, specs: {}}}}
"at '/deployments/a': missing property 'spec'": {deployments: {a: {}}}
"at '/deployments': additional properties 'Qwen' not allowed": {deployments: {Qwen: {spec: {}}}}
"deployments.a: the operator does not look after the namespace team-b":
  {watchNamespaces: [team-a], deployments: {a: {namespace: team-b, spec: {x: 1}}}}
"at '/replicas': got string, want integer": {replicas: "2"}
"at '/replicas': minimum: got -1, want 0": {replicas: -1}
"at '/crds/install': got string, want boolean": {crds: {install: "false"}}
"at '/image/tag': got number, want string": {image: {tag: 1.2}}
"at '/resources': got array, want object": {resources: []}
"at '/metrics/podMonitor/mode': value must be one of 'Auto', 'Enabled', 'Disabled'":
  {metrics: {podMonitor: {mode: auto}}}
"at '/log/level': value must be one of 'debug', 'info', 'warning', 'error'": {log: {level: warn}}
"at '/image/digest': 'sha256:1' does not match pattern": {image: {digest: "sha256:1"}}
"at '/operatorConfig/apiServerCidrs/0': '10.0.0.1' does not match pattern":
  {operatorConfig: {apiServerCidrs: [10.0.0.1]}}
"at '/networkPolicy/lookupApiServer': got string, want boolean": {networkPolicy: {lookupApiServer: Auto}}
"at '/observability/otlpEndpoint': 'otel:4318' does not match pattern": {observability: {otlpEndpoint: "otel:4318"}}
"at '/operatorConfig/engineImages': additional properties 'vllm' not allowed":
  {operatorConfig: {engineImages: {vllm: x}}}
"at '/leaderElection/retryPeriod': exclusiveMinimum: got 0, want 0": {leaderElection: {retryPeriod: 0}}
"at '/podLabels/team': got number, want string": {podLabels: {team: 1}}
"additional properties 'labelSelector' not allowed":
  {topologySpreadConstraints: [{topologyKey: z, maxSkew: 1, labelSelector: {}}]}
""")


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_wrong_value_is_refused_with_its_place_and_a_sentence(helm: Helm, sentence: str) -> None:
    assert sentence in helm.refusal(*TEMPLATE, values=REFUSED[sentence])


def objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every part of the schema that is about an object, with its path."""
    if schema.get("type") == "object":
        yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from objects(below, f"{path}/{name}")
    for name, below in schema.get("$defs", {}).items():
        yield from objects(below, f"{path}#{name}")
    inner = [schema.get("items"), schema.get("additionalProperties"), *schema.get("patternProperties", {}).values()]
    for below in inner:
        if isinstance(below, dict):
            yield from objects(below, f"{path}/*")


OPEN = {"/global", "/extraEnv/*/valueFrom", "/deployments/*/spec"} | {
    f"/affinity/{kind}" for kind in ("nodeAffinity", "podAffinity", "podAntiAffinity")
}
"""Objects of Kubernetes, and of the CRD, which the API server checks; and helm's own."""


def test_no_object_of_the_schema_takes_unknown_keys() -> None:
    assert {path for path, schema in objects(SCHEMA) if schema.get("additionalProperties", True) is True} == OPEN


def test_schema_and_values_have_the_same_keys() -> None:
    def keys(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, below in schema.get("properties", {}).items():
            yield f"{prefix}{name}"
            yield from keys(below, f"{prefix}{name}.")

    def given(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in values.items():
            yield f"{prefix}{name}"
            if isinstance(value, dict):
                yield from given(value, f"{prefix}{name}.")

    free = ("global", "affinity.", "resources.", "gateway.resources.", "dashboard.labels.", "nodeSelector.")
    known, written = ({key for key in found if not key.startswith(free)} for found in (keys(SCHEMA), given(VALUES)))
    assert known == written


META = yaml.safe_load((CHART / "Chart.yaml").read_text())


def test_the_chart_holds_the_crds_as_they_are() -> None:
    ours = {path.name: path.read_text() for path in (CHART / "files" / "crds").glob("*")}
    assert ours == {path.name: path.read_text() for path in (ROOT / "crds").glob("*")}


def test_the_release_has_the_crd_to_the_letter_and_keeps_it(helm: Helm) -> None:
    made = copy.deepcopy(helm.render().one("CustomResourceDefinition"))
    assert made["metadata"]["annotations"].pop("helm.sh/resource-policy") == "keep"
    (file,) = (ROOT / "crds").glob("*.yaml")
    assert made == yaml.load(file.read_text(), yaml.CSafeLoader)


def test_the_crd_can_be_left_to_others(helm: Helm) -> None:
    assert helm.render({"crds": {"install": False}}).all("CustomResourceDefinition") == []


def test_chart_and_code_have_one_version() -> None:
    assert META["appVersion"] == META["version"] == mmrouter.__version__


def test_the_annotations_for_artifact_hub_match_the_code(helm: Helm) -> None:
    annotations = {key.partition("/")[2]: value for key, value in META["annotations"].items()}
    (crd,) = yaml.safe_load(annotations["crds"])
    assert (crd["name"], crd["kind"]) == (NAME, definition()["spec"]["names"]["kind"])
    assert crd["version"] in {version["name"] for version in definition()["spec"]["versions"]}
    assert [image["image"] for image in yaml.safe_load(annotations["images"])] == [helm.render().operator["image"]]
    assert all({"kind", "description"} == set(change) for change in yaml.safe_load(annotations["changes"]))
    (example,) = yaml.safe_load(annotations["crdsExamples"])
    ours = yaml.safe_load((ROOT / "examples" / "mmrouter.yaml").read_text())
    assert parse_deployment(example).spec == parse_deployment(ours).spec


def test_a_package_holds_everything(helm: Helm, tmp_path: Path) -> None:
    helm.output("package", CHART, f"--destination={tmp_path}")
    package = tmp_path / f"mmrouter-{META['version']}.tgz"
    rendered = helm.output("template", RELEASE, CHART)
    assert helm.output("template", RELEASE, package) == rendered
    build_chart(ROOT, tmp_path, 0)  # the released one, whose bytes do not depend on the checkout
    assert helm.output("template", RELEASE, package) == rendered
