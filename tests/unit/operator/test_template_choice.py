"""Kept templates: a new operator's rendering, a user's change, and the way back."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from unit.operator.simulated_world import UID, World, deployment, finish, pair, standing, want, whole

from mmrouter_lib import __version__
from mmrouter_operator.model.kinds import FORMER_HASH, INPUTS_HASH
from mmrouter_operator.model.snapshot import RevisionView
from mmrouter_operator.planning.planner import Complete
from mmrouter_operator.planning.rollout_progress import template_hash
from mmrouter_operator.planning.template_choice import (
    REVISION_LIMIT,
    adopts,
    choose_templates,
    difference,
    stored_template,
)


def with_priority(deployment: dict[str, Any]) -> None:
    deployment["spec"]["template"]["spec"]["priorityClassName"] = "next"


def upgraded(world: World, change: Callable[[dict[str, Any]], None] = with_priority) -> None:
    """A new operator version, which renders every template otherwise."""
    render = world.desired

    def next_version() -> list[dict[str, Any]]:
        objects = copy.deepcopy(render())
        for obj in objects:
            if obj["kind"] == "Deployment":
                change(obj)
        return objects

    world.desired = next_version  # type: ignore[method-assign]


def templates(world: World) -> dict[str, str]:
    return {name: template_hash(child.manifest) for name, child in world.children.items()}


def test_a_new_operator_version_restarts_nothing() -> None:
    world = standing(whole())
    before, pods = templates(world), {pod.name for pod in world.pods()}
    upgraded(world)
    finish(world)
    world.settle()
    assert templates(world) == before
    assert {pod.name for pod in world.pods()} == pods
    assert len(world.revisions) == 1


def previous_hashes(world: World) -> None:
    """An operator of the previous version, with the hashes that it gives."""

    def previous(obj: dict[str, Any]) -> None:
        if (former := obj["metadata"].pop("annotations", {}).get(FORMER_HASH)) is not None:
            obj["spec"]["template"]["metadata"]["annotations"][INPUTS_HASH] = former

    upgraded(world, previous)


def with_devices(count: int, **spec: Any) -> dict[str, Any]:
    made = {**whole(), **spec}
    made["pools"][0]["accelerator"]["count"] = count
    return made


def test_the_version_that_leaves_fields_out_of_the_frontends_inputs_restarts_nothing_and_neither_do_the_fields() -> (
    None
):
    world = World(deployment(with_devices(2, observability={"podMonitor": "Enabled"})))
    new = world.desired
    previous_hashes(world)
    finish(world)
    before, pods = templates(world), {pod.name for pod in world.pods()}
    previous = world.desired
    world.desired = new  # type: ignore[method-assign]
    finish(world)
    assert (templates(world), {pod.name for pod in world.pods()}) == (before, pods)
    world.desired = previous  # type: ignore[method-assign]
    finish(world)
    assert (templates(world), {pod.name for pod in world.pods()}) == (before, pods)
    world.desired = new  # type: ignore[method-assign]
    want(world, with_devices(4))
    finish(world)
    assert {name for name, value in templates(world).items() if value != before[name]} == {"vl-work"}


def test_a_new_operator_version_scales_the_old_rendering() -> None:
    world = standing(whole())
    before = templates(world)
    upgraded(world)
    want(world, whole(replicas=4))
    finish(world)
    assert templates(world) == before
    assert world.ready("work") == 4
    assert len(world.revisions) == 1, "replicas are no part of a template"


def test_the_user_changes_one_pool_and_only_that_pool_gets_the_new_rendering() -> None:
    world = standing(whole())
    before = templates(world)
    upgraded(world)
    spec = whole()
    spec["pools"][0]["args"] = ["--seed=9"]
    want(world, spec)
    finish(world)
    assert {name for name, value in templates(world).items() if value != before[name]} == {"vl-work"}
    assert "priorityClassName" in world.children["vl-work"].manifest["spec"]["template"]["spec"]


@pytest.mark.parametrize(("value", "expected"), [("true", True), (__version__, True), ("0.0.0", False), ("", False)])
def test_adoption_is_requested_by_word_or_by_version(value: str, expected: bool) -> None:
    assert adopts(deployment(whole(), annotations={"mmrouter.io/adopt": value})) is expected
    assert not adopts(deployment(whole()))


def test_adopting_rolls_every_template_and_stays() -> None:
    world = standing(whole())
    before = templates(world)
    upgraded(world)
    for _ in range(60):
        planned = world.reconcile(adopt=True)
        if isinstance(planned.outcome, Complete):
            break
        world.settle()
    adopted = templates(world)
    assert not set(adopted.values()) & set(before.values())
    assert len(world.revisions) == 2
    finish(world)  # without the annotation again
    assert templates(world) == adopted


def test_a_change_taken_back_under_a_new_operator_keeps_the_pods_that_still_run() -> None:
    world = standing(whole())
    before = templates(world)
    upgraded(world)
    want(world, whole(seed=1))
    world.reconcile()
    for name in list(world.children):
        world.control(name)
    want(world, whole())
    finish(world)
    assert templates(world) == before


def test_a_set_is_adopted_whole() -> None:
    """One pool changes under an operator whose default layout is another: its partner must not stay behind."""

    def other_layout(obj: dict[str, Any]) -> None:
        if "mmrouter.io/pool" in obj["metadata"]["labels"]:
            obj["spec"]["template"]["metadata"]["labels"]["mmrouter.io/compatibility"] = "0123456789abcdef"

    world = standing(pair())
    upgraded(world, other_layout)
    finish(world)
    assert {child.manifest["metadata"]["name"][-8:] for child in world.of_pool("pre")} != {"01234567"}
    spec = pair()
    spec["pools"][0]["args"] = ["--seed=9"]
    want(world, spec)
    finish(world)
    names = {child.manifest["metadata"]["name"] for pool in ("pre", "dec") for child in world.of_pool(pool)}
    assert names == {"vl-pre-01234567", "vl-dec-01234567"}


def test_the_last_revisions_are_kept_and_those_that_run() -> None:
    world = standing(whole())
    for seed in range(1, 8):
        want(world, whole(seed=seed))
        finish(world)
    assert [revision.number for revision in world.revisions] == [6, 7, 8]
    assert len(world.revisions) == REVISION_LIMIT
    stuck = template_hash(world.children["vl-work"].manifest)
    for seed in range(20, 26):
        want(world, whole(seed=seed, router=str(seed)))  # the frontend never gets ready, so the pools are held
        world.reconcile()
    world.reconcile()  # a revision that was just made is counted from the next time on
    assert template_hash(world.children["vl-work"].manifest) == stuck
    assert stored_template(world.revisions, "vl-work", stuck) is not None
    assert len(world.revisions) == REVISION_LIMIT + 1


def test_a_revision_has_an_owner_and_its_number_in_its_name() -> None:
    world = World(deployment(whole()))
    _, revision = world.choose()
    assert revision is not None
    assert revision["metadata"]["name"] == "vl-1"
    assert revision["metadata"]["labels"]["mmrouter.io/deployment"] == "vl"
    assert revision["metadata"]["ownerReferences"][0]["controller"] is True
    assert set(revision["data"]["deployments"]) == {"vl-frontend", "vl-work", "vl-enc", "vl-rend"}


def test_a_revision_of_a_later_release_is_passed_over() -> None:
    """Data of another shape, as a later release may write it, is no template."""
    world = World(deployment(whole()))
    world.revisions = [RevisionView("vl-4", 4, {"deployments": {"vl-work": {"template": 1}, "vl-enc": 2}, "more": 3})]
    chosen, revision = choose_templates(world.desired(), world.snapshot(), False, world.dep)
    assert revision is not None
    assert revision["revision"] == 5
    assert all(template_hash(m) for m in chosen if m["kind"] == "Deployment")


def test_a_difference_names_the_fields() -> None:
    old = {"a": 1, "pools": [{"name": "x", "args": ["1"]}, {"name": "y"}], "gone": {"b": 1}}
    new = {"a": 1, "pools": [{"name": "x", "args": ["2"]}, {"name": "z"}]}
    assert difference(old, new) == ["gone", "pools[x].args", "pools[y]", "pools[z]"]
    assert difference({"p": [{"name": "a"}, {"name": "b"}]}, {"p": [{"name": "b"}, {"name": "a"}]}) == ["p (order)"]
    assert difference(old, copy.deepcopy(old)) == []


def test_an_orphaned_revision_is_taken_back_and_restarts_nothing() -> None:
    world = standing(whole())
    before = templates(world)
    (kept,) = world.revisions
    world.revisions = [dataclasses.replace(kept, owner="")]
    _, revision = world.choose()
    assert revision is not None
    assert (revision["metadata"]["name"], revision["data"]) == (kept.name, kept.data)
    assert revision["metadata"]["ownerReferences"][0]["uid"] == UID
    finish(world)
    assert templates(world) == before


def test_a_new_revision_never_takes_a_name_that_is_there() -> None:
    world = World(deployment(whole()))
    world.others["ControllerRevision", "vl-7"] = {
        "kind": "ControllerRevision",
        "metadata": {"name": "vl-7", "ownerReferences": [{"uid": "another", "controller": True}]},
    }
    _, revision = world.choose()
    assert revision is not None
    assert (revision["metadata"]["name"], revision["revision"]) == ("vl-8", 8)
