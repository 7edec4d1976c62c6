"""A release is installed whose definition comes first: the operator of before goes on, and says nothing of faults."""

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from cluster.controlplane import ControlPlane
from cluster.deployments import MERGE, SECONDS, Deployed, named
from cluster.hollow_kubelet import Hollow
from cluster.operators import operator
from waiting import wait_for

from mmrouter_lib.api.crd import NAME, definition

PATH = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{NAME}"
FIELD = 'ignored_fields{name="old",namespace='


@contextmanager
def newer(plane: ControlPlane) -> Iterator[None]:
    """Serve a definition with more fields that have defaults, in a section, in a pool and in one of their own."""
    spec: Any = copy.deepcopy(definition()["spec"])
    properties = spec["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    properties["routing"]["properties"]["novelty"] = {"type": "integer", "default": 7}
    properties["routing"]["default"]["novelty"] = 7
    properties["pools"]["items"]["properties"]["novelty"] = {"type": "string", "default": "x"}
    section = {"one": {"type": "integer", "default": 1}, "two": {"type": "string"}}
    properties["section"] = {"type": "object", "properties": section, "default": {"one": 1}}
    try:
        plane.request("PATCH", PATH, {"spec": spec}, content_type=MERGE).raise_for_status()
        yield
    finally:
        plane.request("PATCH", PATH, {"spec": definition()["spec"]}, content_type=MERGE).raise_for_status()


def test_defaults_of_a_newer_definition_are_no_fault_of_the_user_and_what_a_user_says_is(
    crd: ControlPlane, kubelet: Hollow, namespace: str
) -> None:
    deployed = Deployed(crd, namespace)
    with operator(crd) as replica:
        deployed.apply(named("old"))
        deployed.settled("old")
        before = deployed.condition("old", "SpecValid")
        with newer(crd):
            wait_for(
                lambda: "novelty" in deployed.resource("old")["spec"]["routing"], SECONDS, "the server fills it in"
            )
            touches = itertools.count()

            def seen() -> bool:
                # A watch shows an object in its new form when the object changes, and not before.
                note = {"metadata": {"annotations": {"touched": str(next(touches))}}}
                path = deployed.path("mmrouterdeployments", "old")
                crd.request("PATCH", path, note, content_type=MERGE).raise_for_status()
                return FIELD in replica.metrics()

            wait_for(seen, SECONDS, "the operator has seen it")
            assert deployed.condition("old", "SpecValid") == before, "not even for a moment: its time is as it was"
            deployed.apply(named("new"))
            deployed.settled("new")
            said = named("said")
            said["spec"]["section"] = {"two": "word"}
            deployed.apply(said)
            refused = deployed.await_condition("said", "SpecValid", "False")
            assert "spec.section: no such field" in refused["message"], yaml.safe_dump(refused)
            for name in ("said", "new"):
                crd.request("DELETE", deployed.path("mmrouterdeployments", name)).raise_for_status()
        assert deployed.condition("old", "SpecValid") == before
