"""Client libraries read through mmrouter what the engine answers, and retry as a refusal says."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx
import pytest
from artefacts import run_tool_or_skip
from clients.load_programs import REQUESTS, Guidellm, LoadProgram, VllmBench
from clients.matrix import (
    ABOUT_IMAGE,
    CHATS,
    CLIENTS,
    SHORT,
    STORY_TOKENS,
    STRUCTURED,
    TEXT,
    TEXTS,
    TOOLS,
    Matrix,
    answers,
)
from conformance.engines import Pod, engines
from local.rig import ROOT, Deployment, deployed, example
from long_form import parameters
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri

KEYS = {"a": "slow", "b": "free", "c": "once"}
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": KEYS}
TENANTS = {"named": [{"name": "a", "requestsPerMinute": 20}, {"name": "c", "requestsPerMinute": 1}]}
WITHOUT_RETRIES = {"huggingface-hub"}
RETRYING = parameters([client for client in CLIENTS if client not in WITHOUT_RETRIES], "openai", "ai-sdk")
OBJECT = {"color": "red"}
"""The answer of a simulated engine to the schema of the clients."""
LOAD_TOKENS = 4000  # of an answer of a program for load: 80 s on the engine
ATTEMPTS = 5  # a client is not refused where it asks just when the limit admits one request


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix.made(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One engine, and one frontend that admits 20 and one requests per minute of two tenants."""
    resource = example()
    resource["spec"]["frontend"].update(replicas=1, apiKeys={"secret": {"name": "keys"}}, tenants=TENANTS)
    resource["spec"]["pools"][0].update(replicas=1, args=["--sim-decode-ms=20"])
    with deployed(tmp_path_factory.mktemp("clients"), SECRET, resource) as deployment:
        wait_for(deployment.settled, 60, "the engine is verified")
        yield deployment


@pytest.fixture(scope="module")
def engine(deployment: Deployment) -> Pod:
    [(_, engine)] = engines(deployment)
    return engine


@pytest.fixture(scope="module")
def expected(matrix: Matrix, deployment: Deployment, engine: Pod) -> dict[str, str]:
    """Scenario -> text. The simulated engine's answer depends on an image's identity, which the router gives."""
    common = {"model": "demo", "max_tokens": SHORT, "temperature": 0}
    image = {"type": "image_url", "image_url": {"url": data_uri(matrix.image.read_bytes())}}
    pictured = [{"role": "user", "content": [{"type": "text", "text": ABOUT_IMAGE}, image]}]
    chat = engine.ask({**common, "messages": [{"role": "user", "content": TEXT}]})
    completion = engine.ask({**common, "prompt": TEXT}, "/v1/completions")
    about_image = post(deployment, "free", {**common, "messages": pictured})
    text = chat.json()["choices"][0]["message"]["content"]
    return {
        **dict.fromkeys(("chat", "stream", "responses"), text),
        "completion": completion.json()["choices"][0]["text"],
        "image": about_image.json()["choices"][0]["message"]["content"],
    }


