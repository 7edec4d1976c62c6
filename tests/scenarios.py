"""The ten scenarios by which image routing is judged, through the official client: what is sent again is a whole hit.

Each is a function that raises ``AssertionError`` where a deployment falls short, and stands under a text of its own, so
its first request finds nothing of another one. What it asks for is the same of local processes, of pods and of real
engines: a model, the official client, every frontend's control API, and a web server that the frontends fetch from.
"""

import functools
import http.server
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import httpx
import openai
import pytest
from local.rig import Deployment
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture

FILLER = "The harbour lies still in the early light and the boats wait for the tide to turn. " * 3
SETTLE_SECONDS = 10.0
Message = dict[str, Any]


class Pictures(Protocol):
    """A web server that the frontends reach."""

    def put(self, name: str, content: bytes) -> str:
        """Serve a file, in place of the one of that name if there is one, with any query; return its URL."""
        ...


@dataclass(frozen=True)
class Folder:
    """A folder that a web server on loopback serves below ``url``."""

    path: Path
    url: str

    def put(self, name: str, content: bytes) -> str:
        (self.path / name).write_bytes(content)
        return f"{self.url}/{name}"


@contextmanager
def served(folder: Path) -> Iterator[Folder]:
    """Serve a folder on loopback until the block ends."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Folder(folder, f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Folder]:
    with served(tmp_path) as web:
        yield web


@dataclass(frozen=True)
class Seen:
    """What was seen of one answer: the router's headers, the engine's usage, and the decision's trace."""

    worker: str
    exactness: str
    overlap: int
    """Blocks of the prompt that the router saw in the worker's cache."""
    blocks: int
    size: int
    predicted_tokens: int
    tokens: int
    cached: int
    """Tokens that the engine took from its cache."""
    image_at: int | None
    """First token of the first image."""
    keys: tuple[str, ...] = ()
    """Predicted keys of its blocks, in order."""
    prefilled_by: str = ""
    """The prefill engine, whose hits ``cached`` counts where there is one."""

    @property
    def reusable(self) -> int:
        """Blocks that a repeat can take from the cache: an engine always computes the last token. One with a sliding
        window does not keep more of a prompt than these."""
        return (self.tokens - 1) // self.size


@dataclass
class Chat:
    """Sends messages to ``model`` and returns what was seen of the answers.

    ``client`` shows the control token with every request; ``controls`` are clients of every frontend's control API.
    """

    model: str
    client: openai.OpenAI
    controls: Sequence[httpx.Client]
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    def picture(self, name: str, side: int = 224) -> bytes:
        """Return a picture that no other conversation has."""
        return picture(self.nonce + name, side, side)

    def image(self, name: str, side: int = 224) -> str:
        """Return such a picture as a ``data:`` URI."""
        return data_uri(self.picture(name, side))

    def messages(self, *content: str) -> list[Message]:
        """Return one turn: this conversation's own text, then texts and the URLs of images in their order."""
        parts: list[Message] = [{"type": "text", "text": self.nonce + " " + FILLER}]
        for item in content:
            if item.startswith(("data:", "http:")):
                parts.append({"type": "image_url", "image_url": {"url": item}})
            else:
                parts.append({"type": "text", "text": item})
        return [{"role": "user", "content": parts}]

    def send(self, *content: str, messages: list[Message] | None = None) -> Seen:
        """Send one chat, and wait until every frontend knows its blocks.

        Raises ``AssertionError`` unless the router was exact: its token count is the engine's, and the engine took from
        its cache what the router saw there.
        """
        messages = messages or self.messages(*content)
        seen = self._exact(self._answer(messages))
        self.settle({"messages": messages}, seen.reusable, prefilled_by=seen.prefilled_by)
        return seen

    def complete(self, prompt: str | list[int]) -> Seen:
        """Send one completion, and wait and check as :meth:`send` does. Its one token of answer is in no block."""
        raw = self.client.completions.with_raw_response.create(
            model=self.model, prompt=prompt, max_tokens=1, temperature=0
        )
        seen = self._exact(raw)
        self.settle({"prompt": prompt}, seen.reusable, "/v1/completions")
        return seen

    def _exact(self, raw: Any) -> Seen:
        usage, headers = raw.parse().usage, raw.headers
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        decision = self.decision(raw)
        seen = Seen(
            worker=headers["x-mmrouter-worker"],
            exactness=headers["x-mmrouter-exactness"],
            overlap=int(headers["x-mmrouter-overlap-blocks"]),
            blocks=int(headers["x-mmrouter-prompt-blocks"]),
            size=int(headers["x-mmrouter-block-size"]),
            predicted_tokens=int(headers["x-mmrouter-prompt-tokens"]),
            tokens=usage.prompt_tokens,
            cached=usage.prompt_tokens_details.cached_tokens or 0,
            image_at=next((int(image["offset"]) for image in decision["images"]), None),
            keys=tuple(decision["keys"]),
            prefilled_by=prefill_engine(decision),
        )
        assert seen.exactness == "exact"
        assert seen.predicted_tokens == seen.tokens
        assert seen.cached == min(seen.overlap, seen.reusable) * seen.size
        return seen

    def decided(self, *content: str) -> dict[str, Any]:
        """Send one request and return its decision."""
        raw = self._answer(self.messages(*content))
        assert raw.parse().choices[0].message.content
        return self.decision(raw)

    def _answer(self, messages: list[Message]) -> Any:
        return self.client.chat.completions.with_raw_response.create(
            model=self.model, messages=cast(Any, messages), max_tokens=4, temperature=0
        )

    def decision(self, raw: Any) -> dict[str, Any]:
        path = f"/control/decisions/{raw.headers['x-mmrouter-request-id']}"
        found: dict[str, Any] = self.controls[0].get(path).raise_for_status().json()
        return found

    def settle(
        self, fields: dict[str, Any], blocks: int, path: str = "/v1/chat/completions", prefilled_by: str = ""
    ) -> None:
        """Wait until every frontend sees at least so many blocks of a request's prompt at some engine that answers.

        Where another engine computed the prompt, also at that one: a repeat goes there only by its blocks.
        """
        body = {"model": self.model, **fields}
        for number, control in enumerate(self.controls):

            def seen(control: httpx.Client = control) -> int:
                dry = control.post("/control/explain", params={"path": path}, json=body).raise_for_status().json()
                if prefilled_by and not all(prefilled_by in names for names in dry["holders_now"][:blocks]):
                    return 0
                return max((int(each["overlap"]) for each in dry["candidates"]), default=0)

            what = f"frontend {number} sees the {blocks} blocks of the last request"
            wait_for(lambda seen=seen: seen() >= blocks, SETTLE_SECONDS, what, known=seen)


