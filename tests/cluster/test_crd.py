"""The definition on a real API server: what it takes, what it refuses in which words, and kubectl."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.controlplane import APPLY, ControlPlane
from cluster.crd_cases import (
    ARGS,
    HOSTS,
    NUMBERS,
    PATH,
    QUANTITIES,
    RANGES,
    WORDS,
    Case,
    Object,
    cases,
    create,
    documents,
    good,
    put,
    replace,
    surprising,
)
from hypothesis import HealthCheck, given, settings

from mmrouter_cli import init
from mmrouter_lib.api import MMRouterDeployment, SpecError, parse_deployment, to_json
from mmrouter_lib.api.crd import HASH_ANNOTATION, NAME, definition
from mmrouter_lib.api.cross_field_rules import VALIDATIONS
from mmrouter_operator.cluster.operator_kinds import KINDS
from mmrouter_operator.model.kinds import RESOURCE

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def home(crd: ControlPlane) -> Any:
    """A namespace with one stored object of each good spec, under its name."""
    with crd.namespace() as name:
        for document in good().values():
            status, answer = create(crd, name, document, store=True)
            assert status == 201, answer
        yield name


@pytest.mark.parametrize("case", cases("bad"), ids=lambda case: case.id)
def test_a_bad_spec_is_refused_with_its_field_and_a_sentence(crd: ControlPlane, home: str, case: Case) -> None:
    case.document["metadata"].setdefault("name", "bad")
    status, answer = create(crd, home, case.document)
    assert status in (400, 422), answer
    causes = answer.get("details", {}).get("causes") or [{"field": "", "message": answer["message"]}]
    messages = [f"{cause.get('field', '')}: {cause['message']}" for cause in causes]
    assert any(case.says in line and case.field in line for line in messages), "\n".join(messages)
    with pytest.raises(SpecError):
        parse_deployment(case.document)


@pytest.mark.parametrize("case", cases("changes"), ids=lambda case: case.id)
def test_a_change_is_refused_where_it_would_be_another_deployment(crd: ControlPlane, home: str, case: Case) -> None:
    version = crd.read(f"{PATH.format(home)}/{case.of}")["metadata"]["resourceVersion"]
    stored = {**case.document, "metadata": {"name": case.of, "resourceVersion": version}}
    status, answer = replace(crd, home, stored)
    if not case.says:
        assert status == 200, answer
        return
    assert status == 422, answer
    messages = [f"{cause['field']}: {cause['message']}" for cause in answer["details"]["causes"]]
    assert any(line.startswith(f"{case.field}: ") and case.says in line for line in messages), "\n".join(messages)


def test_every_rule_of_the_definition_has_a_row() -> None:
    """A rule that no row breaks could be lost, or never hold, without a failing test."""
    rows = {row.says for table in ("bad", "changes") for row in cases(table) if row.says}
    spec = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    fixed = {entry["message"] for entry in _rules(spec) if "messageExpression" not in entry}
    # One rule for all bounds of keys: the number differs.
    fixed -= {message for message in fixed if message.startswith("a key has")}
    assert not {message for message in fixed if not any(row in message for row in rows)}


def _rules(schema: dict[str, Any]) -> Iterator[dict[str, str]]:
    yield from schema.get(VALIDATIONS, [])
    inner = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    for child in inner:
        if isinstance(child, dict):
            yield from _rules(child)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_accepted(crd: ControlPlane, home: str, example: Path) -> None:
    status, answer = create(crd, home, yaml.safe_load(example.read_text()))
    assert status == 201, answer


@pytest.mark.parametrize("name", sorted(good()))
def test_what_the_server_fills_in_changes_nothing(crd: ControlPlane, home: str, name: str) -> None:
    """Otherwise an operator that reads from the cluster would render other pods than one that reads the file."""
    stored = crd.read(f"{PATH.format(home)}/{name}")
    original, filled = parse_deployment({**good()[name], "metadata": stored["metadata"]}), parse_deployment(stored)
    assert filled.spec == original.spec
    assert to_json(filled) == to_json(original)


def test_a_list_of_arguments_as_long_as_allowed_stays_within_the_budget(crd: ControlPlane, home: str) -> None:
    document = good()["minimal"]
    pool = document["spec"]["pools"][0]
    args = [f"--flag-number-{n}={'x' * 60}" for n in range(64)]
    document["spec"]["pools"] = [{**pool, "name": f"pool-{n}", "args": args} for n in range(16)]
    document["spec"]["engine"]["args"] = args
    document["metadata"]["name"] = "long"
    status, answer = create(crd, home, document)
    assert status == 201, answer


def test_a_status_is_checked_and_its_lists_are_maps(crd: ControlPlane, home: str) -> None:
    def apply(manager: str, status: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        body = {**good()["minimal"], "status": status}
        del body["spec"]
        answer = crd.request(
            "PATCH", f"{PATH.format(home)}/minimal/status", body, APPLY, fieldManager=manager, fieldValidation="Strict"
        )
        return answer.status_code, answer.json()

    condition = {"status": "True", "reason": "Checked", "message": "", "lastTransitionTime": "2026-01-02T03:04:05Z"}
    assert apply("one", {"conditions": [{"type": "Ready", **condition}]})[0] == 200
    status, answer = apply("two", {"conditions": [{"type": "SpecValid", **condition}], "poolsReady": "1/1"})
    assert status == 200
    assert {row["type"] for row in answer["status"]["conditions"]} == {"Ready", "SpecValid"}
    assert parse_deployment(answer).status is not None
    assert apply("three", {"conditions": [{"type": "Odd", **condition, "status": "Maybe"}]})[0] == 422
    status, answer = apply("three", {"phase": "Ready", "mood": "good"})
    assert status >= 400, answer
    assert "mood" in answer["message"]


def test_the_served_definition_carries_the_hash_of_the_models(crd: ControlPlane) -> None:
    served = crd.request("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{NAME}").json()
    assert (
        served["metadata"]["annotations"][HASH_ANNOTATION] == definition()["metadata"]["annotations"][HASH_ANNOTATION]
    )
    assert not [row for row in served["status"]["conditions"] if row["type"] == "NonStructuralSchema"]


def test_kubectl_explains_every_section(crd: ControlPlane) -> None:
    # kubectl keeps for hours what was served before the definition was there; this asks anew.
    assert "mmrd" in crd.kubectl("api-resources", "--api-group=mmrouter.io").stdout
    for path, sentence in (
        ("mmrd", "One model behind one OpenAI-compatible endpoint"),
        ("mmrd.spec.pools", "Replicas with the same role, image, flags and accelerator."),
        ("mmrd.spec.pools.accelerator.kind", "ENUM:"),
        ("mmrd.spec.routing.media.maxBytes", "Largest encoded image or video."),
        ("mmrd.status.conditions", "Explanation for people."),
    ):
        shown = crd.kubectl("explain", path)
        assert shown.returncode == 0, shown.stderr
        assert sentence in shown.stdout


def test_kubectl_get_tells_the_story_in_columns(crd: ControlPlane) -> None:
    with crd.namespace() as namespace:
        assert create(crd, namespace, good()["minimal"], store=True)[0] == 201
        status = {
            "poolsReady": "1/1",
            "routing": {"exactRatio": "0.998", "hitRatio": "0.83"},
            "conditions": [
                {
                    **{"type": "Ready", "status": "True", "reason": "AllReady", "message": ""},
                    "lastTransitionTime": "2026-01-02T03:04:05Z",
                }
            ],
        }
        path = f"{PATH.format(namespace)}/minimal/status"
        crd.request("PATCH", path, {"status": status}, "application/merge-patch+json").raise_for_status()
        shown = crd.kubectl("get", "mmrd", "-n", namespace)
        heading, row = shown.stdout.splitlines()
        assert heading.split() == ["NAME", "ENGINE", "POOLS", "READY", "EXACT", "HIT", "AGE"]
        assert row.split()[:-1] == ["minimal", "vllm", "1/1", "True", "0.998", "0.83"]
        assert "minimal" in crd.kubectl("get", "mmrouter", "-n", namespace).stdout  # the category


def test_kubectl_scale_sets_the_frontends_replicas(crd: ControlPlane) -> None:
    with crd.namespace() as namespace:
        assert create(crd, namespace, good()["minimal"], store=True)[0] == 201
        done = crd.kubectl("scale", "mmrd", "minimal", "--replicas=3", "-n", namespace)
        assert done.returncode == 0, done.stderr
        path = f"{PATH.format(namespace)}/minimal"
        status = {"status": {"frontend": {"ready": 2, "selector": "app=a"}}}
        crd.request("PATCH", f"{path}/status", status, "application/merge-patch+json").raise_for_status()
        assert crd.request("GET", path).json()["spec"]["frontend"]["replicas"] == 3
        scale = crd.request("GET", f"{path}/scale").json()
        assert (scale["spec"]["replicas"], scale["status"]) == (3, {"replicas": 2, "selector": "app=a"})
        refused = crd.kubectl("scale", "mmrd", "minimal", "--replicas=0", "-n", namespace)
        assert refused.returncode != 0
        assert "spec.frontend.replicas" in refused.stderr


def test_two_managers_share_a_pool(crd: ControlPlane) -> None:
    """Pools merge by name: applying one field of one pool changes no other."""
    with crd.namespace() as namespace:
        path = f"{PATH.format(namespace)}/encoders"
        document = good()["encoders"]
        crd.request("PATCH", path, document, APPLY, fieldManager="user").raise_for_status()
        other = {**document, "spec": {"pools": [{"name": "worker", "podTemplate": {"metadata": {}}}]}}
        answer = crd.request("PATCH", path, other, APPLY, fieldManager="other").raise_for_status().json()
        assert [pool["name"] for pool in answer["spec"]["pools"]] == ["fast", "slow", "worker", "render"]
        put(document, "spec.pools[2].replicas", 3)
        answer = crd.request("PATCH", path, document, APPLY, fieldManager="user").raise_for_status().json()
        assert answer["spec"]["pools"][2]["podTemplate"] == {"metadata": {}}


@pytest.fixture(scope="module")
def empty(crd: ControlPlane) -> Any:
    with crd.namespace() as name:
        yield name


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("spec.routing.media.allowedHosts[0]", HOSTS),
        ("spec.routing.media.allowedCIDRs[0]", RANGES),
        ("spec.routing.media.maxBytes", QUANTITIES),
        ("spec.pools[2].resources.requests.cpu", QUANTITIES),
        ("spec.routing.overlapWeight", NUMBERS),
        ("spec.engine.args[0]", ARGS),
        ("spec.pools[2].tolerations[0].key", WORDS),
        ("spec.model.servedName", WORDS),
    ],
)
def test_the_server_and_the_models_agree_on_odd_text(
    crd: ControlPlane, empty: str, field: str, values: Sequence[str]
) -> None:
    for value in values:
        document = good()["encoders"]
        put(document, field, value)
        _agree(crd, empty, document)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(documents())
def test_the_server_and_the_models_agree(crd: ControlPlane, empty: str, document: Object) -> None:
    _agree(crd, empty, document)


def _agree(crd: ControlPlane, empty: str, document: Object) -> None:
    status, answer = create(crd, empty, document)
    assert status in (201, 400, 422), answer
    result = _parsed(document)
    if status != 201:
        assert isinstance(result, SpecError), f"only the server refuses: {answer['message']}"
        return
    filled = _parsed(answer)
    if isinstance(filled, SpecError):
        assert not surprising(filled), f"only Python refuses: {filled}"
    elif not isinstance(result, SpecError):  # Python refuses a null that the server drops
        assert filled.spec == result.spec
        assert to_json(filled)["spec"] == to_json(result)["spec"]


def _parsed(document: Object) -> MMRouterDeployment | SpecError:
    try:
        return parse_deployment(document)
    except SpecError as error:
        return error


@pytest.mark.parametrize(("engine", "kind"), list(itertools.product(init.ENGINES, init.KINDS)))
def test_the_server_takes_it(crd: ControlPlane, engine: str, kind: str) -> None:
    made = init.resource(init.Answers(engine=engine, accelerator=kind))
    path = KINDS[RESOURCE].path("default")
    answer = crd.request("POST", path, made, dryRun="All", fieldValidation="Strict")
    assert answer.status_code == 201, answer.text


def test_kubectl_reads_the_text_as_we_do(crd: ControlPlane) -> None:
    """With its own YAML reader, and a name and an image that others may take for something else."""
    answers = init.Answers(model="org/Model-1e3", name="no", image="registry.example:5000/e:1")
    done = crd.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=init.text(answers))
    assert done.returncode == 0, done.stderr
