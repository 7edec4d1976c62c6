"""Bodies for engines: each image by its URL, its uuid or its bytes, and all other fields unchanged."""

import copy
import json

from mmrouter_router.media import Media
from mmrouter_router.request.engine_request import NO_URL, Outgoing, OutgoingImage

URI = "data:image/png;base64,YmI="


def part(**more):
    return {"type": "image_url", "image_url": {"url": NO_URL, **more}, "uuid": "m1-a"}


def outgoing():
    messages = [
        {"role": "system", "content": "text"},
        {"role": "user", "content": [part(detail="low"), {"type": "text", "text": "and"}, part()]},
        {"role": "user", "content": [part()]},
    ]
    images = [OutgoingImage(1, 0, "m1-a", PICTURE), OutgoingImage(1, 2, "m1-b", PICTURE)]
    return Outgoing("/v1", {"model": "m", "messages": messages}, (*images, OutgoingImage(2, 0, "m1-c", PICTURE)))


PICTURE = Media(b"bb", "image/png", "data")


def shown(body: bytes):
    messages = json.loads(body)["messages"]
    return [messages[1]["content"][0], messages[1]["content"][2], messages[2]["content"][0]]


def test_plain_body_holds_all_image_bytes():
    request = outgoing()
    assert [one["image_url"]["url"] for one in shown(request.plain)] == [URI] * 3
    assert shown(request.plain)[0]["image_url"]["detail"] == "low"


def test_each_image_is_sent_by_its_url_or_its_bytes():
    request = outgoing()
    before = copy.deepcopy(request.fields)
    body = request.body({**request.fields, "seed": 1}, {(1, 0): "file:///x.png", (2, 0): None})
    first, second, third = shown(body)
    assert first["image_url"] == {"url": "file:///x.png", "detail": "low"}
    assert second["image_url"] == {"url": URI}
    assert (third["image_url"], third["uuid"]) == (None, "m1-a")
    assert json.loads(body)["seed"] == 1
    assert request.fields == before


def test_unused_image_bytes_are_not_encoded():
    request = outgoing()
    request.body(request.fields, dict.fromkeys((image.place for image in request.images), "file:///x"))
    assert not any("url" in vars(image) for image in request.images)
    assert request.images[0].url == URI
