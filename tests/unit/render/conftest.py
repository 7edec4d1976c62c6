from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils
from unit.render.objects import SECRETS

from mmrouter_lib.api import MMRouterDeployment, parse_deployment, to_json
from mmrouter_operator.model.credentials import SecretData

GOLDEN = Path(__file__).parent / "golden"


# It reads a megabyte of schemas anew for every object.
utils.schema_contents = cache(utils.schema_contents)


def load(name: str) -> MMRouterDeployment:
    return parse_deployment(read(GOLDEN / f"{name}.yaml"))


@cache
def read(path: Path) -> Any:
    """Return a YAML document, which must not be modified."""
    return yaml.safe_load(path.read_text())


@pytest.fixture
def secrets() -> SecretData:
    """Keys that never change, so that rendered objects can be compared with files."""
    return SECRETS


@pytest.fixture
def shortest() -> MMRouterDeployment:
    return load("shortest")


@pytest.fixture
def whole() -> MMRouterDeployment:
    return load("whole")


@pytest.fixture
def sglang() -> MMRouterDeployment:
    return load("sglang")


@pytest.fixture
def changed() -> Callable[..., MMRouterDeployment]:
    """A deployment with other sections of its spec: ``changed(dep, routing={...})``."""

    def change(dep: MMRouterDeployment, **spec: Any) -> MMRouterDeployment:
        obj = to_json(dep)
        obj["spec"].update(spec)
        obj["metadata"]["uid"] = dep.metadata.uid
        return parse_deployment(obj)

    return change


@pytest.fixture
def valid() -> Callable[[list[dict[str, Any]]], None]:
    """Checks objects by the API's schemas: the oldest that is supported, that of the test level, the newest."""

    def check(objects: list[dict[str, Any]]) -> None:
        assert objects
        for obj in objects:
            for version in ("1.29", "1.35", "1.37"):
                kubernetes_validate.validate(obj, version, strict=True)

    return check
