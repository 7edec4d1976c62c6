"""Sampled answers that lose their engine are continued by the token ids that the client has."""

import json

import pytest
from unit.router.rig import BLOCK, LoopbackEngine, http_answer, synced
from unit.router.streams.test_answer import DONE, Engine, event, received
from unit.router.test_continued_stream import COMPLETIONS, SAMPLED, TOKENS, Streams, assert_ends_with, breaks, ends

from mmrouter_lib.engines.vllm.answer_takeover import CONTINUATION as VLLM_CONTINUATION
from mmrouter_router.fleet.workers import Member
from mmrouter_router.request.prepared import CHAT


@pytest.fixture
async def rig(make_rig):
    return make_rig(roles=("worker",), engine={"type": "vllm", "blockSize": BLOCK})


class TokensIn(LoopbackEngine):
    """Continues token ids; ``broken`` of the last tokens form no character. ``wanted``: the requests for the rest."""

    def __init__(self, texts: dict[int, str], *, broken: int = 0, renders: int = 200) -> None:
        super().__init__()
        self.texts, self.broken, self.renders = texts, broken, renders
        self.wanted: list[dict] = []

    async def respond(self, reader, writer, headers) -> bool:
        path, _, body = self.requests[-1]
        if path == "/detokenize":
            self.broken -= 1
            writer.write(http_answer(200, json.dumps({"prompt": "x\ufffd" if self.broken >= 0 else "x"}).encode()))
        elif path.endswith("/render"):
            rendered = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 5}}
            rendered = [rendered] if path == f"{COMPLETIONS}/render" else rendered
            writer.write(http_answer(self.renders, json.dumps(rendered).encode()))
        else:
            self.wanted.append(body)
            sent = len(body["token_ids"]) - 2
            steps = [
                {"index": 0, "text": text, "token_ids": [token], "finish_reason": "length" if token == 14 else None}
                for token, text in list(self.texts.items())[sent:]
            ]
            events = [event({"request_id": "r", "choices": [step]}) for step in steps]
            usage = {"prompt_tokens": 2 + sent, "completion_tokens": len(steps), "total_tokens": 7}
            writer.write(ends(b"".join([*events, event({"request_id": "r", "choices": [], "usage": usage}), DONE])))
        return True


ANSWER = dict(zip(range(10, 15), ("The ", "tide ", "", "turns ", "at noon."), strict=True))


