"""`mmrouter status`: what a resource or its frontends say becomes one view, and nothing is made up."""

import io
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner
from unit.cli import healthy_cluster as d

from mmrouter_cli.app import app
from mmrouter_cli.status import control_api
from mmrouter_cli.status.control_api import Frontend, Unread
from mmrouter_cli.status.view import UNKNOWN, View, drawn, of_resource, of_states

TOKEN = "t" * 32
POOL = {"name": "worker", "role": "worker", "desired": 3, "ready": 2, "routable": 2, "verified": 1, "updated": 2}


def with_status(**status: Any) -> dict[str, Any]:
    made = d.resource()
    made["status"] |= status
    return made


def gated(name: str, routable: str, verified: str) -> dict[str, Any]:
    pod = d.pod(name)
    gates = {"mmrouter.io/routable": routable, "mmrouter.io/verified": verified}
    pod["spec"]["readinessGates"] = [{"conditionType": gate} for gate in gates]
    pod["status"]["conditions"] += [{"type": gate, "status": value} for gate, value in gates.items()]
    return pod


def text(*views: View) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(drawn(views))
    return console.export_text()


def test_a_resource_is_shown_as_its_status_says() -> None:
    routing = {"exactRatio": "0.998", "hitRatio": "0.83"}
    frontend = {"desired": 2, "ready": 1}
    view = of_resource(with_status(pools=[POOL], routing=routing, frontend=frontend, endpoint="http://vl.home.svc"), [])
    assert (view.phase, view.frontends, view.exact_ratio, view.hit_ratio) == ("Ready", "1/2", "0.998", "0.83")
    (pool,) = view.pools
    assert (pool.desired, pool.ready, pool.routable, pool.verified) == (3, 2, 2, 1)
    shown = text(view)
    for part in ("home/vl", "2/3", "1/3", "0.998", "0.83", "http://vl.home.svc", "ExactRoutingVerified"):
        assert part in shown


def test_an_engine_is_exact_only_where_its_gate_says_so() -> None:
    pulling = d.pod("c", ready=False, **d.waiting("ImagePullBackOff"))
    pods = [gated("a", "True", "True"), gated("b", "True", "False"), pulling, d.pod("f", "")]
    workers = {worker.name: worker for worker in of_resource(d.resource(), pods).workers}
    assert workers.keys() == {"a", "b", "c"}, "frontends are no workers"
    assert (workers["a"].routable, workers["a"].exact) == (True, "True")
    assert workers["b"].exact == "Unknown (not proved yet)"
    assert workers["c"].exact == "Unknown (ImagePullBackOff)"
    assert (workers["b"].unroutable, workers["c"].unroutable) == ("", "ImagePullBackOff")


def test_a_resource_without_status_shows_no_made_up_values() -> None:
    made = d.resource()
    del made["status"]
    view = of_resource(made, [])
    assert (view.phase, view.exact_ratio, view.hit_ratio, view.frontends) == ("Unknown", *[UNKNOWN] * 3)
    assert "no operator has processed it yet" in text(view)


def test_an_older_generation_is_noted_and_a_message_with_brackets_is_shown_as_it_is() -> None:
    made = d.resource(conditions=[d.condition("SpecValid", "False", "Invalid", "spec.pools[0].image: [red] is none")])
    made["metadata"]["generation"] = 9
    shown = text(of_resource(made, []))
    assert "generation 3, the spec of 9" in shown
    assert "spec.pools[0].image: [red] is none" in shown


def seen_by(**answers: Any) -> View:
    return of_states("http://127.1.0.1:8000", answers)


def test_counts_of_all_frontends_are_added_up_and_without_any_there_is_no_ratio() -> None:
    one = d.state(decisions=10, exact_decisions=10, prompt_blocks=100, hit_blocks=50)
    other = d.state(decisions=30, exact_decisions=20, prompt_blocks=100, hit_blocks=25)
    view = seen_by(a=one, b=other)
    assert (view.exact_ratio, view.hit_ratio, view.frontends) == ("0.750", "0.375", "2/2")
    assert seen_by(a=d.state()).exact_ratio == UNKNOWN, "nothing is decided yet"


def test_a_worker_is_as_the_worst_frontend_sees_it() -> None:
    good = d.state(d.worker("w", in_flight=1))
    bad = d.state(d.worker("w", routable=False, canary="Unknown", message="its sidecar is not heard", in_flight=2))
    (worker,) = seen_by(a=good, b=bad).workers
    assert (worker.routable, worker.exact) == (False, "Unknown (its sidecar is not heard)")
    assert worker.in_flight == 3
    assert "no: its sidecar is not heard" in text(seen_by(a=good, b=bad))
    assert seen_by(a=good, b=bad).phase == "Degraded"


def test_a_failed_canary_shows_its_cause() -> None:
    failed = d.worker(canary="False", canary_cause="template", canary_message="token 5")
    assert seen_by(a=d.state(failed)).workers[0].exact == "False (template: token 5)"


