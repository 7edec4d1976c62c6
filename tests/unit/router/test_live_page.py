"""The live page: its files and their policy, the token that guards its data, and the size of every part."""

import asyncio
import json
import re
from array import array

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.router.frontend import PORT, Frontend
from unit.router.rig import BLOCK, IDS, KEYS, counts
from waiting import until

from mmrouter_lib.block_keys import block_keys
from mmrouter_router.api.live_page import FOLDER, PATH
from mmrouter_router.api.live_view import (
    COMPARED_KEYS,
    DECISION_ROWS,
    MAP_CONVERSATIONS,
    MAP_WORKERS,
    MAX_PAGES,
    MAX_STATUS,
    SCORES,
    WORKER_ROWS,
    Cursor,
)
from mmrouter_router.explain.round_robin import RoundRobinCaches

FILES = sorted(file.name for file in FOLDER.iterdir())


@pytest.fixture
async def frontend():
    made = await Frontend(token="right").start()
    yield made
    await made.stop()


@pytest.fixture
async def client(frontend):
    async with httpx.AsyncClient(base_url=f"http://{frontend.ip}:{PORT}", trust_env=False, timeout=30) as made:
        yield made


def parts(frontend: Frontend, cursor: Cursor) -> dict:
    """One tick's parts by name, without those that the page has."""
    found = {}
    for raw in frontend.live.parts(cursor):
        found |= json.loads(raw.removeprefix(b"data: ")) if raw else {}
    return found


def text(name: str) -> str:
    return (FOLDER / name).read_text()


async def test_the_page_needs_no_token_and_holds_nothing_of_the_deployment(frontend, client):
    frontend.worker("secret-worker")
    for name in ("", *FILES):
        answer = await client.get(PATH + name)
        if name == "index.html":
            assert answer.status_code == 404  # one address per document
            continue
        assert answer.status_code == 200
        assert answer.content == (FOLDER / (name or "index.html")).read_bytes()
        assert "secret" not in answer.text
    assert counts(frontend.refusals, "reason") == {}
    assert (await client.get("/ui")).headers["location"] == PATH


@pytest.mark.parametrize("name", ["..%2fchat.py", "../chat.py", "live_page.py", "%2e%2e/live_view.py"])
async def test_no_other_file_is_served(client, name):
    assert (await client.get(PATH + name)).status_code in (401, 404)


async def test_the_policy_allows_only_the_page_s_own_scripts_and_connections(client):
    for name in ("", "page.js", "page.css", "absent.js"):
        answer = await client.get(PATH + name)
        policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
        assert policy.pop("default-src") == "'none'"
        assert {policy.pop(name) for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
        assert policy == {
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "require-trusted-types-for": "'script'",
            "trusted-types": "'none'",
        }
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert "content-security-policy" not in (await client.get("/control/state")).headers


@pytest.mark.parametrize("name", FILES)
def test_files_name_no_other_server_and_parse_no_text_as_html(name):
    assert not re.search(
        r"(?:https?:)?//[a-z](?!ww\.w3\.org/2000/svg)", re.sub(r"^\s*//.*$", "", text(name), flags=re.MULTILINE)
    )
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|\sstyle=", text(name)
    )
    assert not re.search(r"<script(?! type=\"module\" src=)|\son[a-z]+=", text(name))


def test_every_file_is_used_and_every_used_file_is_there():
    used = set(re.findall(r"from \"\./([\w.]+)\"", "".join(text(name) for name in FILES if name.endswith(".js"))))
    used |= set(re.findall(r"(?:src|href)=\"(\w+\.\w+)\"", text("index.html")))
    assert used | {"index.html"} == set(FILES)


async def test_the_stream_requires_the_token_in_a_header_and_not_in_the_address(frontend, client):
    assert (await client.get("/control/live")).status_code == 401
    assert (await client.get("/control/live?token=right")).status_code == 401
    assert (await client.get("/control/live", headers={"authorization": "Bearer wrong"})).status_code == 401
    assert counts(frontend.refusals, "reason") == {"missing": 2, "wrong": 1}
    assert frontend.live.pages == 0