def reported(count: int, path: str = CHAT, **more) -> bytes:
    """The beginning of a stream that reports so many token ids. ``more``: of each choice."""
    head = {"id": "a", "object": "chunk", "created": 1, "model": "m"}
    start = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    steps = [
        {"index": 0, "delta": {"content": text}, **more, "finish_reason": None, "token_ids": [token]}
        for token, text in list(ANSWER.items())[:count]
    ]
    chunks = [head | {"choices": [start], "prompt_token_ids": [1, 2]}, *(head | {"choices": [step]} for step in steps)]
    if path == COMPLETIONS:
        texts = [{"index": 0, "text": step["delta"]["content"], "finish_reason": None} for step in steps]
        ids = [{"prompt_token_ids": None if n else [1, 2], "token_ids": s["token_ids"]} for n, s in enumerate(steps)]
        chunks = [head | {"choices": [text | found]} for text, found in zip(texts, ids, strict=True)]
    return b"".join(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n" for chunk in chunks)


async def by_tokens(rig, count: int, other: TokensIn, path: str = CHAT, **more) -> tuple[Streams, bytes]:
    await rig.serve(w1=breaks(reported(count, path, **more)))
    rig.engines["w2"] = other
    await other.serve()
    synced(rig.fleet, Member("w2", "w2", other.ip, "worker", "worker"), (), "True", 1)
    streams = Streams(rig, by_tokens=VLLM_CONTINUATION)
    return streams, await streams.read(SAMPLED, path)


@pytest.mark.parametrize("count", range(1, 5))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_engine_continues_the_token_ids_of_a_sampled_answer(rig, count, path):
    other = TokensIn(ANSWER)
    streams, out = await by_tokens(rig, count, other, path)
    choices, heads, usages, done = received(out)
    assert choices[0]["texts"] == [("content" if path == CHAT else "text", "The tide turns at noon.")]
    assert (choices[0]["roles"], choices[0]["finish"]) == (int(path == CHAT), ["length"])
    assert (heads, done) == ({("a", 1)}, 1)
    assert usages == [{"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}]
    (wanted,) = other.wanted
    assert wanted["token_ids"] == [1, 2, *list(ANSWER)[:count]]
    assert wanted["sampling_params"]["max_tokens"] == 5 - count
    assert b"token_ids" not in out
    assert streams.counted == {("engine_lost", "continued"): 1}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_sampled_answer_of_which_the_client_has_nothing_is_requested_anew(rig, path):
    whole = Engine("b", chat=path == CHAT).stream([TOKENS])
    _, second = await rig.serve(w1=breaks(reported(1, path)[:20]), w2=ends(whole))
    out = await Streams(rig, by_tokens=VLLM_CONTINUATION).read(SAMPLED, path)
    assert received(out) == received(whole)
    assert [asked for asked, *_ in second.asked] == [path]


@pytest.mark.parametrize("with_usage", [True, False])
async def test_a_finished_answer_gets_its_last_events_from_the_router(rig, with_usage):
    last = {"id": "a", "object": "chunk", "created": 1, "model": "m"}
    last["choices"] = [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop", "token_ids": [99]}]
    await rig.serve(w1=breaks(reported(5) + b"data: " + json.dumps(last, separators=(",", ":")).encode() + b"\n\n"))
    streams = Streams(rig, by_tokens=VLLM_CONTINUATION)
    fields = SAMPLED | {"stream_options": {"include_usage": with_usage}}
    choices, heads, usages, done = received(await streams.read(fields))
    assert (choices[0]["texts"], choices[0]["finish"]) == ([("content", "The tide turns at noon.")], ["stop"])
    assert (heads, done) == ({("a", 1)}, 1)
    assert usages == ([{"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}] if with_usage else [])
    assert streams.counted == {("engine_lost", "continued"): 1}


async def test_tokens_of_an_incomplete_character_are_generated_again(rig):
    other = TokensIn(ANSWER, broken=1)
    _, out = await by_tokens(rig, 3, other)  # the last one has no text yet
    assert other.wanted[0]["token_ids"] == [1, 2, 10, 11]
    choices, _, usages, _ = received(out)
    assert choices[0]["texts"] == [("content", "The tide turns at noon.")]
    assert usages[0]["completion_tokens"] == 5


async def test_a_token_without_text_whose_log_probability_was_sent_is_not_generated_again(rig):
    listed = {"logprobs": {"content": [{"token": "x", "logprob": -1.0, "bytes": [], "top_logprobs": []}]}}
    streams, out = await by_tokens(rig, 3, TokensIn(ANSWER, broken=1), **listed)
    assert_ends_with(out, "logprobs", VLLM_CONTINUATION.strip(reported(3, **listed)))
    assert streams.counted == {("engine_lost", "logprobs"): 1}


async def test_an_engine_that_does_not_take_token_ids_ends_the_stream(rig):
    streams, out = await by_tokens(rig, 3, TokensIn(ANSWER, renders=403))
    assert_ends_with(out, "engine_refused", VLLM_CONTINUATION.strip(reported(3)))
    assert streams.counted == {("engine_lost", "engine_refused"): 1}


@pytest.mark.parametrize(
    ("path", "fields", "reports"),
    [
        (CHAT, {"stream": True}, True),
        (CHAT, {}, False),
        (CHAT, {"stream": True, "temperature": 0}, False),  # is repeated, at no cost per token
        (CHAT, {"stream": True, "n": 2}, False),
        (COMPLETIONS, {"stream": True}, True),
        (COMPLETIONS, {"stream": True, "logprobs": 1}, False),
        ("/v1/responses", {"stream": True}, False),
    ],
)
def test_only_streams_that_need_them_report_token_ids(rig, path, fields, reports):
    for enabled in (True, False):
        streams = Streams(rig, enabled=enabled, by_tokens=VLLM_CONTINUATION)
        way, added = streams.continuations.plan(path, fields)
        assert (way == "token_ids", "return_token_ids" in added) == (reports and enabled, reports and enabled)
