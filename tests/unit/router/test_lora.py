"""Requests for LoRA adapters: their name, their keys, and the engines that they go to."""

import json
from dataclasses import replace

import pytest
from unit.router.preparing import preparing, settings
from unit.router.rig import BLOCK, IDS, Rig, heartbeat, prepared, resource, sync
from unit.router.router_rig import client_of, member, router

from mmrouter_lib.block_keys import block_keys, namespace_seed
from mmrouter_lib.engines import ADAPTERS
from mmrouter_lib.engines.base.adapter import lora_adapters
from mmrouter_lib.engines.base.request_fields import CHAT, COMPLETIONS
from mmrouter_router.core.errors import RequestError
from mmrouter_router.fleet.membership import Membership
from mmrouter_router.intake import Limits, parse_chat
from mmrouter_router.scheduling.candidates import NoWorkerError

NAMES = frozenset({"t", "sql"})
SQL = replace(prepared(), adapter="sql")


def parsed(model: str):
    body = {"model": model, "messages": [{"role": "user", "content": "The harbour lies still. " * 20}]}
    return parse_chat(json.dumps(body).encode(), Limits(), NAMES)


def test_an_adapter_is_a_model_of_the_list_with_another_as_its_parent():
    rows = [{"id": "m", "parent": None}, {"id": "sql", "parent": "m"}, {"id": "b", "parent": "m"}, {"id": "x"}, 7]
    assert lora_adapters({"data": rows}) == ("b", "sql")
    assert lora_adapters({"data": [{"id": 7, "parent": "m"}, {"id": "n" * 300, "parent": "m"}]}) == ()
    assert lora_adapters({}) == ()


def test_an_adapter_is_named_like_a_model_and_no_other_name_is_served():
    assert parsed("sql").model == "sql"
    with pytest.raises(RequestError) as caught:
        parsed("s")
    assert caught.value.status == 404


async def test_keys_of_an_adapters_prompt_are_its_own():
    configured = settings()
    async with preparing(configured) as preparer:
        own, adapted = [await preparer.prepare(parsed(name), "salt") for name in ("t", "sql")]
    assert (own.adapter, adapted.adapter) == ("", "sql")
    assert own.ids == adapted.ids
    model = configured.deployment.spec.model
    seed = namespace_seed(configured.identity_key, model=model.id, revision=model.revision, lora="sql", salt="salt")
    assert adapted.keys(BLOCK) == block_keys(adapted.ids, BLOCK, (), seed)
    assert not set(own.keys(BLOCK)) & set(adapted.keys(BLOCK))


def test_a_request_for_an_adapter_goes_where_it_is_loaded():
    rig = Rig()
    rig.worker("a", SQL.keys(BLOCK))
    loaded = rig.worker("b", adapters=("other", "sql"))
    assert rig.placer.place(SQL).target.worker is loaded
    assert rig.placer.place(prepared(ids=IDS)).target.worker.member.name == "a"
    assert rig.fleet.adapters() == {"other", "sql"}
    rig.beat(loaded, adapters=())
    assert rig.fleet.adapters() == frozenset()
    with pytest.raises(NoWorkerError):
        rig.placer.place(SQL)


@pytest.mark.parametrize(
    ("engine", "name", "expected"),
    [
        ("vllm", "sql", {"model": "sql"}),
        ("sglang", "sql", {"model": "sql", "lora_path": "sql"}),
        ("sglang", "team:sql", {"model": "t", "lora_path": "team:sql"}),  # else the engine would look for "sql"
    ],
)
def test_an_engine_gets_the_name_where_it_reads_it_and_never_the_clients_path(engine, name, expected):
    body = {"model": name, "messages": [], "lora_path": "another"}
    sent = ADAPTERS[engine].rewrite_chat(body, (), model="t", cache_salt=None, adapter=name).body
    assert {field: value for field, value in sent.items() if field in ("model", "lora_path")} == {
        **({"lora_path": "another"} if engine == "vllm" else {}),  # no field of vLLM's: a client's is a 400 before
        **expected,
    }


async def test_an_adapter_that_sglangs_responses_would_ignore_is_refused_there_and_served_by_chats():
    own = resource(engine={"type": "sglang", "image": "x", "blockSize": BLOCK})
    async with router(own=own) as made, client_of(made) as client:
        made.apply_membership(Membership((member("a", "127.0.0.1"),)))
        (worker,) = made.fleet
        made.fleet.feed_connected(worker)
        sync(made.fleet, worker)
        heartbeat(made.fleet, worker, engine="sglang", adapters=("sql",))
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(each["id"], each["parent"]) for each in listed] == [("t", None), ("sql", "t")]
        answer = await client.post("/v1/responses", json={"model": "sql", "input": "x"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        for path, field in ((CHAT, {"messages": [{"role": "user", "content": "x"}]}), (COMPLETIONS, {"prompt": "x"})):
            raw = json.dumps({"model": "sql", **field}).encode()
            tenant = made.chat.tenant("")
            assert (await made.chat.prepare(path, raw, tenant)).adapter == "sql"
