"""Responses that a real vLLM stores: their prompts are the predicted ones, and another router finds each again.

Two routers before one engine, which the long form kills at the end: it comes back without its responses.
"""

import httpx
import openai
import pytest
from conformance.engine_process import VLLM_ENVIRONMENT, engine_args, require_memory
from conformance.engines import deployed, engines, manifest, pool
from conformance.setups import TINY
from conformance.workload import STORY
from waiting import wait_for

KEYS = {"alice": "key-of-alice", "bob": "key-of-bob"}
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": KEYS}
STORING = {**VLLM_ENVIRONMENT, "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
TURNS = [
    {"role": "user", "content": [{"type": "input_text", "text": STORY}, {"type": "input_text", "text": "Who counts?"}]},
    {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
        {"type": "output_text", "text": "The baker.", "annotations": []}
    ]},
    {"role": "user", "content": "And what?"},
]  # fmt: skip
LIMITS = {"max_output_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def deployment(vllm_env, shrunk, tmp_path_factory):
    require_memory()
    frontend = {"apiKeys": {"secret": {"name": "keys"}}}
    pools = [pool("worker", STORING)]
    engine = {"type": "vllm", "args": engine_args()}
    made = manifest(shrunk(TINY), engine, pools, repository=TINY, frontends=2, frontend=frontend)
    with deployed(vllm_env, tmp_path_factory.mktemp("stored"), made, SECRET) as deployment:
        yield deployment


@pytest.fixture
def client(deployment):
    """Return a function that makes a client of a frontend for a tenant."""

    def make(number: int = 0, tenant: str = "alice") -> openai.OpenAI:
        url = f"http://{httpx.URL(deployment.controls[number]).host}:8000/v1"
        headers = {"x-mmrouter-control": deployment.token}
        return openai.OpenAI(base_url=url, api_key=KEYS[tenant], default_headers=headers, timeout=600, max_retries=0)

    return make


@pytest.mark.parametrize(
    "given",
    [
        {"input": STORY},
        {"input": STORY, "instructions": "Be brief."},
        {"input": TURNS, "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_object"}}},
        {"input": STORY, "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}]},
    ],
    ids=["text", "instructions", "turns", "tools"],
)
def test_the_prompt_of_a_stored_response_is_predicted_and_a_repeat_is_a_whole_hit(deployment, client, given):
    first = client().responses.with_raw_response.create(model="demo", **given, **LIMITS)
    tokens, size = first.parse().usage.input_tokens, int(first.headers["x-mmrouter-block-size"])
    assert first.headers["x-mmrouter-exactness"] == "exact"
    assert int(first.headers["x-mmrouter-prompt-tokens"]) == tokens
    worker = engines(deployment)[0][1].uid
    keys = deployment.decision(first)["keys"]
    wait_for(lambda: set(keys) <= set(deployment.keys(worker)["keys"]["0"]), 60, "every predicted block is published")
    again = client().responses.with_raw_response.create(model="demo", **given, **LIMITS)
    assert int(again.headers["x-mmrouter-overlap-blocks"]) == len(keys) == tokens // size
    assert again.parse().usage.input_tokens_details.cached_tokens == (tokens - 1) // size * size


def test_a_response_is_continued_retrieved_streamed_and_cancelled_through_another_router(client):
    one, other = client(0), client(1)
    first = one.responses.create(model="demo", input=STORY, **LIMITS)
    assert other.responses.retrieve(first.id).to_dict() == first.to_dict()
    asked = {"model": "demo", "input": "And then?", "previous_response_id": first.id, **LIMITS}
    second = other.responses.create(**asked)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    events = list(other.responses.create(**asked, stream=True))
    named = {event.response.id for event in events if hasattr(event, "response")}
    assert (events[-1].type, len(named)) == ("response.completed", 1)
    assert one.responses.retrieve(named.pop()).status in ("completed", "incomplete")
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        other.responses.cancel(first.id)
    queued = one.responses.create(model="demo", input=STORY, background=True, extra_body={"ignore_eos": True})
    assert other.responses.cancel(queued.id).status == "cancelled"
    assert one.responses.retrieve(queued.id).status == "cancelled"
    live = one.responses.create(model="demo", input=STORY, background=True, stream=True, **LIMITS)
    sent = [event.to_dict() for event in live]
    name = sent[0]["response"]["id"]
    again = other.responses.retrieve(name, stream=True, starting_after=1)
    assert [event.to_dict() for event in again] == sent[2:]


def test_another_tenants_response_is_not_found(client):
    mine = client().responses.create(model="demo", input=STORY, **LIMITS).id
    with pytest.raises(openai.NotFoundError) as caught:
        client(1, "bob").responses.create(model="demo", input="And?", previous_response_id=mine, **LIMITS)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "response_not_found")


@pytest.mark.long_form  # tests/local/test_stored_responses.py has the same of simulated engines
def test_a_response_of_a_killed_engine_is_lost_and_says_so(deployment, client):
    mine = client().responses.create(model="demo", input=STORY, **LIMITS).id
    for process in engines(deployment)[0][1].processes:
        process.kill()

    def lost() -> openai.NotFoundError | None:
        try:
            client(1).responses.retrieve(mine)
        except openai.NotFoundError as error:
            return error
        except openai.InternalServerError:  # while the engine is away
            return None
        raise AssertionError("the response is still there")

    error = wait_for(lost, 300, "the engine is back without its responses")
    assert (error.code, error.param) == ("response_lost", "response_id")
