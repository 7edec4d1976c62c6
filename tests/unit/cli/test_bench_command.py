"""`mmrouter bench` as it is typed: what is refused before anything is sent, and what is kept whatever comes after."""

import asyncio
import os
import sys
from pathlib import Path

import msgspec
from aiohttp import web
from unit.cli.chat_servers import Engine, serving

from mmrouter_cli.bench.types import Result

SMALL = ("--requests", "6", "--concurrency", "2", "--image-share", "0", "--system-tokens", "60")
NO_LISTENER = "http://127.0.0.1:1"


async def bench(*arguments: str) -> tuple[int | None, str, str]:
    """Return exit status, stdout and stderr."""
    env = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    pipe = asyncio.subprocess.PIPE
    argv = ("-m", "mmrouter_cli", "bench", *arguments)
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=pipe, stderr=pipe, env=env)
    out, shown = await process.communicate()
    return process.returncode, out.decode(), shown.decode()


async def test_what_cannot_be_compared_is_said_before_anything_is_sent_and_a_first_run_is_kept(tmp_path: Path) -> None:
    engine, file, both = Engine(), tmp_path / "run.json", tmp_path / "both.json"
    async with serving(engine) as url:
        status, out, shown = await bench(url, "--against", NO_LISTENER, *SMALL, "--json", str(file))
        assert (status, shown.splitlines()[-1]) == (2, f"mmrouter: {NO_LISTENER} does not answer: Connection refused")
        assert "6 answered and 0 failed" in out
        kept = msgspec.json.decode(file.read_bytes(), type=Result)
        assert (kept.answered, len(engine.asked)) == (6, 6)
        both.write_bytes(msgspec.json.encode([kept, kept]))
        for other, said in ((str(tmp_path / "none"), "neither a URL nor a file"), (str(both), "these are 3")):
            status, _, shown = await bench(url, "--against", other, *SMALL)
            assert (status, said in shown) == (2, True), shown
    assert len(engine.asked) == 6


async def test_without_an_answer_to_the_first_run_there_is_no_second_one() -> None:
    class Full(Engine):
        async def __call__(self, request: web.Request) -> web.StreamResponse:
            if (await request.json()).get("stream"):
                self.asked.append(0)
                return web.json_response({"error": {"message": "no room"}}, status=503)
            return await super().__call__(request)

    engine = Full()
    async with serving(engine) as url:
        status, out, shown = await bench(url, "--against", url, *SMALL)
    assert (status, len(engine.asked)) == (1, 6)
    assert "6 failed: status 503: no room" in out
    assert shown.splitlines()[-1] == "mmrouter: not compared: there is no second run"


async def test_each_of_two_endpoints_gets_its_own_key() -> None:
    engine = Engine()
    async with serving(engine) as url:
        options = ("--api-key", "one", "--against-api-key", "two")
        status, _, shown = await bench(url, "--against", url, *SMALL, *options)
    assert (status, engine.keys) == (0, ["Bearer one"] * 6 + ["Bearer two"] * 6), shown


async def test_the_same_words_twice_to_one_endpoint_are_no_comparison() -> None:
    engine = Engine()
    async with serving(engine) as url:
        status, out, shown = await bench(url, "--against", url, *SMALL, "--salt", "s", "--api-key", "one")
    assert (status, "second against first" in out) == (1, False)
    assert "not compared: both sent the same words" in shown
    assert engine.keys == ["Bearer one"] * 12
