"""`mmrouter plan`: what is printed, and that it is what the planner does."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner
from unit.operator.rollout_stories import pair, standing, want, whole

from mmrouter_cli.app import app
from mmrouter_operator.planning.planner import Blocked, Complete
from mmrouter_operator.planning.rollout_simulation import simulate


def write(folder: Path, name: str, spec: dict[str, Any], **metadata: Any) -> str:
    path = folder / name
    kind = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment"}
    path.write_text(yaml.safe_dump({**kind, "metadata": {"name": "vl", **metadata}, "spec": spec}))
    return str(path)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def report(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return answer


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


def test_between_equal_files_there_is_nothing_to_do(tmp_path: Path) -> None:
    old = write(tmp_path, "a.yaml", whole())
    same = whole()
    same["frontend"]["replicas"] = 2  # a default written out
    assert run(write(tmp_path, "b.yaml", same), "--against", old) == "nothing to do\n"


def test_a_change_is_shown_with_the_pods_that_restart_because_of_it_in_their_order(tmp_path: Path) -> None:
    new = whole(seed=1, router="2", replicas=3)
    shown = report(write(tmp_path, "b.yaml", new), "--against", write(tmp_path, "a.yaml", whole()))
    restarts = [name for steps in actions(shown) for action, name in steps if action == "restart"]
    assert restarts == ["vl-frontend", "vl-rend", "vl-enc", "vl-work"]
    assert shown["restarts"]["vl-frontend"] == ["frontend.resources.limits.cpu"]
    assert shown["restarts"]["vl-work"] == ["pools[work].args"]
    assert "pools[work].replicas" in shown["changes"]
    first = actions(shown)[0]
    assert ("scale", "vl-work") in first
    assert ("hold", "vl-work") in first


def test_scaling_restarts_nothing(tmp_path: Path) -> None:
    text = run(write(tmp_path, "b.yaml", whole(replicas=4)), "--against", write(tmp_path, "a.yaml", whole()))
    assert "restart" not in text
    assert "  scale   Deployment vl-work: pool work: 2 -> 4 replicas" in text.splitlines()


def test_a_set_is_shown_switching_replica_by_replica(tmp_path: Path) -> None:
    shown = report(write(tmp_path, "b.yaml", pair(block=32)), "--against", write(tmp_path, "a.yaml", pair()))
    told = [action for steps in actions(shown) for action, _ in steps]
    assert told.count("create") == 2
    assert told.count("delete") == 2
    assert told.count("switch") >= 4
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

    shown = report(write(tmp_path, "b.yaml", gossip("2Gi")), "--against", write(tmp_path, "a.yaml", gossip("1Gi")))
    why = [f"pools[{gossip('1Gi')['pools'][0]['name']}].sharedMemory.size"]
    assert shown["restarts"] == dict.fromkeys(("vl-frontend", f"vl-{whole()['pools'][0]['name']}"), why)


def test_pools_that_will_not_be_paired_are_reported_in_advance(tmp_path: Path) -> None:
    spec = pair()
    assert report(write(tmp_path, "a.yaml", spec))["warnings"] == []
    spec["pools"][0]["args"] = ["--kv-cache-dtype=fp8"]
    file = write(tmp_path, "b.yaml", spec)
    (said,) = report(file)["warnings"]
    assert said == "pools pre and dec cannot exchange KV blocks: --kv-cache-dtype is fp8 and not set"
    assert f"warning: {said}\n" in run(file)


@pytest.mark.parametrize(
    ("spec", "arguments", "words"),
    [
        ({"pools": []}, [], "b.yaml: spec"),
        (whole(), ["--against", "missing.yaml"], "cannot read missing.yaml"),
        (whole(), ["--config", "missing.yaml"], "missing.yaml"),
    ],
)
def test_what_cannot_be_read_is_an_error_of_the_caller(
    tmp_path: Path, spec: dict[str, Any], arguments: list[str], words: str
) -> None:
    result = CliRunner().invoke(app, ["plan", write(tmp_path, "b.yaml", spec), *arguments])
    assert result.exit_code == 2
    assert words in result.output


def test_two_deployments_are_not_compared(tmp_path: Path) -> None:
    old = write(tmp_path, "a.yaml", whole(), namespace="elsewhere")
    result = CliRunner().invoke(app, ["plan", write(tmp_path, "b.yaml", whole()), "--against", old])
    assert result.exit_code == 2
    assert "elsewhere/vl and default/vl are two deployments" in result.output


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
    told = [step for steps in rehearsed.rounds for step in steps if step.kind == "Deployment" and step.action != "hold"]
    assert told == taken


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
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "x.yaml")])
    assert result.exit_code == 2
    assert says in result.output
    assert len(result.output.splitlines()) == 1


def test_a_misspelt_field_is_reported_with_a_suggestion(tmp_path: Path) -> None:
    spec = whole()
    spec["pools"][0]["acelerator"] = spec["pools"][0].pop("accelerator")
    spec["frontend"]["zzz"] = 1
    result = CliRunner().invoke(app, ["plan", write(tmp_path, "x.yaml", spec)])
    assert result.exit_code == 2
    assert "spec.pools[0].acelerator: no such field; did you mean accelerator?" in result.output
    assert "spec.frontend.zzz: no such field\n" in result.output
