"""`mmrouter plan` and `explain`: what is printed, and that it is what the planner does and where both sides differ."""

import copy
import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner
from unit.operator.simulated_world import pair, standing, want, whole

from mmrouter_cli.app import app
from mmrouter_cli.explain import error_text, newest, show
from mmrouter_operator.planning.planner import Blocked, Complete
from mmrouter_operator.planning.rollout_simulation import simulate


def write(folder: Path, name: str, spec: dict[str, Any], **metadata: Any) -> str:
    path = folder / name
    kind = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment"}
    path.write_text(yaml.safe_dump({**kind, "metadata": {"name": "vl", **metadata}, "spec": spec}))
    return str(path)


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


def report(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return answer


def changed(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return report(write(folder, "b.yaml", new), "--against", write(folder, "a.yaml", old))


def actions(shown: dict[str, Any]) -> list[list[tuple[str, str]]]:
    return [[(step["action"], step["name"]) for step in steps] for steps in shown["rounds"]]


def test_from_nothing_everything_is_created_in_one_step(tmp_path: Path) -> None:
    shown = report(write(tmp_path, "a.yaml", whole()))
    (steps,) = shown["rounds"]
    assert {step["action"] for step in steps} == {"create"}
    kinds = [step["kind"] for step in steps]
    assert {"Secret", "ConfigMap", "Service", "ServiceAccount", "NetworkPolicy"} <= set(kinds)
    assert kinds[-4:] == ["Deployment"] * 4, "in the order in which they are applied"
    assert shown["outcome"] == {"type": "Complete"}


def test_the_choice_of_a_connector_is_explained(tmp_path: Path) -> None:
    pools = [
        {"name": "slow", "role": "encoder", "accelerator": {"kind": "cpu"}},
        {"name": "work", "role": "worker", "accelerator": {"kind": "nvidia"}},
    ]
    spec = {**whole(), "engine": {"type": "vllm", "image": "vllm:1"}, "pools": pools}
    path = write(tmp_path, "a.yaml", spec)
    _, choice = report(path)["choices"]
    for words in ("slow, work", "ECExampleConnector", "as the pools are cpu and nvidia", "ReadWriteMany"):
        assert words in choice
    assert choice in run(path).splitlines()
    spec["engine"]["ecConnector"] = {"ec_connector": "Mine"}
    assert "Mine, set in engine.ecConnector" in report(write(tmp_path, "b.yaml", spec))["choices"][1]


def test_objects_for_gateways_and_what_gateways_need_are_shown(tmp_path: Path) -> None:
    frontend = {"mode": "endpointPicker", "gateway": {"parentRefs": [{"name": "public"}]}}
    spec = {**whole(), "pools": whole()["pools"][:1], "frontend": frontend}
    path = write(tmp_path, "a.yaml", spec)
    *_, pool, route, needs = report(path)["choices"]
    assert pool.startswith("InferencePool")
    assert route.startswith("HTTPRoute")
    for words in ("64Mi", "port 9002 of the frontends by TLS", "port 8000 of the workers", "NetworkPolicy"):
        assert words in needs
    assert {pool, route, needs} <= set(run(path).splitlines())
    spec["frontend"] = {"mode": "frontendPicker", "pickerTls": "none"}
    *_, pool, needs = report(write(tmp_path, "c.yaml", spec))["choices"]
    assert pool.startswith("InferencePool")
    assert needs == "a gateway needs: bodies of up to 64Mi, to reach port 9002 of the frontends by plain HTTP/2"
    spec["frontend"] = {"gateway": frontend["gateway"]}
    *_, route, needs = report(write(tmp_path, "b.yaml", spec))["choices"]
    assert "inference.networking" not in route
    assert needs == "a gateway needs: bodies of up to 64Mi"


def test_between_equal_files_there_is_nothing_to_do(tmp_path: Path) -> None:
    old = write(tmp_path, "a.yaml", whole())
    same = whole()
    same["frontend"]["replicas"] = 2  # a default written out
    assert run(write(tmp_path, "b.yaml", same), "--against", old) == "nothing to do\n"


def test_a_change_is_shown_with_the_pods_that_restart_because_of_it_in_their_order(tmp_path: Path) -> None:
    shown = changed(tmp_path, whole(), whole(seed=1, router="2", replicas=3))
    restarts = [name for steps in actions(shown) for action, name in steps if action == "restart"]
    assert restarts == ["vl-frontend", "vl-rend", "vl-enc", "vl-work"]
    assert shown["restarts"]["vl-frontend"] == ["frontend.resources.limits.cpu"]
    assert shown["restarts"]["vl-work"] == ["pools[work].args"]
    assert "pools[work].replicas" in shown["changes"]
    first = actions(shown)[0]
    assert ("scale", "vl-work") in first
    assert ("hold", "vl-work") in first


def test_what_changes_in_one_pool_is_the_reason_of_restarts_elsewhere(tmp_path: Path) -> None:
    parsing = whole()
    pool = parsing["pools"][0]
    pool["args"] = [*pool.get("args", ()), "--reasoning-parser", "qwen3"]
    shown = changed(tmp_path, whole(), parsing)
    assert shown["restarts"]["vl-frontend"] == [f"pools[{pool['name']}].args"]
    alone = {**whole(), "pools": [pool for pool in whole()["pools"] if pool["role"] == "worker"]}
    encoder = {"name": "enc", "role": "encoder", "accelerator": {"kind": "nvidia"}}
    encoded = {**alone, "pools": [*alone["pools"], encoder]}
    assert changed(tmp_path, alone, encoded)["restarts"]["vl-work"] == ["pools[enc]"]


def test_scaling_restarts_nothing(tmp_path: Path) -> None:
    text = run(write(tmp_path, "b.yaml", whole(replicas=4)), "--against", write(tmp_path, "a.yaml", whole()))
    assert "restart" not in text
    assert "  scale   Deployment vl-work: pool work: 2 -> 4 replicas" in text.splitlines()


def test_a_set_is_shown_switching_replica_by_replica(tmp_path: Path) -> None:
    shown = changed(tmp_path, pair(), pair(block=32))
    sequence = [action for steps in actions(shown) for action, _ in steps]
    assert sequence.count("create") == 2
    assert sequence.count("delete") == 2
    assert sequence.count("switch") >= 4
    assert shown["outcome"] == {"type": "Complete"}


def test_what_cannot_be_done_is_shown_as_blocked(tmp_path: Path) -> None:
    old, new = pair(prefill=1), pair(prefill=1, block=32)
    for spec in (old, new):
        spec["pools"][0]["updates"] = {"maxSurge": 0, "maxUnavailable": 1}
    files = write(tmp_path, "b.yaml", new), "--against", write(tmp_path, "a.yaml", old)
    assert report(*files)["outcome"]["reason"] == "SetCannotOverlap"
    assert "blocked: pool pre has one replica and no surge" in run(*files)


def test_how_much_a_nodes_directory_holds_restarts_those_who_write_there_too(tmp_path: Path) -> None:
    def gossip(size: str) -> dict[str, Any]:
        spec = whole()
        spec["routing"] = {"transfer": "shm"}
        spec["pools"] = [{**spec["pools"][0], "sharedMemory": {"scope": "node", "size": size}}]
        return spec

    shown = changed(tmp_path, gossip("1Gi"), gossip("2Gi"))
    why = [f"pools[{gossip('1Gi')['pools'][0]['name']}].sharedMemory.size"]
    assert shown["restarts"] == dict.fromkeys(("vl-frontend", f"vl-{whole()['pools'][0]['name']}"), why)


def test_pools_that_will_not_be_paired_are_reported_in_advance(tmp_path: Path) -> None:
    spec = pair()
    assert report(write(tmp_path, "a.yaml", spec))["warnings"] == []
    spec["pools"][0]["args"] = ["--kv-cache-dtype=fp8"]
    file = write(tmp_path, "b.yaml", spec)
    (warning,) = report(file)["warnings"]
    assert warning == "pools pre and dec cannot exchange KV blocks: --kv-cache-dtype is fp8 and not set"
    assert f"warning: {warning}\n" in run(file)


@pytest.mark.parametrize(
    ("spec", "arguments", "words"),
    [
        ({"pools": []}, [], "b.yaml: spec"),
        (whole(), ["--against", "missing.yaml"], "cannot read missing.yaml"),
        (whole(), ["--config", "missing.yaml"], "missing.yaml"),
        (whole(), ["--against", "a.yaml"], "elsewhere/vl and default/vl are two deployments"),
    ],
)
def test_what_cannot_be_read_or_compared_is_an_error_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a.yaml", whole(), namespace="elsewhere")
    assert words in run(write(tmp_path, "b.yaml", spec), *arguments, status=2)


def test_a_paused_deployment_is_rehearsed_as_blocked() -> None:
    world = standing(whole())
    want(world, {**whole(seed=1), "paused": True})
    rehearsal = simulate(world.choose()[0], world.snapshot(), None)
    assert rehearsal.rounds == ()
    assert isinstance(rehearsal.outcome, Blocked)


def test_a_rehearsal_takes_the_steps_that_the_rollout_takes() -> None:
    world = standing(pair())
    want(world, pair(block=32, router="2"))
    chosen, revision = world.choose()
    rehearsed = simulate(chosen, world.snapshot(), revision)
    taken = []
    planned = world.reconcile()
    while not isinstance(planned.outcome, Complete):
        taken += [step for step in planned.steps if step.kind == "Deployment" and step.action != "hold"]
        for _ in range(8):
            world.settle()
        planned = world.reconcile()
    done = [step for steps in rehearsed.rounds for step in steps if step.kind == "Deployment" and step.action != "hold"]
    assert done == taken


def test_planning_changes_nothing_it_was_given() -> None:
    world = standing(whole())
    want(world, whole(seed=1, router="2"))
    chosen, revision = world.choose()
    before = copy.deepcopy((chosen, revision, world.snapshot()))
    simulate(chosen, world.snapshot(), revision)
    assert (chosen, revision, world.snapshot()) == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: demo", "is no MMRouterDeployment: it has no field kind"),
        ("kind: Deployment", "is no MMRouterDeployment: its kind is 'Deployment'"),
        ("- a list", "is no MMRouterDeployment: it has no field kind"),
        ("", "holds 0 deployments"),
    ],
)
def test_a_file_of_something_else_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    shown = run(str(tmp_path / "x.yaml"), status=2)
    assert says in shown
    assert len(shown.splitlines()) == 1


