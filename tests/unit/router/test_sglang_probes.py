"""The router's own questions to a prefill and a decode engine of SGLang, and which partner receives each with it."""

import orjson
import pytest
from unit.router.preparing import preparing, settings
from unit.router.rig import Rig as FleetRig
from unit.router.rig import http_answer as answer
from unit.router.scripted_engines import DIES, HANGS, IDS, MEETS, ROOM, SOON, Rig
from waiting import until

from mmrouter_lib.block_keys import Span
from mmrouter_router.fleet.workers import Target
from mmrouter_router.request.renderer_client import new_nonce
from mmrouter_router.verify.probe_requests import ProbeRequest, ProbeRequestError, ProbeRequests


@pytest.fixture
async def rig(make_rig):
    return make_rig()


async def prove(rig: Rig, name: str, rank: int = 0, seconds: float = 60) -> bytes:
    """Ask a question of the router's own."""
    own = ProbeRequests(settings(engine="sglang"), None, rig.upstream, rig.placer.partner, seconds)
    question = ProbeRequest(b'{"model": "m"}', IDS, Span(0, 1, b""))
    return await own.send(Target(rig.fleet.workers[name], rank, 16), question)


async def test_prefill_engine_is_probed_with_a_decoder_of_its_layout(rig):
    other = await rig.engine("d0", compatibility="b")
    prefill, decode = await rig.engine("p1", compatibility="a", ranks=2), await rig.engine("d1", compatibility="a")
    await prove(rig, "p1", rank=1)
    ((_, one, body), (_, two, same)) = (*prefill.asked, *decode.asked)
    assert (body, other.asked) == (same, [])
    assert one[ROOM] == two[ROOM]
    assert (int(one[ROOM]) % 2, one["x-data-parallel-rank"]) == (1, "1")


@pytest.mark.parametrize(("hidden", "unkept"), [((), 0), (("windows",), 0), (("states",), 256)])
async def test_a_block_behind_the_image_of_a_probe_is_before_what_an_engine_with_states_may_not_keep(hidden, unkept):
    async with preparing(settings(engine="sglang")) as preparer:
        preparer.hidden = hidden
        own = ProbeRequests(settings(engine="sglang"), preparer, None, None)
        for image in own.canary_images():
            made = await own.build(new_nonce(), image, 64)
            assert (own.unkept, len(made.ids) - own.unkept >= made.span.end + 64) == (unkept, True)


async def test_the_system_message_of_a_probe_fills_a_block_before_images_that_stand_before_their_text():
    async with preparing(settings(engine="sglang")) as preparer:
        own = ProbeRequests(settings(engine="sglang"), preparer, None, None)
        made = await own.build(new_nonce(), own.canary_images()[-1], 64)
        system = orjson.loads(made.body)["messages"][0]
        assert system["role"] == "system"
        assert len(preparer.prompter.codec.encode(system["content"], add_special_tokens=False)) >= 64


async def test_no_canary_is_possible_at_an_engine_of_a_release_that_makes_other_prompts():
    worker = FleetRig().worker("a", engine="sglang", engine_version="0.5.20")
    async with preparing(settings(engine="sglang")) as preparer:
        own = ProbeRequests(settings(engine="sglang"), preparer, None, None)
        assert own.possible_at(worker)
        preparer.first_release = (0, 5, 21)
        assert not own.possible_at(worker)


@pytest.mark.parametrize(("prefill", "decode"), [(answer(500), HANGS), (HANGS, answer(500)), (DIES, HANGS)])
async def test_failed_probe_aborts_the_other_half(rig, prefill, decode):
    engines = [await rig.engine("p1", prefill), await rig.engine("d1", decode)]
    with pytest.raises(ProbeRequestError):
        await prove(rig, "p1")
    for engine in engines:
        if engine.says == HANGS and engine.asked:
            await engine.aborted()


async def test_probe_needs_a_partner(rig):
    prefill = await rig.engine("p1")
    with pytest.raises(ProbeRequestError, match="decode"):
        await prove(rig, "p1")
    assert prefill.asked == []


async def test_decode_engine_is_probed_by_its_half(rig):
    prefill, decode = await rig.engine("p1", ranks=2), await rig.engine("d1", answer(200, b'{"usage": {}}'), ranks=2)
    await rig.engine("p2", compatibility="other")
    answered = await prove(rig, "d1", rank=1)
    ((_, one, body), (_, two, same)) = (*prefill.asked, *decode.asked)
    assert (answered, body, rig.engines["p2"].asked) == (b'{"usage": {}}', same, [])
    assert (one[ROOM], two["x-override-routed-dp-rank"]) == (two[ROOM], "1")
    assert one["x-override-routed-dp-rank"] == two["x-override-disagg-prefill-dp-rank"] == str(int(one[ROOM]) % 2)


async def test_probe_of_a_hung_engine_times_out(rig):
    engines = [await rig.engine("p1", MEETS), await rig.engine("d1", HANGS)]
    with pytest.raises(ProbeRequestError, match=r"p1 and d1 gave no answer within 0\.4 s"):
        await prove(rig, "d1", seconds=SOON)
    await until(lambda: all(engine.left for engine in engines))


async def test_verified_partner_is_preferred_for_probes(rig):
    for name in ("p1", "p2", "p3"):
        await rig.engine(name, proved=name == "p3")
    await rig.engine("d1")
    await rig.engine("d2")
    decode, prefill = rig.fleet.workers["d1"], rig.fleet.workers["p1"]
    assert {rig.placer.partner(decode).worker.member.name for _ in range(64)} == {"p3"}
    assert {rig.placer.partner(prefill).worker.member.name for _ in range(64)} == {"d1", "d2"}
