"""Hand-overs: eligible ways, their costs, and the fallback to bytes on every failure."""

import asyncio
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.router.preparing import settings
from unit.router.rig import cancelled, counts, loopback, resource
from waiting import until

from mmrouter_lib import feed
from mmrouter_lib.engines.vllm.plugin_api import Status
from mmrouter_router.core.linear_cost import Line
from mmrouter_router.fleet.workers import Fleet, Member
from mmrouter_router.handover.files import IN_THREAD, SharedFolder
from mmrouter_router.handover.image_handover import Handover
from mmrouter_router.handover.request_delivery import AddressedRequest, BufferedAnswer
from mmrouter_router.handover.ways import (
    FAILURES,
    LAST_SECONDS,
    Endpoint,
    Fallback,
    ImageTransfer,
    WayBackoff,
    WayCosts,
    WayEligibility,
    plan_handover,
    why_no_file,
    why_not_processed,
)
from mmrouter_router.http.engine_connection import UpstreamError
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.media.content import Media
from mmrouter_router.request.prepared import CHAT, Outgoing, OutgoingImage
from mmrouter_router.scheduling.offload_comparison import ENOUGH, PERIOD
from mmrouter_router.telemetry.metrics import Metrics

LARGE = 8 * IN_THREAD
TOKENS = 100
OPEN = Status(1, "engine", enabled=True, settings="s", ways={"shm": "", "nixl": "", "inline": ""})
GONE = b'{"error":{"message":"[Errno 2] No such file or directory: \'<path>\'"}}'


def test_file_is_used_from_the_break_even_size():
    costs = WayCosts({"file": Line(1e-3, 1e-9), "bytes": Line(0.0, 1e-9)})
    taken = [not costs.why_no_file(size) for size in (1_000, 100_000, 10_000_000)]
    assert taken == [False, False, True]
    for size in (100_000, 200_000, 400_000, 800_000) * 3:
        costs.observe("bytes", size, size * 5e-8)
    assert not costs.why_no_file(100_000)
    assert costs.why_no_file(1_000) == "bytes_cheaper"


@given(st.lists(st.floats(0, 60), min_size=8, max_size=8))
def test_estimates_tolerate_a_quarter_of_outliers(wild):
    costs = WayCosts()
    for number in range(24):
        size = 100_000 * (1 + number % 4)
        costs.observe("file", size, 1e-4 + size * 1e-9)
        costs.observe("bytes", size, size * 2e-9)
    for seconds in wild:
        costs.observe("file", 100_000, seconds)
    assert not costs.why_no_file(10_000_000)
    assert costs.why_no_file(1_000)


def test_few_tokens_are_processed_by_the_engine_and_all_by_a_renderer_where_costs_do_not_count():
    assert WayCosts().why_unprocessed(4) == "small"
    always = WayCosts(always=True)
    assert (always.why_no_file(1), always.why_unprocessed(1)) == ("", "")


@pytest.mark.parametrize(
    ("router", "engine", "why"),
    [
        (Endpoint("n", True), Endpoint("n", True), ""),
        (Endpoint("n", False), Endpoint("n", True), "no_folder"),
        (Endpoint("n", True), Endpoint("n", False), "no_folder"),
        (Endpoint("n", True), Endpoint("m", True), "other_node"),
        (Endpoint("", True), Endpoint("", True), "other_node"),
        (Endpoint("n", True), Endpoint("n", True, above=True), "full"),
        (Endpoint("n", True), Endpoint("m", True, above=True), "other_node"),
    ],
)
def test_file_requires_the_same_node_and_folder(router, engine, why):
    assert why_no_file(router, engine) == why


READY = Endpoint("n", plugin=OPEN)


def engine(**status) -> Endpoint:
    return Endpoint("n", plugin=Status(1, "engine", True, **status))