def post(deployment: Deployment, key: str, body: dict[str, object]) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{deployment.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


@pytest.mark.parametrize("client", CHATS)
def test_every_client_reads_the_engines_answer(
    matrix: Matrix, deployment: Deployment, expected: dict[str, str], client: str
) -> None:
    read = matrix.run(client, deployment.url, "free", (*TEXTS, STRUCTURED, TOOLS))
    assert read.pop(STRUCTURED, OBJECT) == OBJECT
    assert read.pop(TOOLS) in (["paint", OBJECT], OBJECT)  # with or without the tool's name
    texts = {scenario: answer[0] if isinstance(answer, list) else answer for scenario, answer in read.items()}
    assert texts.pop("models", True)
    counted = texts.pop("count", None)
    totals = {answer[1] for answer in read.values() if isinstance(answer, list)}
    assert counted is None or totals == {counted + SHORT}
    assert texts == {scenario: expected[scenario] for scenario in texts}


@pytest.mark.parametrize("client", parameters(CHATS, "openai", "openai-node"))
def test_a_stream_that_the_client_leaves_ends_on_the_engine(
    matrix: Matrix, deployment: Deployment, engine: Pod, client: str
) -> None:
    before = engine.value("vllm:generation_tokens_total")
    assert matrix.run(client, deployment.url, "free", ["cancel"]) == {"cancel": True}
    wait_for(lambda: engine.value("vllm:num_requests_running") == 0, 60, "the engine has no request")
    assert engine.value("vllm:generation_tokens_total") - before < STORY_TOKENS


@pytest.mark.parametrize("client", RETRYING)
def test_a_client_that_is_limited_retries_until_it_is_served(
    matrix: Matrix, deployment: Deployment, expected: dict[str, str], client: str
) -> None:
    answer: dict[str, object] = {}
    for _ in range(ATTEMPTS):
        process = matrix.start(client, deployment.url, "slow", [asked(client)])
        refused = refuse_until_the_client_is(deployment, process)
        answer = answers(process)
        if refused:
            break
    assert refused
    assert_served(client, answer, expected)


@pytest.mark.parametrize("client", RETRYING)
def test_a_client_that_finds_no_engine_retries_until_it_is_served(
    matrix: Matrix, deployment: Deployment, engine: Pod, expected: dict[str, str], client: str
) -> None:
    with lost(deployment, engine):
        before = refusals(deployment, "503")
        started = matrix.start(client, deployment.url, "free", [asked(client)])
        wait_for(lambda: refusals(deployment, "503") > before, 600, "the client is refused")
    assert_served(client, answers(started), expected)
    wait_for(deployment.settled, 60, "the engine is back")


@pytest.mark.long_form
@pytest.mark.parametrize("client", sorted(WITHOUT_RETRIES))
def test_a_client_without_retries_shows_the_first_refusal(
    matrix: Matrix, deployment: Deployment, engine: Pod, client: str
) -> None:
    before = refusals(deployment, "503")
    with lost(deployment, engine):
        assert "503" in matrix.run(client, deployment.url, "free", ["chat"], may_fail=["chat"])["chat"]
    assert refusals(deployment, "503") - before == 1
    wait_for(deployment.settled, 60, "the engine is back")


@pytest.fixture(params=[VllmBench, Guidellm])
def program(request: pytest.FixtureRequest, tmp_path: Path) -> LoadProgram:
    kind: type[LoadProgram] = request.param
    return kind(Path(run_tool_or_skip("engines.vllm_env")), ROOT / "examples" / "models" / "tiny-qwen2-vl", tmp_path)


@pytest.mark.long_form
def test_an_interrupted_program_for_load_leaves_no_request(
    deployment: Deployment, engine: Pod, program: LoadProgram
) -> None:
    before = engine.value("vllm:generation_tokens_total")
    process = program.start(deployment.url, "free", LOAD_TOKENS)
    try:
        wait_for(lambda: engine.value("vllm:num_requests_running") > 0 or process.poll() is not None, 600, "a request")
        process.send_signal(signal.SIGINT)
        assert process.wait(600) != 0
    finally:
        process.kill()
    wait_for(lambda: engine.value("vllm:num_requests_running") == 0, 60, "the engine has no request")
    wait_for(lambda: deployment.workers("worker")[0]["in_flight"] == 0, 60, "the router has no request")
    assert engine.value("vllm:generation_tokens_total") - before < LOAD_TOKENS


@pytest.mark.long_form
@pytest.mark.parametrize("status", ["429", "503"])
def test_a_program_for_load_counts_each_refusal_as_a_failure_and_does_not_retry(
    deployment: Deployment, engine: Pod, program: LoadProgram, status: str
) -> None:
    before = refusals(deployment, status)
    with lost(deployment, engine) if status == "503" else nullcontext():
        program.run(deployment.url, "once" if status == "429" else "free")
    answered, failed = program.counted()
    assert (answered + failed, failed) == (REQUESTS, refusals(deployment, status) - before)
    assert failed > 0
    wait_for(deployment.settled, 60, "the engine is there")


@contextmanager
def lost(deployment: Deployment, engine: Pod) -> Iterator[None]:
    """Suspend the only engine, so that requests are refused with a 503."""
    try:
        for process in engine.processes:
            process.suspend()
        wait_for(lambda: httpx.get(f"{deployment.url}/ready").status_code == 503, 60, "the engine is lost")
        yield
    finally:
        for process in engine.processes:
            process.resume()


def refusals(deployment: Deployment, status: str) -> float:
    return deployment.metric("mmrouter_requests_total", code=status)


def asked(client: str) -> str:
    """Return the scenario with one request: Instructor has structured answers only."""
    return STRUCTURED if client == "instructor" else "chat"


def assert_served(client: str, answer: dict[str, object], expected: dict[str, str]) -> None:
    text = answer[asked(client)]
    assert (text[0] if isinstance(text, list) else text) == (OBJECT if client == "instructor" else expected["chat"])


def refuse_until_the_client_is(deployment: Deployment, process: "subprocess.Popen[str]") -> bool:
    """Use up the tenant's limit until a client is refused, too; return whether it was before it ended."""

    body: dict[str, object] = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    before, own = refusals(deployment, "429"), 0
    while process.poll() is None:
        own += post(deployment, "slow", body).status_code == 429
        if refusals(deployment, "429") - before > own:
            return True
    return False
