"""Bad input is a 4xx in OpenAI's shape that names the field, and the connection stays usable.

Images that are served and not predicted are never an over-estimate.
"""

import base64
import io
import json
import os
from pathlib import Path

import httpx
import pytest
from long_form import IS_LONG
from PIL import Image
from scenarios import FILLER
from unit.router.test_unresolved_images import play

from mmrouter_cli.sample_images import data_uri, picture

IMAGES = Path(os.environ.get("MMROUTER_IMAGES", Path(__file__).resolve().parents[3] / "shared" / "images"))


def user(*parts):
    return {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": list(parts)}]}


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def encoded(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


URL = "messages[0].content[0].image_url.url"
TEXT = {"type": "text", "text": "hello"}
GOOD = {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}

CASES = {
    "invalid JSON": (b"{", 400, None),
    "not an object": (b"[1]", 400, None),
    "no messages": ({"model": "demo"}, 400, "messages"),
    "empty messages": ({"model": "demo", "messages": []}, 400, "messages"),
    "no model": ({"messages": GOOD["messages"]}, 400, "model"),
    "unknown model": ({**GOOD, "model": "other"}, 404, "model"),
    "unknown role": ({**GOOD, "messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
    "unknown part": (user({"type": "smell", "smell": "x"}), 400, "messages[0].content[0].type"),
    "embeddings part": (user({"type": "image_embeds", "image_embeds": "x"}), 400, "messages[0].content[0].type"),
    "not an image": (user(image(encoded(b"just some text, no picture"))), 400, URL),
    "empty image": (user(image("data:image/png;base64,")), 400, URL),
    "broken base64": (user(image("data:image/png;base64,@@@")), 400, URL),
    "unreadable header": (user(image(encoded(b"\x89PNG\r\n\x1a\n" + bytes(40)))), 400, URL),
    "second image bad": (
        user(image(data_uri(picture("x"))), TEXT, image("data:,x")),
        400,
        "messages[0].content[2].image_url.url",
    ),
    "too many images": (user(*[image("data:image/png;base64,AAAA")] * 33), 400, "messages"),
    "other scheme": (user(image("file:///etc/passwd")), 400, URL),
    "link-local address": (user(image("http://169.254.169.254/latest")), 400, URL),
    "private address": (user(image("http://10.0.0.1/x.png")), 400, URL),
    "mapped address": (user(image("http://[::ffff:10.0.0.1]/x.png")), 400, URL),
    "no listener": (user(image("http://127.0.0.1:9/x.png")), 400, URL),
    "too long": ({**GOOD, "messages": [{"role": "user", "content": "word " * 60000}]}, 400, "messages"),
    "unknown field": ({**GOOD, "some_new_engine_field": 1}, 400, "some_new_engine_field"),
    "huge max_tokens type": ({**GOOD, "max_tokens": "many"}, 400, "max_tokens"),
}


@pytest.fixture(scope="module")
def connection(demo):
    """One connection for all cases: each must leave it usable for the next."""
    with httpx.Client(base_url=demo.run["frontends"][0]["url"], timeout=60) as client:
        yield client


def post(client, body, path="/v1/chat/completions", **options):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(path, content=content, headers={"content-type": "application/json"}, **options)


def assert_error(answer, status, param):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    assert error["code"], "clients tell errors apart by their code"
    if param is not None:
        assert error["param"].startswith(param), error
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_named_and_the_connection_stays_usable(connection, case):
    body, status, param = CASES[case]
    assert_error(post(connection, body), status, param)
    assert post(connection, GOOD).status_code == 200


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("bomb_header_65000x65000.png", 400),
        ("bomb_valid_12000x12000_1bit.png", 400),
        ("empty.png", 400),
        ("not_an_image.jpg", 400),
        ("extreme_4020x20.png", 400),
        ("truncated_half.jpg", 400),
        ("corrupt_idat.png", None),
    ],
)
def test_hostile_pictures_are_never_a_5xx(connection, name, status):
    if not IMAGES.is_dir():
        pytest.skip(f"not run: no folder {IMAGES}")
    answer = post(connection, user(TEXT, image(encoded((IMAGES / name).read_bytes()))))
    assert answer.status_code < 500, answer.text
    if status is not None:
        assert_error(answer, status, None)


def test_a_body_over_the_limit_is_a_413_whether_declared_or_not(demo):
    url = demo.run["frontends"][0]["url"] + "/v1/chat/completions"
    piece = b" " * 2**20
    for headers in ({"content-length": str(65 * len(piece))}, {}):
        with httpx.Client(timeout=60) as client:
            try:
                answer = client.post(url, content=(piece for _ in range(65)), headers=headers)
            except httpx.TransportError:
                continue  # answered and closed while we still sent: also a refusal, seen by the next assertion
            assert_error(answer, 413, None)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("POST", "/v1/embeddings", 404), ("GET", "/v1/chat/completions", 405)],
)
def test_unknown_paths_are_never_forwarded(connection, method, path, status):
    assert_error(connection.request(method, path), status, None)


