"""Frontends that share encoders: each image is encoded once for all, and a lost frontend delays others by its lease."""

import asyncio
from collections import Counter
from itertools import count

import pytest
from unit.router.rig import cancelled, running
from unit.router.test_encoders import Pool, shown
from waiting import until

from mmrouter_lib import feed
from mmrouter_router.encoding import encoding_claims
from mmrouter_router.encoding.encoder_queue import Encoder
from mmrouter_router.encoding.encoding_claims import EncodingClaims
from mmrouter_router.encoding.image_sender import EncodeError, ImageSender
from mmrouter_router.encoding.scheduler import EncoderScheduler
from mmrouter_router.fleet.feed_client import FeedRequestError
from mmrouter_sidecar.feed import embedding_directory as kept

ENCODERS = ("a", "b")
NAMES = [f"i{number}" for number in range(24)]


class Sidecar:
    """One encoder's sidecar, behind the frames of the feed."""

    def __init__(self, clock):
        self.directory, self.clock, self.down = kept.EmbeddingDirectory(1 << 20), clock, False
        self.numbers, self.claimed = count(2, 2), Counter()  # frontend -> claims
        self.under_way, self.most = 0, 0  # requests at once
        self.late = []  # events that the next answers wait for

    async def request(self, build, timeout):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        if self.down:
            raise FeedRequestError("no answer")
        request = feed.decode_request(feed.encode(build(next(self.numbers))))
        claims = isinstance(request, feed.EmbeddingClaim)
        self.claimed[request.router] += claims
        reply = self.directory.claim(request, self.clock()) if claims else self.directory.report(request)
        if self.late:
            await self.late.pop(0).wait()
        return [feed.decode_reply(feed.encode(reply))]


@pytest.fixture
async def pool():
    return Pool()


@pytest.fixture
async def sidecars():
    clock = asyncio.get_running_loop().time
    return {name: Sidecar(clock) for name in ENCODERS}


def frontend(name, pool, sidecars):
    claims = EncodingClaims(name, lambda: list(sidecars), sidecars.get, lambda: True)
    made = ImageSender(EncoderScheduler("perImage"), pool.post, claims=claims)
    made.update([Encoder(encoder, "cpu") for encoder in ENCODERS])
    return made


@pytest.mark.parametrize("number", [2, 4])
async def test_an_image_is_encoded_once_by_all_frontends_together(pool, sidecars, number):
    frontends = [frontend(f"r{n}", pool, sidecars) for n in range(number)]
    # Each begins elsewhere, so that turns by weight alone would take different encoders.
    shown_by = [NAMES[5 * n :] + NAMES[: 5 * n] for n in range(number)]
    done = await asyncio.gather(
        *(f.encode(f"{n}-{at}", [shown(x) for x in names[at : at + 4]])
          for n, (f, names) in enumerate(zip(frontends, shown_by, strict=True)) for at in range(0, 24, 4))
    )  # fmt: skip
    assert sorted(name for _, name in pool.sent) == sorted(NAMES)
    assert sum(placed.how == "queued" for each in done for placed in each.placed) == 24
    where = {name: encoder for encoder, name in pool.sent}
    assert all(each.params[name]["peer_host"] == where[name] for each in done for name in each.params)


async def test_an_image_that_a_frontend_gives_up_is_encoded_by_the_other(pool, sidecars):
    one, two = (frontend(name, pool, sidecars) for name in ("one", "two"))
    pool.hold("x")
    first = asyncio.create_task(one.encode("r", [shown("x")]))
    await until(lambda: pool.sent)
    second = asyncio.create_task(two.encode("r", [shown("x"), shown("y")]))
    await until(lambda: len(pool.sent) == 2)
    assert [name for _, name in pool.sent] == ["x", "y"]
    await cancelled(first)
    pool.gates["x"].set()
    done = await second
    assert [placed.how for placed in done.placed] == ["queued", "queued"]
    assert [name for _, name in pool.sent] == ["x", "y", "x"]


async def test_requests_for_one_image_send_their_claims_one_after_the_other(pool, sidecars):
    one, two = (frontend(name, pool, sidecars) for name in ("one", "two"))
    pool.hold("x")
    encoding = [asyncio.create_task(one.encode("r", [shown("x")]))]
    await until(lambda: pool.sent)
    encoding += [asyncio.create_task(two.encode(f"r{n}", [shown("x")])) for n in range(8)]
    claims = lambda: sum(sidecar.claimed["two"] for sidecar in sidecars.values())  # noqa: E731
    await until(lambda: claims() >= 8)
    for sidecar in sidecars.values():
        sidecar.most = 0
    enough = claims() + 12
    await until(lambda: claims() > enough)
    assert max(sidecar.most for sidecar in sidecars.values()) == 1
    pool.gates["x"].set()
    done = await asyncio.gather(*encoding)
    assert [name for _, name in pool.sent] == ["x"]
    assert [placed.how for each in done for placed in each.placed] == ["queued"] + 8 * ["held"]


