"""What ``up`` prints while a deployment starts, and once it is ready."""

import asyncio
import io
import shlex
from typing import Any

import pytest
from rich.console import Console
from waiting import wait_for

from mmrouter_cli.local.foreground import PodView, lines_when_ready
from mmrouter_lib.api import parse_deployment

WORKERS = {"name": "worker", "role": "worker", "accelerator": {"kind": "cpu"}}
URL = "http://127.1.0.1:8000"


def text(url: str = URL, *, simulated: bool = True, demo: bool = False, **frontend: Any) -> str:
    spec = {"model": {"id": "m"}, "engine": {"type": "vllm"}, "pools": [WORKERS], "frontend": frontend}
    described = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment", "metadata": {"name": "t"}}
    deployment = parse_deployment({**described, "spec": spec})
    return "\n".join(lines_when_ready(url, deployment, simulated=simulated, demo=demo))


@pytest.mark.parametrize("demo", [True, False])
@pytest.mark.parametrize("simulated", [True, False])
def test_simulated_engines_are_named_as_such(simulated: bool, demo: bool) -> None:
    shown = text(simulated=simulated, demo=demo)
    assert shown.startswith("SIMULATED engines") == simulated
    assert ("curl" in shown) != demo


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


def test_each_change_of_a_pod_is_one_line_and_no_text_of_it_is_markup() -> None:
    written = io.StringIO()
    view = PodView(Console(file=written, width=20))
    for router in (
        "[red]router[/red]: not started",
        "[red]router[/red]: not started",
        "",
        "router: exited with status 1",
    ):
        view.show({"frontend-0": router, "worker-0": "engine: loads"})
    assert written.getvalue().splitlines() == [
        "frontend-0: waits for [red]router[/red]: not started",
        "worker-0: waits for engine: loads",
        "frontend-0: ready, 1 of 2",
        "frontend-0: waits for router: exited with status 1",
    ]


async def test_a_terminal_has_a_table_until_all_pods_are_ready_and_lines_after_that() -> None:
    written, pods = io.StringIO(), {"frontend-0": "router: not started", "worker-0": ""}
    view = PodView(Console(file=written, width=100, force_terminal=True, color_system=None))

    async def until(text: str) -> None:
        await asyncio.to_thread(wait_for, lambda: text in written.getvalue(), 20, text)

    following = asyncio.create_task(view.follow(lambda: pods))
    await until("1 of 2 pods ready")
    assert "waits for" in written.getvalue()
    pods["frontend-0"] = ""
    await until("2 pods ready after")
    pods["worker-0"] = "engine: exited with status 1"
    await until("worker-0: waits for engine: exited with status 1")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
