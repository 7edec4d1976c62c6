"""Transfers of blocks and embeddings between simulated engines look like a real engine's from outside.

Forms and figures are those of the captures ``qwen2vl_pd_nixl`` and ``qwen2vl_encoder_disagg``.
"""

import asyncio
import json

import pytest
from unit.sim.conftest import LONG, cached_tokens, image, png, samples, text
from unit.sim.test_events import ask, events
from waiting import until

from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_sim.media import RecentImages
from mmrouter_sim.vllm.flags import parse

REMOTE = {"do_remote_decode": True, "do_remote_prefill": False}
TOKENS = 16
CONTENT = [text(LONG), image(png(), "u-1")]
VISUAL = ("mmrouter_sim_visual_tokens_total", "0")


@pytest.fixture
def nixl(serve, unused_port, monkeypatch):
    """Start engines that hand over blocks, each at a port of its own; more fields go into the connector's flag."""

    async def start(*flags, **fields):
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(unused_port(1)))
        config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"} | fields
        client = await serve("--block-size", str(TOKENS), "--kv-transfer-config", json.dumps(config), *flags)
        await listening(*client.engine.handover.config.kv_address)
        return client

    return start


@pytest.fixture
def ec(serve, unused_port, monkeypatch):
    """Start an engine with a role in handing over embeddings."""

    async def start(role, *flags, folder=None):
        monkeypatch.setenv("VLLM_EC_SIDE_CHANNEL_HOST", "127.0.0.1")
        monkeypatch.setenv("VLLM_EC_SIDE_CHANNEL_PORT", str(unused_port(1)))
        config = {"ec_connector": "ECCPUConnector", "ec_role": role}
        if folder is not None:
            extra = {"shared_storage_path": str(folder)}
            config = {"ec_connector": "ECExampleConnector", "ec_role": role, "ec_connector_extra_config": extra}
        client = await serve("--block-size", str(TOKENS), "--ec-transfer-config", json.dumps(config), *flags)
        if client.engine.handover.config.listens:
            await listening(*client.engine.handover.config.listens)
        return client

    return start


async def listening(host, port):
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, port)
            except ConnectionError:
                await asyncio.sleep(0.005)
            else:
                writer.close()
                return


async def prefilled(client, *content):
    status, reply = await client.chat(CONTENT, max_tokens=1, kv_transfer_params=REMOTE)
    assert status == 200
    return reply


def held(client):
    return sum(len(runner.scheduler.held) for runner in client.engine.runners)


