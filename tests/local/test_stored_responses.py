"""Stored responses of a running deployment: continued, retrieved and cancelled through another router, per tenant."""

from collections import Counter

import httpx
import openai
import pytest
from local.rig import deployed, example
from long_form import parameters
from waiting import wait_for

KEYS = {"alice": "key-of-alice", "bob": "key-of-bob"}
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": KEYS}
STORE = {"name": "engine", "env": [{"name": "VLLM_ENABLE_RESPONSES_API_STORE", "value": "1"}]}
FIRST = "The harbour lies in the morning light, and the boats are still. What is the tide doing?"


@pytest.fixture(scope="module", params=parameters(("vllm", "sglang"), "vllm"))
def deployment(tmp_path_factory, request):
    """Two frontends before two engines that store responses."""
    resource = example("demo.yaml" if request.param == "vllm" else "demo-sglang.yaml")
    spec, pool = resource["spec"], resource["spec"]["pools"][0]
    spec["frontend"].update(replicas=2, apiKeys={"secret": {"name": "keys"}})
    pool.update(replicas=2, args=["--sim-jitter=0", "--sim-answer-tokens=1000", "--sim-decode-ms=20"])
    if request.param == "vllm":
        pool["podTemplate"] = {"spec": {"containers": [STORE]}}
    else:
        pool["args"].append("--enable-response-store")
    with deployed(tmp_path_factory.mktemp("stored"), SECRET, resource) as deployment:
        wait_for(deployment.settled, 120, "every worker is verified on every frontend")
        yield deployment


@pytest.fixture
def clients(deployment):
    """A client of each frontend by tenant."""

    def client(number: int, tenant: str) -> openai.OpenAI:
        host = httpx.URL(deployment.controls[number]).host
        headers = {"x-mmrouter-control": deployment.token}
        url = f"http://{host}:8000/v1"
        return openai.OpenAI(base_url=url, api_key=KEYS[tenant], default_headers=headers, timeout=120, max_retries=0)

    return client


def test_a_response_is_continued_retrieved_and_streamed_through_another_router(deployment, clients):
    one, other = clients(0, "alice"), clients(1, "alice")
    holders = Counter()
    for number in range(6):
        raw = one.responses.with_raw_response.create(model="demo", input=f"{number}: {FIRST}", max_output_tokens=8)
        first = raw.parse()
        assert raw.headers["x-mmrouter-exactness"] == "exact"
        assert other.responses.retrieve(first.id).to_dict() == first.to_dict()
        asked = {"model": "demo", "input": "And then?", "max_output_tokens": 8, "previous_response_id": first.id}
        again = other.responses.with_raw_response.create(**asked)
        assert again.headers["x-mmrouter-worker"] == raw.headers["x-mmrouter-worker"]
        assert again.parse().usage.input_tokens > first.usage.input_tokens + 8
        assert again.parse().usage.input_tokens_details.cached_tokens > 0, "it was computed where it is cached"
        events = list(one.responses.create(**asked, stream=True))
        named = {event.response.id for event in events if hasattr(event, "response")}
        assert (events[-1].type.removesuffix("incomplete").removesuffix("completed"), len(named)) == ("response.", 1)
        assert other.responses.retrieve(named.pop()).to_dict() == events[-1].response.to_dict()
        holders[raw.headers["x-mmrouter-worker"]] += 1
    assert len(holders) == 2, "both engines store conversations"
    assert deployment.metric("mmrouter_decisions_total", exactness="affinity", reason="stored_messages") == 12


def test_a_response_in_the_background_is_cancelled_through_another_router(clients):
    one, other = clients(0, "alice"), clients(1, "alice")
    queued = one.responses.create(model="demo", input=FIRST, background=True)
    assert queued.status == "queued"
    assert other.responses.cancel(queued.id).status == "cancelled"
    assert one.responses.retrieve(queued.id).status == "cancelled"


def test_another_tenants_response_is_not_found(clients):
    mine = clients(0, "alice").responses.create(model="demo", input=FIRST, max_output_tokens=4).id
    stranger = clients(1, "bob")
    with pytest.raises(openai.NotFoundError) as caught:
        stranger.responses.create(model="demo", input="And?", previous_response_id=mine)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "response_not_found")
    for ask in (stranger.responses.retrieve, stranger.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(mine)
        assert caught.value.code == "response_not_found"


def test_a_response_of_a_killed_engine_is_lost_and_says_so(deployment, clients):
    one, other = clients(0, "alice"), clients(1, "alice")
    raw = one.responses.with_raw_response.create(model="demo", input=FIRST, max_output_tokens=4)
    mine = raw.parse().id
    engines = deployment.processes("vllm") or deployment.processes("sglang")
    engines[raw.headers["x-mmrouter-worker"]].kill()

    def lost(ask) -> openai.NotFoundError | None:
        try:
            ask()
        except openai.NotFoundError as error:
            return error
        except openai.InternalServerError:  # while the engine is away
            return None
        raise AssertionError("the response is still there")

    asked = {"model": "demo", "input": "And?", "previous_response_id": mine}
    for ask, param in (
        (lambda: other.responses.retrieve(mine), "response_id"),
        (lambda: other.responses.create(**asked), "previous_response_id"),
    ):
        error = wait_for(lambda ask=ask: lost(ask), 120, "the engine is back without its responses")
        assert (error.param, error.code) == (param, "response_lost")
        assert "the engine that stored it has restarted since" in error.message
