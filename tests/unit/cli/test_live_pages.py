"""`mmrouter ui`: an address per frontend that answers, with the token where no server sees it, or why there is none."""

import asyncio
import json
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner
from unit.router.frontend import PORT, Frontend

from mmrouter_cli.app import app
from mmrouter_cli.status import control_api
from mmrouter_cli.status.control_api import ControlEndpoint, Unread
from mmrouter_cli.status.live_pages import address, of_endpoint


@given(st.text(min_size=1))
def test_the_token_is_in_the_fragment_only_and_comes_back_whole(token: str) -> None:
    made = urlsplit(address("http://127.0.0.1:8001", token))
    assert (made.netloc, made.path, made.query) == ("127.0.0.1:8001", "/ui/", "")
    assert parse_qs(made.fragment, keep_blank_values=True) == {"token": [token]}


async def test_a_frontend_that_answers_has_an_address_and_any_other_a_reason() -> None:
    frontend = await Frontend(token="right").start()
    controls = (f"http://{frontend.ip}:{PORT}", "http://127.0.0.1:9")
    try:
        found = await of_endpoint(ControlEndpoint("http://x", controls, "right"))
        refused = await of_endpoint(ControlEndpoint("http://x", controls[:1], "wrong"))
    finally:
        await frontend.stop()
    assert found[0] == (f"{frontend.ip}:{PORT}", address(controls[0], "right"))
    assert isinstance(found[1].address, Unread)
    assert [page.address for page in refused] == [Unread("it rejects the control token")]


async def test_addresses_are_printed_one_a_line_and_as_json() -> None:
    frontend = await Frontend(token="right").start()
    control = f"http://{frontend.ip}:{PORT}"
    options = ["ui", control, "--control", control, "--token", "right"]
    try:
        plain = await asyncio.to_thread(CliRunner().invoke, app, options)
        listed = await asyncio.to_thread(CliRunner().invoke, app, [*options, "--json"])
    finally:
        await frontend.stop()
    assert (plain.exit_code, plain.stdout) == (0, f"{address(control, 'right')}\n")
    assert json.loads(listed.stdout) == [{"frontend": f"{frontend.ip}:{PORT}", "address": address(control, "right")}]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("http://127.0.0.1:9", "--control", "http://127.0.0.1:9", "--token", "t"), 1, "127.0.0.1:9 has no page: "),
        ((), 2, "give the URL of an endpoint or a name"),
        (("127.0.0.1:9",), 2, "name its control API with --control and --token"),
        (("127.0.0.1:9", "-n", "home"), 2, "go with a name"),
        (("vl", "--control", "http://x"), 2, "--control goes with a URL"),
        (("vl",), 2, "no cluster is configured"),
    ],
)
def test_where_there_is_no_page_the_command_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], status: int, says: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(control_api, "run_root", lambda: tmp_path)
    result = CliRunner().invoke(app, ["ui", *arguments], catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr.startswith("mmrouter: ")
    assert says in result.stderr