async def test_a_prefill_returns_the_owner_of_its_blocks_and_holds_them(nixl):
    first = await nixl()
    reply = await prefilled(first, *CONTENT)
    params, prompt = reply["kv_transfer_params"], reply["usage"]["prompt_tokens"]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert (params["remote_host"], params["remote_port"]) == first.engine.handover.config.kv_address
    assert params["remote_num_tokens"] == prompt
    assert [len(blocks) for blocks in params["remote_block_ids"]] == [-(-prompt // TOKENS)]
    assert held(first) == 1
    assert (await first.chat([text("short")]))[1]["kv_transfer_params"] is None


async def test_the_decoder_computes_nothing_publishes_ordinary_blocks_and_frees_the_prefills(nixl, context, tmp_path):
    replay = f"ipc://{tmp_path}/replay"
    first = await nixl()
    second = await nixl(*events(f"ipc://{tmp_path}/events", replay))
    params = (await prefilled(first, *CONTENT))["kv_transfer_params"]
    status, reply = await second.chat(CONTENT, kv_transfer_params=params)
    assert status == 200
    (_, _, _, payload), _ = await ask(context, replay)
    prompt = reply["usage"]["prompt_tokens"]
    (stored,) = decode_batch(payload).events
    assert len(stored.hashes) == prompt // TOKENS
    # All but the last token, which is sampled from.
    assert second.engine.runners[0].scheduler.counters.external_hits == prompt - 1
    assert (await samples(second))[VISUAL] == 0
    assert cached_tokens(reply) == 0
    await until(lambda: held(first) == 0)
    assert first.engine.runners[0].scheduler.pool.used == 0


async def test_an_answer_does_not_depend_on_which_engine_computed_its_prompt(nixl):
    first, second, whole = await nixl(), await nixl(), await nixl()
    params = (await prefilled(first, *CONTENT))["kv_transfer_params"]
    _, apart = await second.chat(CONTENT, kv_transfer_params=params)
    _, alone = await whole.chat(CONTENT)
    assert apart["choices"][0]["message"] == alone["choices"][0]["message"]


async def test_unfetched_blocks_are_freed_when_their_lease_ends(nixl):
    first = await nixl(kv_connector_extra_config={"kv_lease_duration": 0.05})
    await prefilled(first, text(LONG))
    await until(lambda: held(first) == 0)
    assert (await samples(first))["vllm:nixl_num_kv_expired_reqs_total", "0"] == 1


@pytest.mark.parametrize(("policy", "status"), [("fail", 500), ("recompute", 200)])
async def test_a_failed_transfer_fails_or_is_computed_by_flag(nixl, policy, status):
    first = await nixl(kv_connector_extra_config={"kv_lease_duration": 0.01})
    second = await nixl(kv_load_failure_policy=policy)
    params = (await prefilled(first, text(LONG)))["kv_transfer_params"]
    await until(lambda: held(first) == 0)
    assert (await second.chat([text(LONG)], kv_transfer_params=params))[0] == status


async def test_an_aborted_request_holds_no_blocks(nixl):
    first = await nixl("--sim-prefill-rate", "0.1")
    computing = asyncio.create_task(prefilled(first, text(LONG)))
    await until(lambda: not first.engine.runners[0].scheduler.idle)
    computing.cancel()
    await until(lambda: first.engine.runners[0].scheduler.idle)
    assert (held(first), first.engine.runners[0].scheduler.pool.used) == (0, 0)


async def test_an_encoder_answers_without_tokens_and_lists_its_items(ec, tmp_path):
    encoder = await ec("ec_producer", folder=tmp_path)
    again = [text("look"), image(png(), "u-1"), image(png("blue"), "u-2"), image(png(), "u-1")]
    status, reply = await encoder.chat(again, max_tokens=1)
    assert status == 200
    assert reply["usage"]["completion_tokens"] == 0
    assert reply["choices"][0]["finish_reason"] == "stop"
    named = reply["ec_transfer_params"]
    assert {name: items["item_indices"] for name, items in named.items()} == {"u-1": [0, 2], "u-2": [1]}
    for name in ("u-1", "u-2"):
        data = (tmp_path / name / "encoder_cache.safetensors").read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        assert len(data) == 8 + size + header["ec_cache"]["data_offsets"][1]


async def test_an_image_is_encoded_once_and_only_by_the_encoder(ec, tmp_path):
    encoder, reader = await ec("ec_producer", folder=tmp_path), await ec("ec_consumer", folder=tmp_path)
    for _ in range(2):
        params = (await encoder.chat(CONTENT, max_tokens=1))[1]["ec_transfer_params"]
    status, reply = await reader.chat(CONTENT, ec_transfer_params=params)
    assert status == 200
    visual = reply["usage"]["prompt_tokens_details"]["multimodal_tokens"]["image"]
    assert (await samples(encoder))[VISUAL] == visual
    assert (await samples(reader))[VISUAL] == 0


async def test_a_reader_fetches_from_the_encoder_that_the_parameters_name(ec):
    encoder, reader = await ec("ec_producer"), await ec("ec_consumer")
    params = (await encoder.chat(CONTENT, max_tokens=1))[1]["ec_transfer_params"]
    assert (params["u-1"]["peer_host"], params["u-1"]["peer_port"]) == encoder.engine.handover.config.listens
    await reader.chat(CONTENT, ec_transfer_params=params)
    assert (await samples(reader))[VISUAL] == 0


async def test_a_missing_embedding_is_encoded_by_the_reader(ec):
    reader = await ec("ec_consumer")
    gone = {"u-1": {"item_indices": [0], "metadata": {}, "peer_host": "127.0.0.1", "peer_port": 9}}
    status, reply = await reader.chat(CONTENT, ec_transfer_params=gone)
    assert status == 200
    visual = reply["usage"]["prompt_tokens_details"]["multimodal_tokens"]["image"]
    assert (await samples(reader))[VISUAL] == visual


def test_an_encoder_and_a_processor_cache_drop_the_least_recently_used_image():
    kept = RecentImages(room=10)
    kept.put("a", 4)
    kept.put("b", 4)
    assert kept.use("a")
    kept.put("c", 4)
    assert sorted(kept) == ["a", "c"]
    kept.put("large", 11)
    assert kept.use("large") is None


@pytest.mark.parametrize("flag", ["--kv-transfer-config", "--ec-transfer-config"])
def test_a_connector_that_is_not_simulated_is_refused_at_the_start(flag):
    with pytest.raises(SystemExit) as ended:
        parse(["serve", "folder", flag, json.dumps({"kv_connector": "X", "ec_connector": "X", "ec_role": "ec_both"})])
    assert ended.value.code == 2
