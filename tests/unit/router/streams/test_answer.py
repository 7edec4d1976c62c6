"""A repeated answer, cut into other chunks, becomes the rest of the first one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_router.streams.answer import DONE, DivergedError, StreamedAnswer, UnreadableError, split
from mmrouter_router.streams.kept import KeptBytes, KeptStream

Token = dict[str, str]  # field -> what one token adds to it


def event(chunk) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


class Engine:
    """Streams one answer. ``steps``: tokens per chunk, repeated; ``name`` is in what engines choose themselves."""

    def __init__(self, name: str, steps=(1,), *, chat=True, logprobs=False, usage=True) -> None:
        self.name, self.steps, self.chat, self.logprobs, self.usage = name, steps, chat, logprobs, usage

    def stream(self, choices: list[list[Token]], finish="stop") -> bytes:
        events: list[bytes] = []
        for index, tokens in enumerate(choices):
            if self.chat:
                events.append(self._chunk(index, {"delta": {"role": "assistant", "content": ""}}))
            done, turn = 0, 0
            while done < len(tokens):
                size = max(1, self.steps[turn % len(self.steps)])
                turn += 1
                events += self._step(index, tokens[done : done + size], done)
                done += size
            ending = {"delta": {"content": ""}} if self.chat else {"text": ""}
            events.append(self._chunk(index, {**ending, "finish_reason": finish, "stop_reason": None}))
        if self.usage:
            total = sum(map(len, choices))
            events.append(event(self._head() | {"choices": [], "usage": {"completion_tokens": total}}))
        return b"".join([*events, DONE])

    def _head(self):
        return {"id": f"chatcmpl-{self.name}", "object": "chunk", "created": len(self.name), "model": "m"}

    def _chunk(self, index, fields) -> bytes:
        return event(self._head() | {"choices": [{"index": index, "finish_reason": None, **fields}]})

    def _step(self, index, tokens, at) -> list[bytes]:
        """Return the chunks of one step: one per run of tokens of the same field, as engines write them."""
        runs: list[tuple[str, list[str]]] = []
        for token in tokens:
            ((name, text),) = token.items()
            if not runs or runs[-1][0] != name:
                runs.append((name, []))
            runs[-1][1].append(text)
        chunks = []
        for name, texts in runs:
            fields = self._fields(name, "".join(texts))
            if self.logprobs:
                key = "content" if self.chat else "tokens"
                fields["logprobs"] = {key: [f"{index}.{at + n}" for n in range(len(texts))]}
            at += len(texts)
            chunks.append(self._chunk(index, fields))
        return chunks

    def _fields(self, name, text):
        if not self.chat:
            return {"text": text}
        if not name.startswith("tool"):
            return {"delta": {name: text, "tool_calls": []}}
        number = int(name.removeprefix("tool").removesuffix("!"))
        call = {"index": number, "function": {"arguments": text}}
        if name.endswith("!"):
            call = {"index": number, "id": f"call-{self.name}", "type": "function", "function": {"name": text}}
        return {"delta": {"tool_calls": [call]}}


def received(stream: bytes):
    """What a client makes of a stream: the texts, log probabilities and endings of each choice, ids and usage."""
    choices, heads, usages, done = {}, set(), [], 0
    for part in split(stream):
        data = part.removeprefix(b"data: ")
        if data == b"[DONE]":
            done += 1
            continue
        chunk = json.loads(data)
        heads.add((chunk["id"], chunk["created"]))
        if not chunk["choices"]:
            usages.append(chunk["usage"])
        for choice in chunk["choices"]:
            mine = choices.setdefault(choice["index"], {"roles": 0, "texts": [], "logprobs": [], "finish": []})
            delta = choice.get("delta") or {"text": choice.get("text")}
            mine["roles"] += bool(delta.get("role"))
            for name, value in delta.items():
                if name == "tool_calls":
                    pieces = [(f"{c['index']}.{k}", v) for c in value for k, v in c["function"].items()]
                else:
                    pieces = [(name, value)] if name != "role" else []
                for field, text in pieces:
                    if text and mine["texts"] and mine["texts"][-1][0] == field:
                        mine["texts"][-1] = (field, mine["texts"][-1][1] + text)
                    elif text:
                        mine["texts"].append((field, text))
            for entries in (choice.get("logprobs") or {}).values():
                mine["logprobs"] += entries
            if choice["finish_reason"]:
                mine["finish"].append(choice["finish_reason"])
    return choices, heads, usages, done


def continued(first: bytes, cut: int, *others: tuple[bytes, int]) -> bytes:
    """What a client gets of a stream cut after so many bytes, and of repetitions cut likewise."""
    kept = KeptStream(KeptBytes())
    out = kept.take(first[:cut])
    answer = StreamedAnswer.read(kept.events() or b"")
    for stream, end in others:
        if answer.done:
            break
        answer.restart()
        whole = KeptStream(KeptBytes()).take(stream[:end])
        out += b"".join(answer.merge(each) for each in split(whole))
    return out


TEXTS = st.lists(st.builds(lambda text: {"content": text}, st.text('ab"\\\n{é', min_size=0, max_size=4)), max_size=8)
THOUGHTS = st.lists(st.builds(lambda text: {"reasoning": text}, st.text("xy", min_size=1, max_size=3)), max_size=3)
ARGUMENTS = st.lists(st.builds(lambda text: {"tool0": text}, st.text('{"a}', min_size=1, max_size=3)), max_size=4)
TOOLS = st.builds(lambda arguments: [{"tool0!": "search"}, *arguments], ARGUMENTS)
ANSWERS = st.builds(lambda a, b, c: a + b + c, THOUGHTS, TEXTS, st.one_of(st.just([]), TOOLS))
STEPS = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(st.lists(ANSWERS, min_size=1, max_size=2), STEPS, STEPS, st.booleans(), st.data())
def test_a_chat_cut_anywhere_and_repeated_is_the_undisturbed_one(choices, steps, others, logprobs, data):
    first = Engine("a", steps, logprobs=logprobs).stream(choices)
    second = Engine("bbb", others, logprobs=logprobs).stream(choices)
    cut = data.draw(st.integers(0, len(first)))
    again = data.draw(st.integers(0, len(second)))
    merged = continued(first, cut, (second, again), (second, len(second)))
    whole, heads, usages, done = received(merged)
    assert (whole, usages, done) == (received(first)[0], received(first)[2], 1)
    assert len(heads) == 1


def test_a_stream_may_be_cut_at_every_byte():
    answer = [[{"content": text} for text in ("Die ", "Bücher", "", " sind", ' "neu"\n\n', ".")]]
    first, second = Engine("a").stream(answer), Engine("b", (3, 1)).stream(answer)
    for cut in range(len(first) + 1):
        assert received(continued(first, cut, (second, len(second))))[0] == received(first)[0], cut


@given(TEXTS, STEPS, STEPS, st.data())
def test_a_completion_cut_anywhere_and_repeated_is_the_undisturbed_one(tokens, steps, others, data):
    options = {"chat": False, "logprobs": True}
    first, second = Engine("a", steps, **options).stream([tokens]), Engine("b", others, **options).stream([tokens])
    cut = data.draw(st.integers(0, len(first)))
    assert received(continued(first, cut, (second, len(second))))[0] == received(first)[0]


@pytest.mark.parametrize(
    "other",
    [
        [{"content": "one"}, {"content": " too"}, {"content": " three"}],
        [{"content": "one"}],
        [{"reasoning": "one"}, {"content": " two three"}],
        [{"content": "one two"}, {"tool0!": "search"}],
    ],
)
def test_another_answer_diverges(other):
    first = Engine("a").stream([[{"content": text} for text in ("one", " two", " thr", "ee")]])
    cut = first.index(b"ee")
    with pytest.raises(DivergedError):
        continued(first, cut, (Engine("b").stream([other]), 10**6))


def test_another_end_diverges():
    first = Engine("a").stream([[{"content": "one"}]], "length")
    with pytest.raises(DivergedError):
        continued(first, len(first) - len(DONE), (Engine("b").stream([[{"content": "one"}]], "stop"), 10**6))


def test_a_tool_call_keeps_the_id_that_the_client_has():
    answer = [[{"tool0!": "search"}, {"tool0": '{"q":'}, {"tool0": "1}"}, {"tool1!": "open"}, {"tool1": "{}"}]]
    first, second = Engine("a").stream(answer), Engine("b").stream(answer)
    merged = continued(first, first.index(b"1}"), (second, len(second)))
    assert (merged.count(b"call-a"), merged.count(b"call-b")) == (1, 1)
    assert received(merged)[0] == received(first)[0]


@pytest.mark.parametrize("bad", [b"data: {", b"data: []", b'data: {"choices": 1}', b'data: {"choices": [{}]}'])
def test_unknown_events_are_unreadable(bad):
    with pytest.raises(UnreadableError):
        StreamedAnswer.read(bad + b"\n\n")


def test_each_choice_keeps_the_id_of_its_own_first_chunk():
    """SGLang's choices have an id each."""

    def chunks(engine: str, texts: list[str]) -> bytes:
        return b"".join(
            event(
                {"id": f"{engine}-{index}", "object": "chunk", "created": 1, "model": "m"}
                | {"choices": [{"index": index, "text": text, "finish_reason": None}]}
            )
            for text in texts
            for index in (0, 1)
        )

    answer = StreamedAnswer.read(chunks("first", ["a"]))
    answer.restart()
    rest = b"".join(answer.merge(each) for each in split(chunks("second", ["a", "b"])))
    sent = [json.loads(each.removeprefix(b"data: ")) for each in split(rest)]
    assert [(chunk["id"], chunk["choices"][0]["text"]) for chunk in sent] == [("first-0", "b"), ("first-1", "b")]
