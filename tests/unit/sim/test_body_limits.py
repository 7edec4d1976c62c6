"""Requests beyond the simulators' limits are refused before they are held."""

import tracemalloc

import pytest
from unit.sim.conftest import CHAT

from mmrouter_sim.server import MAX_BODY, MAX_VALUES
from mmrouter_sim.sglang import app as sglang_app
from mmrouter_sim.vllm.app import build

MIB = 1 << 20


async def asked(app, piece, count, **headers):
    """Send a body in pieces; returns the status, and how many pieces were taken."""
    taken, sent = 0, []

    async def receive():
        nonlocal taken
        taken += 1
        return {"type": "http.request", "body": piece, "more_body": taken < count}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "root_path": ""}
    await app({**scope, "headers": [(name.encode(), value) for name, value in headers.items()]}, receive, send)
    return sent[0]["status"], taken


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_a_body_beyond_the_limit_is_refused_with_413_and_never_held(serve, serve_sglang, engine):
    client = await (serve if engine == "vllm" else serve_sglang)()
    app = (build if engine == "vllm" else sglang_app.build)(client.engine)
    assert await asked(app, b"", 1, **{"content-length": b"200000000"}) == (413, 0)
    status, taken = await asked(app, b" " * MIB, 200)
    assert (status, taken) == (413, MAX_BODY // MIB + 1)


async def test_a_body_of_more_values_than_the_limit_takes_a_few_bytes_of_memory_for_each_of_its_own(serve):
    app = build((await serve()).engine)
    raw = b'{"model":"tiny","messages":[' + b"{}," * MAX_VALUES + b"{}]}"
    tracemalloc.start()
    try:
        status, _ = await asked(app, raw, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert status == 413
    assert peak < 8 * len(raw)


async def test_marks_in_a_text_are_no_values(serve):
    client = await serve()
    status, _ = await client.chat("Hello", metadata='{[,"\\' * (MAX_VALUES // 2))
    assert status == 200
