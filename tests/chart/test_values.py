"""Values: what the schema refuses and in which words, and that values.yaml, schema and README tell the same."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from chart.cases import MINIMAL
from chart.helm import CHART, Helm

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"replica": 2}, "at '': additional properties 'replica' not allowed"),
    "unknown key of a section": ({"image": {"name": "x"}}, "at '/image': additional properties 'name' not allowed"),
    "unknown site setting": (
        {"operatorConfig": {"podCIDRs": []}},
        "at '/operatorConfig': additional properties 'podCIDRs' not allowed",
    ),
    "unknown key of a deployment": (
        {"deployments": {"a": {"spec": MINIMAL, "specs": {}}}},
        "at '/deployments/a': additional properties 'specs' not allowed",
    ),
    "deployment without a spec": ({"deployments": {"a": {}}}, "at '/deployments/a': missing property 'spec'"),
    "name of a deployment": (
        {"deployments": {"Qwen": {"spec": MINIMAL}}},
        "at '/deployments': additional properties 'Qwen' not allowed",
    ),
    "text for a number": ({"replicas": "2"}, "at '/replicas': got string, want integer"),
    "negative number": ({"replicas": -1}, "at '/replicas': minimum: got -1, want 0"),
    "text for a truth": ({"crds": {"install": "false"}}, "at '/crds/install': got string, want boolean"),
    "number for a text": ({"image": {"tag": 1.2}}, "at '/image/tag': got number, want string"),
    "list for a section": ({"resources": []}, "at '/resources': got array, want object"),
    "word that is none of the choices": (
        {"metrics": {"podMonitor": {"mode": "auto"}}},
        "at '/metrics/podMonitor/mode': value must be one of 'Auto', 'Enabled', 'Disabled'",
    ),
    "level of a log": (
        {"log": {"level": "warn"}},
        "at '/log/level': value must be one of 'debug', 'info', 'warning', 'error'",
    ),
    "digest that is none": ({"image": {"digest": "sha256:1"}}, "at '/image/digest': 'sha256:1' does not match pattern"),
    "address for a range": (
        {"operatorConfig": {"apiServerCidrs": ["10.0.0.1"]}},
        "at '/operatorConfig/apiServerCidrs/0': '10.0.0.1' does not match pattern",
    ),
    "word for a truth": (
        {"networkPolicy": {"lookupApiServer": "Auto"}},
        "at '/networkPolicy/lookupApiServer': got string, want boolean",
    ),
    "endpoint that is none": (
        {"observability": {"otlpEndpoint": "otel:4318"}},
        "at '/observability/otlpEndpoint': 'otel:4318' does not match pattern",
    ),
    "key of an engine image": (
        {"operatorConfig": {"engineImages": {"vllm": "x"}}},
        "at '/operatorConfig/engineImages': additional properties 'vllm' not allowed",
    ),
    "no time between renewals": (
        {"leaderElection": {"retryPeriod": 0}},
        "at '/leaderElection/retryPeriod': exclusiveMinimum: got 0, want 0",
    ),
    "number in a label": ({"podLabels": {"team": 1}}, "at '/podLabels/team': got number, want string"),
    "selector of a spread": (
        {"topologySpreadConstraints": [{"topologyKey": "z", "maxSkew": 1, "labelSelector": {}}]},
        "additional properties 'labelSelector' not allowed",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_value_is_refused_with_its_place_and_a_sentence(helm: Helm, case: str) -> None:
    values, sentence = REFUSED[case]
    done = helm.template(values)
    assert done.returncode != 0
    assert sentence in done.stderr


def test_a_deployment_where_the_operator_does_not_look_is_refused(helm: Helm) -> None:
    deployments = {"a": {"namespace": "team-b", "spec": MINIMAL}}
    done = helm.template({"watchNamespaces": ["team-a"], "deployments": deployments})
    assert done.returncode != 0
    assert "deployments.a: the operator does not look after the namespace team-b" in done.stderr


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


OPEN = {
    "/global",
    "/affinity/nodeAffinity",
    "/affinity/podAffinity",
    "/affinity/podAntiAffinity",
    "/extraEnv/*/valueFrom",
    "/deployments/*/spec",
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

    free = ("global", "affinity.", "resources.", "dashboard.labels.", "nodeSelector.")
    known, written = ({key for key in found if not key.startswith(free)} for found in (keys(SCHEMA), given(VALUES)))
    assert known == written
