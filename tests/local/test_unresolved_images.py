"""Images that are served and not predicted: never an over-estimate, and seen as what they are in a whole deployment."""

import io
import re
import secrets

import httpx
from PIL import Image
from unit.router.unresolved_images import play
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture

CASES = 10_000
FILLER = "The harbour lies still in the early light and the boats wait for the tide to turn. " * 3


def test_in_10_000_random_mixes_no_overlap_is_over_estimated_and_none_before_the_first_unresolved_is_lost():
    requests = hits = over = lost = 0
    for case in range(CASES):
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


def counted(demo, metric: str, reason: str) -> float:
    """Sum a counter over the frontends."""
    total = 0.0
    for frontend in demo.run["frontends"]:
        ip = httpx.URL(frontend["url"]).host
        text = httpx.get(f"http://{ip}:9090/metrics", timeout=10).text
        found = re.findall(rf'^{metric}\{{[^}}]*reason="{reason}"[^}}]*\}} (\S+)$', text, re.MULTILINE)
        total += sum(map(float, found))
    return total


def test_case_39_one_unresolved_image_of_three_in_a_whole_deployment(demo):
    nonce = secrets.token_hex(8)
    urls = data_uri(picture(nonce + "a")), avif(nonce + "b"), data_uri(picture(nonce + "c"))
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts = [{"type": "text", "text": f"{nonce} {FILLER}"}, images[0], {"type": "text", "text": FILLER}, *images[1:]]
    body = {"model": "demo", "messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    before = [counted(demo, name, "image_format") for name in NAMES]
    create = demo.client().chat.completions.with_raw_response.create

    first = create(**body)
    assert first.headers["x-mmrouter-exactness"] == "partial"
    with demo.control() as control:
        trace = control.get(f"/control/decisions/{first.headers['x-mmrouter-request-id']}").json()
    field = "messages[0].content[3].image_url.url"
    assert trace["reasons"] == [f"image_format:{field}"]
    assert [bool(image["unresolved"]) for image in trace["images"]] == [False, True, False]
    size = trace["block_size"]
    sure = trace["images"][1]["offset"] // size
    assert sure > trace["images"][0]["offset"] // size

    for number in range(len(demo.controls)):
        with demo.control(number) as control:

            def known(control=control):
                dry = control.post("/control/explain", json=body).json()
                return max(candidate["overlap"] for candidate in dry["candidates"]) == sure

            wait_for(known, 20, "the blocks before the unresolved image are known")
    again = create(**body)
    assert again.headers["x-mmrouter-worker"] == first.headers["x-mmrouter-worker"]
    assert int(again.headers["x-mmrouter-overlap-blocks"]) == sure
    # The engine knows its image by the identity of its bytes and serves all of it again.
    usage = again.parse().usage
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // size * size > sure * size
    assert [counted(demo, name, "image_format") for name in NAMES] == [count + 2 for count in before]


NAMES = ("mmrouter_decisions_total", "mmrouter_unresolved_images_total")