@pytest.mark.parametrize(
    ("mode", "renderer", "engine", "whys"),
    [
        ("nixl", READY, READY, ["", "", ""]),
        ("nixl", READY, Endpoint("m", plugin=OPEN), ["", "other_node", ""]),
        ("shm", READY, READY, ["", ""]),
        ("nixl", READY, Endpoint("n", plugin=OPEN, above=True), ["", "full", ""]),
        ("shm", None, READY, ["no_renderer"] * 2),
        ("shm", READY, Endpoint("n"), ["no_plugin"] * 2),
        ("shm", Endpoint("n", plugin=Status(1, "renderer", enabled=False)), READY, ["disabled"] * 2),
        ("shm", READY, engine(settings="t"), ["settings"] * 2),
        ("shm", READY, engine(settings="s", ways={"shm": ""}), ["", "absent"]),
    ],
)
def test_processed_way_requires_both_plugins(mode, renderer, engine, whys):
    assert list(why_not_processed(mode, renderer, engine).values()) == whys


@given(
    st.lists(st.integers(0, 20_000_000), min_size=1, max_size=6),
    st.sampled_from(["", "no_folder", "other_node", "resting"]),
    st.dictionaries(st.sampled_from(["nixl", "shm", "inline"]), st.sampled_from(["", "absent", "other_node"])),
)
def test_every_image_has_a_way_and_every_skipped_way_a_reason(sizes, file, processed):
    loads = [ImageTransfer(str(number), size, 100) for number, size in enumerate(sizes)]
    found = plan_handover(loads, WayEligibility(file, processed), WayCosts(wall_clock=lambda: PERIOD))
    for load in loads:
        passed = {fall.how for fall in found.fallbacks[load.uuid]}
        assert all(fall.reason for fall in found.fallbacks[load.uuid])
        refused = {way for way, why in processed.items() if why}
        assert passed == (refused if load.uuid in found.files else {*refused, "file"})
    assert list(found.processed) == [way for way, why in processed.items() if not why]


def test_failing_way_backs_off_until_a_success():
    now = 0.0
    resting = WayBackoff(lambda: now)
    for _ in range(FAILURES - 1):
        resting.failed("e", "file")
    assert not resting.skips("e", "file")
    rests = []
    for _ in range(9):
        resting.failed("e", "file")
        assert resting.skips("e", "file")
        assert not resting.skips("e", "shm")
        assert not resting.skips("f", "file")
        began = now
        while resting.skips("e", "file"):
            now += 1.0
        rests.append(now - began)
    assert rests[:4] == [1, 2, 4, 8]
    assert rests[-1] == LAST_SECONDS
    resting.succeeded("e", "file")
    resting.failed("e", "file")
    assert not resting.skips("e", "file")
    for _ in range(FAILURES):
        resting.failed("gone", "file")
    resting.retain({"e"})
    assert not resting.skips("gone", "file")


SHARED = {"accelerator": {"kind": "cpu"}, "sharedMemory": {"scope": "node"}}
WORKERS, RENDERERS = ({"name": role, "role": role, **SHARED} for role in ("worker", "renderer"))


class Rig:
    """A router with its folder, one engine on its node, and an engine with scripted answers."""

    def __init__(self, root: Path, *, limit: int = 64 << 20, clock=lambda: 0.0, renderers=(), **clocks) -> None:
        self.root = root
        self.metrics = Metrics()
        fleet = self.fleet = Fleet(self.metrics)
        self.worker = fleet.join(Member("u", "w-0", "127.0.0.1", "worker", "worker", "n"))
        self.folder = SharedFolder(root, "router", limit, limit)
        self.folder.measured = dict  # the folder's real speed is low on a busy machine
        own = resource(routing={"transfer": "shm"}, pools=[WORKERS, *([RENDERERS] if renderers else [])])
        here = replace(settings(), deployment=own, node="n")
        self.handover = Handover(here, fleet, Upstream(), self.metrics, lambda: renderers, self.folder, clock, **clocks)
        self.answers: list[tuple[int, bytes] | Exception] = []
        self.got: list[list[bytes | None]] = []  # per request the images as the engine has them
        self.told: list[dict] = []

    async def post(self, body: bytes) -> BufferedAnswer:
        self.got.append([self.seen(part) for part in json.loads(body)["messages"][0]["content"]])
        answer = self.answers.pop(0) if self.answers else (200, b"ok")
        if isinstance(answer, Exception):
            raise answer
        return BufferedAnswer(*answer)

    def seen(self, part: dict) -> bytes | str:
        url = part["image_url"]["url"]
        if not url.startswith("file:"):
            return "bytes"
        path = Path(urlsplit(url).path)
        assert path.is_relative_to(self.root)
        assert path.stat().st_mode & 0o007 == 0
        return path.read_bytes()

    def parcel(self, *sizes: int) -> AddressedRequest:
        media = [Media(bytes([n]) * size, "image/png", "data") for n, size in enumerate(sizes)]
        images = tuple(OutgoingImage(0, n, f"m1-{n}", each, tokens=TOKENS) for n, each in enumerate(media))
        parts = [{"type": "image_url", "image_url": {"url": ""}, "uuid": image.uuid} for image in images]
        outgoing = Outgoing(CHAT, {"messages": [{"role": "user", "content": parts}]}, images)
        return AddressedRequest(self.worker, outgoing, outgoing.fields)

    async def send(self, *sizes: int) -> BufferedAnswer:
        return await self.handover.send(self.parcel(*sizes), self.post, self.told)

    def counted(self) -> dict[tuple[str, str], float]:
        return counts(self.metrics.handovers, "how", "reason")

    def left(self) -> list[str]:
        return [name for _, _, names in os.walk(self.root) for name in names if name != "owner"]


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path)


