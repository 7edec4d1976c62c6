"""The ten scenarios of the field's gate, through the official client: what is sent again is an exact whole hit."""

import functools
import http.server
import secrets
import threading

import pytest
from local.rig import wait_for

from mmrouter_cli.pictures import data_uri, picture

FILLER = "The harbour lies still in the early light and the boats wait for the tide to turn. " * 3


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A web server on loopback: URL below which pictures a.png and b.png lie, with any query."""
    folder = tmp_path_factory.mktemp("pictures")
    seed = secrets.token_hex(4)
    for name in "ab":
        (folder / f"{name}.png").write_bytes(picture(seed + name))

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()


class Chat:
    """Sends messages and returns what was seen; ``whole`` waits until every frontend knows the blocks."""

    def __init__(self, demo):
        self.demo, self.nonce = demo, secrets.token_hex(8)
        self.client = demo.client()

    def messages(self, *content):
        parts = [{"type": "text", "text": self.nonce + " " + FILLER}]
        for item in content:
            if item.startswith(("data:", "http:")):
                parts.append({"type": "image_url", "image_url": {"url": item}})
            else:
                parts.append({"type": "text", "text": item})
        return [{"role": "user", "content": parts}]

    def send(self, *content, messages=None):
        messages = messages or self.messages(*content)
        raw = self.client.chat.completions.with_raw_response.create(
            model="demo", messages=messages, max_tokens=4, temperature=0
        )
        usage = raw.parse().usage
        headers = raw.headers
        seen = {
            "worker": headers["x-mmrouter-worker"],
            "exactness": headers["x-mmrouter-exactness"],
            "overlap": int(headers["x-mmrouter-overlap-blocks"]),
            "blocks": int(headers["x-mmrouter-prompt-blocks"]),
            "size": int(headers["x-mmrouter-block-size"]),
            "predicted_tokens": int(headers["x-mmrouter-prompt-tokens"]),
            "tokens": usage.prompt_tokens,
            "cached": usage.prompt_tokens_details.cached_tokens,
            "image_at": self.image_at(headers["x-mmrouter-request-id"]),
        }
        assert seen["exactness"] == "exact"
        assert seen["predicted_tokens"] == seen["tokens"]
        cached_blocks = min(seen["overlap"], (seen["tokens"] - 1) // seen["size"])
        assert seen["cached"] == cached_blocks * seen["size"]
        self.settle(messages, seen["blocks"])
        return seen

    def image_at(self, request_id):
        """First token of the first image, by the decision's trace."""
        with self.demo.control() as control:
            images = control.get(f"/control/decisions/{request_id}").json()["images"]
        return images[0]["offset"] if images else None

    def settle(self, messages, blocks):
        for number in range(len(self.demo.controls)):
            with self.demo.control(number) as control:

                def known(control=control):
                    dry = control.post("/control/explain", json={"model": "demo", "messages": messages}).json()
                    return max(c["overlap"] for c in dry["candidates"]) == blocks

                wait_for(known, 5, f"frontend {number} sees the blocks of the last request")

    def assert_whole(self, first, again):
        assert again["overlap"] == again["blocks"] == first["blocks"]
        assert again["worker"] == first["worker"]


@pytest.fixture
def chat(demo):
    return Chat(demo)


@pytest.fixture
def a(chat):
    return data_uri(picture(chat.nonce + "a"))


@pytest.fixture
def b(chat):
    return data_uri(picture(chat.nonce + "b"))


def test_01_text_only_repeats_whole(chat):
    chat.assert_whole(chat.send(), chat.send())


def test_02_the_same_image_repeats_whole(chat, a):
    chat.assert_whole(chat.send(a, "what?"), chat.send(a, "what?"))


def test_03_a_different_image_shares_only_the_text_before_it(chat, a, b):
    chat.send(a, "what?")
    other = chat.send(b, "what?")
    assert other["overlap"] == other["image_at"] // other["size"] > 0


def test_04_several_images_repeat_whole(chat, a, b):
    chat.assert_whole(chat.send(a, b, "compare"), chat.send(a, b, "compare"))


def test_05_http_repeats_whole(chat, served):
    url, _ = served
    chat.assert_whole(chat.send(f"{url}/a.png", "what?"), chat.send(f"{url}/a.png", "what?"))


def test_06_a_data_uri_repeats_whole_in_a_second_turn(chat, a):
    turn = chat.messages(a, "what?")
    first = chat.send(messages=turn)
    longer = [
        *turn,
        {"role": "assistant", "content": "A pattern."},
        {"role": "user", "content": "Which colour is the strongest of them all, and where is it?"},
    ]
    second = chat.send(messages=longer)
    assert second["worker"] == first["worker"]
    assert second["overlap"] >= first["blocks"] - 1
    chat.assert_whole(second, chat.send(messages=longer))


def test_07_a_staircase_of_images_extends_the_step_before(chat):
    images = [data_uri(picture(f"{chat.nonce}{n}", 112, 112)) for n in range(4)]
    before = chat.send(images[0])
    for count in range(2, 5):
        step = chat.send(*images[:count])
        assert step["worker"] == before["worker"]
        # The step before ends with the assistant's turn where this one goes on, so its last block may differ.
        assert step["overlap"] >= before["blocks"] - 1
        before = step


def test_08_swapped_images_part_at_the_first_one(chat, a, b):
    chat.send(a, b, "compare")
    swapped = chat.send(b, a, "compare")
    assert swapped["overlap"] == swapped["image_at"] // swapped["size"] > 0


def test_09_http_and_data_of_the_same_bytes_are_one_image(chat, served):
    url, folder = served
    inline = data_uri((folder / "a.png").read_bytes())
    chat.assert_whole(chat.send(inline, "what?"), chat.send(f"{url}/a.png", "what?"))


def test_10_a_signed_url_and_the_plain_one_are_one_image_and_changed_bytes_are_another(chat, served):
    url, folder = served
    first = chat.send(f"{url}/b.png", "what?")
    chat.assert_whole(first, chat.send(f"{url}/b.png?signature=1&expires=2", "what?"))
    (folder / "b.png").write_bytes(picture(chat.nonce + "changed"))
    changed = chat.send(f"{url}/b.png?signature=3", "what?")
    assert changed["overlap"] == changed["image_at"] // changed["size"]


def test_streamed_answers_carry_usage_and_end_with_done(chat, a):
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