def prefill_engine(decision: dict[str, Any]) -> str:
    """Return the engine that computed the prompt for the one that answered; empty where that one did."""
    done = (stage for stage in decision["chain"] if (stage["stage"], stage["outcome"]) == ("prefill", "done"))
    return next((str(stage["workers"][0]) for stage in done), "")


@contextmanager
def open_chat(deployment: Deployment, kind: type[Chat] = Chat, **options: Any) -> Iterator[Chat]:
    """Give a chat with a local deployment and all its frontends. ``options`` are those of the official client."""
    with ExitStack() as stack:
        controls = [stack.enter_context(deployment.control(number)) for number in range(len(deployment.controls))]
        yield kind("demo", stack.enter_context(deployment.client(**options)), controls)


@pytest.fixture
def chat(settled: Deployment) -> Iterator[Chat]:
    """A chat with the deployment that the fixture ``settled`` returns."""
    with open_chat(settled) as chat:
        yield chat


def assert_whole(first: Seen, again: Seen) -> None:
    """Raise ``AssertionError`` unless ``again`` found all of itself where ``first`` went."""
    assert again.reusable <= again.overlap <= again.blocks == first.blocks
    assert again.worker == first.worker


def assert_only_text(seen: Seen) -> None:
    """Raise ``AssertionError`` unless a request found the blocks before its first image and no others."""
    assert seen.image_at is not None
    assert seen.overlap == seen.image_at // seen.size > 0


def text_only_repeats_whole(chat: Chat, web: Pictures) -> None:
    assert_whole(chat.send(), chat.send())


def the_same_image_repeats_whole(chat: Chat, web: Pictures) -> None:
    a = chat.image("a")
    assert_whole(chat.send(a, "what?"), chat.send(a, "what?"))


def a_different_image_shares_only_the_text_before_it(chat: Chat, web: Pictures) -> None:
    chat.send(chat.image("a"), "what?")
    assert_only_text(chat.send(chat.image("b"), "what?"))


def several_images_repeat_whole(chat: Chat, web: Pictures) -> None:
    a, b = chat.image("a"), chat.image("b")
    assert_whole(chat.send(a, b, "compare"), chat.send(a, b, "compare"))


def http_repeats_whole(chat: Chat, web: Pictures) -> None:
    url = web.put("a.png", chat.picture("a"))
    assert_whole(chat.send(url, "what?"), chat.send(url, "what?"))