async def test_large_image_is_a_file_until_the_answer(tmp_path):
    rig = Rig(tmp_path, clock=time.monotonic)
    answer = await rig.send(LARGE, 10)
    assert (answer.status, rig.got) == (200, [[b"\0" * LARGE, "bytes"]])
    assert rig.left() == []
    assert rig.counted() == {("file", ""): 1, ("bytes", ""): 1, ("file", "bytes_cheaper"): 1}
    first, second = rig.told
    assert (first["how"], first["bytes"], first["engine"], first["instead_of"]) == ("file", LARGE, "w-0", [])
    assert first["seconds"] > 0
    assert second["instead_of"] == [{"how": "file", "reason": "bytes_cheaper"}]


async def test_refused_file_falls_back_to_bytes_and_the_way_backs_off(rig):
    for number in range(1, FAILURES + 1):
        rig.answers = [(500, GONE), (200, b"ok")]
        answer = await rig.send(LARGE)
        assert (answer.status, rig.got[-2:]) == (200, [[b"\0" * LARGE], ["bytes"]])
        assert rig.counted() == {("file", "refused"): number, ("bytes", ""): number}
        assert rig.left() == []
    await rig.send(LARGE)
    assert (len(rig.got), rig.got[-1], rig.counted()["file", "resting"]) == (2 * FAILURES + 1, ["bytes"], 1)


@pytest.mark.parametrize(
    ("status", "body"), [(400, b"context length"), (503, GONE), (500, b"cannot schedule new futures"), (404, GONE)]
)
async def test_unrelated_error_is_returned_without_retry(rig, status, body):
    rig.answers = [(status, body)]
    answer = await rig.send(LARGE)
    assert (answer.status, len(rig.got), rig.left()) == (status, 1, [])


async def test_failure_with_bytes_does_not_count_against_files(rig):
    for _ in range(FAILURES):
        rig.answers = [(500, GONE), (400, b"cannot identify image file")]
        assert (await rig.send(LARGE)).status == 400
    assert not rig.handover.backoff.skips(rig.worker.id, "file")


async def test_full_folder_falls_back_to_bytes(tmp_path):
    rig = Rig(tmp_path, limit=2 * LARGE)
    held = await rig.folder.put("other", Media(bytes(LARGE), "image/png", "data"))
    assert (await rig.send(LARGE)).status == 200
    assert rig.got == [["bytes"]]
    assert rig.counted() == {("file", "full"): 1, ("bytes", ""): 1}
    held.release()
    await rig.send(LARGE)
    assert rig.got[-1] == [b"\0" * LARGE]


async def test_node_above_its_watermark_gets_bytes(rig):
    for above, seen in ((True, "bytes"), (False, b"\0" * LARGE)):
        shared = feed.SharedDirectory(0, 1, 1, 1, above)
        rig.worker.heartbeat = feed.Heartbeat("u/1", 1, 0, "vllm", "up", "", 16, "m", "main", {}, shared=shared)
        await rig.send(LARGE)
        assert rig.got[-1] == [seen]
    assert rig.counted() == {("file", "full"): 1, ("bytes", ""): 1, ("file", ""): 1}


