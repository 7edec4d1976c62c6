"""The ten scenarios of the field's gate on local processes: what is sent again is an exact whole hit."""

import functools
import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from local.rig import Deployment
from scenarios import SCENARIOS, Chat, Scenario, open_chat, title


@dataclass(frozen=True)
class Folder:
    """A folder that a web server on loopback serves below ``url``."""

    path: Path
    url: str

    def put(self, name: str, content: bytes) -> str:
        (self.path / name).write_bytes(content)
        return f"{self.url}/{name}"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Folder]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Folder(tmp_path, f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


@pytest.fixture
def chat(demo: Deployment) -> Iterator[Chat]:
    with open_chat(demo) as chat:
        yield chat


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, chat: Chat, web: Folder) -> None:
    scenario(chat, web)


def test_streamed_answers_carry_usage_and_end_with_done(chat: Chat) -> None:
    a = chat.image("a")
    chat.send(a, "what?")
    stream = chat.client.chat.completions.create(
        model="demo",
        messages=chat.messages(a, "what?"),
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert sum(bool(c.choices and c.choices[0].delta.content) for c in chunks) >= 1
    usage = chunks[-1].usage
    assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 32