def test_an_unreachable_frontend_is_noted_and_without_any_answer_so_is_the_deployment() -> None:
    view = seen_by(a=d.state(), b=Unread("connection refused"))
    assert (view.frontends, view.phase) == ("1/2", "Starting")
    assert "b cannot be queried: connection refused" in text(view)
    view = seen_by(a=Unread("connection refused"))
    assert (view.phase, view.workers, view.pools) == ("Unreachable", (), ())


def test_renderers_are_shown_with_their_pool() -> None:
    row = {"uid": "r", "name": "r", "ip": "", "pool": "rend", "ready": True, "draining": False}
    view = seen_by(a=d.state(renderers=[{**row, "answered": True, "verified": True, "message": ""}]))
    pools = [(pool.name, pool.role, pool.verified) for pool in view.pools]
    assert pools == [("rend", "renderer", 1), ("worker", "worker", 1)]


def test_every_column_is_drawn() -> None:
    shown = text(seen_by(a=d.state(d.worker("the-worker", held={"0": 3, "1": 4}, heard_seconds_ago=0.25, in_flight=5))))
    row = next(line for line in shown.splitlines() if "the-worker" in line)
    for part in ("worker", "yes", "7", "5", "0.2 s ago"):
        assert part in row
    assert row.count("yes") == 2
    failed = d.worker(canary="False", canary_cause="template", canary_message="token 5")
    assert "no (template: token 5)" in text(seen_by(a=d.state(failed)))


def control(request: httpx.Request) -> httpx.Response:
    """A control API with one worker, and answers that are none."""
    if request.headers["authorization"] != f"Bearer {TOKEN}":
        return httpx.Response(401, json={})
    wrong = {"/html": httpx.Response(200, text="<html>"), "/list": httpx.Response(200, json=[])}
    wrong["/broken"] = httpx.Response(503)
    return wrong.get(request.url.path.removesuffix("/control/state"), httpx.Response(200, json=d.state()))


async def asked(path: str, token: str = TOKEN) -> Any:
    async with httpx.AsyncClient(transport=httpx.MockTransport(control)) as client:
        client.headers = control_api.client(token).headers
        return await control_api.fetch(client, Frontend("f", f"http://control{path}"))


@pytest.mark.parametrize(
    ("path", "token", "says"),
    [
        ("", "wrong", "rejects the control token"),
        ("/html", TOKEN, "not JSON"),
        ("/list", TOKEN, "not the state of a frontend"),
        ("/broken", TOKEN, "answered 503"),
    ],
)
async def test_a_state_is_read_and_what_is_none_is_said(path: str, token: str, says: str) -> None:
    assert await asked("") == d.state()
    assert says in (await asked(path, token)).why


async def test_a_connection_failure_is_shown() -> None:
    gone = Unread("its pod does not run")
    async with control_api.client(TOKEN) as client:
        assert (await control_api.fetch(client, Frontend("f", "http://127.0.0.1:9"))).why
        assert await control_api.fetch(client, Frontend("f", gone)) == gone


async def ways(*ips: str) -> list[str | Unread]:
    """The URLs of frontends' pods; one whose address ends in an exclamation mark does not run."""
    pods = [d.pod(f"f-{ip}", "", podIP=ip.strip("!"), phase="Pending" if "!" in ip else "Running") for ip in ips]
    async with control_api.open_frontends(pods, None) as frontends:
        return [frontend.url for frontend in frontends]


async def test_a_token_goes_to_a_pods_address_only_where_that_address_is_the_pods(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    loopback, elsewhere, nowhere, failing = await ways("127.0.0.9", "10.0.0.9", "", "10.1.2.3!")
    assert loopback == "http://127.0.0.9:8001"
    assert isinstance(elsewhere, Unread)
    assert "no kubectl" in elsewhere.why
    assert nowhere == failing == Unread("its pod does not run")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert await ways("10.0.0.9", "fd00::9") == ["http://10.0.0.9:8001", "http://[fd00::9]:8001"]


@pytest.mark.parametrize("command", ["status", "doctor"])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no `mmrouter up` runs here, and no cluster is configured"),
        (("vl", "--url", "http://x"), "a URL excludes"),
        (("--url", "http://x", "-n", "home"), "a URL excludes"),
        (("192.0.2.1:1", "-n", "home"), "a URL excludes"),
        (("--url", "http://192.0.2.1:1"), "name its control API with --control and --token"),
        (("http://192.0.2.1:1/v1",), "name its control API with --control and --token"),
        (("192.0.2.1:1",), "name its control API with --control and --token"),
        (("--control", "http://x"), "URL"),
        (("vl", "--kubeconfig", "/nowhere/config"), "there is no file /nowhere/config"),
    ],
)
def test_what_cannot_be_looked_at_ends_with_status_2_and_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(control_api, "run_root", lambda: tmp_path)
    result = CliRunner().invoke(app, [command, *arguments], catch_exceptions=False)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("mmrouter: ")
    assert says in result.stderr
