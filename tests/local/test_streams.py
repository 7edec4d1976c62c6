"""Sixty-four streams outlive one engine of three: each equals the stream of an undisturbed engine."""

import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from local.rig import deployed, example
from long_form import parameters
from node_loss import losing_nodes, own_network
from streams import BEST_ONLY, COMPLETIONS, GREEDY, SECONDS, WHOLE_ANSWER, Streams, body, whole_answer
from waiting import wait_for

KINDS = {"repeated": GREEDY, "continued": BEST_ONLY}
COUNT = 64
TOKENS = 400


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A deployment of its own: these tests break it."""
    resource = example()
    resource["spec"]["routing"] = {**resource["spec"].get("routing", {}), "seedStreams": True}
    with own_network(), deployed(tmp_path_factory.mktemp("streams"), resource) as deployment:
        yield deployment


@pytest.fixture(scope="module", params=list(KINDS))
def streams(demo, request):
    """Greedy answers are repeated by another engine; sampled ones are continued from their token ids."""
    wait_for(demo.settled, 60, "every worker is verified on every frontend")
    return Streams(demo, COUNT, TOKENS, KINDS[request.param])


def drain_past_its_time(process) -> None:
    """The signal that begins a drain, and the kubelet's when the drain takes too long."""
    process.send_signal(signal.SIGTERM)
    process.kill()


def test_streams_outlive_their_engine(settled, streams):
    streams.assert_outlive(lambda name: settled.processes("vllm")[name].kill())


@pytest.mark.parametrize("streams", parameters(KINDS, "repeated"), indirect=True)
def test_streams_outlive_a_drain(settled, streams):
    streams.assert_outlive(lambda name: drain_past_its_time(settled.processes("vllm")[name]))


def test_completions_outlive_their_engine(settled):
    streams = Streams(settled, COUNT, TOKENS, BEST_ONLY, COMPLETIONS)
    streams.assert_outlive(lambda name: settled.processes("vllm")[name].kill())


def test_sampled_streams_that_need_the_whole_answer_outlive_their_engine(settled):
    streams = Streams(settled, COUNT, TOKENS, {**BEST_ONLY, **WHOLE_ANSWER["stop"], **WHOLE_ANSWER["penalties"]})
    streams.assert_outlive(lambda name: settled.processes("vllm")[name].kill())


@pytest.mark.parametrize("streams", parameters(KINDS, "continued"), indirect=True)
def test_streams_outlive_an_engine_that_hangs(settled, streams):
    stopped = []

    def stop(name: str) -> None:
        stopped.append(settled.processes("vllm")[name])
        stopped[0].send_signal(signal.SIGSTOP)

    try:
        streams.assert_outlive(stop)
    finally:
        stopped[0].send_signal(signal.SIGCONT)


@pytest.mark.parametrize("streams", parameters(KINDS, "continued"), indirect=True)
def test_streams_and_new_requests_outlive_a_lost_node(settled, streams):
    """Connections to the node stay open in silence, and new ones to it are not refused."""
    with losing_nodes() as lose, ThreadPoolExecutor(COUNT) as pool:
        answers = []

        def strike(name: str) -> None:
            lose(settled.processes("vllm")[name].environ()["POD_IP"])
            answers.extend(pool.submit(whole_answer, settled.url, request) for request in streams.requests)

        streams.assert_outlive(strike)
        assert [answer.result(SECONDS) for answer in answers] == streams.answers


def test_the_decision_shows_where_a_stream_went(settled):
    request = body(1, TOKENS, stream=True)
    with httpx.stream("POST", f"{settled.url}/v1/chat/completions", json=request, timeout=SECONDS) as answer:
        lines = answer.iter_lines()
        next(lines)
        settled.processes("vllm")[settled.decision(answer)["worker"]].kill()
        assert [line for line in lines if line][-1] == "data: [DONE]"
        decision = settled.decision(answer)
    outcomes = [attempt["outcome"] for attempt in decision["attempts"]]
    assert decision["stream"] == "repeated"
    assert outcomes == ["answered 200", "stream broke: engine_lost", "answered 200"]