def test_what_clients_may_not_set_is_removed_and_counted(demo, connection):
    body = {**GOOD, "cache_salt": "mine", "kv_transfer_params": {"do_remote_decode": True}, "mm_hashes": ["x"]}
    assert post(connection, body).status_code == 200
    for field in ("cache_salt", "kv_transfer_params", "mm_hashes"):
        assert demo.metric("mmrouter_stripped_fields_total", field=field) > 0


def test_a_field_that_is_not_modelled_is_served_and_never_called_exact(demo):
    client = demo.client()
    raw = client.chat.completions.with_raw_response.create(**GOOD, extra_body={"use_beam_search": True})
    assert raw.headers["x-mmrouter-exactness"] == "affinity"


def test_models_lists_what_is_served(demo):
    assert [model.id for model in demo.client().models.list().data] == ["demo"]


MIXES = 10_000 if IS_LONG else 1_000
NAMES = ("mmrouter_decisions_total", "mmrouter_unresolved_images_total")


def test_in_random_mixes_no_overlap_is_over_estimated_and_none_before_the_first_unresolved_is_lost():
    requests = hits = over = lost = 0
    for case in range(MIXES):
        for one in play(case):
            requests += 1
            hits += one.predicted
            over += one.over
            lost += min(one.held, one.sure) - one.predicted
    assert (over, lost) == (0, 0)
    assert hits > requests


def avif(seed: str) -> str:
    raw = io.BytesIO()
    Image.open(io.BytesIO(picture(seed))).convert("RGB").save(raw, "AVIF")
    return data_uri(raw.getvalue())


def test_case_39_one_unresolved_image_of_three_in_a_whole_deployment(demo, chat):
    messages = chat.messages(chat.image("a"), FILLER, avif(chat.nonce + "b"), chat.image("c"))
    body = {"model": "demo", "messages": messages, "max_tokens": 2}
    before = [demo.metric(name, reason="image_format") for name in NAMES]
    create = chat.client.chat.completions.with_raw_response.create

    first = create(**body)
    assert first.headers["x-mmrouter-exactness"] == "partial"
    trace = demo.decision(first)
    field = "messages[0].content[3].image_url.url"
    assert trace["reasons"] == [f"image_format:{field}"]
    assert [bool(image["unresolved"]) for image in trace["images"]] == [False, True, False]
    size = trace["block_size"]
    sure = trace["images"][1]["offset"] // size
    assert sure > trace["images"][0]["offset"] // size

    chat.settle({"messages": messages}, sure)
    again = create(**body)
    assert again.headers["x-mmrouter-worker"] == first.headers["x-mmrouter-worker"]
    assert int(again.headers["x-mmrouter-overlap-blocks"]) == sure
    # The engine knows its image by the identity of its bytes and serves all of it again.
    usage = again.parse().usage
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // size * size > sure * size
    assert [demo.metric(name, reason="image_format") for name in NAMES] == [count + 2 for count in before]
