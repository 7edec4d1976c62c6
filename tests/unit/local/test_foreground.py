"""What ``up`` prints once a deployment is ready."""

import shlex
from typing import Any

import pytest

from mmrouter_cli.local.foreground import first_request
from mmrouter_lib.api import parse_deployment

WORKERS = {"name": "worker", "role": "worker", "accelerator": {"kind": "cpu"}}
URL = "http://127.1.0.1:8000"


def text(url: str = URL, *, simulated: bool = True, **frontend: Any) -> str:
    spec = {"model": {"id": "m"}, "engine": {"type": "vllm"}, "pools": [WORKERS], "frontend": frontend}
    described = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment", "metadata": {"name": "t"}}
    return first_request(url, parse_deployment({**described, "spec": spec}), simulated=simulated)


@pytest.mark.parametrize("simulated", [True, False])
def test_simulated_engines_are_named_as_such(simulated: bool) -> None:
    assert text(simulated=simulated).startswith("SIMULATED engines") == simulated


def test_the_request_is_a_command_and_a_program() -> None:
    curl, *program = text(simulated=False).splitlines()
    words = shlex.split(curl)
    assert words[:2] == ["curl", f"{URL}/v1/chat/completions"]
    assert '"content": "Hello."' in words[-1]
    compile("\n".join(line.strip() for line in program), "program", "exec")


def test_a_deployment_with_keys_asks_for_one_and_one_with_tls_has_no_program() -> None:
    keys = {"secret": {"name": "keys"}}
    assert "Bearer KEY" in text(apiKeys=keys)
    assert "api_key='KEY'" in text(apiKeys=keys)
    assert "OpenAI" not in text(URL.replace("http", "https"))