async def test_the_stream_sends_what_is_there_and_then_what_changes(frontend, client):
    frontend.worker("a", KEYS)
    frontend.decide("one")
    async with client.stream("GET", "/control/live", headers={"authorization": "Bearer right"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line.removeprefix("data: ") async for line in answer.aiter_lines() if line)
        first = {}
        while len(first) < 5:
            first |= json.loads(await anext(lines))
        assert first["summary"]["deployment"] == "d"
        assert [row["name"] for row in first["workers"]["rows"]] == ["a"]
        assert [row["request_id"] for row in first["decisions"]["rows"]] == ["one"]
        assert first["map"]["rows"][0]["held"] == [1.0]
        frontend.decide("two")
        while "decisions" not in (part := json.loads(await anext(lines))) or not part["decisions"]["rows"]:
            pass
        assert [row["request_id"] for row in part["decisions"]["rows"]] == ["two"]


CONDITION = {
    "type": "Degraded",
    "status": "True",
    "observedGeneration": 3,
    "lastTransitionTime": "2026-01-02T03:04:05Z",
    "reason": "Unschedulable",
    "message": "no node",
}
STEP = {"action": "hold", "kind": "Deployment", "name": "d-worker", "why": "the frontend comes first"}


async def test_a_page_has_what_the_operator_sent_last_of_the_resource(frontend, client):
    cursor, headers = Cursor(), {"authorization": "Bearer right"}
    assert parts(frontend, cursor)["rollout"] == {"received": None}
    for ready in (0, 1):
        pool = {"name": "worker", "role": "worker", "desired": 2, "ready": ready, "verified": 0, "updated": 1}
        sent = {"phase": "Updating", "pools": [pool], "conditions": [CONDITION], "steps": [STEP], "newer": [1]}
        assert (await client.put("/control/status", json=sent, headers=headers)).status_code == 204
        shown = parts(frontend, cursor)["rollout"]
        assert shown["received"] > 0
        assert (shown["phase"], shown["frontend"], shown["steps"]) == ("Updating", None, [STEP])
        assert [(row["name"], row["ready"]) for row in shown["pools"]] == [("worker", ready)]
        assert shown["conditions"] == [{name: CONDITION[name] for name in CONDITION if name != "observedGeneration"}]


async def test_a_status_without_the_token_or_of_another_shape_or_too_long_changes_nothing(frontend, client):
    headers = {"authorization": "Bearer right"}
    assert (await client.put("/control/status", json={"phase": "Ready"})).status_code == 401
    for wrong in (b"", b"[]", b'{"phase": 1}', b'{"conditions": [{"type": "Ready"}]}'):
        answer = await client.put("/control/status", content=wrong, headers=headers)
        assert (answer.status_code, "not a status" in answer.json()["detail"]) == (400, True)
    answer = await client.put("/control/status", content=b" " * (MAX_STATUS + 1), headers=headers)
    assert answer.status_code == 413
    assert parts(frontend, Cursor())["rollout"] == {"received": None}


async def test_a_router_serves_a_bounded_number_of_pages_and_a_closed_one_makes_room(frontend):
    opened = []
    for _ in range(MAX_PAGES):
        stream = frontend.live.events(frontend.stopping)
        await anext(stream)
        opened.append(stream)
    async with httpx.AsyncClient(base_url=f"http://{frontend.ip}:{PORT}", trust_env=False, timeout=30) as client:
        answer = await client.get("/control/live", headers={"authorization": "Bearer right"})
        assert (answer.status_code, str(MAX_PAGES) in answer.json()["detail"]) == (503, True)
    for stream in opened:
        await stream.aclose()
    assert not frontend.live.full


async def test_a_stream_ends_with_the_router_and_with_its_client(frontend, client):
    async with client.stream("GET", "/control/live", headers={"authorization": "Bearer right"}) as answer:
        await anext(answer.aiter_lines())
        assert frontend.live.pages == 1
    await until(lambda: frontend.live.pages == 0)
    stream = frontend.live.events(frontend.stopping, seconds=600)

    async def whole() -> list[bytes]:
        return [part async for part in stream]

    reading = asyncio.create_task(whole())
    await until(lambda: frontend.live.pages == 1)
    frontend.stopping.set()
    assert await asyncio.wait_for(reading, 30)


def test_unchanged_parts_are_not_sent_again():
    frontend, cursor = Frontend(), Cursor()
    frontend.worker("a")
    assert parts(frontend, cursor).keys() == {"summary", "rollout", "workers", "decisions", "map"}
    assert parts(frontend, cursor).keys() <= {"summary"}


def test_every_worker_comes_in_turn_and_no_tick_has_more_than_the_limit():
    frontend, cursor = Frontend(), Cursor()
    for number in range(1000):
        frontend.worker(f"w{number}")
    seen: list[str] = []
    while len(seen) < 1000:
        part = parts(frontend, cursor)["workers"]
        assert (part["total"], part["first"]) == (1000, len(seen))
        assert 0 < len(part["rows"]) <= WORKER_ROWS
        seen += [row["name"] for row in part["rows"]]
    assert seen == [f"w{number}" for number in range(1000)]
    assert parts(frontend, cursor)["workers"]["first"] == 0


def test_a_tick_has_the_newest_decisions_and_counts_those_left_out():
    frontend, cursor = Frontend(), Cursor()
    frontend.worker("a")
    for number in range(DECISION_ROWS + 5):
        frontend.decide(f"r{number}")
    part = parts(frontend, cursor)["decisions"]
    assert [row["request_id"] for row in part["rows"]] == [f"r{number}" for number in range(DECISION_ROWS + 4, 4, -1)]
    assert part["left_out"] == 5
    frontend.decide("last")
    assert [row["request_id"] for row in parts(frontend, cursor)["decisions"]["rows"]] == ["last"]


def test_scores_of_many_candidates_are_computed_for_few_decisions():
    frontend, cursor = Frontend(), Cursor()
    for number in range(300):
        frontend.worker(f"w{number}")
    for number in range(4):
        frontend.decide(f"r{number}")
    rows = parts(frontend, cursor)["decisions"]["rows"]
    assert [len(row["scores"]) for row in rows] == [SCORES, 0, 0, 0]
    assert [bool(row["why"]) for row in rows] == [True, False, False, False]
    assert {row["candidates"] for row in rows} == {300}


def test_the_map_has_who_holds_what_and_is_bounded():
    frontend = Frontend()
    held = frontend.worker("z-held", KEYS[:3])
    for number in range(40):
        frontend.worker(f"w{number}")
    trace = frontend.decide("r")
    assert trace.decision.target.worker is held
    part = parts(frontend, Cursor())["map"]
    assert len(part["workers"]) == MAP_WORKERS
    assert part["of"] == 41
    (row,) = part["rows"]
    assert dict(zip(part["workers"], row["held"], strict=True))["z-held"] == row["anywhere"] == 0.5  # 3 of 6 blocks
    assert sum(row["held"]) == 0.5
    for number in range(MAP_CONVERSATIONS + 10):
        frontend.decide(f"c{number}", fingerprint=number)
    rows = parts(frontend, Cursor())["map"]["rows"]
    assert len(rows) == MAP_CONVERSATIONS
    assert rows[0]["request_id"] == f"c{MAP_CONVERSATIONS + 9}"


def test_blocks_and_hits_of_a_worker_are_those_of_its_kept_decisions():
    frontend = Frontend()
    frontend.worker("a", KEYS[:3])
    frontend.decide("one")
    frontend.decide("two")
    (row,) = parts(frontend, Cursor())["workers"]["rows"]
    assert (row["decisions"], row["blocks"], row["hits"], row["held"]) == (2, 12, 6, 3)


def test_a_worker_that_is_not_usable_says_why():
    frontend = Frontend()
    frontend.worker("a", canary="")
    (row,) = parts(frontend, Cursor())["workers"]["rows"]
    assert (row["standing"], row["why"]) == ("pending", "its canary has not been answered yet")


def test_round_robin_is_compared_in_ticks_of_bounded_size():
    frontend = Frontend()
    frontend.worker("a")
    long = array("I", range(BLOCK * (COMPARED_KEYS // 2)))
    for number in range(5):
        frontend.decide(f"r{number}", ids=long)
    compared = []
    for _ in range(4):
        frontend.live.compare()
        compared.append(frontend.live.summary(Cursor())["round_robin"]["decisions"])
    assert compared == [2, 4, 5, 5]


def test_of_a_log_that_was_full_before_only_the_newer_half_is_compared():
    frontend, cursor = Frontend(kept=4), Cursor()
    frontend.worker("a")
    for number in range(6):
        frontend.decide(f"r{number}")
    seen = parts(frontend, cursor)["summary"]["round_robin"]
    assert (seen["decisions"], seen["found"]) == (2, 2 * len(KEYS))
    frontend.decide("next")
    parts(frontend, cursor)
    assert frontend.chat.decisions.get("next").round_robin == len(KEYS)


def test_a_conversation_on_one_of_three_engines_finds_more_than_round_robin_would():
    frontend = Frontend()
    workers = [frontend.worker(name) for name in "abc"]
    for turn in range(1, 7):
        trace = frontend.decide(f"r{turn}", ids=IDS[: BLOCK * turn])
        frontend.delta(trace.decision.target.worker, KEYS[:turn])
    assert len({worker.member.name for worker in workers if frontend.fleet.index.held(worker.slots[0])}) == 1
    seen = parts(frontend, Cursor())["summary"]["round_robin"]
    # Kept on one engine, each turn finds the one before; in turn, it finds what its engine got three turns ago.
    assert seen == {"decisions": 6, "blocks": 21, "hits": 15, "found": 1 + 2 + 3}


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 5))
def test_round_robin_finds_what_a_model_with_a_set_per_engine_finds(prompts, engines):
    shadow = RoundRobinCaches()
    held: list[set[int]] = [set() for _ in range(engines)]
    for turn, length in enumerate(prompts):
        keys = block_keys(IDS[: BLOCK * length], BLOCK, (), length % 2)
        mine = held[turn % engines]
        expected = next((at for at, key in enumerate(keys) if key not in mine), len(keys))
        assert shadow.serve(keys, engines) == expected
        mine.update(keys)


def test_round_robin_forgets_the_first_blocks_beyond_its_limit():
    shadow = RoundRobinCaches(max_keys=4)
    assert [shadow.serve(range(4), 1), shadow.serve(range(4), 1)] == [0, 4]
    shadow.serve(range(10, 14), 1)
    assert shadow.serve(range(4), 1) == 0