def test_a_misspelt_field_is_reported_with_a_suggestion(tmp_path: Path) -> None:
    spec = whole()
    spec["pools"][0]["acelerator"] = spec["pools"][0].pop("accelerator")
    spec["frontend"]["zzz"] = 1
    shown = run(write(tmp_path, "x.yaml", spec), status=2)
    assert "spec.pools[0].acelerator: no such field; did you mean accelerator?" in shown
    assert "spec.frontend.zzz: no such field\n" in shown


TRACE: dict[str, Any] = {
    **{"request_id": "r-1", "worker": "w", "rank": 0, "exactness": "exact", "policy": "kv", "why": "the only one"},
    **{"overlap": 0, "blocks": 0, "block_size": 16, "prompt_tokens": 3},
    **{name: [] for name in ("reasons", "attempts", "candidates", "images", "keys", "holders_now")},
}


def printed(width: int = 160, **fields) -> str:
    file = io.StringIO()
    show(Console(file=file, width=width), TRACE | fields)
    return file.getvalue()


def side(text: str, *tokens: int) -> dict:
    return {"text": text, "tokens": list(tokens), "images": []}


def test_a_rendering_that_differs_is_shown_as_both_sides_have_it():
    piece = {"first_token": 7, "predicted": side("Hello [x]", 1, 2), "rendered": side("Hi", 3)}
    rendering = {"result": "False", "cause": "template", "tokens": 9, "message": "token 8: [here]", "piece": piece}
    out = printed(parity=None, rendering=rendering)
    assert "renderer: False (template): token 8: [here]" in out
    assert all(part in out for part in ("from token 7", "rendered", "Hello [x]", "1 2", "Hi"))


