from pathlib import Path

import pytest
import yaml

from mmrouter.api import MMRouterDeployment, parse_deployment
from mmrouter_operator.render import SecretData

GOLDEN = Path(__file__).parent / "golden"


def load(name: str) -> MMRouterDeployment:
    return parse_deployment(yaml.safe_load((GOLDEN / f"{name}.yaml").read_text()))


@pytest.fixture
def secrets() -> SecretData:
    """Keys that never change, so that rendered objects can be compared with files."""
    return SecretData(
        identity_key=bytes(range(32)),
        sidecar_public="a" * 40,
        sidecar_secret="b" * 40,
        router_public="c" * 40,
        router_secret="d" * 40,
        control_token="control-token",
        engine_key="engine-key",
    )


@pytest.fixture
def shortest() -> MMRouterDeployment:
    return load("shortest")


@pytest.fixture
def whole() -> MMRouterDeployment:
    return load("whole")


@pytest.fixture
def sglang() -> MMRouterDeployment:
    return load("sglang")