def a_data_uri_repeats_whole_in_a_second_turn(chat: Chat, web: Pictures) -> None:
    turn = chat.messages(chat.image("a"), "what?")
    first = chat.send(messages=turn)
    longer = [
        *turn,
        {"role": "assistant", "content": "A pattern."},
        {"role": "user", "content": "Which colour is the strongest of them all, and where is it?"},
    ]
    second = chat.send(messages=longer)
    assert second.worker == first.worker
    # The first turn ends where the assistant begins to speak, so the block in which it ends may differ.
    assert second.overlap >= first.blocks - 1
    assert_whole(second, chat.send(messages=longer))


def a_staircase_of_images_extends_the_step_before(chat: Chat, web: Pictures) -> None:
    images = [chat.image(str(number), 112) for number in range(4)]
    before = chat.send(images[0])
    for count in range(2, 5):
        step = chat.send(*images[:count])
        assert step.worker == before.worker
        # The step before ends with the assistant's turn where this one goes on, so its last block may differ.
        assert step.overlap >= before.blocks - 1
        before = step


def swapped_images_part_at_the_first_one(chat: Chat, web: Pictures) -> None:
    a, b = chat.image("a"), chat.image("b")
    chat.send(a, b, "compare")
    assert_only_text(chat.send(b, a, "compare"))


def http_and_data_of_the_same_bytes_are_one_image(chat: Chat, web: Pictures) -> None:
    url = web.put("a.png", chat.picture("a"))
    assert_whole(chat.send(chat.image("a"), "what?"), chat.send(url, "what?"))


def a_signed_url_and_the_plain_one_are_one_image_and_changed_bytes_are_another(chat: Chat, web: Pictures) -> None:
    url = web.put("b.png", chat.picture("b"))
    first = chat.send(url, "what?")
    assert_whole(first, chat.send(f"{url}?signature=1&expires=2", "what?"))
    web.put("b.png", chat.picture("changed"))
    assert_only_text(chat.send(f"{url}?signature=3", "what?"))


def completions_repeat_whole(chat: Chat) -> set[str]:
    """A text and token ids, repeat whole as completions. Return the keys of their blocks.

    Apart from the ten scenarios, which are about images.
    """
    keys: set[str] = set()
    for prompt in (f"{chat.nonce} {FILLER}", [ord(letter) for letter in chat.nonce[:16]] * 6):
        first = chat.complete(prompt)
        assert first.blocks > 1
        assert_whole(first, chat.complete(prompt))
        keys.update(first.keys)
    return keys


def several_prompts_and_an_echo_repeat_whole(chat: Chat, cached: Callable[[], float]) -> None:
    """Each prompt of a list finds its own blocks; an echo reads the cache. ``cached``: tokens that engines found."""
    prompts = [f"{name} of {chat.nonce}. {FILLER}" for name in ("One", "Another", "The third")]

    def asked(prompt: str | list[str], **fields: Any) -> tuple[str, int, int, int, float]:
        before = cached()
        raw = chat.client.completions.with_raw_response.create(
            model=chat.model, prompt=prompt, max_tokens=1, temperature=0, **fields
        )
        counts = [
            int(raw.headers[f"x-mmrouter-{name}"]) for name in ("overlap-blocks", "prompt-blocks", "prompt-tokens")
        ]
        assert counts[2] == raw.parse().usage.prompt_tokens
        for each in [prompt] if isinstance(prompt, str) else prompt:
            chat.settle({"prompt": each}, 1, "/v1/completions")
        return raw.headers["x-mmrouter-exactness"], *counts, cached() - before

    exactness, overlap, blocks, _, found = asked(prompts)
    assert (exactness, overlap, found) == ("exact", 0, 0)
    alone = [asked(prompt) for prompt in prompts]
    assert [each[:2] for each in alone] == [("exact", each[2]) for each in alone]
    exactness, overlap, again, tokens, found = asked(prompts)
    assert (exactness, overlap, again, tokens) == ("exact", blocks, blocks, sum(each[3] for each in alone))
    assert found == sum(each[4] for each in alone) > 0
    assert asked(prompts[0], echo=True) == alone[0]


Scenario = Callable[[Chat, Pictures], None]
SCENARIOS: tuple[Scenario, ...] = (
    text_only_repeats_whole,
    the_same_image_repeats_whole,
    a_different_image_shares_only_the_text_before_it,
    several_images_repeat_whole,
    http_repeats_whole,
    a_data_uri_repeats_whole_in_a_second_turn,
    a_staircase_of_images_extends_the_step_before,
    swapped_images_part_at_the_first_one,
    http_and_data_of_the_same_bytes_are_one_image,
    a_signed_url_and_the_plain_one_are_one_image_and_changed_bytes_are_another,
)


def title(scenario: Scenario) -> str:
    """Return what a scenario is called in reports: ``05_http_repeats_whole``."""
    return f"{SCENARIOS.index(scenario) + 1:02}_{scenario.__name__}"
