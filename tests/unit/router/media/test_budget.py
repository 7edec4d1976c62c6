"""Fetched media and the budget of held bytes."""

import asyncio
import io

import pytest
from PIL import Image
from unit.router.media.conftest import Origin
from unit.router.rig import WORKERS, Engine, resource
from unit.router.router_rig import client_of, heard, member, router
from waiting import until

from mmrouter_router.fleet.membership import Membership
from mmrouter_router.request.prepared import CHAT


class Silent(Engine):
    """An engine that reads requests and answers when it is allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.allowed = asyncio.Event(), asyncio.Event()

    async def respond(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: dict[str, str]
    ) -> bool:
        self.read.set()
        await self.allowed.wait()
        return await super().respond(reader, writer, headers)


@pytest.mark.parametrize("times", [1, 3])
async def test_fetched_media_count_as_held_until_their_request_is_answered(origin: Origin, times: int) -> None:
    picture = io.BytesIO()
    Image.effect_noise((300, 300), 100).save(picture, "PNG")
    data = picture.getvalue()
    part = {"type": "image_url", "image_url": {"url": origin.serve("/noise.png", data)}}
    body = {"model": "t", "messages": [{"role": "user", "content": [part] * times}]}
    media = {"fetch": "public", "allowedCIDRs": ["127.0.0.0/8"]}
    engine = Silent()
    await engine.serve()
    async with router(own=resource(pools=[WORKERS], routing={"media": media})) as made, client_of(made) as client:
        made.apply_membership(Membership((member(ip=engine.ip),)))
        heard(made, "uid-w0")
        asking = asyncio.create_task(client.post(CHAT, json=body))
        await engine.read.wait()
        held = made.chat.body_budget.used
        engine.allowed.set()
        assert (await asking).status_code == 200
        await until(lambda: made.chat.body_budget.used == 0)
    engine.close()
    assert held > times * 4 * len(data) // 3
