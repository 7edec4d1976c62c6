"""LoRA adapters of simulated engines: models of their own names, where they are loaded, with blocks of their own."""

from collections.abc import Iterator
from dataclasses import replace

import openai
import pytest
from local.rig import Deployment, deployed, example
from long_form import parameters
from scenarios import Chat, assert_whole, open_chat
from waiting import wait_for

ADAPTERS = ("sql", "team:sql")
FLAGS = {"vllm": ["--enable-lora", "--lora-modules"], "sglang": ["--lora-paths"]}


@pytest.fixture(scope="module", params=parameters(("demo.yaml", "demo-sglang.yaml"), "demo.yaml"))
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One engine without adapters, and one of another pool that has loaded two."""
    resource = example(request.param)
    spec = resource["spec"]
    (pool,) = spec["pools"]
    pool["replicas"] = 1
    loaded = [f"{name}=/adapters/{number}" for number, name in enumerate(ADAPTERS)]
    spec["pools"].append({**pool, "name": "adapted", "args": [*FLAGS[spec["engine"]["type"]], *loaded]})
    with deployed(tmp_path_factory.mktemp("adapters"), resource) as running:
        wait_for(running.settled, 60, "both engines are verified")
        yield running


@pytest.fixture
def chat(deployment: Deployment) -> Iterator[Chat]:
    with open_chat(deployment) as chat:
        yield chat


def test_the_model_list_has_every_adapter_below_the_model(deployment: Deployment) -> None:
    rows = deployment.client().models.list().data
    assert [(row.id, row.parent) for row in rows] == [("demo", None), *((name, "demo") for name in ADAPTERS)]


def test_an_adapter_answers_where_it_is_loaded_from_blocks_that_no_other_model_has(chat: Chat) -> None:
    workers: dict[str, str] = {}
    keys: dict[str, tuple[str, ...]] = {}
    # One engine has both adapters, and so the blocks of the first one when the second receives the same request.
    for model in (*ADAPTERS, "demo"):
        own = replace(chat, model=model)
        first, again = own.send(chat.image("a"), "what?"), own.send(chat.image("a"), "what?")
        assert (first.overlap, first.cached) == (0, 0), model
        assert_whole(first, again)
        workers[model], keys[model] = first.worker, first.keys
    assert all("adapted" in workers[name] for name in ADAPTERS)
    assert len(set().union(*keys.values())) == sum(map(len, keys.values()))


def test_a_completion_of_an_adapter_finds_its_own_blocks(chat: Chat) -> None:
    prompt = f"{chat.nonce} Once more. " * 20
    for model in ADAPTERS:
        own = replace(chat, model=model)
        first, again = own.complete(prompt), own.complete(prompt)
        assert first.cached == 0, model
        assert_whole(first, again)


def test_a_name_that_no_engine_has_is_not_found(deployment: Deployment) -> None:
    with pytest.raises(openai.NotFoundError):
        deployment.client().chat.completions.create(model="none", messages=[{"role": "user", "content": "x"}])