async def test_retry_at_another_engine_is_planned_again(rig):
    rig.answers = [UpstreamError("gone", sent=True)]
    parcel = rig.parcel(LARGE)
    with pytest.raises(UpstreamError):
        await rig.handover.send(parcel, rig.post, rig.told)
    elsewhere = rig.fleet.join(Member("v", "w-1", "127.0.0.2", "worker", "worker", "m"))
    await rig.handover.send(AddressedRequest(elsewhere, parcel.outgoing, parcel.fields), rig.post, rig.told)
    assert rig.got == [[b"\0" * LARGE], ["bytes"]]
    assert [(one["engine"], one["how"]) for one in rig.told] == [("w-0", "file"), ("w-1", "bytes")]


async def test_cancelled_request_and_lost_engine_leave_no_file(rig):
    rig.answers = [UpstreamError("gone", sent=True)]
    with pytest.raises(UpstreamError):
        await rig.send(LARGE)
    assert rig.left() == []
    asked = asyncio.Event()

    async def hangs(body: bytes) -> BufferedAnswer:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    task = asyncio.create_task(rig.handover.send(rig.parcel(LARGE), hangs, rig.told))
    await asked.wait()
    assert len(rig.left()) == 1
    await cancelled(task)
    assert rig.left() == []
    assert ("file", "") not in rig.counted()


async def test_requests_that_end_without_an_answer_leave_the_comparison_of_both_ways(tmp_path):
    """Nothing listens at the renderer's address, so that it costs time and no request."""
    now = 0.0
    renderer = Member("r", "r-0", loopback(), "renderer", "renderer", "n")
    rig = Rig(tmp_path, clock=lambda: 100 * now, wall_clock=lambda: now, renderers=[renderer])
    rig.handover.plugins.status = lambda _: OPEN

    async def post(body: bytes) -> BufferedAnswer:
        nonlocal now
        now += 1
        return await rig.post(body)

    async def hangs(body: bytes) -> BufferedAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    async def costs() -> list[float]:
        while now % PERIOD < PERIOD - 2:
            await rig.handover.send(rig.parcel(10), post, rig.told)
        labels = [{"pool": "worker", "by": by} for by in ("engine", "renderer")]
        return [rig.metrics.registry.get_sample_value("mmrouter_handover_cost_seconds", each) for each in labels]

    task = asyncio.create_task(rig.handover.send(rig.parcel(10), hangs, rig.told))
    await asyncio.sleep(0)
    await cancelled(task)
    rig.answers = [UpstreamError("gone", sent=True), (400, b"no")]
    with pytest.raises(UpstreamError):
        await rig.handover.send(rig.parcel(10), post, rig.told)
    await rig.handover.send(rig.parcel(10), post, rig.told)
    engine = (ENOUGH + 2) / ENOUGH / TOKENS  # two requests failed after a second each
    assert await costs() == [pytest.approx(engine), 0]
    now = PERIOD
    assert await costs() == [pytest.approx(engine), pytest.approx(1 / TOKENS)]


async def test_cancellation_during_the_write_leaves_no_file(rig):
    task = asyncio.create_task(rig.send(LARGE * 4))
    await asyncio.sleep(0)  # the thread has it now
    await cancelled(task)
    await until(lambda: not rig.left())
    assert rig.got == []


async def test_requests_share_the_file_of_one_image(rig):
    seen: list[str] = []

    async def looks(body: bytes) -> BufferedAnswer:
        seen.append(json.loads(body)["messages"][0]["content"][0]["image_url"]["url"])
        if len(seen) == 1:
            await rig.handover.send(rig.parcel(LARGE), looks, rig.told)
            assert len(rig.left()) == 1  # the first one's answer has not begun
        return BufferedAnswer(200, b"ok")

    await rig.handover.send(rig.parcel(LARGE), looks, rig.told)
    assert seen[0] == seen[1]
    assert rig.left() == []


def test_plan_lists_skipped_ways_in_order():
    eligible = WayEligibility("", {"nixl": "absent", "shm": "", "inline": ""})
    found = plan_handover([ImageTransfer("a", 10, 1)], eligible, WayCosts())
    passed = [("nixl", "absent"), ("shm", "small"), ("inline", "small"), ("file", "bytes_cheaper")]
    assert found.fallbacks["a"] == tuple(Fallback(*each) for each in passed)
