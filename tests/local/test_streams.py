"""Sixty-four streams outlive one engine of three: each is the stream that an undisturbed engine gives."""

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import httpx
import pytest
from local.rig import ROOT, running
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture

STREAMS = 64
TOKENS = 400
IMAGES = [data_uri(picture(f"stream {n}", 112, 112)) for n in range(4)]
SECONDS = 180.0


@pytest.fixture(scope="module")
def demo():
    """A deployment of its own: these tests break it."""
    with running(ROOT / "examples" / "demo.yaml") as deployment:
        yield deployment


def body(number: int, **fields) -> dict:
    parts = [{"type": "text", "text": f"Story {number} of the sea, told at length and without an end. " * 3}]
    if number % 2:
        parts.append({"type": "image_url", "image_url": {"url": IMAGES[number % 4]}})
    messages = [{"role": "user", "content": parts}]
    return {"model": "demo", "messages": messages, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, **fields}


def whole_answer(url: str, number: int) -> tuple[str, str, int, int]:
    """Return text, finish reason and tokens of an answer that is not streamed."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=body(number), timeout=SECONDS).raise_for_status().json()
    choice, usage = answer["choices"][0], answer["usage"]
    return choice["message"]["content"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


@dataclass
class Stream:
    """One stream, read in a thread of its own."""

    url: str
    number: int
    chunks: list[dict] = field(default_factory=list)
    end: str = ""
    error: str = ""

    def read(self) -> None:
        fields = {"stream": True, "stream_options": {"include_usage": True}}
        try:
            self._read(body(self.number, **fields))
        except httpx.HTTPError as error:
            self.error = repr(error)

    def _read(self, request: dict) -> None:
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=request, timeout=SECONDS) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.chunks.append(json.loads(line[6:]))
                elif line:
                    self.end = line

    @property
    def received(self) -> tuple[str, str, int, int]:
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        (finish,) = (choice["finish_reason"] for choice in choices if choice["finish_reason"])
        (usage,) = (chunk["usage"] for chunk in self.chunks if chunk.get("usage"))
        return text, finish, usage["prompt_tokens"], usage["completion_tokens"]


@pytest.fixture(scope="module")
def answers(demo):
    wait_for(demo.settled, 60, "every worker is verified on every frontend")
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(partial(whole_answer, demo.url), range(STREAMS)))


def breaks(deployment) -> float:
    return deployment.metric("mmrouter_stream_breaks_total")


def kill(process) -> None:
    process.kill()


def stop(process) -> None:
    process.send_signal(signal.SIGSTOP)


def drain_past_its_time(process) -> None:
    """The signal that begins a drain, and the kubelet's when it takes too long."""
    process.send_signal(signal.SIGTERM)
    process.kill()


@pytest.mark.parametrize("strike", [kill, stop, drain_past_its_time])
def test_streams_outlive_their_engine(settled, answers, strike):
    before = breaks(settled)
    streams = [Stream(settled.url, number) for number in range(STREAMS)]
    threads = [threading.Thread(target=stream.read) for stream in streams]
    for thread in threads:
        thread.start()
    wait_for(lambda: all(len(stream.chunks) > 5 for stream in streams), 120, "every stream has begun")
    load = {worker["name"]: 0 for worker in settled.state()["workers"]}
    for number in range(2):
        for worker in settled.state(number)["workers"]:
            load[worker["name"]] += worker["in_flight"]
    victim = settled.processes("vllm")[max(load, key=lambda name: load[name])]
    strike(victim)
    for thread in threads:
        thread.join(SECONDS)
    if victim.is_running():
        victim.send_signal(signal.SIGCONT)

    assert [stream.error for stream in streams if stream.error] == []
    assert {stream.end for stream in streams} == {"data: [DONE]"}
    assert [stream.received == answers[stream.number] for stream in streams] == [True] * STREAMS
    assert {len({(chunk["id"], chunk["created"]) for chunk in stream.chunks}) for stream in streams} == {1}
    broke = breaks(settled) - before
    assert broke > 0
    assert settled.metric("mmrouter_stream_breaks_total", outcome="continued") == breaks(settled)


def test_the_decision_shows_where_a_stream_went(settled):
    request = body(1, stream=True)
    with httpx.stream("POST", f"{settled.url}/v1/chat/completions", json=request, timeout=SECONDS) as answer:
        lines = answer.iter_lines()
        next(lines)
        name = settled.decision(answer)["worker"]
        settled.processes("vllm")[name].kill()
        assert [line for line in lines if line][-1] == "data: [DONE]"
        outcomes = [attempt["outcome"] for attempt in settled.decision(answer)["attempts"]]
    assert outcomes == ["answered 200", "stream broke: engine_lost", "answered 200"]


def test_a_sampled_stream_ends_with_an_error_that_names_the_cause(settled):
    request = body(2, stream=True, temperature=1)
    with httpx.stream("POST", f"{settled.url}/v1/chat/completions", json=request, timeout=SECONDS) as answer:
        lines = answer.iter_lines()
        next(lines)
        settled.processes("vllm")[settled.decision(answer)["worker"]].kill()
        *_, error, end = [line for line in lines if line]
    assert (json.loads(error[6:])["error"]["code"], end) == ("stream_sampled", "data: [DONE]")