async def test_a_claim_whose_answer_comes_after_the_encoding_is_not_renewed(pool, sidecars, monkeypatch):
    monkeypatch.setattr(encoding_claims, "RENEW_SECONDS", 0.001)
    sidecars = {"a": sidecars["a"]}
    one, late = frontend("one", pool, sidecars), asyncio.Event()
    sidecars["a"].late = [asyncio.Event(), late]
    sidecars["a"].late[0].set()
    async with running(one.run()):
        first, second = (asyncio.create_task(one.encode(name, [shown("x")])) for name in ("r1", "r2"))
        await first
        late.set()
        await second
        directory, now = sidecars["a"].directory, sidecars["a"].clock
        directory.claim(feed.EmbeddingClaim(2, "other", b"x", (), 0.0), now())  # cannot use the embedding
        pool.hold("y")
        third, claimed = asyncio.create_task(one.encode("r3", [shown("y")])), sidecars["a"].claimed["one"]
        await until(lambda: sidecars["a"].claimed["one"] > claimed + 3)
        assert directory.claim(feed.EmbeddingClaim(2, "two", b"x", (), 3.0), now()).state == "granted"
        pool.gates["y"].set()
        await third


async def test_the_claim_of_a_frontend_that_ended_runs_out(pool, sidecars, monkeypatch):
    monkeypatch.setattr(encoding_claims, "RENEW_SECONDS", 0.02)
    now = 0.0
    for sidecar in sidecars.values():
        sidecar.clock = lambda: now
    claims = lambda name: sum(sidecar.claimed[name] for sidecar in sidecars.values())  # noqa: E731
    one, two = (frontend(name, pool, sidecars) for name in ("one", "two"))
    pool.hold("x")
    async with running(one.run()):
        asyncio.create_task(one.encode("r", [shown("x")]))  # noqa: RUF006 - it stays behind, as in a process that ended
        await until(lambda: pool.sent)
        second = asyncio.create_task(two.encode("r", [shown("x")]))
        for _ in range(3):
            now += 0.9 * encoding_claims.LEASE_SECONDS
            before = claims("one"), claims("two")
            await until(lambda before=before: claims("one") > before[0] + 1 and claims("two") > before[1] + 1)
        assert len(pool.sent) == 1, "the claim is renewed while its frontend lives"
    now += 1.1 * encoding_claims.LEASE_SECONDS
    del pool.gates["x"]
    async with asyncio.timeout(30):
        assert (await second).placed[0].how == "queued"


async def test_a_failed_image_frees_its_claim_and_the_error_is_that_of_the_encoders(pool, sidecars):
    one, two = (frontend(name, pool, sidecars) for name in ("one", "two"))
    pool.answers = dict.fromkeys(ENCODERS, 400)
    with pytest.raises(EncodeError, match="image_refused"):
        await one.encode("r", [shown("x"), shown("y")])
    pool.answers.clear()
    assert (await two.encode("r", [shown("x")])).placed[0].how == "queued"


async def test_without_an_answer_of_the_sidecars_a_frontend_encodes_alone(pool, sidecars):
    for sidecar in sidecars.values():
        sidecar.down = True
    for name in ("one", "two"):
        await frontend(name, pool, sidecars).encode("r", [shown("x")])
    assert [name for _, name in pool.sent] == ["x", "x"]


async def test_an_embedding_of_an_encoder_that_left_is_encoded_again(pool, sidecars):
    await frontend("one", pool, sidecars).encode("r", [shown("x")])
    ((gone, _),) = pool.sent
    (left,) = set(ENCODERS) - {gone}
    two = frontend("two", pool, sidecars)
    two.update([Encoder(left, "cpu")])
    assert (await two.encode("r", [shown("x")])).placed[0].encoder == left


def test_what_a_sidecar_remembers_is_bounded():
    directory = kept.EmbeddingDirectory(100)
    for number in range(5):
        key = bytes([number])
        assert directory.claim(feed.EmbeddingClaim(2, "r", key, ("a",), 3.0), 0.0).state == "granted"
        directory.report(feed.EmbeddingReport(2, "r", key, "a", 40, b"{}"))
    states = [directory.claim(feed.EmbeddingClaim(2, "s", bytes([n]), ("a",), 3.0), 0.0).state for n in range(5)]
    assert states == ["granted"] * 3 + ["held"] * 2
    assert isinstance(directory.report(feed.EmbeddingReport(2, "r", b"k", "a", 1, bytes(1 << 20))), feed.Refused)
