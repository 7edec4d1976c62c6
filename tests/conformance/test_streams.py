"""Streams of real engines, with images, have the same text after their engine was stopped, lost or killed.

One deployment of two engines per engine type, SGLang's only in the long form: a stopped engine resumes, a lost node is
back, and an ended engine starts again afterwards. vLLM answers are repeated if greedy or seeded and continued from
their token ids if sampled, SGLang answers are repeated.
"""

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from conformance.conftest import Shrunk
from conformance.engine_process import engine_args, require_memory
from conformance.engines import deployed, manifest, pool, sglang_manifest
from conformance.setups import TINY
from local.rig import Deployment
from long_form import IS_LONG, parameters
from node_loss import losing_nodes, own_network
from streams import BEST_ONLY, CHAT, CHOICES, COMPLETIONS, GREEDY, SEEDED, TOOLS, WHOLE_ANSWER, Streams
from waiting import wait_for

COUNT, MANY = 6, 64
TOKENS = 160 if IS_LONG else 80  # of an answer; a fault comes after the first four
RUNNING = {"vllm": "--max-num-seqs", "sglang": "--max-running-requests"}
"""Flags of the number of requests that an engine runs at a time: all streams begin before a fault."""
PROVE_SECONDS = 240.0
ARRIVAL_SECONDS = 0.3  # in which what a stopped engine has sent arrives
TOOL_CALLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
KEYS = {"VLLM_API_KEY", "SGLANG_API_KEY"}  # variables of an engine's container


@dataclass
class Served:
    deployment: Deployment
    continues: bool

    def streams(self, fields: Mapping[str, Any] = GREEDY, path: str = CHAT, count: int = COUNT) -> Streams:
        wait_for(self.deployment.settled, PROVE_SECONDS, "two verified engines")
        return Streams(self.deployment, count, TOKENS, fields, path)


@pytest.fixture(scope="module", params=parameters(RUNNING, "vllm"))
def served(
    request: pytest.FixtureRequest, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    require_memory()
    kind: str = request.param
    all_at_once = (RUNNING[kind], str(MANY))
    env = request.getfixturevalue(f"{kind}_env")
    if kind == "vllm":
        engine = {"type": "vllm", "args": [*engine_args(), *all_at_once, *TOOL_CALLS]}
        written = manifest(shrunk(TINY), engine, [pool("worker", replicas=2)], repository=TINY)
        written["spec"]["routing"]["seedStreams"] = True
    else:
        written = sglang_manifest(shrunk(TINY), TINY, [("worker", 2)], *all_at_once)
    with own_network(), deployed(env, tmp_path_factory.mktemp(f"streams-{kind}"), written) as deployment:
        yield Served(deployment, kind == "vllm")


def engine_processes(served: Served) -> dict[str, list[int]]:
    """Return the ids of each engine's processes. To find them takes longer than some streams."""
    found: dict[str, list[int]] = {}
    for child in psutil.Process(served.deployment.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            environment = child.environ()
            if environment.keys() & KEYS:
                found.setdefault(environment.get("POD_NAME", ""), []).append(child.pid)
    return found


def send_signal(processes: Sequence[int], number: signal.Signals) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def lose_a_node(served: Served, fields: Mapping[str, Any], path: str) -> None:
    streams = served.streams(fields, path)
    addresses = {worker["name"]: worker["ip"] for worker in served.deployment.state()["workers"]}
    processes = engine_processes(served)
    with losing_nodes() as lose:

        def lose_while_stopped(name: str) -> bool:
            """Stop the engine meanwhile: on a busy machine its streams might end before the node is lost."""
            send_signal(processes[name], signal.SIGSTOP)
            time.sleep(ARRIVAL_SECONDS)
            running = streams.load()[name] > 0
            if running:
                lose(addresses[name])
            send_signal(processes[name], signal.SIGCONT)
            return running

        streams.assert_outlive(lose_while_stopped)


def test_streams_outlive_an_engine_that_hangs(served: Served) -> None:
    every = (GREEDY, BEST_ONLY, SEEDED) if IS_LONG else (BEST_ONLY,)
    for sampling in every if served.continues else (GREEDY,):
        streams = served.streams(sampling)
        processes = engine_processes(served)
        try:
            streams.assert_outlive(lambda name, of=processes: send_signal(of[name], signal.SIGSTOP))
        finally:
            for each in processes.values():
                send_signal(each, signal.SIGCONT)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        pytest.param({}, CHAT, id="chats"),
        pytest.param({"logprobs": True, "top_logprobs": 2}, CHAT, id="top_logprobs"),
        pytest.param({"logprobs": True}, CHAT, id="logprobs", marks=pytest.mark.long_form),
        pytest.param({}, COMPLETIONS, id="completions", marks=pytest.mark.long_form),
    ],
)
def test_streams_outlive_a_lost_node(served: Served, fields: dict[str, Any], path: str) -> None:
    lose_a_node(served, {**(BEST_ONLY if served.continues else GREEDY), **fields}, path)


@pytest.mark.parametrize("served", ["vllm"], indirect=True)
@pytest.mark.parametrize(
    ("fields", "path"),
    [
        *(
            pytest.param(fields, CHAT, id=name, marks=() if name == "grammar" else pytest.mark.long_form)
            for name, fields in WHOLE_ANSWER.items()
        ),
        pytest.param({"logprobs": 2}, COMPLETIONS, id="completions_logprobs"),
    ],
)
def test_sampled_streams_that_need_the_whole_answer_outlive_a_lost_node(
    served: Served, fields: dict[str, Any], path: str
) -> None:
    """The router sets a seed, so another engine repeats them."""
    lose_a_node(served, {**BEST_ONLY, **fields}, path)


@pytest.mark.long_form
def test_greedy_streams_of_several_parts_outlive_a_lost_node(served: Served) -> None:
    """vLLM calls tools, and refuses several greedy choices; SGLang runs without a grammar backend, which tools need."""
    lose_a_node(served, {**GREEDY, **(TOOLS if served.continues else CHOICES)}, CHAT)


@pytest.mark.parametrize(
    ("signals", "count"),
    [
        pytest.param([signal.SIGTERM, signal.SIGKILL], COUNT, id="drain", marks=pytest.mark.long_form),
        pytest.param([signal.SIGKILL], COUNT, id="kill"),
        pytest.param([signal.SIGKILL], MANY, id="kill_of_many", marks=pytest.mark.long_form),
    ],
)
def test_streams_outlive_an_engine_that_ends(served: Served, signals: Sequence[signal.Signals], count: int) -> None:
    """A drain past its time is the signal that begins it, and then the kubelet's."""
    streams = served.streams(BEST_ONLY if served.continues else GREEDY, count=count)
    processes = engine_processes(served)

    def end(name: str) -> None:
        for number in signals:
            send_signal(processes[name], number)

    streams.assert_outlive(end)