def test_a_rendering_that_agrees_or_failed_is_one_line():
    assert "the same prompt, 9 tokens compared" in printed(rendering={"result": "True", "cause": "", "tokens": 9})
    lost = {"result": "Unknown", "cause": "renderer_lost", "tokens": 0, "message": "gone"}
    assert "renderer: Unknown (renderer_lost): gone" in printed(rendering=lost)
    assert "renderer" not in printed(rendering=None)


def test_a_block_that_differs_is_shown_as_both_sides_have_it():
    block = {"number": 2, "first_token": 32, "predicted": side("a", 1), "published": side("b", 2)}
    parity = {"result": "False", "cause": "count", "blocks": 3, "message": "said", "block": block}
    out = printed(parity=parity)
    assert all(part in out for part in ("parity: False (count): said", "block 2, from token 32", "published"))


def candidate(worker: str, **terms: float) -> dict:
    return {"worker": worker, "scored": True, "overlap": 0, "held": 16, "terms": terms, "cost": sum(terms.values())}


def test_a_terminal_of_80_columns_shows_a_pods_whole_name_and_no_column_of_nothing_but_zeros():
    names = [f"demo-worker-7f68747fc5-lh5f{number}" for number in range(2)]
    terms = [{"compute": 6, "decode": 0, "queue": 0}, {"compute": 6, "decode": 0, "queue": 12}]
    out = printed(80, candidates=[candidate(name, **one) for name, one in zip(names, terms, strict=True)])
    assert all(f"│ {name} │" in out for name in names)
    head = next(line for line in out.splitlines() if "worker" in line and "┃" in line)
    assert "queue" in head
    assert "decode" not in head
    assert "0 for all: decode" in out


@pytest.mark.parametrize(("param", "says"), [("messages", "messages: No."), (None, "No.")])
def test_a_refusal_is_shown_with_its_field(param, says):
    assert error_text(httpx.Response(400, json={"error": {"message": "No.", "param": param}})) == says


def test_the_newest_request_is_looked_for_at_every_frontend() -> None:
    kept = {"a": [{"at": 1.0, "request_id": "a-1"}], "b": [{"at": 2.0, "request_id": "b-1"}], "c": []}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=kept[request.url.host]))
    with httpx.Client(transport=transport) as client:
        assert newest(client, ["http://a", "http://b", "http://c"]) == ("http://b", "b-1")
        assert newest(client, ["http://c"]) is None
